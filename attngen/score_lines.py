"""Statements of score_mod and mask_mod as lines of Triton and of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from attngen.score_nodes import Aux, Node, kind_of, written
from attngen.score_ops import OPS, TRITON, Operand, is_constant, typed

_NAMES = {"q": "q_idx", "k": "k_idx"}  # in printed functions


def aux_parameters(aux: Iterable[Aux], first: int = 0) -> tuple[str, ...]:
    """Parameters of tensors in a printed function, numbered from `first`."""
    found = []
    for n, each in enumerate(aux, first):
        found.append(f"aux{n}_ptr")
        found += [f"aux{n}_size{dim}" for dim in range(each.dims)]
        found += [f"aux{n}_stride{dim}" for dim in range(each.dims)]
    return tuple(found)


def named(x: Operand) -> str:
    """An operand in a printed function."""
    return _NAMES.get(x, x) if isinstance(x, str) else written(x)


def number(x: Operand, kind: str = "float") -> str:
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
        return number(x, want)
    return named(x) if have == want else to(want).format(named(x))


def _operands(node: Node, nodes: Sequence[Node], to: Callable[[str], str]) -> list[str]:
    """The operands of a statement, cast to what its operator takes."""
    kinds = [kind_of(x, nodes) for x in node.args]
    wanted, _ = typed(node.op, [(k, is_constant(x)) for k, x in zip(kinds, node.args, strict=True)])
    return [_cast(x, k, w, to) for x, k, w in zip(node.args, kinds, wanted, strict=True)]


def index(x: Operand) -> str:
    """An index in a Triton function."""
    return f"tl.full([], {x}, tl.int64)" if is_constant(x) else named(x)


def helper(node: Node) -> str:
    """The function that a statement calls in Triton, if any."""
    is_float = node.op == "floordiv" and node.kind == "float"
    return "floor_divide_floats" if is_float else OPS[node.op].helper or ""


def in_triton(nodes: Sequence[Node]) -> list[str]:
    """A line of Triton for each statement, and for each index of an entry."""
    lines = []
    for n, node in enumerate(nodes):
        if node.op != "index":
            words = _operands(node, nodes, lambda kind: OPS[kind].triton)
            form = OPS[node.op].triton.replace("floor_divide", helper(node))
            lines.append(f"t{n} = {form.format(*words)}")
            continue
        tensor, *indices = node.args
        for dim, x in enumerate(indices):
            sign, stride = "+=" if dim else "=", f"{tensor}_stride{dim}"
            lines.append(f"at {sign} entry({index(x)}, {tensor}_size{dim}) * {stride}")
        value = f"tl.load({tensor}_ptr{' + at' if indices else ''})"
        value += " != 0" if node.kind == "bool" else f".to({TRITON[node.kind]})"
        lines.append(f"t{n} = {value}")
    return lines


def in_torch(nodes: Sequence[Node]) -> list[str]:
    """A line of PyTorch for each statement."""
    lines = []
    for n, node in enumerate(nodes):
        if node.op == "index":
            tensor, *indices = node.args
            at = "".join(f", {named(x)}" for x in indices)
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
