"""Weights that are loaded by name, some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.errors import CheckpointError
from gradgraph.runtime.execution.session import RuntimeOptions

QUIET = RuntimeOptions(threads=1)
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(32, 4)).astype(np.float32), "target": RNG.integers(0, 3, 32)}


def model(classes: int = 3, seed: int = 0, head: str = "head.weight") -> onnx.ModelProto:
    net = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        net (float[batch, 4] x) => (float[batch, {classes}] logits) {{
            h = MatMul (x, body)
            a = Relu (h)
            logits = MatMul (a, top)
        }}""")
    names = {"body": "body.weight", "top": head}
    for node in net.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    rng = np.random.default_rng(seed)
    for name, shape in {"body.weight": (4, 8), head: (8, classes)}.items():
        net.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return net


def trainer(net: onnx.ModelProto, **options: Any) -> gg.Trainer:
    return gg.Trainer(gg.build(net, **options), device="cpu", options=QUIET)


def test_a_head_trained_alone_and_then_everything() -> None:
    first = trainer(model(), freeze="body.*", optimizer=gg.optim.adamw(1e-2))
    first.fit(DATA, epochs=2, progress=False)
    second = trainer(model(), optimizer=gg.optim.adamw(1e-3))
    report = second.load_state_dict(first.state_dict(), strict=False)
    assert report.loaded == ("head.weight",)
    assert report.missing == ("body.weight",)
    assert "step" in report.unexpected
    assert "loaded 1 tensor; missing: 'body.weight'; not used:" in str(report)
    assert second.evaluate(DATA)["loss"] == pytest.approx(first.evaluate(DATA)["loss"], rel=1e-6)


def test_another_head_and_frozen_weights_are_told() -> None:
    other = trainer(model(classes=5, seed=1)).parameters
    report = trainer(model()).load_state_dict(other, strict=False)
    assert report.loaded == ("body.weight",)
    assert report.mismatched == {"head.weight": "is float32[8, 5], but float32[8, 3] in this step"}
    frozen = trainer(model(), freeze="body.*")
    assert frozen.load_state_dict(trainer(model(seed=1)).parameters, strict=False).frozen == ("body.weight",)
    assert frozen.load_state_dict(trainer(model()).parameters, strict=False).frozen == ()


def test_nothing_that_fits_is_an_error_and_changes_nothing() -> None:
    t = trainer(model())
    before = t.state_dict()
    for values in ({}, {"module.body.weight": np.zeros((4, 8), np.float32)}, {"body.weight": np.zeros((8, 4))}):
        with pytest.raises(CheckpointError, match=r"none of the \d values matches a weight of this step"):
            t.load_state_dict(values, strict=False)
    assert all(np.array_equal(value, t.state_dict()[name]) for name, value in before.items())


OPTIMIZERS = {
    "ema": lambda: {"optimizer": gg.optim.adamw(1e-2), "ema": 0.9},
    "lookahead": lambda: {"optimizer": gg.optim.lookahead(gg.optim.sgd(0.1))},
    "schedule_free": lambda: {"optimizer": gg.optim.schedule_free_adamw(1e-2)},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_that_an_optimizer_keeps_follow_the_weights(name: str) -> None:
    """Training goes on as if the model had been built with these weights."""
    loaded, built = trainer(model(), **OPTIMIZERS[name]()), trainer(model(seed=1), **OPTIMIZERS[name]())
    loaded.load_state_dict(built.parameters, strict=False)
    for t in (loaded, built):
        t.fit(DATA, epochs=3, progress=False)
    assert all(np.array_equal(value, loaded.state_dict()[key]) for key, value in built.state_dict().items())
    assert loaded.evaluate(DATA) == built.evaluate(DATA)


def test_copies_of_other_weights_stay() -> None:
    t = trainer(model(), **OPTIMIZERS["ema"]())
    t.fit(DATA, progress=False)
    before = t.state_dict()
    t.load_state_dict({"head.weight": np.zeros((8, 3), np.float64)}, strict=False)
    after = t.state_dict()
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {
        "head.weight",
        "head.weight.ema",
    }
    assert not after["head.weight.ema"].any()


def test_master_weights_follow() -> None:
    half = model(seed=1)
    for tensor in half.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )
    for value in (*half.graph.input, *half.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    t = trainer(half, optimizer=gg.optim.master_weights(gg.optim.sgd(0.0)))
    t.load_state_dict({"head.weight": np.ones((8, 3), np.float32)}, strict=False)
    t.step({"x": DATA["x"].astype(np.float16), "target": DATA["target"]})
    assert np.array_equal(t.parameters["head.weight"], np.ones((8, 3), np.float16))


@pytest.mark.parametrize("name", ["run.ckpt", "w.safetensors", "w.npz", "trained.onnx"])
def test_files(tmp_path: Path, name: str) -> None:
    source, path = trainer(model(seed=1)), tmp_path / name
    if name == "run.ckpt":
        source.save(path)
    elif name == "w.safetensors":
        from gradgraph.export import save_weights

        save_weights(source.definition, path)
    elif name == "w.npz":
        np.savez(path, **source.parameters)
    else:
        source.export(path)
    t = trainer(model())
    assert sorted(t.load_state_dict(path, strict=False).loaded) == ["body.weight", "head.weight"]
    assert all(np.array_equal(value, t.parameters[key]) for key, value in source.parameters.items())


@pytest.mark.parametrize("content", [None, b"", b"no tensors"])
def test_files_that_are_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"give a \.safetensors"):
        trainer(model()).load_state_dict(path, strict=False)
