"""Timing our kernels beside their peers, in one run.

All contestants take turns, several rounds of `triton.testing.do_bench` medians, so that drift of
clocks and temperature meets all alike. A backward is timed through `torch.autograd.grad` with
`retain_graph=True`, for peers and for ours. TFLOP/s count 4*B*Hq*Sq*Sk*D for a forward (two
products; (D + Dv) / 2 where they differ), half of it if causal, and 2.5 times that for a backward;
a window is not subtracted.

`by_graph` replays forwards from a CUDA graph instead, which leaves the host's time out: that of a
decode takes longer than its kernels. Calls in the graph take turns over tensors that together are
larger than any L2 cache.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attngen import lowering
from attngen.api import compile
from attngen.block_map import BlockMap, map_of
from attngen.config import KernelConfig
from attngen.errors import UnsupportedSpecError
from attngen.explain import explain_workload
from attngen.fp8 import quantize
from attngen.gpu import current
from attngen.peers import Attend, CannotServe, Peer
from attngen.pinned import pinned
from attngen.spec import DESCALES, AttentionSpec
from attngen.tuner.case import beside_of
from attngen.workload import DIRECTIONS, Direction, Workload
from attngen.workload import flops as flops

OURS, DEFAULT = "attngen", "attngen default"
REASON_LENGTH = 160

Inputs = tuple[Tensor, ...]
"""q, k and v, and if these are FP8 their descales."""
Timer = Callable[[Callable[[], Any]], float]
"""Milliseconds of a call."""
COLD_BYTES = 256 << 20
"""Of all k and v that calls in a graph take turns over: none is in a cache when its turn comes."""
GRAPH_CALLS = 4
"""Calls in a graph at least."""
GRAPH_MS = 20.0
"""Device time that one measurement by graph aims at."""


@dataclass(frozen=True)
class Timed:
    """One contestant; `ms` is None if it did not run, and `reason` says why."""

    name: str
    ms: float | None = None
    spread_ms: float | None = None
    """Largest less smallest round."""
    tflops: float | None = None
    reason: str = ""
    config: str = ""


@dataclass(frozen=True)
class Comparison:
    """Every contestant on one workload and direction."""

    spec: AttentionSpec
    workload: Workload
    direction: Direction
    rounds: int
    tier: str
    """Where our config is from, as `attngen explain` says."""
    timed: tuple[Timed, ...]

    @property
    def ours(self) -> float | None:
        return next((each.ms for each in self.timed if each.name == OURS), None)

    def ratio(self, other: Timed) -> float | None:
        """Their time over ours: above 1 where ours is faster."""
        return other.ms / self.ours if other.ms and self.ours else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "spec": self.spec.key,
            "workload": str(self.workload),
            "direction": self.direction,
            "rounds": self.rounds,
            "tier": self.tier,
            "results": {
                each.name: vars(each) | {"their_time_over_ours": self.ratio(each)}
                for each in self.timed
            },
        }


def usual_workloads(spec: AttentionSpec) -> list[Workload]:
    """16k tokens and a model width of 2048, in sequences of 1k, 4k and 16k."""
    heads = max(1, 2048 // spec.head_dim)
    return [Workload(16384 // n, heads, heads, n, n) for n in (1024, 4096, 16384)]


def do_bench(call: Callable[[], Any]) -> float:
    """Median milliseconds, the L2 flushed before each run."""
    from triton.testing import do_bench as measure

    return float(measure(call, warmup=20, rep=60, return_mode="median"))


def by_graph(call: Callable[[], Any]) -> float:
    """Median milliseconds of replays of a CUDA graph of some calls, for each of them."""
    count = max(GRAPH_CALLS, len(call.turns)) if isinstance(call, Turns) else GRAPH_CALLS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    times = [_replay(graph)]  # of a graph that is still cold: it counts for nothing
    while len(times) < 4 or (sum(times) < GRAPH_MS and len(times) < 100):
        times.append(_replay(graph))
    return statistics.median(times[1:]) / count


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@dataclass
class Turns:
    """One call after the other, each time the next."""

    turns: list[Callable[[], Any]]
    made: int = 0

    def __call__(self) -> Any:
        self.made += 1
        return self.turns[self.made % len(self.turns)]()


def bench(
    spec: AttentionSpec,
    workload: Workload,
    peers: list[Peer],
    *,
    directions: tuple[Direction, ...] = DIRECTIONS,
    rounds: int = 5,
    timer: Timer = do_bench,
    device: str = "cuda",
    progress: Callable[[str], None] = lambda message: None,
) -> Iterator[Comparison]:
    """Time a spec on a workload, one direction after the other."""
    if timer is by_graph and directions != ("fwd",):
        raise ValueError(f"by_graph times forwards, got directions={directions}")
    if spec.is_packed:
        raise UnsupportedSpecError(
            [
                'bench of layout="thd" is not built yet: its peers take other arguments; `attngen '
                "tune` times it"
            ]
        )
    if spec.is_quantized:
        raise UnsupportedSpecError(["bench of kv_dtype is not built yet; `attngen tune` times it"])
    if spec.has_lengths:
        raise UnsupportedSpecError(
            ["bench of key_lengths and paged is not built yet; `attngen tune` times it"]
        )
    given = replace(spec, layout="bhsd")
    gpu = current()
    for direction in directions:
        spec = given.served_as(direction)
        at = f"{workload} {direction}"
        progress(f"{at}: preparing")
        torch.compiler.reset()  # each shape compiles FlexAttention anew, and dynamo counts
        (choice,) = explain_workload(spec, workload, gpu=gpu, directions=(direction,)).choices
        default = lowering.default(spec.text, choice.bucket, gpu)
        ours = ((OURS, choice.config), (DEFAULT, default))
        inputs = [_inputs(spec, workload, device)]
        if timer is by_graph:
            size = sum(x.numel() * x.element_size() for x in inputs[0][1:3])
            inputs += [_inputs(spec, workload, device) for _ in range(COLD_BYTES // size)]
        beside = beside_of(spec, workload, device, torch.Generator(device).manual_seed(1))
        entrants = list(_ours(spec, direction, ours, inputs, beside))
        theirs, absent = _theirs(spec, workload, direction, peers, inputs, beside)
        entrants += theirs
        work = flops(spec, workload, direction)
        timed = _timed(entrants, rounds, timer, work, partial(_tell, progress, at))
        order = [OURS, DEFAULT, *(peer.name for peer in peers)]
        both = sorted([*timed, *absent], key=lambda each: order.index(each.name))
        yield Comparison(spec, workload, direction, rounds, choice.found.tier, tuple(both))


@dataclass(frozen=True)
class _Entrant:
    """A contestant that ran once: what is timed, and the setting it runs in."""

    name: str
    call: Callable[[], Any]
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext
    config: str = ""


def _tell(progress: Callable[[str], None], at: str, turn: str) -> None:
    progress(f"{at}: {turn}")


def _timed(
    entrants: list[_Entrant],
    rounds: int,
    timer: Timer,
    work: float,
    progress: Callable[[str], None],
) -> list[Timed]:
    """Let everyone run in each round; the median round counts."""
    times: dict[str, list[float]] = {entrant.name: [] for entrant in entrants}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for entrant in entrants:
            with entrant.setting():
                times[entrant.name].append(timer(entrant.call))
    timed = []
    for entrant in entrants:
        mine = times[entrant.name]
        ms = statistics.median(mine)
        spread = max(mine) - min(mine)
        timed.append(Timed(entrant.name, ms, spread, work / ms / 1e9, config=entrant.config))
    return timed


def _ours(
    spec: AttentionSpec,
    direction: Direction,
    configs: tuple[tuple[str, KernelConfig], ...],
    inputs: list[Inputs],
    beside: dict[str, Tensor],
) -> Iterator[_Entrant]:
    """Our kernels under each of the named configs, each having run once."""
    attn = compile(spec)
    tiles: list[BlockMap] = []
    if spec.block_map:
        aux = tuple(beside[name] for name in spec.aux_args)
        tiles.append(map_of(spec, inputs[0][0], inputs[0][1], aux))

    def attend(q: Tensor, k: Tensor, v: Tensor, *descales: Tensor) -> Tensor:
        named: dict[str, Any] = beside | dict(zip(DESCALES, descales, strict=False))
        if spec.has_functions:
            named["aux_tensors"] = tuple(named.pop(name) for name in spec.aux_args)
        if spec.block_map:
            named["block_map"] = tiles[0]
        out: Tensor = attn(q, k, v, **named)
        return out

    for name, config in configs:
        setting = partial(pinned, {config.direction: config})
        with setting():
            call = _calls(attend, inputs, direction)
        yield _Entrant(name, call, setting, config.key)


def _theirs(
    spec: AttentionSpec,
    workload: Workload,
    direction: Direction,
    peers: list[Peer],
    inputs: list[Inputs],
    beside: dict[str, Tensor],
) -> tuple[list[_Entrant], list[Timed]]:
    """The peers that run, each having run once, and those that do not, with the reason."""
    entrants, absent = [], []
    for peer in peers:
        try:
            if spec.has_functions:
                raise CannotServe(f"{peer.name} is not handed score_mod or mask_mod")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attend = peer.make(spec, workload, **beside)
                theirs = [_ordered(each, peer.layout) for each in inputs]
                call = _calls(attend, theirs, direction)
        except CannotServe as why:
            absent.append(Timed(peer.name, reason=str(why)[:REASON_LENGTH]))
        except Exception as error:  # a peer may fail in any way; the others are still timed
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            absent.append(Timed(peer.name, reason=first_line[:REASON_LENGTH]))
        else:
            entrants.append(_Entrant(peer.name, call))
    return entrants, absent


def _inputs(spec: AttentionSpec, workload: Workload, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    shapes = (
        (workload.num_heads_q, workload.seqlen_q, spec.head_dim),
        (workload.num_heads_kv, workload.seqlen_k, spec.head_dim),
        (workload.num_heads_kv, workload.seqlen_k, spec.head_dim_v),
    )
    dtype = getattr(torch, spec.out_dtype)
    q, k, v = (
        torch.randn((workload.batch, *shape), generator=generator, device=device, dtype=dtype)
        for shape in shapes
    )
    if spec.fp8_scale is not None:
        return quantize(q, k, v, spec.dtype, spec.fp8_scale)
    return q, k, v


def _ordered(inputs: Inputs, layout: str) -> Inputs:
    if layout == "bhsd":
        return inputs
    return (*(x.transpose(1, 2).contiguous() for x in inputs[:3]), *inputs[3:])


def _calls(attend: Attend, inputs: list[Inputs], direction: Direction) -> Callable[[], Any]:
    """The same for several inputs, which take turns."""
    calls = [_call(attend, each, direction) for each in inputs]
    return Turns(calls) if len(calls) > 1 else calls[0]


def _call(attend: Attend, inputs: Inputs, direction: Direction) -> Callable[[], Any]:
    """What is timed; it has run once when this returns, so that compiling is over."""
    call: Callable[[], Any]
    if direction == "fwd":
        call = partial(attend, *inputs)
    else:
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        out = attend(*leaves)
        call = partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
    call()
    return call
