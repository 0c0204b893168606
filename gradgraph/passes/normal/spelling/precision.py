"""Pass: compute in float32 where tensors are stored in bfloat16.

CPU runtimes have hardly any bfloat16 kernels (only data movement and Cast), and half of ONNX's operators do not allow
the type before opset 22. So only inputs, initializers, outputs and results of Casts stay bfloat16, and all values
between them are computed in float32:

1. inputs, initializers and results of Casts are followed by a Cast to float32 if a node other than a Cast reads them;
2. constants, and attributes that contain or name the type, become float32;
3. each output is preceded by a Cast back to bfloat16.

Gradients pass through the Casts, so bfloat16 tensors get bfloat16 gradients. Nothing is rounded in between.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.graph.builder import Builder
from gradgraph.graph.marks import is_marked_constant
from gradgraph.passes.normal.edit import calls_of, graph_of, graphs_of, names_of, nodes_of

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
_NAMES_A_TYPE = ("dtype", "precision", "softmax_precision", "stash_type")


def compute_in_float32(model: ir.Model) -> bool:
    """Convert a model that computes in bfloat16 to float32, in place; return True if anything was converted.

    All constants must be initializers.

    Raises:
        ModelError: an input or output is a sequence or optional of bfloat16 tensors.
    """
    _check_containers(model.graph)
    op = Builder(names_of(model))
    stored = _stored(model)
    inner = [v for node in nodes_of(model) for v in node.outputs]
    inner += [v for graph in graphs_of(model) if graph is not model.graph for v in graph.inputs]
    computed = {v for v in inner if _is_narrow(v)} - set(stored)
    written = [i for i, v in enumerate(model.graph.outputs) if v in computed]
    for value in computed:
        value.type = _widened(value.type)
    changed = [
        bool(computed),
        _widen_constants(model),
        *(retype_attributes(node, NARROW, *_NAMES_A_TYPE) for node in nodes_of(model)),
    ]
    changed += [_read_through_cast(model, op, value) for value in stored]
    for place in written:
        _write_through_cast(model.graph, op, place)
    return any(changed)


# --- classification --------------------------------------------------------------------------------------


def _is_narrow(value: ir.Value) -> bool:
    return value.dtype == NARROW


def _check_containers(graph: ir.Graph) -> None:
    for value in (*graph.inputs, *graph.outputs):
        if _is_narrow(value) and not isinstance(value.type, ir.TensorType):
            raise ModelError(
                f"'{shown(value.name)}' is a sequence or optional of bfloat16 tensors, which cannot be cast at the "
                "boundary of the model; make its elements float32"
            )


def _stored(model: ir.Model) -> list[ir.Value]:
    """Return the values that stay bfloat16: inputs, parameters, and results of Casts."""
    graph = model.graph
    parameters = (v for v in graph.initializers.values() if not is_marked_constant(v))
    cast = (n.outputs[0] for n in calls_of(model, "Cast") if n.attributes["to"].as_int() == NARROW)
    return list(dict.fromkeys([*filter(_is_narrow, (*graph.inputs, *parameters)), *cast]))


# --- rewriting -------------------------------------------------------------------------------------------


def _widened(old: ir.TypeProtocol | None) -> ir.TypeProtocol:
    if isinstance(old, ir.SequenceType | ir.OptionalType):
        return type(old)(_widened(old.elem_type))
    return ir.TensorType(WIDE)


def _wide_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(WIDE.numpy()), name=tensor.name)


def retype_attributes(node: ir.Node, old: ir.DataType, *names: str) -> bool:
    """Change the type ``old`` to float32 in tensor attributes of ``node``, and in the attributes ``names``."""
    new: dict[str, ir.Attr] = {}
    for name, attr in node.attributes.items():
        if attr.type == ir.AttributeType.TENSOR and attr.as_tensor().dtype == old:
            new[name] = ir.AttrTensor(name, _wide_tensor(attr.as_tensor()))
        elif name in names and attr.type == ir.AttributeType.INT and attr.as_int() == old:
            new[name] = ir.AttrInt64(name, int(WIDE))
    node.attributes.update(new)
    return bool(new)


def _widen_constants(model: ir.Model) -> bool:
    constants = [v for v in model.graph.initializers.values() if is_marked_constant(v) and _is_narrow(v)]
    for value in constants:
        assert value.const_value is not None
        value.const_value, value.type = _wide_tensor(value.const_value), ir.TensorType(WIDE)
    return bool(constants)


def _read_through_cast(model: ir.Model, op: Builder, value: ir.Value) -> bool:
    """Make readers of ``value`` other than Casts, and body outputs, read a float32 copy; return False if none."""
    producer = value.producer()
    graph = model.graph if producer is None else graph_of(producer)
    readers = [(use.node, use.idx) for use in value.uses() if use.node.op_type != "Cast"]
    results = [] if graph is model.graph else [i for i, v in enumerate(graph.outputs) if v is value]
    if not readers and not results:
        return False
    wide = op.like(op.Cast(op.wrap(value), to=int(WIDE)), op.wrap(value)).value
    if producer is None:
        op.finish(graph, before=next(iter(graph), None))
    else:
        graph.insert_after(producer, op.nodes)
        op.nodes = []
    for node, i in readers:
        node.replace_input_with(i, wide)
    for i in results:
        graph.outputs[i] = wide
    return True


def _write_through_cast(graph: ir.Graph, op: Builder, place: int) -> None:
    value = graph.outputs[place]
    name = value.name or ""
    value.name = op.fresh(name)
    narrow = op.like(op.Cast(op.wrap(value), to=int(NARROW)), op.wrap(value)).value
    narrow.name = name
    op.finish(graph)
    graph.outputs[place] = narrow
