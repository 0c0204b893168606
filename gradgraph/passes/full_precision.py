"""Pass: convert a model in mixed precision back to float32, or store its weights in the low precision.

``in_float32`` removes the Casts of mixed precision: readers of a low-precision copy read the original tensor, and
results get their original names. ``with_low_weights`` keeps the model in mixed precision, and stores in the low
precision each weight that is read only through such a Cast.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.marks import is_for_precision, precision_role
from gradgraph.graph.nodes import inputs_of
from gradgraph.passes.autocast import METADATA_KEY, PRECISIONS
from gradgraph.passes.normal.edit import replace_value

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16


def in_float32(model: ir.Model) -> None:
    """Convert a model in mixed precision back to float32, in place."""
    if model.metadata_props.pop(METADATA_KEY, None) is None:
        return
    graph = model.graph
    casts = list(filter(is_for_precision, graph))
    low = {n.inputs[0] for n in casts if _role(n) == "written"} | _rename_unread(graph)
    for value in {v for n in graph if not low.isdisjoint(n.outputs) for v in inputs_of(n)}:
        if value.dtype == FLOAT16 and value.const_value is not None:  # a constant that a later pass added in float16
            _store(value, FLOAT)
    for value in (v for node in graph for v in node.outputs if not v.is_graph_output()):
        value.type = value.shape = None  # types have changed for some values, and need not be declared
    for node in casts:
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None
        if _role(node) == "written":
            source.name, source.type, source.shape, result.name = result.name, result.type, result.shape, None
        replace_value(result, source)
    graph.remove(casts, safe=True)


def _rename_unread(graph: ir.Graph) -> set[ir.Value]:
    """Give low-precision results without a Cast (no node reads them in float32) their original names; return them."""
    outputs = [y for n in graph if not is_for_precision(n) for y in n.outputs]
    taken = {v.name for v in (*graph.inputs, *graph.initializers.values(), *(y for n in graph for y in n.outputs))}
    read = {n.inputs[0] for n in graph if _role(n) == "written"}
    found = set()
    for value in (y for y in outputs if y not in read):
        plain, _, precision = (value.name or "").rpartition(".")
        if precision in PRECISIONS and plain and plain not in taken:
            value.name = plain
            taken.add(plain)
            found.add(value)
    return found


def with_low_weights(model: ir.Model) -> None:
    """Store each weight that only a mixed-precision Cast reads in the Cast's type, and remove the Cast, in place."""
    for node in [n for n in model.graph if _role(n) == "read"]:
        weight = node.inputs[0]
        if weight is None or not weight.is_initializer() or weight.dtype != FLOAT or weight.is_graph_output():
            continue
        if len(weight.uses()) == 1:
            _store(weight, ir.DataType(node.attributes["to"].as_int()))
            replace_value(node.outputs[0], weight)
            model.graph.remove(node, safe=True)


def _store(value: ir.Value, dtype: ir.DataType) -> None:
    """Convert the tensor of an initializer to ``dtype``, in place."""
    assert value.const_value is not None
    value.const_value = ir.Tensor(value.const_value.numpy().astype(dtype.numpy()), dtype=dtype, name=value.name)
    value.type = ir.TensorType(dtype)


def _role(node: ir.Node) -> str:
    return precision_role(node.op_type, node.metadata_props) if is_for_precision(node) else ""
