"""Side outputs of the forward: what kernels write for them, and what a call returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.memory import Memory, float32
from attngen.packed import maxima_of_rows, packed_of
from attngen.spec import AttentionSpec


def side_memory(aux: tuple[str, ...], q: Tensor, k: Tensor) -> list[Memory]:
    """What kernels write for side outputs; of max_logit, the largest score of each row."""
    batch, heads, rows, _ = q.shape
    return [float32(batch, heads, k.shape[2] if name == "col_sum" else rows) for name in aux]


def side_outputs(
    aux: tuple[str, ...], made: Sequence[Tensor], cu_seqlens_q: Tensor | None = None
) -> list[Tensor]:
    """The side outputs, from what kernels wrote; cu_seqlens_q of packed sequences."""

    def largest(x: Tensor) -> Tensor:
        if cu_seqlens_q is None:
            return x.amax(2)
        return maxima_of_rows(x.squeeze(0), cu_seqlens_q)

    pairs = zip(aux, made[: len(aux)], strict=True)
    return [largest(x) if name == "max_logit" else x for name, x in pairs]


def no_side_outputs(
    spec: AttentionSpec, extra: Sequence[Tensor | None], q: Tensor, k: Tensor
) -> list[Tensor]:
    """Those of a call in which nothing is seen."""
    fresh = [q.new_zeros(shape, dtype=torch.float32) for shape in side_shapes(spec, extra, q, k)]
    return [
        x.fill_(float("-inf")) if name == "max_logit" else x
        for name, x in zip(spec.aux, fresh, strict=True)
    ]


def side_shapes(
    spec: AttentionSpec, extra: Sequence[Tensor | None], q: Tensor, k: Tensor
) -> list[tuple[int, ...]]:
    """Shapes of the side outputs."""
    batch, heads, rows, _ = q.shape
    count = packed_of(spec, extra).num_seqs if spec.is_packed else batch
    shapes = {
        "max_logit": (count, heads),
        "col_sum": (batch, heads, k.shape[2]),
        "entropy": (batch, heads, rows),
    }
    return [shapes[name] for name in spec.aux]
