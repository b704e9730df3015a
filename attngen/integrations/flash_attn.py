"""The functions of the flash-attn package, by attngen's kernels.

    from attngen.integrations.flash_attn import flash_attn_func   # was: from flash_attn import ...

Arguments, defaults, layouts and results are those of flash-attn 2.8; what attngen has no kernel for
is an error that says so. Beyond them, float32 and head dims that are no multiples of 8 are served,
pages may have any multiple of 16 keys, and lse and alibi_slopes have gradients. Where a query sees
no key, out is 0 and lse -inf. Dropout draws other bits from the same seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.api import attention
from attngen.append import append_kv
from attngen.checks import check_kinds
from attngen.errors import DtypeError, SpecError, UnsupportedSpecError
from attngen.values import shown, whole

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, num_heads_q, head_dim), k and v (batch, seqlen_k,
    num_heads_kv, head_dim).

    Args:
        causal: bottom-right aligned, as windows and ALiBi are.
        window_size: (left, right), inclusive; -1 is an open side.
        softcap: 0.0 is none.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q).
        deterministic: True: same gradients, same bits. False follows
            `torch.are_deterministic_algorithms_enabled()`.
        return_attn_probs: also return lse (batch, num_heads_q, seqlen_q), and an empty tensor
            where flash-attn has the weights of a dropout; without dropout alone.

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim), or (out, lse, empty).
    """
    named = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    named |= {"deterministic": deterministic or None, "layout": "bshd"}
    _check_probs(return_attn_probs, dropout_p)
    if not return_attn_probs:
        return attention(q, k, v, **named)
    out, lse = attention(q, k, v, return_lse=True, **named)
    return out, lse, out.new_empty(0)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of kv (batch, seqlen_k, 2, num_heads_kv, head_dim)."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`flash_attn_func` of packed sequences: q (total_q, num_heads_q, head_dim), and so on.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (num_seqs + 1).
        max_seqlen_q, max_seqlen_k: not read.
        block_table: int32 (num_seqs, max_pages), for k and v of (pages, page_size, num_heads_kv,
            head_dim), without dropout and gradients.

    Returns:
        out (total_q, num_heads_q, head_dim), or (out, lse (num_heads_q, total_q), empty).
    """
    named = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    named["deterministic"] = deterministic or None
    _check_probs(return_attn_probs, dropout_p)
    if block_table is None:
        named["cu_seqlens_k"] = cu_seqlens_k
    else:
        if dropout_p:
            why = "dropout_p with block_table is not built yet; gather the pages into dense k and v"
            raise UnsupportedSpecError([why])
        check_kinds({"cu_seqlens_k": cu_seqlens_k})
        named |= {"seqused_k": cu_seqlens_k.diff().to(torch.int32), "block_table": block_table}
    out, lse = attention(q, k, v, cu_seqlens_q=cu_seqlens_q, return_lse=True, layout="thd", **named)
    return (out, lse.transpose(0, 1), out.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv (total, 3, num_heads, head_dim)."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of kv (total_k, 2, num_heads_kv, head_dim)."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, num_heads_q, head_dim) over a cache, in which k and v are
    first written in place. Without gradients; nothing is looked at on the host.

    Args:
        k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim), or with block_table
            (pages, page_size, num_heads_kv, head_dim), page_size a multiple of 16.
        k, v: (batch, seqlen_new, num_heads_kv, head_dim), written from cache_seqlens on.
        rotary_cos, rotary_sin: (max_positions, rotary_dim / 2), applied to k and q by their
            positions in the cache, if there is a k; without causal or window_size, all rows of q
            stand at cache_seqlens.
        cache_seqlens: int32 (batch,), or an int: how many keys the cache holds before k; all of it
            if None.
        cache_batch_idx: int32 (batch,), the row of the cache of each row of q, all different where
            there is a k; seqlen_cache must be a multiple of 16.
        cache_leftpad: int32 (batch,), where each row's keys begin. Not with block_table,
            cache_batch_idx or rotary_cos.
        num_splits: how the keys are cut is attngen's config, which this does not change, but 1 asks
            for bits that do not depend on the rest of the batch.

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim), or (out, lse (batch, num_heads_q, seqlen_q)).
    """
    check_kinds({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    _check_cache(k, v, rotary_cos, rotary_sin, cache_seqlens)
    if cache_leftpad is not None:
        _check_leftpad(block_table, cache_batch_idx, rotary_cos)
    if cache_batch_idx is not None:
        if block_table is not None:
            raise SpecError("cache_batch_idx with block_table: the table names the pages of a row")
        check_kinds({"cache_batch_idx": cache_batch_idx})
        if k_cache.shape[1] % 16:
            raise UnsupportedSpecError(
                [
                    f"cache_batch_idx with seqlen_cache={k_cache.shape[1]}, no multiple of 16, is "
                    "not built yet; make the cache longer, or pass k_cache[cache_batch_idx]"
                ]
            )
        block_table = cache_batch_idx.to(torch.int32).unsqueeze(1)  # each row of the cache a page
    named = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    batch = q.shape[0]
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if rotary_cos is not None and rotary_cos.shape[0] < room:
        raise SpecError(
            f"rotary_cos must have a row for each key that the cache has room for, {room}, got "
            f"{rotary_cos.shape[0]}; compute it for as many positions"
        )
    used = _lengths(cache_seqlens, batch, room - (0 if k is None else k.shape[1]), q.device)
    with torch.no_grad():
        if k is not None and v is not None:
            assert used is not None  # _check_cache
            q = _append(
                q,
                k,
                v,
                k_cache,
                v_cache,
                used,
                block_table,
                rotary_cos,
                rotary_sin,
                rotary_interleaved,
                named["causal"] or named["window"] != (None, None),
            )
            used = used + k.shape[1]
        if used is None and block_table is not None:
            used = torch.full((batch,), room, dtype=torch.int32, device=q.device)
        if cache_leftpad is not None:
            number = torch.arange(k_cache.shape[1], device=q.device)
            named["attn_mask"] = (number >= cache_leftpad[:, None])[:, None, None, :]
        out, lse = attention(
            q,
            k_cache,
            v_cache,
            seqused_k=used,
            block_table=block_table,
            batch_invariant=num_splits == 1,
            layout="bshd",
            return_lse=True,
            **named,
        )
    return (out, lse) if return_softmax_lse else out


# ---- parts ------------------------------------------------------------------------------------


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """Options in the words of `attngen.attention`."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise SpecError(f"window_size must be (left, right), got {shown(window_size)}")
    left, right = (_window_side(n) for n in window_size)
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": bool(causal),
        "window": (left, None if causal else right),
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
    }


def _window_side(side: Any) -> Any:
    """None for an open side, which flash-attn writes as -1."""
    try:
        return None if side is None or side < 0 else side
    except TypeError:
        return side  # refused as a window's side is


def _check_probs(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p:
        raise UnsupportedSpecError(
            [
                "return_attn_probs with dropout_p is not built: no kernel writes a weight for each "
                "pair; attngen.dropout_keep says which are kept, and attngen.attention with "
                "return_lse=True returns lse"
            ]
        )


def _unpacked(name: str, x: Any, count: int, dims: int) -> tuple[Tensor, ...]:
    """The views of which a tensor is stacked."""
    if not isinstance(x, Tensor) or x.dim() != dims or x.shape[-3] != count:
        lead = "batch, seqlen" if dims == 5 else "total"
        got = tuple(x.shape) if isinstance(x, Tensor) else shown(x)
        raise SpecError(f"{name} must be ({lead}, {count}, num_heads, head_dim), got {got}")
    return x.unbind(-3)


def _lengths(cache_seqlens: Any, batch: int, most: int, device: torch.device) -> Tensor | None:
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.dtype not in (torch.int32, torch.int64):
            raise DtypeError(
                f"cache_seqlens must be int32 or int64, got {cache_seqlens.dtype}; cast it with "
                "cache_seqlens.int()"
            )
        return cache_seqlens.to(torch.int32)
    step = "int32 tensors may differ by row"
    number = whole("cache_seqlens", cache_seqlens, 0, most, step)
    return torch.full((batch,), number, dtype=torch.int32, device=device)


def _check_cache(k: Any, v: Any, cos: Any, sin: Any, cache_seqlens: Any) -> None:
    """Which arguments belong together."""
    if (k is None) != (v is None):
        raise SpecError("k and v are written together; pass both, or neither")
    if k is not None and cache_seqlens is None:
        raise SpecError("k without cache_seqlens: pass where in the cache the new keys begin")
    if (cos is None) != (sin is None):
        raise SpecError("rotary_cos and rotary_sin belong together; pass both, or neither")
    if cos is not None and k is None:
        raise SpecError("rotary_cos without k: rotate q yourself, or pass the new keys")


def _check_leftpad(block_table: Any, cache_batch_idx: Any, rotary_cos: Any) -> None:
    named = {"block_table": block_table, "cache_batch_idx": cache_batch_idx}
    named["rotary_cos"] = rotary_cos
    step = "move the keys of each row to its start, and leave cache_leftpad out"
    why = [
        f"cache_leftpad with {name} is not built yet; {step}"
        for name, x in named.items()
        if x is not None
    ]
    if why:
        raise UnsupportedSpecError(why)


def _append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    used: Tensor,
    block_table: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    moves: bool,
) -> Tensor:
    """Write k and v, and return q, rotated if asked; `moves` if its rows have positions."""
    is_alike = q.shape[1] == k.shape[1] and (moves or q.shape[1] == 1)
    rotated = append_kv(
        k,
        v,
        k_cache,
        v_cache,
        positions=used,
        block_table=block_table,
        q=q if cos is not None and is_alike else None,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        layout="bshd",
    )
    if cos is None or sin is None:
        return q
    if rotated is not None:
        return rotated
    # Rows of q end where the new keys end.
    place = used[:, None].long()
    if moves:
        place = place + torch.arange(q.shape[1], device=q.device)
    place = place.clamp(max=cos.shape[0] - 1)
    return _rotate(q, cos[place], sin[place], interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (batch, rows, heads, dim) with its first 2 * angles columns rotated by cos and sin (batch,
    1 or rows, angles)."""
    angles = cos.shape[-1]
    turned, rest = x[..., : 2 * angles].float(), x[..., 2 * angles :]
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :angles], turned[..., angles:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
