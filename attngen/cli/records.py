"""Commands about stored records: list, export, import, merge."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attngen.cli.options import FilePath, db_option, gpu_option, json_option, out_option
from attngen.cli.output import microseconds, print_json, table, write_whole
from attngen.cli.program import FAILED, Command, say
from attngen.errors import StoreError
from attngen.gpu import GpuInfo

if TYPE_CHECKING:
    from attngen.exchange import ImportReport
    from attngen.records import Record
    from attngen.store import Store

FILE = FilePath(exists=True)
INPUT = FilePath(exists=True, allow_dash=True)


@contextmanager
def reading(path: Path | None) -> Iterator[Store]:
    """A database to read; a missing one is empty, one that cannot be used is an error.

    A look-up goes on without such a database; a person who asks for it must hear of it.
    """
    from attngen.store import Store

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        store = Store.open(path, readonly=True)
    with store:
        if store.trouble is not None:
            raise StoreError(store.trouble)
        yield store


@click.command("list", cls=Command)
@gpu_option
@db_option
@json_option
def list_(gpu: GpuInfo | None, db: Path | None, as_json: bool) -> None:
    """List stored and shipped winners, one a line.

    One of another Triton or of other templates is stale: it serves where there is none of these,
    and `attngen tune --revalidate` brings it up to date.
    """
    from attngen.identity import stale_in
    from attngen.records import shipped

    with reading(db) as store:
        found = [("user", record) for record in store.winners()]
    found += [("shipped", record) for record in shipped()]
    found = [each for each in found if gpu is None or each[1].key.device_key == gpu.device_key]
    if as_json:
        for source, record in found:
            print_json(record.as_dict() | {"source": source, "stale": stale_in(record)})
    elif found:
        click.echo(_winners(found))
    else:
        where = f" for {gpu.name}" if gpu else ""
        say(f"no record is stored in {store.path} or shipped{where}; `attngen tune` makes them")


def _winners(found: list[tuple[str, Record]]) -> str:
    from attngen.identity import stale_in

    names = ("source", "gpu", "bucket", "spec", "us", "vs default", "origin", "stale", "date")
    rows = [
        (
            source,
            record.provenance.gpu,
            record.key.bucket,
            record.key.text_key,
            microseconds(record.median_us),
            f"{record.gain:.2f}x" if record.gain else "-",
            record.origin,
            "; ".join(stale_in(record)) or "-",
            record.date,
            record.kernel_config.key,
        )
        for source, record in found
    ]
    return table((*names, "config"), sorted(rows, key=lambda row: (row[1], row[3], row[2], row[0])))


@click.command("export", cls=Command)
@gpu_option
@db_option
@out_option
@click.pass_context
def export(ctx: click.Context, gpu: GpuInfo | None, db: Path | None, out: Path) -> None:
    """Print your winners as lines of JSON, as tuning_db/<gpu>.jsonl holds them.

    A winner that cannot be read is named and left out, and makes the exit code 1.
    """
    from attngen.exchange import lines_of

    with reading(db) as store:
        records, unreadable = store.read_winners()
        lines = lines_of(records, gpu)
        if os.path.exists(out) and store.path.exists() and out.samefile(store.path):
            raise click.BadParameter(
                f"{out} is the database itself; name another file", param_hint="'--out'"
            )
    for why in unreadable:
        say(f"attngen: {why}; it is left out, tune this spec again")
    if not lines:
        where = f" for {gpu.name}" if gpu else ""
        raise StoreError(
            f"{store.path} holds no winner{where}; `attngen list` shows what there is, "
            "`attngen tune` makes them"
        )
    text = "\n".join(lines) + "\n"
    if str(out) == "-":
        click.echo(text, nl=False)
    else:
        write_whole(out, text)
        say(f"wrote {len(lines)} records to {out}")
    if unreadable:
        ctx.exit(FAILED)


@click.command("import", cls=Command)
@click.argument("files", type=INPUT, metavar="FILE...", nargs=-1, required=True)
@db_option
@click.pass_context
def import_(ctx: click.Context, files: tuple[Path, ...], db: Path | None) -> None:
    """Merge exported records into the database; of two with one key the better stays.

    '-' reads stdin. A bad line is named and skipped, and makes the exit code 1.
    """
    from attngen.exchange import import_lines
    from attngen.store import Store

    texts = [(file, _read(file)) for file in files]
    with Store.open(db) as store:
        done = [(file, import_lines(store, text.split("\n"))) for file, text in texts]
    if not all([_said(str(file), report) for file, report in done]):
        ctx.exit(FAILED)


def _read(file: Path) -> str:
    if str(file) == "-":
        return sys.stdin.read()
    content = file.read_bytes()
    if content.startswith(b"SQLite format 3"):
        raise click.BadParameter(
            f"{file} is a database; `attngen merge` joins those", param_hint="'FILE...'"
        )
    return content.decode(errors="replace")


@click.command("merge", cls=Command)
@click.argument("sources", type=FILE, metavar="DB...", nargs=-1, required=True)
@click.option(
    "--into",
    type=FilePath(),
    metavar="DB",
    required=True,
    help="The database that receives all.",
)
@click.pass_context
def merge(ctx: click.Context, sources: tuple[Path, ...], into: Path) -> None:
    """Merge databases into one: winners, and the trials that have ended.

    Of two winners with one key the better stays, and of two trials of one config the timed one,
    then a failed one, then the newer. A row that cannot be read is named and skipped, and makes the
    exit code 1.
    """
    from attngen import exchange
    from attngen.store import Store

    batches = []
    for source in sources:  # all are read before anything is written
        with source.open("rb") as file:
            if file.read(1) == b"{":
                raise click.BadParameter(
                    f"{source} holds lines of JSON; `attngen import` reads those",
                    param_hint="'DB...'",
                )
        with reading(source) as store:
            batches.append((source, exchange.contents(store)))
    with Store.open(into) as store:
        done = [(source, exchange.merge(store, held)) for source, held in batches]
    fine = [
        _said(f"{source}{what}", report)
        for source, reports in done
        for what, report in zip((", winners", ", trials"), reports, strict=True)
    ]
    if not all(fine):
        ctx.exit(FAILED)


def _said(name: str, report: ImportReport) -> bool:
    """Say what an import did; True if nothing was rejected."""
    for number, reason in report.rejected:
        what = f"{name}: {reason}; the line" if number else f"{reason}; it"
        say(f"attngen: {what} is skipped")
    click.echo(f"{name}: {report}")
    return not report.rejected
