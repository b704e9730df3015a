"""What can go wrong, as one tree.

AttngenError
├── SpecError (ValueError)         a spec, a shape, a device or an argument is wrong
│   ├── UnsupportedSpecError       legal, but not built (yet): lists every reason
│   └── DtypeError (TypeError)     tensors of different or unexpected dtypes
├── KernelCompileError             an emitted file does not compile: names file and line
├── NoFeasibleConfigError          no tile fits the GPU: lists what was tried
├── StoreError                     the tuning database cannot be read or written
│   └── DamagedStoreError          its file is none, or no longer one
├── RankError                      another rank of a distributed call failed, or answers no more
└── TuningError                    a tuning run cannot start or produced no winner

Every message says what was wrong, the value, what is allowed and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AttngenError(Exception):
    """Base of everything attngen raises on purpose."""


class SpecError(AttngenError, ValueError):
    """A spec, shape, device or argument is wrong."""


class UnsupportedSpecError(SpecError):
    """The spec is legal but cannot be built; `reasons` lists every cause."""

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self.args[0])

    def __str__(self) -> str:
        return "unsupported spec: " + "; ".join(self.reasons)


class DtypeError(SpecError, TypeError):
    """Tensors have different dtypes, or one that the spec does not name."""


class KernelCompileError(AttngenError):
    """An emitted file does not compile."""


class NoFeasibleConfigError(AttngenError):
    """No configuration fits the GPU."""


class StoreError(AttngenError):
    """The tuning database cannot be read or written."""


class DamagedStoreError(StoreError):
    """A file is no SQLite database, or a damaged one."""


class RankError(AttngenError):
    """Another rank of a distributed call failed, or answers no more."""


class TuningError(AttngenError):
    """A tuning run cannot start, or ended without a winner."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'X'?)"`, to follow the wrong name; empty if nothing comes close."""
    names = list(known)
    close = [other for other in names if other.lower() == name.lower()]
    close += [other for other in names if len(name) > 2 and name in other]
    close += difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
