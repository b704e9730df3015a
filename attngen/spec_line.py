"""A spec as one line, `head_dim=128,dtype=bfloat16,causal=true,window=1023:0`: written and read.

Imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

from attngen.errors import SpecError
from attngen.score_nodes import FUNCTIONS
from attngen.spec_rules import refuse_unknown
from attngen.values import shown

if TYPE_CHECKING:
    from attngen.spec import AttentionSpec

# The numbers that `AttentionSpec.text` forgets: where one is set, its line shows `any`.
_FORGOTTEN = {"window": 0, "dropout_p": 0.5, "softcap": 1.0, "chunk": 1}


def changed(spec: AttentionSpec) -> list[Field[Any]]:
    """Fields that differ from their default; head_dim and dtype always."""
    always = ("head_dim", "dtype")
    default = {field.name: field.default for field in fields(spec)}
    default["head_dim_v"] = spec.head_dim
    return [f for f in fields(spec) if f.name in always or getattr(spec, f.name) != default[f.name]]


def written(spec: AttentionSpec, *, forget: bool = False) -> str:
    """The line of a spec; with `forget`, numbers that no text can see are `any`."""
    items = []
    for field in changed(spec):
        name, value = field.name, getattr(spec, field.name)
        if name == "deterministic" and not value and forget:
            continue
        if name == "window":
            sides = ["none" if w is None else "any" if forget else str(w) for w in value]
            text = ":".join(sides)
        elif name == "aux":
            text = ":".join(value)
        elif forget and name in _FORGOTTEN:
            text = "any"
        elif isinstance(value, bool):
            text = str(value).lower()
        else:
            text = repr(value) if isinstance(value, float) else str(value)
        items.append(f"{name}={text}")
    return ",".join(items)


def read_line(line: str, known: Collection[str]) -> dict[str, Any]:
    """The fields that a line gives, of those that are known."""
    if not isinstance(line, str):
        raise SpecError(
            f"a spec line must be a str, got {shown(line)}; write one as "
            "head_dim=128,dtype=bfloat16,causal=true"
        )
    named: dict[str, Any] = {}
    for item in filter(None, (piece.strip() for piece in line.split(","))):
        name, equals, value = item.partition("=")
        if not equals:
            raise SpecError(
                f"spec item {item!r} has no '='; write a spec as "
                "head_dim=128,dtype=bfloat16,causal=true"
            )
        if name in named:
            raise SpecError(f"spec field {name!r} is given twice; keep one")
        refuse_unknown({name: value}, known)
        named[name] = _parse_value(name, value.strip())
    if "head_dim" not in named:
        raise SpecError(f"spec {line!r} lacks head_dim; begin it with head_dim=128")
    return named


def _parse_value(name: str, text: str) -> Any:
    if name in FUNCTIONS:
        return None if text.lower() in ("none", "") else text
    if name == "window":
        if text.lower() == "none":
            return None
        sides = text.split(":")
        if len(sides) != 2:
            raise SpecError(f"window must be LEFT:RIGHT, as 1023:0 or 511:none, got {text!r}")
        return tuple(_parse_scalar(name, side) for side in sides)
    return _parse_scalar(name, text)


def _parse_scalar(name: str, text: str) -> Any:
    low = text.lower()
    if low == "any" and name in _FORGOTTEN:
        return _FORGOTTEN[name]
    if low in ("none", ""):
        return None
    if low in ("true", "false"):
        return low == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
