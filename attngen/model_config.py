"""What a HuggingFace config.json says about a model's attention, as groups of equal layers.

Pure: a parsed config in, `Model` out. A layer that attngen cannot serve is a `Skipped` with its
reason, or a group whose spec raises; nothing is left out without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attngen.errors import SpecError
from attngen.values import shown, whole

Phase = Literal["training", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("training", "prefill", "decode")
Config = Mapping[str, Any]

# One thing under the names that configs have for it.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "d_kv", "kv_channels")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
_DROPOUT = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "dropout_rate",
)
_DTYPE = ("dtype", "torch_dtype")
_TEXT = ("text_config", "llm_config", "language_config")

# Models whose queries see the keys on both sides; a config does not say so.
_ENCODERS = frozenset(
    [
        "albert",
        "beit",
        "bert",
        "camembert",
        "clip_vision_model",
        "deberta",
        "deberta-v2",
        "deit",
        "dinov2",
        "distilbert",
        "electra",
        "ernie",
        "esm",
        "eurobert",
        "hubert",
        "ijepa",
        "layoutlmv3",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "pixtral",
        "roberta",
        "siglip2_vision_model",
        "siglip_text_model",
        "siglip_vision_model",
        "t5gemma_encoder",
        "vit",
        "wav2vec2",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ]
)
_CLASS_TOKEN = frozenset(("beit", "clip_vision_model", "deit", "dinov2", "vit"))

# Every how many layers one is full, where config.json leaves it to the code.
_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4}
_LAYER_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
}
# Fields that make the attention another one, which no spec field stands for.
_OTHER_ATTENTION = {
    "index_topk": "sparse attention over the keys that an indexer picks",
    "attention_window": "sliding attention with global tokens",
    "attention_types": "GPT-Neo's list of local layers",
    "relative_attention": "disentangled relative positions",
    "attn_layers": "a list of hashed and local layers",
}


@dataclass(frozen=True)
class Layers:
    """Layers of a model that have the same attention."""

    name: str
    fields: dict[str, Any]
    """Of the AttentionSpec, without dtype and dropout_p."""
    num_heads_q: int
    num_heads_kv: int
    phases: tuple[Phase, ...]
    dropout_p: float = 0.0
    dtype: str | None = None
    longest_q: int | None = None
    longest_k: int | None = None
    length: int | None = None
    """The one length there is, as the patches of an image."""
    window: int | None = None
    """Keys that a layer keeps for decoding, if not all."""


@dataclass(frozen=True)
class Skipped:
    """Attention of the model that is not tuned, and why."""

    what: str
    spec: str
    why: str


@dataclass(frozen=True)
class Model:
    layers: tuple[Layers, ...]
    skipped: tuple[Skipped, ...] = ()


def read_config(config: Config) -> Model:
    """The attention of a model.

    Raises:
        SpecError: the config lacks a size, or one is no whole number from 1 up.
    """
    found: list[Layers] = []
    skipped: list[Skipped] = []
    text = next((name for name in _TEXT if isinstance(config.get(name), dict)), None)
    _read(_nested(config, text) if text else config, text or "", found, skipped)
    for name, nested in config.items():
        if name == text or not isinstance(nested, dict):
            continue
        if name != "vision_config" and not {"model_type", *_HEADS} & nested.keys():
            continue  # no model: quantization, rope and so on
        if name != "vision_config":
            skipped.append(
                Skipped(name, "", "only text_config and vision_config are read; use a TOML list")
            )
            continue
        try:
            _read(_nested(config, name), name, found, skipped)
        except SpecError as error:
            skipped.append(Skipped(name, "", str(error)))
    return Model(tuple(found), tuple(skipped))


def _nested(config: Config, name: str) -> Config:
    """The config of a part, with the dtype of the whole unless it has its own."""
    part: Config = config[name]
    return part if _first(part, _DTYPE) else {**part, "dtype": _first(config, _DTYPE)}


def _read(config: Config, where: str, found: list[Layers], skipped: list[Skipped]) -> None:
    """One model without its nested ones."""
    if isinstance(config.get("attn_config"), dict):
        config = {**config["attn_config"], **config}
    for name, what in _OTHER_ATTENTION.items():
        if config.get(name):
            skipped.append(Skipped(where or "all layers", "", f"{name}: {what} is not built yet"))
            return
    if config.get("is_encoder_decoder"):
        found += _encoder_decoder(config, where)
    elif where == "vision_config" or "patch_size" in config:
        found += _vision(config, where)
    else:
        found += _stack(config, where, skipped)


def _stack(config: Config, where: str, skipped: list[Skipped]) -> list[Layers]:
    """The layers of a decoder or of an encoder, by the keys that they see."""
    encoder = _is_encoder(config)
    base = _sizes(config, where) | {
        "phases": PHASES if not encoder else ("training", "prefill"),
        "longest_q": _length(config, where),
        "longest_k": _length(config, where),
    }
    common = _fields(config, where) | _positions(config)
    causal = {} if encoder else {"causal": True}
    kind = "encoder" if encoder else "decoder"
    made = []
    for name, count in Counter(_layer_types(config, where)).items():
        label = _label(where, count, kind)
        if name == "full":
            made.append(Layers(label, causal | common, **base))
        elif name == "sliding":
            window, sides = _window(config, where, encoder)
            label = f"{label}, window {window}"
            keep = None if encoder else window
            fields = causal | {"window": sides} | common
            made.append(Layers(label, fields, **base | {"window": keep}))
        elif name == "chunked":
            chunk = whole(_at(where, "attention_chunk_size"), config.get("attention_chunk_size"), 1)
            made.append(
                Layers(f"{label}, chunk {chunk}", causal | {"chunk": chunk} | common, **base)
            )
        else:
            skipped.append(Skipped(label, "", f"layer type {name!r} is no attention that is built"))
    return made


def _encoder_decoder(config: Config, where: str) -> list[Layers]:
    """Encoder, decoder and cross-attention; a decoder begins with one token, without a prefill."""
    listening, speaking = _side(config, "encoder"), _side(config, "decoder")
    positions = _positions(config)
    encoder, decoder = _sizes(listening, where), _sizes(speaking, where)
    fields_e, fields_d = _fields(listening, where), _fields(speaking, where)
    layers_e, layers_d = _count(listening, where), _count(speaking, where)
    heard = _length(config, where, "max_source_positions")
    said = _length(config, where, "max_target_positions")
    later: tuple[Phase, ...] = ("training", "decode")
    return [
        Layers(
            _label(where, layers_e, "encoder"),
            fields_e | positions,
            phases=("training", "prefill"),
            longest_q=heard,
            longest_k=heard,
            **encoder,
        ),
        Layers(
            _label(where, layers_d, "decoder"),
            {"causal": True} | fields_d | positions,
            phases=later,
            longest_q=said,
            longest_k=said,
            **decoder,
        ),
        Layers(
            _label(where, layers_d, "cross-attention"),
            fields_d,
            phases=later,
            longest_q=said,
            longest_k=heard,
            **decoder,
        ),
    ]


def _vision(config: Config, where: str) -> list[Layers]:
    """An image encoder: one length, its patches."""
    sizes = {}
    for name in ("image_size", "patch_size"):
        value = config.get(name)
        sizes[name] = value if isinstance(value, list) else [value, value]
        if len(sizes[name]) != 2 or None in sizes[name]:
            raise SpecError(
                f"{_at(where, name)} is {shown(value)}, so that the length depends on the image "
                "(packed sequences are not built yet); name the length in a TOML list"
            )
    sides = [
        whole(_at(where, "image_size"), i, 1) // whole(_at(where, "patch_size"), p, 1)
        for i, p in zip(sizes["image_size"], sizes["patch_size"], strict=True)
    ]
    if 0 in sides:
        raise SpecError(
            f"{_at(where, 'image_size')} {shown(config['image_size'])} is smaller than "
            f"{_at(where, 'patch_size')} {shown(config['patch_size'])}; correct the config"
        )
    patches = sides[0] * sides[1] + (_kind(config) in _CLASS_TOKEN)
    label = f"{_label(where, _count(config, where), 'image encoder')}, {patches} positions"
    fields = _fields(config, where) | _positions(config)
    phases: tuple[Phase, ...] = ("training", "prefill")
    return [Layers(label, fields, phases=phases, length=patches, **_sizes(config, where))]


def _sizes(config: Config, where: str) -> dict[str, Any]:
    """Heads, and what a training step drops."""
    heads = _size(config, _HEADS, where)
    kv_heads = _first(config, _KV_HEADS)
    if "qk_nope_head_dim" in config:  # latent attention: each head has keys of its own
        kv_heads = heads
    elif config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    dropout = _first(config, _DROPOUT)
    return {
        "num_heads_q": heads,
        "num_heads_kv": heads if kv_heads is None else whole(_at(where, _KV_HEADS[0]), kv_heads, 1),
        "dropout_p": 0.0 if dropout is None else dropout,
        "dtype": _first(config, _DTYPE),
    }


def _fields(config: Config, where: str) -> dict[str, Any]:
    """Spec fields that all layers share."""
    found: dict[str, Any] = {}
    if "qk_nope_head_dim" in config:
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        nope, rope, found["head_dim_v"] = (whole(_at(where, n), config.get(n), 1) for n in names)
        found = {"head_dim": nope + rope} | found
    elif (head_dim := _first(config, _HEAD_DIM)) is not None:
        found["head_dim"] = whole(_at(where, "head_dim"), head_dim, 1)
    else:
        hidden, heads = _size(config, _HIDDEN, where), _size(config, _HEADS, where)
        if hidden % heads:
            raise SpecError(
                f"{_at(where, _HIDDEN[0])} {hidden} is no multiple of {heads} heads, and no "
                "head_dim is given; correct the config"
            )
        found["head_dim"] = hidden // heads
    if (scale := _scale(config)) is not None:
        found["softmax_scale"] = scale
    if config.get("attn_logit_softcapping") is not None:
        found["softcap"] = config["attn_logit_softcapping"]
    if _kind(config) == "gpt_oss":
        found["sinks"] = True
    return found


def _scale(config: Config) -> Any:
    """A softmax scale other than 1 / sqrt(head_dim)."""
    if isinstance(scalar := config.get("query_pre_attn_scalar"), (int, float)) and scalar > 0:
        return float(scalar) ** -0.5
    if config.get("scale_attn_weights") is False or "d_kv" in config:
        return 1.0  # GPT-2 when told so; the T5 family
    return _first(config, ("attention_multiplier", "softmax_scale"))


def _positions(config: Config) -> dict[str, Any]:
    """Positions that act on scores: of self-attention, not of cross-attention."""
    kind = str(config.get("position_embedding_type", ""))
    if config.get("alibi") or _kind(config) == "bloom" or kind == "alibi":
        return {"alibi": True}
    relative = ("relative_attention_num_buckets", "use_relative_position_bias")
    if any(config.get(name) for name in relative) or kind.startswith("relative"):
        return {"bias": True}
    return {}


def _layer_types(config: Config, where: str) -> list[str]:
    """full, sliding, chunked or another type, layer by layer."""
    count = _count(config, where)
    given = _first(config, ("layer_types", "layers_block_type"))
    if isinstance(given, list):
        types = [_LAYER_TYPES.get(str(name), str(name)) for name in given]
    elif config.get("attention_chunk_size"):
        rope = _list(config, "no_rope_layers") or _every(config, "no_rope_layer_interval", 4, count)
        types = ["chunked" if flag else "full" for flag in rope]
    elif (every := config.get("global_attn_every_n_layers")) is not None:
        every = whole(_at(where, "global_attn_every_n_layers"), every, 1)
        types = ["sliding" if i % every else "full" for i in range(count)]
    elif _uses_window(config):
        types = ["sliding" if flag else "full" for flag in _windowed(config, count)]
    else:
        types = ["full"] * count
    if len(types) != count:
        raise SpecError(f"the config lists {len(types)} layer types for {count} layers; correct it")
    if not (config.get("sliding_window") or config.get("local_attention")):
        types = ["full" if name == "sliding" else name for name in types]  # as transformers does
    return types


def _uses_window(config: Config) -> bool:
    """Is sliding_window in force? Qwen's configs name one that is not, unless they say so."""
    default = not _kind(config).startswith("qwen")
    return bool(config.get("sliding_window") and config.get("use_sliding_window", default))


def _windowed(config: Config, count: int) -> list[bool]:
    """Which layers have the window."""
    first = config.get("max_window_layers")
    if isinstance(first, int) and "use_sliding_window" in config:
        return [i >= first for i in range(count)]
    pattern = _first(config, ("sliding_window_pattern", "_sliding_window_pattern"))
    if isinstance(pattern, str) and pattern:
        return [pattern[i % len(pattern)] == "L" for i in range(count)]
    default = _PATTERN.get(_kind(config))
    if pattern is None and default is None:
        return [True] * count
    return _every(config, "sliding_window_pattern", pattern or default, count)


def _every(config: Config, name: str, default: Any, count: int) -> list[bool]:
    """False for each n-th layer."""
    every = whole(name, config.get(name) or default, 1)
    return [bool((i + 1) % every) for i in range(count)]


def _window(config: Config, where: str, encoder: bool) -> tuple[int, tuple[int, int]]:
    """The keys a layer sees, and the window of the spec."""
    if "local_attention" in config:  # ModernBERT's, centred
        size = whole(_at(where, "local_attention"), config["local_attention"], 1)
        return size, (size // 2, size // 2)
    size = whole(_at(where, "sliding_window"), config["sliding_window"], 1)
    return size, (size - 1, size - 1 if encoder else 0)


def _is_encoder(config: Config) -> bool:
    if config.get("is_decoder"):
        return False
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return True
    names = _list(config, "architectures")
    masked = any(str(name).endswith(("ForMaskedLM", "ForPreTraining")) for name in names)
    return masked or _kind(config) in _ENCODERS


def _side(config: Config, side: str) -> Config:
    """The encoder's or the decoder's own sizes over the common ones."""
    own = {
        "num_attention_heads": (f"{side}_attention_heads",),
        "num_hidden_layers": (f"{side}_layers", f"num_{side}_layers"),
    }
    found = {name: _first(config, names) for name, names in own.items()}
    return {**config, **{name: value for name, value in found.items() if value is not None}}


def _label(where: str, count: int, kind: str) -> str:
    inside = f"{where.removesuffix('_config')}: " if where else ""
    unit = "layer" if count == 1 else "layers"
    return f"{inside}{count} {kind} {unit}"


def _count(config: Config, where: str) -> int:
    return _size(config, _LAYERS, where)


def _length(config: Config, where: str, *better: str) -> int | None:
    """The longest sequence, if the config sets an end."""
    longest = _first(config, (*better, *_LENGTH))
    return None if longest is None else whole(_at(where, (*better, *_LENGTH)[0]), longest, 1)


def _size(config: Config, names: tuple[str, ...], where: str) -> int:
    """A size that must be there, under one of its names."""
    for name in names:
        if config.get(name) is not None:
            return whole(_at(where, name), config[name], 1)
    kind = config.get("model_type")
    raise SpecError(
        f"the config lacks {_at(where, names[0])} (model_type {shown(kind)}), whose default only "
        "transformers knows; write a full one with AutoConfig.from_pretrained(NAME)"
        ".to_json_file(FILE, use_diff=False), or a TOML list"
    )


def _kind(config: Config) -> str:
    return str(config.get("model_type", ""))


def _list(config: Config, name: str) -> list[Any]:
    value = config.get(name)
    return value if isinstance(value, list) else []


def _first(config: Config, names: tuple[str, ...]) -> Any:
    """The first value that is set."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
