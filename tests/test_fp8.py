"""FP8 operands: shapes, scales, and the error of attention that they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.fp8 import Quantized, spread
from attngen.spec import SCALE_ROWS

DTYPES = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
SHAPES: dict[str, tuple[int, ...]] = {"tensor": (), "head": (2, 3), "block": (2, 3, 3)}


def inputs(
    batch: int, heads: tuple[int, int], seqlen: int, dim: int, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, h, seqlen, dim, generator=generator) for h in (heads[0], *heads[1:] * 2)
    ]


def dequantized(found: Quantized) -> list[Tensor]:
    return [x.double() * spread(scale, x) for x, scale in zip(found[:3], found[3:], strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SHAPES)
def test_operands_times_descales_are_the_originals(dtype: str, scale: str) -> None:
    originals = inputs(2, (6, 3), 2 * SCALE_ROWS + 5, 24)
    found = attngen.quantize(*originals, dtype=dtype, scale=scale)
    assert [tuple(x.shape) for x in found[3:]] == [SHAPES[scale]] * 3
    step = 2.0**-4 if dtype == "float8_e4m3fn" else 2.0**-3  # half a unit of the mantissa
    for x, back in zip(originals, dequantized(found), strict=True):
        least = spread(found[3], x).max().item() * 2.0**-6
        assert ((back - x).abs() <= step * x.abs() + least).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude_of_each_scale_is_the_dtypes_largest(dtype: str) -> None:
    q, k, v = inputs(2, (6, 3), 2 * SCALE_ROWS + 5, 24)
    found = attngen.quantize(q, k, v, dtype=dtype, scale="block")
    rows = found.q.float().abs().amax(3).view(2, 3, 2, -1).amax(2)
    for block in rows.split(SCALE_ROWS, 2):
        assert (block.amax(2) == DTYPES[dtype]).all()


def test_a_tensor_of_zeros_and_an_empty_one_have_scale_one() -> None:
    zeros = torch.zeros(1, 2, 4, 16)
    for scale in SHAPES:
        found = attngen.quantize(zeros, zeros, zeros, scale=scale)
        assert all((x == 1.0).all() for x in found[3:])
        empty = attngen.quantize(zeros[:, :, :0], zeros, zeros, scale=scale)
        assert empty.q.shape == (1, 2, 0, 16)


def test_what_is_not_finite_spoils_no_scale() -> None:
    q, k, v = inputs(1, (2, 2), 8, 16)
    k[0, 0, 0, 0], v[0, 0, 0, 0] = float("inf"), float("nan")
    found = attngen.quantize(q, k, v)
    assert all(x.isfinite().all() for x in found[3:])
    assert found.v.float().isnan().sum() == 1
    assert found.k.float().isfinite().sum() >= k.numel() - 1


@pytest.mark.parametrize("dim", [16, 64, 96, 72])
def test_rotation_keeps_the_scores_and_spreads_an_outlier(dim: int) -> None:
    q, k, v = inputs(1, (2, 2), 32, dim)
    k[..., 3] *= 50
    plain, turned = attngen.quantize(q, k, v), attngen.quantize(q, k, v, hadamard=True)
    scores = q.double() @ k.double().mT

    def error(found: Quantized) -> float:
        a, b, _ = dequantized(found)
        return ((a @ b.mT - scores).norm() / scores.norm()).item()

    assert error(turned) < 0.08 and error(plain) < 0.08
    assert turned.k_descale < 0.7 * plain.k_descale  # the outlier's column is no longer alone
    assert torch.equal(turned.v.float(), plain.v.float())


def test_rotation_and_block_scales_halve_the_error_of_outliers() -> None:
    """FlashAttention-3, section 4.3: N(0, 1), and N(0, 100) at one entry in a thousand."""
    generator = torch.Generator().manual_seed(0)

    def with_outliers() -> Tensor:
        shape = (1, 1, 8192, 128)
        x, y = (torch.randn(shape, generator=generator) for _ in range(2))
        return x + 10 * y * (torch.rand(shape, generator=generator) < 0.001)

    q, k, v = with_outliers()[:, :, :1024], with_outliers(), with_outliers()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * 128**-0.5, -1) @ v

    want = attend(q.double(), k.double(), v.double())

    def error(**options: Any) -> float:
        out = attend(*dequantized(attngen.quantize(q, k, v, **options)))
        return (out - want).square().mean().sqrt().item()

    assert error(scale="block", hadamard=True) < 0.5 * error()


def test_bshd_is_the_transposed_bhsd() -> None:
    originals = inputs(2, (4, 2), 10, 16)
    want = attngen.quantize(*originals, scale="head")
    found = attngen.quantize(
        *(x.mT.mT.transpose(1, 2) for x in originals), scale="head", layout="bshd"
    )
    for x, y in zip(want[:3], found[:3], strict=True):
        assert torch.equal(x.float(), y.transpose(1, 2).float())
    assert all(torch.equal(x, y) for x, y in zip(want[3:], found[3:], strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8_e4m3"}, "dtype must be one of float8_e4m3fn, float8_e5m2"),
        ({"dtype": torch.bfloat16}, "dtype must be one of"),
        ({"dtype": "fp8"}, "got 'fp8'; leave dtype out for float8_e4m3fn"),
        ({"scale": 3}, "got 3; leave scale out for tensor"),
        ({"scale": "row"}, "scale must be one of tensor, head, block, got 'row'"),
        ({"hadamard": 1}, "hadamard must be True or False"),
        ({"layout": "thd"}, "layout must be one of bhsd, bshd"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(attngen.SpecError, match=message):
        attngen.quantize(*inputs(1, (2, 2), 4, 16), **options)


def test_what_is_rounded_already_is_refused() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(1, (2, 2), 4, 16))
    with pytest.raises(attngen.DtypeError, match=r"q must be float16.*pass q\.float\(\)"):
        attngen.quantize(q, k, v)
