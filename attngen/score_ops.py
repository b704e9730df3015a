"""The operators of score_mod and mask_mod: types, Triton, PyTorch and derivatives of each.

One table, which the capture, the text of a spec, printed kernels, the oracle and the docs share.
Imports neither torch nor triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from attngen.errors import SpecError

KINDS = ("bool", "int", "long", "float")
"""Types of values, in the order in which they promote: bool, int32, int64 and float32."""
TRITON = {"bool": "tl.int1", "int": "tl.int32", "long": "tl.int64", "float": "tl.float32"}


class Ref(NamedTuple):
    """The value of a statement, by its number."""

    at: int


Operand = Any  # the name of an input, a Ref, or a constant: a bool, an int or a float


@dataclass(frozen=True)
class Op:
    """One operator; `{0}`, `{1}`, ... in its forms are its operands."""

    rule: str
    """How types go: "number" and "any" promote, "bits" promotes what is no float, "float" makes all
    floats, "compare" promotes and gives a bool, "select" takes a bool first, "cast" takes any."""
    triton: str
    torch: str
    gradient: Callable[..., tuple[Operand | None, ...]] | None = None
    """(builder, upstream, result, *operands) -> what each operand gets; None: all get nothing."""
    helper: str | None = None
    """The function of `templates/parts/score_helpers.py.jinja` that the Triton form calls."""
    aten: tuple[str, ...] = ()
    """PyTorch's operators that become this one as they are."""

    @property
    def arity(self) -> int:
        return 1 + max(n for n in range(3) if f"{{{n}}}" in self.torch)


def _minmax(is_max: bool) -> Callable[..., tuple[Operand | None, ...]]:
    """The larger gets it all. Between two tensors a tie is shared; a constant bound leaves it all
    to the tensor, as torch.clamp does."""

    def gradient(b: Any, g: Operand, _: Operand, x: Operand, y: Operand) -> tuple[Operand, ...]:
        if is_constant(x) or is_constant(y):
            own, other = (y, x) if is_constant(x) else (x, y)
            keeps = b.add("ge" if is_max else "le", own, other)
            taken = b.add("where", keeps, g, 0.0)
            return (None, taken) if is_constant(x) else (taken, None)
        half = b.add("where", b.add("eq", x, y), b.add("mul", g, 0.5), g)
        loses = "lt" if is_max else "gt"
        return (
            b.add("where", b.add(loses, x, y), 0.0, half),
            b.add("where", b.add(loses, y, x), 0.0, half),
        )

    return gradient


def _sqrt(b: Any, g: Operand, out: Operand, x: Operand) -> tuple[Operand, ...]:
    return (b.add("div", b.add("mul", g, 0.5), out),)


def _rsqrt(b: Any, g: Operand, out: Operand, x: Operand) -> tuple[Operand, ...]:
    cube = b.add("mul", b.add("mul", out, out), out)
    return (b.add("mul", b.add("mul", g, -0.5), cube),)


def _tanh(b: Any, g: Operand, out: Operand, x: Operand) -> tuple[Operand, ...]:
    return (b.add("mul", g, b.add("sub", 1.0, b.add("mul", out, out))),)


def _sigmoid(b: Any, g: Operand, out: Operand, x: Operand) -> tuple[Operand, ...]:
    return (b.add("mul", g, b.add("mul", out, b.add("sub", 1.0, out))),)


def _erf(b: Any, g: Operand, out: Operand, x: Operand) -> tuple[Operand, ...]:
    bell = b.add("exp", b.add("neg", b.add("mul", x, x)))
    return (b.add("mul", b.add("mul", g, 2 / math.sqrt(math.pi)), bell),)


def _div(b: Any, g: Operand, out: Operand, x: Operand, y: Operand) -> tuple[Operand, ...]:
    return b.add("div", g, y), b.add("neg", b.add("div", b.add("mul", g, out), y))


def _remainder(b: Any, g: Operand, out: Operand, x: Operand, y: Operand) -> tuple[Operand, ...]:
    return g, b.add("neg", b.add("mul", g, b.add("floordiv", x, y)))


def _fmod(b: Any, g: Operand, out: Operand, x: Operand, y: Operand) -> tuple[Operand, ...]:
    ratio = b.add("div", x, y)
    whole = b.add("where", b.add("lt", ratio, 0.0), b.add("ceil", ratio), b.add("floor", ratio))
    return g, b.add("neg", b.add("mul", g, whole))


def _abs(b: Any, g: Operand, out: Operand, x: Operand) -> tuple[Operand, ...]:
    up = b.add("where", b.add("gt", x, 0.0), g, 0.0)
    return (b.add("where", b.add("lt", x, 0.0), b.add("neg", g), up),)


def _times(factor: float, name: str) -> Callable[..., tuple[Operand, ...]]:
    """g * factor, by `name` and an operand: the derivative of exp2 and log2."""

    def gradient(b: Any, g: Operand, out: Operand, x: Operand) -> tuple[Operand, ...]:
        other = out if name == "mul" else x
        return (b.add(name, b.add("mul", g, factor), other),)

    return gradient


OPS: dict[str, Op] = {
    "add": Op("number", "{0} + {1}", "{0} + {1}", lambda b, g, o, x, y: (g, g)),
    "sub": Op("number", "{0} - {1}", "{0} - {1}", lambda b, g, o, x, y: (g, b.add("neg", g))),
    "mul": Op(
        "number",
        "{0} * {1}",
        "{0} * {1}",
        lambda b, g, o, x, y: (b.add("mul", g, y), b.add("mul", g, x)),
    ),
    "div": Op("float", "{0} / {1}", "{0} / {1}", _div),
    "floordiv": Op(
        "number",
        "floor_divide({0}, {1})",
        "{0} // {1}",
        None,
        "floor_divide",
        ("floor_divide",),
    ),
    "mod": Op(
        "number",
        "remainder({0}, {1})",
        "{0} % {1}",
        _remainder,
        "remainder",
        ("remainder",),
    ),
    "fmod": Op("number", "{0} % {1}", "torch.fmod({0}, {1})", _fmod, None, ("fmod",)),
    "neg": Op("number", "-{0}", "-{0}", lambda b, g, o, x: (b.add("neg", g),), None, ("neg",)),
    "abs": Op("number", "tl.abs({0})", "torch.abs({0})", _abs, None, ("abs",)),
    "min": Op(
        "number",
        "smaller({0}, {1})",
        "torch.minimum({0}, {1})",
        _minmax(False),
        "smaller",
        ("minimum",),
    ),
    "max": Op(
        "number",
        "larger({0}, {1})",
        "torch.maximum({0}, {1})",
        _minmax(True),
        "larger",
        ("maximum",),
    ),
    "exp": Op(
        "float",
        "tl.exp({0})",
        "torch.exp({0})",
        lambda b, g, o, x: (b.add("mul", g, o),),
        None,
        ("exp",),
    ),
    "exp2": Op(
        "float", "tl.exp2({0})", "torch.exp2({0})", _times(math.log(2), "mul"), None, ("exp2",)
    ),
    "log": Op(
        "float",
        "tl.log({0})",
        "torch.log({0})",
        lambda b, g, o, x: (b.add("div", g, x),),
        None,
        ("log",),
    ),
    "log2": Op(
        "float", "tl.log2({0})", "torch.log2({0})", _times(1 / math.log(2), "div"), None, ("log2",)
    ),
    "sqrt": Op("float", "tl.sqrt({0})", "torch.sqrt({0})", _sqrt, None, ("sqrt",)),
    "rsqrt": Op("float", "tl.rsqrt({0})", "torch.rsqrt({0})", _rsqrt, None, ("rsqrt",)),
    "tanh": Op("float", "tanh({0})", "torch.tanh({0})", _tanh, "tanh", ("tanh",)),
    "sigmoid": Op("float", "tl.sigmoid({0})", "torch.sigmoid({0})", _sigmoid, None, ("sigmoid",)),
    "erf": Op("float", "tl.erf({0})", "torch.erf({0})", _erf, None, ("erf",)),
    "sin": Op(
        "float",
        "tl.sin({0})",
        "torch.sin({0})",
        lambda b, g, o, x: (b.add("mul", g, b.add("cos", x)),),
        None,
        ("sin",),
    ),
    "cos": Op(
        "float",
        "tl.cos({0})",
        "torch.cos({0})",
        lambda b, g, o, x: (b.add("neg", b.add("mul", g, b.add("sin", x))),),
        None,
        ("cos",),
    ),
    "floor": Op("float", "tl.floor({0})", "torch.floor({0})", None, None, ("floor",)),
    "ceil": Op("float", "tl.ceil({0})", "torch.ceil({0})", None, None, ("ceil",)),
    "eq": Op("compare", "{0} == {1}", "{0} == {1}", None, None, ("eq",)),
    "ne": Op("compare", "{0} != {1}", "{0} != {1}", None, None, ("ne",)),
    "lt": Op("compare", "{0} < {1}", "{0} < {1}", None, None, ("lt",)),
    "le": Op("compare", "{0} <= {1}", "{0} <= {1}", None, None, ("le",)),
    "gt": Op("compare", "{0} > {1}", "{0} > {1}", None, None, ("gt",)),
    "ge": Op("compare", "{0} >= {1}", "{0} >= {1}", None, None, ("ge",)),
    "and": Op("bits", "{0} & {1}", "{0} & {1}", None, None, ("bitwise_and",)),
    "or": Op("bits", "{0} | {1}", "{0} | {1}", None, None, ("bitwise_or",)),
    "xor": Op("bits", "{0} ^ {1}", "{0} ^ {1}", None, None, ("bitwise_xor",)),
    "not": Op("bits", "~{0}", "~{0}", None, None, ("bitwise_not",)),
    "shl": Op("bits", "{0} << {1}", "{0} << {1}", None, None, ("bitwise_left_shift",)),
    "shr": Op("bits", "{0} >> {1}", "{0} >> {1}", None, None, ("bitwise_right_shift",)),
    "where": Op(
        "select",
        "tl.where({0}, {1}, {2})",
        "torch.where({0}, {1}, {2})",
        lambda b, g, o, c, x, y: (None, b.add("where", c, g, 0.0), b.add("where", c, 0.0, g)),
    ),
    "bool": Op("cast", "{0} != 0", "{0} != 0"),
    "int": Op("cast", "{0}.to(tl.int32)", "{0}.to(torch.int32)"),
    "long": Op("cast", "{0}.to(tl.int64)", "{0}.to(torch.int64)"),
    "float": Op("cast", "{0}.to(tl.float32)", "{0}.to(FLOAT)"),
}

# What else is taken apart into these: by `score_aten`, which the docs' list follows.
ALSO = (
    "add", "sub", "rsub", "mul", "div", "reciprocal", "square", "pow", "clamp", "clamp_min",
    "clamp_max", "relu", "silu", "sign", "trunc", "where", "masked_fill", "isnan", "isinf",
    "logical_and", "logical_or", "logical_xor", "logical_not", "full", "full_like", "zeros",
    "zeros_like", "ones", "ones_like", "scalar_tensor", "index", "select", "view", "expand",
    "squeeze", "unsqueeze", "clone", "detach", "to",
)  # fmt: skip


def known() -> list[str]:
    """PyTorch's operators that functions may use."""
    return sorted({name for op in OPS.values() for name in op.aten} | set(ALSO))


def is_constant(x: Operand) -> bool:
    return isinstance(x, (bool, int, float)) and not isinstance(x, Ref)


def constant_kind(x: Operand) -> str:
    """The type a Python number has where no tensor decides."""
    return {bool: "bool", int: "long", float: "float"}[type(x)]


def promoted(kinds: list[tuple[str, bool]]) -> str:
    """PyTorch's result type of 0-d tensors and Python numbers, as (kind, is it a number)."""
    tensors = [KINDS.index(kind) for kind, is_number in kinds if not is_number]
    numbers = [KINDS.index(kind) for kind, is_number in kinds if is_number]
    most = max(tensors, default=-1)
    # a number counts only where its category, bool < int < float, is above the tensors'
    category = (0, 1, 1, 2)
    for number in numbers:
        if most < 0 or category[number] > category[most]:
            most = max(most, number)
    return KINDS[most]


def typed(name: str, kinds: list[tuple[str, bool]]) -> tuple[list[str], str]:
    """The types that an operator's operands are cast to, and that of its result."""
    op = OPS[name]
    if len(kinds) != op.arity:
        raise SpecError(f"operator {name} takes {op.arity} operands, got {len(kinds)}")
    if op.rule == "cast":
        return [kinds[0][0]], name
    if op.rule == "float":
        return ["float"] * op.arity, "float"
    if op.rule == "select":
        if kinds[0][0] != "bool":
            raise SpecError(f"operator where takes a bool first, got {kinds[0][0]}")
        kind = promoted(kinds[1:])
        return ["bool", kind, kind], kind
    kind = promoted(kinds)
    if (op.rule == "number" and kind == "bool") or (op.rule == "bits" and kind == "float"):
        raise SpecError(f"operator {name} does not take {kind}")
    return [kind] * op.arity, "bool" if op.rule == "compare" else kind
