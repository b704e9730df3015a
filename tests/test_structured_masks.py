"""Prefixes, documents and trees: out, lse and all gradients, beside the oracle's; tiles that no
query sees are not read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_close, assert_exact, make_qkv, structure
from torch import Tensor

import attngen
from attngen import mask_rules, ops, peers, reference
from attngen.config import BwdConfig, FwdConfig, KernelConfig
from attngen.kernel import kernel
from attngen.pinned import pinned
from attngen.spec import AttentionSpec
from attngen.tuner import case, gate
from attngen.workload import Workload

BATCH, ROWS = 2, 37


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles of 16 by 16, so that short sequences span several; dq by atomic adds where a test of
    both ways asks for them."""
    named = getattr(request.node, "callspec", None)
    is_atomic = named is not None and named.params.get("deterministic") is False
    with pinned(
        {"fwd": SMALL_FWD, "bwd": replace(SMALL_BWD, dq="atomic" if is_atomic else "kernel")}
    ):
        yield


def slow(value: Any, name: str | None = None) -> Any:
    """A value that `make test` leaves out."""
    return pytest.param(value, id=name, marks=pytest.mark.slow)


def ids_of(*lengths: int) -> Tensor:
    """Ids of documents of these lengths, in order."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def documents(rows: int = ROWS, keys: int | None = None) -> dict[str, Tensor]:
    """Sorted ids, in both batch rows other ones; a document of the keys alone, too."""
    named = {"doc_ids_q": torch.stack([ids_of(17, 3, rows - 20), ids_of(rows - 9, 9) * 7 - 3])}
    if keys is not None:
        named["doc_ids_k"] = torch.stack(
            [ids_of(9, 2, 31, keys - 42), ids_of(keys - 30, 30) * 7 - 3]
        )
    return named


def shuffled(rows: int = ROWS, keys: int | None = None) -> dict[str, Tensor]:
    """Ids in no order, some of one side alone."""
    made = torch.Generator().manual_seed(4)
    named = {"doc_ids_q": torch.randint(-2, 4, (BATCH, rows), generator=made)}
    if keys is not None:
        named["doc_ids_k"] = torch.randint(0, 6, (BATCH, keys), generator=made)
    return named


def prefixes(*lengths: int) -> dict[str, Tensor]:
    return {"prefix_lens": torch.tensor(lengths, dtype=torch.int32)}


def tree(n: int = 18, batch: int = BATCH) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(6)
    return {"tree_mask": torch.rand(batch, n, n, generator=made) < 0.4}


def check(q: Tensor, k: Tensor, v: Tensor, masks: dict[str, Tensor], **options: Any) -> None:
    """`attngen.attention` with these is as exact as plain PyTorch."""
    scores = options.pop("scores", {})

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attngen.attention(q, k, v, return_lse=True, **masks, **scores, **options)
        return out, lse

    assert_exact(attend, q, k, v, {**options, **masks}, scores=scores)


def qkv(rows: int = ROWS, keys: int | None = None, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    sizes = {"batch": BATCH, "heads": 2, "heads_kv": 1, **sizes}
    return make_qkv(seqlen_q=rows, seqlen_k=keys, **sizes)


# ---- each mask with each option -------------------------------------------------------------

MASKS: dict[str, dict[str, Tensor]] = {
    "prefix": prefixes(20, 7),
    "documents": documents(),
    "shuffled": shuffled(),
    "tree": tree(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "plain": {},
    "left": {"causal": True, "window": (18, 0)},
    "window": {"window": (18, 9)},
    "chunk": {"chunk": 19},
    "chunk-causal": {"chunk": 19, "causal": True},
    "top-left": {"causal": "top_left"},
    "softcap": {"causal": True, "softcap": 1.5},
    "dropout": {"causal": True, "dropout_p": 0.3, "dropout_seed": 11},
}


def fits(name: str, option: str) -> bool:
    causal = OPTIONS[option].get("causal", False)
    if name == "prefix":
        return causal is not False
    return name != "tree" or causal != "top_left"


@pytest.mark.parametrize(
    ("name", "option", "deterministic"),
    [
        pytest.param(
            name,
            option,
            same_bits,
            marks=[] if same_bits or option == "causal" else pytest.mark.slow,
        )
        for name, option, same_bits in itertools.product(MASKS, OPTIONS, (True, False))
        if fits(name, option)
    ],
)
def test_mask_with_option(name: str, option: str, deterministic: bool) -> None:
    check(*qkv(heads=1), MASKS[name], deterministic=deterministic, **OPTIONS[option])


@pytest.mark.parametrize("deterministic", [True, slow(False)])
@pytest.mark.parametrize("name", MASKS)
def test_mask_with_all_that_acts_on_scores(name: str, deterministic: bool) -> None:
    made = torch.Generator().manual_seed(9)
    hides = torch.rand(BATCH, 1, ROWS, ROWS, generator=made) < 0.8
    scores = {
        "bias": torch.randn(1, 2, ROWS, ROWS, generator=made).requires_grad_(),
        "alibi_slopes": torch.rand(2, generator=made),
        "sinks": torch.randn(2, generator=made).requires_grad_(),
    }
    options = {"causal": True, "attn_mask": hides, "deterministic": deterministic}
    check(*qkv(), MASKS[name], scores=scores, **options)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("causal", [True, slow("top_left")], ids=str)
@pytest.mark.parametrize("lengths", [(25, 45), (45, 44)], ids=str)
def test_lengths_that_differ(lengths: tuple[int, int], causal: Any, deterministic: bool) -> None:
    masks = {**prefixes(15, 30), **documents(*lengths)}
    check(*qkv(*lengths), masks, causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "lengths", [(18, 41), (30, 41), slow((41, 34), "41-34"), slow((18, 18), "18-18")], ids=str
)
def test_tree_of_lengths_that_differ(lengths: tuple[int, int], causal: bool) -> None:
    check(*qkv(*lengths), tree(), causal=causal)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("window", [None, (20, 0)], ids=str)
def test_all_masks_together(window: Any, deterministic: bool) -> None:
    masks = {**prefixes(20, 33), **documents(), **tree()}
    options = {"causal": True, "window": window, "chunk": 30}
    check(*qkv(), masks, deterministic=deterministic, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        with pytest.raises(attngen.SpecError, match="float64"):
            attngen.attention(*qkv(dtype=dtype), causal=True, **MASKS[name])
        return
    check(*qkv(dtype=dtype), MASKS[name], causal=True)


@pytest.mark.parametrize("name", MASKS)
def test_groups_and_split_head_dims(name: str) -> None:
    check(*qkv(heads=6, heads_kv=2, dim=40, dim_v=24), MASKS[name], causal=True)


@pytest.mark.parametrize("name", MASKS)
def test_a_compiled_spec_does_the_same(name: str) -> None:
    fields = {"prefix": "prefix_lm", "tree": "tree_mask"}
    spec = AttentionSpec(
        head_dim=16, dtype="float32", causal=True, layout="bshd",
        **{fields.get(name, "documents"): True},
    )  # fmt: skip
    q, k, v = qkv()
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    out = attngen.compile(spec)(*swapped, **MASKS[name])
    want = attngen.attention(q, k, v, causal=True, **MASKS[name])
    assert_close([out.transpose(1, 2)], [want], atol=0)


# ---- tiles ----------------------------------------------------------------------------------

SIZES = [(16, 64), (64, 16), (32, 32), (128, 16)]


@pytest.mark.parametrize("dq", ["kernel", slow("atomic")])
@pytest.mark.parametrize("tiles", ["pointer", slow("descriptor")])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_tile_size(sizes: tuple[int, int], tiles: Any, dq: Any) -> None:
    """One layout of documents after the other, at which tiles begin, end, or neither."""
    block_m, block_n = sizes
    fwd = FwdConfig(tiles=tiles, block_m=block_m, block_n=block_n, num_warps=1, num_stages=1)
    bwd = BwdConfig(
        tiles=tiles,
        dq=dq,
        block_m=block_m,
        block_n=block_n,
        num_warps=1,
        num_stages=1,
        dq_block_m=block_n,
        dq_block_n=block_m,
        dq_num_warps=1,
        dq_num_stages=1,
    )
    q, k, v = qkv(100, 100, heads=1)
    masks = {"doc_ids_q": torch.stack([ids_of(64, 1, 31, 4), ids_of(2, 66, 32)])}
    with pinned({"fwd": fwd, "bwd": bwd}):
        check(q, k, v, masks)
        check(q, k, v, {**masks, **prefixes(70, 20)}, causal=True, window=(50, 0))


def sees(q: Tensor, k: Tensor, masks: dict[str, Tensor], **options: Any) -> Tensor:
    return structure({**options, **masks}, q, k)


def poisoned(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies with NaN in all rows but 32 to 47."""
    found = [x.detach().clone() for x in tensors]
    for x in found:
        x[:, :, :32] = x[:, :, 48:] = float("nan")
    return found


THREE = {"doc_ids_q": ids_of(32, 16, 48).expand(BATCH, 96)}


@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_other_documents_are_never_read(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel read of them would have it run again with care, which calls finite()."""
    q, k, v = (x.detach() for x in qkv(96, 96))
    spec = AttentionSpec(head_dim=16, dtype="float32", causal=causal, documents=True)
    module = kernel(spec, SMALL_FWD, True).module

    def finite(*_: Any) -> Any:
        raise RuntimeError("ran again, with care")

    monkeypatch.setattr(module, "finite", finite)
    want = attngen.attention(q, k, v, causal=causal, **THREE)
    ids = {"doc_ids_q": torch.ones(16, dtype=torch.int64), "doc_ids_k": THREE["doc_ids_q"]}
    at = {"q_start": 32, "seqlen_q_total": 96, "seqlen_k_total": 96}
    k, v = poisoned((k, v))
    found = attngen.attention(q[:, :, 32:48], k, v, causal=causal, **ids, **at)
    assert_close([found], [want[:, :, 32:48]], atol=0)
    v[:, :, 33] = float("nan")
    with pytest.raises(Exception, match="with care"):
        attngen.attention(q[:, :, 32:48], k, v, causal=causal, **ids, **at)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of rows that hold nothing else
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_other_documents_spoil_no_gradient(causal: bool) -> None:
    """Keys, values, queries and gradients in tiles that a document does not touch are NaN."""
    inputs = qkv(96, 96)
    out = attngen.attention(*inputs, causal=causal, **THREE)
    do = torch.randn(out.shape)
    want = torch.autograd.grad(out, inputs, do)
    leaves = [x.requires_grad_() for x in poisoned(inputs)]
    found = attngen.attention(*leaves, causal=causal, **THREE)
    got = torch.autograd.grad(found, leaves, *poisoned([do]))
    for a, b in zip((found, *got), (out, *want), strict=True):
        assert_close([a[:, :, 32:48]], [b[:, :, 32:48]], atol=0)


def ranges(ids_q: Tensor, ids_k: Tensor, block: int = 16, walks_keys: bool = True) -> list[Any]:
    """begin, full_begin, full_end and end of each tile, in tiles, as document_ranges gives them."""
    module = kernel(AttentionSpec(head_dim=16, dtype="float32", documents=True), SMALL_FWD, True)
    rows, keys = ids_q.shape[0], ids_k.shape[0]
    room = torch.full((1, 8, -(-max(rows, keys) // 16)), -1, dtype=torch.int64)
    blocks = {"BLOCK_M": block, "BLOCK_N": block}
    for run, grid, arguments, constants in module.module.document_launches(
        ids_q[None], ids_k[None], room, blocks, walks_keys
    ):
        run[grid](*arguments, **constants)
    return (room[0, 4:, : -(-(rows if walks_keys else keys) // block)] // block).T.tolist()


def test_ranges_of_sorted_ids_are_exact() -> None:
    ids = ids_of(40, 24, 16, 20)
    assert ranges(ids, ids) == [
        [0, 0, 2, 3],  # document 0: keys 0 to 39
        [0, 0, 2, 3],
        [0, 4, 4, 4],  # of 0 and 1
        [2, 3, 4, 4],
        [4, 4, 5, 5],
        [5, 5, 7, 7],
        [5, 5, 7, 7],
    ]
    assert ranges(ids, ids, walks_keys=False) == ranges(ids, ids)


def test_ranges_of_ids_that_are_not_sorted_hold_all_that_meet() -> None:
    a_b_a = torch.cat([torch.zeros(32), torch.ones(16), torch.zeros(16)]).long()
    assert ranges(a_b_a, a_b_a) == [[0, 4, 4, 4], [0, 4, 4, 4], [2, 2, 3, 3], [0, 4, 4, 4]]
    lonely = torch.full((16,), 9)
    assert ranges(lonely, a_b_a) == [[0, 0, 0, 0]]
    wide = torch.tensor([-(2**62), 2**62]).repeat_interleave(16)
    assert ranges(wide, wide) == [[0, 0, 1, 1], [1, 1, 2, 2]]


def test_many_tiles_are_searched_in_steps() -> None:
    ids = torch.arange(5000) // 100
    found = ranges(ids, ids)
    for tile, (begin, full_begin, full_end, end) in enumerate(found):
        first, last = ids[16 * tile], ids[min(16 * tile + 15, 4999)]
        assert begin == 100 * int(first) // 16 and end == -(-100 * (int(last) + 1) // 16)
        assert begin <= full_begin <= full_end <= end
        assert (first == last) == (full_begin < full_end)


# ---- hidden rows and keys -------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_that_see_nothing(deterministic: bool) -> None:
    ids = {"doc_ids_q": ids_of(9, 24, 4), "doc_ids_k": ids_of(9, 3) * 9}
    q, k, v = qkv(ROWS, 12)
    assert not bool(sees(q, k, ids).any(-1)[:, :, 9:].any())
    check(q, k, v, ids, deterministic=deterministic)
    out, lse = attngen.attention(q, k, v, return_lse=True, **ids)
    assert bool((out[:, :, 9:] == 0).all()) and bool(torch.isneginf(lse[:, :, 9:]).all())


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("value", [float("nan"), slow(float("inf"), "inf")])
@pytest.mark.parametrize("name", ["documents", "tree", "prefix"])
def test_what_is_hidden_from_all_never_leaks(name: str, value: float, deterministic: bool) -> None:
    q, k, v = qkv(37, 53)
    masks = {
        "documents": {"doc_ids_q": ids_of(20, 17), "doc_ids_k": ids_of(18, 16, 19)},
        "tree": {"tree_mask": torch.eye(9, dtype=torch.bool) & (torch.arange(9) < 5)},
        "prefix": {**prefixes(3, 30), "doc_ids_q": ids_of(37), "doc_ids_k": ids_of(40, 13)},
    }[name]
    options: dict[str, Any] = {"causal": True, "deterministic": deterministic}
    hidden = ~sees(q, k, masks, causal=True)[:, 0].any(1)
    assert bool(hidden.any())
    with torch.no_grad():
        for x in (k, v):
            x.masked_fill_(hidden[:, None, :, None], value)
    check(q, k, v, masks, **options)


@pytest.mark.parametrize("name", MASKS)
def test_no_rows_and_no_keys(name: str) -> None:
    q, k, v = qkv(0, 0)
    masks = {
        "prefix": prefixes(0, 4),
        "tree": {"tree_mask": torch.ones(0, 0, dtype=torch.bool)},
    }.get(name, {"doc_ids_q": torch.zeros(BATCH, 0, dtype=torch.int32)})
    assert attngen.attention(q, k, v, causal=True, **masks).shape == q.shape
    q, k, v = qkv(5, 5)
    if name == "tree":
        assert_close(
            [attngen.attention(q, k, v, causal=True, **masks)],
            [attngen.attention(q, k, v, causal=True)],
            atol=0,
        )


def test_prefixes_of_any_length() -> None:
    check(*qkv(20, 20), prefixes(-5, 2**31 - 1), causal=True)
    huge = torch.tensor([2**62, -(2**62)])
    check(*qkv(20, 20), {"prefix_lens": huge}, causal=True)


def test_views_of_ids_and_trees() -> None:
    ids = torch.stack([documents()["doc_ids_q"]] * 2, 2)[..., 0]
    assert ids.stride(1) == 2
    check(*qkv(), {"doc_ids_q": ids, "doc_ids_k": ids.int().clone()})
    check(*qkv(), {"tree_mask": tree(32)["tree_mask"].mT[:1, 5:23, 5:23]}, causal=True)
    check(*qkv(), {"prefix_lens": torch.tensor([4, 9, 20, 7])[::2]}, causal=True)


# ---- shards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all", "tree"])
def test_shards_of_keys_and_rows_merge_to_the_whole(name: str) -> None:
    rows, keys = 40, 53
    q, k, v = (x.detach() for x in qkv(rows, keys))
    ids = documents(rows, keys)
    masks: dict[str, Tensor] = tree() if name == "tree" else {**tree(), **prefixes(9, 35)}
    whole = masks if name == "tree" else {**masks, **ids}
    options = {"causal": True, "window": (30, 0)}
    want, want_lse = attngen.attention(q, k, v, return_lse=True, **whole, **options)
    totals = {"seqlen_q_total": rows, "seqlen_k_total": keys}
    for part in (slice(0, 17), slice(17, rows), slice(0, rows, 3)):
        found = None
        for piece in (slice(0, 30), slice(30, keys), None):
            if piece is None:
                continue
            at = {
                "q_start": part.start,
                "q_step": part.step or 1,
                "k_start": piece.start,
                **totals,
            }
            here = dict(masks)
            if name == "all":
                here["doc_ids_q"] = ids["doc_ids_q"][:, part]
                here["doc_ids_k"] = ids["doc_ids_k"][:, piece]
            sides = (q[:, :, part], k[:, :, piece], v[:, :, piece])
            out, lse = attngen.attention(
                *sides, partial=True, return_lse=True, **at, **here, **options
            )
            found = (out, lse) if found is None else attngen.merge(*found, out, lse)
        assert found is not None
        assert_close(found, [want[:, :, part], want_lse[:, :, part]])


# ---- torch ----------------------------------------------------------------------------------


def test_one_graph_for_all_lengths() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, tree: Tensor, lens: Tensor) -> Tensor:
        masks = {"doc_ids_q": ids, "tree_mask": tree, "prefix_lens": lens}
        return attngen.attention(q, k, v, causal=True, **masks)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for rows, nodes in ((35, 7), (48, 9)):
        q, k, v = (x.detach() for x in qkv(rows, rows))
        masks = (shuffled(rows)["doc_ids_q"], tree(nodes)["tree_mask"], torch.tensor([5, 20]))
        assert_close([compiled(q, k, v, *masks)], [attend(q, k, v, *masks)], atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", MASKS)
def test_gradients_under_compile(name: str) -> None:
    q, k, v = qkv(37, 37)
    masks = MASKS[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q, k, v, causal=True, **masks)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    want = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    assert_close(got, want, atol=0)


@pytest.mark.parametrize("shares", [False, slow(True)])
@pytest.mark.parametrize("name", MASKS)
def test_vmap(name: str, shares: bool) -> None:
    """Over masks of each sample's own, or with one for all."""
    q, k, v = (torch.stack([x.detach(), x.detach().flip(2)]) for x in qkv())
    (key,) = MASKS[name]
    one = MASKS[name][key]
    each = torch.stack([one, one.flip(0)])

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attngen.attention(q, k, v, causal=True, **{key: mask})

    mask = one if shares else each
    got = torch.func.vmap(attend, in_dims=(0, 0, 0, None if shares else 0))(q, k, v, mask)
    want = [attend(q[n], k[n], v[n], one if shares else each[n]) for n in range(2)]
    assert_close([got], [torch.stack(want)], atol=0)

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, mask).square().sum()

    grad = torch.func.grad(loss, (0, 1, 2))
    found = torch.func.vmap(grad, in_dims=(0, 0, 0, None if shares else 0))(q, k, v, mask)
    for n in range(2):
        right = grad(q[n], k[n], v[n], one if shares else each[n])
        assert_close([x[n] for x in found], right)


def test_opcheck() -> None:
    from attngen.masks import check_masks

    spec = AttentionSpec(
        head_dim=16, dtype="float32", causal=True, prefix_lm=True, documents=True, tree_mask=True
    )
    q, k, v = qkv(20, 20)
    found = check_masks(
        q, k, torch.tensor([3, 9]), shuffled(20)["doc_ids_q"], None, tree(5)["tree_mask"]
    )
    ints = [0, 0, 1, 0, 1, 1, -1, -1]
    assert len(ints) == len(spec.int_args) and tuple(found) == spec.tensor_args
    arguments = (spec.text_key, q, k, v, list(found.values()), [0.25], ints)
    assert ops.parsed(spec.text_key).documents
    torch.library.opcheck(torch.ops.attngen.fwd, arguments)


# ---- what is refused ------------------------------------------------------------------------

IDS = torch.zeros(BATCH, ROWS, dtype=torch.int32)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "prefix-kind": ({"prefix_lens": 3}, "prefix_lens must be a torch.Tensor, got int"),
    "prefix-dtype": ({"prefix_lens": torch.ones(2)}, r"int32 or int64, got torch.float32; cast"),
    "prefix-shape": ({"prefix_lens": torch.ones(3).int()}, r"\(batch,\) \(2,\), got \(3,\)"),
    "prefix-device": (
        {"prefix_lens": torch.ones(2, dtype=torch.int32, device="meta")},
        "prefix_lens is on meta but q is on cpu",
    ),
    "prefix-alone": ({"prefix_lens": torch.ones(2).int(), "causal": False}, "needs causal"),
    "ids-dtype": ({"doc_ids_q": IDS.short()}, "int32 or int64, got torch.int16"),
    "ids-shape": ({"doc_ids_q": IDS[:, 1:]}, r"\(2, 37\) or \(seqlen_q,\) \(37,\), got \(2, 36\)"),
    "ids-batch": ({"doc_ids_q": IDS[0].expand(3, ROWS)}, r"got \(3, 37\)"),
    "ids-of-keys": ({"doc_ids_k": IDS}, "doc_ids_k is given, but doc_ids_q is not"),
    "ids-shape-k": ({"doc_ids_q": IDS, "doc_ids_k": IDS[:, 1:]}, r"doc_ids_k .*got \(2, 36\)"),
    "tree-dtype": ({"tree_mask": torch.ones(3, 3)}, r"bool, got .*; write tree_mask.bool\(\)"),
    "tree-shape": ({"tree_mask": torch.ones(3, 4).bool()}, r"\(n, n\) or .*, got \(3, 4\)"),
    "tree-batch": ({"tree_mask": torch.ones(3, 4, 4).bool()}, "with batch 2"),
    "tree-size": ({"tree_mask": torch.ones(38, 38).bool()}, "38 nodes, .* have 37 and 37"),
    "tree-top-left": (
        {"tree_mask": torch.ones(3, 3).bool(), "causal": "top_left"},
        "aligned at their ends",
    ),
}


@pytest.mark.parametrize(("masks", "message"), BAD.values(), ids=BAD)
def test_bad_mask_says_what_is_wrong(masks: dict[str, Any], message: str) -> None:
    with pytest.raises(attngen.SpecError, match=message):
        attngen.attention(*qkv(), **{"causal": True, **masks})


def test_ids_of_keys_may_be_left_out_only_where_lengths_agree() -> None:
    with pytest.raises(attngen.SpecError, match="seqlen_q 37 and seqlen_k 60; pass doc_ids_k="):
        attngen.attention(*qkv(ROWS, 60), doc_ids_q=IDS)


FIELDS = {"prefix_lens": "prefix_lm", "doc_ids_q": "documents", "tree_mask": "tree_mask"}


@pytest.mark.parametrize(("name", "field"), FIELDS.items())
def test_a_spec_and_its_calls_agree(name: str, field: str) -> None:
    given = {**prefixes(3, 4), "doc_ids_q": IDS, **tree()}
    attn = attngen.compile(AttentionSpec(head_dim=16, dtype="float32", causal=True))
    with pytest.raises(attngen.SpecError, match=f"{name} is given, but .* {field}=False"):
        attn(*qkv(), **{name: given[name]})
    attn = attngen.compile(
        AttentionSpec(head_dim=16, dtype="float32", causal=True, **{field: True})
    )
    with pytest.raises(attngen.SpecError, match=f"{field}=True, but the call has no {name}"):
        attn(*qkv())


@pytest.mark.parametrize("field", FIELDS.values())
def test_the_hopper_lowering_says_that_it_does_not_serve(field: str) -> None:
    from attngen import hopper

    spec = AttentionSpec(head_dim=64, causal=True, **{field: True})
    assert f"lowering=hopper has no {field}" in hopper.unserved_anywhere(spec)


def test_prefix_lm_and_the_text_key() -> None:
    base = AttentionSpec(head_dim=16, causal=True)
    spec = replace(base, prefix_lm=True)
    assert spec.text_key == "head_dim=16,dtype=bfloat16,causal=true,prefix_lm=true"
    assert AttentionSpec.parse(spec.text_key).text == spec.text
    with pytest.raises(attngen.SpecError, match="causal=False; add causal=True"):
        AttentionSpec(head_dim=16, prefix_lm=True)


# ---- the package's own oracle, and the tuner ------------------------------------------------

RULES = [
    AttentionSpec(head_dim=16, dtype="float32", **fields)
    for fields in (
        {"documents": True},
        {"documents": True, "window": (9, 3)},
        {"prefix_lm": True, "causal": True, "window": (20, 0)},
        {"tree_mask": True},
        {"tree_mask": True, "prefix_lm": True, "documents": True, "causal": True, "chunk": 20},
    )
]


@pytest.mark.parametrize("spec", RULES, ids=str)
def test_reference_agrees_with_the_dense_mask(spec: AttentionSpec) -> None:
    sizes = Workload(2, 2, 1, 37, 53)
    q, k, v = qkv(37, 53)
    masks = mask_rules.made(spec, sizes, "cpu")
    options = {"causal": spec.causal, "window": spec.window, "chunk": spec.chunk}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference.attention(spec, q, k, v, **masks)
        return out.float(), lse.float()

    assert_exact(attend, q, k, v, {**options, **masks})


@pytest.mark.parametrize("config", [SMALL_FWD, SMALL_BWD], ids=["fwd", "bwd"])
@pytest.mark.parametrize("spec", RULES, ids=str)
def test_gate_accepts(spec: AttentionSpec, config: KernelConfig) -> None:
    small_gate = gate.SmallGate(spec, config.direction, 2, "cpu")
    verdict = small_gate.check(config)
    assert verdict.ok, verdict.detail
    large = case.make(spec, Workload(2, 2, 1, 70, 90), "cpu", backward=config.direction == "bwd")
    if config.direction == "bwd":
        gate.run(large, SMALL_FWD, interpret=True)
    found = gate.sampled(large, config)
    assert found.ok, found.detail


def test_gate_refuses_a_kernel_of_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(head_dim=16, dtype="float32", documents=True)
    small_gate = gate.SmallGate(spec, "fwd", 2, "cpu")
    for each in small_gate.cases:
        each.beside["doc_ids_q"][:, :9] += 1
    assert not small_gate.check(SMALL_FWD).ok


def test_made_masks_are_plausible() -> None:
    spec = AttentionSpec(head_dim=16, causal=True, prefix_lm=True, documents=True, tree_mask=True)
    made = mask_rules.made(spec, Workload(2, 1, 1, 512, 1024), "cpu")
    assert made["prefix_lens"].tolist() == [256, 256]
    assert made["doc_ids_q"].unique().numel() == mask_rules.DOCUMENTS
    assert torch.equal(made["doc_ids_k"][:, ::2], made["doc_ids_q"])
    assert bool((made["doc_ids_k"].diff(dim=1) >= 0).all())
    nodes = made["tree_mask"][0]
    assert nodes.shape == (64, 64) and nodes[5].nonzero().flatten().tolist() == [0, 2, 5]


# ---- peers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", RULES, ids=str)
def test_flex_attention_gets_the_same_mask(spec: AttentionSpec) -> None:
    sizes = Workload(BATCH, 2, 1, 30, ROWS)
    masks = mask_rules.made(spec, sizes, "cpu")
    b, i, j = torch.arange(BATCH)[:, None, None], torch.arange(30)[:, None], torch.arange(ROWS)
    shift = reference.alignment(spec, 30, ROWS)
    rules = mask_rules.Structure.of(spec, ROWS, dict(masks))
    want = reference.visible(spec, i + shift, j, rules, (b, i, j))
    seen = peers._visible(spec, sizes, None, masks)(b, b, i, j)
    assert torch.equal(seen.expand(BATCH, 30, ROWS), want.expand(BATCH, 30, ROWS))


@pytest.mark.parametrize(
    "spec", [s for s in RULES if s.window is None and s.chunk is None], ids=str
)
def test_sdpa_computes_the_spec_by_math_alone(spec: AttentionSpec) -> None:
    sizes = Workload(BATCH, 2, 1, ROWS, ROWS)
    q, k, v = (x.detach() for x in qkv())
    masks = mask_rules.made(spec, sizes, "cpu")
    named = {peer.name: peer.make for peer in peers.all_peers()}
    out = named["sdpa math"](spec, sizes, **masks)(q, k, v)
    want, _ = reference.attention(spec, q, k, v, **masks)
    assert_close([out], [want.float()])
    field = "documents" if spec.documents else "tree_mask"
    with pytest.raises(peers.CannotServe, match=f"sdpa has no {field}"):
        named["sdpa flash"](spec, sizes, **masks)
