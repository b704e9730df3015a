"""Each example runs as a program, and prints what it promises."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

import attngen

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Kernels and records of an example go to a folder of the test."""
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ATTNGEN_DB", raising=False)
    attngen.reload()
    yield
    torch._dynamo.reset()
    attngen.reload()


PROMISES = {
    "quickstart": ("out: largest difference", "dv: largest difference", "fwd: lowering="),
    "run_emitted": ("fwd: ", "out: relative error", "dk: relative error"),
    "compile_model": ("4 lengths, 1 graph(s)", "same dropout mask: True"),
    "io_bytes": ("q, k, v and out, each once", "forward kernel, asked of L2"),
    "merge_shards": ("ring of 2 against one call", "dq: largest difference"),
    "serve_paged": ("tokens of 3 prompts", "tokens against eager attention"),
    "cascade": ("cascade against one call", "keys and values read"),
    "finetune_transformers": ("with eager attention", "less than at first: True"),
    "diffusers_block": ("attngen against native attention: relative difference",),
    "bench_decode": ("no GPU to time; largest difference",),
    "bench_training": ("attngen: first step", "sdpa: first step", "throughput over SDPA's:"),
    "nanogpt_training": ("loss fell from",),
    "tune_and_read_kernel": ("record kept in", '"direction": "fwd"', "def visible_keys("),
}


# Of test_context_parallel.py; the benchmark needs two GPUs.
OVER_RANKS = ("ring_training", "context_parallel_model", "bench_context_parallel")
NEEDS = {"finetune_transformers": "transformers", "diffusers_block": "diffusers"}


@pytest.mark.rotating
@pytest.mark.parametrize("name", PROMISES)
@pytest.mark.filterwarnings("ignore:attngen. no CUDA device")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo asks for it
def test_example(name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
        warnings.simplefilter("ignore")  # theirs
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capfd.readouterr().out
    for promise in PROMISES[name]:
        assert promise in printed


@pytest.mark.slow
def test_demo(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # the demo sets its own
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    printed = capfd.readouterr().out
    assert ended.value.code == 0, printed
    for section in range(1, 7):
        assert f"\n{section}. " in printed
    assert "largest difference" in printed


@pytest.mark.parametrize("name", NEEDS)
def test_example_without_its_library(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert not ended.value.code and "attngen[integrations]" in capfd.readouterr().out


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"demo", *PROMISES, *OVER_RANKS}
