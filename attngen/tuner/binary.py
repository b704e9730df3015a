"""What a compiled Triton kernel says of itself, read from its PTX and cubin without loading it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton.backends.nvidia

_SERIALISED = re.compile(r"\(?C75(1[0-9])\)?")
_WGMMA_ARCH = 90
_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


def facts_of(name: str, compiled: Any) -> dict[str, Any]:
    """Fields of `static_check.KernelFacts`, without how long it took and what ptxas said."""
    return {
        "kernel": name,
        "shared_bytes": compiled.metadata.shared,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", None) or 0,
        "trap": is_trap(compiled.asm["ptx"]),
        **resource_usage(compiled.asm["cubin"]),
    }


def is_trap(ptx: str) -> bool:
    """Triton turns a kernel that exceeds tensor memory into a bare `trap`, which looks ideal."""
    body = ptx[ptx.find("{") :]
    return "trap;" in body and not re.search(r"\b(ld|st|cp|mma|wgmma|tcgen05)\.", body)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = tool("cuobjdump", "--dump-resource-usage", file.name)
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text[:200]!r}")
    return {"registers": int(match.group(1)), "stack_bytes": int(match.group(2))}


def is_serialised(ptx: str, capability: int) -> bool | None:
    """Did ptxas have to run wgmma one by one? None where there are none.

    It says so in a note that Triton does not show, so it is run once more.
    """
    if capability != _WGMMA_ARCH or "wgmma.mma_async" not in ptx:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        arguments = ["-v", f"--gpu-name=sm_{capability}a", str(source)]
        log = tool("ptxas", *arguments, "-o", str(Path(folder, "kernel.cubin")))
    return _SERIALISED.search(log) is not None


def tool(name: str, *arguments: str) -> str:
    """What one of Triton's bundled CUDA tools prints."""
    done = subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
