"""How an attention is spread over ranks: what a caller says, and what the op is told."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from attngen.distributed import comm
from attngen.distributed.layouts import check_layout
from attngen.errors import SpecError
from attngen.values import one_of, shown

METHODS = ("ring", "ulysses", "usp", "allgather")
HOPS = ("kernel", "torch")


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """How the rows of a sequence are spread over ranks, for `attngen.compile(spec,
    context_parallel=...)`.

    Args:
        group: a process group or a DeviceMesh of one dim; None is the world. For method "usp" a
            DeviceMesh of two dims: the ring's, then Ulysses'.
        method: "ring": keys and values go round, one hop while another computes. "ulysses":
            all-to-all to shards of heads, and back. "usp": Ulysses within a mesh's rows, rings
            across them. "allgather": keys and values of all ranks on each.
        layout: which rows a rank holds: "contiguous", "zigzag" or "striped", over all ranks of the
            group, in the order of a mesh's dims.
        hop: what computes: "kernel", or "torch": plain PyTorch with score matrices whole, for tests
            on a CPU.
    """

    group: Any = None
    method: str = "ring"
    layout: str = "contiguous"
    hop: str = "kernel"

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("hop", self.hop, HOPS)
        check_layout(self.layout)

    @property
    def plan(self) -> str:
        """What the op is told, the same on all ranks but for the names of groups."""
        flat = comm.group_of(self.group)
        names = [flat.group_name]
        if self.method == "usp":
            mesh = self.group
            if not hasattr(mesh, "mesh_dim_names") or mesh.ndim != 2:
                raise SpecError(
                    'method="usp" needs a DeviceMesh of two dims as group, the ring\'s and then '
                    f"Ulysses', got {shown(mesh)}; make one with "
                    'torch.distributed.device_mesh.init_device_mesh("cuda", (rings, ulysses))'
                )
            names += [mesh.get_group(n).group_name for n in range(2)]
        words = {"groups": names, "method": self.method, "layout": self.layout, "hop": self.hop}
        return json.dumps(words)


class Plan(NamedTuple):
    """A plan, read."""

    group: Any
    ring: Any
    """The group that keys go round in; None without."""
    ulysses: Any
    """The group that heads are shared out in; None without."""
    method: str
    layout: str
    hop: str

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def title(self) -> str:
        return f"{self.method} attention"


@functools.lru_cache(maxsize=256)
def words_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def read(text: str) -> Plan:
    """The plan of a text; groups are looked up in each call, for names may be given anew."""
    words = words_of(text)
    groups = [comm.resolve(name) for name in words["groups"]]
    ring = ulysses = None
    if words["method"] == "usp":
        _, ring, ulysses = groups
    elif words["method"] == "ring":
        ring = groups[0]
    elif words["method"] == "ulysses":
        ulysses = groups[0]
    return Plan(groups[0], ring, ulysses, words["method"], words["layout"], words["hop"])
