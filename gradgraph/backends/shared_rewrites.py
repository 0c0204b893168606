"""Rewrites shared by backends: replace loops and constants that some runtimes reject or compute incorrectly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.backends.facts import copied, is_output_twice, read_slices
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import small_constant
from gradgraph.passes.normal.edit import Editor, calls_of, names_of, nodes_of
from gradgraph.passes.normal.spelling.precision import retype_attributes
from gradgraph.passes.rewrites import Rewrite

WIDE, NARROW = ir.DataType.DOUBLE, ir.DataType.FLOAT
LAST = -(2**31 - 1)  # the end of a Slice that includes the first element when stepping backwards; fits in 32 bits


# --- loops ----------------------------------------------------------------------------------------------------


def make_scans_forward(model: ir.Model) -> None:
    """Make every Scan run forward, in place, by reversing the tensors that it reads or writes backward."""
    editor = Editor(model)
    for node in calls_of(model, "Scan"):
        slices = node.attributes["num_scan_inputs"].as_int()
        states = len(node.inputs) - slices
        back_in = node.attributes.get_ints("scan_input_directions", [0] * slices)
        back_out = node.attributes.get_ints("scan_output_directions", [0] * (len(node.outputs) - states))
        if any(back_in) or any(back_out):
            _write_forward(editor, node, states, back_in, back_out)


def _write_forward(editor: Editor, node: ir.Node, states: int, back_in: Sequence[int], back_out: Sequence[int]) -> None:
    """Replace the Scan ``node`` with a forward one; 1 in ``back_in`` or ``back_out`` marks tensors read in reverse."""
    op = editor.op
    op.scope = node.name or ""
    sliced = zip(node.inputs[states:], back_in, _axes(node, "input", len(back_in)), strict=True)
    inputs = [_reversed(op, op.wrap(v), axis).value if back and v is not None else v for v, back, axis in sliced]
    axes = _axes(node, "output", len(back_out))
    for name in ("scan_input_directions", "scan_output_directions"):
        node.attributes.pop(name, None)
    results = _scan_like(op, node, [*node.inputs[:states], *inputs], node.outputs)
    stacked = zip(results[states:], back_out, axes, strict=True)
    turned = [_reversed(op, y, axis) if back else y for y, back, axis in stacked]
    editor.replace(node, *results[:states], *turned)


def _axes(node: ir.Node, side: str, count: int) -> Sequence[int]:
    return node.attributes.get_ints(f"scan_{side}_axes", [0] * count)


def _scan_like(op: Builder, node: ir.Node, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value]) -> list[Var]:
    """Write a Scan with outputs like ``outputs``, and move the body and attributes of ``node`` to it."""
    new = ir.Node("", "Scan", inputs, [node.attributes.pop(name) for name in list(node.attributes)],
                  num_outputs=len(outputs), name=op.fresh_in(op.scope, "Scan"))  # fmt: skip
    for out, like in zip(new.outputs, outputs, strict=True):
        out.name, out.type, out.shape = op.fresh(like.name or "out"), like.type, like.shape
    op.nodes.append(new)
    return [Var(op, out) for out in new.outputs]


def _reversed(op: Builder, x: Var, axis: int) -> Var:
    return op.like(op.Slice(x, [-1], [LAST], [axis], [-1]), x)


def close_scans(model: ir.Model) -> None:
    """Remove captured outer values from bodies of Scans, in place: constants are copied, other values become states."""
    editor = Editor(model)
    for node in calls_of(model, "Scan"):
        body = node.attributes["body"].as_graph()
        inside = {body, *body.subgraphs()}
        values = (v for n in body.all_nodes() for v in n.inputs if v is not None)
        read = list(dict.fromkeys(v for v in values if _home(v) not in inside))
        if read:
            _close_body(editor, node, body, read)


def _home(value: ir.Value) -> ir.Graph | ir.Function | None:
    """Return the graph that computes ``value``, or has it as an input or initializer; None if there is none."""
    producer = value.producer()
    return value.graph if producer is None else producer.graph


def _close_body(editor: Editor, node: ir.Node, body: ir.Graph, read: Sequence[ir.Value]) -> None:
    """Make ``body`` read the captured values ``read`` as its own Constants, or as states that it returns unchanged."""
    op, states = editor.op, len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    op.scope = node.name or ""
    carried: list[tuple[ir.Value, ir.Value]] = []
    constants = []
    for outer in read:
        inner = ir.Value(name=op.fresh(f"{outer.name}.inside"), type=outer.type, shape=outer.shape)
        constant = small_constant(outer)
        if constant is None:
            carried.append((outer, inner))
        else:
            attribute = ir.AttrTensor("value", ir.Tensor(constant))
            constants.append(ir.Node("", "Constant", [], [attribute], outputs=[inner], name=inner.name))
        for user in body.all_nodes():
            for i in (i for i, value in enumerate(user.inputs) if value is outer):
                user.replace_input_with(i, inner)
    for constant_node in reversed(constants):
        body.insert_before(next(iter(body)), [constant_node])
    kept = [op.like(op.Identity(Var(op, inner)), Var(op, outer)).value for outer, inner in carried]
    body.extend(op.nodes)
    op.nodes = []
    body.inputs[states:states] = [inner for _, inner in carried]
    body.outputs[states:states] = kept
    fed = [outer for outer, _ in carried]
    inputs = [*node.inputs[:states], *fed, *node.inputs[states:]]
    results = _scan_like(op, node, inputs, [*node.outputs[:states], *fed, *node.outputs[states:]])
    editor.replace(node, *results[:states], *results[states + len(fed) :])


def part_slices(model: ir.Model) -> None:
    """Make each scan output a separate Identity in the body, in place: tract would also reshape its other uses."""
    op = Builder(names_of(model))
    for node in calls_of(model, "Scan"):
        body = node.attributes["body"].as_graph()
        for i in read_slices(node):
            body.outputs[i] = op.Identity(op.wrap(body.outputs[i])).value
        body.extend(op.nodes)
        op.nodes = []


# --- constants ------------------------------------------------------------------------------------------------


def narrow_numbers(model: ir.Model) -> None:
    """Compute float64 intermediates in float32, in place, unless inputs or outputs of the model are float64.

    These intermediates are scalars of an optimizer. ``1 − βᵗ``, which would cancel in float32, becomes ``2h/(1+h)``
    with ``h = tanh(s/2)`` and ``s = −t·ln β``: accurate to 4e-7 for any t, where runtimes' float32 Pow is accurate to
    2e-5.
    """
    if any(v.dtype == WIDE for v in (*model.graph.inputs, *model.graph.outputs)):
        return
    editor = Editor(model)
    for node in list(nodes_of(model)):
        if node.op_type == "Sub" and node.domain == "" and node.outputs[0].dtype == WIDE:
            _without_cancellation(editor, node)
    for value in list(model.graph.initializers.values()):
        if value.dtype == WIDE and value.const_value is not None:
            value.const_value = ir.Tensor(value.const_value.numpy().astype(np.float32), name=value.name)
            value.type = ir.TensorType(NARROW)
    for node in nodes_of(model):
        retype_attributes(node, WIDE, "to")
        for result in node.outputs:
            if result.dtype == WIDE:
                result.type = ir.TensorType(NARROW)


def _without_cancellation(editor: Editor, node: ir.Node) -> None:
    """Replace ``node`` with ``2h/(1+h)`` if it is ``1 − βᵗ`` for a constant β in (0, 1); see :func:`narrow_numbers`."""
    one, power = node.inputs
    source = None if power is None else power.producer()
    if one is None or source is None or source.op_type != "Pow":
        return
    base, exponent = source.inputs
    known = [None if v is None else small_constant(v) for v in (one, base)]
    if exponent is None or any(k is None or k.size != 1 for k in known):
        return
    first, beta = (float(k.item()) for k in known if k is not None)
    if first == 1.0 and 0.0 < beta < 1.0:
        half = editor.op.Tanh(Var(editor.op, exponent) * (-math.log(beta) / 2))
        editor.replace(node, half * 2.0 / (half + 1.0))


# --- outputs --------------------------------------------------------------------------------------------------


def part_outputs(model: ir.Model) -> None:
    """Separate outputs that copy the same constant through Identities, in place.

    OpenVINO drops Identities, and if two outputs are then the same constant, it loses the name of one. Each such output
    gets a copy of a small constant; for a large one, its Identity becomes a Cast.
    """
    op = Builder(names_of(model))
    for node in model.graph:
        if not is_output_twice(node):
            continue
        constant = small_constant(copied(node.inputs[0]))
        if constant is None:
            node.op_type = "Cast"
            node.attributes["to"] = ir.AttrInt64("to", int(node.outputs[0].dtype or ir.DataType.FLOAT))
        else:
            name = op.fresh(f"{node.outputs[0].name}.first")
            own = ir.Value(name=name, type=node.outputs[0].type, shape=ir.Shape(constant.shape))
            own.const_value = ir.Tensor(constant, name=name)
            model.graph.register_initializer(own)
            node.replace_input_with(0, own)


NARROW_NUMBERS = Rewrite(narrow_numbers, "scalars of optimizers in float32: some runtimes lack float64, or narrow it")
TURN_SCANS = Rewrite(make_scans_forward, "Scans run forward: some runtimes support no other direction")
CLOSE_SCANS = Rewrite(close_scans, "bodies capture nothing: some runtimes reject captures")
PART_SLICES = Rewrite(part_slices, "scan outputs have no other reader in the body")
PART_OUTPUTS = Rewrite(part_outputs, "outputs of the same constant have nodes of their own")
