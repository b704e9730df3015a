"""v as the first columns of k, in the same memory: kernels of `shared_kv` load them once.

A view is told by its address, which tensors have when an op runs, not when it is traced: a compiler
may have made a copy of either. A call whose v lies elsewhere has the same result by other kernels.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from attngen.decode import forward_direction
from attngen.errors import UnsupportedSpecError
from attngen.identity import parsed


def key_of(text_key: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The text key that serves a call: with shared_kv if and only if v is k's first columns."""
    if v.shape[-1] >= k.shape[-1]:
        return text_key
    is_view = v.data_ptr() == k.data_ptr() and v.stride() == k.stride()
    return _key(text_key, q.shape[-2], is_view)


@functools.lru_cache(maxsize=4096)
def _key(text_key: str, seqlen_q: int, is_view: bool) -> str:
    spec = parsed(text_key)
    if is_view == spec.shared_kv or (is_view and forward_direction(spec, seqlen_q) != "decode"):
        return text_key
    try:
        return replace(spec, shared_kv=is_view).text_key
    except UnsupportedSpecError:
        return text_key
