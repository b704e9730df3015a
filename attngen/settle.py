"""What is settled once for a layout: which kernel serves it, its memory and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen import counters, paged
from attngen.config import AnyDecodeConfig
from attngen.decode import counter_count, partial_shape, row_tiles, split_count
from attngen.identity import parsed
from attngen.kernel import Prepared, Tensors
from attngen.masks import document_scratch
from attngen.memory import Memory, addressable, float32, numbered_rows, order_of, transposed
from attngen.packed import check_values, packed_of, padded_rows
from attngen.resolve import device_index_of, resolve
from attngen.spec import AttentionSpec
from attngen.values import MAX_POSITION
from attngen.workload import Direction, Workload, bucket, in_chunk, packed_workload


class Counters(Memory):
    """Counters of a kernel, which are not allocated for each call; the last thing it takes."""

    def make(self, like: Tensor) -> Tensor:
        return counters.zeros(like, self.shape[0])


class Call(NamedTuple):
    """What is remembered for a layout."""

    run: Callable[[Tensors], None]
    device: int | None
    memory: list[Memory]
    """Of the results, then of the scratch."""
    aux: tuple[str, ...] = ()
    """Side outputs that follow out and lse."""
    places: AttentionSpec | None = None
    """Set if `extra` must be placed first, as kernels take it: the spec."""
    sequences: AttentionSpec | None = None
    """Set if the values of offsets must be looked at, on the CPU: the spec."""

    def repeat(self, tensors: list[Tensor | None]) -> bool:
        """Launch for tensors that have the addresses of those that kernels take; False if these
        must have their shapes, too."""
        if not isinstance(self.run, Prepared):
            return False
        if self.device is None or self.device == torch._C._cuda_getDevice():
            return self.run.repeat(tensors)
        with torch.cuda.device(self.device):
            return self.run.repeat(tensors)

    def launch(self, tensors: Tensors, count: int) -> None:
        """Launch for tensors as kernels take them, of which `count` are results and scratch."""
        if self.device is None and self.sequences is not None:
            extra = tensors[3 + count :]
            q: Tensor = tensors[0]  # type: ignore[assignment]  # never None
            k: Tensor = tensors[1]  # type: ignore[assignment]  # never None
            if self.sequences.has_lengths:
                paged.check_values(self.sequences, q.shape[2], k, extra)
            else:
                check_values(packed_of(self.sequences, extra), q.shape[2], k.shape[2])
        if self.device is None or self.device == torch._C._cuda_getDevice():
            self.run(tensors)
        else:
            with torch.cuda.device(self.device):
                self.run(tensors)


def settled(
    direction: Direction,
    text_key: str,
    tiles: tuple[Tensor, ...],
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
    results: list[Memory],
    buffers: tuple[str, ...] = (),
    out: Tensor | None = None,
) -> tuple[Call, bool]:
    """The call of a layout that kernels can take, and whether it serves the next one, too.

    Args:
        tiles: what descriptors must address: q, k and v, and more of a backward.
        extra: as kernels take it; it ends with tensors that plan() takes as `buffers` names them.
        results: memory of the results.
        out: the caller's tensor for the first result.
    """
    spec = parsed(text_key)
    named = dict(zip(spec.int_args, ints, strict=True))
    q, k, v, *_ = tiles
    batch, heads, seqlen_q, dim = q.shape
    dim_v = v.shape[3]
    left, right = named.get("window_left"), named.get("window_right")
    if left is not None and spec.is_causal:
        right = 0
    if "chunk" in named:
        left, right = in_chunk((left, right), named["chunk"], spec.is_causal)
    seqlen_k = paged.key_capacity(spec, k, extra)
    sizes = Workload(batch, heads, k.shape[1], seqlen_q, seqlen_k)
    if spec.is_packed:
        count = packed_of(spec, extra).num_seqs
        sizes = packed_workload(count, heads, k.shape[1], seqlen_q, k.shape[2])
    if spec.packs_queries:
        count = paged.num_seqs(spec, extra)
        sizes = packed_workload(count, heads, k.shape[1], seqlen_q, k.shape[2])
        sizes = replace(sizes, seqlen_k=seqlen_k)
    place = bucket(direction, sizes, (left, right), batch_invariant=spec.batch_invariant)
    if spec.paged:
        place = replace(place, page_size=k.shape[2])
    device = device_index_of(q)
    resolved = resolve(text_key, place, device)
    kernel = resolved.kernel
    is_hopper = kernel.config.lowering == "hopper"
    captured = is_hopper and direction != "decode" and _is_captured(device)
    mixed = is_hopper and any(x.dtype != q.dtype for x in tiles)  # the gradient of a partial out
    addressed = tiles if out is None else (*tiles, out)
    has_others = kernel is not resolved.by_pointer
    if captured or mixed or (has_others and not addressable(*addressed)):
        kernel = resolved.by_pointer
    memory = [*results]
    if spec.is_fp8 and kernel.config.lowering == "hopper":
        memory.append(transposed(tiles[2]))
    if isinstance(kernel.config, AnyDecodeConfig):
        total = seqlen_q if spec.packs_queries else None
        sms = resolved.gpu.sm_count
        memory += partials(kernel.config, sizes, (left, right), dim_v, sms, total)
    if spec.is_packed and kernel.config.lowering == "hopper" and direction == "fwd":
        memory.append(order_of(packed_of(spec, extra).num_seqs))
    if direction == "bwd":
        padded = numbered_rows(seqlen_q)
        if spec.is_packed and kernel.config.lowering == "hopper":
            padded = padded_rows(seqlen_q, packed_of(spec, extra).num_seqs)
        memory.append(float32(batch, heads, spec.row_numbers, padded))
        if kernel.config.sums_dq:
            memory.append(float32(batch, heads, seqlen_q, dim))
    if spec.documents:
        sizes_of = document_scratch(batch, seqlen_q, k.shape[2])
        memory.append(float32(*sizes_of)._replace(dtype=torch.int64))
    numbers = numbers_of(spec, named, seqlen_q, seqlen_k)
    numbers |= zip(spec.scalar_args, scalars, strict=True)
    keywords = tuple(name.removeprefix("dropout_") for name in spec.tensor_args) + buffers
    run = kernel.prepared(numbers, keywords)
    aux = spec.aux if direction != "bwd" else ()
    has_sequences = spec.is_packed or spec.has_lengths
    call = Call(run, device, memory, aux, sequences=spec if has_sequences else None)
    return call, not captured


def partials(
    config: AnyDecodeConfig,
    sizes: Workload,
    window: tuple[int | None, int | None],
    dim_v: int,
    sm_count: int,
    total_q: int | None = None,
) -> list[Memory]:
    """Scratch of a decode's splits; none if there is one. `total_q` is of packed queries."""
    rows, group, seen = sizes.seqlen_q, sizes.group_size, sizes.seqlen_k
    left, right = window
    if left is not None and right is not None and not config.split_keys:
        seen = min(seen, left + right + rows)
    tiles = sizes.batch * row_tiles(config, rows, group)
    total = sizes.batch * rows if total_q is None else total_q
    splits = split_count(config, tiles * sizes.num_heads_kv, seen, sm_count)
    if splits == 1:
        return []
    if total_q is not None:
        tiles = total_q * group // config.block_m + sizes.batch + 2
    made = [float32(*partial_shape(splits, total * sizes.num_heads_q, dim_v))]
    count = counter_count(config, tiles, sizes.num_heads_kv)
    return [*made, Counters((count,), (1,), torch.int32)] if count else made


def _is_captured(device: int | None) -> bool:
    """Is a CUDA graph being captured? plan() of a hopper file may copy its table of work to the
    device, which a capture forbids."""
    return device is not None and torch.cuda.is_current_stream_capturing()


def numbers_of(
    spec: AttentionSpec, named: dict[str, int], seqlen_q: int, seqlen_k: int
) -> dict[str, Any]:
    """The ints of a call as the emitted file's plan() takes them."""
    placed = ("q_start", "q_step", "k_start", "k_step", "batch_start", "head_start")
    numbers: dict[str, Any] = {name: named[name] for name in placed if name in named}
    for side in ("window_left", "window_right"):
        if side in named:
            numbers[side] = min(named[side], MAX_POSITION)
    if "chunk" in named:
        numbers["chunk"] = named["chunk"]
    if spec.aligns_rows:
        total_q, total_k = named["seqlen_q_total"], named["seqlen_k_total"]
        total_q = seqlen_q if total_q < 0 else total_q
        total_k = seqlen_k if total_k < 0 else total_k
        numbers["align"] = total_k - total_q if named["bottom_right"] else 0
        if spec.tree_mask:
            numbers["tree_end"] = total_k
    if (spec.is_packed or spec.has_lengths) and spec.aligns_rows:  # each sequence has its own
        numbers["align"] = int(bool(named["bottom_right"]))
    return numbers
