"""What the attngen ops take, from the arguments of torch's flash attention."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.errors import UnsupportedSpecError
from attngen.spec import AttentionSpec


class Arguments(NamedTuple):
    """What the attngen ops take beside tensors."""

    text_key: str
    extra: list[Tensor | None]
    scalars: list[float]
    ints: list[int]


def arguments_of(
    q: Tensor,
    v: Tensor,
    *,
    causal: bool | str,
    scale: float,
    window: tuple[int | None, int | None] = (None, None),
    dropout_p: float = 0.0,
    batch_invariant: bool = False,
    **tensors: Tensor | None,
) -> Arguments:
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
    return Arguments(
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


def refuse(**given: Any) -> None:
    """Refuse arguments that are set."""
    reasons = [
        f"{name} in torch's flash attention by attngen; leave it out, or call attngen.attention"
        for name, value in given.items()
        if value is not None and value is not False
    ]
    if reasons:
        raise UnsupportedSpecError(reasons)


def scaled(q: Tensor, scale: float | None) -> tuple[Tensor, float, float]:
    """q and a positive scale for kernels, and what a gradient of that q is multiplied by."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if scale > 0:
        return q, scale, 1.0
    return (-q, -scale, -1.0) if scale < 0 else (q * 0, 1.0, 0.0)


def random_state(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """What torch keeps for the backward, two numbers, and the seed in it if there is dropout."""
    offset = q.new_empty((), dtype=torch.uint64)
    if dropout_p == 0:
        return q.new_empty(2, dtype=torch.uint64), offset, None
    state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    return state.view(torch.uint64), offset, state[:1]


def seed_in(state: Tensor, dropout_p: float) -> Tensor | None:
    """The seed in what torch kept."""
    return state.view(torch.int64)[:1] if dropout_p > 0 else None


def before(inputs: list[Tensor], arguments: Arguments) -> Any:
    """All that an op takes, its tensors before the lists."""
    return (arguments.text_key, *inputs, *arguments[1:])
