"""attngen.distributed as `tests/cases/cp_acceptance.py` calls it:

python tests/cases/cp_acceptance.py --world 4 --dtype float32 --impl cp_adapter:attention

On CUDA kernels compute; on a CPU plain PyTorch does, unless ATTNGEN_HOP=kernel.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from attngen import distributed


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    method: str,
    layout: str,
    causal: bool,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    hop = os.environ.get("ATTNGEN_HOP", "kernel" if q.is_cuda else "torch")
    sides = None if window is None else (window - 1, 0 if causal else None)
    out: Tensor = distributed.attention(
        q,
        k,
        v,
        group=group,
        method=method,
        layout=layout,
        hop=hop,
        causal=causal,
        softmax_scale=scale,
        window=sides,
        sinks=sinks,
    )
    return out
