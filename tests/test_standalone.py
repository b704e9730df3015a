"""`attngen emit --standalone`: a package that works where attngen cannot be imported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import REPO

import attngen
from attngen.cli import main
from attngen.gpu import by_name
from attngen.spec import AttentionSpec
from attngen.standalone import emit_folder, unserved
from attngen.workload import Workload

SPECS = [
    "head_dim=16,dtype=float32,causal=true",
    "head_dim=24,head_dim_v=16,dtype=float16,window=any:any,softcap=any",
    "head_dim=16,dtype=bfloat16,layout=thd,causal=true",
    "head_dim=16,dtype=float16,dropout_p=any",
]
ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "attngen":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, {folder!r})
"""
COMPILED = """
import torch
from kernels_of_mine import attention
torch.manual_seed(0)
q, k, v = (torch.randn(1, n, 20, 16, requires_grad=True) for n in (2, 1, 1))
out, lse = torch.compile(lambda *x: attention(*x, causal=True, return_lse=True), fullgraph=True,
                         backend="aot_eager")(q, k, v)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
for got, right in zip(torch.autograd.grad(out.sum() + lse.sum() * 0, (q, k, v)),
                      torch.autograd.grad(want.sum(), (q, k, v))):
    torch.testing.assert_close(got, right, atol=1e-5, rtol=0)
rows = attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bshd")
torch.testing.assert_close(rows.transpose(1, 2), want, atol=1e-5, rtol=0)
wrong = [  # kernels trust shapes
    (q, k, v[:, :, :7]),
    (q.expand(2, -1, -1, -1), k, v),
    (q, k[:, :0], v[:, :0]),
    (q, k, v.bfloat16()),
    (q[0], k[0], v[0]),
    (q[:, :, :, :8], k, v),
]
for tensors in wrong:
    try:
        attention(*tensors, causal=True)
    except ValueError:
        continue
    raise AssertionError([x.shape for x in tensors])
try:
    import attngen
except ModuleNotFoundError:
    print("done, alone")
"""


def emit(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(main, ["emit", *arguments, "--standalone", str(folder)])
    assert done.exit_code == 0, done.output
    return done.output


def alone(code: str, folder: Path) -> str:
    """Run code in a process that cannot import attngen."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", ALONE.format(folder=str(folder)) + code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alone_under_compile(tmp_path: Path):
    emit(tmp_path / "kernels_of_mine", SPECS[0], "--gpu", "nvidia_h200")
    assert "done, alone" in alone(COMPILED, tmp_path)


@pytest.mark.slow
def test_its_own_tests_pass(tmp_path: Path):
    emit(tmp_path / "mine", *SPECS, "--gpu", "nvidia_h200", "--gpu", "sm_80")
    code = "import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'mine']))"
    assert " passed" in alone(code, tmp_path)


def test_files(tmp_path: Path):
    """Readable, formatted, of no attngen, and the same each time."""
    gpus = [by_name("nvidia_h200"), by_name("sm_80")]
    specs = [AttentionSpec.parse(line) for line in SPECS]
    files = dict(emit_folder(tmp_path / "mine", specs, gpus))
    assert files == dict(emit_folder(tmp_path / "mine", specs, gpus))
    for path, text in files.items():
        ast.parse(text)
        assert "import attngen" not in text and "from attngen" not in text
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for verb in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *verb, "--config", str(REPO / "pyproject.toml"), "mine"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout
    text = files[tmp_path / "mine" / "__init__.py"]
    assert 'lowering="hopper"' in text and 'gpu="any"' in text and 'arch="sm_80"' in text


def test_refusals(tmp_path: Path):
    spec = AttentionSpec(head_dim=64, bias=True, sinks=True)
    assert len(unserved(spec)) == 2
    with pytest.raises(attngen.UnsupportedSpecError, match="bias in a standalone folder"):
        list(emit_folder(tmp_path / "mine", [spec], []))
    with pytest.raises(attngen.SpecError, match="write my_kernels"):
        list(emit_folder(tmp_path / "my-kernels", [AttentionSpec(head_dim=64)], []))
    twice = [AttentionSpec(head_dim=64), AttentionSpec(head_dim=64, softmax_scale=2.0)]
    with pytest.raises(attngen.SpecError, match="there twice"):
        list(emit_folder(tmp_path / "mine", twice, []))
    h200, few = by_name("nvidia_h200"), Workload(1, 8, 8, 1, 4096)
    with pytest.raises(attngen.SpecError, match="few rows"):
        list(emit_folder(tmp_path / "mine", twice[:1], [h200], [few]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--standalone", "x", "--out", "y"], "--standalone takes neither"),
        (["head_dim=32"], "SPEC is given 2 times"),
        (["--gpu", "sm_80", "--gpu", "sm_90"], "--gpu is given 2 times"),
    ],
)
def test_usage(arguments: list[str], message: str):
    done = CliRunner().invoke(main, ["emit", "head_dim=64", *arguments])
    assert done.exit_code == 2 and message in done.output


def test_package_of_others_is_not_replaced(tmp_path: Path):
    kept = tmp_path / "mine" / "__init__.py"
    kept.parent.mkdir()
    kept.write_text("value = 1\n")
    line = ["emit", "head_dim=64", "--gpu", "sm_90", "--standalone", str(kept.parent)]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 2 and "attngen did not write" in done.output
    assert kept.read_text() == "value = 1\n"
    kept.unlink()
    for _ in range(2):  # its own is
        assert CliRunner().invoke(main, line).exit_code == 0
