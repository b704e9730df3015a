"""`attngen report --html`: a tuning database as one page that needs nothing beside itself.

The page has no script and loads nothing. Every number on it is a stored one, or a rate or ratio of
stored ones, and says which record, trial or bench line it is from.
"""

from __future__ import annotations

from pathlib import Path

import jinja2

from attngen import __version__
from attngen.errors import StoreError
from attngen.gpu import GpuInfo
from attngen.records import now
from attngen.report.bench_lines import read
from attngen.report.gather import bench_name, gather
from attngen.report.search_plots import require_matplotlib
from attngen.store import Store


def html(store: Store, *, gpu: GpuInfo | None = None, bench: tuple[Path, ...] = ()) -> str:
    """The page of a database, with peers' times from the output of `attngen bench --json`.

    Raises:
        AttngenError: there is nothing to show, a bench file is none, or matplotlib is missing.
    """
    require_matplotlib()
    contents = gather(store, gpu, read(bench))
    if not (contents.runs or contents.winners or contents.bench):
        where = f" for {gpu.name}" if gpu else ""
        raise StoreError(
            f"{store.path} holds no trial and no winner{where}; `attngen tune` makes them"
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["digits"] = _digits
    page = environment.get_template("page.html.jinja")
    return page.render(
        contents=contents, bench_name=bench_name, version=__version__, made=now(), gpu=gpu
    )


def _digits(value: float | None, form: str = ".1f") -> str:
    """A number as text; a missing one is a dash, never a zero."""
    return "—" if value is None else format(value, form)
