"""The table of gradient rules, and the test cases of rules as data.

An operator has a rule (``@vjp``), is declared to have no gradient (``no_gradient``, with the mathematical reason), is
refused (``refuse``, with the reason and a remedy), or is absent from the table. For an absent operator, the function
body of its schema is differentiated. Without such a body, an error explains how to register a rule.

A rule is a function with these parameters:

- the builder ``op``;
- ``dy, y``, the cotangent and value of the first output (any names except ``dys, ys``), or ``dys, ys``, tuples of the
  cotangents and values of all outputs, with ``None`` for an output without a cotangent;
- the inputs, in the order of the ONNX specification;
- the attributes by keyword, including defaults.

It returns one gradient per input, or ``None`` for an input without a gradient; trailing ``None`` may be omitted::

    @vjp("Mul", case(real(2, 3), real(2, 3)), case(real(2, 1, 3), real(4, 1)), broadcasts=True)
    def mul(op, dz, z, x, y):
        return dz * y, dz * x

Rules emit every gradient, whether it is wanted or not: unread nodes are pruned later. They only emit operators that
have rules themselves, so that second derivatives need no other rules. They do not depend on the opset (see
``gradgraph.passes.normal``). With ``broadcasts=True``, gradients may have the shape of the output; the caller sums them
to the shape of each input. Test cases are only data; ``gradgraph.verify`` draws their numbers and runs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import is_detached
from gradgraph.graph.nodes import plain
from gradgraph.graph.schemas import default_attributes
from gradgraph.graph.shapes import OPSET

Gradients = Sequence[Var | None]
Emit = Callable[..., Gradients]
Key = tuple[str, str]  # domain, op_type


# --- test cases of rules, as data ---------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """A random input of a case: its distribution and shape. Floating-point draws are differentiated."""

    kind: str
    shape: tuple[int, ...]
    low: float = -1.0
    high: float = 1.0

    @property
    def differentiable(self) -> bool:
        return self.kind not in ("integers", "boolean")


def real(*shape: int) -> Draw:
    """Return a draw with random sign and magnitude uniform on [0.2, 2], to avoid kinks at zero."""
    return Draw("real", shape, 0.2, 2.0)


def positive(*shape: int) -> Draw:
    """Return a draw, uniform on [0.5, 2]."""
    return Draw("uniform", shape, 0.5, 2.0)


def uniform(low: float, high: float, *shape: int) -> Draw:
    """Return a draw, uniform on [low, high]."""
    return Draw("uniform", shape, low, high)


def distinct(*shape: int) -> Draw:
    """Return a draw of values at least 0.05 apart, in random order: without ties, for max, min, sorting and pooling."""
    return Draw("distinct", shape)


def integers(low: int, high: int, *shape: int) -> Draw:
    """Return a draw of int64 numbers in [low, high)."""
    return Draw("integers", shape, low, high)


def boolean(*shape: int) -> Draw:
    """Return a draw of booleans, equally likely."""
    return Draw("boolean", shape)


@dataclass(frozen=True)
class Case:
    """A test case: a call of an operator. Inputs are draws, literals (constants without gradients) or ``None``."""

    inputs: tuple[Any, ...]
    attrs: dict[str, Any]
    outputs: int = 1
    read: tuple[int, ...] | None = None  # the outputs that get a cotangent; all floating-point ones by default
    first_order_only: str = ""  # the reason to skip second order, if any
    constant_literals: str = ""  # the reason why literals cannot be run-time inputs, if any
    known_shapes: str = ""  # the reason why shapes must be known, if any
    onnxruntime: str = ""  # the reason why onnxruntime cannot run the case, if any
    graph: str = ""  # nodes in ONNX's text form, from x0, x1, … to y0, y1, …, instead of the operator alone


def case(
    *inputs: Any,
    outputs: int = 1,
    read: Sequence[int] | None = None,
    first_order_only: str = "",
    constant_literals: str = "",
    known_shapes: str = "",
    onnxruntime: str = "",
    graph: str = "",
    **attrs: Any,
) -> Case:
    """Return a case for the rule kit: ``case(real(2, 3), [1], keepdims=0)``; keyword arguments are ONNX attributes.

    An operator with subgraphs, or one that needs other nodes, is tested in a graph, written in ONNX's text form with
    ``real`` for the tested type: ``case(real(3), graph="s = SequenceConstruct(x0, x0) y0 = SequenceAt(s, x1)")``.

    The kit compares gradients with central differences in float64: with all shapes known, with unknown shapes, with
    alternate axes known, and with the literals as run-time inputs. Then it checks the second-order gradient, and the
    gradient in onnxruntime in float32. To skip a check, pass a reason: ``first_order_only`` and so on.
    """
    chosen = None if read is None else tuple(read)
    return Case(inputs, attrs, outputs, chosen, first_order_only, constant_literals, known_shapes, onnxruntime, graph)


@dataclass(frozen=True)
class Point:
    """A test of a convention at a kink, tie or edge: exact inputs, a cotangent of ones, and the expected gradients."""

    case: Case
    gives: tuple[Any, ...]


def point(*inputs: Any, gives: Sequence[Any], outputs: int = 1, graph: str = "", **attrs: Any) -> Point:
    """Return a point such as ``point([0.0, -0.0], gives=[[0.0, 0.0]])``.

    ``gives`` contains the expected gradient of each input, or ``None`` to skip the check. Like a case, a point may be a
    graph of several nodes.
    """
    return Point(Case(inputs, attrs, outputs, graph=graph), tuple(gives))


class Bodies(Protocol):
    """The subgraphs of a control-flow node, passed to the node's rule."""

    @property
    def captured(self) -> Sequence[Var]:
        """The outer values that the subgraphs read and that need a gradient."""
        ...

    def active(self, value: ir.Value) -> bool:
        """Whether ``value``, an input or output of the node or a value in a subgraph, is on the gradient path."""
        ...

    def readers(self, value: Var) -> list[ir.Node]:
        """Return the nodes on the path that read a captured ``value`` inside the subgraphs, at any depth."""
        ...

    def gradients(
        self, op: Builder, graph: ir.Graph, inputs: Sequence[Var], dys: Sequence[Var | None], wrt: Sequence[Var]
    ) -> list[Var | None]:
        """Copy a subgraph applied to ``inputs``, append its backward pass, and return the gradient of each of ``wrt``.

        ``wrt`` may contain ``inputs``, captured values and values of ``graph`` (whose copies are then differentiated).
        Forward nodes whose outputs are unused remain; they are pruned later.
        """
        ...


# --- the table ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Why an operator with a derivative has no rule (a clause that follows "as"), and what to do instead."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    op_type: str
    emit: Emit
    whole: bool  # the rule accepts the cotangents of all outputs
    cases: tuple[Case, ...]
    points: tuple[Point, ...]
    family: str
    domain: str = ""
    broadcasts: bool = False
    settings: frozenset[int] = frozenset()  # indices of float inputs that select a behaviour, without gradient
    captures: bool = False  # the rule accepts ``bodies``, and also returns the gradients of captured values

    @classmethod
    def of(cls, op_type: str, emit: Emit, trials: Sequence[Case | Point], **more: Any) -> Rule:
        """Return the rule ``emit`` with its test cases and points; ``more`` are further fields."""
        cases = tuple(t for t in trials if isinstance(t, Case))
        points = tuple(t for t in trials if isinstance(t, Point))
        whole = list(inspect.signature(emit).parameters)[1:3] == ["dys", "ys"]
        return cls(op_type, emit, whole, cases, points, emit.__module__.rsplit(".", 1)[-1], **more)

    def __call__(
        self, op: Builder, node: ir.Node, dys: Sequence[Var | None], bodies: Bodies | None = None
    ) -> list[Var | None]:
        """Return the gradients of every input of ``node``, not summed over broadcast axes, then of captured values."""
        ys = tuple(op.wrap(y) for y in node.outputs)
        first = (tuple(dys), ys) if self.whole else (dys[0], ys[0])
        inputs = [op.wrap(x) for x in node.inputs]
        more = {"bodies": bodies} if self.captures else {}
        gradients = list(self.emit(op, *first, *inputs, **attributes(node), **more))
        count = len(inputs) + (len(bodies.captured) if bodies is not None and self.captures else 0)
        # a rule may omit trailing gradients, or return None for an absent optional input
        return (gradients + [None] * count)[:count]


RULES: dict[Key, Rule] = {}
NO_GRADIENT: dict[Key, str] = {}
REFUSED: dict[Key, Refusal] = {}


def vjp(
    op_type: str,
    *trials: Case | Point,
    broadcasts: bool = False,
    settings: Sequence[int] = (),
    captures: bool = False,
    domain: str = "",
) -> Callable[[Emit], Emit]:
    """Return a decorator that registers the vector-Jacobian product of an operator; see the module's docstring.

    Args:
        op_type, domain: the name and domain of the operator.
        trials: test cases and points for the rule kit.
        broadcasts: whether gradients may have the shape of the output.
        settings: indices of floating-point inputs that select a behaviour (Dropout's ratio, Resize's scales) and
            therefore never have a gradient.
        captures: whether the operator has subgraphs. Then the rule accepts ``bodies`` (see ``Bodies``) by keyword, and
            returns one gradient for each of ``bodies.captured`` after those of the inputs.
    """

    def register(emit: Emit) -> Emit:
        RULES[domain, op_type] = Rule.of(op_type, emit, trials, domain=domain, broadcasts=broadcasts,
                                         settings=frozenset(settings), captures=captures)  # fmt: skip
        NO_GRADIENT.pop((domain, op_type), None)
        REFUSED.pop((domain, op_type), None)
        return emit

    return register


def no_gradient(reason: str, *op_types: str, domain: str = "") -> None:
    """Declare that operators have no derivative or a zero one, and why; backward passes stop there without an error."""
    for op_type in op_types:
        NO_GRADIENT[domain, op_type] = reason


def refuse(reason: str, remedy: str, *op_types: str, domain: str = "") -> None:
    """Declare that operators have no rule, and why; one on the path to a loss raises an error with the remedy."""
    for op_type in op_types:
        REFUSED[domain, op_type] = Refusal(reason, remedy)


def refusal_of(node: ir.Node) -> Refusal | None:
    return REFUSED.get(key_of(node))


def rule_of(node: ir.Node) -> Rule | None:
    return RULES.get(key_of(node))


def is_own(node: ir.Node) -> bool:
    """Whether the rule of ``node`` is gradgraph's own, not registered by a user."""
    rule = rule_of(node)
    return rule is not None and rule.emit.__module__.startswith("gradgraph.rules.")


def stops_gradient(node: ir.Node) -> bool:
    return key_of(node) in NO_GRADIENT or is_detached(node)


def why_it_stops(node: ir.Node) -> str:
    """Return the reason why ``node`` has no gradient."""
    return "the model detaches it" if is_detached(node) else NO_GRADIENT[key_of(node)]


def key_of(node: ir.Node) -> Key:
    domain = node.domain
    return ("" if domain == "ai.onnx" else domain, node.op_type)


def attributes(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of a node, including schema defaults, as Python values (tensors and graphs unchanged)."""
    return plain({**default_attributes(node.op_type, OPSET, key_of(node)[0]), **node.attributes.data})
