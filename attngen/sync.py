"""Ranks of one training run resolve configs from the same records: those of rank 0."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from attngen import resolve
from attngen.errors import StoreError
from attngen.records import Record, shipped, warn_once
from attngen.store import Store


def sync_configs(group: Any = None) -> None:
    """Make every rank use the records of rank 0, so that no two ranks run different kernels.

    Call it on all ranks, after `init_process_group` and before the first attention: what each rank
    looks up from then on it finds in rank 0's database and shipped records, as they are now. (Ranks
    with different GPUs may still differ.) `attngen.reload()` undoes it. Without torch.distributed
    it does nothing.

    Args:
        group: the process group; its rank 0 is the source. Default: the world.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    source = 0 if group is None else dist.get_global_rank(group, 0)
    records: list[Any] = [None]
    if dist.get_rank() == source:
        records = [[[r.to_line() for r in each] for each in (_winners(), shipped())]]
    dist.broadcast_object_list(records, src=source, group=group)
    user, theirs = ([Record.from_line(line) for line in lines] for lines in records[0])
    resolve.freeze(user, theirs)


def _winners() -> list[Record]:
    """The user's records; none, after a warning, where the database fails: the others wait."""
    try:
        with Store.open(readonly=True) as store:
            return store.winners()
    except StoreError as error:
        warn_once(f"{error}; the ranks go on with the shipped records")
        return []
