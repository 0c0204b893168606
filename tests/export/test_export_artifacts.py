"""Inference models and weights of a step: from its folder, from memory, from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import safetensors.numpy

import gradgraph as gg
from gradgraph import export, frontend
from gradgraph.errors import CheckpointError, ModelError, OutputError
from gradgraph.frontend import nn


def network() -> onnx.ModelProto:
    frontend.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 16, 3)
    )
    return frontend.export(net, {"x": ("batch", 1, 6, 6)}, outputs=["scores"])


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(12, 1, 6, 6)).astype(np.float32), "target": rng.integers(0, 3, 12)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, gg.Trainer]:
    """A step folder, a checkpoint of a few steps, and the trainer that wrote it."""
    folder = tmp_path_factory.mktemp("run")
    step = gg.build(network(), "cross_entropy", gg.optim.sgd(0.1), freeze="0.bias")
    step.save(folder / "step")
    trainer = gg.Trainer(step)
    trainer.fit(data(), epochs=2, batch_size=4, progress=False)
    trainer.save(folder / "run.ckpt")
    return folder / "step", folder / "run.ckpt", trainer


def outputs(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    scores: np.ndarray = session.run(["scores"], {"x": data()["x"]})[0]
    return scores


def test_inference_model_computes_what_the_trainer_predicts(run: tuple[Path, Path, gg.Trainer]) -> None:
    step, checkpoint, trainer = run
    model = export.inference_model(step, checkpoint)
    np.testing.assert_allclose(outputs(model), trainer.predict(data()["x"]), rtol=1e-5, atol=1e-6)
    assert [i.name for i in model.graph.input] == ["x"]
    assert [o.name for o in model.graph.output] == ["scores"]
    assert not {n.op_type for n in model.graph.node} & {"Dropout", "LogSoftmax"}


def test_without_a_checkpoint_the_model_is_the_one_that_was_built(run: tuple[Path, Path, gg.Trainer]) -> None:
    step, _, trainer = run
    for source in (step, trainer.definition):
        np.testing.assert_allclose(outputs(export.inference_model(source)), outputs(network()), rtol=1e-5, atol=1e-6)


def test_weights_are_all_there_under_their_names(run: tuple[Path, Path, gg.Trainer], tmp_path: Path) -> None:
    step, checkpoint, trainer = run
    original = {t.name: onnx.numpy_helper.to_array(t) for t in network().graph.initializer}
    found = export.save_weights(step, tmp_path / "w.safetensors", checkpoint)
    stored = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    assert found.keys() == stored.keys() == original.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(stored[name], array)
        assert array.shape == original[name].shape
    np.testing.assert_array_equal(found["0.bias"], original["0.bias"])
    for name, array in trainer.parameters.items():
        np.testing.assert_array_equal(found[name], array)
        assert not np.array_equal(array, original[name])
    assert not np.array_equal(found["1.running_mean"], original["1.running_mean"])


def test_saved_model_is_the_returned_one(run: tuple[Path, Path, gg.Trainer], tmp_path: Path) -> None:
    step, checkpoint, _ = run
    model = export.save_inference(step, tmp_path / "trained.onnx", checkpoint)
    np.testing.assert_array_equal(outputs(onnx.load(tmp_path / "trained.onnx")), outputs(model))


def test_errors_leave_nothing_behind(run: tuple[Path, Path, gg.Trainer], tmp_path: Path) -> None:
    step, checkpoint, _ = run
    with pytest.raises(ModelError, match="not a step folder"):
        export.save_inference(tmp_path / "missing", tmp_path / "a.onnx")
    with pytest.raises(CheckpointError):
        export.save_inference(step, tmp_path / "a.onnx", tmp_path / "missing.ckpt")
    with pytest.raises(OutputError):
        export.save_weights(step, tmp_path / "missing" / "w.safetensors", checkpoint)
    other = gg.Trainer(gg.build(network(), "mse", gg.optim.sgd(0.1)))
    other.save(tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="does not match"):
        export.save_inference(step, tmp_path / "a.onnx", tmp_path / "other.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["other.ckpt"]


def test_a_weight_that_is_an_output_keeps_its_type(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 2] x) => (float[N, 2] y, float[2, 2] w) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }""")
    step = gg.build(model, {"y": "mse"}, gg.optim.sgd(0.1))
    for sizes in (None, {"N": 2}):
        export.save_inference(step, tmp_path / "m.onnx", sizes=sizes)
        onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
