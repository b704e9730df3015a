"""What vmap and the FLOP counter make of the ops: registered with them by `attngen.ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attngen.errors import SpecError


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
    _refuse_batched(in_dims[4])
    folded = [_fold(x, d, info.batch_size) for x, d in zip((q, k, v), in_dims[1:4], strict=True)]
    results = torch.ops.attngen.fwd(text_key, *folded, extra, scalars, ints)
    return [r.unflatten(0, (info.batch_size, -1)) for r in results], [0] * len(results)


def _vmap_backward(info: Any, in_dims: Any, text_key: Any, *arguments: Any) -> Any:
    _refuse_batched(in_dims[8])
    tensors, (extra, scalars, ints) = arguments[:7], arguments[7:]
    folded = [
        None if x is None else _fold(x, d, info.batch_size)
        for x, d in zip(tensors, in_dims[1:8], strict=True)
    ]
    results = torch.ops.attngen.bwd(text_key, *folded, extra, scalars, ints)
    return [r.unflatten(0, (info.batch_size, -1)) for r in results], [0] * len(results)


def _refuse_batched(dims: Any) -> None:
    if any(dim is not None for dim in dims or ()):
        raise SpecError(
            "vmap over dropout_seed is not offered, nor over one drawn inside it; draw one seed "
            "outside and hand it in: each sample's batch row gives it bits of its own"
        )


def _flops_forward(text_key: str, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    """2 products of 2*B*H*Sq*Sk*D, whatever is masked (what torch counts for SDPA)."""
    batch, heads, seqlen_q, dim = q
    return int(2 * batch * heads * seqlen_q * k[2] * (dim + v[3]))


def _flops_backward(text_key: str, q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> int:
    """5 products: S and dK, dQ with head_dim columns, dP and dV with head_dim_v."""
    batch, heads, seqlen_q, dim = q
    return int(2 * batch * heads * seqlen_q * k[2] * (3 * dim + 2 * v[3]))
