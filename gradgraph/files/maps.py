"""Removal of ZipMap nodes: gradgraph does not support their outputs, maps from labels to numbers (ai.onnx.ml)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import onnx

from gradgraph.errors import ModelError, shown
from gradgraph.files.protos import proto_graphs

_ZIP = ("ai.onnx.ml", "ZipMap")


def without_maps(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return ``proto`` with each ZipMap replaced by an Identity, so its output is a matrix with one column per label.

    A model with maps is copied, not changed. skl2onnx ends classifiers with a ZipMap, unless ``zipmap=False``.

    Raises:
        ModelError: if the model has other maps, such as the input of a DictVectorizer.
    """
    if not any(_holds_map(v.type) for v in _declared(proto)):
        return proto
    changed = copy.deepcopy(proto)
    zipped = {n.output[0] for n in changed.graph.node if (n.domain, n.op_type) == _ZIP and len(n.output) == 1}
    for node in changed.graph.node:
        if (node.domain, node.op_type) == _ZIP:
            node.domain, node.op_type = "", "Identity"
            del node.attribute[:]
    for value in _declared(changed):
        if value.name in zipped:
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
        elif _holds_map(value.type):
            raise ModelError(
                f"'{shown(value.name)}' is a map from labels to numbers, through which no gradient passes; cut the "
                "model after the operator that converts it to a tensor (DictVectorizer, CastMap)"
            )
    return changed


def _declared(proto: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    for graph in proto_graphs(proto):
        yield from (*graph.input, *graph.output, *graph.value_info)


def _holds_map(kind: onnx.TypeProto) -> bool:
    while kind.HasField("sequence_type") or kind.HasField("optional_type"):
        kind = kind.sequence_type.elem_type if kind.HasField("sequence_type") else kind.optional_type.elem_type
    return bool(kind.HasField("map_type"))
