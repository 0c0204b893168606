"""Streaming writers for large files: a model, and safetensors. Weights are not copied.

The bytes equal those of protobuf's ``SerializeToString`` and ``safetensors.numpy.save``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from safetensors.numpy import save

from gradgraph.files.external import external_entry, is_external, tensor_pieces
from gradgraph.files.mapped import pieces
from gradgraph.files.protos import copied
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.messages import varint

Bytes = Iterator[bytes | memoryview]

LEAST_STREAMED = 1 << 16  # bytes: smaller weights go through protobuf
_METADATA = "__metadata__"
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers of ModelProto, GraphProto and TensorProto in onnx.proto


def model_pieces(model: ir.Model) -> Bytes:
    """Serialise ``model`` with its weights inside.

    Raises:
        ValueError: if the model without its weights exceeds protobuf's limit.
    """
    proto, weights = without_weights(model)
    head, tail = _around(proto, _GRAPH)
    before, after = _around(proto.graph, _INITIALIZER)
    stored = [_stored(tensor, weights) for tensor in proto.graph.initializer]
    size = len(before) + sum(len(start) + data + len(end) for start, data, end, _ in stored) + len(after)
    yield head + _key(_GRAPH) + varint(size) + before
    for start, _, end, tensor in stored:
        yield start
        if tensor is not None:
            yield from tensor_pieces(tensor)
        yield end
    yield after + tail


def without_weights(model: ir.Model) -> tuple[onnx.ModelProto, dict[str, ir.TensorProtocol]]:
    """Convert ``model`` to protobuf without the data of large initializers, which are marked as external.

    Returns:
        The message, and the tensors of these initializers by name.
    """
    weights: dict[str, ir.TensorProtocol] = {}
    slim = model.clone()
    for name, value in slim.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.dtype != ir.DataType.STRING and _is_streamed(tensor):
            weights[name] = tensor
            value.const_value = _elsewhere(name, tensor)
    return ir.to_proto(slim), weights


def _is_streamed(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes >= LEAST_STREAMED or isinstance(tensor, ir.ExternalTensor)


def _elsewhere(name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    """Return an external tensor without a file, with the type and shape of ``tensor``, to stand in for it."""
    return ir.ExternalTensor("", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name,
                             doc_string=tensor.doc_string, metadata_props=dict(tensor.metadata_props))  # fmt: skip


def _stored(
    proto: onnx.TensorProto, weights: Mapping[str, ir.TensorProtocol]
) -> tuple[bytes, int, bytes, ir.TensorProtocol | None]:
    """Return an initializer's bytes before its data, the size of the data, the bytes after, and the data's tensor.

    If ``proto`` contains the data, all bytes come first, and the tensor is None.
    """
    if not is_external(proto):
        whole = proto.SerializeToString()
        return _key(_INITIALIZER) + varint(len(whole)) + whole, 0, b"", None
    size = external_entry(proto).length
    proto.ClearField("external_data")
    proto.ClearField("data_location")
    before, after = _around(proto, _RAW_DATA)
    start = before + _key(_RAW_DATA) + varint(size)
    return _key(_INITIALIZER) + varint(len(start) + size + len(after)) + start, size, after, weights[proto.name]


def _around(message: Any, number: int) -> tuple[bytes, bytes]:
    """Return the serialised fields of ``message`` with field numbers below and above ``number``, in order."""
    before, after = copied(message, lambda f: f.number < number), copied(message, lambda f: f.number > number)
    return before.SerializeToString(), after.SerializeToString()


def _key(number: int) -> bytes:
    """Return the bytes of the key of a length-delimited field (wire type 2) with this number."""
    return varint(number << 3 | 2)


def safetensors_pieces(arrays: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str] | None = None) -> Bytes:
    """Serialise ``arrays`` as safetensors: the length of the header, the header, and the bytes of the arrays.

    Type names and order are taken from the header that the safetensors library writes for empty arrays.
    """
    empty = save({name: np.empty(0, array.dtype) for name, array in arrays.items()}, dict(metadata or {}) or None)
    header = json_of(empty[8 : 8 + int.from_bytes(empty[:8], "little")])
    order, end = [name for name in header if name != _METADATA], 0
    for name in order:
        begin, end = end, end + arrays[name].nbytes
        header[name] |= {"shape": list(arrays[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield from pieces(arrays[name])
