"""`tune`: which directions, on which GPU, into which store."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from attngen import gpu as gpus
from attngen.errors import SpecError, TuningError
from attngen.gpu import GpuInfo
from attngen.identity import record_key
from attngen.one_row import kept_at
from attngen.search_space import axes
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.tuner.compile_pool import CompilePool, kept_workers
from attngen.tuner.predict import Prediction
from attngen.tuner.report import TuneReport
from attngen.tuner.session import Job, Progress, Session
from attngen.tuner.timing_client import TimingClient
from attngen.workload import (
    DIRECTIONS,
    FAMILIES,
    Direction,
    Workload,
    check_direction,
)


def tune(
    spec: AttentionSpec,
    workload: Workload,
    *,
    direction: Direction | Literal["both"] = "both",
    gpu: str | GpuInfo | None = None,
    budget: float = 60.0,
    max_trials: int | None = None,
    seed: int = 0,
    exhaustive: bool = False,
    revalidate: bool = False,
    store: Store | Path | str | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
    jobs: int | None = None,
    storage: str | None = None,
) -> list[TuneReport]:
    """Find the fastest correct config for a spec and a workload, and store it.

    A second call under the same key goes on from what the first stored; so does one after Ctrl-C or
    SIGTERM, which keep everything that was measured.

    Args:
        spec: what is computed.
        workload: how large; its bucket is what the result will serve.
        direction: "fwd", "bwd" or "both". A forward of few query rows is tuned as what serves it,
            "decode".
        gpu: None for this machine's first visible GPU; a name ("nvidia_h200", "sm_90") or GpuInfo
            for another. For a GPU that is not here everything but the timing is done, and the
            record says "predicted".
        budget: seconds of search for each direction; the last comparison comes on top.
        max_trials: configs to try for each direction, those of earlier runs counted in.
        seed: of the search.
        exhaustive: try every tile of every kernel, within budget and max_trials. Of the backward's
            two kernels, whose times add, each is tried by itself, then the best together.
        revalidate: time the stored top 16 again, of this key or of other Triton and template
            versions, and search no further.
        store: the database, or its path; default `paths.database_path()`.
        progress: called with a dict for each config tried ("event": "trial") and each winner.
        jobs: child processes that compile; default all cores but one.
        storage: share the search with every worker that names the same one, on any host, whose
            GPU has the same properties: "postgresql://USER@HOST/DB", "mysql://..." or
            "journal://FILE". max_trials then counts the configs of all; budget is each worker's.

    Returns:
        One report a direction.

    Raises:
        TuningError: there is no GPU and none was named, the workload cannot be set up, or the
            shared storage cannot be used.
        NoFeasibleConfigError: no config runs; nothing is stored as a winner.
        StoreError: the database cannot be written.
        KeyboardInterrupt: after what was measured is stored; also on SIGTERM, unless the program
            handles that itself.
    """
    directions = _directions(direction)
    _refuse_empty(workload, budget)
    target = gpus.by_name(gpu) if isinstance(gpu, str) else gpu
    if target is not None and target.is_interpreter:
        raise TuningError(
            "Triton's interpreter is not tuned; name a GPU, one of " + ", ".join(gpus.KNOWN_GPUS)
        )
    if storage is not None and revalidate:
        raise TuningError("a revalidation takes seconds and is not shared; leave storage out")
    tell = progress or (lambda event: None)
    with ExitStack() as stack:
        shared = None if storage is None else stack.enter_context(_opened(storage))
        stack.enter_context(_sigterm_interrupts())
        stack.enter_context(kept_workers())
        if not isinstance(store, Store):
            store = stack.enter_context(Store.open(store))
        timer = stack.enter_context(TimingClient())
        here = timer.gpu
        if target is None and here is None:
            raise TuningError(
                "this machine has no GPU that PyTorch can use; name the one to predict for "
                "(`attngen tune --gpu nvidia_h200`), or see what `attngen doctor` says"
            )
        present = here is not None and (target is None or target.device_key == here.device_key)
        where = here if present else target
        assert where is not None
        if shared is not None and not present:
            raise TuningError(
                f"{where.name} is not here, and only times are worth sharing; leave storage out to "
                "predict, or run on that GPU"
            )
        if not present:
            timer.close()
            timer = stack.enter_context(TimingClient(interpret=True))
        reports = []
        run: Session | Prediction
        for each in directions:
            served = spec.served_as(each).tuned
            if each == "bwd" and (spec.has_lengths or spec.is_quantized):  # has none
                continue
            served, bucket = kept_at(each, served, workload)
            key = record_key(served, bucket, where)
            job = Job(
                served,
                workload,
                bucket,
                where,
                key,
                budget,
                max_trials,
                seed,
                exhaustive,
                revalidate,
            )
            timer.open(served, workload if present else _token(workload), bucket.direction)
            with CompilePool(served, workload, bucket.direction, where, jobs) as pool:
                if shared is not None:
                    run = shared(job, store, pool, timer, tell)
                elif present:
                    run = Session(job, store, pool, timer, tell)
                else:
                    run = Prediction(job, store, pool, timer, tell)
                reports.append(run.run())
        return reports


@contextmanager
def _opened(storage: str) -> Iterator[Callable[..., Session]]:
    """Makes the sessions that share a storage. (Imported late: SQLAlchemy takes its time.)"""
    from attngen.tuner.shared_session import SharedSession
    from attngen.tuner.shared_study import SharedStudy
    from attngen.tuner.storage import opened

    with opened(storage) as shared:

        def session(
            job: Job, store: Store, pool: CompilePool, timer: TimingClient, tell: Progress
        ) -> Session:
            space = axes(job.spec, job.bucket, job.gpu)
            study = SharedStudy(shared, storage, job.key, job.workload, space)
            return SharedSession(job, store, pool, timer, tell, study)

        yield session


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, where it would end the process at once."""

    def interrupt(*signal_and_frame: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _directions(direction: str) -> tuple[Direction, ...]:
    if direction == "both":
        return DIRECTIONS
    if direction not in FAMILIES:
        raise SpecError(f'direction must be "fwd", "bwd" or "both", got {direction!r}')
    return (check_direction(direction),)


def _token(workload: Workload) -> Workload:
    """The least workload with the same group size: the interpreter checks small shapes only."""
    return Workload(1, workload.group_size, 1, 16, 16)


def _refuse_empty(workload: Workload, budget: float) -> None:
    sizes = (workload.batch, workload.num_heads_q, workload.seqlen_q, workload.seqlen_k)
    if 0 in sizes:
        raise TuningError(
            f"workload {workload} is empty; every size must be at least 1 to be tuned"
        )
    if not budget > 0:
        raise TuningError(f"budget must be seconds above 0, got {budget!r}")
