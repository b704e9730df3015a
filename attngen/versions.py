"""Which releases are installed, as "major.minor". Imports neither torch nor triton."""

from __future__ import annotations

import functools
import importlib.metadata


def minor_of(version: str) -> str:
    """`3.6.0` -> `3.6`."""
    return ".".join(version.split(".")[:2])


@functools.cache
def triton_minor() -> str:
    """Version of the installed Triton as "major.minor", without importing it."""
    return minor_of(importlib.metadata.version("triton"))
