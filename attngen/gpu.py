"""GpuInfo: *where* a kernel runs. Facts about a device; decides what is feasible.

Imports neither torch nor triton, unless asked to look at a real device.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from attngen.errors import SpecError, nearest

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """Device facts that the search and the record key need.

    `name` is provenance only: drivers rename devices, so records match on `device_key`.
    """

    name: str
    arch: str
    """"sm_90" for compute capability 9.0; "interpreter" for Triton's interpreter."""
    sm_count: int
    shared_memory: int
    """Bytes of shared memory one block may use (opt-in limit)."""
    l2_bytes: int
    warp_size: int = 32

    @property
    def capability(self) -> int:
        """Compute capability as one number: 90 for 9.0; 0 for the interpreter."""
        digits = re.fullmatch(r"sm_(\d+)", self.arch)
        return int(digits.group(1)) if digits else 0

    @property
    def has_tma(self) -> bool:
        """The bulk tensor copy engine exists (Hopper and later)."""
        return self.capability >= 90

    @property
    def is_interpreter(self) -> bool:
        return self.arch == "interpreter"

    @property
    def device_key(self) -> str:
        """What a record is matched by: properties, never the name."""
        l2_mib = self.l2_bytes // MIB
        return f"{self.arch}-sm{self.sm_count}-smem{self.shared_memory}-l2_{l2_mib}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _gpu(name: str, arch: str, sm_count: int, shared_kib: int, l2_mib: int) -> GpuInfo:
    return GpuInfo(
        name=name,
        arch=arch,
        sm_count=sm_count,
        shared_memory=shared_kib * KIB,
        l2_bytes=l2_mib * MIB,
    )


# Shared memory per block: CUDA C++ programming guide, table "Technical Specifications per Compute
# Capability". SM counts and L2 sizes: NVIDIA's architecture whitepapers; H200: read from the
# device.
KNOWN_GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("nvidia_h200", "sm_90", 132, 227, 60),
        _gpu("nvidia_h100_sxm", "sm_90", 132, 227, 50),
        _gpu("nvidia_h100_pcie", "sm_90", 114, 227, 50),
        _gpu("nvidia_a100", "sm_80", 108, 163, 40),
        _gpu("nvidia_a10g", "sm_86", 80, 99, 6),
        _gpu("nvidia_rtx_3090", "sm_86", 82, 99, 6),
        _gpu("nvidia_rtx_4090", "sm_89", 128, 99, 72),
        _gpu("nvidia_l4", "sm_89", 58, 99, 48),
        _gpu("nvidia_l40s", "sm_89", 142, 99, 96),
        _gpu("nvidia_b200", "sm_100", 148, 227, 126),
        _gpu("sm_80", "sm_80", 108, 163, 40),
        _gpu("sm_86", "sm_86", 84, 99, 6),
        _gpu("sm_89", "sm_89", 128, 99, 72),
        _gpu("sm_90", "sm_90", 132, 227, 50),
        _gpu("sm_100", "sm_100", 148, 227, 126),
    )
}

INTERPRETER = GpuInfo(
    name="interpreter", arch="interpreter", sm_count=1, shared_memory=227 * KIB, l2_bytes=MIB
)


def by_name(name: str) -> GpuInfo:
    """A GPU by name, as `nvidia_h200` or `sm_90`; no such device need be present.

    Raises:
        SpecError: the name is unknown; lists the known ones.
    """
    if name == INTERPRETER.name:
        return INTERPRETER
    slug = slug_of(name)
    if slug not in KNOWN_GPUS:
        raise SpecError(
            f"unknown GPU {name!r}{nearest(slug, KNOWN_GPUS)}; known: {', '.join(KNOWN_GPUS)}"
        )
    return KNOWN_GPUS[slug]


def from_device_key(key: str) -> GpuInfo | None:
    """The device that a `device_key` describes, under its key as name; None if it is none."""
    found = re.fullmatch(r"(\w+)-sm(\d+)-smem(\d+)-l2_(\d+)", key)
    if found is None:
        return None
    sm_count, shared_memory, l2_mib = map(int, found.groups()[1:])
    return GpuInfo(
        name=key,
        arch=found[1],
        sm_count=sm_count,
        shared_memory=shared_memory,
        l2_bytes=l2_mib * MIB,
    )


def slug_of(name: str) -> str:
    """`NVIDIA H200` -> `nvidia_h200`."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def from_device(index: int) -> GpuInfo:
    """Facts of CUDA device `index` (starts CUDA)."""
    import torch

    # torch's stub lacks the opt-in limit.
    props: Any = torch.cuda.get_device_properties(index)
    return GpuInfo(
        name=slug_of(props.name),
        arch=f"sm_{props.major}{props.minor}",
        sm_count=props.multi_processor_count,
        shared_memory=props.shared_memory_per_block_optin,
        l2_bytes=props.L2_cache_size,
        warp_size=props.warp_size,
    )


def current() -> GpuInfo:
    """The current CUDA device, or the interpreter on a machine without one."""
    import torch

    if torch.cuda.is_available():
        return from_device(torch.cuda.current_device())
    return INTERPRETER


def main() -> None:
    """Print the GPU that is here as JSON, or null."""
    gpu = current()
    print(json.dumps(None if gpu.is_interpreter else asdict(gpu)))


if __name__ == "__main__":
    main()
