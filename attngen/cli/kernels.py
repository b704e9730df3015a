"""Commands about one kernel: emit, explain, verify."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli.options import (
    GPU,
    SPEC,
    bad_config,
    config_option,
    device,
    direction_option,
    directions_of,
    gpu_option,
    json_option,
    out_option,
    parse_config,
    spec_argument,
    workload_option,
)
from attngen.cli.output import print_json, table, write_whole
from attngen.cli.program import FAILED, Command, say
from attngen.config import KernelConfig
from attngen.gpu import GpuInfo
from attngen.spec import AttentionSpec
from attngen.workload import Direction, Workload

if TYPE_CHECKING:
    from attngen.verify import Check

# What `emit` and `verify` look a config up for if no workload is named.
USUAL_WORKLOAD = Workload(1, 16, 16, 4096, 4096)


@click.command(cls=Command)
@click.argument("specs", type=SPEC, metavar="SPEC...", nargs=-1, required=True)
@direction_option("fwd", both=False)
@workload_option(multiple=True)
@click.option(
    "--gpu",
    "gpus",
    type=GPU,
    metavar="NAME",
    multiple=True,
    help="A GPU that need not be here, as nvidia_h200 or sm_90; default: the one here. Repeatable "
    "with --standalone.",
)
@config_option
@out_option
@click.option(
    "--standalone",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write a package that needs no attngen: kernels of each SPEC for each --gpu and "
    "--workload, forward and backward, a function that picks among them, and tests.",
)
def emit(
    specs: tuple[AttentionSpec, ...],
    direction: Direction,
    workloads: tuple[Workload, ...],
    gpus: tuple[GpuInfo, ...],
    config: str | None,
    out: Path,
    standalone: Path | None,
) -> None:
    """Print the kernel file of a SPEC: the stored winner's, or the one that --config names.

    Numbers that the text does not depend on may be `any`: window=any:none,dropout_p=any.
    """
    if standalone is not None:
        if config is not None or str(out) != "-":
            raise click.UsageError("--standalone takes neither --config nor --out; leave them out")
        _emit_folder(standalone, specs, gpus, workloads)
        return
    for what, given in (("SPEC", specs), ("--gpu", gpus), ("--workload", workloads)):
        if len(given) > 1:
            raise click.UsageError(
                f"{what} is given {len(given)} times; keep one, or write a folder of all with "
                "--standalone DIR"
            )
    from attngen.one_row import unordered
    from attngen.render import render

    spec, where = specs[0], device(gpus[0] if gpus else None)
    if config is None:
        if workloads and direction != "bwd":
            spec = unordered(spec, workloads[0].seqlen_q)
        chosen = _looked_up(spec, direction, workloads[0] if workloads else None, where)
    else:
        chosen = parse_config(spec, direction, config, where)
    text = render(spec, chosen)
    if str(out) == "-":
        click.echo(text, nl=False)
    else:
        write_whole(out, text)
        say(f"wrote {out}")
    if where.is_interpreter and config is None:
        say("note: no GPU here: this is the interpreter's config; --gpu nvidia_h200 emits for one")


def _emit_folder(
    folder: Path,
    specs: tuple[AttentionSpec, ...],
    gpus: tuple[GpuInfo, ...],
    workloads: tuple[Workload, ...],
) -> None:
    """`emit --standalone`."""
    from attngen.standalone import emit_folder

    here = gpus or (device(None),)
    named = [gpu for gpu in here if not gpu.is_interpreter]
    files = dict(emit_folder(folder.resolve(), specs, named, workloads))
    if (held := folder / "__init__.py").exists() and "Emitted by attngen" not in held.read_text():
        raise click.UsageError(
            f"{folder} is a package that attngen did not write, and its __init__.py would be lost; "
            "name another folder, which may lie in it"
        )
    try:
        (folder.resolve() / "kernels").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot make {folder} ({error.strerror})") from error
    for path, text in files.items():
        write_whole(path, text)
    say(f"wrote {len(files)} files to {folder}; python -m pytest {folder} checks them")
    if not named:
        say("note: no GPU here: all run the config that fits any; --gpu nvidia_h200 adds winners")


def _looked_up(
    spec: AttentionSpec, direction: Direction, workload: Workload | None, gpu: GpuInfo
) -> KernelConfig:
    """The config that a call of these sizes runs on a GPU."""
    from attngen.decode import family
    from attngen.resolve import find
    from attngen.workload import spec_bucket

    sizes = workload or USUAL_WORKLOAD
    served = family(direction, spec.text, sizes.seqlen_q)
    config, _, _ = find(spec.text, spec_bucket(served, spec, sizes), gpu)
    return config


@click.command(cls=Command)
@spec_argument
@workload_option(required=True, multiple=True)
@direction_option("both")
@gpu_option
@json_option
def explain(
    spec: AttentionSpec,
    workloads: tuple[Workload, ...],
    direction: str,
    gpu: GpuInfo | None,
    as_json: bool,
) -> None:
    """Say which record, config and lowering serve a SPEC, and why."""
    from attngen.explain import explain_workload

    where = device(gpu)
    for number, workload in enumerate(workloads):
        made = explain_workload(spec, workload, gpu=where, directions=directions_of(direction))
        if as_json:
            print_json(made.as_dict())
        else:
            click.echo(f"\n{made}" if number else str(made))


@click.command(cls=Command)
@spec_argument
@workload_option(runs=True)
@direction_option("both")
@gpu_option
@config_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    spec: AttentionSpec,
    workload: Workload | None,
    direction: str,
    gpu: GpuInfo | None,
    config: str | None,
    as_json: bool,
) -> None:
    """Run a SPEC's kernels on small and awkward shapes and compare them with float64.

    The config is the one that a call of --workload would run here, or on --gpu, or the one that
    --config names. Without a GPU the kernels run in Triton's interpreter. Exit code 1 if a result
    is worse than plain PyTorch's in the same dtype allows.
    """
    directions = directions_of(direction)
    if config is not None and len(directions) > 1:
        raise bad_config("a config serves one direction; add --direction fwd or --direction bwd")
    from attngen import interpreter
    from attngen import verify as checks
    from attngen.pinned import pinned

    chosen: dict[Direction, KernelConfig] = {}
    for each in directions:
        if config is not None:
            chosen[each] = parse_config(spec, each, config, device(gpu))
        elif gpu is not None or workload is not None:
            chosen[each] = _looked_up(spec, each, workload, device(gpu))
    on = "cpu" if interpreter.enabled() else "cuda"
    found = []
    with warnings.catch_warnings(), pinned(chosen) if chosen else nullcontext():
        warnings.filterwarnings("ignore", message="attngen: no CUDA device")
        workloads = checks.shapes(workload, on)
        for check in checks.verify(spec, workloads, directions, on):
            found.append(check)
            if as_json:
                print_json(check.as_dict())
    wrong = [check for check in found if not check.ok]
    if not as_json:
        click.echo(_verdicts(found))
    if workload is not None and workload not in workloads:
        say(f"note: {workload} itself is too large to check whole; its config ran on small shapes")
    if wrong:
        say(
            f"attngen: {len(wrong)} of {len(found)} results disagree with float64, first "
            f"{wrong[0].result} of {wrong[0].workload} ({wrong[0].detail}); report the spec "
            f"{spec.key}"
        )
        ctx.exit(FAILED)


def _verdicts(found: list[Check]) -> str:
    rows = [
        (str(each.workload), each.direction, each.result, "ok" if each.ok else "WRONG", each.detail)
        for each in found
    ]
    return table(("workload", "pass", "result", "verdict", "beside float64"), rows)
