"""Named operators: operators of the domain ``gradgraph`` for computations of backward passes and optimizers.

A rule calls a named operator like a function of the builder::

    @named_operator("ConvGradWeight", like=[2], shape_only=[2])
    def weight_gradient(op, x, dy, w, *, group=1, strides=None, pads=None, dilations=None): ...

The decorated function is its *portable form*: standard ONNX nodes that run in every runtime. Transforms (``gg.vjp``, …)
write that form directly. A training step (``Builder(named_operators=True)``) keeps a single node
``gradgraph.ConvGradWeight``. ``backends.functions`` turns it into a call of a model-local function with the portable
form as its body, and ``backends`` replaces it with the fastest form for a machine. Rules thus define the mathematics,
and backends the performance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.schemas import attributes_without_schema
from gradgraph.graph.scoped_names import DOMAIN as DOMAIN
from gradgraph.rules.registry import Case

Write = Callable[..., Any]  # (op, *inputs, **attributes) -> Var, or a tuple of them
Portable = TypeVar("Portable", bound=Write)

_SHAPE = "shape_of_"  # attribute prefix for the known shape of an input that is not passed


@dataclass(frozen=True)
class NamedOperator:
    """A named operator: its portable form, and the signature of its nodes.

    Attributes:
        name: the name in the domain ``gradgraph``.
        portable: the function that writes the operator in standard ONNX nodes.
        like: for each output, the index of the input whose type and shape it has.
        shape_only: the indices of inputs that are needed only for their shape. If the shape is known, the input is not
            passed, so that the runtime can free it.
        parameters: the names of the inputs.
        cases: inputs and attributes for the tests of the operator's forms.
    """

    name: str
    portable: Write
    like: tuple[int, ...]
    shape_only: frozenset[int]
    parameters: tuple[str, ...]
    cases: tuple[Case, ...]

    def call(self, op: Builder, *inputs: Var | None, **attrs: Any) -> Any:
        """Write a single node or the portable form, depending on the builder, and return the outputs."""
        return _named(op, self, inputs, attrs) if op.named_operators else self.portable(op, *inputs, **attrs)


OPERATORS: dict[str, NamedOperator] = {}


def named_operator(
    name: str, *cases: Case, like: Sequence[int] = (0,), shape_only: Sequence[int] = (), inputs: str = ""
) -> Callable[[Portable], Portable]:
    """Return a decorator that registers a function as the portable form of a named operator.

    The decorated name then calls the operator. Attributes are passed by keyword: numbers, strings, lists of numbers, or
    ``None`` for an absent attribute.

    Args:
        name: the name in the domain ``gradgraph``.
        cases: inputs and attributes for the tests of the operator's forms.
        like, shape_only: see ``NamedOperator``.
        inputs: the names of the inputs, if the function has ``*inputs``.
    """

    def register(portable: Portable) -> Portable:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        declared = [p.name for p in inspect.signature(portable).parameters.values() if p.kind in kinds][1:]
        names = inputs.split() or declared
        operator = NamedOperator(name, portable, tuple(like), frozenset(shape_only), tuple(names), cases)
        OPERATORS[name] = operator

        return cast(Portable, operator.call)

    return register


def _named(op: Builder, operator: NamedOperator, inputs: Sequence[Var | None], attrs: dict[str, Any]) -> Any:
    """Write a node of the domain ``gradgraph`` that calls ``operator``, and return its outputs."""
    passed: list[ir.Value | None] = []
    for i, x in enumerate(inputs):
        found = None if x is None else x.shape  # infers the shape now, as backend forms only read recorded shapes
        dims = found if i in operator.shape_only else None
        known = shapes.all_sizes(dims) or []
        if known:  # an empty list has no type
            attrs[f"{_SHAPE}{operator.parameters[i]}"] = known
        passed.append(None if x is None or known else x.value)
    while passed and passed[-1] is None:
        passed.pop()
    node = ir.Node(DOMAIN, operator.name, passed, attributes_without_schema(attrs), num_outputs=len(operator.like))
    node.name = op.fresh_in(op.scope, operator.name)
    for i, (out, source) in enumerate(zip(node.outputs, operator.like, strict=True)):
        model = inputs[source]
        assert model is not None
        out.name = node.name if i == 0 else op.fresh(f"{node.name}:{i}")
        out.type, out.shape = model.value.type, None if model.shape is None else ir.Shape(model.shape)
    op.nodes.append(node)
    results = tuple(op.wrap(out) for out in node.outputs)
    return results[0] if len(results) == 1 else results


def operator_of(node: ir.Node) -> NamedOperator | None:
    """Return the named operator that ``node`` calls, or None if it calls another operator."""
    return OPERATORS.get(node.op_type) if node.domain == DOMAIN else None


def arguments(op: Builder, node: ir.Node) -> tuple[list[Var | None], dict[str, Any]]:
    """Return the inputs and attributes of a call; omitted ``shape_only`` inputs become values with only a shape."""
    operator = OPERATORS[node.op_type]
    attrs = {a.name: list(a.value) if isinstance(a.value, tuple | list) else a.value for a in node.attributes.values()}
    floats = (v.type for v in node.inputs if v is not None and v.dtype is not None and v.dtype.is_floating_point())
    dtype = next(floats, None)
    inputs: list[Var | None] = []
    for i, name in enumerate(operator.parameters):
        value = node.inputs[i] if i < len(node.inputs) else None
        dims = attrs.pop(f"{_SHAPE}{name}", None)
        if value is None and dims is not None:
            value = ir.Value(name=op.fresh(f"shape of {name}"), type=dtype, shape=ir.Shape(dims))
        inputs.append(op.wrap(value))
    return inputs, attrs


def describe(node: ir.Node) -> None:
    """Set the types and shapes of a call's outputs to those of the inputs listed in ``like``."""
    for out, source in zip(node.outputs, OPERATORS[node.op_type].like, strict=True):
        model = node.inputs[source] if source < len(node.inputs) else None
        if model is not None and model.shape is not None:
            out.shape = model.shape


def write_portable(op: Builder, node: ir.Node) -> tuple[Var, ...]:
    """Write the portable form of a call with ``op``, and return its outputs."""
    inputs, attrs = arguments(op, node)
    written = OPERATORS[node.op_type].portable(op, *inputs, **attrs)
    results = written if isinstance(written, tuple) else (written,)
    for result, old in zip(results, node.outputs, strict=True):
        if result.value.shape is None and old.shape is not None:
            shapes.record_shape(result.value, shapes.as_dims(old.shape))
    return results
