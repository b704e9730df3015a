"""What commands take: specs, workloads, GPUs and configs, each refused with exit code 2."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attngen import config as configs
from attngen.config import KernelConfig
from attngen.errors import AttngenError, SpecError, TuningError
from attngen.gpu import INTERPRETER, GpuInfo, by_name
from attngen.spec import AttentionSpec
from attngen.workload import DIRECTIONS, FAMILIES, Direction, Workload

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Parsed(click.ParamType[Any]):
    """A value read by a function of ours, whose error message is a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except AttngenError as error:
            self.fail(str(error), param, ctx)


class FilePath(click.Path):
    """A path that is no folder; '' is refused, which pathlib reads as the folder one is in."""

    def __init__(self, **named: Any) -> None:
        super().__init__(dir_okay=False, path_type=Path, **named)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("an empty path; name a file", param, ctx)
        return super().convert(value, param, ctx)


MAX_ROWS = 2**31 - 1
"""Rows of q or k in one call: with 16 columns of 16 bits that is half of a GPU's 128 GiB."""
MAX_BUDGET_S = 7 * 24 * 3600.0


def _workload(text: str) -> Workload:
    """A workload that some GPU could hold."""
    found = Workload.parse(text)
    for name, *sizes in (
        ("batch x query heads x query length", found.batch, found.num_heads_q, found.seqlen_q),
        ("batch x kv heads x key length", found.batch, found.num_heads_kv, found.seqlen_k),
    ):
        rows = math.prod(max(1, size) for size in sizes)
        if rows > MAX_ROWS:
            raise SpecError(
                f"workload {text} is larger than any GPU's memory: {name} is {rows}, at most "
                f"{MAX_ROWS} is allowed; use smaller sizes"
            )
    return found


def full_workload(text: str) -> Workload:
    """A workload that there is something to run of."""
    found = _workload(text)
    if not all(vars(found).values()):
        raise SpecError(f"workload {text} is empty, nothing runs; every size must be at least 1")
    return found


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_BUDGET_S:
        raise SpecError(f"must be seconds above 0, at most {MAX_BUDGET_S:.0f}, got {text!r}")
    return seconds


SPEC = Parsed("spec", AttentionSpec.parse)
GPU = Parsed("gpu", by_name)
SECONDS = Parsed("seconds", _seconds)

spec_argument = click.argument("spec", type=SPEC, metavar="SPEC")
spec_or_model_argument = click.argument("spec", type=SPEC, metavar="[SPEC]", required=False)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
gpu_option = click.option(
    "--gpu",
    type=GPU,
    metavar="NAME",
    help="A GPU that need not be here, as nvidia_h200 or sm_90; default: the one here.",
)
db_option = click.option(
    "--db",
    type=FilePath(),
    metavar="PATH",
    help="The tuning database; default: ATTNGEN_DB, else tuning.db in the cache folder.",
)
config_option = click.option(
    "--config",
    metavar="FIELDS",
    help="A config, as block_m=128,block_n=64,num_warps=8,num_stages=3. `attngen explain` shows "
    "all fields.",
)
out_option = click.option(
    "--out",
    type=FilePath(allow_dash=True),
    default="-",
    metavar="FILE",
    help="Write to a file; '-' is stdout.",
)


def workload_option(
    *, required: bool = False, multiple: bool = False, runs: bool = False
) -> Decorator:
    """`--workload B,Hq,Hkv,Sq,Sk`; one that `runs` must not be empty."""
    return click.option(
        "--workload",
        "workloads" if multiple else "workload",
        type=Parsed("workload", full_workload if runs else _workload),
        metavar="B,Hq,Hkv,Sq,Sk",
        required=required,
        multiple=multiple,
        help=f"Sizes of a call, as 4,32,8,4096,4096{'; repeatable' if multiple else ''}.",
    )


def direction_option(default: str, *, both: bool = True) -> Decorator:
    """`--direction fwd|bwd|both`."""
    return click.option(
        "--direction",
        type=click.Choice([*(DIRECTIONS if both else FAMILIES), *(["both"] if both else [])]),
        default=default,
        show_default=True,
    )


def directions_of(name: str) -> tuple[Direction, ...]:
    """`both` as the two directions, one of them as itself."""
    return tuple(d for d in DIRECTIONS if name in (d, "both"))


def parse_config(
    spec: AttentionSpec, direction: Direction, text: str, gpu: GpuInfo
) -> KernelConfig:
    """The config that `--config` names, refused if it cannot serve the spec on the GPU."""
    try:
        config = configs.parse(direction, text)
    except AttngenError as error:
        raise bad_config(str(error)) from None
    if why := configs.infeasible(spec.served_as(direction), config, gpu):
        raise bad_config(f"{'; '.join(why)}; choose other values, or leave --config out")
    return config


def bad_config(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="'--config'", ctx=click.get_current_context())


def device(gpu: GpuInfo | None) -> GpuInfo:
    """The named GPU, else the one here, else the interpreter."""
    if gpu is not None:
        return gpu
    from attngen.gpu import current

    return current()


def device_to_tune(gpu: GpuInfo | None) -> GpuInfo:
    """The same, but a child looks at the one here: a tuning run's parent must not start CUDA."""
    return _here() if gpu is None else gpu


@functools.cache
def _here() -> GpuInfo:
    done = subprocess.run(
        [sys.executable, "-m", "attngen.gpu"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TuningError(f"the GPU cannot be asked what it is: {last}; see `attngen doctor`")
    named = json.loads(done.stdout.splitlines()[-1])
    return INTERPRETER if named is None else GpuInfo(**named)
