"""What a call's shards say of the whole: its lengths, and the documents of packed sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attngen.checks import check_place
from attngen.distributed import comm
from attngen.distributed.layouts import positions
from attngen.distributed.plan import words_of
from attngen.errors import DtypeError, SpecError
from attngen.values import whole


def totals_of(
    plan: str, q: Tensor, k: Tensor, total_q: int | None, total_k: int | None
) -> tuple[int, int]:
    """Lengths of the whole sequences of q and k."""
    world = world_of(plan)
    if total_q is None:
        total_q = q.shape[2] * world
    if total_k is None:
        total_k = total_q if k.shape[2] == q.shape[2] else k.shape[2] * world
    step = "it is the length of the whole sequence"
    q_total = whole("seqlen_q_total", total_q, step=step)
    return q_total, whole("seqlen_k_total", total_k, step=step)


def world_of(plan: str) -> int:
    return dist.get_world_size(comm.resolve(words_of(plan)["groups"][0]))


def _place_of(plan: str) -> tuple[str, int, int]:
    words = words_of(plan)
    group = comm.resolve(words["groups"][0])
    return words["layout"], dist.get_rank(group), dist.get_world_size(group)


torch.compiler.assume_constant_result(world_of)
torch.compiler.assume_constant_result(_place_of)


def documents_of(
    plan: str,
    q: Tensor,
    totals: tuple[int, int],
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    doc_ids_q: Any,
    doc_ids_k: Any,
) -> tuple[Tensor, Tensor]:
    """Packed sequences as documents: the number of each row's sequence, of this rank's rows."""
    if cu_seqlens_q is None:
        raise SpecError(
            'layout "thd" without cu_seqlens_q: pass the offsets of the whole, int32 '
            "(num_seqs + 1), on q's device"
        )
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
        raise SpecError(
            "cu_seqlens_k must be cu_seqlens_q itself, or left out: over ranks, packed queries and "
            "keys have the same offsets"
        )
    if doc_ids_q is not None or doc_ids_k is not None:
        raise SpecError("doc_ids_q with cu_seqlens_q: sequences are the documents; leave one out")
    if totals[0] != totals[1]:
        raise SpecError(
            f"packed queries and keys must have the same rows, got {totals[0]} and {totals[1]}"
        )
    check_place("cu_seqlens_q", cu_seqlens_q, q)
    if cu_seqlens_q.dtype != torch.int32 or cu_seqlens_q.dim() != 1:
        raise DtypeError(
            f"cu_seqlens_q must be int32 (num_seqs + 1), got {cu_seqlens_q.dtype} of shape "
            f"{tuple(cu_seqlens_q.shape)}; cast it with .int()"
        )
    layout, rank, world = _place_of(plan)
    rows = positions(layout, rank, world, totals[0], device=q.device)
    ids = torch.bucketize(rows, cu_seqlens_q.long(), right=True, out_int32=True)[None]
    outside = (ids == 0) | (ids == cu_seqlens_q.shape[0])  # rows of no sequence, which see none
    return ids.masked_fill(outside, -1), ids.masked_fill(outside, -2)
