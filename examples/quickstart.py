"""Compile a spec, run it forward and backward, and compare with PyTorch's attention.

    python examples/quickstart.py

Grouped queries, a causal mask with more keys than queries (aligned at the bottom right), and the
log-sum-exp of each row. Runs on a CUDA GPU, or in Triton's interpreter where there is none.
"""

from __future__ import annotations

import torch

import attngen


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q = torch.randn(1, 4, 50, 64, device=device, requires_grad=True)  # (batch, heads, seqlen, dim)
    k = torch.randn(1, 2, 80, 64, device=device, requires_grad=True)  # two query heads share one
    v = torch.randn(1, 2, 80, 64, device=device, requires_grad=True)

    spec = attngen.AttentionSpec(head_dim=64, dtype="float32", causal=True)
    attn = attngen.compile(spec)
    out, lse = attn(q, k, v, return_lse=True)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    print(f"out {tuple(out.shape)} {out.dtype}, lse {tuple(lse.shape)} {lse.dtype}")

    may_see = torch.ones(50, 80, dtype=torch.bool, device=device).tril(80 - 50)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=may_see, enable_gqa=True
    )
    want_gradients = torch.autograd.grad(want.square().sum(), (q, k, v))
    results = ("out", out, want), *zip(("dq", "dk", "dv"), gradients, want_gradients, strict=True)
    for name, got, right in results:
        error = (got - right).abs().max().item()
        print(f"{name}: largest difference from PyTorch {error:.1e}")
        assert error < 1e-4, f"{name} does not agree with PyTorch"

    print(attn.explain(q, k, v))


if __name__ == "__main__":
    main()
