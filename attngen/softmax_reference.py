"""From scores to P in plain PyTorch: masks, biases, slopes and sinks, softmax and dropout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen.mask_rules import NAMES, Structure
from attngen.spec import AttentionSpec

NEG_INF = float("-inf")


def seen_lse(lse: Tensor) -> Tensor:
    """lse, 0 in rows that see no key: what it is subtracted from may be -inf, too."""
    return torch.where(lse == NEG_INF, 0.0, lse)


def scale_of(spec: AttentionSpec) -> float:
    """The spec's softmax scale, or its default."""
    return spec.head_dim**-0.5 if spec.softmax_scale is None else spec.softmax_scale


def alignment(spec: AttentionSpec, seqlen_q: int, seqlen_k: int) -> int:
    """The key position that stands at query 0's own."""
    return 0 if spec.causal == "top_left" else seqlen_k - seqlen_q


def visible(
    spec: AttentionSpec,
    queries: Tensor,
    keys: Tensor,
    structure: Structure | None = None,
    at: tuple[Tensor | int, Tensor, Tensor] | None = None,
) -> Tensor:
    """May queries see keys? Both are aligned positions, of shapes that broadcast.

    With a structure, `at` names their batch rows, query rows and key rows.
    """
    left, right = spec.window or (None, None)
    ahead = keys - queries
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if spec.chunk is not None:
        seen &= queries // spec.chunk == keys // spec.chunk
    if spec.is_causal:
        right = 0
    if structure is not None and at is not None:
        if spec.is_causal:
            seen = seen & structure.ordered(ahead <= 0, at[0], queries, keys)
            right = None
        elif spec.tree_mask:
            seen = seen & structure.ordered(torch.ones_like(seen), at[0], queries, keys)
        seen = seen & structure.shares_document(*at)
    if left is not None:
        seen = seen & (ahead >= -left)
    if right is not None:
        seen = seen & (ahead <= right)
    return seen


def capped(spec: AttentionSpec, s: Tensor) -> Tensor:
    return s if spec.softcap is None else spec.softcap * torch.tanh(s / spec.softcap)


@dataclass(frozen=True)
class Beside:
    """The tensors of a call beside q, k and v, as they meet scores (batch, heads, rows, keys)."""

    attn_mask: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None

    def expand(self, *sizes: int) -> Beside:
        return Beside(*(None if x is None else x.expand(sizes) for x in vars(self).values()))

    def __getitem__(self, at: Any) -> Beside:
        return Beside(*(None if x is None else x[at] for x in vars(self).values()))

    def seen(self, seen: Tensor) -> Tensor:
        """Those of the keys `seen` that are not hidden here."""
        if self.attn_mask is not None:
            seen = seen & self.attn_mask
        return seen if self.bias is None else seen & (self.bias != NEG_INF)

    def added_to(self, s: Tensor, ahead: Tensor) -> Tensor:
        """Capped scores with their bias, less ALiBi's part."""
        if self.bias is not None:
            s = s + self.bias.to(s.dtype).masked_fill(self.bias == NEG_INF, 0.0)
        return s if self.slopes is None else s - self.slopes.to(s.dtype) * ahead.abs()


def beside_of(
    spec: AttentionSpec,
    attn_mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Beside:
    """The tensors that the spec wants, neither more nor less."""
    given = {"attn_mask": attn_mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    for name, tensor in given.items():
        assert (tensor is not None) == (name in spec.tensor_args), f"{name} is not as {spec} says"

    def of_heads(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(-1, x.shape[-1], 1, 1)

    return Beside(attn_mask, bias, of_heads(alibi_slopes), of_heads(sinks))


def places(
    batch: int, heads: int, rows: Tensor, keys: Tensor, first: int = 0
) -> tuple[Tensor, ...]:
    """b, h, q_idx and k_idx of all scores, b from `first` on."""
    b, h = (torch.arange(n, device=rows.device) for n in (batch, heads))
    return (b + first)[:, None, None, None], h[:, None, None], rows[:, None], keys


def softmax(s: Tensor, seen: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(probabilities, lse) over the last dim; a row that sees nothing is 0 and -inf."""
    s = s.masked_fill(~seen, NEG_INF)
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m == NEG_INF, torch.zeros_like(m), m)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    live = total > 0
    total = torch.where(live, total, torch.ones_like(total))
    p, lse = e / total, m + torch.log(total)
    if sinks is not None:  # exp(lse) of exp(lse) + exp(sink) is left to the keys
        p = p * torch.sigmoid(lse - sinks.to(s.dtype))
    return p, torch.where(live, lse, torch.full_like(lse, NEG_INF)).squeeze(-1)


def dropped(spec: AttentionSpec, p: Tensor, keep: Tensor | None) -> Tensor:
    if keep is None:
        return p
    return p * keep / (1 - spec.dropout_p) if spec.dropout_p < 1 else p * 0.0


def structure_of(given: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Those of a call's tensors that masks of structure read."""
    return {name: x for name, x in given.items() if name in NAMES}


def aux_of(given: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Those that score_mod and mask_mod read."""
    return {name: x for name, x in given.items() if name not in NAMES and x is not None}
