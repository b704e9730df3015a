"""What the configs of every lowering have in common: a direction, a key and a plain form.

Imports neither torch nor triton.
"""

from __future__ import annotations

import functools
from dataclasses import MISSING, fields
from typing import Any, ClassVar

from attngen.workload import Direction


class NamedFields:
    """Base of the config dataclasses."""

    direction: ClassVar[Direction]

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields that mean nothing, because of what another field says."""
        return ()

    @property
    def sums_dq(self) -> bool:
        """plan() takes `dq_sum`, scratch in which dq is added up in float32."""
        return False

    @property
    def key(self) -> str:
        """Readable and canonical: `lowering=triton,tiles=pointer,block_m=128,...`."""
        return ",".join(f"{name}={_written(value)}" for name, value in self.as_dict().items())

    def as_dict(self) -> dict[str, Any]:
        """The named fields, without the unused ones."""
        unused = self.unused
        names = _defaults(type(self))  # type: ignore[arg-type]  # a class is hashable
        return {name: getattr(self, name) for name in names if name not in unused}

    def __post_init__(self) -> None:
        """Unused fields have their default, so that configs that run the same are equal."""
        for name in self.unused:
            default = _defaults(type(self))[name]  # type: ignore[arg-type]  # a class is hashable
            assert default is not MISSING
            object.__setattr__(self, name, default)


@functools.cache
def _defaults(kind: type[Any]) -> dict[str, Any]:
    """The fields of a config class, all of them plain values, and their defaults."""
    return {field.name: field.default for field in fields(kind)}


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
