"""A forward with one config for ever, as a torch `triton_op`: for AOTInductor packages.

`attngen::fwd` is opaque and chooses its config where it runs, so that a package with it needs
Python there. A frozen op is traced into its launches instead: AOTInductor compiles them into the
package, which then runs where there is neither Python nor attngen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attngen import gpu, lowering, resolve
from attngen.checks import check_dtypes, check_tensors
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.kernel import file_name, load, write
from attngen.memory import empty_bshd
from attngen.render import render
from attngen.settle import numbers_of
from attngen.spec import AttentionSpec
from attngen.values import shown
from attngen.workload import Workload, spec_bucket

NAMESPACE = "attngen_aot"


class Frozen:
    """A forward of one spec and one config: callable, for torch.export and AOTInductor."""

    def __init__(self, spec: AttentionSpec, op: Any, path: Any) -> None:
        numbers = _numbers(spec)
        self.spec = spec
        self.op = op
        """The torch operator, of q, k, v, scalars and ints."""
        self.path = path
        """The kernel file."""
        self.numbers = numbers
        """The operator's scalars and ints."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False) -> Any:
        """Attention of (batch, heads, seqlen, dim) tensors of the spec's dtype, the last stride 1
        and the others multiples of 16 bytes: out, or (out, lse). Has no gradient.

        Raises:
            SpecError: shapes, dtypes or devices are others; a package does not look at them.
        """
        check_tensors(q, k, v, self.spec.head_dim, self.spec.head_dim_v)
        check_dtypes(q, k, v, self.spec.dtype)
        q, k, v = (x.to(getattr(torch, self.spec.dtype)) for x in (q, k, v))  # under autocast
        out, lse = self.op(q, k, v, *self.numbers)
        return (out, lse) if return_lse else out


def freeze(spec: AttentionSpec, workload: Workload, *, gpu_name: str | None = None) -> Frozen:
    """The forward of a spec with the config that serves a workload, whatever sizes it is called
    with.

    Args:
        spec: of q, k and v alone, layout "bhsd"; head dims are multiples of 16 bytes.
        workload: the sizes that its config is chosen for.
        gpu_name: as `attngen tune --gpu` takes it; default: the current GPU.

    Raises:
        UnsupportedSpecError: the spec takes further tensors, or its rows are no multiples of 16
            bytes; lists every reason.
    """
    if not isinstance(spec, AttentionSpec) or not isinstance(workload, Workload):
        raise SpecError(
            f"freeze takes an AttentionSpec and a Workload, got {shown(spec)} and {shown(workload)}"
        )
    _check(spec)
    info = gpu.current() if gpu_name is None else gpu.by_name(gpu_name)
    bucket = spec_bucket("fwd", spec, workload)
    config, _, _ = resolve.find(spec, bucket, info)
    config = lowering.by_pointer(spec, config, bucket, info)  # inductor compiles Triton alone
    text = render(spec, config, frozen=True)
    path = write(file_name(spec, "fwd", text), text)
    return Frozen(spec, _operator(spec.text_key, str(path)), path)


def _numbers(spec: AttentionSpec) -> tuple[list[float], list[int]]:
    """The operator's scalars and ints, of a call of whole sequences."""
    left, right = spec.window or (None, None)
    scale = spec.head_dim**-0.5 if spec.softmax_scale is None else spec.softmax_scale
    scalars = {"softmax_scale": scale, "softcap": spec.softcap}
    ints = {"window_left": left, "window_right": right, "chunk": spec.chunk}
    ints |= {"q_step": 1, "k_step": 1, "seqlen_q_total": -1, "seqlen_k_total": -1}
    ints["bottom_right"] = int(spec.causal != "top_left")
    return (
        [float(scalars.get(name) or 0) for name in spec.scalar_args],
        [int(ints.get(name) or 0) for name in spec.int_args],
    )


def _check(spec: AttentionSpec) -> None:
    why = []
    tensors = ", ".join(spec.tensor_args)
    if tensors:
        why.append(f"a frozen forward takes q, k and v alone, but the spec has {tensors}")
    if spec.aux:
        why.append(f"a frozen forward has no side outputs, but the spec has {', '.join(spec.aux)}")
    if spec.layout != "bhsd":
        why.append(f'layout="{spec.layout}"; transpose, and freeze layout="bhsd"')
    if spec.softmax_scale is not None and spec.softmax_scale <= 0:
        why.append(f"softmax_scale={spec.softmax_scale}; put the sign into q")
    unit = 16 // getattr(torch, spec.dtype).itemsize
    for name in ("head_dim", "head_dim_v"):
        if getattr(spec, name) % unit:
            why.append(f"{name}={getattr(spec, name)} is no multiple of {unit}; pad it")
    if why:
        raise UnsupportedSpecError(why)


@functools.cache
def _operator(text_key: str, path: str) -> Any:
    """The operator of a kernel file, registered once a process."""
    from pathlib import Path

    from torch.library import triton_op, wrap_triton

    spec = AttentionSpec.parse(text_key)
    file = Path(path)
    module = load(file, interpret=False)

    def fwd(
        q: Tensor, k: Tensor, v: Tensor, scalars: list[float], ints: list[int]
    ) -> tuple[Tensor, Tensor]:
        batch, heads, rows, _ = q.shape
        out = empty_bshd(q, batch, heads, rows, v.shape[3], q.dtype)
        lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        named = dict(zip(spec.int_args, ints, strict=True))
        numbers = numbers_of(spec, named, rows, k.shape[2])
        numbers |= zip(spec.scalar_args, scalars, strict=True)
        for kernel, grid, arguments, constants in module.plan(q, k, v, out, lse, **numbers):
            wrap_triton(kernel)[grid](*arguments, **constants)
        return out, lse

    return triton_op(f"{NAMESPACE}::{file.stem}", fwd, mutates_args=())
