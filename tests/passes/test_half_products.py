"""What is written in float16 opens in onnxruntime at its default level, and computes the same; else processes end."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph.verify.reference import Oracle, in_float64
from tests.kit.running import run

HALF = onnx.TensorProto.FLOAT16
OPEN = """
import sys, onnxruntime
for path in sys.argv[1:]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    print(path, flush=True)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
"""


def opened(models: Iterable[tuple[str, onnx.ModelProto]], folder: Path) -> None:
    """Open every model in a process of its own, which must not end before the last."""
    paths = []
    for name, model in models:
        onnx.save(model, folder / f"{name}.onnx")
        paths.append(str(folder / f"{name}.onnx"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", OPEN, *paths], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, f"{Path(ran.stdout.splitlines()[-1]).name}: {ran.returncode} {ran.stderr[-300:]}"
    assert len(ran.stdout.splitlines()) == len(paths) > 0


def layer(op_type: str, direction: str, layout: int, states: bool) -> onnx.ModelProto:
    """A recurrent layer with constant weights, of open batch and length."""
    rng, count, gates = np.random.default_rng(0), 1 + (direction == "bidirectional"), {"LSTM": 4, "GRU": 3, "RNN": 1}
    rows = gates[op_type] * 5
    shapes = {"W": (count, rows, 4), "R": (count, rows, 5), "B": (count, 2 * rows)}
    weights = [onnx.numpy_helper.from_array(rng.normal(size=s).astype(np.float16) / 2, n) for n, s in shapes.items()]
    inputs = [helper.make_tensor_value_info("x", HALF, ["N", "T", 4] if layout else ["T", "N", 4])]
    first = [*(["h", "c"] if op_type == "LSTM" else ["h"])] if states else []
    shape = ["N", count, 5] if layout else [count, "N", 5]
    inputs += [helper.make_tensor_value_info(n, HALF, shape) for n in first]
    read = ["x", "W", "R", "B", *(["", *first] if states else [])]
    node = helper.make_node(op_type, read, ["y"], "n", hidden_size=5, direction=direction, layout=layout)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", HALF, None)], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.sweep(0.06)
@pytest.mark.parametrize("backend", ["portable", "ort-cpu"])
@pytest.mark.parametrize("op_type", ["LSTM", "GRU", "RNN"])
def test_gradients_of_recurrent_layers_open(op_type: str, backend: str, tmp_path: Path) -> None:
    def gradients() -> Iterable[tuple[str, onnx.ModelProto]]:
        for direction, layout, states in itertools.product(("forward", "reverse", "bidirectional"), (0, 1), (0, 1)):
            model = layer(op_type, direction, layout, bool(states))
            wrt = [i.name for i in model.graph.input]
            for k, each in enumerate((wrt, [*wrt, "W", "R", "B"])):
                name = f"{direction} layout {layout} states {states} {k}"
                yield name, gg.vjp(model, outputs=["y"], wrt=each, backend=backend)

    opened(gradients(), tmp_path)


def product(perm: tuple[int, ...], first: bool, after: bool) -> onnx.ModelProto:
    """A product by a matrix, behind a Transpose or (``after``) in front of one."""
    sizes = [2, 3, 4, 5][: len(perm)]
    moved = sizes if after else [sizes[p] for p in perm]
    matrix = np.random.default_rng(0).normal(size=(moved[-1], 6) if first else (6, moved[-2])).astype(np.float16)
    source = "x" if after else "t"
    made = helper.make_node("MatMul", [source, "w"] if first else ["w", source], ["p" if after else "y"])
    turned = helper.make_node("Transpose", ["p" if after else "x"], ["y" if after else "t"], perm=perm)
    nodes = [made, turned] if after else [turned, made]
    inputs = [helper.make_tensor_value_info("x", HALF, sizes)]
    outputs = [helper.make_tensor_value_info("y", HALF, [None] * len(perm))]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [onnx.numpy_helper.from_array(matrix, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.sweep(0.07)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("rank", [3, 4])
def test_products_of_transposed_tensors_open_and_are_right(rank: int, after: bool, tmp_path: Path) -> None:
    models = {(p, f): product(p, f, after) for p in itertools.permutations(range(rank)) for f in (True, False)}
    gradients = {key: gg.vjp(model, outputs=["y"], wrt=["x", "w"]) for key, model in models.items()}
    opened(((str(key), gradient) for key, gradient in gradients.items()), tmp_path)
    rng = np.random.default_rng(1)
    for key, gradient in gradients.items():
        x = rng.normal(size=[d.dim_value for d in gradient.graph.input[0].type.tensor_type.shape.dim])
        y = Oracle(in_float64(models[key]))({"x": x})["y"]
        feeds = {"x": x.astype(np.float16), "y.cotangent": rng.normal(size=y.shape).astype(np.float16)}
        exact = Oracle(in_float64(gradient))({k: v.astype(float) for k, v in feeds.items()})
        for name, value in run(gradient, feeds).items():
            np.testing.assert_allclose(value, exact[name], rtol=2e-2, atol=5e-2)
