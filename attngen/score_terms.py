"""Masks, biases, ALiBi slopes and sinks: from what a call gives to what kernels take, and back.

The op takes them small: 4-D masks and biases whose dims are 1 or full, slopes and sinks of one row
or of one for each batch row. Kernels take views of full shape, whose stride is 0 where they repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen import packed, paged
from attngen.errors import UnsupportedSpecError
from attngen.masks import MASK_FIELDS, placed_mask
from attngen.memory import on_16_bytes
from attngen.spec import KV_DESCALES, AttentionSpec

SUM_KEYS = 16
"""Keys of the smallest tile: each has a sum of its own in `slope_sums`."""


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
