"""score_mod and mask_mod: what is read of them, and results and gradients beside plain PyTorch."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import REPO, SMALL_BWD, SMALL_FWD, assert_close, make_qkv, oracle, python
from torch import Tensor
from torch.nn.attention import flex_attention

import attngen
from attngen import reference, sampled_reference
from attngen.config import BwdConfig
from attngen.kernel import file_name
from attngen.pinned import pinned
from attngen.render import render, title
from attngen.score_functions import read
from attngen.score_ops import OPS, known
from attngen.score_reference import plain
from attngen.spec import AttentionSpec
from attngen.tuner.gate import SmallGate
from attngen.verify import verify
from attngen.workload import Workload

BATCH, HEADS, ROWS, KEYS = 2, 2, 19, 22
INF = math.inf
Mod = Callable[..., Tensor]


def _random(*shape: int, learns: bool = True) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return made.requires_grad_(learns)


TABLE = _random(HEADS, ROWS + KEYS)  # of relative positions, for each head
HEAD = _random(HEADS)
NUMBER = _random()
OF_BATCH = _random(BATCH, 3)
WIDE = _random(KEYS, 8, learns=False)[:, ::2].T  # strides of its own
HALF = _random(HEADS, learns=False).half()
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 5 + [2] * 10, [0] * 3 + [1] * 19])
PREFIX = torch.tensor([3, 11], dtype=torch.int32)
OPEN = torch.rand(KEYS, generator=torch.Generator().manual_seed(3)) < 0.7


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - 2 ** (-8 * (h + 1) / HEADS) * (q - k).abs()


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 2.0 * torch.tanh(score / 2.0)


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + TABLE[h, q - k + KEYS]


def chain(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    capped = torch.tanh(score * HEAD[h]) * NUMBER + torch.sigmoid(-score)
    return capped + OF_BATCH[b, (q + k) % 3] * torch.exp(-torch.abs(score))


def tables(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(OPEN[k], score * (1 + HALF[h].float()) + WIDE[h, k], score - OF_BATCH[b, 2])


def kinks(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What has corners, and what has other rules below zero."""
    x = torch.maximum(score, HEAD[h]).clamp(-1.0, 1.5) + torch.relu(score) ** 2
    x = x + score.remainder(0.7) - score.fmod(0.9) + torch.floor(score).detach() * 0.1
    n = (q - k) // 3 + (k - q) % 5 - ((q - 9) * (k - 5)).fmod(4) + torch.sign(q - k)
    return x + n.float() / (1 + h) + torch.sqrt(1 + score.square()) * torch.erf(score)


def waves(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    x = torch.sin(score) + torch.cos(q * 0.3) * torch.exp2(-score.abs())
    y = torch.log(score.square() + 1.0) + torch.log2(2.0 + score * score) + 1 / (3 + score.abs())
    return x * 0.5 + y * torch.rsqrt(score * score + 0.5) + score.abs().pow(1.5) + score**3 * 0.1


def half_hidden(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Causal by -inf: the last rows of more queries than keys see nothing where b is 1."""
    return torch.where((q >= k) & ((b == 0) | (q < 15)), score * 1.5, -INF)


def no_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return HEAD[h] * q.float() / 9


SCORE_MODS = (
    alibi, softcap, relative, chain, tables, kinks, waves, half_hidden, no_score,
)  # fmt: skip


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k < PREFIX[b]) | (q >= k)


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.logical_and((q - k) % 5 < 2, ~((q ^ k) & 4 == 4) | OPEN[k])


def of_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (h % 2 == 0) | (k > 4)


def nothing(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.zeros_like(q, dtype=torch.bool)


MASK_MODS = (causal, documents, prefix, strided, of_heads, nothing)


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles of 16 by 16; dq by atomic adds where a test asks for it."""
    named = getattr(request.node, "callspec", None)
    is_atomic = named is not None and named.params.get("dq") == "atomic"
    with pinned(
        {"fwd": SMALL_FWD, "bwd": replace(SMALL_BWD, dq="atomic" if is_atomic else "kernel")}
    ):
        yield


def qkv(dtype: torch.dtype = torch.float32, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    given = {"batch": BATCH, "heads": HEADS, "heads_kv": 1, "seqlen_q": ROWS, "seqlen_k": KEYS}
    return make_qkv(**{**given, **sizes}, dtype=dtype)


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    starts: tuple[int, int, int, int, int, int] = (0, 1, 0, 1, 0, 0),
) -> tuple[Tensor, Tensor]:
    """(out, lse) by calling the functions on all scores at once."""
    q_start, q_step, k_start, k_step, batch_start, head_start = starts
    batch, heads, rows, dim = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    q, k, v = q.to(dtype), *(x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    b = (batch_start + torch.arange(batch, dtype=torch.int32))[:, None, None, None]
    h = (head_start + torch.arange(heads, dtype=torch.int32))[:, None, None]
    i = (q_start + torch.arange(rows, dtype=torch.int32) * q_step)[:, None]
    j = k_start + torch.arange(keys, dtype=torch.int32) * k_step
    s = q @ k.mT * dim**-0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    if score_mod is not None:
        s = s * 0 + score_mod(s, b, h, i, j)
    ahead = j - i - (keys - rows)
    seen = s != -INF
    if mask_mod is not None:
        seen = seen & mask_mod(b, h, i, j)
    if causal:
        seen = seen & (ahead <= 0)
    if window is not None:
        seen = seen & (ahead >= -window[0]) & (ahead <= window[1])
    live = seen.any(-1, keepdim=True)
    s = s.masked_fill(~seen, -INF).masked_fill(~live, 0.0)
    lse = s.logsumexp(-1, keepdim=True)
    p = (s - lse).exp() * live
    if sinks is not None:
        p = p * torch.sigmoid(lse - sinks[:, None, None])
    if keep is not None:
        p = p * keep / (1 - dropout_p)
    return p @ v, lse.masked_fill(~live, -INF).squeeze(-1)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    attend: Callable[..., tuple[Tensor, Tensor]] | None = None,
    *,
    learnt: tuple[Tensor, ...] = (),
    deterministic: bool = False,
    right: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Out, lse and all gradients are as good as plain PyTorch's, as the cases judge it."""
    if attend is None:
        out, lse = attngen.attention(
            q,
            k,
            v,
            score_mod=score_mod,
            mask_mod=mask_mod,
            deterministic=deterministic,
            return_lse=True,
            **options,
        )
    else:
        out, lse = attend(q, k, v)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(out.shape, generator=generator).to(out)
    dlse = torch.randn(lse.shape, generator=generator).masked_fill(torch.isinf(lse.detach()), 0.0)
    leaves = [q, k, v, *learnt]

    def solved(out: Tensor, lse: Tensor) -> list[Tensor]:
        shown = lse.masked_fill(torch.isinf(lse.detach()), 0.0)
        loss = (out * do.to(out.dtype)).sum() + (shown * dlse).sum()
        return [out, lse, *torch.autograd.grad(loss, leaves)]

    got = solved(out, lse)
    named = {name: options[name] for name in ("causal", "window", "softcap") if name in options}
    named |= {name: options[name] for name in ("bias", "sinks") if name in options}
    want, about = (
        solved(*by_hand(q, k, v, score_mod, mask_mod, dtype=dtype, **(right or named)))
        for dtype in (torch.float64, torch.float32)
    )
    about[0] = about[0].to(q.dtype)
    for n, (a, w, y) in enumerate(zip(got, want, about, strict=True)):
        unit = q.dtype if n != 1 else torch.float32
        good, why = oracle.judge(a, w, unit, yard=y, factor=4.0)
        assert good, (n, why)


def learnt_by(*functions: Mod | None) -> tuple[Tensor, ...]:
    """The tensors that need a gradient of these."""
    found = {}
    for name, fn in zip(("score_mod", "mask_mod"), functions, strict=False):
        if fn is not None:
            spec = AttentionSpec(head_dim=16, **{name: fn})
            assert spec.captured is not None
            for aux, tensor in zip(spec.aux_args, spec.captured, strict=True):
                if aux in spec.learnt_aux and tensor.requires_grad:
                    found[id(tensor)] = tensor
    return tuple(found.values())


# ---- results and gradients ------------------------------------------------------------------


@pytest.mark.parametrize("score_mod", SCORE_MODS, ids=lambda fn: fn.__name__)
def test_score_mod(score_mod: Mod) -> None:
    check(*qkv(), score_mod, learnt=learnt_by(score_mod))


@pytest.mark.parametrize("mask_mod", MASK_MODS, ids=lambda fn: fn.__name__)
def test_mask_mod(mask_mod: Mod) -> None:
    check(*qkv(), None, mask_mod, deterministic=True)


@pytest.mark.parametrize("dq", ["kernel", "atomic"])
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float16, id="float16", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, id="bfloat16"),
        pytest.param(torch.float32, id="float32"),
    ],
)
def test_both_at_once(dtype: torch.dtype, dq: str) -> None:
    assert dq in ("kernel", "atomic")  # see the fixture
    check(*qkv(dtype), relative, documents, learnt=(TABLE,), causal=True)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"causal": True}, marks=pytest.mark.slow),
        {"causal": True, "window": (6, 0)},
        pytest.param({"window": (5, 3)}, marks=pytest.mark.slow),
        pytest.param({"softcap": 3.0}, marks=pytest.mark.slow),
        pytest.param({"bias": _random(1, HEADS, 1, KEYS)}, marks=pytest.mark.slow),
        {"sinks": _random(HEADS, learns=False)},
        {"causal": True, "softcap": 3.0, "bias": _random(ROWS, KEYS)},
    ],
    ids=["causal", "causal-window", "window", "softcap", "bias", "sinks", "all"],
)
def test_with_what_else_there_is(options: dict[str, Any]) -> None:
    learnt = (TABLE, *(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad))
    check(*qkv(), relative, prefix, learnt=learnt, **options)


def test_dropout_keeps_the_same_entries() -> None:
    keep = attngen.dropout_keep(11, BATCH, HEADS, ROWS, KEYS, 0.3)
    right = {"keep": keep, "dropout_p": 0.3}
    check(*qkv(), chain, strided, learnt=learnt_by(chain), right=right, dropout_p=0.3,
          dropout_seed=11)  # fmt: skip


def test_rows_are_counted_in_the_whole_sequence() -> None:
    """A shard of every other row, of later keys, of another batch row and of the last head."""
    q, k, v = qkv(heads=1, batch=1, seqlen_q=8, seqlen_k=9)
    placed = {"q_start": 3, "q_step": 2, "k_start": 5, "batch_start": 1, "head_start": 1}
    right = {"starts": (3, 2, 5, 1, 1, 1)}
    check(q, k, v, relative, documents, learnt=(TABLE,), right=right, **placed)


def test_bottom_right_alignment_moves_masks_but_no_function() -> None:
    q, k, v = qkv(seqlen_q=7, seqlen_k=KEYS)
    check(q, k, v, alibi, None, causal=True)


def test_layout_bshd() -> None:
    q, k, v = (x.detach().transpose(1, 2) for x in qkv())
    out = attngen.attention(q, k, v, score_mod=alibi, layout="bshd")
    want, _ = by_hand(*(x.transpose(1, 2) for x in (q, k, v)), alibi)
    assert_close([out.double()], [want.transpose(1, 2)])


def test_odd_head_dims_and_one_row() -> None:
    check(*make_qkv(1, 2, 1, 5, dim=24, dim_v=8), softcap, causal, right={})


def test_negative_and_distant_indices() -> None:
    """One below zero counts from the end, as in PyTorch; beyond either end is the nearest entry."""
    table = torch.arange(4.0)
    q, k, v = (x.detach() for x in qkv())
    got = attngen.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i - 6])

    def right(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = i - 6
        return s + table[torch.where(at < 0, at + 4, at).clamp(0, 3)]

    assert_close([got.double()], [by_hand(q, k, v, right)[0]])


def test_what_hidden_keys_hold_does_not_matter() -> None:
    q, k, v = (x.detach() for x in qkv())
    dirty = k.clone(), v.clone()
    for x in dirty:
        x[:, :, 13:] = math.nan

    def early(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < 13

    def hides(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j < 13, s, -INF)

    for given in ({"mask_mod": early}, {"score_mod": hides}):
        found = []
        for keys, values in ((k, v), dirty):
            leaves = [x.clone().requires_grad_() for x in (q, keys, values)]
            out, lse = attngen.attention(*leaves, return_lse=True, **given)
            found.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)])
        assert_close(found[1], found[0])


def test_gradient_of_a_half_table_and_of_one_alone() -> None:
    table = _random(HEADS, learns=False).half().requires_grad_()
    q, k, v = (x.detach() for x in qkv())
    out = attngen.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * table[h])
    (got,) = torch.autograd.grad(out.square().sum(), table)
    want, _ = by_hand(q, k, v, lambda s, b, h, i, j: s * table[h])
    (right,) = torch.autograd.grad(want.square().sum(), table)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, right, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.gradient is not None])
def test_derivative_of_each_operator(name: str) -> None:
    """The printed derivative, in PyTorch's form, beside autograd's of the operator."""
    words = " ".join(["t0"] + ["t1"] * (OPS[name].arity - 1))
    before = "aux0:float1;t0:add score 2.5;t1:index aux0 h"
    text = (
        f"{before};{name} {words}" if name != "where" else f"{before};t2:gt score t1;where t2 t0 t1"
    )
    text = text if OPS[name].arity > 1 else f"t0:add score 2.5;{name} t0"
    function = read("score_mod", text)
    spec = AttentionSpec(head_dim=16, score_mod=text)
    aux = [torch.tensor([1.5], dtype=torch.float64)] * len(spec.function_tensors)
    score = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    place = [torch.zeros(9, dtype=torch.int64)] * 4
    out = plain("score_mod", function.text)(torch.float64, score, *place, *aux)
    (want,) = torch.autograd.grad(out.sum(), score)
    nodes, result, _ = function._with_gradients
    made = replace(function, nodes=nodes, result=result)
    source = "\n    ".join(made.torch_lines)
    from attngen.score_reference import entry

    scope: dict[str, Any] = {"torch": torch, "entry": entry, "FLOAT": torch.float64}
    exec(f"def grad(grad, score, h, aux0=None):\n    {source}", scope)
    got = scope["grad"](torch.ones(9, dtype=torch.float64), score.detach(), place[1], *aux)
    torch.testing.assert_close(got.expand(9), want)


def test_gate_and_verify_know_functions() -> None:
    spec = AttentionSpec(
        head_dim=16, dtype="float32", score_mod=relative, mask_mod=documents, causal=True,
        deterministic=False,
    )  # fmt: skip
    bare = AttentionSpec.parse(spec.key)
    found = list(verify(bare, [Workload(1, 2, 1, 17, 21)], ("fwd", "bwd"), "cpu"))
    assert [each.result for each in found] == ["out", "lse", "dq", "dk", "dv", "daux0"]
    assert all(each.ok for each in found), found
    assert SmallGate(bare, "fwd", 2, "cpu").check(SMALL_FWD).ok


@pytest.mark.slow
def test_gate_of_a_backward() -> None:
    spec = AttentionSpec(head_dim=16, score_mod=relative, mask_mod=documents)
    bare = AttentionSpec.parse(spec.key)
    assert SmallGate(bare, "bwd", 2, "cpu").check(SMALL_BWD).ok


# ---- the text -------------------------------------------------------------------------------

TEXTS: list[tuple[str, Mod, str]] = [
    ("score_mod", alibi, "t0:add h 1;t1:mul t0 -8;t2:div t1 2;t3:exp2 t2;t4:sub q k;t5:abs t4;"
                         "t6:mul t3 t5;sub score t6"),
    ("score_mod", softcap, "t0:div score 2.0;t1:tanh t0;mul t1 2.0"),
    ("score_mod", relative, "aux0:float2;t0:sub q k;t1:add t0 22;t2:index aux0 h t1;add score t2"),
    ("score_mod", lambda s, b, h, q, k: s, "score"),
    ("score_mod", lambda s, b, h, q, k: torch.zeros_like(s), "0.0"),
    ("score_mod", lambda s, b, h, q, k: s + 1e-05 * (s * 2 - s * 2 + q),
     "t0:mul score 2;t1:sub t0 t0;t2:add t1 q;t3:mul t2 1e-05;add score t3"),
    ("mask_mod", documents, "aux0:long2;t0:index aux0 b q;t1:index aux0 b k;eq t0 t1"),
    ("mask_mod", prefix, "aux0:int1;t0:index aux0 b;t1:lt k t0;t2:ge q k;or t1 t2"),
    ("mask_mod", nothing, "false"),
    ("mask_mod", lambda b, h, q, k: OPEN[k] & (k < torch.tensor(7)),
     "aux0:bool1;t0:index aux0 k;t1:lt k 7;and t0 t1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "text"), TEXTS, ids=[text for *_, text in TEXTS])
def test_text_of_a_function(name: str, fn: Mod, text: str) -> None:
    spec = AttentionSpec(head_dim=16, **{name: fn})
    assert getattr(spec, name) == text
    assert "," not in text and "=" not in text
    assert AttentionSpec(head_dim=16, **{name: text}) == spec
    for again in (
        AttentionSpec.parse(spec.key),
        AttentionSpec.parse(spec.text_key),
        AttentionSpec.from_json(spec.to_json()),
        pickle.loads(pickle.dumps(spec)),
    ):
        assert again == spec and hash(again) == hash(spec) and again.text_key == spec.text_key


def test_masks_that_flex_attention_combines() -> None:
    combined = flex_attention.and_masks(causal, flex_attention.or_masks(prefix, of_heads))
    spec = AttentionSpec(head_dim=16, mask_mod=combined)
    by_hand = AttentionSpec(
        head_dim=16,
        mask_mod=lambda b, h, q, k: (
            causal(b, h, q, k) & (prefix(b, h, q, k) | of_heads(b, h, q, k))
        ),
    )
    assert spec == by_hand and spec.captured == (PREFIX,)
    assert AttentionSpec(head_dim=16, mask_mod=flex_attention.noop_mask).mask_mod == "true"


def test_equal_functions_are_one_spec() -> None:
    def other(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        unused = DOCUMENTS[b, q_idx] + 1  # noqa: F841  (dead: not even an input)
        shift = q_idx - k_idx + KEYS
        return score + TABLE[h][shift]

    one, two = (AttentionSpec(head_dim=16, score_mod=fn) for fn in (relative, other))
    assert one == two and len({one, two}) == 1 and one.captured[0] is two.captured[0] is TABLE
    by_number = [functools.partial(lambda c, s, b, h, q, k: s * c, c) for c in (2.0, 3.0)]
    specs = [AttentionSpec(head_dim=16, score_mod=fn) for fn in by_number]
    assert specs[0].text_key != specs[1].text_key


def test_captured_tensors_belong_to_the_object_alone() -> None:
    spec = AttentionSpec(head_dim=16, score_mod=relative, mask_mod=documents)
    assert spec.tensor_args == ("aux0", "aux1") and spec.gradient_args == ("aux0",)
    assert spec.captured == (TABLE, DOCUMENTS)
    assert replace(spec, causal=True).captured == spec.captured == copy.deepcopy(spec).captured
    assert pickle.loads(pickle.dumps(spec)).captured is None and spec.text.captured is None


def test_a_fresh_process_reads_and_renders_without_torch() -> None:
    spec = AttentionSpec(head_dim=16, score_mod=chain, mask_mod=strided)
    done = python(f"""
import sys
from attngen.spec import AttentionSpec
from attngen.render import render
from attngen.config import BwdConfig
spec = AttentionSpec.parse({spec.key!r})
assert "def score_mod_grad" in render(spec, BwdConfig(
    block_m=64, block_n=64, num_warps=4, num_stages=2))
assert spec.key == {spec.key!r} and "torch" not in sys.modules
""")
    assert done.returncode == 0, done.stderr


def test_printed_file_and_its_names() -> None:
    spec = AttentionSpec(head_dim=16, score_mod=relative, mask_mod=documents)
    text = render(spec, SMALL_BWD)
    assert "score_mod, mask_mod" in title(spec, SMALL_BWD)
    assert "score_mod_mask_mod" in file_name(spec, "bwd", text)
    assert "t2 = tl.load(aux0_ptr + at).to(tl.float32)" in text
    dead = render(AttentionSpec(head_dim=16, score_mod=softcap), BwdConfig(
        block_m=64, block_n=64, num_warps=4, num_stages=2))  # fmt: skip
    assert "def entry" not in dead and "daux" not in dead and "def tanh" in dead


# ---- calls ----------------------------------------------------------------------------------


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(head_dim=16, dtype="float32", **{"deterministic": False, **fields})


def test_a_compiled_spec_takes_its_own_tensors_or_others() -> None:
    q, k, v = (x.detach() for x in qkv())
    attn = attngen.compile(_spec(score_mod=relative, mask_mod=documents))
    other = torch.randn_like(TABLE)
    own = attn(q, k, v)
    assert_close([own.double()], [by_hand(q, k, v, relative, documents)[0]])
    assert torch.equal(attn(q, k, v, aux_tensors=(TABLE, DOCUMENTS)), own)
    got = attn(q, k, v, aux_tensors=[other, DOCUMENTS])
    moved = attngen.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + other[h, i - j + KEYS], mask_mod=documents,
        deterministic=False,
    )  # fmt: skip
    assert torch.equal(got, moved) and not torch.equal(got, own)
    loaded = pickle.loads(pickle.dumps(attn))
    assert torch.equal(loaded(q, k, v, aux_tensors=(TABLE, DOCUMENTS)), own)
    with pytest.raises(attngen.SpecError, match="read 2 tensors.*aux0 float32.*aux1 int64 of 2"):
        loaded(q, k, v)


def test_a_function_reads_what_there_is_at_each_call() -> None:
    q, k, v = (x.detach() for x in qkv())
    scale = 2.0
    mods = {"score_mod": lambda s, b, h, i, j: s * scale}
    first = attngen.attention(q, k, v, **mods)
    scale = 3.0
    second = attngen.attention(q, k, v, **mods)
    for got, number in ((first, 2.0), (second, 3.0)):
        want, _ = by_hand(q, k, v, lambda s, *_, n=number: s * n)
        assert_close([got.double()], [want])


BAD_TENSORS: list[tuple[Any, str]] = [
    ((), "must hold 1 tensors"),
    ((TABLE, TABLE), "must hold 1 tensors"),
    (TABLE, "must be a tuple of tensors"),
    ((TABLE[0],), "must have 2 dims"),
    ((TABLE[:, :0],), "none of them empty"),
    ((TABLE.long(),), "must be float32, float16 or bfloat16"),
    ((TABLE.double(),), "must be float32, float16 or bfloat16"),
    ((TABLE.to("meta"),), "is on meta"),
    ((3.0,), "must be a torch.Tensor"),
]


@pytest.mark.parametrize(("aux", "match"), BAD_TENSORS, ids=[match for _, match in BAD_TENSORS])
def test_aux_tensors_that_do_not_fit(aux: Any, match: str) -> None:
    attn = attngen.compile(_spec(score_mod=relative))
    with pytest.raises(attngen.SpecError, match=match):
        attn(*qkv(), aux_tensors=aux)


def test_aux_tensors_without_a_function() -> None:
    for attend in (attngen.compile(_spec()), attngen.attention):
        with pytest.raises(attngen.SpecError, match="neither score_mod nor mask_mod"):
            attend(*qkv(), aux_tensors=(TABLE,))


def test_deterministic_gradients_of_tables_are_refused() -> None:
    q, k, v = qkv()
    attn = attngen.compile(_spec(score_mod=relative, deterministic=True))
    with pytest.raises(attngen.UnsupportedSpecError, match="in no fixed order"):
        attn(q, k, v)
    with torch.no_grad():
        attn(q, k, v)
    fixed = TABLE.detach()
    found = [
        torch.autograd.grad(attn(q, k, v, aux_tensors=(fixed,)).square().sum(), (q, k, v))
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_fp8_is_refused() -> None:
    fields = {"head_dim": 64, "dtype": "float8_e4m3fn", "fp8_scale": "tensor"}
    with pytest.raises(attngen.UnsupportedSpecError, match="score_mod with FP8.*mask_mod with FP8"):
        AttentionSpec(**fields, score_mod=softcap, mask_mod=causal)


def test_compiled_graph() -> None:
    q, k, v = qkv()
    attn = attngen.compile(_spec(score_mod=relative, mask_mod=documents))
    graph = torch.compile(attn, fullgraph=True, backend="aot_eager")
    found = [
        [out, *torch.autograd.grad(out.square().sum(), (q, k, v, TABLE))]
        for out in (attn(q, k, v), graph(q, k, v))
    ]
    assert_close(found[1], found[0], atol=1e-6)


def test_a_function_inside_a_compiled_graph_says_what_to_do() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q, k, v, score_mod=softcap)

    graph = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.raises(attngen.UnsupportedSpecError, match="outside of it"):
        graph(*qkv())


def test_op_check() -> None:
    spec = _spec(score_mod=relative, mask_mod=documents)
    numbers = [0.25], [0, 0, 1, 0, 1, 0, 0]
    arguments = (spec.text_key, *qkv(), [TABLE, DOCUMENTS], *numbers)
    torch.library.opcheck(torch.ops.attngen.fwd.default, arguments)


def test_vmap_where_no_batch_row_is_read() -> None:
    q, k, v = (x.detach() for x in qkv())
    many = torch.stack([q, 2 * q])
    attn = attngen.compile(_spec(score_mod=relative))
    with torch.no_grad():
        got = torch.vmap(lambda q: attn(q, k, v))(many)
        assert_close(got, [attn(each, k, v) for each in many], atol=1e-6)
        with pytest.raises(attngen.SpecError, match="mask_mod reads b"):
            torch.vmap(lambda q: attngen.compile(_spec(mask_mod=documents))(q, k, v))(many)


# ---- what cannot be read ----------------------------------------------------------------------

VALUE = "asks for the value of a tensor"
UNREADABLE: list[tuple[str, Any, str]] = [
    ("score_mod", lambda s, b, h, q, k: s if q > k else 2 * s, VALUE),
    ("score_mod", lambda s, b, h, q, k: s * math.exp(k), VALUE),
    ("score_mod", lambda s, b, h, q, k: s * TABLE[0, 0].item(), VALUE),
    ("mask_mod", lambda b, h, q, k: q >= k and k > 0, VALUE),
    ("score_mod", lambda s, b, h: s, r"must take score_mod\(score, b, h, q_idx, k_idx\)"),
    ("mask_mod", lambda s, b, h, q, k: q > k, r"must take mask_mod\(b, h, q_idx, k_idx\)"),
    ("score_mod", lambda s, b, h, q, k: q - k, "must return a floating tensor.*got torch.int32"),
    ("score_mod", lambda s, b, h, q, k: None, "must return a floating tensor.*got None"),
    ("score_mod", lambda s, b, h, q, k: TABLE[h], "of no dims, got shape"),
    ("mask_mod", lambda b, h, q, k: True, "must return a bool tensor.*got True"),
    ("mask_mod", lambda b, h, q, k: q - k, "must return a bool tensor.*write a comparison"),
    ("score_mod", lambda s, b, h, q, k: torch.special.i0(s), "<lambda> uses aten.i0, but kernels"),
    ("score_mod", lambda s, b, h, q, k: s**s, "uses aten.pow, but it takes a constant"),
    ("score_mod", lambda s, b, h, q, k: s + TABLE[h].sum(), "aten.sum on a tensor of 1 dims"),
    ("score_mod", lambda s, b, h, q, k: s + TABLE[h, :], "only single entries are read"),
    ("score_mod", lambda s, b, h, q, k: s + torch.arange(4)[q], "uses aten.arange"),
    ("score_mod", lambda s, b, h, q, k: s + torch.rand(()), "it is random"),
    ("score_mod", lambda s, b, h, q, k: s.double(), "kernels compute in float32"),
    ("score_mod", lambda s, b, h, q, k: s + TABLE.double()[h, q], "uses"),
    ("score_mod", lambda s, b, h, q, k: s + q.missing, "AttributeError"),
    ("score_mod", 3, "must be None or a function"),
    ("score_mod", "add score", "'add score': operator add takes 2 operands"),
    ("score_mod", "t0:add score 1;mul t1 2", "'t1' is neither a number nor one of"),
    ("score_mod", "sinh score", "operators are index, add"),
    ("score_mod", "sub q k", "must give a float"),
    ("score_mod", "aux0:float1;add score 1", "never read"),
    ("score_mod", "aux0:float2;t0:index aux0 h;add score t0", "has 2 dims, got 1 indices"),
    ("score_mod", "aux0:float1;t0:index aux0 score;add score t0", "indexed by a float"),
    ("mask_mod", "lt score 1", "'score' is neither"),
    ("mask_mod", "", "is no text of a function"),
]


@pytest.mark.parametrize(("name", "value", "match"), UNREADABLE)
def test_what_cannot_be_read_says_why(name: str, value: Any, match: str) -> None:
    with pytest.raises(attngen.SpecError, match=match):
        AttentionSpec(head_dim=16, **{name: value})


def test_operators_are_listed_where_one_is_missing() -> None:
    with pytest.raises(attngen.UnsupportedSpecError) as raised:
        AttentionSpec(head_dim=16, score_mod=lambda s, *_: torch.lgamma(s))
    assert "clamp" in str(raised.value) and "tanh" in str(raised.value)


def test_readme_lists_the_operators_that_there_are() -> None:
    text = (REPO / "templates" / "README.md").read_text()
    listed = text.partition("<!-- operators: begin -->")[2].partition("<!-- operators: end -->")[0]
    assert listed.strip().removesuffix(".").replace("\n", " ").split(", ") == known()


@pytest.mark.parametrize("score_mod", [chain, half_hidden, no_score], ids=lambda fn: fn.__name__)
def test_sampled_rows_and_keys_of_the_oracle(score_mod: Mod) -> None:
    """What the gate compares on the tuned shape, beside the whole."""
    spec = _spec(score_mod=score_mod, mask_mod=documents, softcap=2.0, causal=True)
    assert spec.captured is not None
    aux = {name: x.detach() for name, x in zip(spec.aux_args, spec.captured, strict=True)}
    q, k, v = (x.detach().double().requires_grad_() for x in qkv())
    out, lse = reference.attention(spec, q, k, v, **aux)
    do = torch.randn(out.shape, dtype=torch.float64)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    rows = torch.tensor([[0, 0, 0], [1, 1, 18], [1, 0, 9]])
    here = sampled_reference.sampled_rows(spec, q, k, v, rows, do=do, **aux)
    keys = torch.tensor([[0, 0, 0], [1, 0, 21], [1, 0, 8]])
    there = sampled_reference.sampled_keys(spec, q, k, v, out, lse, do, keys, **aux)
    assert here.dq is not None
    found = (here.out, here.lse, here.dq, there.dk, there.dv)
    at, of = tuple(rows.T), tuple(keys.T)
    assert_close(found, (out[at], lse[at], dq[at], dk[of], dv[of]), atol=1e-10)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
@pytest.mark.parametrize("dq", ["kernel", "atomic"])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_rows_past_the_end_may_become_anything(options: dict[str, Any], dq: str) -> None:
    """Their scores are zero, of which this makes NaN; so does its derivative."""

    def sign(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score / score.abs() * HEAD[h] + score

    assert dq in ("kernel", "atomic")  # see the fixture
    check(*qkv(seqlen_q=17, seqlen_k=20), sign, of_heads, learnt=(HEAD,), **options)
