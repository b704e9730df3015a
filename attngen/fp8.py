"""FP8 operands for attention, in plain torch: rounding, the Hadamard rotation, and scales, with
what a call must bring of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.checks import check_beside, check_kinds, check_tensors, heads_first
from attngen.errors import DtypeError, SpecError
from attngen.head_dim import split_head_dim
from attngen.spec import DESCALES, SCALE_ROWS, AttentionSpec
from attngen.spec_rules import FP8_DTYPES
from attngen.values import flag, one_of

SCALES = ("tensor", "head", "block")


class Quantized(NamedTuple):
    """FP8 operands, and the float32 scales that give them back: x is about x_fp8 * descale."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: str | torch.dtype = "float8_e4m3fn",
    scale: str = "tensor",
    hadamard: bool = False,
    *,
    layout: str = "bhsd",
) -> Quantized:
    """Round q, k and v to FP8, each divided by its largest finite magnitude.

    Args:
        q: (batch, num_heads_q, seqlen_q, head_dim); for layout "bshd" (batch, seqlen_q,
            num_heads_q, head_dim), and so on.
        k: (batch, num_heads_kv, seqlen_k, head_dim).
        v: (batch, num_heads_kv, seqlen_k, head_dim_v).
        dtype: "float8_e4m3fn" or "float8_e5m2" (torch dtypes are accepted).
        scale: what shares a scale: "tensor" all of it; "head" one key/value head of one batch row,
            with the query heads that read it; "block" 128 rows of that.
        hadamard: rotate the columns of q and k first, by one random signed Hadamard matrix: q @ k.T
            stays, and outliers are spread over all columns (FlashAttention-3, section 3.3).

    Returns:
        The operands, contiguous in the layout given, and float32 descales: () for "tensor",
        (batch, num_heads_kv) for "head", (batch, num_heads_kv, ceil(seqlen / 128)) for "block".
        NaN stays NaN, and so does inf in float8_e4m3fn, which has none.

    Raises:
        SpecError: shapes do not belong together, or dtype, scale or layout is unknown.
        DtypeError: q, k or v is no float tensor of 16 bits or more.
    """
    name = str(dtype).removeprefix("torch.")
    one_of("dtype", name, FP8_DTYPES)
    one_of("scale", scale, SCALES)
    one_of("layout", layout, ("bhsd", "bshd"))
    flag("hadamard", hadamard)
    if layout == "bshd":
        q, k, v = heads_first(q, k, v)
    check_tensors(q, k, v, None, None)
    for letter, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point() or x.element_size() < 2:
            raise DtypeError(
                f"{letter} must be float16, bfloat16 or float32, got {x.dtype}; quantize takes "
                f"what is not rounded yet: pass {letter}.float(), times its scale if it has one"
            )
    q, k, v = (x.detach().float() for x in (q, k, v))
    if hadamard:
        q, k = _rotate(q), _rotate(k)
    kind = getattr(torch, name)
    rounded = [_round(x, kind, scale, k.shape[1]) for x in (q, k, v)]
    operands = [x.transpose(1, 2) if layout == "bshd" else x for x, _ in rounded]
    return Quantized(*(x.contiguous() for x in operands), *(descale for _, descale in rounded))


def _round(x: Tensor, dtype: torch.dtype, scale: str, num_heads_kv: int) -> tuple[Tensor, Tensor]:
    """x (batch, heads, seqlen, dim) in FP8, and what it was divided by."""
    batch, heads, seqlen, _ = x.shape
    largest = torch.where(x.isfinite(), x.abs(), 0.0)
    group = heads // num_heads_kv if num_heads_kv else 1
    if scale == "tensor":
        peak = largest.amax() if x.numel() else largest.new_zeros(())
    else:
        rows = largest.amax(3) if x.shape[3] else largest.new_zeros(batch, heads, seqlen)
        rows = rows.view(batch, num_heads_kv, group, seqlen).amax(2)
        if scale == "block":
            rows = torch.nn.functional.pad(rows, (0, -seqlen % SCALE_ROWS))
            peak = rows.view(batch, num_heads_kv, -1, SCALE_ROWS).amax(3)
        else:
            peak = rows.amax(2) if seqlen else rows.new_zeros(batch, num_heads_kv)
    most = torch.finfo(dtype).max
    descale = torch.where(peak > 0, peak / most, 1.0)
    return (x / spread(descale, x)).clamp(-most, most).to(dtype), descale


def spread(descale: Tensor, x: Tensor) -> Tensor:
    """A descale in a shape that multiplies x (batch, heads, seqlen, dim)."""
    if descale.dim() == 0:
        return descale
    wide = descale.repeat_interleave(x.shape[1] // max(1, descale.shape[1]), 1)
    if wide.dim() == 3:
        return wide.repeat_interleave(SCALE_ROWS, 2)[:, :, : x.shape[2], None]
    return wide[:, :, None, None]


def scale_kind(dtype: str, descales: tuple[Any, ...]) -> str | None:
    """The fp8_scale that the descales of q, k and v make, None for a dtype that has none."""
    if dtype not in FP8_DTYPES:
        for name, descale in zip(DESCALES, descales, strict=True):
            if descale is not None:
                raise SpecError(
                    f"{name} belongs to FP8 inputs, got {dtype} ones; leave it out, or make both "
                    "with attngen.quantize"
                )
        return None
    missing = [name for name, x in zip(DESCALES, descales, strict=True) if x is None]
    if missing:
        raise SpecError(
            f"{dtype} inputs need q_descale, k_descale and v_descale, got no "
            f"{' and no '.join(missing)}; attngen.quantize makes them"
        )
    check_kinds(dict(zip(DESCALES, descales, strict=True)))
    for name, x in zip(DESCALES, descales, strict=True):
        if x.requires_grad and torch.is_grad_enabled():
            raise SpecError(f"{name} requires grad, but scales get none; pass {name}.detach()")
    dims = [x.dim() for x in descales]
    kinds = {0: "tensor", 2: "head", 3: "block"}
    if dims[0] not in kinds or dims != dims[:1] * 3:
        raise SpecError(
            "q_descale, k_descale and v_descale must be all of shape (), (batch, num_heads_kv) or "
            "(batch, num_heads_kv, ceil(seqlen / 128)), got shapes "
            f"{', '.join(str(tuple(x.shape)) for x in descales)}; attngen.quantize makes them"
        )
    return kinds[dims[0]]


def check_scale(spec: AttentionSpec, descales: tuple[Any, ...]) -> None:
    """Descales as the spec has them."""
    scale = scale_kind(spec.dtype, descales)
    if scale != spec.fp8_scale:
        raise SpecError(
            f"q_descale, k_descale and v_descale are those of fp8_scale={scale!r}, but the spec "
            f"says {spec.fp8_scale!r}; compile a spec with fp8_scale={scale!r}, or quantise with "
            f"scale={spec.fp8_scale!r}"
        )


def check_gradient_dtypes(*tensors: Tensor) -> None:
    """Refuse FP8 tensors whose gradients autograd would round to FP8."""
    for name, x in zip("qkv", tensors, strict=True):
        if x.element_size() > 1 or not x.requires_grad:
            continue
        if x.is_leaf and (x.grad_dtype is None or x.grad_dtype.itemsize > 1):
            continue
        step = f"make it a leaf and set {name}.grad_dtype = torch.bfloat16"
        if type(x) not in (Tensor, torch.nn.Parameter):  # AOTAutograd traces, and forgets it
            step += ', and keep the call out of torch.compile (backend="eager" aside)'
        raise SpecError(
            f"{name} is {x.dtype} and requires grad, and autograd would round its gradient to it; "
            f"{step}"
        )


def descale_shape(scale: str, k: Tensor, rows: int) -> tuple[int, ...]:
    """The shape of the descale of a tensor with so many rows."""
    lead = (k.shape[0], k.shape[1])
    return {"tensor": (), "head": lead, "block": (*lead, -(-rows // SCALE_ROWS))}[scale]


def check_descales(scale: str, q: Tensor, k: Tensor, descales: Sequence[Tensor | None]) -> None:
    """Shapes, dtypes and devices of the descales of q, k and v."""
    for name, rows, x in zip(DESCALES, (q.shape[2], k.shape[2], k.shape[2]), descales, strict=True):
        said = f"fp8_scale={scale!r}"
        check_descale(
            name, x, descale_shape(scale, k, rows), said, q, "; attngen.quantize makes it"
        )


def check_descale(
    name: str, x: Tensor | None, shape: tuple[int, ...], said: str, q: Tensor, step: str = ""
) -> None:
    """Shape, dtype and device of a descale; `said` is the spec's word, as kv_scale='key'."""
    if x is None or tuple(x.shape) != shape:
        got = None if x is None else tuple(x.shape)
        raise SpecError(f"{name} must have shape {shape} for {said}, got {got}{step}")
    check_beside(name, x, torch.float32, q)


def _rotate(x: Tensor) -> Tensor:
    """x times an orthogonal matrix: random signs, then Hadamard's on each power-of-two part."""
    dim = x.shape[-1]
    parts = [part for part in split_head_dim(dim) if not part.padded]
    rotated: Tensor = x * _signs(dim).to(x.device)
    pieces = [
        rotated[..., part.start : part.start + part.width] @ _hadamard(part.width).to(x.device)
        for part in parts
    ]
    end = sum(part.width for part in parts)
    return torch.cat([*pieces, rotated[..., end:]], -1)


@functools.cache
def _signs(dim: int) -> Tensor:
    """The same for every call, so that keys quantised at different times go together."""
    generator = torch.Generator(device="cpu").manual_seed(dim)
    signs = torch.randint(0, 2, (dim,), generator=generator, device="cpu")
    return signs.to(torch.float32).mul(2.0).sub(1.0)


@functools.cache
def _hadamard(width: int) -> Tensor:
    """Sylvester's matrix, orthonormal."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    orthonormal: Tensor = matrix * width**-0.5
    return orthonormal
