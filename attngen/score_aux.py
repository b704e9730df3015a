"""The tensors that score_mod and mask_mod read, from a call to the op."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.checks import check_kinds
from attngen.errors import DtypeError, SpecError, UnsupportedSpecError
from attngen.score_capture import KIND_OF
from attngen.score_functions import read
from attngen.score_nodes import Aux
from attngen.spec import AttentionSpec
from attngen.values import shown


class Functions(NamedTuple):
    """What a call must know of its functions' tensors."""

    aux: tuple[Aux, ...]
    learns: tuple[bool, ...]
    """Which have a gradient."""
    captured: tuple[Tensor, ...] | None
    """Those seen when the functions were read, in the same order."""


def functions_of(spec: AttentionSpec) -> Functions | None:
    """None for a spec without functions."""
    return functions_of_texts(spec.score_mod, spec.mask_mod)


def functions_of_texts(score_mod: str | None, mask_mod: str | None) -> Functions | None:
    """The same of the fields of a spec."""
    aux: list[Aux] = []
    learns: list[bool] = []
    captured: list[Tensor] = []
    for name, text in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if text is not None:
            function = read(name, str(text))
            aux += function.aux
            learns += [n in function.learnt for n in range(len(function.aux))]
            captured += getattr(text, "tensors", ())
    if score_mod is None and mask_mod is None:
        return None
    held = tuple(captured) if len(captured) == len(aux) else None
    return Functions(tuple(aux), tuple(learns), held)


def check_aux(
    functions: Functions | None, given: Any, q: Tensor, deterministic: bool | None
) -> tuple[Tensor, ...]:
    """The tensors of a call, as the op takes them.

    Args:
        given: aux_tensors of the call; None takes those that the functions brought along.
    """
    if functions is None:
        raise SpecError(
            "aux_tensors is given, but the spec has neither score_mod nor mask_mod, which would "
            "read them; leave it out"
        )
    wanted = ", ".join(
        f"aux{n} {_words(aux.kind)} of {aux.dims} dims" for n, aux in enumerate(functions.aux)
    )
    if given is None:
        given = functions.captured
        if given is None:
            raise SpecError(
                f"score_mod and mask_mod read {len(functions.aux)} tensors, which a spec made from "
                f"text does not hold; pass aux_tensors=, a tuple of {wanted}"
            )
    if not isinstance(given, (tuple, list)):
        raise SpecError(f"aux_tensors must be a tuple of tensors, got {shown(given)}")
    if len(given) != len(functions.aux):
        raise SpecError(
            f"aux_tensors must hold {len(functions.aux)} tensors ({wanted or 'none'}), got "
            f"{len(given)}: score_mod's, then mask_mod's, each in the order of first use"
        )
    each = zip(functions.aux, functions.learns, given, strict=True)
    return tuple(
        _checked(f"aux_tensors[{n}]", aux, learns, x, q, deterministic)
        for n, (aux, learns, x) in enumerate(each)
    )


def _checked(
    name: str, aux: Aux, learns: bool, x: Any, q: Tensor, deterministic: bool | None
) -> Tensor:
    check_kinds({name: x})
    found: Tensor = x
    if found.device != q.device:
        raise SpecError(
            f"{name} is on {found.device} but q is on {q.device}; move it with .to(q.device) "
            "before the function reads it"
        )
    if KIND_OF.get(found.dtype) != aux.kind:
        raise DtypeError(
            f"{name} must be {_words(aux.kind)}, as the function was read, got {found.dtype}; "
            "cast it"
        )
    if found.dim() != aux.dims or 0 in found.shape:
        raise SpecError(
            f"{name} must have {aux.dims} dims, none of them empty, got shape {tuple(found.shape)}"
        )
    if not found.requires_grad or not torch.is_grad_enabled():
        return found
    if not learns:
        return found.detach()  # a mask has no derivative
    if deterministic:
        raise UnsupportedSpecError(
            [
                f"{name} requires grad, and its gradient is added up in no fixed order, but the "
                "spec says deterministic=True; pass deterministic=False, or a detached tensor, or "
                "what can be one as bias="
            ]
        )
    return found


def _words(kind: str) -> str:
    return {
        "float": "float32, float16 or bfloat16",
        "int": "int32 or smaller",
        "long": "int64",
        "bool": "bool",
    }[kind]
