"""The correctness gate: no config is timed before it computes the right thing.

Every config is compared with `attngen.reference` on small shapes, one of which no tile divides;
finalists also on sampled rows and keys of the tuned shape. The criterion is `verdict.judge`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen import packed_reference, reference, sampled_reference
from attngen.config import KernelConfig
from attngen.decode import MAX_ROWS
from attngen.kernel import kernel
from attngen.spec import AttentionSpec
from attngen.tuner import case
from attngen.tuner.case import Case
from attngen.verdict import FP8_LSE_EPSILON, Verdict, judge, slopes_slack
from attngen.workload import Direction, Workload

SAMPLES = 64
LSE_EPSILON = 1e-5  # lse is float32, but sums exponentials from the approximate unit
_MAX_WINDOW = 50  # on small shapes, so that a window hides something there too
_INTERPRETED_GROUP = 2


class Expected(NamedTuple):
    """What a case must give, and what plain PyTorch gives in the same dtype."""

    wanted: dict[str, Tensor]
    yard: dict[str, Tensor]


def epsilon(spec: AttentionSpec, name: str) -> float:
    """The rounding unit of a result, or of what it is made of."""
    narrow = torch.float16 if spec.precision == "tf32" else getattr(torch, spec.out_dtype)
    unit = float(torch.finfo(narrow).eps)
    if name == "lse" or name in spec.aux:
        if spec.is_fp8:
            return FP8_LSE_EPSILON
        return max(LSE_EPSILON, unit if spec.precision == "tf32" else 0.0)
    return unit


def small_workloads(group_size: int, interpret: bool, is_packed: bool = False) -> list[Workload]:
    """Shapes for every config: one that no tile divides, and one with more rows than keys.

    Where there is more than one batch row, they share a mask and a bias.
    """
    if interpret:
        group = min(group_size, _INTERPRETED_GROUP)
        if is_packed:
            return [Workload(3, group, 1, 25, 41)]
        return [Workload(1, group, 1, 75, 139)]
    group = group_size
    return [Workload(2, 2 * group, 2, 193, 259), Workload(1, group, 1, 256, 128)]


def small_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec with windows that small shapes can see."""
    if spec.window is None:
        return spec
    left, right = (side if side is None else min(side, _MAX_WINDOW) for side in spec.window)
    return replace(spec, window=(left, right))


class SmallGate:
    """Small cases of one spec and direction, with their expected results computed once."""

    def __init__(
        self, spec: AttentionSpec, direction: Direction, group_size: int, device: str
    ) -> None:
        self._interpret = device == "cpu"
        self._backward = direction == "bwd"
        spec = small_spec(spec)
        workloads = small_workloads(group_size, self._interpret, spec.is_packed)
        if direction == "decode":
            rows = (3, MAX_ROWS)
            workloads = [replace(x, seqlen_q=n) for x, n in zip(workloads, rows, strict=False)]
        if self._interpret and self._backward and spec.bias:  # a gradient that is added to
            workloads.append(replace(workloads[0], batch=2, seqlen_q=33, seqlen_k=40))
        self.cases = [
            case.make(
                spec,
                sizes,
                device,
                backward=self._backward,
                learns_scores=True,
                shares_scores=sizes.batch > 1,
            )
            for sizes in workloads
        ]
        self._expected = [whole(each) for each in self.cases]

    def check(self, config: KernelConfig) -> Verdict:
        """Run a config on every small case; the first failure, else the largest error."""
        worst = Verdict(True, 0.0, "")
        for each, expected in zip(self.cases, self._expected, strict=True):
            verdict = self._check(each, expected, config)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict, key=lambda v: v.error)
        return worst

    def _check(self, each: Case, expected: Expected, config: KernelConfig) -> Verdict:
        if self._backward:
            each.out.copy_(expected.wanted["out"])
            each.lse.copy_(expected.wanted["lse"])
        run(each, config, interpret=self._interpret)
        slack = slopes_slack(each.workload.seqlen_q, each.workload.seqlen_k)
        verdicts = _verdicts(each.spec, each.results(config), expected, slack)
        return _joined(verdicts, f"at {each.workload}")


def run(each: Case, config: KernelConfig, *, interpret: bool) -> None:
    """Run a config once, over results that were NaN before."""
    each.spoil(config)
    launch = kernel(each.spec.text, config, interpret)
    launch(*each.tensors(config), **each.numbers)
    if not interpret:
        torch.cuda.synchronize()


def whole(each: Case) -> Expected:
    """Everything a small case must give, forward and gradients."""
    return Expected(_whole(each, torch.float64), _whole(each, torch.float32))


def _whole(each: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The oracle's results in float64, the yardstick's in float32."""
    backward = each.do is not None

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype, copy=True).requires_grad_(backward)

    q, k, v = (leaf(x) for x in each.operands)
    leaves = {"dq": q, "dk": k, "dv": v}
    beside: dict[str, Any] = dict(each.beside)
    if each.dbias is not None:
        leaves["dbias"] = beside["bias"] = leaf(each.beside["bias"])
    if each.slope_sums is not None:
        leaves["dslopes"] = beside["alibi_slopes"] = leaf(each.beside["alibi_slopes"])
    for name in each.daux:
        leaves[f"d{name}"] = beside[name] = leaf(each.beside[name])
    if each.offsets is not None:
        how = {**beside, "seed": each.seed}
        inputs = (each.spec, q, k, v)
        if dtype == torch.float64:
            out, lse = packed_reference.attention(*inputs, each.sequences, **how)
        else:
            narrow = _narrow(each)
            out, lse = packed_reference.yardstick(*inputs, narrow, each.sequences, **how)
    elif dtype == torch.float64:
        out, lse = reference.attention(each.spec, q, k, v, **beside, seed=each.seed)
    else:
        narrow = _narrow(each)
        out, lse = reference.yardstick(each.spec, q, k, v, narrow, **beside, seed=each.seed)
    named = {"out": out.detach(), "lse": lse.detach()}
    how = {**each.beside, "math_dtype": dtype}
    if each.offsets is not None:
        named |= packed_reference.side_outputs(each.spec, q, k, each.sequences, **how)
    else:
        named |= reference.side_outputs(each.spec, q, k, **how)
    if each.do is not None:
        grads = reference.gradients(out, lse, tuple(leaves.values()), each.do)
        named |= zip(leaves, grads, strict=True)
    return named


def _narrow(each: Case) -> torch.dtype | None:
    return None if each.q.dtype == torch.float32 else getattr(torch, each.spec.out_dtype)


def sampled(each: Case, config: KernelConfig) -> Verdict:
    """Run a config on the tuned shape and compare sampled rows (and keys, of a backward)."""
    run(each, config, interpret=each.q.device.type == "cpu")
    if each.offsets is not None:
        return _sampled_of_packed(each, config)
    sizes = each.workload
    rows = _sample(each, sizes.num_heads_q, sizes.seqlen_q)
    keys = _sample(each, sizes.num_heads_kv, sizes.seqlen_k)
    wanted, yard = (_sampled(each, rows, keys, **how) for how in _exact_and_narrow(each))
    found = each.results(config)
    at = {name: keys if name in ("dk", "dv") else rows for name in found if name in wanted}
    actual = {name: found[name][tuple(at[name].T)] for name in at}
    verdicts = _verdicts(each.spec, actual, Expected(wanted, yard))
    return _joined(verdicts, f"in sampled rows of {sizes}")


def _sampled_of_packed(each: Case, config: KernelConfig) -> Verdict:
    """The same of packed sequences: rows of sampled sequences."""
    sizes, sequences = each.workload, each.sequences
    at_rows, at_keys = (
        _sample_of_packed(each, heads, begins)
        for heads, begins in (
            (sizes.num_heads_q, sequences.rows),
            (sizes.num_heads_kv, sequences.keys),
        )
    )
    wanted, yard = (
        _sampled_sequences(each, at_rows, at_keys, **how) for how in _exact_and_narrow(each)
    )
    found = each.results(config)
    rows = packed_reference.rows_at(sequences.rows, at_rows)
    keys = packed_reference.rows_at(sequences.keys, at_keys)
    actual = {
        name: found[name][tuple((keys if name in ("dk", "dv") else rows).T)]
        for name in found
        if name in wanted
    }
    verdicts = _verdicts(each.spec, actual, Expected(wanted, yard))
    return _joined(verdicts, f"in sampled rows of {sizes}")


def _sample_of_packed(each: Case, heads: int, begins: list[slice]) -> Tensor:
    """(SAMPLES, 3) random (sequence, head, row) of sequences that have rows, in their order."""
    generator = torch.Generator().manual_seed(case.SEED)
    lengths = torch.tensor([at.stop - at.start for at in begins])
    full = lengths.nonzero().flatten()
    at = full[torch.randint(len(full), (SAMPLES,), generator=generator)]
    at[0], at[1] = full[0], full[-1]
    row = (torch.rand(SAMPLES, generator=generator) * lengths[at]).long()
    row[0], row[1] = 0, lengths[at[1]] - 1
    head = torch.randint(heads, (SAMPLES,), generator=generator)
    found = torch.stack([at, head, row], 1)
    return found[at.argsort(stable=True)].to(each.q.device)


def _sampled_sequences(
    each: Case, at_rows: Tensor, at_keys: Tensor, **how: Any
) -> dict[str, Tensor]:
    how |= {"seed": each.seed, **each.beside}
    count, sequences, spec = each.workload.batch, each.sequences, each.spec.of_sequence
    found: dict[str, list[Tensor]] = {}

    def put(**results: Tensor | None) -> None:
        for name, x in results.items():
            if x is not None:
                found.setdefault(name, []).append(x)

    def inputs_of(n: int) -> list[Tensor]:
        places = (sequences.rows[n], sequences.keys[n], sequences.keys[n])
        pairs = zip(each.operands, places, strict=True)
        return [packed_reference.of_sequence(x, at, count) for x, at in pairs]

    def rows_of(n: int, x: Tensor | None) -> Any:
        return None if x is None else packed_reference.of_sequence(x, sequences.rows[n], count)

    for n, at in packed_reference.samples(at_rows):
        q, k, v = inputs_of(n)
        here = sampled_reference.sampled_rows(spec, q, k, v, at, do=rows_of(n, each.do), **how)
        if each.do is None:
            put(out=here.out, lse=here.lse)
        else:
            put(dq=here.dq)
    for n, at in packed_reference.samples(at_keys) if each.do is not None else ():
        q, k, v = inputs_of(n)
        out, lse, do = (rows_of(n, x) for x in (each.out, each.lse, each.do))
        there = sampled_reference.sampled_keys(spec, q, k, v, out, lse, do, at, **how)
        put(dk=there.dk, dv=there.dv)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _exact_and_narrow(each: Case) -> list[dict[str, Any]]:
    return [
        {"math_dtype": torch.float64},
        {"math_dtype": torch.float32, "round_to": _narrow(each)},
    ]


def _sampled(each: Case, rows: Tensor, keys: Tensor, **how: Any) -> dict[str, Tensor]:
    how |= {"seed": each.seed, **each.beside}
    inputs = (each.spec, *each.operands)
    here = sampled_reference.sampled_rows(*inputs, rows, do=each.do, **how)
    if each.do is None:
        return {"out": here.out, "lse": here.lse}
    there = sampled_reference.sampled_keys(*inputs, each.out, each.lse, each.do, keys, **how)
    assert here.dq is not None
    return {"dq": here.dq, "dk": there.dk, "dv": there.dv}


def _sample(each: Case, heads: int, rows: int) -> Tensor:
    """(SAMPLES, 3) random (batch, head, row), the first and last row among them."""
    generator = torch.Generator().manual_seed(case.SEED)
    sizes = (each.workload.batch, heads, rows)
    at = torch.stack([torch.randint(n, (SAMPLES,), generator=generator) for n in sizes], 1)
    at[0] = 0
    at[1] = torch.tensor(sizes) - 1
    return at.to(each.q.device)


def _verdicts(
    spec: AttentionSpec, actual: dict[str, Tensor], expected: Expected, slopes_slack: float = 0.0
) -> Iterator[tuple[str, Verdict]]:
    for name, tensor in actual.items():
        wanted, yard = expected.wanted[name], expected.yard[name]
        slack = slopes_slack if name == "dslopes" else 0.0
        yield name, judge(tensor, wanted, yard, epsilon(spec, name), slack)


def _joined(verdicts: Iterator[tuple[str, Verdict]], where: str) -> Verdict:
    """The first failure, named, else the largest error."""
    worst = Verdict(True, 0.0, "")
    for name, verdict in verdicts:
        if not verdict.ok:
            return verdict._replace(detail=f"{name} is wrong {where}: {verdict.detail}")
        worst = max(worst, verdict, key=lambda v: v.error)
    return worst
