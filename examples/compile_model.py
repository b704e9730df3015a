"""Use attngen inside torch.compile: one graph for all lengths, dropout, checkpointing.

    python examples/compile_model.py

`attngen.compile` belongs where the model is built. To Dynamo it returns one opaque op, whose
config is chosen at run time by the sizes of the call, so a new length recompiles nothing. The
backend here counts the graphs; a real model takes torch.compile's default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attngen

WIDTH, HEADS = 64, 2
LENGTHS = (33, 48, 64, 100)


class SelfAttention(nn.Module):
    """Causal self-attention with dropout on the softmax matrix."""

    def __init__(self) -> None:
        super().__init__()
        spec = attngen.AttentionSpec(
            head_dim=WIDTH // HEADS, dtype="float32", causal=True, dropout_p=0.1, layout="bshd"
        )
        self.attend = attngen.compile(spec)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2)  # (batch, seqlen, heads, dim)
        out = self.attend(q, k, v, dropout_p=None if self.training else 0.0)
        return self.out(out.flatten(2))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    graphs: list[Any] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = SelfAttention().to(device)
    compiled = torch.compile(model, backend=counting, fullgraph=True, dynamic=True)
    for seqlen in LENGTHS:
        x = torch.randn(2, seqlen, WIDTH, device=device)
        compiled(x).square().mean().backward()
    print(f"{len(LENGTHS)} lengths, {len(graphs)} graph(s)")
    assert len(graphs) == 1

    x = torch.randn(2, 40, WIDTH, device=device, requires_grad=True)
    gradients = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        torch.manual_seed(1)
        gradients += torch.autograd.grad(run(x).square().mean(), x)
    same = torch.equal(*gradients)
    print(f"recomputed in a checkpoint with the same dropout mask: {same}")
    assert same

    model.eval()
    same = torch.equal(model(x), model(x))
    print(f"evaluation drops nothing: {same}")
    assert same


if __name__ == "__main__":
    main()
