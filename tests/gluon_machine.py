"""One CTA of an sm_90 GPU on the CPU: partitions of warps, barriers and shared memory.

Partitions are threads of which one runs at a time. At every operation on shared memory or barriers
a seeded generator chooses who goes on and which asynchronous copy lands, so that a seed repeats a
run and another seed is another interleaving. What is wrong raises `Fault`:

- deadlock: nobody can go on; the message says which partition waits where, and for what;
- races: each partition has a vector clock, barriers hand clocks on, and two accesses of
  overlapping shared memory, one of them a write, must be ordered by them. A copy by TMA ends for
  those who waited for its mbarrier, the reads of a wgmma at its wait, those of a TMA store at
  `store_wait`. This finds a missing wait in whatever order things happened to run;
- proxies: what the partition's own stores wrote must pass `fence_async_shared` before wgmma or TMA
  read it; after `store_wait` only the thread that issued the store may write, until a barrier;
- barriers: too many arrivals, other participant counts, ids that Triton uses, bytes that never
  come, barriers left half full, stores and loads nobody waited for.

Not modelled: threads and warps inside a partition (Triton places their barriers), clusters,
registers, time, and races between CTAs, which run one after the other.
"""

from __future__ import annotations

import linecache
import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

SHARED_BYTES = 227 * 1024
RESERVED_BARRIERS = 5
"""Named barriers 0 .. 4 are Triton's own, for up to four partitions."""

Clock = dict[Any, int]
Box = tuple[tuple[int, int], ...]


class Fault(Exception):
    """The kernel does what the hardware does not allow, or waits for ever."""


class _Stopped(BaseException):
    """Unwinds a partition after another one has failed."""


def _join(clock: Clock, other: Clock) -> None:
    for agent, epoch in other.items():
        if clock.get(agent, 0) < epoch:
            clock[agent] = epoch


@dataclass(eq=False)
class Access:
    """One access of a box of shared memory."""

    box: Box
    writes: bool
    is_async: bool
    agent: Any
    epoch: int
    what: str
    pending: bool = False
    fenced: bool = False
    only_issuer: bool = False
    """A TMA store has read it, as so far only the thread knows that issued the store."""


@dataclass(eq=False)
class Mma:
    """One wgmma in flight, with its reads of shared memory."""

    reads: list[tuple[Allocation, Access]]
    done: bool = False


class Partition:
    """A group of warps that runs one function."""

    def __init__(self, name: str, num_warps: int, clock: Clock) -> None:
        self.name = name
        self.num_warps = num_warps
        self.clock = {**clock, name: 1}
        self.turn = threading.Semaphore(0)
        self.thread = threading.current_thread()
        self.until: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False
        self.mmas: list[Mma] = []
        self.stores: list[tuple[Allocation, Access, Copy]] = []

    def release(self) -> Clock:
        """What others learn of this partition when they acquire a barrier it arrived at."""
        snapshot = dict(self.clock)
        self.clock[self.name] += 1
        return snapshot


@dataclass(eq=False)
class MBarrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have come."""

    name: str
    count: int
    pending: int
    tx: int = 0
    completed: int = 0
    fenced: bool = False
    clock: Clock = field(default_factory=dict)
    next_clock: Clock = field(default_factory=dict)

    def arrive(self, count: int, clock: Clock) -> None:
        if count > self.pending:
            raise Fault(f"{self.name}: {count} arrivals, but the phase waits for {self.pending}")
        self.pending -= count
        _join(self.next_clock, clock)
        self.check()

    def check(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.completed += 1
            self.pending = self.count
            _join(self.clock, self.next_clock)
            self.next_clock = {}


@dataclass(eq=False)
class NamedBarrier:
    """A `bar.sync` / `bar.arrive` barrier, which counts threads."""

    count: int = 0
    threads: int = 0
    arrived: list[Partition] = field(default_factory=list)
    clock: Clock = field(default_factory=dict)
    past: list[Clock] = field(default_factory=list)


@dataclass(eq=False)
class Copy:
    """A copy by TMA that has not happened yet."""

    what: str
    happen: Callable[[], None]
    landed: bool = False


class Allocation:
    """A piece of shared memory, full of NaN, and who touched it."""

    def __init__(self, name: str, data: np.ndarray, dtype: Any, layout: Any) -> None:
        self.name = name
        self.data = data
        self.dtype = dtype
        self.layout = layout
        self.accesses: list[Access] = []
        self.barriers: dict[int, MBarrier] = {}


class Machine:
    """One CTA while it runs."""

    def __init__(self, program: tuple[int, int, int], num_warps: int, seed: int) -> None:
        self.program = program
        self.grid = (1, 1, 1)
        self.random = random.Random(seed)
        self.current = Partition("default", num_warps, {})
        self.partitions = [self.current]
        self.copies: list[Copy] = []
        self.named: dict[int, NamedBarrier] = {}
        self.allocations: list[Allocation] = []
        self.failure: BaseException | None = None

    # Partitions

    def pause(self, until: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Let others run, and go on when `until` holds."""
        me = self.current
        me.until, me.waits_for = until, waits_for
        following = self._next()
        if following is not me:
            self._hand_to(following)
            me.turn.acquire()
            if self.failure is not None:
                raise _Stopped
        me.until = None

    def _hand_to(self, partition: Partition) -> None:
        self.current = partition
        partition.turn.release()

    def _next(self) -> Partition:
        while True:
            if self.copies and self.random.random() < 0.2:
                self._land()
            ready = [p for p in self.partitions if not p.done and (p.until is None or p.until())]
            if ready:
                return self.random.choice(ready)
            if not self.copies:
                raise Fault(self._deadlock())
            self._land()

    def _land(self) -> None:
        copy = self.copies.pop(self.random.randrange(len(self.copies)))
        copy.happen()
        copy.landed = True

    def _deadlock(self) -> str:
        frames = sys._current_frames()
        lines = [
            f"  {p.name} at {location(frames[p.thread.ident or 0])}: {p.waits_for}"
            for p in self.partitions
            if not p.done
        ]
        return f"deadlock in program {self.program}\n" + "\n".join(lines)

    def specialize(
        self, functions: list[tuple[Callable[..., Any], tuple[Any, ...]]], num_warps: list[int]
    ) -> Any:
        """Run the first function in this partition and the others in new ones, to their ends."""
        first = self.current
        snapshot = first.release()
        workers = [
            Partition(f"worker {number}", warps, snapshot) for number, warps in enumerate(num_warps)
        ]
        for worker, (function, arguments) in zip(workers, functions[1:], strict=True):
            run = (worker, function, arguments)
            worker.thread = threading.Thread(target=self._work, args=run, daemon=True)
            worker.thread.start()
        self.partitions += workers
        result = None
        try:
            self.pause()
            function, arguments = functions[0]
            result = function(*arguments)
            self.pause(lambda: all(w.done for w in workers), "the other partitions to end")
        except BaseException as error:
            if self.failure is None:
                self.failure = error
        for worker in workers:
            if not worker.done:
                worker.turn.release()
            worker.thread.join()
        if self.failure is not None:
            raise self.failure
        for worker in workers:
            _join(first.clock, worker.clock)
            self._check_ended(worker)
        self.partitions = [first]
        return result

    def _work(self, me: Partition, function: Callable[..., Any], arguments: Any) -> None:
        me.turn.acquire()
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):  # numpy's settings are a thread's own
                    function(*arguments)
        except BaseException as error:
            if self.failure is None:
                self.failure = error
        me.done = True
        if self.failure is not None:
            if self.current is me:  # else the first partition is already stopping everybody
                self._hand_to(self.partitions[0])
            return
        try:
            following = self._next()
        except Fault as fault:
            self.failure = fault
            following = self.partitions[0]
        self._hand_to(following)

    def finish(self) -> None:
        """The CTA has run to its end: is anything left over?"""
        self._check_ended(self.current)
        for number, barrier in self.named.items():
            if barrier.threads:
                who = ", ".join(p.name for p in barrier.arrived)
                raise Fault(f"named barrier {number} is left half full, by {who}")
        loads = [copy.what for copy in self.copies]
        if loads:
            raise Fault(f"the CTA ends before {loads[0]} has")

    def _check_ended(self, partition: Partition) -> None:
        if partition.stores:
            what = partition.stores[0][1].what
            raise Fault(f"{partition.name} ends without store_wait for {what}")
        if any(not mma.done for mma in partition.mmas):
            raise Fault(f"{partition.name} ends with a wgmma in flight")

    # Shared memory

    def allocate(self, data: np.ndarray, dtype: Any, layout: Any, frame: FrameType) -> Allocation:
        source = linecache.getline(*location_of(frame))
        name = source.split("=")[0].strip() if "=" in source else "shared memory"
        allocation = Allocation(name, data, dtype, layout)
        self.allocations.append(allocation)
        used = sum(a.data.size * a.dtype.primitive_bitwidth // 8 for a in self.allocations)
        if used > SHARED_BYTES:
            raise Fault(f"{used} bytes of shared memory, {SHARED_BYTES} are there")
        return allocation

    def access(
        self, at: Allocation, box: Box, what: str, *, writes: bool, is_async: bool = False
    ) -> Access:
        """Note an access by the current partition, after all that it conflicts with."""
        self.pause()
        me = self.current
        for past in at.accesses:
            if not (writes or past.writes) or not _overlap(past.box, box):
                continue
            if past.pending:
                raise Fault(f"race: {what} of {at.name}{list(box)} while {past.what} is in flight")
            if me.clock.get(past.agent, 0) < past.epoch:
                raise Fault(
                    f"race: {what} of {at.name}{list(box)} by {me.name} has not waited for "
                    f"{past.what}"
                )
            if is_async and past.writes and not past.is_async and not past.fenced:
                raise Fault(f"{what} of {at.name}: no fence_async_shared since {past.what}")
            if past.only_issuer and not is_async and past.agent == me.name:
                raise Fault(f"{what} of {at.name}: no barrier between store_wait and it")
        access = Access(box, writes, is_async, me.name, me.clock[me.name], f"{what} by {me.name}")
        at.accesses = [p for p in at.accesses if not _replaces(access, p)]
        at.accesses.append(access)
        return access

    def fence(self) -> None:
        """What the partition knows to be written becomes visible to wgmma and TMA."""
        clock = self.current.clock
        for allocation in self.allocations:
            for access in allocation.accesses:
                if clock.get(access.agent, 0) >= access.epoch:
                    access.fenced = True
            for barrier in allocation.barriers.values():
                barrier.fenced = True

    def thread_barrier(self) -> None:
        """The threads of the partition meet."""
        for allocation in self.allocations:
            for access in allocation.accesses:
                if access.agent == self.current.name:
                    access.only_issuer = False

    # Barriers

    def barrier_wait(self, barrier: MBarrier, parity: int) -> None:
        if parity not in (0, 1):
            raise Fault(f"{barrier.name}: phase {parity} is no parity")
        me = self.current
        what = f"{barrier.name}, phase {parity}: {barrier.pending} arrivals to come"
        self.pause(lambda: barrier.completed % 2 != parity, what)
        _join(me.clock, barrier.clock)
        me.clock[barrier] = barrier.completed

    def barrier_arrive(self, barrier: MBarrier, count: int, tx: int = 0) -> None:
        self.pause()
        self.thread_barrier()
        barrier.tx += tx
        barrier.arrive(count, self.current.release())

    def named_barrier(self, kind: str, number: int, count: int) -> None:
        """bar.sync or bar.arrive by all threads of the partition."""
        self.pause()
        me = self.current
        if not RESERVED_BARRIERS <= number < 16:
            raise Fault(f"bar.{kind} {number}: ids 0 to 4 are Triton's, and 15 is the last")
        barrier = self.named.setdefault(number, NamedBarrier())
        if barrier.threads and barrier.count != count:
            raise Fault(f"bar.{kind} {number}, {count}: others said {barrier.count} threads")
        if me in barrier.arrived:
            raise Fault(f"bar.{kind} {number}: {me.name} arrives twice")
        barrier.count = count
        barrier.threads += 32 * me.num_warps
        barrier.arrived.append(me)
        _join(barrier.clock, me.release())
        if barrier.threads > count:
            raise Fault(f"bar.{kind} {number}: {barrier.threads} threads of {count}")
        generation = len(barrier.past)
        if barrier.threads == count:
            barrier.past.append(barrier.clock)
            barrier.threads, barrier.arrived, barrier.clock = 0, [], {}
        if kind == "sync":
            what = f"bar.sync {number}, {count} ({barrier.threads} threads there)"
            self.pause(lambda: len(barrier.past) > generation, what)
            _join(me.clock, barrier.past[generation])
            self.thread_barrier()

    # Asynchronous operations

    def load(self, at: Allocation, box: Box, copy: Copy, barrier: MBarrier, size: int) -> None:
        """A TMA load into a box; `size` bytes are told to the barrier when it lands."""
        if not barrier.fenced:
            raise Fault(f"{barrier.name}: no fence_async_shared since its init")
        access = self.access(at, box, copy.what, writes=True, is_async=True)
        access.agent, access.epoch, access.pending = barrier, barrier.completed + 1, True
        happen = copy.happen

        def land() -> None:
            happen()
            access.pending = False
            barrier.tx -= size
            barrier.check()

        copy.happen = land
        self.copies.append(copy)

    def store(self, at: Allocation, box: Box, copy: Copy) -> None:
        """A TMA store out of a box."""
        access = self.access(at, box, copy.what, writes=False, is_async=True)
        access.pending = True
        self.current.stores.append((at, access, copy))
        self.copies.append(copy)

    def store_wait(self, left: int) -> None:
        """Wait until all but the last `left` stores of the partition have read their sources."""
        me = self.current
        waited = me.stores[: max(len(me.stores) - left, 0)]
        self.pause(lambda: all(copy.landed for _, _, copy in waited), "store_wait")
        for _, access, _ in waited:
            access.pending, access.epoch = False, me.clock[me.name]
            access.only_issuer = True
        me.stores = me.stores[len(waited) :]

    def mma(self, reads: list[tuple[Allocation, Box]]) -> Mma:
        """Issue a wgmma that reads these boxes until a wait."""
        issued = Mma([])
        for at, box in reads:
            access = self.access(at, box, "wgmma's read", writes=False, is_async=True)
            access.pending = True
            issued.reads.append((at, access))
        self.current.mmas.append(issued)
        return issued

    def mma_wait(self, left: int) -> None:
        """Wait until at most `left` wgmmas of the partition are in flight."""
        me = self.current
        for mma in me.mmas[: max(len(me.mmas) - left, 0)]:
            mma.done = True
            for at, access in mma.reads:
                access.pending, access.epoch = False, me.clock[me.name]
                kept = [p for p in at.accesses if p is access or not _replaces(access, p)]
                at.accesses = kept
        me.mmas = [mma for mma in me.mmas if not mma.done]
        self.pause()


def _overlap(a: Box, b: Box) -> bool:
    return all(low < high2 and low2 < high for (low, high), (low2, high2) in zip(a, b, strict=True))


def _replaces(new: Access, old: Access) -> bool:
    """Is whoever is ordered after `new` also ordered after `old`, so that it may be forgotten?"""
    if old.pending or new.pending:
        return False
    inside = all(
        low <= low2 and high2 <= high
        for (low, high), (low2, high2) in zip(new.box, old.box, strict=True)
    )
    if new.writes:
        return inside
    return inside and not old.writes and old.agent == new.agent and not old.only_issuer


def location_of(frame: FrameType | None) -> tuple[str, int]:
    """File and line of the innermost frame that is no part of the emulator."""
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _is_ours(file: str) -> bool:
    return file == threading.__file__ or os.path.basename(file).startswith("gluon_")


def location(frame: FrameType | None) -> str:
    """The same as text."""
    file, line = location_of(frame)
    return f"{file}:{line}"
