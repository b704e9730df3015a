"""append_kv(): new keys and values into a dense or paged cache, by one kernel, rotated if asked."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attngen import interpreter, kv_cache
from attngen.checks import check_kinds
from attngen.errors import DtypeError, SpecError, UnsupportedSpecError
from attngen.in_place import count_write
from attngen.kernel import load, run, write
from attngen.memory import empty_bshd
from attngen.paged import check_page_size
from attngen.render import TEXT_VERSION, environment
from attngen.resolve import device_index_of
from attngen.spec import AttentionSpec
from attngen.spec_rules import KV_DTYPES
from attngen.values import flag
from attngen.workload import ceil_pow2

_LIBRARY = torch.library.Library("attngen", "FRAGMENT")
_LIBRARY.define(
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? q,"
    " Tensor? positions, Tensor? slots, Tensor? block_table, Tensor? cos, Tensor? sin,"
    " bool is_paged, bool interleaved, Tensor? k_descale=None, Tensor? v_descale=None) -> Tensor"
)


@dataclass(frozen=True)
class AppendSpec:
    """What the text of the kernel depends on."""

    head_dim: int
    head_dim_v: int
    is_paged: bool
    has_positions: bool
    has_slots: bool
    rotary: bool
    is_interleaved: bool
    rotates_q: bool
    stored: str | None = None
    """The 8-bit dtype of a quantised cache."""
    scale: str | None = None
    """And what shares a scale there, as `AttentionSpec.kv_scale`."""

    @property
    def has_table(self) -> bool:
        """Pages are named by a table, not by slots."""
        return self.is_paged and not self.has_slots

    @property
    def width(self) -> int:
        return ceil_pow2(self.head_dim)

    @property
    def width_v(self) -> int:
        return ceil_pow2(self.head_dim_v)

    @property
    def title(self) -> str:
        """One line that says what the kernel does."""
        where = "dense"
        if self.is_paged:
            where = "paged, by slots" if self.has_slots else "paged"
        dims = f"head_dim {self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"/{self.head_dim_v}"
        traits = [where, dims]
        traits += [f"to {self.stored} by {self.scale}"] if self.stored else []
        if self.rotary:
            kind = "interleaved" if self.is_interleaved else "half-split"
            traits.append(f"{kind} rotary of k{' and q' if self.rotates_q else ''}")
        return f"Appending keys and values to a cache: {', '.join(traits)}."


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    block_table: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    layout: str = "bhsd",
) -> Tensor | None:
    """Write new keys and values into a cache, in place, by one kernel; rotate k and q if asked.

    A token whose position, slot or page does not lie in the cache is not written, so that -1 stands
    for padding. No two tokens may have one place. Nothing is looked at on the host.

    Args:
        k: (batch, num_heads_kv, seqlen, head_dim), or of layout "bshd" (batch, seqlen,
            num_heads_kv, head_dim).
        v: the same with head_dim_v.
        k_cache: of that layout, with places instead of seqlen; or with block_table or slots (pages,
            page_size, num_heads_kv, head_dim) in either layout, page_size a multiple of 16. Any
            strides, the last one 1.
        v_cache: the same with head_dim_v.
        positions: int32 or int64, (batch,): where the first new token of each batch row stands, as
            `seqused_k` before the append; or (batch, seqlen), for each token.
        slots: int32 or int64, (batch, seqlen): the place of each token in a paged cache, page *
            page_size + place (vLLM's slot mapping). Positions are then needed for rotary alone.
        block_table: int32 (batch, max_pages), as `attention` takes it.
        q: (batch, num_heads_q, seqlen, head_dim) in k's layout, rotated as k is.
        cos, sin: (max_positions, angles), float, contiguous: rotary embedding of the first 2 *
            angles columns. Tokens at positions behind the last are not rotated.
        interleaved: pairs are columns 2n and 2n + 1, else n and n + angles.
        k_descale, v_descale: of caches of float8_e4m3fn or int8, float32, as `attention` takes
            them, of the same shapes. What is written is divided by them, rounded to the nearest,
            and clamped; they are read, not written.
        layout: "bhsd" or "bshd".

    Returns:
        The rotated q, if there is one.

    Raises:
        SpecError: shapes, dtypes or devices do not fit.
        UnsupportedSpecError: a tensor that requires grad.
    """
    named = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    descales = (k_descale, v_descale)
    others = {"positions": positions, "slots": slots, "block_table": block_table, "q": q}
    others |= {"cos": cos, "sin": sin, "k_descale": k_descale, "v_descale": v_descale}
    check_kinds(named | {name: x for name, x in others.items() if x is not None})
    if layout not in ("bhsd", "bshd"):
        raise SpecError(f'layout must be "bhsd" or "bshd", got {layout!r}')
    if k_cache is v_cache:
        raise SpecError(
            "k_cache and v_cache are one tensor, where v would overwrite k; make one for each"
        )
    interleaved = flag("interleaved", interleaved)
    for name, x in (named | {"q": q}).items():
        if x is not None and x.dim() != 4:
            raise SpecError(f"{name} must have 4 dims, got shape {tuple(x.shape)}")
    if layout == "bshd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        q = None if q is None else q.transpose(1, 2)
    is_paged = block_table is not None or slots is not None
    if is_paged or layout == "bshd":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    tensors = (k, v, k_cache, v_cache, q, positions, slots, block_table, cos, sin)
    rotated: Tensor = torch.ops.attngen.append_kv(*tensors, is_paged, interleaved, *descales)
    if q is None:
        return None
    return rotated.transpose(1, 2) if layout == "bshd" else rotated


def _check(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor | None,
    positions: Tensor | None,
    slots: Tensor | None,
    block_table: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    is_paged: bool,
) -> None:
    """Refuse what the kernel must never see; all have heads first."""
    batch, heads, seqlen, dim = k.shape
    if v.shape[:3] != k.shape[:3]:
        raise SpecError(
            f"k and v must agree in batch, heads and length, got {tuple(k.shape)} and "
            f"{tuple(v.shape)} (batch, heads, seqlen, dim)"
        )
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (heads, x.shape[3]) if is_paged else (batch, heads, x.shape[3])
        got = (cache.shape[1], cache.shape[3])
        if (got if is_paged else (cache.shape[0], *got)) != wanted:
            raise SpecError(
                f"{name}_cache does not fit {name}: shapes {tuple(cache.shape)} and "
                f"{tuple(x.shape)}, heads first"
            )
        if cache.dtype != x.dtype and str(cache.dtype).removeprefix("torch.") not in KV_DTYPES:
            raise DtypeError(f"{name}_cache is {cache.dtype}, but {name} is {x.dtype}; cast {name}")
        if not x.is_floating_point():
            raise DtypeError(f"{name} must be of a float dtype, got {x.dtype}; cast it")
        strides = cache.stride()
        if strides[3] != 1:
            raise SpecError(f"{name}_cache must have a last stride of 1, got {strides}")
        if any(stride == 0 and n > 1 for stride, n in zip(strides, cache.shape, strict=True)):
            raise SpecError(
                f"{name}_cache must have one place for each element, got shape "
                f"{tuple(cache.shape)} with strides {strides}; make it with .contiguous()"
            )
    if k_cache.shape[0] != v_cache.shape[0] or k_cache.shape[2] != v_cache.shape[2]:
        raise SpecError(
            f"k_cache and v_cache must agree but in dim, got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}, heads first"
        )
    if is_paged:
        check_page_size(k_cache)
    if positions is None and (slots is None or cos is not None):
        why = "rotary needs them" if slots is not None else "or slots of a paged cache"
        raise SpecError(f"positions are missing, (batch,) or (batch, seqlen); {why}")
    if slots is None and is_paged and block_table is None:
        raise SpecError("a paged cache needs block_table or slots")
    _check_ints("positions", positions, ((batch,), (batch, seqlen)))
    _check_ints("slots", slots, ((batch, seqlen),))
    if block_table is not None and slots is None:
        if block_table.dtype != torch.int32 or block_table.dim() != 2:
            raise DtypeError(
                f"block_table must be int32 (batch, max_pages), got {block_table.dtype} "
                f"{tuple(block_table.shape)}"
            )
        if block_table.shape[0] != batch or block_table.stride(1) != 1:
            raise SpecError(
                f"block_table must have {batch} rows and a last stride of 1, got "
                f"{tuple(block_table.shape)} with strides {block_table.stride()}"
            )
    if (cos is None) != (sin is None) or (q is not None and cos is None):
        raise SpecError("rotary needs cos and sin, and q is there to be rotated; pass both")
    if cos is not None and sin is not None:
        if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[1] > dim:
            raise SpecError(
                f"cos and sin must be (max_positions, angles) with 2 * angles at most {dim}, got "
                f"{tuple(cos.shape)} and {tuple(sin.shape)}"
            )
        if not (cos.is_contiguous() and sin.is_contiguous() and cos.is_floating_point()):
            raise SpecError("cos and sin must be contiguous float tensors")
    if q is not None and (q.shape[0], *q.shape[2:]) != (batch, seqlen, dim):
        raise SpecError(
            f"q must have k's batch, length and dim, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    for other in (v, k_cache, v_cache, q, positions, slots, block_table, cos, sin):
        if other is not None and other.device != k.device:
            raise SpecError(f"a tensor is on {other.device} but k is on {k.device}; move it")
    if k.is_cpu and not interpreter.enabled():
        raise SpecError(
            "k is on the CPU but this machine has a GPU; move the tensors with .cuda(), or set "
            "ATTNGEN_INTERPRET=1 to run Triton's interpreter"
        )


def _check_descales(
    k_cache: Tensor,
    v_cache: Tensor,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    is_paged: bool,
) -> tuple[str | None, str | None]:
    """The dtype and the kv_scale of a quantised cache, (None, None) of another."""
    stored = str(k_cache.dtype).removeprefix("torch.")
    if stored not in KV_DTYPES:
        if k_descale is not None or v_descale is not None:
            raise SpecError(
                f"k_descale and v_descale belong to caches of float8_e4m3fn or int8, got {stored}; "
                "leave them out"
            )
        return None, None
    if v_cache.dtype != k_cache.dtype:
        raise DtypeError(f"k_cache is {stored}, but v_cache is {v_cache.dtype}; they must agree")
    scale = kv_cache.scale_of(stored, None, k_descale, v_descale)
    spec = AttentionSpec(head_dim=16, kv_dtype=stored, kv_scale=scale, paged=is_paged)
    shape = kv_cache.descale_shape(spec, k_cache)
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is None or tuple(x.shape) != shape or x.dtype != torch.float32:
            got = None if x is None else f"{x.dtype} {tuple(x.shape)}"
            raise SpecError(f"{name} must be float32 of shape {shape}, as the caches', got {got}")
        if x.device != k_cache.device:
            raise SpecError(f"{name} is on {x.device} but k_cache is on {k_cache.device}; move it")
    return stored, scale


def _check_ints(name: str, x: Tensor | None, shapes: tuple[tuple[int, ...], ...]) -> None:
    if x is None:
        return
    if x.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name} must be int32 or int64, got {x.dtype}; cast it with {name}.int()")
    if tuple(x.shape) not in shapes:
        raise SpecError(
            f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}"
        )


def _append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q: Tensor | None,
    positions: Tensor | None,
    slots: Tensor | None,
    block_table: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    is_paged: bool,
    interleaved: bool,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor:
    """`attngen::append_kv`."""
    table = None if slots is not None else block_table
    tables = (positions, slots, table, cos, sin)
    _check(k, v, k_cache, v_cache, q, *tables, is_paged)
    stored, scale = _check_descales(k_cache, v_cache, k_descale, v_descale, is_paged)
    out = k.new_empty(0) if q is None else _like(q)
    if k.numel() == 0:
        return out
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    has_positions = positions is not None and (slots is None or cos is not None)
    spec = AppendSpec(
        k.shape[3],
        v.shape[3],
        is_paged,
        has_positions,
        slots is not None,
        cos is not None,
        interleaved and cos is not None,
        q is not None,
        stored,
        scale,
    )
    device = device_index_of(k)
    module = _module(spec, device is None)
    tensors = (k, v, k_cache, v_cache)
    if q is not None:
        tensors = (*tensors, q if q.stride(3) == 1 else q.contiguous(), out)  # type: ignore[assignment]  # more of them
    names = ("positions", "slots", "block_table", "cos", "sin")
    named = {name: x for name, x in zip(names, tables, strict=True) if x is not None}
    if not has_positions:
        named.pop("positions", None)
    if k_descale is not None and v_descale is not None:
        named |= {"k_descale": k_descale, "v_descale": v_descale}
    run(module.plan(*tensors, **named), device)
    return out


def _like(q: Tensor) -> Tensor:
    batch, heads, rows, dim = q.shape
    return empty_bshd(q, batch, heads, rows, dim, q.dtype)


@functools.lru_cache(maxsize=256)
def _module(spec: AppendSpec, interpret: bool) -> ModuleType:
    """The emitted file of a spec, imported."""
    return load(write(_file_name(spec), source(spec)), interpret=interpret)


def source(spec: AppendSpec) -> str:
    """The text of the kernel file."""
    template = environment().get_template("append.triton.py.jinja")
    return template.render(spec=spec, title=spec.title, version=TEXT_VERSION)


def _file_name(spec: AppendSpec) -> str:
    traits = [f"d{spec.head_dim}"]
    traits += [] if spec.head_dim_v == spec.head_dim else [f"v{spec.head_dim_v}"]
    traits += ["slots"] if spec.has_slots else ["paged"] if spec.is_paged else []
    traits += ["rotary"] if spec.rotary else []
    traits += [f"{spec.stored}_by_{spec.scale}"] if spec.stored else []
    digest = hashlib.sha256(source(spec).encode()).hexdigest()[:8]
    return f"append__{'_'.join(traits)}__{digest}.py"


def _fake(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, q: Any, *rest: Any) -> Tensor:
    return k.new_empty(0) if q is None else _like(q)


def _refuse_gradients(*arguments: Any) -> Tensor:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedSpecError(
            ["append_kv has no backward; call it under torch.no_grad(), or detach its tensors"]
        )
    return _counted(*arguments)


def _counted(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
    """The op below autograd, which learns of the writes."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        rotated: Tensor = torch.ops.attngen.append_kv(k, v, k_cache, v_cache, *rest)
    count_write(k_cache, v_cache)
    return rotated


def _refuse_vmap(*arguments: Any) -> Any:
    raise UnsupportedSpecError(["vmap over append_kv is not offered; fold samples into k's batch"])


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("append_kv", _append, _key)
_LIBRARY.impl("append_kv", _refuse_gradients, "Autograd")
_LIBRARY.impl("append_kv", _counted, "ADInplaceOrView")  # in inference mode
torch.library.register_fake("attngen::append_kv", _fake, lib=_LIBRARY)
torch.library.register_vmap("attngen::append_kv", _refuse_vmap, lib=_LIBRARY)
