"""A tiny model and data for the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.parser

MLP = """<ir_version: 10, opset_import: ["" : 21]>
mlp (float[N, 4] x) => (float[N, 3] logits) {
    h = Gemm <transB = 1> (x, first.weight, first.bias)
    r = Relu (h)
    logits = Gemm <transB = 1> (r, last.weight, last.bias)
}"""
SHAPES = {"first.weight": (8, 4), "first.bias": (8,), "last.weight": (3, 8), "last.bias": (3,)}


@dataclass
class Ran:
    code: int
    out: str
    err: str


Cli = Callable[..., Ran]


def mlp() -> onnx.ModelProto:
    """Return a classifier with 4 inputs, 8 hidden units and 3 classes."""
    rng = np.random.default_rng(0)
    text = MLP
    for i, name in enumerate(SHAPES):
        text = text.replace(name, f"w{i}")
    model = onnx.parser.parse_model(text)
    for i, (name, shape) in enumerate(SHAPES.items()):
        weight = rng.normal(0, 0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
        for node in model.graph.node:
            node.input[:] = [name if n == f"w{i}" else n for n in node.input]
    return model


def arrays(rows: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Return random points of four dimensions; the class is the index of the largest of the first three numbers."""
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "target": x[:, :3].argmax(axis=1)}
