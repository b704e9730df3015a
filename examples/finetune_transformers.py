"""Fine-tune a small transformers model with attngen's attention, on packed documents.

    pip install 'attngen[integrations]'
    python examples/finetune_transformers.py

One line changes: `attn_implementation=register()`. Documents of several lengths lie end to end in
one row, and position_ids that restart keep them apart, so that nothing is spent on padding. The
first loss is compared with eager attention's. Runs on a CUDA GPU, or at toy size in Triton's
interpreter where there is none; the model has random weights, and nothing is downloaded.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
from torch import Tensor

try:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
except ImportError:
    print("transformers is not installed; pip install 'attngen[integrations]'")
    sys.exit(0)

from attngen.integrations.transformers import register

VOCAB = 64


def build(device: str) -> transformers.LlamaForCausalLM:
    """A Llama of random weights."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        num_attention_heads=4 if device == "cpu" else 16,
        num_key_value_heads=2 if device == "cpu" else 4,
        head_dim=16 if device == "cpu" else 64,
        max_position_embeddings=8192,
        **(small if device == "cpu" else large),
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return transformers.LlamaForCausalLM(config).to(device, dtype)


def documents(lengths: list[int], device: str) -> dict[str, Tensor]:
    """Counting upwards, from somewhere: tokens of all documents in one row."""
    tokens, positions = [], []
    for length in lengths:
        positions.append(torch.arange(length))
        tokens.append((positions[-1] + torch.randint(VOCAB, ())) % VOCAB)
    ids = torch.cat(tokens)[None].to(device)
    starts = torch.cat(positions)[None].to(device)
    labels = ids.masked_fill(starts == 0, -100)  # no token says what another document begins with
    return {"input_ids": ids, "position_ids": starts, "labels": labels}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    lengths, steps = ([9, 14, 5], 8) if device == "cpu" else ([1500, 700, 2400, 3400], 50)
    model = build(device)
    model.set_attn_implementation(register())
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    batch = documents(lengths, device)
    with torch.no_grad():
        want = eager(**batch, use_cache=False).loss.item()
        got = model(**batch, use_cache=False).loss.item()
    print(f"loss with attngen {got:.5f}, with eager attention {want:.5f}")
    assert abs(got - want) < (1e-5 if device == "cpu" else 2e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if device == "cpu" else 3e-4)
    model.train()
    for step in range(steps):
        loss = model(**documents(lengths, device), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 4) == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"after {steps} steps: loss {loss.item():.3f}, less than at first: {loss.item() < got}")
    assert loss.item() < got


if __name__ == "__main__":
    main()
