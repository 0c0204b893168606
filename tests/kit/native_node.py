"""Runs a single node with a native kernel in a session of its own."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime as ort

from gradgraph.backends.ort_native import library as native


def opened(op_type: str, attributes: str, outputs: int, *inputs: np.ndarray, threads: int = 2) -> ort.InferenceSession:
    """Return a session of a node with inputs ``x0``, … and outputs ``y0``, …."""
    kinds = {np.dtype(np.uint8): "uint8"}
    types = ", ".join(f"{kinds.get(x.dtype, 'float')}{list(x.shape)} x{i}" for i, x in enumerate(inputs))
    given = ", ".join(f"x{i}" for i in range(len(inputs)))
    listed = f"<{attributes}>" if attributes else ""
    made = [f"y{i}" for i in range(outputs)]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21, "{native.DOMAIN}" : 1]> g ({types}) => '
        f"({', '.join(f'float {y}' for y in made)}) "
        f"{{ {', '.join(made)} = {native.DOMAIN}.{op_type} {listed} ({given}) }}"
    )
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    options = ort.SessionOptions()  # not a Trainer's options, which flush denormals to zero
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    native.here().add_to(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(op_type: str, attributes: str, outputs: int, *inputs: np.ndarray, threads: int = 2) -> list[np.ndarray]:
    """Run a node with a native kernel on ``inputs`` named ``x0``, …; return its outputs."""
    session = opened(op_type, attributes, outputs, *inputs, threads=threads)
    return session.run(None, {f"x{i}": x for i, x in enumerate(inputs)})
