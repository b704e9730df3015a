"""attngen.integrations.transformers: small random models against eager attention."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[integrations]'"
)

from transformers import masking_utils  # noqa: E402  (not without transformers)

from attngen.integrations import transformers as integration  # noqa: E402  (nor these)
from attngen.integrations import transformers_masks as masks  # noqa: E402  (nor these)

masks.load()
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch._dynamo
SEQLEN = 21
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _model(name: str) -> Any:
    t, more = transformers, {"sliding_window": 8}
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**SMALL))
    if name == "gemma2":
        more |= {"query_pre_attn_scalar": 48, "attn_logit_softcapping": 2.0}
        return t.Gemma2ForCausalLM(t.Gemma2Config(**SMALL, **more))
    if name == "gpt_oss":
        more |= {"num_local_experts": 2, "num_experts_per_tok": 2}
        return t.GptOssForCausalLM(t.GptOssConfig(**SMALL, **more))
    if name == "deepseek_v3":
        sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
        sizes |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 16}
        sizes |= {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        base = {k: v for k, v in SMALL.items() if k != "head_dim"} | {"num_key_value_heads": 4}
        return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**base, **sizes))
    if name == "bert":
        sizes = {k: SMALL[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")}
        config = t.BertConfig(**sizes, intermediate_size=48, num_attention_heads=2)
        return t.BertModel(config, add_pooling_layer=False)
    assert name == "t5"
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    return t.T5Model(t.T5Config(vocab_size=64, decoder_start_token_id=0, pad_token_id=0, **sizes))


Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[[str], Pair]]:
    """A model with eager attention and its copy with attngen's, by name."""
    made: dict[str, Pair] = {}
    name = integration.register()

    def get(model: str) -> Pair:
        if model not in made:
            torch.manual_seed(0)
            eager = _model(model).eval()
            with torch.no_grad():  # else all logits are about 0
                for label, x in eager.named_parameters():
                    x.mul_(4.0) if x.dim() > 1 else None
                    x.normal_(0, 1.5) if "sinks" in label else None
            ours = copy.deepcopy(eager)
            eager.set_attn_implementation("eager")
            ours.set_attn_implementation(name)
            made[model] = eager, ours
        return made[model]

    yield get


@pytest.fixture
def ids() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 64, (2, SEQLEN), generator=generator)


def assert_same(got: Tensor, want: Tensor, rows: Any = None) -> None:
    assert got.isfinite().all()
    if rows is not None:
        got, want = got[rows], want[rows]
    torch.testing.assert_close(got, want, atol=3e-5 * max(1.0, want.abs().max().item()), rtol=0)


CAUSAL = ["llama", "gemma2", "gpt_oss", "deepseek_v3"]
MOSTLY_LLAMA = ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in CAUSAL[1:])]


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_prefill(name: str, pair: Callable[[str], Pair], ids: Tensor):
    eager, ours = pair(name)
    assert_same(ours(ids).logits, eager(ids).logits)


@pytest.mark.parametrize("name", MOSTLY_LLAMA)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding(name: str, side: str, pair: Callable[[str], Pair], ids: Tensor):
    eager, ours = pair(name)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    got, want = (model(ids, attention_mask=mask).logits for model in (ours, eager))
    assert_same(got, want, mask.bool())


@pytest.mark.parametrize("name", MOSTLY_LLAMA)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_caches(name: str, kind: str, padded: bool, pair: Callable[[str], Pair], ids: Tensor):
    """Two chunks of a prompt, then token by token, past the sliding window."""
    mask = torch.ones_like(ids)
    mask[0, : 5 if padded else 0] = 0

    def steps(model: Any) -> Tensor:
        cache = transformers.DynamicCache(config=model.config)
        if kind == "static":
            cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        found, at = [], 0
        for n in (9, 10, 1, 1):
            named = {"attention_mask": mask[:, : at + n]} if padded else {}
            out = model(ids[:, at : at + n], past_key_values=cache, use_cache=True, **named)
            found.append(out.logits)
            at += n
        return torch.cat(found, 1)

    eager, ours = pair(name)
    assert_same(steps(ours), steps(eager), mask.bool())


@pytest.mark.parametrize("name", MOSTLY_LLAMA)
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
@torch.no_grad()
def test_packed(name: str, how: str, pair: Callable[[str], Pair], ids: Tensor):
    """Documents of one row are as apart."""
    eager, ours = pair(name)
    lengths = [7, 10, SEQLEN - 17]
    row = ids[:1]
    named: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if how == "cu_seq_lens":
        cu = torch.tensor([0, 7, 17, SEQLEN], dtype=torch.int32)
        named |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 10, "max_length_k": 10}
    elif name == "gpt_oss":
        pytest.skip("transformers 5.24 does not tell the mask of GptOss where documents begin")
    want = torch.cat([eager(x).logits for x in row.split(lengths, 1)], 1)
    assert_same(ours(row, use_cache=False, **named).logits, want)


@pytest.mark.parametrize("name", MOSTLY_LLAMA)
def test_gradients(name: str, pair: Callable[[str], Pair], ids: Tensor):
    eager, ours = pair(name)
    for model in (eager, ours):
        model.zero_grad()
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        model.eval()
    for got, want in zip(ours.parameters(), eager.parameters(), strict=True):
        if want.grad is not None:
            assert_same(got.grad, want.grad)


@torch.no_grad()
def test_dropout_in_training_alone(pair: Callable[[str], Pair], ids: Tensor):
    _, ours = pair("llama")
    layers = [x for x in ours.modules() if hasattr(x, "attention_dropout")]
    want = ours(ids).logits
    for layer in layers:
        layer.attention_dropout = 0.3
    try:
        assert torch.equal(ours(ids).logits, want)
        ours.train()
        drawn = []
        for seed in (7, 7, 8):
            torch.manual_seed(seed)
            drawn.append(ours(ids, use_cache=False).logits)
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    finally:
        ours.eval()
        for layer in layers:
            layer.attention_dropout = 0.0


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_encoder(padded: bool, pair: Callable[[str], Pair], ids: Tensor):
    eager, ours = pair("bert")
    mask = torch.ones_like(ids)
    mask[0, SEQLEN - (5 if padded else 0) :] = 0
    got, want = (m(ids, attention_mask=mask).last_hidden_state for m in (ours, eager))
    assert_same(got, want, mask.bool())


def test_learnt_position_bias(pair: Callable[[str], Pair], ids: Tensor):
    """T5's, whose gradient sums over batch and rows."""
    eager, ours = pair("t5")
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    found = []
    for model in (eager, ours):
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :9])
        out.last_hidden_state.square().sum().backward()
        found.append(out.last_hidden_state.detach())
    assert_same(found[1], found[0])
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert_same(ours.get_parameter(name).grad, eager.get_parameter(name).grad)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(cache: str | None, pair: Callable[[str], Pair], ids: Tensor):
    eager, ours = pair("gemma2")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    named = {"attention_mask": mask, "cache_implementation": cache, "max_new_tokens": 4}
    named |= {"do_sample": False, "eos_token_id": None, "disable_compile": True}
    assert torch.equal(ours.generate(ids, **named), eager.generate(ids, **named))


@pytest.mark.slow
@pytest.mark.parametrize("name, most", [("llama", 1), ("gemma2", 2)])
def test_generate_compiles_its_steps(name: str, most: int, pair: Callable[[str], Pair]):
    """As on a GPU, where a static cache makes transformers compile the decode step by itself: masks
    are made ahead, and one that slides is full at some step."""
    eager, ours = pair(name)
    torch._dynamo.reset()
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    how = transformers.CompileConfig(backend="aot_eager", fullgraph=True)
    how._compile_all_devices = True
    named = {"attention_mask": mask, "cache_implementation": "static", "max_new_tokens": 5}
    named |= {"do_sample": False, "eos_token_id": None}
    torch._dynamo.utils.counters.clear()
    got = ours.generate(ids, compile_config=how, **named)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= most
    assert torch.equal(got, eager.generate(ids, disable_compile=True, **named))
    torch._dynamo.reset()


@pytest.mark.slow
@torch.no_grad()
def test_compiled(pair: Callable[[str], Pair], ids: Tensor):
    """One graph without a cache, where documents cannot be looked at, and few for a static one."""
    eager, ours = pair("gemma2")
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same(compiled(ids, use_cache=False).logits, eager(ids, use_cache=False).logits)
    caches = [transformers.StaticCache(config=m.config, max_cache_len=32) for m in (ours, eager)]
    start = SEQLEN - 3
    for model, cache in zip((ours, eager), caches, strict=True):
        model(ids[:, :start], past_key_values=cache, use_cache=True)
    torch._dynamo.utils.counters.clear()
    for at in range(start, SEQLEN):
        named = {"position_ids": torch.full((2, 1), at), "use_cache": True}
        got, want = (
            model(ids[:, at : at + 1], past_key_values=cache, **named).logits
            for model, cache in zip((compiled, eager), caches, strict=True)
        )
        assert_same(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("module, alone", [(masks, "load"), (integration, "register")])
def test_what_torch_compile_traces_imports_nothing(module: Any, alone: str):
    """transformers is a lazy module: torch 2.11 stops at an import of it."""
    for part in ast.parse(inspect.getsource(module)).body:
        if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and part.name != alone:
            kinds = {type(node) for node in ast.walk(part)}
            assert not kinds & {ast.Import, ast.ImportFrom, ast.Global}, part.name


# ---- masks ------------------------------------------------------------------------------------

PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 2]])


def _function(window: int | None, chunk: int | None, packed: Any, blocks: Any = None) -> Any:
    found = masking_utils.causal_mask_function
    if window is not None:
        found = masking_utils.sliding_window_causal_mask_function(window)
    if chunk is not None:
        found = masking_utils.chunked_causal_mask_function(chunk, torch.zeros(2, dtype=torch.long))
    if packed is not None:
        found = masking_utils.remap_positions_for_packed_sequence(found, packed)
    if blocks is not None:
        found = masking_utils.or_masks(found, masking_utils.blockwise_overlay(blocks))
    if packed is not None:
        ids = masking_utils.find_packed_sequence_indices(packed)
        found = masking_utils.and_masks(found, masking_utils.packed_sequence_mask_function(ids))
    return found


def _both(function: Any, rows: int, keys: int, offsets: Any, pad: Any, **named: Any) -> Any:
    """Ours and transformers' own."""
    sizes = {"batch_size": 2, "q_length": rows, "kv_length": keys, "mask_function": function}
    sizes |= {"q_offset": offsets[0], "kv_offset": offsets[1], "attention_mask": pad}
    dense = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
    return masks.structured_mask(**sizes, **named), dense


@pytest.mark.parametrize("window, chunk", [(None, None), (3, None), (None, 4)])
@pytest.mark.parametrize(
    "rows, keys, offsets",
    [
        pytest.param(8, 8, (0, 0), id="prefill"),
        pytest.param(1, 8, (7, 0), id="decode"),
        pytest.param(3, 8, (5, 0), id="chunk"),
        pytest.param(3, 6, (9, 6), id="slid"),
        pytest.param(8, 20, (0, 0), id="static-prefill"),
        pytest.param(1, 20, (9, 0), id="static"),
        pytest.param(1, 20, (torch.tensor(9), 0), id="static-on-device"),
        pytest.param(20, 40, (torch.tensor(9), 0), id="static-chunk-on-device"),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_structured(window: Any, chunk: Any, rows: int, keys: int, offsets: Any, padded: bool):
    """What is said without an entry for each pair is what transformers says with one."""
    pad = torch.ones(2, keys + offsets[1], dtype=torch.bool)
    pad[0, :2] = False
    function = _function(window, chunk, None)
    ours, dense = _both(function, rows, keys, offsets, pad if padded else None)
    if isinstance(ours, masks.StructuredMask):
        assert torch.equal(ours.dense(), dense)
        assert torch.equal(torch.zeros(()).bool() | ours[:, :, -1:], dense[:, :, -1:])
        assert torch.equal(torch.where(ours, 1, 0), torch.where(dense, 1, 0))
    else:
        assert ours is None and not padded
        causal = torch.ones(rows, keys, dtype=torch.bool).tril() if rows > 1 else 1
        assert torch.equal(dense, (dense | True) & causal)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("blocks", [None, PACKED // 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_documents(window: int | None, blocks: Any, compiled: bool):
    """Under torch.compile, too, where no closure can be read; blocks that see themselves whole have
    no structure."""

    def call(positions: Tensor) -> Any:
        function = _function(window, None, positions, blocks)
        named = {"local_size": window, "allow_is_causal_skip": False}
        ours, dense = _both(function, 8, 8, (0, 0), None, **named)
        is_structured = isinstance(ours, masks.StructuredMask)
        return ours.dense() if is_structured else ours, dense, is_structured

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="eager")
    ours, dense, is_structured = call(PACKED)
    assert torch.equal(ours, dense)
    assert is_structured == (blocks is None)


PADDED = torch.ones(3, 24, dtype=torch.bool)
PADDED[0, :7] = PADDED[1, -9:] = PADDED[2, :3] = PADDED[2, 5:] = False


def _padded(traits: Any, pad: Tensor) -> Any:
    return masks._placed(traits, (*pad.shape[:1], 1, *pad.shape[1:] * 2), 0, 0, pad, "cpu")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [None, 5])
@pytest.mark.parametrize("holes", [False, True], ids=["ends", "holes"])
def test_padding_at_the_ends_of_rows_makes_packed_sequences(causal: bool, left: Any, holes: bool):
    """Which a Hopper lowering serves; other padding becomes documents. Both say what a dense mask
    does, of queries that are no padding."""
    pad = PADDED[:, torch.randperm(24)] if holes else PADDED
    mask = _padded(masks._Traits(causal=causal, left=left, right=left), pad)
    assert (mask.packing is None) == (holes or (not causal and left is not None))
    generator = torch.Generator().manual_seed(5)
    shapes = [(3, 2, 24, 16), (3, 1, 24, 16), (3, 1, 24, 8), (3, 24, 2, 8)]
    q, k, v, do = (torch.randn(s, generator=generator) for s in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    named = {"scaling": 0.3, "softcap": 2.0, "s_aux": torch.tensor([0.5, -1.0])}
    found = []
    for each in (mask, mask.dense()):
        out, _ = integration.attention_forward(None, *leaves, each, **named)
        seen = out * pad[:, :, None, None]
        found.append([seen, *torch.autograd.grad(seen, leaves, do)])
        if not holes and each is mask and causal:
            assert not out[~pad].any()
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rows, left", [(17, None), (24, None), (31, None), (24, 5)])
def test_padded_keys_of_another_sequence_hide_no_query(rows: int, left: int | None):
    """A decoder that looks at an encoder: its queries are others than the keys that are padding,
    though there may be as many."""
    pad = PADDED.clone()
    pad[2] = False  # a batch row of padding alone
    traits = masks._Traits(left=left, right=left)
    mask = masks._placed(traits, (3, 1, rows, 24), 0, 0, pad, "cpu")
    assert (mask.packing is None) == (left is not None)
    q, k = torch.randn(3, 2, rows, 16), torch.randn(3, 2, 24, 16)
    leaves = [x.requires_grad_() for x in (q, k)]
    found = []
    for each in (mask, mask.dense()):
        out, _ = integration.attention_forward(None, q, k, k, each)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)


def test_packed_sequences_of_padding_stay_where_they_say_all():
    """Not beside a position_bias, whose columns are those of the padded keys, and on any device."""
    mask = _padded(masks._Traits(), PADDED)
    moved = mask.to("meta")
    assert all(x.device.type == "meta" for x in (*moved.packing.values(), *moved.documents))
    q = torch.randn(3, 1, 24, 16)
    bias = torch.randn(1, 1, 24, 24)
    got, _ = integration.attention_forward(None, q, q, q, mask, position_bias=bias)
    want, _ = integration.attention_forward(None, q, q, q, mask.dense(), position_bias=bias)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    static = masks._placed(masks._Traits(causal=True), (3, 1, 20, 24), 0, 0, PADDED[:, :20], "cpu")
    assert static.keys == 20 and static.packing is not None  # an empty cache of static length
    rows = q[:, :, :20]
    got, _ = integration.attention_forward(None, rows, q, q, static)
    want, _ = integration.attention_forward(None, rows, q, q, static.dense())
    seen = PADDED[:, :20]
    torch.testing.assert_close(got[seen], want[seen], atol=2e-6, rtol=1e-5)


def test_a_model_that_computes_with_its_mask_gets_a_tensor():
    function = _function(None, None, None)
    ours, dense = _both(function, 8, 8, (0, 0), None, allow_is_causal_skip=False)
    assert torch.equal(ours, dense)


@pytest.mark.parametrize("name", ["my_flash", "kernels/x", "paged|x", 3])
def test_names_that_transformers_keeps(name: Any):
    with pytest.raises(attngen.SpecError, match="name must be"):
        integration.register(name)


def test_a_mask_of_other_lengths_is_refused():
    mask, _ = _both(_function(3, None, None), 8, 8, (0, 0), None)
    q = torch.zeros(2, 2, 8, 16)
    made = "made for 8 queries and 8 keys, but this layer has"
    with pytest.raises(attngen.SpecError, match=f"{made} 8 and 9"):
        integration.attention_forward(None, q, torch.zeros(2, 2, 9, 16), q, mask)
    with pytest.raises(attngen.SpecError, match=f"{made} 7 and 8"):
        integration.attention_forward(None, q[:, :, :7], q, q, mask)


def test_a_mask_of_ints_is_refused():
    """Added to the scores, as floats are, it would hide nothing."""
    q = torch.zeros(2, 2, 8, 16)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.int64)
    with pytest.raises(attngen.DtypeError, match=r"write attn_mask.bool\(\)"):
        integration.attention_forward(None, q, q, q, mask)
