"""Candidates, and single steps between them; and the sampler over them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from attngen.config import BwdConfig, FwdConfig, KernelConfig, default_config, infeasible
from attngen.cost_model import costs
from attngen.gpu import by_name
from attngen.search_order import model_order
from attngen.search_space import (
    axes,
    candidates,
    decode,
    encode,
    joined,
    kernel_parts,
    neighbours,
)
from attngen.spec import AttentionSpec
from attngen.tuner.additive import best_pairs, links
from attngen.tuner.cover import Cover, parts_of
from attngen.tuner.search import Search
from attngen.workload import Direction, Workload, spec_bucket

H200, A10G = by_name("nvidia_h200"), by_name("nvidia_a10g")
CAUSAL = AttentionSpec(head_dim=128, causal=True)
SPECS = [
    pytest.param(CAUSAL, id="d128"),
    pytest.param(AttentionSpec(head_dim=256), id="d256"),
    pytest.param(AttentionSpec(head_dim=40, head_dim_v=36), id="no-tma"),
    pytest.param(AttentionSpec(head_dim=64, dtype="float32"), id="float32"),
    pytest.param(AttentionSpec(head_dim=64, deterministic=True), id="deterministic"),
    pytest.param(AttentionSpec(head_dim=64, batch_invariant=True), id="batch-invariant"),
]
DIRECTIONS: list[Direction] = ["fwd", "bwd"]


def bucket_of(direction: Direction, spec: AttentionSpec = CAUSAL, seqlen: int = 4096):
    return spec_bucket(direction, spec, Workload(2, 16, 4, seqlen, seqlen))


@pytest.mark.parametrize("gpu", [H200, A10G], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_candidates_are_feasible_and_distinct(spec, direction, gpu):
    bucket = bucket_of(direction, spec)
    found = candidates(spec, bucket, gpu)
    assert found
    assert len(set(found)) == len(found)
    sample = found[:: max(1, len(found) // 200)]
    assert not any(infeasible(spec, config, gpu) for config in sample)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_candidates_are_all_that_is_feasible(direction):
    """The backward checks its two kernels apart; that must lose and add nothing."""
    spec = AttentionSpec(head_dim=256)
    bucket = bucket_of(direction, spec, 64)
    space = axes(spec, bucket, A10G)
    sizes = [len(values) for values in space.values()]
    every: set[KernelConfig] = set()
    for number in range(_product(sizes)):
        indices = {}
        for name, size in zip(space, sizes, strict=True):
            number, indices[name] = divmod(number, size)
        config = decode(direction, indices, space)
        if not infeasible(spec, config, A10G):
            every.add(config)
    assert set(candidates(spec, bucket, A10G)) == every


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


@pytest.mark.parametrize("seqlen", [1, 16, 33])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_blocks_do_not_exceed_the_lengths(direction, seqlen):
    bucket = bucket_of(direction, CAUSAL, seqlen)
    longest = max(16, bucket.seqlen_q)
    for config in candidates(CAUSAL, bucket, H200):
        for name, value in config.as_dict().items():
            assert "block" not in name or value <= longest


def test_descriptors_need_tma_and_aligned_rows():
    odd = AttentionSpec(head_dim=40, head_dim_v=36)
    assert axes(CAUSAL, bucket_of("fwd"), H200)["tiles"] == ("pointer", "descriptor")
    assert axes(CAUSAL, bucket_of("fwd"), A10G)["tiles"] == ("pointer",)
    assert axes(odd, bucket_of("fwd", odd), H200)["tiles"] == ("pointer",)


def test_atomics_are_left_out_of_a_deterministic_spec():
    spec = AttentionSpec(head_dim=64, deterministic=True)
    assert all(c.dq == "kernel" for c in candidates(spec, bucket_of("bwd", spec), H200))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_neighbours_change_one_field_and_one_kernel(direction):
    bucket = bucket_of(direction)
    space = axes(CAUSAL, bucket, H200)
    for config in candidates(CAUSAL, bucket, H200)[::97]:
        for near in neighbours(config, space):
            old, new = config.as_dict(), near.as_dict()
            kinds = (config.tiles, getattr(config, "dq", None))
            changed = [name for name in old.keys() & new.keys() if old[name] != new[name]]
            assert len(changed) == 1
            assert config in neighbours(near, space) or getattr(near, "dq", "") == "atomic"
            if kinds == (near.tiles, getattr(near, "dq", None)):
                before, after = kernel_parts(config), kernel_parts(near)
                assert sum(before[name] != after[name] for name in before) == 1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_encode_and_decode_are_inverse(direction):
    bucket = bucket_of(direction)
    space = axes(CAUSAL, bucket, H200)
    for config in candidates(CAUSAL, bucket, H200)[::31]:
        indices = encode(config, space)
        assert indices is not None and decode(direction, indices, space) == config


def test_a_config_off_the_axes_has_no_code():
    off = FwdConfig(block_m=128, block_n=64, num_warps=16, num_stages=2)
    assert encode(off, axes(CAUSAL, bucket_of("fwd"), H200)) is None


# ---- the sampler ----------------------------------------------------------------------------


def surface(config: KernelConfig) -> float:
    """A synthetic time with one best tile away from the model's favourites."""
    wanted = {"block_m": 64, "block_n": 32, "num_warps": 2, "num_stages": 4}
    off = sum(abs(getattr(config, n).bit_length() - v.bit_length()) for n, v in wanted.items())
    return 100.0 * (1 + 0.2 * off + 0.05 * (config.tiles == "pointer"))


def search(direction: Direction = "fwd", **how) -> tuple[Search, list[KernelConfig]]:
    bucket = bucket_of(direction)
    order = model_order(CAUSAL, bucket, H200, candidates(CAUSAL, bucket, H200))
    starts = [default_config(CAUSAL, bucket, H200), *order[:5]]
    return Search(direction, order, axes(CAUSAL, bucket, H200), starts, **how), order


@pytest.mark.parametrize("seed", range(3))
def test_search_finds_the_optimum_in_few_steps(seed):
    seeker, order = search(seed=seed)
    asked = []
    for _ in range(90):
        config = seeker.ask()
        asked.append(config)
        seeker.tell(config, surface(config))
    assert len(set(asked)) == len(asked)
    assert min(map(surface, asked)) == min(map(surface, order))


def test_search_is_reproducible():
    runs = []
    for _ in range(2):
        seeker, _ = search(seed=7)
        asked = []
        for _ in range(30):
            config = seeker.ask()
            asked.append(config)
            seeker.tell(config, surface(config))
        runs.append(asked)
    assert runs[0] == runs[1]


def test_search_tries_everything_once_and_ends():
    seeker, order = search()
    asked = []
    while (config := seeker.ask()) is not None:
        asked.append(config)
        seeker.tell(config, None if len(asked) % 3 else surface(config))
    assert set(asked) >= set(order) and len(asked) == len(set(asked))


def test_exhaustive_search_follows_the_model():
    seeker, order = search(exhaustive=True)
    first = [seeker.ask() for _ in range(6)]
    assert [seeker.ask() for _ in range(4)] == [c for c in order if c not in first][:4]


def two_kernels(config: KernelConfig) -> float:
    """A rugged synthetic time: the sum of the config's kernels."""
    times = [
        cost**0.25 * random.Random(f"1{part}").uniform(0.5, 2.0)
        for part, cost in zip(
            kernel_parts(config).items(), costs(CAUSAL, config, bucket_of("bwd"), H200), strict=True
        )
    ]
    return sum(times) if len(times) == 2 else 3 * times[0]


def cover(order, runs=lambda config: True) -> list[KernelConfig]:
    """What is asked for to show every kernel."""
    seeker, asked = Cover(order), []
    while (config := seeker.ask(set(asked))) is not None:
        asked.append(config)
        seeker.tell(config, runs(config))
    return asked


@pytest.mark.parametrize("ahead", [1, 8])
@pytest.mark.parametrize("failing", [1, 3, 12])
def test_cover_finds_other_partners_for_kernels_whose_partner_fails(failing, ahead):
    """The kernels that most configs of the plain cover run fail; all others must run."""
    order = search("bwd")[1]
    every = {part for config in order for part in parts_of(config)}
    plain = cover(order)
    hubs = Counter(part for config in plain for part in parts_of(config)).most_common(failing)
    broken = {part for part, _ in hubs}
    seeker, asked, waiting = Cover(order), set(), []
    ran: set = set()
    while True:
        while len(waiting) < ahead and (config := seeker.ask(asked)) is not None:
            asked.add(config)
            waiting.append(config)
        if not waiting:
            break
        config = waiting.pop(0)
        good = broken.isdisjoint(parts_of(config))
        ran |= set(parts_of(config)) if good else set()
        seeker.tell(config, good)
    assert ran == every - broken
    assert seeker.unknown() == 0
    assert len(asked) < len(plain) + 3 * ahead * failing


def test_cover_counts_kernels_that_only_failing_ones_run_beside():
    order = [c for c in search("bwd")[1] if c.dq == "kernel" and c.tiles == "pointer"]
    seeker, asked = Cover(order[:2]), set()
    while (config := seeker.ask(asked)) is not None:
        asked.add(config)
        seeker.tell(config, False)
    assert asked == set(order[:2]) and seeker.unknown() > 0


def test_exhaustive_search_says_what_it_did_not_find_out():
    _, order = search("bwd")
    space = axes(CAUSAL, bucket_of("bwd"), H200)
    seeker = Search("bwd", order[:600], space, order[:5], exhaustive=True)
    while (config := seeker.ask()) is not None:
        seeker.tell(config, None if config.tiles == "pointer" else two_kernels(config))
    words = seeker.exhausted()
    assert words.startswith("every kernel was tried, ") and words.endswith("others that fail")


def test_exhaustive_search_finds_the_best_pair_of_backward_kernels():
    """Each kernel's every tile once, then the pairs of the best: a 20th of all configs."""
    seeker, order = search("bwd", exhaustive=True)
    times: dict[KernelConfig, float] = {}
    while (config := seeker.ask()) is not None:
        times[config] = two_kernels(config)
        seeker.tell(config, times[config])
    best = min(order, key=two_kernels)
    assert times[best] == min(times.values())
    assert best not in cover(order), "the pairs were needed"
    assert len(times) < len(order) / 20
    shown = {part for config in times for part in kernel_parts(config).items()}
    assert shown == {part for config in order for part in kernel_parts(config).items()}


def test_pairs_come_fastest_first_with_the_time_they_should_take():
    order = search("bwd")[1]
    times = {config: two_kernels(config) for config in cover(order)[:200]}
    pairs = best_pairs(times)
    assert pairs and not {config for _, config in pairs} & set(times)
    assert [expected for expected, _ in pairs] == sorted(expected for expected, _ in pairs)
    same = {c for c in times if c.dq == "kernel" and c.tiles == pairs[0][1].tiles}
    for expected, config in pairs[:5]:
        assert {config.tiles} == {c.tiles for c in same}
        assert expected == pytest.approx(two_kernels(config), rel=1e-6)


def test_pairs_stay_within_what_measured_configs_link():
    """Between groups any share of a time can be moved, so that sums across mean nothing."""
    order = search("bwd")[1]
    one, other = (
        [c for c in order if c.dq == "kernel" and c.tiles == "pointer" and chosen(c)]
        for chosen in (
            lambda c: (c.block_m, c.dq_block_m) == (64, 64),
            lambda c: (c.block_m, c.dq_block_m) == (32, 32),
        )
    )
    times = {c: two_kernels(c) for c in (*cover(one), *cover(other))}
    groups = [{part for c in kind for part in parts_of(c)} for kind in (one, other)]
    pairs = best_pairs(times)
    assert pairs and all(any(g.issuperset(parts_of(c)) for g in groups) for _, c in pairs)
    for expected, config in pairs:
        assert expected == pytest.approx(two_kernels(config), rel=1e-6)
    ((slower, link),) = links(times)
    assert slower == max(min(times[c] for c in times if c in kind) for kind in (one, other))
    assert all(not group.isdisjoint(parts_of(link)) for group in groups)
    times[link] = two_kernels(link)
    assert not links(times)
    assert any(not any(g.issuperset(parts_of(c)) for g in groups) for _, c in best_pairs(times))


def test_search_links_groups_of_backward_kernels():
    seeker, order = search("bwd")
    same = [c for c in order if c.dq == "kernel" and c.tiles == "pointer"]
    first = same[0]
    second = next(c for c in same if not set(parts_of(c)) & set(parts_of(first)))
    for config in (first, second):
        seeker.tell(config, 100.0)
    asked = [seeker.ask() for _ in range(14)]
    assert joined(first, second) in asked or joined(second, first) in asked


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_pairs_without_two_kernels(direction):
    order = search(direction)[1]
    assert best_pairs({}) == []
    assert best_pairs({c: 1.0 for c in order if len(kernel_parts(c)) == 1}) == []


def test_only_configs_that_agree_in_the_rest_are_joined():
    one, other = (
        BwdConfig(block_m=m, block_n=64, num_warps=4, num_stages=2, dq_block_m=m) for m in (64, 32)
    )
    assert joined(one, other) == replace(one, dq_block_m=32)
    assert joined(one, replace(other, tiles="descriptor")) is None
    assert joined(one, replace(other, dq="atomic")) is None
    assert joined(*[FwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)] * 2) is None


def test_search_does_not_ask_for_what_is_known():
    seeker, order = search("bwd")
    known = order[3]
    assert isinstance(known, BwdConfig)
    seeker.tell(known, 50.0)
    assert known not in [seeker.ask() for _ in range(20)]
