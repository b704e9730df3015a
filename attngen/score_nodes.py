"""Statements of score_mod and mask_mod: how they are built, and their canonical form.

Imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attngen.errors import SpecError
from attngen.score_ops import Operand, Ref, constant_kind, is_constant, typed

POSITIONS = ("b", "h", "q", "k")
INPUTS = {"score_mod": ("score", *POSITIONS), "mask_mod": POSITIONS}
FUNCTIONS = tuple(INPUTS)
RESULTS = {"score_mod": "float", "mask_mod": "bool"}
MAX_DIMS = 8


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


@dataclass
class Builder:
    """Statements as they come; equal ones are one."""

    aux: list[Aux] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    known: dict[str, Ref] = field(default_factory=dict)

    def kind(self, x: Operand) -> str:
        return kind_of(x, self.nodes)

    def add(self, op: str, *args: Operand) -> Operand:
        """The value of an operator; what is known beforehand makes no statement."""
        if op in ("and", "or"):  # as the masks that FlexAttention combines
            for own, other in (args, args[::-1]):
                if other is (op == "and") and self.kind(own) == "bool":
                    return own
        simple = _simplified(op, args)
        if simple is not None and (
            is_constant(simple) or self.kind(simple) == self.result(op, args)
        ):
            return simple
        return self.put(op, args, self.result(op, args))

    def index(self, aux: int, indices: Iterable[Operand]) -> Operand:
        """One entry of a tensor."""
        at = tuple(indices)
        for x in at:
            if self.kind(x) not in ("int", "long"):
                raise SpecError(f"aux{aux} is indexed by a {self.kind(x)}; indices are ints")
        return self.put("index", (f"aux{aux}", *at), self.aux[aux].kind)

    def result(self, op: str, args: tuple[Operand, ...]) -> str:
        """The type of an operator's value."""
        return typed(op, [(self.kind(x), is_constant(x)) for x in args])[1]

    def put(self, op: str, args: tuple[Operand, ...], kind: str) -> Ref:
        """A statement as it is."""
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


def canonical(
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


def reads(nodes: tuple[Node, ...], results: Iterable[Operand]) -> frozenset[str]:
    """The inputs that results depend on."""
    found: list[set[str]] = []
    for node in nodes:
        found.append(set().union(*(_read(x, found) for x in node.args)))
    return frozenset(set().union(*(_read(x, found) for x in results)))


def _read(x: Operand, found: list[set[str]]) -> set[str]:
    if isinstance(x, Ref):
        return found[x.at]
    return {x} if isinstance(x, str) and not x.startswith("aux") else set()


def kind_of(x: Operand, nodes: Sequence[Node]) -> str:
    """The type of an operand."""
    if isinstance(x, Ref):
        return nodes[x.at].kind
    if is_constant(x):
        return constant_kind(x)
    return "float" if x in ("score", "grad") else "int"


def written(x: Operand) -> str:
    """An operand in the canonical text."""
    if isinstance(x, Ref):
        return f"t{x.at}"
    if isinstance(x, bool):
        return str(x).lower()
    return x if isinstance(x, str) else repr(x)
