"""Child processes that compile candidates while others are timed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from attngen.config import KernelConfig
from attngen.gpu import GpuInfo
from attngen.search_space import kernel_parts
from attngen.spec import AttentionSpec
from attngen.tuner.process import Worker, WorkerLostError
from attngen.tuner.static_check import Compiled, KernelFacts, kernel_objection
from attngen.workload import Direction, Workload

MODULE = "attngen.tuner.compile_worker"
COMPILE_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0  # importing torch and triton on a busy machine

_Part = tuple[str, tuple[Any, ...]]


MAX_JOBS = 16  # each child holds torch and triton in memory


def default_jobs() -> int:
    """All cores but one, which the timing worker needs for itself."""
    return min(MAX_JOBS, max(1, len(os.sched_getaffinity(0)) - 1))


class _Stock:
    """Children that no pool uses now: importing torch and triton anew costs seconds a pool."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Worker]] = {}
        self._depth = 0
        self._lock = threading.Lock()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While inside (the outermost counts), pools hand their children on to later pools."""
        with self._lock:
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                leave = self._depth == 0
                idle = [w for workers in self._idle.values() for w in workers] if leave else []
                if leave:
                    self._idle.clear()
            for worker in idle:
                worker.kill()

    def take(self, capability: str) -> Worker | None:
        with self._lock:
            workers = self._idle.get(capability)
            return workers.pop() if workers else None

    def give(self, capability: str, worker: Worker) -> bool:
        """Keep a child that waits for work; False if it should be killed."""
        with self._lock:
            if self._depth == 0:
                return False
            self._idle.setdefault(capability, []).append(worker)
            return True


_STOCK = _Stock()
kept_workers = _STOCK.kept


class CompilePool:
    """Compiles configs of one spec, direction and workload for one GPU. A context manager.

    One thread drives one child. A kernel is compiled once: configs that share a kernel share its
    facts, and those that share one that failed fail with it.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        workload: Workload,
        direction: Direction,
        gpu: GpuInfo,
        jobs: int | None = None,
    ) -> None:
        self.jobs = jobs or default_jobs()
        self._gpu = gpu
        self._message = {"spec": spec.key, "workload": str(workload), "direction": direction}
        self._threads = ThreadPoolExecutor(self.jobs, thread_name_prefix="attngen-compile")
        self._local = threading.local()
        self._workers: list[Worker] = []
        self._busy: set[Worker] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._facts: dict[_Part, KernelFacts] = {}
        self._errors: dict[_Part, str] = {}
        self._lost: set[_Part] = set()

    def submit(self, config: KernelConfig) -> Future[Compiled]:
        """Compile a config; the future never raises for a config that does not compile."""
        return self._threads.submit(self._compile, config)

    def _compile(self, config: KernelConfig) -> Compiled:
        """Kernel by kernel, so that one that hangs or does not fit is known by name."""
        parts = kernel_parts(config)
        found: dict[str, KernelFacts] = {}
        for part in parts.items():
            error = self._errors.get(part)
            if error is None and part not in self._facts:
                skip = [name for name in parts if name != part[0]]
                error = self._learn(part, found, self._ask(config, skip))
            if error is not None:
                return Compiled(config, tuple(found.values()), error, part in self._lost)
            found[part[0]] = self._facts[part]
            if kernel_objection(self._facts[part], self._gpu):
                break
        return Compiled(config, tuple(found.values()))

    def _ask(self, config: KernelConfig, skip: list[str]) -> dict[str, Any]:
        try:
            message = self._message | {"config": config.as_dict(), "skip": skip}
            worker = self._worker()
            with self._lock:
                self._busy.add(worker)
            answer = worker.ask(message, COMPILE_TIMEOUT_S)
            with self._lock:
                self._busy.discard(worker)
            return answer
        except WorkerLostError as error:
            self._local.worker = None
            return {"error": f"while compiling: {error}", "lost": True}

    def _learn(
        self, part: _Part, found: dict[str, KernelFacts], answer: dict[str, Any]
    ) -> str | None:
        """Keep what a child says about a kernel (and its helpers); returns its error."""
        error: str | None = answer.get("error")
        for named in answer.get("kernels", ()):
            facts = KernelFacts(**named)
            found[facts.kernel] = facts
            if facts.kernel == part[0]:
                self._facts[part] = facts
        if error is None and part not in self._facts:
            error = f"the emitted file has no kernel {part[0]}"
        if error is not None:
            self._errors[part] = error
        if answer.get("lost"):
            self._lost.add(part)
        return error

    def _worker(self) -> Worker:
        worker: Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._start()
            self._local.worker = worker
        return worker

    def _start(self) -> Worker:
        environment = {
            "TRITON_INTERPRET": None,
            "ATTNGEN_INTERPRET": None,
            "CUDA_VISIBLE_DEVICES": "",
        }
        capability = str(self._gpu.capability)
        with self._lock:
            if self._closing:
                raise WorkerLostError("the pool is closed")
            worker = _STOCK.take(capability)
            fresh = worker is None
            worker = worker or Worker(MODULE, capability, environment=environment)
            self._workers.append(worker)
            self._busy.add(worker)
        if fresh:
            worker.ask({"hello": True}, START_TIMEOUT_S)
        return worker

    def close(self) -> None:
        """Let go of the children and forget what was submitted; what still compiles is killed."""
        with self._lock:
            self._closing = True
            workers, busy = list(self._workers), set(self._busy)
        for worker in workers:
            if worker in busy or not _STOCK.give(str(self._gpu.capability), worker):
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
