"""A small model of three convolutions, for tests of named operators."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

RNG = np.random.default_rng(0)


def convolutions(batch: int | str, size: int | str = 6) -> onnx.ModelProto:
    """Return a model of three convolutions, the first two with equal sizes and attributes."""
    shapes = {"a": (4, 4, 3, 3), "b": (4, 4, 3, 3), "c": (6, 4, 3, 3)}
    weights = [numpy_helper.from_array(RNG.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Conv", [x, w], [y], pads=[1] * 4)
        for x, w, y in [("x", "a", "h"), ("h", "b", "k"), ("k", "c", "y")]
    ]
    x = helper.make_tensor_value_info("x", 1, [batch, 4, size, size])
    y = helper.make_tensor_value_info("y", 1, [batch, 6, size, size])
    graph = helper.make_graph(nodes, "convolutions", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    sizes = {v.name: [d.dim_value or 3 for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: np.asarray(rng.normal(size=size), np.float32) for name, size in sizes.items()}
