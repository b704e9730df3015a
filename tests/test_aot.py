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
