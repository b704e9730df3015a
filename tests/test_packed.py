"""Packed sequences (layout "thd"): out, lse and all gradients, beside the oracle's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_close, make_qkv, oracle
from torch import Tensor

import attngen
from attngen import packed
from attngen.bench import bench
from attngen.config import BwdConfig, FwdConfig, infeasible
from attngen.gpu import KNOWN_GPUS
from attngen.pinned import pinned
from attngen.spec import AttentionSpec
from attngen.tuner import case, gate
from attngen.workload import Workload

HEADS, HEADS_KV, DIM, SEED = 2, 1, 16, 77
UNEVEN = ([5, 0, 37, 1, 16], [9, 3, 21, 0, 33])
"""Lengths of queries and of keys: empty ones on either side, and ones that no tile divides."""
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NARROW = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in DTYPES]
DETERMINISTIC = pytest.mark.parametrize("deterministic", [True, False], ids=["kernel", "atomic"])
MOSTLY_DETERMINISTIC = pytest.mark.parametrize(
    "deterministic",
    [
        pytest.param(True, id="kernel"),
        pytest.param(False, id="atomic", marks=pytest.mark.slow),
    ],
)


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles of 16 by 16, so that short sequences span several; dq by atomic adds where a test of
    both ways asks for them."""
    named = getattr(request.node, "callspec", None)
    is_atomic = named is not None and named.params.get("deterministic") is False
    dq = "atomic" if is_atomic else "kernel"
    with pinned({"fwd": SMALL_FWD, "bwd": replace(SMALL_BWD, dq=dq)}):
        yield


def offsets(lengths: Sequence[int], first: int = 0) -> Tensor:
    return torch.tensor([first, *itertools.accumulate(lengths, initial=first)][1:]).int()


def inputs(
    lengths: tuple[Sequence[int], Sequence[int]] = UNEVEN,
    dtype: torch.dtype = torch.float32,
    *,
    heads: int = HEADS,
    heads_kv: int = HEADS_KV,
    dim: int = DIM,
    dim_v: int | None = None,
    spare: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (total, heads, dim) leaves, `spare` rows longer than the sequences."""
    generator = torch.Generator().manual_seed(3)
    rows, keys = (sum(each) + spare for each in lengths)
    shapes = (rows, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v or dim)
    q, k, v = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def keep_masks(options: dict[str, Any], heads: int, cu_q: Tensor, cu_k: Tensor, **used: Any) -> Any:
    """What dropout keeps, for the oracle: (heads, rows, keys) of each sequence."""
    if not options.get("dropout_p"):
        return None
    lengths = (used.get("seqused_q"), used.get("seqused_k"))
    rows, keys = (
        (cu.diff() if n is None else n).tolist()
        for n, cu in zip(lengths, (cu_q, cu_k), strict=True)
    )
    sizes = (len(rows), heads, max(rows), max(keys))
    keep = attngen.dropout_keep(options["dropout_seed"], *sizes, options["dropout_p"])
    return [keep[n, :, :i, :j] for n, (i, j) in enumerate(zip(rows, keys, strict=True))]


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **how: Any) -> Any:
    """`oracle.varlen`, where each sequence may have sinks of its own."""
    sinks = how.pop("sinks", None)
    if sinks is None or sinks.dim() == 1:
        return oracle.varlen(q, k, v, cu_q, cu_k, sinks=sinks, **how)
    slopes = how.pop("alibi_slopes", None)
    outs, lses = [], []
    for n in range(len(sinks)):
        each = how | {"sinks": sinks[n], "alibi_slopes": None if slopes is None else slopes[n]}
        at = cu_q[n : n + 2]
        one = oracle.varlen(q, k, v, at, cu_k[n : n + 2], **each)  # zeros in other rows
        outs.append(one.out)
        lses.append(one.lse)
    return oracle.Result(torch.stack(outs).sum(0), torch.stack(lses).amax(0))


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    scores: dict[str, Tensor] | None = None,
    with_lse_gradient: bool = True,
    attend: Any = None,
    **options: Any,
) -> None:
    """`attngen.attention` of packed sequences, and all gradients, as exact as plain PyTorch."""
    scores = scores or {}
    causal = options.get("causal", False)
    named: dict[str, Any] = {
        "causal": causal is not False,
        "align": "top_left" if causal == "top_left" else "bottom_right",
        "window": options.get("window"),
        "scale": options.get("softmax_scale"),
        "softcap": options.get("softcap") or 0.0,
        "dropout_p": options.get("dropout_p", 0.0),
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    named["keep"] = keep_masks(options, q.shape[1], cu_q, cu_k, **used)
    attend = attend or attngen.attention
    out, lse = attend(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        return_lse=True,
        **used,
        **scores,
        **options,
    )
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    loss, grads, dlse = [out], [do], None
    if with_lse_gradient:
        dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2))
        loss.append(lse)
        grads.append(dlse.masked_fill(torch.isinf(lse.detach()), 0.0))
    leaves = {"q": q, "k": k, "v": v} | {n: x for n, x in scores.items() if x.requires_grad}
    fixed = {name: x for name, x in scores.items() if not x.requires_grad}
    got = torch.autograd.grad(loss, list(leaves.values()), grads)
    narrow = q.dtype if q.dtype != torch.float32 else None

    def solve(**how: Any) -> tuple[Any, dict[str, Tensor]]:
        leaf = how.get("math_dtype", torch.float64)
        return oracle.gradients(
            lambda q, k, v, **x: varlen(q, k, v, cu_q, cu_k, **x, **fixed, **named, **how),
            leaves,
            do,
            dlse,
            leaf_dtype=leaf,
        )

    right, right_grads = solve()
    yard, yard_grads = solve(math_dtype=torch.float32, round_to=narrow)
    rows = [
        ("out", out, right.out, yard.out, q.dtype),
        ("lse", lse, right.lse, yard.lse, lse.dtype),
    ]
    rows += [
        (f"d{name}", grad, right_grads[name], yard_grads[name], leaves[name].dtype)
        for name, grad in zip(leaves, got, strict=True)
    ]
    for name, actual, want, about, dtype in rows:
        assert actual.dtype == dtype, name
        assert actual.shape == want.shape, name
        if name in ("dalibi_slopes", "dsinks"):  # no finer than the out that they use
            dtype = max(dtype, q.dtype, key=lambda each: torch.finfo(each).eps)
        good, why = oracle.judge(actual, want, dtype, yard=about)
        assert good, f"{name}: {why}"


LENGTHS = {
    "uneven": UNEVEN,
    "one": ([19], [35]),
    "equal": ([16, 16, 16], [16, 16, 16]),
    "no-queries": ([0, 7], [5, 0]),
    "ends-empty": ([0, 21, 14, 0], [24, 17, 8, 30]),
    "more-queries": ([40, 33], [1, 18]),
    "single-tokens": ([1] * 5, [1] * 5),
}


@pytest.mark.parametrize(
    "causal",
    [True, *(pytest.param(each, marks=pytest.mark.slow) for each in (False, "top_left"))],
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(lengths: Any, causal: bool | str) -> None:
    check(*inputs(lengths), offsets(lengths[0]), offsets(lengths[1]), causal=causal)


@MOSTLY_DETERMINISTIC
@pytest.mark.parametrize("dtype", NARROW)
def test_dtypes(dtype: torch.dtype, deterministic: bool) -> None:
    check(*inputs(dtype=dtype), *map(offsets, UNEVEN), causal=True, deterministic=deterministic)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (7, 3)},
    "window-left": {"window": (5, None)},
    "causal-window": {"causal": True, "window": (6, 0)},
    "top-left-window": {"causal": "top_left", "window": (20, 0)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": -0.4},
    "dropout": {"dropout_p": 0.3, "dropout_seed": SEED},
    "causal-dropout": {"causal": True, "dropout_p": 0.5, "dropout_seed": SEED},
    "everything": {
        "window": (9, 5),
        "softcap": 2.0,
        "dropout_p": 0.2,
        "dropout_seed": SEED,
    },
}


@MOSTLY_DETERMINISTIC
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], deterministic: bool) -> None:
    check(*inputs(), *map(offsets, UNEVEN), deterministic=deterministic, **options)


@MOSTLY_DETERMINISTIC
@pytest.mark.parametrize(
    ("dim", "dim_v", "heads", "heads_kv"),
    [(40, 24, 2, 2), (96, None, 2, 1), (16, 48, 6, 2)],
    ids=["d40-v24", "d96", "gqa3"],
)
def test_dims_and_groups(
    dim: int, dim_v: int | None, heads: int, heads_kv: int, deterministic: bool
) -> None:
    sizes = {"dim": dim, "dim_v": dim_v, "heads": heads, "heads_kv": heads_kv}
    lengths = ([18, 5], [7, 20])
    check(
        *inputs(lengths, **sizes), *map(offsets, lengths), causal=True, deterministic=deterministic
    )


@DETERMINISTIC
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (4, 9)}], ids=str)
def test_used_lengths_and_what_the_rest_holds(options: Any, deterministic: bool) -> None:
    """Unused rows lie between sequences and behind them; NaN there reaches nothing."""
    lengths = ([20, 18, 4, 25], [19, 18, 33, 9])
    used_q, used_k = torch.tensor([20, 1, 0, 17]).int(), torch.tensor([3, 17, 33, 0]).int()
    q, k, v = inputs(lengths, spare=21)
    cu = [offsets(each, first=2) for each in lengths]
    with torch.no_grad():
        for x, begins, used in ((q, cu[0], used_q), (k, cu[1], used_k), (v, cu[1], used_k)):
            is_used = torch.zeros(len(x), dtype=torch.bool)
            for begin, length in zip(begins.tolist(), used.tolist(), strict=False):
                is_used[begin : begin + length] = True
            x[~is_used] = math.nan
    named = {"seqused_q": used_q, "seqused_k": used_k, "deterministic": deterministic}
    check(q, k, v, *cu, **named, **options)


def test_gradient_of_unused_rows_may_be_nan() -> None:
    lengths = ([20, 5], [20, 5])
    cu, used = offsets(lengths[0]), torch.tensor([4, 5]).int()
    q, k, v = inputs(lengths)
    out = attngen.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used)
    do = torch.ones_like(out)
    want = torch.autograd.grad(out, (q, k, v), do, retain_graph=True)
    do[4:20] = math.nan
    assert_close(torch.autograd.grad(out, (q, k, v), do), want, atol=0)


@pytest.mark.parametrize("dtype", NARROW[1:])
@pytest.mark.parametrize("by_sequence", [False, True], ids=["heads", "sequences"])
@DETERMINISTIC
def test_slopes_and_sinks(by_sequence: bool, deterministic: bool, dtype: torch.dtype) -> None:
    shape = (len(UNEVEN[0]), HEADS) if by_sequence else (HEADS,)
    generator = torch.Generator().manual_seed(8)
    slopes = torch.rand(shape, generator=generator).requires_grad_()
    sinks = torch.randn(shape, generator=generator).requires_grad_()
    scores = {"alibi_slopes": slopes, "sinks": sinks}
    q, k, v = inputs(dtype=dtype, spare=5)
    cu = [offsets(each, first=3) for each in UNEVEN]
    check(q, k, v, *cu, scores=scores, causal=True, deterministic=deterministic)


def test_slopes_with_used_lengths() -> None:
    slopes = torch.rand(len(UNEVEN[0]), HEADS).requires_grad_()
    used = torch.tensor([2, 0, 30, 1, 0]).int(), torch.tensor([9, 1, 17, 0, 20]).int()
    named = {"seqused_q": used[0], "seqused_k": used[1], "scores": {"alibi_slopes": slopes}}
    check(*inputs(), *map(offsets, UNEVEN), window=(8, 8), **named)


def test_chunks_are_those_of_a_sequence() -> None:
    q, k, v = inputs()
    cu_q, cu_k = map(offsets, UNEVEN)
    options = {"causal": "top_left", "chunk": 6, "return_lse": True}
    got = attngen.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    for n in range(len(UNEVEN[0])):
        rows, keys = slice(*cu_q[n : n + 2].tolist()), slice(*cu_k[n : n + 2].tolist())
        one = [x[at].transpose(0, 1)[None] for x, at in ((q, rows), (k, keys), (v, keys))]
        out, lse = attngen.attention(*one, **options)
        here = (got[0][rows], got[1][rows])
        assert_close(here, (out[0].transpose(0, 1), lse[0].transpose(0, 1)))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "dropout_p": 0.3, "dropout_seed": SEED}],
    ids=["plain", "dropout"],
)
def test_equal_lengths_equal_a_batch(options: dict[str, Any]) -> None:
    """To the bit: tiles, dropout and the order of sums are the same."""
    q, k, v = make_qkv(batch=2, heads=2, heads_kv=1, seqlen_q=21, seqlen_k=35)
    flat = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = offsets([21] * 2), offsets([35] * 2)
    named = {"return_lse": True, "deterministic": True, **options}
    out, lse = attngen.attention(q, k, v, **named)
    got, got_lse = attngen.attention(*flat, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **named)
    do = torch.randn(out.shape)
    grads = torch.autograd.grad(out, (q, k, v), do)
    got_grads = torch.autograd.grad(got, flat, do.transpose(1, 2).flatten(0, 1))
    want = [x.transpose(1, 2).flatten(0, 1) for x in (out, lse[..., None], *grads)]
    for x, y in zip((got, got_lse[..., None], *got_grads), want, strict=True):
        assert torch.equal(x, y)


def test_many_sequences_are_found() -> None:
    """More than a step of the search looks at: 129 and more, most of them empty."""
    lengths = [0] * 150 + [3, 0, 17] + [1] * 4 + [0] * 130
    q, k, v = (x.detach() for x in inputs((lengths, lengths), heads=1))
    cu = offsets(lengths)
    got = attngen.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert_close([got], [oracle.varlen(q, k, v, cu, cu).out.float()])


def test_compiled_spec() -> None:
    spec = AttentionSpec(
        head_dim=DIM, dtype="float32", causal=True, window=(5, 0), alibi=True, layout="thd"
    )
    attn, (q, k, v), (cu_q, cu_k) = attngen.compile(spec), inputs(), map(offsets, UNEVEN)

    def attend(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        for name in ("causal", "window"):
            named.pop(name)
        return attn(q, k, v, **named)

    slopes = torch.rand(HEADS).requires_grad_()
    scores = {"alibi_slopes": slopes}
    check(q, k, v, cu_q, cu_k, attend=attend, scores=scores, causal=True, window=(5, 0))
    assert "packed" in attn.source("fwd").splitlines()[0]
    explained = attn.explain(q, k, v, cu_seqlens_q=cu_q)
    assert str(explained.workload) == "5,2,1,12,14"  # sequences of the mean length
    assert attngen.AttentionSpec.parse(spec.text_key).is_packed


def test_any_strides() -> None:
    """Projections packed as (total, 3, heads, dim), and rows of odd bytes."""
    lengths = [11, 0, 20]
    qkv = torch.randn(31, 3, HEADS, DIM).requires_grad_()
    cu = offsets(lengths)
    check(*(x.detach().requires_grad_() for x in qkv.unbind(1)), cu, cu, causal=True)
    odd = torch.randn(31, 3, HEADS, 24)[..., 1:18]
    check(*(x.requires_grad_() for x in odd.unbind(1)), cu, cu)


def test_partial_out_merges() -> None:
    """Two halves of the keys of each sequence, by used lengths and offsets."""
    lengths = ([9, 17], [20, 30])
    q, k, v = (x.detach() for x in inputs(lengths))
    cu_q, cu_k = map(offsets, lengths)
    named: dict[str, Any] = {"cu_seqlens_q": cu_q, "return_lse": True, "partial": True}
    used = torch.tensor([10, 10]).int()
    one = attngen.attention(q, k, v, cu_seqlens_k=cu_k, seqused_k=used, **named)
    halves = [torch.cat([x[10:20], x[30:50]]) for x in (k, v)]
    other = attngen.attention(q, *halves, cu_seqlens_k=offsets([10, 20]), **named)
    want, want_lse = attngen.attention(q, k, v, cu_seqlens_k=cu_k, **named)
    assert_close(attngen.merge(*one, *other), (want, want_lse))


@pytest.mark.parametrize("rows", [0, 5], ids=["no-rows", "rows-of-none"])
def test_no_sequences(rows: int) -> None:
    q, k, v = (torch.randn(rows, HEADS, DIM).requires_grad_() for _ in range(3))
    cu = torch.zeros(1).int()
    out, lse = attngen.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
    assert out.shape == (rows, HEADS, DIM)
    assert lse.shape == (rows, HEADS)
    assert not out.any() and (lse == -math.inf).all()
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_inputs_without_keys() -> None:
    q = torch.randn(4, HEADS, DIM)
    k = torch.randn(0, HEADS, DIM)
    cu_k = torch.zeros(3).int()
    out = attngen.attention(q, k, k, cu_seqlens_q=offsets([1, 3]), cu_seqlens_k=cu_k)
    assert not out.any()


# ---- torch.compile, vmap, flops ---------------------------------------------------------------


def test_compiled_with_changing_lengths() -> None:
    """One graph for all totals and counts; values of offsets are none of its business."""
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
        return attngen.attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True
        )

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for lengths in (UNEVEN, ([30, 4, 2], [11, 12, 13]), ([7] * 9, [8] * 9)):
        q, k, v = inputs(lengths)
        cu = [offsets(each) for each in lengths]
        got, want = (f(q, k, v, *cu) for f in (compiled, attend))
        assert_close(got, want, atol=0)
        grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out, _ in (got, want)]
        assert_close(*grads, atol=0)
    assert len(graphs) == 1


def test_opcheck() -> None:
    spec = AttentionSpec(head_dim=DIM, dtype="float32", causal=True, layout="thd", sinks=True)
    q, k, v = (x.detach().requires_grad_() for x in packed.heads_first(*inputs()))
    extra = [torch.randn(1, HEADS).requires_grad_(), *map(offsets, UNEVEN), None, None]
    ints = [0, 0, 1, 0, 1, 1, -1, -1]
    arguments = (spec.text_key, q, k, v, extra, [0.25], ints)
    torch.library.opcheck(torch.ops.attngen.fwd.default, arguments)


def test_vmap_is_refused() -> None:
    q, k, v = (x.detach()[None].repeat(2, 1, 1, 1) for x in inputs())
    cu_q, cu_k = map(offsets, UNEVEN)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)

    with pytest.raises(attngen.SpecError, match="vmap over packed sequences"):
        torch.vmap(attend)(q, k, v)


def test_flops_count_keys_of_the_mean_length() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = make_qkv(batch=2, seqlen_q=8, seqlen_k=12)
    flat = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in (q, k, v)]
    counts = []
    for arrays, named in (
        ((q, k, v), {}),
        (flat, {"cu_seqlens_q": offsets([8, 8]), "cu_seqlens_k": offsets([12, 12])}),
    ):
        with FlopCounterMode(display=False) as counter:
            attngen.attention(*arrays, **named).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


CU_Q, CU_K = offsets(UNEVEN[0]), offsets(UNEVEN[1])


# ---- nested tensors ---------------------------------------------------------------------------


def nested(x: Tensor, lengths: Sequence[int], heads_first: bool = True) -> Tensor:
    """A jagged leaf of rows x, (batch, heads, seqlen, dim) or (batch, seqlen, heads, dim)."""
    at = offsets(lengths).long()
    made = torch.nested.nested_tensor_from_jagged(x.detach().clone(), at)
    made = made.transpose(1, 2) if heads_first else made
    return made.detach().requires_grad_()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_nested_tensors(layout: str) -> None:
    lengths = ([5, 20, 1], [9, 3, 21])
    q, k, v = inputs(lengths)
    cu = [offsets(each) for each in lengths]
    want, want_lse = attngen.attention(
        q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], causal=True, return_lse=True
    )
    heads_first = layout == "bhsd"
    of_q = nested(q, lengths[0], heads_first)
    of_k = nested(k, lengths[1], heads_first)
    rows = torch.nested.nested_tensor_from_jagged(v.detach().clone(), of_k.offsets())
    of_v = (rows.transpose(1, 2) if heads_first else rows).detach().requires_grad_()
    out, lse = attngen.attention(of_q, of_k, of_v, causal=True, return_lse=True, layout=layout)
    assert out.shape == of_q.shape  # the same ragged length, too

    def flat(x: Tensor) -> Tensor:
        return x.values().transpose(0, 1) if heads_first else x.values()

    assert_close((flat(out), flat(lse)), (want, want_lse), atol=0)
    grads = torch.autograd.grad(flat(out).square().sum(), (of_q, of_k, of_v))
    wanted = torch.autograd.grad(want.square().sum(), (q, k, v))
    assert_close(map(flat, grads), wanted, atol=0)
    spec = AttentionSpec(head_dim=DIM, dtype="float32", causal=True, layout="thd")
    assert_close([flat(attngen.compile(spec)(of_q, of_k, of_v))], [want], atol=0)


def test_nested_tensors_with_holes() -> None:
    """torch.nested.narrow leaves rows unused: their lengths are used ones."""
    x = torch.randn(2, 9, HEADS, DIM)
    starts, lengths = torch.tensor([0, 2]), torch.tensor([5, 7])
    q = torch.nested.narrow(x, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    out = attngen.attention(q, q, q)
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        one = x[n, start : start + length].transpose(0, 1)[None]
        assert_close([out.unbind()[n]], attngen.attention(one, one, one))


def test_nested_tensors_that_do_not_fit() -> None:
    q, k, v = inputs()
    of_q = nested(q, UNEVEN[0])
    of_k, of_v = (nested(x, UNEVEN[1]) for x in (k, v))  # each with offsets of its own
    for changes, message in (
        ({"v": of_v}, "k and v must share their offsets"),
        ({"k": torch.randn(2, 1, 3, DIM)}, "q is a nested tensor, .* where q, k and v are jagged"),
        ({"layout": "bshd"}, 'must be .batch, seqlen, heads, dim. with layout="bshd"'),
        ({"cu_seqlens_q": CU_Q}, "nested tensors, which have offsets of their own"),
    ):
        with pytest.raises(attngen.SpecError, match=message):
            attngen.attention(**{"q": of_q, "k": of_k, "v": of_k, **changes})


# ---- what is refused --------------------------------------------------------------------------

COUNT = len(UNEVEN[0])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one-missing": ({"cu_seqlens_k": None}, "cu_seqlens_q without cu_seqlens_k"),
    "used-alone": (
        {"cu_seqlens_q": None, "cu_seqlens_k": None, "seqused_k": CU_K},
        "seqused_k without cu_seqlens_q",
    ),
    "thd-alone": (
        {"cu_seqlens_q": None, "cu_seqlens_k": None, "layout": "thd"},
        'layout="thd" without cu_seqlens_q',
    ),
    "bshd": ({"layout": "bshd"}, 'with layout="bshd"'),
    "int64": ({"cu_seqlens_q": CU_Q.long()}, "cu_seqlens_q must be int32, got torch.int64"),
    "list": ({"cu_seqlens_q": CU_Q.tolist()}, "cu_seqlens_q must be an int32 tensor"),
    "two-dims": ({"cu_seqlens_q": CU_Q[None]}, r"must have one dim, got shape \(1, 6\)"),
    "counts": ({"cu_seqlens_k": CU_K[:-1]}, r"cu_seqlens_k must have shape \(6,\)"),
    "empty": (
        {"cu_seqlens_q": CU_Q[:0], "cu_seqlens_k": CU_K[:0]},
        r"cu_seqlens_q must have shape \(1,\)",
    ),
    "used-count": ({"seqused_q": CU_Q}, r"seqused_q must have shape \(5,\)"),
    "used-dtype": ({"seqused_q": CU_Q[:-1].float()}, "seqused_q must be int32"),
    "device": ({"cu_seqlens_q": CU_Q.to("meta")}, "cu_seqlens_q is on meta"),
    "decreasing": (
        {"cu_seqlens_q": CU_Q.flip(0)},
        "cu_seqlens_q must not decrease and lie from 0 to 59",
    ),
    "negative": ({"cu_seqlens_q": CU_Q - 1}, "must not decrease and lie from 0 to 59"),
    "too-far": ({"cu_seqlens_k": CU_K + 1}, "cu_seqlens_k must not decrease and lie from 0 to 66"),
    "used-too-long": (
        {"seqused_k": torch.tensor([9, 4, 21, 0, 33]).int()},
        r"seqused_k\[1\] must be from 0 to 3, the length of its sequence, got 4",
    ),
    "slopes": (
        {"alibi_slopes": torch.ones(COUNT + 1, HEADS)},
        r"\(batch, num_heads_q\) \(5, 2\), got \(6, 2\)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes: dict[str, Any], message: str) -> None:
    named = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | changes
    for _ in range(2):  # also once the layout is known
        with pytest.raises(attngen.SpecError, match=message):
            attngen.attention(*inputs(), **named)


def test_values_are_looked_at_in_every_call() -> None:
    q, k, v = (x.detach() for x in inputs())
    attngen.attention(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
    with pytest.raises(attngen.SpecError, match="must not decrease"):
        attngen.attention(q, k, v, cu_seqlens_q=CU_Q.flip(0), cu_seqlens_k=CU_K)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"bias": torch.zeros(59, 66)}, 'bias with layout="thd" is refused'),
    "mask": ({"attn_mask": torch.ones(59, 66).bool()}, 'attn_mask with layout="thd"'),
    "shard": ({"q_start": 1}, "q_start, .* with packed sequences are not built yet"),
    "total": ({"seqlen_k_total": 66}, "seqlen_.*_total with packed sequences"),
}


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(attngen.UnsupportedSpecError, match=message):
        attngen.attention(*inputs(), cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **changes)


def test_unsupported_specs_list_every_reason() -> None:
    with pytest.raises(attngen.UnsupportedSpecError) as raised:
        AttentionSpec(head_dim=64, layout="thd", bias=True, attn_mask=True)
    assert len(raised.value.reasons) == 2
    with pytest.raises(attngen.UnsupportedSpecError, match="FP8 inputs with layout"):
        AttentionSpec(head_dim=64, layout="thd", dtype="float8_e5m2", fp8_scale="tensor")


def test_dense_rows_are_refused() -> None:
    q, k, v = make_qkv()
    with pytest.raises(attngen.SpecError, match="q must have 3 dims with packed sequences"):
        attngen.attention(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)


def test_a_spec_without_packed_sequences_refuses_offsets() -> None:
    attn = attngen.compile(AttentionSpec(head_dim=16, dtype="float32"))
    with pytest.raises(attngen.SpecError, match="cu_seqlens_k is given, but the spec says layout"):
        attn(*make_qkv(), cu_seqlens_k=CU_K)


def test_descriptors_are_refused() -> None:
    spec, gpu = AttentionSpec(head_dim=64, layout="thd"), KNOWN_GPUS["nvidia_h200"]
    tile = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2, "tiles": "descriptor"}
    for config in (FwdConfig(**tile), BwdConfig(**tile)):
        assert "tiles=descriptor writes whole tiles" in "; ".join(infeasible(spec, config, gpu))


@pytest.mark.parametrize("values", [(-5, 3, 2, 99), (7, 7, 1, 0), (2**31 - 1, -(2**31), 0, 6)])
def test_kernels_stay_within_their_tensors(
    values: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever offsets hold: rows before and behind the tensors stay NaN, and are not read."""
    monkeypatch.setattr("attngen.settle.check_values", lambda *_: None)
    rows = 40
    buffers = [torch.full((3 * rows, HEADS, DIM), math.nan) for _ in range(3)]
    q, k, v = (x[rows : 2 * rows] for x in buffers)
    for x in (q, k, v):
        x.normal_()
        x.requires_grad_()
    cu = torch.tensor(values).int()
    used = torch.tensor([100, -3, 2**31 - 1]).int()
    named = {"cu_seqlens_q": cu, "cu_seqlens_k": cu.flip(0), "seqused_k": used}
    out = attngen.attention(q, k, v, window=(9, 9), **named)
    torch.autograd.grad(out.nan_to_num().sum(), (q, k, v))


# ---- the tuner ----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_gate_of_the_tuner_passes_what_is_right(direction: Any) -> None:
    """Small cases, and sampled rows of sequences of uneven lengths."""
    spec = AttentionSpec(
        head_dim=16, dtype="float32", layout="thd", causal=True, alibi=True, dropout_p=0.2
    )
    config = SMALL_FWD if direction == "fwd" else SMALL_BWD
    small_gate = gate.SmallGate(spec, direction, 2, "cpu")
    verdict = small_gate.check(config)
    assert verdict.ok, verdict.detail
    tuned = case.make(spec, Workload(4, 2, 1, 12, 12), "cpu", backward=direction == "bwd")
    assert tuned.offsets is not None
    assert tuned.offsets[0].tolist() == [0, 6, 16, 30, 48]
    if direction == "bwd":
        wanted = gate.whole(tuned).wanted
        tuned.out.copy_(wanted["out"])
        tuned.lse.copy_(wanted["lse"])
    verdict = gate.sampled(tuned, config)
    assert verdict.ok, verdict.detail


def test_bench_is_refused() -> None:
    spec = AttentionSpec(head_dim=16, layout="thd")
    with pytest.raises(attngen.UnsupportedSpecError, match="attngen tune"):
        next(bench(spec, Workload(1, 1, 1, 4, 4), []))
