"""Files that are written piece by piece have the bytes that protobuf and safetensors give as a whole."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper

from gradgraph.files import streamed
from gradgraph.files.models import load_model, save_model
from gradgraph.files.streamed import model_pieces, safetensors_pieces
from tests.kit.lowered_networks import exported

KINDS = (np.float32, np.float64, np.float16, np.int64, np.int8, np.uint8, np.bool_, ml_dtypes.bfloat16)
NAMES = ("w", "ü", "a b", 'q"', "b\\", "z.0")


@pytest.mark.parametrize("seed", range(8))
def test_arrays(seed: int) -> None:
    """Of every type, of any sizes (none, one, zero), under names that JSON writes in its own way."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for i in range(int(rng.integers(0, 12))):
        shape = tuple(rng.integers(0, 4, rng.integers(0, 4)))
        name = f"{rng.choice(NAMES)}{i}"
        arrays[name] = np.asarray(rng.integers(0, 2, shape)).astype(KINDS[rng.integers(len(KINDS))])
    metadata = {"gradgraph": '{"a": "ü\n"}'} if seed % 2 else None
    assert b"".join(safetensors_pieces(arrays, metadata)) == safetensors.numpy.save(arrays, metadata)


def test_an_array_that_is_no_block_of_memory() -> None:
    """The library writes what lies at its address; here a column is a column."""
    matrix = np.arange(12.0).reshape(3, 4)
    found = safetensors.numpy.load(b"".join(safetensors_pieces({"t": matrix.T, "c": matrix[:, 1]})))
    assert np.array_equal(found["t"], matrix.T) and np.array_equal(found["c"], matrix[:, 1])


def odd() -> onnx.ModelProto:
    """Weights with documentation, in fields of their own type, of four bits, of text; metadata on all sides."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.normal(size=(8, 9)).astype(kind), str(kind)) for kind in ("f", "d")]
    weights += [helper.make_tensor("typed", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])]
    weights += [helper.make_tensor("text", TensorProto.STRING, [2], [b"a", b"b"])]
    weights += [helper.make_tensor("four", TensorProto.INT4, [5], [1, -2, 3, -4, 5])]
    weights += [numpy_helper.from_array(np.zeros((0, 4), "f"), "none")]
    weights[0].doc_string = "a weight"
    nodes = [helper.make_node("Identity", ["f"], ["y"])]
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 9])
    graph = helper.make_graph(nodes, "odd", [], [value], weights, doc_string="a graph")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, doc_string="a model")
    helper.set_model_props(model, {"a": "b"})
    return model


MODELS = {
    "residual": lambda: exported("residual", "batch"),
    "transformer": lambda: exported("transformer", "batch"),
    "odd": odd,
}


def once(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in one spelling: onnx-ir writes the metadata of tensors that came from protobuf twice."""
    for tensor in model.graph.initializer:
        entries = {p.key: p.value for p in tensor.metadata_props}
        tensor.ClearField("metadata_props")
        helper.set_model_props(tensor, entries)
        if tensor.data_type != TensorProto.STRING:
            tensor.raw_data = ir.from_proto(tensor).tobytes()
        for field in ("float_data", "int32_data"):
            tensor.ClearField(field)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("least", [0, 64, 1 << 40])
def test_models(name: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "LEAST_STREAMED", least)
    model = load_model(MODELS[name]())
    written = b"".join(model_pieces(model))
    found = onnx.ModelProto.FromString(written)
    assert found.SerializeToString() == written  # fields stand in their order
    assert once(found) == once(ir.to_proto(model))


def test_weights_that_lay_in_a_file_are_inside(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "LEAST_STREAMED", 64)
    onnx.save(odd(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=16, location="m.data")
    save_model(load_model(tmp_path / "m.onnx"), tmp_path / "again.onnx")
    again = onnx.load(tmp_path / "again.onnx", load_external_data=False)
    assert not any(t.data_location for t in again.graph.initializer)
    for tensor, other in zip(odd().graph.initializer, again.graph.initializer, strict=True):
        assert np.array_equal(numpy_helper.to_array(tensor), numpy_helper.to_array(other))
