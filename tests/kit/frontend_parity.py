"""Runs frontend networks in onnxruntime, to compare them with PyTorch if it is installed."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.frontend import Input, export

OPTIONS = ort.SessionOptions()
OPTIONS.intra_op_num_threads = 1
OPTIONS.log_severity_level = 3


def model_of(net, arrays, dynamic=(0,), **options) -> onnx.ModelProto:
    """Export a network for inputs like ``arrays``, with symbolic sizes on the axes ``dynamic``, and check the model."""
    specs = {}
    for name, a in arrays.items():
        dims = tuple(f"n{i}" if i in dynamic else n for i, n in enumerate(a.shape))
        specs[name] = Input(dims, a.dtype.name)
    model = export(net, specs, **options)
    onnx.checker.check_model(model, full_check=True)
    return model


def run_model(model, arrays) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, arrays), strict=True))


def declared_shapes_hold(model, arrays) -> None:
    """Assert that all recorded shapes of the model are those of a run, and that equal names are equal sizes."""
    extended = onnx.ModelProto()
    extended.CopyFrom(model)
    outputs = {y.name for y in model.graph.output}
    extended.graph.output.extend(v for v in model.graph.value_info if v.name not in outputs)
    results = run_model(extended, arrays)
    sizes: dict[str, int] = {}
    for value in [*model.graph.input, *extended.graph.output]:
        shape = {**arrays, **results}[value.name].shape
        assert value.type.tensor_type.HasField("shape"), f"{value.name} has no shape"
        dims = value.type.tensor_type.shape.dim
        assert len(dims) == len(shape), f"{value.name}: rank {len(dims)} declared, {shape} found"
        for dim, size in zip(dims, shape, strict=True):
            if dim.HasField("dim_value"):
                assert dim.dim_value == size, f"{value.name}: {dim.dim_value} declared, {shape} found"
            elif dim.dim_param:
                known = sizes.setdefault(dim.dim_param, size)
                assert known == size, f"{value.name}: '{dim.dim_param}' was {known}, here {shape}"


def drawn(shape, seed=0, kind="real"):
    """Return random numbers of a kind: real, positive, unit (in (0, 1)) or mask (booleans).

    If ``kind`` is an int, they are class indices below it.
    """
    rng = np.random.default_rng([seed, *shape])
    if isinstance(kind, int):
        return rng.integers(0, kind, shape)
    if kind == "mask":
        return rng.random(shape) < 0.3
    if kind == "unit":
        return rng.uniform(0.05, 0.95, shape).astype(np.float32)
    if kind == "positive":
        return rng.uniform(0.2, 3.0, shape).astype(np.float32)
    return rng.normal(size=shape).astype(np.float32)
