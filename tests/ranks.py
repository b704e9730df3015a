"""One pool of rank processes for a whole test session: gloo, worlds of 2, 3 and 4 as subgroups."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from typing import Any

WORLD = 4
GROUPS = {2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}
"""Global ranks of each world: a rank's place in its group is not its global one."""
TIMEOUT_S = 60
PATIENCE_S = 120

_pool: Pool | None = None
spare: list[Any] = []
"""In a rank process: groups of world 3 that a test may break."""


class Pool:
    """Rank processes that wait for functions to run."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rank_cases"])  # torch is imported once for all ranks
        folder = tempfile.mkdtemp(prefix="attngen-ranks-")
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            arguments = (rank, f"file://{folder}/store", theirs, list(sys.path))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, world: int, function: str, **named: Any) -> list[Any]:
        """What `module:function(group, **named)` returns on each rank of a world.

        Raises:
            AssertionError: it failed on some rank; has the tracebacks.
        """
        members = GROUPS[world]
        environment = {x: y for x, y in os.environ.items() if x.startswith("ATTNGEN_")}
        for rank in members:
            self.pipes[rank].send((world, function, environment, named))
        found, failed = [], []
        for rank in members:
            if not self.pipes[rank].poll(PATIENCE_S):
                for process in self.processes:  # where they are goes to stderr
                    os.kill(process.pid, signal.SIGUSR1)
                time.sleep(1)
                self.close()
                raise AssertionError(f"rank {rank} did not answer in {PATIENCE_S} s; {failed}")
            ok, value = self.pipes[rank].recv()
            if not ok:
                failed.append(f"rank {members.index(rank)} of {world}:\n{value}")
            found.append(value)
        assert not failed, "\n".join(failed)
        return found

    def close(self) -> None:
        global _pool
        for process in self.processes:
            process.kill()
        _pool = None


def pool() -> Pool:
    """The session's."""
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(_pool.close)
    return _pool


def _serve(rank: int, store: str, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    groups = {}
    for world, members in GROUPS.items():
        groups[world] = dist.new_group(members, timeout=timedelta(seconds=TIMEOUT_S))
    for _ in range(3):
        spare.append(dist.new_group(GROUPS[3]))
    while True:
        try:
            world, function, environment, named = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        module, _, name = function.partition(":")
        try:
            made = getattr(importlib.import_module(module), name)
            pipe.send((True, made(groups[world], **named)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
