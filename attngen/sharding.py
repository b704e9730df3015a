"""How DTensor may shard `attngen::fwd` and `attngen::bwd`: by batch rows and by heads.

Registered when a DTensor first meets the ops. Sequences are not sharded here, which needs
communication between the parts. What a rule does not allow is redistributed first: a spec whose
functions or dropout number batch rows and heads is computed whole on each rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from attngen.identity import parsed
from attngen.spec import AttentionSpec

_BATCH, _HEADS = 0, 1
_OF_HEADS = ("attn_mask", "bias", "alibi_slopes", "sinks", "block_map")
"""Tensors whose dim 1 is 1 or the query heads, and dim 0 is 1 or the batch."""
_OF_BATCH = ("prefix_lens", "doc_ids_q", "doc_ids_k", "tree_mask", "seqused_q", "seqused_k")
"""Tensors whose dim 0 is 1 or the batch."""


def meet(*tensors: Any) -> None:
    """Register the rules if one of these is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None and any(isinstance(x, tensor.DTensor) for x in tensors):
        register()


@functools.cache
def register() -> None:
    """Register the rules, once a process."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    # The first argument, and so all, is part of what a decision is remembered by.
    info = RuntimeSchemaInfo(0, needs_pytree=True)
    propagator.register_op_strategy(torch.ops.attngen.fwd.default, _forward, info)
    propagator.register_op_strategy(torch.ops.attngen.bwd.default, _backward, info)


def _forward(schema: Any) -> Any:
    text_key, q, k, v, extra, *_ = schema.args_schema
    spec = parsed(text_key)
    rows = [_replicated(2 + len(spec.aux), 3 + _count(extra))]
    for dim in _dims(spec, k):
        shard = _shard(dim)
        outputs = [shard] * (2 + len(spec.aux))
        rows.append([*outputs, *_operands(spec, dim, q, k), *_beside(spec, extra, dim)])
    return _expanded(schema, rows, 2 + len(spec.aux))


def _backward(schema: Any) -> Any:
    text_key, q, k, v, out, lse, dout, dlse, extra, _, _, *rest = schema.args_schema
    spec = parsed(text_key)
    needs: Sequence[bool] = rest[0] if rest else ()
    wanted = [n for n, need in zip(spec.gradient_args, needs, strict=False) if need]
    grads = [x for x in (dout, dlse) if x is not None]
    rows = [_replicated(3 + len(wanted), 5 + len(grads) + _count(extra))]
    for dim in _dims(spec, k):
        operands = _operands(spec, dim, q, k)
        beside = _beside(spec, extra, dim)
        places = dict(zip(_given(spec, extra), beside, strict=True))
        # What ranks share, they have parts of the gradient of.
        made = [_or_partial(x) for x in (*operands, *(places[name] for name in wanted))]
        rows.append([*made, *operands, *[_shard(dim)] * (2 + len(grads)), *beside])
    return _expanded(schema, rows, 3 + len(wanted))


def _expanded(schema: Any, rows: list[list[Any]], outputs: int) -> Any:
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    mesh = schema.get_mesh_from_args()
    return expand_to_full_mesh_op_strategy(mesh, schema, rows, input_index=outputs)


def _dims(spec: AttentionSpec, k: Any) -> list[int]:
    """The dims of q, k and v that may be sharded."""
    functions = [each for each in (spec.score_function, spec.mask_function) if each is not None]
    if spec.has_dropout:
        return []
    dims = []
    is_batch = not (spec.is_packed or spec.paged)
    if is_batch and not any("b" in each.inputs for each in functions):
        dims.append(_BATCH)
    heads, ranks = k.shape[1], k.mesh.size()
    if (heads % ranks == 0 or heads == 1) and not any("h" in each.inputs for each in functions):
        dims.append(_HEADS)
    return dims


def _operands(spec: AttentionSpec, dim: int, q: Any, k: Any) -> list[Any]:
    """Placements of q, k and v."""
    of_k = _replicate() if dim == _HEADS and k.shape[1] == 1 < q.shape[1] else _shard(dim)
    return [_shard(dim), of_k, of_k]


def _given(spec: AttentionSpec, extra: Any) -> list[str]:
    """Names of the tensors in `extra` that are there."""
    given = zip(spec.tensor_args, _entries(extra), strict=True)
    return [name for name, x in given if x is not None]


def _beside(spec: AttentionSpec, extra: Any, dim: int) -> list[Any]:
    """Placements of the tensors in `extra`."""
    placements = []
    for name, x in zip(spec.tensor_args, _entries(extra), strict=True):
        if x is None:
            continue
        is_own = name in _OF_HEADS or (name in _OF_BATCH and dim == _BATCH)
        is_own = is_own or (name.endswith("_descale") and len(x.shape) > 0)
        if is_own and spec.is_packed and name in _OF_BATCH:
            is_own = False
        at = dim
        if dim == _HEADS and spec.paged and spec.kv_scale == "key" and name.endswith("_descale"):
            at = 2  # (pages, page_size, heads)
        placements.append(_shard(at) if is_own and x.shape[at] != 1 else _replicate())
    return placements


def _entries(extra: Any) -> Sequence[Any]:
    entries: Sequence[Any] = getattr(extra, "children", extra)  # a TupleStrategy, or a plain list
    return entries


def _count(extra: Any) -> int:
    return sum(x is not None for x in _entries(extra))


def _shard(dim: int) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(dim)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _or_partial(placement: Any) -> Any:
    from torch.distributed.tensor import Partial

    return Partial() if placement.is_replicate() else placement


def _replicated(outputs: int, inputs: int) -> list[Any]:
    return [_replicate()] * (outputs + inputs)
