"""PyTorch's operators as statements of score_mod and mask_mod."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attngen.errors import UnsupportedSpecError
from attngen.score_nodes import Builder
from attngen.score_ops import KINDS, OPS, Operand, is_constant, known


class Writer:
    """Writes the operators of a function down, of operands instead of tensors."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.builder = Builder()

    def unsupported(self, what: str, why: str = "kernels do not have it") -> UnsupportedSpecError:
        """The error of a function that uses what it may not."""
        names = ", ".join(known())
        reason = f"{self.who} uses {what}, but {why}; operators on 0-d tensors are {names}"
        return UnsupportedSpecError([reason])

    def of_kind(self, kind: str, x: Operand) -> Operand:
        """x as PyTorch has it: of another integer type where a typed constant decides."""
        if is_constant(x) or self.builder.kind(x) == kind:
            return x
        return self.builder.add(kind, x)

    def written(self, name: str, x: list[Any], kwargs: dict[str, Any], kind: str) -> Operand:
        """Statements for an operator whose result is of a kind."""
        add = self.builder.add
        if name in _LIKE:
            return _LIKE[name](x, kind)
        if name in ("_to_copy", "convert_element_type"):
            return self.of_kind(kind, x[0])
        if name in ("add", "sub", "rsub"):
            first, second = (x[1], x[0]) if name == "rsub" else x[:2]
            alpha = x[2] if len(x) > 2 else kwargs.get("alpha", 1)
            if alpha != 1:
                scaled = self._add_of("mul", kind, x[0] if name == "rsub" else x[1], alpha)
                first, second = (first, scaled) if name != "rsub" else (x[1], scaled)
            op = "add" if name == "add" else "sub"
            return (
                add("or", first, second)
                if kind == "bool"
                else self._add_of(op, kind, first, second)
            )
        if name == "mul":
            return add("and", *x[:2]) if kind == "bool" else self._add_of("mul", kind, *x[:2])
        if name in ("div", "true_divide"):
            mode = kwargs.get("rounding_mode")
            if mode == "floor":
                return self._add_of("floordiv", kind, *x[:2])
            ratio = add("div", *x[:2])
            return ratio if mode is None else self.of_kind(kind, self.truncated(ratio))
        if name == "pow":
            return self._power(x[0], x[1], kind)
        if name in ("clamp", "clamp_min", "clamp_max"):
            low, high = [*x[1:], None, None][:2]
            if name == "clamp_max":
                low, high = None, low
            low, high = kwargs.get("min", low), kwargs.get("max", high)
            found = x[0]
            found = found if low is None else self._add_of("max", kind, found, low)
            return found if high is None else self._add_of("min", kind, found, high)
        if name == "masked_fill":
            return add("where", x[1], x[2], x[0])
        if name == "where" and len(x) == 3:
            return add("where", *x)
        if name in ("isnan", "isinf"):
            whole = self.of_kind("float", x[0])
            return (
                add("ne", whole, whole)
                if name == "isnan"
                else add("eq", add("abs", whole), math.inf)
            )
        if name.startswith("logical_"):
            return add(name.removeprefix("logical_"), *(self.of_kind("bool", y) for y in x))
        if name in _UNARY:
            return _UNARY[name](self, x[0], kind)
        if name in ("floor", "ceil", "trunc", "round") and kind != "float":
            return x[0]
        for op, each in OPS.items():
            if name in each.aten and len(x) == each.arity and not kwargs:
                return add(op, *x) if each.rule != "number" else self._add_of(op, kind, *x)
        raise self.unsupported(f"aten.{name}")

    def _add_of(self, op: str, kind: str, *x: Operand) -> Operand:
        """An arithmetic statement whose operands PyTorch takes as of a kind."""
        if all(is_constant(y) or KINDS.index(self.builder.kind(y)) < KINDS.index(kind) for y in x):
            own = next(n for n, y in enumerate(x) if not is_constant(y))
            x = tuple(self.builder.add(kind, y) if n == own else y for n, y in enumerate(x))
        return self.builder.add(op, *x)

    def truncated(self, x: Operand) -> Operand:
        """x, rounded towards zero."""
        add = self.builder.add
        return add("where", add("lt", x, 0.0), add("ceil", x), add("floor", x))

    def _power(self, x: Operand, n: Operand, kind: str) -> Operand:
        add = self.builder.add
        if is_constant(x):
            if x <= 0:
                raise self.unsupported(
                    "aten.pow", "it takes a positive base or a constant exponent"
                )
            return add("exp2", add("mul", self.of_kind("float", n), math.log2(x)))
        if not is_constant(n):
            raise self.unsupported(
                "aten.pow",
                "it takes a constant base or exponent (torch.exp2(y * torch.log2(x)) is x**y of a "
                "positive x)",
            )
        if float(n) == int(n) and abs(n) <= 16 and (n > 0 or kind == "float"):
            x, count = self.of_kind(kind, x), abs(int(n))
            found: Operand = None
            while count:
                if count & 1:
                    found = x if found is None else add("mul", found, x)
                count >>= 1
                x = add("mul", x, x) if count else x
            found = 1.0 if found is None else found
            return add("div", 1.0, found) if n < 0 else found
        if kind != "float":
            raise self.unsupported("aten.pow", "an int takes exponents from 1 to 16")
        if n == 0.5:
            return add("sqrt", x)
        return add("exp2", add("mul", add("log2", x), float(n)))


def _sign(w: Writer, x: Operand, kind: str) -> Operand:
    add, one = w.builder.add, 1.0 if kind == "float" else 1
    return w.of_kind(
        kind, add("where", add("gt", x, 0), one, add("where", add("lt", x, 0), -one, 0 * one))
    )


_UNARY: dict[str, Callable[[Writer, Operand, str], Operand]] = {
    "reciprocal": lambda w, x, kind: w.builder.add("div", 1.0, x),
    "square": lambda w, x, kind: w.builder.add("mul", x, x),
    "relu": lambda w, x, kind: w.builder.add("where", w.builder.add("le", x, 0), 0, x),
    "silu": lambda w, x, kind: w.builder.add("mul", x, w.builder.add("sigmoid", x)),
    "sign": _sign,
    "trunc": lambda w, x, kind: w.truncated(x) if kind == "float" else x,
}
_LIKE: dict[str, Callable[[list[Any], str], Operand]] = {
    "full_like": lambda x, kind: _plain(x[1], kind),
    "zeros_like": lambda x, kind: _plain(0, kind),
    "ones_like": lambda x, kind: _plain(1, kind),
    "new_zeros": lambda x, kind: _plain(0, kind),
    "new_ones": lambda x, kind: _plain(1, kind),
    "new_full": lambda x, kind: _plain(x[2], kind),
}


def _plain(x: Any, kind: str) -> Operand:
    return {"bool": bool, "float": float}.get(kind, int)(x)
