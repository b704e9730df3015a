"""What the configs of every lowering have in common: a direction, a key and a plain form.

Imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
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
        named: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # a dataclass
        return {name: value for name, value in named.items() if name not in self.unused}

    def __post_init__(self) -> None:
        """Unused fields have their default, so that configs that run the same are equal."""
        for field in fields(self):  # type: ignore[arg-type]  # a dataclass
            if field.name in self.unused:
                assert field.default is not MISSING
                object.__setattr__(self, field.name, field.default)


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
