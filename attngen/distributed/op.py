"""The ops `attngen::cp_fwd` and `attngen::cp_bwd`: a whole attention over ranks, with its
exchanges, opaque to torch.compile.

Arguments are those of `attngen::fwd`, and a plan: names of groups, method, layout, hop. Shapes are
local ones. What the backward needs beside the inputs follows out and lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attngen.distributed import comm, ring
from attngen.distributed.call import Call
from attngen.distributed.heads import shares
from attngen.distributed.plan import read
from attngen.distributed.work import Keys
from attngen.identity import parsed
from attngen.memory import empty_bshd
from attngen.softmax_reference import seen_lse

_LIBRARY = torch.library.Library("attngen", "FRAGMENT")
_LIBRARY.define(
    "cp_fwd(str plan, str spec, Tensor q, Tensor k, Tensor v, Tensor?[] extra, float[] scalars,"
    " SymInt[] ints, SymInt total_q, SymInt total_k, bool draws, bool wants_lse) -> Tensor[]"
)
_LIBRARY.define(
    "cp_bwd(str plan, str spec, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout,"
    " Tensor? dlse, Tensor?[] extra, float[] scalars, SymInt[] ints, SymInt total_q,"
    " SymInt total_k, int[] heads, bool[] needs) -> Tensor[]"
)


def _guard(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _forward(
    text: str,
    key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
    total_q: int,
    total_k: int,
    draws: bool,
    wants_lse: bool,
) -> list[Tensor]:
    """[out, lse], the dropout seed if there is dropout, and q, k, v, out and lse by heads if they
    were exchanged."""
    with _guard(q):
        heads = (q.shape[1], k.shape[1])
        call = Call(text, key, heads, extra, scalars, ints, (total_q, total_k))
        call.check(q, k, v, draws, wants_lse)
        saved: list[Tensor] = []
        if call.spec.has_dropout:
            seed = call.terms["dropout_seed"].clone()
            if draws:  # rank 0's
                group = call.plan.group
                with comm.explained(call.plan.title, group, "the dropout seed"):
                    dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
            call.terms["dropout_seed"] = seed
            saved.append(seed)
        if call.exchange is not None:
            q, k, v = call.exchange.to_heads((q, "q"), (k, "k"), (v, "k"))
        work = call.work()
        keys = Keys(call.gathered(k, 2), call.gathered(v, 2), call.ids())
        out, lse = ring.forward(work, q, keys, *call.ring)
        if call.spec.sinks:
            sinks = work.terms["sinks"].float()[..., None]
            out = out * torch.sigmoid(seen_lse(lse) - sinks).unsqueeze(-1)
        out = _own(out.to(q.dtype))
        if call.exchange is None:
            return [out, lse.contiguous(), *saved]
        (rows,) = call.exchange.to_rows((out, "q"))
        lses = call.exchange.to_rows((lse, "q")) if wants_lse else [lse.new_empty(0)]
        kept = [q, keys.k, keys.v, out, lse.contiguous()]
        return [_own(rows), *lses, *saved, *kept]


def _own(x: Tensor) -> Tensor:
    """Stored (batch, rows, heads, dim), as results are."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_forward(
    text: str,
    key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
    total_q: int,
    total_k: int,
    draws: bool,
    wants_lse: bool,
) -> list[Tensor]:
    batch, heads, rows, _ = q.shape
    out = empty_bshd(q, batch, heads, rows, v.shape[3], q.dtype)
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    found = [out, lse]
    if parsed(key).has_dropout:
        found.append(q.new_empty(1, dtype=torch.int64))
    plan = read(text)
    if plan.ulysses is None:
        return found
    if not wants_lse:
        found[1] = q.new_empty(0, dtype=torch.float32)
    width, layout = dist.get_world_size(plan.ulysses), plan.layout
    first = plan.rank // width * width
    held = []
    for total in (total_q, total_k):
        each = [_rows_of(layout, r, plan.world, total) for r in range(first, first + width)]
        held.append(sum(each[1:], each[0]))
    heads, heads_kv = int(heads), int(k.shape[1])  # no symbols: each count has shares of its own
    mine = shares(heads, heads_kv, width)[plan.rank - first]
    found += [
        q.new_empty((batch, mine.num_q, held[0], q.shape[3])),
        k.new_empty((batch, mine.num_kv, held[1], k.shape[3])),
        v.new_empty((batch, mine.num_kv, held[1], v.shape[3])),
        empty_bshd(q, batch, mine.num_q, held[0], v.shape[3], q.dtype),
        q.new_empty((batch, mine.num_q, held[0]), dtype=torch.float32),
    ]
    return found


def _rows_of(layout: str, rank: int, world: int, total: Any) -> Any:
    """How many rows a rank holds, of a length that may be symbolic."""
    if layout == "striped":
        return (total - rank + world - 1) // world
    parts = [rank] if layout == "contiguous" else [rank, 2 * world - 1 - rank]
    whole = world if layout == "contiguous" else 2 * world
    return sum((total + whole - 1 - part) // whole for part in parts)


def _backward(
    text: str,
    key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
    total_q: int,
    total_k: int,
    heads: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    """[dq, dk, dv] of this rank's rows, and its share of the gradients of `spec.gradient_args` that
    `needs` asks for. q, k, v, out and lse are by heads if they were exchanged."""
    with _guard(q):
        spec = parsed(key)
        whole = (heads[0], heads[1])
        call = Call(text, key, whole, extra, scalars, ints, (total_q, total_k))
        exchange = call.exchange
        if exchange is not None:
            if dout is not None:
                (dout,) = exchange.to_heads((dout.to(q.dtype), "q"))
            if dlse is not None:
                (dlse,) = exchange.to_heads((dlse, "q"))
        work = call.work()
        wanted = [n for n, need in zip(spec.gradient_args, needs, strict=True) if need]
        work.gradients = {
            name: torch.zeros(work.terms[name].shape, dtype=torch.float32, device=q.device)
            for name in wanted
            if name != "sinks"
        }
        keys = Keys(call.gathered(k, 2), call.gathered(v, 2), call.ids())
        dq, dk, dv = ring.backward(work, q, keys, out, lse, dout, dlse, *call.ring)
        if exchange is None:
            dk, dv = call.scattered(dk, dv)
        elif exchange.is_shared:
            (dq,) = exchange.to_rows((dq.to(q.dtype), "q"))
            dk, dv = exchange.to_rows((dk.float(), "k"), (dv.float(), "k"))
        else:
            given = ((dq.to(q.dtype), "q"), (dk.to(q.dtype), "k"), (dv.to(q.dtype), "k"))
            dq, dk, dv = exchange.to_rows(*given)  # type: ignore[arg-type]  # "q" is a Side
        found = [_own(x.to(q.dtype)) for x in (dq, dk, dv)]
        for name in wanted:
            x = call.terms[name]
            grad = work.gradients.get(name)
            if name == "sinks":
                grad = sinks_gradient(work.terms[name], out, lse, dout)
            assert grad is not None
            if exchange is not None and name in ("sinks", "alibi_slopes"):
                full = grad.new_zeros((grad.shape[0], x.shape[1]))
                full[:, slice(*call.heads.q)] = grad
                grad = full
            found.append(grad.to(x.dtype))
        return found


def _fake_backward(
    text: str,
    key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
    total_q: int,
    total_k: int,
    heads: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    spec, plan = parsed(key), read(text)
    each = zip((q, k, v), (heads[0], heads[1], heads[1]), (total_q, total_k, total_k), strict=True)
    found = []
    for x, n, total in each:
        rows = x.shape[2]
        if plan.ulysses is not None:
            rows = _rows_of(plan.layout, plan.rank, plan.world, total)
        found.append(empty_bshd(x, x.shape[0], n, rows, x.shape[3], q.dtype))
    given = dict(zip(spec.tensor_args, extra, strict=True))
    for name, need in zip(spec.gradient_args, needs, strict=True):
        term = given[name]
        if need and term is not None:
            found.append(term.new_empty(term.shape))
    return found


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    text, key, q, k, v, extra, scalars, ints, total_q, total_k, _, ctx.wants_lse = inputs
    spec = parsed(key)
    ctx.numbers = text, key, scalars, ints, total_q, total_k, (int(q.shape[1]), int(k.shape[1]))
    out, lse, *saved = output
    extra = list(extra)
    if spec.has_dropout:
        extra[spec.tensor_args.index("dropout_seed")] = saved.pop(0)
    ctx.save_for_backward(*(saved or (q, k, v, out, lse)), *extra)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: Any) -> tuple[Any, ...]:
    text, key, scalars, ints, total_q, total_k, heads = ctx.numbers
    spec = parsed(key)
    q, k, v, out, lse, *extra = ctx.saved_tensors
    dout, dlse, *_ = grads
    nothing = [None] * len(extra)
    if dout is None and dlse is None:
        return (None, None, None, None, None, nothing, *(None,) * 6)
    if not ctx.wants_lse:
        dlse = None
    needed = dict(zip(spec.tensor_args, ctx.needs_input_grad[5], strict=True))
    needs = [needed[name] for name in spec.gradient_args]
    dq, dk, dv, *more = torch.ops.attngen.cp_bwd(
        text, key, q, k, v, out, lse, dout, dlse, extra, scalars, ints, total_q, total_k, heads,
        needs,
    )  # fmt: skip
    wanted = [name for name, need in zip(spec.gradient_args, needs, strict=True) if need]
    named = dict(zip(wanted, more, strict=True))
    others = [named.get(name) for name in spec.tensor_args]
    return (None, None, dq, dk, dv, others, *(None,) * 6)


def sinks_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None) -> Tensor:
    """The gradient of sinks, of this rank's rows: it counts once, whatever hops there were."""
    if dout is None:
        return torch.zeros_like(sinks, dtype=torch.float32)
    delta = (out.float() * dout.float()).sum(-1)
    weight = torch.sigmoid(sinks.float()[..., None] - seen_lse(lse))
    return -(weight * delta).sum(2).sum_to_size(sinks.shape)


def _register() -> None:
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl("cp_fwd", _forward, key)
        _LIBRARY.impl("cp_bwd", _backward, key)
    torch.library.register_fake("attngen::cp_fwd", _fake_forward, lib=_LIBRARY)
    torch.library.register_fake("attngen::cp_bwd", _fake_backward, lib=_LIBRARY)
    torch.library.register_autograd(
        "attngen::cp_fwd", _gradients, setup_context=_setup_context, lib=_LIBRARY
    )


_register()
