"""Pass: convert a model in mixed precision back to float32, or store its weights in the low precision.

``in_float32`` removes the Casts of mixed precision: readers of a low-precision copy read the original tensor, and
results get their original names. ``with_low_weights`` keeps the model in mixed precision, and stores in the low
precision each weight that is read only through such a Cast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx
from onnx import numpy_helper

from gradgraph.files.protos import node_graphs, proto_nodes, reads
from gradgraph.graph.marks import precision_role
from gradgraph.passes.autocast import METADATA_KEY, PRECISIONS

FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16


def in_float32(model: onnx.ModelProto) -> None:
    """Convert a model in mixed precision back to float32, in place."""
    if not _take_mark(model):
        return
    graph = model.graph
    casts = [n for n in graph.node if _role(n)]
    ends = {v.name for v in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    gone = {n.output[0]: n.input[0] for n in casts if _role(n) == "read"}
    own = {n.input[0]: n.output[0] for n in casts if _role(n) == "written"}
    taken = ends | {y for n in graph.node for y in n.output}
    for name in [y for n in graph.node for y in n.output if y not in own and y not in gone]:
        plain = name.rpartition(".")[0]  # a low-precision result without a Cast, as no node reads it in float32
        if name.rpartition(".")[2] in PRECISIONS and plain and plain not in taken:
            own[name] = plain
            taken.add(plain)
    renamed = {name: _final_name(name, {**gone, **own}) for name in (*gone, *own)}
    kept = [n for n in graph.node if not _role(n)]
    read_low = {x for n in kept if any(y in own for y in n.output) for x in n.input}
    for node in kept:
        _rename(node, renamed)
    del graph.node[:]
    graph.node.extend(kept)
    for tensor in graph.initializer:
        if tensor.data_type == FLOAT16 and tensor.name in read_low:  # a constant that a later pass added in float16
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name))
    del graph.value_info[:]  # types have changed for some values, and value_info is optional


def with_low_weights(model: onnx.ModelProto) -> None:
    """Store each weight that only a mixed-precision Cast reads in the Cast's type, and remove the Cast, in place."""
    graph = model.graph
    read_by = Counter(name for n in graph.node for name in reads(n))
    weights = {t.name: t for t in graph.initializer}
    ends = {v.name for v in graph.output}
    gone: dict[str, str] = {}
    for node in [n for n in graph.node if _role(n) == "read" and n.input[0] in weights]:
        tensor = weights[node.input[0]]
        to = next(a.i for a in node.attribute if a.name == "to")
        if tensor.data_type != FLOAT or read_by[tensor.name] != 1 or tensor.name in ends:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(to)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
        gone[node.output[0]] = tensor.name
    low = set(gone.values())
    described = [v for v in graph.value_info if v.name not in low]
    del graph.value_info[:]
    graph.value_info.extend(described)
    kept = [n for n in graph.node if not (n.output and n.output[0] in gone)]
    for node in kept:
        _rename(node, gone)
    del graph.node[:]
    graph.node.extend(kept)


def _take_mark(model: onnx.ModelProto) -> bool:
    kept = [p for p in model.metadata_props if p.key != METADATA_KEY]
    found = len(kept) < len(model.metadata_props)
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return found


def _role(node: onnx.NodeProto) -> str:
    if node.op_type != "Cast" or node.domain:
        return ""
    return precision_role(node.op_type, {p.key: p.value for p in node.metadata_props})


def _final_name(name: str, names: Mapping[str, str]) -> str:
    """Return the name that finally replaces ``name``: ``names`` maps one side of each Cast to the other, in chains."""
    while name in names:
        name = names[name]
    return name


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename the inputs and outputs of ``node``, and outer values that its bodies read, by ``names``."""
    for inner in proto_nodes([node]):
        for field in (inner.input, inner.output):
            for i, name in enumerate(field):
                field[i] = names.get(name, name)
        for value in (v for graph in node_graphs(inner) for v in graph.output):
            value.name = names.get(value.name, value.name)
