"""Which lowering may serve: the portable one everywhere, `hopper` where it is better, or the one
that ATTNGEN_LOWERING names.

Imports neither torch nor triton.
"""

from __future__ import annotations

import os
from typing import Literal

from attngen import hopper, hopper_decode, hopper_space
from attngen.config import KernelConfig, default_config, with_tiles
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.gpu import GpuInfo
from attngen.spec import AttentionSpec
from attngen.workload import Bucket

SWITCH = "ATTNGEN_LOWERING"
Lowering = Literal["hopper", "triton"]


def forced() -> Lowering | None:
    """The lowering that ATTNGEN_LOWERING asks for; None if it is unset or empty.

    Raises:
        SpecError: it names none.
    """
    match os.environ.get(SWITCH, ""):
        case "":
            return None
        case "hopper":
            return "hopper"
        case "triton":
            return "triton"
        case other:
            raise SpecError(
                f"{SWITCH} must be hopper or triton, got {other!r}; unset it to have the better one"
            )


def required(spec: AttentionSpec, gpu: GpuInfo) -> Lowering | None:
    """The same, once it is known to serve the spec.

    Raises:
        UnsupportedSpecError: ATTNGEN_LOWERING=hopper, which cannot; lists every reason.
    """
    lowering = forced()
    if lowering == "hopper" and (why := hopper.unserved(spec, gpu)):
        raise UnsupportedSpecError([*why, f"set {SWITCH}=triton, or unset it"])
    return lowering


def asked_of_decode(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> Lowering | None:
    """What ATTNGEN_LOWERING asks of a decode: hopper where it serves, since few decodes have such
    a kernel; elsewhere as if it were unset."""
    lowering = forced()
    if lowering == "hopper" and not hopper_decode.candidates(spec, bucket, gpu):
        return None
    return lowering


def refusal(spec: AttentionSpec, config: KernelConfig, bucket: Bucket, gpu: GpuInfo) -> list[str]:
    """Why ATTNGEN_LOWERING excludes a config; empty if it does not."""
    is_decode = bucket.direction == "decode"
    lowering = asked_of_decode(spec, bucket, gpu) if is_decode else forced()
    return [f"{SWITCH}={lowering}"] if lowering not in (None, config.lowering) else []


def default(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> KernelConfig:
    """What runs if nothing was measured: the hopper lowering's best guess where it serves.

    Raises:
        UnsupportedSpecError: as `required`.
        NoFeasibleConfigError: nothing fits.
    """
    if bucket.direction == "decode":
        latent = hopper_decode.candidates(spec, bucket, gpu)
        if latent and asked_of_decode(spec, bucket, gpu) != "triton":
            return latent[0]
        return default_config(spec, bucket, gpu)
    wanted = required(spec, gpu)
    if wanted == "hopper":
        return hopper_space.default(spec, bucket, gpu)
    guesses = [] if wanted else hopper_space.candidates(spec, bucket, gpu)
    return guesses[0] if guesses else default_config(spec, bucket, gpu)


def surpasses(spec: AttentionSpec, config: KernelConfig, bucket: Bucket, gpu: GpuInfo) -> bool:
    """Is the default hopper's, and better, by all that was measured, than a portable config that
    was chosen elsewhere or not measured?"""
    if config.lowering == "hopper" or forced() is not None:
        return False
    return default(spec, bucket, gpu).lowering == "hopper"


def by_pointer(
    spec: AttentionSpec, config: KernelConfig, bucket: Bucket, gpu: GpuInfo
) -> KernelConfig:
    """What serves tensors that the config cannot address: the same with pointers, or for the
    hopper lowering the portable default with pointers."""
    if isinstance(config, hopper_decode.HopperDecodeConfig):
        return default_config(spec, bucket, gpu)
    if isinstance(config, hopper.HopperConfig):
        return with_tiles(default_config(spec, bucket, gpu), "pointer")
    return with_tiles(config, "pointer")


def notes(spec: AttentionSpec, config: KernelConfig, bucket: Bucket, gpu: GpuInfo) -> list[str]:
    """Readable lines: which lowering serves, and why not the other."""
    lowering, is_decode = forced(), bucket.direction == "decode"
    lines = [] if lowering is None else [f"lowering={lowering}, because {SWITCH} says so"]
    if config.lowering == "hopper":
        instead = by_pointer(spec, config, bucket, gpu)
        first = ", and a first call of its sizes while a CUDA graph is captured,"
        others = f"tensors that TMA cannot address{'' if is_decode else first}"
        return [*lines, f"{others} are served by {instead.key}"]
    if is_decode and lowering == "hopper":
        why = hopper_decode.unserved_here(spec, bucket, gpu)
        return [f"not lowering=hopper, in spite of {SWITCH}: {'; '.join(why)}"]
    if lines:
        return lines
    if gpu.arch != hopper.ARCH or (is_decode and not spec.shared_kv):
        return []
    if is_decode:
        why = hopper_decode.unserved_here(spec, bucket, gpu)
    else:
        why = hopper.unserved(spec, gpu)
    if not why:
        why = ["lowering=hopper may serve here too; `attngen tune` compares the two"]
    return why
