"""Packed sequences, `layout="thd"`: what a call brings, its checks, and sums by sequence.

A call has q (total_q, heads, dim) and so on, whose rows are those of all sequences, one behind
another. Sequence n owns rows cu_seqlens[n] .. cu_seqlens[n + 1], of which the first seqused[n] are
used if that is given. Kernels see (1, heads, total, dim) views, and read offsets on the device: the
host never waits for their values, and so checks them in Triton's interpreter alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.checks import check_beside
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.shard import WHOLE
from attngen.spec import PACKED_ARGS, AttentionSpec
from attngen.spec_rules import no_pairs
from attngen.values import shown

SUM_KEYS = 16
"""Keys of the smallest tile."""


class Packed(NamedTuple):
    """The offsets of a call, in the order of `spec.PACKED_ARGS`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None

    @property
    def num_seqs(self) -> int:
        """How many sequences there are."""
        return self.cu_seqlens_q.shape[0] - 1


def packed_of(spec: AttentionSpec, extra: Sequence[Tensor | None]) -> Packed:
    """The offsets among the op's `extra`."""
    at = spec.tensor_args.index(PACKED_ARGS[0])
    return Packed(*extra[at : at + len(PACKED_ARGS)])  # type: ignore[arg-type]  # checked first


def offsets(
    layout: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any
) -> Packed:
    """The offsets of a call whose layout is "thd", or becomes it by them."""
    given = dict(zip(PACKED_ARGS, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), strict=True))
    for name in PACKED_ARGS[:2]:
        if given[name] is None:
            what = [other for other, x in given.items() if x is not None] or ['layout="thd"']
            raise SpecError(
                f"{what[0]} without {name}: packed sequences need both cu_seqlens_q and "
                "cu_seqlens_k, int32 (num_seqs + 1), on q's device; pass the same tensor twice "
                "where they agree"
            )
    if layout == "bshd":
        raise SpecError(
            'cu_seqlens_q with layout="bshd": packed sequences have the layout "thd", q (total_q, '
            "heads, dim); leave layout out"
        )
    for name, x in given.items():
        if x is not None and not isinstance(x, Tensor):
            raise SpecError(
                f"{name} must be an int32 tensor on q's device, got {shown(x)}; write "
                f"torch.tensor({name}, dtype=torch.int32, device=q.device)"
            )
        if x is not None and x.dim() != 1:
            raise SpecError(
                f"{name} must have one dim, got shape {tuple(x.shape)}; it has "
                f"{'num_seqs + 1 offsets' if name in PACKED_ARGS[:2] else 'num_seqs lengths'}"
            )
    return Packed(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)


def refuse_offsets(layout: str, *given: Any) -> None:
    """Refuse offsets in a call whose spec has none."""
    for name, x in zip(PACKED_ARGS, given, strict=True):
        if x is not None:
            raise SpecError(
                f'{name} is given, but the spec says layout="{layout}"; compile a spec with '
                f'layout="thd", or leave {name} out'
            )


def refuse_beside(attn_mask: Any, bias: Any, shard: tuple[Any, ...]) -> None:
    """Refuse what packed sequences cannot have, of what a call brings."""
    why = [no_pairs(n) for n, x in (("attn_mask", attn_mask), ("bias", bias)) if x is not None]
    if shard != WHOLE:
        why.append(
            "q_start, q_step, k_start, k_step and seqlen_*_total with packed sequences are not "
            "built yet: each sequence would have its own; leave them out"
        )
    if why:
        raise UnsupportedSpecError(why)


def heads_first(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(total, heads, dim) as (1, heads, total, dim) views."""
    views = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise SpecError(f"{name} must be a torch.Tensor, got {shown(x)}")
        if x.is_nested or x.layout is not torch.strided:
            raise SpecError(
                f"{name} must be dense with cu_seqlens_q, got {x.layout}; pass {name}.values()"
            )
        if x.dim() != 3:
            raise SpecError(
                f"{name} must have 3 dims with packed sequences, (total, heads, dim), got shape "
                f"{tuple(x.shape)}; flatten batch and length into one"
            )
        views.append(x.transpose(0, 1).unsqueeze(0))
    q, k, v = views
    return q, k, v


def rows_first(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The results as the caller has rows: out (total_q, heads, dim), lse (total_q, heads)."""
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def side_rows_first(aux: Sequence[str], sides: Sequence[Tensor]) -> list[Tensor]:
    """Side outputs likewise: entropy (total_q, heads); max_logit is (num_seqs, heads) anyway."""
    pairs = zip(aux, sides, strict=True)
    return [x if name == "max_logit" else x.squeeze(0).transpose(0, 1) for name, x in pairs]


def check_offsets(spec: AttentionSpec, q: Tensor, extra: Sequence[Tensor | None]) -> None:
    """Dtypes, shapes and devices of the offsets."""
    given = dict(zip(PACKED_ARGS, packed_of(spec, extra), strict=True))
    first = given["cu_seqlens_q"]
    if q.shape[0] != 1 or first is None or given["cu_seqlens_k"] is None:
        raise SpecError(
            'layout="thd" takes (1, heads, total, dim) views, cu_seqlens_q and cu_seqlens_k; call '
            "attngen.attention"
        )
    for name, x in given.items():
        if x is None:
            continue
        check_beside(name, x, torch.int32, q)
        size = first.shape[0] if name in PACKED_ARGS[:2] else first.shape[0] - 1
        if first.numel() == 0 or tuple(x.shape) != (size,):
            what = "num_seqs + 1 offsets" if name in PACKED_ARGS[:2] else "num_seqs lengths"
            raise SpecError(
                f"{name} must have shape ({max(size, 1)},), {what}, as cu_seqlens_q of shape "
                f"{tuple(first.shape)} has it, got {tuple(x.shape)}"
            )


def check_values(packed: Packed, total_q: int, total_k: int) -> None:
    """Refuse offsets that decrease or leave the tensor, and used lengths beyond a sequence. Waits
    for the values: for tensors on the CPU."""
    sides = (("q", packed.cu_seqlens_q, packed.seqused_q, total_q),)
    sides += (("k", packed.cu_seqlens_k, packed.seqused_k, total_k),)  # type: ignore[assignment]  # None too
    for side, cu, used, total in sides:
        at = cu.tolist()
        if at != sorted(at) or at[0] < 0 or at[-1] > total:
            raise SpecError(
                f"cu_seqlens_{side} must not decrease and lie from 0 to {total}, the rows of "
                f"{side}, got {shown(at)}; it is torch.cumsum of the lengths, after a 0"
            )
        for n, length in enumerate([] if used is None else used.tolist()):
            if not 0 <= length <= at[n + 1] - at[n]:
                raise SpecError(
                    f"seqused_{side}[{n}] must be from 0 to {at[n + 1] - at[n]}, the length of its "
                    f"sequence, got {length}"
                )


def spread_lengths(count: int, mean: int) -> list[int]:
    """Uneven lengths of packed sequences, whose mean is `mean`: from about half to about three
    halves of it."""
    steps = max(count - 1, 1)
    return [mean + int(mean * (2 * n - count + 1) / (2 * steps)) for n in range(count)]


def offsets_of(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    at = [0, *itertools.accumulate(lengths)]
    return torch.tensor(at, dtype=torch.int32, device=device)


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """The sequence of each row, int64 (total,); one of the nearest for a row of none."""
    rows = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    found = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    return found.clamp(0, max(cu_seqlens.shape[0] - 2, 0))


def sums_of_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sum of each sequence's rows of x (n, total): (num_seqs, n)."""
    return _sums(x, cu_seqlens.clamp(0, x.shape[1]).long())


def padded_rows(total_q: int, count: int) -> int:
    """How many row numbers a backward of the hopper lowering has of a head: those of each sequence
    fill whole tiles of 128. Where they begin, `packed_bwd.py.jinja` says."""
    return (total_q // 128 + count + 2) * 128


def maxima_of_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The largest of each sequence's rows of x (n, total), -inf if it has none: (num_seqs, n)."""
    begins = cu_seqlens.clamp(0, x.shape[1]).long()
    return _reduced(x, begins, "max", float("-inf"))


def slots(total_k: int, count: int) -> int:
    """How many sums of ALiBi slopes a backward makes: `dkdv.py.jinja` says which of whose."""
    return total_k // SUM_KEYS + count + 2


def sums_of_slots(x: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """The sum of each sequence's slots of x (n, slots): (num_seqs, n)."""
    n = torch.arange(1, cu_seqlens_k.shape[0] + 1, device=cu_seqlens_k.device)
    return _sums(x, (cu_seqlens_k.long() // SUM_KEYS + n).clamp(0, x.shape[1]))


def _sums(x: Tensor, begins: Tensor) -> Tensor:
    """Sums of columns begins[m] .. begins[m + 1] of x (n, columns): (m, n), in a fixed order."""
    return _reduced(x, begins, "sum", 0.0)


def _reduced(x: Tensor, begins: Tensor, how: str, initial: float) -> Tensor:
    count, columns = x.shape
    at = begins + columns * torch.arange(count, device=x.device)[:, None]
    at = torch.cat([at.flatten(), at.new_full((1,), count * columns)])
    found = torch.segment_reduce(x.flatten(), how, offsets=at, unsafe=True, initial=initial)
    return found.view(count, -1)[:, :-1].T
