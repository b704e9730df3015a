"""Attention over a sequence that is spread over ranks: rings, Ulysses, both, or all-gather.

`attention` works on this rank's shards; `shard`, `unshard`, `positions` and `shift_labels` are what
a model needs around it. `ContextParallel` makes a compiled spec do the same.
"""

from __future__ import annotations

from attngen.distributed.attention import ParallelAttention, attention
from attngen.distributed.layouts import positions, shard, shift_labels, unshard
from attngen.distributed.plan import ContextParallel

__all__ = [
    "ContextParallel",
    "ParallelAttention",
    "attention",
    "positions",
    "shard",
    "shift_labels",
    "unshard",
]
