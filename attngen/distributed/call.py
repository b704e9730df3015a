"""One call of an attention over ranks, on concrete tensors: who has which rows and heads, at each
stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attngen.distributed import comm
from attngen.distributed.exchange import Exchange
from attngen.distributed.heads import Share, runs
from attngen.distributed.layouts import (
    Pieces,
    check_rows,
    gathered_rows,
    in_order,
    length,
    pieces,
    reordered,
)
from attngen.distributed.plan import Plan, read
from attngen.distributed.work import Work
from attngen.identity import parsed


class Call:
    """What a plan and a text key make of concrete tensors on this rank.

    Args:
        text: the plan, as `plan.read` takes it.
        key: the spec's text key.
        heads: query and kv heads of the whole attention.
        extra, scalars, ints: as `attngen::fwd` takes them.
        totals: lengths of the whole sequences of q and k.
    """

    def __init__(
        self,
        text: str,
        key: str,
        heads: tuple[int, int],
        extra: Sequence[Tensor | None],
        scalars: Sequence[float],
        ints: Sequence[int],
        totals: tuple[int, int],
    ) -> None:
        self.plan: Plan = read(text)
        self.key, self.spec, self.totals = key, parsed(key), totals
        plan, spec = self.plan, self.spec
        self.scalars = dict(zip(spec.scalar_args, scalars, strict=True))
        self.ints = dict(zip(spec.int_args, ints, strict=True))
        self.terms = {
            name: x for name, x in zip(spec.tensor_args, extra, strict=True) if x is not None
        }
        width = 1 if plan.ulysses is None else dist.get_world_size(plan.ulysses)
        self.rank, self.world = plan.rank, plan.world
        rings = self.world // width
        q_all, k_all = (
            [pieces(plan.layout, r, self.world, total) for r in range(self.world)]
            for total in totals
        )
        self.q_rows, self.k_rows = tuple(q_all), tuple(k_all)
        self.exchange: Exchange | None = None
        if plan.ulysses is not None:
            first = self.rank // width * width
            members = slice(first, first + width)
            own = (self.q_rows[members], self.k_rows[members])
            self.exchange = Exchange(plan.ulysses, self.rank - first, *own, *heads)
        # Of the ring, or of this rank alone where nothing goes round.
        self.q_shards: tuple[Pieces, ...] = self.q_rows
        self.k_shards: tuple[Pieces, ...] = self.k_rows
        if width > 1:
            self.q_shards, self.k_shards = (
                tuple(in_order(rows[n * width : (n + 1) * width])[0] for n in range(rings))
                for rows in (self.q_rows, self.k_rows)
            )
        if plan.ring is None and plan.method == "allgather":
            self.q_shards = (self.q_rows[self.rank],)
            self.k_shards = (in_order(self.k_rows)[0],)
        self.heads = Share((0, heads[0]), (0, heads[1]))
        self.head_start = self.ints.get("head_start", 0)
        if self.exchange is not None:
            self.heads = self.exchange.mine
            self.head_start += self.heads.q[0]
        self.group_size = heads[0] // heads[1]

    def check(self, q: Tensor, k: Tensor, v: Tensor, draws: bool, wants_lse: bool) -> None:
        """Lengths are those of the layout, and all ranks ask for the same."""
        comm.check_device(self.plan.group, "q", q)
        for name, x, total in (("q", q, self.totals[0]), ("k", k, self.totals[1])):
            check_rows(name, x.shape[2], self.plan.layout, self.rank, self.world, total)
        plan, sizes = self.plan, (q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        said = (
            f"{plan.method}, {plan.layout} of {self.totals[0]} and {self.totals[1]} rows, "
            f"batch, heads and dims {sizes}, {q.dtype}, {self.key}, {self.ints}"
        )
        said += ", with a dropout_seed" if self.spec.has_dropout and not draws else ""
        said += ", with lse" if self.exchange is not None and wants_lse else ""
        numbers = ", ".join(f"{name} {x}" for name, x in self.scalars.items())
        seed = None if draws else self.terms.get("dropout_seed")
        for group in dict.fromkeys((plan.group, plan.ring, plan.ulysses)):
            if group is not None:
                comm.check_agreement(group, said, numbers, seed, q.device)

    def work(self) -> Work:
        """For the heads of this rank, and with the documents of its queries."""
        first, last = self.heads.q
        terms = dict(self.terms)
        terms.pop("doc_ids_k", None)
        if self.exchange is not None:
            for name in ("alibi_slopes", "sinks"):
                if name in terms:
                    terms[name] = terms[name][:, first:last]
            if "doc_ids_q" in terms:
                terms["doc_ids_q"] = self.exchange.ids(terms["doc_ids_q"], "q")
        own = runs(self.heads, self.group_size)
        numbers = (self.scalars, self.ints, self.totals)
        return Work(self.key, *numbers, terms, own, self.head_start, self.plan.hop)

    def ids(self) -> Tensor | None:
        """Documents of this rank's keys, as they go round."""
        ids = self.terms.get("doc_ids_k")
        if ids is None:
            return None
        if self.exchange is not None:
            return self.exchange.ids(ids, "k")
        return self.gathered(ids.contiguous(), 1)

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """Keys of all ranks, if the method wants them here."""
        if self.plan.method != "allgather":
            return x.contiguous()
        return gathered_rows(x, dim, self.k_rows, self.plan.group).contiguous()

    def scattered(self, dk: Tensor, dv: Tensor) -> list[Tensor]:
        """The gradients of this rank's keys, from what each has of all keys."""
        if self.plan.method != "allgather":
            return [dk, dv]
        order = in_order(self.k_rows)[1]
        counts = [length(rows) for rows in self.k_rows]
        split = [reordered(x.float(), order, 2, back=True).split(counts, 2) for x in (dk, dv)]
        parts = [[each[n] for each in split] for n in range(self.world)]
        shapes = [[tuple(x.shape) for x in parts[self.rank]]] * self.world
        found = comm.all_to_all(parts, shapes, self.plan.group)
        return [torch.stack([each[n] for each in found]).sum(0) for n in range(2)]

    @property
    def ring(self) -> tuple[tuple[Pieces, ...], tuple[Pieces, ...], Any, str]:
        """What `ring.forward` and `ring.backward` take after the tensors."""
        q_shards, k_shards = self.q_shards, self.k_shards
        return q_shards, k_shards, self.plan.ring, self.plan.title
