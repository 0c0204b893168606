"""Losses that are Python functions of traced tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model

import gradgraph as gg
from gradgraph.frontend import Input, grad
from gradgraph.frontend import functional as F
from tests.kit.running import Loop, resumed

RNG = np.random.default_rng(0)
ROWS = 6
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, ROWS)


def network() -> onnx.ModelProto:
    """Two outputs, an inner value that is computed twice, and weights."""
    model = parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, 3] logits, float[batch, 1] score)
    <float[4, 5] w, float[5, 3] a, float[5, 1] b> {
        h = MatMul (x, w)
        hidden = Tanh (h)
        again = Tanh (h)
        passed = Identity (again)
        logits = MatMul (hidden, a)
        score = MatMul (passed, b)
    }""")
    rng = np.random.default_rng(1)
    for name, shape in {"w": (4, 5), "a": (5, 3), "b": (5, 1)}.items():
        array = rng.normal(scale=0.4, size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def entropy(out: Any, batch: Any) -> Any:
    return F.cross_entropy(out["logits"], batch["target"])


TARGET = {"target": Input(("batch",), "int64")}
FEEDS = {"x": X, "target": LABELS}


def test_a_function_trains_as_the_loss_that_it_calls() -> None:
    loops = [Loop(gg.build(network(), loss, gg.optim.sgd(0.1), targets=targets, train=["w", "a"], metrics=[]))
             for loss, targets in (("cross_entropy", {}), (entropy, TARGET))]  # fmt: skip
    for _ in range(3):
        named, function = (float(loop(FEEDS)["loss"]) for loop in loops)
        assert named == function
    for name in ("w", "a"):
        np.testing.assert_array_equal(loops[0].state[name], loops[1].state[name])


def test_what_a_function_may_read() -> None:
    """Outputs, an input, a weight, and inner values, also those that a simpler model would not have."""

    def everything(out: Any, batch: Any) -> Any:
        inner = (out["passed"] - out["hidden"]).square().sum() + out["h"].mean()
        assert list(out) == ["logits", "score"]
        assert list(batch) == ["x", "y"]
        return ((out["score"] - batch["y"]).square() * batch["x"][:, :1]).mean() + inner + 0.1 * out["w"].square().sum()

    step = gg.build(network(), everything, gg.optim.sgd(0.1), targets={"y": ("batch", 1)})
    assert step.manifest.trainable == ("w", "b")
    assert step.manifest.loss == {"name": "everything", "arguments": {}}
    assert step.manifest.outputs == ("logits", "score")
    y = RNG.normal(size=(ROWS, 1)).astype(np.float32)
    state = {k: v.astype(np.float64) for k, v in Loop(step).state.items()}
    h = X @ state["w"]
    expected = ((np.tanh(h) @ state["b"] - y) ** 2 * X[:, :1]).mean() + h.mean() + 0.1 * (state["w"] ** 2).sum()
    assert float(Loop(step)({"x": X, "y": y})["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(Loop(step).evaluate({"x": X, "y": y})["loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_weight_that_only_the_loss_reads_is_trained() -> None:
    step = gg.build(network(), lambda out, batch: out["logits"].square().mean() + out["b"].square().sum(), "sgd")
    assert set(step.manifest.trainable) == {"w", "a", "b"}


def two(out: Any, batch: Any) -> dict[str, Any]:
    return {"classes": F.cross_entropy(out["logits"], batch["target"]), "score": out["score"].square().mean()}


def test_several_parts_are_columns_and_their_sum_is_minimised(tmp_path: Path) -> None:
    step = gg.build(network(), two, gg.optim.sgd(0.1), targets=TARGET)
    assert step.manifest.metrics == ("classes", "score_loss")  # the model has a value called score
    trainer = gg.Trainer(step)
    history = trainer.fit(FEEDS, epochs=2, batch_size=4, validation=FEEDS, progress=False)
    for prefix in ("", "val_"):
        parts = np.array(history[f"{prefix}classes"]) + np.array(history[f"{prefix}score_loss"])
        np.testing.assert_allclose(parts, history[f"{prefix}loss"], rtol=1e-6)
    step.save(tmp_path / "step")
    assert gg.Trainer(tmp_path / "step").evaluate(FEEDS).keys() == {"loss", "classes", "score_loss"}


def test_a_part_called_loss_is_minimised_alone() -> None:
    step = gg.build(network(), lambda out, batch: {"loss": out["score"].mean(), "size": out["logits"].abs().mean()})
    assert step.manifest.trainable == ("w", "b")
    results = Loop(step)({"x": X})
    assert set(results) == {"loss", "size"}


def test_a_part_may_be_a_value_of_the_model_itself() -> None:
    model = parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[2] x) => (float y) <float[2] w = {1, 2}> {
        a = Mul (x, w)
        s = ReduceSum <keepdims = 0> (a)
        y = Exp (s)
    }""")
    step = gg.build(model, lambda out, batch: {"loss": out["y"], "seen": out["s"], "again": out["s"]}, "sgd")
    assert step.manifest.metrics == ("seen", "again")
    assert float(Loop(step).evaluate({"x": np.array([0.5, 0.25], np.float32)})["again"]) == 1.0


def test_a_target_may_have_the_name_of_an_output() -> None:
    step = gg.build(network(), lambda out, batch: F.mse_loss(out["score"], batch["score"]), "sgd",
                    targets={"score": ("batch", 1)})  # fmt: skip
    assert [t.name for t in step.manifest.targets] == ["score_target"]
    loop = Loop(step)
    assert np.isfinite(loop({"x": X, "score_target": np.zeros((ROWS, 1), np.float32)})["loss"])


@pytest.mark.sweep(0.6)
@pytest.mark.parametrize("name", ["loss", "accuracy", "logits_loss", "score"])
@pytest.mark.parametrize("loss", ["cross_entropy", {"logits": "cross_entropy"}, two], ids=["named", "dict", "function"])
def test_a_target_may_have_the_name_of_a_result(loss: Any, name: str) -> None:
    if callable(loss):
        step = gg.build(network(), lambda out, batch: {"score": F.cross_entropy(out["logits"], batch[name])},
                        targets={name: TARGET["target"]})  # fmt: skip
    else:
        step = gg.build(network(), loss, **({} if isinstance(loss, dict) else {"target_name": name}))
    (target,) = step.manifest.targets
    assert np.isfinite(gg.Trainer(step).step({"x": X, target.name: LABELS})["loss"])


def test_inner_values_of_layers_that_change_their_mode() -> None:
    """Behind Dropout, whose node is another one in training."""
    model = parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, 3] y) <float[4, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float ratio = {0.5}> {
        d = Dropout (x, ratio)
        y = MatMul (d, w)
    }""")
    step = gg.build(model, lambda out, batch: out["y"].mean() + out["d"].sum(), gg.optim.sgd(0.1))
    ones = np.ones((ROWS, 4), np.float32)
    results = Loop(step).evaluate({"x": ones})
    assert float(results["loss"]) == pytest.approx(ones.sum() + results["y"].mean())
    assert set(results) == {"loss", "loss.sums", "y"}
    assert float(Loop(step)({"x": ones})["loss"]) != pytest.approx(float(results["loss"]))


@pytest.mark.parametrize("loss", ["cross_entropy", entropy], ids=["named", "function"])
def test_the_exported_model_has_no_labels_and_any_outputs(loss: Any, tmp_path: Path) -> None:
    trainer = gg.Trainer(gg.build(network(), loss, "sgd", targets=TARGET if callable(loss) else {}))
    assert [i.name for i in trainer.export().graph.input] == ["x"]
    assert [o.name for o in trainer.export().graph.output] == ["logits", "score"]
    one = trainer.export(tmp_path / "one.onnx", outputs="score")
    assert [o.name for o in one.graph.output] == ["score"]
    assert {t.name for t in one.graph.initializer} == {"w", "b"}
    assert [o.name for o in trainer.export(outputs=["score", "logits"]).graph.output] == ["score", "logits"]
    with pytest.raises(gg.errors.UnknownNameError, match="no output 'scor'; did you mean 'score'"):
        trainer.export(outputs=["scor"])


def test_a_loss_inside_the_model_takes_its_labels_with_it() -> None:
    model = network()
    model.graph.input.append(onnx.helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, ["batch"]))
    model.graph.node.append(onnx.helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["cost"]))
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("cost", 1, []))
    trainer = gg.Trainer(gg.build(model, None, "sgd"))
    exported = trainer.export().graph
    assert [i.name for i in exported.input] == ["x"]
    assert [o.name for o in exported.output] == ["logits", "score"]
    assert set(trainer.predict({"x": X})) == {"logits", "score"}
    assert [i.name for i in trainer.export(outputs=["cost"]).graph.input] == ["x", "labels"]


def test_resume_is_exact_to_the_bit(tmp_path: Path) -> None:
    step = gg.build(network(), two, gg.optim.adam(1e-2), targets=TARGET)
    resumed(step, FEEDS, tmp_path, 7, epochs=4, batch_size=2)


def test_gradients_within_a_loss() -> None:
    """Forces are the gradient of an energy; the step differentiates them once more."""
    quadratic = parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 2] x) => (float[batch] energy) <float[2] w = {1.0, 2.0}> {
        s = Mul (x, x)
        p = Mul (s, w)
        axes = Constant <value = int64[1] {1}> ()
        energy = ReduceSum <keepdims = 0> (p, axes)
    }""")

    def loss(out: Any, batch: Any) -> dict[str, Any]:
        forces = -grad(out["energy"].sum(), out["x"])
        return {"energy": F.mse_loss(out["energy"], batch["energy"]), "forces": F.mse_loss(forces, batch["forces"])}

    step = gg.build(quadratic, loss, gg.optim.sgd(1.0), targets={"energy": ("batch",), "forces": ("batch", 2)})
    assert step.manifest.metrics == ("energy_loss", "forces_loss")
    loop = Loop(step)
    x = RNG.normal(size=(ROWS, 2))
    fed = {"x": x, "energy_target": np.zeros(ROWS), "forces": np.zeros((ROWS, 2))}
    found = loop({name: array.astype(np.float32) for name, array in fed.items()})
    w = np.array([1.0, 2.0])
    energy, forces = (x * x) @ w, -2 * x * w
    assert float(found["loss"]) == pytest.approx((energy**2).mean() + (forces**2).mean(), rel=1e-5)
    gradient = 2 * energy @ (x * x) / ROWS + (2 * forces * -2 * x).sum(0) / x.size
    np.testing.assert_allclose(w - loop.state["w"], gradient, rtol=1e-4)


def read(name: str) -> Any:
    return lambda out, batch: out[name].mean()


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one argument": (lambda out: out["score"].mean(), {}, "has two parameters"),
    "all outputs for one": (
        lambda out, batch: F.relu(out).mean(),
        {},
        r"requires a single tensor; select one .* out\['logits'\]",
    ),
    "no tensor": (lambda out, batch: 3.0, {}, r"returned 3\.0; return a scalar tensor"),
    "nothing": (lambda out, batch: None, {}, "returned None"),
    "an empty dict": (lambda out, batch: {}, {}, "returned nothing"),
    "a vector": (lambda out, batch: out["score"], {}, r"'loss' of shape \['batch', 1\].*reduce it"),
    "whole numbers": (lambda out, batch: out["logits"].argmax(), {}, "tensor of type int64"),
    "an unknown value": (read("scores"), {}, "reads out\\['scores'\\].*did you mean 'score'"),
    "an unknown target": (entropy, {}, r"batch\['target'\], which is neither an input of the model nor .*targets="),
    "a target that is not read": (read("score"), {"targets": TARGET}, "never reads the target 'target'"),
    "a bad shape": (entropy, {"targets": {"target": "batch"}}, "has shape 'batch'"),
    "targets of a named loss": ("mse", {"targets": TARGET}, "the argument targets declares inputs of a loss function"),
    "an output for a function": (entropy, {"output": "logits"}, "a loss function reads out"),
    "a metric": (read("score"), {"metrics": "accuracy"}, "write it as a function"),
    "two outputs for one": ("mse", {"output": ["logits", "score"]}, "reads 1 output"),
    "nothing depends on a weight": (lambda out, batch: batch["x"].mean(), {}, "no parameters to train"),
    "a number of a traced tensor": (lambda out, batch: float(out["score"]), {}, "has no value yet"),
    "no scalar": ("mse", {"loss": gg.losses.mse("none")}, "returns a number per element"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_losses_are_one_sentence(name: str) -> None:
    loss, options, says = BAD[name]
    with pytest.raises(gg.GradgraphError, match=says) as caught:
        gg.build(network(), **{"loss": loss, **options})
    assert "\n" not in str(caught.value)


def test_an_error_of_the_function_itself_comes_through() -> None:
    def broken(out: Any, batch: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        gg.build(network(), broken)
