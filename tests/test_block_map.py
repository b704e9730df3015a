"""Block maps: which tiles a mask leaves empty, and results and gradients beside plain PyTorch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_close, make_qkv, python
from torch import Tensor

import attngen
from attngen.block_map import CONFIG, BlockMap, lists_of, mask_spec
from attngen.config import infeasible
from attngen.gpu import by_name
from attngen.pinned import pinned
from attngen.render import render, structural_variants
from attngen.score_reference import Functions
from attngen.softmax_reference import alignment, visible
from attngen.spec import MAP_TILE, AttentionSpec
from attngen.verify import verify
from attngen.workload import Workload

IDS = torch.tensor([[0] * 50 + [1] * 90 + [2] * 120, [0] * 129 + [1] * 131])
Mask = Callable[..., Tensor]


def blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Rows of tiles that are empty, partial and full, and half tiles."""
    return (q // 64 + k // 128 + h) % 3 != 0


def band(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() < 40


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return IDS[b, q] == IDS[b, k]


def nothing(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q < 0


def late(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The first rows see nothing, and no row the first keys."""
    return (q > 128) & (k > 128)


def make(mask: Mask | None = blocks, **fields: Any) -> AttentionSpec:
    named = {"head_dim": 16, "dtype": "float32", "mask_mod": mask, "block_map": True}
    return AttentionSpec(**{**named, **fields})


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles of half a map's; dq by atomic adds where a test asks for it."""
    named = getattr(request.node, "callspec", None)
    dq = named.params.get("dq", "kernel") if named is not None else "kernel"
    sizes = {"block_m": 64, "block_n": 64}
    bwd = replace(SMALL_BWD, dq=dq, **sizes, dq_block_m=64, dq_block_n=64)
    with pinned({"fwd": replace(SMALL_FWD, block_m=32, block_n=64), "bwd": bwd}):
        yield


def dense(spec: AttentionSpec, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    """The mask, entry by entry."""
    b, h, i, j = (torch.arange(n) for n in (batch, heads, rows, keys))
    i = i[:, None]
    seen = visible(spec, i + alignment(spec, rows, keys), j)
    aux = {f"aux{n}": x for n, x in enumerate(spec.captured or ())}
    place = (b[:, None, None, None], h[:, None, None], i, j)
    return Functions(spec, aux).seen(seen, *place).expand(batch, heads, rows, keys)


def kinds_of(seen: Tensor) -> Tensor:
    pads = (0, -seen.shape[3] % MAP_TILE, 0, -seen.shape[2] % MAP_TILE)
    padded = torch.nn.functional.pad(seen, pads)
    at = padded.unflatten(3, (-1, MAP_TILE)).unflatten(2, (-1, MAP_TILE)).transpose(3, 4)
    return at.any(5).any(4).to(torch.int8) + at.all(5).all(4)


POSITIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "top_left", "window": (50, None)},
    {"window": (140, 200)},
    {"chunk": 150},
)


MASKS: tuple[tuple[Mask, dict[str, Any]], ...] = (
    *((blocks, fields) for fields in POSITIONS),
    (band, {"causal": True}),
    (documents, {}),
    (nothing, {}),
    (late, {"window": (140, 200)}),
)


def named(value: Any) -> str:
    """The same in every process: an id must not hold an address."""
    return value.__name__ if callable(value) else str(value)


@pytest.mark.parametrize(("mask", "fields"), MASKS, ids=named)
def test_map_beside_the_dense_mask(mask: Mask, fields: dict[str, Any]) -> None:
    spec, sizes = make(mask, **fields), (2, 2, 129, 256)
    found = attngen.make_block_map(spec, *sizes)
    wanted = lists_of(kinds_of(dense(spec, *sizes)))
    assert torch.equal(found.lists.expand_as(wanted), wanted)
    reads = spec.mask_function.inputs if spec.mask_function else ()
    assert found.lists.shape[:2] == (2 if "b" in reads else 1, 2 if "h" in reads else 1)


CASES: tuple[tuple[Mask, dict[str, Any], str], ...] = (
    (blocks, {}, "kernel"),
    (blocks, {"causal": True, "deterministic": True}, "kernel"),
    (band, {"window": (30, 90), "dtype": "bfloat16"}, "atomic"),
    (documents, {"causal": True, "dropout_p": 0.2, "softcap": 5.0}, "atomic"),
    (late, {"sinks": True, "alibi": True, "dtype": "bfloat16"}, "kernel"),
    (late, {"chunk": 150, "bias": True, "attn_mask": True}, "kernel"),
    (nothing, {}, "atomic"),
)


@pytest.mark.parametrize(("mask", "fields", "dq"), CASES, ids=named)
def test_results_and_gradients_beside_the_oracle(
    mask: Mask, fields: dict[str, Any], dq: str
) -> None:
    workload = Workload(2 if mask is documents else 1, 2, 1, 141, 158)
    for check in verify(make(mask, **fields), [workload], ("fwd", "bwd"), "cpu"):
        assert check.ok, check


def test_results_with_score_mod_and_side_outputs() -> None:
    """A score_mod may hide keys of full tiles, too."""
    table = torch.randn(2, requires_grad=True)
    spec = make(
        score_mod=lambda s, b, h, q, k: torch.where(q % 7 == 3, -torch.inf, s * table[h]),
        deterministic=False,
    )
    q, k, v = make_qkv(seqlen_q=130, seqlen_k=140, heads=2, heads_kv=1)
    tiles = attngen.make_block_map(spec, 1, 2, 130, 140)
    names = ("lse", "max_logit", "entropy")
    results = []
    for each, more in ((spec, {"block_map": tiles}), (replace(spec, block_map=False), {})):
        leaves = [x.clone().requires_grad_() for x in (q[:1], k[:1], v[:1])]
        out, aux = attngen.compile(each)(*leaves, return_aux=names, **more)
        grads = torch.autograd.grad(out.square().sum(), [*leaves, table])
        results.append([out, *aux.values(), *grads])
    assert_close(*results)


def test_what_stands_in_empty_tiles_is_nowhere() -> None:
    spec = make(late)
    q, k, v = (x[:1].clone() for x in make_qkv(seqlen_q=150, seqlen_k=140, heads=2, heads_kv=1))
    tiles = attngen.make_block_map(spec, 1, 2, 150, 140)
    k[:, :, :128], v[:, :, :128], q[:, :, :128] = torch.nan, torch.inf, torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attngen.compile(spec)(*leaves, block_map=tiles, return_lse=True)
    assert torch.isfinite(out).all()
    assert (lse[:, :, :129] == -torch.inf).all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert torch.isfinite(grad).all()


def test_one_map_serves_functional_calls_and_compiled_ones() -> None:
    spec = make(causal=True)
    q, k, v = make_qkv(seqlen_q=130, seqlen_k=140, heads=2, heads_kv=1)
    tiles = attngen.make_block_map(spec, q.shape[0], 2, 130, 140)
    attn = attngen.compile(spec)
    wanted = attngen.compile(replace(spec, block_map=False))(q, k, v)
    assert_close([attn(q, k, v, block_map=tiles)], [wanted])
    functional = attngen.attention(q, k, v, causal="bottom_right", mask_mod=blocks, block_map=tiles)
    assert_close([functional], [wanted])
    graph = torch.compile(attn, fullgraph=True, backend="aot_eager")
    assert_close([graph(q, k, v, block_map=tiles)], [wanted])
    stored = pickle.loads(pickle.dumps(tiles))
    assert_close([attn(q, k, v, block_map=stored)], [wanted])
    samples = torch.vmap(lambda x: attn(x, k, v, block_map=tiles))(torch.stack([q, q]))
    assert_close([samples[1]], [wanted])


def test_map_of_another_call_is_refused() -> None:
    spec = make(causal=True)
    q, k, v = make_qkv(seqlen_q=5, seqlen_k=6, heads=2, heads_kv=1)
    batch = q.shape[0]
    attn = attngen.compile(spec)
    tiles = attngen.make_block_map(spec, batch, 2, 5, 6)
    for wrong, message in (
        (None, "the call has no block_map"),
        (tiles.lists, "attngen.make_block_map gives"),
        (tiles._replace(seqlen_k=7), "made for seqlen_k 7, but the call has 6"),
        (tiles._replace(batch=9), "made for batch 9"),
        (attngen.make_block_map(make(), batch, 2, 5, 6), "made for head_dim=1.*causal"),
        (attngen.make_block_map(make(band, causal=True), batch, 2, 5, 6), "block_map was made for"),
        (tiles._replace(lists=tiles.lists.to("meta")), "block_map is on meta"),
        (tiles._replace(lists=tiles.lists[..., 1:]), "block_map must be int32"),
        (tiles._replace(lists=tiles.lists.long()), "block_map must be int32"),
    ):
        with pytest.raises(attngen.SpecError, match=message):
            attn(q, k, v, block_map=wrong)
    with pytest.raises(attngen.UnsupportedSpecError, match="q_start"):
        attn(q, k, v, block_map=tiles, q_start=4)
    with pytest.raises(attngen.SpecError, match="block_map=False"):
        attngen.compile(replace(spec, block_map=False))(q, k, v, block_map=tiles)
    with pytest.raises(attngen.SpecError, match="has no mask_mod"):
        attngen.attention(q, k, v, causal=True, block_map=tiles)


def test_specs_that_have_no_map_are_refused() -> None:
    with pytest.raises(attngen.SpecError, match="block_map=True needs mask_mod"):
        make(None)
    with pytest.raises(attngen.UnsupportedSpecError, match="block_map with documents"):
        make(documents=True)
    with pytest.raises(attngen.SpecError, match="takes an AttentionSpec with mask_mod"):
        attngen.make_block_map(AttentionSpec(head_dim=16), 1, 1, 1, 1)
    with pytest.raises(attngen.SpecError, match="seqlen_q must be"):
        attngen.make_block_map(make(), 1, 1, -1, 1)
    with pytest.raises(attngen.UnsupportedSpecError, match="block_map with prefix_lm"):
        attngen.make_block_map(make(block_map=False, prefix_lm=True, causal=True), 1, 1, 1, 1)


def test_tiles_of_kernels_divide_those_of_the_map() -> None:
    config = replace(SMALL_FWD, block_m=2 * MAP_TILE)
    (why,) = infeasible(make(), config, by_name("nvidia_h200"))
    assert why == "block_m=256 must be at most 128, the size of a block map's tile"


def test_empty_sizes() -> None:
    for rows, keys in ((0, 5), (5, 0)):
        tiles = attngen.make_block_map(make(), 1, 2, rows, keys)
        assert isinstance(tiles, BlockMap)
        q, k = torch.randn(1, 2, rows, 16), torch.randn(1, 2, keys, 16)
        out = attngen.compile(make())(q, k, k, block_map=tiles)
        assert out.shape == q.shape
        assert not out.any()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"causal": True, "window": (9, 0)}, {"chunk": 9}], ids=str)
def test_emitted_files_stand_alone(fields: dict[str, Any], tmp_path: Path) -> None:
    spec = make("aux0:long1;t0:index aux0 q;t1:index aux0 k;eq t0 t1", **fields)
    texts = [render(mask_spec(spec), CONFIG)]
    texts += [render(spec, structural_variants(d)[0]) for d in ("fwd", "bwd")]
    for n, text in enumerate(texts):
        path = tmp_path / f"file{n}.py"
        path.write_text(text)
        code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        done = python(code, str(path), TRITON_INTERPRET="1")
        assert done.returncode == 0, done.stderr[-2000:]
