"""Exchanges between ranks, on any backend: what is sent lies contiguous, sizes may differ, and a
rank that fails is named on the others."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attngen.errors import RankError, SpecError
from attngen.values import shown

# Its name since torch 2.13, or the one before.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_of(group: Any) -> Any:
    """The process group that a caller names: itself, a DeviceMesh's, or the world's.

    Raises:
        SpecError: there is no process group, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise SpecError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first,"
            " or use attngen.attention on one device"
        )
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise SpecError(
            f"rank {dist.get_rank()} is not in the group; call on the ranks of the group alone"
        )
    if isinstance(group, dist.ProcessGroup):
        return group
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        return group.get_group() if group.ndim == 1 else _flat_group(group)
    raise SpecError(
        f"group must be a torch.distributed ProcessGroup or a DeviceMesh, got {shown(group)}"
    )


_FLAT: dict[Any, Any] = {}


def _flat_group(mesh: Any) -> Any:
    """The group of all ranks of a mesh of several dims; made once, by all of them."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    if list(ranks) != sorted(ranks):
        raise SpecError(
            f"the ranks of the mesh must ascend along its rows, and from row to row, got {ranks}; "
            "groups number their members so"
        )
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    if ranks not in _FLAT:
        _FLAT[ranks] = mesh._flatten().get_group()
    return _FLAT[ranks]


def check_device(group: Any, name: str, x: Tensor) -> None:
    """Can the group send what lies on this device?"""
    try:
        group._get_backend(x.device)
    except RuntimeError as error:
        config = dist.get_backend_config(group)
        raise SpecError(
            f"{name} is on {x.device}, but the process group was made for {config}; move {name}, "
            'or call init_process_group or new_group with backend="cpu:gloo,cuda:nccl"'
        ) from error


def resolve(name: str) -> Any:
    """The group of a name, as `group.group_name` gives it."""
    find: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009  (not exported)
    return find(name)


@contextmanager
def explained(what: str, group: Any, wanted: str) -> Iterator[None]:
    """Say which rank waited for what when an exchange fails."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, (RankError, SpecError)):
            raise
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RankError(
            f"{what} on rank {rank} of {world} (global rank {dist.get_rank()}): {wanted} did not "
            f"come ({lines[0][:200]}); another rank failed, or made no such call: its own output "
            "says why. How long to wait is init_process_group(timeout=) or new_group(timeout=)"
        ) from error


def _limit(group: Any) -> Any:
    """How long a CPU group waits: its messages between two ranks alone would wait as long as was
    said when it was made, whatever was set since."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None


class Message(NamedTuple):
    """Tensors that go from one rank of a group to another."""

    source: int
    target: int
    block: int


class Pending:
    """Messages under way; `wait` makes what was received safe to read."""

    def __init__(self, works: list[Any], held: list[Tensor], group: Any, what: str, wanted: str):
        self.works, self.held, self.group = works, held, group
        self.what, self.wanted = what, wanted

    def wait(self) -> None:
        limit = _limit(self.group) if self.held and self.held[0].is_cpu else None
        with explained(self.what, self.group, self.wanted):
            for work in self.works:
                work.wait() if limit is None else work.wait(limit)
        self.works, self.held = [], []


def post(
    messages: Sequence[Message],
    outgoing: dict[int, list[Tensor]],
    incoming: dict[int, list[Tensor]],
    group: Any,
    what: str,
    wanted: str,
) -> Pending:
    """Begin one step's messages, all of them known to all ranks, in one order on each.

    Args:
        messages: of all ranks.
        outgoing: by block, what this rank sends of it.
        incoming: by block, where to put what this rank receives.
    """
    rank = dist.get_rank(group)
    ops, held = [], []
    for message in messages:
        if message.source == rank:
            to = dist.get_global_rank(group, message.target)
            for x in outgoing[message.block]:
                ops.append(dist.P2POp(dist.isend, x, to, group))
                held.append(x)
        elif message.target == rank:
            source = dist.get_global_rank(group, message.source)
            for x in incoming[message.block]:
                ops.append(dist.P2POp(dist.irecv, x, source, group))
                held.append(x)
    works: list[Any] = []
    if ops:
        with explained(what, group, wanted):
            works = dist.batch_isend_irecv(ops)
    return Pending(works, held, group, what, wanted)


def all_gather(x: Tensor, shapes: Sequence[tuple[int, ...]], group: Any) -> list[Tensor]:
    """x of every rank, whose shapes may differ; x is contiguous."""
    if all(shape == shapes[0] for shape in shapes):
        made = x.new_empty((len(shapes), *shapes[0]))
        with explained("all-gather", group, "a shard"):
            _gather(made.view(-1), x.view(-1), group=group)
        return list(made.unbind(0))
    sizes = [_size(shape) for shape in shapes]
    made = x.new_empty(sum(sizes))
    with explained("all-gather", group, "a shard"):
        flat = x.view(-1).repeat(len(shapes))
        dist.all_to_all_single(made, flat, sizes, [x.numel()] * len(shapes), group=group)
    return [part.view(shape) for part, shape in zip(made.split(sizes), shapes, strict=True)]


def all_to_all(
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: Any,
) -> list[list[Tensor]]:
    """Send to each rank its tensors, all of one dtype; receive those of `shapes` from each."""
    sent = [sum(x.numel() for x in each) for each in parts]
    sizes = [sum(_size(shape) for shape in each) for each in shapes]
    like = next(x for each in parts for x in each)
    flat = torch.cat([x.reshape(-1) for each in parts for x in each])
    made = like.new_empty(sum(sizes))
    with explained("all-to-all", group, "a part"):
        dist.all_to_all_single(made, flat, sizes, sent, group=group)
    found = []
    for part, each in zip(made.split(sizes), shapes, strict=True):
        split = part.split([_size(shape) for shape in each])
        found.append([x.view(shape) for x, shape in zip(split, each, strict=True)])
    return found


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


_AGREED: dict[str, set[int]] = {}
_MOST = 4096


def check_agreement(
    group: Any, kind: str, numbers: str, seed: Tensor | None, device: torch.device
) -> None:
    """The first call of its kind: do all ranks ask for the same? One small all-gather, and a wait.

    A rank that asked for something else would wait for messages that never come, or take wrong ones
    for its own. ATTNGEN_CHECK_RANKS=0 leaves all but the first check of a group out.

    Args:
        kind: what decides on messages.
        numbers: what may change from call to call (a dropout on a schedule), compared all the same.
        seed: int64 (1,), compared too.
    """
    known = _AGREED.setdefault(group.group_name, set())
    digest = _digest(kind)
    if digest in known or (known and os.environ.get("ATTNGEN_CHECK_RANKS") == "0"):
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    mine = torch.zeros(2, dtype=torch.int64, device=device)
    mine[0] = _digest(f"{kind}, {numbers}")
    if seed is not None:
        mine[1] = seed[0]
    world = dist.get_world_size(group)
    with explained("context parallelism", group, "the first call"):
        found = torch.stack(all_gather(mine, [(2,)] * world, group)).tolist()
    if any(x != found[0] for x in found):
        texts: list[Any] = [None] * world
        text = f"{kind}, {numbers}"
        if seed is not None:
            text += f", dropout_seed {found[dist.get_rank(group)][1]}"
        with explained("context parallelism", group, "the first call"):
            dist.all_gather_object(texts, text, group=group)
        said = "; ".join(f"rank {n}: {each}" for n, each in enumerate(texts))
        raise SpecError(
            f"the ranks of the group ask for different attentions: {said}; call with equal options "
            "and whole lengths on all, and pass seqlen_q_total= and seqlen_k_total= where shards "
            "have unequal lengths"
        )
    if len(known) >= _MOST:
        known.clear()
    known.add(digest)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
