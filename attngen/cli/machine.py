"""Commands about this machine: doctor, bench."""

from __future__ import annotations

import platform
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from attngen.cli.options import (
    direction_option,
    directions_of,
    json_option,
    spec_argument,
    workload_option,
)
from attngen.cli.output import print_json, table
from attngen.cli.program import FAILED, Command
from attngen.cli.progress import status_line
from attngen.errors import AttngenError
from attngen.spec import AttentionSpec
from attngen.workload import Workload

if TYPE_CHECKING:
    from attngen.bench import Comparison


@click.command(cls=Command)
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what was found on this machine, and what to do about each problem."""
    from attngen.doctor import examine, summary

    found = examine()
    if as_json:
        print_json(summary(found))
    else:
        click.echo("\n".join(map(str, found)))
    if any(each.state == "problem" for each in found):
        ctx.exit(FAILED)


@click.command(cls=Command)
@spec_argument
@workload_option(multiple=True, runs=True)
@direction_option("both")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--graph", is_flag=True, help="Replay forwards from CUDA graphs: no host time.")
@click.option("--max-autotune", is_flag=True, help="Time FlexAttention's max-autotune too (slow).")
@json_option
def bench(
    spec: AttentionSpec,
    workloads: tuple[Workload, ...],
    direction: str,
    rounds: int,
    graph: bool,
    max_autotune: bool,
    as_json: bool,
) -> None:
    """Time a SPEC's tuned and default kernels beside SDPA, FlexAttention and FlashAttention-3.

    All take turns in one run; TFLOP/s count 4*B*Hq*Sq*Sk*D (half if causal), 2.5 times that for
    the backward. "ratio" is a peer's time over ours: above 1.00 ours is faster.
    """
    import torch

    if graph and direction != "fwd":
        raise click.UsageError("--graph is for forwards; add --direction fwd")
    if not torch.cuda.is_available():
        raise AttngenError(
            f"bench needs a CUDA device, and torch {torch.__version__} sees none; "
            "`attngen doctor` says why"
        )
    from attngen.bench import bench as compare
    from attngen.bench import by_graph, do_bench, usual_workloads
    from attngen.peers import all_peers

    about = _about()
    if not as_json:
        click.echo(", ".join(f"{name} {value}" for name, value in about.items()))
    peers = all_peers(max_autotune=max_autotune)
    with status_line() as progress:
        for workload in workloads or usual_workloads(spec):
            for comparison in compare(
                spec,
                workload,
                peers,
                directions=directions_of(direction),
                rounds=rounds,
                timer=by_graph if graph else do_bench,
                progress=progress,
            ):
                if as_json:
                    print_json(about | comparison.as_dict())
                else:
                    click.echo(f"\n{comparison_table(comparison)}")


def _about() -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    import torch
    import triton

    from attngen.doctor import driver

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver().found,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": shlex.join(["attngen", *sys.argv[1:]]),
    }


def comparison_table(comparison: Comparison) -> str:
    """One table: a contestant a line, with its time, speed and the ratio to ours."""
    head = f"{comparison.spec.key}  {comparison.workload}  {comparison.direction}"
    rows = []
    for each in comparison.timed:
        ratio = comparison.ratio(each)
        numbers = ("-", "-", "-", "-")
        if each.ms is not None:
            numbers = (
                f"{each.ms:.4f}",
                f"{each.spread_ms:.4f}",
                f"{each.tflops:.1f}",
                "-" if ratio is None else f"{ratio:.2f}",
            )
        rows.append((each.name, *numbers, each.reason or each.config))
    columns = ("", "ms", "spread", "TFLOP/s", "ratio", f"(ours: from {comparison.tier})")
    return f"{head}\n{table(columns, rows)}"
