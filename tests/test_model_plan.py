"""From a model's config, or a TOML list, to what is tuned."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from samples import H200, MEASURED

from attngen import gpu as gpus
from attngen.cli import main, options
from attngen.config import default_config
from attngen.errors import NoFeasibleConfigError, SpecError
from attngen.identity import record_key
from attngen.lookup import lookup
from attngen.model_plan import Plan, plan_list, plan_model, plan_stored
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.workload import DIRECTIONS, Direction, Workload, spec_bucket

LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "quantization_config": {"bits": 4},
}
MISTRAL = LLAMA3 | {"model_type": "mistral", "sliding_window": 4096}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
GEMMA2 = {
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "head_dim": 256,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
GEMMA3_TYPES = [*["sliding_attention"] * 5, "full_attention"] * 4
GPT2 = {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_layer": 12, "n_positions": 1024}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_size": 768,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "position_embedding_type": "absolute",
}
T5 = {
    "is_encoder_decoder": True,
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "num_heads": 8,
    "num_layers": 6,
    "num_decoder_layers": 4,
    "n_positions": 512,
    "dropout_rate": 0.1,
    "relative_attention_num_buckets": 32,
}
WHISPER = {
    "is_encoder_decoder": True,
    "model_type": "whisper",
    "d_model": 512,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "num_hidden_layers": 6,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "dtype": "float16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "image_size": 336,
    "patch_size": 14,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
}
LLAVA = {
    "model_type": "llava",
    "text_config": {n: v for n, v in LLAMA3.items() if n != "torch_dtype"},
    "torch_dtype": "float16",
    "vision_config": VISION,
}
CAUSAL = "head_dim=128,dtype=bfloat16,causal=true"
SLIDING = f"{CAUSAL},window=4095:0"


def rows(plan: Plan) -> list[str]:
    """Each job in a line, without its reasons."""
    return [f"{job.spec} {job.workload} {'+'.join(job.directions)}" for job in plan.jobs]


def skips(plan: Plan) -> dict[str, str]:
    return {skipped.what: skipped.why for skipped in plan.skipped}


@pytest.mark.parametrize(
    ("workload", "directions"),
    [
        *(
            pytest.param(f"1,32,8,{n},{n}", ("fwd",), id=f"prefill-{n}")
            for n in (1024, 4096, 16384)
        ),
        pytest.param("2,32,8,4096,4096", DIRECTIONS, id="training-4096"),
        pytest.param("8,32,8,1024,1024", DIRECTIONS, id="training-1024"),
    ],
)
def test_records_of_the_default_plan_serve_one_step_around(
    workload: str, directions: tuple[Direction, ...]
) -> None:
    records = [
        replace(
            MEASURED,
            key=record_key(job.spec, spec_bucket(direction, job.spec, job.workload), H200),
            direction=direction,
            config=default_config(
                job.spec, spec_bucket(direction, job.spec, job.workload), H200
            ).as_dict(),
        )
        for job in plan_model(LLAMA3).jobs
        for direction in job.directions
    ]
    spec = AttentionSpec.parse(CAUSAL)
    for direction in directions:
        bucket = spec_bucket(direction, spec, Workload.parse(workload))
        key = record_key(spec, bucket, H200)
        found = lookup(None, key, bucket, H200, lambda config: [], shipped_records=records)
        assert found.tier == "neighbour bucket", found.why
        assert "wanted" in found.why[-1], "explain says what differs"


def test_llama_by_default() -> None:
    plan = plan_model(LLAMA3)
    assert rows(plan) == [
        f"{CAUSAL} 4,32,8,2048,2048 fwd+bwd",
        f"{CAUSAL} 1,32,8,8192,8192 fwd+bwd",
        f"{CAUSAL} 1,32,8,2048,2048 fwd",
        f"{CAUSAL} 16,32,8,1,2048 fwd",
        f"{CAUSAL} 16,32,8,1,8192 fwd",
    ]
    assert plan.jobs[1].why == ("training: 32 decoder layers", "prefill: 32 decoder layers")
    assert plan.jobs[3].why == ("decode: 32 decoder layers (kernels of their own)",)
    assert plan.skipped == ()
    assert [note.partition(" ")[0] for note in plan.notes] == ["seqlen", "batch:", "decode:"]
    assert "8192 positions" in plan.notes[0]


BOTH = {"seqlens": [4096], "batches": [2], "phases": ["training", "decode"]}


@pytest.mark.parametrize(
    ("config", "want"),
    [
        pytest.param(
            MISTRAL,
            [f"{SLIDING} 2,32,8,4096,4096 fwd+bwd", f"{SLIDING} 2,32,8,1,4096 fwd"],
            id="mistral",
        ),
        pytest.param(
            QWEN2,
            [f"{CAUSAL} 2,28,4,4096,4096 fwd+bwd", f"{CAUSAL} 2,28,4,1,4096 fwd"],
            id="qwen2-window-off",
        ),
        pytest.param(
            QWEN2 | {"use_sliding_window": True, "sliding_window": 1024},
            [
                f"{CAUSAL} 2,28,4,4096,4096 fwd+bwd",
                f"{CAUSAL} 2,28,4,1,4096 fwd",
                f"{CAUSAL},window=1023:0 2,28,4,4096,4096 fwd+bwd",
                f"{CAUSAL},window=1023:0 2,28,4,1,1024 fwd",
            ],
            id="qwen2-last-layers",
        ),
        pytest.param(
            GPT2,
            [
                "head_dim=64,dtype=bfloat16,causal=true 2,12,12,4096,4096 fwd+bwd",
                "head_dim=64,dtype=bfloat16,causal=true 2,12,12,1,4096 fwd",
            ],
            id="gpt2-names",
        ),
        pytest.param(
            GPT2 | {"attn_pdrop": 0.1, "multi_query": True},
            [
                "head_dim=64,dtype=bfloat16,causal=true,dropout_p=0.1 2,12,1,4096,4096 fwd+bwd",
                "head_dim=64,dtype=bfloat16,causal=true 2,12,1,1,4096 fwd",
            ],
            id="multi-query-dropout-in-training-only",
        ),
        pytest.param(
            DEEPSEEK_V3,
            [
                "head_dim=192,head_dim_v=128,dtype=bfloat16,causal=true "
                "2,128,128,4096,4096 fwd+bwd",
                "head_dim=192,head_dim_v=128,dtype=bfloat16,causal=true 2,128,128,1,4096 fwd",
            ],
            id="deepseek-latent",
        ),
        pytest.param(
            BERT,
            ["head_dim=64,dtype=bfloat16,dropout_p=0.1 2,12,12,4096,4096 fwd+bwd"],
            id="bert",
        ),
        pytest.param(
            BERT
            | {
                "model_type": "modernbert",
                "attention_probs_dropout_prob": 0.0,
                "local_attention": 128,
                "global_attn_every_n_layers": 3,
                "dtype": "float16",
            },
            [
                "head_dim=64,dtype=float16 2,12,12,4096,4096 fwd+bwd",
                "head_dim=64,dtype=float16,window=64:64 2,12,12,4096,4096 fwd+bwd",
            ],
            id="modernbert-two-sided",
        ),
    ],
)
def test_plan_of(config: dict[str, Any], want: list[str]) -> None:
    assert rows(plan_model(config, **BOTH)) == want


def test_gemma2_alternates_window_and_full_layers() -> None:
    plan = plan_model(GEMMA2, dtype="bfloat16", phases=["training"], seqlens=[8192])
    base = "head_dim=256,dtype=bfloat16,causal=true"
    rest = "softmax_scale=0.0625,softcap=50.0 1,16,8,8192,8192 fwd+bwd"
    assert rows(plan) == [f"{base},window=4095:0,{rest}", f"{base},{rest}"]
    assert [job.why for job in plan.jobs] == [
        ("training: 21 decoder layers, window 4096",),
        ("training: 21 decoder layers",),
    ]
    assert any("float32" in note for note in plan_model(GEMMA2).notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": GEMMA3_TYPES},
        {"sliding_window_pattern": 6},
        {"model_type": "gemma3_text"},
        {"sliding_window_pattern": "LLLLLG"},
    ],
    ids=["layer_types", "pattern", "model_type", "letters"],
)
def test_window_patterns_agree(fields: dict[str, Any]) -> None:
    config = MISTRAL | {"num_hidden_layers": 24} | fields
    plan = plan_model(config, phases=["training"], seqlens=[8192])
    assert [job.why[0] for job in plan.jobs] == [
        "training: 20 decoder layers, window 4096",
        "training: 4 decoder layers",
    ]


def test_t5_self_attention_has_a_bias_and_cross_attention_has_none() -> None:
    plan = plan_model(T5)
    base = "head_dim=64,dtype=bfloat16"
    scale, drop = "softmax_scale=1.0", "dropout_p=0.1,softmax_scale=1.0"
    assert rows(plan) == [
        f"{base},{drop},bias=true 16,8,8,512,512 fwd+bwd",
        f"{base},{scale},bias=true 1,8,8,512,512 fwd",
        f"{base},causal=true,{drop},bias=true 16,8,8,512,512 fwd+bwd",
        f"{base},causal=true,{scale},bias=true 16,8,8,1,512 fwd",
        f"{base},{drop} 16,8,8,512,512 fwd+bwd",
        f"{base},{scale} 16,8,8,1,512 fwd",
    ]
    assert not skips(plan)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        pytest.param({"model_type": "gpt_oss"}, "sinks", id="sinks"),
        pytest.param({"alibi": True}, "alibi", id="alibi"),
    ],
)
def test_sinks_and_alibi_are_planned(config: dict[str, Any], field: str) -> None:
    plan = plan_model(LLAMA3 | config, phases=["prefill"], seqlens=[4096])
    assert rows(plan) == [f"{CAUSAL},{field}=true 1,32,8,4096,4096 fwd"]


def test_whisper_has_two_longest_lengths() -> None:
    base = "head_dim=64,dtype=float16"
    assert rows(plan_model(WHISPER, batches=[4])) == [
        f"{base} 4,8,8,1500,1500 fwd+bwd",
        f"{base},causal=true 4,8,8,448,448 fwd+bwd",
        f"{base},causal=true 4,8,8,1,448 fwd",
        f"{base} 4,8,8,448,1500 fwd+bwd",
        f"{base} 4,8,8,1,1500 fwd",
    ]


def test_llava_is_text_and_image_encoder() -> None:
    plan = plan_model(LLAVA, phases=["prefill"], seqlens=[4096])
    assert rows(plan) == [
        "head_dim=128,dtype=float16,causal=true 1,32,8,4096,4096 fwd",
        "head_dim=64,dtype=float16 1,16,16,577,577 fwd",
    ]
    assert plan.jobs[1].why == ("prefill: vision: 24 image encoder layers, 577 positions",)


@pytest.mark.parametrize(
    ("config", "what", "words"),
    [
        pytest.param(DEEPSEEK_V3, "decode over the compressed cache", ("576", "512"), id="mla"),
        pytest.param(
            LLAMA3 | {"layer_types": ["linear_attention"] * 31 + ["full_attention"]},
            "31 decoder layers",
            ("'linear_attention'", "no attention that is built"),
            id="linear",
        ),
        pytest.param(
            DEEPSEEK_V3 | {"index_topk": 2048}, "all layers", ("sparse",), id="deepseek-v3.2"
        ),
        pytest.param(
            LLAMA3 | {"torch_dtype": "float8_e4m3fn"},
            "32 decoder layers",
            ("float8_e4m3fn", "bfloat16"),
            id="dtype",
        ),
        pytest.param(
            LLAVA | {"vision_config": {**VISION, "image_size": None}},
            "vision_config",
            ("vision_config.image_size", "packed", "TOML"),
            id="packed-images",
        ),
        pytest.param(
            LLAVA | {"vision_config": {"model_type": "clip_vision_model"}},
            "vision_config",
            ("vision_config.image_size", "TOML"),
            id="bare-vision",
        ),
        pytest.param(
            LLAMA3 | {"audio_config": WHISPER}, "audio_config", ("TOML list",), id="audio"
        ),
    ],
)
def test_what_is_not_built_is_listed(
    config: dict[str, Any], what: str, words: tuple[str, ...]
) -> None:
    why = skips(plan_model(config))[what]
    for word in words:
        assert word in why


def test_equal_kernels_are_tuned_once() -> None:
    """Windows, scales and caps are numbers at run time; what counts is text and bucket."""
    text = LLAMA3 | {"sliding_window": 4096, "model_type": "mistral"}
    vision = text | {"sliding_window": 4000, "is_causal": False}
    plan = plan_model({"text_config": text}, phases=["prefill"], seqlens=[4096, 4000])
    assert rows(plan) == [f"{SLIDING} 1,32,8,4000,4000 fwd"]
    other = plan_model({"text_config": text, "vision_config": vision}, phases=["prefill"])
    assert "vision_config" in skips(other)


@pytest.mark.parametrize(
    ("gpus", "heads"), [(1, "32,8"), (4, "8,2"), (8, "4,1"), (16, "2,1"), (32, "1,1")]
)
def test_tensor_parallel_divides_heads(gpus: int, heads: str) -> None:
    plan = plan_model(LLAMA3, phases=["prefill"], seqlens=[4096], tensor_parallel=gpus)
    assert rows(plan) == [f"{CAUSAL} 1,{heads},4096,4096 fwd"]


def test_tensor_parallel_that_does_not_divide() -> None:
    with pytest.raises(SpecError, match="3 does not divide 32 .* one of 1, 2, 4, 8, 16, 32"):
        plan_model(LLAMA3, tensor_parallel=3)
    plan = plan_model(LLAVA, phases=["prefill"], seqlens=[512], tensor_parallel=32)
    assert len(plan.jobs) == 1
    assert "does not divide 16" in plan.skipped[0].why


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": None}, ("lacks num_attention_heads", "'llama'", "use_diff=False")),
        ({"hidden_size": None}, ("lacks hidden_size", "TOML")),
        ({"num_hidden_layers": "many"}, ("num_hidden_layers", "'many'")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads", "from 1 to", "got 0")),
        ({"num_key_value_heads": 5}, ("32 query heads do not share 5",)),
        ({"text_config": {"model_type": "llama"}}, ("text_config.num_attention_heads",)),
    ],
)
def test_config_without_its_sizes(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as raised:
        plan_model(LLAMA3 | change)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA3 | {"layer_types": ["full_attention"] * 3}, "3 layer types for 32 layers"),
        (LLAMA3 | {"hidden_size": 4097, "head_dim": None}, "4097 is no multiple of 32 heads"),
        (VISION | {"patch_size": 4096}, "image_size .* is smaller than patch_size 4096"),
    ],
)
def test_sizes_that_contradict_each_other(config: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        plan_model(config)


def test_a_part_keeps_its_own_dtype() -> None:
    config = LLAVA | {"dtype": "float32", "vision_config": VISION | {"torch_dtype": "float16"}}
    plan = plan_model(config, phases=["prefill"], seqlens=[64])
    assert [job.spec.dtype for job in plan.jobs] == ["float32", "float16"]


@pytest.mark.parametrize(
    "config",
    [
        LLAMA3 | {"num_hidden_layers": 24, "layer_types": GEMMA3_TYPES},
        MISTRAL,
        QWEN2,
        GEMMA2,
        BERT,
        T5,
        WHISPER,
        LLAVA,
    ],
    ids=lambda config: config["model_type"],
)
def test_odd_values_are_refused_or_skipped(config: dict[str, Any]) -> None:
    """A config is a stranger's: no value of it ends in a traceback."""
    odd = (None, -1, 0, "x", [], {}, 1.5, True, 10**30, [[1]], {"a": 1}, float("nan"))
    for name in config:
        for value in odd:
            with contextlib.suppress(SpecError):
                plan_model(config | {name: value})


# ---- a TOML list ----------------------------------------------------------------------------

JOB = {"spec": "head_dim=128,causal=true", "workload": "4,32,8,4096,4096"}


def test_list_of_jobs() -> None:
    plan = plan_list(
        {
            "job": [
                JOB | {"direction": "fwd", "why": "the long one"},
                JOB | {"spec": "head_dim=64,key_lengths=true,layout=thd"},
                JOB | {"workload": "4,32,8,4000,4000"},
            ]
        }
    )
    assert rows(plan) == [
        f"{CAUSAL} 4,32,8,4096,4096 fwd",
        f"{CAUSAL} 4,32,8,4000,4000 bwd",
    ]
    assert [job.why for job in plan.jobs] == [("the long one", "job 3"), ("job 3",)]
    assert "not built" in skips(plan)["job 2"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, ("holds no job", "[[job]]")),
        ({"jobs": [JOB]}, ("'jobs'", "'job'")),
        ({"job": JOB}, ("holds no job",)),
        ({"job": [JOB | {"worklod": "1"}]}, ("job 1", "'worklod'", "'workload'", "direction")),
        ({"job": [JOB, {"spec": "head_dim=64"}]}, ("job 2", "workload is missing")),
        ({"job": [JOB | {"workload": [4, 32]}]}, ("job 1", "must be a string")),
        ({"job": [JOB | {"workload": "1,2"}]}, ("job 1", "'1,2'", "B,Hq,Hkv,Sq,Sk")),
        ({"job": [JOB | {"spec": "head_dim=9999"}]}, ("job 1", "9999")),
        ({"job": [JOB | {"direction": "bwdd"}]}, ("job 1", "'bwdd'", "'bwd'")),
    ],
)
def test_wrong_list(content: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as raised:
        plan_list(content)
    for word in words:
        assert word in str(raised.value)


# ---- the command ----------------------------------------------------------------------------


def tune(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def file(folder: Path, content: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def fails(result: Result, code: int, *words: str) -> None:
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "no json", ("is not JSON", "config.json", ".toml")),
        ("config.json", "[1, 2]", ("JSON object", "[1, 2]")),
        ("config.json", "{}", ("lacks num_attention_heads", "TOML list")),
        ("jobs.toml", "[[job", ("is not TOML", "[[job]]")),
        ("jobs.toml", "[[jobs]]\nspec = 'x'", ("'jobs'", "'job'")),
        ("jobs.toml", "", ("holds no job",)),
    ],
)
def test_wrong_file(name: str, content: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = file(tmp_path, content, name)
    fails(tune("--model", path, "--dry-run"), 2, "--model", str(path), *words, "--help")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model none.json", ("cannot read none.json", "config.json, or a TOML list")),
        ("--model .", ("cannot read .", "name config.json")),
        ("", ("neither a SPEC nor --model",)),
        ("head_dim=64", ("--workload is missing", "4,32,8,4096,4096")),
        ("head_dim=64 --model config.json", ("head_dim=64", "config.json", "keep one")),
        ("--model config.json --workload 1,1,1,8,8", ("--workload 1,1,1,8,8", "--seqlen")),
        ("head_dim=64 --seqlen 8", ("--seqlen goes with --model", "--workload")),
        ("head_dim=64 --again", ("--again goes with --model",)),
        ("--model config.json --phase train", ("'train'", "'training'", "prefill, decode")),
        ("--model config.json --seqlen 0", ("--seqlen", "x", "0")),
        ("--model config.json --dtype fp16", ("'fp16'", "float16")),
        ("--model config.json --tensor-parallel 3", ("tensor-parallel 3", "1, 2, 4")),
        ("--model config.json --seqlen 999999999", ("larger than any GPU", "smaller sizes")),
        ("--model jobs.toml --batch 2", ("--batch is for a config.json", "jobs.toml")),
    ],
)
def test_wrong_usage(
    line: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file(tmp_path, LLAMA3)
    file(tmp_path, '[[job]]\nspec = "head_dim=64"\nworkload = "1,1,1,8,8"', "jobs.toml")
    monkeypatch.chdir(tmp_path)
    fails(tune(*line.split()), 2, *words, "attngen tune --help")


def test_empty_model_path() -> None:
    fails(tune("--model", ""), 2, "empty path", "name a file")


@pytest.fixture
def no_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.lookup.shipped", lambda: ())


PREFILL = ("--phase", "prefill,training", "--seqlen", 4096, "--batch", 1, "--gpu", "nvidia_h200")


def store_forward(path: Path) -> None:
    """A measured winner for the forward of LLAMA3's one job in PREFILL."""
    spec = AttentionSpec.parse(CAUSAL)
    bucket = spec_bucket("fwd", spec, Workload(1, 32, 8, 4096, 4096))
    with Store.open(path) as store:
        store.record_winner(replace(MEASURED, key=record_key(spec, bucket, H200)))


@pytest.mark.usefixtures("no_shipped")
def test_dry_run_shows_plan_and_time(tmp_path: Path) -> None:
    path = file(tmp_path, LLAMA3 | {"audio_config": WHISPER})
    store_forward(tmp_path / "user.db")
    result = tune("--model", path, *PREFILL, "--dry-run", "--budget", 30)
    assert (result.exit_code, result.stderr) == (0, "")
    head, job, skipped, total = result.stdout.splitlines()
    assert head.split() == ["spec", "workload", "directions", "stored", "seconds", "why"]
    assert re.split("  +", job) == [
        CAUSAL,
        "1,32,8,4096,4096",
        "fwd+bwd",
        "fwd measured, bwd no",
        "30",
        "training: 32 decoder layers; prefill: 32 decoder layers",
    ]
    assert skipped.startswith("skipped  audio_config: ")
    assert total.startswith("total    30 s for nvidia_h200: 1 to tune, 30 s each")
    again = tune("--model", path, *PREFILL, "--dry-run", "--again")
    assert "total    120 s for nvidia_h200: 2 to tune" in again.stdout


def test_dry_run_as_json_and_one_direction(tmp_path: Path) -> None:
    path = file(tmp_path, LLAMA3)
    line = ("--phase", "training", "--seqlen", 64, "--gpu", "sm_80", "--direction", "bwd")
    result = tune("--model", path, *line, "--dry-run", "--json")
    job, last = (json.loads(line) for line in result.stdout.splitlines())
    assert job["buckets"] == ["bwd-q64-k64-bh4096-g4-w0-p0"]
    assert (job["stored"], job["directions"], job["seconds"]) == ({"bwd": "no"}, ["bwd"], 60.0)
    assert (last["gpu"], last["total_seconds"]) == ("sm_80", 60.0)
    assert last["notes"][0].startswith("batch")


def test_dry_run_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = tune("--model", file(tmp_path, BERT), "--dry-run")
    assert "--gpu NAME shows what is stored" in result.stdout
    fails(tune("--model", file(tmp_path, BERT)), 1, "no GPU", "--gpu nvidia_h200")


def test_dry_run_of_a_spec() -> None:
    result = tune("head_dim=64", "--workload", "1,2,2,8,8", "--gpu", "sm_90", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "total    120 s for sm_90" in result.stdout


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the tuner, which finds no config for head_dim 256; gives what it was asked."""
    calls: list[str] = []

    def search(spec: AttentionSpec, workload: Workload, **named: Any) -> list[Any]:
        calls.append(f"{spec} {workload} {named['direction']}")
        if spec.head_dim == 256:
            raise NoFeasibleConfigError("no fwd config")
        return []

    module = types.ModuleType("attngen.tuner")
    module.tune = search
    module.kept_workers = contextlib.nullcontext
    monkeypatch.setitem(sys.modules, "attngen.tuner", module)
    return calls


@pytest.mark.usefixtures("no_shipped")
def test_model_is_tuned_job_by_job_and_what_is_stored_is_passed_over(
    tmp_path: Path, tuned: list[str]
) -> None:
    path = file(tmp_path, LLAMA3)
    store_forward(tmp_path / "user.db")
    result = tune("--model", path, *PREFILL, "--seqlen", 1024)
    assert result.exit_code == 0, result.output
    assert tuned == [f"{CAUSAL} 1,32,8,1024,1024 both", f"{CAUSAL} 1,32,8,4096,4096 bwd"]
    assert "job 2 of 2: " in result.stderr
    result = tune("--model", path, *PREFILL, "--direction", "fwd")
    assert "is stored; --again tunes it again" in result.stderr
    assert len(tuned) == 2
    tune("--model", path, *PREFILL, "--direction", "fwd", "--again")
    assert tuned[2:] == [f"{CAUSAL} 1,32,8,4096,4096 fwd"]


def test_job_without_a_config_does_not_stop_the_others(tmp_path: Path, tuned: list[str]) -> None:
    path = file(tmp_path, GEMMA2 | {"vision_config": VISION})
    line = ("--phase", "prefill", "--seqlen", 512, "--gpu", "sm_80")
    result = tune("--model", path, *line)
    assert (result.exit_code, len(tuned)) == (1, 3)
    assert "no fwd config" in result.stderr
    assert "2 of 3 jobs have no winner" in result.stderr


def test_chunked_layers_are_planned() -> None:
    """Llama 4: three of four layers attend within chunks, and those shorter than one are causal."""
    plan = plan_model(LLAMA3 | {"attention_chunk_size": 8192}, batches=(1,), seqlens=(16384,))
    specs = {job.spec.key for job in plan.jobs}
    assert "head_dim=128,dtype=bfloat16,causal=true,chunk=8192" in specs


def test_nothing_to_tune_is_a_failure(tmp_path: Path, tuned: list[str]) -> None:
    config = LLAMA3 | {"layer_types": ["linear_attention"] * 32}
    result = tune("--model", file(tmp_path, config), "--gpu", "sm_80")
    assert (result.exit_code, tuned) == (1, [])
    assert "linear_attention" in result.stderr
    assert "nothing of this model can be tuned" in result.stderr


def test_interrupt_keeps_what_is_done(
    tmp_path: Path, tuned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["attngen.tuner"], "tune", interrupted)
    result = tune("--model", file(tmp_path, LLAMA3), "--gpu", "sm_80")
    assert result.exit_code == 130
    assert "run the same command to go on" in result.stderr


STORED_SPECS = [
    AttentionSpec(head_dim=64, causal=True),
    AttentionSpec(head_dim=64, window=(500, None)),
    AttentionSpec(head_dim=64, window=(100, 200), softcap=9.0),
    AttentionSpec(head_dim=64, causal=True, window=(1023, None), dropout_p=0.1),
]


@pytest.mark.parametrize("spec", STORED_SPECS, ids=str)
def test_a_stored_key_becomes_a_job_of_that_very_key(spec: AttentionSpec) -> None:
    for group, batch, kv, rows, keys in itertools.product(
        (1, 3, 7, 8), (1, 3), (1, 8), (1, 100, 4096), (5, 4096)
    ):
        for direction in DIRECTIONS:
            bucket = spec_bucket(direction, spec, Workload(batch, group * kv, kv, rows, keys))
            (job,) = plan_stored([(spec.text_key, bucket.key)]).jobs
            assert job.spec.text_key == spec.text_key
            assert spec_bucket(direction, job.spec, job.workload) == bucket
            assert job.directions == (direction,)


def test_a_stored_record_of_all_sizes_is_skipped_and_said() -> None:
    spec = AttentionSpec(head_dim=64, batch_invariant=True)
    bucket = spec_bucket("fwd", spec, Workload(1, 1, 1, 8, 8))
    plan = plan_stored([(spec.text_key, bucket.key)])
    assert not plan.jobs
    (skipped,) = plan.skipped
    assert (skipped.what, skipped.spec) == (bucket.key, spec.text_key)


@pytest.mark.parametrize(
    ("text_key", "bucket", "why"),
    [
        ("gibberish", "fwd-q8-k8-bh8-g1-w0-p0", "has no '='"),
        ("head_dim=64,key_lengths=true,layout=thd", "fwd-q8-k8-bh8-g1-w0-p0", "key_lengths"),
        ("head_dim=64", "fwd-q8", "is no bucket key"),
        ("head_dim=64", "fwd-q8-k8-bh8-g0-w0-p0", "no call has this bucket"),
        ("head_dim=64", f"fwd-q{'9' * 40}-k8-bh8-g1-w0-p0", "no call has this bucket"),
    ],
)
def test_an_odd_stored_record_is_skipped_and_named(text_key: str, bucket: str, why: str) -> None:
    good = ("head_dim=64", "fwd-q8-k8-bh8-g1-w0-p0")
    plan = plan_stored([(text_key, bucket), good])
    assert [job.spec.head_dim for job in plan.jobs] == [64]
    (skipped,) = plan.skipped
    assert (skipped.what, skipped.spec) == (bucket, text_key)
    assert why in skipped.why


def test_the_tuning_parent_does_not_look_at_the_gpu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "current", lambda: pytest.fail("a child asks"))
    options._here.cache_clear()
    assert options.device_to_tune(None) is gpus.INTERPRETER


def test_revalidate_needs_a_gpu(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["tune", "--revalidate", "--db", str(tmp_path / "t.db")])
    assert result.exit_code == 1
    assert "--gpu nvidia_h200" in result.stderr


def test_revalidate_without_a_spec_takes_what_is_stored(tmp_path: Path) -> None:
    db = tmp_path / "tuning.db"
    with Store.open(db) as store:
        store.record_winner(MEASURED)
    arguments = ["tune", "--revalidate", "--db", str(db), "--gpu"]
    shown = CliRunner().invoke(main, [*arguments, "nvidia_h200", "--dry-run", "--json"])
    jobs = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(j["text_key"], j["buckets"]) for j in jobs[:-1]] == [
        (MEASURED.key.text_key, [MEASURED.key.bucket])
    ]
    nothing = CliRunner().invoke(main, [*arguments, "nvidia_a100"])
    assert nothing.exit_code == 1
    assert f"{db} holds no winner for nvidia_a100" in nothing.stderr


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_stored_is_sought_where_decode_has_it(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attngen import lookup as lookup_module
    from attngen.cli import model
    from attngen.model_plan import PlannedJob

    sought: list[Any] = []

    def look_up(store: Any, *asked: Any) -> Any:
        sought.extend(asked[:2])
        return lookup_module.Found(None, "default", [])

    monkeypatch.setattr(lookup_module, "lookup", look_up)
    job = PlannedJob(
        AttentionSpec(head_dim=64, causal=causal), Workload(1, 8, 2, 1, 4096), ("fwd",)
    )
    store: Any = None
    model._held(job, "fwd", gpus.by_name("nvidia_h200"), store, True)
    key, bucket = sought
    assert key.text_key == AttentionSpec(head_dim=64).text_key
    assert bucket.key == key.bucket and bucket.direction == "decode"


def test_a_decode_has_one_place_whatever_its_order() -> None:
    """One job, one bucket and one place of a benchmark, with and without causal order."""
    from attngen import model_plan
    from attngen.cli import model
    from attngen.report.bench_lines import BenchLine

    workload, bare = Workload(1, 8, 2, 1, 4096), AttentionSpec(head_dim=64)
    specs = [bare, AttentionSpec(head_dim=64, causal=True)]
    jobs = model_plan._Jobs()
    for spec in specs:
        jobs.add(spec, workload, ("fwd",), "")
        (job,) = jobs.all()
        assert "decode" in model._job_dict(job, {}, 1.0)["buckets"][0]
        about = {"gpu": "NVIDIA H200"}
        line = BenchLine(1, "bench.jsonl:1", about, spec, workload, "fwd", 3, ())
        key = record_key(bare, spec_bucket("decode", bare, workload), gpus.by_name("nvidia_h200"))
        assert line.place_key == ("nvidia_h200", key.text_key, key.bucket)
