"""Where shipped data, caches and the database live. The only module that knows paths."""

from __future__ import annotations

import os
from pathlib import Path


def data_dir(name: str) -> Path:
    """Folder of shipped data: inside the package in a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for path in (here / name, here.parent / name):
        if path.is_dir():
            return path
    raise FileNotFoundError(
        f"attngen data folder {name!r} is missing in {here} and {here.parent}; reinstall attngen"
    )


def tuned_dirs() -> list[Path]:
    """Folders of `<gpu>.jsonl` records: those of `ATTNGEN_TUNED_DIR`, then the shipped ones."""
    named = os.environ.get("ATTNGEN_TUNED_DIR", "").split(os.pathsep)
    return [*(Path(os.path.expanduser(name)) for name in named if name), data_dir("tuning_db")]


def cache_dir() -> Path:
    """Folder of emitted kernels and the user's database (not created here).

    `ATTNGEN_CACHE_DIR` overrides the platform's cache folder.
    """
    override = os.environ.get("ATTNGEN_CACHE_DIR")
    if override:
        return Path(os.path.expanduser(override))
    import platformdirs

    return Path(platformdirs.user_cache_dir("attngen"))


def database_path() -> Path:
    """The user's tuning database. `ATTNGEN_DB` overrides `cache_dir()/tuning.db`."""
    override = os.environ.get("ATTNGEN_DB")
    return Path(os.path.expanduser(override)) if override else cache_dir() / "tuning.db"


def kernel_dir() -> Path:
    """Where emitted kernel files are written."""
    return cache_dir() / "kernels"
