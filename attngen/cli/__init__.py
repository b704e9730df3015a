"""The `attngen` command line.

Data goes to stdout; progress, notes and errors go to stderr. Exit codes: 0 done, 1 failed, 2 wrong
usage, 130 interrupted. Nothing here imports torch or triton before a command needs them, so that
`attngen --help` is quick.
"""

from __future__ import annotations

import click

from attngen.cli.kernels import emit, explain, verify
from attngen.cli.machine import bench, doctor
from attngen.cli.program import Program, debug_option
from attngen.cli.records import export, import_, list_, merge
from attngen.cli.tuning import report, tune

__all__ = ["main"]

COMMANDS = (tune, emit, list_, explain, verify, bench, report, export, import_, merge, doctor)


@click.group(
    cls=Program,
    params=[debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="attngen", message="attngen %(version)s")
def main() -> None:
    """Generate, tune and check attention kernels.

    A SPEC says what is computed: head_dim=128,dtype=bfloat16,causal=true. A workload says how
    large a call is: batch, query heads, key/value heads and the two lengths, as 4,32,8,4096,4096.
    """


for _command in COMMANDS:
    main.add_command(_command)
