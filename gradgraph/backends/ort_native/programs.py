"""Element-wise nodes as lines of a program for the native kernel ``Elementwise`` (``kernels/elementwise.cc``).

Most operators are an instruction of the same name; the others are a few lines here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_native.library import DOMAIN
from gradgraph.graph.shapes import small_constant
from gradgraph.rules.registry import attributes, key_of

FLOAT, BOOL = ir.DataType.FLOAT, ir.DataType.BOOL
Place: TypeAlias = tuple[str, int] | str  # ("input", which), ("line", which) or "#number"


class Program:
    """Lines written one after the other; ``node`` makes them the attributes of a kernel."""

    def __init__(self) -> None:
        self.inputs: list[ir.Value] = []
        self.lines: dict[tuple[str, tuple[Place, ...]], int] = {}
        self._places: dict[ir.Value, Place] = {}

    def add(self, instruction: str, *operands: Place | float) -> Place:
        """The result of a line, a new one if there is none like it; a number is an operand, too."""
        line = instruction, tuple(written_number(p) if isinstance(p, float) else p for p in operands)
        return "line", self.lines.setdefault(line, len(self.lines))

    def write(self, node: ir.Node) -> None:
        """Append what ``node``, one of ``OPERATORS``, computes."""
        self._places[node.outputs[0]] = OPERATORS[key_of(node)](self, node)

    def operand(self, value: ir.Value | None) -> Place:
        """Where ``value`` stands: a result, a known number, or an input, which is added."""
        assert value is not None
        if value not in self._places:
            known = small_constant(value)
            if known is not None and known.size == 1:
                return written_number(known.item())
            self._places[value] = "input", len(self.inputs)
            self.inputs.append(value)
        return self._places[value]

    def operands(self, node: ir.Node) -> list[Place]:
        """Where its inputs stand."""
        return [self.operand(x) for x in node.inputs]

    def node(self, results: Sequence[ir.Value]) -> ir.Node:
        """The native node that gives ``results``, which were written."""
        given: list[Place] = []
        for place in (self._places[value] for value in results):  # a truth value and its Cast are one place
            given.append(self.add("Identity", place) if place in given else place)
        attrs = {
            "program": "; ".join(" ".join([name, *map(self._written, operands)]) for name, operands in self.lines),
            "arity": len(self.inputs),
            "outputs": [int(self._written(place)) for place in given],
        }
        return ir.Node(
            DOMAIN,
            "Elementwise",
            self.inputs,
            ir.convenience.convert_attributes(attrs),
            num_outputs=len(results),
        )

    def _written(self, place: Place) -> str:
        if isinstance(place, str):
            return place
        kind, which = place
        return str(which + len(self.inputs) if kind == "line" else which)


def written_number(x: float) -> str:
    """As an operand: nine digits tell every float32."""
    return f"#{np.float32(x):.9g}"


# --- operators ---------------------------------------------------------------------------------------------------

Write: TypeAlias = Callable[[Program, ir.Node], Place]
OPERATORS: dict[tuple[str, str], Write] = {}


def written(op_type: str, domain: str = "") -> Callable[[Write], Write]:
    """Register how an operator is written; its operands are all its inputs."""

    def register(write: Write) -> Write:
        OPERATORS[domain, op_type] = write
        return write

    return register


def _as_instruction(name: str) -> Write:
    return lambda p, node: p.add(name, *p.operands(node))


def _one_by_one(name: str) -> Write:
    """Apply ``name`` to the first two operands, then to the result and the third, and so on."""

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


@written("Cast")
def _cast(p: Program, node: ir.Node) -> Place:
    (x,) = p.operands(node)
    return p.add("NotEqual", x, 0.0) if node.outputs[0].dtype == BOOL else x  # it changes no truth value


@written("Clip")
def _clip(p: Program, node: ir.Node) -> Place:
    result, *bounds = [None if x is None else p.operand(x) for x in node.inputs]
    assert result is not None
    for name, bound in zip(("Max", "Min"), bounds, strict=False):
        result = result if bound is None else p.add(name, result, bound)
    return result


@written("LeakyRelu")
def _leaky_relu(p: Program, node: ir.Node) -> Place:
    return p.add("LeakyRelu", *p.operands(node), attributes(node)["alpha"])


@written("ThresholdedRelu")
def _thresholded_relu(p: Program, node: ir.Node) -> Place:
    (x,) = p.operands(node)
    return p.add("Where", p.add("Greater", x, attributes(node)["alpha"]), x, 0.0)


@written("HardSigmoid")
def _hard_sigmoid(p: Program, node: ir.Node) -> Place:
    attrs = attributes(node)
    return p.add("HardSigmoid", *p.operands(node), attrs["alpha"], attrs["beta"])


@written("HardSwish")
def _hard_swish(p: Program, node: ir.Node) -> Place:
    (x,) = p.operands(node)
    return p.add("Mul", x, p.add("HardSigmoid", x, 1 / 6, 0.5))


@written("Elu")
def _elu(p: Program, node: ir.Node) -> Place:
    return p.add("Elu", *p.operands(node), attributes(node)["alpha"])


@written("Celu")
def _celu(p: Program, node: ir.Node) -> Place:
    (x,), alpha = p.operands(node), attributes(node)["alpha"]
    return p.add("Mul", p.add("Elu", p.add("Div", x, alpha), 1.0), alpha) if alpha != 1.0 else p.add("Elu", x, 1.0)


@written("Selu")
def _selu(p: Program, node: ir.Node) -> Place:
    attrs = attributes(node)
    return p.add("Mul", p.add("Elu", *p.operands(node), attrs["alpha"]), attrs["gamma"])


@written("Softsign")
def _softsign(p: Program, node: ir.Node) -> Place:
    (x,) = p.operands(node)
    return p.add("Div", x, p.add("Add", p.add("Abs", x), 1.0))


@written("Mish")
def _mish(p: Program, node: ir.Node) -> Place:
    (x,) = p.operands(node)
    return p.add("Mul", x, p.add("Tanh", p.add("Softplus", x)))


def _normal_cdf(p: Program, x: Place) -> Place:
    return p.add("HardSigmoid", p.add("Erf", p.add("Mul", x, 0.5**0.5)), 0.5, 0.5)


@written("Gelu")
def _gelu(p: Program, node: ir.Node) -> Place:
    (x,) = p.operands(node)
    if attributes(node)["approximate"] == "none":
        return p.add("Mul", x, _normal_cdf(p, x))
    k = (8 / np.pi) ** 0.5  # x·σ(k·(x + 0.044715·x³))
    inner = p.add("Mul", x, p.add("Add", p.add("Mul", p.add("Mul", x, x), 0.044715 * k), k))
    return p.add("Mul", x, p.add("Sigmoid", inner))


@written("Elementwise", DOMAIN)
def _program(p: Program, node: ir.Node) -> Place:
    """A program of one result that a form has written."""
    places = p.operands(node)
    for line in attributes(node)["program"].split(";"):
        name, *operands = line.split()
        places.append(p.add(name, *(o if o.startswith("#") else places[int(o)] for o in operands)))
    last: int = attributes(node)["outputs"][0]
    return places[last]
