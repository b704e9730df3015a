"""The tuning procedure, with a compiler and a timer that answer from a table."""

from __future__ import annotations

import signal
import threading
import zlib
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

import pytest

from attngen.config import FwdConfig, KernelConfig, default_config
from attngen.errors import NoFeasibleConfigError, SpecError, TuningError
from attngen.gpu import by_name
from attngen.identity import record_key
from attngen.records import Provenance
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.tuner import session as sessions
from attngen.tuner import tune
from attngen.tuner.predict import MAX_CHECKS, Prediction
from attngen.tuner.session import Job, Session
from attngen.tuner.static_check import Compiled, KernelFacts, objection
from attngen.tuner.timing_client import Measured, TrialFailedError
from attngen.workload import Workload, spec_bucket

pytestmark = pytest.mark.usefixtures("portable")  # its fake timer knows the portable configs

GPU = by_name("nvidia_h200")
SPEC = AttentionSpec(head_dim=128, causal=True)
WORKLOAD = Workload(4, 32, 8, 4096, 4096)
FACTS = KernelFacts("attn_fwd", 128, 0, 65536, 0, False, False, 1.0)


def job(direction="fwd", **how) -> Job:
    bucket = spec_bucket(direction, SPEC, WORKLOAD)
    how = {"budget": 600.0, "max_trials": 30} | how
    return Job(SPEC, WORKLOAD, bucket, GPU, record_key(SPEC, bucket, GPU), **how)


DEFAULT = default_config(SPEC, job().bucket, GPU)
BEST = FwdConfig(block_m=128, block_n=128, num_warps=8, num_stages=2)


def seconds(config: KernelConfig) -> float:
    """Recorded times: the default takes 100 us, BEST 80, all others more."""
    return {DEFAULT: 100.0, BEST: 80.0}.get(config, 110.0 + zlib.crc32(config.key.encode()) % 7)


class FakeCompiler:
    """Compiles everything, save what a test says otherwise."""

    jobs = 1

    def __init__(self, result=lambda config: Compiled(config, (FACTS,))) -> None:
        self._result = result
        self.seen: list[KernelConfig] = []

    def submit(self, config: KernelConfig) -> Future[Compiled]:
        self.seen.append(config)
        future: Future[Compiled] = Future()
        future.set_result(self._result(config))
        return future


class FakeTimer:
    """Answers from a table; `trouble` may raise for a config."""

    provenance = Provenance(gpu=GPU.name, driver=None, cuda="12.8", torch="2.13.0", triton="3.6.0")

    def __init__(self, times=seconds, trouble=lambda action, config: None) -> None:
        self._times = times
        self._trouble = trouble
        self.calls: Counter[str] = Counter()
        self.compared: list[KernelConfig] = []
        self.limits: list[float | None] = []

    def measure(self, config, stop_above_us):
        self.calls["measure"] += 1
        self.limits.append(stop_above_us)
        self._trouble("measure", config)
        time = self._times(config)
        stopped = stop_above_us is not None and time > stop_above_us
        return Measured(time, 1.0, stopped, error=0.001)

    def verify(self, config):
        self.calls["verify"] += 1
        self._trouble("verify", config)
        return 0.002

    def gate(self, config):
        self.calls["gate"] += 1
        self._trouble("gate", config)
        return 0.003

    def compare(self, configs, rounds, expected_us):
        self.calls["compare"] += 1
        for config in configs:
            self._trouble("compare", config)
        self.compared = list(configs)
        return [Measured(self._times(c), 0.5, clocks_mhz=(1980, 1965)) for c in configs]


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "tuning.db") as opened:
        yield opened


def run(store, timer=None, compiler=None, what=None):
    events: list[dict] = []
    what, timer, compiler = what or job(), timer or FakeTimer(), compiler or FakeCompiler()
    report = Session(what, store, compiler, timer, events.append).run()
    return report, events


def fails(status, kind, *configs, action="measure"):
    def trouble(now, config):
        if now == action and (not configs or config in configs):
            raise TrialFailedError(status, kind, f"{kind} of {config.block_m}")

    return trouble


def statuses(store) -> dict[str, str]:
    return {trial.config_key: trial.status for trial in store.trials(job().key)}


class LateDefault(FakeCompiler):
    """Takes longer over the default than the budget lasts."""

    jobs = 4

    def submit(self, config: KernelConfig) -> Future[Compiled]:
        done = super().submit(config)
        if config != DEFAULT:
            return done
        late: Future[Compiled] = Future()
        threading.Timer(0.4, late.set_result, [done.result()]).start()
        return late


def test_the_default_is_compared_however_short_the_budget(store):
    timer = FakeTimer()
    report, _ = run(store, timer, LateDefault(), job(budget=0.05))
    assert DEFAULT in timer.compared
    assert report.record is not None and report.record.default_us == 100.0


def test_winner_is_stored_with_its_evidence(store):
    report, events = run(store)
    record = report.record
    assert record in store.winners()
    assert record.kernel_config == BEST
    assert (record.median_us, record.default_us, record.spread_us) == (80.0, 100.0, 0.5)
    assert (record.rounds, record.origin, record.clocks_mhz) == (9, "measured", (1980, 1965))
    assert record.error == 0.002
    assert report.tried == report.measured == 30 == len(store.trials(job().key))
    assert report.stopped_by == "max_trials 30"
    assert [e["event"] for e in events] == ["trial"] * 30 + ["winner"]
    assert events[29]["best_us"] == 80.0
    assert "+20.0% against the default" in report.confidence
    assert BEST.key in str(report) and "clear" in str(report)


def test_default_is_tried_first_and_is_a_finalist(store):
    compiler, timer = FakeCompiler(), FakeTimer(lambda c: 300.0 if c == DEFAULT else seconds(c))
    report, _ = run(store, timer, compiler)
    assert compiler.seen[0] == DEFAULT
    assert DEFAULT in timer.compared and len(set(timer.compared)) == 9
    assert report.record.default_us == 300.0


def test_second_run_finds_everything_and_measures_nothing(store):
    first, _ = run(store)
    timer, compiler = FakeTimer(), FakeCompiler()
    second, _ = run(store, timer, compiler)
    assert not timer.calls and not compiler.seen
    assert second.resumed == 30 and second.measured == 0
    assert second.record == first.record


def test_second_run_goes_on_where_the_first_stopped(store):
    run(store, what=job(max_trials=5))
    before = set(statuses(store))
    timer = FakeTimer()
    report, _ = run(store, timer, what=job(max_trials=12))
    assert (report.resumed, report.measured) == (5, 7)
    assert before < set(statuses(store))


def test_stored_winner_must_be_beaten_by_the_margin(store):
    run(store, what=job(max_trials=30))
    slightly = {BEST: 80.0, DEFAULT: 100.0}
    timer = FakeTimer(lambda c: slightly.get(c, 79.5))
    report, _ = run(store, timer, what=job(max_trials=40))
    assert report.record.kernel_config == BEST


@pytest.mark.parametrize(("best", "wins"), [(99.5, False), (98.5, True)])
def test_one_percent_margin_keeps_the_default(store, best, wins):
    timer = FakeTimer(lambda c: best if c == BEST else seconds(c))
    report, _ = run(store, timer)
    assert report.record.kernel_config == (BEST if wins else DEFAULT)
    if not wins:
        assert "nothing beat the default" in report.confidence


def test_a_config_timed_under_a_falling_clock_has_another_turn(store):
    class Throttled(FakeTimer):
        def measure(self, config, stop_above_us):
            found = super().measure(config, stop_above_us)
            first = self.calls["measure"] == 3
            return replace(
                found,
                median_us=999.0 if first else found.median_us,
                clocks_mhz=(1980, 1500) if first else (1980, 1965),
            )

    timer = Throttled()
    report, _ = run(store, timer)
    assert timer.calls["measure"] == 31 and report.tried == report.measured == 30
    trials = store.trials(job().key)
    assert {t.status for t in trials} == {"ok"} and max(t.median_us for t in trials) < 999.0
    assert not any(t.crashes for t in trials)


def test_a_clock_that_always_falls_does_not_hold_up_a_run(store):
    class Throttled(FakeTimer):
        def measure(self, config, stop_above_us):
            return replace(super().measure(config, stop_above_us), clocks_mhz=(1980, 1500))

        def compare(self, configs, rounds, expected_us):
            found = super().compare(configs, rounds, expected_us)
            return [replace(each, clocks_mhz=(1980, 1500)) for each in found]

    timer = Throttled()
    report, _ = run(store, timer)
    assert timer.calls["measure"] == 60 and timer.calls["compare"] == 2
    assert report.record.kernel_config == BEST and report.record.clocks_mhz == (1980, 1500)


@pytest.mark.parametrize(("wobble", "wins"), [(1.05, True), (1.35, False)])
def test_a_gain_below_the_noise_is_none(store, wobble, wins):
    """The default takes part twice; what its two times differ by, a challenger must gain."""

    class Noisy(FakeTimer):
        def compare(self, configs, rounds, expected_us):
            *found, again = super().compare(configs, rounds, expected_us)
            assert configs[-1] == configs[0] == DEFAULT
            return [*found, replace(again, median_us=again.median_us * wobble)]

    report, _ = run(store, Noisy())
    assert report.record.kernel_config == (BEST if wins else DEFAULT)
    assert report.noise == pytest.approx(wobble - 1)
    assert f"differs by {wobble - 1:.1%}" in report.confidence


def test_hopeless_configs_are_stopped_early(store):
    slow = FwdConfig(tiles="descriptor", block_m=128, block_n=64, num_warps=4, num_stages=2)
    timer = FakeTimer(lambda c: 900.0 if c == slow else seconds(c))
    run(store, timer)
    assert timer.limits[0] is None and timer.limits[1] == 200.0
    (trial,) = [t for t in store.trials(job().key) if t.config_key == slow.key]
    assert (trial.status, trial.median_us) == ("ok", 900.0)
    assert trial.reason.startswith("stopped early")


def test_search_ends_without_gains(store, monkeypatch):
    monkeypatch.setattr(sessions, "PATIENCE", 10)
    report, _ = run(store, what=job(max_trials=None))
    assert report.stopped_by == "10 measurements without a gain"


def test_budget_ends_the_search(store):
    report, _ = run(store, what=job(budget=1e-9, max_trials=None))
    assert report.stopped_by == "budget of 1e-09 s"
    assert 1 <= report.measured <= 2  # at least one config, whatever the budget


def test_small_spaces_are_tried_completely(store):
    small = Workload(1, 1, 1, 16, 16)
    bucket = spec_bucket("fwd", SPEC, small)
    what = Job(SPEC, small, bucket, GPU, record_key(SPEC, bucket, GPU), exhaustive=True)
    report, _ = run(store, what=what)
    assert report.stopped_by == "every config was tried"
    assert report.measured == 24  # 2 tiles, 3 warps, 4 stages


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (replace(FACTS, shared_bytes=300_000), "shared memory"),
        (replace(FACTS, trap=True), "trap"),
        (replace(FACTS, stack_bytes=4096), "spills"),
        (replace(FACTS, tensor_memory=640), "tensor memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_compiler_rules_out_is_skipped(store, facts, kind):
    def compiled(config):
        return Compiled(config, (facts if config == BEST else FACTS,))

    timer = FakeTimer()
    report, _ = run(store, timer, FakeCompiler(compiled))
    assert report.skipped[kind] == 1
    assert statuses(store)[BEST.key] == "skipped"
    assert report.measured == 29


def test_spilling_alone_does_not_rule_out():
    assert objection(Compiled(BEST, (replace(FACTS, stack_bytes=4088),)), GPU) is None


def test_wrong_results_are_failed_and_never_win(store):
    report, _ = run(store, FakeTimer(trouble=fails("failed", "wrong result", BEST)))
    assert report.failed == [(BEST.key, "wrong result of 128")]
    assert statuses(store)[BEST.key] == "failed"
    assert report.record.kernel_config == DEFAULT


def test_a_finalist_wrong_on_the_tuned_shape_is_failed(store):
    timer = FakeTimer(trouble=fails("failed", "wrong result", BEST, action="verify"))
    report, _ = run(store, timer)
    assert report.record.kernel_config == DEFAULT and BEST not in timer.compared
    assert statuses(store)[BEST.key] == "failed"


def test_a_finalist_that_crashes_in_the_comparison_is_dropped(store):
    timer = FakeTimer(trouble=fails("crashed", "crashed", BEST, action="compare"))
    report, _ = run(store, timer)
    assert report.record.kernel_config == DEFAULT
    assert statuses(store)[BEST.key] == "crashed"


def test_two_crashes_quarantine(store):
    crash = fails("crashed", "crashed", BEST)
    run(store, FakeTimer(trouble=crash))
    assert statuses(store)[BEST.key] == "crashed"
    timer = FakeTimer(trouble=crash)
    report, _ = run(store, timer)
    assert timer.calls["measure"] == 1 and report.resumed == 29
    assert statuses(store)[BEST.key] == "quarantined"
    timer = FakeTimer()
    run(store, timer)
    assert timer.calls["measure"] == 0


def test_interrupt_keeps_what_was_measured(store):
    def interrupt(action, config):
        if config == BEST:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, FakeTimer(trouble=interrupt))
    kept = statuses(store)
    assert kept.pop(BEST.key) == "skipped"
    assert kept and set(kept.values()) == {"ok"}
    assert not store.winners()
    report, _ = run(store)  # the interrupted one is taken up again
    assert report.record.kernel_config == BEST
    assert report.resumed == len(kept)


def test_nothing_runs(store):
    timer = FakeTimer(trouble=fails("failed", "does not compile"))
    with pytest.raises(NoFeasibleConfigError, match="tried 30") as caught:
        run(store, timer)
    assert str(caught.value).count("does not compile of") == 30
    assert DEFAULT.key in str(caught.value)
    assert not store.winners()


def test_nothing_compiles(store):
    compiler = FakeCompiler(lambda config: Compiled(config, error="line 7: no"))
    with pytest.raises(NoFeasibleConfigError, match="line 7: no"):
        run(store, compiler=compiler, what=job("bwd", max_trials=8))
    assert set(t.status for t in store.trials(job("bwd").key)) == {"failed"}


def test_a_default_that_fails_gives_a_record_without_gain(store):
    report, _ = run(store, FakeTimer(trouble=fails("failed", "wrong result", DEFAULT)))
    assert report.record.kernel_config == BEST
    assert report.record.gain == 1.0


def test_winners_of_neighbour_buckets_are_tried_early(store):
    far = FwdConfig(block_m=16, block_n=16, num_warps=2, num_stages=4)
    report, _ = run(store)
    near = spec_bucket("fwd", SPEC, Workload(4, 32, 8, 4096, 8192))
    key = record_key(SPEC, near, GPU)
    store.record_winner(replace(report.record, key=key, config=far.as_dict()))
    wanted = spec_bucket("fwd", SPEC, Workload(4, 32, 8, 4096, 16384))
    compiler = FakeCompiler()
    what = replace(job(), bucket=wanted, key=record_key(SPEC, wanted, GPU))
    run(store, compiler=compiler, what=what)
    assert compiler.seen[1] == far


# ---- without the GPU ------------------------------------------------------------------------


def predict(store, timer=None, compiler=None, **how):
    timer, compiler = timer or FakeTimer(), compiler or FakeCompiler()
    what = job(**{"max_trials": None} | how)
    return Prediction(what, store, compiler, timer, lambda event: None).run()


def test_prediction_takes_the_first_that_passes(store):
    def compiled(config):
        fits = config.tiles == "pointer"
        return Compiled(config, (FACTS if fits else replace(FACTS, shared_bytes=10**6),))

    report = predict(store, compiler=FakeCompiler(compiled))
    assert report.record.origin == "predicted" and report.record.median_us is None
    assert report.record.kernel_config.tiles == "pointer"
    assert report.record.error == 0.003
    assert report.skipped["shared memory"] == report.tried - 1 > 0
    assert store.winners() == [report.record]


def test_second_prediction_compiles_nothing(store):
    first = predict(store)
    compiler = FakeCompiler()
    assert predict(store, compiler=compiler).record == first.record
    assert not compiler.seen


def test_prediction_gives_up_after_a_few(store):
    timer = FakeTimer(trouble=fails("failed", "wrong result", action="gate"))
    with pytest.raises(NoFeasibleConfigError, match=f"none of {MAX_CHECKS} "):
        predict(store, timer)
    assert not store.winners()
    compiler = FakeCompiler()
    report = predict(store, compiler=compiler)  # goes on behind the ones that failed
    assert report.resumed == MAX_CHECKS and report.tried == 1


def test_measuring_replaces_a_prediction_and_not_the_reverse(store):
    predict(store)
    report, _ = run(store)
    assert store.winners() == [report.record]
    assert predict(store).record == report.record


# ---- what tune() refuses --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "error", "text"),
    [
        ({"direction": "sideways"}, SpecError, '"fwd", "bwd" or "both"'),
        ({"gpu": "nvidia_h2000"}, SpecError, "did you mean 'nvidia_h200'"),
        ({"gpu": "interpreter"}, TuningError, "not tuned"),
        ({"budget": 0.0}, TuningError, "budget must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tune_refuses(tmp_path, named, error, text):
    with pytest.raises(error, match=text):
        tune(SPEC, WORKLOAD, store=tmp_path / "tuning.db", **named)


def test_tune_refuses_an_empty_workload(tmp_path):
    with pytest.raises(TuningError, match="is empty"):
        tune(SPEC, Workload(1, 1, 1, 0, 5), store=tmp_path / "tuning.db")


def upgraded(what: Job) -> Job:
    """The same job under the next Triton."""
    return replace(what, key=replace(what.key, triton="3.99"))


def test_the_top_of_another_version_is_tried_first(store):
    run(store)
    compiler = FakeCompiler()
    run(store, compiler=compiler, what=upgraded(job()))
    stored = {trial.config_key for trial in store.top(job().key)}
    assert len(stored) == 16 and stored <= {c.key for c in compiler.seen[:17]}


@pytest.mark.parametrize("version", [lambda what: what, upgraded], ids=["same", "upgraded"])
def test_revalidate_times_the_stored_top_again_and_nothing_else(store, version):
    first, _ = run(store)
    stored = {trial.config_key for trial in store.top(job().key)}
    slower = FakeTimer(lambda c: seconds(c) + (50.0 if c == BEST else 0.0))
    what = version(replace(job(max_trials=None), revalidate=True))
    report, _ = run(store, slower, what=what)
    assert report.measured == len(stored | {DEFAULT.key})
    assert {t.config_key for t in store.trials(what.key) if t.date >= first.record.date} >= stored
    assert report.record.kernel_config == DEFAULT != first.record.kernel_config
    assert report.record.key == what.key
    assert report.stopped_by == "every config was tried"


def test_revalidate_without_anything_stored_times_the_default(store):
    report, _ = run(store, what=replace(job(), revalidate=True))
    assert report.measured == 1 and report.record.kernel_config == DEFAULT


# ---- what is held stays ---------------------------------------------------------------------


@pytest.fixture
def winner(tmp_path):
    """A record of BEST at 80 us, from another database."""
    with Store.open(tmp_path / "other.db") as other:
        return run(other)[0].record


@pytest.mark.parametrize("count", [1, 2])
def test_a_merged_winner_is_a_finalist_before_it_is_replaced(store, winner, count):
    store.merge([winner])
    timer = FakeTimer()
    report, _ = run(store, timer, what=job(max_trials=count))
    assert BEST in timer.compared and report.record.kernel_config == BEST
    assert [r.kernel_config for r in store.winners()] == [BEST]


def test_a_merged_winner_that_loses_or_fails_is_replaced(store, winner):
    store.merge([winner])
    slow = FakeTimer(lambda c: 120.0 if c == BEST else seconds(c))
    report, _ = run(store, slow, what=job(max_trials=1))
    assert store.winners() == [report.record] and report.record.kernel_config == DEFAULT


def test_a_held_winner_that_fails_now_is_replaced(store, winner):
    store.merge([winner])
    wrong = FakeTimer(trouble=fails("failed", "wrong result", BEST))
    report, _ = run(store, wrong, what=job(max_trials=1))
    assert store.winners() == [report.record] and report.record.kernel_config == DEFAULT


def test_a_held_winner_without_room_in_memory_now_is_kept(store, winner):
    store.merge([winner])
    full = FakeTimer(trouble=fails("skipped", "GPU memory", BEST))
    report, _ = run(store, full, what=job(max_trials=1))
    assert store.winners() == [winner] == [report.record]


def test_a_held_winner_under_a_falling_clock_is_still_timed(store, winner):
    store.merge([winner])

    class Throttled(FakeTimer):
        def measure(self, config, stop_above_us):
            return replace(super().measure(config, stop_above_us), clocks_mhz=(1980, 1500))

    report, _ = run(store, Throttled(), what=job(max_trials=1))
    assert report.record.kernel_config == BEST


def test_a_winner_that_another_run_stores_meanwhile_is_compared_too(store, winner):
    class Meanwhile(FakeTimer):
        def compare(self, configs, rounds, expected_us):
            if self.calls["compare"] == 0:
                store.merge([winner])
            return super().compare(configs, rounds, expected_us)

    timer = Meanwhile()
    report, _ = run(store, timer, what=job(max_trials=1))
    assert timer.calls["compare"] == 2 and BEST in timer.compared
    assert store.winners() == [report.record] and report.record.kernel_config == BEST


@pytest.mark.parametrize("kind", ["GPU memory", "Ctrl-C"])
def test_an_undone_revalidation_leaves_times_and_winner(store, kind):
    first, _ = run(store)
    before = store.history(job().key)

    def trouble(action, config):
        if kind == "Ctrl-C":
            raise KeyboardInterrupt
        fails("skipped", kind)(action, config)

    with pytest.raises((KeyboardInterrupt, NoFeasibleConfigError)):
        run(store, FakeTimer(trouble=trouble), what=replace(job(), revalidate=True))
    assert store.history(job().key) == before and store.winners() == [first.record]
    report, _ = run(store, what=job(max_trials=5))
    assert report.record == first.record and report.measured == 0


def test_what_found_no_memory_is_tried_again(store):
    run(store, FakeTimer(trouble=fails("skipped", "GPU memory", BEST)))
    assert statuses(store)[BEST.key] == "skipped"
    report, _ = run(store)
    assert statuses(store)[BEST.key] == "ok" and report.record.kernel_config == BEST


def test_a_hiccup_in_the_last_comparison_accuses_nobody(store):
    class Hiccup(FakeTimer):
        def compare(self, configs, rounds, expected_us):
            if self.calls["compare"] == 0:
                self.calls["compare"] += 1
                raise TrialFailedError("crashed", "crashed", "no answer within 30 s; killed")
            return super().compare(configs, rounds, expected_us)

    timer = Hiccup(lambda c: 150.0 if c == DEFAULT else seconds(c))
    report, _ = run(store, timer)
    assert report.record.default_us == 150.0 and not report.failed
    assert set(statuses(store).values()) == {"ok"}


def test_a_default_that_is_dropped_last_has_its_time_of_the_search(store):
    timer = FakeTimer(trouble=fails("crashed", "crashed", DEFAULT, action="compare"))
    report, _ = run(store, timer)
    assert (report.record.kernel_config, report.record.default_us) == (BEST, 100.0)


def test_history_is_the_order_of_the_search(store):
    order: list[str] = []

    class Listing(FakeTimer):
        def measure(self, config, stop_above_us):
            order.append(config.key)
            return super().measure(config, stop_above_us)

    run(store, Listing())
    assert [trial.config_key for trial in store.history(job().key)] == order


def test_a_budget_without_end(store):
    report, _ = run(store, what=job(budget=float("inf")))
    assert report.measured == 30


# ---- other sizes of the same bucket ---------------------------------------------------------

SMALL = Workload(3, 32, 8, 2100, 2100)


def small(**how) -> Job:
    return replace(job(**how), workload=SMALL)


def test_times_of_another_size_are_an_order_and_no_times(store):
    assert spec_bucket("fwd", SPEC, SMALL) == job().bucket
    run(store, FakeTimer(lambda c: seconds(c) / 4), what=small(max_trials=25))
    stored = store.top(job().key)
    timer, compiler = FakeTimer(), FakeCompiler()
    report, _ = run(store, timer, compiler, what=job(max_trials=30))
    assert report.resumed == 0 and report.measured == 30
    assert min(limit for limit in timer.limits if limit) == 2 * 80.0
    assert [c.key for c in compiler.seen[2:8]] == [t.config_key for t in stored[2:8]]
    assert report.record.median_us == 80.0


def test_what_failed_at_another_size_is_not_tried(store):
    run(store, FakeTimer(trouble=fails("failed", "wrong result", BEST)), what=small())
    timer = FakeTimer()
    report, _ = run(store, timer)
    assert report.resumed == 1 and statuses(store)[BEST.key] == "failed"


def test_a_prediction_begins_with_what_was_measured_and_leaves_it(store):
    with pytest.raises(KeyboardInterrupt):
        run(store, FakeTimer(trouble=interrupt_on_compare))
    before = store.history(job().key)
    report = predict(store)
    assert report.record.kernel_config == BEST
    assert store.history(job().key) == before


def interrupt_on_compare(action, config):
    if action == "compare":
        raise KeyboardInterrupt


def test_sigterm_ends_a_run_like_ctrl_c():
    from attngen.tuner.run import _sigterm_interrupts

    with pytest.raises(KeyboardInterrupt), _sigterm_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_stays_with_a_program_that_handles_it():
    from attngen.tuner.run import _sigterm_interrupts

    got = []
    before = signal.signal(signal.SIGTERM, lambda *args: got.append(args))
    try:
        with _sigterm_interrupts():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(got) == 1
