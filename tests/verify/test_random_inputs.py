"""Random inputs for models of others: states of one row, lengths of sounds, classes that a comparison tells apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from gradgraph.verify.check_gradients import check_gradients
from gradgraph.verify.feeds import LARGEST, candidates, index_bound

F, WHOLE = TensorProto.FLOAT, TensorProto.INT64


def model(nodes: list[Any], inputs: dict[str, tuple[int, list[Any]]], weights: dict[str, Any]) -> Any:
    infos = [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()]
    stored = [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", F, None)], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def gru() -> Any:
    """Of an open batch, with a state of one row."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(1, 9, 2)), "r": rng.normal(size=(1, 9, 3))}
    nodes = [helper.make_node("Transpose", ["x"], ["steps_first"], perm=[1, 0, 2]),
             helper.make_node("GRU", ["steps_first", "w", "r", "", "", "h"], ["y"], hidden_size=3)]  # fmt: skip
    inputs = {"x": (F, ["batch", "steps", 2]), "h": (F, [1, 1, 3])}
    return model(nodes, inputs, {n: a.astype(np.float32) for n, a in weights.items()})


def nameless() -> Any:
    """A GRU whose file names no size: the batch is the second axis of its state."""
    found = gru()
    for value, dims in zip(found.graph.input, ([None, None, 2], [1, None, 3]), strict=True):
        value.CopyFrom(helper.make_tensor_value_info(value.name, F, dims))
    return found


def sound() -> Any:
    """A convolution that takes 400 samples at least."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], strides=[160])]
    return model(nodes, {"x": (F, ["batch", 1, "time"])}, {"w": np.ones((2, 1, 400), np.float32)})


@pytest.mark.parametrize("make", [gru, nameless, sound])
def test_inputs_are_found(make: Any) -> None:
    report = check_gradients(make())
    assert report.ok and all(t.resolved for t in report.tensors)


def test_pictures_do_not_grow_as_sounds_do() -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    read = ir.from_proto(model(nodes, {"x": (F, ["n", 3, "h", "w"])}, {}))
    sizes = [feeds["x"].size for feeds in candidates(read.graph, np.random.default_rng(0))]
    assert max(sizes) <= LARGEST and {2 * 3 * 224 * 224, 3 * 1024 * 1024} & set(sizes)


@pytest.mark.parametrize(
    ("node", "weights", "bound"),
    [
        (helper.make_node("OneHot", ["x", "depth", "values"], ["y"]), {"depth": 7, "values": [0.0, 1.0]}, 7),
        (helper.make_node("Equal", ["x", "classes"], ["e"]), {"classes": np.arange(5)}, 5),
        (helper.make_node("Equal", ["classes", "x"], ["e"]), {"classes": np.arange(5).reshape(1, 5)}, 5),
        (helper.make_node("Equal", ["x", "classes"], ["e"]), {"classes": [3, 1]}, None),
        (helper.make_node("Equal", ["x", "classes"], ["e"]), {"classes": 0}, None),
    ],
    ids=["OneHot", "Equal", "Equal the other way", "numbers out of order", "one number"],
)
def test_classes_are_seen(node: Any, weights: dict[str, Any], bound: int | None) -> None:
    """Ones alone, as for a mask, would make all rows equal: kinks where a maximum is taken of them."""
    read = ir.from_proto(model([node], {"x": (WHOLE, [4, 1])}, weights))
    assert index_bound(read.graph.inputs[0]) == bound
