"""The inline PTX of emitted Gluon files, run for all threads of a partition at once.

Knows the few instructions they use: named barriers, setp, vote, forward branches, and some
arithmetic. Approximate instructions are exact here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np
from gluon_machine import Fault, Machine


@functools.cache
def _program(text: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int]]:
    """[(predicate, opcode, operands)] and the labels."""
    program: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    body = text.strip()
    if body.startswith("{") and body.endswith("}"):
        body = body[1:-1]
    for line in re.split(r"[;\n]", body):
        line = line.strip()
        while match := re.match(r"([A-Za-z_$%][\w$%]*):\s*", line):
            labels[match[1].lstrip("$%")] = len(program)
            line = line[match.end() :]
        if not line or line.startswith((".reg", "//")):
            continue
        match = re.match(r"(?:@(!?[\w%]+)\s+)?([\w.]+)\s*(.*)$", line)
        if match is None:
            raise Fault(f"PTX is not emulated: {line}")
        operands = [operand.strip() for operand in match[3].split(",") if operand.strip()]
        program.append((match[1] or "", match[2], operands))
    return program, labels


def _shifted(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) << by.astype(np.uint32)).view(x.dtype)


def _flushed(x: np.ndarray) -> np.ndarray:
    """Numbers too small for a normal float32 are 0."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs,
    "add": np.add,
    "copysign": lambda sign, x: np.copysign(x, sign),
    "ex2": lambda x: _flushed(np.exp2(x)),
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
    "max": np.fmax,
    "max.NaN": np.maximum,
    "mul": np.multiply,
    "rcp": np.reciprocal,
    "selp": lambda x, y, p: np.where(p, x, y),
    "shl": _shifted,
    "sub": np.subtract,
}


class Threads:
    """Registers of the threads of a partition while they run one block of PTX."""

    def __init__(self, machine: Machine, registers: dict[str, np.ndarray], threads: int) -> None:
        self._machine = machine
        self.registers = registers
        self._threads = threads
        self._skip_to = np.zeros(threads, np.int64)

    def run(self, text: str) -> None:
        program, labels = _program(text)
        for at, (predicate, opcode, operands) in enumerate(program):
            active = self._skip_to <= at
            if predicate:
                holds = self._read(predicate.lstrip("!"))
                active = active & (~holds if predicate.startswith("!") else holds)
            if opcode.startswith("bra"):
                target = labels[operands[0].lstrip("$%")]
                if target <= at and active.any():
                    raise Fault("PTX that branches backwards is not emulated")
                self._uniform(active, opcode)
                self._skip_to[active] = target
            else:
                self._step(opcode, operands, active)

    def _uniform(self, active: np.ndarray, opcode: str) -> None:
        warps = active.reshape(-1, 32)
        if opcode == "bra.uni" and not np.array_equal(warps.any(1), warps.all(1)):
            raise Fault("bra.uni: threads of a warp disagree")

    def _step(self, opcode: str, operands: list[str], active: np.ndarray) -> None:
        name, *kinds = opcode.split(".")
        name += ".NaN" if "NaN" in kinds else ""
        if name in ("bar", "barrier") and kinds[0] in ("sync", "arrive"):
            ids = np.unique(self._read(operands[0]))
            if len(ids) != 1 or not active.all():
                raise Fault(f"{opcode}: threads of a partition name different barriers")
            count = int(self._read(operands[1])[0])
            self._machine.named_barrier(kinds[0], int(ids[0]), count)
            return
        if name == "nanosleep":
            return
        if name == "mov":
            value = self._read(operands[1])
        elif name in ARITHMETIC and kinds[-1] in ("f32", "b32"):
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                value = ARITHMETIC[name](*[self._read(operand) for operand in operands[1:]])
        elif name == "setp":
            value = self._compare(kinds, [self._read(operand) for operand in operands[1:]])
        elif name == "vote" and kinds[-1] == "pred":
            how = {"any": np.any, "all": np.all}[kinds[-2]]
            among = self._read(operands[1]).reshape(-1, 32)
            value = np.repeat(how(among, axis=1), 32)
        else:
            raise Fault(f"PTX is not emulated: {opcode}")
        target = operands[0]
        if target in self.registers:  # in place: operands may be tied
            self.registers[target][active] = value[active]
        else:
            self.registers[target] = np.where(active, value, np.zeros_like(value))

    @staticmethod
    def _compare(kinds: list[str], values: list[np.ndarray]) -> np.ndarray:
        x, y, *others = values
        ordered = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        how = {"eq": np.equal, "neu": np.not_equal, **ordered}.get(kinds[0])
        if how is None:
            raise Fault(f"PTX is not emulated: setp.{'.'.join(kinds)}")
        result: np.ndarray = how(x, y)
        if others:
            result = {"or": np.logical_or, "and": np.logical_and}[kinds[1]](result, others[0])
        return result

    def _read(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", operand):
            value = np.array([int(operand[2:], 16)], np.uint32).view(np.float32)
            return np.repeat(value, self._threads)
        try:
            return np.full(self._threads, int(operand, 0))
        except ValueError:
            raise Fault(f"PTX reads {operand}, which nothing has written") from None
