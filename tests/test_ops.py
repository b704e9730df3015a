"""The torch ops: schema, fakes, autograd, compile, export, vmap, autocast, checkpoints, threads."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_close, assert_exact, make_qkv, python
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import attngen.ops
from attngen import calls, settle
from attngen.dropout import seed_tensor
from attngen.identity import parsed
from attngen.pinned import pinned

fwd, bwd = torch.ops.attngen.fwd, torch.ops.attngen.bwd


def fwd_arguments(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None = None, partial: int = 0, **fields: Any
) -> tuple[Any, ...]:
    """Arguments of `attngen::fwd` for a causal spec, with dropout if a seed is given."""
    spec = attngen.AttentionSpec(
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        causal=True,
        dropout_p=0.25 if seed is not None else 0.0,
        **fields,
    )
    scalars = {"softmax_scale": 0.3, "dropout_p": 0.25}
    ints = {
        "partial": partial,
        "q_start": 0,
        "q_step": 1,
        "k_start": 0,
        "k_step": 1,
        "bottom_right": 1,
        "seqlen_q_total": -1,
        "seqlen_k_total": -1,
        "batch_start": 0,
        "head_start": 0,
    }
    return (
        spec.text_key,
        q,
        k,
        v,
        [] if seed is None else [seed],
        [scalars[name] for name in spec.scalar_args],
        [ints[name] for name in spec.int_args],
    )


def seq_major(x: Tensor) -> Tensor:
    """The same values stored (batch, seqlen, heads, dim), as a leaf."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by the direction of each kernel call."""
    seen: list[str] = []
    launch = calls.launch

    def counting(call: Any, inputs: Any, *more: Any) -> Any:
        seen.append("fwd" if len(inputs) == 3 else "bwd")
        return launch(call, inputs, *more)

    monkeypatch.setattr(calls, "launch", counting)
    return seen


# ---- opcheck --------------------------------------------------------------------------------

OPCHECK_INPUTS = {
    "plain": {},
    "non-contiguous-q": {"strided": True},
    "gqa-wide-v": {"heads_kv": 1, "dim_v": 24},
    "dropout-seed": {"dropout": True},
    "partial": {"partial": 1, "dtype": torch.bfloat16},
}


def _opcheck_arguments(
    strided: bool = False, dropout: bool = False, partial: int = 0, **sizes: Any
) -> tuple[Any, ...]:
    q, k, v = make_qkv(seqlen_q=5, seqlen_k=7, **sizes)
    seed = torch.tensor([42]) if dropout else None
    return fwd_arguments(seq_major(q) if strided else q, k, v, seed, partial)


@pytest.mark.rotating
@pytest.mark.parametrize("how", OPCHECK_INPUTS.values(), ids=OPCHECK_INPUTS)
def test_fwd_passes_opcheck(how: dict[str, Any]) -> None:
    torch.library.opcheck(fwd.default, _opcheck_arguments(**how))


@pytest.mark.rotating
@pytest.mark.parametrize("how", OPCHECK_INPUTS.values(), ids=OPCHECK_INPUTS)
@pytest.mark.parametrize("with_dlse", [False, True], ids=["dout", "dout-dlse"])
def test_bwd_passes_opcheck(how: dict[str, Any], with_dlse: bool) -> None:
    arguments = _opcheck_arguments(**how)
    text_key, q, k, v, *rest = arguments
    with torch.no_grad():
        out, lse = fwd(*arguments)
    dout = torch.randn(out.shape, dtype=out.dtype)
    dlse = torch.randn(lse.shape) if with_dlse else None
    q, k, v = (x.detach() for x in (q, k, v))  # the backward has no derivative of its own
    torch.library.opcheck(bwd.default, (text_key, q, k, v, out, lse, dout, dlse, *rest))


def test_bwd_without_a_gradient_of_out_uses_that_of_lse_alone() -> None:
    q, k, v = make_qkv()
    _, lse = attngen.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    p = torch.softmax(q @ k.transpose(2, 3) / 4, -1)
    assert_close((dq, dk), (p @ k / 4, p.transpose(2, 3) @ q / 4))
    assert not dv.any()


def test_results_alias_no_input() -> None:
    q, k, v = make_qkv()
    with torch.no_grad():
        results = fwd(*fwd_arguments(q, k, v))
    inputs = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert inputs.isdisjoint(x.untyped_storage().data_ptr() for x in results)


# ---- fakes ----------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.detach().requires_grad_(),
    "seq-major": seq_major,
    "fused-view": lambda x: torch.stack([x.detach(), x.detach()], 2)[:, :, 1].requires_grad_(),
    "last-stride-2": lambda x: x.detach().repeat_interleave(2, 3)[..., ::2].requires_grad_(),
}


def _facts(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype


@pytest.mark.rotating
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("seqlen_q", "dim_v", "options"),
    [
        pytest.param(1, 16, {}, id="one-query"),
        pytest.param(5, 24, {}, id="wide-v"),
        pytest.param(33, 8, {"causal": True}, id="narrow-v"),
        pytest.param(5, 24, {"layout": "bshd"}, id="bshd"),
        pytest.param(5, 24, {"partial": True}, id="partial"),
    ],
)
def test_fake_results_equal_real_ones_in_shape_stride_and_dtype(
    layout: Callable[[Tensor], Tensor], seqlen_q: int, dim_v: int, options: dict[str, Any]
) -> None:
    tensors = make_qkv(batch=2, heads=4, heads_kv=2, seqlen_q=seqlen_q, seqlen_k=7, dim_v=dim_v)
    q, k, v = (layout(x.to(torch.float16)) for x in tensors)
    if "layout" in options:
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))

    def facts(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Any, ...]]:
        out, lse = attngen.attention(q, k, v, return_lse=True, **options)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
        return [_facts(x) for x in (out, lse, *grads)]

    real = facts(q, k, v)
    with FakeTensorMode() as mode:
        fake = facts(*(mode.from_tensor(x).detach().requires_grad_() for x in (q, k, v)))
    assert fake == real
    shape = (2, 4, seqlen_q)
    out_shape = (2, seqlen_q, 4, dim_v) if "layout" in options else (*shape, dim_v)
    assert [facts[0] for facts in real[:2]] == [out_shape, shape]


# ---- torch.compile and export ---------------------------------------------------------------


def compiled(function: Callable[..., Any], dynamic: bool | None = True) -> Callable[..., Any]:
    """A fresh torch.compile of a function, whose graphs `graphs()` counts."""
    torch._dynamo.reset()
    counters.clear()
    made: Callable[..., Any] = torch.compile(
        function, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    return made


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


LENGTHS = (17, 33, 97, 20)


def _run_with_gradients(attend: Any, *tensors: Tensor) -> list[Tensor]:
    out, lse = attend(*tensors)
    generator = torch.Generator().manual_seed(3)
    do = torch.randn(out.shape, generator=generator)
    return [out, lse, *torch.autograd.grad((out * do).sum() + lse.sum(), tensors)]


def _entry_points() -> dict[str, Callable[..., Any]]:
    attn = attngen.compile(attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True))
    return {
        "attention": lambda q, k, v: attngen.attention(q, k, v, causal=True, return_lse=True),
        "compile": lambda q, k, v: attn(q, k, v, return_lse=True),
    }


@pytest.mark.parametrize("attend", _entry_points().values(), ids=_entry_points())
def test_torch_compile_makes_one_graph_for_all_lengths(attend: Callable[..., Any]) -> None:
    fast = compiled(attend)
    for seqlen in LENGTHS:
        tensors = make_qkv(seqlen_q=seqlen, seqlen_k=seqlen + 3)
        assert_close(_run_with_gradients(fast, *tensors), _run_with_gradients(attend, *tensors))
    assert graphs() == 1


def test_torch_compile_with_dropout_and_windows_makes_one_graph() -> None:
    """Window sizes are run-time numbers too."""

    def attend(q: Tensor, k: Tensor, v: Tensor, left: int, seed: Tensor) -> Any:
        return attngen.attention(
            q, k, v, window=(left, 2), dropout_p=0.3, dropout_seed=seed, return_lse=True
        )

    fast = compiled(attend)
    for seqlen, left in ((17, 5), (33, 9), (26, 2)):
        tensors, rest = make_qkv(seqlen_q=seqlen), (left, torch.tensor([seqlen]))
        got, want = (
            _run_with_gradients(lambda *x, fn=fn, rest=rest: fn(*x, *rest), *tensors)
            for fn in (fast, attend)
        )
        assert_close(got, want)
    assert graphs() == 1


def test_mark_dynamic_does_not_specialise_lengths() -> None:
    fast = compiled(_entry_points()["attention"], dynamic=None)
    for seqlen in (17, 40, 23):
        tensors = make_qkv(seqlen_q=seqlen, seqlen_k=seqlen + 3)
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 2)
        assert_exact(fast, *tensors, {"causal": True})
    assert graphs() == 1


INDUCTOR = """
import torch
from support import assert_exact, make_qkv
import attngen
attn = attngen.compile(attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True))
fast = torch.compile(lambda *x: attn(*x, return_lse=True), fullgraph=True, dynamic=True)
for seqlen in (17, 40, 23):
    assert_exact(fast, *make_qkv(seqlen_q=seqlen), {"causal": True})
"""


@pytest.mark.slow
def test_inductor_equals_eager() -> None:
    """In a process of its own: inductor's pool of compilers outlives a test."""
    done = python(INDUCTOR)
    assert done.returncode == 0, done.stderr[-2000:]


class Block(torch.nn.Module):
    """A projection, attention, and a projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.back = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        spec = attngen.AttentionSpec(
            head_dim=16, dtype="float32", causal=True, layout="bshd", dropout_p=0.1
        )
        self.attend = attngen.compile(spec)

    def forward(self, x: Tensor, dropout_seed: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        p = None if self.training else 0.0
        out = self.attend(q, k, v, dropout_p=p, dropout_seed=dropout_seed)
        return self.back(out.flatten(2))


def test_export_keeps_the_length_dynamic() -> None:
    block = Block().eval()
    seqlen = torch.export.Dim("seqlen", min=2, max=512)
    program = torch.export.export(
        block, (torch.randn(1, 12, 32),), dynamic_shapes={"x": {1: seqlen}}
    )
    for length in (12, 30, 57):
        x = torch.randn(1, length, 32)
        torch.testing.assert_close(program.module()(x), block(x))


# ---- autograd, vmap, autocast ---------------------------------------------------------------


def test_op_differentiates_without_the_api() -> None:
    tensors = make_qkv(seqlen_k=23)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = fwd(*fwd_arguments(q, k, v))
        return out, lse

    assert_exact(attend, *tensors, {"causal": True, "softmax_scale": 0.3})


def test_gradient_for_q_alone() -> None:
    tensors = make_qkv()
    q = tensors[0]
    k, v = (x.detach() for x in tensors[1:])
    attngen.attention(q, k, v, causal=True).sum().backward()
    want = torch.autograd.grad(attngen.attention(*tensors, causal=True).sum(), tensors)
    assert_close([q.grad], want[:1])
    assert k.grad is None and v.grad is None


def test_no_grad_and_inference_mode_save_nothing() -> None:
    q, k, v = make_qkv()
    want = attngen.attention(q, k, v)
    assert want.grad_fn is not None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = attngen.attention(q, k, v)
        assert out.grad_fn is None and not out.requires_grad
        assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("in_dims", "size_at"),
    [
        pytest.param((0, 0, 0), 0, id="first"),
        pytest.param((2, 2, 2), 2, id="inner"),
        pytest.param((0, None, None), 0, id="q-alone"),
    ],
)
def test_vmap_equals_a_loop(in_dims: tuple[int | None, ...], size_at: int) -> None:
    samples = [make_qkv(batch=2, seqlen_q=9, seed=seed) for seed in range(3)]
    first = samples[0]
    stacked = [
        x.detach() if dim is None else torch.stack([s[n].detach() for s in samples], dim)
        for n, (x, dim) in enumerate(zip(first, in_dims, strict=True))
    ]
    for x in stacked:
        x.requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attngen.attention(q, k, v, causal=True, return_lse=True)
        return out, lse

    out, lse = torch.vmap(attend, in_dims)(*stacked)
    rows = []
    for number in range(3):
        chosen = [
            x if dim is None else x.select(dim, number)
            for x, dim in zip(stacked, in_dims, strict=True)
        ]
        rows.append(attend(*chosen))
    want = [torch.stack(x) for x in zip(*rows, strict=True)]
    assert_close((out, lse), want, atol=1e-6)
    do = torch.randn(out.shape)
    assert_close(
        torch.autograd.grad((out * do).sum() + lse.sum(), stacked),
        torch.autograd.grad((want[0] * do).sum() + want[1].sum(), stacked),
    )


def test_vmap_refuses_a_seed_per_sample() -> None:
    q, k, v = (x.detach() for x in make_qkv(seqlen_q=4))

    def attend(seed: Tensor) -> Tensor:
        out: Tensor = attngen.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)
        return out

    with pytest.raises(attngen.SpecError, match="vmap over dropout_seed is not offered"):
        torch.vmap(attend)(torch.arange(3)[:, None])


def _mixed() -> tuple[Tensor, Tensor, Tensor]:
    """What a norm layer does under autocast: q and k in float32, v still in bfloat16."""
    q, k, v = make_qkv()
    return q, k, v.detach().bfloat16().requires_grad_()


@pytest.mark.parametrize("through", ["attention", "compile"])
def test_autocast_casts_mixed_dtypes_and_gradients_return_in_the_inputs_dtypes(
    through: str,
) -> None:
    q, k, v = _mixed()
    attn = attngen.compile(attngen.AttentionSpec(head_dim=16, dtype="bfloat16"))
    attend = attn if through == "compile" else attngen.attention
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(q, k, v, return_lse=True)
    narrow = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    want = attngen.attention(*narrow)
    assert torch.equal(out, want)

    found: list[Any] = []  # the backward runs outside autocast, in a thread that never saw it
    thread = threading.Thread(
        target=lambda: found.extend(torch.autograd.grad(out.float().sum(), (q, k, v)))
    )
    thread.start()
    thread.join()
    wanted = torch.autograd.grad(want.float().sum(), narrow)
    assert [g.dtype for g in found] == [torch.float32, torch.float32, torch.bfloat16]
    for got, right in zip(found, wanted, strict=True):
        assert torch.equal(got, right.to(got.dtype))


def test_mixed_dtypes_outside_autocast_are_a_type_error_and_a_spec_error() -> None:
    with pytest.raises(TypeError, match="got torch.float32, torch.float32, torch.bfloat16") as e:
        attngen.attention(*_mixed())
    assert isinstance(e.value, attngen.SpecError)


# ---- checkpoints, FLOPs, pickling, threads --------------------------------------------------


def _train_step(block: Block, x: Tensor, forward: Callable[..., Tensor]) -> list[Tensor]:
    block.zero_grad()
    loss = forward(x).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in block.parameters() if p.grad is not None)]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_with_dropout_is_bit_equal(reentrant: bool) -> None:
    block, x = Block(), torch.randn(1, 20, 32).requires_grad_()
    torch.manual_seed(0)
    want = _train_step(block, x, block)
    torch.manual_seed(0)
    got = _train_step(block, x, lambda x: checkpoint(block, x, use_reentrant=reentrant))
    assert len(want) == 5
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    torch.manual_seed(1)
    assert not torch.equal(_train_step(block, x, block)[0], want[0])  # dropout is at work


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_without_rng_state_is_bit_equal_with_an_explicit_seed(reentrant: bool) -> None:
    block, x = Block(), torch.randn(1, 20, 32).requires_grad_()
    seed = torch.tensor([99])
    want = _train_step(block, x, lambda x: block(x, seed))
    got = _train_step(
        block,
        x,
        lambda x: checkpoint(block, x, seed, use_reentrant=reentrant, preserve_rng_state=False),
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_selective_checkpoint_decides_whether_attention_runs_again(
    policy: CheckpointPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = count_forwards(monkeypatch)
    block, x = Block(), torch.randn(1, 12, 32).requires_grad_()

    def decide(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        return policy if op == fwd.default else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(decide)

    _train_step(block, x, lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts))
    forwards = 1 if policy == CheckpointPolicy.MUST_SAVE else 2
    assert seen.count("fwd") == forwards
    assert seen.count("bwd") == 1


def test_flop_counter_counts_both_directions() -> None:
    q, k, v = make_qkv(batch=2, heads=4, heads_kv=2, seqlen_q=5, seqlen_k=7, dim=16, dim_v=8)
    with FlopCounterMode(display=False) as counter:
        out = attngen.attention(q, k, v)
        forward = counter.get_total_flops()
        out.sum().backward()
    products = 2 * 2 * 4 * 5 * 7
    assert forward == products * (16 + 8)
    assert counter.get_total_flops() - forward == products * (3 * 16 + 2 * 8)


def test_attention_pickles() -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True, window=(5, 0))
    attn = attngen.compile(spec)
    again = pickle.loads(pickle.dumps(attn))
    assert again.spec == attn.spec
    q, k, v = make_qkv()
    assert torch.equal(again(q, k, v), attn(q, k, v))


def test_two_threads_may_make_the_first_call_at_once() -> None:
    for dim in range(17, 22):  # five specs that no other test has run
        q, k, v = make_qkv(seqlen_q=8, dim=dim)
        barrier = threading.Barrier(2)
        found: dict[int, list[Tensor]] = {}

        def first_call(
            number: int,
            q: Tensor = q,
            k: Tensor = k,
            v: Tensor = v,
            barrier: Any = barrier,
            found: dict[int, list[Tensor]] = found,
        ) -> None:
            barrier.wait()
            out = attngen.attention(q, k, v, causal=True)
            found[number] = [out, *torch.autograd.grad(out.sum(), (q, k, v))]

        threads = [threading.Thread(target=first_call, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        wanted = [want, *torch.autograd.grad(want.sum(), (q, k, v))]
        for number in range(2):
            assert_close(found[number], wanted)


def test_deterministic_backward_gives_the_same_bits() -> None:
    q, k, v = make_qkv(heads=4, heads_kv=2, seqlen_q=40)
    with pinned({"fwd": SMALL_FWD, "bwd": SMALL_BWD}):
        out = attngen.attention(q, k, v, causal=True, deterministic=True)
        grads = [torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in range(3)]
    for again in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, grads[0], strict=True))


def test_deterministic_follows_torch_at_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32")
    assert attngen.compile(spec).spec.deterministic is False
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    attn = attngen.compile(spec)
    assert attn.spec.deterministic is True
    assert parsed(attn._text_key).deterministic is True


# ---- what stands behind a mask --------------------------------------------------------------

HIDDEN = {
    # name: (seqlen_q, options, keys that no query sees); the rest lies in the same tile of 64
    "causal-top-left": (10, {"causal": "top_left"}, slice(10, 20)),
    "window-left": (4, {"causal": True, "window": (3, 0)}, slice(0, 13)),
    "window-both": (4, {"window": (2, 0)}, slice(0, 14)),
    "window-dropout": (4, {"window": (2, 0), "dropout_p": 0.3, "dropout_seed": 3}, slice(0, 14)),
    "shard-of-later-keys": (4, {"causal": True, "q_start": 5, "seqlen_q_total": 20}, slice(9, 20)),
}


@pytest.mark.rotating
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize(("seqlen_q", "options", "hidden"), HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("tiles", ["default", "small"])
def test_hidden_keys_never_leak(
    seqlen_q: int, options: dict[str, Any], hidden: slice, poison: float, tiles: str
) -> None:
    q, k, v = make_qkv(seqlen_q=seqlen_q, seqlen_k=20)
    dirty_k, dirty_v = k.detach().clone(), v.detach().clone()
    dirty_k[:, :, hidden] = poison
    dirty_v[:, :, hidden] = poison

    def run(k: Tensor, v: Tensor) -> list[Tensor]:
        leaves = (q, k.detach().requires_grad_(), v.detach().requires_grad_())
        return _run_with_gradients(
            lambda *x: attngen.attention(*x, return_lse=True, **options), *leaves
        )

    want = run(k, v)
    with pinned({"fwd": SMALL_FWD, "bwd": SMALL_BWD} if tiles == "small" else {}):
        got = run(dirty_k, dirty_v)
    assert_close(got, want)
    assert not got[3][:, :, hidden].any() and not got[4][:, :, hidden].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
def test_hidden_keys_do_not_reach_rows_above_the_diagonal(poison: float) -> None:
    """Key 12 is visible to rows 12 .. 19 only: rows 0 .. 11 of the same tile stay right."""
    q, k, v = make_qkv(seqlen_q=20)
    want_out, want_lse = attngen.attention(q, k, v, causal=True, return_lse=True)
    do = torch.randn(q.shape)
    do[:, :, 12:] = 0
    (want_dq,) = torch.autograd.grad(want_out, q, do)
    dirty_k, dirty_v = k.detach().clone(), v.detach().clone()
    dirty_k[:, :, 12] = poison
    dirty_v[:, :, 12] = poison
    out, lse = attngen.attention(q, dirty_k, dirty_v, causal=True, return_lse=True)
    (dq,) = torch.autograd.grad(out, q, do)
    for got, want in ((out, want_out), (lse, want_lse), (dq, want_dq)):
        assert_close([got[:, :, :12]], [want[:, :, :12]])
    assert not torch.isfinite(out[:, :, 12:]).all(2).any()  # and a visible NaN is not hidden


def test_rows_that_see_no_key_have_no_gradient_whatever_comes_in() -> None:
    q, k, v = make_qkv(seqlen_q=12, seqlen_k=5)
    out, lse = attngen.attention(q, k, v, causal=True, return_lse=True)
    assert not out[:, :, :7].any() and torch.isneginf(lse[:, :, :7]).all()
    dlse = torch.randn(lse.shape)
    dlse[:, :, :7] = math.nan
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.randn(out.shape), dlse))
    assert all(torch.isfinite(g).all() for g in grads)
    assert not grads[0][:, :, :7].any()


# ---- every option on every path -------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bottom-right": {"causal": "bottom_right"},
    "top-left": {"causal": "top_left"},
    "window-both": {"window": (4, 2)},
    "window-left": {"window": (4, None)},
    "window-right": {"window": (None, 2)},
    "window-zero": {"window": (0, 0)},
    "causal-window": {"causal": True, "window": (3, 0)},
    "scale": {"softmax_scale": 0.7},
    "scale-zero": {"softmax_scale": 0.0},
    "scale-negative": {"softmax_scale": -0.4},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11},
    "dropout-all": {"dropout_p": 1.0, "dropout_seed": 11},
    "tf32": {"precision": "tf32"},  # the interpreter computes it as ieee
    "deterministic": {"deterministic": True},
    "batch-invariant": {"batch_invariant": True},
}
ALL_TOGETHER = {
    "causal": True,
    "window": (9, 0),
    "softmax_scale": -0.5,
    "softcap": 2.0,
    "dropout_p": 0.3,
    "dropout_seed": 4,
}
PATHS = ("attention", "compile", "bshd", "torch.compile")


def _attend_through(path: str, options: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`attend(q, k, v) -> (out, lse)`, all (batch, heads, seqlen, dim), through a public path."""
    call = {"dropout_seed": options.get("dropout_seed"), "return_lse": True}
    fields = {name: value for name, value in options.items() if name not in call}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if path == "compile":
            spec = attngen.AttentionSpec(
                head_dim=q.shape[3], head_dim_v=v.shape[3], dtype=q.dtype, **fields
            )
            out, lse = attngen.compile(spec)(q, k, v, **call)
        elif path == "bshd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out, lse = attngen.attention(q, k, v, layout="bshd", **fields, **call)
            out = out.transpose(1, 2)
        else:
            out, lse = attngen.attention(q, k, v, **fields, **call)
        return out, lse

    return compiled(attend) if path == "torch.compile" else attend


OTHER_PATHS = [pytest.param(path, marks=pytest.mark.rotating) for path in PATHS[1:]]


@pytest.mark.parametrize("path", [PATHS[0], *OTHER_PATHS])
@pytest.mark.parametrize("options", [*OPTIONS.values(), ALL_TOGETHER], ids=[*OPTIONS, "all"])
def test_option_is_honoured(path: str, options: dict[str, Any]) -> None:
    q, k, v = make_qkv(heads=4, heads_kv=2, seqlen_q=17, seqlen_k=21, dim_v=24)
    assert_exact(_attend_through(path, options), q, k, v, options)


def test_compiled_graph_refuses_with_the_reason() -> None:
    """Dynamo replaces exceptions of the code it traces, so that the graph raises this one."""
    compiled = torch.compile(attngen.attention, fullgraph=True, backend="aot_eager")
    q, k, v = make_qkv(seqlen_q=4)
    with pytest.raises(attngen.UnsupportedSpecError, match="cannot read score_mod") as raised:
        compiled(q, k, v, score_mod=lambda score, b, h, q_idx, k_idx: score + 1)
    assert len(raised.value.reasons) == 1


def test_int_seeds_are_symbolic_under_dynamic_compile() -> None:
    """An int seed may become a SymInt; inductor cannot hold 2**63 in an int64."""

    def seeded(x: Tensor, seed: int) -> Tensor:
        return x + seed_tensor(seed, x.device)

    compiled = torch.compile(seeded, fullgraph=True, dynamic=True)
    x = torch.zeros(1, dtype=torch.int64)
    for seed in (7, 8, 2**62):
        assert compiled(x, seed).item() == seed
    assert seed_tensor(2**64 - 1, x.device).item() == -1


def test_call_layouts_differ_in_all_that_a_launch_depends_on() -> None:
    q, k, v = make_qkv(seqlen_q=6, dim=16)
    inputs: tuple[Tensor | None, ...] = (q, k, v, None)
    base = calls.layout_of("key", inputs, [0.5], [0, 1])
    others = [
        calls.layout_of("other", inputs, [0.5], [0, 1]),
        calls.layout_of("key", inputs, [0.25], [0, 1]),
        calls.layout_of("key", inputs, [0.5], [0, 2]),
        calls.layout_of("key", (q, k, v, v), [0.5], [0, 1]),
        calls.layout_of("key", (q.half(), k, v, None), [0.5], [0, 1]),
        calls.layout_of("key", (q[:, :, :5], k, v, None), [0.5], [0, 1]),
        calls.layout_of("key", (seq_major(q), k, v, None), [0.5], [0, 1]),
        calls.layout_of("key", (q, seq_major(k), v, None), [0.5], [0, 1]),
        calls.layout_of("key", (q, k, v.to("meta"), None), [0.5], [0, 1]),
    ]
    assert len({base, *others}) == 1 + len(others)
    assert base == calls.layout_of("key", (q + 1, k, v, None), [0.5], [0, 1])


def test_remembered_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls._CALLS, "most", 4)
    attngen.reload()
    for rows in range(1, 9):
        attngen.attention(*(x.detach() for x in make_qkv(seqlen_q=rows)))
        assert 0 < len(calls._CALLS) <= 4


def test_reload_during_a_first_call_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was resolved before a reload must not be remembered after it."""
    resolve = settle.resolve

    def slow(*where: Any) -> Any:
        found = resolve(*where)
        attngen.reload()
        return found

    monkeypatch.setattr(settle, "resolve", slow)
    attngen.reload()
    attngen.attention(*(x.detach() for x in make_qkv(seqlen_q=3)))
    assert not calls._CALLS


def test_negative_views_are_seen_as_negative() -> None:
    q, k, v = (x.detach() for x in make_qkv(seqlen_q=5))
    got = attngen.attention(torch._neg_view(q), k, v)
    assert torch.equal(got, attngen.attention(-q, k, v))
    q, k, v = make_qkv(seqlen_q=5)
    out = attngen.attention(q, k, v)
    do = torch.randn_like(out)
    (by_view,) = torch.autograd.grad(out, v, torch._neg_view(do), retain_graph=True)
    (by_value,) = torch.autograd.grad(out, v, -do)
    assert torch.equal(by_view, by_value)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
def test_compiled_autograd_over_an_eager_forward() -> None:
    from torch._dynamo import compiled_autograd

    q, k, v = make_qkv(seqlen_q=5)
    (want,) = torch.autograd.grad(attngen.attention(q, k, v).sum(), q)
    out = attngen.attention(q, k, v).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward()
    torch.testing.assert_close(q.grad, want)


def test_batched_gradients_say_that_there_is_no_rule() -> None:
    q, k, v = make_qkv(seqlen_q=3)
    out = attngen.attention(q, k, v)
    grads = torch.eye(out.numel()).view(-1, *out.shape)
    with pytest.raises(RuntimeError, match="attngen::bwd"):
        torch.autograd.grad(out, q, grads, is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_jit_trace_is_refused() -> None:
    q, k, v = (x.detach() for x in make_qkv(seqlen_q=3))
    with pytest.raises(attngen.SpecError, match=r"torch\.export"):
        torch.jit.trace(lambda *x: attngen.attention(*x), (q, k, v))


def test_autocast_leaves_float64_as_torch_does() -> None:
    q, k, v = (x.detach().double() for x in make_qkv(seqlen_q=3))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(attngen.SpecError, match="float64"):
        attngen.attention(q, k, v)
