"""Causal order over one query row: it stands at the last key, and sees all of them anyway.

Such a decode has the kernels, and the records, of the spec without `causal`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from attngen.decode import family, forward_direction
from attngen.spec import AttentionSpec
from attngen.workload import Bucket, Direction, Workload, spec_bucket

if TYPE_CHECKING:
    from torch import Tensor

_WHOLE = {
    "bottom_right": 1,
    "q_start": 0,
    "k_start": 0,
    "k_step": 1,
    "seqlen_q_total": -1,
    "seqlen_k_total": -1,
}
"""The integers of a call of whole sequences, whose last row sees all keys."""


def unordered(spec: AttentionSpec, seqlen_q: int) -> AttentionSpec:
    """The spec whose kernels serve a forward of so many rows of whole sequences."""
    return spec if spec.causal == "top_left" else _unordered(spec, seqlen_q)


def kept_at(
    direction: Direction, spec: AttentionSpec, workload: Workload
) -> tuple[AttentionSpec, Bucket]:
    """The spec and the bucket under which what serves a call of whole sequences is recorded."""
    served = unordered(spec, workload.seqlen_q) if direction == "fwd" else spec
    return served, spec_bucket(family(direction, served, workload.seqlen_q), served, workload)


def _unordered(spec: AttentionSpec, seqlen_q: int) -> AttentionSpec:
    if seqlen_q != 1 or not spec.is_causal or spec.moves_limits or spec.packs_queries:
        return spec
    bare = replace(spec, causal=False)
    if bare.has_positions or forward_direction(spec, seqlen_q) != "decode":
        return spec
    return bare


def unordered_call(text_key: str, q: Tensor, ints: Sequence[int]) -> tuple[str, Sequence[int]]:
    """The text key and the integers of the op that serve a forward."""
    if q.shape[2] != 1 or "causal" not in text_key:
        return text_key, ints
    return _unordered_call(text_key, tuple(ints))


@functools.lru_cache(maxsize=4096)
def _unordered_call(text_key: str, ints: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    spec = AttentionSpec.parse(text_key)
    bare = _unordered(spec, 1)
    named = dict(zip(spec.int_args, ints, strict=True))
    if bare is spec or any(named[name] != value for name, value in _WHOLE.items()):
        return text_key, ints
    return bare.text_key, tuple(named[name] for name in bare.int_args)
