"""attention(): the function that derives the spec from its arguments."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngen import in_place, kv_cache
from attngen.block_map import BlockMap, check_block_map, mask_key
from attngen.checks import check_call, check_results, compute_dtype, refuse_names
from attngen.fp8 import scale_kind
from attngen.jagged import are_jagged
from attngen.op_call import call_op
from attngen.operands import counts_keys, operands
from attngen.repeat import repeated
from attngen.score_aux import check_aux, functions_of_texts
from attngen.score_functions import function_text
from attngen.score_terms import check_scores
from attngen.spec import AttentionSpec
from attngen.spec_rules import FP8_DTYPES, LAYOUTS
from attngen.text_keys import drops, key_with_aux, text_key
from attngen.values import (
    MAX_POSITION,
    cap_number,
    plain,
    probability,
    scale_number,
    whole,
    window_sides,
)

_NONE: tuple[str, ...] = ()
"""The default of return_aux, known by identity."""
_NO_TEXTS = (None, None)
_LENGTH_FIELDS = ((), ("key_lengths",), ("paged",), ("paged",))
"""Spec fields of no lengths, of seqused_k, of block_table beside it, and of cu_seqlens_q beside
both."""


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
        chunk = whole("chunk", chunk, 1, MAX_POSITION, "None switches it off")
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
        tiles = check_block_map(block_map, mask, q, k, shard, (batch_start, head_start))
    key = text_key(
        operator.index(q.shape[3]),  # a constant to torch.compile, where int() stays symbolic
        operator.index(v.shape[3]),
        name,
        causal,
        left is not None,
        right is not None,
        chunk is not None,
        drops(dropout_p),
        softcap is not None,
        layout,
        precision,
        deterministic,
        batch_invariant,
        fp8_scale,
        _NONE if scores is None else tuple(scores),
        _NONE if masks is None else tuple(masks),
        (*_LENGTH_FIELDS[len(given.lengths)], *mapped),
        kv_dtype,
        kv_scale,
        *(_NO_TEXTS if texts is None else (x and str(x) for x in texts)),
    )
    if texts is not None:
        functions = functions_of_texts(*texts)
        aux = check_aux(functions, aux_tensors, q, deterministic)
    wanted = _NONE if return_aux is _NONE else tuple(return_aux)
    if wanted:
        key = key_with_aux(key, wanted)
    into = None
    if out is not None:
        into = in_place.heads_first(out, layout, layout == "thd", wanted, given.nested)
    made, lse, *sides = call_op(
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
