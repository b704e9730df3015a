"""Column sums of P under masks of structure and functions, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_close, make_qkv

import attngen
from attngen import reference
from attngen.mask_rules import binary_tree
from attngen.pinned import pinned
from attngen.spec import AttentionSpec
from attngen.tuner import gate

ROWS, KEYS, HEADS = 35, 41, 2
GENERATOR = torch.Generator().manual_seed(2)
IDS_Q = torch.randint(0, 3, (2, ROWS), generator=GENERATOR).sort(1).values.int()
IDS_K = torch.randint(0, 3, (2, KEYS), generator=GENERATOR).sort(1).values.int()
DOCUMENTS = {"doc_ids_q": IDS_Q, "doc_ids_k": IDS_K}
PREFIX = {"prefix_lens": torch.tensor([3, 22]).int()}
TREE = {"tree_mask": binary_tree(9, "cpu")}
SCORE_MOD = (
    "aux0:float1;t0:index aux0 h;t1:tanh score;t2:mul t1 t0;t3:sub q k;t4:eq t3 4;where t4 -inf t2"
)
MASK_MOD = "aux0:long2;t0:index aux0 b q;t1:index aux0 b k;ge t0 t1"
AUX_S, AUX_M = torch.tensor([2.0, -1.0]), torch.arange(2 * KEYS).view(2, KEYS) // 5
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prefix": ({"causal": True, "prefix_lm": True}, PREFIX),
    "documents": ({"documents": True}, DOCUMENTS),
    "documents-unsorted": (
        {"documents": True, "causal": True},
        {n: x.flip(1) % 2 for n, x in DOCUMENTS.items()},
    ),
    "tree": ({"tree_mask": True, "causal": True, "window": (9, 0)}, TREE),
    "all": (
        {"tree_mask": True, "causal": True, "prefix_lm": True, "documents": True},
        {**PREFIX, **DOCUMENTS, **TREE},
    ),
    "mask_mod": ({"mask_mod": MASK_MOD, "dropout_p": 0.3}, {"aux": (AUX_M,)}),
    "score_mod": ({"score_mod": SCORE_MOD, "causal": True, "softcap": 3.0}, {"aux": (AUX_S,)}),
    "both": (
        {"score_mod": SCORE_MOD, "mask_mod": MASK_MOD, "sinks": True, "chunk": 11},
        {"aux": (AUX_S, AUX_M)},
    ),
}


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with pinned({"fwd": SMALL_FWD, "bwd": SMALL_BWD}):
        yield


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fields", "given"), CASES.values(), ids=CASES)
def test_side_outputs(fields: dict[str, Any], given: dict[str, Any], dtype: str) -> None:
    names = ("max_logit", "col_sum", "entropy")
    spec = AttentionSpec(head_dim=16, dtype=dtype, aux=names, **fields)
    sizes = {"batch": 2, "heads": HEADS, "heads_kv": 1, "seqlen_q": ROWS, "seqlen_k": KEYS}
    q, k, v = make_qkv(**sizes, dtype=getattr(torch, dtype))
    tensors = {name: x for name, x in given.items() if name != "aux"}
    beside: dict[str, Any] = {f"aux{n}": x for n, x in enumerate(given.get("aux", ()))}
    call: dict[str, Any] = {"aux_tensors": given["aux"]} if "aux" in given else {}
    if spec.sinks:
        tensors["sinks"] = torch.tensor([0.5, -1.0])
    wanted = reference.side_outputs(spec, q, k, **tensors, **beside)
    attn = attngen.compile(spec)
    out, found = attn(q, k, v, dropout_seed=3, **tensors, **call)
    assert list(found) == list(names)
    for name in names:
        torch.testing.assert_close(found[name].double(), wanted[name], atol=5e-5, rtol=1e-5)
    plain = attngen.compile(AttentionSpec(head_dim=16, dtype=dtype, **fields))
    assert torch.equal(out, plain(q, k, v, dropout_seed=3, **tensors, **call))


@pytest.mark.parametrize("name", ["documents", "mask_mod"])
def test_what_is_hidden_does_not_count(name: str) -> None:
    """Keys that no query sees may hold NaN: their sums are 0."""
    fields, given = CASES[name]
    q, k, v = make_qkv(batch=2, heads=HEADS, heads_kv=1, seqlen_q=ROWS, seqlen_k=KEYS)
    k = k.detach().clone()
    k[:, :, -3:] = torch.nan
    if name == "documents":
        ids = IDS_K.clone()
        ids[:, -3:] = 7
        named: dict[str, Any] = {"doc_ids_q": IDS_Q, "doc_ids_k": ids}
    else:
        table = AUX_M.clone()
        table[:, -3:] = 1 << 40
        named = {"mask_mod": fields["mask_mod"], "aux_tensors": (table,)}
    _, aux = attngen.attention(q, k, v, return_aux=("col_sum", "lse"), **named)
    assert not aux["col_sum"][..., -3:].any()
    total = torch.isfinite(aux["lse"]).sum(2).float()
    assert_close([aux["col_sum"].sum(2)], [total], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "both"])
def test_gate_passes_what_is_right(name: str) -> None:
    spec = AttentionSpec(head_dim=16, dtype="float32", aux=("col_sum",), **CASES[name][0])
    verdict = gate.SmallGate(spec, "fwd", 2, "cpu").check(SMALL_FWD)
    assert verdict.ok, verdict.detail


def test_with_a_block_map_is_refused() -> None:
    with pytest.raises(attngen.UnsupportedSpecError, match="aux=col_sum with block_map"):
        AttentionSpec(head_dim=16, mask_mod="ge q k", block_map=True, aux=("col_sum",))
