"""The tuner's child processes: compiling for a GPU that is not here, checking in the interpreter,
and how hangs, crashes and the parent's death end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from attngen import kernel as kernels
from attngen.config import BwdConfig, FwdConfig
from attngen.errors import TuningError
from attngen.gpu import by_name
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.tuner import case, compile_pool, gate, timing_client, tune
from attngen.tuner.compile_pool import CompilePool
from attngen.tuner.process import Worker, WorkerLostError
from attngen.tuner.static_check import check, objection
from attngen.tuner.timing_client import TimingClient, TrialFailedError
from attngen.workload import Workload

GPU = by_name("sm_90")
SPEC = AttentionSpec(head_dim=16, causal=True)
TINY = Workload(1, 2, 1, 32, 32)
FWD = FwdConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
BWD = BwdConfig(block_m=16, block_n=32, num_warps=4, num_stages=1, dq_block_m=16, dq_block_n=32)


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "attngen"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def test_compile_round_trip_for_sm_90():
    with CompilePool(SPEC, TINY, "bwd", GPU, jobs=1) as pool:
        first = pool.submit(BWD).result()
        names = {facts.kernel for facts in first.kernels}
        assert names == {"attn_bwd_preprocess", "attn_bwd_dkdv", "attn_bwd_dq"}
        assert all(facts.registers > 0 and not facts.trap for facts in first.kernels)
        assert all(facts.shared_bytes < GPU.shared_memory for facts in first.kernels)
        assert objection(first, GPU) is None
        begin = time.monotonic()
        again = pool.submit(BWD).result()
        assert time.monotonic() - begin < 0.1  # a kernel is compiled once
        assert {facts.kernel for facts in again.kernels} >= {"attn_bwd_dkdv", "attn_bwd_dq"}


def test_static_check_alone():
    assert check(SPEC, FWD, GPU) == []
    wide = FwdConfig(block_m=128, block_n=128, num_warps=4, num_stages=8)
    (reason,) = check(AttentionSpec(head_dim=256), wide, GPU)
    assert "shared memory" in reason


def test_a_compilation_that_hangs_is_killed_and_remembered(monkeypatch):
    with CompilePool(SPEC, TINY, "fwd", GPU, jobs=1) as pool:
        monkeypatch.setattr(compile_pool, "COMPILE_TIMEOUT_S", 0.01)
        found = pool.submit(FWD).result()
        assert found.error.startswith("while compiling: no answer within")
        monkeypatch.setattr(compile_pool, "COMPILE_TIMEOUT_S", 60.0)
        assert pool.submit(FWD).result().error == found.error
        other = FwdConfig(block_m=16, block_n=32, num_warps=4, num_stages=1)
        assert pool.submit(other).result().error is None  # by a fresh child


def test_checks_and_times_in_the_interpreter():
    with TimingClient(interpret=True) as client:
        assert client.gpu.is_interpreter
        client.open(SPEC, TINY, "fwd")
        found = client.measure(FWD, stop_above_us=1.0)
        assert found.stopped and found.median_us > 1.0 and found.error < 0.05
        assert client.verify(FWD) < 0.05
        client.open(SPEC, TINY, "bwd")
        assert client.verify(BWD) < 0.05
        with pytest.raises(TrialFailedError, match="ValueError|arange"):
            client.measure(FwdConfig(block_m=17, block_n=16, num_warps=4, num_stages=1), None)
        assert client.verify(BWD) < 0.05  # the worker lives on


def test_a_lost_timing_worker_is_replaced():
    with TimingClient(interpret=True) as client:
        client.open(SPEC, TINY, "fwd")
        client._worker.kill()
        with pytest.raises(TrialFailedError) as caught:
            client.verify(FWD)
        assert caught.value.status == "crashed"
        assert client.verify(FWD) < 0.05  # with its tensors set up again


@pytest.mark.parametrize("kills", [2, 3])
def test_a_timing_worker_killed_while_it_starts_is_started_again(monkeypatch, kills):
    started = []

    class Killed(timing_client.Worker):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            started.append(self)
            if len(started) <= kills:
                self._process.kill()

    monkeypatch.setattr(timing_client, "Worker", Killed)
    if kills < timing_client.STARTS:
        with TimingClient(interpret=True) as client:
            assert client.gpu.is_interpreter
    else:
        with pytest.raises(TuningError, match="does not start.*exit code -9"):
            TimingClient(interpret=True)
    assert len(started) == timing_client.STARTS


@pytest.mark.parametrize("limit", [None, 10e6], ids=["first", "best-known"])
def test_a_call_of_five_seconds_is_waited_for(monkeypatch, limit):
    """It runs six times in a measurement, of a kernel at 100 TFLOP/s."""
    asked: dict[str, float] = {}

    def ask(self, action, named, timeout_s):
        asked[action] = timeout_s
        return {"median_us": 5e6, "spread_us": 1.0, "stopped": False, "error": 0.0}

    monkeypatch.setattr(TimingClient, "_start", lambda self: {})
    monkeypatch.setattr(TimingClient, "_ask", ask)
    client = TimingClient()
    client.open(AttentionSpec(head_dim=128), Workload(8, 32, 32, 62_000, 62_000), "fwd")
    client.measure(FWD, limit)
    client.verify(FWD)
    assert 120 < asked["measure"] < 600 and asked["verify"] > 60
    client.open(AttentionSpec(head_dim=128), Workload(8, 32, 32, 1000, 1000), "fwd")
    client.measure(FWD, None)
    assert asked["measure"] < 31


def test_children_end_with_their_parent():
    code = (
        "from attngen.tuner.process import Worker; import os;"
        "w = Worker('attngen.tuner.compile_worker', '90');"
        "w.ask({'hello': True}, 60); print(w._process.pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    child = int(done.stdout)
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{child}") and not _is_zombie(child):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_child_that_cannot_start_says_why():
    worker = Worker("attngen.tuner.no_such_module")
    with pytest.raises(WorkerLostError, match="No module named"):
        worker.ask({}, 30)
    worker.close()


def test_gate_refuses_a_wrong_kernel():
    """Results that another config left behind must not pass: outputs are NaN before each run."""
    small = gate.SmallGate(SPEC, "fwd", 2, "cpu")
    (each,) = small.cases
    expected = gate.whole(each)
    each.out.copy_(expected.wanted["out"])
    each.lse.copy_(expected.wanted["lse"])
    verdicts = dict(gate._verdicts(each.spec, each.results(FWD), expected))
    assert all(verdict.ok for verdict in verdicts.values())
    each.out[0, 1, 7, 3] += 0.1
    verdicts = dict(gate._verdicts(each.spec, each.results(FWD), expected))
    assert not verdicts["out"].ok and verdicts["lse"].ok
    each.spoil(FWD)
    verdicts = dict(gate._verdicts(each.spec, each.results(FWD), expected))
    assert not any(verdict.ok for verdict in verdicts.values())


def test_gate_checks_gradients_of_bias_and_slopes():
    """A bias of each head's own and one that all share, whose gradient starts at 0 each time."""
    spec = AttentionSpec(head_dim=16, bias=True, attn_mask=True, alibi=True, sinks=True)
    small = gate.SmallGate(spec, "bwd", 2, "cpu")
    assert [each.dbias.shape[:2] for each in small.cases] == [(1, 2), (1, 1)]
    for _ in range(2):
        verdict = small.check(BWD)
        assert verdict.ok, verdict.detail
    each = small.cases[0]
    assert set(each.results(BWD)) == {"dq", "dk", "dv", "dbias", "dslopes"}
    expected = gate.whole(each)
    each.dbias[0, 1, 2, 3] += 1
    each.slope_sums[0, 1] += 100
    verdicts = dict(gate._verdicts(each.spec, each.results(BWD), expected))
    assert {name for name, verdict in verdicts.items() if not verdict.ok} == {"dbias", "dslopes"}


def test_prediction_from_end_to_end(tmp_path):
    events: list[dict] = []
    (report,) = tune(
        SPEC,
        TINY,
        direction="fwd",
        gpu="nvidia_h200",
        store=tmp_path / "tuning.db",
        progress=events.append,
    )
    assert report.record.origin == "predicted" and report.seconds < 60
    assert events[-1]["status"] == "ok"
    with Store.open(tmp_path / "tuning.db", readonly=True) as store:
        assert store.winners() == [report.record]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_tune_without_a_gpu_says_what_to_do(tmp_path):
    with pytest.raises(TuningError, match="--gpu nvidia_h200"):
        tune(SPEC, TINY, store=tmp_path / "tuning.db")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "named",
    [
        pytest.param({"head_dim": 128, "causal": True}, id="d128-causal"),
        pytest.param({"head_dim": 64, "dropout_p": 0.1, "window": (200, 0)}, id="dropout-window"),
        pytest.param({"head_dim": 96, "dtype": "float32", "softcap": 20.0}, id="float32-softcap"),
    ],
)
def test_tune_on_the_gpu(tmp_path, named):
    spec, sizes = AttentionSpec(**named), Workload(2, 8, 2, 1000, 1024)
    # Trials end it, not the budget, or a busy machine leaves some for the second time.
    how = {"budget": 300.0, "max_trials": 12, "store": tmp_path / "tuning.db"}
    reports = tune(spec, sizes, **how)
    for report in reports:
        assert not report.failed, str(report)
        assert report.record.origin == "measured"
        assert 0 < report.record.median_us <= report.record.default_us
    again = tune(spec, sizes, **how)
    assert [r.measured for r in again] == [0, 0]
    assert [r.record for r in again] == [r.record for r in reports]


PLANTED = {
    # (a piece of the forward, what takes its place): right wherever tiles divide the lengths
    "ragged": ("tl.store(lse_ptr", "acc = tl.where(seqlen_k % BLOCK_N == 0, acc, acc * 1.1)\n"),
    # right on every small shape
    "tuned-size": ("tl.store(lse_ptr", "acc = tl.where(seqlen_k < 300, acc, acc * 1.1)\n"),
}


@pytest.mark.parametrize("where", PLANTED)
def test_a_planted_bug_cannot_win(where, monkeypatch):
    """One shows only where no tile divides a length, the other only at the tuned size."""
    piece, planted = PLANTED[where]
    write = kernels.render

    def render(*what):
        text = write(*what)
        assert text.count(f"    {piece}") == 1
        return text.replace(f"    {piece}", f"    {planted}    {piece}")

    monkeypatch.setattr(kernels, "render", render)
    kernels.kernel.cache_clear()
    try:
        small = gate.SmallGate(SPEC, "fwd", 2, "cpu").check(FWD)
        tuned = case.make(SPEC, Workload(1, 2, 1, 320, 320), "cpu", backward=False)
        large = gate.sampled(tuned, FWD)
    finally:
        kernels.kernel.cache_clear()
    assert small.ok == (where == "tuned-size")
    assert large.ok == (where == "ragged")
    assert "out is wrong" in (large if small.ok else small).detail
