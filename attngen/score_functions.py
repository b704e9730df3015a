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
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attngen.errors import SpecError
from attngen.score_ops import (
    KINDS,
    OPS,
    TRITON,
    Operand,
    Ref,
    constant_kind,
    is_constant,
    typed,
)

POSITIONS = ("b", "h", "q", "k")
INPUTS = {"score_mod": ("score", *POSITIONS), "mask_mod": POSITIONS}
FUNCTIONS = tuple(INPUTS)
RESULTS = {"score_mod": "float", "mask_mod": "bool"}
MAX_DIMS = 8
_NAMES = {"q": "q_idx", "k": "k_idx"}  # in printed functions
_TORCH = {"int": "torch.int32", "long": "torch.int64"}


class Aux(NamedTuple):
    """A tensor that a function reads, float (float32, float16, bfloat16), int (up to 32 bits), long
    (int64) or bool."""

    kind: str
    dims: int


class Node(NamedTuple):
    """A statement: an operator, or `index` of a tensor, its operands, and its type."""

    op: str
    args: tuple[Operand, ...]
    kind: str


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


@dataclass
class Builder:
    """Statements as they come; equal ones are one."""

    aux: list[Aux] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    known: dict[str, Ref] = field(default_factory=dict)

    def kind(self, x: Operand) -> str:
        return _kind(x, self.nodes)

    def add(self, op: str, *args: Operand) -> Operand:
        """The value of an operator; what is known beforehand makes no statement."""
        if op in ("and", "or"):  # as the masks that FlexAttention combines
            for own, other in (args, args[::-1]):
                if other is (op == "and") and self.kind(own) == "bool":
                    return own
        simple = _simplified(op, args)
        if simple is not None and (
            is_constant(simple) or self.kind(simple) == self._result(op, args)
        ):
            return simple
        return self._put(op, args, self._result(op, args))

    def index(self, aux: int, indices: Iterable[Operand]) -> Operand:
        """One entry of a tensor."""
        at = tuple(indices)
        for x in at:
            if self.kind(x) not in ("int", "long"):
                raise SpecError(f"aux{aux} is indexed by a {self.kind(x)}; indices are ints")
        return self._put("index", (f"aux{aux}", *at), self.aux[aux].kind)

    def _result(self, op: str, args: tuple[Operand, ...]) -> str:
        return typed(op, [(self.kind(x), is_constant(x)) for x in args])[1]

    def _put(self, op: str, args: tuple[Operand, ...], kind: str) -> Ref:
        key = f"{op} {args!r}"  # 1, 1.0 and True are different constants
        if key not in self.known:
            self.known[key] = Ref(len(self.nodes))
            self.nodes.append(Node(op, args, kind))
        return self.known[key]


def _simplified(op: str, args: tuple[Operand, ...]) -> Operand | None:
    """What derivatives are full of: products with one, negative constants."""
    if op == "mul":
        for own, other in (args, args[::-1]):
            if type(other) is float and other == 1.0 and not is_constant(own):
                return own
            if type(other) is float and other == 0.0 and own == "grad":
                return 0.0
    if op == "neg" and type(args[0]) in (int, float):
        return -args[0]
    if op == "where" and repr(args[1]) == repr(args[2]):
        return args[1]
    return None


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
            line = " ".join([node.op, *map(_shown, node.args)])
            parts.append(line if n == last else f"t{n}:{line}")
        return ";".join(parts if last is not None else [*parts, _shown(self.result)])

    @property
    def inputs(self) -> frozenset[str]:
        """Those of score, b, h, q and k that are read."""
        return _reads(self.nodes, [self.result])

    # ---- printing --------------------------------------------------------------------------

    def helpers(self, direction: str) -> frozenset[str]:
        """Functions that the printed ones call, in a backward the derivative among them."""
        nodes = self.nodes
        if self.name == "score_mod" and direction == "bwd":
            nodes = self._with_gradients[0]
        found = {_helper(n) for n in nodes if n.op != "index"}
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
        return (*_triton(self.nodes), f"return {self._spread(self.nodes, self.result)}")

    @property
    def gradient_lines(self) -> tuple[str, ...]:
        """The body that turns the gradient of the result into that of the score."""
        nodes, score, _ = self._with_gradients
        nodes, (score, *_) = _canonical(nodes, [score])
        return (*_triton(nodes), f"return {self._spread(nodes, score)}")

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
        nodes, flat = _canonical(nodes, flat)
        lines = _triton(nodes)
        for args, _ in wanted:
            indices, adjoint, flat = flat[: len(args) - 1], flat[len(args) - 1], flat[len(args) :]
            if is_constant(adjoint):
                continue
            lines.append(f"value = tl.where(inside, {_named(adjoint)}, 0.0)")
            reads = {name for x in indices for name in _reads(nodes, [x])}
            has_q, has_k = bool(reads & {"q", "score"}), bool(reads & {"k", "score"})
            if not has_k:
                lines.append("value = tl.sum(value, 0, keep_dims=True)")
            if not has_q:
                lines.append("value = tl.sum(value, 1, keep_dims=True)")
            lines.append("at = tl.zeros(value.shape, tl.int64)")
            for dim, x in enumerate(indices):
                lines.append(
                    f"at = at * aux{aux}_size{dim} + entry({_index(x)}, aux{aux}_size{dim})"
                )
            there = ", inside" if has_q and has_k else ""
            lines.append(f'tl.atomic_add(daux{aux}_ptr + at, value{there}, sem="relaxed")')
        return tuple(lines)

    @property
    def torch_lines(self) -> tuple[str, ...]:
        """The body in PyTorch; FLOAT is the dtype of floats."""
        result = _named(self.result)
        if is_constant(self.result):
            result = f"torch.tensor({_number(self.result, RESULTS[self.name])})"
        return (*_torch(self.nodes), f"return {result}")

    def example_shape(self, aux: int, batch: int, heads: int, rows: int, keys: int) -> list[int]:
        """Sizes of a tensor that its indices seem to reach, in calls of such sizes."""
        reach = {"b": batch, "h": heads, "q": rows, "k": keys, "score": 16}
        reads = self._reach(aux)
        return [max([1, most, *(sum(reach[x] for x in each) for each in of)]) for most, of in reads]

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
                    found[dim] = most, [*of, _reads(self.nodes, [x])]
        return found

    def _spread(self, nodes: tuple[Node, ...], result: Operand) -> str:
        """A result in Triton, of the tile's shape where it is a score."""
        if self.name == "mask_mod":
            return f"tl.full([1, 1], {result}, tl.int1)" if is_constant(result) else _named(result)
        if is_constant(result):
            return f"tl.full(score.shape, {_number(result)}, tl.float32)"
        is_whole = _reads(nodes, [result]) & {"score", "grad"}
        return _named(result) if is_whole else f"tl.broadcast_to({_named(result)}, score.shape)"

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


def aux_parameters(aux: Iterable[Aux], first: int = 0) -> tuple[str, ...]:
    """Parameters of tensors in a printed function, numbered from `first`."""
    found = []
    for n, each in enumerate(aux, first):
        found.append(f"aux{n}_ptr")
        found += [f"aux{n}_size{dim}" for dim in range(each.dims)]
        found += [f"aux{n}_stride{dim}" for dim in range(each.dims)]
    return tuple(found)


def function(name: str, builder: Builder, result: Operand) -> Function:
    """The canonical function of what was built."""
    kind = builder.kind(result)
    if kind != RESULTS[name]:
        wanted = {"float": "a float", "bool": "a bool"}[RESULTS[name]]
        raise SpecError(f"{name} must give {wanted} for each score, got {kind}")
    nodes, (result,) = _canonical(tuple(builder.nodes), [result])
    return Function(name, tuple(builder.aux), nodes, result)


def _canonical(
    nodes: tuple[Node, ...], results: list[Operand]
) -> tuple[tuple[Node, ...], list[Operand]]:
    """The statements that the results need, in the order of their first use."""
    made: list[Node] = []
    at: dict[int, Ref] = {}

    def moved(x: Operand) -> Operand:
        return at[x.at] if isinstance(x, Ref) else x

    for result in results:
        pending = [result]
        while pending:
            x = pending[-1]
            if not isinstance(x, Ref) or x.at in at:
                pending.pop()
                continue
            node = nodes[x.at]
            missing = [y for y in node.args if isinstance(y, Ref) and y.at not in at]
            if missing:
                pending += reversed(missing)
                continue
            at[x.at] = Ref(len(made))
            made.append(node._replace(args=tuple(map(moved, node.args))))
    return tuple(made), [moved(x) for x in results]


def _reads(nodes: tuple[Node, ...], results: Iterable[Operand]) -> frozenset[str]:
    found: list[set[str]] = []
    for node in nodes:
        found.append(set().union(*(_read(x, found) for x in node.args)))
    return frozenset(set().union(*(_read(x, found) for x in results)))


def _read(x: Operand, found: list[set[str]]) -> set[str]:
    if isinstance(x, Ref):
        return found[x.at]
    return {x} if isinstance(x, str) and not x.startswith("aux") else set()


def _shown(x: Operand) -> str:
    if isinstance(x, Ref):
        return f"t{x.at}"
    if isinstance(x, bool):
        return str(x).lower()
    return x if isinstance(x, str) else repr(x)


# ---- reading ------------------------------------------------------------------------------------

_DECLARED = re.compile(rf"aux(\d+):({'|'.join(reversed(KINDS))})([0-{MAX_DIMS}])")


@functools.lru_cache(maxsize=1024)
def read(name: str, text: str) -> Function:
    """The function that a text is of.

    Raises:
        SpecError: it is none; says which statement is wrong.
    """
    builder = Builder()
    named: dict[str, Operand] = {x: x for x in INPUTS[name]}
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
            result = _operand(name, item, op, named)
            break
        try:
            result = _statement(name, item, op, words, named, builder)
        except SpecError as error:
            if str(error).startswith(name):
                raise
            raise _wrong(name, item, str(error)) from None
        named[label] = result
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
    named: dict[str, Operand],
    builder: Builder,
) -> Operand:
    if op == "index":
        found = re.fullmatch(r"aux(\d+)", words[0])
        if not found or int(found[1]) >= len(builder.aux):
            raise SpecError(f"{words[0]} is not declared")
        aux = int(found[1])
        indices = [_operand(name, item, word, named) for word in words[1:]]
        if len(indices) != builder.aux[aux].dims:
            raise SpecError(
                f"aux{aux} has {builder.aux[aux].dims} dims, got {len(indices)} indices"
            )
        return builder.index(aux, indices)
    if op not in OPS:
        raise SpecError(f"operators are index, {', '.join(OPS)}")
    args = tuple(_operand(name, item, word, named) for word in words)
    if args and all(map(is_constant, args)):
        raise SpecError("all operands are constants; write their result")
    return builder._put(op, args, builder._result(op, args))


def _operand(name: str, item: str, word: str, named: dict[str, Operand]) -> Operand:
    if word in named:
        return named[word]
    if word in ("true", "false"):
        return word == "true"
    for convert in (int, float):
        try:
            number = convert(word)
        except ValueError:
            continue
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            raise _wrong(name, item, f"{word} does not fit in 64 bits")
        return number
    raise _wrong(name, item, f"{word!r} is neither a number nor one of {', '.join(named)}")


def _wrong(name: str, item: str, why: str) -> SpecError:
    return SpecError(
        f"{name} is no text of a function: {item!r}: {why}; pass the function itself, which is "
        "read and written as such a text"
    )


# ---- printing -----------------------------------------------------------------------------------


def _named(x: Operand) -> str:
    """An operand in a printed function."""
    return _NAMES.get(x, x) if isinstance(x, str) else _shown(x)


def _number(x: Operand, kind: str = "float") -> str:
    """A constant of a type."""
    if kind == "bool":
        return str(bool(x))
    if kind != "float":
        return str(int(x))
    x = float(x)
    if math.isnan(x) or math.isinf(x):
        return f'float("{x}")'
    return repr(x).replace("e+", "e")


def _cast(x: Operand, have: str, want: str, to: Callable[[str], str]) -> str:
    """An operand as an operator takes it."""
    if is_constant(x):
        return _number(x, want)
    return _named(x) if have == want else to(want).format(_named(x))


def _kind(x: Operand, nodes: Sequence[Node]) -> str:
    if isinstance(x, Ref):
        return nodes[x.at].kind
    if is_constant(x):
        return constant_kind(x)
    return "float" if x in ("score", "grad") else "int"


def _operands(node: Node, nodes: Sequence[Node], to: Callable[[str], str]) -> list[str]:
    """The operands of a statement, cast to what its operator takes."""
    kinds = [_kind(x, nodes) for x in node.args]
    wanted, _ = typed(node.op, [(k, is_constant(x)) for k, x in zip(kinds, node.args, strict=True)])
    return [_cast(x, k, w, to) for x, k, w in zip(node.args, kinds, wanted, strict=True)]


def _index(x: Operand) -> str:
    return f"tl.full([], {x}, tl.int64)" if is_constant(x) else _named(x)


def _helper(node: Node) -> str:
    """The function that a statement calls in Triton, if any."""
    is_float = node.op == "floordiv" and node.kind == "float"
    return "floor_divide_floats" if is_float else OPS[node.op].helper or ""


def _triton(nodes: Sequence[Node]) -> list[str]:
    lines = []
    for n, node in enumerate(nodes):
        if node.op != "index":
            words = _operands(node, nodes, lambda kind: OPS[kind].triton)
            form = OPS[node.op].triton.replace("floor_divide", _helper(node))
            lines.append(f"t{n} = {form.format(*words)}")
            continue
        tensor, *indices = node.args
        for dim, x in enumerate(indices):
            sign, stride = "+=" if dim else "=", f"{tensor}_stride{dim}"
            lines.append(f"at {sign} entry({_index(x)}, {tensor}_size{dim}) * {stride}")
        value = f"tl.load({tensor}_ptr{' + at' if indices else ''})"
        value += " != 0" if node.kind == "bool" else f".to({TRITON[node.kind]})"
        lines.append(f"t{n} = {value}")
    return lines


def _torch(nodes: Sequence[Node]) -> list[str]:
    lines = []
    for n, node in enumerate(nodes):
        if node.op == "index":
            tensor, *indices = node.args
            at = "".join(f", {_named(x)}" for x in indices)
            value = f"entry({tensor}{at}){'.to(FLOAT)' if node.kind == 'float' else ''}"
        else:
            words = _operands(node, nodes, lambda kind: OPS[kind].torch)
            value = OPS[node.op].torch.format(*words)
            if node.op in ("min", "max") and any(map(is_constant, node.args)):
                own, bound = words if is_constant(node.args[1]) else words[::-1]
                value = f"{own}.clamp({'max' if node.op == 'min' else 'min'}={bound})"
            elif node.op == "fmod" and is_constant(node.args[0]):
                value = f"torch.fmod(torch.tensor({words[0]}), {words[1]})"
        lines.append(f"t{n} = {value}")
    return lines
