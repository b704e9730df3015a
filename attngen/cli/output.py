"""Printing: aligned columns, lines of JSON, files written whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns, never wrapped or cut, so that other tools can read them."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def print_json(value: Any) -> None:
    """One object on one line of stdout."""
    click.echo(json.dumps(value, sort_keys=True))


def write_whole(target: Path, text: str) -> None:
    """Write a file so that a reader, or a full disk, leaves the old one or the new one.

    A link is followed; a device or a pipe is written to, not replaced.
    """
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(target)), text)
    except OSError as error:
        raise click.ClickException(
            f"cannot write {target} ({error.strerror}); name a file in a folder that exists and "
            "that you may write to"
        ) from error


def _replace(target: Path, text: str) -> None:
    handle, part = tempfile.mkstemp(dir=target.parent, prefix=".attngen-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
