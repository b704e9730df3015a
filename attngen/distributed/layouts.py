"""Which rows of a sequence each rank holds, and what is made of that: shards, positions, labels.

A shard is a list of pieces, runs of rows `start + i * step`, one behind another. Layouts:
"contiguous": rank r holds part r of `world`. "zigzag": of 2 * world parts, rank r holds part r and
the one as far from the end, which balances causal attention. "striped": rank r holds every row that
leaves r over when divided by `world`. Lengths need not divide: the first parts have a row more.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attngen.distributed import comm
from attngen.errors import SpecError, nearest
from attngen.values import shown, whole

LAYOUTS = ("contiguous", "zigzag", "striped")


class Piece(NamedTuple):
    """Rows `start + i * step` of the whole sequence, i < size."""

    start: int
    step: int
    size: int

    @property
    def last(self) -> int:
        return self.start + (self.size - 1) * self.step

    @property
    def rows(self) -> range:
        return range(self.start, self.last + 1, self.step)


Pieces = tuple[Piece, ...]


def check_layout(layout: Any) -> str:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        hint = nearest(layout, LAYOUTS) if isinstance(layout, str) else ""
        raise SpecError(
            f"layout must say which rows a rank holds, one of {', '.join(LAYOUTS)}, got "
            f"{shown(layout)}{hint}; the order of dims of q is tensor_layout="
        )
    return layout


def _part(seqlen: int, parts: int, index: int) -> Piece:
    """Part `index` of `parts`; the first ones have a row more."""
    size, more = divmod(seqlen, parts)
    return Piece(index * size + min(index, more), 1, size + (index < more))


@functools.lru_cache(maxsize=4096)
def pieces(layout: str, rank: int, world: int, seqlen: int) -> Pieces:
    """The rows that a rank holds, in the order of its shard; none of them empty."""
    if layout == "striped":
        found = [Piece(rank, world, len(range(rank, seqlen, world)))]
    elif layout == "contiguous":
        found = [_part(seqlen, world, rank)]
    else:
        found = [_part(seqlen, 2 * world, n) for n in (rank, 2 * world - 1 - rank)]
    return joined(piece for piece in found if piece.size)


def joined(found: Iterable[Piece]) -> Pieces:
    """The same rows in fewer pieces, where one goes on as the one before it."""
    made: list[Piece] = []
    for piece in found:
        last = made[-1] if made else None
        if last and last.step == piece.step == 1 and last.last + 1 == piece.start:
            made[-1] = Piece(last.start, 1, last.size + piece.size)
        else:
            made.append(piece)
    return tuple(made)


def length(found: Pieces) -> int:
    """How many rows these are."""
    return sum(piece.size for piece in found)


def rows_of(found: Pieces) -> list[int]:
    return [row for piece in found for row in piece.rows]


class Order(NamedTuple):
    """How rows of several shards, one behind another, are put in the order of the sequence."""

    chunks: tuple[tuple[int, int], ...]
    """(place, count) of runs of rows, in the order of the sequence; none where stripes mix."""
    shards: tuple[Pieces, ...]


@functools.lru_cache(maxsize=256)
def in_order(shards: tuple[Pieces, ...]) -> tuple[Pieces, Order | None]:
    """The pieces of several shards in the order of the sequence, and how to get there; None if all
    rows stay where they are. Some stripes of several stay, too: they make no runs of rows."""
    held = [piece for shard in shards for piece in shard]
    if any(piece.step > 1 for piece in held):
        count = sum(piece.size for piece in held)
        if max((piece.last for piece in held), default=-1) + 1 != count:
            return tuple(held), None
        return joined([Piece(0, 1, count)]), Order((), shards)
    starts, at = [], 0
    for piece in held:
        starts.append(at)
        at += piece.size
    by_start = sorted(zip(held, starts, strict=True))
    found = joined(piece for piece, _ in by_start)
    if [start for _, start in by_start] == starts:
        return found, None
    return found, Order(tuple((start, piece.size) for piece, start in by_start), shards)


@functools.lru_cache(maxsize=16)
def _index(shards: tuple[Pieces, ...], device: torch.device, back: bool) -> Tensor:
    each = [
        torch.arange(p.start, p.last + 1, p.step, device="cpu") for held in shards for p in held
    ]
    rows = torch.cat(each)
    return (rows if back else torch.argsort(rows)).to(device)


def reordered(x: Tensor, order: Order | None, dim: int, *, back: bool = False) -> Tensor:
    """x with its rows in the order of the sequence; `back`: in the order of shards again."""
    if order is None:
        return x
    if not order.chunks:
        return x.index_select(dim, _index(order.shards, x.device, back))
    chunks = list(order.chunks)
    if back:
        places, at = [], 0
        for place, count in chunks:
            places.append((place, at, count))
            at += count
        chunks = [(at, count) for _, at, count in sorted(places)]
    return torch.cat([x.narrow(dim, place, count) for place, count in chunks], dim)


# ---- what users call ------------------------------------------------------------------------


def positions(
    layout: str,
    rank: int,
    world: int,
    seqlen: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which rows of the whole sequence a rank holds: int64 (rows of the shard,), for rotary
    embeddings and whatever else depends on position.

    Args:
        layout: "contiguous", "zigzag" or "striped".
        rank, world: place in the group of context parallelism, and its size.
        seqlen: length of the whole sequence; it need not divide.
    """
    layout, seqlen, world = check_layout(layout), whole("seqlen", seqlen), whole("world", world, 1)
    found = pieces(layout, whole("rank", rank, 0, world - 1), world, seqlen)
    each = [torch.arange(p.start, p.last + 1, p.step, device=device) for p in found]
    return torch.cat(each) if each else torch.arange(0, device=device)


def shard(
    x: Tensor,
    layout: str,
    *,
    dim: int,
    group: Any = None,
    rank: int | None = None,
    world: int | None = None,
) -> Tensor:
    """This rank's rows of a whole tensor, which every rank has. Differentiable.

    Args:
        x: any tensor whose dim `dim` is the whole sequence.
        layout: "contiguous", "zigzag" or "striped".
        group: the group of context parallelism, or a DeviceMesh; default: the world.
        rank, world: instead of a group, without torch.distributed.
    """
    layout = check_layout(layout)
    rank, world = _place(group, rank, world)
    found = pieces(layout, rank, world, x.shape[dim])
    index: list[Any] = [slice(None)] * x.dim()
    each = []
    for piece in found:
        index[dim] = slice(piece.start, piece.last + 1, piece.step)
        each.append(x[tuple(index)])
    if not each:
        return x.narrow(dim, 0, 0).contiguous()
    return torch.cat(each, dim) if len(each) > 1 else each[0].contiguous()


def _place(group: Any, rank: int | None, world: int | None) -> tuple[int, int]:
    if rank is not None or world is not None:
        if group is not None or rank is None or world is None:
            raise SpecError(
                f"shard() takes a group, or rank and world, got {group=}, {rank=}, {world=}"
            )
        world = whole("world", world, 1)
        return whole("rank", rank, 0, world - 1), world
    flat = comm.group_of(group)
    return dist.get_rank(flat), dist.get_world_size(flat)


def unshard(
    x: Tensor, layout: str, *, dim: int, seqlen: int | None = None, group: Any = None
) -> Tensor:
    """The whole of which every rank holds a shard, on every rank: all-gather.

    Differentiable: the gradient of a shard is the sum of what all ranks hand back for its rows.

    Args:
        x: this rank's shard.
        layout: as the shards were cut.
        seqlen: length of the whole; default: the rows of this shard times the number of ranks.
            Shards of unequal length need it.
        group: the group of context parallelism, or a DeviceMesh; default: the world.
    """
    layout, flat = check_layout(layout), comm.group_of(group)
    comm.check_device(flat, "x", x)
    rank, world = dist.get_rank(flat), dist.get_world_size(flat)
    dim = dim % x.dim()
    seqlen = whole("seqlen", x.shape[dim] * world if seqlen is None else seqlen)
    check_rows("x", x.shape[dim], layout, rank, world, seqlen)
    found: Tensor = _Unshard.apply(x, layout, dim, seqlen, flat)  # type: ignore[no-untyped-call]  # torch types none
    return found


def check_rows(name: str, rows: int, layout: str, rank: int, world: int, seqlen: int) -> None:
    """A rank holds as many rows as its layout says."""
    wanted = length(pieces(layout, rank, world, seqlen))
    if rows != wanted:
        total = "seqlen" if name == "x" else f"seqlen_{name}_total"
        raise SpecError(
            f"{name} has {rows} rows on rank {rank} of {world}, but the {layout} layout of {seqlen}"
            f" rows gives it {wanted}; cut it with attngen.distributed.shard, and pass {total}=, "
            "the length of the whole sequence, where that is no multiple of what a rank holds"
        )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: str, dim: int, seqlen: int, group: Any) -> Tensor:
        ctx.of = layout, dim, group
        world = dist.get_world_size(group)
        shards = tuple(pieces(layout, r, world, seqlen) for r in range(world))
        return gathered_rows(x, dim, shards, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        layout, dim, group = ctx.of
        total = grad.contiguous()
        total = total.clone() if total is grad else total
        with comm.explained("unshard", group, "a gradient"):
            dist.all_reduce(total, group=group)
        return shard(total, layout, dim=dim, group=group), None, None, None, None


def gathered_rows(x: Tensor, dim: int, shards: Sequence[Pieces], group: Any) -> Tensor:
    """The rows of all ranks along `dim`, in the order of the sequence."""
    first = x.movedim(dim, 0)
    shapes = [(length(held), *first.shape[1:]) for held in shards]
    rows = torch.cat(comm.all_gather(first.contiguous(), shapes, group))
    held, order = in_order(tuple(shards))
    rows = reordered(rows, order, 0)
    if order is None and len(held) > 1:  # stripes of a part of the ranks: not of a whole sequence
        raise AssertionError("the shards of a group make no whole")
    return rows.movedim(0, dim)


def shift_labels(
    labels: Tensor,
    layout: str,
    *,
    dim: int = -1,
    seqlen: int | None = None,
    group: Any = None,
    doc_ids: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """What each row of this rank's shard has to predict: the label of the row behind it in the
    whole sequence, which another rank may hold.

    Args:
        labels: this rank's shard, integers; dim `dim` is the sequence.
        layout: as the shards were cut.
        seqlen: length of the whole, which shards of unequal length need.
        doc_ids: a shard likewise, of the shape of labels: the last row of a document predicts
            nothing.
        ignore_index: the label of rows that predict nothing; the whole's last row is one. Divide
            the sum of losses by the count over all ranks of rows that predict, not by a rank's own.
    """
    whole_labels = unshard(labels, layout, dim=dim, seqlen=seqlen, group=group)
    dim, rows = dim % labels.dim(), whole_labels.shape[dim]
    behind = whole_labels.roll(-1, dim)
    ends = torch.arange(rows, device=labels.device) == rows - 1
    ends = ends.view([rows if n == dim else 1 for n in range(labels.dim())])
    if doc_ids is not None:
        ids = unshard(doc_ids, layout, dim=dim, seqlen=seqlen, group=group)
        ends = ends | (ids.roll(-1, dim) != ids)
    return shard(behind.masked_fill(ends, ignore_index), layout, dim=dim, group=group)
