"""The hopper lowering's decode of latent attention, as emitted, in an emulator of one SM: results,
and that faults are noticed; which calls it serves."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_emulator import run
from gluon_machine import Fault
from support import oracle
from test_compile_only import compile_all, needs_checked_triton
from test_hopper import UNWRITTEN, load
from torch import Tensor

from attngen import hopper_decode, lowering, settle
from attngen.config import KernelConfig, infeasible
from attngen.decode import DecodeConfig
from attngen.gpu import by_name
from attngen.hopper import HopperBwdConfig, HopperFwdConfig
from attngen.hopper_decode import HopperDecodeConfig
from attngen.render import render, template_hash
from attngen.search_order import search_order, search_starts
from attngen.spec import AttentionSpec
from attngen.workload import Bucket, Workload, spec_bucket

H200 = by_name("nvidia_h200")
CONFIG = HopperDecodeConfig()
SCALE = 192**-0.5


def spec_of(dim_v: int = 128, **options: Any) -> AttentionSpec:
    return AttentionSpec(head_dim=dim_v + 64, head_dim_v=dim_v, shared_kv=True, **options)


def emitted(
    spec: AttentionSpec,
    folder: Path,
    *changes: tuple[str, str],
    config: HopperDecodeConfig = CONFIG,
) -> Any:
    """The emitted file as a module, with text replaced."""
    text = render(spec, config)
    for old, new in changes:
        assert old in text, f"the emitted file has no more {old!r}"
        text = text.replace(old, new)
    return load(text, "decode", folder)


def inputs(
    spec: AttentionSpec, lengths: list[int], heads: int, rows: int = 1, page: int = 16
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """q, k, what plan() takes as k, and what goes with it. Behind the lengths k is NaN, and tables
    name no page."""
    make = torch.Generator().manual_seed(0)
    dtype, most = getattr(torch, spec.dtype), max(lengths)
    q = torch.randn(len(lengths), heads, rows, spec.head_dim, generator=make).to(dtype)
    k = torch.randn(len(lengths), 1, most, spec.head_dim, generator=make).to(dtype)
    for b, length in enumerate(lengths):
        k[b, :, length:] = float("nan")
    if not spec.has_lengths:
        return q, k, k, {}
    named = {"seqused_k": torch.tensor(lengths, dtype=torch.int32)}
    if not spec.paged:
        return q, k, k, named
    width = -(-most // page)
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    pages = torch.full((len(lengths) * width + 1, 1, page, spec.head_dim), float("nan")).to(dtype)
    free = list(range(len(pages)))
    for b, length in enumerate(lengths):
        for n in range(-(-length // page)):
            table[b, n] = free.pop()
            part = k[b, :, n * page : n * page + page]
            pages[table[b, n], :, : part.shape[1]] = part
    return q, k, pages, {**named, "block_table": table}


def attend(
    module: Any,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    splits: int = 1,
    seed: int = 0,
    out: Tensor | None = None,
    softmax_scale: float = SCALE,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    if out is None:
        out = torch.full((*q.shape[:3], spec.head_dim_v), UNWRITTEN, dtype=q.dtype)
    lse = torch.full(q.shape[:3], UNWRITTEN)
    scratch = None
    if splits > 1:
        scratch = torch.full((splits, lse.numel() * (spec.head_dim_v + 2)), float("nan"))
    v = k[..., : spec.head_dim_v]
    run(module.plan(q, k, v, out, lse, scratch, softmax_scale=softmax_scale, **named), seed)
    return out, lse


def compare(
    spec: AttentionSpec,
    got: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    lengths: list[int],
    scale: float = SCALE,
) -> None:
    for b, length in enumerate(lengths):
        at = slice(b, b + 1)
        tensors = (q[at], k[at, :, :length], k[at, :, :length, : spec.head_dim_v])
        want, yard = (f(*tensors, scale=scale) for f in (oracle.attention, oracle.unfused))
        for x, name in zip(got, ("out", "lse"), strict=True):
            right, about = getattr(want, name), getattr(yard, name)
            ok, why = oracle.judge(x[at], right, x.dtype, yard=about)
            assert ok, f"{name} of {b}: {why}"


@pytest.mark.parametrize(
    ("fields", "lengths", "sizes", "splits"),
    [
        pytest.param({}, [200], {"heads": 64}, 1, id="dense"),
        pytest.param({}, [64, 64], {"heads": 5}, 1, id="one-tile"),
        pytest.param({"dim_v": 256}, [330], {"heads": 70}, 1, id="two-tiles-of-rows"),
        pytest.param({"dim_v": 512}, [150], {"heads": 20}, 1, id="d576"),
        pytest.param({"dtype": "float16"}, [130], {"heads": 8}, 2, id="float16-splits"),
        pytest.param({"key_lengths": True}, [0, 65, 1, 192], {"heads": 3}, 1, id="lengths"),
        pytest.param({"paged": True}, [0, 1, 15, 17, 150], {"heads": 3}, 1, id="pages-of-16"),
        pytest.param({"paged": True}, [130, 97], {"heads": 4, "page": 48}, 1, id="pages-of-48"),
        pytest.param(
            {"paged": True}, [63, 64, 65, 300], {"heads": 4, "page": 64}, 2, id="pages-of-64"
        ),
        pytest.param({"paged": True}, [255, 257], {"heads": 4, "page": 256}, 3, id="pages-of-256"),
        pytest.param(
            {"paged": True}, [257], {"heads": 20, "rows": 5, "page": 64}, 2, id="several-rows"
        ),
    ],
)
def test_results(
    fields: dict[str, Any],
    lengths: list[int],
    sizes: dict[str, int],
    splits: int,
    session_cache: Path,
) -> None:
    """Splits without keys, rows and keys that fill no tile, NaN behind the last key."""
    spec = spec_of(**fields)
    q, k, cache, named = inputs(spec, lengths, **sizes)
    got = attend(emitted(spec, session_cache), spec, q, cache, splits, **named)
    compare(spec, got, q, k, lengths)


def test_bits_depend_on_the_row_alone(session_cache: Path) -> None:
    spec = spec_of(paged=True, batch_invariant=True)
    q, k, cache, named = inputs(spec, [700, 64, 0, 513], heads=4, page=64)
    module = emitted(spec, session_cache, config=HopperDecodeConfig(split_keys=512))
    got = attend(module, spec, q, cache, splits=2, **named)
    compare(spec, got, q, k, [700, 64, 0, 513])
    for b in range(4):
        at = slice(b, b + 1)
        alone = {name: x[at] for name, x in named.items()}
        one = attend(module, spec, q[at], cache, splits=2, **alone)
        assert all(torch.equal(x, y[at]) for x, y in zip(one, got, strict=True))


def test_bits_depend_on_no_room(session_cache: Path) -> None:
    """One split, which no kernel merges, gives what several do of which one has keys."""
    spec = spec_of(key_lengths=True, batch_invariant=True)
    q, k, cache, named = inputs(spec, [500, 130], heads=4)
    module = emitted(spec, session_cache, config=HopperDecodeConfig(split_keys=512))
    one, many = (attend(module, spec, q, cache, splits, **named) for splits in (1, 3))
    compare(spec, one, q, k, [500, 130])
    assert all(torch.equal(x, y) for x, y in zip(one, many, strict=True))


@pytest.mark.parametrize("junk", [2**30, -(2**31)])
@pytest.mark.parametrize("splits", [1, 3])
def test_entries_behind_lengths(junk: int, splits: int, session_cache: Path) -> None:
    """No address comes from them, whatever they hold."""
    spec, lengths = spec_of(paged=True), [0, 1, 63, 64, 65]
    q, k, cache, named = inputs(spec, lengths, heads=100 if splits == 1 else 16, page=64)
    table = named["block_table"]
    named["block_table"] = table.where(table >= 0, junk)
    compare(
        spec, attend(emitted(spec, session_cache), spec, q, cache, splits, **named), q, k, lengths
    )


@pytest.mark.parametrize("scale", [1e-30, 50.0, 1e30])
def test_scales(scale: float, session_cache: Path) -> None:
    spec = spec_of()
    q, k, _, _ = inputs(spec, [200], heads=16)
    got = attend(emitted(spec, session_cache), spec, q, k, softmax_scale=scale)
    compare(spec, got, q, k, [200], scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("key", "splits"), [(70, 1), (199, 2)])
def test_a_key_that_is_seen_and_not_finite(
    value: float, key: int, splits: int, session_cache: Path
) -> None:
    """NaN are where plain PyTorch has them; lse is NaN where out is in all columns."""
    spec = spec_of()
    q, k, _, _ = inputs(spec, [200], heads=16)
    k[0, 0, key, 5] = value
    out, lse = attend(emitted(spec, session_cache), spec, q, k, splits)
    want = oracle.unfused(q, k, k[..., : spec.head_dim_v], scale=SCALE).out.isnan()
    assert want.any() and torch.equal(out.isnan(), want)
    assert torch.equal(lse.isnan(), want.all(3))


@pytest.mark.parametrize("splits", [1, 2])
def test_strides(splits: int, session_cache: Path) -> None:
    """q and k in padded rows of other tensors, and a float32 out between numbers that stay."""
    spec, lengths = spec_of(key_lengths=True), [130, 64]
    q, k, cache, named = inputs(spec, lengths, heads=20, rows=4)
    wide_q = torch.full((2, 4, 21, 200), float("nan"), dtype=q.dtype)
    wide_k = torch.full((3, 140, 2, 256), float("nan"), dtype=q.dtype)
    wide_out = torch.full((2, 4, 22, 133), UNWRITTEN)
    padded_q = wide_q[:, :, :20, :192].transpose(1, 2).copy_(q)
    padded_k = wide_k[:2, :130, :1, :192].transpose(1, 2).copy_(cache)
    out = wide_out[:, :, 1:21, 3:131].transpose(1, 2)
    got = attend(emitted(spec, session_cache), spec, padded_q, padded_k, splits, out=out, **named)
    compare(spec, (got[0].to(q.dtype), got[1]), q, k, lengths)
    out.fill_(UNWRITTEN)
    assert (wide_out == UNWRITTEN).all()


@pytest.mark.parametrize("order", ["rising", "falling"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 30), ("float16", 3)])
def test_maxima_that_move(
    order: str, splits: int, dtype: str, size: int, session_cache: Path
) -> None:
    """Keys sorted by their scores, of long queries: out is rescaled in every tile, or in none, and
    splits have maxima far apart. With shorter queries weights grow to 2^8."""
    spec = spec_of(dtype=dtype)
    q, k, _, _ = inputs(spec, [400], heads=6)
    q = q * size
    ranks = (q[0, 0, 0].float() @ k[0, 0].float().T).argsort(descending=order == "falling")
    k = k[:, :, ranks].contiguous()
    k[..., :128] *= 1000 if dtype == "float16" else 1  # v, and so scores, are large
    q[..., :128] /= 1000 if dtype == "float16" else 1
    compare(spec, attend(emitted(spec, session_cache), spec, q, k, splits), q, k, [400])


@pytest.mark.parametrize("seed", range(1, 5))
def test_interleavings(seed: int, session_cache: Path) -> None:
    spec = spec_of(paged=True)
    q, _, cache, named = inputs(spec, [450, 130], heads=8, page=32)
    module = emitted(spec, session_cache)
    first, other = (attend(module, spec, q, cache, seed=n, **named) for n in (0, seed))
    assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        ("        named_barrier(P_FREE, P_SYNC)\n        p_smem", "        p_smem"),
        ("        named_barrier(P_READY, P_SYNC)\n", ""),
        ("        named_barrier(LEFT_FREE + before, FREE_ARRIVE)\n        qk", "        qk"),
        ("        named_barrier(RIGHT_FREE + stage, FREE_ARRIVE)\n", ""),
        ("    mbarrier.expect(full, BLOCK_N * WIDTH * 2)", "    mbarrier.expect(full, 64)"),
        ("    if start_n + BLOCK_N > end:\n        columns", "    if False:\n        columns"),
        ("            if start_n + BLOCK_N > end:", "            if False:"),
        ("    fence_async_shared()\n    gl.thread_barrier()\n", "    gl.thread_barrier()\n"),
    ],
    ids=[
        *("weights-overwritten", "weights-early", "left-held", "right-held", "few-bytes"),
        *("keys-behind-the-end", "values-behind-the-end", "no-fence"),
    ],
)
def test_faults_are_noticed(change: tuple[str, str], session_cache: Path) -> None:
    spec = spec_of(key_lengths=True)
    q, k, cache, named = inputs(spec, [300, 330], heads=8)
    module = emitted(spec, session_cache, change)
    with pytest.raises((Fault, AssertionError)):
        for seed in range(6):
            compare(spec, attend(module, spec, q, cache, seed=seed, **named), q, k, [300, 330])


def at(spec: AttentionSpec, heads: int = 128) -> Bucket:
    return spec_bucket("decode", spec, Workload(64, heads, 1, 1, 4096))


def test_what_it_serves() -> None:
    if needs_checked_triton.args[0]:
        pytest.skip("for the Triton that the lowering is checked with")
    for options in ({}, {"paged": True}, {"key_lengths": True}, {"dtype": "float16"}):
        spec = spec_of(512, **options)
        assert lowering.default(spec, at(spec), H200) == CONFIG
        order = search_order(spec, at(spec), H200)
        assert CONFIG in search_starts(spec, at(spec), H200, order)
        assert isinstance(lowering.by_pointer(spec, CONFIG, at(spec), H200), DecodeConfig)
    spec = spec_of(512, paged=True)
    assert lowering.default(spec, at(spec, heads=16), H200) == CONFIG
    assert isinstance(lowering.default(spec, at(spec, heads=8), H200), DecodeConfig)
    assert isinstance(lowering.default(spec, at(spec), by_name("nvidia_a100")), DecodeConfig)
    few = at(spec, heads=8)
    (why,) = lowering.notes(spec, lowering.default(spec, few, H200), few, H200)
    assert "8 rows (queries times heads) are fewer than 16" in why
    masked = spec_of(512, paged=True, causal=True)
    (why,) = lowering.notes(masked, lowering.default(masked, few, H200), few, H200)
    assert "has no causal, window or chunk" in why
    invariant = spec_of(512, batch_invariant=True)
    assert lowering.default(invariant, at(invariant), H200) == HopperDecodeConfig(split_keys=512)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is obeyed where it can be, alike by the default, by searches and for what is stored;
    decodes without a hopper kernel are served and tuned as if it were unset, and notes say why."""
    if needs_checked_triton.args[0]:
        pytest.skip("for the Triton that the lowering is checked with")
    spec = spec_of(512, paged=True)
    portable = lowering.by_pointer(spec, CONFIG, at(spec), H200)
    cases: list[tuple[AttentionSpec, Bucket, str]] = [
        (spec, at(spec, heads=8), "8 rows .* are fewer than 16"),
        (spec_of(512, causal=True), at(spec), "has no causal"),
        (AttentionSpec(head_dim=128), at(spec), "needs shared_kv"),
    ]
    unset = [lowering.default(one, bucket, H200) for one, bucket, _ in cases]
    for name, lowerings in (("triton", {"triton"}), ("hopper", {"hopper"})):
        monkeypatch.setenv("ATTNGEN_LOWERING", name)
        assert lowering.default(spec, at(spec), H200).lowering == name
        assert {one.lowering for one in search_order(spec, at(spec), H200)} == lowerings
        for one in (portable, CONFIG):
            assert bool(lowering.refusal(spec, one, at(spec), H200)) is (one.lowering != name)
    for (one, bucket, why), config in zip(cases, unset, strict=True):
        assert lowering.default(one, bucket, H200) == config
        assert {each.lowering for each in search_order(one, bucket, H200)} == {"triton"}
        assert not lowering.refusal(one, config, bucket, H200)
        (note,) = lowering.notes(one, config, bucket, H200)
        assert re.match(f"not lowering=hopper, in spite of ATTNGEN_LOWERING: .*{why}", note)


def test_a_capture_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of its sizes, too: nothing is copied to the device. No note says otherwise."""
    spec = spec_of(512)
    (note,) = lowering.notes(spec, CONFIG, at(spec), H200)
    assert "TMA cannot address" in note and "captured" not in note
    portable = lowering.by_pointer(spec, CONFIG, at(spec), H200)
    hopper, other = (
        SimpleNamespace(config=one, prepared=lambda *_, one=one, **__: one)
        for one in (CONFIG, portable)
    )
    resolved = SimpleNamespace(kernel=hopper, by_pointer=other, gpu=H200)
    monkeypatch.setattr(settle, "resolve", lambda *given: resolved)
    monkeypatch.setattr(settle, "_is_captured", lambda device: True)
    q, wide = (torch.empty(1, 64, 1, width, dtype=torch.bfloat16) for width in (576, 580))
    for k, config in ((q[:, :1], CONFIG), (wide[:, :1, :, :576].expand(1, 1, 9, 576), portable)):
        tiles = (q, k, k[..., :512])
        call, lasts = settle.settled("decode", spec.text_key, tiles, (), [1.0], [0], [])
        assert call.run == config and lasts


@pytest.mark.parametrize("config", [HopperFwdConfig(), HopperBwdConfig(), CONFIG], ids=str)
def test_emitted_files_say_which_gpu_they_need(
    config: KernelConfig, monkeypatch: pytest.MonkeyPatch, session_cache: Path
) -> None:
    spec = spec_of() if config is CONFIG else AttentionSpec(head_dim=128)
    module = load(render(spec, config), config.direction, session_cache)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"needs a GPU of compute capability 9\.0"):
        module.main()


def test_what_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[AttentionSpec, HopperDecodeConfig, str]] = [
        (AttentionSpec(head_dim=128), CONFIG, "needs shared_kv"),
        (spec_of(causal=True), CONFIG, "has no causal"),
        (spec_of(dtype="float32"), CONFIG, "16 bits, got dtype=float32"),
        (AttentionSpec(head_dim=48, head_dim_v=32, shared_kv=True), CONFIG, "got 32 and 48"),
        (spec_of(), HopperDecodeConfig(programs_per_sm=0), "programs_per_sm=0"),
        (spec_of(), HopperDecodeConfig(split_keys=100), "split_keys=100"),
        (spec_of(batch_invariant=True), CONFIG, "split_keys=0"),
    ]
    for spec, config, message in cases:
        assert message in "; ".join(infeasible(spec, config, H200))
    assert "needs sm_90" in "; ".join(infeasible(spec_of(), CONFIG, by_name("nvidia_a100")))
    monkeypatch.setattr(hopper_decode, "triton_minor", lambda: "3.9")
    assert "needs Triton" in "; ".join(infeasible(spec_of(), CONFIG, H200))


def test_hash_of_what_may_serve() -> None:
    """Records of other specs stay valid when this kernel changes."""
    for spec, differs in ((spec_of(512), True), (AttentionSpec(head_dim=128), False)):
        hashes = {template_hash(spec, "decode", arch) for arch in ("sm_80", "sm_90")}
        assert (len(hashes) == 2) is differs


@needs_checked_triton
@pytest.mark.parametrize(
    "fields",
    [
        {"dim_v": 512, "paged": True},
        pytest.param({"dim_v": 512}, marks=pytest.mark.slow),
        pytest.param({"dim_v": 512, "key_lengths": True}, marks=pytest.mark.slow),
        pytest.param({"dim_v": 128, "dtype": "float16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_compiles(fields: dict[str, Any]) -> None:
    spec = spec_of(**fields)
    line = {"spec": spec.key, "direction": "decode", "config": CONFIG.as_dict()}
    (found,) = compile_all(90, [{**line, "workload": "1,128,1,1,65536"}])
    assert "error" not in found, found
    first, second = found["kernels"]
    assert not first["serialised_wgmma"] and first["stack_bytes"] <= 16, first  # the producer's
    assert second["kernel"] == "attn_decode_merge" and second["stack_bytes"] == 0
    assert first["shared_bytes"] <= H200.shared_memory
