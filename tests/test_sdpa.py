"""attngen.sdpa and patch_sdpa beside torch's scaled_dot_product_attention."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import assert_close, make_qkv, oracle
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attngen
from attngen import sdpa_patch

# ---- a sweep over all arguments, beside torch's math path -----------------------------------

# Leading dims and heads of query, key and value; the result's are those of a matmul.
LEADS = {
    "two-dims": ((), (), ()),
    "three-dims": ((2,), (2,), (2,)),
    "four-dims": ((2, 2), (2, 2), (2, 2)),
    "five-dims": ((2, 1, 2), (2, 1, 2), (2, 1, 2)),
    "six-dims": ((1, 2, 2, 1), (1, 2, 2, 1), (1, 2, 2, 1)),
    "shared-batch": ((2, 2), (1, 2), (1, 2)),
    "one-query-batch": ((1, 2), (2, 2), (2, 2)),
    "one-key-head": ((1, 2), (1, 1), (1, 1)),
    "one-value-head": ((1, 2), (1, 2), (1, 1)),
    "one-query-head": ((2, 1), (2, 2), (2, 2)),
    "fewer-dims": ((1, 2), (2,), ()),
    "more-key-dims": ((2,), (2, 2), (2, 2)),
    "five-dims-broadcast": ((2, 1, 2), (1, 2, 2), (2, 2, 1)),
}
GROUPS = {
    "gqa": ((1, 4), (1, 2), (1, 2)),
    "gqa-three-dims": ((3,), (1,), (1,)),
    "gqa-five-dims": ((2, 1, 4), (2, 1, 2), (2, 1, 2)),
    "gqa-broadcast": ((2, 2), (1, 1), (1, 1)),
    "gqa-unequal": ((1, 4), (1, 1), (1, 2)),
}
MASKS = ("none", "causal", "bool", "bool-keys", "float", "float-keys", "float-heads", "inf")
LENGTHS = ((7, 7), (5, 19), (19, 5), (1, 23), (17, 2))


def _cases() -> Iterator[Any]:
    """Each kind of leading dims with every second mask; the rest drawn."""
    draw = random.Random(0)
    kinds = {**LEADS, **GROUPS}
    for n, (lead, m) in enumerate(itertools.product(kinds, range(0, len(MASKS), 2))):
        mask = MASKS[m + n // 4 % 2]
        case = {
            "leads": kinds[lead],
            "mask": mask,
            "lengths": draw.choice(LENGTHS),
            "dims": draw.choice([(16, 16), (16, 24), (24, 8), (5, 3)]),
            "dtype": draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
            "scale": draw.choice([None, None, 0.3, -0.4]),
            "p": draw.choice([0.0, 0.0, 0.0, 0.25]),
            "order": draw.choice(["rows", "heads", "odd"]),
            "enable_gqa": lead in GROUPS,
        }
        if mask == "float-heads":
            # Its gradient is 0, and the math path's exactly: a yardstick without length.
            case["dtype"] = torch.float32
        yield pytest.param(case, id=f"{lead}-{mask}")


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, order: str) -> Tensor:
    """A leaf in another order of memory."""
    x = torch.randn(shape)
    if order == "heads" and len(shape) > 2:
        x = x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if order == "odd":
        x = x.mT.contiguous().mT
    return x.to(dtype).detach().requires_grad_()


def _mask(kind: str, lead: tuple[int, ...], rows: int, keys: int, dtype: torch.dtype) -> Any:
    """A mask under which each row sees something."""
    full = (*lead, rows, keys)
    if kind in ("none", "causal"):
        return None
    if kind.startswith("bool"):
        mask = torch.rand(full if kind == "bool" else (1, keys)) > 0.4
        mask[..., 0] = True
        return mask
    if kind == "inf":
        mask = torch.randn(rows, keys).masked_fill(torch.rand(rows, keys) > 0.6, float("-inf"))
        mask[:, 0] = 0.0
        return mask.to(dtype)
    shapes = {"float": full, "float-keys": (1, keys), "float-heads": (*lead[-1:], rows, 1)}
    return torch.randn(shapes[kind]).to(dtype).requires_grad_()


@pytest.mark.parametrize("case", list(_cases()))
def test_sweep(case: dict[str, Any]) -> None:
    """out and all gradients, those of float masks among them, are as good as the math path's."""
    (rows, keys), (dim, dim_v), dtype = case["lengths"], case["dims"], case["dtype"]
    of_q, of_k, of_v = case["leads"]
    q = _tensor((*of_q, rows, dim), dtype, case["order"])
    k = _tensor((*of_k, keys, dim), dtype, case["order"])
    v = _tensor((*of_v, keys, dim_v), dtype, case["order"])
    lead = torch.broadcast_shapes(of_q[:-1], of_k[:-1], of_v[:-1])
    counts = (of_q,) if case["enable_gqa"] else case["leads"]
    lead = (*lead, *torch.broadcast_shapes(*(x[-1:] for x in counts)))
    mask = _mask(case["mask"], lead, rows, keys, dtype)
    leaves = [q, k, v] + ([mask] if mask is not None and mask.requires_grad else [])
    options = {"is_causal": case["mask"] == "causal", "scale": case["scale"]}
    options["enable_gqa"] = case["enable_gqa"]

    torch.manual_seed(3)
    got = attngen.sdpa(q, k, v, mask, case["p"], **options)
    do = torch.randn(got.shape).to(dtype)
    torch.manual_seed(3)
    keep = None
    if case["p"]:
        seed = torch.randint(0, 2**63 - 1, (1,))
        sizes = (torch.Size(lead[:-1]).numel(), lead[-1] if lead else 1, rows, keys)
        keep = attngen.dropout_keep(seed, *sizes, case["p"]).reshape(*lead, rows, keys)

    def solve(dtype: torch.dtype) -> list[Tensor]:
        own = [x.detach().to(dtype).requires_grad_() for x in leaves]
        tile = own[3] if len(own) > 3 else mask
        if tile is not None and tile.dtype == torch.bool:  # the op itself takes no bool mask
            tile = torch.zeros(tile.shape).masked_fill(~tile, float("-inf"))
        tile = None if tile is None else tile.to(dtype)
        call = (*own[:3], tile, case["p"], options["is_causal"], keep)
        rest = {"scale": case["scale"], "enable_gqa": case["enable_gqa"]}
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(*call, **rest)
        return [out, *torch.autograd.grad(out, own, do.to(dtype))]

    found = [got, *torch.autograd.grad(got, leaves, do)]
    names = ("out", "dq", "dk", "dv", "dmask")
    for name, x, right, yard in zip(names, found, solve(torch.float64), solve(dtype), strict=False):
        assert x.dtype == dtype and x.shape == right.shape, name
        good, why = oracle.judge(x, right, dtype, yard=yard)
        assert good, f"{name}: {why}"


# ---- arguments one by one ----------------------------------------------------------------------


def attend(*arguments: Any, **options: Any) -> Tensor:
    """torch's math path."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*arguments, **options)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_torch(make: Any) -> None:
    q, k, v = make_qkv(seqlen_q=5, seqlen_k=9)
    bias = make(5, 9)
    assert_close([attngen.sdpa(q, k, v, bias)], [attend(q, k, v, bias)])
    with pytest.raises(attngen.SpecError, match="causal bias of 5 queries and 9 keys, got 5 and 5"):
        attngen.sdpa(q, q, q, bias)


def test_everything_dropped_gives_zeros() -> None:
    q, k, v = make_qkv(seqlen_q=5)
    assert not attngen.sdpa(q, k, v, dropout_p=1.0).any()


def test_rows_that_see_nothing_give_zeros_and_no_gradient() -> None:
    q, k, v = make_qkv(seqlen_q=5)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    bias = torch.zeros(5, 5).masked_fill(~mask, float("-inf")).requires_grad_()
    for given in (mask, bias):
        leaves = [q, k, v] + ([bias] if given is bias else [])
        got, want = attngen.sdpa(q, k, v, given), attend(q, k, v, given)
        assert_close([got], [want])
        assert_close(
            torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves)
        )


@pytest.mark.parametrize("sizes", [(5, 0), (0, 5)], ids=["no-keys", "no-queries"])
def test_empty_sequences(sizes: tuple[int, int]) -> None:
    q, k, v = make_qkv(seqlen_q=sizes[0], seqlen_k=sizes[1], dim_v=24)
    assert_close([attngen.sdpa(q, k, v)], [attend(q, k, v)])


def test_no_query_heads() -> None:
    q, k, v = make_qkv(seqlen_q=5, dim_v=24)
    assert attngen.sdpa(q[:, :0], k, v, enable_gqa=True).shape == (*q.shape[:1], 0, 5, 24)


def test_jagged_tensors() -> None:
    def nest(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(n, 2, 16, generator=generator) for n in (5, 3)]
        return torch.nested.nested_tensor(parts, layout=torch.jagged)

    q = nest(0)
    k, v = (torch.nested.nested_tensor_from_jagged(nest(n).values(), q.offsets()) for n in (1, 2))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    got = attngen.sdpa(*heads_first, is_causal=True)
    for n in range(2):
        one = [x[n].transpose(0, 1)[None] for x in (q, k, v)]
        assert_close([got.transpose(1, 2)[n]], [attend(*one, is_causal=True)[0].transpose(0, 1)])
    with pytest.raises(attngen.SpecError, match="attn_mask with nested tensors"):
        attngen.sdpa(*heads_first, torch.ones(5, 5))


# ---- patch_sdpa --------------------------------------------------------------------------------


@pytest.fixture
def calls_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with each call that attngen serves."""
    seen: list[None] = []

    def sdpa(*arguments: Any) -> Tensor:
        seen.append(None)
        return attngen.sdpa(*arguments)

    monkeypatch.setattr(sdpa_patch, "sdpa", sdpa)
    monkeypatch.setattr(sdpa_patch, "_told", set())
    return seen


def test_patch_as_a_context_and_as_a_global(calls_of_sdpa: list[None]) -> None:
    q, k, v = make_qkv(seqlen_q=5)
    torchs = F.scaled_dot_product_attention
    with attngen.patch_sdpa():
        got = F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3)
    assert F.scaled_dot_product_attention is torchs and len(calls_of_sdpa) == 1
    assert_close([got], [attend(q, k, v, is_causal=True, scale=0.3)])

    outer, inner = attngen.patch_sdpa(strict=True), attngen.patch_sdpa()
    outer.restore()  # in whatever order
    F.scaled_dot_product_attention(q, k, v)
    inner.restore()
    inner.restore()
    F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is torchs and len(calls_of_sdpa) == 2


def test_a_patch_reaches_modules_in_training(calls_of_sdpa: list[None]) -> None:
    module = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 5, 32)
    want, _ = module(x, x, x, need_weights=False)
    with attngen.patch_sdpa():
        got, _ = module(x, x, x, need_weights=False)
    assert_close([got], [want])
    assert calls_of_sdpa


UNSERVED = {
    "float64": (lambda q: (q.double(),) * 3, {}),
    "head dims 300 and 300": (lambda q: (torch.randn(1, 1, 2, 300),) * 3, {}),
    "no heads": (lambda q: (torch.randn(2, 0, 2, 16),) * 3, {}),
    "a float64 mask": (lambda q: (q,) * 3, {"attn_mask": torch.zeros(5, 5).double()}),
}


@pytest.mark.parametrize("why", UNSERVED)
def test_what_attngen_does_not_serve_is_torchs_with_one_warning(
    why: str, calls_of_sdpa: list[None]
) -> None:
    make, options = UNSERVED[why]
    tensors = make(torch.randn(1, 2, 5, 16))
    with attngen.patch_sdpa():
        with pytest.warns(UserWarning, match=why):
            if why == "a float64 mask":  # which torch refuses
                with pytest.raises(RuntimeError, match="attn_mask"):
                    F.scaled_dot_product_attention(*tensors, **options)
                return
            F.scaled_dot_product_attention(*tensors, **options)
        got = F.scaled_dot_product_attention(*tensors, **options)
    assert not calls_of_sdpa
    assert torch.equal(got, F.scaled_dot_product_attention(*tensors, **options))


def test_a_strict_patch_raises(calls_of_sdpa: list[None]) -> None:
    q, k, v = (x.double() for x in make_qkv(seqlen_q=5))
    with attngen.patch_sdpa(strict=True), pytest.raises(attngen.SpecError, match="float64"):
        F.scaled_dot_product_attention(q, k, v)


def test_math_asked_for_is_torchs(calls_of_sdpa: list[None]) -> None:
    q, k, v = make_qkv(seqlen_q=5)
    with attngen.patch_sdpa(), sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, k, v)
    assert not calls_of_sdpa


def test_a_patch_in_compiled_code() -> None:
    """One graph; the function is looked at again when the patch is gone."""
    torch._dynamo.reset()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    fast = torch.compile(step, backend=keep, fullgraph=True)
    q, k, v = make_qkv(heads=2, heads_kv=1, seqlen_q=5)
    with attngen.patch_sdpa():
        got = fast(q, k, v)
    assert len(graphs) == 1 and "attngen.fwd" in graphs[0]
    want = fast(q, k, v)
    assert len(graphs) == 2 and "attngen.fwd" not in graphs[1]
    assert_close([got], [want])
