"""What a call brings, as views that the op takes, and its results as the caller has them: layouts,
packed sequences, nested tensors, keys of several lengths and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from attngen import packed, paged
from attngen.checks import heads_first
from attngen.errors import SpecError
from attngen.jagged import Jagged, are_jagged, jagged
from attngen.masks import check_masks
from attngen.shard import Shard
from attngen.spec_rules import AUX

Offsets = tuple[Any, Any, Any, Any]
"""In the order of `spec.PACKED_ARGS`."""


class Operands(NamedTuple):
    """A call's tensors, (batch, heads, seqlen, dim), and what says how many rows they use."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_bshd: bool
    lengths: tuple[Tensor, ...] = ()
    """cu_seqlens_q of packed queries over pages; seqused_k, and block_table if there is one."""
    sequences: packed.Packed | None = None
    nested: Jagged | None = None

    @property
    def packs_queries(self) -> bool:
        """Are queries packed, but keys in pages?"""
        return len(self.lengths) > 2

    @property
    def num_seqs(self) -> int | None:
        """How many packed sequences there are."""
        if self.packs_queries:
            return self.lengths[0].shape[0] - 1
        return None if self.sequences is None else self.sequences.num_seqs

    def checked_masks(self, given: Sequence[Any], totals: tuple[Any, Any]) -> dict[str, Tensor]:
        """prefix_lens, doc_ids_q, doc_ids_k and tree_mask as the op takes them; `totals` are the
        whole lengths that a shard names."""
        if self.lengths:
            table = self.lengths[-1] if len(self.lengths) > 1 else None
            totals = (self.q.shape[2], paged.capacity(self.k, table))
        prefix_lens, doc_ids_q, doc_ids_k, tree_mask = given
        return check_masks(
            self.q, self.k, prefix_lens, doc_ids_q, doc_ids_k, tree_mask, totals, self.num_seqs
        )

    def results(
        self,
        out: Tensor,
        lse: Tensor,
        sides: Sequence[Tensor],
        return_lse: bool,
        return_aux: tuple[str, ...],
    ) -> Any:
        """What the call returns."""
        names = in_order(return_aux)
        if self.is_bshd:
            out = out.transpose(1, 2)
        elif self.sequences is not None or self.packs_queries:
            out, lse = packed.rows_first(out, lse)
            sides = packed.side_rows_first(names, sides)
        if self.nested is not None:
            out, lse = self.nested.nested(out), self.nested.nested(lse)
            pairs = zip(names, sides, strict=True)
            sides = [x if name == "max_logit" else self.nested.nested(x) for name, x in pairs]
        if return_aux:
            found = {"lse": lse, **dict(zip(names, sides, strict=True))}
            return out, {name: found[name] for name in return_aux}
        return (out, lse) if return_lse else out


def operands(
    q: Any,
    k: Any,
    v: Any,
    layout: Any,
    offsets: Offsets,
    block_table: Any,
    shard: Shard,
    by_key: dict[str, Any],
    *,
    has_lengths: bool,
    is_packed: bool,
) -> Operands:
    """A call's q, k and v, (batch, heads, seqlen, dim) by its layout.

    Args:
        by_key: what may have an entry for each key, by name: pages refuse it.
        has_lengths: seqused_k, the last of the offsets, counts the keys of batch rows.
        is_packed: sequences are packed or nested.

    Raises:
        SpecError: offsets, tables and tensors do not belong together.
        UnsupportedSpecError: what is beside them is not built.
    """
    lengths: tuple[Tensor, ...] = ()
    if has_lengths:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = offsets
        lengths = paged.lengths(seqused_k, block_table, cu_seqlens_q, cu_seqlens_k, seqused_q)
        paged.refuse_beside(shard, block_table, **by_key)
        offsets = (cu_seqlens_q, cu_seqlens_k, seqused_q, None)
        if len(lengths) > 2:
            if layout == "bshd":
                raise SpecError(
                    'cu_seqlens_q with layout="bshd": packed queries have the layout "thd", q '
                    "(total_q, heads, dim); leave layout out"
                )
            return Operands(paged.queries_first(q), *paged.heads_first(k, v), False, lengths)
        if layout == "thd":
            raise SpecError(
                'layout="thd" with block_table needs cu_seqlens_q, which says where the queries of '
                "each sequence begin; pass it, int32 (num_seqs + 1,), on q's device"
            )
    if is_packed:
        nested = None
        if not has_lengths and are_jagged(q, k, v):
            nested = jagged(q, k, v, layout, *offsets)
            (q, k, v), offsets, layout = nested.tensors, nested.offsets, "thd"
        sequences = packed.offsets(layout, *offsets)
        packed.refuse_beside(by_key["attn_mask"], by_key["bias"], shard)
        q, k, v = packed.heads_first(q, k, v)
        return Operands(q, k, v, False, lengths, sequences, nested)
    is_bshd = isinstance(layout, str) and layout == "bshd"
    if block_table is not None:
        k, v = paged.heads_first(k, v)
        q = q.transpose(1, 2) if is_bshd else q
    elif is_bshd:
        q, k, v = heads_first(q, k, v)
    if not (offsets[0] is offsets[1] is offsets[2] is offsets[3] is None):
        packed.refuse_offsets(layout, *offsets)
    return Operands(q, k, v, is_bshd, lengths)


def in_order(aux: tuple[str, ...]) -> list[str]:
    """Side outputs in the order of the op's results."""
    return [name for name in AUX if name in aux]


def counts_keys(q: Any, layout: Any, *offsets: Any) -> bool:
    """Has seqused_k batch rows to count the keys of, not packed sequences?"""
    if not all(x is None for x in offsets) or layout == "thd":
        return False
    return isinstance(q, Tensor) and not q.is_nested and q.dim() != 3
