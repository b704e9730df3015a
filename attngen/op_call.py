"""From a checked call to the op: its lists, in the order that the spec names them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen import in_place, ops, packed
from attngen.checks import check_kinds
from attngen.dropout import check_seed, seed_of
from attngen.errors import SpecError
from attngen.shard import Shard, check_shard
from attngen.values import first, flag

# Defaults of a call, known by identity: an argument that is none of them is looked at.
_ZERO, _ONE = 0, 1


def call_op(
    key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
    chunk: int | None,
    softmax_scale: float,
    softcap: float | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    descales: tuple[Tensor | None, ...],
    scores: dict[str, Tensor] | None,
    masks: dict[str, Tensor] | None,
    aux: tuple[Tensor, ...] | None,
    sequences: packed.Packed | None,
    lengths: tuple[Tensor, ...],
    shard: Shard,
    starts: tuple[int, int],
    block_map: Tensor | None,
    partial: bool,
    out: Tensor | None = None,
) -> Sequence[Tensor]:
    """Put a checked call into the op's lists, in the order of spec.scalar_args and int_args."""
    compiling = torch.compiler.is_compiling()
    if dropout_seed is not None:
        dropout_seed = check_seed(dropout_seed, q.device)
    if partial is not False:
        partial = flag("partial", partial)
        if partial and scores is not None and "sinks" in scores:
            raise SpecError(
                "partial=True with sinks: merge() would count the sink once for each part; leave "
                "sinks out of the parts and multiply the merged out by "
                "torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1)"
            )
    if softmax_scale <= 0:  # kernels take a positive scale: the sign, or zero, moves into q
        q, softmax_scale = with_positive_scale(q, softmax_scale)
    left, right = window if window is not None else (None, None)
    is_causal = causal is not False
    has_dropout = dropout_p > 0
    aligned = is_causal or left is not None or right is not None or chunk is not None
    if scores is not None and "alibi_slopes" in scores:
        aligned = True
    if masks is not None and "tree_mask" in masks:
        aligned = True
    q_start, q_step, k_start, k_step, total_q, total_k = shard
    whole_q = q_start is _ZERO and q_step is _ONE and total_q is None
    if compiling or not (whole_q and k_start is _ZERO and k_step is _ONE and total_k is None):
        bottom_right = aligned and causal != "top_left"
        shard = check_shard(*shard, q.shape[2], k.shape[2], bottom_right)
        q_start, q_step, k_start, k_step, total_q, total_k = shard
    batch_start, head_start = starts
    if compiling or batch_start is not _ZERO or head_start is not _ZERO:
        starts = first("batch_start", batch_start), first("head_start", head_start)
    scalars = [float(softmax_scale)]
    ints = [int(partial)]
    extra: list[Tensor | None] = []
    if softcap is not None:
        scalars.append(float(softcap))
    if left is not None:
        ints.append(left)
    if right is not None and not is_causal:
        ints.append(right)
    if chunk is not None:
        ints.append(chunk)
    if aligned or has_dropout or aux is not None:
        ints += [q_start, q_step, k_start, k_step]
    if aligned:
        ints += [int(causal != "top_left")]
        ints += [-1 if total is None else total for total in (total_q, total_k)]
    if has_dropout:
        scalars.append(float(dropout_p))
        extra.append(seed_of(dropout_seed, q))
    if has_dropout or aux is not None:
        ints += starts
    if scores is not None:
        extra.extend(scores.values())
    if masks is not None:
        extra.extend(masks.values())
    if block_map is not None:
        extra.append(block_map)
    if sequences is not None:
        extra.extend(sequences)
    extra.extend(lengths)
    if aux is not None:
        extra.extend(aux)
    extra.extend(descales)
    if out is not None:
        return out, in_place.forward(key, q, k, v, out, extra, scalars, ints)
    if compiling:
        return torch.ops.attngen.fwd(key, q, k, v, extra, scalars, ints)  # type: ignore[no-any-return]  # torch.ops is untyped
    try:
        return ops.forward(key, q, k, v, extra, scalars, ints)
    except RuntimeError:  # a sparse tensor of a shape that passed before has no strides
        check_kinds({"q": q, "k": k, "v": v})
        raise


def with_positive_scale(q: Tensor, softmax_scale: float) -> tuple[Tensor, float]:
    """q with the sign of a negative scale, or zero, and the scale without."""
    wide = q.bfloat16() if q.element_size() == 1 else q  # torch has no arithmetic of FP8
    wide, softmax_scale = (-wide, -softmax_scale) if softmax_scale < 0 else (wide * 0, 1.0)
    return wide.to(q.dtype), softmax_scale
