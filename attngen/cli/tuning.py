"""Commands about tuning: tune, report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from attngen import lowering
from attngen.cli.model import model_options, plan_of, plan_of_stored, run_plan, show_plan
from attngen.cli.options import (
    SECONDS,
    FilePath,
    db_option,
    device_to_tune,
    direction_option,
    directions_of,
    gpu_option,
    json_option,
    spec_or_model_argument,
    workload_option,
)
from attngen.cli.output import microseconds, print_json, table, write_whole
from attngen.cli.program import FAILED, Command, say
from attngen.cli.progress import tuning_progress
from attngen.cli.records import reading
from attngen.cli.shard import Shard, shard_default, shard_option, storage_option
from attngen.errors import NoFeasibleConfigError, TuningError
from attngen.gpu import GpuInfo
from attngen.spec import AttentionSpec
from attngen.workload import Direction, Workload

if TYPE_CHECKING:
    from attngen.model_plan import PlannedJob
    from attngen.records import RecordKey
    from attngen.store import Store
    from attngen.trials import Trial
    from attngen.tuner import TuneReport


@click.command(cls=Command)
@spec_or_model_argument
@workload_option(multiple=True, runs=True)
@model_options
@direction_option("both")
@click.option(
    "--budget",
    type=SECONDS,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for each workload and direction.",
)
@gpu_option
@click.option("--max-trials", type=click.IntRange(1), metavar="N", help="Try at most N configs.")
@click.option(
    "--exhaustive",
    is_flag=True,
    help="Try every feasible kernel, within --budget; a prediction still tries a few.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the search.",
)
@click.option(
    "--revalidate",
    is_flag=True,
    help="Time the stored top 16 again and search no further; without a SPEC, for every winner "
    "that the database holds for the GPU.",
)
@storage_option
@shard_option
@db_option
@json_option
def tune(
    spec: AttentionSpec | None,
    workloads: tuple[Workload, ...],
    direction: Literal["both", "fwd", "bwd"],
    budget: float,
    gpu: GpuInfo | None,
    max_trials: int | None,
    exhaustive: bool,
    seed: int,
    revalidate: bool,
    storage: str | None,
    shard: Shard | None,
    db: Path | None,
    as_json: bool,
    dry_run: bool,
    again: bool,
    **model: Any,
) -> None:
    """Search for the fastest correct config of a SPEC, or of each in a --model, and store it.

    Each trial is stored as it ends: an interrupted run, started again, goes on from there. With
    --gpu for a GPU that is not here, everything but the timing is done and the record is marked
    "predicted"; a measured one always outranks it.

    --model takes a HuggingFace config.json, or a TOML list of [[job]] tables with spec, workload
    and, if need be, direction and why. What your database holds for its jobs is not tuned again.

    Several workers, one a GPU, share the searches with --storage, or the jobs with --shard;
    `attngen merge` joins their databases.

    After an upgrade of Triton or attngen, --revalidate brings stored winners up to date.
    """
    if gpu is not None and gpu.is_interpreter:
        raise click.BadParameter(
            "the interpreter is not tuned; name a GPU, as nvidia_h200", param_hint="'--gpu'"
        )
    if revalidate and spec is None and not any(model.values()) and not workloads:
        plan = plan_of_stored(gpu, db).only(directions_of(direction))
    else:
        plan = plan_of(spec, workloads, again=again, **model).only(directions_of(direction))
    if storage is not None:
        _check_storage(storage, revalidate)
    jobs = len(plan.jobs)
    shard = shard or shard_default(storage)
    if shard is not None:
        plan = plan.shard(*shard)
    whole_model = spec is None
    again = again or revalidate
    if dry_run:
        for job in plan.jobs:
            lowering.required(job.spec, device_to_tune(gpu))
        show_plan(plan, gpu, db, budget, skip_stored=whole_model and not again, as_json=as_json)
        return

    if jobs and not plan.jobs:
        say(f"shard {shard} of {jobs} jobs is empty; nothing to do")
        return
    from attngen.tuner import kept_workers
    from attngen.tuner import tune as search

    with tuning_progress(budget) as progress, kept_workers():

        def run(job: PlannedJob, directions: tuple[Direction, ...]) -> None:
            reports = search(
                job.spec,
                job.workload,
                direction="both" if len(directions) == 2 else directions[0],
                gpu=gpu,
                budget=budget,
                max_trials=max_trials,
                seed=seed,
                exhaustive=exhaustive,
                revalidate=revalidate,
                store=db,
                progress=progress,
                storage=storage,
            )
            for each in reports:
                if as_json:
                    print_json(_report_dict(each))
                else:
                    click.echo(str(each))

        if whole_model:
            run_plan(plan, gpu, db, run, again=again)
            return
        failed = 0
        for job in plan.jobs:
            try:
                run(job, job.directions)
            except (NoFeasibleConfigError, TuningError) as error:
                if len(plan.jobs) == 1:
                    raise
                failed += 1
                say(f"attngen: {job.spec} {job.workload}: {error}")
        if failed:
            say(f"attngen: {failed} of {len(plan.jobs)} workloads have no winner")
            click.get_current_context().exit(FAILED)


def _check_storage(storage: str, revalidate: bool) -> None:
    from attngen.tuner.storage import checked

    if revalidate:
        raise click.UsageError("--revalidate takes seconds and is not shared; drop --storage")
    try:
        checked(storage)
    except TuningError as error:
        raise click.BadParameter(str(error), param_hint="'--storage'") from None


def _report_dict(report: TuneReport) -> dict[str, Any]:
    record = report.record.as_dict() if report.record else None
    named = vars(report) | {"bucket": report.bucket.key, "record": record}
    return named | {"confidence": report.confidence}


@click.command(cls=Command)
@gpu_option
@db_option
@json_option
@click.option(
    "--html",
    type=FilePath(allow_dash=True),
    metavar="FILE",
    help="Write a page instead: roofline, speed, searches, failures, winners; '-' is stdout.",
)
@click.option(
    "--bench",
    type=FilePath(exists=True),
    multiple=True,
    metavar="FILE",
    help="Output of `attngen bench --json`, for peers' times on the page; repeatable.",
)
def report(
    gpu: GpuInfo | None, db: Path | None, as_json: bool, html: Path | None, bench: tuple[Path, ...]
) -> None:
    """Sum up what tuning has tried: trials by outcome, and the best, for each key."""
    if html is not None and as_json:
        raise click.UsageError("--html and --json exclude each other; keep one")
    if bench and html is None:
        raise click.UsageError("--bench is for the page; add --html FILE")
    with reading(db) as store:
        if html is not None:
            _write_page(store, gpu, html, bench)
            return
        keys = store.trial_keys()
        keys = [key for key in keys if gpu is None or key.device_key == gpu.device_key]
        tried = [(key, store.trials(key)) for key in keys]
    if as_json:
        for key, trials in tried:
            print_json(_summary(key, trials))
    elif tried:
        click.echo(_report_table([_summary(key, trials) for key, trials in tried]))
    else:
        say(f"no trial is stored in {store.path}; `attngen tune` makes them")


def _write_page(store: Store, gpu: GpuInfo | None, target: Path, bench: tuple[Path, ...]) -> None:
    if any(
        each.exists() and target.exists() and target.samefile(each) for each in (store.path, *bench)
    ):
        raise click.BadParameter(
            f"{target} is what the page is made of; name another file", param_hint="'--html'"
        )
    from attngen.report import html

    page = html(store, gpu=gpu, bench=bench)
    if str(target) == "-":
        click.echo(page, nl=False)
    else:
        write_whole(target, page)
        say(f"wrote {target}")


def _summary(key: RecordKey, trials: list[Trial]) -> dict[str, Any]:
    """What was tried for a key; `best` is the fastest trial, before finalists were re-timed."""
    best = next((t for t in trials if t.status == "ok"), None)  # trials come fastest first
    reasons = Counter(t.reason.splitlines()[0] for t in trials if t.status != "ok" and t.reason)
    return {
        "spec": key.text_key,
        "bucket": key.bucket,
        "device_key": key.device_key,
        "triton": key.triton,
        "tried": len(trials),
        "outcomes": dict(Counter(t.status for t in trials)),
        "best_us": best.median_us if best else None,
        "best": best.config_key if best else None,
        "common_reason": reasons.most_common(1)[0][0] if reasons else None,
        "last": max(t.date for t in trials),
    }


OUTCOMES = ("ok", "failed", "skipped", "crashed", "quarantined", "running")


def _report_table(summaries: list[dict[str, Any]]) -> str:
    head = ("device", "bucket", "spec", "tried", *OUTCOMES, "best us", "best")
    rows = [
        (
            each["device_key"],
            each["bucket"],
            each["spec"],
            str(each["tried"]),
            *(str(each["outcomes"].get(name, 0)) for name in OUTCOMES),
            microseconds(each["best_us"]),
            each["best"] or f"none: {each['common_reason'] or 'nothing has ended'}",
        )
        for each in summaries
    ]
    return table(head, rows)
