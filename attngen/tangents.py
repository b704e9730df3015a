"""Forward-mode derivatives: calls of `attngen::jvp` on concrete tensors.

One kernel computes out and lse and their tangents from q, k and v and what tangents these have;
which have one is part of its text. It runs by default configs, which are not tuned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from attngen import calls
from attngen.config import (
    REGISTERS_PER_THREAD,
    FwdConfig,
    Tiles,
    descriptors_pay,
    unserved,
    value_problem,
)
from attngen.errors import NoFeasibleConfigError, SpecError, UnsupportedSpecError
from attngen.gpu import GpuInfo
from attngen.kernel import Tensors, kernel
from attngen.memory import addressable, aligned, bshd, float32
from attngen.paged import refuse_gradients
from attngen.remembered import Remembered
from attngen.render import render
from attngen.resolve import device_index_of, device_info
from attngen.score_terms import placed
from attngen.settle import Call, numbers_of
from attngen.spec import AttentionSpec
from attngen.workload import MAX_SIZE, Direction, ceil_pow2


@dataclass(frozen=True, kw_only=True)
class JvpConfig(FwdConfig):
    """Forward with tangents: as the forward, and which of q, k and v have a tangent."""

    direction: ClassVar[Direction] = "jvp"

    tangents: str
    """Letters of q, k and v, in this order."""


def source(spec: AttentionSpec | str, config: JvpConfig | str) -> str:
    """The emitted text of a spec and a config, or of the lines that an emitted file's header has.

    Raises:
        SpecError: a line does not read as a spec or a config.
    """
    if isinstance(spec, str):
        spec = AttentionSpec.parse("".join(spec.split()))
    if isinstance(config, str):
        items = dict(item.split("=", 1) for item in "".join(config.split()).split(",") if item)
        known = [field.name for field in fields(JvpConfig)]
        if set(items) - {"lowering", "tiles"} != set(known) - {"lowering", "tiles"}:
            raise SpecError(f"a jvp config has the fields {', '.join(known)}, got {config!r}")
        named = {name: int(value) if value.isdigit() else value for name, value in items.items()}
        config = JvpConfig(**named)  # type: ignore[arg-type]  # checked below
    if not config.tangents or config.tangents != "".join(x for x in "qkv" if x in config.tangents):
        raise SpecError(f"tangents must be some of qkv, in this order, got {config.tangents!r}")
    for field in fields(config):
        if problem := value_problem(type(config), field.name, getattr(config, field.name)):
            raise SpecError(f"{field.name} {problem}, got {getattr(config, field.name)!r}")
    return render(spec, config)


@functools.lru_cache(maxsize=1024)
def default(
    spec: AttentionSpec, tangents: str, rows: int, keys: int, gpu: GpuInfo, by_pointer: bool
) -> JvpConfig:
    """The first config of a short list that fits.

    Args:
        rows, keys: lengths, rounded up to powers of two.
        by_pointer: for tensors that descriptors cannot address.

    Raises:
        UnsupportedSpecError: no config serves the spec on this GPU.
        NoFeasibleConfigError: none of the list fits.
    """
    if why := unserved(spec, gpu):
        raise UnsupportedSpecError(why)
    pays = descriptors_pay(spec, gpu) and not by_pointer
    tiles: Tiles = "descriptor" if pays else "pointer"
    # On an H200, bfloat16, of 25 configs at head_dim 64 and of 15 at 128: two programs of the first
    # just fill the shared memory of sm_90. With more beside the scores, or by pointer, the second
    # spills.
    bare = not (spec.has_score_terms or spec.has_dropout or spec.has_softcap)
    sizes = [(64, 64, 4, 3)] if bare else []
    sizes += [(64, 64, 4, 2), (64, 32, 8, 2), (32, 32, 4, 1), (16, 16, 4, 1)]
    if max(spec.head_dim, spec.head_dim_v) > 64:
        wide = [(128, 64, 8, 2)] if bare and pays else []
        sizes = [*wide, (128, 32, 8, 2), *sizes[-3:]]
    if spec.dtype == "float32":
        sizes = [(32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)]
    if gpu.is_interpreter:
        sizes.insert(0, (64, 64, 4, 1))
    tried = []
    for m, n, warps, stages in sizes:
        config = JvpConfig(
            tiles=tiles,
            block_m=max(16, min(m, rows)),
            block_n=max(16, min(n, keys)),
            num_warps=warps,
            num_stages=stages,
            tangents=tangents,
        )
        why = _excess(spec, config, gpu)
        if not why:
            return config
        tried.append(f"{config.key}: {'; '.join(why)}")
    raise NoFeasibleConfigError(
        f"no config of the forward with tangents fits {spec.text_key} on {gpu.name}; tried:\n  "
        + "\n  ".join(tried)
        + "\nuse a smaller head_dim or a 16-bit dtype"
    )


def _excess(spec: AttentionSpec, config: JvpConfig, gpu: GpuInfo) -> list[str]:
    """What a config needs beyond what there is, by a formula: `config.footprints` with tangents."""
    if gpu.is_interpreter:
        return []
    d, dv = (sum(part.width for part in parts) for parts in (spec.qk_parts, spec.v_parts))
    m, n, given = config.block_m, config.block_n, config.tangents
    rows = m * d * (1 + ("q" in given))
    keys = n * (d * (1 + ("k" in given)) + dv * (1 + ("v" in given)))
    shared = (rows + config.num_stages * keys) * spec.element_size
    shared = max(shared, 2 * m * dv * spec.element_size)
    registers = (2 * m * dv + 2 * m * n) // (32 * config.num_warps)
    why = []
    if shared > gpu.shared_memory:
        why.append(f"about {shared} bytes of shared memory, {gpu.name} has {gpu.shared_memory}")
    if registers > REGISTERS_PER_THREAD:
        why.append(f"about {registers} registers a thread")
    return why


_RUNS: Remembered[tuple[Any, ...], Callable[[Tensors], None]] = Remembered(1024)


def forward(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
) -> list[Tensor]:
    """[out, lse, tangent of out, tangent of lse] of `attngen::jvp`."""
    spec = calls.checked_spec(text_key, q, k, v, extra)
    given = {"q": (q, tq), "k": (k, tk), "v": (v, tv)}
    _check_tangents(spec, given)
    batch, heads, seqlen_q, _ = q.shape
    out = bshd(q, v.shape[3], torch.float32 if ints[0] else getattr(torch, spec.out_dtype))
    lse = float32(batch, heads, seqlen_q)
    memory = [out, lse, out, lse]
    if q.numel() == 0 or v.numel() == 0:
        made = [each.make(q).zero_() for each in memory]
        made[1].fill_(float("-inf"))
        return made
    moved = [(name, aligned(t)) for name, (_, t) in given.items() if t is not None]
    inputs: Tensors = (aligned(q), aligned(k), aligned(v), *(t for _, t in moved))
    extra = placed(spec, extra, q, k)
    tangents = "".join(name for name, _ in moved)
    at = (tangents, *calls.layout_of(text_key, (*inputs, *extra), scalars, ints))
    run, resets = _RUNS.get(at), _RUNS.resets
    if run is None:
        run = _prepared(spec, tangents, inputs, scalars, ints)
        _RUNS.keep(at, run, resets)
    call = Call(run, device_index_of(q), memory)
    return calls.launch(call, inputs, extra)


def _prepared(
    spec: AttentionSpec,
    tangents: str,
    inputs: Tensors,
    scalars: Sequence[float],
    ints: Sequence[int],
) -> Callable[[Tensors], None]:
    """The kernel of a layout with its numbers."""
    tiles = [x for x in inputs if x is not None]
    q, k, *_ = tiles
    device = device_index_of(q)
    rows, keys = ceil_pow2(q.shape[2]), ceil_pow2(k.shape[2])
    if spec.batch_invariant:  # one config for all sizes
        rows = keys = MAX_SIZE
    config = default(spec, tangents, rows, keys, device_info(device), not addressable(*tiles))
    named = dict(zip(spec.int_args, ints, strict=True))
    numbers = numbers_of(spec, named, q.shape[2], k.shape[2])
    numbers |= zip(spec.scalar_args, scalars, strict=True)
    keywords = tuple(name.removeprefix("dropout_") for name in spec.tensor_args)
    return kernel(spec, config, device is None).prepared(numbers, keywords)


def _check_tangents(spec: AttentionSpec, given: dict[str, tuple[Tensor, Tensor | None]]) -> None:
    if spec.is_fp8:
        raise UnsupportedSpecError(
            ["forward-mode derivatives of FP8 inputs are not built; dequantise them"]
        )
    refuse_gradients(spec)
    if spec.has_masks or spec.has_functions or spec.is_packed:
        raise UnsupportedSpecError(
            [
                "forward-mode derivatives under prefix_lm, documents, tree_mask, score_mod, "
                'mask_mod and layout="thd" are not built; say it by attn_mask and bias'
            ]
        )
    for name, (x, tangent) in given.items():
        if tangent is None:
            continue
        if tangent.shape != x.shape or tangent.dtype != x.dtype or tangent.device != x.device:
            raise SpecError(
                f"the tangent of {name} must be as {name}, {x.dtype} of shape {tuple(x.shape)} on "
                f"{x.device}, got {tangent.dtype} of shape {tuple(tangent.shape)} on "
                f"{tangent.device}"
            )
