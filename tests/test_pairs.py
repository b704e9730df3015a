"""Every pair of features, in few calls: each row of a covering array against the oracle.

A row is one call, forward and all gradients. All rows run in `make accept`, a tenth of them,
another one each day, in `make test`.
"""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch
from support import assert_exact
from torch import Tensor

import attngen

FACTORS: dict[str, tuple[Any, ...]] = {
    "mask": (
        "none",
        "causal",
        "top_left",
        "window",
        "left",
        "attn_mask",
        "attn_mask causal",
        "chunk",
        "chunk causal",
        "prefix causal",
        "prefix left causal",
        "documents",
        "documents causal",
        "documents shuffled",
        "tree",
        "tree causal",
        "prefix documents tree causal",
        "prefix tree chunk causal",
    ),
    "bias": ("none", "full", "of heads", "of keys", "alibi", "alibi and full"),
    "softcap": (None, 2.5),
    "sinks": (False, True),
    "dropout": (0.0, 0.3),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "layout": ("bhsd", "bshd"),
    "dims": ((16, 16), (40, 24), (96, 96)),
    "dtype": ("float32", "bfloat16", "float16"),
    "deterministic": (False, True),
    "lengths": ((21, 37), (37, 21)),
}
BATCH = 2


def covering() -> list[dict[str, Any]]:
    """Rows in which every two values of two factors meet, found greedily."""
    names = list(FACTORS)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }
    rng, rows = random.Random(0), []
    while pairs:
        best: tuple[int, dict[str, Any]] = (-1, {})
        for _ in range(60):
            (a, x), (b, y) = rng.choice(sorted(pairs, key=str))
            row = {name: rng.choice(values) for name, values in FACTORS.items()} | {a: x, b: y}
            best = max(best, (len(pairs & _met(row)), row), key=lambda each: each[0])
        pairs -= _met(best[1])
        rows.append(best[1])
    return rows


def _met(row: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))


ROWS = covering()
TODAY = int(os.environ["ATTNGEN_TEST_DAY"]) % 10


def _every() -> list[Any]:
    return [
        pytest.param(
            row,
            id=f"{number}-" + "-".join(str(value).replace(" ", "") for value in row.values()),
            marks=[] if number % 10 == TODAY else [pytest.mark.slow],
        )
        for number, row in enumerate(ROWS)
    ]


def test_rows_cover_every_pair() -> None:
    met = set().union(*(_met(row) for row in ROWS))
    sizes = [len(values) for values in FACTORS.values()]
    assert len(met) == sum(m * n for m, n in itertools.combinations(sizes, 2))


@pytest.mark.parametrize("row", _every())
def test_pair(row: dict[str, Any]) -> None:
    check(row)


def masks_of(kind: str, rows: int, keys: int, device: str) -> dict[str, Tensor]:
    """Prefixes, documents and trees that a kind of mask names."""
    found: dict[str, Tensor] = {}
    if "prefix" in kind:
        found["prefix_lens"] = torch.tensor([keys // 4, keys - 3]).to(device)
    if "documents" in kind:
        for name, length in (("doc_ids_q", rows), ("doc_ids_k", keys)):
            ids = torch.randint(0, 4, (BATCH, length))
            found[name] = (ids if "shuffled" in kind else ids.sort().values).to(device)
    if "tree" in kind:
        nodes = min(rows, keys) // 2
        found["tree_mask"] = (torch.rand(BATCH, nodes, nodes) < 0.5).to(device)
    return found


def check(row: dict[str, Any], device: str = "cpu", longer: int = 1) -> None:
    """Compare a row with the oracle, at lengths `longer` times its own."""
    torch.manual_seed(3)
    dtype, (heads, heads_kv), (dim, dim_v) = getattr(torch, row["dtype"]), row["heads"], row["dims"]
    rows, keys = (longer * length for length in row["lengths"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype).requires_grad_()

    q, k = normal(BATCH, heads, rows, dim), normal(BATCH, heads_kv, keys, dim)
    v = normal(BATCH, heads_kv, keys, dim_v)
    scores: dict[str, Tensor] = {}
    for kind, shape in {
        "full": (BATCH, heads, rows, keys),
        "of heads": (1, heads, rows, keys),
        "of keys": (BATCH, 1, 1, keys),
    }.items():
        if kind in row["bias"]:
            scores["bias"] = normal(*shape)
    if "alibi" in row["bias"]:  # in the inputs' dtype, so that its gradient is judged by that
        slopes = torch.rand(BATCH, heads) / longer  # exp(lse) of far keys stays a float32 number
        scores["alibi_slopes"] = slopes.to(device, dtype).requires_grad_()
    if row["sinks"]:
        scores["sinks"] = normal(heads)
    options: dict[str, Any] = {
        "causal": "top_left" if row["mask"] == "top_left" else "causal" in row["mask"],
        "window": {"window": (9, 4), "left": (7, None)}.get(
            row["mask"].removeprefix("prefix ").removesuffix(" causal")
        ),
        "chunk": 11 if "chunk" in row["mask"] else None,
        "softcap": row["softcap"],
        "dropout_p": row["dropout"],
        "dropout_seed": 5 if row["dropout"] else None,
    }
    if "attn_mask" in row["mask"]:
        options["attn_mask"] = (torch.rand(BATCH, 1, rows, keys) < 0.7).to(device)
        options["attn_mask"][:, :, 2] = False
    options |= masks_of(row["mask"], rows, keys, device)
    named = {"layout": row["layout"], "deterministic": row["deterministic"]}
    is_bshd = row["layout"] == "bshd"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if is_bshd:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = attngen.attention(q, k, v, **scores, **options, **named, return_lse=True)
        return out.transpose(1, 2) if is_bshd else out, lse

    assert_exact(attend, q, k, v, options, scores=scores)
