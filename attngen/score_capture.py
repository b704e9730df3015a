"""From a Python score_mod or mask_mod to its text: it is called once, on 0-d meta tensors.

A dispatch mode sees each operator as PyTorch runs it and writes it down; tensors that the function
brings along are replaced by stand-ins when they are first used, and become aux0, aux1, ... What is
not written as operators of `score_ops` is an error that names the operator and its function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from attngen.errors import SpecError, UnsupportedSpecError
from attngen.score_aten import Writer
from attngen.score_functions import Function, FunctionText, function
from attngen.score_nodes import INPUTS, MAX_DIMS, RESULTS, Aux
from attngen.score_ops import Operand, is_constant
from attngen.values import shown

KIND_OF = {
    torch.bool: "bool",
    torch.uint8: "int",
    torch.int8: "int",
    torch.int16: "int",
    torch.int32: "int",
    torch.int64: "long",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.float32: "float",
}
"""The kind of a tensor that a function reads."""
_DTYPES = {
    "bool": torch.bool,
    "int": torch.int32,
    "long": torch.int64,
    "float": torch.float32,
}
_COMPUTED = {dtype: kind for kind, dtype in _DTYPES.items()}
_SIGNATURES = {
    "score_mod": "score_mod(score, b, h, q_idx, k_idx)",
    "mask_mod": "mask_mod(b, h, q_idx, k_idx)",
}
_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "normal", "uniform", "random")
_SAME = (
    *("view", "_unsafe_view", "reshape", "expand", "squeeze", "unsqueeze", "clone", "detach"),
    *("alias", "lift_fresh", "lift_fresh_copy", "permute", "contiguous", "to", "positive"),
)


class _Entry(NamedTuple):
    """A tensor that the function brought, indexed so far."""

    aux: int
    indices: tuple[Operand, ...]


def capture(name: str, fn: Callable[..., Any]) -> FunctionText:
    """The canonical text of a function, with the tensors that it reads.

    Raises:
        SpecError: its arguments or its result are not as FlexAttention has them, or it asks for the
            values of tensors.
        UnsupportedSpecError: it uses an operator that kernels do not have.
    """
    made, tensors = _traced(name, fn)
    return FunctionText(made.text, tensors)


def _traced(name: str, fn: Callable[..., Any]) -> tuple[Function, tuple[Tensor, ...]]:
    who = f"{name} {getattr(fn, '__qualname__', None) or type(fn).__qualname__}"
    count = len(INPUTS[name])
    try:
        inspect.signature(fn).bind(*range(count))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{who} must take {_SIGNATURES[name]}; {error}") from None
    tracer = _Tracer(who)
    inputs = []
    for given in INPUTS[name]:
        kind = torch.float32 if given == "score" else torch.int32
        inputs.append(tracer.value(torch.empty((), dtype=kind, device="meta"), given))
    try:
        with torch.no_grad(), _Stand(tracer), tracer:
            result = fn(*inputs)
    except SpecError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())
        raise SpecError(
            f"{who} cannot be read: {type(error).__name__}: {line[:300]}; it is called once, on "
            "0-d tensors without values"
        ) from error
    wanted = {"float": "a floating", "bool": "a bool"}[RESULTS[name]]
    must = f"{who} must return {wanted} tensor of no dims"
    if not isinstance(result, Tensor):
        raise SpecError(f"{must}, got {shown(result)}")
    operand = tracer.operand_of(result, must)
    found = _COMPUTED.get(result.dtype, str(result.dtype))
    if found != RESULTS[name]:
        step = "cast it with .to(score.dtype)" if name == "score_mod" else "write a comparison"
        raise SpecError(f"{must}, got {result.dtype}; {step}")
    return _function(name, tracer, operand)


def _function(name: str, tracer: _Tracer, result: Operand) -> tuple[Function, tuple[Tensor, ...]]:
    """The function without the tensors that its result does not need."""
    made = function(name, tracer.writer.builder, result)
    used = {int(node.args[0][3:]) for node in made.nodes if node.op == "index"}
    kept = sorted(used)
    renamed = {f"aux{old}": f"aux{new}" for new, old in enumerate(kept)}
    nodes = tuple(
        node._replace(args=(renamed[node.args[0]], *node.args[1:])) if node.op == "index" else node
        for node in made.nodes
    )
    aux = tuple(made.aux[n] for n in kept)
    tensors = tuple(tracer.tensors[n] for n in kept)
    return Function(name, aux, nodes, made.result), tensors


class _Stand(TorchFunctionMode):
    """Puts stand-ins where the function uses tensors of its own, and reads x[i] one index at a
    time."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self.tracer.stand_in, (args, kwargs or {}))
        if func is Tensor.__getitem__:
            x, at = args
            items = at if isinstance(at, tuple) else (at,)
            if items and all(map(_is_index, items)):
                for item in items:
                    is_number = isinstance(item, int)
                    x = x.select(0, item) if is_number else torch.ops.aten.index.Tensor(x, [item])
                return x
            what = "x[i] with more than ints and 0-d int tensors"
            raise self.tracer.writer.unsupported(what, "only single entries are read")
        if func is Tensor.__setitem__:
            raise self.tracer.writer.unsupported("x[i] = y")
        self.tracer.called = _name_of(func)
        return func(*args, **kwargs)


def _is_index(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dim() == 0 and not item.is_floating_point() and item.dtype != torch.bool
    return isinstance(item, int) and not isinstance(item, bool)


def _name_of(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func))


class _Tracer(TorchDispatchMode):
    """Writes operators down as they run on meta tensors."""

    def __init__(self, who: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types none
        self.who = who
        self.writer = Writer(who)
        self.tensors: list[Tensor] = []
        self.values: dict[int, Any] = {}
        self.called = ""
        self._stands: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []

    def value(self, x: Tensor, operand: Any) -> Tensor:
        """x, from now on known as `operand`."""
        self._alive.append(x)  # or its id would be another's
        self.values[id(x)] = operand
        return x

    def stand_in(self, x: Any) -> Any:
        """A meta tensor for one that the function brings along; all else as it is."""
        if not isinstance(x, Tensor) or id(x) in self.values:
            return x
        if id(x) not in self._stands:
            if x.dtype not in KIND_OF:
                raise SpecError(
                    f"{self.who} reads a tensor of {x.dtype}; cast it to float32, float16, "
                    "bfloat16, int64, int32 or bool outside the function"
                )
            if x.dim() > MAX_DIMS or x.layout is not torch.strided or x.is_nested:
                raise SpecError(
                    f"{self.who} reads a tensor of {x.dim()} dims and layout {x.layout}; make it "
                    f"dense, of {MAX_DIMS} dims at most"
                )
            kind = KIND_OF[x.dtype]
            with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                stand = torch.empty(tuple(x.shape), dtype=_DTYPES[kind], device="meta")
            self._stands[id(x)] = self.value(stand, _Entry(len(self.tensors), ()))
            self._alive.append(x)
            self.tensors.append(x)
            self.writer.builder.aux.append(Aux(kind, x.dim()))
        return self._stands[id(x)]

    def operand_of(self, x: Any, must: str) -> Operand:
        """What a 0-d tensor or a number is in a statement."""
        if not isinstance(x, Tensor):
            if isinstance(x, (bool, int, float)):
                return x
            raise self.writer.unsupported(self.called, f"an operand is {shown(x)}")
        if x.dim() != 0:
            raise SpecError(f"{must}, got shape {tuple(x.shape)}")
        if id(x) not in self.values:
            raise self.writer.unsupported(self.called, "it makes a tensor of its own")
        found = self.values[id(x)]
        return (
            self.writer.builder.index(found.aux, found.indices)
            if isinstance(found, _Entry)
            else found
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        if name in ("_local_scalar_dense", "item", "is_nonzero", "equal"):
            raise SpecError(
                f"{self.who} asks for the value of a tensor (if, while, and, or, not, int(), "
                "float() or .item()), but it is read without values; write torch.where(condition, "
                "x, y), and &, | and ~ between conditions"
            )
        if not func._schema.name.startswith(("aten::", "prims::")):
            raise self.writer.unsupported(func._schema.name)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        for x in args:
            if isinstance(x, (list, tuple)):
                tensors += [y for y in x if isinstance(y, Tensor)]
        is_literal = name.startswith("lift_fresh") and id(args[0]) not in self.values
        if is_literal or all(is_constant(self.values.get(id(x))) for x in tensors):
            return self._constant(func, name, args, kwargs)
        out = func(*tree_map(_as_meta, args), **{**kwargs, **_on_meta(func)})
        if not isinstance(out, Tensor):
            raise self.writer.unsupported(f"aten.{name}")
        if name in ("index", "select"):
            return self._indexed(name, args, out)
        is_new = not name.endswith("_")
        base = name.removesuffix("_")
        if base in _SAME and isinstance(args[0], Tensor):
            entry = self.values.get(id(args[0]))
            if out.dim() == args[0].dim() == 0 or (
                out.dim() == 0 and not isinstance(entry, _Entry)
            ):
                return self.value(out, entry)
            if out.shape == args[0].shape and base in ("clone", "detach", "alias", "contiguous"):
                return self.value(out, entry)
            raise self._dims(name, args[0])
        for x in tensors:
            if x.dim() != 0:
                raise self._dims(name, x)
        if not is_new and isinstance(self.values.get(id(args[0])), _Entry):
            raise self.writer.unsupported(f"aten.{name}", "it writes to a tensor that it reads")
        operand = self._operator(base, args, kwargs, out)
        if not is_new:
            self.values[id(args[0])] = operand
            return args[0]
        return self.value(out, operand)

    def _dims(self, name: str, x: Tensor) -> UnsupportedSpecError:
        return self.writer.unsupported(
            f"aten.{name} on a tensor of {x.dim()} dims",
            "only single entries are read: index each dim, as in table[h, q_idx]",
        )

    def _constant(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """What depends on no input is computed at once."""
        if name.removesuffix("_") in _RANDOM:
            raise self.writer.unsupported(f"aten.{name}", "it is random")
        if "device" in kwargs or _on_meta(func):
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(self._as_number, args), **kwargs)
        if not isinstance(out, Tensor) or out.dim() != 0:
            raise self.writer.unsupported(
                f"aten.{name}", "it makes a tensor that is no single number"
            )
        return self.value(out, out.item())

    def _as_number(self, x: Any) -> Any:
        """A constant on the CPU, with its value."""
        if isinstance(x, Tensor) and x.is_meta:
            return torch.tensor(self.values[id(x)], dtype=x.dtype, device="cpu")
        return x

    def _indexed(self, name: str, args: Any, out: Tensor) -> Tensor:
        x = args[0]
        entry = self.values.get(id(x))
        if not isinstance(entry, _Entry):
            raise self.writer.unsupported(f"aten.{name}", "it indexes a computed tensor")
        if name == "select":
            if args[1] not in (0, -x.dim()):
                raise self._dims(name, x)
            return self.value(out, _Entry(entry.aux, (*entry.indices, int(args[2]))))
        items = args[1]
        if any(y is None or y.dim() != 0 or y.dtype == torch.bool for y in items):
            raise self._dims(name, x)
        at = tuple(self.operand_of(y, f"{self.who}: an index must have no dims") for y in items)
        return self.value(out, _Entry(entry.aux, (*entry.indices, *at)))

    def _operator(self, name: str, args: Any, kwargs: dict[str, Any], out: Tensor) -> Operand:
        """The value of an operator of 0-d tensors."""
        must = f"{self.who}: operands must have no dims"
        numbers = (Tensor, bool, int, float)
        given = [self.operand_of(x, must) if isinstance(x, numbers) else x for x in args]
        named = {
            name: self.operand_of(x, must) if isinstance(x, Tensor) else x
            for name, x in kwargs.items()
        }
        kind = _COMPUTED.get(out.dtype)
        if kind is None:
            raise self.writer.unsupported(
                f"{out.dtype}", "kernels compute in float32, int32, int64 and bool"
            )
        return self.writer.of_kind(kind, self.writer.written(name, given, named, kind))


def _as_meta(x: Any) -> Any:
    """Computed constants are real numbers; all else here has none."""
    if isinstance(x, Tensor) and not x.is_meta:
        with torch._C._DisableTorchDispatch():
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
    return x


def _on_meta(func: Any) -> dict[str, Any]:
    names = {argument.name for argument in func._schema.arguments}
    return {"device": torch.device("meta")} if "device" in names else {}
