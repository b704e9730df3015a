"""The parent's side of the timing worker: asks, waits, and replaces it when it hangs or dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attngen.config import KernelConfig
from attngen.errors import TuningError
from attngen.gpu import GpuInfo
from attngen.records import Provenance
from attngen.spec import AttentionSpec
from attngen.timing import RUNS_PER_ROUND
from attngen.tuner.process import Worker, WorkerLostError
from attngen.workload import Direction, Workload, flops

RUN_TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 90.0
OPEN_TIMEOUT_S = 180.0
START_TIMEOUT_S = 120.0
STARTS = 3
"""How often a worker that is killed while it starts is started."""

SLOWEST_FLOPS = 1e13
"""Operations a second below which no kernel is waited for: a tenth of what good ones do."""
MEASURED_CALLS = 10
"""How many calls a measurement of long ones makes."""

MODULE = "attngen.tuner.timing_worker"
GPU_MEMORY = "GPU memory"
"""The kind, and the beginning of the reason, of a trial that another hour may find room for."""


class TrialFailedError(Exception):
    """A config gave no time."""

    def __init__(
        self, status: Literal["failed", "crashed", "skipped"], kind: str, reason: str
    ) -> None:
        self.status = status
        self.kind = kind
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class Measured:
    """A config's time, and how far off its results were."""

    median_us: float
    spread_us: float
    stopped: bool = False
    error: float | None = None
    clocks_mhz: tuple[int, int] | None = None


class TimingClient:
    """Times configs of one (spec, workload, direction) at a time. A context manager."""

    def __init__(self, *, interpret: bool = False) -> None:
        self._device = "cpu" if interpret else "cuda"
        self._environment = (
            {"TRITON_INTERPRET": "1", "ATTNGEN_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
            if interpret
            else {"TRITON_INTERPRET": None, "ATTNGEN_INTERPRET": None}
        )
        self._worker: Worker | None = None
        self._opened: dict[str, Any] | None = None
        self._longest_us = 0.0
        hello = self._start()
        self.gpu: GpuInfo | None = None
        """None if this machine has no GPU."""
        self.provenance: Provenance | None = None
        if "gpu" in hello:
            self.gpu = GpuInfo(**hello["gpu"])
            self.provenance = Provenance(**hello["provenance"])

    def _start(self, starts: int = STARTS) -> dict[str, Any]:
        self._worker = Worker(MODULE, self._device, environment=self._environment)
        try:
            return self._worker.ask({"do": "hello"}, START_TIMEOUT_S)
        except WorkerLostError as error:
            self._worker = None
            if error.was_killed and starts > 1:
                return self._start(starts - 1)
            raise TuningError(
                f"the timing worker does not start: {error}; check that PyTorch can use this GPU"
            ) from None

    def open(self, spec: AttentionSpec, workload: Workload, direction: Direction) -> None:
        """Allocate the tensors of a workload.

        Raises:
            TuningError: they do not fit, or the forward pass that a backward needs fails.
        """
        work = flops(spec, workload, direction)
        self._longest_us = 1e6 * work / SLOWEST_FLOPS
        self._opened = {"spec": spec.key, "workload": str(workload), "direction": direction}
        try:
            self._ask("open", self._opened, OPEN_TIMEOUT_S)
        except TrialFailedError as error:
            raise TuningError(
                f"workload {workload} of {spec.key} cannot be set up: {error.reason}; "
                "use a smaller workload"
            ) from None

    def gate(self, config: KernelConfig) -> float:
        """The largest error on small shapes.

        Raises:
            TrialFailedError: a result is wrong.
        """
        return float(self._ask("gate", {"config": config.as_dict()}, OPEN_TIMEOUT_S)["error"])

    def measure(self, config: KernelConfig, stop_above_us: float | None) -> Measured:
        """Check a config on small shapes and time it.

        Raises:
            TrialFailedError: it does not run, or its results are wrong.
        """
        named: dict[str, Any] = {"config": config.as_dict()}
        self._ask("load", named, LOAD_TIMEOUT_S)
        expected_us = min(self._longest_us, stop_above_us or self._longest_us)
        patience = RUN_TIMEOUT_S + 1e-6 * MEASURED_CALLS * expected_us
        return _measured(self._ask("measure", named | {"stop_above_us": stop_above_us}, patience))

    def verify(self, config: KernelConfig) -> float:
        """The largest error in sampled rows and keys of the tuned shape.

        Raises:
            TrialFailedError: a result is wrong.
        """
        self._ask("load", {"config": config.as_dict()}, LOAD_TIMEOUT_S)
        patience = RUN_TIMEOUT_S + 1e-6 * self._longest_us
        return float(self._ask("verify", {"config": config.as_dict()}, patience)["error"])

    def compare(
        self, configs: Sequence[KernelConfig], rounds: int, expected_us: float
    ) -> list[Measured]:
        """Time configs against each other, in turns; one round should take `expected_us`.

        Raises:
            TrialFailedError: the worker was lost; it does not say through which config.
        """
        named = {"configs": [config.as_dict() for config in configs], "rounds": rounds}
        allowance = 5e-6 * expected_us * rounds * RUNS_PER_ROUND
        answer = self._ask("compare", named, RUN_TIMEOUT_S + allowance)
        clocks = answer["clocks_mhz"]
        return [_measured(each | {"clocks_mhz": clocks}) for each in answer["timings"]]

    def _ask(self, action: str, named: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Ask the worker, a fresh one if the last was lost."""
        if self._worker is None:
            self._start()
            if self._opened is not None and action != "open":
                self._ask("open", self._opened, OPEN_TIMEOUT_S)
        assert self._worker is not None
        try:
            answer = self._worker.ask({"do": action} | named, timeout_s)
        except WorkerLostError as error:
            self._drop()
            raise TrialFailedError("crashed", "crashed", str(error)) from None
        except BaseException:
            self._drop()
            raise
        if "status" in answer:
            if answer["status"] == "crashed":
                self._drop()
            raise TrialFailedError(answer["status"], answer["kind"], answer["reason"])
        return answer

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> TimingClient:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _measured(answer: dict[str, Any]) -> Measured:
    clocks = answer.get("clocks_mhz")
    return Measured(
        median_us=answer["median_us"],
        spread_us=answer["spread_us"],
        stopped=answer["stopped"],
        error=answer.get("error"),
        clocks_mhz=None if clocks is None else (clocks[0], clocks[1]),
    )
