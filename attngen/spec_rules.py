"""What a spec may say: the values of each field, and which fields exclude each other.

Imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from attngen.errors import SpecError, nearest
from attngen.head_dim import MAX_HEAD_DIM, MAX_HEAD_DIM_V
from attngen.score_nodes import FUNCTIONS
from attngen.values import MAX_POSITION, flag, shown, whole

if TYPE_CHECKING:
    from attngen.spec import AttentionSpec

DTYPES = ("float16", "bfloat16", "float32")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
CAUSAL = (False, True, "bottom_right", "top_left")
LAYOUTS = ("bhsd", "bshd", "thd")
PRECISIONS = ("ieee", "tf32")
FP8_SCALES = (None, "tensor", "head", "block")
KV_DTYPES = (None, "float8_e4m3fn", "int8")
KV_SCALES = (None, "tensor", "head", "key")
AUX = ("max_logit", "col_sum", "entropy")
"""Side outputs that kernels write beside lse, in the order of the op's results."""


def refuse_unknown(named: Iterable[str], known: Collection[str]) -> None:
    """Refuse names of fields that are not known."""
    for name in named:
        if name not in known:
            raise SpecError(
                f"unknown spec field {name!r}{nearest(name, known)}; fields: {', '.join(known)}"
            )


def check(spec: AttentionSpec) -> None:
    """Refuse values that no spec may have, and combinations that mean nothing."""
    for name, most in (("head_dim", MAX_HEAD_DIM), ("head_dim_v", MAX_HEAD_DIM_V)):
        size = getattr(spec, name)
        step = "split the heads or use a smaller head dim"
        if name == "head_dim_v" and spec.head_dim_v == spec.head_dim:
            step = f"give head_dim_v, at most {most}, for a head_dim above it"
        if not isinstance(size, (int, float, str)) or (type(size) is int and size < 1):
            step = f"it is the last dim of {'v' if name == 'head_dim_v' else 'q and k'}"
        whole(name, size, 1, most, step)
    _one_of(spec, "dtype", DTYPES + FP8_DTYPES)
    _one_of(spec, "layout", LAYOUTS)
    _one_of(spec, "precision", PRECISIONS)
    _one_of(spec, "fp8_scale", FP8_SCALES)
    _one_of(spec, "causal", CAUSAL)
    _one_of(spec, "kv_dtype", KV_DTYPES)
    _one_of(spec, "kv_scale", KV_SCALES)
    if (spec.kv_dtype is None) != (spec.kv_scale is None):
        raise SpecError(
            f"kv_dtype and kv_scale go together, got {spec.kv_dtype!r} and {spec.kv_scale!r}; add "
            'kv_scale="tensor", "head" or "key" to a kv_dtype, or leave both out'
        )
    if spec.kv_dtype is not None and spec.dtype not in ("float16", "bfloat16"):
        raise SpecError(
            f"kv_dtype={spec.kv_dtype!r} needs dtype float16 or bfloat16, which q and out have, "
            f"got {spec.dtype!r}; compute in one of these, or leave kv_dtype and kv_scale out"
        )
    if spec.dtype in FP8_DTYPES and spec.fp8_scale is None:
        raise SpecError(
            f"dtype={spec.dtype!r} needs fp8_scale, which says what shares a scale; add "
            'fp8_scale="tensor", "head" or "block", or compute in bfloat16'
        )
    if spec.dtype not in FP8_DTYPES and spec.fp8_scale is not None:
        raise SpecError(
            f"fp8_scale={spec.fp8_scale!r} needs an FP8 dtype, got dtype={spec.dtype!r}; add "
            f"dtype={FP8_DTYPES[0]!r} or {FP8_DTYPES[1]!r}, or leave fp8_scale out"
        )
    if spec.deterministic is not None:
        flag("deterministic", spec.deterministic, "None, True or False")
    if spec.chunk is not None:
        whole("chunk", spec.chunk, 1, MAX_POSITION, "None switches it off")
    if spec.shared_kv is True and spec.head_dim_v >= spec.head_dim:
        raise SpecError(
            "shared_kv=True needs head_dim_v below head_dim: v is k's first columns, got head_dim="
            f"{spec.head_dim} and head_dim_v={spec.head_dim_v}; give the head_dim_v of those "
            "columns, or leave shared_kv out"
        )
    if spec.prefix_lm and spec.causal is False:
        raise SpecError(
            "prefix_lm=True needs causal, which it widens, got causal=False; add causal=True, or "
            "leave prefix_lm out: without causal a query sees the prefix anyway"
        )
    if spec.tree_mask and spec.causal == "top_left":
        raise SpecError(
            "tree_mask=True needs rows of q and k that are aligned at their ends, where the tree "
            "is, got causal='top_left'; use causal=True"
        )
    for field in fields(spec):
        if field.type == "bool":
            flag(field.name, getattr(spec, field.name))
    if spec.block_map and spec.mask_mod is None:
        raise SpecError(
            "block_map=True needs mask_mod, whose tiles it lists, got mask_mod=None; add mask_mod, "
            "or leave block_map out: causal, window and chunk skip tiles without one"
        )


def side_outputs(names: Any) -> tuple[str, ...]:
    """Names of side outputs in their one order, without "lse", which is always there."""
    if isinstance(names, str):
        names = names.split(":")
    if not isinstance(names, (tuple, list)):
        raise SpecError(f'aux must be a tuple of names, got {shown(names)}; write ("entropy",)')
    for name in names:
        if not isinstance(name, str) or name not in (*AUX, "lse"):
            hint = nearest(name, AUX) if isinstance(name, str) else ""
            hint = hint or "; leave aux out for out and lse alone"
            raise SpecError(f"aux must name {', '.join(AUX)}, got {shown(name)}{hint}")
    return tuple(name for name in AUX if name in names)


def _one_of(spec: AttentionSpec, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(spec, name)
    if any(type(value) is type(a) and value == a for a in allowed):
        return
    hint = ""
    if isinstance(value, str):
        hint = nearest(value, [a for a in allowed if isinstance(a, str)])
    if name == "dtype" and str(value).rstrip("0123456789") in ("float", "int", "uint", "complex"):
        hint = "; cast tensors with .to(torch.float32) or another of these"
    if True in allowed and str(value).lower() in ("true", "false", "1", "0", "none"):
        hint = f"; write {name}={str(value).lower() in ('true', '1')}"
    default = next(field.default for field in fields(spec) if field.name == name)
    hint = hint or f"; leave {name} out for {default!r}"
    raise SpecError(f"{name} must be one of {_list(allowed)}, got {shown(value)}{hint}")


def _list(allowed: tuple[Any, ...]) -> str:
    return ", ".join(repr(a) for a in allowed)


def unbuilt(spec: AttentionSpec) -> list[str]:
    """Why the kernels of a legal combination are not built; empty if they are."""
    reasons: list[str] = []
    if spec.is_fp8:
        named = {"attn_mask": spec.attn_mask, "bias": spec.bias, "alibi": spec.alibi}
        named["sinks"] = spec.sinks
        named |= {name: getattr(spec, name) is not None for name in FUNCTIONS}
        reasons += [
            f"{name} with FP8 inputs is not built yet; dequantise them and use bfloat16"
            for name, is_on in named.items()
            if is_on
        ]
    if spec.is_fp8 and "col_sum" in spec.aux:
        reasons.append(
            "aux=col_sum with FP8 inputs is not built yet; dequantise them and use bfloat16"
        )
    if spec.block_map and "col_sum" in spec.aux:
        reasons.append("aux=col_sum with block_map is not built yet; leave one of them out")
    if spec.block_map:
        reasons += [
            f"block_map with {name} is not built yet; say it by mask_mod"
            for name in ("prefix_lm", "documents", "tree_mask")
            if getattr(spec, name)
        ]
    if spec.is_packed or spec.packs_queries:
        reasons += _unpacked(spec)
    if spec.has_lengths or spec.shared_kv or spec.is_quantized:
        reasons += undecoded(spec)
    return reasons


def _unpacked(spec: AttentionSpec) -> list[str]:
    """What packed sequences cannot have."""
    why = [no_pairs(name) for name in ("attn_mask", "bias") if getattr(spec, name)]
    beside = ("documents", "tree_mask", "block_map")
    why += [
        f'{name} with layout="thd" is not built yet; call once for each sequence'
        for name in beside
        if getattr(spec, name)
    ]
    if "col_sum" in spec.aux:
        why.append('aux=col_sum with layout="thd" is not built yet; call once for each sequence')
    if spec.is_fp8:
        why.append('FP8 inputs with layout="thd" are not built yet; dequantise them')
    return why


def no_pairs(name: str) -> str:
    """Why packed sequences have no mask and no bias."""
    return (
        f'{name} with layout="thd" is refused: it would hold a number for each pair of packed '
        "rows, most of them of two sequences; call once for each sequence"
    )


def undecoded(spec: AttentionSpec) -> list[str]:
    """Why the decode family does not serve a spec; empty if it does."""
    needs = ("paged", "key_lengths", "shared_kv", "kv_dtype")
    who = next((name for name in needs if getattr(spec, name)), "decode")
    if spec.is_quantized:
        who = "kv_dtype"
    named = {
        "dropout_p": spec.has_dropout,
        "FP8 inputs": spec.is_fp8,
        'layout="thd"': spec.is_packed or (spec.packs_queries and not spec.paged),
        "documents": spec.documents,
        "score_mod": spec.score_mod is not None,
        "mask_mod": spec.mask_mod is not None,
        "aux": bool(spec.aux),
        "attn_mask": spec.attn_mask and spec.paged,
        "bias": spec.bias and spec.paged,
        "shared_kv": spec.shared_kv and spec.is_quantized,
        "an odd head_dim_v": spec.is_quantized and spec.head_dim_v % 2 == 1,
        "a head_dim_v of parts that are no powers of two from 16 on": spec.shared_kv
        and any(part.padded for part in spec.v_parts),
    }
    steps = {
        "paged": "gather the pages into dense k and v, and leave paged out",
        "key_lengths": "leave key_lengths out, and hide the keys by attn_mask",
        "shared_kv": "leave shared_kv out",
        "kv_dtype": "dequantise k and v, and leave kv_dtype and kv_scale out",
        "decode": "the forward serves it",
    }
    own = {("FP8 inputs", who): "dequantise them and use bfloat16"}
    own['layout="thd"', "key_lengths"] = "leave key_lengths out: seqused_k of packed calls says it"
    return [
        f"{name} with {who} is not built yet; {own.get((name, who), steps[who])}"
        for name, is_on in named.items()
        if is_on
    ]
