"""What vmap and the FLOP counter make of the ops: registered with them by `attngen.ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attngen.errors import SpecError
from attngen.identity import parsed
from attngen.spec import DESCALES, AttentionSpec


def register(library: torch.library.Library) -> None:
    """Register the rules of `attngen::fwd` and `attngen::bwd`."""
    torch.library.register_vmap("attngen::fwd", _vmap_forward, lib=library)
    torch.library.register_vmap("attngen::bwd", _vmap_backward, lib=library)
    register_flop_formula(torch.ops.attngen.fwd)(_flops_forward)
    register_flop_formula(torch.ops.attngen.bwd)(_flops_backward)


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
    extra = _fold_extra(text_key, extra, in_dims[4], info.batch_size)
    folded = [_fold(x, d, info.batch_size) for x, d in zip((q, k, v), in_dims[1:4], strict=True)]
    results = torch.ops.attngen.fwd(text_key, *folded, extra, scalars, ints)
    return [r.unflatten(0, (info.batch_size, -1)) for r in results], [0] * len(results)


def _vmap_backward(info: Any, in_dims: Any, text_key: Any, *arguments: Any) -> Any:
    tensors, (extra, scalars, ints) = arguments[:7], arguments[7:]
    extra = _fold_extra(text_key, extra, in_dims[8], info.batch_size)
    folded = [
        None if x is None else _fold(x, d, info.batch_size)
        for x, d in zip(tensors, in_dims[1:8], strict=True)
    ]
    results = torch.ops.attngen.bwd(text_key, *folded, extra, scalars, ints)
    return [r.unflatten(0, (info.batch_size, -1)) for r in results], [0] * len(results)


def _fold_extra(text_key: str, extra: Any, dims: Any, size: int) -> list[Any]:
    """The optional tensors of the folded batch."""
    spec = parsed(text_key)
    each = zip(spec.tensor_args, extra, dims or (None,) * len(extra), strict=True)
    return [_fold_one(spec, name, x, dim, size) for name, x, dim in each]


def _fold_one(spec: AttentionSpec, name: str, x: Any, dim: int | None, size: int) -> Any:
    if name in DESCALES and spec.fp8_scale != "tensor":
        return _fold(x, dim, size)
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
    return int(2 * batch * heads * seqlen_q * k[2] * (dim + v[3]))


def _flops_backward(text_key: str, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    """5 products: S and dK, dQ with head_dim columns, dP and dV with head_dim_v."""
    batch, heads, seqlen_q, dim = q
    return int(2 * batch * heads * seqlen_q * k[2] * (3 * dim + 2 * v[3]))
