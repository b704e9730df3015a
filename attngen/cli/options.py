"""What commands take: specs, workloads, GPUs and configs, each refused with exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from attngen import config as configs
from attngen.config import KernelConfig
from attngen.errors import AttngenError
from attngen.gpu import GpuInfo, by_name
from attngen.spec import AttentionSpec
from attngen.workload import DIRECTIONS, Direction, Workload

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


SPEC = Parsed("spec", AttentionSpec.parse)
WORKLOAD = Parsed("workload", Workload.parse)
GPU = Parsed("gpu", by_name)

spec_argument = click.argument("spec", type=SPEC, metavar="SPEC")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
gpu_option = click.option(
    "--gpu",
    type=GPU,
    metavar="NAME",
    help="A GPU that need not be here, as nvidia_h200 or sm_90; default: the one here.",
)
db_option = click.option(
    "--db",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="The tuning database; default: ATTNGEN_DB, else tuning.db in the cache folder.",
)
config_option = click.option(
    "--config",
    metavar="FIELDS",
    help="A config, as block_m=128,block_n=64,num_warps=8,num_stages=3.",
)


def workload_option(*, required: bool = False, multiple: bool = False) -> Decorator:
    """`--workload B,Hq,Hkv,Sq,Sk`."""
    return click.option(
        "--workload",
        "workloads" if multiple else "workload",
        type=WORKLOAD,
        metavar="B,Hq,Hkv,Sq,Sk",
        required=required,
        multiple=multiple,
        help=f"Sizes of a call, as 4,32,8,4096,4096{'; repeatable' if multiple else ''}.",
    )


def direction_option(default: str, *, both: bool = True) -> Decorator:
    """`--direction fwd|bwd|both`."""
    return click.option(
        "--direction",
        type=click.Choice([*DIRECTIONS, *(["both"] if both else [])]),
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
    for item in text.split(","):
        if "=" not in item:
            raise bad_config(f"item {item!r} has no '='; write block_m=128,block_n=64,...")
    try:
        config = configs.parse(direction, text)
    except AttngenError as error:
        raise bad_config(str(error)) from None
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise bad_config(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        if kind is int and not isinstance(value, int):
            raise bad_config(f"{name} must be an int, got {value!r}")
    if why := configs.infeasible(spec, config, gpu):
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
