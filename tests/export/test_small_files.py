"""Smaller files and builds: fixed sizes, weights stored as float16, .ort files, lists of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.tools.reduced_build_config_parser import parse_config

import gradgraph as gg
from gradgraph import export
from gradgraph.errors import ArgumentError, BuildError, ModelError, OutputError, UnknownNameError
from gradgraph.export import storage
from gradgraph.frontend import nn
from gradgraph.step.manifest import Manifest
from tests.backends.test_other_runtimes import small_cnn
from tests.kit.running import Loop, run

BATCH: dict[str, Any] = {
    "x": np.random.default_rng(0).normal(size=(8, 1, 4, 4)).astype(np.float32),
    "target": np.arange(8) % 3,
}


# --- fixed sizes --------------------------------------------------------------------------------------------


def test_a_step_of_fixed_sizes_is_the_same_step() -> None:
    fixed, opened = gg.build(small_cnn(), sizes={"batch": 8}), gg.build(small_cnn())
    assert [s.shape for s in fixed.manifest.batch] == [(8, 1, 4, 4), (8,)]
    one, other = Loop(fixed), Loop(opened)
    for _ in range(3):
        np.testing.assert_allclose(one(BATCH)["loss"], other(BATCH)["loss"], rtol=1e-6)
    kinds = [n.op_type for n in fixed.train.graph.node]
    assert "Shape" not in kinds and len(kinds) < len(opened.train.graph.node)
    assert not any(d.dim_param for v in (*fixed.train.graph.input, *fixed.train.graph.output)
                   for d in v.type.tensor_type.shape.dim)  # fmt: skip


def test_an_inference_model_gets_fixed_sizes() -> None:
    model = export.inference_model(gg.build(small_cnn()))
    for sizes in ({"batch": 8}, {"x": [8, 1, 4, 4]}):
        fixed = export.fixed_sizes(model, sizes)
        dims = [
            [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (fixed.graph.input[0], fixed.graph.output[0])
        ]
        assert dims == [[8, 1, 4, 4], [8, 3]]
        np.testing.assert_allclose(run(fixed, {"x": BATCH["x"]})["logits"], run(model, {"x": BATCH["x"]})["logits"])
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("opset", [17, 20])
def test_what_is_made_of_an_older_step_keeps_its_opset(opset: int) -> None:
    step = gg.build(small_cnn(), opset=opset, sizes={"batch": 8}, separate=True)
    opened = gg.build(small_cnn(), opset=opset)
    small = export.inference_model(opened, sizes={"batch": 8})
    models = [*step.separate.values(), small, export.float16_storage(small).result, *export.flat_models(step).values()]
    assert {m.opset_import[0].version for m in models} == {opset}
    assert {m.ir_version for m in models} == {step.train.ir_version} != {10}
    plain = run(export.inference_model(opened), {"x": BATCH["x"]})["logits"]
    np.testing.assert_allclose(run(small, {"x": BATCH["x"]})["logits"], plain, rtol=1e-6)
    flat = export.flat_weights(step)
    np.testing.assert_array_equal(run(models[-1], {"flat": flat.buffer})["fc.weight"], flat.arrays()["fc.weight"])


def test_arithmetic_on_sizes_is_folded() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[batch, time, 4] x) => (float[rows, 4] y) <int64[1] four = {4}, int64[1] all = {-1}> {
            s = Shape<start = 0, end = 1>(x)
            t = Shape<start = 1, end = 2>(x)
            n = Mul(s, t)
            shape = Concat<axis = 0>(n, four)
            y = Reshape(x, shape)
        }""")
    fixed = export.fixed_sizes(model, {"batch": 2, "time": 3})
    assert [n.op_type for n in fixed.graph.node] == ["Reshape"]
    assert run(fixed, {"x": np.zeros((2, 3, 4), np.float32)})["y"].shape == (6, 4)


@pytest.mark.parametrize(
    ("sizes", "error", "said"),
    [
        ({"btch": 8}, UnknownNameError, "did you mean 'batch'"),
        ({"y": [8, 3]}, UnknownNameError, "no input 'y'"),
        ({"x": [8, 2, 4, 4]}, BuildError, r"\[batch, 1, 4, 4\], which does not match \[8, 2, 4, 4\]"),
        ({"batch": 0}, BuildError, "a size must be at least 1"),
        ({"batch": 4, "x": [8, 1, 4, 4]}, BuildError, "both 4 and 8"),
        ({"batch": "8"}, ArgumentError, "a dict of numbers by dimension"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        gg.build(small_cnn(), sizes=sizes)


def test_negative_sizes_are_unknown() -> None:
    model = small_cnn()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1  # as old exporters write any size
    step = gg.build(model, sizes={"x": [8, 1, 4, 4]})
    assert step.manifest.inputs[0].shape == (8, 1, 4, 4)


# --- float16 ------------------------------------------------------------------------------------------------


def wide_model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(16, 32)), "b": rng.normal(size=32), "v": rng.normal(size=(32, 16))}
    weights["v"][0, 0] = 1e5  # beyond float16
    node = onnx.helper.make_node
    graph = onnx.helper.make_graph(
        [node("Gemm", ["x", "w", "b"], ["h"]), node("Tanh", ["h"], ["t"]), node("MatMul", ["t", "v"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 16])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n", 16])],
        [onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def every_rounding() -> np.ndarray[Any, Any]:
    """Each float16 number, the middle between each two, and its neighbours in float32."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    known = np.unique(halves[np.isfinite(halves)]).astype(np.float32)
    middles = ((known[1:].astype(np.float64) + known[:-1]) / 2).astype(np.float32)
    return np.concatenate([known, *(np.nextafter(middles, np.float32(end)) for end in (-1e9, 1e9)), middles])


@pytest.mark.parametrize("piece", [1000, 1 << 18])
def test_each_number_is_rounded_to_nearest_even(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PIECE", piece)
    numbers = every_rounding()
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g () => (float[n] y) { y = Neg(w) }')
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "w"))
    stored = export.float16_storage(model)
    rounded = onnx.numpy_helper.to_array(stored.result.graph.initializer[0])
    np.testing.assert_array_equal(rounded.view(np.uint16), numbers.astype(np.float16).view(np.uint16))
    error = np.abs(numbers.astype(np.float16).astype(np.float64) - numbers)
    assert stored.largest_error == error.max()
    assert stored.relative_error == pytest.approx(np.linalg.norm(error) / np.linalg.norm(numbers), rel=1e-5)


@pytest.mark.parametrize("one", [65520.0, np.inf, np.nan])
def test_numbers_beyond_float16_stay(one: float) -> None:
    numbers = np.append(np.ones(400, np.float32), np.float32(one))
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g () => (float[n] y) { y = Neg(w) }')
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "w"))
    assert export.float16_storage(model).kept == ("w",)


def test_weights_are_stored_as_float16_and_the_error_is_said() -> None:
    model = wide_model()
    stored = export.float16_storage(model)
    assert (stored.tensors, stored.kept) == (1, ("v",))
    assert {t.name: t.data_type for t in stored.result.graph.initializer} == {"w.float16": 10, "b": 1, "v": 1}
    assert stored.bytes_before - stored.bytes_after == 2 * 16 * 32
    w = onnx.numpy_helper.to_array(model.graph.initializer[0])
    rounded = w.astype(np.float16).astype(np.float32)
    assert stored.largest_error == pytest.approx(float(np.abs(rounded - w).max()))
    assert 0 < stored.relative_error < 2**-11 and "cannot represent them: v" in str(stored)
    x = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    exact = wide_model()
    exact.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(rounded, "w"))
    np.testing.assert_array_equal(run(stored.result, {"x": x})["y"], run(exact, {"x": x})["y"])


def test_what_a_model_holds_beside_its_weights_stays() -> None:
    model, make = wide_model(), onnx.numpy_helper.from_array
    values, places = make(np.array([2], np.float32), "s"), make(np.array([5]), "s_at")
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [32]))
    model.graph.node[0].input[2] = "s"
    model.training_info.add()
    stored = export.float16_storage(model)
    kept = stored.result
    assert (stored.tensors, kept.training_info) == (1, model.training_info)
    assert kept.graph.sparse_initializer == model.graph.sparse_initializer
    x = np.ones((1, 16), np.float32)
    np.testing.assert_allclose(run(kept, {"x": x})["y"], run(model, {"x": x})["y"], rtol=1e-2)


def test_a_stored_weight_gets_a_free_name() -> None:
    model = wide_model()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "w.float16"
    stored = export.float16_storage(model).result
    onnx.checker.check_model(stored, full_check=True)
    (name,) = (t.name for t in stored.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16)
    assert name == "w_1.float16"


def test_a_step_begins_with_rounded_weights_and_loads_others_as_ever(tmp_path: Path) -> None:
    """Averages, which init.onnx makes of the weights, follow weights that are loaded."""
    step = gg.build(wide_model(), "mse", gg.optim.sgd(0.1), ema=0.9)
    stored = export.float16_storage(step)
    stored.result.save(tmp_path / "step")
    plain = step.save(tmp_path / "plain") / "init.onnx"
    assert (tmp_path / "step" / "init.onnx").stat().st_size < plain.stat().st_size - 900
    trainer = gg.Trainer(tmp_path / "step", device="cpu")
    begun, w = trainer.state_dict(), onnx.numpy_helper.to_array(wide_model().graph.initializer[0])
    (average,) = (a for n, a in trainer.manifest.averages.items() if n == "w")
    for name in ("w", average):
        np.testing.assert_array_equal(begun[name], w.astype(np.float16).astype(np.float32))
    trainer.load_state_dict({"w": w + 1}, strict=False)
    np.testing.assert_array_equal(trainer.state_dict()[average], w + np.float32(1))
    assert trainer.step({"x": np.ones((2, 16), np.float32), "target": np.ones((2, 16), np.float32)})
    assert "float16" in str(export.float16_storage(trainer.export()))


def test_what_has_its_weights_elsewhere_or_is_no_model_is_refused(tmp_path: Path) -> None:
    onnx.save(wide_model(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    with pytest.raises(ModelError, match="is stored in an external file"):
        export.float16_storage(onnx.load(tmp_path / "m.onnx", load_external_data=False))
    with pytest.raises(ArgumentError):
        export.float16_storage("m.onnx")  # type: ignore[arg-type]


# --- .ort, lists of operators -------------------------------------------------------------------------------


def operators_of(config: str, folder: Path, types: bool = False) -> tuple[set[tuple[str, str]], Any]:
    """As onnxruntime's build reads them."""
    (folder / "c.config").write_text(config)
    required, impl = parse_config(str(folder / "c.config"), types)
    return {(domain, op) for domain, by_opset in required.items() for ops in by_opset.values() for op in ops}, impl


def test_ort_files_train_as_the_step_does(tmp_path: Path) -> None:
    step = gg.build(small_cnn(), separate=True)
    folder = export.save_ort(step, tmp_path / "ort", types=True)
    assert {f.name for f in folder.iterdir()} == {"init.ort", "train.ort", "eval.ort", "gradient.ort", "apply.ort",
                                                  "manifest.json", "required_operators.config"}  # fmt: skip
    manifest = Manifest.from_json((folder / "manifest.json").read_text())
    assert manifest == step.manifest
    sessions = {
        n: ort.InferenceSession(folder / f"{n}.ort", providers=["CPUExecutionProvider"]) for n in ("init", "train")
    }
    state = dict(zip([o.name for o in sessions["init"].get_outputs()], sessions["init"].run(None, {}), strict=True))
    rates = {n: np.array(v, np.float32) for n, v in manifest.hyperparameters.items()}
    names, loop = [o.name for o in sessions["train"].get_outputs()], Loop(step)
    for _ in range(3):
        found = dict(zip(names, sessions["train"].run(None, {**BATCH, **rates, **state}), strict=True))
        state = {s.name: found[s.next] for s in manifest.state}
        np.testing.assert_allclose(found["loss"], loop(BATCH)["loss"], rtol=1e-6)
    found, impl = operators_of((folder / "required_operators.config").read_text(), tmp_path, types=True)
    assert ("ai.onnx", "Conv") in found and impl is not None


@pytest.mark.sweep(0)
def test_zeros_of_the_optimizer_are_not_stored(tmp_path: Path) -> None:
    step = gg.build(wide_model(), "mse", "adamw")
    size = (export.save_ort(step, tmp_path / "ort") / "init.ort").stat().st_size
    assert size < 1.5 * sum(a.nbytes for a in export.weights(step).values()) + 6000


@pytest.mark.sweep(0)
def test_the_list_holds_what_functions_call_and_what_optimizers_write(tmp_path: Path) -> None:
    """Of a folder, and of a model by its path."""
    step = gg.build(small_cnn())
    step.save(tmp_path / "step")
    found, _ = operators_of(export.required_operators(tmp_path / "step"), tmp_path)
    called = {(n.domain, n.op_type) for f in step.train.functions for n in f.node}
    inside = {op for domain, op in called if domain == ""}
    plain = {n.op_type for m in (step.train, step.init, step.eval) for n in m.graph.node if n.domain == ""}
    assert {"MaxUnpool", "ScatterElements"} <= inside
    constant = {"Constant"}  # becomes an initializer
    assert {op for _, op in found} >= (inside | plain) - constant, (inside | plain) - {op for _, op in found}
    assert not any("gradgraph" in domain for domain, _ in found)
    onnx.save(export.inference_model(step), tmp_path / "m.onnx")
    model, _ = operators_of(export.required_operators(tmp_path / "m.onnx"), tmp_path)
    assert ("com.microsoft", "FusedConv") in model and ("ai.onnx", "Relu") in model and len(model) < len(found)


@pytest.mark.sweep(0)
def test_the_list_holds_what_onnxruntime_runs_here(tmp_path: Path) -> None:
    """Whatever its optimizers write for this processor, blocks of channels among it."""
    net = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(512, 3))
    step = gg.build(gg.frontend.export(net, {"x": ("n", 16, 8, 8)}), optimizer="sgd")
    step.save(tmp_path / "step")
    onnx.save(export.inference_model(step), tmp_path / "m.onnx")  # whose weights are constants
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    for source, name in (("step", "step/train"), ("m.onnx", "m")):
        listed, _ = operators_of(export.required_operators(tmp_path / source), tmp_path)
        ort.InferenceSession(tmp_path / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
        runs = {(n.domain or "ai.onnx", n.op_type) for n in onnx.load(options.optimized_model_filepath).graph.node}
        assert runs <= listed, runs - listed


@pytest.mark.sweep(0)
def test_ort_files_of_several_steps(tmp_path: Path) -> None:
    options = gg.StepOptions("mse", "sgd")
    step = gg.build(wide_model(), steps={"one": options, "two": options})
    folder = export.save_ort(step, tmp_path / "ort")
    files = {"init.ort", "train.one.ort", "train.two.ort", "eval.ort", "manifest.json", "required_operators.config"}
    assert {f.name for f in folder.iterdir()} == files
    with pytest.raises(OutputError, match="is not empty"):
        export.save_ort(step, folder)
    export.save_ort(gg.build(wide_model(), "mse", "sgd"), folder, force=True)
    assert "train.ort" in {f.name for f in folder.iterdir()} and not (folder / "train.one.ort").exists()


@pytest.mark.sweep(0)
def test_a_model_that_onnxruntime_refuses_is_said() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21, "other" : 1]>
        g (float[2] x) => (float[2] y) { y = other.Nothing(x) }""")
    with pytest.raises(ModelError, match="onnxruntime's converter rejects the model"):
        export.ort_model(model)
