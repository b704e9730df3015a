"""What rank processes run: an attention over shards against one over the whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

import attngen
import attngen.ops
from attngen import distributed, reference
from attngen.verdict import judge

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
    cut = {n: distributed.shard(x, layout, dim=2, group=group).clone() for n, x in tensors.items()}
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

        dynamic = case.get("dynamic")
        run = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
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
        if "spread" in case and name in "qkv":  # an lse of hundreds has few digits for P
            slack = 1e-3 * w.abs().max().item()
        if name == "alibi_slopes":
            slack = reference.slopes_slack(case["seqlen"], case["seqlen"])
            slack *= w.abs().max().item() + 1
        verdict = judge(a, w, y, epsilon, slack)
        if a.shape != w.shape or not verdict.ok:
            bad.append(f"{name} {tuple(a.shape)} {tuple(w.shape)}: {verdict.detail}")
    assert not bad, f"{case}: " + "; ".join(bad)


def refused(group: Any, case: dict[str, Any]) -> tuple[str, str]:
    """The name and the words of the error that a call raises."""
    try:
        call(group, case)
    except attngen.AttngenError as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"{case} was not refused")


def dropout_bits(group: Any, method: str, layout: str, hop: str) -> None:
    """With v = identity, zeros of out are what dropout removed: the bits of one device."""
    seqlen, p, seed = 19, 0.4, 11
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 4, seqlen, 16, generator=generator) for _ in "qk")
    v = torch.eye(seqlen).expand(2, 4, seqlen, seqlen)
    whole = attngen.attention(q, k, v, dropout_p=p, dropout_seed=seed)
    assert torch.equal(whole != 0, attngen.dropout_keep(seed, 2, 4, seqlen, seqlen, p))
    q, k, v, want = (distributed.shard(x, layout, dim=2, group=group) for x in (q, k, v, whole))
    out = distributed.attention(
        q, k, v, group=group, method=method, layout=layout, hop=hop, dropout_p=p,
        dropout_seed=seed, seqlen_q_total=seqlen, seqlen_k_total=seqlen,
    )  # fmt: skip
    assert torch.equal(out != 0, want != 0)


def drawn_seed(group: Any) -> Any:
    """A seed that is not given is the first rank's: bits are those of one mask."""
    seqlen = 16
    torch.manual_seed(100 + dist.get_rank(group))
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    q, k = torch.ones(1, 2, seqlen // world, 16), torch.ones(1, 2, seqlen // world, 16)
    v = distributed.shard(torch.eye(seqlen).expand(1, 2, seqlen, seqlen), "contiguous", dim=2,
                          group=group)  # fmt: skip
    out = distributed.attention(q, k, v, group=group, hop="torch", dropout_p=0.5)
    whole = distributed.unshard(out, "contiguous", dim=2, group=group)
    torch.manual_seed(100)
    seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
    assert torch.equal(whole != 0, attngen.dropout_keep(seed, 1, 2, seqlen, seqlen, 0.5)), rank


def checkpointed(group: Any, case: dict[str, Any]) -> None:
    """Recomputation gives the gradients of the first run, dropout included."""
    tensors, _ = made(case)
    layout = case["layout"]
    cut = {n: distributed.shard(x, layout, dim=2, group=group) for n, x in tensors.items()}
    qkv = [cut[n].requires_grad_() for n in "qkv"]

    def attend(*x: Tensor) -> Tensor:
        return distributed.attention(
            *x, group=group, method=case["method"], layout=layout, hop="torch", causal=True,
            dropout_p=0.3, seqlen_q_total=case["seqlen"], seqlen_k_total=case["seqlen"],
        )  # fmt: skip

    torch.manual_seed(3)
    want = torch.autograd.grad(attend(*qkv), qkv, cut["do"])
    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(attend, *qkv, use_reentrant=False)
    got = torch.autograd.grad(out, qkv, cut["do"])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def helpers(group: Any, layout: str, seqlen: int) -> None:
    """shard, unshard, positions and shift_labels agree with what is done to the whole."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    x = torch.randn(2, seqlen, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows = distributed.positions(layout, rank, world, seqlen)
    mine = distributed.shard(x, layout, dim=1, group=group)
    assert torch.equal(mine, x[:, rows])
    assert torch.equal(distributed.shard(x, layout, dim=1, rank=rank, world=world), mine)
    back = distributed.unshard(mine, layout, dim=1, seqlen=seqlen, group=group)
    assert torch.equal(back, x)
    (grad,) = torch.autograd.grad((back * (rank + 1)).sum(), x)
    total = torch.zeros_like(x)
    total[:, rows] = world * (world + 1) / 2
    assert torch.equal(grad, total)
    labels, ids = torch.arange(seqlen) + 7, torch.arange(seqlen) // 5
    cut = [distributed.shard(y, layout, dim=0, group=group) for y in (labels, ids)]
    shifted = distributed.shift_labels(cut[0], layout, seqlen=seqlen, group=group)
    want = torch.cat([labels[1:], torch.tensor([-100])])
    assert torch.equal(shifted, want[rows])
    shifted = distributed.shift_labels(cut[0], layout, seqlen=seqlen, group=group, doc_ids=cut[1])
    want = torch.where((ids == ids.roll(-1)) & (want != -100), want, -100)
    assert torch.equal(shifted, want[rows])


def packed(group: Any, method: str, layout: str) -> None:
    """Packed sequences over ranks, against each sequence by itself; rows of none see nothing."""
    cu = torch.tensor([2, 7, 7, 24, 34], dtype=torch.int32)
    total = 37
    generator = torch.Generator().manual_seed(2)
    q, k, v, do = (torch.randn(total, n, 16, generator=generator) for n in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    outs = [torch.zeros(2, 4, 16)]
    for a, b in ((2, 7), (7, 24), (24, 34)):
        each = [x[a:b].transpose(0, 1)[None] for x in leaves]
        spec = attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True, window=(5, 0))
        outs.append(reference.attention(spec, *each)[0][0].transpose(0, 1))
    out = torch.cat([*outs, torch.zeros(3, 4, 16)])
    want = [out, *torch.autograd.grad(out, leaves, do.double())]
    near = [distributed.shard(x, layout, dim=0, group=group) for x in (q, k, v, do)]
    mine = [x.requires_grad_() for x in near[:3]]
    totals = {"seqlen_q_total": total, "seqlen_k_total": total}
    got, lse = distributed.attention(
        *mine, group=group, method=method, layout=layout, hop="torch", causal=True,
        window=(5, 0), cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True, **totals,
    )  # fmt: skip
    assert lse.shape == got.shape[:2]
    rows = distributed.positions(layout, dist.get_rank(group), dist.get_world_size(group), total)
    outside = (rows < 2) | (rows >= 34)
    assert torch.equal(lse == float("-inf"), outside[:, None].expand_as(lse))
    spec = attngen.AttentionSpec(
        head_dim=16, dtype="float32", causal=True, window=(5, 0), layout="thd"
    )
    cp = distributed.ContextParallel(group, method=method, layout=layout, hop="torch")
    attn = attngen.compile(spec, context_parallel=cp)
    assert torch.equal(attn(*mine, cu_seqlens_q=cu, **totals), got)
    results = [got, *torch.autograd.grad(got, mine, near[3])]
    for a, w in zip(results, want, strict=True):
        w = distributed.shard(w, layout, dim=0, group=group)
        torch.testing.assert_close(a, w.float(), rtol=1e-4, atol=1e-5)


def fails_on_rank(group: Any, bad: int, seconds: float, method: str) -> str:
    """One rank raises before its call; the words of the error of the others."""
    import time
    from datetime import timedelta

    import ranks

    short = ranks.spare.pop()
    x = torch.randn(1, 4, 8, 16)
    distributed.attention(x, x, x, group=short, method=method, hop="torch")
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), short)
    dist.barrier(group)
    if dist.get_rank(group) == bad:
        time.sleep(2 * seconds)  # as one that hangs, or has ended by an error of its own
        return "failed"
    began = time.monotonic()
    try:
        distributed.attention(x, x, x, group=short, method=method, hop="torch")
    except attngen.errors.RankError as error:
        assert time.monotonic() - began < 4 * seconds + 5
        return str(error)
    raise AssertionError("no rank noticed")


def differ(group: Any, rank_0: dict[str, Any], others: dict[str, Any]) -> str:
    """Ranks ask for different attentions, neither of which was asked for before."""
    x = torch.randn(1, 2, 9, 24)
    named = rank_0 if dist.get_rank(group) == 0 else others
    try:
        distributed.attention(x, x, x, group=group, hop="torch", **named)
    except attngen.SpecError as error:
        return str(error)
    raise AssertionError("not refused")


def without_backend(group: Any) -> list[str]:
    """A group that has no backend for the tensors: the words of the errors."""
    other = dist.new_group(backend="cuda:gloo")
    x, said = torch.randn(1, 2, 8, 16), []
    for call in (
        lambda: distributed.attention(x, x, x, group=other, hop="torch"),
        lambda: distributed.unshard(x, "zigzag", dim=2, group=other),
    ):
        try:
            call()
        except attngen.SpecError as error:
            said.append(str(error))
    return said


def defaults(group: Any) -> None:
    """What says nothing in attngen.attention says nothing here."""
    x = torch.randn(1, 2, 8, 16)
    named = {"block_table": None, "seqused_k": None, "q_start": 0, "partial": False}
    want = distributed.attention(x, x, x, group=group, hop="torch")
    got = distributed.attention(x, x, x, group=group, hop="torch", **named)
    assert torch.equal(got, want)


def functions(group: Any) -> None:
    """score_mod and mask_mod see rows of the whole."""
    table = torch.randn(4, generator=torch.Generator().manual_seed(4))

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * 0.5 + table[h] * (i - j)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & ((i - j) % 7 != 3)

    tensors, _ = made({"seqlen": 21})
    named = {"score_mod": score_mod, "mask_mod": mask_mod}
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", deterministic=False, **named)
    leaves = [tensors[n].clone().requires_grad_() for n in "qkv"]
    aux = dict(zip(spec.aux_args, spec.captured or (), strict=True))
    out, _ = reference.attention(spec, *leaves, **aux)
    want = [out, *torch.autograd.grad(out, leaves, tensors["do"].double())]
    for method, layout, hop in (
        ("ring", "striped", "torch"),
        ("ulysses", "zigzag", "torch"),
        ("allgather", "zigzag", "torch"),
        ("ring", "zigzag", "kernel"),
    ):
        qkv = [
            distributed.shard(tensors[n], layout, dim=2, group=group).requires_grad_()
            for n in "qkv"
        ]
        got = distributed.attention(
            *qkv, group=group, method=method, layout=layout, hop=hop, **named,
            seqlen_q_total=21, seqlen_k_total=21,
        )  # fmt: skip
        do = distributed.shard(tensors["do"], layout, dim=2, group=group)
        results = [got, *torch.autograd.grad(got, qkv, do)]
        for a, w in zip(results, want, strict=True):
            w = distributed.shard(w, layout, dim=2, group=group)
            torch.testing.assert_close(a, w.float(), rtol=1e-4, atol=1e-5)
