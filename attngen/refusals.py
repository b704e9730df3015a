"""Which features of a spec exclude each other, tried out: `python -m attngen.refusals` prints
docs/features.md.

Each field of AttentionSpec gives a feature, so that a new one is tried with all others.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from attngen import hopper, hopper_decode
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.spec import FIELDS, AttentionSpec


def _score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 0.5


def _mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


# Values of the fields that are no bools, where one makes a feature.
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "head_dim": (96,),
    "head_dim_v": (32,),
    "dtype": ("float16", "float32"),
    "causal": (True, "top_left"),
    "window": ((1023, 0), (511, 511)),
    "dropout_p": (0.1,),
    "softmax_scale": (-0.5,),
    "softcap": (30.0,),
    "score_mod": (_score_mod,),
    "mask_mod": (_mask_mod,),
    "layout": ("bshd", "thd"),
    "chunk": (8192,),
    "fp8_scale": ("tensor", "block"),
    "kv_dtype": ("float8_e4m3fn", "int8"),
    "kv_scale": ("tensor", "key"),
    "aux": (("max_logit",), ("col_sum",), ("entropy",)),
    "precision": ("tf32",),
    "deterministic": (True,),
}
# What a field cannot do without.
NEEDS: dict[str, dict[str, Any]] = {
    "fp8_scale": {"dtype": "float8_e4m3fn"},
    "precision": {"dtype": "float32"},
    "prefix_lm": {"causal": True},
    "shared_kv": {"head_dim_v": 32},
    "kv_dtype": {"kv_scale": "head"},
    "kv_scale": {"kv_dtype": "int8"},
    "block_map": {"mask_mod": _mask_mod},
}


@dataclass(frozen=True, eq=False)
class Feature:
    """A value of a field."""

    name: str
    value: Any
    needs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, tuple):
            value = ":".join(map(str, value))
        elif callable(value):
            value = "f"
        elif isinstance(value, bool):
            value = str(value).lower()
        return f"{self.name}={value}"


def features() -> list[Feature]:
    """A feature or two of each field."""
    found = []
    for name, each in FIELDS.items():
        values = (True,) if each.type == "bool" else EXAMPLES[name]
        found += [Feature(name, value, NEEDS.get(name, {})) for value in values]
    return found


def refusal(*wanted: Feature) -> SpecError | None:
    """Why no spec has these features; None if one has."""
    fields: dict[str, Any] = {"head_dim": 64}
    for each in wanted:
        fields |= each.needs
    try:
        AttentionSpec(**fields | {each.name: each.value for each in wanted})
    except SpecError as error:
        return error
    return None


def document() -> str:
    """The text of docs/features.md."""
    every = features()
    alone = {each: refusal(each) for each in every}
    built = [each for each in every if alone[each] is None]
    lines = [
        "# Features, and pairs that are refused",
        "",
        "Printed by `python -m attngen.refusals`, which tries every field of `AttentionSpec` alone",
        "and with every other; a test holds this page to it. What is not listed works, forward and",
        "backward.",
        "",
        "## Pairs",
        "",
        f"Of the pairs of these {len(built)} features, those below are refused: by `SpecError`",
        "where one excludes the other, by `UnsupportedSpecError` where the pair is not built.",
        "",
        *_wrapped(built),
        "",
        "| feature | with | error | reason |",
        "|---|---|---|---|",
        *_pairs(built),
        "",
        *_alone(alone),
        "## Of the portable lowering alone",
        "",
        "| feature | why the hopper lowering does not serve it |",
        "|---|---|",
        *(f"| `{each}` | {'; '.join(why)} |" for each in built if (why := _unserved(each))),
    ]
    return "\n".join(lines) + "\n"


def _alone(alone: dict[Feature, SpecError | None]) -> list[str]:
    """A row for each feature that is refused by itself."""
    rows = [f"| `{each}` | {_reason(why)} |" for each, why in alone.items() if why is not None]
    if not rows:
        return []
    return ["## Not built", "", "| feature | reason |", "|---|---|", *rows, ""]


def _pairs(built: list[Feature]) -> list[str]:
    """A row for each feature, reason and the features that it goes against."""
    found: dict[tuple[Feature, str, str], list[Feature]] = {}
    for one, other in itertools.combinations(built, 2):
        if one.name == other.name or any(
            other.needs.get(name, value) != value for name, value in one.needs.items()
        ):
            continue  # two values of a field
        why = refusal(one, other)
        if why is not None:
            kind = "Unsupported" if isinstance(why, UnsupportedSpecError) else ""
            found.setdefault((one, f"{kind}SpecError", _reason(why)), []).append(other)
    return [
        f"| `{one}` | {', '.join(f'`{other}`' for other in others)} | `{kind}` | {reason} |"
        for (one, kind, reason), others in found.items()
    ]


def _reason(why: SpecError) -> str:
    text = "; ".join(why.reasons) if isinstance(why, UnsupportedSpecError) else str(why)
    return text.replace("|", "\\|")


def _unserved(feature: Feature) -> list[str]:
    fields = {"head_dim": 64, **feature.needs, feature.name: feature.value}
    spec = AttentionSpec(**fields)
    if spec.shared_kv:
        return hopper_decode.unserved_anywhere(spec)
    return hopper.unserved_anywhere(spec)


def _wrapped(built: list[Feature]) -> list[str]:
    """Their names, in lines of at most 100 columns."""
    lines = [""]
    for each in built:
        item = f"`{each}`" + ("" if each is built[-1] else ",")
        if len(lines[-1]) + len(item) + 1 > 100:
            lines.append("")
        lines[-1] = f"{lines[-1]} {item}".strip()
    return lines


if __name__ == "__main__":
    print(document(), end="")
