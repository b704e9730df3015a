"""What vmap and the FLOP counter make of the ops: registered with them by `attngen.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attngen.errors import SpecError
from attngen.identity import parsed
from attngen.masks import MASK_FIELDS
from attngen.score_terms import SCORE_FIELDS
from attngen.spec import DESCALES, AttentionSpec


def register(library: torch.library.Library) -> None:
    """Register the rules of `attngen::fwd` and `attngen::bwd`."""
    torch.library.register_vmap("attngen::fwd", _vmap_forward, lib=library)
    torch.library.register_vmap("attngen::bwd", _vmap_backward, lib=library)
    torch.library.register_vmap("attngen::jvp", _vmap_tangents, lib=library)
    register_flop_formula(torch.ops.attngen.fwd)(_flops_forward)
    register_flop_formula(torch.ops.attngen.bwd)(_flops_backward)
    register_flop_formula(torch.ops.attngen.jvp)(_flops_tangents)


def _refuse_packed(text_key: str) -> None:
    if parsed(text_key).is_packed:
        raise SpecError(
            "vmap over packed sequences is not offered; pack the samples' sequences into one call"
        )
    if parsed(text_key).is_quantized:
        raise SpecError(
            "vmap over a quantised cache (kv_dtype) is not offered; fold the samples into the batch"
        )
    if parsed(text_key).has_lengths:
        raise SpecError(
            "vmap over keys of several lengths is not offered; fold the samples into the batch"
        )


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Move a vmapped dimension to the front and fold it into the batch."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap_forward(
    info: Any,
    in_dims: Any,
    text_key: Any,
    q: Any,
    k: Any,
    v: Any,
    extra: Any,
    scalars: Any,
    ints: Any,
) -> Any:
    _refuse_packed(text_key)
    folded = [_fold(x, d, info.batch_size) for x, d in zip((q, k, v), in_dims[1:4], strict=True)]
    if parsed(text_key).shared_kv:
        folded[2] = folded[1][..., : v.shape[-1]]
    batch = _sample(q, in_dims[1]).shape[0]
    extra = _fold_extra(text_key, extra, in_dims[4], info.batch_size, batch)
    results = torch.ops.attngen.fwd(text_key, *folded, extra, scalars, ints)
    return [r.unflatten(0, (info.batch_size, -1)) for r in results], [0] * len(results)


def _vmap_backward(info: Any, in_dims: Any, text_key: Any, *arguments: Any) -> Any:
    _refuse_packed(text_key)
    tensors, (extra, scalars, ints, *rest) = arguments[:7], arguments[7:]
    needs = rest[0] if rest else []
    folded = [
        None if x is None else _fold(x, d, info.batch_size)
        for x, d in zip(tensors, in_dims[1:8], strict=True)
    ]
    batch = _sample(tensors[0], in_dims[1]).shape[0]
    spec = parsed(text_key)
    # `needs` is empty where none is needed
    wanted = [n for n, need in zip(spec.gradient_args, needs, strict=False) if need]
    at = [spec.tensor_args.index(name) for name in wanted]
    dims = in_dims[8] or (None,) * len(extra)
    single = [batch > 1 and _sample(extra[n], dims[n]).shape[0] == 1 for n in at]
    extra = _fold_extra(text_key, extra, dims, info.batch_size, batch, wanted)
    results = torch.ops.attngen.bwd(text_key, *folded, extra, scalars, ints, needs)
    results = [r.unflatten(0, (info.batch_size, -1)) for r in results]
    for n, is_single in enumerate(single, 3):
        if is_single:
            grad = results[n]
            results[n] = grad.sum(1, keepdim=True, dtype=torch.float32).to(grad.dtype)
    return results, [0] * len(results)


def _vmap_tangents(info: Any, in_dims: Any, text_key: Any, *arguments: Any) -> Any:
    tensors, (extra, scalars, ints) = arguments[:6], arguments[6:]
    folded = [
        None if x is None else _fold(x, d, info.batch_size)
        for x, d in zip(tensors, in_dims[1:7], strict=True)
    ]
    batch = _sample(tensors[0], in_dims[1]).shape[0]
    extra = _fold_extra(text_key, extra, in_dims[7], info.batch_size, batch)
    results = torch.ops.attngen.jvp(text_key, *folded, extra, scalars, ints)
    return [r.unflatten(0, (info.batch_size, -1)) for r in results], [0] * len(results)


def _sample(x: Tensor, dim: int | None) -> Tensor:
    """What one sample has."""
    return x if dim is None else x.select(dim, 0)


def _fold_extra(
    text_key: str, extra: Any, dims: Any, size: int, batch: int, wanted: Sequence[str] = ()
) -> list[Any]:
    """The optional tensors of the folded batch; `wanted` ones get a gradient a sample."""
    spec = parsed(text_key)
    _check_functions(spec, wanted)
    each = zip(spec.tensor_args, extra, dims or (None,) * len(extra), strict=True)
    return [
        _fold_scores(x, dim, size, batch, name in wanted)
        if name in (*SCORE_FIELDS, "block_map") or (name in MASK_FIELDS and name != "prefix_lens")
        else _fold_one(spec, name, x, dim, size)
        for name, x, dim in each
    ]


def _fold_scores(x: Tensor, dim: int | None, size: int, batch: int, needed: bool) -> Tensor:
    """A tensor that acts on scores: its first dim is 1 or the batch. One that all samples and batch
    rows share stays so, unless each sample needs a gradient of its own."""
    if dim is None and x.shape[0] == 1 and not needed:
        return x
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def _check_functions(spec: AttentionSpec, wanted: Sequence[str]) -> None:
    """Batch rows get other numbers, and samples share what functions read."""
    for each in (spec.score_function, spec.mask_function):
        if each is not None and "b" in each.inputs:
            raise SpecError(
                f"vmap is not offered where {each.name} reads b, the batch row: samples are folded "
                "into the batch; make the batch dim itself that of the samples"
            )
    if any(name in spec.aux_args for name in wanted):
        raise SpecError(
            "vmap is not offered for gradients of aux_tensors, which samples share; detach them"
        )


def _fold_one(spec: AttentionSpec, name: str, x: Any, dim: int | None, size: int) -> Any:
    if name == "prefix_lens" or (name in DESCALES and spec.fp8_scale != "tensor"):
        return _fold(x, dim, size)
    if dim is not None and name in spec.aux_args:
        raise SpecError(
            "vmap over aux_tensors is not offered; give them a dim for the samples, and index it"
        )
    if dim is not None and name in DESCALES:
        raise SpecError(
            f"vmap over {name} is not offered with fp8_scale='tensor', one scale for all; quantise "
            "with scale='head'"
        )
    if dim is not None:
        raise SpecError(
            "vmap over dropout_seed is not offered, nor over one drawn inside it; draw one seed "
            "outside and hand it in: each sample's batch row gives it bits of its own"
        )
    return x


def _flops_forward(text_key: str, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    """2 products of 2*B*H*Sq*Sk*D, whatever is masked (what torch counts for SDPA)."""
    batch, heads, seqlen_q, dim = q
    return int(2 * batch * heads * seqlen_q * _keys(text_key, k, rest[0]) * (dim + v[3]))


def _flops_backward(text_key: str, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    """5 products: S and dK, dQ with head_dim columns, dP and dV with head_dim_v."""
    batch, heads, seqlen_q, dim = q
    keys = _keys(text_key, k, rest[4])
    return int(2 * batch * heads * seqlen_q * keys * (3 * dim + 2 * v[3]))


def _flops_tangents(
    text_key: str, q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, *rest: Any, **more: Any
) -> int:
    """Those of the forward; with each of tq and tk one product of head_dim columns, with either
    one of head_dim_v, and with tv another."""
    batch, heads, seqlen_q, dim = q
    columns = dim * (1 + (tq is not None) + (tk is not None))
    columns += v[3] * (1 + (tq is not None or tk is not None) + (tv is not None))
    return int(2 * batch * heads * seqlen_q * k[2] * columns)


def _keys(text_key: str, k: Any, extra: Any) -> float:
    """Keys that a query may see: of packed sequences the mean length, as lengths are on the
    device."""
    spec = parsed(text_key)
    if spec.paged:
        return float(k[2] * extra[spec.tensor_args.index("block_table")][1])
    if not spec.is_packed:
        return float(k[2])
    count = extra[spec.tensor_args.index("cu_seqlens_k")][0] - 1
    return float(k[2] / max(count, 1))
