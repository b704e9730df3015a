"""AttentionSpec and Workload: validation, keys, round trips, buckets."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from typing import Any

import pytest
import torch

from attngen.errors import SpecError, UnsupportedSpecError
from attngen.head_dim import split_head_dim
from attngen.spec import FIELDS, AttentionSpec
from attngen.workload import Bucket, Workload, bucket, ceil_pow2, spec_bucket

SPECS = [
    AttentionSpec(head_dim=head_dim, **fields)
    for head_dim, fields in itertools.product(
        (1, 96, 128),
        (
            {},
            {"causal": True},
            {"causal": "top_left", "dtype": "float16"},
            {"window": (1023, 0), "causal": "bottom_right"},
            {"window": (None, 7), "head_dim_v": 64},
            {"window": (5, None), "softcap": 30, "layout": "bshd"},
            {"dropout_p": 0.1, "softmax_scale": 0.125, "deterministic": True},
            {"dtype": "float32", "precision": "tf32", "deterministic": False},
            {"batch_invariant": True, "softmax_scale": -1e-9, "dropout_p": 1},
        ),
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_spec_round_trips(spec: AttentionSpec) -> None:
    for again in (
        AttentionSpec.parse(spec.key),
        AttentionSpec.from_json(spec.to_json()),
        pickle.loads(pickle.dumps(spec)),
        AttentionSpec(**spec.as_dict()),
    ):
        assert again == spec and hash(again) == hash(spec) and again.key == spec.key
    assert AttentionSpec.parse(spec.text_key).text == spec.text
    assert AttentionSpec.parse(spec.text_key).text_key == spec.text_key
    assert json.loads(spec.to_json())["head_dim"] == spec.head_dim


def test_spec_is_frozen_and_keyword_only() -> None:
    spec = AttentionSpec(head_dim=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.head_dim = 32
    with pytest.raises(TypeError):
        AttentionSpec(64)


def test_spec_settles_what_is_left_open() -> None:
    spec = AttentionSpec(head_dim=64, window=(None, None), dropout_p=0)
    assert (spec.head_dim_v, spec.window, spec.dtype) == (64, None, "bfloat16")
    assert spec == AttentionSpec(head_dim=64)
    assert spec.key == "head_dim=64,dtype=bfloat16"


def test_spec_accepts_torch_dtypes() -> None:
    assert AttentionSpec(head_dim=8, dtype=torch.float16).dtype == "float16"


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: (fields, the value it names, what is allowed or the next step)
    "head-dim-0": ({"head_dim": 0}, "0", "from 1 to 576"),
    "head-dim-600": ({"head_dim": 600}, "600", "split the heads"),
    "head-dim-bool": ({"head_dim": True}, "True", "from 1 to 576"),
    "head-dim-float": ({"head_dim": 64.0}, "64.0", "must be an int"),
    "head-dim-v": ({"head_dim_v": -1}, "-1", "head_dim_v must be an int from 1"),
    "dtype": ({"dtype": "bf16"}, "'bf16'", "did you mean 'bfloat16'?"),
    "dtype-int8": ({"dtype": "int8"}, "'int8'", "'float16', 'bfloat16', 'float32'"),
    "causal": ({"causal": "lower_right"}, "'lower_right'", "bottom_right"),
    "causal-int": ({"causal": 1}, "1", "False, True"),
    "window-negative": ({"window": (-1, -3)}, "-1", "the only way to say 'no limit'"),
    "window-int": ({"window": 4}, "4", "(W - 1, 0)"),
    "window-float": ({"window": (4.0, 0)}, "4.0", "an int from 0 up"),
    "dropout": ({"dropout_p": 1.01}, "1.01", "from 0 to 1"),
    "dropout-nan": ({"dropout_p": float("nan")}, "nan", "from 0 to 1"),
    "scale-inf": ({"softmax_scale": float("inf")}, "inf", "finite"),
    "softcap": ({"softcap": 0}, "0.0", "None switches it off"),
    "layout": ({"layout": "bhds"}, "'bhds'", "'bhsd', 'bshd', 'thd'"),
    "precision": ({"precision": "tf-32"}, "'tf-32'", "did you mean 'tf32'?"),
    "deterministic": ({"deterministic": "yes"}, "'yes'", "None, True or False"),
    "batch-invariant": ({"batch_invariant": 1}, "1", "True or False"),
    "unknown": ({"headdim_v": 64}, "'headdim_v'", "did you mean 'head_dim_v'?"),
    "unknown-far": ({"zzz": 1}, "'zzz'", "fields: head_dim, head_dim_v"),
}


@pytest.mark.parametrize(("fields", "value", "step"), BAD.values(), ids=BAD)
def test_bad_field_names_the_value_and_the_next_step(
    fields: dict[str, Any], value: str, step: str
) -> None:
    with pytest.raises(ValueError) as raised:
        AttentionSpec(**{"head_dim": 64, **fields})
    assert isinstance(raised.value, SpecError)
    assert value in str(raised.value) and step in str(raised.value), raised.value


BAD_LINES = {
    "no-equals": ("head_dim=64,causal", "'causal' has no '='"),
    "twice": ("head_dim=64,head_dim=32", "given twice"),
    "unknown": ("head_dim=64,casual=true", "did you mean 'causal'?"),
    "no-head-dim": ("dtype=float16", "lacks head_dim"),
    "empty": ("", "lacks head_dim"),
    "window": ("head_dim=64,window=5", "LEFT:RIGHT"),
    "not-a-number": ("head_dim=big", "'big'"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_line_says_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        AttentionSpec.parse(line)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("{", "write it with spec.to_json()"),
        ("[1]", "got [1]; write it with spec.to_json()"),
        ('{"head_dim": 64, "x": 1}', "fields: head_dim"),
    ],
)
def test_bad_json_is_a_spec_error(text: str, step: str) -> None:
    with pytest.raises(SpecError) as raised:
        AttentionSpec.from_json(text)
    assert step in str(raised.value)


def test_unsupported_spec_lists_every_reason() -> None:
    with pytest.raises(UnsupportedSpecError) as raised:
        AttentionSpec(head_dim=64, paged=True, alibi=True, layout="thd", bias=True)
    assert len(raised.value.reasons) == 2
    for piece in ("paged", 'layout="thd"'):
        assert piece in str(raised.value)


# ---- the text key ---------------------------------------------------------------------------

# Another value of each field, and whether a kernel's text may see the change.
BASE = {
    "head_dim": 64,
    "dtype": "float32",
    "window": (5, 3),
    "dropout_p": 0.1,
    "softcap": 20.0,
    "deterministic": False,
}
CHANGES: list[tuple[str, Any, bool]] = [
    ("head_dim", 32, True),
    ("head_dim_v", 32, True),
    ("dtype", "float16", True),
    ("causal", True, True),
    ("window", (9, 7), False),
    ("window", (None, 3), True),
    ("window", (5, None), True),
    ("window", None, True),
    ("dropout_p", 0.7, False),
    ("dropout_p", 0.0, True),
    ("chunk", 64, True),
    ("softmax_scale", 0.3, False),
    ("softcap", 5.0, False),
    ("softcap", None, True),
    ("layout", "bshd", False),
    ("precision", "tf32", True),
    ("deterministic", True, True),
    ("deterministic", None, False),
    ("batch_invariant", True, True),
    ("attn_mask", True, True),
    ("bias", True, True),
    ("alibi", True, True),
    ("sinks", True, True),
    ("documents", True, True),
    ("tree_mask", True, True),
    ("aux", ("entropy",), True),
    ("score_mod", "mul score 2", True),
    ("mask_mod", "ge q k", True),
]


@pytest.mark.parametrize(
    ("field", "value", "seen"), CHANGES, ids=[f"{field}={value}" for field, value, _ in CHANGES]
)
def test_text_key_changes_only_with_what_the_text_may_see(
    field: str, value: Any, seen: bool
) -> None:
    base = AttentionSpec(**BASE)
    changed = AttentionSpec(**{**BASE, field: value})
    assert changed.key != base.key
    assert (changed.text_key != base.text_key) is seen


def test_every_built_field_is_among_the_changes() -> None:
    """A new field must say whether the text sees it."""
    with_dtype = {"fp8_scale"}  # cannot change alone: test_fp8_attention
    with_causal = {"prefix_lm"}  # nor this: test_structured_masks
    with_mask = {"block_map"}  # nor this: test_block_map
    without_dropout = {"paged", "key_lengths", "shared_kv"}  # which BASE has: test_decode
    in_pairs = {"kv_dtype", "kv_scale"}  # neither alone: test_kv_cache
    apart = without_dropout | in_pairs | with_dtype | with_causal | with_mask
    assert {field for field, *_ in CHANGES} == set(FIELDS) - apart


def test_causal_alignment_is_a_run_time_number() -> None:
    keys = {AttentionSpec(head_dim=8, causal=c).text_key for c in (True, "top_left")}
    assert keys == {"head_dim=8,dtype=bfloat16,causal=true"}


def test_argument_lists_name_what_the_spec_needs() -> None:
    plain = AttentionSpec(head_dim=8)
    assert (plain.scalar_args, plain.int_args) == (("softmax_scale",), ("partial",))
    assert (plain.tensor_args, plain.outputs) == ((), ("out", "lse"))
    full = AttentionSpec(head_dim=8, causal=True, window=(3, 0), dropout_p=0.1, softcap=2.0)
    assert full.tensor_args == ("dropout_seed",)
    assert full.scalar_args == ("softmax_scale", "softcap", "dropout_p")
    assert "window_left" in full.int_args and "window_right" not in full.int_args
    scores = AttentionSpec(
        head_dim=8, dropout_p=0.1, attn_mask=True, bias=True, alibi=True, sinks=True
    )
    assert scores.tensor_args == ("dropout_seed", "attn_mask", "bias", "alibi_slopes", "sinks")
    assert scores.gradient_args == ("bias", "alibi_slopes", "sinks")
    assert "bottom_right" in scores.int_args  # distances count from aligned rows
    assert "bottom_right" not in AttentionSpec(head_dim=8, attn_mask=True, bias=True).int_args


# ---- head dims ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "widths"),
    [(1, [16]), (40, [32, 16]), (72, [64, 16]), (96, [64, 32]), (128, [128]), (192, [128, 64])],
)
def test_head_dim_is_cut_into_known_parts(dim: int, widths: list[int]) -> None:
    assert [part.width for part in split_head_dim(dim)] == widths


def test_every_head_dim_is_covered_by_at_most_three_parts() -> None:
    for dim in range(1, 513):
        parts = split_head_dim(dim)
        ends = [part.start + part.width for part in parts]
        assert [part.start for part in parts] == [0, *ends[:-1]]
        assert len(parts) <= 3 and ends[-1] >= dim > ends[-1] - parts[-1].width
        assert all(part.width >= 16 and part.width & (part.width - 1) == 0 for part in parts)
        assert [part.padded for part in parts] == [end > dim for end in ends]
        assert ends[-1] <= 1 << max(4, (dim - 1).bit_length())  # never above the next power of 2


# ---- workloads and buckets ------------------------------------------------------------------


def test_workload_round_trips_and_refuses() -> None:
    assert str(Workload.parse("4,32,8,4096,1024")) == "4,32,8,4096,1024"
    assert Workload(4, 32, 8, 1, 1).group_size == 4
    for text, message in (("4,32,8", "five ints"), ("a,b,c,d,e", "five ints")):
        with pytest.raises(SpecError, match=message):
            Workload.parse(text)
    with pytest.raises(
        SpecError, match="num_heads_kv must be at least 1, got 0, with num_heads_q=4"
    ):
        Workload(1, 4, 0, 1, 1)
    with pytest.raises(SpecError, match="multiple of num_heads_kv, got 9 and 7"):
        Workload(1, 9, 7, 4, 4)
    with pytest.raises(SpecError, match="batch must be an int from 0 up, got -1"):
        Workload(-1, 1, 1, 1, 1)


def test_bucket_rounds_up_to_powers_of_two_but_keeps_the_group_exact() -> None:
    found = bucket("fwd", Workload(3, 12, 4, 1000, 1025))
    assert found == Bucket("fwd", 1024, 2048, 64, 3, 0)
    assert Bucket.parse(found.key) == found
    assert [ceil_pow2(n) for n in (0, 1, 2, 3, 1024, 1025)] == [0, 1, 2, 4, 1024, 2048]


def test_bucket_of_a_window_is_what_it_lets_a_query_see() -> None:
    sizes = Workload(1, 8, 8, 4096, 4096)
    assert bucket("fwd", sizes, (1023, 0)).window == 1024
    assert bucket("fwd", sizes, (None, 0)).window == 4096
    assert bucket("fwd", sizes, (100000, 0)).window == 4096
    causal = AttentionSpec(head_dim=64, causal=True)
    assert spec_bucket("fwd", causal, sizes).window == 0
    window = AttentionSpec(head_dim=64, causal=True, window=(127, 5))
    assert spec_bucket("bwd", window, sizes).window == 128


def test_batch_invariant_has_one_bucket_for_all_sizes() -> None:
    spec = AttentionSpec(head_dim=64, batch_invariant=True)
    sizes = [Workload(1, 8, 8, 16, 16), Workload(64, 32, 8, 1, 9999)]
    assert len({spec_bucket("fwd", spec, size) for size in sizes}) == 1


@pytest.mark.parametrize("key", ["", "fwd-q1", "sideways-q1-k1-bh1-g1-w0-p0", "fwd-q-k-b-g-w-p"])
def test_bad_bucket_key_is_a_spec_error(key: str) -> None:
    with pytest.raises(SpecError):
        Bucket.parse(key)
