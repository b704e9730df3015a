"""`attngen tune --model`: from a file to a plan, shown or tuned job by job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attngen.cli.options import Parsed, device_to_tune, full_workload
from attngen.cli.output import print_json, table
from attngen.cli.program import FAILED, say
from attngen.cli.records import reading
from attngen.errors import NoFeasibleConfigError, SpecError, TuningError, nearest
from attngen.gpu import GpuInfo
from attngen.model_config import PHASES, Phase
from attngen.model_plan import Plan, PlannedJob, plan_list, plan_model, plan_stored, read_file
from attngen.spec import AttentionSpec
from attngen.spec_rules import DTYPES
from attngen.workload import Direction, Workload

if TYPE_CHECKING:
    from attngen.store import Store

MAX_LENGTH = 2**30


def _phases(text: str) -> tuple[Phase, ...]:
    """`training,decode` as a tuple."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PHASES:
            raise SpecError(
                f"unknown phase {name!r}{nearest(name, PHASES)}; allowed: {', '.join(PHASES)}"
            )
    return tuple(phase for phase in PHASES if phase in names)


_OPTIONS = (
    click.option(
        "--model",
        metavar="FILE",
        help="A HuggingFace config.json, or a TOML list of jobs, in place of a SPEC.",
    ),
    click.option(
        "--phase",
        "phases",
        type=Parsed("phases", _phases),
        metavar="PHASES",
        help="Of a config.json: training,prefill,decode; default: all that the model has.",
    ),
    click.option(
        "--batch",
        "batches",
        type=click.IntRange(1, MAX_LENGTH),
        multiple=True,
        metavar="N",
        help="Of a config.json: a batch size; repeatable. Default: 8192 tokens a call in training, "
        "1 in prefill, 16 in decode.",
    ),
    click.option(
        "--seqlen",
        "seqlens",
        type=click.IntRange(1, MAX_LENGTH),
        multiple=True,
        metavar="N",
        help="Of a config.json: a length; repeatable. Default: 2048 and 8192, at most the model's.",
    ),
    click.option(
        "--dtype", type=click.Choice(DTYPES), help="Of a config.json: in place of its dtype."
    ),
    click.option(
        "--tensor-parallel",
        type=click.IntRange(1),
        metavar="N",
        help="Of a config.json: GPUs that share the heads.",
    ),
    click.option("--again", is_flag=True, help="With --model: tune what is stored, too."),
    click.option("--dry-run", is_flag=True, help="Show the plan and its time; tune nothing."),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options about a whole model."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def plan_of(
    spec: AttentionSpec | None,
    workloads: tuple[Workload, ...],
    *,
    model: str | None,
    again: bool,
    **sizes: Any,
) -> Plan:
    """The plan that the arguments ask for; wrong ones are usage errors."""
    given = {name: value for name, value in sizes.items() if value}
    if model is None:
        return _plan_of_spec(spec, workloads, given | ({"again": True} if again else {}))
    if spec is not None:
        raise click.UsageError(f"SPEC {spec} and --model {model} are both given; keep one")
    if workloads:
        raise click.UsageError(
            f"--workload {workloads[0]} goes with a SPEC; with --model, --batch and --seqlen say "
            "the sizes"
        )
    if not model:
        raise click.BadParameter("an empty path; name a file", param_hint="'--model'")
    try:
        content, is_list = read_file(Path(model))
        if is_list and given:
            raise SpecError(
                f"{_flag(next(iter(given)))} is for a config.json; the jobs of {model} say all "
                "themselves"
            )
        plan = plan_list(content) if is_list else plan_model(content, **given)
        for job in plan.jobs:
            full_workload(str(job.workload))
    except SpecError as error:
        where = "" if model in str(error) else f"{model}: "
        raise click.BadParameter(f"{where}{error}", param_hint="'--model'") from None
    return plan


_NO_GPU = (
    "this machine has no GPU that PyTorch can use; add --gpu nvidia_h200, or whichever to predict "
    "for, or see what `attngen doctor` says"
)


def plan_of_stored(gpu: GpuInfo | None, db: Path | None) -> Plan:
    """The jobs behind every winner that the database holds for a GPU."""
    where = device_to_tune(gpu)
    if where.is_interpreter:
        raise TuningError(_NO_GPU)
    with reading(db) as store:
        keys = [record.key for record in store.winners()]
        path = store.path
    plan = plan_stored((k.text_key, k.bucket) for k in keys if k.device_key == where.device_key)
    if not plan.jobs:
        raise TuningError(
            f"{path} holds no winner for {where.name} to revalidate; `attngen list` shows what it "
            "holds, `attngen tune SPEC --workload ...` makes one"
        )
    return plan


def _plan_of_spec(
    spec: AttentionSpec | None, workloads: tuple[Workload, ...], given: dict[str, Any]
) -> Plan:
    if spec is None and given:
        raise click.UsageError(f"{_flag(next(iter(given)))} goes with --model; add it")
    if spec is None:
        raise click.UsageError(
            "neither a SPEC nor --model is given; write head_dim=128,causal=true --workload "
            "4,32,8,4096,4096, or --model config.json"
        )
    if given:
        raise click.UsageError(
            f"{_flag(next(iter(given)))} goes with --model; a SPEC is tuned as it and "
            "--workload say"
        )
    if not workloads:
        raise click.UsageError("--workload is missing; write its sizes, as 4,32,8,4096,4096")
    return Plan(tuple(PlannedJob(spec, each, ("fwd", "bwd")) for each in workloads))


def _flag(name: str) -> str:
    names = {"phases": "--phase", "batches": "--batch", "seqlens": "--seqlen"}
    return names.get(name, f"--{name.replace('_', '-')}")


@dataclass(frozen=True)
class _Held:
    """What is stored for a direction of a job."""

    word: str
    """measured, predicted or shipped; or no, or ? where no GPU is known."""
    enough: bool
    """True if tuning again can wait: it is the user's, and as good as this machine can make it."""


def _held(job: PlannedJob, direction: Direction, gpu: GpuInfo, store: Store, here: bool) -> _Held:
    """What serves a job on a GPU: only an exact, current record counts."""
    from attngen.config import infeasible
    from attngen.identity import record_key
    from attngen.lookup import lookup
    from attngen.one_row import kept_at

    served, bucket = kept_at(direction, job.spec, job.workload)
    spec = served.text
    key = record_key(spec, bucket, gpu)
    found = lookup(store, key, bucket, gpu, lambda config: infeasible(spec, config, gpu))
    if found.record is None or found.tier not in ("user", "shipped"):
        return _Held("no", False)
    if found.tier == "shipped":
        return _Held("shipped", not here)  # a prediction would not be used
    origin = found.record.origin
    return _Held(origin, origin == "measured" or not here)


def _all_held(plan: Plan, gpu: GpuInfo | None, db: Path | None) -> list[dict[Direction, _Held]]:
    """What is stored, job by job and direction by direction."""
    where = device_to_tune(gpu)
    if where.is_interpreter:
        return [dict.fromkeys(job.directions, _Held("?", False)) for job in plan.jobs]
    here = gpu is None or device_to_tune(None).device_key == gpu.device_key
    with reading(db) as store:
        return [{d: _held(job, d, where, store, here) for d in job.directions} for job in plan.jobs]


def show_plan(
    plan: Plan,
    gpu: GpuInfo | None,
    db: Path | None,
    budget: float,
    *,
    skip_stored: bool,
    as_json: bool,
) -> None:
    """Print jobs, what is skipped and why, what was assumed, and the time."""
    held = _all_held(plan, gpu, db)
    times = [
        budget * sum(not (skip_stored and each.enough) for each in stored.values())
        for stored in held
    ]
    where = device_to_tune(gpu)
    name = None if where.is_interpreter else where.name
    if as_json:
        for job, stored, seconds in zip(plan.jobs, held, times, strict=True):
            print_json(_job_dict(job, stored, seconds))
        for skipped in plan.skipped:
            print_json({"skipped": asdict(skipped)})
        print_json({"gpu": name, "notes": plan.notes, "total_seconds": sum(times)})
        return
    head = ("spec", "workload", "directions", "stored", "seconds", "why")
    rows = [
        (
            job.spec.key,
            str(job.workload),
            "+".join(job.directions),
            _words(stored),
            f"{seconds:g}",
            "; ".join(job.why) or "-",
        )
        for job, stored, seconds in zip(plan.jobs, held, times, strict=True)
    ]
    if rows:
        click.echo(table(head, rows))
    for skipped in plan.skipped:
        spec = f" ({skipped.spec})" if skipped.spec else ""
        click.echo(f"skipped  {skipped.what}{spec}: {skipped.why}")
    for note in plan.notes:
        click.echo(f"note     {note}")
    if name is None:
        click.echo("note     no GPU is here; --gpu NAME shows what is stored for it")
    of = f" for {name}" if name else ""
    click.echo(
        f"total    {sum(times):g} s{of}: {round(sum(times) / budget)} to tune, {budget:g} s each; "
        "the last comparison of each comes on top"
    )


def _words(stored: dict[Direction, _Held]) -> str:
    """`no`, or `fwd measured, bwd no`."""
    words = {held.word for held in stored.values()}
    if len(words) == 1:
        return words.pop()
    return ", ".join(f"{direction} {held.word}" for direction, held in stored.items())


def _job_dict(job: PlannedJob, stored: dict[Direction, _Held], seconds: float) -> dict[str, Any]:
    from attngen.one_row import kept_at

    return {
        "spec": job.spec.key,
        "text_key": job.spec.text_key,
        "workload": str(job.workload),
        "directions": list(job.directions),
        "buckets": [kept_at(d, job.spec, job.workload)[1].key for d in job.directions],
        "stored": {direction: held.word for direction, held in stored.items()},
        "seconds": seconds,
        "why": list(job.why),
    }


def run_plan(
    plan: Plan,
    gpu: GpuInfo | None,
    db: Path | None,
    run: Callable[[PlannedJob, tuple[Direction, ...]], None],
    *,
    again: bool,
) -> None:
    """Tune job by job; one that has no config is said and does not stop the others."""
    for skipped in plan.skipped:
        say(f"skipped {skipped.what}: {skipped.why}")
    if not plan.jobs:
        raise TuningError("nothing of this model can be tuned; `--dry-run` says why")
    if device_to_tune(gpu).is_interpreter:
        raise TuningError(_NO_GPU)
    failed = 0
    for number, (job, held) in enumerate(zip(plan.jobs, _all_held(plan, gpu, db), strict=True), 1):
        left = tuple(d for d in job.directions if again or not held[d].enough)
        name = f"job {number} of {len(plan.jobs)}: {job.spec} {job.workload}"
        if not left:
            say(f"{name} is stored; --again tunes it again")
            continue
        say(f"{name} {'+'.join(left)} ({'; '.join(job.why)})")
        try:
            run(job, left)
        except (NoFeasibleConfigError, TuningError) as error:
            failed += 1
            say(f"attngen: {name}: {error}")
    if failed:
        say(f"attngen: {failed} of {len(plan.jobs)} jobs have no winner; the others are stored")
        click.get_current_context().exit(FAILED)
