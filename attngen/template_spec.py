"""A spec as templates see it: with what only a text needs to know."""

from __future__ import annotations

from typing import Any

from attngen.score_lines import aux_parameters
from attngen.spec import AttentionSpec
from attngen.workload import Direction


class TemplateSpec:
    """The `spec` of every template."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spec, name)

    @property
    def largest(self) -> float:
        """The largest finite number of the dtype."""
        return {
            "float16": 65504.0,
            "bfloat16": 3.3895313892515355e38,
            "float32": 3.4028234663852886e38,
        }[self.spec.dtype]

    @property
    def compares_rows(self) -> bool:
        """Positions of queries are compared with those of keys."""
        return self.spec.is_causal or self.spec.window is not None or self.spec.has_chunk

    @property
    def begins_late(self) -> bool:
        """Tiles before the first that a query sees are skipped."""
        return self.spec.closes_left or self.spec.documents

    @property
    def chunk_closes_right(self) -> bool:
        """A chunk's end hides keys that nothing else does."""
        return self.spec.has_chunk and (not self.spec.is_causal or self.spec.moves_limits)

    @property
    def map_loops(self) -> list[tuple[str, str, bool]]:
        """The loops over the tiles that a block map lists: where each begins and ends, and whether
        its tiles are masked ones."""
        if self.spec.has_score_entries or self.spec.score_mod is not None:
            return [("0", "num_listed", True)]
        return [("0", "num_partial", True), ("num_partial", "num_listed", False)]

    @property
    def scales_keys(self) -> bool:
        """The scales of k and v differ from key to key, or from page to page."""
        return self.spec.kv_scale == "key" or (self.spec.kv_scale == "head" and self.spec.paged)

    @property
    def levels_q(self) -> bool:
        """Rows of q are brought into float16's range, in which 8-bit keys are multiplied."""
        return self.spec.is_quantized and self.spec.dtype != "float16"

    @property
    def v_halves(self) -> tuple[str, ...]:
        """What ends the names of accumulators: those of even and odd columns, where v is read in
        pairs."""
        return ("_even", "_odd") if self.spec.is_quantized else ("",)

    @property
    def k_halves(self) -> tuple[str, ...]:
        """The same for parts of q and k. If k is read as v is, pages of both are found at once, and
        int8 is converted by fewer instructions."""
        pays = self.spec.paged or self.spec.kv_dtype == "int8"
        if not self.spec.is_quantized or not pays or self.spec.head_dim % 2:
            return ("",)
        return ("_even", "_odd") if min(x.width for x in self.spec.qk_parts) >= 32 else ("",)

    @property
    def aux_parameters(self) -> tuple[str, ...]:
        """What printed kernels take for the tensors of functions."""
        return aux_parameters(self.spec.function_tensors)

    @property
    def score_parameters(self) -> tuple[str, ...]:
        """Those of score_mod."""
        return (
            () if self.spec.score_function is None else aux_parameters(self.spec.score_function.aux)
        )

    @property
    def mask_parameters(self) -> tuple[str, ...]:
        """Those of mask_mod."""
        return self.aux_parameters[len(self.score_parameters) :]

    @property
    def aux_run_time(self) -> tuple[str, ...]:
        """Those of `aux_parameters` whose values compile nothing: all but pointers and last
        strides."""
        last = {
            f"aux{n}_stride{each.dims - 1}" for n, each in enumerate(self.spec.function_tensors)
        }
        return tuple(x for x in self.aux_parameters if not x.endswith("_ptr") and x not in last)

    @property
    def score_tensors(self) -> tuple[str, ...]:
        """The names in `aux_args` of score_mod's tensors."""
        return self.spec.aux_args[
            : len(self.spec.score_function.aux) if self.spec.score_function else 0
        ]

    @property
    def mask_tensors(self) -> tuple[str, ...]:
        """Those of mask_mod's."""
        return self.spec.aux_args[len(self.score_tensors) :]

    @property
    def aux_examples(self) -> tuple[str, ...]:
        """A random tensor for each, as printed files make it."""
        functions = (self.spec.score_function, self.spec.mask_function)
        return tuple(f.example(n) for f in functions if f is not None for n in range(len(f.aux)))

    @property
    def has_head_terms(self) -> bool:
        """Kernels work something out for each head that such terms need."""
        return (
            self.spec.has_score_entries
            or self.spec.alibi
            or (self.spec.has_functions and not self.spec.has_dropout)
        )

    @property
    def has_term_parameters(self) -> bool:
        """Kernels have parameters for such terms alone."""
        return self.has_head_terms or self.spec.adds_to_scores or bool(self.spec.function_tensors)

    @property
    def subtracts_lse(self) -> bool:
        """The backward subtracts lse from a score before it changes to base 2: where P is large
        nothing is rounded then, but one instruction is added."""
        return self.spec.is_exact and self.spec.adds_to_scores

    @property
    def subtracts_maximum(self) -> bool:
        """The forward subtracts the row's maximum before it scales: nothing is lost of scores of
        any size, for one instruction more."""
        return self.spec.is_exact or self.spec.adds_to_scores

    def function_helpers(self, direction: Direction) -> frozenset[str]:
        """What printed functions call."""
        functions = (self.spec.score_function, self.spec.mask_function)
        found = (each.helpers(direction) for each in functions if each is not None)
        return frozenset().union(*found)
