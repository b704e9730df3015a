"""torch's flash attention by attngen kernels: SDPA's flash path, varlen_attn and their users.

`activate()` puts attngen behind the operators that torch's flash backend consists of, through
`torch.nn.attention.register_flash_attention_impl`. All that ends in these operators follows,
eager and compiled: `F.scaled_dot_product_attention` where it picks the flash backend, however it
was imported, `nn.MultiheadAttention`, jagged nested tensors, `torch.nn.attention.varlen`, and
torch's own context parallelism. Results have the dtypes, shapes and strides of torch's own.

On a machine without a GPU the operators of CPU tensors are replaced, too, and run in Triton's
interpreter.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from attngen import calls, interpreter
from attngen.errors import UnsupportedSpecError
from attngen.spec import AttentionSpec

NAME = "ATTNGEN"
"""What torch.nn.attention knows it by."""


def register() -> str:
    """Make it known to `torch.nn.attention.activate_flash_attention_impl`, by the name returned.
    Activates nothing."""
    torch_attention.register_flash_attention_impl(NAME, register_fn=_Handle)
    return NAME


def activate() -> None:
    """Put attngen behind torch's flash attention, in place of what is there."""
    torch_attention.activate_flash_attention_impl(register())


def restore() -> None:
    """Torch's own flash attention again."""
    if torch_attention.current_flash_attention_impl() == NAME:
        torch_attention.restore_flash_attention_impl()


class _Handle:
    """Replaced operators, until `remove`."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        keys = ["CUDA"] if torch.cuda.is_available() else []
        keys += ["CPU"] if interpreter.enabled() else []
        for key in keys:
            table = _OPERATORS | (_OF_CPU if key == "CPU" else {})
            for name, function in table.items():
                self._library.impl(name, function, key)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


class _Arguments(NamedTuple):
    """What the attngen ops take beside tensors."""

    text_key: str
    extra: list[Tensor | None]
    scalars: list[float]
    ints: list[int]


def _arguments(
    q: Tensor,
    v: Tensor,
    *,
    causal: bool | str,
    scale: float,
    window: tuple[int | None, int | None] = (None, None),
    dropout_p: float = 0.0,
    batch_invariant: bool = False,
    **tensors: Tensor | None,
) -> _Arguments:
    """Of tensors (batch, heads, seqlen, dim); `tensors` go into the op's `extra`."""
    left, right = (None if side is None or side < 0 else side for side in window)
    if causal:
        right = None
    spec = _spec(
        q.shape[3],
        v.shape[3],
        q.dtype,
        causal,
        left is not None,
        right is not None,
        dropout_p > 0,
        tuple(name for name, x in tensors.items() if x is not None),
        torch.are_deterministic_algorithms_enabled(),
        batch_invariant,
    )
    numbers = {
        "softmax_scale": scale,
        "dropout_p": dropout_p,
        "window_left": left,
        "window_right": right,
        "q_step": 1,
        "k_step": 1,
        "bottom_right": int(causal != "top_left"),
        "seqlen_q_total": -1,
        "seqlen_k_total": -1,
    }
    return _Arguments(
        spec.text_key,
        [tensors.get(name) for name in spec.tensor_args],
        [float(numbers.get(name) or 0) for name in spec.scalar_args],
        [int(numbers.get(name) or 0) for name in spec.int_args],
    )


@functools.lru_cache(maxsize=1024)
def _spec(
    head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    causal: bool | str,
    left: bool,
    right: bool,
    dropout: bool,
    tensors: tuple[str, ...],
    deterministic: bool,
    batch_invariant: bool,
) -> AttentionSpec:
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnsupportedSpecError(
            [
                f"{dtype}: attngen computes float16, bfloat16 and float32; cast the tensors, or "
                "call attngen.integrations.torch_backend.restore()"
            ]
        )
    fields: dict[str, Any] = {"bias": "bias" in tensors, "paged": "block_table" in tensors}
    if "cu_seqlens_q" in tensors:
        fields["layout"] = "thd"
    elif "seqused_k" in tensors:
        fields["key_lengths"] = not fields["paged"]
    return AttentionSpec(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=str(dtype).removeprefix("torch."),
        causal=causal,
        window=(0 if left else None, 0 if right else None),
        dropout_p=0.5 if dropout else 0.0,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        **fields,
    )


def _refuse(**given: Any) -> None:
    """Refuse arguments that are set."""
    reasons = [
        f"{name} in torch's flash attention by attngen; leave it out, or call attngen.attention"
        for name, value in given.items()
        if value is not None and value is not False
    ]
    if reasons:
        raise UnsupportedSpecError(reasons)


def _scaled(q: Tensor, scale: float | None) -> tuple[Tensor, float, float]:
    """q and a positive scale for kernels, and what a gradient of that q is multiplied by."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale > 0:
        return q, scale, 1.0
    return (-q, -scale, -1.0) if scale < 0 else (q * 0, 1.0, 0.0)


def _as_in(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory order in which `torch.empty_like(like)` would be."""
    batch, heads, rows, columns = like.stride()
    if (batch >= rows >= heads and columns == 1) or x.shape != like.shape:
        return x  # as attngen stores results
    made = torch.empty_like(like)
    pairs = zip(x.shape, x.stride(), made.stride(), strict=True)
    return x if all(a == b for size, a, b in pairs if size != 1) else made.copy_(x)


def _alone(*tensors: Tensor) -> bool:
    """Is each head a batch row of its own in memory, for all of these? Results stored (batch,
    seqlen, heads, dim) then have torch's order without a copy."""
    heads = tensors[0].shape[1]
    return heads > 1 and all(x.shape[1] == heads and x.is_contiguous() for x in tensors)


def _fold(*tensors: Tensor) -> list[Tensor]:
    return [x.flatten(0, 1).unsqueeze(1) for x in tensors]


def _unfold(like: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [x.squeeze(1).unflatten(0, like.shape[:2]) for x in tensors]


def _random_state(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """What torch keeps for the backward, two numbers, and the seed in it if there is dropout."""
    offset = q.new_empty((), dtype=torch.uint64)
    if dropout_p == 0:
        return q.new_empty(2, dtype=torch.uint64), offset, None
    state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    return state.view(torch.uint64), offset, state[:1]


def _seed(state: Tensor, dropout_p: float) -> Tensor | None:
    return state.view(torch.int64)[:1] if dropout_p > 0 else None


# ---- (batch, heads, seqlen, dim) --------------------------------------------------------------


def _dense_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    dropout_p: float = 0.0,
    **beside: Any,
) -> tuple[Tensor, Tensor]:
    q, positive, _ = _scaled(q, scale)
    how: dict[str, Any] = {"causal": causal, "scale": positive, "dropout_p": dropout_p, **beside}
    if dropout_p == 0 and beside.get("bias") is None and _alone(q, k, v):
        rows = _fold(q, k, v)
        folded = calls.forward(*_with(rows, _arguments(rows[0], rows[2], **how)))
        return _unfold(q, folded[0])[0], folded[1].view(q.shape[:3])
    out, lse = calls.forward(*_with([q, k, v], _arguments(q, v, **how)))
    return _as_in(out, q), lse


def _dense_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool | str,
    scale: float | None,
    dropout_p: float = 0.0,
    **beside: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    own, positive, factor = _scaled(q, scale)
    how: dict[str, Any] = {"causal": causal, "scale": positive, "dropout_p": dropout_p, **beside}
    inputs = [own, k, v, out, lse, dout]
    alone = dropout_p == 0 and beside.get("bias") is None and _alone(own, k, v)
    if alone:
        *rows, lse, dout = _fold(own, k, v, out.contiguous(), lse[..., None], dout.contiguous())
        inputs = [*rows, lse.squeeze(3), dout]
    arguments = _arguments(inputs[0], inputs[2], **how)
    grads: Any = calls.backward(arguments.text_key, *inputs, None, *arguments[1:])  # type: ignore[arg-type,call-arg]  # seven tensors
    if alone:
        grads = _unfold(q, *grads)
    dq, dk, dv = grads
    dq = dq if factor == 1.0 else dq * factor
    return dq, dk, dv


def _with(inputs: list[Tensor], arguments: _Arguments) -> Any:
    return (arguments.text_key, *inputs, *arguments[1:])


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse(return_debug_mask=return_debug_mask)
    state, offset, seed = _random_state(query, dropout_p)
    out, lse = _dense_forward(query, key, value, is_causal, scale, dropout_p, dropout_seed=seed)
    lengths = (query.shape[2], key.shape[2])
    return out, lse, None, None, *lengths, state, offset, query.new_empty(0)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    grads = _dense_backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        is_causal,
        scale,
        dropout_p,
        dropout_seed=_seed(philox_seed, dropout_p),
    )
    return tuple(_as_in(g, x) for g, x in zip(grads, (query, key, value), strict=True))


# ---- SDPA's operators of CPU tensors: top-left causal, with masks -----------------------------


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    causal = "top_left" if is_causal else False
    bias = _four_dims(attn_mask)
    out, lse = _dense_forward(query, key, value, causal, scale, bias=bias)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    causal = "top_left" if is_causal else False
    bias = _four_dims(attn_mask)
    grads = _dense_backward(grad_out, query, key, value, out, logsumexp, causal, scale, bias=bias)
    return tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)


def _four_dims(mask: Tensor | None) -> Tensor | None:
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask


# ---- flash attention's own operators: (batch, seqlen, heads, dim) or (total, heads, dim) ------


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """num_splits=1 asks for bits that do not depend on the batch; else attngen chooses it."""
    _refuse(return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes)
    state, offset, seed = _random_state(query, dropout_p)
    q, positive, _ = _scaled(query, scale)
    how: dict[str, Any] = {
        "causal": is_causal,
        "scale": positive,
        "window": (window_size_left, window_size_right),
        "dropout_p": dropout_p,
        "dropout_seed": seed,
        "batch_invariant": num_splits == 1,
    }
    if cum_seq_q is None or cum_seq_k is None:
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        lengths: dict[str, Any] = {"seqused_k": seqused_k, "block_table": block_table}
        if (
            cum_seq_q is not None
            and block_table is not None
            and not _are_equal(q, cum_seq_q, max_q)
        ):
            (q,) = _heads_first(q)
            lengths["cu_seqlens_q"] = cum_seq_q
            out, lse = calls.forward(*_with([q, k, v], _arguments(q, v, **how, **lengths)))
            out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
            return out, lse, state, offset, query.new_empty(0)
        q = q.transpose(1, 2) if cum_seq_q is None else _equal_lengths(q, cum_seq_q, max_q)
        out, lse = calls.forward(*_with([q, k, v], _arguments(q, v, **how, **lengths)))
        out = out.transpose(1, 2)
        if cum_seq_q is not None:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    else:
        _refuse(block_table=block_table)
        rows = _heads_first(q, key, value)
        packed: dict[str, Any] = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
        packed["seqused_k"] = seqused_k
        out, lse = calls.forward(*_with(rows, _arguments(rows[0], rows[2], **how, **packed)))
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return out, lse, state, offset, query.new_empty(0)


def _are_equal(q: Tensor, cum_seq_q: Tensor, max_q: int) -> bool:
    """Has each sequence max_q packed queries? Their sum says so."""
    return q.shape[0] == (cum_seq_q.shape[0] - 1) * max_q


def _equal_lengths(q: Tensor, cum_seq_q: Tensor, max_q: int) -> Tensor:
    """Packed queries of equal lengths as a batch."""
    count = cum_seq_q.shape[0] - 1
    if not _are_equal(q, cum_seq_q, max_q):
        raise UnsupportedSpecError(
            [
                f"a cache without cu_seq_k for sequences of unequal query lengths ({q.shape[0]} "
                f"rows in {count} sequences of at most {max_q}); pad the queries to {max_q}, or "
                "call attngen.attention"
            ]
        )
    batch: Tensor = q.unflatten(0, (count, max_q))
    return batch.transpose(1, 2)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def _flash_forward_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any
) -> Tensor:
    made, lse, *_ = _flash_forward(query, key, value, *arguments, **named)
    out.copy_(made)
    return lse  # type: ignore[no-any-return]  # a Tensor


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    how: dict[str, Any] = {
        "window": (window_size_left, window_size_right),
        "dropout_seed": _seed(rng_state, dropout_p),
    }
    tensors = (grad_out, query, key, value, out)
    if cum_seq_q is None:
        dout, q, k, v, made = (x.transpose(1, 2) for x in tensors)
        dense = _dense_backward(dout, q, k, v, made, logsumexp, is_causal, scale, dropout_p, **how)
        return tuple(g.transpose(1, 2) for g in dense)
    dout, q, k, v, made = _heads_first(*tensors)
    q, positive, factor = _scaled(q, scale)
    how |= {"causal": is_causal, "scale": positive, "dropout_p": dropout_p}
    packed: dict[str, Any] = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
    arguments = _arguments(q, v, **how, **packed)
    lse = logsumexp.unsqueeze(0)
    found = calls.backward(arguments.text_key, q, k, v, made, lse, dout, None, *arguments[1:])
    dq, dk, dv = (g.squeeze(0).transpose(0, 1) for g in found)
    return dq if factor == 1.0 else dq * factor, dk, dv


_OPERATORS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_out,
    "_flash_attention_backward": _flash_backward,
}
_OF_CPU: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}
