"""What compiling a config says about it, without running it.

`check` stands alone: the look-up of records from another GPU or Triton, and CI, ask it whether a
stored config would still run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attngen.config import KernelConfig, infeasible
from attngen.gpu import GpuInfo
from attngen.render import direction_of
from attngen.search_space import kernel_parts
from attngen.spec import AttentionSpec
from attngen.workload import Workload

MAX_STACK_BYTES = 4096
"""Spills below this only order candidates: some that spill are the fastest."""
TENSOR_MEMORY_COLUMNS = 512
ANY_SIZES = Workload(2, 4, 4, 1024, 1024)


@dataclass(frozen=True)
class KernelFacts:
    """What the compiler says about one kernel."""

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory: int
    """Columns of tensor memory (sm_100)."""
    trap: bool
    """The body is only a trap: the compiler gave up silently."""
    serialised_wgmma: bool | None = None
    """ptxas made the matrix instructions wait for each other; None where there are none."""
    compile_s: float = 0.0


@dataclass(frozen=True)
class Compiled:
    """A config as the compiler saw it: facts of each kernel, or why it does not compile."""

    config: KernelConfig
    kernels: tuple[KernelFacts, ...] = ()
    error: str | None = None
    lost: bool = False
    """The child that compiled it died or hung, which need not be the config's doing."""

    @property
    def stack_bytes(self) -> int:
        return max((facts.stack_bytes for facts in self.kernels), default=0)


@dataclass(frozen=True)
class Objection:
    """Why a compiled config is not run."""

    status: Literal["failed", "crashed", "skipped"]
    kind: str
    """One or two words, for counting."""
    reason: str


def objection(compiled: Compiled, gpu: GpuInfo) -> Objection | None:
    """The first thing that speaks against running a config, or None."""
    if compiled.error is not None:
        status: Literal["failed", "crashed"] = "crashed" if compiled.lost else "failed"
        return Objection(status, "does not compile", compiled.error)
    for facts in compiled.kernels:
        if found := kernel_objection(facts, gpu):
            return found
    if compiled.config.lowering == "hopper":
        return _serialised(compiled)
    return None


def _serialised(compiled: Compiled) -> Objection | None:
    """The hopper lowering is written to keep several products in flight; where ptxas cannot, it is
    slow."""
    tuned = kernel_parts(compiled.config)
    for facts in compiled.kernels:
        if facts.serialised_wgmma and facts.kernel in tuned:
            return _skip("serialised wgmma", facts, "waits for each product before the next")
    return None


def kernel_objection(facts: KernelFacts, gpu: GpuInfo) -> Objection | None:
    """The first thing that speaks against running one kernel, or None."""
    if facts.shared_bytes > gpu.shared_memory:
        reason = f"needs {facts.shared_bytes} bytes of shared memory, {gpu.name} has "
        return _skip("shared memory", facts, f"{reason}{gpu.shared_memory}")
    if facts.trap:
        return _skip("trap", facts, "compiles to a trap: it exceeds a limit of the GPU")
    if facts.tensor_memory > TENSOR_MEMORY_COLUMNS:
        reason = f"needs {facts.tensor_memory} columns of tensor memory of {TENSOR_MEMORY_COLUMNS}"
        return _skip("tensor memory", facts, reason)
    if facts.stack_bytes >= MAX_STACK_BYTES:
        return _skip("spills", facts, f"spills {facts.stack_bytes} bytes a thread")
    return None


def _skip(kind: str, facts: KernelFacts, reason: str) -> Objection:
    return Objection("skipped", kind, f"{facts.kernel} {reason}")


def check(spec: AttentionSpec, config: KernelConfig, gpu: GpuInfo) -> list[str]:
    """Why a config cannot serve a spec on a GPU, from the compiler's figures; empty if it can.

    Compiles in a child process (seconds); needs no GPU.
    """
    from attngen.tuner.compile_pool import CompilePool

    if why := infeasible(spec, config, gpu):
        return why
    with CompilePool(spec, ANY_SIZES, direction_of(config), gpu, jobs=1) as pool:
        found = objection(pool.submit(config).result(), gpu)
    return [found.reason] if found else []
