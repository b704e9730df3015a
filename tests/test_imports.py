"""What importing costs, in fresh processes."""

from __future__ import annotations

import json

import pytest
from support import python

import attngen

LIGHT = ["attngen"] + [
    f"attngen.{name}"
    for name in (
        "spec",
        "workload",
        "gpu",
        "config",
        "hopper",
        "hopper_space",
        "lowering",
        "search_space",
        "cost_model",
        "search_order",
        "render",
        "store",
        "errors",
        "values",
        "model_config",
        "model_plan",
        "score_ops",
        "score_functions",
        "identity",
    )
]


def _heavy_after(code: str) -> list[str]:
    done = python(
        f"{code}\nimport json, sys\n"
        "print(json.dumps([m for m in ('torch', 'triton') if m in sys.modules]))"
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("module", LIGHT)
def test_light_module_imports_neither_torch_nor_triton(module: str) -> None:
    assert _heavy_after(f"import {module}") == []


def test_light_work_needs_neither_torch_nor_triton() -> None:
    code = """
import attngen
from attngen.config import default_config
from attngen.gpu import by_name
from attngen.render import render
from attngen.workload import spec_bucket
spec = attngen.AttentionSpec(head_dim=64, causal=True)
where = spec_bucket("fwd", spec, attngen.Workload(1, 8, 8, 512, 512))
assert "def launch" in render(spec, default_config(spec, where, by_name("nvidia_h200")))
assert "compile" in dir(attngen)
"""
    assert _heavy_after(code) == []


def test_unknown_attribute_is_an_attribute_error() -> None:
    done = python("import attngen; attngen.atention")
    assert "module 'attngen' has no attribute 'atention'" in done.stderr


def test_every_public_name_loads() -> None:
    assert sorted(attngen._HOME) == sorted(attngen.__all__)
    done = python("import attngen; print([getattr(attngen, n) for n in attngen.__all__])")
    assert done.returncode == 0, done.stderr


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name", ["aot.freeze", "distributed.attention", "integrations.flash_attn.flash_attn_func"]
)
def test_part_is_reached_from_attngen(name: str) -> None:
    """As the documents write it, whatever was imported before."""
    done = python(f"import attngen; attngen.{name}")
    assert done.returncode == 0, done.stderr
    assert {"aot", "distributed", "integrations"} <= {*dir(attngen)}
    assert {"flash_attn", "transformers"} <= {*dir(attngen.integrations)}


@pytest.mark.rotating
@pytest.mark.parametrize("code", ["import attngen", "import attngen; attngen.attention"])
def test_import_starts_no_cuda(code: str) -> None:
    done = python(f"import torch\n{code}\nprint(torch.cuda.is_initialized())")
    assert done.stdout.split() == ["False"], done.stderr


CALL = """
import torch, attngen
q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in "qkv")
out = attngen.attention(q, k, v, causal=True)
out.sum().backward()
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
assert torch.allclose(out, want, atol=1e-5), (out - want).abs().max()
attngen.attention(q, k, v, causal=True)
"""


@pytest.mark.rotating
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="attngen-first"),
        pytest.param("import torch._dynamo", id="dynamo-first"),
        pytest.param("import triton, triton.language", id="triton-first"),
        pytest.param("import torch, torch._inductor.config", id="inductor-first"),
    ],
)
def test_interpreter_runs_whatever_was_imported_first_with_one_notice(before: str) -> None:
    done = python(f"{before}\n{CALL}", ATTNGEN_INTERPRET="1", TRITON_INTERPRET="")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kernels run in Triton's interpreter on the CPU") == 1


def test_interpreter_gives_no_notice_when_it_was_asked_for() -> None:
    done = python(CALL, ATTNGEN_INTERPRET="1", TRITON_INTERPRET="1")
    assert (done.returncode, done.stderr) == (0, "")
