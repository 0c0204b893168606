"""Weights that are Constant nodes, as PaddlePaddle's exporter writes them, are weights as initializers are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import gradgraph as gg
from gradgraph.surgery import load_adapter, load_weights, save_adapter
from tests.kit.constant_weights import with_constants
from tests.kit.lowered_networks import NETWORKS, batches, exported
from tests.kit.small_models import model_of, real
from tests.surgery.test_untouched import OPERATIONS, language_model

BRANCHES = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 3] x, bool up) => (float[n, 2] y) {
  h = If (up) <
    then_branch = one () => (float[n, 4] a) <float[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> { a = MatMul(x, w) },
    else_branch = two () => (float[n, 4] b) <float[3, 4] w = {2, 1, 0, 4, 1, 6, 0, 8, 3, 0, 1, 2}> { b = MatMul(x, w) }
  >
  y = MatMul(h, out)
}"""  # noqa: E501


def branches() -> onnx.ModelProto:
    model = onnx.parser.parse_model(BRANCHES)
    model.graph.initializer.append(numpy_helper.from_array(real(4, 2), "out"))
    return model


def paddle() -> onnx.ModelProto:
    """Single numbers are written as PaddlePaddle does: those of formulas, a learned scale, the bias of one channel."""
    number = "p2o.helper.constant"
    nodes = [
        helper.make_node("Conv", ["x", "conv2d_0.w_0", "conv2d_0.b_0"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", f"{number}.0"], ["a"]),
        helper.make_node("Clip", ["a", f"{number}.1", f"{number}.2"], ["b"]),
        helper.make_node("Mul", ["c", "b"], ["d"]),
        helper.make_node("Mul", ["mobile_one_block_0.w_0", "d"], ["s"]),
        helper.make_node("Div", ["s", f"{number}.3"], ["e"]),
        helper.make_node("ConvTranspose", ["e", "conv2d_transpose_0.w_0"], ["t"]),
        helper.make_node("Add", ["t", "conv2d_transpose_0.b_0"], ["y"]),
    ]
    single = {f"{number}.0": 3, f"{number}.1": 0, f"{number}.2": 6, f"{number}.3": 6, "mobile_one_block_0.w_0": 1.5}
    shapes = {"conv2d_0.w_0": (2, 1, 3, 3), "conv2d_0.b_0": (2,), "conv2d_transpose_0.w_0": (2, 1, 1, 1)}
    weights = {n: np.array(a, np.float32) for n, a in single.items()} | {n: real(*s) for n, s in shapes.items()}
    weights["conv2d_transpose_0.b_0"] = real(1, 1, 1, 1)
    return with_constants(model_of(nodes, {"x": (np.float32, ["n", 1, "h", "w"])}, opset=12, weights=weights))


def assert_equal(one: gg.Step, other: gg.Step) -> None:
    assert one.manifest == other.manifest
    assert [*map(unmarked, (one.train, one.eval))] == [*map(unmarked, (other.train, other.eval))]
    assert numbers(one.init) == numbers(other.init)


def unmarked(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the metadata that say where the weights were."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    kept = [entry for entry in copy.metadata_props if entry.key != "gradgraph.weights_were_nodes"]
    del copy.metadata_props[:]
    copy.metadata_props.extend(kept)
    return copy


def numbers(model: onnx.ModelProto) -> dict[str, list[float]]:
    return {t.name: numpy_helper.to_array(t).ravel().tolist() for t in model.graph.initializer}


@pytest.mark.sweep(0.31)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_that_of_the_model_with_initializers(name: str) -> None:
    model = exported(name, "batch")
    nodes = with_constants(model)
    assert not nodes.graph.initializer
    assert_equal(*(gg.build(m, "cross_entropy", gg.optim.adamw(1e-3)) for m in (model, nodes)))


def test_losses_and_exported_weights_are_those_of_the_model_with_initializers() -> None:
    model = exported("mlp", "batch")
    found = []
    for source in (model, with_constants(model)):
        trainer = gg.Trainer(gg.build(source, "cross_entropy", gg.optim.adamw(1e-2)))
        losses = [trainer.step(batch)["loss"] for batch in batches("mlp", 8, 5)]
        found.append((losses, numbers(trainer.export())))
    assert found[0] == found[1]


def test_weights_in_bodies_are_told_apart_by_branch() -> None:
    model, feeds = branches(), {"x": np.ones((2, 3), np.float32), "target": np.ones((2, 2), np.float32)}
    steps = [gg.build(m, "mse", "sgd") for m in (model, with_constants(model))]
    assert len(steps[1].manifest.trainable) == 3
    assert_equal(*steps)
    losses = [gg.Trainer(s).step({**feeds, "up": np.array(up)})["loss"] for s in steps for up in (True, False)]
    assert losses[:2] == losses[2:] and losses[0] != losses[1]


@pytest.mark.parametrize("name", OPERATIONS)
def test_surgery_gives_what_it_gives_with_initializers(name: str) -> None:
    model = language_model()
    expected, found = OPERATIONS[name](model), OPERATIONS[name](with_constants(model))
    assert numbers(found) == numbers(expected)
    assert [(n.op_type, n.input, n.output) for n in found.graph.node if n.op_type != "Constant"] == [
        (n.op_type, n.input, n.output) for n in expected.graph.node if n.op_type != "Constant"
    ]


def test_weights_and_adapters_are_read_from_files_with_constants(tmp_path: Path) -> None:
    model, nodes = language_model(), with_constants(language_model())
    reset = OPERATIONS["reset_weights"](model)
    onnx.save(with_constants(reset), tmp_path / "other.onnx")
    assert numbers(load_weights(nodes, tmp_path / "other.onnx")) == numbers(reset)
    adapted = gg.lora(nodes, "*")
    save_adapter(adapted, tmp_path / "adapter")
    assert numbers(load_adapter(nodes, tmp_path / "adapter")) == numbers(adapted)


def test_single_numbers_of_formulas_stay_and_learned_ones_are_trained(caplog: pytest.LogCaptureFixture) -> None:
    trained = set(gg.build(paddle(), "mse", "sgd").manifest.trainable)
    assert trained == {v.output[0] for v in paddle().graph.node if v.op_type == "Constant" and "p2o" not in v.output[0]}
    assert "not trained" not in caplog.text
    assert gg.build(paddle(), "mse", "sgd", train="conv2d_0*", freeze="*.b_0").manifest.trainable == ("conv2d_0.w_0",)


def test_gradients_of_constants_are_right() -> None:
    feeds = {"x": real(2, 1, 4, 5)}
    report = gg.check_gradients(paddle(), feeds)
    assert report.precision == "float64" and report.ok, str(report)
    assert {t.name for t in report.tensors} > set(gg.build(paddle(), "mse", "sgd").manifest.trainable)


def test_among_weights_that_are_initializers_a_constant_is_a_number() -> None:
    model = exported("mlp", "batch")
    names = [t.name for t in model.graph.initializer if t.name.endswith("weight")]
    one = with_constants(model, but={t.name for t in model.graph.initializer} - {names[0]})
    trained = gg.build(one, "cross_entropy", "sgd").manifest.trainable
    assert trained == tuple(n for n in gg.build(model, "cross_entropy", "sgd").manifest.trainable if n != names[0])


def test_the_names_of_constants_do_not_make_numbers_of_weights() -> None:
    """PyTorch exports what ``torch.jit.freeze`` gives so; in other files tensors of such names are numbers."""
    model, places = language_model(), ("words", "scale", "shift", "val_92")
    for tensor in model.graph.initializer:
        tensor.name = f"/Constant_{places.index(tensor.name)}_output_0"
    for node in model.graph.node:
        node.input[:] = [f"/Constant_{places.index(n)}_output_0" if n in places else n for n in node.input]
    nodes, weights = with_constants(model), {f"/Constant_{i}_output_0" for i in range(4)}
    assert set(gg.build(nodes, "mse", "sgd").manifest.trainable) == weights
    assert set(gg.build(gg.new_head(nodes, 3), "mse", "sgd").manifest.trainable) > weights - {"/Constant_3_output_0"}


def test_a_file_of_ir_version_3_stays_one_that_runtimes_read() -> None:
    old = with_constants(language_model())
    old.ir_version = 3
    onnx.checker.check_model(gg.lora(old, "*"), full_check=True)


def test_sizes_that_are_called_unknown_need_not_be_equal() -> None:
    model = paddle()
    for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_param = "?"
    step = gg.build(model, "mse", "sgd")
    assert step.manifest.inputs[0].shape == ("n", 1, None, None)
    gg.Trainer(step).step({"x": real(2, 1, 4, 5), "target": real(2, 1, 4, 5)})
