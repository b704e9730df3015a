"""compile() and attention(): validate a call, then hand it to the op."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from attngen import in_place, kv_cache, ops, packed, paged, resolve
from attngen.block_map import BlockMap, check_block_map, mask_key
from attngen.checks import (
    SCORE_FIELDS,
    Shard,
    check_call,
    check_kinds,
    check_results,
    check_scale,
    check_score_fields,
    check_scores,
    check_seed,
    check_shard,
    check_tensors,
    compute_dtype,
    heads_first,
    refuse_names,
    scale_kind,
)
from attngen.dropout import seed_tensor
from attngen.errors import SpecError
from attngen.explain import Explanation, explain_call
from attngen.jagged import are_jagged
from attngen.masks import check_mask_fields, fields_of
from attngen.operands import counts_keys, operands
from attngen.repeat import repeated, repeated_method
from attngen.score_aux import check_aux, functions_of, functions_of_texts
from attngen.spec import AttentionSpec, function_text
from attngen.spec_rules import FP8_DTYPES, LAYOUTS
from attngen.values import (
    MAX_POSITION,
    cap_number,
    flag,
    plain,
    probability,
    scale_number,
    shown,
    whole,
    window_sides,
)
from attngen.workload import Direction, Workload, check_direction

if TYPE_CHECKING:
    from attngen.distributed import ContextParallel, ParallelAttention

# Defaults of the calls, known by identity: an argument that is none of them is looked at.
_NONE: tuple[str, ...] = ()
_ZERO, _ONE = 0, 1
_NO_TEXTS = (None, None)
_LENGTH_FIELDS = ((), ("key_lengths",), ("paged",), ("paged",))
"""Spec fields of no lengths, of seqused_k, of block_table beside it, and of cu_seqlens_q beside
both."""


@overload
def compile(spec: AttentionSpec) -> Attention: ...


@overload
def compile(spec: AttentionSpec, *, context_parallel: ContextParallel) -> ParallelAttention: ...


def compile(spec: AttentionSpec, *, context_parallel: Any = None, **options: Any) -> Any:
    """The attention a spec describes, ready to call. Never tunes and never fails for want of a
    record: an untuned shape runs with a default config.

    Args:
        spec: what to compute. `deterministic=None` is settled here, by
            `torch.are_deterministic_algorithms_enabled()`.
        context_parallel: an `attngen.distributed.ContextParallel`: calls take shards of a sequence
            then, and the result is an `attngen.distributed.ParallelAttention`.
    """
    if not isinstance(spec, AttentionSpec):
        raise SpecError(
            f"compile() takes an AttentionSpec, got {type(spec).__name__}; make one with "
            "attngen.AttentionSpec(head_dim=128, causal=True)"
        )
    if options:
        changed = ", ".join(f"{name}={shown(value)}" for name, value in options.items())
        replace(spec, **options)  # refuses unknown fields by name
        raise SpecError(
            f"compile() takes the spec alone, got {changed}; write "
            f"attngen.compile(attngen.AttentionSpec(..., {changed}))"
        )
    if context_parallel is not None:
        return _parallel(spec, context_parallel)
    return Attention(spec)


def _parallel(spec: AttentionSpec, context_parallel: Any) -> Any:
    from attngen import distributed

    if not isinstance(context_parallel, distributed.ContextParallel):
        raise SpecError(
            "context_parallel must be an attngen.distributed.ContextParallel, got "
            f'{shown(context_parallel)}; write ContextParallel(group, method="ring", '
            'layout="zigzag")'
        )
    return distributed.ParallelAttention(spec, context_parallel)


class Attention:
    """A compiled spec: callable, picklable, usable inside torch.compile. Equal specs make equal
    objects."""

    def __init__(self, spec: AttentionSpec) -> None:
        if spec.deterministic is None:
            spec = replace(spec, deterministic=torch.are_deterministic_algorithms_enabled())
        self.spec = spec
        self._owner = spec.key
        bare = replace(spec, aux=()) if spec.aux else spec  # a call says which side outputs
        self._text_key = bare.text_key
        self._eval_key = replace(bare, dropout_p=0.0).text_key
        # None where there is no dropout
        has_none = spec.has_lengths or spec.shared_kv or spec.is_quantized
        self._drop_key = None if has_none else replace(bare, dropout_p=0.5).text_key
        self._functions = functions_of(spec)
        self._mask = None
        if spec.block_map:
            self._mask = mask_key(spec.causal, spec.window, spec.chunk, str(spec.mask_mod))
        self._scores = tuple(field for field in SCORE_FIELDS.values() if getattr(spec, field))
        masks = ("prefix_lm", "documents", "tree_mask")
        self._masks = tuple(field for field in masks if getattr(spec, field))

    def __eq__(self, other: object) -> bool:
        return self.spec == other.spec if isinstance(other, Attention) else NotImplemented

    def __hash__(self) -> int:
        return hash((Attention, self.spec))

    def __reduce__(self) -> tuple[Any, tuple[AttentionSpec]]:
        return Attention, (self.spec,)

    @repeated_method
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        return_aux: tuple[str, ...] = (),
        attn_mask: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        prefix_lens: Tensor | None = None,
        doc_ids_q: Tensor | None = None,
        doc_ids_k: Tensor | None = None,
        tree_mask: Tensor | None = None,
        block_map: BlockMap | None = None,
        aux_tensors: Sequence[Tensor] | None = None,
        dropout_p: float | None = None,
        dropout_seed: int | Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        q_start: int = 0,
        q_step: int = 1,
        k_start: int = 0,
        k_step: int = 1,
        seqlen_q_total: int | None = None,
        seqlen_k_total: int | None = None,
        batch_start: int = 0,
        head_start: int = 0,
        partial: bool = False,
        out: Tensor | None = None,
        **tensors: Any,
    ) -> Any:
        """Attention of q, k and v.

        Args:
            q: (batch, num_heads_q, seqlen_q, head_dim); for layout "bshd" (batch, seqlen_q,
                num_heads_q, head_dim), and so on; for "thd" (total_q, num_heads_q, head_dim),
                where batch is the number of sequences elsewhere.
            k: (batch, num_heads_kv, seqlen_k, head_dim); num_heads_q is a multiple of num_heads_kv.
            v: (batch, num_heads_kv, seqlen_k, head_dim_v).
            return_lse: also return lse, float32 (batch, num_heads_q, seqlen_q), the natural log of
                the softmax denominator; differentiable.
            return_aux: names of side outputs, returned as a dict of float32 tensors, in either
                layout: "lse"; "max_logit" (batch, num_heads_q), the largest score that a head's
                queries see, after softcap and biases, -inf if there is none; "col_sum" (batch,
                num_heads_q, seqlen_k), the sum of each key's P over the queries, before dropout;
                "entropy" (batch, num_heads_q, seqlen_q), -sum P log P of each query over the keys
                it sees, whose P a sink makes less than 1 in sum. Only lse is differentiable. Not
                together with return_lse. For layout "thd" max_logit is (num_seqs, num_heads_q) and
                entropy (total_q, num_heads_q). Default: the spec's aux.
            attn_mask: bool, broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k) in either
                layout; True is a key that may be seen.
            bias: float16, bfloat16 or float32, broadcastable likewise; added to the scores, where
                -inf hides a key. Differentiable.
            alibi_slopes: float, (num_heads_q,) or (batch, num_heads_q); a score loses slope times
                the distance of its query and key. Differentiable.
            sinks: float, of the same shapes; a row's softmax denominator gains exp(sink), its lse
                does not. Differentiable.
            prefix_lens: int32 or int64, (batch,); keys at positions below its batch row's are seen
                by every query (prefix-LM).
            doc_ids_q: int32 or int64, (batch, seqlen_q) or (seqlen_q,), any values; a query sees
                keys of its own document alone. Sorted ids are the fast ones.
            doc_ids_k: the same for keys; doc_ids_q itself if None and lengths agree.
            tree_mask: bool, (n, n) or (batch, n, n); the last n rows of q and k are the nodes of a
                tree, and node i sees node j iff tree_mask[i, j].
            block_map: what `attngen.make_block_map` made of the spec's masks, for these sizes;
                tiles of which no key is seen are not read.
            aux_tensors: what score_mod reads, then what mask_mod reads, each in the order of first
                use (one that both read stands twice); default: the tensors that the functions had
                when the spec was made. Those of score_mod are differentiable where floating, unless
                deterministic.
            dropout_p: overrides the spec's; 0.0 for evaluation.
            dropout_seed: an int, or an int64 tensor of one element on q's device; drawn from
                torch's generator if None. Hand one in where a recomputed forward must see the same
                mask without torch's RNG state (checkpoint with preserve_rng_state=False).
            q_descale, k_descale, v_descale: the scales of FP8 inputs, positive float32, as
                `attngen.quantize` gives them: () for fp8_scale "tensor", (batch, num_heads_kv) for
                "head", (batch, num_heads_kv, ceil(seqlen / 128)) for "block". With kv_dtype, those
                of k and v alone: () for kv_scale "tensor", (batch, num_heads_kv) for "head",
                (batch, num_heads_kv, seqlen_k) for "key"; of pages, (pages, num_heads_kv) and
                (pages, page_size, num_heads_kv), of any strides. Scales of keys that are not used
                are not read.
            cu_seqlens_q, cu_seqlens_k: of layout "thd", int32 (num_seqs + 1) on q's device:
                sequence n owns rows cu_seqlens[n] to cu_seqlens[n + 1], which may be none. Not
                looked at on the host, so that a GPU is never waited for; offsets that decrease or
                pass the end give wrong results there, but read no other memory.
            seqused_q, seqused_k: int32 (num_seqs): how many of a sequence's rows are used, from
                the first on. The others get out 0, lse -inf and gradients 0, whatever they hold.
                With key_lengths or paged, seqused_k (batch,) says it of each batch row's keys;
                CUDA graphs may be replayed with other lengths.
            block_table: of paged, int32 (batch, max_pages), for k and v of (pages, page_size,
                num_heads_kv, dim) in either layout, page_size a multiple of 16; other orders in
                memory by strides. Entries behind the last used key are not read.
            q_start, q_step, k_start, k_step: where this call's rows stand in the whole sequence
                (shards): row i is row start + i * step.
            seqlen_q_total, seqlen_k_total: lengths of the whole sequences, which bottom-right
                alignment needs of a shard; default: those of q and k.
            batch_start, head_start: global numbers of the first batch row and query head, for
                dropout.
            partial: return out in float32, for `merge`.
            out: a tensor to write the result to, of its shape, dtype and device, the last stride 1,
                that shares no memory with q, k and v; it is returned. Without gradients.

        Returns:
            out (batch, num_heads_q, seqlen_q, head_dim_v) in q's dtype (bfloat16 for FP8) and
            layout; (out, lse) or (out, aux) on request. A query that sees no key has out 0 and lse
            -inf. For layout "thd" lse is (total_q, num_heads_q).

        Raises:
            SpecError: an argument, shape or device does not fit the spec; a tensor whose spec field
                is off, or the other way round.
            DtypeError: q, k and v are not of the spec's dtype.
            UnsupportedSpecError: a tensor whose feature is not built.
        """
        spec = self.spec
        if tensors:
            refuse_names(tensors, self.__call__)
        if return_aux is _NONE and spec.aux:
            return_aux = spec.aux
        if return_lse is not False or return_aux is not _NONE:
            check_results(return_lse, return_aux)
        p, key = spec.dropout_p, self._text_key
        if dropout_p is not None:
            p = probability("dropout_p", dropout_p)
            key = (self._drop_key if _drops(p) else self._eval_key) or _without_dropout(spec, p)
        wanted = _NONE if return_aux is _NONE else tuple(return_aux)
        if wanted:
            key = _key_with_aux(key, wanted)
        shard = (q_start, q_step, k_start, k_step, seqlen_q_total, seqlen_k_total)
        has_lengths = spec.has_lengths or block_table is not None
        has_lengths = has_lengths or not (seqused_k is None or spec.is_packed)
        if has_lengths:
            paged.check_fields(spec, seqused_k, block_table, cu_seqlens_q)
        offsets = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        given = operands(
            *(q, k, v, spec.layout, offsets, block_table, shard),
            {"attn_mask": attn_mask, "bias": bias, "doc_ids_k": doc_ids_k},
            has_lengths=has_lengths,
            is_packed=spec.is_packed,
        )
        q, k, v = given.q, given.k, given.v
        dims, kinds = (spec.head_dim, spec.head_dim_v), (spec.paged, spec.kv_dtype)
        check_call(q, k, v, *dims, spec.dtype, is_paged=kinds[0], kv_dtype=kinds[1])
        descales = (q_descale, k_descale, v_descale)
        if spec.is_quantized:
            kv_cache.check_scale(spec, *descales)
            descales = descales[1:]  # type: ignore[assignment]  # fewer of them
        elif spec.is_fp8 or not (q_descale is None and k_descale is None and v_descale is None):
            check_scale(spec, descales)
        scores = None
        if self._scores or not (
            attn_mask is None and bias is None and alibi_slopes is None and sinks is None
        ):
            count = given.num_seqs
            scores = check_scores(q, k, attn_mask, bias, alibi_slopes, sinks, count)
            check_score_fields(self._scores, scores)
        masks = None
        if self._masks or not (
            prefix_lens is None and doc_ids_q is None and doc_ids_k is None and tree_mask is None
        ):
            tensors_of_masks = (prefix_lens, doc_ids_q, doc_ids_k, tree_mask)
            masks = given.checked_masks(tensors_of_masks, (seqlen_q_total, seqlen_k_total))
            check_mask_fields(self._masks, masks)
        starts = (batch_start, head_start)
        tiles = None
        if block_map is not None or spec.block_map:
            tiles = _tiles(block_map, self._mask, q, k, shard, starts)
        aux = None
        if self._functions is not None or aux_tensors is not None:
            aux = check_aux(self._functions, aux_tensors, q, spec.deterministic)
        scale = spec.softmax_scale
        if scale is None:
            scale = spec.head_dim**-0.5
        into = None
        if out is not None:
            into = in_place.heads_first(
                out, spec.layout, spec.layout == "thd", wanted, given.nested
            )
        made, lse, *sides = _run(
            key,
            q,
            k,
            v,
            causal=spec.causal,
            window=spec.window,
            chunk=spec.chunk,
            softmax_scale=scale,
            softcap=spec.softcap,
            dropout_p=p,
            dropout_seed=dropout_seed,
            descales=descales if spec.is_fp8 or spec.is_quantized else (),
            scores=scores,
            masks=masks,
            aux=aux,
            sequences=given.sequences,
            lengths=given.lengths,
            shard=shard,
            starts=starts,
            block_map=tiles,
            partial=partial,
            out=into,
        )
        results = given.results(made, lse, sides, return_lse, wanted)
        return results if out is None else in_place.results(out, results, return_lse)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> Explanation:
        """Which record, config and lowering serve a call of these tensors, and why. Of packed
        sequences, cu_seqlens_q says how many there are, and of a paged cache block_table how long a
        batch row may be."""
        count = None
        if self.spec.paged:
            given = block_table if self.spec.packs_queries else None  # whatever they are
            paged.check_fields(self.spec, block_table, block_table, given)
            k, v = paged.heads_first(k, v)
            q = q.transpose(1, 2) if self.spec.layout == "bshd" else q
            if self.spec.packs_queries:
                assert block_table is not None  # see check_fields
                q, count = paged.queries_first(q), block_table.shape[0]
        elif self.spec.layout == "bshd":
            q, k, v = heads_first(q, k, v)
        elif self.spec.is_packed:
            q, k, v = packed.heads_first(q, k, v)
            offsets = packed.offsets(self.spec.layout, cu_seqlens_q, cu_seqlens_q, None, None)
            count = offsets.num_seqs
        dims = (self.spec.head_dim, self.spec.head_dim_v)
        check_tensors(q, k, v, *dims, is_paged=self.spec.paged)
        keys = paged.capacity(k, block_table) if self.spec.paged else k.shape[2]
        return explain_call(self.spec, q, k, v, count, keys)

    def source(self, direction: Direction = "fwd", workload: Workload | None = None) -> str:
        """The emitted text that serves a workload (default: batch 1, 16 heads, 4096 tokens)."""
        from attngen.explain import explain_workload

        check_direction(direction)
        if workload is None:
            workload = Workload(1, 16, 16, 4096, 4096)
        if not isinstance(workload, Workload):
            raise SpecError(
                f"workload must be an attngen.Workload, got {shown(workload)}; make one with "
                "attngen.Workload(batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k)"
            )
        return explain_workload(self.spec, workload, directions=(direction,)).source(direction)

    def __repr__(self) -> str:
        return f"attngen.compile({self.spec.key})"


@repeated
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    doc_ids_q: Tensor | None = None,
    doc_ids_k: Tensor | None = None,
    tree_mask: Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_map: BlockMap | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    layout: str = "bhsd",
    precision: str = "ieee",
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_aux: tuple[str, ...] = (),
    q_start: int = 0,
    q_step: int = 1,
    k_start: int = 0,
    k_step: int = 1,
    seqlen_q_total: int | None = None,
    seqlen_k_total: int | None = None,
    batch_start: int = 0,
    head_start: int = 0,
    partial: bool = False,
    out: Tensor | None = None,
    **tensors: Any,
) -> Any:
    """Attention as a function: derives the spec from the tensors and the options, and caches it.

    Options are those of `AttentionSpec`, call arguments those of `Attention.__call__`. Under
    autocast, q, k and v are cast to its dtype, unless they are FP8. The descales of those say what
    the spec's fp8_scale is, and k and v of 8 bits beside a q of 16, with their descales, its
    kv_dtype and kv_scale; a tensor that acts on scores, or tells which keys a query sees, turns
    its spec field on; cu_seqlens_q and cu_seqlens_k make the layout "thd". Jagged nested tensors,
    (batch, heads, seqlen, dim) or of layout "bshd", are packed sequences, too, and so are their
    results; k and v share offsets. score_mod and mask_mod are read anew in each call, with the
    tensors they have then; a compiled spec reads them once.

    Raises:
        SpecError: an option, shape, dtype or device is wrong.
        UnsupportedSpecError: a feature that is not built; lists every reason.
    """
    if tensors:
        refuse_names(tensors, attention)
    if return_lse is not False or return_aux is not _NONE:
        check_results(return_lse, return_aux)
    shard = (q_start, q_step, k_start, k_step, seqlen_q_total, seqlen_k_total)
    offsets = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    has_lengths = block_table is not None
    if seqused_k is not None and not has_lengths:
        has_lengths = counts_keys(q, layout, *offsets[:3])
    has_offsets = not (offsets[0] is offsets[1] is offsets[2] is None)
    has_offsets = has_offsets or (seqused_k is not None and not has_lengths)
    is_packed = has_offsets or (isinstance(layout, str) and layout == "thd")
    given = operands(
        *(q, k, v, layout, offsets, block_table, shard),
        {"attn_mask": attn_mask, "bias": bias, "doc_ids_k": doc_ids_k},
        has_lengths=has_lengths,
        is_packed=is_packed or (not has_lengths and are_jagged(q, k, v)),
    )
    q, k, v = given.q, given.k, given.v
    if given.sequences is not None or given.packs_queries:
        if layout not in LAYOUTS:
            AttentionSpec(head_dim=q.shape[3], layout=layout)  # refuses it
        layout = "thd"
    name = compute_dtype(q)
    kv_dtype, kv_scale = kv_cache.dtype_of(name, k, v), None
    check_call(q, k, v, None, None, name, is_paged=block_table is not None, kv_dtype=kv_dtype)
    descales, fp8_scale = (q_descale, k_descale, v_descale), None
    if kv_dtype is not None:
        kv_scale = kv_cache.scale_of(kv_dtype, *descales)
        descales = descales[1:]  # type: ignore[assignment]  # fewer of them
    elif name in FP8_DTYPES or not (q_descale is None and k_descale is None and v_descale is None):
        fp8_scale = scale_kind(name, descales)
    scores = None
    if not (attn_mask is None and bias is None and alibi_slopes is None and sinks is None):
        scores = check_scores(q, k, attn_mask, bias, alibi_slopes, sinks, given.num_seqs)
    masks = None
    if not (prefix_lens is None and doc_ids_q is None and doc_ids_k is None and tree_mask is None):
        tensors_of_masks = (prefix_lens, doc_ids_q, doc_ids_k, tree_mask)
        masks = given.checked_masks(tensors_of_masks, (seqlen_q_total, seqlen_k_total))
    texts = aux = None
    if score_mod is not None or mask_mod is not None or aux_tensors is not None:
        if torch.compiler.is_compiling() and (callable(score_mod) or callable(mask_mod)):
            reason = (
                "attngen.attention cannot read score_mod and mask_mod inside torch.compile; make "
                "attngen.compile(attngen.AttentionSpec(...)) outside of it, and call that"
            )
            refused = torch.ops.attngen.refuse([reason], q.detach())
            if return_aux:
                return refused, dict.fromkeys(return_aux, refused)
            return (refused, refused) if return_lse else refused
        texts = function_text("score_mod", score_mod), function_text("mask_mod", mask_mod)
    if type(causal) is not bool and type(causal) is not str:
        causal = plain(causal)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    left, right = (None, None) if window is None else window_sides(window)
    if chunk is not None:
        chunk = whole("chunk", chunk, 1, MAX_POSITION)
    if softmax_scale is not None:
        softmax_scale = scale_number("softmax_scale", softmax_scale)
    if softcap is not None:
        softcap = cap_number(softcap, softmax_scale)
    dropout_p = probability("dropout_p", dropout_p)
    tiles, mapped = None, _NONE
    if block_map is not None:
        mapped = ("block_map",)
        mask = None
        if texts is not None and texts[1] is not None:
            mask = mask_key(causal, (left, right), chunk, str(texts[1]))
        tiles = _tiles(block_map, mask, q, k, shard, (batch_start, head_start))
    key = _text_key(
        operator.index(q.shape[3]),  # a constant to torch.compile, where int() stays symbolic
        operator.index(v.shape[3]),
        name,
        causal,
        left is not None,
        right is not None,
        chunk is not None,
        _drops(dropout_p),
        softcap is not None,
        layout,
        precision,
        deterministic,
        batch_invariant,
        fp8_scale,
        _NONE if scores is None else tuple(scores),
        (
            *(_NONE if masks is None else fields_of(masks)),
            *_LENGTH_FIELDS[len(given.lengths)],
            *mapped,
        ),
        kv_dtype,
        kv_scale,
        *(_NO_TEXTS if texts is None else (x and str(x) for x in texts)),
    )
    if texts is not None:
        functions = functions_of_texts(*texts)
        aux = check_aux(functions, aux_tensors, q, deterministic)
    wanted = _NONE if return_aux is _NONE else tuple(return_aux)
    if wanted:
        key = _key_with_aux(key, wanted)
    into = None
    if out is not None:
        into = in_place.heads_first(out, layout, layout == "thd", wanted, given.nested)
    made, lse, *sides = _run(
        key,
        q,
        k,
        v,
        causal=causal,
        window=(left, right),
        chunk=chunk,
        softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        descales=descales if fp8_scale or kv_scale else (),
        scores=scores,
        masks=masks,
        aux=aux,
        sequences=given.sequences,
        lengths=given.lengths,
        shard=shard,
        starts=(batch_start, head_start),
        block_map=tiles,
        partial=partial,
        out=into,
    )
    results = given.results(made, lse, sides, return_lse, wanted)
    return results if out is None else in_place.results(out, results, return_lse)


def reload() -> None:
    """Forget resolved configs: the next call of each shape reads the database again."""
    resolve.reset()


def _text_key(*traits: Any) -> str:
    """A constant to torch.compile, which warns of a cached function that it meets itself."""
    try:
        return _cached_text_key(*traits)
    except TypeError:  # something that cannot be hashed: let the spec refuse it
        return _cached_text_key.__wrapped__(*traits)


torch.compiler.assume_constant_result(_text_key)


def _key_with_aux(key: str, aux: tuple[str, ...]) -> str:
    """A text key that asks for side outputs, too."""
    return _cached_key_with_aux(key, aux)


torch.compiler.assume_constant_result(_key_with_aux)


@functools.lru_cache(maxsize=1024)
def _cached_key_with_aux(key: str, aux: tuple[str, ...]) -> str:
    return replace(AttentionSpec.parse(key), aux=aux).text_key


@functools.lru_cache(maxsize=4096, typed=True)  # causal=0 is not causal=False: the spec refuses it
def _cached_text_key(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    causal: bool | str,
    left: bool,
    right: bool,
    chunk: bool,
    dropout: bool,
    softcap: bool,
    layout: str,
    precision: str,
    deterministic: bool,
    batch_invariant: bool,
    fp8_scale: str | None,
    scores: tuple[str, ...],
    masks: tuple[str, ...],
    kv_dtype: str | None = None,
    kv_scale: str | None = None,
    score_mod: str | None = None,
    mask_mod: str | None = None,
) -> str:
    """The text key of a functional call; validates what the spec validates."""
    spec = AttentionSpec(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=causal,
        window=(0 if left else None, 0 if right else None),
        chunk=1 if chunk else None,
        dropout_p=0.5 if dropout else 0.0,
        softcap=1.0 if softcap else None,
        layout=layout,
        precision=precision,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        fp8_scale=fp8_scale,
        kv_dtype=kv_dtype,
        kv_scale=kv_scale,
        score_mod=score_mod,
        mask_mod=mask_mod,
        **dict.fromkeys((*scores, *masks), True),  # type: ignore[arg-type]  # names of bool fields
    )
    return spec.text_key


def _run(
    key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
    chunk: int | None,
    softmax_scale: float,
    softcap: float | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    descales: tuple[Tensor | None, ...],
    scores: dict[str, Tensor] | None,
    masks: dict[str, Tensor] | None,
    aux: tuple[Tensor, ...] | None,
    sequences: packed.Packed | None,
    lengths: tuple[Any, ...],
    shard: Shard,
    starts: tuple[int, int],
    block_map: Tensor | None,
    partial: bool,
    out: Tensor | None = None,
) -> Sequence[Tensor]:
    """Put a checked call into the op's lists, in the order of spec.scalar_args and int_args."""
    compiling = torch.compiler.is_compiling()
    if dropout_seed is not None:
        dropout_seed = check_seed(dropout_seed, q.device)
    if partial is not False:
        partial = flag("partial", partial)
        if partial and scores is not None and "sinks" in scores:
            raise SpecError(
                "partial=True with sinks: merge() would count the sink once for each part; leave "
                "sinks out of the parts and multiply the merged out by "
                "torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1)"
            )
    if softmax_scale <= 0:  # kernels take a positive scale: the sign, or zero, moves into q
        q, softmax_scale = _scaled(q, softmax_scale)
    left, right = window if window is not None else (None, None)
    is_causal = causal is not False
    has_dropout = dropout_p > 0
    aligned = is_causal or left is not None or right is not None or chunk is not None
    if scores is not None and "alibi" in scores:
        aligned = True
    if masks is not None and "tree_mask" in masks:
        aligned = True
    q_start, q_step, k_start, k_step, total_q, total_k = shard
    whole_q = q_start is _ZERO and q_step is _ONE and total_q is None
    if compiling or not (whole_q and k_start is _ZERO and k_step is _ONE and total_k is None):
        bottom_right = aligned and causal != "top_left"
        shard = check_shard(*shard, q.shape[2], k.shape[2], bottom_right)
        q_start, q_step, k_start, k_step, total_q, total_k = shard
    batch_start, head_start = starts
    if compiling or batch_start is not _ZERO or head_start is not _ZERO:
        starts = whole("batch_start", batch_start), whole("head_start", head_start)
    scalars = [float(softmax_scale)]
    ints = [int(partial)]
    extra: list[Tensor | None] = []
    if softcap is not None:
        scalars.append(float(softcap))
    if left is not None:
        ints.append(left)
    if right is not None and not is_causal:
        ints.append(right)
    if chunk is not None:
        ints.append(chunk)
    if aligned or has_dropout or aux is not None:
        ints += [q_start, q_step, k_start, k_step]
    if aligned:
        ints += [int(causal != "top_left")]
        ints += [-1 if total is None else total for total in (total_q, total_k)]
    if has_dropout:
        scalars.append(float(dropout_p))
        extra.append(_seed(dropout_seed, q))
    if has_dropout or aux is not None:
        ints += starts
    if scores is not None:
        extra.extend(scores.values())
    if masks is not None:
        extra.extend(masks.values())
    if block_map is not None:
        extra.append(block_map)
    if sequences is not None:
        extra.extend(sequences)
    extra.extend(lengths)
    if aux is not None:
        extra.extend(aux)
    extra.extend(descales)
    if out is not None:
        return out, in_place.forward(key, q, k, v, out, extra, scalars, ints)
    if compiling:
        return torch.ops.attngen.fwd(key, q, k, v, extra, scalars, ints)  # type: ignore[no-any-return]  # torch.ops is untyped
    try:
        return ops.forward(key, q, k, v, extra, scalars, ints)
    except RuntimeError:  # a sparse tensor of a shape that passed before has no strides
        check_kinds({"q": q, "k": k, "v": v})
        raise


def _tiles(
    block_map: Any, mask: str | None, q: Tensor, k: Tensor, shard: Shard, starts: tuple[int, int]
) -> Tensor:
    """The lists of a call's block map; `mask` is what it must be of, None if the spec has none."""
    if block_map is None:
        raise SpecError(
            "the spec says block_map=True, but the call has no block_map; pass block_map=, or "
            "compile a spec without block_map"
        )
    if mask is None:
        raise SpecError(
            "block_map is given, but the spec says block_map=False, or has no mask_mod; compile a "
            "spec with both, or leave block_map out"
        )
    moved = shard != (0, 1, 0, 1, None, None) or starts != (0, 0)
    return check_block_map(block_map, mask, q, k, moved)


def _scaled(q: Tensor, softmax_scale: float) -> tuple[Tensor, float]:
    """q with the sign of a negative scale, or zero, and the scale without."""
    wide = q.bfloat16() if q.element_size() == 1 else q  # torch has no arithmetic of FP8
    wide, softmax_scale = (-wide, -softmax_scale) if softmax_scale < 0 else (wide * 0, 1.0)
    return wide.to(q.dtype), softmax_scale


def _seed(seed: int | Tensor | None, q: Tensor) -> Tensor:
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    return seed.reshape(1) if isinstance(seed, Tensor) else seed_tensor(seed, q.device)


def _without_dropout(spec: AttentionSpec, p: float) -> str:
    """Refuse a spec with this dropout, which it cannot have."""
    return replace(spec, dropout_p=p).text_key


def _drops(p: float) -> bool:
    """Is there dropout?"""
    if p > 0:  # noqa: SIM103  (torch.compile may hand in a symbolic p; a branch gives a bool)
        return True
    return False


_ = ops  # importing it registers the ops
