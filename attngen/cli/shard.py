"""`--shard i/n`: which of a list of jobs are this process's, said or read from the launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import click

from attngen.cli.options import Parsed
from attngen.errors import SpecError

_ALONE = "write --shard i/n, or 0/1 for all jobs"


class Shard(NamedTuple):
    """Share number `part` of `parts`, from 0."""

    part: int
    parts: int

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}"


def parse_shard(text: str) -> Shard:
    """`0/4` to `3/4`."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if found is None or not int(found[1]) < int(found[2]):
        raise SpecError(f"shard must be i/n with i from 0 to n-1, as 0/4, got {text!r}")
    return Shard(int(found[1]), int(found[2]))


def shard_of(environment: Mapping[str, str]) -> Shard | None:
    """The share of a Slurm array task, else of a rank; None where there is neither.

    Raises:
        SpecError: the variables do not fit together.
    """
    if "SLURM_ARRAY_TASK_ID" in environment:
        return _of_array(environment)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
        if rank >= size:
            raise SpecError(f"RANK={rank} is not below WORLD_SIZE={size}; {_ALONE}")
        return Shard(rank, size)
    return None


def _of_array(environment: Mapping[str, str]) -> Shard:
    task, count = (_number(environment, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "COUNT"))
    least, step = (
        _number(environment, f"SLURM_ARRAY_TASK_{name}", default)
        for name, default in (("MIN", "0"), ("STEP", "1"))
    )
    index, rest = divmod(task - least, max(step, 1))
    if rest or not 0 <= index < count:
        raise SpecError(
            f"SLURM_ARRAY_TASK_ID={task} of {count} tasks from {least} in steps of {step} is no "
            f"regular array; {_ALONE}"
        )
    return Shard(index, count)


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None or not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise SpecError(f"{name} must be a whole number, got {text!r}; {_ALONE}")
    return int(text)


def shard_default(storage: str | None) -> Shard | None:
    """Without a storage the launcher's share; with one, all workers join each job."""
    if storage is not None:
        return None
    try:
        return shard_of(os.environ)
    except SpecError as error:
        raise click.UsageError(str(error)) from None


shard_option = click.option(
    "--shard",
    type=Parsed("shard", parse_shard),
    metavar="I/N",
    help="Tune only every N-th job, from the I-th on (from 0). Default without --storage: of "
    "SLURM_ARRAY_TASK_ID and _COUNT, else RANK and WORLD_SIZE.",
)
storage_option = click.option(
    "--storage",
    metavar="URL",
    help="Share each search with every worker that names the same storage: postgresql://..., "
    "mysql://... or journal://FILE.",
)
