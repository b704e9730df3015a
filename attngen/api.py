"""The public calls: compile() and its Attention; attention() is in `functional`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from attngen import in_place, kv_cache, packed, paged, resolve
from attngen.block_map import BlockMap, check_block_map, mask_key
from attngen.checks import (
    check_call,
    check_fields,
    check_results,
    check_tensors,
    heads_first,
    refuse_names,
)
from attngen.errors import SpecError
from attngen.explain import Explanation, explain_call
from attngen.fp8 import check_scale
from attngen.functional import attention as attention
from attngen.masks import MASK_FIELDS
from attngen.op_call import call_op
from attngen.operands import operands
from attngen.repeat import repeated_method
from attngen.score_aux import check_aux, functions_of
from attngen.score_terms import SCORE_FIELDS, check_scores
from attngen.spec import AttentionSpec
from attngen.text_keys import drops, key_with_aux
from attngen.values import probability, shown
from attngen.workload import Direction, Workload, check_direction

if TYPE_CHECKING:
    from attngen.distributed import ContextParallel, ParallelAttention

_NONE: tuple[str, ...] = ()
"""The default of return_aux, known by identity."""


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
            key = (self._drop_key if drops(p) else self._eval_key) or _without_dropout(spec, p)
        wanted = _NONE if return_aux is _NONE else tuple(return_aux)
        if wanted:
            key = key_with_aux(key, wanted)
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
            check_fields(SCORE_FIELDS, self._scores, scores)
        masks = None
        if self._masks or not (
            prefix_lens is None and doc_ids_q is None and doc_ids_k is None and tree_mask is None
        ):
            tensors_of_masks = (prefix_lens, doc_ids_q, doc_ids_k, tree_mask)
            masks = given.checked_masks(tensors_of_masks, (seqlen_q_total, seqlen_k_total))
            check_fields(MASK_FIELDS, self._masks, masks)
        starts = (batch_start, head_start)
        tiles = None
        if block_map is not None or spec.block_map:
            tiles = check_block_map(block_map, self._mask, q, k, shard, starts)
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
        made, lse, *sides = call_op(
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


def reload() -> None:
    """Forget resolved configs: the next call of each shape reads the database again."""
    resolve.reset()


def _without_dropout(spec: AttentionSpec, p: float) -> str:
    """Refuse a spec with this dropout, which it cannot have."""
    return replace(spec, dropout_p=p).text_key
