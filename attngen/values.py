"""Numbers and flags that callers hand in: made plain Python ones, or refused with what to write.

`AttentionSpec` and the calls share these, so that both refuse the same values in the same words.
torch.compile traces them: a symbolic number passes as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attngen.errors import SpecError, nearest

MAX_POSITION = 1 << 30
"""Rows end here, and window sides are cut to it, so that sums of positions stay within 32 bits."""
SMALLEST, LARGEST = 2.0**-126, 2.0**126
"""Scales and caps whose products with log2(e), and whose quotients, float32 holds."""

_RANGE = "from 1.2e-38 to 8.5e37"
_PLAIN: tuple[tuple[type, Any], ...] = ((int, int), (float, float), (str, str.__str__))
_WORDS = {"true": True, "false": False, 1: True, 0: False}


def plain(value: Any) -> Any:
    """The Python value that a numpy scalar, or an int, float or str of a subclass, holds."""
    if type(value) in (int, float, bool, str):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool):
        return value
    for kind, convert in _PLAIN:
        if isinstance(value, kind):
            return convert(value)
    return value


def shown(value: Any) -> str:
    """The value in at most 80 characters of one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of more digits than Python prints
        text = f"an {type(value).__name__} of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    """A word among those allowed, the first of which is the default."""
    if not isinstance(value, str) or value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        hint = hint or f"; leave {name} out for {allowed[0]}"
        raise SpecError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}{hint}")
    return value


def whole(
    name: str, value: Any, low: int = 0, high: int | None = MAX_POSITION, step: str = ""
) -> int:
    """An int in a range; `step` says what to do about another one."""
    if type(value) is int and value >= low and (high is None or value <= high):
        return value
    given, value = value, plain(value)
    known = type(value) is int or _is_symbolic(value)
    if not known or value < low or (high is not None and value > high):
        span = f"from {low} up" if high is None else f"from {low} to {high}"
        step = _meant(name, given, int, low, high) or (f"; {step}" if step else "")
        raise SpecError(f"{name} must be an int {span}, got {shown(given)}{step}")
    return value  # type: ignore[no-any-return]  # checked above


def first(name: str, value: Any) -> int:
    """The batch row or head of the whole call that a part of it begins with."""
    return whole(name, value, step="0 is the first one; leave it out where the call is whole")


def flag(name: str, value: Any, allowed: str = "True or False") -> bool:
    """True or False; not 1, "yes" or anything else that Python takes for it."""
    held = plain(value)
    if type(held) is not bool:
        step = _meant(name, value, bool) or f"; leave {name} out for its default"
        raise SpecError(f"{name} must be {allowed}, got {shown(value)}{step}")
    return held


def probability(name: str, value: Any) -> float:
    """A number from 0 to 1."""
    step = "0.0 switches dropout off"
    p = _number(name, value, "from 0 to 1", step)
    if not 0.0 <= p <= 1.0:
        raise SpecError(f"{name} must be from 0 to 1, got {p!r}; {step}")
    return p


def scale_number(name: str, value: Any) -> float:
    """A softmax scale: a finite number, zero or one that float32 holds."""
    must = f"a finite number, 0 or {_RANGE} in size (what float32 kernels hold)"
    step = "None means 1/sqrt(head_dim)"
    scale = _number(name, value, must, step)
    if not (scale == 0 or SMALLEST <= abs(scale) <= LARGEST):
        raise SpecError(f"{name} must be {must}, got {scale!r}; {step}")
    return scale


def cap_number(value: Any, scale: float | None = None) -> float:
    """A softcap that float32 holds, alone and under the scale."""
    must = f"a positive number {_RANGE} (what float32 kernels hold)"
    step = "None switches it off"
    cap = _number("softcap", value, must, step)
    if not SMALLEST <= cap <= LARGEST:
        raise SpecError(f"softcap must be {must}, got {cap!r}; {step}")
    if scale is not None and abs(scale) / cap > LARGEST:
        raise SpecError(
            f"softmax_scale / softcap must be at most 8.5e37 (what float32 kernels hold), got "
            f"{scale!r} / {cap!r}; raise softcap, or switch it off with None"
        )
    return cap


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """(left, right), each None or an int from 0 to MAX_POSITION, where any window is open."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise SpecError(
            f"window must be (left, right) or None, got {shown(window)}; "
            "a causal window of W keys is (W - 1, 0)"
        )
    left, right = window
    return _window_side("left", left), _window_side("right", right)


def _window_side(side: str, value: Any) -> int | None:
    if value is None or (type(value) is int and 0 <= value <= MAX_POSITION):
        return value
    given, value = value, plain(value)
    known = type(value) is int or _is_symbolic(value)
    if not known or value < 0:
        raise SpecError(
            f"window {side} must be None (open) or an int from 0 up, got {shown(given)}"
            f"{_meant('', given, int, 0)}; None is the only way to say 'no limit'"
        )
    return value if value <= MAX_POSITION else MAX_POSITION


def _number(name: str, value: Any, must: str, step: str) -> float:
    """The value as a float; a bool, a str and a tensor are none. `step` says what to do."""
    if type(value) is float or _is_symbolic(value):
        return value  # type: ignore[no-any-return]  # checked above
    held = plain(value)
    if type(held) is int and -(2**1000) < held < 2**1000:
        return float(held)
    if type(held) is float:
        return held
    step = _meant(name, value, float) or f"; {step}"
    if hasattr(value, "requires_grad") and name != "dropout_p":
        step = "; let a learned scale multiply q, where it gets a gradient"
    elif hasattr(value, "requires_grad"):
        step = f"; write {name}=p.item() for a tensor p"
    raise SpecError(f"{name} must be {must}, got {shown(value)}{step}")


def _meant(
    name: str, value: Any, kind: type, low: float = -math.inf, high: float | None = None
) -> str:
    """`"; write head_dim=64"` where a value is right but for its type; else empty."""
    value = plain(value)
    meant: Any = None
    if kind is bool:
        word = value.lower() if isinstance(value, str) else value
        meant = _WORDS.get(word) if isinstance(word, (str, int)) else None
    elif isinstance(value, (str, float)):
        try:
            meant = kind(value)
        except (ValueError, OverflowError):
            return ""
        if isinstance(value, float) and meant != value:
            return ""
        if not low <= meant <= (math.inf if high is None else high):
            return ""
    if meant is None:
        return ""
    return f"; write {name}={meant}" if name else f"; write {meant}"


def _is_symbolic(value: Any) -> bool:
    """torch's SymInt or SymFloat, known without importing torch."""
    return type(value).__name__ in ("SymInt", "SymFloat")
