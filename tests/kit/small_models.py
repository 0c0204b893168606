"""Helpers that create small models, and run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper

from gradgraph.passes.normal import normalise

Feeds = Mapping[str, np.ndarray]


def parsed(graph: str, **weights: np.ndarray) -> onnx.ModelProto:
    """Parse a model in ONNX's text form, such as ``(float[n] x) => (float[n] y) { … }``, with weights in float32."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {graph}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items())
    return model


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Any],
    outputs: Sequence[str] = ("y",),
    opset: int = 21,
    weights: Mapping[str, np.ndarray] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Return a model; each of ``inputs`` is an array, whose type and shape are used, or (dtype, dims)."""
    infos = [helper.make_tensor_value_info(n, *_type_and_dims(v)) for n, v in inputs.items()]
    results = [helper.make_value_info(name, onnx.TypeProto()) for name in outputs]
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "g", infos, results, tensors)
    imports = [helper.make_opsetid(d, v) for d, v in {"": opset, **(domains or {})}.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))


def _type_and_dims(value: Any) -> tuple[int, list[int | str | None]]:
    if isinstance(value, np.ndarray):
        return helper.np_dtype_to_tensor_dtype(value.dtype), list(value.shape)
    dtype, dims = value
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims


def normal_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the normal form; assert that it is valid, idempotent and of opset 21, and the original unchanged."""
    before = model.SerializeToString()
    result = normalise(ir.from_proto(model))
    proto = ir.to_proto(result)
    assert model.SerializeToString() == before
    assert {o.domain: o.version for o in proto.opset_import}[""] == 21
    onnx.checker.check_model(proto)
    assert ir.to_proto(normalise(result)) == proto
    return proto


def run(model: onnx.ModelProto, feeds: Feeds) -> list[Any]:
    """Return the outputs in onnxruntime."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def assert_same(expected: Sequence[Any], found: Sequence[Any], **tolerance: float) -> None:
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_allclose(b, a, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


def real(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def op_types(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def every_node(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of ``graph`` and its bodies."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from every_node(attribute.g)
