"""flex_attention with torch's arguments, beside torch's own and a dense computation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import assert_close, make_qkv, oracle
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    noop_mask,
)

import attngen
from attngen.integrations import flex_attention as ours
from attngen.integrations.flex_attention import flex_attention

Mod = Callable[..., Tensor]
SLOPES = torch.tensor([0.3, 0.05, 0.2, 0.1])
TABLE = torch.linspace(-1, 1, 4 * 500).reshape(4, 500)
IDS = torch.arange(400) // 90

SCORE_MODS: dict[str, Mod | None] = {
    "none": None,
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "softcap": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0),
    "table": lambda s, b, h, i, j: s + TABLE[h, i - j + 200],
    "hides": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
}
MASK_MODS: dict[str, Mod | None] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() < 40,
    "documents": and_masks(lambda b, h, i, j: IDS[i] == IDS[j], lambda b, h, i, j: i >= j),
    "by-head": lambda b, h, i, j: (i // 64 + j // 128 + h + b) % 3 != 0,
    "late": lambda b, h, i, j: (i >= 20) & (j >= 130),
}


def _cases() -> Iterator[Any]:
    draw = random.Random(1)
    for n, (score, mask) in enumerate(itertools.product(SCORE_MODS, MASK_MODS)):
        case = {
            "score": score,
            "mask": mask,
            "block": draw.choice([128, 128, 64, (128, 256), (32, 128), 100]),
            "lengths": draw.choice([(140, 140), (70, 200), (150, 33), (1, 140)]),
            "heads_kv": (2, 1)[n % 2],
            "scale": draw.choice([None, 0.4]),
            "batch_kv": draw.choice([1, 2]) if mask != "none" else 1,
            "dtype": (torch.float32, torch.bfloat16, torch.float32, torch.float16)[n % 4],
            "result": ("lse", "aux", "out")[n % 3],
        }
        case["batch"] = case["batch_kv"] if mask != "by-head" else 2
        yield pytest.param(case, id=f"{score}-{mask}")


def block_mask(mask_mod: Mod, case: dict[str, Any]) -> BlockMask:
    wide = (2, 2) if case["mask"] == "by-head" else (None, None)
    return create_block_mask(
        mask_mod, *wide, *case["lengths"], device="cpu", BLOCK_SIZE=case["block"]
    )


def dense(
    q: Tensor, k: Tensor, v: Tensor, score: Mod | None, mask: Mod | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out and lse in the dtype of q."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).expand(q.shape[0], -1, -1, -1) for x in (k, v))
    s = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    places = [
        torch.arange(n).reshape([-1 if d == m else 1 for d in range(4)])
        for m, n in enumerate(s.shape)
    ]
    s = s if score is None else score(s, *places).to(s.dtype)
    if mask is not None:
        s = s.masked_fill(~mask(*places), float("-inf"))
    lse = torch.logsumexp(s, 3)
    p = torch.exp(s - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return p @ v, lse


@pytest.mark.parametrize("case", list(_cases()))
def test_sweep(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, keys = case["lengths"]
    dtype = case["dtype"]
    q, _, _ = make_qkv(case["batch"], 2, rows)
    _, k, v = make_qkv(case["batch_kv"], case["heads_kv"], keys, dim_v=24, seed=1)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    score, mask_mod = SCORE_MODS[case["score"]], MASK_MODS[case["mask"]]
    options: dict[str, Any] = {"scale": case["scale"], "enable_gqa": case["heads_kv"] == 1}
    if mask_mod is not None:
        options["block_mask"] = block_mask(mask_mod, case)
    how = {"lse": {"return_lse": True}, "aux": {"return_aux": AuxRequest(lse=True)}}
    how["out"] = {"kernel_options": {"BLOCK_M": 32}}
    found = flex_attention(q, k, v, score, **options, **how[case["result"]])
    out, lse = (found, None) if case["result"] == "out" else found
    lse = lse.lse if case["result"] == "aux" else lse

    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    plain = (x.detach() for x in (q, k, v))
    torchs, aux = flex.flex_attention(*plain, score, return_aux=AuxRequest(lse=True), **options)
    if dtype == torch.float32:
        assert_close([out], [torchs.nan_to_num()])
    if lse is not None:
        atol = 1e-5 if dtype == torch.float32 else 0.05  # torch's scores are rounded to dtype
        torch.testing.assert_close(lse, aux.lse, atol=atol, rtol=1e-5, check_dtype=False)

    def solve(dtype: torch.dtype) -> list[Tensor]:
        own = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        found, _ = dense(*own, score, mask_mod, case["scale"])
        return [found, *torch.autograd.grad(found, own, do.to(dtype))]

    do = torch.randn(out.shape).to(dtype)
    got = [out, *torch.autograd.grad(out, (q, k, v), do)]
    for name, x, right, yard in zip(
        ("out", "dq", "dk", "dv"), got, solve(torch.float64), solve(dtype), strict=True
    ):
        assert x.dtype == dtype, name
        good, why = oracle.judge(x, right, dtype, yard=yard)
        assert good, f"{name}: {why}"


def test_tensors_that_score_mod_reads_learn() -> None:
    slopes = SLOPES.clone().requires_grad_()

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - slopes[h] * (i - j).abs()

    q, k, v = make_qkv(seqlen_q=30)
    got = torch.autograd.grad(flex_attention(q, k, v, score).sum(), slopes)
    want = torch.autograd.grad(dense(q, k, v, score, None, None)[0].sum(), slopes)
    assert_close(got, want, atol=2e-4)


# ---- block masks --------------------------------------------------------------------------------


def made_of_blocks(size: int, **options: Any) -> tuple[BlockMask, Tensor]:
    """A BlockMask of three rows of blocks and no mask_mod, and the mask that it means."""
    counts = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    columns = torch.tensor([[[[0, 1, 2], [0, 2, 1], [2, 0, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=size, **options)
    seen = torch.tensor([[1, 0, 0], [1, 0, 1], [0, 0, 1]], dtype=torch.bool)
    return mask, seen.repeat_interleave(size, 0).repeat_interleave(size, 1)


@pytest.mark.parametrize("size", [128, 48])
def test_blocks_count_without_a_mask_mod(size: int) -> None:
    rows, keys = 3 * size - 10, 3 * size - 5
    mask, seen = made_of_blocks(size, seq_lengths=(rows, keys))
    assert mask.mask_mod is noop_mask
    q, k, v = make_qkv(heads=1, seqlen_q=rows, seqlen_k=keys)
    want = attngen.attention(q, k, v, attn_mask=seen[:rows, :keys])
    assert_close([flex_attention(q, k, v, block_mask=mask)], [want])


def test_empty_blocks_are_not_read_and_full_ones_not_masked() -> None:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i // 128 == j // 128

    mask = create_block_mask(mask_mod, None, None, 256, 256, device="cpu")
    q, k, v = make_qkv(heads=1, seqlen_q=256)
    found = ours._masked(mask, q, k)["block_map"].lists
    spec = attngen.AttentionSpec(head_dim=16, mask_mod=mask_mod, block_map=True)
    wanted = attngen.make_block_map(spec, 1, 1, 256, 256).lists
    assert torch.equal(found, wanted)


def test_a_mask_is_read_once_until_its_blocks_change() -> None:
    mask, _ = made_of_blocks(128, seq_lengths=(384, 384))
    q, k, v = make_qkv(heads=1, seqlen_q=384)
    first = ours._masked(mask, q, k)
    assert ours._masked(mask, q, k)["block_map"] is first["block_map"]
    mask.kv_num_blocks.fill_(0)
    assert ours._masked(mask, q, k)["block_map"] is not first["block_map"]
    assert not flex_attention(q, k, v, block_mask=mask).any()


def test_bad_masks_say_what_to_do() -> None:
    q, k, v = make_qkv(heads=1, seqlen_q=384)
    mask, seen = made_of_blocks(128, seq_lengths=(384, 384))
    with pytest.raises(attngen.SpecError, match="must be a BlockMask.*create_block_mask"):
        flex_attention(q, k, v, block_mask=seen)
    with pytest.raises(attngen.SpecError, match="for 384 queries and 384 keys, got 384 and 20"):
        flex_attention(q, k[:, :, :20], v[:, :, :20], block_mask=mask)
    with pytest.raises(attngen.SpecError, match="Cannot use mask_mod from a sliced BlockMask"):
        flex_attention(q, k, v, block_mask=mask[:, :, torch.tensor([0, 1, 2])])
    sliced = mask[:, :, torch.tensor([0])]
    sliced.mask_mod = mask.mask_mod
    with pytest.raises(attngen.SpecError, match="1 rows of blocks for 384 queries"):
        flex_attention(q, k, v, block_mask=sliced)

    def asks(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j if i > 3 else i < j

    mask.mask_mod = asks
    with pytest.raises(attngen.SpecError, match="asks for the value of a tensor"):
        flex_attention(q, k, v, block_mask=mask)


def test_arguments() -> None:
    q, k, v = make_qkv(seqlen_q=20, heads_kv=1)
    with pytest.raises(attngen.SpecError, match="2 heads and key 1; pass enable_gqa=True"):
        flex_attention(q, k, v)
    out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert isinstance(aux, AuxOutput) and aux.lse.shape == (1, 2, 20)
    assert flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest())[1] == AuxOutput()
    with pytest.raises(attngen.UnsupportedSpecError, match="max_scores by query is not built"):
        flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(max_scores=True))
    with pytest.raises(attngen.SpecError, match=r"AuxRequest, got True; write .*lse=True"):
        flex_attention(q, k, v, enable_gqa=True, return_aux=True)
    with pytest.raises(attngen.SpecError, match="exclude each other"):
        flex_attention(q, k, v, None, None, None, True, True, return_aux=AuxRequest(lse=True))


def test_inside_torch_compile() -> None:
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in make_qkv(seqlen_q=40))
    mask = create_block_mask(MASK_MODS["causal"], None, None, 40, 40, device="cpu")

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q * 2, k, v, SCORE_MODS["softcap"], mask) * 2

    got, want = torch.compile(step, backend="eager")(q, k, v), step(q, k, v)
    assert_close([got], [want])


def test_package_has_the_function_under_its_name() -> None:
    q, k, v = make_qkv(1, 2, 20)
    found = attngen.integrations.flex_attention(q, k, v)
    torch.testing.assert_close(found, flex_attention(q, k, v))
