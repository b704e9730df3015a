"""Frozen forwards for torch.export and AOTInductor, as far as a machine without a GPU goes."""

from __future__ import annotations

import pytest
from support import python

import attngen
from attngen.aot import freeze

WORKLOAD = attngen.Workload(2, 8, 4, 1024, 1024)

EXPORT = """
import torch, attngen
from attngen.aot import freeze

class Block(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v):
        return self.attend(q * 2, k, v)

spec = attngen.AttentionSpec(head_dim=64, causal=True, window=(100, None), softcap=5.0)
attend = freeze(spec, attngen.Workload(2, 8, 4, 1024, 1024), gpu_name="nvidia_h200")
assert freeze(spec, attngen.Workload(2, 8, 4, 1024, 1024), gpu_name="nvidia_h200").op is attend.op
q, k, v = (torch.randn(2, heads, 40, 64).bfloat16() for heads in (8, 4, 4))
length = torch.export.Dim("length", min=2, max=4096)
program = torch.export.export(Block(attend), (q, k, v), dynamic_shapes=({2: length},) * 3)
(node,) = [each for each in program.graph.nodes if "attngen_aot" in str(each.target)]
out, lse = node.meta["val"]
assert out.shape[2] == q.shape[2] or out.shape[2].node.expr.free_symbols
assert out.stride()[1] == 64 and lse.dtype == torch.float32
torch.export.save(program, attend.path.parent / "program.pt2")
again = torch.export.load(attend.path.parent / "program.pt2")
assert str(node.target) in str(again.graph)
for wrong in ((q, k, v[:, :, :9]), (q, k.float(), v), (q[..., :32], k[..., :32], v)):
    try:
        attend(*wrong)  # the kernel trusts shapes
    except attngen.SpecError:
        continue
    raise AssertionError([x.shape for x in wrong])
"""


COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import attngen
from attngen.aot import freeze
from attngen.kernel import load
from attngen.settle import numbers_of
from attngen.spec import AttentionSpec
from attngen.tuner.compile_worker import TargetDriver

triton.runtime.driver.set_active(TargetDriver(90))
torch.set_default_device("meta")
SIZES = (("i64", 1, 8, 1024), ("i32", 1, 1, 1))
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}

def type_of(x, integers):
    if isinstance(x, torch.Tensor):
        return POINTERS[x.dtype]
    return "fp64" if isinstance(x, float) else "constexpr" if x == 1 else integers

for text in sys.argv[1:]:
    spec = AttentionSpec.parse(text)
    attend = freeze(spec, attngen.Workload(2, 8, 4, 1024, 1024), gpu_name="nvidia_h200")
    for integers, batch, heads, rows in SIZES[:len(sys.argv) - 1]:
        q, k = (torch.empty(batch, heads, rows, spec.head_dim).to(getattr(torch, spec.dtype))
                for _ in range(2))
        v = q.new_empty(batch, heads, rows, spec.head_dim_v)
        lse = torch.empty(batch, heads, rows)
        scalars, ints = attend.numbers
        numbers = numbers_of(spec, dict(zip(spec.int_args, ints)), rows, rows)
        numbers |= zip(spec.scalar_args, scalars)
        plan = load(attend.path, interpret=False).plan(q, k, v, torch.empty_like(v), lse, **numbers)
        for kernel, grid, arguments, constants in plan:
            types = {name: type_of(x, integers) for name, x in zip(kernel.arg_names, arguments)}
            assert list(types.values()).count("fp64") >= 2, types
            fixed = {name: 1 for name, each in types.items() if each == "constexpr"}
            fixed |= {name: constants[name] for name in kernel.arg_names if name in constants}
            types |= dict.fromkeys(fixed, "constexpr")
            types = {name: types[name] for name in kernel.arg_names}
            options = {name: constants[name] for name in ("num_warps", "num_stages")}
            source = ASTSource(kernel, types, fixed)
            found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            lines = [line for line in found.asm["ttir"].splitlines() if "f64" in line]
            assert all("tt.func" in line or "arith.truncf" in line for line in lines), lines
"""


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(("head_dim=64,causal=true,window=9:0,softcap=5.0",), id="some"),
        pytest.param(
            (
                "head_dim=64,causal=true",
                "head_dim=64,softcap=30.0,dtype=float16",
                "head_dim=96,head_dim_v=40,window=63:31",
                "head_dim=64,causal=true,chunk=512,softmax_scale=1.0",
                "head_dim=32,dtype=float32,score_mod=t0:sub q k;t1:mul t0 0.5;add score t1",
                "head_dim=64,softcap=5.0,score_mod=mul score 0.5,mask_mod=gt q k",
            ),
            id="all",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kernels_take_what_aotinductor_passes(texts: tuple[str, ...]) -> None:
    """Constants as float64, sizes of 64 bits where they are not known to be short, and 1 as a
    constant, in spite of do_not_specialize."""
    done = python(COMPILE, *texts, TRITON_INTERPRET="")
    assert done.returncode == 0, done.stderr[-3000:]


def test_export_holds_the_operator() -> None:
    """In a process of its own: no kernel is interpreted."""
    done = python(EXPORT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dropout_p": 0.1}, "the spec has dropout_seed"),
        ({"bias": True}, "the spec has bias"),
        ({"layout": "bshd"}, 'freeze layout="bhsd"'),
        ({"head_dim": 20}, "head_dim=20 is no multiple of 8; pad it"),
        ({"aux": ("entropy",)}, "no side outputs"),
        ({"softmax_scale": -1.0}, "put the sign into q"),
    ],
    ids=["dropout", "bias", "layout", "dim", "aux", "scale"],
)
def test_what_cannot_be_frozen(fields: dict[str, object], why: str) -> None:
    spec = attngen.AttentionSpec(**{"head_dim": 64, **fields})
    with pytest.raises(attngen.UnsupportedSpecError, match=why):
        freeze(spec, WORKLOAD, gpu_name="nvidia_h200")


def test_freeze_takes_a_spec_and_a_workload() -> None:
    with pytest.raises(attngen.SpecError, match="an AttentionSpec and a Workload, got 3 and"):
        freeze(3, WORKLOAD)
