"""Forward-mode derivatives: tangents of out and lse, beside differences and the oracle's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import make_qkv, oracle, oracle_options, python
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import attngen
from attngen import calls, tangents
from attngen.identity import parsed
from attngen.tangents import JvpConfig

# torch.func builds its jvp decompositions with torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*is deprecated")

BATCH, HEADS, ROWS, KEYS = 2, 2, 17, 21
INF = math.inf


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 by 16, so that short sequences span several."""

    def default(spec: Any, given: str, *rest: Any) -> JvpConfig:
        return JvpConfig(block_m=16, block_n=16, num_warps=1, num_stages=1, tangents=given)

    monkeypatch.setattr(tangents, "default", default)
    tangents._RUNS.clear()


def inputs(dtype: torch.dtype = torch.float32, **sizes: int) -> dict[str, Tensor]:
    usual = {"batch": BATCH, "heads": HEADS, "heads_kv": 1, "seqlen_q": ROWS, "seqlen_k": KEYS}
    made = make_qkv(**{**usual, "dim": 16, "dim_v": 24, **sizes}, dtype=dtype)
    return {name: x.detach() for name, x in zip("qkv", made, strict=True)}


def moved(given: dict[str, Tensor], names: str = "qkv") -> dict[str, Tensor]:
    """Random tangents."""
    generator = torch.Generator().manual_seed(7)
    return {n: torch.randn(given[n].shape, generator=generator).to(given[n]) for n in names}


def derived(
    function: Callable[..., Any], given: dict[str, Tensor], by: dict[str, Tensor]
) -> tuple[Any, Any]:
    """(results, tangents) of a function of q, k and v."""
    fixed = {name: x for name, x in given.items() if name not in by}
    return torch.func.jvp(
        lambda *x: function(**dict(zip(by, x, strict=True)), **fixed),
        tuple(given[name] for name in by),
        tuple(by.values()),
    )


def exact(
    given: dict[str, Tensor],
    by: dict[str, Tensor],
    options: dict[str, Any],
    scores: dict[str, Tensor],
    **how: Any,
) -> list[Tensor]:
    """out, lse and their tangents by the oracle, whose rounding has no forward-mode derivative."""
    named = oracle_options(options, given["q"], given["k"]) | scores
    wide = how.get("math_dtype", torch.float64)
    given = {name: x.to(wide) for name, x in given.items()}
    by = {name: x.to(wide) for name, x in by.items()}

    def solve(**x: Tensor) -> tuple[Tensor, Tensor]:
        result = oracle.attention(**x, **named, **how)
        return result.out, result.lse

    results, found = derived(solve, given, by)
    return [*results, found[0], found[1].masked_fill(results[1] == -INF, 0.0)]


def check(
    given: dict[str, Tensor],
    by: dict[str, Tensor],
    scores: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """As exact as plain PyTorch, float32, of inputs and P rounded as they must be."""
    scores = scores or {}
    results, found = derived(
        lambda **x: attngen.attention(**x, return_lse=True, **scores, **options), given, by
    )
    right = exact(given, by, options, scores)
    yard = exact(given, by, options, scores, math_dtype=torch.float32)
    out, lse = attngen.attention(**given, return_lse=True, **scores, **options)
    dtype = given["q"].dtype
    for name, got, want, about in zip(
        ("out", "lse", "tout", "tlse"), (*results, *found), right, yard, strict=True
    ):
        kind = dtype if name.endswith("out") else torch.float32
        assert got.dtype == kind and got.shape == want.shape, name
        if dtype != torch.float32 and name == "tout":  # P dS and P are rounded, and cancel
            error = (got.double() - want).norm() / want.norm().clamp(min=1e-9)
            assert error < 2 * torch.finfo(dtype).eps, f"{name}: {error}"
            continue
        good, why = oracle.judge(got, want, kind, yard=about)
        assert good, f"{name}: {why}"
    torch.testing.assert_close(
        results[0], out, atol=2e-2 if dtype != torch.float32 else 2e-6, rtol=0
    )
    torch.testing.assert_close(results[1], lse, atol=2e-6, rtol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top_left"},
    "window": {"window": (4, 3)},
    "causal-window-softcap": {"causal": True, "window": (6, 0), "softcap": 2.0},
    "chunk": {"chunk": 7},
    "negative-scale": {"softmax_scale": -0.3, "causal": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 11, "causal": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tangents_of_all_three(options: dict[str, Any], dtype: torch.dtype) -> None:
    given = inputs(dtype)
    check(given, moved(given), **options)


SUBSETS = ["".join(c) for n in (1, 2) for c in itertools.combinations("qkv", n)]


@pytest.mark.parametrize("names", SUBSETS)
def test_subsets(names: str) -> None:
    given = inputs()
    check(given, moved(given, names), causal=True, softcap=3.0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"seqlen_q": 33, "seqlen_k": 9},
        {"heads": 4, "heads_kv": 2, "dim": 40, "dim_v": 8},
        {"dim": 7, "dim_v": 5},
        {"seqlen_q": 1},
    ],
    ids=["rows-that-see-nothing", "gqa", "odd-dims", "one-query"],
)
def test_sizes(sizes: dict[str, int]) -> None:
    given = inputs(**sizes)
    check(given, moved(given), causal=True)


def test_terms_are_fixed_and_count() -> None:
    given = inputs()
    bias = torch.randn(1, HEADS, ROWS, KEYS)
    bias[..., 5] = -INF
    bias[:, :, 3] = -INF
    scores = {
        "bias": bias,
        "alibi_slopes": torch.tensor([0.3, 0.1]),
        "sinks": torch.tensor([0.5, 2.0]),
    }
    check(given, moved(given), scores)
    mask = torch.rand(BATCH, 1, ROWS, KEYS) < 0.7
    check(given, moved(given), attn_mask=mask)


@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_central_differences(names: str) -> None:
    given = inputs()
    by = moved(given, names)
    options = oracle_options({"causal": True, "softcap": 2.0}, given["q"], given["k"])

    def at(step: float) -> list[Tensor]:
        shifted = {
            n: x.double() + step * by[n].double() if n in by else x for n, x in given.items()
        }
        result = oracle.attention(**shifted, **options)
        return [result.out, result.lse]

    _, found = derived(
        lambda **x: attngen.attention(**x, return_lse=True, causal=True, softcap=2.0), given, by
    )
    step = 1e-5
    for got, high, low in zip(found, at(step), at(-step), strict=True):
        torch.testing.assert_close(got.double(), (high - low) / (2 * step), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("what", ["k", "v", "tk", "tv"])
@pytest.mark.parametrize("value", [math.nan, INF])
def test_nan_behind_masks_does_not_leak(what: str, value: float) -> None:
    """A key that the first rows do not see taints those that see it, and no others."""
    given = inputs(seqlen_q=KEYS)
    by = moved(given)

    def run(given: dict[str, Tensor], by: dict[str, Tensor]) -> list[Tensor]:
        results, found = derived(
            lambda **x: attngen.attention(**x, causal=True, return_lse=True), given, by
        )
        return [*results, *found]

    clean = run(given, by)
    (by if what[0] == "t" else given)[what[-1]][:, :, 9] = value
    for name, got, want in zip(("out", "lse", "tout", "tlse"), run(given, by), clean, strict=True):
        assert torch.isfinite(got[:, :, :9]).all(), name
        torch.testing.assert_close(got[:, :, :9], want[:, :, :9], atol=2e-6, rtol=0)
        if name == "tout":
            assert not torch.isfinite(got[:, :, 9:]).all(-1).any(), name


def test_non_contiguous_inputs_and_tangents() -> None:
    given = inputs(heads_kv=2)
    by = moved(given)
    lie = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in given.items()}
    wide = {n: torch.stack([x, x], -1)[..., 0] for n, x in by.items()}
    assert not any(x.is_contiguous() for x in (*lie.values(), *wide.values()))
    check(lie, wide, causal=True)


def test_dual_tensors_layouts_and_compiled_specs() -> None:
    given = inputs()
    by = moved(given, "qv")
    spec = attngen.AttentionSpec(
        head_dim=16, head_dim_v=24, dtype="float32", causal=True, layout="bshd"
    )
    attend = attngen.compile(spec)
    _, (want, _) = derived(
        lambda **x: attngen.attention(**x, causal=True, return_lse=True), given, by
    )
    with forward_ad.dual_level():
        q, k, v = (
            forward_ad.make_dual(x, by[n]).transpose(1, 2) if n in by else x.transpose(1, 2)
            for n, x in given.items()
        )
        tangent = forward_ad.unpack_dual(attend(q, k, v)).tangent
    torch.testing.assert_close(tangent.transpose(1, 2), want)


def test_vmap_both_ways_and_jacfwd() -> None:
    given = inputs(batch=1, seqlen_q=5, seqlen_k=6)
    by = moved(given)
    many = {n: torch.stack([x, -2 * x, x.flip(2)]) for n, x in by.items()}

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return derived(
            lambda **x: attngen.attention(**x, causal=True), given, {"q": q, "k": k, "v": v}
        )[1]

    got = torch.func.vmap(one)(*many.values())
    want = torch.stack([one(*(x[n] for x in many.values())) for n in range(3)])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)

    def outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.func.vmap(lambda *x: attngen.attention(*(y[None] for y in x), causal=True)[0])(
            q, k, v
        )

    _, got = torch.func.jvp(outside, tuple(given.values()), tuple(by.values()))
    torch.testing.assert_close(got, one(*by.values()), atol=2e-6, rtol=0)

    few = {n: x[:1, :1, :3] for n, x in inputs(dim=2, dim_v=2).items()}
    got = torch.func.jacfwd(lambda q: attngen.attention(q, few["k"], few["v"]))(few["q"])
    want = torch.func.jacrev(lambda q: attngen.attention(q, few["k"], few["v"]))(few["q"])
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
def test_torch_compile() -> None:
    given = inputs()
    by = moved(given)

    def run(*x: Tensor) -> Any:
        return torch.func.jvp(lambda *y: attngen.attention(*y, causal=True), x[:3], x[3:])

    tensors = (*given.values(), *by.values())
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors)
    for a, b in zip(got, run(*tensors), strict=True):
        assert torch.equal(a, b)


def op_arguments(given: dict[str, Tensor], by: dict[str, Tensor]) -> tuple[Any, ...]:
    spec = attngen.AttentionSpec(head_dim=16, head_dim_v=24, dtype="float32")
    by_name = [by.get(name) for name in "qkv"]
    return (spec.text_key, *given.values(), *by_name, [], [0.25], [0])


@pytest.mark.parametrize("names", ["qkv", "v"])
def test_the_op_passes_opcheck(names: str) -> None:
    given = inputs()
    torch.library.opcheck(
        torch.ops.attngen.jvp.default,
        op_arguments(given, moved(given, names)),
        test_utils=("test_schema", "test_faketensor"),
    )


class _Sizes(TorchDispatchMode):
    """The largest tensor that any operation gives."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def test_no_score_matrix_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call allocates, and hands its kernel, is linear in the lengths."""
    given = inputs(batch=1, heads=1, seqlen_q=200, seqlen_k=200)
    by = moved(given)
    seen: list[int] = []
    launch = calls.launch

    def launched(call: Any, tensors: Any, extra: Any) -> Any:
        seen.extend(math.prod(each.shape) for each in call.memory)
        seen.extend(x.numel() for x in (*tensors, *extra) if x is not None)
        return launch(call, tensors, extra)

    monkeypatch.setattr(calls, "launch", launched)
    arguments = op_arguments(given, by)
    with _Sizes() as sizes:
        tangents.forward(*arguments)
    linear = 200 * 24
    assert seen and max(seen) <= linear
    assert 0 < sizes.largest <= 4 * linear < 200 * 200  # the interpreter counts in bytes


def test_empty_calls() -> None:
    given = {n: x[:, :, :0] for n, x in inputs().items()}
    results, found = derived(
        lambda **x: attngen.attention(**x, return_lse=True), given, moved(given)
    )
    assert results[0].shape == found[0].shape == (BATCH, HEADS, 0, 24)
    given = inputs()
    given |= {n: given[n][:, :, :0] for n in "kv"}
    results, found = derived(
        lambda **x: attngen.attention(**x, return_lse=True), given, moved(given)
    )
    assert (results[1] == -INF).all() and not found[0].any() and not found[1].any()


def test_partial_results_and_side_outputs_have_tangents_where_they_can() -> None:
    given = inputs(torch.bfloat16)
    by = moved(given)
    (out, aux), (tout, taux) = derived(
        lambda **x: attngen.attention(**x, partial=True, return_aux=("lse", "entropy")), given, by
    )
    right = exact(given, by, {}, {})
    assert out.dtype == tout.dtype == torch.float32
    assert (tout.double() - right[2]).norm() < 1e-2 * right[2].norm()
    torch.testing.assert_close(taux["lse"].double(), right[3], atol=1e-4, rtol=1e-4)
    assert not taux["entropy"].any()  # not differentiable
    assert aux["entropy"].all()


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_tangents_of_terms_are_refused(name: str) -> None:
    given = inputs()
    shape = (1, HEADS, ROWS, KEYS) if name == "bias" else (HEADS,)
    term = torch.rand(shape)
    with pytest.raises(NotImplementedError, match=f"no forward-mode derivative by {name}"):
        torch.func.jvp(lambda x: attngen.attention(**given, **{name: x}), (term,), (term,))


def test_fp8_is_refused() -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float8_e5m2", fp8_scale="tensor")
    x = torch.zeros(1, 1, 4, 16).to(torch.float8_e5m2)
    one = torch.ones(())
    with pytest.raises(attngen.UnsupportedSpecError, match="FP8"):
        tangents.forward(spec.text_key, x, x, x, x, None, None, [one] * 3, [0.25], [0])


def test_tangents_of_another_shape_are_refused() -> None:
    given = inputs()
    text_key, q, *rest = op_arguments(given, moved(given))
    rest[2] = rest[2][:, :, :3]
    with pytest.raises(attngen.SpecError, match="the tangent of q must be as q"):
        tangents.forward(text_key, q, *rest)


def test_source_reads_what_the_header_says() -> None:
    spec = attngen.AttentionSpec(head_dim=64, causal=True, window=(7, 0))
    config = JvpConfig(block_m=64, block_n=32, num_warps=4, num_stages=2, tangents="qk")
    text = tangents.source(spec, config)
    head = text.split('"""')[1]
    line = head[head.index("spec ") + 5 : head.index("config")]
    named = head[head.index("config") + 6 : head.index("again")]
    assert tangents.source(line, named) == text
    with pytest.raises(attngen.SpecError, match="has the fields"):
        tangents.source(spec, "block_m=64")
    with pytest.raises(attngen.SpecError, match="in this order, got 'vq'"):
        tangents.source(spec, named.replace("tangents=qk", "tangents=vq"))
    assert parsed(spec.text_key).text_key in "".join(head.split())


@pytest.mark.slow
def test_a_file_stands_alone(tmp_path: Any) -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True)
    config = JvpConfig(block_m=32, block_n=32, num_warps=4, num_stages=1, tangents="qkv")
    path = tmp_path / "file.py"
    path.write_text(tangents.source(spec, config))
    done = python(
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')",
        str(path),
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0 and "tlse" in done.stdout, done.stderr[-2000:]


COMPILE = """
import torch, triton
from attngen.tuner.compile_worker import TargetDriver
from attngen import gpu
from attngen.kernel import Kernel
from attngen.spec import AttentionSpec
from attngen.tangents import default
from attngen.tuner import case
from attngen.workload import Workload
triton.runtime.driver.set_active(TargetDriver(90))
spec = AttentionSpec(head_dim=64, causal=True, softcap=20.0)
for by_pointer in (False, True):
    config = default(spec, "qkv", 4096, 4096, gpu.by_name("nvidia_h200"), by_pointer)
    x = case.make(spec, Workload(1, 8, 2, 512, 512), "meta", backward=False)
    tensors = (x.q, x.k, x.v, x.q, x.k, x.v, x.out, x.lse, x.out, x.lse)
    (launch,) = Kernel(spec, config, interpret=False).module.plan(*tensors, **x.numbers)
    kernel, grid, arguments, constants = launch
    print(config.tiles, kernel.warmup(*arguments, grid=grid, **constants).metadata.shared)
"""


@pytest.mark.slow
def test_it_compiles_for_hopper() -> None:
    done = python(COMPILE, TRITON_INTERPRET="")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["descriptor", "pointer"]
