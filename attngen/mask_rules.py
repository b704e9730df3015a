"""Prefixes, documents and trees in plain PyTorch: which keys a query sees by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attngen.spec import AttentionSpec
from attngen.workload import Workload

NAMES = ("prefix_lens", "doc_ids_q", "doc_ids_k", "tree_mask")
DOCUMENTS = 8
"""In a row of a made-up batch."""


@dataclass(frozen=True)
class Structure:
    """What a call brings: prefix_lens (batch,), doc_ids (1 or batch, rows), and tree_mask (1 or
    batch, n, n), whose keys stand at positions from tree_start on."""

    prefix_lens: Tensor | None = None
    doc_ids_q: Tensor | None = None
    doc_ids_k: Tensor | None = None
    tree_mask: Tensor | None = None
    tree_start: int = 0

    @classmethod
    def of(cls, spec: AttentionSpec, seqlen_k: int, given: dict[str, Tensor | None]) -> Structure:
        """Of the tensors that the spec wants, neither more nor less."""
        assert set(given) <= set(NAMES), f"{set(given) - set(NAMES)} are none of {NAMES}"
        for name in NAMES:
            wanted = name in spec.tensor_args
            assert (given.get(name) is not None) == wanted, f"{name} is not as {spec} says"
        named = {
            name: x.unsqueeze(0) if x.dim() == (2 if name == "tree_mask" else 1) else x
            for name, x in given.items()
            if x is not None and name != "prefix_lens"
        }
        tree = named.get("tree_mask")
        start = 0 if tree is None else seqlen_k - tree.shape[1]
        return cls(given.get("prefix_lens"), **named, tree_start=start)

    def ordered(self, seen: Tensor, b: Tensor | int, queries: Tensor, keys: Tensor) -> Tensor:
        """`seen`, by the order of rows alone, as the tree and then the prefix change it.

        Args:
            b: batch rows.
            queries, keys: aligned positions; all broadcast.
        """
        if self.tree_mask is not None:
            n = self.tree_mask.shape[1]
            nodes_q, nodes_k = queries - self.tree_start, keys - self.tree_start
            are_nodes = (nodes_q >= 0) & (nodes_k >= 0)
            if n:
                row = _row(self.tree_mask, b)
                tree = self.tree_mask[row, nodes_q.clamp(0, n - 1), nodes_k.clamp(0, n - 1)]
                seen = torch.where(are_nodes, tree, seen)
        if self.prefix_lens is not None:
            seen = seen | (keys < self.prefix_lens[b])
        return seen

    def shares_document(self, b: Tensor | int, i: Tensor, j: Tensor) -> Tensor | bool:
        """Are query rows i and key rows j of one document?"""
        if self.doc_ids_q is None or self.doc_ids_k is None:
            return True
        ids_q, ids_k = self.doc_ids_q, self.doc_ids_k
        return ids_q[_row(ids_q, b), i] == ids_k[_row(ids_k, b), j]


def _row(x: Tensor, b: Tensor | int) -> Tensor | int:
    return b if x.shape[0] > 1 else b * 0


def made(spec: AttentionSpec, sizes: Workload, device: torch.device | str) -> dict[str, Tensor]:
    """Tensors of a plausible call: a prefix of a quarter, 8 documents one after the other, of
    unequal lengths, and a binary tree of up to 64 nodes, a quarter of the rows at most."""
    batch, rows, keys = sizes.batch, sizes.seqlen_q, sizes.seqlen_k
    found: dict[str, Tensor] = {}
    if spec.prefix_lm:
        found["prefix_lens"] = torch.full((batch,), -(-keys // 4), dtype=torch.int32, device=device)
    if spec.documents:
        ends = torch.arange(1, DOCUMENTS, device=device) ** 2 / DOCUMENTS**2
        for name, length in (("doc_ids_q", rows), ("doc_ids_k", keys)):
            share = torch.arange(length, device=device) / max(length, 1)
            ids = (share[:, None] >= ends).sum(1, dtype=torch.int32)
            found[name] = ids.expand(batch, length).contiguous()
    if spec.tree_mask:
        n = min(64, -(-rows // 4), keys)
        found["tree_mask"] = binary_tree(n, device).expand(batch, n, n)
    return found


def binary_tree(n: int, device: torch.device | str) -> Tensor:
    """(n, n) bool: node j is node i or above it, where node i hangs below node (i - 1) // 2."""
    nodes = torch.arange(n, device=device)
    above, seen = nodes.clone(), torch.zeros(n, n, dtype=torch.bool, device=device)
    for _ in range(n.bit_length()):
        seen |= above[:, None] == nodes
        above = (above - 1).clamp(min=0) // 2
    return seen
