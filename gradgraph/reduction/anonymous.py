"""Strategies that replace names, texts and weights that could identify a model."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from gradgraph.files.protos import copied, node_graphs, proto_graphs, proto_nodes
from gradgraph.reduction.strategies import Strategy, Tries
from gradgraph.reduction.submodels import Learn

_STEERING = 64  # elements: smaller integer tensors may be sizes or axes, which do not identify a model


def without_texts(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield a model without descriptions, metadata and the name of the program that wrote the original."""
    small = copied(model)
    for field in ("metadata_props", "doc_string", "producer_name", "producer_version", "domain", "model_version"):
        small.ClearField(field)
    small.graph.name = "reduced"
    for graph in proto_graphs(small):
        graph.ClearField("doc_string")
        graph.ClearField("metadata_props")
        for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            part.ClearField("doc_string")
            part.ClearField("metadata_props")
    yield small


def without_names(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield the model with numbered names instead of its own.

    Inputs are called ``x0`` and so on, weights ``w0``, outputs ``y0``, other values ``v0``, nodes ``n0``, and symbolic
    sizes ``d0``.
    """
    small = copied(model)
    names, sizes = _numbered_values(small), _Numbered()
    for number, node in enumerate(proto_nodes(small.graph.node)):
        node.name = f"n{number}" if node.name else ""
        node.input[:] = [names.get(x, x) for x in node.input]
        node.output[:] = [names.get(y, y) for y in node.output]
        for body in node_graphs(node):
            body.name = "body"
    for graph in proto_graphs(small):
        for tensor in graph.initializer:
            tensor.name = names[tensor.name]
        for value in (*graph.input, *graph.output, *graph.value_info):
            value.name = names.get(value.name, value.name)
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    sizes.add("d", dim.dim_param)
                    dim.dim_param = sizes[dim.dim_param]
    yield small


def _numbered_values(model: onnx.ModelProto) -> _Numbered:
    names = _Numbered()
    for prefix, values in (("x", model.graph.input), ("w", model.graph.initializer), ("y", model.graph.output)):
        for value in values:
            names.add(prefix, value.name)
    for graph in proto_graphs(model):
        for name in (*(v.name for v in (*graph.input, *graph.initializer, *graph.output)),
                     *(name for node in graph.node for name in node.output)):  # fmt: skip
            names.add("v", name)
    return names


def without_weights(model: onnx.ModelProto, learn: Learn) -> Tries:
    """Yield models with weights replaced by random numbers of similar magnitude.

    All weights are replaced at once or, if the fault then disappears, one at a time.
    """
    places = [i for i, t in enumerate(model.graph.initializer) if _tells(t)]
    redrawn = _redrawn(model, places)
    if places and (yield redrawn):
        return
    for place in places:
        small = _redrawn(model, [place])
        if (yield small):
            model = small


def kept_weights(model: onnx.ModelProto, original: onnx.ModelProto) -> list[str]:
    """Return the names of weights of ``model`` that still have the original's values."""
    before = {t.raw_data for t in original.graph.initializer if t.raw_data}
    return [t.name for t in model.graph.initializer if _tells(t) and t.raw_data in before]


class _Numbered(dict[str, str]):
    """A dict from original names to generated names: a prefix and a number, such as ``x0``."""

    def add(self, prefix: str, name: str) -> None:
        if name and name not in self:
            self[name] = f"{prefix}{sum(given.startswith(prefix) for given in self.values())}"


def _tells(tensor: onnx.TensorProto) -> bool:
    elements = int(np.prod(tensor.dims))
    whole = tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
    return elements > (_STEERING if whole else 1)


def _redrawn(model: onnx.ModelProto, places: list[int]) -> onnx.ModelProto:
    small, rng = copied(model), np.random.default_rng(0)
    for place in places:
        tensor = small.graph.initializer[place]
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(_like(array, rng), tensor.name))
    return small


def _like(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random array with the shape, dtype and mean magnitude of ``array``, to replace weights.

    Floats are all positive if they are in ``array``; integers have its range. Arrays of other types, except booleans,
    are returned unchanged.
    """
    if array.dtype.kind == "f":
        size = float(np.abs(array[np.isfinite(array)].astype(np.float64)).mean()) if array.size else 0.0
        positive = bool((array > 0).all())
        drawn = np.asarray(rng.uniform(0.5, 1.5, array.shape) if positive else rng.normal(size=array.shape))
        return (drawn * size).astype(array.dtype)
    if array.dtype.kind in "iu":
        return rng.integers(int(array.min()), int(array.max()) + 1, array.shape).astype(array.dtype)
    if array.dtype.kind == "b":
        return rng.random(array.shape) < 0.5
    return array


ANONYMOUS: tuple[Strategy, ...] = (without_texts, without_names, without_weights)
