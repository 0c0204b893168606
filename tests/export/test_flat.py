"""All weights as one vector, and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.export import FlatWeights, flat_models, flat_weights
from tests.backends.test_other_runtimes import small_cnn
from tests.kit.running import run


@pytest.fixture(scope="module")
def step() -> gg.Step:
    return gg.build(small_cnn())


def test_weights_go_there_and_back(step: gg.Step, tmp_path: Path) -> None:
    flat = flat_weights(step)
    assert [p.name for p in flat.table] == [s.name for s in step.manifest.state if s.kind == "parameter"]
    trainer = gg.Trainer(step, device="cpu")
    trainer.load_state_dict(flat.replaced(flat.buffer + 1).arrays(), strict=False)
    for name, array in trainer.parameters.items():
        np.testing.assert_array_equal(array, flat.arrays()[name] + np.float32(1))
    trainer.save(tmp_path / "run.ckpt")
    np.testing.assert_array_equal(flat_weights(step, tmp_path / "run.ckpt").buffer, flat.buffer + np.float32(1))


def test_statistics_come_if_they_are_wanted(step: gg.Step) -> None:
    names = {p.name for p in flat_weights(step, which="all").table} - {p.name for p in flat_weights(step).table}
    assert names == {"bn.running_mean", "bn.running_var"}


def test_files_say_where_each_tensor_lies(step: gg.Step, tmp_path: Path) -> None:
    flat = flat_weights(step)
    flat.save(tmp_path / "w.bin")
    table = json.loads((tmp_path / "w.json").read_text())
    place = next(t for t in table["tensors"] if t["name"] == "fc.weight")
    numbers = np.fromfile(tmp_path / "w.bin", "<f4")[place["offset"] :][:48].reshape(place["shape"])
    np.testing.assert_array_equal(numbers, flat.arrays()["fc.weight"])
    again = FlatWeights.load(tmp_path / "w.bin")
    assert again.table == flat.table
    np.testing.assert_array_equal(again.buffer, flat.buffer)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: f.with_suffix(".json").unlink(), "flat weights consist of two files"),
        (lambda f: f.with_suffix(".json").write_text("{}"), "is not a table of flat weights"),
        (lambda f: f.write_bytes(f.read_bytes()[:-4]), "its table describes float32"),
        (lambda f: f.write_bytes(f.read_bytes()[:-1]), "is truncated"),
        (lambda f: _edit(f, offset=3), "has a gap or an overlap before"),
        (lambda f: _edit(f, name="fc.bias"), "a duplicate name"),
    ],
)
def test_damaged_files_are_refused(step: gg.Step, tmp_path: Path, damage, said: str) -> None:
    flat_weights(step).save(tmp_path / "w.bin")
    damage(tmp_path / "w.bin")
    with pytest.raises(ModelError, match=said):
        FlatWeights.load(tmp_path / "w.bin")


def _edit(file: Path, **changes: object) -> None:
    table = json.loads(file.with_suffix(".json").read_text())
    table["tensors"][1].update(changes)
    file.with_suffix(".json").write_text(json.dumps(table))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_models_do_the_same_where_a_step_trains(dtype: type) -> None:
    rng = np.random.default_rng(0)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "scale"], ["h"]), onnx.helper.make_node("Gemm", ["h", "w", "b"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["n", 3])],
        [onnx.helper.make_tensor_value_info("y", onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["n", 2])],
        [onnx.numpy_helper.from_array(rng.normal(size=s).astype(dtype), n)
         for n, s in (("scale", ()), ("w", (3, 2)), ("b", (2,)))],
    )  # fmt: skip
    opset = [onnx.helper.make_opsetid("", 21)]
    step = gg.build(
        onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), "mse", "sgd", train=["scale", "w", "b"]
    )
    flat, models = flat_weights(step), flat_models(step)
    for model in models.values():
        onnx.checker.check_model(model, full_check=True)
    weights = {n: a.astype(dtype) for n, a in flat.arrays().items()}
    np.testing.assert_array_equal(run(models["flatten"], weights)["flat"], flat.buffer)
    found = run(models["unflatten"], {"flat": flat.buffer})
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


def test_what_a_float32_vector_cannot_hold_is_refused(step: gg.Step) -> None:
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (double[n, 2] x) => (double[n, 2] y) <double[2] w = {1, 2}> { y = Mul(x, w) }""")
    with pytest.raises(ModelError, match="the weight 'w' is float64, which a float32 vector cannot represent"):
        flat_weights(gg.build(graph, "mse"))
    with pytest.raises(ModelError, match="which is 'some'; pass 'trainable' or 'all'"):
        flat_weights(step, which="some")  # type: ignore[arg-type]
