"""What a call must be before it reaches the op: errors that name the argument and the way out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from attngen.errors import DtypeError, SpecError, nearest
from attngen.spec import DESCALES, FIELDS, SCALE_ROWS, AttentionSpec
from attngen.spec_rules import AUX, FP8_DTYPES
from attngen.values import MAX_POSITION, flag, shown, whole

# Tensor arguments that act on scores, in the order of the op's `extra`, and their spec fields.
SCORE_FIELDS = {
    "attn_mask": "attn_mask",
    "bias": "bias",
    "alibi_slopes": "alibi",
    "sinks": "sinks",
}

BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


_AUX = ("lse", *AUX)


def refuse_names(given: dict[str, Any], call: Callable[..., Any]) -> NoReturn:
    """Refuse further arguments of `call`, which has none of these names.

    Raises:
        SpecError: always; names the nearest options.
    """
    name = next(iter(given))
    parameters = inspect.signature(call).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if name in FIELDS and "causal" not in options:
        raise SpecError(
            f"{name!r} belongs to the spec, not to a call; write "
            f"attngen.compile(attngen.AttentionSpec(..., {name}=...))"
        )
    raise SpecError(
        f"unknown argument {name!r}{nearest(name, options)}; options: {', '.join(options)}"
    )


def check_results(return_lse: Any, return_aux: Any) -> None:
    """What a call is asked to return besides out."""
    flag("return_lse", return_lse)
    if not isinstance(return_aux, (tuple, list)):
        raise SpecError(
            f'return_aux must be a tuple of names, got {shown(return_aux)}; write ("lse",)'
        )
    for name in return_aux:
        if not isinstance(name, str) or name not in _AUX:
            hint = nearest(name, _AUX) if isinstance(name, str) else ""
            raise SpecError(f"return_aux must name {', '.join(_AUX)}, got {shown(name)}{hint}")
    if return_lse and return_aux:
        raise SpecError(
            f"return_lse=True and return_aux={tuple(return_aux)!r} exclude each other; aux has the "
            'lse: return_aux=("lse",) alone'
        )


Shard = tuple[int, int, int, int, "int | None", "int | None"]


def check_shard(*call: Any) -> Shard:
    """Where the rows of q and k stand: (q_start, q_step, k_start, k_step, and both totals).

    Args:
        call: the six as given, then seqlen_q, seqlen_k, and whether the call aligns last rows.
    """
    if torch.compiler.is_compiling():
        return _check_shard(*call)
    try:
        return _known_shard(*call)
    except TypeError:  # something that cannot be hashed
        return _check_shard(*call)


def _check_shard(
    q_start: Any,
    q_step: Any,
    k_start: Any,
    k_step: Any,
    total_q: Any,
    total_k: Any,
    seqlen_q: int,
    seqlen_k: int,
    bottom_right: bool,
) -> Shard:
    q_start, q_step, total_q = _check_rows("q", q_start, q_step, total_q, seqlen_q, bottom_right)
    k_start, k_step, total_k = _check_rows("k", k_start, k_step, total_k, seqlen_k, bottom_right)
    return q_start, q_step, k_start, k_step, total_q, total_k


_known_shard = functools.lru_cache(maxsize=4096, typed=True)(_check_shard)


def _check_rows(
    side: str, start: int, step: int, total: int | None, seqlen: int, bottom_right: bool
) -> tuple[int, int, int | None]:
    start = whole(f"{side}_start", start)
    step = whole(f"{side}_step", step, 1)
    if total is not None:
        total = whole(f"seqlen_{side}_total", total)
    if start == 0 and step == 1 and total is None:
        return start, step, total
    end = start + (seqlen - 1) * step + 1
    if end > (MAX_POSITION if total is None else total):
        most = f"{MAX_POSITION}, the most" if total is None else f"seqlen_{side}_total={total}"
        raise SpecError(
            f"{side}_start={start}, {side}_step={step} and {seqlen} rows end at row {end}, beyond "
            f"{most}; seqlen_{side}_total is the length of the whole sequence"
        )
    if bottom_right and total is None:
        raise SpecError(
            f"{side}_start={start} with {side}_step={step} needs seqlen_{side}_total, the length "
            "of the whole sequence, for the bottom-right alignment of causal=True, windows and "
            "ALiBi"
        )
    return start, step, total


def check_seed(seed: Any, device: torch.device | None = None) -> int | Tensor:
    """A dropout seed: 64 bits as an int, or an int64 tensor of one element, on the device."""
    must = "it must be an int or an int64 tensor of one element"
    if not isinstance(seed, Tensor):
        if torch.compiler.is_compiling() and type(seed) is int:
            return seed  # may be symbolic, and guards know int64 only
        step = f"a seed is 64 bits; {must}"
        return whole("dropout_seed", seed, -(2**63), 2**64 - 1, step)
    if seed.numel() != 1 or seed.dtype != torch.int64:
        raise SpecError(f"dropout_seed: {must}, got {seed.dtype} of shape {tuple(seed.shape)}")
    if device is not None and seed.device != device:
        raise SpecError(
            f"dropout_seed is on {seed.device} but q is on {device}; move it with .to(q.device)"
        )
    return seed


def scale_kind(dtype: str, descales: tuple[Any, ...]) -> str | None:
    """The fp8_scale that the descales of q, k and v make, None for a dtype that has none."""
    if dtype not in FP8_DTYPES:
        for name, descale in zip(DESCALES, descales, strict=True):
            if descale is not None:
                raise SpecError(
                    f"{name} belongs to FP8 inputs, got {dtype} ones; leave it out, or make both "
                    "with attngen.quantize"
                )
        return None
    missing = [name for name, x in zip(DESCALES, descales, strict=True) if x is None]
    if missing:
        raise SpecError(
            f"{dtype} inputs need q_descale, k_descale and v_descale, got no "
            f"{' and no '.join(missing)}; attngen.quantize makes them"
        )
    check_kinds(dict(zip(DESCALES, descales, strict=True)))
    for name, x in zip(DESCALES, descales, strict=True):
        if x.requires_grad and torch.is_grad_enabled():
            raise SpecError(f"{name} requires grad, but scales get none; pass {name}.detach()")
    dims = [x.dim() for x in descales]
    kinds = {0: "tensor", 2: "head", 3: "block"}
    if dims[0] not in kinds or dims != dims[:1] * 3:
        raise SpecError(
            "q_descale, k_descale and v_descale must be all of shape (), (batch, num_heads_kv) or "
            "(batch, num_heads_kv, ceil(seqlen / 128)), got shapes "
            f"{', '.join(str(tuple(x.shape)) for x in descales)}; attngen.quantize makes them"
        )
    return kinds[dims[0]]


def check_scale(spec: AttentionSpec, descales: tuple[Any, ...]) -> None:
    """Descales as the spec has them."""
    scale = scale_kind(spec.dtype, descales)
    if scale != spec.fp8_scale:
        raise SpecError(
            f"q_descale, k_descale and v_descale are those of fp8_scale={scale!r}, but the spec "
            f"says {spec.fp8_scale!r}; compile a spec with fp8_scale={scale!r}, or quantise with "
            f"scale={spec.fp8_scale!r}"
        )


def check_gradient_dtypes(*tensors: Tensor) -> None:
    """Refuse FP8 tensors whose gradients autograd would round to FP8."""
    for name, x in zip("qkv", tensors, strict=True):
        if x.element_size() > 1 or not x.requires_grad:
            continue
        if x.is_leaf and (x.grad_dtype is None or x.grad_dtype.itemsize > 1):
            continue
        step = f"make it a leaf and set {name}.grad_dtype = torch.bfloat16"
        if type(x) not in (Tensor, torch.nn.Parameter):  # AOTAutograd traces, and forgets it
            step += ', and keep the call out of torch.compile (backend="eager" aside)'
        raise SpecError(
            f"{name} is {x.dtype} and requires grad, and autograd would round its gradient to it; "
            f"{step}"
        )


def descale_shape(scale: str, k: Tensor, rows: int) -> tuple[int, ...]:
    """The shape of the descale of a tensor with so many rows."""
    lead = (k.shape[0], k.shape[1])
    return {"tensor": (), "head": lead, "block": (*lead, -(-rows // SCALE_ROWS))}[scale]


def check_descales(scale: str, q: Tensor, k: Tensor, descales: Sequence[Tensor | None]) -> None:
    """Shapes, dtypes and devices of the descales of q, k and v."""
    for name, rows, x in zip(DESCALES, (q.shape[2], k.shape[2], k.shape[2]), descales, strict=True):
        shape = descale_shape(scale, k, rows)
        if x is None or tuple(x.shape) != shape:
            got = None if x is None else tuple(x.shape)
            raise SpecError(
                f"{name} must have shape {shape} for fp8_scale={scale!r}, got {got}; "
                "attngen.quantize makes it"
            )
        if x.dtype != torch.float32:
            raise DtypeError(f"{name} must be float32, got {x.dtype}; cast it with .float()")
        if x.device != q.device:
            raise SpecError(
                f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)"
            )


def check_scores(
    q: Tensor,
    k: Tensor,
    attn_mask: Any,
    bias: Any,
    alibi_slopes: Any,
    sinks: Any,
    num_seqs: int | None = None,
) -> dict[str, Tensor]:
    """The tensors that act on scores, as the op takes them, by the spec's field: views of 4 dims,
    each 1 or full, or (1 or batch, num_heads_q).

    Args:
        q, k: (batch, heads, seqlen, dim).
        num_seqs: of packed sequences, which count as batch.
    """
    found: dict[str, Tensor] = {}
    if attn_mask is not None:
        check_place("attn_mask", attn_mask, q)
        if attn_mask.dtype != torch.bool:
            raise DtypeError(_no_mask(attn_mask.dtype))
        found["attn_mask"] = _check_tile("attn_mask", attn_mask, q, k)
    if bias is not None:
        check_place("bias", bias, q)
        if bias.dtype not in BIAS_DTYPES:
            raise DtypeError(_no_bias(bias.dtype))
        found["bias"] = _check_tile("bias", bias, q, k)
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is not None:
            found[SCORE_FIELDS[name]] = _check_heads(name, x, q, num_seqs)
    return found


def check_score_fields(wanted: tuple[str, ...], found: dict[str, Tensor]) -> None:
    """What a call brings is what its spec has."""
    for name, field in SCORE_FIELDS.items():
        if field in wanted and field not in found:
            raise SpecError(
                f"the spec says {field}=True, but the call has no {name}; pass {name}=, or compile "
                f"a spec without {field}"
            )
        if field in found and field not in wanted:
            raise SpecError(
                f"{name} is given, but the spec says {field}=False; compile a spec with "
                f"{field}=True, or leave {name} out"
            )


def check_place(name: str, x: Any, q: Tensor) -> None:
    check_kinds({name: x})
    if x.device != q.device:
        raise SpecError(
            f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)"
        )


def _no_mask(dtype: torch.dtype) -> str:
    step = "write attn_mask.bool(), where True is a key that may be seen"
    if dtype.is_floating_point:
        step = "pass a mask that is added to the scores as bias=, which has a gradient, too"
    return f"attn_mask must be bool, got {dtype}; {step}"


def _no_bias(dtype: torch.dtype) -> str:
    step = "pass a mask as attn_mask=" if dtype == torch.bool else "cast it with bias.float()"
    return f"bias must be float16, bfloat16 or float32, got {dtype}; {step}"


def _check_tile(name: str, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A view of 4 dims of what is broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k)."""
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    tile = x
    while tile.dim() < 4:
        tile = tile.unsqueeze(0)
    if tile.dim() > 4 or not fits(tile.shape, full):
        batch, heads, rows, keys = full
        step = "make each dim 1 or full"
        if x.shape == (batch, keys):
            step = f"write a mask of keys as {name}[:, None, None, :]"
        elif x.shape == (batch, rows, keys):
            step = f"give it a dim for the heads, {name}[:, None]"
        elif x.shape == (batch, rows, heads, keys):
            step = f"the heads come before the rows in each layout, {name}.transpose(1, 2)"
        elif x.shape == (batch, k.shape[1], rows, keys):
            step = (
                f"repeat it for each query head, {name}.repeat_interleave({heads // k.shape[1]}, 1)"
            )
        raise SpecError(
            f"{name} must be broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k) {full}, got "
            f"shape {tuple(x.shape)}; {step}"
        )
    return tile


def fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Is each dim 1 or full?"""
    return all(size == 1 or size == most for size, most in zip(shape, full, strict=True))


def _check_heads(name: str, x: Any, q: Tensor, num_seqs: int | None) -> Tensor:
    """A number for each query head, as (1 or batch, num_heads_q)."""
    check_place(name, x, q)
    if not x.is_floating_point() or x.element_size() == 1:
        raise DtypeError(
            f"{name} must be of a float dtype of 16 bits or more, got {x.dtype}; cast it with "
            f"{name}.float()"
        )
    batch, heads = q.shape[0] if num_seqs is None else num_seqs, q.shape[1]
    rows: Tensor = x.unsqueeze(0) if x.dim() == 1 else x
    if rows.dim() != 2 or rows.shape[1] != heads or (rows.shape[0] != 1 and rows.shape[0] != batch):
        raise SpecError(
            f"{name} must have shape (num_heads_q,) {(heads,)} or (batch, num_heads_q) "
            f"{(batch, heads)}, got {tuple(x.shape)}; it holds one number for each query head"
        )
    return rows


def check_kinds(tensors: dict[str, Any]) -> None:
    """Dense torch tensors, by their names in the call."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            kind = f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")
            raise SpecError(
                f"{name} must be a torch.Tensor, got {kind}; make one with torch.as_tensor({name})"
            )
        if x.is_nested:
            raise SpecError(
                f'{name} is a nested tensor, which attngen.attention and specs with layout="thd" '
                "take where q, k and v are jagged; pad it with torch.nested.to_padded_tensor, or "
                "call once for each sequence"
            )
        if x.layout is not torch.strided:
            raise SpecError(f"{name} is {x.layout}, not dense; call {name}.to_dense()")


def heads_first(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, seqlen, heads, dim) as (batch, heads, seqlen, dim) views."""
    try:
        if q.dim() == k.dim() == v.dim() == 4:
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    except (AttributeError, RuntimeError):
        check_kinds({"q": q, "k": k, "v": v})
        raise
    check_tensors(q, k, v)
    raise AssertionError("a tensor that has not 4 dims was let pass")


def compute_dtype(q: Any) -> str:
    """The dtype a functional call computes in: q's, or autocast's."""
    if not isinstance(q, Tensor):
        check_kinds({"q": q})
    dtype = q.dtype
    if _autocasts(q) and is_cast(dtype):
        dtype = torch.get_autocast_dtype(q.device.type)
    return str(dtype).removeprefix("torch.")


def is_cast(dtype: torch.dtype) -> bool:
    """Does autocast cast tensors of this dtype? Not float64 and no integers, as torch does, and no
    FP8, whose values mean nothing without their scales."""
    return dtype.is_floating_point and dtype.itemsize > 1 and dtype != torch.float64


def _autocasts(q: Tensor) -> bool:
    return q.device.type != "meta" and torch.is_autocast_enabled(q.device.type)


_PASSED: set[tuple[Any, ...]] = set()
_MAX_PASSED = 4096


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int | None,
    head_dim_v: int | None,
    dtype: str,
    *,
    is_paged: bool = False,
    kv_dtype: str | None = None,
) -> None:
    """Kinds, shapes, devices and dtypes; what passed once is not looked at again."""
    at = None
    if not torch.compiler.is_compiling():
        try:
            shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
            dims = (head_dim, head_dim_v, dtype, is_paged, kv_dtype)
            at = (*shapes, *dtypes, q.device, k.device, v.device, *dims)
            if at in _PASSED and not torch.is_autocast_enabled(q.device.type):
                return
        except (AttributeError, RuntimeError, TypeError):
            at = None  # no plain tensors, or sizes without a value
    check_tensors(q, k, v, head_dim, head_dim_v, is_paged=is_paged)
    check_dtypes(q, k, v, dtype, kv_dtype)
    if at is None or _autocasts(q):
        return
    if len(_PASSED) >= _MAX_PASSED:
        _PASSED.clear()
    _PASSED.add(at)


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    *,
    is_paged: bool = False,
) -> None:
    """Kinds, shapes and devices of q, k, v as (batch, heads, seqlen, dim); of paged k and v as
    (pages, heads, page size, dim)."""
    if torch._C._get_tracing_state() is not None:
        raise SpecError(
            "torch.jit.trace would hold this call's sizes for ever; use torch.export or "
            "torch.compile"
        )
    check_kinds({"q": q, "k": k, "v": v})
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise SpecError(
                f"{name} must have 4 dims, got shape {tuple(x.shape)}; "
                "add the missing ones with .unsqueeze(), or use attngen.sdpa"
            )
        if x.device != q.device:
            raise SpecError(
                f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)"
            )
    if q.device.type == "meta" and not torch.compiler.is_compiling():
        raise SpecError(
            "q, k and v are on the meta device, which holds no data; make them on a real device, "
            "or trace the call with torch.compile or torch.export for shapes alone"
        )
    if is_paged and k.shape[0] != v.shape[0]:
        raise SpecError(f"k and v must have equally many pages, got {k.shape[0]} and {v.shape[0]}")
    if not is_paged and (q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0]):
        raise SpecError(
            f"q, k and v must have one batch size, got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}"
        )
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise SpecError(
            f"k and v must agree in heads and length, got shapes {tuple(k.shape)} and "
            f"{tuple(v.shape)} (batch, heads, seqlen, dim)"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise SpecError(
            f"num_heads_q must be a multiple of num_heads_kv, got {q.shape[1]} and {k.shape[1]}; "
            "check the layout (bhsd or bshd), or pad the kv heads"
        )
    if q.shape[3] != k.shape[3]:
        raise SpecError(f"q has head_dim {q.shape[3]} but k has {k.shape[3]}; they must be equal")
    for name, x, dim in (("q", q, head_dim), ("v", v, head_dim_v)):
        if dim is not None and x.shape[3] != dim:
            raise SpecError(
                f"{name} has head dim {x.shape[3]} but the spec says {dim}; compile a spec with "
                f"{'head_dim_v' if name == 'v' else 'head_dim'}={x.shape[3]}"
            )


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: Tensor) -> None:
    """Can kernels write a caller's out, a (batch, heads, seqlen, dim) view?"""
    if tuple(out.shape) != tuple(shape):
        raise SpecError(
            f"out must have shape {tuple(shape)} (batch, heads, seqlen, dim), got "
            f"{tuple(out.shape)}; make it with q's sizes and v's last dim"
        )
    if out.dtype != dtype:
        raise DtypeError(f"out must be {dtype}, got {out.dtype}; make it of that dtype")
    if out.device != q.device:
        raise SpecError(f"out is on {out.device} but q is on {q.device}; make it there")
    if out.shape[3] > 1 and out.stride(3) != 1:
        raise SpecError(
            f"out must have a last stride of 1, got strides {out.stride()}; make it with "
            "torch.empty"
        )
    extent = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride < extent:
            raise SpecError(
                f"out must have one place for each element, got shape {tuple(out.shape)} with "
                f"strides {out.stride()}; make it with torch.empty"
            )
        extent = max(extent, stride * size)
    if out.data_ptr() % 16:
        raise SpecError("out must begin at a multiple of 16 bytes; make it with torch.empty")


def check_dtypes(q: Tensor, k: Tensor, v: Tensor, dtype: str, kv_dtype: str | None = None) -> None:
    """One dtype, the spec's; under autocast the op casts. Of a quantised cache, two."""
    if kv_dtype is not None:
        stored = getattr(torch, kv_dtype)
        is_cast_here = _autocasts(q) and is_cast(q.dtype)
        if k.dtype == v.dtype == stored and (is_cast_here or q.dtype == getattr(torch, dtype)):
            return
        raise DtypeError(
            f"q must be {dtype}, and k and v {kv_dtype}, got {q.dtype}, {k.dtype}, {v.dtype}; cast "
            "q, quantise k and v, or compile a spec of those dtypes"
        )
    given = (q.dtype, k.dtype, v.dtype)
    if _autocasts(q) and not any(str(x).endswith(FP8_DTYPES) for x in (dtype, *given)):
        return
    wanted = getattr(torch, dtype, None)
    if q.dtype == wanted and k.dtype == wanted and v.dtype == wanted:
        return
    raise DtypeError(
        f"q, k and v must all be {dtype}, got {q.dtype}, {k.dtype}, {v.dtype}; cast them, use "
        "autocast, or compile a spec of that dtype"
    )
