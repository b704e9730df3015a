"""The text keys of calls, found once for each kind of call."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from attngen.identity import parsed
from attngen.masks import MASK_FIELDS
from attngen.score_terms import SCORE_FIELDS
from attngen.spec import AttentionSpec


def text_key(*traits: Any) -> str:
    """The text key of a functional call, by its traits: the parameters of `_cached_text_key`.

    A constant to torch.compile, which warns of a cached function that it meets itself.
    """
    try:
        return _cached_text_key(*traits)
    except TypeError:  # something that cannot be hashed: let the spec refuse it
        return _cached_text_key.__wrapped__(*traits)


torch.compiler.assume_constant_result(text_key)


def key_with_aux(key: str, aux: tuple[str, ...]) -> str:
    """`with_aux`, as such a constant."""
    return with_aux(key, aux)


torch.compiler.assume_constant_result(key_with_aux)


@functools.lru_cache(maxsize=1024)
def with_aux(key: str, aux: tuple[str, ...]) -> str:
    """The text key that asks for these side outputs, and for no others."""
    return replace(parsed(key), aux=aux).text_key


@functools.lru_cache(maxsize=4096, typed=True)  # causal=0 is not causal=False: the spec refuses it
def _cached_text_key(
    head_dim: int,
    head_dim_v: int,
    dtype: str,
    causal: bool | str,
    left: bool,
    right: bool,
    chunk: bool,
    dropout: bool,
    softcap: bool,
    layout: str,
    precision: str,
    deterministic: bool,
    batch_invariant: bool,
    fp8_scale: str | None,
    scores: tuple[str, ...],
    masks: tuple[str, ...],
    others: tuple[str, ...],
    kv_dtype: str | None = None,
    kv_scale: str | None = None,
    score_mod: str | None = None,
    mask_mod: str | None = None,
) -> str:
    """`scores` and `masks` name tensors, and `others` spec fields that are on."""
    terms = (*(SCORE_FIELDS[name] for name in scores), *(MASK_FIELDS[name] for name in masks))
    spec = AttentionSpec(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=causal,
        window=(0 if left else None, 0 if right else None),
        chunk=1 if chunk else None,
        dropout_p=0.5 if dropout else 0.0,
        softcap=1.0 if softcap else None,
        layout=layout,
        precision=precision,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        fp8_scale=fp8_scale,
        kv_dtype=kv_dtype,
        kv_scale=kv_scale,
        score_mod=score_mod,
        mask_mod=mask_mod,
        **dict.fromkeys((*terms, *others), True),  # type: ignore[arg-type]  # names of bool fields
    )
    return spec.text_key


def drops(p: float) -> bool:
    """Is there dropout?"""
    if p > 0:  # noqa: SIM103  (torch.compile may hand in a symbolic p; a branch gives a bool)
        return True
    return False
