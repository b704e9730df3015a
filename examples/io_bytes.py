"""How many bytes attention moves: FlashAttention's IO model, and what to measure beside it.

    python examples/io_bytes.py
    ncu --clock-control none --metrics dram__bytes.sum,lts__t_bytes.sum python examples/io_bytes.py

Prints, for one head, what the model says of the standard algorithm (which writes S and P) and of
the forward kernel, and the memory that one forward and backward take beyond q, k, v, out and their
gradients, by the allocator where there is a GPU. Under Nsight Compute the same run tells the bytes
that reached HBM and L2. A program reads its rows of Q once, and all of K and V.
"""

from __future__ import annotations

import torch

import attngen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, SIZE = 128, 2  # bfloat16


def model(seqlen: int, block_m: int) -> dict[str, int]:
    """Bytes of a forward without a mask, one head."""
    tensor = seqlen * DIM * SIZE
    lse = 4 * seqlen
    return {
        "q, k, v and out, each once": 4 * tensor + lse,
        "standard: also S and P, written and read": 4 * tensor + 4 * seqlen * seqlen * SIZE,
        "forward kernel, asked of L2": 2 * tensor + seqlen // block_m * 2 * tensor + lse,
    }


def standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The standard algorithm: every step to memory and back."""
    s = (q * DIM**-0.5) @ k.transpose(2, 3)
    return torch.softmax(s, dim=-1) @ v


def extra_memory(spec: attngen.AttentionSpec, seqlen: int) -> int:
    """Bytes beyond q, k, v, out, dout and the gradients, at the peak of forward and backward."""
    attn = attngen.compile(spec)
    shape = (1, 1, seqlen, DIM)
    q, k, v = (torch.randn(shape, device=DEVICE).bfloat16().requires_grad_() for _ in range(3))
    dout = torch.randn(shape, device=DEVICE).bfloat16()
    attn(q, k, v).backward(dout)  # compiles
    q.grad = k.grad = v.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attn(q, k, v).backward(dout)
    results = 4 * seqlen * DIM * SIZE  # out and three gradients
    return torch.cuda.max_memory_allocated() - before - results


def main() -> None:
    seqlen = 16384 if DEVICE == "cuda" else 256
    spec = attngen.AttentionSpec(head_dim=DIM)
    attn = attngen.compile(spec)
    q, k, v = (torch.randn(1, 1, seqlen, DIM, device=DEVICE).bfloat16() for _ in range(3))
    out = attn(q, k, v)
    by_steps = standard(q, k, v)
    error = (out.float() - by_steps.float()).abs().max().item()
    print(f"N = {seqlen}, d = {DIM}, bfloat16; largest difference {error:.1e}")
    assert error < 2e-2, "the two do not agree"

    config = attn.explain(q, k, v).choices[0].config
    print(f"forward config: {config.key}")
    for what, count in model(seqlen, config.block_m).items():
        print(f"{count / 1e6:10.1f} MB  {what}")
    if DEVICE == "cuda":
        for deterministic in (True, False):
            each = attngen.AttentionSpec(head_dim=DIM, deterministic=deterministic)
            count = extra_memory(each, seqlen)
            print(f"{count / 1e6:10.1f} MB  extra, forward and backward, {deterministic=}")


if __name__ == "__main__":
    main()
