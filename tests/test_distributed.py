"""Attention over ranks against attention of the whole, on gloo, with a hop in plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from ranks import pool
from support import REPO

LAYOUTS = ("contiguous", "zigzag", "striped")
METHODS = ("ring", "ulysses", "allgather")


def check(world: int, **case: Any) -> None:
    pool().run(world, "rank_cases:compare", case={"seqlen": 38, "layout": "contiguous", **case})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "world",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4],
)
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
    """Every feature by every method; worlds and layouts take turns, and all but one turn of each is
    slow."""
    found = []
    for n, name in enumerate(FEATURES):
        for m, method in enumerate(METHODS):
            if method == "ulysses" and name in NOT_BY_HEADS:
                continue
            for i, layout in enumerate(LAYOUTS):
                world = WORLDS[(n + m + i) % 3]
                usual = (n + m) % 3 == i and (method == "ring" or n % 2 == (m == 1))
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


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("contiguous", "longer-keys"),
        ("zigzag", "window-sinks-softcap"),
        ("striped", "dropout"),
        *(
            pytest.param(layout, name, marks=pytest.mark.slow)
            for layout in LAYOUTS
            for name in ("full", "causal-window", "documents", "bfloat16")
        ),
    ],
)
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
        (2, "ring", "zigzag", "bfloat16"),
        (2, "ring", "striped", "dropout-sinks"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, "ring", "zigzag", "window-sinks-softcap"),
                (2, "ring", "contiguous", "bias"),
                (3, "ring", "zigzag", "alibi"),
                (2, "ring", "contiguous", "documents"),
                (3, "ring", "zigzag", "longer-keys"),
                (2, "ulysses", "striped", "dropout"),
                (2, "ulysses", "zigzag", "mqa"),
                (2, "allgather", "zigzag", "prefix"),
                (2, "allgather", "contiguous", "top-left"),
            )
        ),
    ],
)
def test_hop_of_kernels_equals_whole(world: int, method: str, layout: str, name: str) -> None:
    small = {"batch": 1, "heads": (2, 1), "seqlen": 21}  # interpreted
    check(world, method=method, layout=layout, hop="kernel", **{**small, **FEATURES[name]})


@pytest.mark.slow
def test_score_mod_over_ranks() -> None:
    pool().run(2, "rank_cases:functions")


@pytest.mark.parametrize(
    ("method", "layout", "hop", "world"),
    [
        ("ring", "zigzag", "kernel", 2),
        pytest.param("ulysses", "contiguous", "kernel", 2, marks=pytest.mark.slow),
        *((m, x, "torch", 3) for m, x in zip(METHODS, LAYOUTS, strict=True)),
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


@pytest.mark.parametrize(
    ("method", "layout"), [("ring", "zigzag"), ("ulysses", "striped"), ("allgather", "striped")]
)
def test_packed_sequences(method: str, layout: str) -> None:
    pool().run(3, "rank_cases:packed", method=method, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seqlen", [37, 3])
def test_helpers(layout: str, seqlen: int) -> None:
    pool().run(4, "rank_cases:helpers", layout=layout, seqlen=seqlen)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("ring", "window-sinks-softcap"),
        pytest.param("ulysses", "dropout", marks=pytest.mark.slow),
        pytest.param("allgather", "documents", marks=pytest.mark.slow),
        ("ulysses", "no-lse"),
    ],
)
def test_compiled_in_one_graph(method: str, name: str) -> None:
    case = {"seqlen": 38, "method": method, "layout": "zigzag", **FEATURES[name]}
    pool().run(2, "rank_cases:compare", case={"dynamic": True, **case}, compiled=True)


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


@pytest.mark.parametrize(
    ("rank_0", "others", "words"),
    [
        ({"causal": True}, {}, "causal"),
        ({"dropout_p": 0.1, "dropout_seed": 3}, {"dropout_p": 0.1}, "with a dropout_seed"),
        ({"method": "ulysses", "return_lse": True}, {"method": "ulysses"}, "with lse"),
        ({"softmax_scale": 0.5}, {"softmax_scale": 0.25}, "softmax_scale 0.25"),
        ({"softcap": 3.0}, {"softcap": 2.0}, "softcap 2.0"),
        (
            {"dropout_p": 0.1, "dropout_seed": 3, "causal": "top_left"},
            {"dropout_p": 0.2, "dropout_seed": 3, "causal": "top_left"},
            "dropout_p 0.2",
        ),
        (
            {"dropout_p": 0.1, "dropout_seed": 3, "window": (4, 0)},
            {"dropout_p": 0.1, "dropout_seed": 4, "window": (4, 0)},
            "dropout_seed 4",
        ),
    ],
)
def test_ranks_that_ask_for_different_things_are_told(
    rank_0: dict[str, Any], others: dict[str, Any], words: str
) -> None:
    for said in pool().run(2, "rank_cases:differ", rank_0=rank_0, others=others):
        assert "rank 0: " in said and "rank 1: " in said and words in said


def test_group_without_a_backend_for_the_tensors_is_told() -> None:
    for said in pool().run(4, "rank_cases:without_backend"):
        assert len(said) == 2
        for words in said:
            assert "is on cpu, but the process group was made for cuda:gloo" in words


def test_defaults_of_single_devices_are_taken() -> None:
    pool().run(2, "rank_cases:defaults")


@pytest.mark.parametrize(
    "method", ["ring", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS[1:])]
)
def test_other_ranks_end_when_one_fails(method: str) -> None:
    found = pool().run(3, "rank_cases:fails_on_rank", bad=1, seconds=2.0, method=method)
    assert found.pop(1) == "failed"
    for said in found:
        assert "of 3 (global rank" in said and "another rank failed, or made no such call" in said


# ---- named cases of tests/cases, and the acceptance client -----------------------------------

NAMED: dict[str, tuple[int, dict[str, Any]]] = {
    "MRG-5": (4, {"seqlen": 16}),
    "ZIG-2": (4, {"seqlen": 32, "layout": "striped", "options": {"causal": True}}),
    "ZIG-3": (
        4,
        {"seqlen": 48, "layout": "zigzag", "dtype": "bfloat16", "options": {"causal": True}},
    ),
    "DRP-4": (2, {"seqlen": 32, "options": {"dropout_p": 0.2, "dropout_seed": 1}}),
    "ULY-3": (
        4,
        {
            "seqlen": 1001,
            "method": "ulysses",
            "batch": 1,
            "heads": (4, 1),
            "options": {"causal": True},
        },
    ),
    "ULY-4": (4, {"seqlen": 30, "method": "ulysses", "heads": (14, 2)}),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_case(name: str) -> None:
    world, case = NAMED[name]
    check(world, **{"method": "ring", **case})


@pytest.mark.slow
def test_zigzag_of_a_length_that_does_not_divide() -> None:
    """ZIG-1: 2999 rows over 4 ranks."""
    case = {"batch": 1, "heads": (1, 1), "options": {"causal": True}}
    check(4, method="ring", layout="zigzag", seqlen=2999, **case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_acceptance_client(world: int, dtype: str) -> None:
    line = ["tests/cases/cp_acceptance.py", "--impl", "cp_adapter:attention"]
    line += ["--world", str(world), "--dtype", dtype]
    path = os.pathsep.join([str(REPO), str(REPO / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *line], cwd=REPO, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and " 0 failed" in done.stdout, done.stdout + done.stderr[-2000:]
