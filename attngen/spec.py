"""AttentionSpec: *what* is computed.

Imports neither torch nor triton. Numbers that a kernel takes at run time (softmax_scale, softcap,
dropout_p, window sizes) are fields here but never reach the emitted text: `spec.text` forgets
them, and `spec.text_key` is all that a template, a tuning record or the torch op may see.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from attngen.errors import SpecError, UnsupportedSpecError
from attngen.head_dim import Part, split_behind, split_head_dim
from attngen.score_functions import Function, function_text, read
from attngen.score_nodes import FUNCTIONS, Aux
from attngen.spec_line import changed, read_line, written
from attngen.spec_rules import check, refuse_unknown, side_outputs, unbuilt
from attngen.values import cap_number, plain, probability, scale_number, shown, window_sides

if TYPE_CHECKING:
    from attngen.workload import Direction

SCALE_ROWS = 128
"""Rows that share a scale with fp8_scale="block"."""
MAP_TILE = 128
"""Rows and keys of a tile of a block map."""
DESCALES = ("q_descale", "k_descale", "v_descale")
KV_DESCALES = ("k_descale", "v_descale")
GRADIENT_ARGS = ("bias", "alibi_slopes", "sinks")
PACKED_ARGS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
"""Of packed sequences; a call may leave the last two out."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one attention computes; frozen and hashable.

    `out = dropout(softmax(mask(score_mod(softcap(softmax_scale * q @ k.T) + bias - slope * |i -
    j|)))) @ v`, per head.

    Args:
        head_dim: columns of q and k, 1 to 576 (above 256 where shared memory allows).
        head_dim_v: columns of v and out, 1 to 512; default `head_dim`.
        dtype: "float16", "bfloat16" or "float32" (torch dtypes are accepted). "float8_e4m3fn" or
            "float8_e5m2", together with fp8_scale: inputs as `attngen.quantize` makes them, and a
            bfloat16 out.
        causal: False; True or "bottom_right" (query i sees key j iff j <= i + Sk - Sq);
            "top_left" (j <= i, what SDPA's `is_causal` means).
        window: (left, right), inclusive: query i sees keys from i - left to i + right, in aligned
            positions; None is an open side, and so is, in effect, the most that a side can be,
            2**30. `causal` closes the right side.
        chunk: n makes attention local to chunks of n positions: query i sees key j only if
            i // n == j // n, in aligned positions (Llama 4). Causal masks and windows apply too.
        paged: calls take block_table (batch, max_pages) and seqused_k (batch,): k and v are caches
            of pages, (pages, page_size, num_heads_kv, dim) in any layout, and entry n of a batch
            row names the page of its keys from n * page_size on. Without gradients. With layout
            "thd" queries are packed, and a batch row is a sequence of them.
        key_lengths: calls take seqused_k (batch,): how many keys of each batch row are used, from
            the first on; the others are not read, whatever they hold. Queries are aligned with the
            last used key. Without gradients; packed sequences take seqused_k anyway.
        shared_kv: v is k's first head_dim_v columns, `k[..., :head_dim_v]` of the very same memory,
            which kernels then load once (multi-head latent attention in its absorbed form: 576 and
            512). Each call is looked at, whatever its spec says, and one whose v lies elsewhere is
            served as without: the field is for tuning, where there is no call to look at.
        kv_dtype: "float8_e4m3fn" or "int8": k and v are stored so, q and out in `dtype`, float16 or
            bfloat16, and calls take k_descale and v_descale; kernels multiply in registers. Dense,
            with key_lengths or paged. Without gradients.
        kv_scale: what shares a scale then: "tensor" all of k, or of v; "head" one head of a page,
            or of a dense batch row; "key" one key of one head.
        prefix_lm: calls take prefix_lens (batch,), and a query also sees the keys at positions
            below its batch row's: key j iff j <= max(i, prefix_lens[b] - 1). Needs `causal`. A
            window's left side and chunks apply to those keys, too.
        documents: calls take doc_ids_q (batch, seqlen_q) and doc_ids_k (batch, seqlen_k), and query
            i sees key j only if their ids are equal. Tiles of keys whose ids do not overlap those
            of the queries are not read; with sorted ids, that is all other documents.
        tree_mask: calls take tree_mask (n, n) or (batch, n, n), bool: the last n rows of q and k
            are the nodes of a tree (of draft tokens), and node i sees node j iff tree_mask[i, j],
            whatever `causal` says, beside all keys before the tree. Rows before the tree see what
            they see without one. Windows and chunks apply by positions, and prefixes to nodes, too.
        dropout_p: probability, 0 to 1, of dropping an entry of the softmax matrix.
        softmax_scale: multiplies q @ k.T; default 1 / sqrt(head_dim). Zero and negative are legal;
            its size, else, is one that float32 holds.
        softcap: c > 0 turns a score s into c * tanh(s / c), before biases and masks.
        alibi: calls take alibi_slopes (num_heads_q,) or (batch, num_heads_q), and a score loses
            slope * |i - j|, in aligned positions (ALiBi, arXiv 2108.12409).
        bias: calls take bias, broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k), and add it
            to the scores; -inf hides a key.
        attn_mask: calls take attn_mask, bool, of such a shape; False hides a key.
        sinks: calls take sinks (num_heads_q,) or (batch, num_heads_q), and a row's softmax
            denominator gains exp(sink); its lse does not.
        score_mod: score_mod(score, b, h, q_idx, k_idx), as FlexAttention has it: what becomes of
            each score after softcap, bias and ALiBi. Arguments are tensors of no dims: a float32
            score, and int32 numbers of batch row (or packed sequence), query head, query and key,
            counted in the whole sequence (q_start, batch_start and the rest move them; bottom-right
            alignment does not). It returns a float; -inf hides the key. The function is called
            once, here; the field then holds what it computes as text, so that equal functions make
            equal specs, and such a text is taken in its place. Python numbers become part of it.
            Tensors it reads, each by one index a dim, are inputs: those seen here, unless a call
            has aux_tensors=. A negative index counts from the end; one out of range reads the
            nearest entry. Differentiable, floating tensors included. templates/README.md lists the
            operators.
        mask_mod: mask_mod(b, h, q_idx, k_idx), likewise; returns a bool, and False hides the key.
        block_map: calls take block_map, which `attngen.make_block_map` makes once: which tiles of
            scores mask_mod, with `causal`, `window` and `chunk`, leaves empty, and which it leaves
            whole. Empty ones are never read, and whole ones computed without a mask.
        layout: "bhsd" (batch, heads, seqlen, dim), "bshd" (batch, seqlen, heads, dim), or "thd":
            packed sequences, q (total_q, heads, dim) and so on, whose calls take cu_seqlens_q and
            cu_seqlens_k. Positions, masks and alignments are those of each sequence.
        fp8_scale: what shares a scale of FP8 inputs: "tensor" all of it; "head" one key/value head
            of one batch row, with the query heads that read it; "block" 128 rows of that.
        precision: "ieee" or "tf32"; how float32 inputs are multiplied.
        deterministic: True: same input, same bits, backward too. False admits atomic adds.
            None: `torch.are_deterministic_algorithms_enabled()` at `attngen.compile`.
        batch_invariant: one config for all sizes, so that a row's bits do not depend on what else
            is in the batch.
        aux: side outputs of the forward: "max_logit", "col_sum", "entropy". A call's return_aux
            says which, and is these where it is left out.

    Raises:
        SpecError: a value is out of range or a field is unknown.
        UnsupportedSpecError: a legal combination that is not built; lists every reason.
    """

    head_dim: int
    head_dim_v: int = None  # type: ignore[assignment]  # None means head_dim; an int once made
    dtype: str = "bfloat16"
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: bool = False
    attn_mask: bool = False
    sinks: bool = False
    score_mod: Any = None
    mask_mod: Any = None
    layout: str = "bhsd"
    paged: bool = False
    key_lengths: bool = False
    shared_kv: bool = False
    kv_dtype: str | None = None
    kv_scale: str | None = None
    prefix_lm: bool = False
    documents: bool = False
    tree_mask: bool = False
    block_map: bool = False
    chunk: int | None = None
    fp8_scale: str | None = None
    precision: str = "ieee"
    deterministic: bool | None = None
    batch_invariant: bool = False
    aux: tuple[str, ...] = ()

    def __new__(cls, *args: Any, **named: Any) -> AttentionSpec:
        if args:
            raise _PositionalError(
                f"AttentionSpec takes its fields by name, got {shown(args[0])}; write "
                "AttentionSpec(head_dim=128, causal=True)"
            )
        refuse_unknown(named, FIELDS)
        if "head_dim" not in named:
            raise SpecError("the spec lacks head_dim; write AttentionSpec(head_dim=128)")
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return AttentionSpec.parse, (self.key,)

    def __copy__(self) -> AttentionSpec:
        return self

    def __deepcopy__(self, memo: Any) -> AttentionSpec:
        return self  # with the tensors of its functions, as functions are copied

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # the class is frozen

        for name in FIELDS:
            value = getattr(self, name)
            put(name, function_text(name, value) if name in FUNCTIONS else plain(value))
        put("dtype", str(self.dtype).removeprefix("torch."))
        if self.kv_dtype is not None:
            put("kv_dtype", str(self.kv_dtype).removeprefix("torch."))
        if self.head_dim_v is None:
            put("head_dim_v", self.head_dim)
        sides = window_sides(self.window)
        put("window", None if sides == (None, None) else sides)
        put("dropout_p", probability("dropout_p", self.dropout_p))
        if self.softmax_scale is not None:
            put("softmax_scale", scale_number("softmax_scale", self.softmax_scale))
        if self.softcap is not None:
            put("softcap", cap_number(self.softcap, self.softmax_scale))
        put("aux", side_outputs(self.aux))
        if self.paged is True:  # which has lengths anyway
            put("key_lengths", False if self.key_lengths is True else self.key_lengths)
        check(self)
        if reasons := unbuilt(self):
            raise UnsupportedSpecError(reasons)

    @property
    def is_causal(self) -> bool:
        return self.causal is not False

    @property
    def has_window_left(self) -> bool:
        return self.window is not None and self.window[0] is not None

    @property
    def has_window_right(self) -> bool:
        """A right side other than the one `causal` closes."""
        return self.window is not None and self.window[1] is not None and not self.is_causal

    @property
    def closes_right(self) -> bool:
        """A query sees no key beyond some position."""
        return self.is_causal or self.has_window_right or self.has_chunk or self.tree_mask

    @property
    def closes_left(self) -> bool:
        """A query sees no key before some position."""
        return self.has_window_left or self.has_chunk

    @property
    def has_chunk(self) -> bool:
        """Queries see keys of their own chunk alone."""
        return self.chunk is not None

    @property
    def moves_limits(self) -> bool:
        """Where a query's keys end does not follow from its position alone."""
        return self.prefix_lm or self.tree_mask

    @property
    def has_lengths(self) -> bool:
        """Each batch row says on the device how many keys it uses."""
        return self.paged or self.key_lengths

    @property
    def has_masks(self) -> bool:
        """Which keys a query sees follows from a tensor that has no entry for each score."""
        return self.moves_limits or self.documents

    @property
    def has_positions(self) -> bool:
        """Which keys a query sees depends on where it stands."""
        return self.closes_right or self.closes_left

    @property
    def aligns_rows(self) -> bool:
        """Positions of queries and keys are compared, so that their alignment counts."""
        return self.has_positions or self.alibi

    @property
    def places_rows(self) -> bool:
        """A kernel must know where its rows stand in the whole sequence."""
        return self.aligns_rows or self.places_heads

    @property
    def places_heads(self) -> bool:
        """A kernel must know which head of which batch row it computes."""
        return self.has_dropout or self.has_functions

    @property
    def has_functions(self) -> bool:
        """Something is computed of each score, or of where it stands."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def score_function(self) -> Function | None:
        """`score_mod`, read."""
        return None if self.score_mod is None else read("score_mod", str(self.score_mod))

    @property
    def mask_function(self) -> Function | None:
        """`mask_mod`, read."""
        return None if self.mask_mod is None else read("mask_mod", str(self.mask_mod))

    @property
    def function_tensors(self) -> tuple[Aux, ...]:
        """The tensors that functions read: score_mod's, then mask_mod's."""
        functions = (self.score_function, self.mask_function)
        return tuple(aux for each in functions if each is not None for aux in each.aux)

    @property
    def captured(self) -> tuple[Any, ...] | None:
        """The tensors that functions brought along when this spec was made, in the order of
        `function_tensors`; None if it was read from a text."""
        found: list[Any] = []
        for text, each in (
            (self.score_mod, self.score_function),
            (self.mask_mod, self.mask_function),
        ):
            if each is not None and each.aux:
                found += getattr(text, "tensors", ())
        return tuple(found) if len(found) == len(self.function_tensors) else None

    @property
    def aux_args(self) -> tuple[str, ...]:
        """Names of those tensors among `tensor_args`."""
        return tuple(f"aux{n}" for n in range(len(self.function_tensors)))

    @property
    def learnt_aux(self) -> tuple[str, ...]:
        """Names of the tensors of score_mod that have a gradient."""
        function = self.score_function
        return () if function is None else tuple(f"aux{n}" for n in function.learnt)

    @property
    def has_score_entries(self) -> bool:
        """Something with an entry for each score is read: a mask or a bias."""
        return self.attn_mask or self.bias

    @property
    def has_score_tiles(self) -> bool:
        """Any score of any tile may be hidden, by a mask, a bias or a function."""
        return self.has_score_entries or self.has_functions

    @property
    def has_score_terms(self) -> bool:
        """Something stands between a score and the softmax."""
        return self.has_score_tiles or self.alibi

    @property
    def hides_keys(self) -> bool:
        """Some rows may not see some keys."""
        return self.has_positions or self.has_score_tiles or self.documents

    @property
    def adds_to_scores(self) -> bool:
        """Something is added to scores, or made of them, after the softcap."""
        return self.bias or self.alibi or self.score_mod is not None

    @property
    def has_dropout(self) -> bool:
        return self.dropout_p > 0

    @property
    def has_softcap(self) -> bool:
        return self.softcap is not None

    @property
    def is_packed(self) -> bool:
        """Sequences lie one behind another, and offsets on the device say where each begins."""
        return self.layout == "thd" and not self.has_lengths

    @property
    def packs_queries(self) -> bool:
        """The same of queries alone: keys are in pages."""
        return self.layout == "thd" and self.has_lengths

    @property
    def of_sequence(self) -> AttentionSpec:
        """The spec of one sequence of a packed one."""
        return replace(self, layout="bhsd") if self.is_packed else self

    @property
    def is_fp8(self) -> bool:
        """Inputs are FP8, each with scales of its own; out is not."""
        return self.fp8_scale is not None

    @property
    def has_block_scales(self) -> bool:
        """Each 128 rows of an FP8 input have a scale of their own."""
        return self.fp8_scale == "block"

    @property
    def is_quantized(self) -> bool:
        """k and v are stored in 8 bits, with scales; q is not."""
        return self.kv_dtype is not None

    @property
    def dequantized(self) -> AttentionSpec:
        """The spec of the same inputs once their scales are multiplied in: bfloat16 for FP8."""
        return replace(self, dtype="bfloat16", fp8_scale=None) if self.is_fp8 else self

    def served_as(self, direction: Direction) -> AttentionSpec:
        """The spec whose kernels serve a direction: a backward takes FP8 inputs dequantised, and
        has no side outputs."""
        if direction in ("fwd", "decode"):
            return self
        return replace(self.dequantized, aux=()) if self.aux else self.dequantized

    @property
    def tuned(self) -> AttentionSpec:
        """The spec whose records serve this one: of packed queries over pages, that of others."""
        return replace(self, layout="bhsd") if self.packs_queries else self

    @property
    def out_dtype(self) -> str:
        return self.dequantized.dtype

    @property
    def qk_parts(self) -> tuple[Part, ...]:
        if self.shared_kv:
            return split_behind(self.v_parts, self.head_dim)
        return split_head_dim(self.head_dim)

    @property
    def v_parts(self) -> tuple[Part, ...]:
        return split_head_dim(self.head_dim_v)

    @property
    def element_size(self) -> int:
        """Bytes of one element of q."""
        return {"float32": 4, "float16": 2, "bfloat16": 2}.get(self.dtype, 1)

    @property
    def is_exact(self) -> bool:
        """Products are made in IEEE float32, without tensor cores."""
        return self.dtype == "float32" and self.precision == "ieee"

    @property
    def weighs_rows(self) -> bool:
        """The backward takes P of the keys alone, and their share of the denominator beside it:
        with the sink in P, the gradient of lse would lose digits that float32 has."""
        return self.sinks and self.is_exact

    @property
    def row_numbers(self) -> int:
        """How many numbers of each query row the backward's first kernel hands to the others."""
        return 3 if self.weighs_rows else 2

    @property
    def tensor_args(self) -> tuple[str, ...]:
        """Names of the entries of the op's `extra` list, in order."""
        given = {
            "dropout_seed": self.has_dropout,
            "attn_mask": self.attn_mask,
            "bias": self.bias,
            "alibi_slopes": self.alibi,
            "sinks": self.sinks,
            "prefix_lens": self.prefix_lm,
            "doc_ids_q": self.documents,
            "doc_ids_k": self.documents,
            "tree_mask": self.tree_mask,
            "block_map": self.block_map,
            **dict.fromkeys(PACKED_ARGS, self.is_packed),
        }
        if self.packs_queries:
            given["cu_seqlens_q"] = True
        names = tuple(name for name, is_given in given.items() if is_given)
        names += ("seqused_k",) if self.has_lengths else ()
        names += ("block_table",) if self.paged else ()
        names += self.aux_args + (DESCALES if self.is_fp8 else ())
        return names + (KV_DESCALES if self.is_quantized else ())

    @property
    def gradient_args(self) -> tuple[str, ...]:
        """Those of `tensor_args` that have a gradient, in order."""
        learnt = (*GRADIENT_ARGS, *self.learnt_aux)
        return tuple(name for name in self.tensor_args if name in learnt)

    @property
    def scalar_args(self) -> tuple[str, ...]:
        """Names of the entries of the op's `scalars` list, in order."""
        names = ["softmax_scale"]
        names += ["softcap"] if self.has_softcap else []
        names += ["dropout_p"] if self.has_dropout else []
        return tuple(names)

    @property
    def int_args(self) -> tuple[str, ...]:
        """Names of the entries of the op's `ints` list, in order.

        `partial` 1 asks for a float32 out. `bottom_right` 1 adds seqlen_k_total - seqlen_q_total
        to query positions; a total of -1 means the length of the tensor.
        """
        names = ["partial"]
        names += ["window_left"] if self.has_window_left else []
        names += ["window_right"] if self.has_window_right else []
        names += ["chunk"] if self.has_chunk else []
        names += ["q_start", "q_step", "k_start", "k_step"] if self.places_rows else []
        if self.aligns_rows:
            names += ["bottom_right", "seqlen_q_total", "seqlen_k_total"]
        names += ["batch_start", "head_start"] if self.places_heads else []
        return tuple(names)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the op's results, in order."""
        return ("out", "lse", *self.aux)

    @property
    def text(self) -> AttentionSpec:
        """The spec with every number forgotten that the emitted text cannot see."""
        window = (0 if self.has_window_left else None, 0 if self.has_window_right else None)
        return replace(
            self,
            causal=self.is_causal,
            window=window,
            dropout_p=0.5 if self.has_dropout else 0.0,
            softmax_scale=None,
            softcap=1.0 if self.has_softcap else None,
            chunk=1 if self.has_chunk else None,
            score_mod=self.score_mod and str(self.score_mod),
            mask_mod=self.mask_mod and str(self.mask_mod),
            layout="thd" if self.layout == "thd" else "bhsd",
            precision=self.precision if self.dtype == "float32" else "ieee",
            deterministic=bool(self.deterministic),
        )

    def text_of(self, direction: Direction) -> AttentionSpec:
        """`text`, for one direction's kernels: a forward adds in one order anyway."""
        text = self.served_as(direction).text
        return replace(text, deterministic=False) if direction in ("fwd", "decode") else text

    @property
    def text_key(self) -> str:
        """`text` as a string, with `any` for each forgotten number; `parse` reads it back."""
        return written(self.text, forget=True)

    @property
    def key(self) -> str:
        """The whole spec as one line, non-default fields only; `parse` reads it back."""
        return written(self)

    def __str__(self) -> str:
        return self.key

    @classmethod
    def parse(cls, line: str) -> AttentionSpec:
        """Read `head_dim=128,dtype=bfloat16,causal=true,window=1023:0,softcap=any`."""
        return cls(**read_line(line, FIELDS))

    def to_json(self) -> str:
        """One line of JSON, non-default fields only."""
        return json.dumps({f.name: getattr(self, f.name) for f in changed(self)})

    @classmethod
    def from_json(cls, line: str) -> AttentionSpec:
        """The inverse of `to_json`."""
        try:
            named = json.loads(line)
        except (ValueError, TypeError) as error:
            raise SpecError(f"spec is not JSON ({error}); write it with spec.to_json()") from None
        if not isinstance(named, dict):
            raise SpecError(
                f"spec must be a JSON object, got {shown(named)}; write it with spec.to_json()"
            )
        return cls(**named)

    def as_dict(self) -> dict[str, Any]:
        """Every field, for machines."""
        return asdict(self)


FIELDS = {f.name: f for f in fields(AttentionSpec)}


class _PositionalError(SpecError, TypeError):
    """A field given by position: a TypeError too, as of any keyword-only argument."""
