"""append_and_attend(): a step of generation, new keys into a cache and attention over it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attngen.append import append_kv
from attngen.errors import SpecError
from attngen.functional import attention
from attngen.spec import KV_DESCALES


def append_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
    causal: bool | str = True,
    **options: Any,
) -> Any:
    """`append_kv`, then `attention` of q over the cache. Nothing is looked at on the host: a CUDA
    graph may be replayed with other positions, lengths and tables.

    Args:
        q: (batch, num_heads_q, seqlen, head_dim), or of layout "bshd" (batch, seqlen, num_heads_q,
            head_dim); of layout "thd" (total, num_heads_q, head_dim), with cu_seqlens_q, slots,
            block_table and seqused_k. Rotated as k is, where there is rotary.
        k, v: the new keys and values, as many as q has rows.
        k_cache, v_cache, slots, block_table, cos, sin, interleaved: as `append_kv` takes them; of
            layout "thd" slots are (total,).
        positions: as `append_kv` takes them; of layout "thd" (total,), for rotary alone.
        seqused_k: int32 (batch,): the keys that each batch row sees, the new ones among them.
            Default: positions (batch,) + seqlen.
        cu_seqlens_q: of layout "thd", as `attention` takes it.
        causal: row i of q sees the new keys up to its own.
        options: others of `attention`: softmax_scale, window, sinks, return_lse, out and so on; the
            descales of a quantised cache, for both.

    Returns:
        What `attention` returns.

    Raises:
        SpecError: shapes, dtypes or devices do not fit, or something is missing.
        UnsupportedSpecError: a tensor that requires grad.
    """
    if layout == "thd":
        needs = {"cu_seqlens_q": cu_seqlens_q, "slots": slots, "seqused_k": seqused_k}
        needs["block_table"] = block_table
        missing = [name for name, x in needs.items() if x is None]
        if missing:
            raise SpecError(f'layout="thd" needs {", ".join(missing)}, too')
        options["cu_seqlens_q"] = cu_seqlens_q
    elif cu_seqlens_q is not None:
        raise SpecError(
            f'cu_seqlens_q with layout="{layout}": packed queries have the layout "thd"; pass '
            'layout="thd", or leave cu_seqlens_q out'
        )
    elif slots is not None and block_table is None:
        raise SpecError(
            "slots without block_table: they name places in a paged cache, whose pages attention "
            "finds by block_table; pass it, too"
        )
    elif seqused_k is None:
        if not isinstance(positions, Tensor) or positions.dim() != 1:
            raise SpecError(
                "seqused_k is missing: pass it, int32 (batch,), or positions of shape (batch,), "
                "where the first new token of each batch row stands"
            )
        seqused_k = (positions + q.shape[1 if layout == "bshd" else 2]).int()
    turned: dict[str, Any] = {}
    if cos is not None or sin is not None:
        turned = {"q": q, "cos": cos, "sin": sin, "interleaved": interleaved}
    places: dict[str, Any] = {"positions": positions, "slots": slots}
    if layout == "thd":  # one row of a batch
        k, v = k.unsqueeze(0), v.unsqueeze(0)
        places = {name: x if x is None else x.unsqueeze(0) for name, x in places.items()}
        turned |= {"q": q.unsqueeze(0)} if turned else {}
    table = None if layout == "thd" else block_table
    rows = "bshd" if layout == "thd" else layout
    turned |= {name: options[name] for name in KV_DESCALES if name in options}
    found = append_kv(k, v, k_cache, v_cache, **places, block_table=table, layout=rows, **turned)
    if found is not None:
        q = found.squeeze(0) if layout == "thd" else found
    options |= {} if block_table is None else {"block_table": block_table}
    options |= {"seqused_k": seqused_k, "causal": causal, "layout": layout}
    return attention(q, k_cache, v_cache, **options)
