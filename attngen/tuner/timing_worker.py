"""The one process that touches a GPU: `python -m attngen.tuner.timing_worker DEVICE`.

It checks and times what it is asked to and answers; after an error that leaves the CUDA context
unusable it says so and ends, and the client starts another. With the device "cpu" it runs Triton's
interpreter, which checks predicted configs where there is no GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton

from attngen import config as configs
from attngen import gpu as gpus
from attngen import timing
from attngen.config import KernelConfig, default_config
from attngen.errors import KernelCompileError
from attngen.kernel import kernel
from attngen.spec import AttentionSpec
from attngen.tuner import case, gate
from attngen.tuner.case import Case
from attngen.tuner.child import Lines
from attngen.tuner.timing_client import GPU_MEMORY
from attngen.workload import Direction, Workload, spec_bucket

Answer = dict[str, Any]


class Bench:
    """The tensors of one (spec, workload, direction) and what is done with them."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._interpret = device == "cpu"
        self._gpu = gpus.INTERPRETER if self._interpret else gpus.from_device(0)
        self._clock = timing.HostClock() if self._interpret else timing.CudaClock()
        self._direction: Direction = "fwd"
        self._small: gate.SmallGate | None = None
        self._large: Case | None = None

    def hello(self) -> Answer:
        """What GPU this is, and the versions that a record's provenance names."""
        return {
            "gpu": self._gpu.as_dict(),
            "provenance": {
                "gpu": self._gpu.name,
                "driver": _driver_version(),
                "cuda": torch.version.cuda,
                "torch": str(torch.__version__),
                "triton": triton.__version__,
            },
        }

    def open(self, spec: str, workload: str, direction: Direction) -> Answer:
        """Allocate everything once; a backward's out and lse come from the default forward."""
        self._small = self._large = None
        what, sizes = AttentionSpec.parse(spec), Workload.parse(workload)
        self._direction = direction
        self._small = gate.SmallGate(what, direction, sizes.group_size, self._device)
        self._large = case.make(what, sizes, self._device, backward=direction == "bwd")
        if direction == "bwd":
            forward = default_config(what, spec_bucket("fwd", what, sizes), self._gpu)
            gate.run(self._large, forward, interpret=self._interpret)
        return {}

    def load(self, config: dict[str, Any]) -> Answer:
        """Compile for the shapes that will run, most often from Triton's disk cache."""
        for each in [] if self._interpret else self._cases():
            found = self._config(config)
            run = kernel(each.spec.text, found, False)
            for launch, grid, arguments, constants in run.module.plan(
                *each.tensors(found), **each.numbers
            ):
                launch.warmup(*arguments, grid=grid, **constants)
        return {}

    def gate(self, config: dict[str, Any]) -> Answer:
        """Check a config on the small shapes."""
        assert self._small is not None
        verdict = self._small.check(self._config(config))
        return _failed("wrong result", verdict.detail) if not verdict.ok else verdict._asdict()

    def measure(self, config: dict[str, Any], stop_above_us: float | None) -> Answer:
        """Check a config on the small shapes, then time it on the tuned one."""
        checked = self.gate(config)
        if "status" in checked:
            return checked
        found = self._config(config)
        self._case().spoil(found)
        before = timing.sm_clock_mhz()
        timed = timing.measure(self._clock, self._call(found), stop_above_us)
        clocks = (before, timing.sm_clock_mhz())
        return timed._asdict() | {"error": checked["error"], "clocks_mhz": _both(clocks)}

    def verify(self, config: dict[str, Any]) -> Answer:
        """Compare sampled rows and keys of the tuned shape."""
        verdict = gate.sampled(self._case(), self._config(config))
        return _failed("wrong result", verdict.detail) if not verdict.ok else verdict._asdict()

    def compare(self, configs: list[dict[str, Any]], rounds: int) -> Answer:
        """Time configs against each other."""
        calls = [self._call(self._config(named)) for named in configs]
        before = timing.sm_clock_mhz()
        timed = timing.compare(self._clock, calls, rounds)
        clocks = (before, timing.sm_clock_mhz())
        return {"timings": [each._asdict() for each in timed], "clocks_mhz": _both(clocks)}

    def _cases(self) -> list[Case]:
        assert self._small is not None
        return [*self._small.cases, self._case()]

    def _case(self) -> Case:
        assert self._large is not None
        return self._large

    def _config(self, named: dict[str, Any]) -> KernelConfig:
        return configs.from_dict(self._direction, named)

    def _call(self, config: KernelConfig) -> timing.Call:
        each = self._case()
        run = kernel(each.spec.text, config, self._interpret)
        tensors, numbers = each.tensors(config), each.numbers
        return lambda: run(*tensors, **numbers)


def _both(clocks: tuple[int | None, int | None]) -> list[int] | None:
    before, after = clocks
    return None if before is None or after is None else [before, after]


def _failed(kind: str, reason: str) -> Answer:
    return {"status": "failed", "kind": kind, "reason": reason}


def _driver_version() -> str | None:
    with contextlib.suppress(Exception):  # NVML is optional and fails in many ways
        import pynvml  # type: ignore[import-not-found,unused-ignore]  # optional

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def context_is_lost() -> bool:
    """Did an earlier error leave this process's CUDA context unusable?"""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception:
        return True
    return False


def answer(act: Callable[..., Answer], named: dict[str, Any]) -> Answer:
    """What an action returns, or how it failed."""
    try:
        return act(**named)
    except KernelCompileError as error:
        return _failed("does not compile", str(error))
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return {"status": "skipped", "kind": GPU_MEMORY, "reason": f"{GPU_MEMORY}: {error}"}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if context_is_lost():
            return {"status": "crashed", "kind": "crashed", "reason": reason}
        return _failed("error", reason)


def main() -> None:
    device = sys.argv[1]
    lines = Lines()
    if device == "cuda" and not torch.cuda.is_available():
        lines.serve(lambda message: {"absent": True})
        return
    bench = Bench(device)
    lines.serve(lambda message: answer(getattr(bench, message.pop("do")), message))


if __name__ == "__main__":
    main()
