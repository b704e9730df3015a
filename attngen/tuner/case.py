"""The tensors and numbers of one call of an emitted kernel, on any device.

Used alike to compile (device "meta": no memory), to check and to time, so that all three see the
same dtypes, strides and alignments and so the same compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attngen import packed
from attngen.block_map import map_of, num_entries
from attngen.config import AnyDecodeConfig, KernelConfig
from attngen.fp8 import descale_shape, quantize, spread
from attngen.kv_cache import descale_of, quantized
from attngen.mask_rules import NAMES, made
from attngen.masks import document_scratch
from attngen.memory import numbered_rows, order_of, transposed
from attngen.packed_reference import Sequences
from attngen.score_reference import example_aux
from attngen.score_terms import SUM_KEYS
from attngen.settle import partials
from attngen.side_outputs import side_memory, side_outputs
from attngen.softmax_reference import alignment, scale_of
from attngen.spec import DESCALES, KV_DESCALES, PACKED_ARGS, AttentionSpec
from attngen.workload import TUNED_PAGE, Workload, spec_window

SEED = 0x5EED_0F_A77E
_STORED_ROWS = 16
_STORED_COLUMNS = 8
TARGET_SMS = 132
"""Multiprocessors of a GPU that is not here."""


@dataclass(frozen=True)
class Case:
    """Inputs and outputs of one attention; the gradients' are None for a forward."""

    spec: AttentionSpec
    workload: Workload
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    seed: Tensor
    do: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    rows: Tensor | None = None
    dq_sum: Tensor | None = None
    descales: tuple[Tensor, ...] = ()
    """Of q, k and v, if these are FP8."""
    v_t: Tensor | None = None
    """Scratch of the hopper lowering for these."""
    beside: dict[str, Tensor] = field(default_factory=dict)
    """attn_mask, bias, alibi_slopes, sinks, and the masks of structure: those of the spec, as the
    oracle takes them."""
    doc_tiles: Tensor | None = None
    """Scratch of document masks."""
    dbias: Tensor | None = None
    slope_sums: Tensor | None = None
    sides: tuple[Tensor, ...] = ()
    """What the forward writes for the spec's side outputs."""
    daux: dict[str, Tensor] = field(default_factory=dict)
    """Sums of the gradients of aux tensors, by the names of these."""
    pages: tuple[Tensor, Tensor] | None = None
    """k and v of a paged cache."""
    scratch: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Of decode, by shape."""
    offsets: tuple[Tensor, Tensor] | None = None
    """cu_seqlens_q and cu_seqlens_k of packed sequences, which are of uneven lengths."""
    order: Tensor | None = None
    """Scratch of the hopper lowering's forward for these."""
    padded_rows: Tensor | None = None
    """And of its backward, instead of `rows`."""
    tiles: Tensor | None = None
    """The lists of a block map."""
    kv_scales: tuple[Tensor, ...] = ()
    """Of each key of k and of v, if these are quantised: (batch, heads, keys)."""

    @property
    def sequences(self) -> Sequences:
        """Where packed sequences lie."""
        assert self.offsets is not None
        return Sequences.of(*self.offsets)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v without scales: in float32 if they had some."""
        if self.kv_scales:
            pairs_of_keys = zip((self.k, self.v), self.kv_scales, strict=True)
            k, v = (x.float() * scale[..., None] for x, scale in pairs_of_keys)
            return self.q.float(), k, v
        if not self.descales:
            return self.q, self.k, self.v
        pairs = zip((self.q, self.k, self.v), self.descales, strict=True)
        q, k, v = (x.float() * spread(descale, x) for x, descale in pairs)
        return q, k, v

    @property
    def numbers(self) -> dict[str, Any]:
        """What plan() takes beside tensors."""
        spec, sizes = self.spec, self.workload
        left, right = spec.window or (None, None)
        named: dict[str, Any] = {"softmax_scale": scale_of(spec)}
        if spec.has_softcap:
            named["softcap"] = spec.softcap
        if spec.has_dropout:
            named |= {"dropout_p": spec.dropout_p, "seed": self.seed}
        if spec.has_window_left:
            named["window_left"] = left
        if spec.has_window_right:
            named["window_right"] = right
        if spec.chunk is not None:
            named["chunk"] = spec.chunk
        if spec.aligns_rows:
            named["align"] = alignment(spec, sizes.seqlen_q, sizes.seqlen_k)
        if self.offsets is not None:
            named |= zip(PACKED_ARGS, self.offsets, strict=False)
            if spec.aligns_rows:
                named["align"] = int(spec.causal != "top_left")
        if spec.has_lengths:
            device, batch = self.q.device, sizes.batch
            used = torch.full((batch,), sizes.seqlen_k, dtype=torch.int32, device=device)
            named["seqused_k"] = used
            if spec.aligns_rows:
                named["align"] = int(spec.causal != "top_left")
        if spec.paged:
            pages = -(-sizes.seqlen_k // TUNED_PAGE)
            table = torch.arange(batch * pages, dtype=torch.int32, device=device)
            named["block_table"] = table.view(batch, pages)
        if spec.is_fp8:
            named |= zip(DESCALES, self.descales, strict=True)
        if spec.is_quantized:
            scales = (descale_of(spec, scale, TUNED_PAGE) for scale in self.kv_scales)
            named |= zip(KV_DESCALES, scales, strict=True)
        heads = (sizes.batch, sizes.num_heads_q)
        scores = (*heads, sizes.seqlen_q, sizes.seqlen_k)
        for name, tensor in self.beside.items():
            if name in NAMES or name in spec.aux_args:
                named[name] = tensor
            else:
                named[name] = tensor.expand(scores if tensor.dim() == 4 else heads)
        if self.tiles is not None:
            named["block_map"] = self.tiles.expand(*heads, self.tiles.shape[2])
        if self.dbias is not None:
            named["dbias"] = self.dbias.expand(scores)
        if self.slope_sums is not None:
            named["slope_sums"] = self.slope_sums
        return named | {f"d{name}": each for name, each in self.daux.items()}

    def tensors(self, config: KernelConfig) -> tuple[Tensor | None, ...]:
        """The positional arguments of plan()."""
        documents = (self.doc_tiles,) if self.spec.documents else ()
        if isinstance(config, AnyDecodeConfig):
            return self.q, *self._keys, self.out, self.lse, *self._partials(config)
        if config.direction == "fwd":
            made: tuple[Tensor | None, ...] = ()
            if config.lowering == "hopper":
                made = (self.v_t,) if self.spec.is_fp8 else made
                made = (self.order,) if self.spec.is_packed else made
            return self.q, self.k, self.v, self.out, self.lse, *self.sides, *made, *documents
        rows = self.padded_rows if config.lowering == "hopper" and self.offsets else self.rows
        scratch = (rows, self.dq_sum) if config.sums_dq else (rows,)
        made = (self.dq, self.dk, self.dv, *scratch, *documents)
        return self.q, self.k, self.v, self.out, self.lse, self.do, None, *made

    @property
    def _keys(self) -> tuple[Tensor, Tensor]:
        """k and v as kernels take them."""
        return self.pages or (self.k, self.v)

    def _partials(self, config: AnyDecodeConfig) -> list[Tensor]:
        """Scratch of a decode's splits, the same for each call."""
        count = TARGET_SMS
        if self.q.is_cuda:
            count = torch.cuda.get_device_properties(self.q.device).multi_processor_count
        window = spec_window(self.spec)
        made = partials(config, self.workload, window, self.v.shape[3], count)
        for each in made:
            if each.shape not in self.scratch:
                self.scratch[each.shape] = each.make(self.q)
        return [self.scratch[each.shape] for each in made]

    def results(self, config: KernelConfig) -> dict[str, Tensor]:
        """What a kernel of this config writes, by name."""
        if config.direction != "bwd":
            at = None if self.offsets is None else self.offsets[0]
            sides = zip(self.spec.aux, side_outputs(self.spec.aux, self.sides, at), strict=True)
            return {"out": self.out, "lse": self.lse, **dict(sides)}
        named = {name: getattr(self, name) for name in ("dq", "dk", "dv")}
        if self.dbias is not None:
            named["dbias"] = self.dbias
        if self.slope_sums is not None:
            named["dslopes"] = self.slope_sums.sum(2)
        if self.slope_sums is not None and self.offsets is not None:
            named["dslopes"] = packed.sums_of_slots(self.slope_sums[0], self.offsets[1])
        return named | {f"d{name}": each for name, each in self.daux.items()}

    def spoil(self, config: KernelConfig) -> None:
        """Fill what the kernel must write with NaN, so that stale results pass no check, and what
        it adds to with 0."""
        written = [self.out, self.lse, self.v_t, *self.sides]
        if config.direction == "bwd":
            written = [self.dq, self.dk, self.dv, self.rows, self.padded_rows, self.dq_sum]
        sums = [self.dbias, self.slope_sums, *self.daux.values()]
        for tensors, value in ((written, float("nan")), (sums, 0.0)):
            for tensor in tensors:
                if tensor is not None:
                    tensor.fill_(value)


def _pages(x: Tensor) -> Tensor:
    """Keys of (batch, heads, keys, dim) as (pages, heads, page size, dim), row by row."""
    batch, heads, keys, dim = x.shape
    count = -(-keys // TUNED_PAGE)
    found = x.new_zeros((batch, heads, count * TUNED_PAGE, _up(dim, 16)))[..., :dim]
    found[:, :, :keys] = x
    pages: Tensor = found.unflatten(2, (count, TUNED_PAGE)).transpose(1, 2).flatten(0, 1)
    return pages


def tunable(spec: AttentionSpec) -> AttentionSpec:
    """The spec with a positive scale: emitted files take no other, callers flip signs before."""
    scale = spec.softmax_scale
    return spec if scale is None else replace(spec, softmax_scale=abs(scale) or None)


def make(
    spec: AttentionSpec,
    workload: Workload,
    device: str,
    *,
    backward: bool,
    learns_scores: bool = False,
    shares_scores: bool = True,
) -> Case:
    """A case with random inputs and uninitialised outputs.

    Args:
        learns_scores: a backward also computes the gradients of bias and slopes.
        shares_scores: one mask and one bias for every head of the batch: else a long
            workload's would not fit.
    """
    spec = tunable(spec)
    batch, heads, heads_kv = workload.batch, workload.num_heads_q, workload.num_heads_kv
    rows, keys = workload.seqlen_q, workload.seqlen_k
    sums = -(-keys // SUM_KEYS)
    offsets = None
    if spec.is_packed:  # batch is the number of sequences, and the lengths are their means
        sums = packed.slots(batch * keys, batch)
        lengths = (packed.spread_lengths(batch, mean) for mean in (rows, keys))
        first, second = (packed.offsets_of(each, device) for each in lengths)
        offsets = (first, second)
        batch, rows, keys = 1, batch * rows, batch * keys
    dim, dim_v = spec.head_dim, spec.head_dim_v
    dtype = getattr(torch, spec.out_dtype)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(SEED)

    def filled(heads: int, rows: int, dim: int) -> Tensor:
        shape = _padded(spec, batch, heads, rows, dim)
        values = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        return _as_bhsd(values, spec.layout)[:, :, :rows, :dim]

    def narrowed(x: Tensor, rounded: Tensor) -> Tensor:
        """FP8 values that lie as x does."""
        stored = torch.empty_strided(x.shape, x.stride(), dtype=rounded.dtype, device=device)
        return stored.copy_(rounded)

    def result(heads: int, rows: int, dim: int) -> Tensor:
        return torch.empty((batch, rows, heads, dim), dtype=dtype, device=device).transpose(1, 2)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    named: dict[str, Any] = {}
    if backward:
        named = {
            "do": filled(heads, rows, dim_v),
            "dq": result(heads, rows, dim),
            "dk": result(heads_kv, keys, dim),
            "dv": result(heads_kv, keys, dim_v),
            "rows": numbers(batch, heads, spec.row_numbers, numbered_rows(rows)),
            "dq_sum": numbers(batch, heads, rows, dim),
        }
        if spec.is_packed:
            padded = packed.padded_rows(rows, workload.batch)
            named["padded_rows"] = numbers(1, heads, spec.row_numbers, padded)
    beside = beside_of(spec, workload, device, generator, shares_scores=shares_scores)
    if backward and learns_scores and spec.bias:
        named["dbias"] = numbers(*beside["bias"].shape)
    if backward and learns_scores and spec.alibi:
        named["slope_sums"] = numbers(batch, heads, sums)
    daux = {}
    if backward and learns_scores and not spec.deterministic:
        daux = {name: numbers(*beside[name].shape) for name in spec.learnt_aux}
    q, k, v = filled(heads, rows, dim), filled(heads_kv, keys, dim), filled(heads_kv, keys, dim_v)
    v = k[..., :dim_v] if spec.shared_kv else v
    descales: tuple[Tensor, ...] = ()
    if spec.is_fp8:
        rounded, descales = _quantized(spec, q, k, v)
        q, k, v = (narrowed(x, values) for x, values in zip((q, k, v), rounded, strict=True))
    kv_scales: tuple[Tensor, ...] = ()
    if spec.is_quantized:
        (stored_k, k_scale), (stored_v, v_scale) = (quantized(spec, x, TUNED_PAGE) for x in (k, v))
        k, v, kv_scales = narrowed(k, stored_k), narrowed(v, stored_v), (k_scale, v_scale)
    lists = None
    if spec.block_map:
        aux = tuple(beside[name] for name in spec.aux_args)
        lists = torch.empty(1, 1, num_entries(rows, keys), dtype=torch.int32, device=device)
        lists = lists if device == "meta" else map_of(spec, q, k, aux).lists
    tiles = None
    if spec.documents:
        tiles = torch.empty(document_scratch(batch, rows, keys), dtype=torch.int64, device=device)
    pages = (_pages(k), _pages(v)) if spec.paged else None
    if pages is not None and spec.shared_kv:
        pages = (pages[0], pages[0][..., :dim_v])
    return Case(
        spec,
        workload,
        q=q,
        k=k,
        v=v,
        out=result(heads, rows, dim_v),
        lse=numbers(batch, heads, rows),
        seed=torch.full((1,), SEED, dtype=torch.int64, device=device),
        descales=descales,
        v_t=transposed(v).make(v) if spec.is_fp8 else None,
        beside=beside,
        doc_tiles=tiles,
        sides=tuple(each.make(q) for each in side_memory(spec.aux, q, k)),
        daux=daux,
        offsets=offsets,
        pages=pages,
        order=order_of(workload.batch).make(q) if spec.is_packed else None,
        tiles=lists,
        kv_scales=kv_scales,
        **named,
    )


def beside_of(
    spec: AttentionSpec,
    sizes: Workload,
    device: str,
    generator: torch.Generator | None,
    *,
    shares_scores: bool = True,
) -> dict[str, Tensor]:
    """What a spec's calls bring beside q, k and v: a mask that keeps nine of ten keys, but none in
    one row; a bias that hides one key; what each head has of its own; and what `mask_rules.made`
    gives."""
    heads = (sizes.batch, sizes.num_heads_q)
    scores = (*((1, 1) if shares_scores else heads), sizes.seqlen_q, sizes.seqlen_k)

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    found = made(spec, sizes, device)
    if spec.attn_mask:
        mask = torch.empty(scores, dtype=torch.bool, device=device)
        found["attn_mask"] = mask.bernoulli_(0.9, generator=generator)
        mask[:, :, 7:8] = False
    if spec.bias:
        found["bias"] = normal(scores, getattr(torch, spec.dtype))
        found["bias"][..., 7:8] = float("-inf")
    if spec.alibi:
        nth = torch.arange(1.0, heads[1] + 1, device=device)
        found["alibi_slopes"] = (2 ** (-8 / heads[1] * nth)).repeat(heads[0], 1)
    if spec.sinks:
        found["sinks"] = normal(heads, torch.float32)
    return found | example_aux(spec, sizes, device, generator)


def _quantized(spec: AttentionSpec, *inputs: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """FP8 operands and their scales; on the meta device, the shapes alone."""
    assert spec.fp8_scale is not None
    q, k, v = inputs
    if not q.is_meta:
        found = quantize(q, k, v, spec.dtype, spec.fp8_scale)
        return list(found[:3]), found[3:]
    shapes = (descale_shape(spec.fp8_scale, k, x.shape[2]) for x in inputs)
    descales = (torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes)
    return [x.to(getattr(torch, spec.dtype)) for x in inputs], tuple(descales)


def _up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


def _padded(spec: AttentionSpec, batch: int, heads: int, rows: int, dim: int) -> tuple[int, ...]:
    """The stored shape: 16 bytes a row at least, as memory.aligned gives, and rows in sixteens."""
    in_bytes = spec.is_fp8 or spec.is_quantized
    rows, dim = _up(rows, _STORED_ROWS), _up(dim, 16 if in_bytes else _STORED_COLUMNS)
    is_rows_first = spec.layout in ("bshd", "thd")
    return (batch, rows, heads, dim) if is_rows_first else (batch, heads, rows, dim)


def _as_bhsd(values: Tensor, layout: str) -> Tensor:
    return values.transpose(1, 2) if layout in ("bshd", "thd") else values
