"""Forward mode: tangents pushed through the nodes in graph order, ``dy = J·dx`` at each.

What is linear in an input is applied to its tangent (``pushes``). Where the Jacobian is symmetric, as that of every
element-wise function of one tensor is, the gradient rule is the product itself. The rest is transposed twice: the
rule gives ``Jᵀ·c``, linear in the cotangent ``c``, and the derivative of that by ``c`` is ``J·t``. So whatever has a
gradient rule has a tangent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph import registry, shapes
from gradgraph.autodiff.path import Path, carries, reads_smoothly
from gradgraph.autodiff.reverse import backward, check_rules
from gradgraph.autodiff.select import Names, find_path, float_outputs, select
from gradgraph.autodiff.transforms import Result, Source, as_given, builder_for, named, new_input
from gradgraph.builder import Builder, Var
from gradgraph.errors import DifferentiationError, shown
from gradgraph.files import load_model
from gradgraph.normal import normalise
from gradgraph.normal.canonical import simplify
from gradgraph.prune import prune

Tangents = Sequence[Var | None]  # of the inputs of a node, in order
Push = Callable[[Builder, ir.Node, Tangents], Tangents | None]
PUSHES: dict[str, Push] = {}


def jvp(model: Source, wrt: Names = None, *, outputs: Names = None, allow_unused: bool = False) -> Result:
    """A model that also returns the Jacobian-vector product: ``<output>.tangent = Σ J(output, name) · tangent``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names and globs of inputs and initializers; by default the trainable initializers, or, in a model
            without any, every floating input. For each, the result has a new input ``"<name>.tangent"`` of the
            tensor's shape and type.
        outputs: names and globs of floating outputs; all of them by default.
        allow_unused: accept names that no output depends on, whose tangents count for nothing.

    Returns:
        The same kind of model (a path gives a ``ModelProto``): the original outputs, then ``"<output>.tangent"`` for
        each output, in its shape and type; zeros for an output that depends on none of the names.

    Raises:
        UnknownNameError, DifferentiationError, UnsupportedOperatorError: as for ``value_and_grad``.
    """
    work = normalise(load_model(model))
    targets = float_outputs(work.graph, outputs)
    chosen = select(work.graph, wrt, targets)
    path = find_path(work, targets, chosen, allow_unused)
    add_tangents(work, path, path.targets, "tangent")
    return as_given(model, work)


def add_tangents(model: ir.Model, path: Path, likes: Sequence[ir.Value], suffix: str) -> None:
    """Add an input ``"<name>.tangent"`` for each of ``path.wrt``, and the tangent of each of ``path.targets``.

    Args:
        model: in normal form; changed in place.
        path: its nodes have rules.
        likes: one value per target, whose name (with ``.<suffix>`` behind it), shape and type the tangent takes.
        suffix: of the new outputs.
    """
    graph = model.graph
    op = builder_for(graph)
    tangents = {x: new_input(op, graph, f"{x.name}.tangent", x) for x in path.wrt}
    forward = _Forward(op, path, tangents)
    found = {like: tangents[y] for like, y in zip(likes, path.targets, strict=True) if y in tangents}
    results = named(op, likes, found, suffix, allow_unused=True)
    op.finish(graph)
    graph.outputs.extend(results)
    prune(model)
    forward.release(model, results)
    prune(simplify(model))


class _Forward:
    """Pushes ``tangents`` along ``path``, and adds those of all values on the way to them."""

    def __init__(self, op: Builder, path: Path, tangents: dict[ir.Value, Var]) -> None:
        self.op, self.path, self.tangents = op, path, tangents
        self._cotangents: dict[ir.Value, ir.Value] = {}  # stand-ins, and the values whose shape they have
        for node in path.nodes:
            op.scope = f"jvp/{node.name}"
            for y, dy in self._pushed(node).items():
                tangents[y] = op.like(dy, op.wrap(y))
        op.scope = "jvp"

    def release(self, model: ir.Model, results: Sequence[ir.Value]) -> None:
        """Take the stand-ins out of the pruned ``model``: their shape is all that may be read of them."""
        left = Path(model.graph, results, self._cotangents).nodes
        if left:
            raise DifferentiationError(
                f"a gradient rule is not linear in its cotangent: the derivative of {left[0].op_type} (node "
                f"'{shown(left[0].name)}') by it depends on it; correct the rule, or use value_and_grad instead"
            )
        self._read_shapes_elsewhere(model.graph)
        for cotangent, y in self._cotangents.items():
            cotangent.replace_all_uses_with(y)

    def _read_shapes_elsewhere(self, graph: ir.Graph) -> None:
        """The shape of what was computed from a stand-in is that of a tensor of the model, if both are known."""
        ours = [*self.path.wrt, *(y for node in self.path.nodes for y in node.outputs)]
        known = {dims: x for x in reversed(ours) if (dims := shapes.shape_of(x)) is not None and None not in dims}
        computed = Path(graph, (), self._cotangents).reached
        for node in graph.all_nodes():
            if node.op_type == "Shape" and node.inputs[0] in computed:
                node.replace_input_with(0, known.get(shapes.shape_of(node.inputs[0]) or (None,), node.inputs[0]))

    def _pushed(self, node: ir.Node) -> Mapping[ir.Value, Var]:
        """The tangents of the outputs of ``node``; those that are zero are left out."""
        push = PUSHES.get(node.op_type) if node.domain == "" else None
        inputs = [None if x is None else self.tangents.get(x) for x in node.inputs]
        if push is not None and any(t is not None for t in inputs):
            outputs = push(self.op, node, inputs)
            if outputs is not None:
                return {y: dy for y, dy in zip(node.outputs, outputs, strict=True) if dy is not None}
        return self._transposed(node)

    def _transposed(self, node: ir.Node) -> Mapping[ir.Value, Var]:
        """Jᵀ·c by the rules, and its derivative by c."""
        op = self.op
        sources = dict.fromkeys(x for x in reads_smoothly(node) if x in self.tangents)
        outputs = [y for y in node.outputs if y in self.path.active]
        cotangents = {y: self._stand_in(y) for y in outputs}
        before = len(op.nodes)
        pulled = backward(op, Path([node], outputs, sources), cotangents)
        seeds: dict[ir.Value, list[Var]] = {}
        for x, dx in pulled.items():  # x + y gives both the same cotangent
            seeds.setdefault(dx.value, []).append(self.tangents[x])
        linear = Path(op.nodes[before:], seeds, [c.value for c in cotangents.values()])
        check_rules(linear)
        pushed = backward(op, linear, {dx: op.sum_of(terms) for dx, terms in seeds.items()})
        return {y: pushed[c.value] for y, c in cotangents.items() if c.value in pushed}

    def _stand_in(self, y: ir.Value) -> Var:
        cotangent = ir.Value(name=self.op.fresh(f"{y.name}.cotangent"), type=y.type, shape=y.shape)
        self._cotangents[cotangent] = y
        return self.op.wrap(cotangent)


# --- what is linear in its inputs ----------------------------------------------------------------------


def pushes(op_types: str) -> Callable[[Push], Push]:
    """Register how tangents pass: ``push(op, node, tangents)`` gives one per output, ``None`` to transpose instead."""

    def register(push: Push) -> Push:
        PUSHES.update(dict.fromkeys(op_types.split(), push))
        return push

    return register


def _again(op: Builder, node: ir.Node, inputs: Mapping[int, Var | None]) -> list[Var]:
    """``node`` with some of its inputs replaced."""
    attrs: dict[str, Any] = dict(node.attributes)
    operands = [inputs[i] if i in inputs else None if x is None else op.wrap(x) for i, x in enumerate(node.inputs)]
    results = op.emit(node.op_type, *operands, outputs=len(node.outputs), **attrs)
    return [results] if isinstance(results, Var) else list(results)


def _widened(op: Builder, t: Var, y: ir.Value) -> Var:
    """``t`` broadcast to the shape of ``y``, where it may be smaller."""
    known = shapes.shape_of(y)
    same = known is not None and None not in known and t.shape == known
    wide: Var = t if same else op.Expand(t, op.shape(op.wrap(y)))
    return wide


@pushes(
    "AveragePool Cast CumSum DepthToSpace Expand Flatten Gather GatherElements GatherND GlobalAveragePool Identity "
    "ReduceMean ReduceSum Reshape Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze"
)
def _linear(op: Builder, node: ir.Node, ts: Tangents) -> Tangents | None:
    """Linear in the first input; the others are positions and sizes."""
    return _again(op, node, {0: ts[0]})


@pushes("Mul MatMul Einsum")
def _multilinear(op: Builder, node: ir.Node, ts: Tangents) -> Tangents:
    """The product rule: Σ f(…, tᵢ, …)."""
    return [op.sum_of([_again(op, node, {i: t})[0] for i, t in enumerate(ts) if t is not None])]


@pushes("Conv ConvTranspose")
def _convolution(op: Builder, node: ir.Node, ts: Tangents) -> Tangents | None:
    x, w, b = (*ts, None)[:3]
    if b is not None and w is None:
        return None
    terms = [_again(op, node, {0: x, 2: None})] if x is not None else []
    terms += [_again(op, node, {1: w, 2: b})] if w is not None else []
    return [op.sum_of([term[0] for term in terms])]


@pushes("Gemm")
def _gemm(op: Builder, node: ir.Node, ts: Tangents) -> Tangents | None:
    """``α·(tA·B + A·tB) + β·tC``, each product adding up what there is so far."""
    factors, total = ts[:2], (*ts, None)[2]
    if not any(t is not None for t in factors):
        return None
    attrs = registry.attributes(node)
    for left, right in ((factors[0], node.inputs[1]), (node.inputs[0], factors[1])):
        if left is not None and right is not None:
            total = op.Gemm(_var(op, left), _var(op, right), total, **attrs)
            attrs["beta"] = 1.0
    return [total]


def _var(op: Builder, x: ir.Value | Var) -> Var:
    return x if isinstance(x, Var) else op.wrap(x)


@pushes("Add Sum")
def _sum(op: Builder, node: ir.Node, ts: Tangents) -> Tangents:
    return [_widened(op, op.sum_of([t for t in ts if t is not None]), node.outputs[0])]


@pushes("Sub")
def _difference(op: Builder, node: ir.Node, ts: Tangents) -> Tangents:
    a, b = ts
    total = a if b is None else -b if a is None else a - b
    assert total is not None
    return [_widened(op, total, node.outputs[0])]


@pushes("Concat Where")
def _zeros_elsewhere(op: Builder, node: ir.Node, ts: Tangents) -> Tangents:
    floating = {i: x for i, x in enumerate(node.inputs) if x is not None and carries(x)}
    return _again(op, node, {i: ts[i] or op.zeros_like(op.wrap(x)) for i, x in floating.items()})


# --- whose Jacobian is symmetric ------------------------------------------------------------------------


@pushes(
    "Abs Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Log Mish Neg "
    "Reciprocal Relu Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt Tan Tanh ThresholdedRelu"
)
def _symmetric(op: Builder, node: ir.Node, ts: Tangents) -> Tangents | None:
    """``J·t = Jᵀ·t``: functions of each element (J is diagonal), and Softmax (``J = diag(y) - y·yᵀ``)."""
    rule = registry.rule_of(node)
    return None if rule is None else [rule(op, node, ts)[0]]
