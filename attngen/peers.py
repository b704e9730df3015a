"""Other implementations of attention, as functions of (q, k, v): what `attngen bench` times.

A peer that cannot do a spec raises `CannotServe` with the reason; one that fails at its first call
is reported with its own message. Inputs are (batch, heads, seqlen, dim), or (batch, seqlen, heads,
dim) for a peer whose `layout` is "bshd": each peer gets contiguous tensors in its own order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attngen.decode import MAX_ROWS
from attngen.mask_rules import NAMES, Structure
from attngen.softmax_reference import alignment
from attngen.spec import DESCALES, AttentionSpec
from attngen.workload import Workload

Attend = Callable[..., Tensor]
"""Of q, k and v, and if these are FP8 of their descales."""
MATH_SCORES = 1 << 28
"""Entries of the score matrix up to which the math backend, which stores it, is timed."""


class CannotServe(Exception):
    """Why a peer does not do a spec."""


@dataclass(frozen=True)
class Peer:
    """One implementation; `make` gives its function for a spec and a size.

    It also takes, by keyword, the spec's attn_mask and bias (1, 1, seqlen_q, seqlen_k), one for all
    heads, and its alibi_slopes and sinks (batch, num_heads_q).
    """

    name: str
    make: Callable[..., Attend]
    layout: str = "bhsd"


def all_peers(*, max_autotune: bool = False) -> list[Peer]:
    """Every peer, in the order of the table."""
    peers = [
        Peer("sdpa flash", _sdpa(SDPBackend.FLASH_ATTENTION)),
        Peer("sdpa cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION)),
        Peer("sdpa math", _math),
        Peer("flex", _flex(None)),
    ]
    if max_autotune:
        peers.append(Peer("flex max-autotune", _flex("max-autotune-no-cudagraphs")))
    fa3 = Peer("fa3", _flash_attention_3, layout="bshd")
    return [*peers, fa3, Peer("fa3 kvcache", _flash_kvcache, layout="bshd")]


def _refuse(peer: str, **lacks: bool) -> None:
    """Raise if the spec wants something that the peer lacks."""
    missing = [name for name, wanted in lacks.items() if wanted]
    if missing:
        raise CannotServe(f"{peer} has no {', '.join(missing)}")


def _other_alignment(spec: AttentionSpec, workload: Workload, peers_own: str) -> bool:
    """Does the causal mask differ from the one that a peer knows?"""
    if not spec.is_causal or workload.seqlen_q == workload.seqlen_k:
        return False
    return ("top_left" if spec.causal == "top_left" else "bottom_right") != peers_own


def _refuse_structure(peer: str, spec: AttentionSpec) -> None:
    """Raise if a mask of structure is wanted."""
    _refuse(peer, prefix_lm=spec.prefix_lm, documents=spec.documents, tree_mask=spec.tree_mask)


def _sdpa(backend: SDPBackend) -> Callable[..., Attend]:
    def make(
        spec: AttentionSpec,
        workload: Workload,
        *,
        attn_mask: Tensor | None = None,
        bias: Tensor | None = None,
        **lacking: Tensor,
    ) -> Attend:
        _refuse(
            "sdpa",
            fp8=spec.is_fp8,
            window=spec.window is not None,
            chunk=spec.has_chunk,
            softcap=spec.has_softcap,
            bottom_right=_other_alignment(spec, workload, "top_left"),
            alibi=spec.alibi,
            sinks=spec.sinks,
        )
        if spec.has_masks and backend is not SDPBackend.MATH:
            _refuse_structure("sdpa", spec)
        mask = _one_mask(spec, workload, attn_mask, bias, lacking)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    dropout_p=spec.dropout_p,
                    is_causal=spec.is_causal and mask is None,
                    scale=spec.softmax_scale,
                    enable_gqa=workload.group_size > 1,
                )

        return attend

    return make


def _one_mask(
    spec: AttentionSpec,
    workload: Workload,
    attn_mask: Tensor | None,
    bias: Tensor | None,
    beside: dict[str, Tensor],
) -> Tensor | None:
    """SDPA's attn_mask, with the causal mask in it: it takes one of the two."""
    if attn_mask is None and bias is None and not spec.has_masks:
        return None
    if spec.is_causal or spec.has_masks:
        rows, keys = (
            torch.arange(n, device=_device()) for n in (workload.seqlen_q, workload.seqlen_k)
        )
        batch = torch.arange(workload.batch, device=_device())[:, None, None, None]
        seen = _visible(spec, workload, None, beside)(batch, batch, rows[:, None], keys)
        attn_mask = seen if attn_mask is None else attn_mask & seen
    mask = attn_mask
    if bias is not None:
        mask = bias if attn_mask is None else bias.masked_fill(~attn_mask, float("-inf"))
    assert mask is not None
    return mask.expand(workload.batch, workload.num_heads_q, workload.seqlen_q, workload.seqlen_k)


def _math(spec: AttentionSpec, workload: Workload, **beside: Tensor) -> Attend:
    scores = workload.batch * workload.num_heads_q * workload.seqlen_q * workload.seqlen_k
    if scores > MATH_SCORES:
        raise CannotServe(f"stores {scores:.1e} scores; timed up to {MATH_SCORES:.1e}")
    return _sdpa(SDPBackend.MATH)(spec, workload, **beside)


def _flex(mode: str | None) -> Callable[..., Attend]:
    def make(
        spec: AttentionSpec,
        workload: Workload,
        *,
        attn_mask: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        **lacking: Tensor,
    ) -> Attend:
        from torch._functorch import config as functorch
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        _refuse("flex", fp8=spec.is_fp8, dropout=spec.has_dropout)
        # its backward is run again and again (retain_graph), which donated buffers forbid
        functorch.donated_buffer = False
        mask = None
        if spec.has_positions or spec.documents or spec.attn_mask:
            rows, keys = workload.seqlen_q, workload.seqlen_k
            visible = _visible(spec, workload, attn_mask, lacking)
            each = workload.batch if spec.has_masks else None
            mask = create_block_mask(visible, each, None, rows, keys, device=_device())
        elif workload.seqlen_q <= MAX_ROWS:  # its decode shares out keys by a mask's blocks only
            rows, keys = workload.seqlen_q, workload.seqlen_k
            mask = create_block_mask(
                lambda b, h, i, j: j >= 0, None, None, rows, keys, device=_device()
            )
        score_mod = _score_mod(spec, workload, bias, alibi_slopes)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            named: dict[str, Any] = {
                "score_mod": score_mod,
                "block_mask": mask,
                "scale": spec.softmax_scale,
                "enable_gqa": workload.group_size > 1,
            }
            if sinks is None:
                plain: Any = flex_attention(q, k, v, **named)
                return plain  # type: ignore[no-any-return]  # a tuple only with return_lse
            # It has no sinks: users rescale its out by what a sink leaves to the keys.
            out, aux = flex_attention(q, k, v, **named, return_aux=AuxRequest(lse=True))
            share = torch.sigmoid(aux.lse - sinks[..., None]).to(out.dtype)
            rescaled: Tensor = out * share[..., None]
            return rescaled

        compiled: Attend = torch.compile(attend, dynamic=False, mode=mode)
        return compiled

    return make


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _visible(
    spec: AttentionSpec,
    workload: Workload,
    attn_mask: Tensor | None = None,
    beside: dict[str, Tensor] | None = None,
) -> Callable[..., Tensor]:
    """FlexAttention's mask function of the spec's causal mask and window, of a mask, and of the
    structure that `beside` tells."""
    shift = alignment(spec, workload.seqlen_q, workload.seqlen_k)
    left, right = spec.window or (None, None)
    right = 0 if spec.is_causal else right
    given = {name: x for name, x in (beside or {}).items() if name in NAMES}
    rules = Structure.of(spec, workload.seqlen_k, dict(given))
    beyond = workload.seqlen_q + workload.seqlen_k  # further than any two rows stand apart
    low, high = -(beyond if left is None else left), beyond if right is None else right

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ahead = j - (i + shift)
        seen = ahead <= high
        if spec.moves_limits:
            seen = seen if spec.is_causal else torch.ones_like(seen)
            seen = rules.ordered(seen, b, i + shift, j)
            seen = seen if spec.is_causal else seen & (ahead <= high)
        if spec.documents:
            seen = seen & rules.shares_document(b, i, j)
        if left is not None:
            seen = seen & (ahead >= low)
        if spec.chunk is not None:
            seen = seen & (j // spec.chunk == (i + shift) // spec.chunk)
        return seen

    if attn_mask is None:
        return visible
    table = attn_mask[0, 0]
    if not (spec.has_positions or spec.documents):
        return lambda b, h, i, j: table[i, j]
    return lambda b, h, i, j: visible(b, h, i, j) & table[i, j]


def _score_mod(
    spec: AttentionSpec, workload: Workload, bias: Tensor | None, slopes: Tensor | None
) -> Callable[..., Tensor] | None:
    """FlexAttention's score function of the spec's softcap, bias and ALiBi."""
    cap = spec.softcap
    table = None if bias is None else bias[0, 0]
    shift = alignment(spec, workload.seqlen_q, workload.seqlen_k)
    if cap is None and table is None and slopes is None:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if table is not None:
            score = score + table[i, j]
        if slopes is not None:
            score = score - slopes[b, h] * (j - i - shift).abs()
        return score

    return changed


def _flash_attention_3(spec: AttentionSpec, workload: Workload, **lacking: Tensor) -> Attend:
    flash = _flash_module()
    _refuse(
        "fa3",
        dropout=spec.has_dropout,
        float32=spec.dtype == "float32",
        chunk=spec.has_chunk,
        e5m2=spec.dtype == "float8_e5m2",
        block_scales=spec.has_block_scales,
        top_left=_other_alignment(spec, workload, "bottom_right"),
        attn_mask=spec.attn_mask,
        bias=spec.bias,
        alibi=spec.alibi,
        sinks=spec.sinks,
    )
    _refuse_structure("fa3", spec)
    left, right = spec.window or (None, None)
    per_head = (workload.batch, workload.num_heads_kv)

    def attend(q: Tensor, k: Tensor, v: Tensor, *descales: Tensor) -> Tensor:
        wide = (descale.expand(per_head) for descale in descales)
        result: Any = flash.flash_attn_func(
            q,
            k,
            v,
            softmax_scale=spec.softmax_scale,
            causal=spec.is_causal,
            window_size=(-1 if left is None else left, -1 if right is None else right),
            softcap=spec.softcap or 0.0,
            **dict(zip(DESCALES, wide, strict=False)),
        )
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return attend


def _flash_kvcache(spec: AttentionSpec, workload: Workload, **lacking: Tensor) -> Attend:
    """Its function for decodes, which shares out keys; of full caches, which need no lengths."""
    _flash_attention_3(spec, workload, **lacking)  # raises what it cannot
    if workload.seqlen_q > MAX_ROWS:
        raise CannotServe(f"is timed up to {MAX_ROWS} query rows")
    _refuse("fa3 kvcache", fp8=spec.is_fp8)
    flash = _flash_module()
    left, right = spec.window or (None, None)

    def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash.flash_attn_with_kvcache(
            q,
            k,
            v,
            softmax_scale=spec.softmax_scale,
            causal=spec.is_causal,
            window_size=(-1 if left is None else left, -1 if right is None else right),
            softcap=spec.softcap or 0.0,
        )
        return out

    return decode


def _flash_module() -> Any:
    """FlashAttention-3 under either of the names it is installed by."""
    why = []
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        try:
            return importlib.import_module(name)
        except Exception as error:  # a wheel for another torch fails in any way
            why.append(f"{name}: {error}")
    raise CannotServe("; ".join(why))
