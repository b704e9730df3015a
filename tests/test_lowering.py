"""Configs of the hopper lowering, where they may serve, and how they are chosen and searched.

What its kernels compute is tested in test_hopper.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from samples import MEASURED, PREDICTED

from attngen import calls, config, hopper, hopper_space, lowering, resolve, settle
from attngen.cli import main
from attngen.config import BwdConfig, FwdConfig, KernelConfig, default_config, infeasible
from attngen.errors import NoFeasibleConfigError, SpecError, StoreError, UnsupportedSpecError
from attngen.explain import explain_workload
from attngen.gpu import INTERPRETER, by_name
from attngen.hopper import HopperBwdConfig, HopperFwdConfig
from attngen.identity import record_key, stale_in
from attngen.records import Record
from attngen.remembered import Remembered
from attngen.render import template_hash
from attngen.search_order import search_order, search_starts
from attngen.search_space import (
    axes,
    encode,
    joined,
    kernel_parts,
    neighbours,
)
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.tuner.search import Search
from attngen.tuner.static_check import Compiled, KernelFacts, objection
from attngen.workload import DIRECTIONS, Bucket, Direction, Workload, spec_bucket

H200, A100, B200 = (by_name(f"nvidia_{name}") for name in ("h200", "a100", "b200"))
D128 = AttentionSpec(head_dim=128, deterministic=False)
FWD, BWD = HopperFwdConfig(), HopperBwdConfig()
QUIET = replace(FWD, overlap=False)
WIDE = {"head_dim": 256}
FP8 = {"dtype": "float8_e4m3fn", "fp8_scale": "block"}


def bucket_of(direction: Direction, spec: AttentionSpec = D128, seqlen: int = 4096) -> Bucket:
    return spec_bucket(direction, spec, Workload(2, 16, 4, seqlen, seqlen))


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch):
    return lambda name: monkeypatch.setenv("ATTNGEN_LOWERING", name)


@pytest.fixture
def other_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "triton_minor", lambda: "3.9")


# ---- configs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [FWD, HopperFwdConfig(consumers=3, overlap=False), BWD, HopperBwdConfig(dq="atomic")],
    ids=lambda one: one.key[:40],
)
def test_a_config_is_what_its_key_and_its_fields_say(one: KernelConfig) -> None:
    assert config.parse(one.direction, one.key) == one
    assert config.from_dict(one.direction, one.as_dict()) == one
    assert "True" not in one.key and one.key.startswith("lowering=hopper,")


def test_fields_that_are_left_out_have_their_default() -> None:
    assert config.parse("fwd", "lowering=hopper") == FWD
    found = config.parse("fwd", "lowering=hopper,consumers=3,turns=true")
    assert found == HopperFwdConfig(consumers=3, turns=True)
    assert (found.block_m, found.maxnreg) == (192, 128)


def test_without_a_dq_kernel_its_tile_does_not_matter() -> None:
    assert HopperBwdConfig(dq="atomic", dq_block_n=128) == HopperBwdConfig(dq="atomic")
    assert "dq_block_n" not in HopperBwdConfig(dq="atomic").as_dict()
    with pytest.raises(SpecError, match="leave out dq_block_n"):
        config.parse("bwd", "lowering=hopper,dq=atomic,dq_block_n=64")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lowering=hoper", "lowering must be one of triton, hopper, got 'hoper'"),
        ("lowering=true", "lowering must be one of triton, hopper, got True"),
        ("lowering=hopper,consumers=4", "consumers must be one of 2, 3, got 4"),
        ("lowering=hopper,overlap=1", "overlap must be true or false, got 1"),
        ("lowering=hopper,q_buffers=true", "q_buffers must be one of 1, 2, got True"),
        ("lowering=hopper,block_n=true", "block_n must be an int, got True"),
        ("lowering=hopper,num_warps=4", "'num_warps' .a field of lowering=triton."),
        ("consumers=2", "'consumers' .a field of lowering=hopper."),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        config.parse("fwd", text)


@pytest.mark.parametrize("one", [FWD, BWD], ids=DIRECTIONS)
def test_a_record_keeps_a_config(one: KernelConfig) -> None:
    key = replace(MEASURED.key, bucket=bucket_of(one.direction).key)
    record = replace(MEASURED, key=key, direction=one.direction, config=one.as_dict())
    assert Record.from_line(record.to_line()) == record
    assert record.kernel_config == one


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"overlap": 1}, "config.overlap must be true or false, got 1"),
        ({"block_n": True}, "config.block_n must be an int, got True"),
        ({"block_n": -1}, "config.block_n must be an int from 0"),
        ({"lowering": ["hopper"]}, "lowering must be one of triton, hopper"),
        ({"consumers": 5}, "config.consumers must be one of 2, 3, got 5"),
    ],
)
def test_a_record_refuses_a_wrong_config(named: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError, match=words):
        replace(MEASURED, config=FWD.as_dict() | named)


# ---- where it serves ---------------------------------------------------------------------------


@pytest.mark.parametrize("one", [FWD, BWD], ids=DIRECTIONS)
@pytest.mark.parametrize(
    ("fields", "gpu", "words"),
    [
        ({}, A100, "needs sm_90, nvidia_a100 is sm_80"),
        ({}, B200, "needs sm_90, nvidia_b200 is sm_100"),
        ({}, INTERPRETER, "needs sm_90, interpreter is interpreter"),
        ({"dtype": "float32"}, H200, "a dtype of 16 or 8 bits, got dtype=float32"),
        ({"dropout_p": 0.1}, H200, "no dropout"),
        ({"head_dim": 40}, H200, "head_dim of one or two powers of two, 256 at most"),
        ({"head_dim": 224}, H200, "got 224"),
        ({"head_dim": 320}, H200, "got 320"),
        ({"head_dim_v": 72}, H200, "head_dim_v of one or two"),
        ({"head_dim": 96, **FP8}, H200, "head_dim of 64, 128 or 256 for FP8, got 96"),
    ],
)
def test_why_it_cannot_serve(
    fields: dict[str, Any], gpu: Any, words: str, one: KernelConfig
) -> None:
    spec = replace(D128, **fields) if "head_dim" not in fields else AttentionSpec(**fields)
    assert words in "; ".join(infeasible(spec, one, gpu))
    assert words in "; ".join(hopper.unserved(spec, gpu))
    assert hopper_space.candidates(spec, bucket_of(one.direction, spec), gpu) == []


@pytest.mark.usefixtures("other_triton")
def test_another_triton_is_served_by_the_portable_lowering() -> None:
    (why,) = hopper.unserved(D128, H200)
    assert why == "lowering=hopper needs Triton 3.6, here is 3.9"
    at = bucket_of("fwd")
    assert all(c.lowering == "triton" for c in search_order(D128, at, H200)[:50])
    assert why in str(explain_workload(D128, Workload(2, 16, 4, 4096, 4096), gpu=H200))


@pytest.mark.parametrize(
    ("fields", "one", "words"),
    [
        ({}, replace(FWD, block_n=256), "registers a thread, a consumer has 240"),
        ({}, replace(FWD, consumers=3), "registers a thread, a consumer has 160"),
        ({}, replace(FWD, num_stages=4), "bytes of shared memory"),
        ({}, replace(FWD, block_n=100), "block_n=100 must be one of 32, 64, 128, 256"),
        ({}, replace(FWD, num_stages=9), "num_stages=9 must be from"),
        ({"head_dim_v": 64}, replace(FWD, out_in_q=True), "got [64] and [128]"),
        (WIDE, FWD, "registers a thread"),
        ({}, replace(BWD, block_m=128), "attn_bwd_dkdv needs about 304 registers"),
        ({}, replace(BWD, dq_block_n=32), "dq_block_n=32 must be one of 64, 128"),
        (WIDE, replace(BWD, dq_block_n=128), "attn_bwd_dq needs about 304 registers"),
        ({"head_dim": 64}, replace(BWD, num_stages=4), "num_stages=4 must be from 1 to 3"),
        ({"head_dim": 16}, replace(BWD, dq="atomic"), "dq=atomic needs a head_dim of at least 32"),
        (WIDE, BWD, "attn_bwd_dq needs about 262656 bytes of shared memory"),
        (
            {"head_dim": 144},
            replace(BWD, dq="atomic", dq_v_stages=1),
            "above 128 columns one of whole 64s",
        ),
        ({"deterministic": True}, replace(BWD, dq="atomic"), "deterministic=true"),
        (FP8, replace(FWD, block_n=256), "block_n=256 must be at most 128"),
        (FP8, replace(FWD, out_in_q=True), "q and out of one dtype, and q is FP8"),
        ({**FP8, "head_dim": 256}, FWD, "about 253 registers a thread"),
    ],
)
def test_why_a_config_cannot_serve(fields: dict[str, Any], one: KernelConfig, words: str) -> None:
    spec = AttentionSpec(**{"head_dim": 128, **fields})
    assert words in "; ".join(infeasible(spec, one, H200))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fp8_starts_do_not_overlap(dim: int) -> None:
    spec = AttentionSpec(head_dim=dim, **FP8)
    first, *others = hopper_space.starts(spec, bucket_of("fwd", spec), H200)
    assert others and isinstance(first, HopperFwdConfig)
    assert not first.overlap and first.turns and first.block_n == 128


# ---- the hash of the templates -----------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_hash_counts_the_lowering_where_it_may_serve(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [D128, replace(D128, dropout_p=0.1).text, replace(D128, dtype="float32")]
    before = [[template_hash(s, direction, g.arch) for g in (A100, B200, H200)] for s in specs]
    served, *others = before
    assert served[0] == served[1] != served[2]
    assert all(len(set(hashes)) == 1 for hashes in others)
    key = record_key(D128, bucket_of(direction), H200)
    assert key.template_hash == served[2]
    assert stale_in(replace(MEASURED, key=key, direction=direction, config=_any(direction))) == []


def _any(direction: Direction) -> dict[str, Any]:
    return default_config(D128, bucket_of(direction), H200).as_dict()


# ---- the switch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"), [("", None), ("hopper", "hopper"), ("triton", "triton")]
)
def test_the_switch_names_a_lowering(forced, name: str, wanted: str | None) -> None:
    forced(name)
    assert lowering.forced() == wanted


def test_the_switch_refuses_another_name(forced) -> None:
    forced("Hopper")
    with pytest.raises(SpecError, match="ATTNGEN_LOWERING must be hopper or triton, got 'Hopper'"):
        resolve.find(D128, bucket_of("fwd"), H200)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_default_is_hoppers_where_it_serves(forced, direction: Direction) -> None:
    at = bucket_of(direction)
    assert lowering.default(D128, at, H200) == hopper_space.starts(D128, at, H200)[0]
    assert lowering.default(D128, at, A100) == default_config(D128, at, A100)
    short = spec_bucket(direction, D128, Workload(2, 16, 4, 1, 4096))
    assert lowering.default(D128, short, H200) == default_config(D128, short, H200)
    forced("triton")
    assert lowering.default(D128, at, H200) == default_config(D128, at, H200)


@pytest.mark.parametrize(
    ("fields", "direction", "seqlen", "wanted"),
    [
        ({"head_dim": 128}, "fwd", 4096, replace(FWD, turns=True, q_buffers=2)),
        ({"head_dim": 128}, "fwd", 16384, replace(FWD, q_buffers=2)),
        ({"head_dim": 64}, "fwd", 4096, replace(QUIET, consumers=3, turns=True, q_buffers=2)),
        ({"head_dim": 64}, "fwd", 1024, replace(FWD, turns=True, q_in_registers=True)),
        (WIDE, "fwd", 4096, replace(FWD, block_n=64, out_in_q=True, turns=True)),
        ({"head_dim": 128}, "bwd", 4096, HopperBwdConfig(dq="atomic")),
        ({"head_dim": 64, "causal": True}, "bwd", 4096, HopperBwdConfig(dq="atomic")),
        ({"head_dim": 128, "deterministic": True}, "bwd", 4096, BWD),
        (WIDE, "bwd", 4096, None),
    ],
)
def test_the_forced_default(
    forced, fields: dict[str, Any], direction: Direction, seqlen: int, wanted: KernelConfig | None
) -> None:
    forced("hopper")
    spec = AttentionSpec(**{"deterministic": False, **fields})
    found = lowering.default(spec, bucket_of(direction, spec, seqlen), H200)
    assert found.lowering == "hopper" and not infeasible(spec, found, H200)
    assert found == wanted or (wanted is None and found.dq == "kernel")


@pytest.mark.parametrize(
    ("spec", "gpu"),
    [(replace(D128, dropout_p=0.5), H200), (D128, A100), (D128, INTERPRETER)],
    ids=["dropout", "a100", "interpreter"],
)
def test_the_switch_is_an_error_where_the_lowering_cannot_serve(forced, spec, gpu) -> None:
    forced("hopper")
    with pytest.raises(UnsupportedSpecError) as caught:
        resolve.find(spec.text, bucket_of("fwd"), gpu)
    *why, way_out = caught.value.reasons
    assert why == hopper.unserved(spec, gpu) and "ATTNGEN_LOWERING" in way_out


def test_no_feasible_config_says_why(forced, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(H200, shared_memory=48 << 10)
    with pytest.raises(NoFeasibleConfigError, match="attn_fwd needs about .* shared memory"):
        hopper_space.default(D128, bucket_of("fwd"), small)


def test_the_switch_overrules_records(forced) -> None:
    at = bucket_of("fwd")
    key = record_key(D128, at, H200)
    with Store.open() as store:
        store.record_winner(replace(MEASURED, key=key, config=FWD.as_dict()))
    assert resolve.find(D128, at, H200)[0] == FWD
    forced("triton")
    found, how, _ = resolve.find(D128, at, H200)
    assert found.lowering == "triton"
    assert any("ATTNGEN_LOWERING=triton" in line for line in how.why)


@pytest.mark.parametrize(
    ("record", "key", "serves"),
    [
        (MEASURED, {}, "triton"),
        (PREDICTED, {}, "hopper"),
        (MEASURED, {"triton": "3.5"}, "hopper"),
        (MEASURED, {"template_hash": "0" * 16}, "hopper"),
    ],
    ids=["measured", "predicted", "other-triton", "other-templates"],
)
def test_hoppers_default_outranks_what_was_not_compared_with_it(record, key, serves) -> None:
    at = bucket_of("fwd")
    with Store.open() as store:
        store.record_winner(replace(record, key=replace(record_key(D128, at, H200), **key)))
    found, how, _ = resolve.find(D128, at, H200)
    assert found.lowering == serves
    if serves == "hopper":
        assert how.tier == "default" and "was not compared with lowering=hopper" in how.why[-1]


def test_fp8_is_served_by_hopper() -> None:
    spec = replace(D128, dtype="float8_e4m3fn", fp8_scale="head").text
    assert lowering.default(spec, bucket_of("fwd"), H200).lowering == "hopper"


def test_a_narrow_window_has_short_rows() -> None:
    """Its keys decide how a forward starts, not the length of the sequence."""
    sizes = Workload(1, 16, 16, 16384, 16384)
    first = []
    for window in (None, (1024, 0), (8192, 0)):
        spec = AttentionSpec(head_dim=128, causal=True, window=window)
        first.append(hopper_space.starts(spec, spec_bucket("fwd", spec, sizes), H200)[0])
    assert [config.turns for config in first] == [False, True, False]


def test_a_dry_run_refuses_what_the_switch_refuses(forced) -> None:
    forced("hopper")
    arguments = "tune head_dim=40 --workload 1,2,2,512,512 --gpu nvidia_h200 --dry-run"
    done = CliRunner().invoke(main, arguments.split())
    assert done.exit_code == 1 and "lowering=hopper needs a head_dim" in done.stderr


# ---- what serves -------------------------------------------------------------------------------


def test_explain_says_which_lowering_serves_and_why(forced) -> None:
    sizes = Workload(2, 16, 4, 4096, 4096)

    def explained(spec: AttentionSpec = D128, gpu: Any = H200) -> str:
        return str(explain_workload(spec, sizes, gpu=gpu, directions=("fwd",)))

    assert "are served by" in explained()
    assert "note     lowering=hopper has no dropout" in explained(replace(D128, dropout_p=0.1))
    assert "note" not in explained(gpu=A100)
    with Store.open() as store:
        key = record_key(D128, bucket_of("fwd"), H200)
        store.record_winner(replace(MEASURED, key=key, config=FWD.as_dict()))
    instead = config.with_tiles(default_config(D128, bucket_of("fwd"), H200), "pointer")
    assert f"are served by {instead.key}" in explained()
    forced("hopper")
    assert "lowering=hopper, because ATTNGEN_LOWERING says so" in explained()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_tma_cannot_address_is_served_by_pointers(direction: Direction) -> None:
    at = bucket_of(direction)
    one = FWD if direction == "fwd" else BWD
    instead = lowering.by_pointer(D128, one, at, H200)
    assert instead == config.with_tiles(default_config(D128, at, H200), "pointer")
    assert lowering.by_pointer(D128, instead, at, H200) == instead


@pytest.mark.parametrize("captured", [False, True])
def test_a_first_call_in_a_cuda_graph_makes_no_table(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan() of a hopper file uploads one; later calls of the layout may use it again."""

    def kernel_of(one: KernelConfig) -> Any:
        return SimpleNamespace(config=one, prepared=lambda numbers, keywords: one)

    pointers = lowering.by_pointer(D128, FWD, bucket_of("fwd"), H200)
    resolved = SimpleNamespace(kernel=kernel_of(FWD), by_pointer=kernel_of(pointers))
    monkeypatch.setattr(settle, "resolve", lambda *given: resolved)
    monkeypatch.setattr(settle, "_is_captured", lambda device: captured)
    monkeypatch.setattr(calls, "_CALLS", Remembered(4))
    q = torch.empty(1, 2, 64, 128, dtype=torch.bfloat16)
    call = calls._settled("fwd", D128.text_key, (q, q, q), (q, q, q), (), [1.0], [0], [])
    assert call.run == (pointers if captured else FWD)
    assert len(calls._CALLS) == (not captured)


def test_a_gradient_of_another_dtype_is_served_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a float32 `out`, as `partial=True` gives."""
    pointers = lowering.by_pointer(D128, BWD, bucket_of("bwd"), H200)
    kernels = [SimpleNamespace(config=c, prepared=lambda *_, c=c, **__: c) for c in (BWD, pointers)]
    resolved = SimpleNamespace(kernel=kernels[0], by_pointer=kernels[1])
    monkeypatch.setattr(settle, "resolve", lambda *given: resolved)
    monkeypatch.setattr(calls, "_CALLS", Remembered(4))
    q = torch.empty(1, 2, 64, 128, dtype=torch.bfloat16)
    for do, wanted in ((q, BWD), (q.float(), pointers)):
        inputs = (q, q, q, do, None, do, None)
        call = calls._settled("bwd", D128.text_key, inputs, (q, q, q, do), (), [1.0], [0], [])
        assert call.run == wanted


def test_dq_is_summed_in_scratch_where_the_config_says_so() -> None:
    tile = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
    for cls, rest in ((BwdConfig, tile), (HopperBwdConfig, {})):
        assert cls(dq="atomic", **rest).sums_dq and not cls(dq="kernel", **rest).sums_dq
    assert not FWD.sums_dq and not FwdConfig(**tile).sums_dq


# ---- the search --------------------------------------------------------------------------------

SPECS = [
    pytest.param(AttentionSpec(head_dim=64), id="d64"),
    pytest.param(AttentionSpec(head_dim=96, causal=True), id="d96"),
    pytest.param(D128, id="d128"),
    pytest.param(AttentionSpec(head_dim=192, head_dim_v=128), id="d192-v128"),
    pytest.param(AttentionSpec(head_dim=256, deterministic=True), id="d256"),
    pytest.param(AttentionSpec(head_dim=64, batch_invariant=True), id="batch-invariant"),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_few_dozen_candidates_that_are_feasible_and_distinct(
    spec: AttentionSpec, direction: Direction
) -> None:
    at = bucket_of(direction, spec)
    found = hopper_space.candidates(spec, at, H200)
    assert found and len(set(found)) == len(found) <= 150
    assert not any(infeasible(spec, each, H200) for each in found)
    starts = hopper_space.starts(spec, at, H200)
    assert 1 <= len(starts) <= 8 and found[: len(starts)] == starts
    if spec.deterministic:
        assert not any(each.sums_dq for each in found)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_both_lowerings_compete_and_hopper_goes_first(direction: Direction) -> None:
    at = bucket_of(direction)
    order = search_order(D128, at, H200)
    first = hopper_space.candidates(D128, at, H200)
    assert order[: len(first)] == first
    assert all(each.lowering == "triton" for each in order[len(first) :])
    starts = search_starts(D128, at, H200, order)
    known = hopper_space.starts(D128, at, H200)
    assert starts == [*known, *order[len(first) :][:6]]


def test_lengths_that_fill_no_tile_are_left_to_the_portable_lowering(forced) -> None:
    at = spec_bucket("fwd", D128, Workload(2, 16, 4, 1, 4096))
    assert {each.lowering for each in search_order(D128, at, H200)} == {"triton"}
    forced("hopper")
    assert lowering.default(D128, at, H200).lowering == "hopper"


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_the_switch_narrows_the_search(forced, name: str) -> None:
    forced(name)
    order = search_order(D128, bucket_of("fwd"), H200)
    assert order and {each.lowering for each in order} == {name}


@pytest.mark.parametrize("one", [FWD, BWD, HopperBwdConfig(dq="atomic")], ids=lambda c: c.key[:26])
def test_neighbours_differ_in_one_field(one: KernelConfig) -> None:
    found = neighbours(one, axes(D128, bucket_of(one.direction), H200))
    assert len(found) >= 4 and len(set(found)) == len(found)
    for near in found:
        old, new = one.as_dict(), near.as_dict()
        assert sum(old[name] != new[name] for name in old.keys() & new.keys()) == 1


def test_the_sampler_knows_nothing_of_hopper_configs() -> None:
    assert encode(FWD, axes(D128, bucket_of("fwd"), H200)) is None


def test_backward_kernels_are_told_apart_and_joined() -> None:
    one, other = BWD, replace(BWD, num_stages=1, dq_block_n=128)
    assert list(kernel_parts(one)) == ["attn_bwd_dkdv", "attn_bwd_dq"]
    assert list(kernel_parts(HopperBwdConfig(dq="atomic"))) == ["attn_bwd_dkdv"]
    both = joined(one, other)
    assert both == replace(BWD, dq_block_n=128)
    assert kernel_parts(both)["attn_bwd_dq"] == kernel_parts(other)["attn_bwd_dq"]
    portable = default_config(D128, bucket_of("bwd"), H200)
    assert joined(one, portable) is None and joined(portable, one) is None


def test_the_search_looks_around_the_best_hopper_config_first() -> None:
    """Its neighbours, that is, before the sampler tries more of the portable lowering."""
    at = bucket_of("fwd")
    order, space = search_order(D128, at, H200), axes(D128, at, H200)
    seeker = Search("fwd", order, space, search_starts(D128, at, H200, order))
    best = replace(FWD, turns=True)
    times: dict[KernelConfig, float] = {}
    for _ in range(60):
        asked = seeker.ask()
        assert asked is not None and asked not in times
        times[asked] = {"hopper": 50.0, "triton": 100.0}[asked.lowering] + (asked != best)
        seeker.tell(asked, times[asked])
    near = {c for c in neighbours(best, space) if not infeasible(D128, c, H200)} & set(order)
    assert near and near <= times.keys()
    assert sum(c.lowering == "triton" for c in times) >= 6


# ---- what the compiler says --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "kernel", "serialised", "is_refused"),
    [
        (FWD, "attn_fwd", True, True),
        (FWD, "attn_fwd", False, False),
        (FWD, "attn_fwd_again", True, False),
        (BWD, "attn_bwd_dq", True, True),
        (FwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=2), "attn_fwd", True, False),
    ],
)
def test_serialised_products_refuse_a_hopper_config(
    one: KernelConfig, kernel: str, serialised: bool, is_refused: bool
) -> None:
    facts = KernelFacts(kernel, 168, 0, 65536, 0, False, serialised)
    found = objection(Compiled(one, (facts,)), H200)
    assert (found is not None) == is_refused
    if found is not None:
        assert (found.status, found.kind) == ("skipped", "serialised wgmma")
        assert found.reason.startswith(kernel)
