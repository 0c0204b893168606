"""Elementwise nodes as lines of a program for the native kernel ``Elementwise`` (``kernels/elementwise.cc``).

Most operators correspond to an instruction of the same name; for others, this module defines a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_native.library import DOMAIN
from gradgraph.graph.schemas import attributes_without_schema
from gradgraph.graph.shapes import small_constant
from gradgraph.rules.registry import attributes, key_of

FLOAT, BOOL = ir.DataType.FLOAT, ir.DataType.BOOL
Place: TypeAlias = tuple[str, int] | str  # ("input", index), ("line", index) or "#number"


class Program:
    """A program under construction; ``node`` creates the kernel's node.

    A place is the source of an operand: an input, the result of a line, or a number.

    Attributes:
        inputs: the tensors that the program reads.
        lines: for each instruction with its operands, the index of its line.
    """

    def __init__(self) -> None:
        self.inputs: list[ir.Value] = []
        self.lines: dict[tuple[str, tuple[Place, ...]], int] = {}
        self._places: dict[ir.Value, Place] = {}

    def add(self, instruction: str, *operands: Place | float) -> Place:
        """Add a line unless an equal one exists, and return the place of its result; operands may be numbers."""
        line = instruction, tuple(p if isinstance(p, str | tuple) else written_number(p) for p in operands)
        return "line", self.lines.setdefault(line, len(self.lines))

    def append(self, program: str, operands: Sequence[Place]) -> list[Place]:
        """Append the lines of ``program``, a text; return the places of ``operands`` and of the lines' results."""
        places = [*operands]
        for line in program.split(";"):
            name, *read = line.split()
            places.append(self.add(name, *(o if o.startswith("#") else places[int(o)] for o in read)))
        return places

    def write(self, node: ir.Node) -> None:
        """Append the computation of ``node``, whose operator must be in ``OPERATORS``."""
        self._places[node.outputs[0]] = OPERATORS[key_of(node)](self, node)

    def operand(self, value: ir.Value | None) -> Place:
        """Return the place of ``value``: a result, a constant, or an input, which is added if it is new."""
        assert value is not None
        if value not in self._places:
            known = small_constant(value)
            if known is not None and known.size == 1:
                return written_number(known.item())
            self._places[value] = "input", len(self.inputs)
            self.inputs.append(value)
        return self._places[value]

    def operands(self, node: ir.Node) -> list[Place]:
        """Return the operand for each input of ``node``; see ``operand``."""
        return [self.operand(x) for x in node.inputs]

    def node(self, results: Sequence[ir.Value]) -> ir.Node:
        """Return the native node that computes ``results`` by the lines added so far."""
        given: list[Place] = []
        for place in (self._places[value] for value in results):  # a boolean and its Cast have the same place
            given.append(self.add("Identity", place) if place in given else place)
        attrs = {
            "program": "; ".join(" ".join([name, *map(self._written, operands)]) for name, operands in self.lines),
            "arity": len(self.inputs),
            "outputs": [int(self._written(place)) for place in given],
        }
        made = attributes_without_schema(attrs)
        return ir.Node(DOMAIN, "Elementwise", self.inputs, made, num_outputs=len(results))

    def _written(self, place: Place) -> str:
        if isinstance(place, str):
            return place
        kind, which = place
        return str(which + len(self.inputs) if kind == "line" else which)


def written_number(x: float) -> str:
    """Return ``x`` as an operand: nine digits identify every float32."""
    return f"#{np.float32(x):.9g}"


# --- operators ---------------------------------------------------------------------------------------------------

Write: TypeAlias = Callable[[Program, ir.Node], Place]
OPERATORS: dict[tuple[str, str], Write] = {}


def written(op_type: str, domain: str = "") -> Callable[[Write], Write]:
    """Return a decorator that adds to ``OPERATORS`` a function that translates nodes of an operator to lines."""

    def register(write: Write) -> Write:
        OPERATORS[domain, op_type] = write
        return write

    return register


def _as_instruction(name: str) -> Write:
    return lambda p, node: p.add(name, *p.operands(node))


def _as_lines(program: str) -> Write:
    """Return a function that writes a node as the lines of ``program``, where a word in braces is an attribute."""
    return lambda p, node: p.append(program.format_map(_Numbers(attributes(node))), p.operands(node))[-1]


class _Numbers(dict[str, Any]):
    def __getitem__(self, name: str) -> str:
        return written_number(super().__getitem__(name))


def _one_by_one(name: str) -> Write:
    """Return a function that folds all operands with the two-operand instruction ``name``, from left to right."""

    def write(p: Program, node: ir.Node) -> Place:
        total, *others = p.operands(node)
        for other in others:
            total = p.add(name, total, other)
        return total

    return write


_ALIKE = (
    "Abs Add And Ceil Div Equal Erf Exp Floor Greater GreaterOrEqual Less LessOrEqual Log Mul Neg Not Or Pow "
    "Reciprocal Relu Round Sigmoid Sign Softplus Sqrt Sub Tanh Where"
)
OPERATORS.update({("", name): _as_instruction(name) for name in _ALIKE.split()})
OPERATORS.update({("", name): _one_by_one(line) for name, line in (("Max", "Max"), ("Min", "Min"), ("Sum", "Add"))})
OPERATORS["", "PRelu"] = _as_instruction("LeakyRelu")
_LINES = {
    "Elu": "Elu 0 {alpha}",
    "HardSigmoid": "HardSigmoid 0 {alpha} {beta}",
    "HardSwish": f"HardSigmoid 0 {written_number(1 / 6)} #0.5; Mul 0 1",
    "LeakyRelu": "LeakyRelu 0 {alpha}",
    "Mish": "Softplus 0; Tanh 1; Mul 0 2",
    "Selu": "Elu 0 {alpha}; Mul 1 {gamma}",
    "Softsign": "Abs 0; Add 1 #1; Div 0 2",
    "ThresholdedRelu": "Greater 0 {alpha}; Where 1 0 #0",
}
OPERATORS.update({("", name): _as_lines(program) for name, program in _LINES.items()})


@written("Cast")
def _cast(p: Program, node: ir.Node) -> Place:
    (x,) = p.operands(node)
    return p.add("NotEqual", x, 0.0) if node.outputs[0].dtype == BOOL else x  # booleans are the floats 0 and 1


@written("Clip")
def _clip(p: Program, node: ir.Node) -> Place:
    result, *bounds = [None if x is None else p.operand(x) for x in node.inputs]
    assert result is not None
    for name, bound in zip(("Max", "Min"), bounds, strict=False):
        result = result if bound is None else p.add(name, result, bound)
    return result


@written("Celu")
def _celu(p: Program, node: ir.Node) -> Place:
    (x,), alpha = p.operands(node), attributes(node)["alpha"]
    return p.add("Mul", p.add("Elu", p.add("Div", x, alpha), 1.0), alpha) if alpha != 1.0 else p.add("Elu", x, 1.0)


@written("Gelu")
def _gelu(p: Program, node: ir.Node) -> Place:
    (x,) = p.operands(node)
    if attributes(node)["approximate"] == "none":
        return p.add("Mul", x, p.add("HardSigmoid", p.add("Erf", p.add("Mul", x, 0.5**0.5)), 0.5, 0.5))
    k = (8 / np.pi) ** 0.5  # x·σ(k·(x + 0.044715·x³))
    inner = p.add("Mul", x, p.add("Add", p.add("Mul", p.add("Mul", x, x), 0.044715 * k), k))
    return p.add("Mul", x, p.add("Sigmoid", inner))


@written("Elementwise", DOMAIN)
def _program(p: Program, node: ir.Node) -> Place:
    """Append the program of the Elementwise ``node``, which has one output; return the place of its result."""
    last: int = attributes(node)["outputs"][0]
    return p.append(attributes(node)["program"], p.operands(node))[last]
