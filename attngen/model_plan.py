"""What to tune for a whole model: from its config.json, or from a TOML list of jobs.

Pure but for `read_file`. Two calls that share a kernel's text and a bucket share a record, so a
plan holds each (text_key, bucket) once, with everything that it serves as its reasons.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attngen.errors import SpecError, UnsupportedSpecError, nearest
from attngen.model_config import PHASES, Layers, Phase, Skipped, read_config
from attngen.one_row import kept_at
from attngen.spec import AttentionSpec
from attngen.values import shown
from attngen.workload import DIRECTIONS, Bucket, Direction, Workload, check_direction

SEQLENS = (2048, 8192)
"""Default lengths. A record also serves one step up or down, in both lengths together and whatever
the batch, so these cover 1024 to 16384."""
TRAINING_TOKENS = 8192
DECODE_BATCH = 16
DEFAULT_DTYPE = "bfloat16"
NO_DECODE_KERNEL = "decode kernels are not built yet, the forward serves it"

_DIRECTIONS: dict[Phase, tuple[Direction, ...]] = {
    "training": ("fwd", "bwd"),
    "prefill": ("fwd",),
    "decode": ("fwd",),
}
_JOB_KEYS = ("spec", "workload", "direction", "why")
_EXAMPLE = '[[job]] with spec = "head_dim=128,causal=true" and workload = "4,32,8,4096,4096"'


@dataclass(frozen=True)
class PlannedJob:
    """One call of the tuner."""

    spec: AttentionSpec
    workload: Workload
    directions: tuple[Direction, ...]
    why: tuple[str, ...] = ()
    """What the result serves."""


@dataclass(frozen=True)
class Plan:
    jobs: tuple[PlannedJob, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    """What was assumed."""

    def only(self, directions: Sequence[Direction]) -> Plan:
        """The plan without the other directions."""
        kept = [
            replace(job, directions=tuple(d for d in job.directions if d in directions))
            for job in self.jobs
        ]
        return replace(self, jobs=tuple(job for job in kept if job.directions))

    def shard(self, index: int, count: int) -> Plan:
        """Every `count`-th job, from `index` on."""
        return replace(self, jobs=self.jobs[index::count])


class _Jobs:
    """Collects jobs, each (text_key, bucket) once."""

    def __init__(self) -> None:
        self._jobs: list[PlannedJob] = []
        self._at: dict[tuple[str, str], int] = {}

    def add(
        self,
        spec: AttentionSpec,
        workload: Workload,
        directions: Sequence[Direction],
        why: str,
    ) -> None:
        new: list[Direction] = []
        for each in directions:
            served, bucket = kept_at(each, spec, workload)
            key = (served.text_key, bucket.key)
            at = self._at.setdefault(key, len(self._jobs))
            if at == len(self._jobs):
                new.append(each)
            elif why and why not in self._jobs[at].why:
                self._jobs[at] = replace(self._jobs[at], why=(*self._jobs[at].why, why))
        if new:
            self._jobs.append(PlannedJob(spec, workload, tuple(new), (why,) if why else ()))

    def all(self) -> tuple[PlannedJob, ...]:
        return tuple(self._jobs)


def plan_stored(keys: Iterable[tuple[str, str]]) -> Plan:
    """The jobs behind stored records: for each (text_key, bucket key) the largest workload.

    Numbers that the text forgets (scale, softcap, dropout) are representative ones, windows those
    of the bucket.
    """
    jobs = _Jobs()
    skipped = []
    for text_key, bucket_key in keys:
        try:
            bucket = Bucket.parse(bucket_key)
            spec = AttentionSpec.parse(text_key)
            if not bucket.is_possible:
                raise SpecError("no call has this bucket")
            if bucket.workload is None:
                raise SpecError("its record serves all sizes; tune it by SPEC")
            chunk = max(bucket.window, 1) if spec.has_chunk else None
            spec = replace(spec, window=_window_of(spec, bucket.window), chunk=chunk)
            jobs.add(spec, bucket.workload, (bucket.direction,), "")
        except SpecError as error:
            skipped.append(Skipped(bucket_key, text_key, str(error)))
    return Plan(jobs.all(), tuple(skipped))


def _window_of(spec: AttentionSpec, keys: int) -> tuple[int | None, int | None] | None:
    """A window of the spec's sides in which a query sees that many keys."""
    sides = [spec.has_window_left, spec.has_window_right and not spec.is_causal]
    if not any(sides):
        return None
    share = max(keys - 1, 0) // sum(sides)
    left, right = (share if closed else None for closed in sides)
    return left, right


def plan_model(
    config: Mapping[str, Any],
    *,
    phases: Sequence[Phase] = PHASES,
    batches: Sequence[int] = (),
    seqlens: Sequence[int] = (),
    dtype: str | None = None,
    tensor_parallel: int = 1,
) -> Plan:
    """The jobs of a HuggingFace config.

    Args:
        config: the parsed config.json.
        phases: of training (forward and backward), prefill and decode (one query row).
        batches: default 8192 tokens a call in training, 1 in prefill, 16 in decode.
        seqlens: default 2048 and 8192, cut to what the model's positions allow.
        dtype: instead of the config's.
        tensor_parallel: GPUs that share the heads.

    Raises:
        SpecError: the config lacks a size, or no layer's heads can be shared so.
    """
    model = read_config(config)
    skipped = list(model.skipped)
    sharded = [(layers, _share(layers, tensor_parallel)) for layers in model.layers]
    if sharded and not any(heads for _, heads in sharded):
        raise SpecError(_no_share(model.layers[0], tensor_parallel))
    jobs = _Jobs()
    for layers, heads in sharded:
        if heads is None:
            why = _no_share(layers, tensor_parallel)
            skipped.append(Skipped(layers.name, _line(layers.fields), why))
            continue
        chosen = {"dtype": dtype or layers.dtype or DEFAULT_DTYPE}
        fields: dict[str, Any] = layers.fields | chosen
        try:
            spec = AttentionSpec(**fields)
            dropping = replace(spec, dropout_p=layers.dropout_p)
        except SpecError as error:
            skipped.append(Skipped(layers.name, _line(fields), str(error)))
            continue
        for phase in (p for p in PHASES if p in phases and p in layers.phases):
            for workload in _workloads(layers, heads, phase, batches, seqlens):
                note = " (kernels of their own)" if phase == "decode" else ""
                used = dropping if phase == "training" else spec
                jobs.add(used, workload, _DIRECTIONS[phase], f"{phase}: {layers.name}{note}")
    if "decode" in phases:
        skipped += _absorbed(config)
    notes = _notes(model.layers, phases, batches, seqlens, dtype)
    return Plan(jobs.all(), tuple(skipped), notes)


def _share(layers: Layers, gpus: int) -> tuple[int, int] | None:
    """Query and kv heads of one GPU; kv heads that are too few are copied."""
    q, kv = layers.num_heads_q, layers.num_heads_kv
    if q % gpus or q % kv or (kv % gpus and gpus % kv):
        return None
    return q // gpus, max(1, kv // gpus)


def _no_share(layers: Layers, gpus: int) -> str:
    q, kv = layers.num_heads_q, layers.num_heads_kv
    allowed = [n for n in range(1, min(q, 1024) + 1) if _share(layers, n)]
    if not allowed:
        return f"{q} query heads do not share {kv} kv heads evenly"
    return (
        f"tensor-parallel {gpus} does not divide {q} query and {kv} kv heads; use one of "
        f"{', '.join(map(str, allowed))}"
    )


def _workloads(
    layers: Layers,
    heads: tuple[int, int],
    phase: Phase,
    batches: Sequence[int],
    seqlens: Sequence[int],
) -> list[Workload]:
    """The calls of a phase, the shortest first."""
    lengths = [
        (_cut(n, layers.longest_q), _cut(n, layers.longest_k)) if not seqlens else (n, n)
        for n in sorted(set(seqlens or SEQLENS))
    ]
    if layers.length is not None:
        lengths = [(layers.length, layers.length)]
    found = []
    for rows, keys in dict.fromkeys(lengths):
        kept = min(keys, layers.window or keys)
        for batch in batches or (_default_batch(phase, rows),):
            sizes = (1, kept) if phase == "decode" else (rows, keys)
            found.append(Workload(batch, *heads, *sizes))
    return found


def _cut(length: int, longest: int | None) -> int:
    return length if longest is None else min(length, longest)


def _default_batch(phase: Phase, seqlen: int) -> int:
    if phase == "training":
        return max(1, TRAINING_TOKENS // seqlen)
    return 1 if phase == "prefill" else DECODE_BATCH


def _absorbed(config: Mapping[str, Any]) -> list[Skipped]:
    """Latent attention's other decode, over the compressed cache; transformers does not use it."""
    rank, rope = (config.get(name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if not isinstance(rank, int) or not isinstance(rope, int):
        return []
    fields: dict[str, Any] = {"head_dim": rank + rope, "head_dim_v": rank, "causal": True}
    line = _line(fields | {"shared_kv": True})
    why = f"transformers expands the cache instead; for a server: `attngen tune {line}`"
    return [Skipped("decode over the compressed cache", line, why)]


def _notes(
    layers: Sequence[Layers],
    phases: Sequence[Phase],
    batches: Sequence[int],
    seqlens: Sequence[int],
    dtype: str | None,
) -> tuple[str, ...]:
    """What the user did not say and the plan took for granted."""
    notes = []
    longest = [n for each in layers for n in (each.longest_q, each.longest_k) if n is not None]
    if not seqlens:
        cut = f", at most the {max(longest)} positions of the model" if longest else ""
        notes.append(f"seqlen {' and '.join(map(str, SEQLENS))}{cut}; --seqlen sets others")
    elif longest and max(seqlens) > max(longest):
        notes.append(f"seqlen {max(seqlens)} is beyond the model's {max(longest)} positions")
    if not batches:
        default = {
            "training": f"{TRAINING_TOKENS} tokens in training",
            "prefill": "1 in prefill",
            "decode": f"{DECODE_BATCH} in decode",
        }
        said = ", ".join(default[p] for p in PHASES if p in phases)
        notes.append(f"batch: {said}; --batch sets another")
    if dtype is None and any(each.dtype is None for each in layers):
        notes.append(f"dtype {DEFAULT_DTYPE}, as the config names none; --dtype sets another")
    if dtype is None and any(each.dtype == "float32" for each in layers):
        notes.append(
            "dtype float32, as the config says; under autocast, or loaded in 16 bits, it "
            "is another: --dtype bfloat16"
        )
    if "decode" in phases and any("decode" in each.phases for each in layers):
        notes.append(f"decode: {NO_DECODE_KERNEL}")
    return tuple(notes)


def _line(fields: Mapping[str, Any]) -> str:
    """A spec that cannot be made, as it would be written."""

    def text(value: Any) -> str:
        if isinstance(value, tuple):
            return ":".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    return ",".join(f"{name}={text(value)}" for name, value in fields.items())


def plan_list(content: Mapping[str, Any]) -> Plan:
    """The jobs of a parsed TOML list.

    Raises:
        SpecError: a key is unknown or missing, or a value is wrong; names the job.
    """
    _refuse_unknown(content, ("job",), "key")
    given = content.get("job")
    if not isinstance(given, list) or not given or not all(isinstance(j, dict) for j in given):
        raise SpecError(f"the list holds no job; write {_EXAMPLE}")
    jobs, skipped = _Jobs(), []
    for number, entry in enumerate(given, 1):
        try:
            spec, workload, directions, why = _entry(entry)
        except UnsupportedSpecError as error:
            skipped.append(Skipped(f"job {number}", entry["spec"], str(error)))
        except SpecError as error:
            raise SpecError(f"job {number}: {error}") from None
        else:
            jobs.add(spec, workload, directions, why or f"job {number}")
    return Plan(jobs.all(), tuple(skipped))


def _entry(entry: dict[str, Any]) -> tuple[AttentionSpec, Workload, tuple[Direction, ...], str]:
    _refuse_unknown(entry, _JOB_KEYS, "key")
    for name, value in entry.items():
        if not isinstance(value, str):
            raise SpecError(f"{name} must be a string, got {shown(value)}; write {_EXAMPLE}")
    for name in ("spec", "workload"):
        if name not in entry:
            raise SpecError(f"{name} is missing; write {_EXAMPLE}")
    direction = entry.get("direction", "both")
    if direction not in (*DIRECTIONS, "both"):
        raise SpecError(
            f"direction must be 'fwd', 'bwd' or 'both', got {shown(direction)}"
            f"{nearest(direction, (*DIRECTIONS, 'both'))}"
        )
    directions = DIRECTIONS if direction == "both" else (check_direction(direction),)
    workload = Workload.parse(entry["workload"])
    return AttentionSpec.parse(entry["spec"]), workload, directions, entry.get("why", "")


def read_file(path: Path) -> tuple[dict[str, Any], bool]:
    """A parsed file, and whether it is a TOML list (by its name) and no config.json.

    Raises:
        SpecError: there is no such file, or it cannot be parsed.
    """
    is_list = path.suffix.lower() == ".toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        beside = path / "config.json"
        step = (
            f"name {beside}" if beside.is_file() else "name a model's config.json, or a TOML list"
        )
        raise SpecError(f"cannot read {path} ({error.strerror}); {step}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is no text; name a model's config.json, or a TOML list") from None
    if is_list:
        return _parse_toml(path, text), True
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{path} is not JSON ({error}); name a config.json, or a list that ends in .toml"
        ) from None
    if not isinstance(content, dict):
        raise SpecError(f"{path} must hold a JSON object, got {shown(content)}; name a config.json")
    return content, False


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not TOML ({error}); write {_EXAMPLE}") from None
    return content


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], noun: str) -> None:
    for name in given:
        if name not in known:
            raise SpecError(
                f"unknown {noun} {name!r}{nearest(name, known)}; allowed: {', '.join(known)}"
            )
