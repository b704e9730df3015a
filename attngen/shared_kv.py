"""v as the first columns of k, in the same memory: kernels of `shared_kv` load them once.

A view is told by its address, which tensors have when an op runs, not when it is traced.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from attngen.decode import forward_direction
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.identity import parsed


def key_of(text_key: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The text key that serves a call: with shared_kv where v is k's first columns.

    Raises:
        SpecError: the spec says shared_kv, and v is something else.
    """
    if v.shape[-1] >= k.shape[-1]:
        return text_key
    if v.data_ptr() == k.data_ptr() and v.stride() == k.stride():
        return _with_shared(text_key, q.shape[-2])
    if parsed(text_key).shared_kv:
        raise SpecError(
            "the spec says shared_kv=True, but v is not k's first columns in the same memory; pass "
            "v=k[..., :head_dim_v], or compile a spec without shared_kv"
        )
    return text_key


@functools.lru_cache(maxsize=4096)
def _with_shared(text_key: str, seqlen_q: int) -> str:
    spec = parsed(text_key)
    if spec.shared_kv or forward_direction(spec, seqlen_q) != "decode":
        return text_key
    try:
        return replace(spec, shared_kv=True).text_key
    except UnsupportedSpecError:
        return text_key
