"""The public calls: attention over shards of a sequence, as a function and of a compiled spec."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attngen.checks import check_call, check_fields, check_place, compute_dtype, refuse_names
from attngen.distributed import op
from attngen.distributed.plan import ContextParallel, words_of
from attngen.distributed.refused import REFUSED, refuse_spec, unpacked
from attngen.distributed.shards import documents_of, totals_of
from attngen.dropout import check_seed, seed_of
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.functional import attention as single
from attngen.masks import MASK_FIELDS, check_masks
from attngen.op_call import with_positive_scale
from attngen.score_aux import check_aux, functions_of, functions_of_texts
from attngen.score_functions import function_text
from attngen.score_terms import SCORE_FIELDS, check_scores
from attngen.spec import AttentionSpec
from attngen.spec_rules import FP8_DTYPES, LAYOUTS
from attngen.text_keys import text_key
from attngen.values import (
    MAX_POSITION,
    cap_number,
    first,
    flag,
    one_of,
    probability,
    scale_number,
    whole,
    window_sides,
)

_ = op  # importing it registers the ops
_SINGLE = inspect.signature(single).parameters


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    method: str = "ring",
    layout: str = "contiguous",
    hop: str = "kernel",
    tensor_layout: str = "bhsd",
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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux_tensors: Sequence[Tensor] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    precision: str = "ieee",
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    seqlen_q_total: int | None = None,
    seqlen_k_total: int | None = None,
    batch_start: int = 0,
    head_start: int = 0,
    **others: Any,
) -> Any:
    """Attention over a sequence of which each rank of a group holds a shard, forward and backward.

    The result on each rank is what `attngen.attention` of the whole gives for the rank's rows. All
    ranks of the group call it with equal options. Arguments are those of `attngen.attention`, with
    these differences. Inside torch.compile, call a compiled spec (`ParallelAttention`) instead.

    Args:
        q, k, v: this rank's shards, (batch, heads, rows of the shard, dim), cut by
            `attngen.distributed.shard`.
        group, method, layout, hop: those of `ContextParallel`.
        tensor_layout: "bhsd" or "bshd", the order of dims.
        attn_mask, bias: of this rank's queries, in the order of its shard, and of all keys, in the
            order of the whole: broadcastable to (batch, num_heads_q, rows of the shard,
            seqlen_k_total). Not with Ulysses.
        doc_ids_q, doc_ids_k: of this rank's rows; those of keys go with them.
        cu_seqlens_q: offsets of packed sequences in the whole; q is then (rows of the shard, heads,
            dim), a shard of the packed rows. Keys have the same offsets.
        prefix_lens: (batch,), in positions of the whole.
        dropout_seed: equal on all ranks; drawn on the group's first one if None.
        seqlen_q_total, seqlen_k_total: lengths of the whole; default: those of the shards times the
            number of ranks. Shards of unequal length need them.

    Returns:
        out, or (out, lse), of this rank's rows. The gradients of what all ranks hold (bias,
        alibi_slopes, sinks, aux_tensors) are each rank's share: their sum over the group is the
        whole, as for the weights of a model.

    Raises:
        SpecError: an argument is wrong, a shard has not the rows that the layout gives it, or ranks
            differ in what they ask for.
        UnsupportedSpecError: what a method cannot do, with every reason.
        RankError: another rank failed, or does not answer in the time of the process group.
    """
    if others:
        _refuse(others)
    plan = ContextParallel(group, method, layout, hop).plan
    q, k, v, packed = _heads_first(q, k, v, tensor_layout, cu_seqlens_q is not None)
    name = compute_dtype(q)
    check_call(q, k, v, None, None, name)
    if q.dtype != getattr(torch, name):
        q, k, v = (x.to(getattr(torch, name)) for x in (q, k, v))
    totals = totals_of(plan, q, k, seqlen_q_total, seqlen_k_total)
    if packed:
        doc_ids_q, doc_ids_k = documents_of(
            plan, q, totals, cu_seqlens_q, cu_seqlens_k, doc_ids_q, doc_ids_k
        )
    scores = _scores(q, k, totals, attn_mask, bias, alibi_slopes, sinks)
    masks = check_masks(q, k, prefix_lens, doc_ids_q, doc_ids_k, None)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    texts: tuple[Any, Any] = (None, None)
    aux: tuple[Tensor, ...] = ()
    if score_mod is not None or mask_mod is not None or aux_tensors is not None:
        texts = function_text("score_mod", score_mod), function_text("mask_mod", mask_mod)
        aux = check_aux(functions_of_texts(*texts), aux_tensors, q, deterministic) or ()
    left, right = window_sides(window)
    if chunk is not None:
        chunk = whole("chunk", chunk, 1, MAX_POSITION, "None switches it off")
    if softmax_scale is not None:
        softmax_scale = scale_number("softmax_scale", softmax_scale)
    if softcap is not None:
        softcap = cap_number(softcap, softmax_scale)
    dropout_p = probability("dropout_p", dropout_p)
    if name in FP8_DTYPES:
        raise UnsupportedSpecError([f"context parallelism: {REFUSED['q_descale']}"])
    key = text_key(
        q.shape[3],
        v.shape[3],
        name,
        causal,
        left is not None,
        right is not None,
        chunk is not None,
        dropout_p > 0,
        softcap is not None,
        "bhsd",
        precision,
        deterministic,
        batch_invariant,
        None,
        tuple(scores),
        tuple(masks),
        (),  # neither lengths nor a block map
        None,  # no quantised cache
        None,
        *(x and str(x) for x in texts),
    )
    out, lse = _run(
        plan,
        key,
        (q, k, v),
        {**scores, **masks},
        aux,
        totals,
        causal=causal,
        window=(left, right),
        chunk=chunk,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        starts=(batch_start, head_start),
        packed=packed,
        return_lse=return_lse,
    )
    return _results(out, lse, tensor_layout, packed, return_lse)


class ParallelAttention:
    """A spec compiled for shards: `attngen.compile(spec, context_parallel=ContextParallel(...))`.

    Callable inside torch.compile, where all exchanges are within one opaque op.
    """

    def __init__(self, spec: AttentionSpec, context_parallel: ContextParallel) -> None:
        if spec.deterministic is None:
            spec = replace(spec, deterministic=torch.are_deterministic_algorithms_enabled())
        self.spec, self.context_parallel = spec, context_parallel
        self._plan = context_parallel.plan
        refuse_spec(spec, context_parallel.method)
        dense = replace(spec, layout="bhsd")
        self._keys = tuple(replace(dense, dropout_p=p).text_key for p in (0.0, 0.5))
        self._functions = functions_of(spec)
        self._scores = tuple(field for field in SCORE_FIELDS.values() if getattr(spec, field))
        self._masks = tuple(x for x in ("prefix_lm", "documents") if getattr(spec, x))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        attn_mask: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        prefix_lens: Tensor | None = None,
        doc_ids_q: Tensor | None = None,
        doc_ids_k: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        aux_tensors: Sequence[Tensor] | None = None,
        dropout_p: float | None = None,
        dropout_seed: int | Tensor | None = None,
        seqlen_q_total: int | None = None,
        seqlen_k_total: int | None = None,
        batch_start: int = 0,
        head_start: int = 0,
        **others: Any,
    ) -> Any:
        """Attention of this rank's shards; arguments are those of `attngen.distributed.attention`
        that are not in the spec. The spec's layout is the order of dims."""
        if others:
            _refuse(others)
        spec, plan = self.spec, self._plan
        q, k, v, packed = _heads_first(q, k, v, spec.layout, spec.is_packed)
        check_call(q, k, v, spec.head_dim, spec.head_dim_v, spec.dtype)
        wanted = getattr(torch, spec.dtype)
        q, k, v = (x.to(wanted) for x in (q, k, v))  # under autocast
        totals = totals_of(plan, q, k, seqlen_q_total, seqlen_k_total)
        masks_wanted = self._masks
        if packed:
            doc_ids_q, doc_ids_k = documents_of(
                plan, q, totals, cu_seqlens_q, cu_seqlens_k, doc_ids_q, doc_ids_k
            )
            masks_wanted = (*masks_wanted, "documents")
        elif cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise SpecError(
                f'cu_seqlens_q is given, but the spec says layout="{spec.layout}"; compile a spec '
                'with layout="thd", or leave it out'
            )
        scores = _scores(q, k, totals, attn_mask, bias, alibi_slopes, sinks)
        check_fields(SCORE_FIELDS, self._scores, scores)
        masks = check_masks(q, k, prefix_lens, doc_ids_q, doc_ids_k, None)
        check_fields(MASK_FIELDS, masks_wanted, masks)
        aux: tuple[Tensor, ...] = ()
        if self._functions is not None or aux_tensors is not None:
            aux = check_aux(self._functions, aux_tensors, q, spec.deterministic) or ()
        p = spec.dropout_p if dropout_p is None else probability("dropout_p", dropout_p)
        key = self._keys[1 if p > 0 else 0]
        if packed:
            key = _with_documents(key)
        out, lse = _run(
            plan,
            key,
            (q, k, v),
            {**scores, **masks},
            aux,
            totals,
            causal=spec.causal,
            window=spec.window or (None, None),
            chunk=spec.chunk,
            softmax_scale=spec.softmax_scale,
            softcap=spec.softcap,
            dropout_p=p,
            dropout_seed=dropout_seed,
            starts=(batch_start, head_start),
            packed=packed,
            return_lse=return_lse,
        )
        return _results(out, lse, spec.layout, packed, return_lse)

    def __repr__(self) -> str:
        cp = self.context_parallel
        return f"attngen.compile({self.spec.key}, {cp.method}, {cp.layout})"


@functools.lru_cache(maxsize=256)
def _with_documents(key: str) -> str:
    return replace(AttentionSpec.parse(key), documents=True).text_key


torch.compiler.assume_constant_result(_with_documents)


def _refuse(others: dict[str, Any]) -> None:
    """Refuse what is unknown, or set and not built over ranks."""
    given = {name: x for name, x in others.items() if name not in REFUSED}
    if given:
        refuse_names(given, attention)
    set_ones = [name for name, x in others.items() if x is not _SINGLE[name].default]
    if set_ones:
        why = [f"context parallelism: {name}: {REFUSED[name]}" for name in set_ones]
        raise UnsupportedSpecError(why)


def _heads_first(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: Any, has_offsets: bool
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """(batch, heads, rows, dim) views, and whether they are packed sequences."""
    one_of("tensor_layout", tensor_layout, LAYOUTS)
    if tensor_layout == "thd" or has_offsets:
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_place(name, x, q)
            if x.dim() != 3:
                raise SpecError(
                    f"{name} must have 3 dims with packed sequences, (rows, heads, dim), got shape "
                    f"{tuple(x.shape)}"
                )
        return (*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), True)  # type: ignore[return-value]  # three
    if tensor_layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, k, v, False


def _scores(
    q: Tensor,
    k: Tensor,
    totals: tuple[int, int],
    attn_mask: Any,
    bias: Any,
    alibi_slopes: Any,
    sinks: Any,
) -> dict[str, Tensor]:
    """The tensors that act on scores, which have an entry for each key of the whole."""
    if attn_mask is None and bias is None and alibi_slopes is None and sinks is None:
        return {}
    keys = k.new_empty(()).expand(*k.shape[:2], totals[1], k.shape[3])
    found = check_scores(q, keys, attn_mask, bias, alibi_slopes, sinks)
    return found


def _run(
    plan: str,
    key: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    terms: dict[str, Tensor],
    aux: tuple[Tensor, ...],
    totals: tuple[int, int],
    *,
    causal: bool | str,
    window: tuple[int | None, int | None],
    chunk: int | None,
    softmax_scale: float | None,
    softcap: float | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    starts: tuple[int, int],
    packed: bool,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    spec = _checked(key, _method(plan), packed)
    if softmax_scale is None:
        softmax_scale = q.shape[3] ** -0.5
    if softmax_scale <= 0:
        q, softmax_scale = with_positive_scale(q, softmax_scale)
    named: dict[str, Any] = dict(terms)
    named |= zip(spec.aux_args, aux, strict=True)
    if spec.has_dropout:
        seed = None if dropout_seed is None else check_seed(dropout_seed, q.device)
        named["dropout_seed"] = seed_of(seed, q)
    left, right = window
    batch_start, head_start = starts
    ints = {"partial": 0, "window_left": left, "window_right": right, "chunk": chunk}
    ints |= dict.fromkeys(("q_start", "k_start"), 0) | dict.fromkeys(("q_step", "k_step"), 1)
    ints |= {"seqlen_q_total": totals[0], "seqlen_k_total": totals[1]}
    ints["bottom_right"] = int(causal != "top_left")
    ints["batch_start"] = first("batch_start", batch_start)
    ints["head_start"] = first("head_start", head_start)
    scalars = {"softmax_scale": softmax_scale, "softcap": softcap, "dropout_p": dropout_p}
    out, lse, *_ = torch.ops.attngen.cp_fwd(
        plan,
        key,
        q,
        k,
        v,
        [named[name] for name in spec.tensor_args],
        [float(scalars[name]) for name in spec.scalar_args],  # type: ignore[arg-type]  # none is None
        [ints[name] for name in spec.int_args],
        *totals,
        spec.has_dropout and dropout_seed is None,
        flag("return_lse", return_lse),
    )
    return out, lse


@functools.lru_cache(maxsize=1024)
def _checked(key: str, method: str, packed: bool) -> AttentionSpec:
    spec = AttentionSpec.parse(key)
    refuse_spec(spec, method)
    if packed and (why := unpacked(spec)):
        raise UnsupportedSpecError([f"context parallelism: {each}" for each in why])
    return spec


torch.compiler.assume_constant_result(_checked)


def _method(plan: str) -> str:
    return str(words_of(plan)["method"])


torch.compiler.assume_constant_result(_method)


def _results(out: Tensor, lse: Tensor, tensor_layout: str, packed: bool, return_lse: bool) -> Any:
    if packed:
        out, lse = out[0].transpose(0, 1), lse[0].mT if return_lse else lse
    elif tensor_layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out
