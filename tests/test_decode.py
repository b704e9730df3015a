"""Decode: few query rows, splits of the keys, several lengths, and pages, against the oracle."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support import make_qkv, oracle, oracle_options, run_file
from torch import Tensor

import attngen
from attngen import calls, ops
from attngen.cli import main
from attngen.config import CONFIG_CLASSES, infeasible, parse
from attngen.decode import DecodeConfig, footprint, forward_direction, split_count
from attngen.explain import explain_workload
from attngen.gpu import INTERPRETER, by_name
from attngen.identity import parsed, record_key
from attngen.lowering import default
from attngen.pinned import pinned
from attngen.render import render
from attngen.spec import AttentionSpec
from attngen.workload import Bucket, Workload, spec_bucket

SMALL = DecodeConfig(block_m=16, block_n=16, num_warps=1, num_stages=1)
"""Tiles so small that short sequences have several; one SM, the interpreter, makes few splits."""
SPLIT = DecodeConfig(block_m=16, block_n=16, num_warps=1, num_stages=1, split_keys=32)
LAST = DecodeConfig(block_m=16, block_n=16, num_warps=1, num_stages=1, split_keys=32, merge="last")
TALL = DecodeConfig(block_m=64, block_n=32, num_warps=1, num_stages=1)
PAGE = 16
LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 70)


def _judge(got: Tensor, want: Tensor, yard: Tensor, dtype: torch.dtype) -> None:
    ok, why = oracle.judge(got, want, dtype, yard=yard)
    assert ok, why


def _compare(
    got: tuple[Tensor, Tensor], tensors: tuple[Tensor, ...], named: dict[str, Any]
) -> None:
    """Out and lse against the oracle of q, k and v."""
    q, k, v = tensors
    want, yard = oracle.attention(q, k, v, **named), oracle.unfused(q, k, v, **named)
    _judge(got[0], want.out, yard.out, q.dtype)
    _judge(got[1], want.lse, yard.lse, torch.float32)


def _inputs(*sizes: int, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.detach() for x in make_qkv(*sizes, **named))
    return q, k, v


def _paged(x: Tensor, lengths: tuple[int, ...], page: int = PAGE) -> tuple[Tensor, Tensor]:
    """Shuffled pages (pages, page, heads, dim), NaN where no sequence has a key, and their table,
    -1 where it names none."""
    need = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(need) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    pages = x.new_full((len(order), page, x.shape[1], x.shape[3]), float("nan"))
    table = torch.full((len(lengths), max(1, *need) + 1), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for n in range(need[b]):
            table[b, n] = order.pop()
            part = x[b, :, n * page : min(length, (n + 1) * page)].transpose(0, 1)
            pages[table[b, n], : part.shape[0]] = part
    return pages, table


@pytest.mark.parametrize(
    ("group", "rows"), [(1, 1), (1, 16), (3, 5), (8, 1), (64, 1), (12, 2)], ids=str
)
@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=["rule", "fixed"])
def test_groups(group: int, rows: int, config: DecodeConfig) -> None:
    tensors = _inputs(2, 2 * group, rows, 75, 16, heads_kv=2)
    with pinned({"decode": config}):
        got = attngen.attention(*tensors, causal=True, return_lse=True)
    _compare(got, tensors, {"causal": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (96, 40), (128, 128), (256, 256)], ids=str)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    tensors = _inputs(1, 4, 1, 83, dims[0], heads_kv=2, dim_v=dims[1], dtype=dtype)
    with pinned({"decode": SPLIT}):
        got = attngen.attention(*tensors, return_lse=True)
    _compare(got, tensors, {})


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top_left"},
    "window": {"window": (21, 0), "causal": True},
    "two-sided": {"window": (21, 7)},
    "chunk": {"chunk": 20},
    "softcap": {"softcap": 2.0, "causal": True, "softmax_scale": 0.7},
    "negative-scale": {"softmax_scale": -0.4},
    "alibi": {"alibi": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "alibi-sinks": {"alibi": True, "sinks": True, "window": (40, None), "softcap": 3.0},
}


def _terms(options: dict[str, Any], heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `attngen.attention`, and what of them the oracle takes as tensors."""
    named, tensors = dict(options), {}
    generator = torch.Generator().manual_seed(3)
    if named.pop("alibi", False):
        tensors["alibi_slopes"] = torch.rand(heads, generator=generator)
    if named.pop("sinks", False):
        tensors["sinks"] = torch.randn(heads, generator=generator)
    return named, tensors


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [1, 4])
def test_options(options: dict[str, Any], rows: int) -> None:
    q, k, v = _inputs(1, 6, rows, 75, 16, heads_kv=2)
    named, terms = _terms(options, 6)
    with pinned({"decode": SPLIT}):
        got = attngen.attention(q, k, v, **named, **terms, return_lse=True)
    _compare(got, (q, k, v), {**oracle_options(named, q, k), **terms})


@pytest.mark.parametrize(
    ("rows", "options", "is_left_out"),
    [
        (1, {"causal": True}, True),
        (1, {"causal": "bottom_right", "softcap": 2.0}, True),
        (1, {"causal": True, "seqused_k": torch.tensor([0, 1, 75])}, True),
        (1, {"causal": True, "alibi_slopes": torch.arange(6) / 8}, True),
        (1, {"causal": "top_left"}, False),
        (1, {"causal": True, "window": (21, None)}, False),
        (1, {"causal": True, "q_start": 40, "seqlen_q_total": 79}, False),
        (1, {"causal": True, "k_start": 10, "seqlen_k_total": 90}, False),
        (1, {"causal": True, "prefix_lens": torch.tensor([0, 3, 80])}, False),
        (2, {"causal": True}, False),
    ],
    ids=str,
)
def test_causal_order_of_one_row(
    rows: int, options: dict[str, Any], is_left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hides nothing: the kernels without it serve, unless the row is not at the last key."""
    q, k, v = _inputs(3, 6, rows, 79, 16, heads_kv=2)
    options = {
        name: x.int() if isinstance(x, Tensor) and x.dtype == torch.int64 else x
        for name, x in options.items()
    }
    keys, settle = [], calls._settled

    def settled(family: Any, text_key: str, *rest: Any) -> Any:
        keys.append(text_key)
        return settle(family, text_key, *rest)

    monkeypatch.setattr(calls, "_settled", settled)
    found = attngen.attention(q, k, v, **options, return_lse=True)
    (text_key,) = keys  # of sizes that no other test has
    assert parsed(text_key).is_causal is not is_left_out
    if is_left_out:
        del options["causal"]
        want = attngen.attention(q, k, v, **options, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


def test_what_serves_causal_order_of_one_row() -> None:
    spec = AttentionSpec(head_dim=64, causal=True)
    for rows, is_causal in ((1, False), (2, True)):
        made = explain_workload(spec, Workload(2, 8, 2, rows, 512), directions=("fwd",))
        assert made.choices[0].spec.is_causal is is_causal
        line = ["emit", spec.key, "--direction", "fwd", "--workload", f"2,8,2,{rows},512"]
        printed = CliRunner().invoke(main, line).stdout
        assert printed == made.source("fwd")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
def test_lengths(options: dict[str, Any], is_paged: bool) -> None:
    """Lengths of none to several pages in one batch; what lies behind them is NaN."""
    _check_lengths(options, is_paged, 1, torch.float32)


@pytest.mark.parametrize("rows", [2, 20], ids=["rows2", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "alibi-sinks"])
def test_rows_over_lengths(rows: int, dtype: torch.dtype, name: str) -> None:
    _check_lengths(OPTIONS[name], True, rows, dtype)


def _check_lengths(options: dict[str, Any], is_paged: bool, rows: int, dtype: torch.dtype) -> None:
    q, k, v = _inputs(len(LENGTHS), 3, rows, max(LENGTHS), 16, heads_kv=1, dtype=dtype)
    named, terms = _terms(options, 3)
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    call = {**named, **terms, "seqused_k": used}
    if is_paged:
        given_k, call["block_table"] = _paged(k, LENGTHS)
        given_v, _ = _paged(v, LENGTHS)
    else:
        given_k, given_v = k.clone(), v.clone()
        for b, length in enumerate(LENGTHS):
            given_k[b, :, length:] = given_v[b, :, length:] = float("nan")
    with pinned({"decode": SPLIT if rows == 1 else TALL}):
        out, lse = attngen.attention(q, given_k, given_v, **call, return_lse=True)
    for b, length in enumerate(LENGTHS):
        at = slice(b, b + 1)
        tensors = (q[at], k[at, :, :length], v[at, :, :length])
        _compare((out[at], lse[at]), tensors, {**oracle_options(named, *tensors[:2]), **terms})


@pytest.mark.parametrize("page", [16, 48, 256])
def test_page_sizes_and_strides(page: int) -> None:
    """Pages of any whole sixteen, (pages, heads, page, dim) in memory, and two sequences that share
    their first page."""
    lengths = (300, 257)
    q, k, v = _inputs(2, 4, 1, 300, 16, heads_kv=2)
    k[1, :, :page], v[1, :, :page] = k[0, :, :page], v[0, :, :page]
    (keys, table), (values, _) = _paged(k, lengths, page), _paged(v, lengths, page)
    table[1, 0] = table[0, 0]
    keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    used = torch.tensor(lengths, dtype=torch.int32)
    call = {"block_table": table, "seqused_k": used, "return_lse": True}
    out, lse = attngen.attention(q, keys, values, **call)
    for b, length in enumerate(lengths):
        at = slice(b, b + 1)
        tensors = (q[at], k[at, :, :length], v[at, :, :length])
        _compare((out[at], lse[at]), tensors, {})
    rows_first, lse_too = attngen.attention(q.transpose(1, 2), keys, values, **call, layout="bshd")
    assert torch.equal(rows_first.transpose(1, 2), out) and torch.equal(lse, lse_too)


@pytest.mark.parametrize("name", ["attn_mask", "bias", "tree_mask", "prefix_lens"])
@pytest.mark.parametrize("used", [None, (60, 33)], ids=["all", "lengths"])
def test_masks(name: str, used: tuple[int, int] | None) -> None:
    q, k, v = _inputs(2, 6, 5, 60, 16, heads_kv=2)
    generator = torch.Generator().manual_seed(5)
    beside: dict[str, Any] = {
        "attn_mask": torch.rand(2, 1, 5, 60, generator=generator) < 0.6,
        "bias": torch.randn(1, 6, 5, 60, generator=generator),
        "tree_mask": torch.rand(2, 4, 4, generator=generator) < 0.6,
        "prefix_lens": torch.tensor([58, 7], dtype=torch.int32),
    }
    given = {name: beside[name]}
    if used is not None:
        given["seqused_k"] = torch.tensor(used, dtype=torch.int32)
    with pinned({"decode": SPLIT}):
        out, lse = attngen.attention(q, k, v, causal=True, **given, return_lse=True)
    for b, length in enumerate(used or (60, 60)):
        at = slice(b, b + 1)
        tensors = (q[at], k[at, :, :length], v[at, :, :length])
        options: dict[str, Any] = {"causal": True}
        terms: dict[str, Any] = {}
        if name == "bias":
            terms["bias"] = given["bias"][..., :length]
        elif name == "attn_mask":
            terms["mask"] = given["attn_mask"][at, ..., :length]
        else:
            options[name] = given[name][at]
        _compare((out[at], lse[at]), tensors, {**oracle_options(options, *tensors[:2]), **terms})


def test_hidden_nan_does_not_leak() -> None:
    q, k, v = _inputs(1, 4, 3, 70, 16, heads_kv=2)
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, :, -1] = dirty_v[:, :, -1] = float("nan")  # the last row alone sees it
    dirty_v[:, :, :5] = float("inf")
    with pinned({"decode": SPLIT}):
        call = {"causal": True, "window": (50, 0), "return_lse": True}
        out, lse = attngen.attention(q, dirty_k, dirty_v, **call)
        want, want_lse = attngen.attention(q, k, v, **call)
    torch.testing.assert_close(out[:, :, :-1], want[:, :, :-1])
    torch.testing.assert_close(lse[:, :, :-1], want_lse[:, :, :-1])
    assert out[:, :, -1].isnan().all()


def test_bits_depend_on_the_row_alone() -> None:
    """batch_invariant: a sequence has the bits it has alone, in a cache of any size."""
    spec = AttentionSpec(head_dim=16, dtype="float32", paged=True, batch_invariant=True)
    attend = attngen.compile(spec)
    lengths = (70, 1, 33, 1040)
    q, k, v = _inputs(len(lengths), 4, 1, max(lengths), 16, heads_kv=2)
    (keys, table), (values, _) = _paged(k, lengths), _paged(v, lengths)
    used = torch.tensor(lengths, dtype=torch.int32)
    out, lse = attend(q, keys, values, block_table=table, seqused_k=used, return_lse=True)
    for b, length in enumerate(lengths):
        at, pages = slice(b, b + 1), -(-length // PAGE)
        alone = {"block_table": table[at, :pages].contiguous(), "seqused_k": used[at]}
        one, one_lse = attend(q[at], keys, values, **alone, return_lse=True)
        assert torch.equal(one, out[at]) and torch.equal(one_lse, lse[at])
    order = torch.tensor([2, 0, 3, 1])
    mixed = {"block_table": table[order], "seqused_k": used[order]}
    assert torch.equal(attend(q[order], keys, values, **mixed), out[order])


def test_parts_merge() -> None:
    """A prefix that all share and what each has of its own: two calls and `attngen.merge`."""
    q, k, v = _inputs(1, 4, 2, 60, 16, heads_kv=2)
    shared, own = slice(0, 40), slice(40, 60)
    parts = [
        attngen.attention(q, k[:, :, at], v[:, :, at], causal=c, partial=True, return_lse=True)
        for at, c in ((shared, False), (own, True))
    ]
    assert parts[0][0].dtype == torch.float32
    got = attngen.merge(*parts[0], *parts[1])
    _compare(got, (q, k, v), {"causal": True})


def test_gradients_of_short_queries_are_right() -> None:
    q, k, v = make_qkv(1, 4, 2, 40, 16, heads_kv=2)
    out, lse = attngen.attention(q, k, v, causal=True, return_lse=True)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((out * do).sum() + lse.sum(), (q, k, v))
    inputs = {"q": q, "k": k, "v": v}
    ones = torch.ones_like(lse)
    _, want = oracle.gradients(
        lambda **x: oracle.attention(**x, causal=True), inputs, do, dlse=ones
    )
    for name, grad in zip(inputs, grads, strict=True):
        torch.testing.assert_close(grad.double(), want[name], rtol=1e-4, atol=1e-5)


def test_torch_compile() -> None:
    q, k, v = _inputs(2, 4, 1, 64, 16, heads_kv=2)
    keys, table = _paged(k, (64, 17))
    values, _ = _paged(v, (64, 17))
    used = torch.tensor((64, 17), dtype=torch.int32)

    def attend(q: Tensor, used: Tensor) -> Tensor:
        return attngen.attention(q, keys, values, block_table=table, seqused_k=used, causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, used), attend(q, used))
    op = torch.ops.attngen.fwd.default
    text = AttentionSpec(head_dim=16, dtype="float32", paged=True).text_key
    pages = [x.transpose(1, 2) for x in (keys, values)]
    torch.library.opcheck(op, (text, q, *pages, [used, table], [0.25], [0]))


def test_what_is_refused() -> None:
    q, k, v = _inputs(2, 4, 1, 64, 16, heads_kv=2)
    keys, table = _paged(k, (64, 17))
    values, _ = _paged(v, (64, 17))
    used = torch.tensor((64, 17), dtype=torch.int32)
    cases: list[tuple[type[Exception], str, Any]] = [
        (attngen.SpecError, "without seqused_k", {"block_table": table}),
        (attngen.DtypeError, "int32", {"block_table": table, "seqused_k": used.long()}),
        (attngen.SpecError, "batch", {"block_table": table[:1], "seqused_k": used}),
        (attngen.SpecError, "names page", {"block_table": table - 5, "seqused_k": used}),
        (attngen.SpecError, "from 0 to", {"block_table": table, "seqused_k": used + 99}),
        (
            attngen.UnsupportedSpecError,
            "dropout_p with paged",
            {"block_table": table, "seqused_k": used, "dropout_p": 0.1},
        ),
        (
            attngen.UnsupportedSpecError,
            "q_start",
            {"block_table": table, "seqused_k": used, "q_start": 3, "seqlen_q_total": 9},
        ),
        (
            attngen.SpecError,
            "cu_seqlens_q alone",
            {"block_table": table, "seqused_k": used, "cu_seqlens_q": used, "cu_seqlens_k": used},
        ),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            attngen.attention(q, keys, values, **call)
    for name, x in (
        ("attn_mask", torch.ones(1, 1, 1, 64, dtype=torch.bool)),
        ("bias", torch.zeros(1, 1, 1, 64)),
        ("doc_ids_k", used),
    ):
        with pytest.raises(attngen.UnsupportedSpecError, match=f"{name} with paged.*gather"):
            attngen.attention(q, keys, values, block_table=table, seqused_k=used, **{name: x})
    with pytest.raises(attngen.SpecError, match="multiple of 16"):
        attngen.attention(q, keys[:, :9], values[:, :9], block_table=table, seqused_k=used)
    with pytest.raises(attngen.UnsupportedSpecError, match="no backward"):
        attngen.attention(q.requires_grad_(), k, v, seqused_k=used)
    plain = attngen.compile(AttentionSpec(head_dim=16, dtype="float32"))
    with pytest.raises(attngen.SpecError, match="paged=False"):
        plain(q, keys, values, block_table=table, seqused_k=used)
    with pytest.raises(attngen.SpecError, match="key_lengths"):
        plain(q, k, v, seqused_k=used)
    paged = attngen.compile(AttentionSpec(head_dim=16, dtype="float32", paged=True))
    with pytest.raises(attngen.SpecError, match="no block_table"):
        paged(q, keys, values, seqused_k=used)
    packed = attngen.compile(AttentionSpec(head_dim=16, dtype="float32", layout="thd"))
    rows, at = q.detach()[:, :, 0], torch.tensor([0, 1, 2], dtype=torch.int32)
    offsets = {"cu_seqlens_q": at, "cu_seqlens_k": at}
    with pytest.raises(attngen.SpecError, match="paged=False"):
        packed(rows, rows[:, :2], rows[:, :2], **offsets, block_table=table)
    pages = {"block_table": table, "seqused_k": used}
    with pytest.raises(attngen.SpecError, match="needs cu_seqlens_q"):
        attngen.attention(rows, keys, values, layout="thd", **pages)
    with pytest.raises(attngen.SpecError, match="layout must be one of"):
        attngen.attention(rows, keys, values, layout="tdh", cu_seqlens_q=at, **pages)
    with pytest.raises(attngen.SpecError, match="layout must be one of"):
        attngen.attention(rows, rows, rows, layout="tdh", **offsets)


# ---- the family -------------------------------------------------------------------------------


def test_family_follows_from_spec_and_rows() -> None:
    dense = AttentionSpec(head_dim=64)
    assert [forward_direction(dense, n) for n in (1, 16, 17)] == ["decode", "decode", "fwd"]
    assert forward_direction(AttentionSpec(head_dim=64, dropout_p=0.1), 1) == "fwd"
    assert forward_direction(AttentionSpec(head_dim=64, paged=True), 4096) == "decode"


def test_splits_fill_the_gpu_and_leave_no_split_empty() -> None:
    config = DecodeConfig(block_m=16, block_n=128, num_warps=4, num_stages=3, programs_per_sm=2)
    for programs, keys in itertools.product((1, 8, 100, 264, 300, 5000), (1, 128, 1000, 65536)):
        count = split_count(config, programs, keys, 132)
        tiles = -(-keys // 128)
        assert 1 <= count <= tiles
        assert (count - 1) * -(-tiles // count) < tiles  # the last one has keys
    assert split_count(config, 8, 65536, 132) * 8 >= 0.9 * 264
    assert split_count(config, 5000, 65536, 132) == 1
    fixed = DecodeConfig(block_m=16, block_n=64, num_warps=4, num_stages=2, split_keys=512)
    assert split_count(fixed, 1, 5000, 132) == split_count(fixed, 999, 5000, 132) == 10


def test_footprint_is_what_the_compiler_takes() -> None:
    """Bytes that Triton 3.6 allots for sm_90, but for a few hundred of its own."""
    allotted = [  # block_m, block_n, num_stages
        ({"head_dim": 128}, (64, 64, 2), 81920),
        ({"head_dim": 128}, (64, 64, 3), 114688),
        ({"head_dim": 128, "paged": True}, (64, 64, 3), 114688),
        ({"head_dim": 512}, (64, 64, 2), 327680),
        ({"head_dim": 576, "head_dim_v": 512, "paged": True}, (64, 32, 2), 212992),
    ]
    for fields, (m, n, stages), size in allotted:
        config = DecodeConfig(block_m=m, block_n=n, num_warps=4, num_stages=stages)
        assert 0 <= size - footprint(AttentionSpec(**fields), config)[0] < 512


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_defaults_fit(dim: int, dtype: str) -> None:
    h200 = by_name("nvidia_h200")
    for fields, sizes in itertools.product(
        ({}, {"paged": True}, {"batch_invariant": True}),
        (Workload(1, 32, 8, 1, 65536), Workload(64, 64, 1, 16, 100)),
    ):
        spec = AttentionSpec(head_dim=dim, dtype=dtype, **fields)
        bucket = spec_bucket("decode", spec, sizes)
        config = default(spec, bucket, h200)
        assert not infeasible(spec, config, h200), config.key
        assert parse("decode", config.key) == config
        assert Bucket.parse(bucket.key) == bucket
    assert set(CONFIG_CLASSES["decode"]) == {"triton", "hopper"}


def test_explain_names_the_family() -> None:
    q, k, v = _inputs(1, 4, 1, 64, 16, heads_kv=2)
    attend = attngen.compile(AttentionSpec(head_dim=16, dtype="float32"))
    found = attend.explain(q, k, v)
    assert [each.bucket.direction for each in found.choices] == ["decode", "bwd"]
    assert "def attn_decode" in attend.source("fwd", Workload(1, 4, 2, 1, 64))
    keys, table = _paged(k, (64,), 32)
    paged = attngen.compile(AttentionSpec(head_dim=16, dtype="float32", paged=True))
    (only,) = paged.explain(q, keys, keys, block_table=table).choices
    assert only.bucket.key == "decode-q1-k128-bh4-g2-w0-p32"
    assert default(attend.spec, found.choices[0].bucket, INTERPRETER).direction == "decode"


@pytest.mark.parametrize(
    "fields",
    [
        {"paged": True, "causal": True, "alibi": True, "sinks": True},
        pytest.param({"attn_mask": True, "bias": True}, marks=pytest.mark.slow),
        pytest.param({"paged": True, "layout": "thd", "sinks": True}, marks=pytest.mark.slow),
        pytest.param({"key_lengths": True, "tree_mask": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_emitted_file_checks_itself(fields: dict[str, Any], tmp_path: Path) -> None:
    spec = AttentionSpec(head_dim=40, dtype="float32", **fields)
    path = tmp_path / "decode.py"
    path.write_text(render(spec, LAST if spec.sinks else SMALL))
    done = run_file(path)
    assert done.returncode == 0 and "4 splits" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("group", "rows", "options"),
    [
        (3, 5, {"causal": True}),
        (8, 1, {"sinks": True, "window": (20, None)}),
        (4, 8, {"chunk": 20}),
    ],
    ids=str,
)
def test_the_last_split_merges(group: int, rows: int, options: dict[str, Any]) -> None:
    """In one launch, call after call: counters are zero again."""
    q, k, v = _inputs(2, 2 * group, rows, 75, 16, heads_kv=2)
    named, terms = _terms(options, 2 * group)
    with pinned({"decode": LAST}):
        for _ in range(3):
            got = attngen.attention(q, k, v, **named, **terms, return_lse=True)
            _compare(got, (q, k, v), {**oracle_options(named, q, k), **terms})
    text = render(AttentionSpec(head_dim=16, dtype="float32"), LAST)
    assert "def attn_decode_merge" not in text and 'sem="acq_rel", scope="gpu"' in text


@pytest.mark.parametrize("config", [TALL, SPLIT, LAST], ids=["one", "kernel", "last"])
def test_a_row_that_sees_no_key_is_zero_whatever_its_sink(config: DecodeConfig) -> None:
    """-inf, which is no sink, and what stands for one."""
    q, k, v = _inputs(2, 3, 3, 40, 16, heads_kv=1)
    used = torch.tensor([40, 2], dtype=torch.int32)
    sinks = torch.tensor([float("-inf"), float("inf"), float("nan")])
    with pinned({"decode": config}):
        out = attngen.attention(q, k, v, causal=True, seqused_k=used, sinks=sinks)
        plain = attngen.attention(q, k, v, causal=True, seqused_k=used)
    assert (out[1, :, 0] == 0).all() and (out[0, 1] == 0).all()
    assert torch.equal(out[:, 0], plain[:, 0])


PACKED = [("causal", SPLIT), ("alibi-sinks", LAST), ("window", SMALL), ("alibi-sinks", SPLIT)]
PACKED += [("plain", LAST), ("causal", SMALL), ("chunk", SPLIT), ("softcap", LAST)]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(*each, id=f"{each[0]}-{n}", marks=[pytest.mark.slow] * (n > 1))
        for n, each in enumerate(PACKED)
    ],
)
def test_packed_queries_over_pages(name: str, config: DecodeConfig) -> None:
    """A sequence of no rows, one of no keys, and rows that belong to no sequence."""
    _check_packed(OPTIONS[name], config, torch.float32)


def test_packed_queries_in_bfloat16() -> None:
    _check_packed(OPTIONS["causal"], TALL, torch.bfloat16)


def _check_packed(options: dict[str, Any], config: DecodeConfig, dtype: torch.dtype) -> None:
    lengths, rows, behind = (33, 7, 0, 70, 17), (5, 0, 2, 18, 1), 3
    heads, total = 6, sum(rows) + behind
    q, _, _ = _inputs(1, heads, total, 4, 16, heads_kv=2, dtype=dtype)
    _, k, v = _inputs(len(lengths), heads, 1, max(lengths), 16, heads_kv=2, dtype=dtype)
    named, terms = _terms(options, heads)
    (keys, table), (values, _) = _paged(k, lengths), _paged(v, lengths)
    offsets = [0, *itertools.accumulate(rows)]
    call = {
        "cu_seqlens_q": torch.tensor(offsets, dtype=torch.int32),
        "seqused_k": torch.tensor(lengths, dtype=torch.int32),
        "block_table": table,
        "return_lse": True,
    }
    with pinned({"decode": config}):
        packed = q[0].transpose(0, 1)
        out, lse = attngen.attention(packed, keys, values, **call, **named, **terms)
    assert out.shape == (total, heads, 16) and lse.shape == (total, heads)
    assert (out[-behind:] == 0).all() and (lse[-behind:] == float("-inf")).all()
    out, lse = out.transpose(0, 1)[None], lse.T[None]
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if begin == end:
            continue
        at = slice(b, b + 1)
        tensors = (q[:, :, begin:end], k[at, :, : lengths[b]], v[at, :, : lengths[b]])
        got = (out[:, :, begin:end], lse[:, :, begin:end])
        _compare(got, tensors, {**oracle_options(named, *tensors[:2]), **terms})


def test_packed_queries_by_a_compiled_spec() -> None:
    """The same as the function's; and what is wrong with a call is said."""
    spec = AttentionSpec(head_dim=16, dtype="float32", layout="thd", paged=True, causal=True)
    attend = attngen.compile(spec)
    q, pages = torch.randn(5, 4, 16), torch.randn(3, 16, 2, 16)
    call = {
        "cu_seqlens_q": torch.tensor([0, 1, 5], dtype=torch.int32),
        "seqused_k": torch.tensor([12, 30], dtype=torch.int32),
        "block_table": torch.tensor([[0, 0], [2, 1]], dtype=torch.int32),
    }
    out = attend(q, pages, pages, **call)
    assert torch.equal(out, attngen.attention(q, pages, pages, **call, causal=True, layout="thd"))
    (choice,) = attend.explain(q, pages, pages, block_table=call["block_table"]).choices
    assert choice.bucket.direction == "decode"
    key, others = (record_key(x, choice.bucket, INTERPRETER) for x in (spec, spec.tuned))
    assert key == others and "thd" not in key.text_key
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cu_seqlens_q": None}, "has no cu_seqlens_q"),
        ({"cu_seqlens_k": call["cu_seqlens_q"]}, "cu_seqlens_q alone"),
        ({"seqused_k": call["seqused_k"][:1]}, "as cu_seqlens_q has it"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 1], dtype=torch.int32)}, "must not decrease"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 9], dtype=torch.int32)}, "from 0 to 5"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 5])}, "must be int32"),
    ]
    for changed, why in wrong:
        with pytest.raises(attngen.SpecError, match=why):
            attend(q, pages, pages, **{**call, **changed})
    with pytest.raises(attngen.SpecError, match="3 dims|total_q"):
        attend(q[None], pages, pages, **call)
    with pytest.raises(attngen.UnsupportedSpecError, match="no backward"):
        attend(q.clone().requires_grad_(), pages, pages, **call)


def test_the_usual_call_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third call on few steps are taken, unless a gradient is wanted."""
    q, k, v = _inputs(1, 4, 1, 40, 16, heads_kv=2)
    attend = attngen.compile(AttentionSpec(head_dim=16, dtype="float32", causal=True, softcap=3.0))
    for _ in range(2):
        want = attend(q, k, v, return_lse=True)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("took the long way")

    with monkeypatch.context() as patch:
        patch.setattr(ops, "forward", refuse)
        got = attend(q, k, v, return_lse=True)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        with pytest.raises(AssertionError, match="long way"):
            attend(q.clone().requires_grad_(), k, v)
        with pytest.raises(AssertionError, match="long way"):
            attend(q, k[:, :, :20], v[:, :, :20])


@pytest.mark.parametrize("page", [-(2**31), -1, 10**9, 2**31 - 1])
def test_what_is_behind_the_length_is_not_read(page: int) -> None:
    """Neither keys nor entries of the table, whatever they hold; both may have any strides."""
    lengths = (33, 0, 17)
    q, k, v = _inputs(3, 2, 3, 33, 16, heads_kv=1)
    (keys, table), (values, _) = _paged(k, lengths), _paged(v, lengths)
    table[table < 0] = page
    wide = torch.full((3, 2 * table.shape[1]), page, dtype=torch.int32)
    wide[:, ::2] = table
    used = torch.tensor([lengths, (99, 99, 99)], dtype=torch.int32).T[:, 0]
    for each in (table, wide[:, ::2], table.T.contiguous().T):
        with pinned({"decode": SMALL}):
            call = {"block_table": each, "seqused_k": used, "causal": True, "return_lse": True}
            out, lse = attngen.attention(q, keys, values, **call)
        for b, length in enumerate(lengths):
            at = slice(b, b + 1)
            tensors = (q[at], k[at, :, :length], v[at, :, :length])
            _compare((out[at], lse[at]), tensors, {"causal": True})


def test_torch_defaults_do_not_matter() -> None:
    """Neither the default device nor the default dtype."""
    q, k, v = _inputs(1, 2, 1, 40, 16, heads_kv=1)
    with pinned({"decode": LAST}):
        want = attngen.attention(q, k, v)
        try:
            torch.set_default_device("meta")
            torch.set_default_dtype(torch.float64)
            for _ in range(2):
                assert torch.equal(attngen.attention(q, k, v), want)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)


def test_nothing_to_see() -> None:
    """No batch, no keys, no pages, no rows."""
    none, q = torch.zeros(0, dtype=torch.int32), torch.ones(2, 4, 1, 16)
    zero, pages = torch.zeros(2, dtype=torch.int32), torch.ones(3, 16, 2, 16)
    table = torch.full((2, 3), -1, dtype=torch.int32)
    for rows, keys, named in (
        (q[:0], pages, {"seqused_k": none, "block_table": table[:0]}),
        (q[:0], q[:0, :2], {"seqused_k": none}),
        (q, torch.ones(2, 2, 0, 16), {"seqused_k": zero}),
        (q, pages, {"seqused_k": zero, "block_table": table[:, :0]}),
        (q, pages[:0], {"seqused_k": zero, "block_table": table}),
        (q[:, :, :0], pages, {"seqused_k": zero, "block_table": table}),
    ):
        out, lse = attngen.attention(rows, keys, keys, **named, return_lse=True)
        assert out.shape == rows.shape and lse.shape == rows.shape[:3]
        assert (out == 0).all() and (lse == float("-inf")).all()
