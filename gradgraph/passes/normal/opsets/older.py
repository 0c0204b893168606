"""Convert a model of opset 21 to an older opset, for runtimes that do not support a newer one.

``@until(18, "ReduceMean", ...)`` registers the in-place change to the form of an operator before opset 18. An attribute
that the older operator does not have is removed if the older operator implies its value. Operators that the
older opset does not have are replaced by their function bodies; functions whose bodies need sizes are inlined first.
Every node that cannot be converted is reported by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, Finding
from gradgraph.graph.checks import describe
from gradgraph.graph.nodes import input_at
from gradgraph.graph.schemas import Signature, known_since, signature
from gradgraph.graph.shapes import IR_VERSION, OPSET, constant_of
from gradgraph.passes.normal.edit import Editor, attributes, graph_of, nodes_of
from gradgraph.passes.normal.functions.function_bodies import instantiate_body
from gradgraph.passes.normal.functions.inline import inline_functions
from gradgraph.passes.normal.opsets.opset import convert
from gradgraph.passes.normal.sizes.infer import infer_shapes

OLDEST_WRITTEN = 17  # LayerNormalization was added in 17
IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, OPSET: IR_VERSION}  # IR versions of the onnx releases of these opsets

_NOT_BY_BODY = {"AffineGrid"}  # operators whose body onnxruntime loads only if it expands the operator itself

Change = Callable[[ir.Node], "str | None"]  # changes a node in place, or returns why that is impossible
_CHANGES: dict[str, list[tuple[int, Change]]] = {}


def until(opset: int, *op_types: str) -> Callable[[Change], Change]:
    """Return a decorator that registers a change for nodes of these operators at opsets before ``opset``."""

    def register(change: Change) -> Change:
        for op_type in op_types:
            _CHANGES.setdefault(op_type, []).append((opset, change))
        return change

    return register


def check_opset(opset: int) -> None:
    """Raise BuildError if models cannot be converted to ``opset``."""
    if opset not in IR_VERSIONS:
        raise BuildError(f"the opset must be from {OLDEST_WRITTEN} to {OPSET}, not {opset}")


def write_at(model: ir.Model, opset: int) -> ir.Model:
    """Convert ``model`` from opset 21 to ``opset``, in place, with the IR version of its release; return ``model``.

    Raises:
        BuildError: an operator needs a newer opset; there is a finding for each such node.
    """
    check_opset(opset)
    if opset == OPSET:
        return model
    functions = {name: _function_at(function, opset) for name, function in model.functions.items()}
    if inline_functions(model, [name for name, written in functions.items() if written is None]):
        infer_shapes(model)
    found = list(_write(model, Editor(model), opset))
    model.functions.update({name: written for name, written in functions.items() if written is not None})
    if found:
        more = f" (and {len(found) - 1} more such nodes)" if len(found) > 1 else ""
        raise BuildError(f"{found[0].problem}{more}", found, remedy=found[0].remedy)
    model.opset_imports[""] = opset
    model.ir_version = IR_VERSIONS[opset]
    return model


def _function_at(function: ir.Function, opset: int) -> ir.Function | None:
    """Return a copy of ``function`` at ``opset``; None if the conversion needs sizes, which are known only at calls."""
    copy: ir.Function = ir.from_proto(ir.to_proto(function))
    inner = ir.Model(copy.graph, ir_version=IR_VERSION)
    if any(_write(inner, Editor(inner), opset)):
        return None
    _constants_inside(copy.graph)
    copy.opset_imports[""] = opset
    return copy


def _write(model: ir.Model, editor: Editor, opset: int) -> Iterator[Finding]:
    """Convert the nodes of ``model`` to ``opset``, in place; yield a finding for each that cannot be converted."""
    while _expanded(editor, [n for n in nodes_of(model) if _is_newer(n, opset)]):
        pass
    for node in [n for n in nodes_of(model) if n.domain == ""]:
        if (why := _problem_of_writing(node, opset)) is not None:
            yield Finding(describe(node), why, remedy=f"build at opset {OPSET}, or rewrite that part of the model")


def _is_newer(node: ir.Node, opset: int) -> bool:
    """Whether the operator did not exist at ``opset``, or meant something else."""
    return node.domain == "" and (signature(node.op_type, opset) is None or node.op_type == "GroupNormalization")


def _expanded(editor: Editor, nodes: list[ir.Node]) -> bool:
    """Replace ``nodes`` with their function bodies, in place; return False if no node has a function body."""
    done = False
    for node in nodes:
        outputs = None if node.op_type in _NOT_BY_BODY else instantiate_body(editor.op, node)
        if outputs is not None:
            done = True
            for new in editor.replace(node, *outputs):
                if new.version is not None:
                    convert(editor, new, new.version)
    return done


def _problem_of_writing(node: ir.Node, opset: int) -> str | None:
    """Convert ``node`` to its older form, in place; return an error message if that is impossible, else None."""
    old = signature(node.op_type, opset)
    if old is None:
        return f"needs opset {known_since()[node.op_type]}, but the file is written at {opset}"
    for first, change in _CHANGES.get(node.op_type, ()):
        if opset < first and (why := change(node)) is not None:
            return why
    return None if old == signature(node.op_type, OPSET) else _misfit(node, old, opset)


def _misfit(node: ir.Node, old: Signature, opset: int) -> str | None:
    """Remove attributes of ``node`` that the older opset implies; return why it is still invalid, or None if valid."""
    for name in [n for n in node.attributes if n not in old.attributes]:
        if attributes(node)[name] not in (_DEFAULTS.get(name), *([1] * n for n in range(1, 4))):
            return f"has {name}, which {node.op_type} does not have at opset {opset}"
        del node.attributes[name]
    if len(node.inputs) > old.most:
        return f"has {len(node.inputs)} inputs, but {node.op_type} has at most {old.most} at opset {opset}"
    for values, outputs in ((node.inputs, False), (node.outputs, True)):
        for i, value in enumerate(values):
            if value is None or value.dtype is None or not isinstance(value.type, ir.TensorType):
                continue
            name = value.dtype.name.lower()
            if f"tensor({name})" not in old.formal(i, outputs).allowed:
                return f"has type {name}, which {node.op_type} does not support at opset {opset}"
    return None


_DEFAULTS = {"saturate": 1, "keep_aspect_ratio_policy": "stretch", "antialias": 0, "block_size": 0, "output_dtype": 0,
             "ceil_mode": 0, "stash_type": 1, "noop_with_empty_axes": 0}  # fmt: skip


def _constants_inside(graph: ir.Graph) -> None:
    """Replace the initializers of a function's graph with Constant nodes, because functions have no initializers."""
    for name, value in list(graph.initializers.items()):
        assert value.const_value is not None
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)])
        del graph.initializers[name]
        value.replace_all_uses_with(node.outputs[0])
        value.name, node.outputs[0].name = None, name
        graph.insert_before(graph[0], node)


# --- operators whose form changed ---------------------------------------------------------------------------


@until(18, "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin")
@until(18, "ReduceProd", "ReduceSumSquare")
def reduction(node: ir.Node) -> str | None:
    """Convert the axes input to an attribute; return an error message if it is computed or selects no axis."""
    axes = constant_of(input_at(node, 1))
    if input_at(node, 1) is not None and axes is None:
        return "has computed axes, which only opset 18 can express"
    stays = bool(attributes(node).get("noop_with_empty_axes"))
    node.attributes.pop("noop_with_empty_axes", None)
    node.resize_inputs(1)
    if axes is not None and axes.size:
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(a) for a in axes.ravel()])
    elif stays:
        return "reduces over no axis, which only opset 18 can express"
    return None


@until(18, "Split")
def split(node: ir.Node) -> str | None:
    """Replace num_outputs with the sizes of the parts; return an error message if the axis has unknown size."""
    count = attributes(node).get("num_outputs")
    node.attributes.pop("num_outputs", None)
    if count is None or input_at(node, 1) is not None:
        return None
    x, axis = node.inputs[0], int(attributes(node).get("axis", 0))
    size = None if x is None or x.shape is None else x.shape[axis]
    if not isinstance(size, int):
        return "splits an axis of unknown size, but opset 17 requires the sizes of parts; fix that size"
    part = -(-size // count)
    sizes = np.array([part] * (count - 1) + [size - part * (count - 1)], np.int64)
    node.resize_inputs(2)
    _set_constant(node, 1, sizes)
    return None


def _set_constant(node: ir.Node, i: int, value: np.ndarray[Any, Any]) -> None:
    constant = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(value))])
    constant.outputs[0].name = f"{node.outputs[0].name}.input{i}"
    graph_of(node).insert_before(node, constant)
    node.replace_input_with(i, constant.outputs[0])


@until(18, "Pad")
def pad(node: ir.Node) -> str | None:
    """Expand the pads to all axes, as Pad before opset 18 has no axes input; return an error message if impossible."""
    if (given := input_at(node, 3)) is None:
        return None
    pads, axes, x = constant_of(node.inputs[1]), constant_of(given), node.inputs[0]
    if pads is None or axes is None or x is None or x.shape is None:
        return "pads axes that are unknown, which only opset 18 can express"
    whole = np.zeros((2, len(x.shape)), np.int64)
    whole[:, axes] = pads.reshape(2, -1)
    node.resize_inputs(3)
    _set_constant(node, 1, whole.ravel())
    return None


@until(19, "Pad")
def pad_around(node: ir.Node) -> str | None:
    """Return an error message for mode "wrap", which opset 19 introduced; else None."""
    return "has mode=wrap, which only opset 19 can express" if attributes(node).get("mode") == "wrap" else None


@until(19, "Resize")
def resize(node: ir.Node) -> str | None:
    """Return an error message for half_pixel_symmetric, which opset 19 introduced; else None."""
    mode = attributes(node).get("coordinate_transformation_mode")
    return "is half_pixel_symmetric, which only opset 19 can express" if mode == "half_pixel_symmetric" else None


@until(18, "ScatterElements", "ScatterND")
def scatter(node: ir.Node) -> str | None:
    """Return an error message for the reductions "max" and "min", which opset 18 introduced; else None."""
    how = attributes(node).get("reduction")
    return f"has reduction={how}, which only opset 18 can express" if how in ("max", "min") else None


@until(20, "GridSample")
def grid_sample(node: ir.Node) -> str | None:
    """Convert the modes to their older names; return an error message unless inputs have two spatial axes."""
    x = node.inputs[0]
    if x is None or x.shape is None or len(x.shape) != 4:
        return "has an input of unknown rank, or without exactly two image axes, which only opset 20 supports"
    names = {"linear": "bilinear", "cubic": "bicubic"}
    mode = str(attributes(node).get("mode", "linear"))
    node.attributes["mode"] = ir.AttrString("mode", names.get(mode, mode))
    return None


@until(20, "DFT")
def dft(node: ir.Node) -> str | None:
    """Convert the axis input to an attribute; return the reason if that is impossible, else None."""
    axis = constant_of(input_at(node, 2))
    if input_at(node, 2) is not None and axis is None:
        return "has a computed axis, which only opset 20 can express"
    value = -2 if axis is None else int(axis)
    x = node.inputs[0]
    if value < 0:
        if x is None or x.shape is None:
            return "has a negative axis and unknown rank, which only opset 20 can express"
        value += len(x.shape)
    node.resize_inputs(2)
    node.attributes["axis"] = ir.AttrInt64("axis", value)
    return None
