"""Losses and metrics: values and input gradients against NumPy, and against torch.nn.functional."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import losses
from gradgraph.losses import class_axis
from gradgraph.verify.reference import Oracle
from tests.kit.running import Loop

RNG = np.random.default_rng(0)
N, C = 5, 4
LOGITS = (RNG.normal(size=(N, C)) * 3).astype(np.float32)
LABELS = np.array([0, 3, 1, 1, 2])


def model(shape: list[Any], values: np.ndarray) -> onnx.ModelProto:
    """A model whose only parameter is what it adds to its input: d loss/d w is the loss's own gradient."""
    dtype = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "shift",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, shape)],
        [onnx.numpy_helper.from_array(np.zeros_like(values), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def loss_and_gradient(
    loss: losses.Loss, x: np.ndarray, target: np.ndarray, batch: str | int = "batch"
) -> tuple[float, np.ndarray]:
    step = gg.build(model([batch, *x.shape[1:]], x), loss, gg.optim.sgd(1.0))
    loop = Loop(step)
    value = loop({"x": x, "target": target})["loss"]
    assert value.shape == ()
    return float(value), -loop.state["w"]


def log_softmax(x: np.ndarray, axis: int = 1) -> np.ndarray:
    x = x.astype(np.float64) - x.max(axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def test_cross_entropy_is_its_formula() -> None:
    value, gradient = loss_and_gradient(losses.cross_entropy(), LOGITS, LABELS)
    log_p = log_softmax(LOGITS)
    onehot = np.eye(C)[LABELS]
    np.testing.assert_allclose(value, -(log_p * onehot).sum() / N, rtol=1e-6)
    np.testing.assert_allclose(gradient, (np.exp(log_p) - onehot) / N, atol=1e-6)


def test_cross_entropy_survives_extreme_logits() -> None:
    x = np.array([[200.0, -200.0], [-1e4, 1e4]], np.float32)
    value, gradient = loss_and_gradient(losses.cross_entropy(), x, np.array([1, 1]))
    assert value == pytest.approx(200.0)
    np.testing.assert_allclose(gradient, [[0.5, -0.5], [0, 0]], atol=1e-7)


def test_ignored_labels_do_not_count() -> None:
    target = np.array([0, -100, 1, -100, 2])
    kept = target >= 0
    value, gradient = loss_and_gradient(losses.cross_entropy(), LOGITS, target)
    expected, rows = loss_and_gradient(losses.cross_entropy(), LOGITS[kept], target[kept])
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient[kept], rows, atol=1e-7)
    assert not gradient[~kept].any()


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_masked_class_does_not_reach_ignored_labels(name: str, reduction: str) -> None:
    """Class 0 stands in for an ignored label, and 0 · −∞ is NaN."""
    x, target = LOGITS.copy(), np.array([1, -100, 1, 3, 2])
    x[:, 0] = -np.inf
    value, gradient = loss_and_gradient(losses.by_name(name, reduction=reduction), x, target)
    kept = target >= 0
    expected, rows = loss_and_gradient(losses.by_name(name, reduction=reduction), x[kept], target[kept])
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient[kept], rows, atol=1e-7)
    assert not gradient[~kept].any()


def reads_one_and_compares(name: str) -> bool:
    loss = losses.by_name(name)
    return len(loss.reads) == len(loss.targets) == 1 and (loss.labels or loss.targets[0].words == "as the prediction")


# ciou: onnxruntime has no Atan of float64
@pytest.mark.parametrize("name", sorted({*filter(reads_one_and_compares, losses.LOSSES)} - {"ciou"}))
def test_losses_of_float64_models_run(name: str) -> None:
    """Of all losses: ``test_losses_torch.py``."""
    target = LABELS if losses.by_name(name).labels else np.abs(LOGITS[::-1]) / 20
    narrow = loss_and_gradient(losses.by_name(name), LOGITS, target)
    wide = loss_and_gradient(
        losses.by_name(name), LOGITS.astype(np.float64), target.astype(np.float64) if target.ndim > 1 else target
    )
    np.testing.assert_allclose(wide[0], narrow[0], rtol=1e-5)
    np.testing.assert_allclose(wide[1], narrow[1], rtol=1e-4, atol=1e-6)


def test_float16_models_may_have_many_labels() -> None:
    """70,000 of them, whose losses add up to 700,000; a float16 ends at 65,504."""
    x = np.tile(np.array([[10.0, 0.0]], np.float16), (70_000, 1))
    step = gg.build(model(["batch", 2], x[0]), "cross_entropy", "sgd", backend="portable")
    feeds = {"x": x, "target": np.ones(len(x), np.int64), "w": np.zeros(2, np.float16)}
    value = float(Oracle(step.eval)(feeds)["loss"])
    assert value == pytest.approx(10.0, rel=1e-2)  # onnxruntime on the CPU would compute in float32 anyway


def test_classes_on_the_last_axis() -> None:
    x = RNG.normal(size=(2, 3, C)).astype(np.float32)
    target = RNG.integers(0, C, (2, 3))
    value, _ = loss_and_gradient(losses.cross_entropy(axis=-1), x, target)
    expected, _ = loss_and_gradient(losses.cross_entropy(), x.reshape(6, C), target.reshape(6))
    assert value == pytest.approx(expected, rel=1e-6)


def test_accuracy_counts_what_counts() -> None:
    step = gg.build(model(["batch", C], LOGITS), "cross_entropy", "sgd")
    target = np.where(np.arange(N) == 1, -100, LABELS)
    hit = (LOGITS.argmax(1) == target)[target >= 0].mean()
    results = Loop(step).evaluate({"x": LOGITS, "target": target})
    assert results["accuracy"] == pytest.approx(hit)
    assert set(results) == {"loss", "accuracy", "y"}


def test_a_step_runs_at_every_batch_size() -> None:
    step = gg.build(model(["batch", C], LOGITS[:1]), "cross_entropy", "sgd")
    assert step.manifest.targets[0].shape == ("batch",)
    assert step.manifest.targets[0].classes == C
    loop = Loop(step)
    for size in (1, 3, 5):
        assert np.isfinite(loop({"x": LOGITS[:size], "target": LABELS[:size]})["loss"])


def test_a_models_own_scalar_output() -> None:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"]), helper.make_node("ReduceMean", ["y"], ["cost"], keepdims=0)],
        "own",
        [helper.make_tensor_value_info("x", 1, ["batch", 3])],
        [helper.make_tensor_value_info("cost", 1, []), helper.make_tensor_value_info("y", 1, ["batch", 3])],
        [onnx.numpy_helper.from_array(np.ones(3, np.float32), "w")],
    )
    own = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    step = gg.build(own, None, gg.optim.sgd(3.0))
    assert step.manifest.loss == {"name": "none", "arguments": {}}
    assert step.manifest.loss_output == "cost"
    assert step.manifest.targets == ()
    loop = Loop(step)
    x = LOGITS[:, :3]
    assert loop({"x": x})["cost"] == pytest.approx(x.mean(), rel=1e-6)
    np.testing.assert_allclose(loop.state["w"], 1 - x.mean(0), rtol=1e-5)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown loss": ({"loss": "cros_entropy"}, "did you mean 'cross_entropy'"),
    "own output is no scalar": ({"loss": None}, "itself must be a scalar output"),
    "unknown metric": ({"loss": "mse", "metrics": ["acuracy"]}, "did you mean 'accuracy'"),
    "metric without labels": ({"loss": "mse", "metrics": ["accuracy"]}, "a loss whose targets are class indices"),
    "unknown output": ({"output": "z"}, "no floating-point output 'z'"),
    "train glob": ({"train": "conv*"}, "'conv\\*' in train matches no weight"),
    "freeze glob": ({"freeze": "conv*"}, "'conv\\*' in freeze matches no weight"),
    "nothing left": ({"freeze": "*"}, "no parameters to train"),
    "unknown optimizer": ({"optimizer": "adamm"}, "did you mean 'adam'"),
    "an optimizer that was not called": ({"optimizer": gg.optim.sgd}, "the optimizer is the function sgd; pass a name"),
    "a loss that was not called": ({"loss": losses.mse}, "the loss is the function mse; pass a name"),
}


def test_one_output_is_no_choice_of_classes() -> None:
    with pytest.raises(gg.GradgraphError, match="one output per class, but the model has a single output"):
        gg.build(model(["batch", 1], LOGITS[:, :1]), "cross_entropy")


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_sentence(name: str) -> None:
    arguments, says = BAD[name]
    with pytest.raises(gg.GradgraphError, match=says) as caught:
        gg.build(model(["batch", C], LOGITS), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("taken", ["x", "w", "y"])
@pytest.mark.parametrize("name", ["accuracy", "loss", "target", "learning_rate", "step"])
def test_names_that_a_step_would_like_may_be_taken(name: str, taken: str) -> None:
    clashing = model(["batch", C], LOGITS)
    graph = clashing.graph
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = name if value.name == taken else value.name
    for names in (graph.node[0].input, graph.node[0].output):
        names[:] = [name if n == taken else n for n in names]
    step = gg.build(clashing, "cross_entropy", gg.optim.sgd(0.1))
    loop = Loop(step)
    found = loop({name if taken == "x" else "x": LOGITS, step.manifest.targets[0].name: LABELS})
    assert float(found[step.manifest.metrics[0]]) == pytest.approx(np.mean(LOGITS.argmax(1) == LABELS))


def test_the_target_has_a_name_that_no_body_uses() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    loop (float[batch, 4] x) => (float[batch, 4] y) <float[4] w = {0, 0, 0, 0}, int64 count = {2}> {
        y = Loop (count, , x) <body = b (int64 i, bool go, float[batch, 4] h) => (bool on, float[batch, 4] next) {
            on = Identity (go)
            target = Add (h, w)
            next = Tanh (target)
        }>
    }"""
    step = gg.build(onnx.parser.parse_model(text), "cross_entropy", "sgd")
    (target,) = step.manifest.targets
    expected, _ = loss_and_gradient(losses.cross_entropy(), np.tanh(np.tanh(LOGITS)), LABELS)
    assert float(Loop(step)({"x": LOGITS, target.name: LABELS})["loss"]) == pytest.approx(expected)


def test_a_name_with_brackets_is_a_name_and_no_glob() -> None:
    bracketed = model(["batch", C], LOGITS)
    bracketed.graph.node[0].input[1] = bracketed.graph.initializer[0].name = "layer[0]/w"
    assert gg.build(bracketed, train="layer[0]/w").manifest.trainable == ("layer[0]/w",)
    with pytest.raises(gg.GradgraphError, match="no parameters to train"):
        gg.build(bracketed, freeze=["layer[0]/w"])


# name -> ours, name in torch.nn.functional, its arguments, prediction, target
WEIGHT = [0.5, 2.0, 1.0, 3.0]
MAP = RNG.normal(size=(2, C, 3, 2)).astype(np.float32)
MAP_LABELS = RNG.integers(0, C, (2, 3, 2))
MAP_LABELS[0, 0, 0] = 2
SOFT = RNG.uniform(size=(N, C)).astype(np.float32)
TORCH: dict[str, tuple[losses.Loss, str, dict[str, Any], np.ndarray, np.ndarray]] = {
    "cross_entropy": (losses.cross_entropy(), "cross_entropy", {}, LOGITS, LABELS),
    "sum": (losses.cross_entropy(reduction="sum"), "cross_entropy", {"reduction": "sum"}, LOGITS, LABELS),
    "weight": (losses.cross_entropy(WEIGHT), "cross_entropy", {"weight": WEIGHT}, LOGITS, LABELS),
    "smoothing": (losses.cross_entropy(label_smoothing=0.1), "cross_entropy", {"label_smoothing": 0.1}, LOGITS, LABELS),
    "all": (
        losses.cross_entropy(WEIGHT, 2, "mean", 0.2),
        "cross_entropy",
        {"weight": WEIGHT, "ignore_index": 2, "label_smoothing": 0.2},
        MAP,
        MAP_LABELS,
    ),
    "map": (losses.cross_entropy(), "cross_entropy", {}, MAP, MAP_LABELS),
    "nll": (losses.nll(WEIGHT), "nll_loss", {"weight": WEIGHT}, log_softmax(LOGITS).astype(np.float32), LABELS),
    "mse": (losses.mse(), "mse_loss", {}, LOGITS, SOFT),
    "l1": (losses.l1("sum"), "l1_loss", {"reduction": "sum"}, LOGITS, SOFT),
    "huber": (losses.huber(0.7), "huber_loss", {"delta": 0.7}, LOGITS, SOFT),
    "bce": (losses.bce_with_logits(), "binary_cross_entropy_with_logits", {}, LOGITS * 40, SOFT),
    "bce-weight": (
        losses.bce_with_logits(WEIGHT),
        "binary_cross_entropy_with_logits",
        {"pos_weight": WEIGHT},
        LOGITS,
        SOFT,
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", TORCH)
def test_losses_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    ours, theirs, arguments, x, target = TORCH[name]
    tensors = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in arguments.items()}
    prediction = torch.tensor(x, requires_grad=True)
    expected = getattr(torch.nn.functional, theirs)(prediction, torch.tensor(target), **tensors)
    expected.backward()
    value, gradient = loss_and_gradient(ours, x, target, batch=len(x))
    np.testing.assert_allclose(value, float(expected.detach()), rtol=1e-5)
    np.testing.assert_allclose(gradient, prediction.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_an_axis_of_classes_that_is_none() -> None:
    with pytest.raises(gg.errors.BuildError, match="axis"):
        class_axis(("N", 3), 2)
    with pytest.raises(gg.errors.ArgumentError, match=r"axis is 1\.5; it should be a whole number"):
        losses.cross_entropy(axis=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("delta", [0.0, -1.0, math.inf, math.nan])
def test_huber_wants_a_delta_above_zero(delta: float) -> None:
    with pytest.raises(gg.errors.BuildError, match="delta must be a finite number above zero"):
        losses.huber(delta)


def test_constant_nodes_beside_initializers_are_trained_when_named() -> None:
    constant = model(["batch", C], LOGITS)
    weight = constant.graph.initializer.pop()
    constant.graph.node.insert(0, onnx.helper.make_node("Constant", [], [weight.name], value=weight))
    assert gg.build(constant).manifest.trainable == (weight.name,)  # as ndonnx writes it: no initializers at all
    constant.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.float32), "unread"))
    with pytest.raises(gg.GradgraphError, match=f"no parameters to train.*train='{weight.name}' would train"):
        gg.build(constant)
    assert gg.build(constant, train=weight.name).manifest.trainable == (weight.name,)
