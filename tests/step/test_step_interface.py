"""Every file of a step is valid ONNX, and declares its inputs and outputs as the manifest describes them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.backends import step_backends
from gradgraph.errors import BuildError
from gradgraph.frontend import export, nn
from tests.kit.optim_cases import OPTIMIZERS

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "separate": {"separate": True},
    "norm": {"grad_norm": True},
    "separate norm": {"separate": True, "grad_norm": True, "ema": 0.9},
    "accumulate": {"accumulate": True, "grad_norm": True},
    "weighted": {"sample_weight": True, "separate": True},
    "measured": {"metrics": ["f1", "accuracy"], "separate": True},
    "recomputed": {"recompute": "sqrt", "separate": True},
    "float16": {"precision": "float16", "separate": True, "grad_norm": True},
    "bfloat16": {"precision": "bfloat16", "separate": True},
    "opset 17": {"opset": 17, "separate": True},
}
AROUND = {
    "plain": lambda o: o,
    "separate": lambda o: optim.chain(optim.clip_by_global_norm(0.1), o),
    "norm": lambda o: optim.sam(o, 0.05),
    "accumulate": lambda o: optim.lookahead(o, 2),
}


def network(batch: int | str) -> onnx.ModelProto:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(64, 8),
        nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip
    return export(net, {"x": (batch, 1, 4, 4)}, outputs=["y"])


def dims(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...] | None:
    kind = value.type.tensor_type
    return tuple(d.dim_value or d.dim_param or None for d in kind.shape.dim) if kind.HasField("shape") else None


def faults(step: gg.Step) -> Iterator[str]:
    manifest = step.manifest
    tensors = {t.name: t for t in (*manifest.inputs, *manifest.targets, *manifest.state)}
    tensors |= {s.next: s for s in manifest.state}
    if manifest.separate is not None:
        tensors |= {gradient: tensors[weight] for weight, gradient in manifest.separate.gradients.items()}
    sums = {m.sums: m for m in manifest.columns_of_sums}
    files = {**step.trains, "eval": step.eval, "init": step.init, **step.separate}
    for file, model in files.items():
        onnx.checker.check_model(model, full_check=True)
        outputs = {v.name for v in model.graph.output}
        for value in (*model.graph.input, *model.graph.output):
            found, dtype = dims(value), value.type.tensor_type.elem_type
            if found is None or not dtype:
                yield f"{file}: {value.name} has type {dtype} and shape {found}"
            elif (known := tensors.get(value.name)) is not None:
                if (found, onnx.helper.tensor_dtype_to_np_dtype(dtype).name) != (tuple(known.shape), known.dtype):
                    yield f"{file}: {value.name} has type {dtype} and shape {found}, and is {known}"
            elif value.name in sums and not sums[value.name].rows:
                if found != tuple(sums[value.name].shape):
                    yield f"{file}: the sums {value.name} have shape {found}"
            elif value.name in sums or value.name in manifest.outputs:
                pass
            elif found != ():
                yield f"{file}: the {'result' if value.name in outputs else 'input'} {value.name} has shape {found}"


def check(optimizer: str, options: str, backend: str, batch: int | str) -> None:
    case = OPTIMIZERS[optimizer]
    recipe = AROUND.get(options, AROUND["plain"])(case.optimizer())
    freeze = ["*.bias", "0.*", "1.*"] if case.only_matrices else []
    step = gg.build(network(batch), optimizer=recipe, freeze=freeze, backend=backend, **OPTIONS[options])
    assert list(faults(step)) == []


@pytest.mark.sweep(0.011)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_files_declare_what_the_manifest_describes(optimizer: str, options: str) -> None:
    number = zlib.crc32(f"{optimizer} {options}".encode())
    backends = list(step_backends())
    try:
        check(optimizer, options, backends[number % len(backends)], "n" if number % 3 else 6)
    except BuildError as error:
        if "already averages weights" in str(error):
            pytest.skip(f"these do not go together: {error}")
        if "cannot run in" not in str(error):  # by the table of that runtime
            raise
        check(optimizer, options, "portable", "n")


@pytest.mark.sweep(0.17)
@pytest.mark.parametrize("backend", step_backends())
def test_on_every_backend(backend: str) -> None:
    try:
        check("adam", "separate norm", backend, 6)
    except BuildError as error:
        assert "cannot run in" in str(error)
        pytest.skip(str(error))


def test_several_named_steps() -> None:
    same = {"loss": "cross_entropy", "metrics": ["f1"], "grad_norm": True}
    steps = {"first": gg.StepOptions(train="5.*", **same), "second": gg.StepOptions(optimizer="sgd", **same)}
    step = gg.build(network("n"), steps=steps)
    assert list(faults(step)) == []


def test_a_gradient_has_the_type_of_its_weight() -> None:
    """Of a model that is stored in float16, it is float16, whatever it was computed in."""
    model = export(nn.Linear(4, 3), {"x": ("n", 4)}, outputs=["y"])
    for stored in (*model.graph.initializer, *model.graph.input, *model.graph.output):
        if isinstance(stored, onnx.TensorProto):
            half = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(stored).astype(np.float16), stored.name)
            stored.CopyFrom(half)
        else:
            stored.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    with_copies = optim.master_weights(optim.adamw())
    assert list(faults(gg.build(model, optimizer=with_copies, separate=True))) == []
