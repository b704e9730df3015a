"""score_mod and mask_mod as text: read, written, differentiated, and printed as Triton and PyTorch.

A function of the score and of where it stands becomes statements, each one operator of `score_ops`:

    aux0:float1;t0:sub q k;t1:abs t0;t2:index aux0 h;t3:mul t1 t2;sub score t3

Inputs are `score`, `b`, `h`, `q`, `k` (global batch row, query head, rows of query and key) and the
tensors `aux0`, `aux1`, ... with their kind and number of dims. The last statement is the result.
The text is canonical: dead statements are gone, equal ones are one, and names are numbered in
order. It holds no comma and no '=', so that a spec's key can carry it. Imports neither torch nor
triton.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from attngen.errors import SpecError
from attngen.score_lines import aux_parameters, helper, in_torch, in_triton, index, named, number
from attngen.score_nodes import (
    INPUTS,
    MAX_DIMS,
    RESULTS,
    Aux,
    Builder,
    Node,
    canonical,
    reads,
    written,
)
from attngen.score_ops import KINDS, OPS, Operand, Ref, is_constant
from attngen.values import shown

_DECLARED = re.compile(rf"aux(\d+):({'|'.join(reversed(KINDS))})([0-{MAX_DIMS}])")
_TORCH = {"int": "torch.int32", "long": "torch.int64"}


class FunctionText(str):
    """A function's text, and the tensors it was captured with. Those are no part of it: equality,
    hash and pickle are the text's."""

    __slots__ = ("tensors",)
    tensors: tuple[Any, ...]

    def __new__(cls, text: str, tensors: tuple[Any, ...] = ()) -> FunctionText:
        made = super().__new__(cls, text)
        made.tensors = tensors
        return made

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return str, (str(self),)


@dataclass(frozen=True)
class Function:
    """A score_mod or mask_mod."""

    name: str
    """"score_mod" or "mask_mod"."""
    aux: tuple[Aux, ...]
    nodes: tuple[Node, ...]
    result: Operand

    @property
    def text(self) -> str:
        """The canonical text, which `read` takes."""
        parts = [f"aux{n}:{aux.kind}{aux.dims}" for n, aux in enumerate(self.aux)]
        last = self.result.at if isinstance(self.result, Ref) else None
        for n, node in enumerate(self.nodes):
            line = " ".join([node.op, *map(written, node.args)])
            parts.append(line if n == last else f"t{n}:{line}")
        return ";".join(parts if last is not None else [*parts, written(self.result)])

    @property
    def inputs(self) -> frozenset[str]:
        """Those of score, b, h, q and k that are read."""
        return reads(self.nodes, [self.result])

    def helpers(self, direction: str) -> frozenset[str]:
        """Functions that the printed ones call, in a backward the derivative among them."""
        nodes = self.nodes
        if self.name == "score_mod" and direction == "bwd":
            nodes = self._with_gradients[0]
        found = {helper(n) for n in nodes if n.op != "index"}
        found |= {"entry"} if any(n.op == "index" and len(n.args) > 1 for n in nodes) else set()
        found |= {"remainder"} if found & {"floor_divide", "floor_divide_floats"} else set()
        return frozenset(found - {""})

    @property
    def parameters(self) -> tuple[str, ...]:
        """Of a printed Triton function, after score, b, h, q_idx and k_idx: for each tensor its
        pointer, sizes and strides, by names of its own."""
        return aux_parameters(self.aux)

    @property
    def triton_lines(self) -> tuple[str, ...]:
        """The body of the Triton function."""
        return (*in_triton(self.nodes), f"return {self._spread(self.nodes, self.result)}")

    @property
    def gradient_lines(self) -> tuple[str, ...]:
        """The body that turns the gradient of the result into that of the score."""
        nodes, score, _ = self._with_gradients
        nodes, (score, *_) = canonical(nodes, [score])
        return (*in_triton(nodes), f"return {self._spread(nodes, score)}")

    @property
    def learnt(self) -> tuple[int, ...]:
        """Numbers of the tensors that have a gradient."""
        if self.name != "score_mod":
            return ()
        return tuple(sorted({int(args[0][3:]) for args, _ in self._with_gradients[2]}))

    def aux_gradient_lines(self, aux: int) -> tuple[str, ...]:
        """The body that adds what one [keys, queries] tile gives to the gradient of a tensor.

        Entries that a whole column or row of the tile shares are summed first.
        """
        nodes, _, entries = self._with_gradients
        wanted = [(args, adjoint) for (args, adjoint) in entries if args[0] == f"aux{aux}"]
        flat = [x for args, adjoint in wanted for x in (*args[1:], adjoint)]
        nodes, flat = canonical(nodes, flat)
        lines = in_triton(nodes)
        for args, _ in wanted:
            indices, adjoint, flat = flat[: len(args) - 1], flat[len(args) - 1], flat[len(args) :]
            if is_constant(adjoint):
                continue
            lines.append(f"value = tl.where(inside, {named(adjoint)}, 0.0)")
            axes = {name for x in indices for name in reads(nodes, [x])}
            has_q, has_k = bool(axes & {"q", "score"}), bool(axes & {"k", "score"})
            if not has_k:
                lines.append("value = tl.sum(value, 0, keep_dims=True)")
            if not has_q:
                lines.append("value = tl.sum(value, 1, keep_dims=True)")
            lines.append("at = tl.zeros(value.shape, tl.int64)")
            for dim, x in enumerate(indices):
                lines.append(
                    f"at = at * aux{aux}_size{dim} + entry({index(x)}, aux{aux}_size{dim})"
                )
            there = ", inside" if has_q and has_k else ""
            lines.append(f'tl.atomic_add(daux{aux}_ptr + at, value{there}, sem="relaxed")')
        return tuple(lines)

    @property
    def torch_lines(self) -> tuple[str, ...]:
        """The body in PyTorch; FLOAT is the dtype of floats."""
        result = named(self.result)
        if is_constant(self.result):
            result = f"torch.tensor({number(self.result, RESULTS[self.name])})"
        return (*in_torch(self.nodes), f"return {result}")

    def example_shape(self, aux: int, batch: int, heads: int, rows: int, keys: int) -> list[int]:
        """Sizes of a tensor that its indices seem to reach, in calls of such sizes."""
        reach = {"b": batch, "h": heads, "q": rows, "k": keys, "score": 16}
        return [
            max([1, most, *(sum(reach[x] for x in each) for each in of)])
            for most, of in self._reach(aux)
        ]

    def example(self, aux: int) -> str:
        """A random tensor for a printed file: batch 1, and `heads` and `seqlen` in scope."""
        sizes = []
        for most, of in self._reach(aux):
            lengths = max((len(each & {"q", "k"}) for each in of), default=0)
            has_heads = any("h" in each for each in of)
            size = ["", "seqlen", "2 * seqlen"][lengths] or ("heads" if has_heads else "16")
            sizes.append(str(most) if most and not any(of) else size)
        shape, kind = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})", self.aux[aux].kind
        if kind == "float":
            return f"torch.randn({shape}, device=device)"
        if kind == "bool":
            return f"torch.rand({shape}, device=device) < 0.9"
        return f"torch.randint(0, 3, {shape}, dtype={_TORCH[kind]}, device=device)"

    def _reach(self, aux: int) -> list[tuple[int, list[frozenset[str]]]]:
        """Of each dim of a tensor: the size for its constant indices, and what others read."""
        found: list[tuple[int, list[frozenset[str]]]] = [(0, [])] * self.aux[aux].dims
        for node in self.nodes:
            for dim, x in enumerate(node.args[1:] if node.args[0] == f"aux{aux}" else ()):
                most, of = found[dim]
                if is_constant(x):
                    found[dim] = max(most, x + 1 if x >= 0 else -x), of
                else:
                    found[dim] = most, [*of, reads(self.nodes, [x])]
        return found

    def _spread(self, nodes: tuple[Node, ...], result: Operand) -> str:
        """A result in Triton, of the tile's shape where it is a score."""
        if self.name == "mask_mod":
            return f"tl.full([1, 1], {result}, tl.int1)" if is_constant(result) else named(result)
        if is_constant(result):
            return f"tl.full(score.shape, {number(result)}, tl.float32)"
        is_whole = reads(nodes, [result]) & {"score", "grad"}
        return named(result) if is_whole else f"tl.broadcast_to({named(result)}, score.shape)"

    @functools.cached_property
    def _with_gradients(self) -> tuple[tuple[Node, ...], Operand, list[tuple[Any, Operand]]]:
        """Statements with the derivative, the score's gradient, and that of each entry read."""
        b = Builder(list(self.aux), list(self.nodes))
        b.known = {f"{n.op} {n.args!r}": Ref(at) for at, n in enumerate(self.nodes)}
        found: dict[Operand, Operand] = {self.result: "grad"}
        entries: list[tuple[Any, Operand]] = []
        for at in reversed(range(len(self.nodes))):
            node, g = self.nodes[at], found.get(Ref(at))
            if g is None or node.kind != "float":
                continue
            if node.op == "index":
                entries.append((node.args, g))
                continue
            gradient = OPS[node.op].gradient
            given = () if gradient is None else gradient(b, g, Ref(at), *node.args)
            for x, own in zip(node.args, given, strict=False):
                if own is None or is_constant(x) or b.kind(x) != "float":
                    continue
                found[x] = b.add("add", found[x], own) if x in found else own
        return tuple(b.nodes), found.get("score", 0.0), entries


def function(name: str, builder: Builder, result: Operand) -> Function:
    """The canonical function of what was built."""
    kind = builder.kind(result)
    if kind != RESULTS[name]:
        wanted = {"float": "a float", "bool": "a bool"}[RESULTS[name]]
        raise SpecError(f"{name} must give {wanted} for each score, got {kind}")
    nodes, (result,) = canonical(tuple(builder.nodes), [result])
    return Function(name, tuple(builder.aux), nodes, result)


def function_text(name: str, value: Any) -> Any:
    """A function as its canonical text, with the tensors it brought along."""
    if value is None:
        return None
    if isinstance(value, str):
        text = read(name, str(value)).text
        return FunctionText(text, value.tensors) if isinstance(value, FunctionText) else text
    if not callable(value):
        raise SpecError(
            f"{name} must be None or a function, got {shown(value)}; leave {name} out for None"
        )
    from attngen.score_capture import capture  # torch, which only functions need

    return capture(name, value)


@functools.lru_cache(maxsize=1024)
def read(name: str, text: str) -> Function:
    """The function that a text is of.

    Raises:
        SpecError: it is none; says which statement is wrong.
    """
    builder = Builder()
    known: dict[str, Operand] = {x: x for x in INPUTS[name]}
    items = [item.strip() for item in text.split(";")]
    while items and (declared := _DECLARED.fullmatch(items[0])):
        if int(declared[1]) != len(builder.aux):
            raise _wrong(name, items[0], f"the next tensor is aux{len(builder.aux)}")
        builder.aux.append(Aux(declared[2], int(declared[3])))
        items.pop(0)
    result: Operand = None
    for n, item in enumerate(items):
        is_last = n == len(items) - 1
        label, _, statement = item.rpartition(":")
        if bool(label) == is_last or (label and not re.fullmatch(r"t\d+", label)):
            raise _wrong(name, item, "statements are tN:OPERATOR OPERANDS, the last without tN:")
        op, *words = statement.split() or [""]
        if is_last and not words:
            result = _operand(name, item, op, known)
            break
        try:
            result = _statement(name, item, op, words, known, builder)
        except SpecError as error:
            if str(error).startswith(name):
                raise
            raise _wrong(name, item, str(error)) from None
        known[label] = result
    made = function(name, builder, result)
    used = {node.args[0] for node in made.nodes if node.op == "index"}
    for n in range(len(made.aux)):
        if f"aux{n}" not in used:
            raise _wrong(name, f"aux{n}", "it is declared, but never read")
    return made


def _statement(
    name: str,
    item: str,
    op: str,
    words: list[str],
    known: dict[str, Operand],
    builder: Builder,
) -> Operand:
    if op == "index":
        found = re.fullmatch(r"aux(\d+)", words[0])
        if not found or int(found[1]) >= len(builder.aux):
            raise SpecError(f"{words[0]} is not declared")
        aux = int(found[1])
        indices = [_operand(name, item, word, known) for word in words[1:]]
        if len(indices) != builder.aux[aux].dims:
            raise SpecError(
                f"aux{aux} has {builder.aux[aux].dims} dims, got {len(indices)} indices"
            )
        return builder.index(aux, indices)
    if op not in OPS:
        raise SpecError(f"operators are index, {', '.join(OPS)}")
    args = tuple(_operand(name, item, word, known) for word in words)
    if args and all(map(is_constant, args)):
        raise SpecError("all operands are constants; write their result")
    return builder.put(op, args, builder.result(op, args))


def _operand(name: str, item: str, word: str, known: dict[str, Operand]) -> Operand:
    if word in known:
        return known[word]
    if word in ("true", "false"):
        return word == "true"
    for convert in (int, float):
        try:
            value = convert(word)
        except ValueError:
            continue
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _wrong(name, item, f"{word} does not fit in 64 bits")
        return value
    raise _wrong(name, item, f"{word!r} is neither a number nor one of {', '.join(known)}")


def _wrong(name: str, item: str, why: str) -> SpecError:
    return SpecError(
        f"{name} is no text of a function: {item!r}: {why}; pass the function itself, which is "
        "read and written as such a text"
    )
