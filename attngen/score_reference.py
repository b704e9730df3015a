"""score_mod and mask_mod in plain PyTorch, for the oracle, and tensors to try them with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attngen.score_functions import Function, read
from attngen.spec import AttentionSpec
from attngen.workload import Workload


def entry(x: Tensor, *at: Any) -> Tensor:
    """x[at]: a negative index counts from the end, and past either end is the nearest entry."""
    indices = [torch.as_tensor(i, device=x.device) for i in at]
    sizes = zip(indices, x.shape, strict=True)
    return x[tuple(torch.where(i < 0, i + n, i).clamp(0, n - 1) for i, n in sizes)]


@functools.lru_cache(maxsize=256)
def plain(name: str, text: str) -> Callable[..., Tensor]:
    """The function of a text: (FLOAT, [score,] b, h, q_idx, k_idx, *tensors) -> Tensor."""
    function = read(name, text)
    named = ["FLOAT", *(["score"] if name == "score_mod" else []), "b", "h", "q_idx", "k_idx"]
    named += [f"aux{n}" for n in range(len(function.aux))]
    body = "\n    ".join(function.torch_lines)
    made: dict[str, Any] = {"torch": torch, "entry": entry}
    exec(f"def {name}({', '.join(named)}):\n    {body}", made)
    found: Callable[..., Tensor] = made[name]
    return found


class Functions:
    """A spec's functions, and the tensors of one call."""

    def __init__(self, spec: AttentionSpec, aux: Mapping[str, Tensor]) -> None:
        assert set(aux) == set(spec.aux_args), f"{sorted(aux)} are not the tensors of {spec}"
        given = [aux[name] for name in spec.aux_args]
        count = len(spec.score_function.aux) if spec.score_function else 0
        self.score_mod, self.mask_mod = spec.score_mod, spec.mask_mod
        self.aux = given[:count], given[count:]

    def applied(self, s: Tensor, *place: Tensor) -> Tensor:
        """What becomes of scores at (b, h, q_idx, k_idx), which broadcast to them."""
        if self.score_mod is None:
            return s
        made = plain("score_mod", str(self.score_mod))(s.dtype, s, *place, *self.aux[0])
        never = torch.zeros_like(s, dtype=torch.bool)  # keeps s in the graph of any function
        return torch.where(never, s, made.to(s.dtype))

    def seen(self, seen: Tensor, *place: Tensor) -> Tensor:
        """Those of the keys `seen` that mask_mod leaves."""
        if self.mask_mod is None:
            return seen
        return seen & plain("mask_mod", str(self.mask_mod))(torch.float32, *place, *self.aux[1])


def example_aux(
    spec: AttentionSpec, sizes: Workload, device: str, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Random tensors for a spec's functions, as large as their indices seem to reach."""
    made = []
    for function in (spec.score_function, spec.mask_function):
        for n in range(len(function.aux) if function else 0):
            assert function is not None
            made.append(_example(function, n, sizes, device, generator))
    return dict(zip(spec.aux_args, made, strict=True))


def _example(
    function: Function, n: int, sizes: Workload, device: str, generator: torch.Generator | None
) -> Tensor:
    shape = function.example_shape(
        n, sizes.batch, sizes.num_heads_q, max(sizes.seqlen_q, 1), max(sizes.seqlen_k, 1)
    )
    kind = function.aux[n].kind
    if kind == "float":
        return torch.randn(shape, device=device, generator=generator)
    if kind == "bool":
        return torch.rand(shape, device=device, generator=generator) < 0.9
    dtype = torch.int64 if kind == "long" else torch.int32
    return torch.randint(0, 3, shape, device=device, generator=generator, dtype=dtype)
