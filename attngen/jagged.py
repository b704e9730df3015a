"""torch's jagged nested tensors as packed sequences, and results as nested tensors again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.errors import SpecError

_RAGGED = {"bhsd": 2, "bshd": 1}
"""The dim of sequences."""


class Jagged(NamedTuple):
    """A call of jagged q, k and v: what packed sequences need, and how results become nested."""

    tensors: tuple[Tensor, Tensor, Tensor]
    """q, k and v, (total, heads, dim)."""
    offsets: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    """In the order of `spec.PACKED_ARGS`."""
    of_q: Tensor
    lengths_of_q: Tensor | None
    heads_first: bool

    def nested(self, rows: Tensor) -> Tensor:
        """A result (total_q, heads, ...) nested as q is."""
        made = torch.nested.nested_tensor_from_jagged(rows, self.of_q, self.lengths_of_q)
        return made.transpose(1, 2) if self.heads_first else made


def are_jagged(q: Any, k: Any, v: Any) -> bool:
    """Are all three jagged? Other nested tensors are for the checks to name."""
    if not (isinstance(q, Tensor) and q.is_nested):
        return False
    return all(isinstance(x, Tensor) and x.layout is torch.jagged for x in (q, k, v))


def jagged(q: Any, k: Any, v: Any, layout: str, *given: Any) -> Jagged:
    """The parts of jagged q, k and v; `given` are offsets of the call, which must not be.

    Raises:
        SpecError: they do not belong together, or the layout is another.
    """
    if any(x is not None for x in given):
        raise SpecError(
            "cu_seqlens and seqused with nested tensors, which have offsets of their own; leave "
            "them out, or pass q.values() and so on"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise SpecError(
                f"{name} must be a jagged tensor of 4 dims, got shape {tuple(x.shape)}; add heads "
                "with .unsqueeze(1)"
            )
    at: int = q._ragged_idx
    if at != _RAGGED.get(layout, at) or at not in (1, 2) or k._ragged_idx != at:
        here = {2: "(batch, heads, seqlen, dim)", 1: "(batch, seqlen, heads, dim)"}
        step = 'layout="bshd"' if at == 1 else ".transpose(1, 2)"
        raise SpecError(
            f'q, k and v must be {here[_RAGGED.get(layout, 2)]} with layout="{layout}", got '
            f"sequences in dims {at}, {k._ragged_idx} and {v._ragged_idx}; pass {step}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise SpecError(
            f"k and v must share their offsets, and q their batch, got shapes {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}; make v with "
            "torch.nested.nested_tensor_from_jagged(..., offsets=k.offsets())"
        )
    heads_first = at == 2
    rows = [x.values().transpose(0, 1) if heads_first else x.values() for x in (q, k, v)]
    used_q, used_k = (None if x.lengths() is None else x.lengths().int() for x in (q, k))
    offsets = (q.offsets().int(), k.offsets().int(), used_q, used_k)
    return Jagged((rows[0], rows[1], rows[2]), offsets, q.offsets(), q.lengths(), heads_first)
