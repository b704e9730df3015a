"""Kernels compile for GPUs that are not here; in children, as interpreter and compiler do not mix.

A driver that knows only a compute capability stands in for the real one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest
from support import REPO, python

from attngen import gpu as gpus
from attngen import hopper, hopper_space, lowering
from attngen.config import infeasible
from attngen.identity import parsed
from attngen.records import Record, shipped
from attngen.render import structural_variants
from attngen.spec import AttentionSpec
from attngen.versions import triton_minor
from attngen.workload import DIRECTIONS, Bucket, Direction, Workload, spec_bucket

CHILD = """
import json, sys
from attngen.tuner.compile_worker import Compiler
compiler = Compiler(int(sys.argv[1]))
for line in json.loads(sys.argv[2]):
    print(json.dumps(compiler({**line, "skip": []})))
"""

SPECS = {
    "base": {},
    "causal-window-dropout": {"causal": True, "window": (511, 0), "dropout_p": 0.1},
    "softcap-window": {"window": (63, 31), "softcap": 30.0},
    "d96-v40": {"head_dim": 96, "head_dim_v": 40},
    "bias-mask": {"bias": True, "attn_mask": True, "causal": True},
    "alibi-sinks": {"alibi": True, "sinks": True, "softcap": 30.0, "head_dim": 128},
    "documents": {"documents": True, "dropout_p": 0.1},
    "documents-causal": {"documents": True, "causal": True, "attn_mask": True},
    "prefix-tree": {"prefix_lm": True, "tree_mask": True, "causal": True, "chunk": 512},
    "tree": {"tree_mask": True, "documents": True, "alibi": True},
    "functions": {
        "score_mod": "aux0:float2;t0:sub q k;t1:index aux0 h t0;t2:tanh score;t3:max t2 -0.5;"
        "t4:mod t3 0.7;t5:add t4 t1;t6:floordiv q 3;t7:eq t6 k;where t7 -inf t5",
        "mask_mod": "aux0:long2;aux1:bool1;t0:index aux0 b q;t1:index aux0 b k;t2:eq t0 t1;"
        "t3:index aux1 h;t4:not t3;or t2 t4",
        "dropout_p": 0.1,
    },
    "block-map": {
        "mask_mod": "aux0:long2;t0:index aux0 b q;t1:index aux0 b k;eq t0 t1",
        "block_map": True,
        "causal": True,
    },
    "float32": {"dtype": "float32", "head_dim": 32, "causal": True},
    "packed": {"layout": "thd", "causal": True, "alibi": True, "sinks": True, "dropout_p": 0.1},
    "e5m2-block": {"dtype": "float8_e5m2", "fp8_scale": "block", "causal": True},
}


def compile_all(capability: int, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Facts of every kernel of every line, which names spec, direction, config and workload."""
    done = python(CHILD, str(capability), json.dumps(lines), TRITON_INTERPRET="")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _lines(fields: dict[str, Any], tiles: tuple[str, ...]) -> list[dict[str, Any]]:
    spec = AttentionSpec(**{"head_dim": 64, **fields})
    return [
        {
            "spec": spec.served_as(direction).key,
            "direction": direction,
            "config": config.as_dict(),
            "workload": "1,8,2,512,512",
        }
        for direction in DIRECTIONS
        for config in structural_variants(direction)
        if config.tiles in tiles and not (spec.is_packed and config.tiles == "descriptor")
    ]


def _assert_compiled(lines: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert len(found) == len(lines)
    for line, facts in zip(lines, found, strict=True):
        assert "error" not in facts, (line, facts)
        assert facts["kernels"] and not any(kernel["trap"] for kernel in facts["kernels"]), line


def test_base_compiles_for_hopper() -> None:
    lines = _lines({"causal": True}, ("pointer",))
    _assert_compiled(lines, compile_all(90, lines))


DECODE_SPECS = {
    "base": {"head_dim": 128},
    "causal-window": {"causal": True, "window": (511, 0)},
    "mask-bias": {"attn_mask": True, "bias": True},
    "paged": {"paged": True, "causal": True, "alibi": True, "sinks": True, "softcap": 30.0},
    "paged-tree": {"paged": True, "tree_mask": True, "causal": True, "prefix_lm": True},
    "lengths": {"key_lengths": True, "head_dim": 96, "head_dim_v": 40, "window": (63, 31)},
    "float32": {"dtype": "float32", "chunk": 512},
    "kv-e4m3": {"kv_dtype": "float8_e4m3fn", "kv_scale": "key", "paged": True, "head_dim": 128},
    "kv-int8": {"kv_dtype": "int8", "kv_scale": "head", "paged": True, "window": (511, 0)},
    "kv-dense": {"kv_dtype": "float8_e4m3fn", "kv_scale": "tensor", "dtype": "float16"},
}


@pytest.mark.parametrize(
    "names",
    [
        ("base", "paged", "kv-e4m3"),
        pytest.param(tuple(DECODE_SPECS), marks=pytest.mark.slow, id="all"),
    ],
)
def test_decode_compiles_for_hopper(names: tuple[str, ...]) -> None:
    merges = structural_variants("decode")
    lines = [
        {
            "spec": AttentionSpec(**{"head_dim": 64, **DECODE_SPECS[name]}).key,
            "direction": "decode",
            "config": config.as_dict(),
            "workload": "2,8,2,3,4096",
        }
        for name in names
        for config in merges
    ]
    found = compile_all(90, lines)
    _assert_compiled(lines, found)
    for facts, config in zip(found, itertools.cycle(merges), strict=False):
        assert len(facts["kernels"]) == (2 if config.merge == "kernel" else 1)  # type: ignore[union-attr]  # a DecodeConfig


def test_fp8_compiles_for_hopper() -> None:
    fields = {"dtype": "float8_e4m3fn", "fp8_scale": "head", "dropout_p": 0.1}
    lines = [line for line in _lines(fields, ("descriptor",)) if line["direction"] == "fwd"]
    _assert_compiled(lines, compile_all(90, lines))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "scale"), [(64, "block"), (128, "head"), (256, "tensor")])
def test_fp8_starts_of_the_hopper_lowering_compile(dim: int, scale: str) -> None:
    spec = AttentionSpec(head_dim=dim, dtype="float8_e4m3fn", fp8_scale=scale, causal=True)
    sizes, h200 = Workload(1, 8, 2, 4096, 4096), gpus.by_name("nvidia_h200")
    starts = hopper_space.starts(spec, spec_bucket("fwd", spec, sizes), h200)
    if triton_minor() not in hopper.CHECKED_TRITON:
        assert not starts and "needs Triton" in "; ".join(hopper.unserved(spec, h200))
        return
    first = starts[0]
    line = {"spec": spec.key, "direction": "fwd", "config": first.as_dict()}
    found = compile_all(90, [{**line, "workload": str(sizes)}])
    _assert_compiled([line], found)
    assert not any(kernel["serialised_wgmma"] for kernel in found[0]["kernels"])


@pytest.mark.slow
@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(
    ("capability", "tiles"),
    [
        pytest.param(80, ("pointer",), id="sm_80"),
        pytest.param(90, ("pointer", "descriptor"), id="sm_90"),
    ],
)
def test_every_text_compiles(
    fields: dict[str, Any], capability: int, tiles: tuple[str, ...]
) -> None:
    lines = _lines(fields, tiles)
    _assert_compiled(lines, compile_all(capability, lines))


needs_checked_triton = pytest.mark.skipif(
    triton_minor() not in hopper.CHECKED_TRITON, reason="the hopper lowering is for Triton 3.6"
)


def _assert_hopper_compiles(fields: dict[str, Any]) -> None:
    spec = AttentionSpec(**{"head_dim": 128, **fields})
    lines = [
        {
            "spec": spec.key,
            "direction": direction,
            "config": starts[-1].as_dict(),
            "workload": "1,8,2,2048,2048",
        }
        for direction in DIRECTIONS
        for dq in ("atomic", "kernel")
        if (starts := _starts(spec, direction, dq))
    ]
    found = compile_all(90, lines)
    _assert_compiled(lines, found)
    for line, facts in zip(lines, found, strict=True):
        slow = [k for k in facts["kernels"] if k["serialised_wgmma"]]
        assert all(k["kernel"].endswith("_again") for k in slow), (line, slow)


def _starts(spec: AttentionSpec, direction: Direction, dq: str) -> list[hopper.HopperConfig]:
    """The good configs; of a backward, those with this way to dq."""
    at = spec_bucket(direction, spec, Workload(1, 8, 2, 2048, 2048))
    starts = hopper_space.starts(spec, at, gpus.by_name("nvidia_h200"))
    if direction == "fwd":
        return starts if dq == "kernel" else []
    return [config for config in starts if getattr(config, "dq", None) == dq]


@needs_checked_triton
def test_hopper_lowering_compiles() -> None:
    _assert_hopper_compiles({"causal": True})


@needs_checked_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 64},
        {"head_dim": 64, "causal": True, "softcap": 30.0, "dtype": "float16"},
        {"head_dim": 96, "causal": True, "window": (511, 0)},
        {"window": (63, 31), "softcap": 30.0},
        {"head_dim": 192, "head_dim_v": 128, "causal": True},
        {"head_dim": 256, "causal": True, "window": (511, 0)},
        {"layout": "thd", "causal": True, "sinks": True},
    ],
    ids=str,
)
def test_every_hopper_kernel_compiles(fields: dict[str, Any]) -> None:
    _assert_hopper_compiles(fields)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _changed_records() -> list[Record]:
    """What tuning_db has more than the main branch, or than the last commit on it."""
    base = _git("merge-base", "HEAD", "origin/main")
    if base in ("", _git("rev-parse", "HEAD")):
        base = "HEAD~1"
    lines = _git("diff", "--unified=0", base, "--", "tuning_db/*.jsonl").splitlines()
    return [Record.from_line(line[1:]) for line in lines if line.startswith("+{")]


def test_changed_records_compile_for_their_gpu() -> None:
    changed = _changed_records()
    if not changed:
        pytest.skip("no shipped record has changed")
    _compile_records(changed)


@pytest.mark.slow
def test_every_shipped_record_compiles_for_its_gpu() -> None:
    _compile_records(shipped())


def _compile_records(records: Iterable[Record]) -> None:
    """Each as the running Triton would serve it: the hopper lowering's own, or where that is
    refused there, the portable default."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in {(r.key.text_key, r.kernel_config): r for r in records}.values():
        gpu, at = gpus.by_name(record.provenance.gpu), Bucket.parse(record.key.bucket)
        group = at.group_size or 1  # sizes are 0 in a batch-invariant bucket
        heads = max(at.batch_heads, group) // group * group
        sizes = (1, heads, heads // group, at.seqlen_q or 1024, at.seqlen_k or 1024)
        spec, config = parsed(record.key.text_key), record.kernel_config
        if config.lowering == "hopper" and triton_minor() not in hopper.CHECKED_TRITON:
            assert infeasible(spec, config, gpu) == hopper.unserved(spec, gpu) != []
            config = lowering.default(spec, at, gpu)
            assert config.lowering == "triton"
        groups.setdefault(int(gpu.arch.removeprefix("sm_")), []).append(
            {
                "spec": record.key.text_key,
                "direction": record.direction,
                "config": config.as_dict(),
                "workload": ",".join(map(str, sizes)),
            }
        )
    for capability, lines in groups.items():
        _assert_compiled(lines, compile_all(capability, lines))
