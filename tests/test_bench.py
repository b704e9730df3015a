"""Bench: turns, ratios, and peers that cannot do a spec; with a fake clock, on the CPU."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support import make_qkv

from attngen import bench as benches
from attngen import peers
from attngen.bench import DEFAULT, OURS, Comparison, bench, flops
from attngen.cli import main
from attngen.cli.machine import comparison_table
from attngen.config import FwdConfig
from attngen.kernel import kernel
from attngen.lookup import Found
from attngen.peers import Peer, all_peers
from attngen.reference import attention
from attngen.spec import AttentionSpec
from attngen.tuner.case import beside_of
from attngen.workload import Workload

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="times CPU tensors in the interpreter"),
    pytest.mark.filterwarnings("ignore:attngen. no CUDA device"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
SPEC = AttentionSpec(head_dim=16, dtype="float32", causal=True)
SIZES = Workload(1, 2, 1, 17, 17)  # more query rows than decode takes


class FakeTimer:
    """Runs each call and gives the next of the times 1, 2, 3, ... ms."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def __call__(self, call: Callable[[], Any]) -> float:
        call()
        self.calls.append(call)
        return float(len(self.calls))


def run(*contestants: Peer, spec: AttentionSpec = SPEC, **named: Any) -> list[Comparison]:
    named = {"timer": FakeTimer(), "device": "cpu", "rounds": 3, **named}
    return list(bench(spec, SIZES, list(contestants), **named))


def by_name(name: str) -> Peer:
    (peer,) = [each for each in all_peers(max_autotune=True) if each.name == name]
    return peer


def test_contestants_take_turns_and_the_median_round_counts() -> None:
    fwd, bwd = run(by_name("sdpa math"))
    assert (fwd.direction, bwd.direction) == ("fwd", "bwd")
    ours, default, math = fwd.timed
    assert [each.name for each in fwd.timed] == [OURS, DEFAULT, "sdpa math"]
    # rounds (1, 2, 3), (4, 5, 6), (7, 8, 9)
    assert (ours.ms, default.ms, math.ms) == (4.0, 5.0, 6.0)
    assert ours.spread_ms == 6.0
    assert fwd.ratio(math) == 1.5
    assert ours.tflops == pytest.approx(flops(SPEC, SIZES, "fwd") / 4.0 / 1e9)


def test_flops_are_halved_if_causal_and_take_both_dims() -> None:
    sizes = Workload(2, 8, 2, 100, 50)
    spec = AttentionSpec(head_dim=64, head_dim_v=32)
    assert flops(spec, sizes, "fwd") == 4 * 2 * 8 * 100 * 50 * 48
    assert (
        flops(dataclasses.replace(spec, causal=True), sizes, "bwd") == 2.5 * 2 * 2 * 8 * 5000 * 48
    )


def assert_computes(name: str, spec: AttentionSpec, sizes: Workload) -> None:
    q, k, v = benches._inputs(spec, sizes, "cpu")
    beside = beside_of(spec, sizes, "cpu", torch.Generator().manual_seed(0))
    out = by_name(name).make(spec, sizes, **beside)(q, k, v)
    want, _ = attention(spec, q, k, v, **beside)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", [SPEC, dataclasses.replace(SPEC, causal=False)], ids=str)
@pytest.mark.parametrize("name", ["sdpa math", "sdpa flash"])
def test_sdpa_peers_compute_the_spec(name: str, spec: AttentionSpec) -> None:
    assert_computes(name, spec, SIZES)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "named", [{"attn_mask": True}, {"bias": True}, {"attn_mask": True, "bias": True}], ids=str
)
def test_sdpa_takes_masks_and_biases(named: dict[str, bool], causal: bool) -> None:
    assert_computes("sdpa math", dataclasses.replace(SPEC, causal=causal, **named), SIZES)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(head_dim=16, causal=True),
        AttentionSpec(head_dim=16, causal="top_left"),
        AttentionSpec(head_dim=16, window=(3, None), causal=True),
        AttentionSpec(head_dim=16, window=(None, 2)),
        AttentionSpec(head_dim=16, window=(3, 2)),
    ],
    ids=lambda spec: spec.key,
)
def test_flex_mask_is_the_specs(spec: AttentionSpec) -> None:
    from attngen.softmax_reference import alignment, visible

    sizes = Workload(1, 1, 1, 7, 11)
    i, j = torch.arange(7)[:, None], torch.arange(11)
    seen = peers._visible(spec, sizes)(torch.tensor(0), torch.tensor(0), i, j)
    assert torch.equal(seen, visible(spec, i + alignment(spec, 7, 11), j))


@pytest.mark.filterwarnings("default")  # what torch says while it compiles is its own affair
@pytest.mark.slow
def test_flex_computes_the_spec() -> None:
    spec = dataclasses.replace(SPEC, window=(5, None), softcap=2.0)
    spec = dataclasses.replace(spec, attn_mask=True, bias=True, alibi=True)
    assert_computes("flex", spec, Workload(1, 4, 2, 128, 256))
    assert_computes("flex", dataclasses.replace(SPEC, causal=False), Workload(1, 4, 2, 1, 256))


def test_flex_is_made_with_and_without_a_mask() -> None:
    by_name("flex").make(SPEC, SIZES)
    by_name("flex max-autotune").make(dataclasses.replace(SPEC, causal=False), SIZES)


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("sdpa flash", AttentionSpec(head_dim=16, window=(3, 0)), "no window"),
        ("sdpa math", AttentionSpec(head_dim=16, softcap=2.0), "no softcap"),
        ("flex", AttentionSpec(head_dim=16, dropout_p=0.5), "no dropout"),
        ("flex max-autotune", AttentionSpec(head_dim=16, dropout_p=0.5), "no dropout"),
        ("sdpa math", AttentionSpec(head_dim=16, alibi=True, sinks=True), "no alibi, sinks"),
        ("fa3", SPEC, "fa3_fwd_interface"),
    ],
)
def test_peer_that_cannot_serve_says_why(name: str, spec: AttentionSpec, reason: str) -> None:
    (found,) = run(by_name(name), spec=spec, directions=("fwd",), rounds=1)
    absent = found.timed[-1]
    assert (absent.ms, found.ratio(absent)) == (None, None)
    assert reason in absent.reason
    line = comparison_table(found).splitlines()[-1]
    assert line.split()[len(name.split())] == "-"
    assert reason in line


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_rescales_for_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda attend, **named: attend)
    q, k, v = (x.detach() for x in make_qkv(2, 2, 12))
    sinks = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
    spec = AttentionSpec(head_dim=16, causal=True, sinks=True)
    attend = by_name("flex").make(spec, Workload(2, 2, 2, 12, 12), sinks=sinks)
    scores = (q @ k.mT / 4).masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf)
    with_sink = torch.cat([scores, sinks[..., None, None].expand(2, 2, 12, 1)], -1)
    want = with_sink.softmax(-1)[..., :-1] @ v
    torch.testing.assert_close(attend(q, k, v), want, atol=1e-5, rtol=0)


def test_alignment_that_a_peer_lacks() -> None:
    longer = Workload(1, 1, 1, 4, 8)
    with pytest.raises(peers.CannotServe, match="bottom_right"):
        by_name("sdpa flash").make(SPEC, longer)
    by_name("sdpa flash").make(dataclasses.replace(SPEC, causal="top_left"), longer)


def test_math_is_for_small_shapes() -> None:
    with pytest.raises(peers.CannotServe, match="timed up to"):
        by_name("sdpa math").make(SPEC, Workload(1, 16, 16, 16384, 16384))


def test_peer_that_fails_at_its_first_call_is_reported() -> None:
    def make(spec: AttentionSpec, workload: Workload) -> Any:
        def attend(*tensors: Any) -> Any:
            raise RuntimeError("No available kernel.\nAborting.")

        return attend

    (found,) = run(Peer("broken", make), directions=("fwd",))
    assert found.timed[-1].reason == "No available kernel."


def test_flash_attention_3_gets_its_layout_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def flash_attn_func(q: Any, k: Any, v: Any, **named: Any) -> Any:
        calls.append((tuple(q.shape), named))
        return q, None

    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    spec = AttentionSpec(head_dim=16, causal=True, window=(3, 0), softcap=2.0)
    (found,) = run(by_name("fa3"), spec=spec, directions=("fwd",), rounds=1)
    assert found.timed[-1].ms is not None
    assert calls[0] == (
        (1, 17, 2, 16),
        {"softmax_scale": None, "causal": True, "window_size": (3, 0), "softcap": 2.0},
    )


def test_flash_attention_3_decodes_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def flash_attn_with_kvcache(q: Any, k: Any, v: Any, **named: Any) -> Any:
        calls.append((tuple(q.shape), named))
        return q

    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    spec, peer = AttentionSpec(head_dim=16, window=(3, 0)), by_name("fa3 kvcache")
    for sizes, reason in ((Workload(1, 2, 1, 2, 17), ""), (SIZES, "up to 16 query rows")):
        named = {"timer": FakeTimer(), "device": "cpu", "rounds": 1, "directions": ("fwd",)}
        (found,) = bench(spec, sizes, [peer], **named)
        assert reason in found.timed[-1].reason and bool(found.timed[-1].ms) is not bool(reason)
    options = {"softmax_scale": None, "causal": False, "window_size": (3, 0), "softcap": 0.0}
    assert calls[0] == ((1, 2, 2, 16), options)


def test_calls_in_graphs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over as many inputs as no cache holds; a backward is not timed so."""
    seen: dict[int, int] = {}

    def make(spec: Any, workload: Any, **beside: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            seen[k.data_ptr()] = seen.get(k.data_ptr(), 0) + 1
            return q

        return attend

    def timer(call: Callable[[], Any]) -> float:
        for _ in range(6):
            call()
        return 1.0

    monkeypatch.setattr(benches, "by_graph", timer)
    monkeypatch.setattr(benches, "COLD_BYTES", 2 * 4 * 2 * 17 * 16)  # of two inputs
    run(Peer("counts", make), directions=("fwd",), rounds=1, timer=timer)
    assert list(seen.values()) == [3, 3, 3]  # once to prepare
    with pytest.raises(ValueError, match="by_graph times forwards"):
        run(timer=timer)


def test_ours_and_default_run_their_own_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = FwdConfig(block_m=16, block_n=32, num_warps=4, num_stages=1)
    found = Found(None, "user", [])
    monkeypatch.setattr("attngen.explain.find", lambda *given: (tuned, found, None))
    ran = []

    def watched(spec: Any, config: Any, interpret: bool) -> Any:
        ran.append(config)
        return kernel(spec, config, interpret)

    monkeypatch.setattr("attngen.resolve.kernel", watched)
    (made,) = run(directions=("fwd",), rounds=2)
    assert (made.tier, made.timed[0].config) == ("user", tuned.key)
    default = made.timed[1].config
    keys = [config.key for config in ran]
    assert keys == [tuned.key, default] * 3  # each once to prepare, then in two rounds


def test_bench_command_prints_tables_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    (made,) = run(by_name("sdpa math"), directions=("fwd",))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(benches, "bench", lambda *args, **named: iter([made]))
    line = ["bench", SPEC.key, "--workload", str(SIZES)]
    result = CliRunner().invoke(main, [*line, "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["gpu"], said["workload"], said["direction"]) == ("NVIDIA H200", str(SIZES), "fwd")
    assert said["results"]["sdpa math"]["their_time_over_ours"] == 1.5
    assert {"driver", "torch", "triton", "cuda", "command"} <= said.keys()
    refused = CliRunner().invoke(main, [*line, "--graph"])
    assert refused.exit_code == 2 and "add --direction fwd" in refused.output
    table = CliRunner().invoke(main, line).stdout
    assert "1.50" in table
    assert "NVIDIA H200" in table
