"""torch's own features on a GPU: its flash attention, graphs, FlexAttention and packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_gpu import random
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import attngen
from attngen.integrations import torch_backend
from attngen.integrations.flex_attention import flex_attention

pytestmark = pytest.mark.gpu


def with_gradients(out: Tensor, leaves: Any) -> list[Tensor]:
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def close(got: list[Tensor], want: list[Tensor], limit: float = 1e-2) -> None:
    for n, (x, right) in enumerate(zip(got, want, strict=True)):
        error = (x.float() - right.float()).norm() / right.float().norm()
        assert error < limit, f"[{n}] {error:.1e}"


def math(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, **options)


def tensors(order: str, heads_kv: int = 4, rows: int = 300) -> list[Tensor]:
    if order == "heads":
        return [
            random(2, rows, h, 64).detach().transpose(1, 2).requires_grad_()
            for h in (4, heads_kv, heads_kv)
        ]
    return [random(2, h, rows, 64) for h in (4, heads_kv, heads_kv)]


# ---- torch's flash attention ------------------------------------------------------------------


@pytest.fixture
def active() -> Iterator[None]:
    torch_backend.activate()
    yield
    torch_backend.restore()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
@pytest.mark.parametrize("order", ["rows", "heads"])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("through", ["eager", "inductor"])
def test_flash_path_of_sdpa(active: None, order: str, heads_kv: int, through: str) -> None:
    torch._dynamo.reset()
    leaves = tensors(order, heads_kv)
    options = {"is_causal": True, "enable_gqa": heads_kv != 4}
    attend = flash if through == "eager" else torch.compile(flash)
    got = with_gradients(attend(*leaves, **options), leaves)
    close(got, with_gradients(math(*leaves, **options), leaves))
    if through == "eager":
        assert [x.stride() for x in got] == [x.stride() for x in (leaves[0], *leaves)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        attend(*leaves, **options)
        torch.cuda.synchronize()
    assert any("attn_fwd" in event.key for event in seen.key_averages())


def test_dropout_of_the_flash_path_is_repeated(active: None) -> None:
    leaves = tensors("rows")
    torch.manual_seed(0)
    first = with_gradients(flash(*leaves, dropout_p=0.3), leaves)
    torch.manual_seed(0)
    again = with_gradients(flash(*leaves, dropout_p=0.3), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_varlen_attn_and_nested_tensors(active: None) -> None:
    q, k, v = (random(300, 4, 64) for _ in "qkv")
    cu = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device="cuda")
    got = with_gradients(varlen_attn(q, k, v, cu, cu, 200, 200, window_size=(-1, 0)), (q, k, v))
    want = attngen.attention(q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    close(got, with_gradients(want, (q, k, v)), 1e-6)
    filled = cu[[0, 1, 3]].long()  # torch 2.11 has no fused kernel for an empty sequence
    nested = [
        torch.nested.nested_tensor_from_jagged(x.detach(), filled).transpose(1, 2)
        for x in (q, k, v)
    ]
    with torch.no_grad():
        out = flash(*nested, is_causal=True).transpose(1, 2).values()
    close([out], [got[0]], 1e-6)


# ---- patch_sdpa, CUDA graphs --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, of its first graph
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_patched_step_of_a_compiled_module(mode: str) -> None:
    """reduce-overhead replays CUDA graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    project = torch.nn.Linear(256, 768, device="cuda", dtype=torch.bfloat16)

    def step(x: Tensor) -> Tensor:
        q, k, v = project(x).unflatten(2, (3, 4, 64)).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    x = random(2, 256, 256).detach()
    project.zero_grad()
    step(x).backward()
    want = [p.grad.clone() for p in project.parameters()]
    with attngen.patch_sdpa(strict=True):
        fast = torch.compile(step, fullgraph=True, mode=None if mode == "default" else mode)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            project.zero_grad()
            fast(x).backward()
            got = [p.grad.clone() for p in project.parameters()]
    close(got, want, 2e-2)


# ---- FlexAttention ------------------------------------------------------------------------------


def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as torchs

    torch._dynamo.reset()
    slopes = torch.rand(4, device="cuda")
    ids = torch.arange(400, device="cuda") // 150

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (ids[i] == ids[j])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j)

    leaves = tensors("rows", 2, 400)
    mask = create_block_mask(mask_mod, None, None, 400, 400, device="cuda")
    got = flex_attention(*leaves, score_mod, mask, enable_gqa=True)
    want = torch.compile(torchs)(*leaves, score_mod, mask, enable_gqa=True)
    close(with_gradients(got, leaves), with_gradients(want, leaves))


# ---- AOTInductor --------------------------------------------------------------------------------

PACKAGE = """
import sys, torch, attngen
from attngen.aot import freeze

class Block(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v):
        return self.attend(q, k, v) * 2

spec = attngen.AttentionSpec(head_dim=64, causal=True)
attend = freeze(spec, attngen.Workload(2, 4, 2, 333, 333))
q, k, v = (torch.randn(2, h, 333, 64, device="cuda").bfloat16() for h in (4, 2, 2))
length = torch.export.Dim("length", min=2, max=4096)
program = torch.export.export(Block(attend), (q, k, v), dynamic_shapes=({2: length},) * 3)
quick = {"compile_wrapper_opt_level": "O0", "precompile_headers": False}
known = torch._inductor.config.aot_inductor
configs = {f"aot_inductor.{name}": x for name, x in quick.items() if hasattr(known, name)}
torch._inductor.aoti_compile_and_package(
    program, package_path=sys.argv[1], inductor_configs=configs
)
"""
RUN = """
import sys
sys.modules["attngen"] = None
import torch
import torch.nn.functional as F
runner = torch._inductor.aoti_load_package(sys.argv[1])
for seqlen in (64, 333):
    torch.manual_seed(seqlen)
    q, k, v = (torch.randn(2, h, seqlen, 64, device="cuda").bfloat16() for h in (4, 2, 2))
    got = runner(q, k, v)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    print(((got - 2 * want).float().norm() / want.float().norm()).item())
"""


def test_a_package_runs_without_attngen(tmp_path: Path) -> None:
    """In processes that end in time: AOTInductor has a C++ compiler read all of torch's headers,
    which takes a minute."""
    found = []
    for code, seconds in ((PACKAGE, 300), (RUN, 120)):
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", code, str(tmp_path / "a.pt2")],
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = done.stdout.split()
    assert len(found) == 2 and all(float(error) < 2e-2 for error in found), found
