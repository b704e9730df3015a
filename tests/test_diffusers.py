"""attngen.integrations.diffusers: a small transformer of diffusers against its own attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import attngen

diffusers = pytest.importorskip(
    "diffusers", reason="diffusers is not installed: pip install -e '.[integrations]'"
)

from attngen.integrations import diffusers as integration  # noqa: E402  (not without diffusers)

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers


def _models() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=12,
        axes_dims_rope=(4, 4, 8),
    )
    ours = copy.deepcopy(model)
    ours.set_attention_backend(integration.register())
    return model, ours


def test_model_and_gradients():
    native, ours = _models()
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    named = {
        "hidden_states": random(1, 12, 8),
        "encoder_hidden_states": random(1, 7, 24),
        "pooled_projections": random(1, 12),
        "timestep": torch.tensor([0.5]),
        "img_ids": random(12, 3),
        "txt_ids": random(7, 3),
    }
    outs = [model(**named).sample for model in (native, ours)]
    torch.testing.assert_close(outs[1], outs[0], atol=2e-5, rtol=0)
    for out in outs:
        out.square().mean().backward()
    for got, want in zip(ours.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", [None, "keys", "rows", "float", "causal"])
def test_dispatch(mask: str | None):
    """Masks of every form, by the dispatcher that models call."""
    from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 9, 4, 16, generator=generator)
    k, v = (torch.randn(2, 11, 2, 16, generator=generator) for _ in range(2))
    named: dict[str, Any] = {"scale": 0.3, "enable_gqa": True}
    if mask == "keys":
        named["attn_mask"] = torch.arange(11) < torch.tensor([[11], [6]])
    if mask == "rows":
        named["attn_mask"] = torch.rand(2, 1, 9, 11, generator=generator) < 0.7
    if mask == "float":
        named["attn_mask"] = torch.randn(2, 1, 1, 11, generator=generator)
    if mask == "causal":
        named["is_causal"] = True
    found = []
    for name in ("native", integration.register()):
        with attention_backend(name):
            found.append(dispatch_attention_fn(q, k, v, **named))
    assert found[1].shape == (2, 9, 4, 16) and found[1].is_contiguous()
    torch.testing.assert_close(found[1], found[0], atol=2e-6, rtol=0)


def test_lse_and_refusals():
    q = torch.randn(1, 5, 2, 16)
    out, lse = integration.attend(q, q, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (1, 2, 5)
    with pytest.raises(attngen.UnsupportedSpecError, match="context parallelism"):
        integration.attend(q, q, q, _parallel_config=object())
    with pytest.raises(attngen.SpecError, match="pass enable_gqa=True"):
        integration.attend(q, q[:, :, :1], q[:, :, :1])
    with pytest.raises(attngen.DtypeError, match=r"attn_mask.*write attn_mask.bool\(\)"):
        integration.attend(q, q, q, torch.ones(1, 5, dtype=torch.int64))


def test_register_twice():
    assert integration.register() == integration.register() == "attngen"
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert AttentionBackendName("attngen").value == "attngen"
    assert list(AttentionBackendName.__members__).count("ATTNGEN") == 1
