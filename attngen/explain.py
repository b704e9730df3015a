"""Which record, config and lowering serve a call, and why: as data and printable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from attngen import lowering
from attngen.config import KernelConfig
from attngen.decode import family
from attngen.errors import SpecError
from attngen.gpu import GpuInfo
from attngen.identity import parsed
from attngen.kernel import file_name
from attngen.lookup import Found
from attngen.memory import addressable, aligned
from attngen.one_row import unordered
from attngen.render import render
from attngen.resolve import device_index_of, device_info, find
from attngen.shared_kv import key_of
from attngen.spec import AttentionSpec
from attngen.workload import (
    DIRECTIONS,
    Bucket,
    Direction,
    Workload,
    check_direction,
    packed_workload,
    spec_bucket,
)


@dataclass(frozen=True)
class Choice:
    """What serves one direction of a call."""

    spec: AttentionSpec
    bucket: Bucket
    gpu: GpuInfo
    config: KernelConfig
    found: Found
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        record = self.found.record
        return {
            "direction": self.bucket.direction,
            "bucket": self.bucket.key,
            "tier": self.found.tier,
            "lowering": self.config.lowering,
            "config": self.config.as_dict(),
            "file": file_name(self.spec, self.bucket.direction, render(self.spec, self.config)),
            "record": record.as_dict() if record else None,
            "why": list(self.found.why),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        record = self.found.record
        lines = [
            f"{self.bucket.direction}: {self.config.key}",
            f"  bucket   {self.bucket.key} on {self.gpu.name} ({self.gpu.device_key})",
            f"  chosen   from {self.found.tier}",
        ]
        if record and record.median_us is not None:
            lines.append(
                f"  measured {record.median_us:.1f} us, the default of then "
                f"{record.default_us:.1f} us ({record.date}, {record.rounds} rounds)"
            )
        elif record:
            lines.append(f"  measured never: origin {record.origin} ({record.date})")
        lines += [f"  why      {line}" for line in self.found.why]
        lines += [f"  note     {line}" for line in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What serves a call, direction by direction. `print` it, or read `as_dict()`."""

    spec: AttentionSpec
    workload: Workload
    choices: tuple[Choice, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "spec": self.spec.key,
            "text_key": self.spec.text_key,
            "workload": str(self.workload),
            "choices": [choice.as_dict() for choice in self.choices],
        }

    def source(self, direction: Direction) -> str:
        """The emitted text of a direction."""
        check_direction(direction)
        for choice in self.choices:
            served = choice.bucket.direction
            if direction in (served, "fwd" if served == "decode" else served):
                return render(choice.spec, choice.config)
        raise SpecError(
            f"this explanation has no direction {direction!r}; ask explain_workload for it"
        )

    def __str__(self) -> str:
        head = [f"spec     {self.spec.key}", f"workload {self.workload} (B,Hq,Hkv,Sq,Sk)"]
        return "\n".join([*head, *map(str, self.choices)])


def explain_workload(
    spec: AttentionSpec,
    workload: Workload,
    *,
    gpu: GpuInfo | None = None,
    directions: tuple[Direction, ...] = DIRECTIONS,
    page_size: int = 0,
) -> Explanation:
    """What would serve a workload on a GPU (default: the current device)."""
    from attngen.gpu import current

    where = gpu or current()
    choices = []
    for direction in directions:
        if direction == "bwd" and (spec.has_lengths or spec.is_quantized):  # has none
            continue
        served = spec.served_as(direction)
        text = (unordered(served, workload.seqlen_q) if direction == "fwd" else served).text
        at = spec_bucket(family(direction, text, workload.seqlen_q), spec, workload)
        if page_size:
            at = replace(at, page_size=page_size)
        config, found, _ = find(text, at, where)
        notes = lowering.notes(text, config, at, where)
        if text.is_fp8 != spec.is_fp8:
            notes.append("FP8 inputs are dequantised, and served as dtype=bfloat16")
        choices.append(Choice(text, at, where, config, found, tuple(notes)))
    return Explanation(spec, workload, tuple(choices))


def explain_call(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_seqs: int | None = None,
    num_keys: int | None = None,
) -> Explanation:
    """What serves a call of these tensors, each (batch, heads, seqlen, dim), or of so many packed
    sequences; of pages, (pages, heads, page size, dim), with room for so many keys."""
    keys = k.shape[2] if num_keys is None else num_keys
    workload = Workload(q.shape[0], q.shape[1], k.shape[1], q.shape[2], keys)
    if num_seqs is not None:
        sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        workload = packed_workload(num_seqs, *sizes)
        if spec.packs_queries:
            workload = replace(workload, seqlen_k=keys)
    where = device_info(device_index_of(q))
    page_size = k.shape[2] if spec.paged else 0
    made = explain_workload(spec, workload, gpu=where, page_size=page_size)
    found = [*made.choices]
    if not spec.shared_kv and parsed(key_of(spec.text_key, q, k, v)).shared_kv:
        shared = replace(spec, shared_kv=True)
        found[:1] = explain_workload(
            shared, workload, gpu=where, page_size=page_size, directions=("fwd",)
        ).choices
    choices = []
    for choice in found:
        notes = list(choice.notes)
        config = choice.config
        if not addressable(*(aligned(x) for x in (q, k, v))):
            config = lowering.by_pointer(choice.spec, config, choice.bucket, where)
        if config != choice.config:
            was = choice.config
            why = "lowering=hopper" if was.lowering == "hopper" else "descriptor"
            notes.append(
                f"tiles=pointer instead of {why}: a pointer or stride of q, k or v is no "
                "multiple of 16 bytes"
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            if aligned(x) is not x:
                notes.append(
                    f"{name} is copied: its strides {tuple(x.stride())} are not 1 in the last dim "
                    "and multiples of 16 bytes in the others"
                )
        choices.append(
            Choice(choice.spec, choice.bucket, where, config, choice.found, tuple(notes))
        )
    return Explanation(spec, workload, tuple(choices))
