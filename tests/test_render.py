"""Rendering: pure, formatted, no text for features that are off, and golden files."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_spec import BASE, CHANGES

from attngen import hopper
from attngen.config import BwdConfig, FwdConfig, KernelConfig
from attngen.decode import DecodeConfig
from attngen.hopper import HopperBwdConfig, HopperFwdConfig, unserved_anywhere
from attngen.hopper_decode import HopperDecodeConfig
from attngen.kernel import file_name
from attngen.render import (
    direction_of,
    hopper_variants,
    render,
    structural_variants,
    template_hash,
)
from attngen.spec import AttentionSpec

GOLDEN = Path(__file__).parent / "golden"

FWD = FwdConfig(block_m=128, block_n=64, num_warps=4, num_stages=2)
FWD_TMA = FwdConfig(tiles="descriptor", block_m=128, block_n=128, num_warps=8, num_stages=3)
DECODE = DecodeConfig(block_m=16, block_n=128, num_warps=4, num_stages=3)
BWD = BwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
BWD_ATOMIC = BwdConfig(dq="atomic", block_m=64, block_n=128, num_warps=8, num_stages=2)

RELATIVE = "aux0:float2;t0:sub q k;t1:add t0 511;t2:index aux0 h t1;add score t2"
DOCUMENTS = "aux0:long2;t0:index aux0 b q;t1:index aux0 b k;eq t0 t1"

# Each adds one feature to the base, so that a diff of two neighbours is that feature.
NAMED: dict[str, tuple[dict[str, Any], KernelConfig]] = {
    "fwd_base": ({}, FWD),
    "fwd_causal": ({"causal": True}, FWD),
    "fwd_window": ({"window": (1023, 512)}, FWD),
    "fwd_chunk": ({"causal": True, "chunk": 8192}, FWD),
    "fwd_softcap": ({"softcap": 30.0}, FWD),
    "fwd_dropout": ({"dropout_p": 0.1}, FWD),
    "fwd_d96": ({"head_dim": 96}, FWD),
    "fwd_d192_v128": ({"head_dim": 192, "head_dim_v": 128}, FWD),
    "fwd_float32": ({"dtype": "float32"}, FWD),
    "fwd_descriptor": ({}, FWD_TMA),
    "fwd_fp8_block": ({"dtype": "float8_e4m3fn", "fp8_scale": "block"}, FWD),
    "fwd_mask": ({"attn_mask": True}, FWD),
    "fwd_bias": ({"bias": True}, FWD),
    "fwd_alibi": ({"alibi": True}, FWD),
    "fwd_sinks": ({"sinks": True}, FWD),
    "fwd_documents": ({"documents": True}, FWD),
    "fwd_prefix": ({"causal": True, "prefix_lm": True}, FWD),
    "fwd_tree": ({"causal": True, "tree_mask": True}, FWD),
    "fwd_score_mod": ({"score_mod": RELATIVE}, FWD),
    "fwd_mask_mod": ({"mask_mod": DOCUMENTS}, FWD),
    "fwd_packed": ({"layout": "thd", "causal": True}, FWD),
    "decode_base": ({}, DECODE),
    "decode_paged": ({"paged": True, "causal": True}, DECODE),
    "decode_kv": ({"paged": True, "kv_dtype": "float8_e4m3fn", "kv_scale": "key"}, DECODE),
    "decode_shared": ({"head_dim": 576, "head_dim_v": 512, "shared_kv": True}, DECODE),
    "decode_hopper": (
        {"head_dim": 576, "head_dim_v": 512, "paged": True, "shared_kv": True},
        HopperDecodeConfig(),
    ),
    "bwd_packed": ({"layout": "thd", "causal": True}, BWD),
    "bwd_base": ({}, BWD),
    "bwd_bias": ({"bias": True}, BWD),
    "bwd_alibi": ({"alibi": True}, BWD),
    "bwd_sinks": ({"sinks": True}, BWD),
    "bwd_documents": ({"causal": True, "documents": True}, BWD),
    "bwd_tree": ({"tree_mask": True}, BWD_ATOMIC),
    "bwd_score_mod": ({"score_mod": RELATIVE}, BWD),
    "bwd_atomic": ({}, BWD_ATOMIC),
    "bwd_causal_dropout": ({"causal": True, "dropout_p": 0.1}, BWD),
    "fwd_hopper": ({"causal": True}, HopperFwdConfig(turns=True, q_buffers=2)),
    "fwd_hopper_packed": (
        {"layout": "thd", "causal": True},
        HopperFwdConfig(turns=True, q_buffers=2),
    ),
    "bwd_hopper_atomic": ({"causal": True}, HopperBwdConfig(dq="atomic")),
    "bwd_hopper_packed": ({"layout": "thd", "causal": True}, HopperBwdConfig(dq="atomic")),
    "bwd_hopper_kernel": ({"head_dim": 256}, HopperBwdConfig(dq_v_stages=1)),
}


def _named(name: str) -> str:
    fields, config = NAMED[name]
    return render(AttentionSpec(**{"head_dim": 128, **fields}), config)


@pytest.mark.parametrize("name", NAMED)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    """`make golden` rewrites them; read the diff as code."""
    path, text = GOLDEN / f"{name}.py", _named(name)
    if request.config.getoption("--update-golden"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: make golden"
    assert path.read_text() == text, f"{path} is out of date: make golden, and read the diff"


def test_golden_folder_holds_nothing_else() -> None:
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(NAMED)


MATRIX = [
    AttentionSpec(**dict(itertools.chain.from_iterable(map(dict.items, fields))))
    for fields in itertools.product(
        ({"head_dim": 64}, {"head_dim": 40, "head_dim_v": 112}),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "float32", "precision": "tf32"}),
        ({}, {"causal": True}, {"causal": True, "window": (7, 0)}, {"window": (7, None)},
         {"window": (None, 7)}, {"window": (7, 7)}),
        ({}, {"dropout_p": 0.1}),
        ({}, {"softcap": 9.0}),
    )
]  # fmt: skip


FP8_MATRIX = [
    AttentionSpec(dtype="float8_e4m3fn", **dims, **scale, **mask, **rest)
    for dims, scale, mask, rest in itertools.product(
        ({"head_dim": 64}, {"head_dim": 72}),
        ({"fp8_scale": "tensor"}, {"fp8_scale": "head"}, {"fp8_scale": "block"}),
        ({}, {"causal": True}, {"window": (7, 7)}),
        ({}, {"dropout_p": 0.1}, {"softcap": 9.0}),
    )
]  # fmt: skip


TERMS_MATRIX = [
    AttentionSpec(head_dim=64, **scores, **mask, **rest)
    for scores, mask, rest in itertools.product(
        ({"bias": True}, {"attn_mask": True}, {"alibi": True}, {"sinks": True},
         {"bias": True, "alibi": True}, {"bias": True, "attn_mask": True, "sinks": True},
         {"bias": True, "attn_mask": True, "alibi": True, "sinks": True},
         {"score_mod": RELATIVE}, {"mask_mod": DOCUMENTS}, {"mask_mod": "le k q"},
         {"score_mod": RELATIVE, "mask_mod": DOCUMENTS, "bias": True, "sinks": True}),
        ({}, {"causal": True}, {"window": (7, None)}, {"window": (7, 7)}, {"chunk": 7}),
        ({}, {"dropout_p": 0.1, "softcap": 9.0}, {"dtype": "float32", "softcap": 9.0}),
    )
]  # fmt: skip


MASKS_MATRIX = [
    AttentionSpec(head_dim=64, **{**rest, **masks})
    for masks, rest in itertools.product(
        ({"documents": True}, {"prefix_lm": True, "causal": True}, {"tree_mask": True},
         {"tree_mask": True, "documents": True},
         {"prefix_lm": True, "documents": True, "tree_mask": True, "causal": True}),
        ({}, {"causal": True}, {"window": (7, None)}, {"window": (7, 7)}, {"chunk": 7},
         {"attn_mask": True}, {"alibi": True, "bias": True}, {"dropout_p": 0.1, "softcap": 3.0},
         {"sinks": True, "dtype": "float32"},
         {"dtype": "float8_e4m3fn", "fp8_scale": "block"}),
    )
]  # fmt: skip


HOPPER_MATRIX = [
    AttentionSpec(**dims, **mask, **cap)
    for dims, mask, cap in itertools.product(
        ({"head_dim": 64}, {"head_dim": 96}, {"head_dim": 128}, {"head_dim": 256},
         {"head_dim": 192, "head_dim_v": 128}),
        ({}, {"causal": True}, {"causal": True, "window": (7, 0)}, {"window": (None, 7)},
         {"window": (7, 7)}, {"chunk": 7, "causal": True}, {"chunk": 7}),
        ({}, {"softcap": 9.0}, {"sinks": True}),
    )
]  # fmt: skip


PACKED_MATRIX = [
    AttentionSpec(head_dim=64, layout="thd", **mask, **scores, **rest)
    for mask, scores, rest in itertools.product(
        ({}, {"causal": True}, {"window": (7, None)}, {"window": (7, 7)}, {"chunk": 7}),
        ({}, {"alibi": True}, {"sinks": True}, {"alibi": True, "sinks": True}),
        ({}, {"dropout_p": 0.1, "softcap": 9.0}, {"dtype": "float32", "head_dim_v": 96}),
    )
]  # fmt: skip


DECODE_MATRIX = [
    AttentionSpec(**{"head_dim": 64, **keys, **mask, **rest})
    for keys, mask, rest in itertools.product(
        ({}, {"key_lengths": True}, {"paged": True}),
        ({}, {"causal": True}, {"window": (7, None)}, {"window": (7, 7)}, {"chunk": 7},
         {"tree_mask": True}, {"tree_mask": True, "prefix_lm": True, "causal": True}),
        ({}, {"alibi": True, "sinks": True}, {"softcap": 9.0, "head_dim_v": 96},
         {"dtype": "float32", "head_dim": 40}),
    )
] + [
    AttentionSpec(head_dim=64, **keys, **mask, attn_mask=True, bias=True, softcap=9.0)
    for keys, mask in itertools.product(
        ({}, {"key_lengths": True}), ({}, {"causal": True}, {"window": (7, None)}))
] + [
    AttentionSpec(shared_kv=True, **dims, **keys, **mask)
    for dims, keys, mask in itertools.product(
        ({"head_dim": 576, "head_dim_v": 512}, {"head_dim": 40, "head_dim_v": 32}),
        ({}, {"key_lengths": True}, {"paged": True}),
        ({}, {"causal": True, "alibi": True}, {"window": (7, None)}, {"attn_mask": True}))
    if not (keys.get("paged") and mask.get("attn_mask"))
] + [
    AttentionSpec(head_dim=64, layout="thd", paged=True, **mask, **rest)
    for mask, rest in itertools.product(
        ({}, {"causal": True, "prefix_lm": True}, {"window": (7, 7)}),
        ({}, {"alibi": True, "sinks": True}))
]  # fmt: skip


def _texts(step: int) -> Iterator[tuple[AttentionSpec, KernelConfig]]:
    """Of every `step`th spec, each day others."""
    day = slice(int(os.environ["ATTNGEN_TEST_DAY"]) % step, None, step)
    for spec in MATRIX[day]:
        for config in (*structural_variants("fwd"), *structural_variants("bwd")):
            yield spec, config
    for spec in FP8_MATRIX[day]:
        hopper = [] if unserved_anywhere(spec) else hopper_variants(spec, "fwd")
        for config in (*structural_variants("fwd"), *hopper):
            yield spec, config
    for spec in (*TERMS_MATRIX[day], *MASKS_MATRIX[day]):
        for config in (*structural_variants("fwd"), *structural_variants("bwd")):
            yield spec, config
    for spec in PACKED_MATRIX[day]:
        for config in (*structural_variants("fwd"), *structural_variants("bwd")):
            if config.tiles == "pointer":  # all that packed sequences have
                yield spec, config
    for number, spec in enumerate(DECODE_MATRIX[day]):
        yield spec, structural_variants("decode")[number % 2]
    for dim_v, keys in itertools.product(
        (128, 512), ({}, {"key_lengths": True}, {"paged": True, "batch_invariant": True})
    ):
        latent = AttentionSpec(head_dim=dim_v + 64, head_dim_v=dim_v, shared_kv=True, **keys)
        yield latent, HopperDecodeConfig(split_keys=512 if latent.batch_invariant else 0)
    for spec in HOPPER_MATRIX[day]:
        for config in (*hopper_variants(spec, "fwd"), *hopper_variants(spec, "bwd")):
            yield spec, config
        packed = replace(spec, layout="thd")
        for config in (*hopper_variants(packed, "fwd"), *hopper_variants(packed, "bwd")):
            yield packed, config


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(15, id="some")]
)
def test_every_spec_renders_parses_and_is_formatted(tmp_path: Path, step: int) -> None:
    """One ruff call for the whole matrix."""
    for number, (spec, config) in enumerate(_texts(step)):
        text = render(spec, config)
        ast.parse(text)
        assert "\t" not in text and not any(line.endswith(" ") for line in text.split("\n"))
        name = file_name(spec, direction_of(config), text)
        (tmp_path / f"{number}_{name}").write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--isolated", "--line-length", "100", "--target-version", "py310"]
    found = subprocess.run(
        [*ruff, "format", "--check", *settings, str(tmp_path)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[:2000]
    found = subprocess.run(
        [*ruff, "check", *settings, "--select", "F", "--output-format", "concise", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[:2000]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("field", "value", "seen"), CHANGES, ids=[f"{field}={value}" for field, value, _ in CHANGES]
)
def test_text_changes_only_with_the_text_key(
    field: str, value: Any, seen: bool, direction: Any
) -> None:
    """What `text_key` forgets must not reach the text; what it holds must be in the header. (The
    kernels alone, which the template hash stands for: test_identity.)"""
    base, changed = AttentionSpec(**BASE), AttentionSpec(**{**BASE, field: value})
    if field == "aux" and direction == "bwd":
        seen = False  # a backward makes no side outputs
    for arch in ("sm_80", "sm_90"):
        hashes = [template_hash(spec.text, direction, arch) for spec in (base, changed)]
        assert hashes[0] == hashes[1] or seen
    variants = structural_variants(direction)
    if not (hopper.unserved_anywhere(base) or hopper.unserved_anywhere(changed)):
        variants += hopper_variants(changed, direction)
    for config in variants:
        assert (render(base, config) == render(changed, config)) is not seen


@pytest.mark.parametrize("config", [FWD, BWD, BWD_ATOMIC], ids=["fwd", "bwd", "atomic"])
def test_kernels_take_what_mask_mod_reads_beside_dropout(config: KernelConfig) -> None:
    spec = AttentionSpec(head_dim=64, mask_mod=DOCUMENTS, dropout_p=0.1)
    taken = {
        each.name: [x.arg for x in each.args.args]
        for each in ast.parse(render(spec, config)).body
        if isinstance(each, ast.FunctionDef)
    }
    kernels = {"attn_fwd", "attn_bwd_dkdv", "attn_bwd_dq"} & set(taken)
    assert kernels
    assert all("aux0_ptr" in taken[name] for name in kernels)


def test_text_depends_on_config_only_where_it_says_so() -> None:
    """One text serves every trial: tile sizes change the CONFIG lines and the header alone."""
    spec = AttentionSpec(head_dim=64, causal=True, dropout_p=0.1)
    small = FwdConfig(block_m=32, block_n=16, num_warps=1, num_stages=1)
    pairs = zip(render(spec, FWD).splitlines(), render(spec, small).splitlines(), strict=True)
    changed = [a.split()[0] for a, b in pairs if a != b]
    assert changed == ["config", '"BLOCK_M":', '"BLOCK_N":', '"num_warps":', '"num_stages":']


def test_render_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _named("fwd_causal")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", "/elsewhere")
    assert _named("fwd_causal") == before


def test_features_that_are_off_leave_no_trace_in_the_kernels() -> None:
    def kernels(name: str) -> str:
        return _named(name).partition("\nCONFIG")[2].partition("def launch(")[0]

    base = kernels("fwd_base") + kernels("bwd_base")
    for word in ("dropout", "philox", "softcap", "window", "tanh", "Descriptor", "atomic", "align"):
        assert word not in base, word
    assert "philox" in kernels("fwd_dropout") and "tanh" in kernels("fwd_softcap")
    assert "window" in kernels("fwd_window") and "align" in kernels("fwd_causal")


def test_emitted_file_imports_torch_and_triton_only() -> None:
    for name in NAMED:
        modules = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
            for node in ast.walk(ast.parse(_named(name)))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
        assert modules <= {"torch", "triton", "functools", "heapq"}, name


def test_header_says_how_to_make_the_file_again() -> None:
    head = ast.get_docstring(ast.parse(_named("fwd_causal")))
    assert head is not None
    assert "spec    head_dim=128,dtype=bfloat16,causal=true" in head
    assert f"config  {FWD.key}" in head
    assert "again   attngen emit" in head
