"""Masks of structure: prefixes, documents and trees, from what a call gives to what kernels take.

None has an entry for each score, and none has a gradient. The op takes each with a first dim of 1
or the batch; kernels take views whose stride is 0 where they repeat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.checks import check_place
from attngen.errors import DtypeError, SpecError
from attngen.memory import on_16_bytes

MASK_FIELDS = {
    "prefix_lens": "prefix_lm",
    "doc_ids_q": "documents",
    "doc_ids_k": "documents",
    "tree_mask": "tree_mask",
}
"""Tensor arguments, in the order of the op's `extra`, and their spec fields."""
DOCUMENT_ROWS = 16
"""Rows of the smallest tile: each has a place of its own in `doc_tiles`."""
INTS = (torch.int32, torch.int64)


def check_masks(
    q: Tensor,
    k: Tensor,
    prefix_lens: Any,
    doc_ids_q: Any,
    doc_ids_k: Any,
    tree_mask: Any,
    totals: tuple[int | None, int | None] = (None, None),
    num_seqs: int | None = None,
) -> dict[str, Tensor]:
    """The tensors as the op takes them, by name.

    Args:
        q, k: (batch, heads, seqlen, dim).
        totals: whole lengths that a shard names.
        num_seqs: of packed sequences, which count as batch.
    """
    found: dict[str, Tensor] = {}
    batch, rows, keys = q.shape[0] if num_seqs is None else num_seqs, q.shape[2], k.shape[2]
    if prefix_lens is not None:
        _check_ints("prefix_lens", prefix_lens, q)
        if prefix_lens.dim() != 1 or prefix_lens.shape[0] != batch:
            raise SpecError(
                f"prefix_lens must have shape (batch,) {(batch,)}, got {tuple(prefix_lens.shape)}; "
                "it holds one length for each batch row"
            )
        found["prefix_lens"] = prefix_lens
    if doc_ids_q is not None or doc_ids_k is not None:
        if doc_ids_q is None:
            raise SpecError("doc_ids_k is given, but doc_ids_q is not; pass doc_ids_q=, too")
        if doc_ids_k is None:
            if rows != keys:
                raise SpecError(
                    f"doc_ids_q stands for doc_ids_k where lengths agree, got seqlen_q {rows} and "
                    f"seqlen_k {keys}; pass doc_ids_k=, too"
                )
            doc_ids_k = doc_ids_q
        found["doc_ids_q"] = _check_ids("doc_ids_q", doc_ids_q, q, batch, rows, "seqlen_q")
        found["doc_ids_k"] = _check_ids("doc_ids_k", doc_ids_k, q, batch, keys, "seqlen_k")
    if tree_mask is not None:
        rows, keys = (n if t is None else t for n, t in zip((rows, keys), totals, strict=True))
        found["tree_mask"] = _check_tree(tree_mask, q, batch, rows, keys)
    return found


def _check_ints(name: str, x: Any, q: Tensor) -> None:
    check_place(name, x, q)
    if x.dtype not in INTS:
        raise DtypeError(f"{name} must be int32 or int64, got {x.dtype}; cast it with {name}.int()")


def _check_ids(name: str, x: Any, q: Tensor, batch: int, seqlen: int, length: str) -> Tensor:
    _check_ints(name, x, q)
    ids: Tensor = x.unsqueeze(0) if x.dim() == 1 else x
    if ids.dim() != 2 or ids.shape[1] != seqlen or (ids.shape[0] != 1 and ids.shape[0] != batch):
        raise SpecError(
            f"{name} must have shape (batch, {length}) {(batch, seqlen)} or ({length},) "
            f"{(seqlen,)}, got {tuple(x.shape)}; it holds the document of each row"
        )
    return ids


def _check_tree(x: Any, q: Tensor, batch: int, rows: int, keys: int) -> Tensor:
    check_place("tree_mask", x, q)
    if x.dtype != torch.bool:
        raise DtypeError(
            f"tree_mask must be bool, got {x.dtype}; write tree_mask.bool(), where True is a node "
            "that may be seen"
        )
    tree: Tensor = x.unsqueeze(0) if x.dim() == 2 else x
    is_square = tree.dim() == 3 and tree.shape[1] == tree.shape[2]
    if not is_square or (tree.shape[0] != 1 and tree.shape[0] != batch):
        raise SpecError(
            f"tree_mask must have shape (n, n) or (batch, n, n) with batch {batch}, got "
            f"{tuple(x.shape)}; n is how many of the last rows are nodes"
        )
    if tree.shape[1] > rows or tree.shape[1] > keys:
        raise SpecError(
            f"tree_mask has {tree.shape[1]} nodes, which are the last rows of q and of k, but "
            f"these have {rows} and {keys}; hand in rows for every node, or name the whole lengths "
            "of a shard by seqlen_q_total and seqlen_k_total"
        )
    return tree


def placed_mask(name: str, x: Tensor, batch: int) -> Tensor:
    """A tensor as kernels take it."""
    if name == "tree_mask":
        return on_16_bytes(x).expand(batch, *x.shape[1:])
    if x.stride(-1) != 1:
        x = x.contiguous()
    return on_16_bytes(x) if name == "prefix_lens" else on_16_bytes(x).expand(batch, x.shape[1])


def document_scratch(batch: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int, int]:
    """The shape of `doc_tiles`, in which kernels note the ids of tiles; int64."""
    return batch, 8, -(-max(seqlen_q, seqlen_k) // DOCUMENT_ROWS)
