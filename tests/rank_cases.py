"""What rank processes run: an attention over shards against one over the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attngen
from attngen import distributed, reference
from attngen.api import _text_key  # noqa: F401  (registers the ops)
from attngen.reference import judge

LOCAL_ROWS = ("doc_ids_q", "doc_ids_k")
LEARNT = ("bias", "alibi_slopes", "sinks")


def made(case: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """q, k, v, do, dlse of a case, and its further tensors, whole."""
    heads, heads_kv = case.get("heads", (4, 2))
    batch, seqlen = case.get("batch", 2), case["seqlen"]
    keys = case.get("seqlen_k", seqlen)
    dim = case.get("dim", 16)
    dim_v = case.get("dim_v", dim)
    dtype = getattr(torch, case.get("dtype", "float32"))
    generator = torch.Generator().manual_seed(case.get("seed", 0))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "q": draw(batch, heads, seqlen, dim).to(dtype) * case.get("spread", 1),
        "k": draw(batch, heads_kv, keys, dim).to(dtype),
        "v": draw(batch, heads_kv, keys, dim_v).to(dtype),
        "do": draw(batch, heads, seqlen, dim_v).to(dtype),
        "dlse": draw(batch, heads, seqlen),
    }
    terms = {}
    for name in case.get("terms", ()):
        if name == "sinks":
            terms[name] = draw(heads)
        elif name == "alibi_slopes":
            terms[name] = draw(heads).abs() / 4
        elif name == "bias":
            terms[name] = draw(1, heads, seqlen, keys)
        elif name == "attn_mask":
            terms[name] = draw(batch, 1, seqlen, keys) > -0.5
        elif name == "prefix_lens":
            terms[name] = torch.tensor([seqlen // 2 + n for n in range(batch)], dtype=torch.int32)
        elif name == "documents":
            ends = torch.tensor([seqlen // 5, seqlen // 2 + 1, seqlen - 2])
            ids = torch.bucketize(torch.arange(seqlen), ends, right=True).int()
            terms |= {"doc_ids_q": ids[None], "doc_ids_k": ids[None]}
    return tensors, terms


def spec_of(case: dict[str, Any]) -> attngen.AttentionSpec:
    """The spec of the whole."""
    options = {x: y for x, y in case.get("options", {}).items() if x != "dropout_seed"}
    fields = {"sinks": "sinks", "alibi_slopes": "alibi", "bias": "bias", "attn_mask": "attn_mask"}
    fields |= {"prefix_lens": "prefix_lm", "documents": "documents"}
    options |= {fields[name]: True for name in case.get("terms", ())}
    dim = case.get("dim", 16)
    return attngen.AttentionSpec(
        head_dim=dim,
        head_dim_v=case.get("dim_v", dim),
        dtype=case.get("dtype", "float32"),
        deterministic=case.get("deterministic", False),
        **options,
    )


def expected(case: dict[str, Any], yard: bool) -> list[Tensor]:
    """out, lse and all gradients of the whole, in float64, or the yardstick's."""
    tensors, terms = made(case)
    spec = spec_of(case)
    leaves = {x: tensors[x].detach().clone() for x in "qkv"}
    leaves |= {x: terms[x].clone() for x in LEARNT if x in terms}
    if not yard:
        leaves = {n: x.double() for n, x in leaves.items()}
    for x in leaves.values():
        x.requires_grad_()
    named = {**terms, **{n: leaves[n] for n in LEARNT if n in terms}}
    if case.get("options", {}).get("dropout_p"):
        named["seed"] = case["options"]["dropout_seed"]
    qkv = [leaves[n] for n in "qkv"]
    if yard:
        narrow = None if tensors["q"].dtype == torch.float32 else tensors["q"].dtype
        out, lse = reference.yardstick(spec, *qkv, narrow, **named)
    else:
        out, lse = reference.attention(spec, *qkv, **named)
    losses = [out, lse] if case.get("lse", True) else [out]
    dlse = tensors["dlse"].masked_fill(torch.isinf(lse.detach()), 0.0)
    given = [tensors["do"].to(out.dtype), dlse.to(lse.dtype)][: len(losses)]
    grads = torch.autograd.grad(losses, list(leaves.values()), given)
    return [out.detach(), lse.detach(), *(x.detach() for x in grads)]


def mesh_of(group: Any, shape: tuple[int, int] | None) -> Any:
    """A mesh of two dims over a group of all ranks."""
    if shape is None:
        return group
    from torch.distributed.device_mesh import DeviceMesh

    key = tuple(shape)
    if key not in _MESHES:
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(shape)
        _MESHES[key] = DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "ulysses"))
    return _MESHES[key]


_MESHES: dict[Any, Any] = {}


def call(group: Any, case: dict[str, Any], *, compiled: bool = False) -> list[Tensor]:
    """out, lse and gradients of this rank, the latter for rows of shards."""
    tensors, terms = made(case)
    group = mesh_of(group, case.get("mesh"))
    layout = case["layout"]
    cut = {
        n: distributed.shard(x, layout, dim=2, group=group).clone() for n, x in tensors.items()
    }
    near = {}
    for name, x in terms.items():
        if name in LOCAL_ROWS:
            x = distributed.shard(x, layout, dim=1, group=group)
        elif name in ("bias", "attn_mask"):
            x = distributed.shard(x, layout, dim=2, group=group)
        near[name] = x.clone()
    leaves = {n: cut[n].requires_grad_() for n in "qkv"}
    leaves |= {n: near[n].requires_grad_() for n in LEARNT if n in near}
    options = dict(case.get("options", {}))
    totals = {"seqlen_q_total": case["seqlen"]}
    totals["seqlen_k_total"] = case.get("seqlen_k", case["seqlen"])
    how = {"method": case["method"], "layout": layout, "hop": case.get("hop", "torch")}
    wants = case.get("lse", True)
    qkv = [cut[n] for n in "qkv"]
    if compiled:
        cp = distributed.ContextParallel(group, **how)
        attn = attngen.compile(spec_of(case), context_parallel=cp)
        seed = {n: options[n] for n in ("dropout_seed",) if n in options}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
            found = attn(q, k, v, return_lse=wants, **near, **totals, **seed)
            return found if wants else (found, None)

        run = torch.compile(attend, fullgraph=True, backend="aot_eager")
        out, lse = run(*qkv)
    else:
        found = distributed.attention(
            *qkv,
            group=group,
            **how,
            **options,
            **near,
            **totals,
            return_lse=wants,
            deterministic=case.get("deterministic", False),
        )
        out, lse = found if wants else (found, None)
    losses, given = [out], [cut["do"]]
    if lse is not None:
        losses.append(lse)
        given.append(cut["dlse"].masked_fill(torch.isinf(lse.detach()), 0.0))
    grads = dict(
        zip(leaves, torch.autograd.grad(losses, list(leaves.values()), given), strict=True)
    )
    flat = distributed.comm.group_of(group)
    for name in grads:
        if name not in "qkv" and name != "bias":
            dist.all_reduce(grads[name], group=flat)
    lse = lse.detach() if lse is not None else torch.zeros(0)
    return [out.detach(), lse, *grads.values()]


def compare(group: Any, case: dict[str, Any], compiled: bool = False) -> None:
    """Every result of this rank is as good as plain PyTorch's of the whole."""
    got = call(group, case, compiled=compiled)
    want, yard = expected(case, False), expected(case, True)
    mesh, layout = mesh_of(group, case.get("mesh")), case["layout"]
    dtype = getattr(torch, case.get("dtype", "float32"))
    _, terms = made(case)
    names = ["out", "lse", "q", "k", "v", *(n for n in LEARNT if n in terms)]
    bad = []
    for name, a, w, y in zip(names, got, want, yard, strict=True):
        if name == "lse" and not case.get("lse", True):
            continue
        if name in ("out", "lse", "q", "k", "v", "bias"):
            w, y = (distributed.shard(x, layout, dim=2, group=mesh) for x in (w, y))
        is_wide = name in ("lse", *LEARNT)
        epsilon = torch.finfo(torch.float32 if is_wide else dtype).eps
        if is_wide and dtype != torch.float32:
            epsilon = torch.finfo(dtype).eps / 4
        slack = 0.0
        if name == "alibi_slopes":
            slack = reference.slopes_slack(case["seqlen"], case["seqlen"])
            slack *= w.abs().max().item() + 1
        verdict = judge(a, w, y, epsilon, slack)
        if a.shape != w.shape or not verdict.ok:
            bad.append(f"{name} {tuple(a.shape)} {tuple(w.shape)}: {verdict.detail}")
    assert not bad, f"{case}: " + "; ".join(bad)


_ = replace
