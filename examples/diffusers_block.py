"""A diffusion transformer of diffusers with attngen's attention.

    pip install 'attngen[integrations]'
    python examples/diffusers_block.py

One line changes: `model.set_attention_backend(register())`. A Flux transformer of random weights
makes a few denoising steps by either backend; the images agree. Runs on a CUDA GPU, or at toy size
in Triton's interpreter where there is none.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

try:
    from diffusers import FluxTransformer2DModel
    from diffusers.utils import logging
except ImportError:
    print("diffusers is not installed; pip install 'attngen[integrations]'")
    sys.exit(0)

from attngen.integrations.diffusers import register


def build(device: str) -> FluxTransformer2DModel:
    """Blocks of joint and of single attention, random weights."""
    is_small = device == "cpu"
    return (
        FluxTransformer2DModel(
            in_channels=16,
            num_layers=1 if is_small else 4,
            num_single_layers=1 if is_small else 8,
            attention_head_dim=16 if is_small else 128,
            num_attention_heads=2 if is_small else 24,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8) if is_small else (16, 56, 56),
        )
        .to(device, torch.float32 if is_small else torch.bfloat16)
        .eval()
    )


@torch.no_grad()
def denoise(model: FluxTransformer2DModel, side: int, steps: int) -> Tensor:
    """Euler steps from noise to an image of side * side patches."""
    device, dtype = model.device, model.dtype
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    image, text, pooled = random(1, side * side, 16), random(1, 12, 32), random(1, 16)
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    places = torch.cat([torch.zeros(side * side, 1), grid], 1).to(device, dtype)
    for step in range(steps):
        velocity = model(
            hidden_states=image,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=torch.tensor([1 - step / steps], device=device, dtype=dtype),
            img_ids=places,
            txt_ids=torch.zeros(12, 3, device=device, dtype=dtype),
        ).sample
        image = image - velocity / steps
    return image


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model, (side, steps) = build(device), (6, 3) if device == "cpu" else (64, 8)
    images = []
    for backend in ("native", register()):
        model.set_attention_backend(backend)
        denoise(model, side, 1)
        began = time.perf_counter()
        images.append(denoise(model, side, steps).float())
        if device == "cuda":
            torch.cuda.synchronize()
            print(f"{backend}: {(time.perf_counter() - began) / steps * 1e3:.1f} ms a step")
    error = (images[1] - images[0]).norm() / images[0].norm()
    print(f"attngen against native attention: relative difference {error.item():.1e}")
    assert error < (1e-5 if device == "cpu" else 3e-2)


if __name__ == "__main__":
    main()
