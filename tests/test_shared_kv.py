"""v as k's first columns (absorbed MLA): kernels that load them once, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import make_qkv, oracle, run_file
from test_compile_only import compile_all
from torch import Tensor

import attngen
from attngen import shared_kv
from attngen.config import default_config
from attngen.decode import DecodeConfig, footprint, infeasible
from attngen.gpu import by_name
from attngen.head_dim import split_behind, split_head_dim
from attngen.identity import parsed
from attngen.lowering import default
from attngen.pinned import pinned
from attngen.render import render
from attngen.spec import AttentionSpec
from attngen.workload import Workload, spec_bucket

SPLIT = DecodeConfig(block_m=16, block_n=16, num_warps=1, num_stages=1, split_keys=32)
TALL = DecodeConfig(block_m=64, block_n=32, num_warps=1, num_stages=1)
LENGTHS = (0, 1, 16, 41)
MLA = {"head_dim": 576, "head_dim_v": 512}


def _made(heads: int, rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k, _ = make_qkv(len(LENGTHS), heads, rows, max(LENGTHS), dim, heads_kv=1, dtype=dtype)
    return q.detach(), k.detach()


def _paged(k: Tensor) -> tuple[Tensor, Tensor]:
    """Pages in reverse, NaN behind the lengths, and their table."""
    pages = torch.full((9, 16, 1, k.shape[3]), float("nan"), dtype=k.dtype)
    table = torch.full((len(LENGTHS), 3), -1, dtype=torch.int32)
    free = list(range(9))
    for b, length in enumerate(LENGTHS):
        for n in range(-(-length // 16)):
            table[b, n] = free.pop()
            part = k[b, :, 16 * n : min(length, 16 * n + 16)].transpose(0, 1)
            pages[table[b, n], : part.shape[0]] = part
    return pages, table


def _compare(
    got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, dim_v: int, named: dict[str, Any]
) -> None:
    for b, length in enumerate(LENGTHS):
        at = slice(b, b + 1)
        tensors = (q[at], k[at, :, :length], k[at, :, :length, :dim_v])
        want, yard = oracle.attention(*tensors, **named), oracle.unfused(*tensors, **named)
        for name, x, dtype in (("out", got[0], q.dtype), ("lse", got[1], torch.float32)):
            right, about = getattr(want, name), getattr(yard, name)
            ok, why = oracle.judge(x[at], right, dtype, yard=about)
            assert ok, why


@pytest.fixture
def keys_used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call was served with shared_kv."""
    found = []

    def key_of(text_key: str, *tensors: Tensor) -> str:
        key = shared_kv.key_of(text_key, *tensors)
        found.append(parsed(key).shared_kv)
        return key

    monkeypatch.setattr("attngen.calls.key_of", key_of)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [SPLIT, TALL], ids=["split", "tall"])
@pytest.mark.parametrize(
    ("dims", "heads"),
    [
        ((40, 32), 3),
        pytest.param((576, 512), 8, marks=pytest.mark.slow),
        pytest.param((48, 32), 70, marks=pytest.mark.slow),
        pytest.param((192, 128), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_caches(
    dims: tuple[int, int],
    heads: int,
    config: DecodeConfig,
    dtype: torch.dtype,
    keys_used: list[bool],
) -> None:
    """Dense and paged; a view of k is told without a word."""
    q, k = _made(heads, 1, dims[0], dtype)
    pages, table = _paged(k)
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    call = {"seqused_k": used, "softmax_scale": 192**-0.5, "return_lse": True}
    named = {"scale": 192**-0.5}
    with pinned({"decode": config}):
        got = attngen.attention(q, k, k[..., : dims[1]], **call)
        _compare(got, q, k, dims[1], named)
        got = attngen.attention(q, pages, pages[..., : dims[1]], block_table=table, **call)
        _compare(got, q, k, dims[1], named)
    assert keys_used == [True, True]


def test_latent_attention(keys_used: list[bool]) -> None:
    """DeepSeek's dims."""
    q, k = _made(2, 1, 576, torch.bfloat16)
    pages, table = _paged(k)
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    call = {"seqused_k": used, "block_table": table, "return_lse": True}
    _compare(attngen.attention(q, pages, pages[..., :512], **call), q, k, 512, {})
    assert keys_used == [True]


@pytest.mark.parametrize("rows", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_masks_and_hidden_nan(rows: int, dtype: torch.dtype) -> None:
    """Several rows, bottom-right; keys that no row may see hold NaN, in v, too."""
    q, k = _made(4, rows, 48, dtype)
    spec = AttentionSpec(
        head_dim=48,
        head_dim_v=32,
        dtype=dtype,
        shared_kv=True,
        key_lengths=True,
        causal=True,
        window=(30, 0),
        sinks=True,
        softcap=5.0,
    )
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2))
    named = {"causal": True, "window": (30, 0), "sinks": sinks, "softcap": 5.0}
    dirty = k.clone()
    hidden = max(0, 41 - rows - 30)  # of the longest sequence
    dirty[3, :, :hidden] = float("nan")
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    with pinned({"decode": SPLIT}):
        got = attngen.compile(spec)(
            q, dirty, dirty[..., :32], seqused_k=used, sinks=sinks, return_lse=True
        )
    _compare(got, q, k, 32, named)


def test_bits_depend_on_the_row_alone() -> None:
    attend = attngen.compile(
        AttentionSpec(
            head_dim=48,
            head_dim_v=32,
            dtype="float32",
            paged=True,
            batch_invariant=True,
            shared_kv=True,
        )
    )
    q, k = _made(6, 1, 48, torch.float32)
    pages, table = _paged(k)
    v, used = pages[..., :32], torch.tensor(LENGTHS, dtype=torch.int32)
    out = attend(q, pages, v, block_table=table, seqused_k=used)
    for b in range(len(LENGTHS)):
        at = slice(b, b + 1)
        one = attend(q[at], pages, v, block_table=table[at], seqused_k=used[at])
        assert torch.equal(one, out[at])


def test_dense_without_lengths_and_its_gradients(keys_used: list[bool]) -> None:
    q, k, _ = make_qkv(2, 4, 2, 37, 48, heads_kv=1)
    out, lse = attngen.attention(q, k, k[..., :32], causal=True, return_lse=True)
    assert keys_used == [True]
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad((out * do).sum() + lse.sum(), (q, k))
    leaves = [x.detach().double().requires_grad_() for x in (q, k)]
    want = oracle.attention(leaves[0], leaves[1], leaves[1][..., :32], causal=True)
    wanted = torch.autograd.grad((want.out * do).sum() + want.lse.sum(), leaves)
    for grad, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(grad.double(), right, rtol=1e-4, atol=1e-5)


def test_other_values_are_not_taken_for_a_view(keys_used: list[bool]) -> None:
    """Calls of one layout, in turn."""
    q, k = _made(4, 1, 48, torch.float32)
    other = torch.randn_like(k)
    for v, shared in ((k[..., :32], True), (other[..., :32], False), (k[..., 16:], False)):
        got = attngen.attention(q, k, v)
        want = oracle.attention(q, k, v)
        torch.testing.assert_close(got.double(), want.out, rtol=1e-4, atol=1e-5)
        assert keys_used.pop() is shared
    attend = attngen.compile(
        AttentionSpec(head_dim=48, head_dim_v=32, dtype="float32", shared_kv=True)
    )
    for v in (k[..., :32], other[..., :32], k[..., 16:], k[..., :32].clone()):
        attngen.reload()  # a call like another would not be looked at
        want = oracle.attention(q, k, v)
        torch.testing.assert_close(attend(q, k, v).double(), want.out, rtol=1e-4, atol=1e-5)
        assert keys_used.pop() is (v.data_ptr() == k.data_ptr())


def test_torch_compile_and_vmap(keys_used: list[bool]) -> None:
    q, k = _made(4, 1, 48, torch.float32)
    attend = attngen.compile(
        AttentionSpec(head_dim=48, head_dim_v=32, dtype="float32", shared_kv=True)
    )
    for function in (attend, attngen.attention):

        def step(q: Tensor, k: Tensor, function: Any = function) -> Tensor:
            out: Tensor = function(q, k, k[..., :32])
            return out

        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(q, k), step(q, k))
        assert torch.equal(compiled(q[:2], k[:2, :, :20]), step(q[:2], k[:2, :, :20]))
    assert all(keys_used)
    pair = torch.stack([q, q + 1]), torch.stack([k, k - 1])
    got = torch.func.vmap(lambda q, k: attend(q, k, k[..., :32]))(*pair)
    want = torch.stack([attend(q, k, k[..., :32]) for q, k in zip(*pair, strict=True)])
    torch.testing.assert_close(got, want)


def test_autocast_copies_k_and_v() -> None:
    q, k = _made(4, 1, 48, torch.float32)
    attend = attngen.compile(AttentionSpec(head_dim=48, head_dim_v=32, shared_kv=True))
    want = oracle.attention(*(x.bfloat16() for x in (q, k, k[..., :32])))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, k[..., :32])
    torch.testing.assert_close(out.double(), want.out, rtol=2e-2, atol=2e-2)


def test_appending_to_a_cache_of_both() -> None:
    """v and its cache are views, too: what is written twice is the same."""
    _, k = _made(1, 2, 48, torch.float32)
    new, cache = k[:, :, :2], torch.full((8, 16, 1, 48), float("nan"))
    table = torch.tensor([[3, 1], [0, 7], [5, 2], [6, 4]], dtype=torch.int32)
    start, want = torch.tensor([0, 15, 30, 7], dtype=torch.int32), cache.clone()
    for b, n in torch.cartesian_prod(torch.arange(4), torch.arange(2)).tolist():
        at = int(start[b]) + n
        want[table[b, at // 16], at % 16] = new[b, :, n]
    views = (new[..., :32], cache, cache[..., :32])
    attngen.append_kv(new, *views, positions=start, block_table=table)
    torch.testing.assert_close(cache, want, equal_nan=True, rtol=0, atol=0)


def test_what_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"head_dim": 64}, "needs head_dim_v below head_dim"),
        ({"head_dim": 576}, "at most 512, for a head_dim above it"),
        ({"head_dim": 577, "head_dim_v": 512}, "from 1 to 576"),
        ({"head_dim": 64, "head_dim_v": 40}, "no powers of two"),
        ({**MLA, "dropout_p": 0.1}, "dropout_p with shared_kv"),
        ({**MLA, "layout": "thd"}, "with shared_kv"),
    ]
    for fields, message in cases:
        with pytest.raises(attngen.SpecError, match=message):
            AttentionSpec(**fields, shared_kv=fields != {"head_dim": 576})


def test_parts_of_k_begin_with_those_of_v() -> None:
    for dim, dim_v in ((576, 512), (192, 128), (40, 32), (100, 96), (130, 112)):
        parts = split_behind(split_head_dim(dim_v), dim)
        ends = [part.start + part.width for part in parts]
        assert [part.start for part in parts] == [0, *ends[:-1]] and ends[-1] >= dim
        spec = AttentionSpec(head_dim=dim, head_dim_v=dim_v, shared_kv=True)
        for mine, other in zip(spec.v_parts, spec.qk_parts, strict=False):
            assert mine[:4] == other[:4]


def test_defaults_read_k_once_and_fit() -> None:
    h200 = by_name("nvidia_h200")
    for fields in ({}, {"paged": True}, {"batch_invariant": True}):
        spec = AttentionSpec(**MLA, **fields, shared_kv=True)
        for sizes in (Workload(64, 128, 1, 1, 4096), Workload(1, 16, 1, 2, 65536)):
            config = default_config(spec, spec_bucket("decode", spec, sizes), h200)
            assert isinstance(config, DecodeConfig) and not infeasible(spec, config, h200)
            apart = AttentionSpec(**MLA, **fields)
            assert footprint(spec, config)[0] < footprint(apart, config)[0]
    text = render(AttentionSpec(**MLA, paged=True, shared_kv=True), SPLIT)
    assert "v_ptr" not in text and text.count("= load_keys(") == 2


@pytest.mark.slow
def test_emitted_file_checks_itself(tmp_path: Any) -> None:
    path = tmp_path / "decode.py"
    spec = AttentionSpec(head_dim=48, head_dim_v=32, dtype="float32", paged=True, shared_kv=True)
    path.write_text(render(spec, SPLIT))
    done = run_file(path)
    assert done.returncode == 0 and "4 splits" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
def test_mla_compiles_for_hopper_without_spills() -> None:
    spec, h200 = AttentionSpec(**MLA, paged=True, shared_kv=True), by_name("nvidia_h200")
    sizes = Workload(64, 128, 1, 1, 4096)
    config = default(spec, spec_bucket("decode", spec, sizes), h200)
    line = {"spec": spec.key, "direction": "decode", "config": config.as_dict()}
    (found,) = compile_all(90, [{**line, "workload": str(sizes)}])
    assert "error" not in found, found
    first = found["kernels"][0]
    assert first["shared_bytes"] <= h200.shared_memory and not first["serialised_wgmma"]
    assert first["stack_bytes"] <= 16, first


def test_explain_sees_the_view() -> None:
    q, k = _made(4, 1, 48, torch.float32)
    attend = attngen.compile(AttentionSpec(head_dim=48, head_dim_v=32, dtype="float32"))
    for v, shared in ((k[..., :32], True), (k[..., 16:], False)):
        first, second = attend.explain(q, k, v).choices
        assert first.bucket.direction == "decode" and first.spec.shared_kv is shared
        assert second.bucket.direction == "bwd" and not second.spec.shared_kv
