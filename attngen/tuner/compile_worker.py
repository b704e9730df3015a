"""Compiles candidates for one architecture without a GPU: `python -m attngen.tuner.compile_worker`.

A driver that knows only the target's compute capability stands in for the real one, so that
`kernel.warmup` compiles from tensors without memory. What it compiles lands in Triton's disk
cache, where the timing worker finds it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from attngen import config as configs
from attngen.kernel import Kernel, explained
from attngen.spec import AttentionSpec
from attngen.tuner import case
from attngen.tuner.binary import facts_of, is_serialised
from attngen.tuner.child import Lines
from attngen.workload import Workload


class TargetDriver:
    """As much of a Triton driver as a compilation asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self._capability, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class Compiler:
    """Handles the pool's messages; remembers each kernel's facts."""

    def __init__(self, capability: int) -> None:
        triton.runtime.driver.set_active(TargetDriver(capability))
        self._capability = capability
        self._known: dict[str, dict[str, Any]] = {}

    def __call__(self, message: dict[str, Any]) -> dict[str, Any]:
        """Facts of every kernel of a config, or the error of the one that does not compile."""
        if "hello" in message:
            return {}
        spec = AttentionSpec.parse(message["spec"])
        config = configs.from_dict(message["direction"], message["config"])
        sizes = Workload.parse(message["workload"])
        backward = message["direction"] == "bwd"
        found: list[dict[str, Any]] = []
        name = ""
        try:
            run = Kernel(spec, config, interpret=False)
            inputs = case.make(spec, sizes, "meta", backward=backward)
            plan = run.module.plan(*inputs.tensors(config), **inputs.numbers)
            for kernel, grid, arguments, constants in plan:
                name = kernel.__name__
                if name not in message["skip"]:
                    found.append(self._facts(name, kernel, grid, arguments, constants))
        except Exception as error:
            why = explained(error, run.path, spec) if name else error
            return {"error": f"{type(why).__name__}: {why}"[-1500:], "kernel": name}
        return {"kernels": found}

    def _facts(
        self, name: str, kernel: Any, grid: Any, arguments: Any, constants: dict[str, Any]
    ) -> dict[str, Any]:
        begin = time.perf_counter()
        compiled = kernel.warmup(*arguments, grid=grid, **constants)
        if compiled.hash not in self._known:
            self._known[compiled.hash] = {
                **facts_of(name, compiled),
                "serialised_wgmma": is_serialised(compiled.asm["ptx"], self._capability),
            }
        return self._known[compiled.hash] | {"compile_s": time.perf_counter() - begin}


def main() -> None:
    lines = Lines()
    lines.serve(Compiler(int(sys.argv[1])))


if __name__ == "__main__":
    main()
