"""Attention over ranks against attention of the whole, on gloo, with a hop in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import pool

LAYOUTS = ("contiguous", "zigzag", "striped")
METHODS = ("ring", "ulysses", "allgather")


def check(world: int, **case: Any) -> None:
    pool().run(world, "rank_cases:compare", case={"seqlen": 38, "layout": "contiguous", **case})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_causal_equals_whole(world: int, method: str, layout: str) -> None:
    check(world, method=method, layout=layout, options={"causal": True})


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "top-left": {"options": {"causal": "top_left"}, "seqlen_k": 51},
    "longer-keys": {"options": {"causal": True}, "seqlen_k": 51},
    "fewer-keys": {"options": {"causal": True}, "seqlen_k": 21},
    "window": {"options": {"window": (7, 5)}},
    "causal-window": {"options": {"causal": True, "window": (9, 0)}},
    "narrow-window": {"options": {"causal": True, "window": (2, 0)}},
    "chunk": {"options": {"causal": True, "chunk": 11}},
    "softcap": {"options": {"causal": True, "softcap": 2.0, "softmax_scale": 0.4}},
    "negative-scale": {"options": {"softmax_scale": -0.3}},
    "alibi": {"options": {"causal": True}, "terms": ["alibi_slopes"]},
    "sinks": {"options": {"causal": True}, "terms": ["sinks"]},
    "window-sinks-softcap": {
        "options": {"causal": True, "window": (9, 0), "softcap": 3.0},
        "terms": ["sinks"],
    },
    "documents": {"options": {"causal": True}, "terms": ["documents"]},
    "full-documents": {"terms": ["documents"]},
    "prefix": {"options": {"causal": True}, "terms": ["prefix_lens"]},
    "dropout": {"options": {"causal": True, "dropout_p": 0.3, "dropout_seed": 5}},
    "dropout-sinks": {"options": {"dropout_p": 0.3, "dropout_seed": 5}, "terms": ["sinks"]},
    "bias": {"options": {"causal": True}, "terms": ["bias"]},
    "mask-sinks": {"terms": ["attn_mask", "sinks"]},
    "mha": {"heads": (4, 4), "options": {"causal": True}},
    "mqa": {"heads": (4, 1), "options": {"causal": True}},
    "dims": {"dim": 24, "dim_v": 40, "options": {"causal": True}},
    "bfloat16": {"dtype": "bfloat16", "options": {"causal": True}},
    "bfloat16-sinks": {"dtype": "bfloat16", "options": {"window": (9, 3)}, "terms": ["sinks"]},
    "spread": {"options": {"causal": True}, "spread": 30.0},
    "no-lse": {"options": {"causal": True}, "lse": False},
    "short": {"options": {"causal": True}, "seqlen": 3},
    "one-row": {"options": {"causal": True}, "seqlen": 1},
}
NOT_BY_HEADS = ("bias", "mask-sinks")
WORLDS = (4, 2, 3)


def _features() -> list[Any]:
    """Every feature by every method; worlds and layouts take turns, the others of a ring are
    slow."""
    found = []
    for n, name in enumerate(FEATURES):
        for m, method in enumerate(METHODS):
            if method == "ulysses" and name in NOT_BY_HEADS:
                continue
            for i, layout in enumerate(LAYOUTS):
                world = WORLDS[(n + m + i) % 3]
                usual = (n + m) % 3 == i or (method == "ring" and (n + 1) % 3 == i)
                marks = [] if usual else [pytest.mark.slow]
                label = f"{name}-{method}-{layout}-{world}"
                found.append(pytest.param(world, method, layout, name, id=label, marks=marks))
    return found


@pytest.mark.parametrize(("world", "method", "layout", "name"), _features())
def test_feature_equals_whole(world: int, method: str, layout: str, name: str) -> None:
    check(world, method=method, layout=layout, **FEATURES[name])


@pytest.mark.parametrize(
    ("world", "heads"),
    [(4, (6, 3)), (3, (4, 2)), (4, (7, 1)), (3, (5, 5)), (4, (14, 2)), (2, (10, 2))],
)
def test_ulysses_shares_out_any_number_of_heads(world: int, heads: tuple[int, int]) -> None:
    options = {"causal": True, "dropout_p": 0.2, "dropout_seed": 3}
    terms = ["sinks", "alibi_slopes"]
    check(world, method="ulysses", layout="zigzag", heads=heads, options=options, terms=terms)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["full", "longer-keys", "window-sinks-softcap", "dropout"])
def test_usp_equals_whole(layout: str, name: str) -> None:
    check(4, method="usp", mesh=(2, 2), layout=layout, **FEATURES[name])


@pytest.mark.parametrize("mesh", [(1, 4), (4, 1)])
def test_usp_of_one_dim(mesh: tuple[int, int]) -> None:
    case = {**FEATURES["causal-window"], "heads": (6, 3), "terms": ["documents"]}
    check(4, method="usp", mesh=mesh, layout="zigzag", **case)


# ---- hops of kernels ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "method", "layout", "name"),
    [
        (2, "ring", "zigzag", "window-sinks-softcap"),
        (2, "ring", "striped", "dropout-sinks"),
        (2, "ring", "contiguous", "bias"),
        (2, "ring", "zigzag", "bfloat16"),
        (3, "ring", "zigzag", "alibi"),
        (2, "ring", "contiguous", "documents"),
        (3, "ring", "zigzag", "longer-keys"),
        (2, "ulysses", "striped", "dropout"),
        (3, "ulysses", "zigzag", "mha"),
        (2, "allgather", "zigzag", "prefix"),
        (2, "allgather", "contiguous", "top-left"),
    ],
)
def test_hop_of_kernels_equals_whole(world: int, method: str, layout: str, name: str) -> None:
    check(world, method=method, layout=layout, hop="kernel", **FEATURES[name])


def test_score_mod_over_ranks() -> None:
    pool().run(2, "rank_cases:functions")


@pytest.mark.parametrize(
    ("method", "layout", "hop", "world"),
    [
        ("ring", "zigzag", "kernel", 2),
        ("ulysses", "contiguous", "kernel", 2),
        *((m, x, "torch", 3) for m in METHODS for x in LAYOUTS),
    ],
)
def test_dropout_bits_are_those_of_one_device(
    method: str, layout: str, hop: str, world: int
) -> None:
    pool().run(world, "rank_cases:dropout_bits", method=method, layout=layout, hop=hop)


# ---- around a call --------------------------------------------------------------------------


def test_seed_is_drawn_on_the_first_rank() -> None:
    pool().run(2, "rank_cases:drawn_seed")


@pytest.mark.parametrize("method", METHODS)
def test_checkpoint_recomputes_the_same(method: str) -> None:
    case = {"seqlen": 37, "method": method, "layout": "zigzag"}
    pool().run(3, "rank_cases:checkpointed", case=case)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_packed_sequences(method: str, layout: str) -> None:
    pool().run(3, "rank_cases:packed", method=method, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seqlen", [24, 37, 3])
def test_helpers(layout: str, seqlen: int) -> None:
    pool().run(4, "rank_cases:helpers", layout=layout, seqlen=seqlen)


@pytest.mark.parametrize(
    ("method", "name"),
    [("ring", "window-sinks-softcap"), ("ulysses", "dropout"), ("allgather", "documents"),
     ("ulysses", "no-lse")],
)  # fmt: skip
def test_compiled_in_one_graph(method: str, name: str) -> None:
    case = {"seqlen": 38, "method": method, "layout": "zigzag", **FEATURES[name]}
    pool().run(2, "rank_cases:compare", case=case, compiled=True)


# ---- what is refused, and what fails --------------------------------------------------------


def refused(world: int, **case: Any) -> tuple[str, str]:
    base = {"seqlen": 8, "method": "ring", "layout": "contiguous"}
    found = pool().run(world, "rank_cases:refused", case={**base, **case})
    kinds = {kind for kind, _ in found}
    assert len(kinds) == 1
    return found[0]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"method": "ulysses", "terms": ["bias"]}, "bias with method ulysses: a rank has"),
        ({"method": "ulysses", "heads": (1, 1)}, "there are 1, over 2 ranks; use method="),
    ],
)
def test_what_a_method_cannot_do_is_refused(case: dict[str, Any], words: str) -> None:
    kind, said = refused(2, **case)
    assert kind == "UnsupportedSpecError" and words in said


def test_ranks_that_ask_for_different_things_are_told() -> None:
    for said in pool().run(2, "rank_cases:differ"):
        assert "rank 0: ring" in said and "rank 1: ring" in said and "causal" in said


@pytest.mark.parametrize("method", METHODS)
def test_other_ranks_end_when_one_fails(method: str) -> None:
    found = pool().run(3, "rank_cases:fails_on_rank", bad=1, seconds=2.0, method=method)
    assert found.pop(1) == "failed"
    for said in found:
        assert "of 3 (global rank" in said and "another rank failed, or made no such call" in said
