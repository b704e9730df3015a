"""Greedy generation over a paged cache, token for token that of eager attention."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from support import REPO
from torch import Tensor

import attngen


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(REPO / "examples" / "serve_paged.py"))


def _eager(model: Any, prompt: Tensor, steps: int) -> list[int]:
    """One token at a time, each from the whole sequence anew."""
    tokens = prompt
    for _ in range(steps):
        following = model(tokens[None])[0, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following])
    return tokens[len(prompt) :].tolist()


def _prompts(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(101, (n,), generator=generator) for n in lengths]


@pytest.mark.slow
@torch.no_grad()
def test_tokens_are_those_of_eager_attention(example: dict[str, Any]) -> None:
    """Lengths of a page, of less and of more; sequences grow over the ends of pages."""
    torch.manual_seed(1)
    model = example["Llama"](example["Sizes"](heads=4, heads_kv=2), "cpu")
    prompts, steps = _prompts((20, 16, 5)), 12
    found = example["generate"](model, prompts, steps)
    want = [_eager(model, prompt, steps) for prompt in prompts]
    assert found.tolist() == want
    assert len(set(sum(want, []))) > steps  # no model that says one thing


@torch.no_grad()
def test_the_check_sees_a_wrong_cache(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are read one token late change what is generated."""
    torch.manual_seed(1)
    model = example["Llama"](example["Sizes"](layers=1), "cpu")
    prompts, right = _prompts((6, 3)), attngen.attention

    def late(*tensors: Tensor, **named: Any) -> Any:
        used = named.pop("seqused_k")
        return right(*tensors, **named, seqused_k=(used - 1).clamp(min=1))

    for attend, is_right in ((right, True), (late, False)):
        monkeypatch.setattr(attngen, "attention", attend)
        found = example["generate"](model, prompts, 3)
        pairs = zip(prompts, found, strict=True)
        short = max(example["shortfall"](model, *pair) for pair in pairs)
        assert (short < 1e-3) is is_right, short
