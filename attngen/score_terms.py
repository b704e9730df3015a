"""Masks, biases, ALiBi slopes and sinks: from what a call gives to what kernels take, and back.

The op takes them small: 4-D masks and biases whose dims are 1 or full, slopes and sinks of one row
or of one for each batch row. Kernels take views of full shape, whose stride is 0 where they repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngen import packed, paged
from attngen.checks import check_place
from attngen.errors import DtypeError, SpecError, UnsupportedSpecError
from attngen.masks import MASK_FIELDS, placed_mask
from attngen.memory import on_16_bytes
from attngen.spec import KV_DESCALES, AttentionSpec

SCORE_FIELDS = {
    "attn_mask": "attn_mask",
    "bias": "bias",
    "alibi_slopes": "alibi",
    "sinks": "sinks",
}
"""Tensor arguments, in the order of the op's `extra`, and their spec fields."""
BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SUM_KEYS = 16
"""Keys of the smallest tile: each has a sum of its own in `slope_sums`."""


def check_scores(
    q: Tensor,
    k: Tensor,
    attn_mask: Any,
    bias: Any,
    alibi_slopes: Any,
    sinks: Any,
    num_seqs: int | None = None,
) -> dict[str, Tensor]:
    """The tensors that act on scores, as the op takes them, by name: views of 4 dims, each
    1 or full, or (1 or batch, num_heads_q).

    Args:
        q, k: (batch, heads, seqlen, dim).
        num_seqs: of packed sequences, which count as batch.
    """
    found: dict[str, Tensor] = {}
    if attn_mask is not None:
        check_place("attn_mask", attn_mask, q)
        if attn_mask.dtype != torch.bool:
            raise DtypeError(_no_mask(attn_mask.dtype))
        found["attn_mask"] = _check_tile("attn_mask", attn_mask, q, k)
    if bias is not None:
        check_place("bias", bias, q)
        if bias.dtype not in BIAS_DTYPES:
            raise DtypeError(_no_bias(bias.dtype))
        found["bias"] = _check_tile("bias", bias, q, k)
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is not None:
            found[name] = _check_heads(name, x, q, num_seqs)
    return found


def _no_mask(dtype: torch.dtype) -> str:
    step = "write attn_mask.bool(), where True is a key that may be seen"
    if dtype.is_floating_point:
        step = "pass a mask that is added to the scores as bias=, which has a gradient, too"
    return f"attn_mask must be bool, got {dtype}; {step}"


def _no_bias(dtype: torch.dtype) -> str:
    step = "pass a mask as attn_mask=" if dtype == torch.bool else "cast it with bias.float()"
    return f"bias must be float16, bfloat16 or float32, got {dtype}; {step}"


def _check_tile(name: str, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A view of 4 dims of what is broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k)."""
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    tile = x
    while tile.dim() < 4:
        tile = tile.unsqueeze(0)
    if tile.dim() > 4 or not fits(tile.shape, full):
        batch, heads, rows, keys = full
        step = "make each dim 1 or full"
        if x.shape == (batch, keys):
            step = f"write a mask of keys as {name}[:, None, None, :]"
        elif x.shape == (batch, rows, keys):
            step = f"give it a dim for the heads, {name}[:, None]"
        elif x.shape == (batch, rows, heads, keys):
            step = f"the heads come before the rows in each layout, {name}.transpose(1, 2)"
        elif x.shape == (batch, k.shape[1], rows, keys):
            step = (
                f"repeat it for each query head, {name}.repeat_interleave({heads // k.shape[1]}, 1)"
            )
        raise SpecError(
            f"{name} must be broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k) {full}, got "
            f"shape {tuple(x.shape)}; {step}"
        )
    return tile


def fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Is each dim 1 or full?"""
    return all(size == 1 or size == most for size, most in zip(shape, full, strict=True))


def _check_heads(name: str, x: Any, q: Tensor, num_seqs: int | None) -> Tensor:
    """A number for each query head, as (1 or batch, num_heads_q)."""
    check_place(name, x, q)
    if not x.is_floating_point() or x.element_size() == 1:
        raise DtypeError(
            f"{name} must be of a float dtype of 16 bits or more, got {x.dtype}; cast it with "
            f"{name}.float()"
        )
    batch, heads = q.shape[0] if num_seqs is None else num_seqs, q.shape[1]
    rows: Tensor = x.unsqueeze(0) if x.dim() == 1 else x
    if rows.dim() != 2 or rows.shape[1] != heads or (rows.shape[0] != 1 and rows.shape[0] != batch):
        raise SpecError(
            f"{name} must have shape (num_heads_q,) {(heads,)} or (batch, num_heads_q) "
            f"{(batch, heads)}, got {tuple(x.shape)}; it holds one number for each query head"
        )
    return rows


def placed(
    spec: AttentionSpec, extra: Sequence[Tensor | None], q: Tensor, k: Tensor
) -> list[Tensor | None]:
    """`extra` as kernels take it."""
    batch, heads, seqlen_q, _ = q.shape
    if spec.is_packed:
        batch = packed.packed_of(spec, extra).num_seqs
    if spec.packs_queries:
        batch = paged.num_seqs(spec, extra)
    found: list[Tensor | None] = []
    for name, x in zip(spec.tensor_args, extra, strict=True):
        if x is None:
            found.append(None)
        elif name in ("attn_mask", "bias"):
            found.append(on_16_bytes(x).expand(batch, heads, seqlen_q, k.shape[2]))
        elif name in ("alibi_slopes", "sinks"):
            found.append(on_16_bytes(x.float()).expand(batch, heads))
        elif name == "block_map":
            found.append(on_16_bytes(x).expand(batch, heads, x.shape[2]))
        elif name in MASK_FIELDS:
            found.append(placed_mask(name, x, batch))
        elif (
            name in spec.aux_args
            or (name == "block_table" and x.stride(1) == 1)
            or (name in KV_DESCALES and spec.is_quantized)
        ):
            found.append(on_16_bytes(x))
        else:
            found.append(on_16_bytes(x.contiguous()))
    return found


class Sums:
    """Gradients of the terms that want one, from their buffers to the shapes of the inputs."""

    def __init__(self, spec: AttentionSpec, needs: Sequence[bool]) -> None:
        self.wanted = [n for n, need in zip(spec.gradient_args, needs, strict=True) if need]
        self.is_deterministic = bool(spec.deterministic)
        self.aux = [name for name in self.wanted if name in spec.learnt_aux]
        if self.aux and self.is_deterministic:
            raise UnsupportedSpecError(
                [f"the gradient of {x} is added in no fixed order: deterministic" for x in self.aux]
            )
        self.is_packed = spec.is_packed

    @property
    def names(self) -> tuple[str, ...]:
        """Buffers, as the keywords of plan() name them."""
        buffers = {"bias": "dbias", "alibi_slopes": "slope_sums"}
        buffers |= {name: f"d{name}" for name in self.aux}
        return tuple(buffers[name] for name in self.wanted if name in buffers)

    def made(self, given: dict[str, Tensor | None], q: Tensor, k: Tensor) -> list[Tensor]:
        """The buffers, all zero.

        dbias has the shape of bias and is added to atomically where it repeats; a deterministic
        spec's has an entry for each score, float32, and is summed afterwards.
        """
        batch, heads, seqlen_q, _ = q.shape
        full = (batch, heads, seqlen_q, k.shape[2])
        found = []
        for name in self.wanted:
            if name == "bias":
                bias = given["bias"]
                assert bias is not None
                shape = full if self.is_deterministic else bias.shape
                found.append(q.new_zeros(shape, dtype=torch.float32).expand(full))
            elif name == "alibi_slopes":
                tiles = -(-k.shape[2] // SUM_KEYS)
                if self.is_packed:
                    offsets = given["cu_seqlens_q"]
                    assert offsets is not None
                    tiles = packed.slots(k.shape[2], offsets.shape[0] - 1)
                found.append(q.new_zeros((batch, heads, tiles), dtype=torch.float32))
            elif name in self.aux:
                aux = given[name]
                assert aux is not None
                found.append(q.new_zeros(aux.shape, dtype=torch.float32))
        return found

    def zeros(self, given: dict[str, Tensor | None]) -> list[Tensor]:
        """The gradients of a call in which nothing is seen."""
        found = [given[name] for name in self.wanted]
        return [torch.zeros_like(x) for x in found if x is not None]

    def gradients(
        self,
        given: dict[str, Tensor | None],
        buffers: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
    ) -> list[Tensor]:
        """The gradients in the order of spec.gradient_args, of the inputs' shapes and dtypes."""
        at = dict(zip(self.names, buffers, strict=True))
        if self.is_packed:
            return self._of_packed(given, at, out, lse, dout)
        found = []
        for name in self.wanted:
            x = given[name]
            assert x is not None
            if name == "bias":
                grad = at["dbias"]
                if self.is_deterministic:
                    grad = grad.sum_to_size(x.shape)
                else:
                    grad = grad[tuple(slice(0, size) for size in x.shape)]
            elif name == "alibi_slopes":
                grad = at["slope_sums"].sum(2).sum_to_size(x.shape)
            elif name in self.aux:
                grad = at[f"d{name}"]
            else:
                grad = _of_sinks(x.float(), out, lse, dout).sum_to_size(x.shape)
            found.append(grad.to(x.dtype))
        return found

    def _of_packed(
        self,
        given: dict[str, Tensor | None],
        at: dict[str, Tensor],
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
    ) -> list[Tensor]:
        """The same of packed sequences, each of which may have slopes and sinks of its own."""
        found = []
        cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        assert cu_q is not None
        assert cu_k is not None
        for name in self.wanted:
            x = given[name]
            assert x is not None
            if name in self.aux:
                found.append(at[f"d{name}"].to(x.dtype))
                continue
            if name == "alibi_slopes":
                each = at["slope_sums"].squeeze(0)
            else:
                wide = x.float()
                if x.shape[0] != 1:
                    wide = wide[packed.sequence_of_rows(cu_q, out.shape[2])]
                each = _of_sinks_by_row(wide.T[None], out, lse, dout).squeeze(0)
            if x.shape[0] == 1:
                grad = each.sum(1)[None]
            elif name == "alibi_slopes":
                grad = packed.sums_of_slots(each, cu_k)
            else:
                grad = packed.sums_of_rows(each, cu_q)
            found.append(grad.to(x.dtype))
        return found


def _of_sinks(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """Minus the sum over rows of P times rowsum(out * do), P the sink's weight: (batch, heads)."""
    return _of_sinks_by_row(sinks[:, :, None], out, lse, dout).sum(2)


def _of_sinks_by_row(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """What each row adds to that: (batch, heads, seqlen_q)."""
    dp = (out.float() * dout.float()).sum(3)
    weight = torch.sigmoid(sinks - lse)  # exp(sink) / (exp(sink) + exp(lse))
    return -(weight * dp).where(lse != float("-inf"), 0.0)
