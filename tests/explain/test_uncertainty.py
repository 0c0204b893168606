"""Last-layer Laplace, gradient norms, TracIn and adversarial training beside dense computations in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import GradgraphError
from gradgraph.frontend import Module, export, nn
from gradgraph.frontend import functional as F
from tests.kit.running import run

RNG = np.random.default_rng(0)
TRAIN = RNG.normal(size=(33, 4)).astype(np.float32)
TEST = (RNG.normal(size=(5, 4)) * 2).astype(np.float32)
LABELS = RNG.integers(0, 3, 33)


class Net(Module):
    def __init__(self, classes: int, end: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.one, self.head, self.end = nn.Linear(4, 5), nn.Linear(5, classes, bias=bias), end

    def forward(self, x: Any) -> Any:
        y = self.head(F.tanh(self.one(x)))
        return y if self.end is None else self.end(y)


def net(classes: int = 3, end: Any = None, bias: bool = True) -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    return export(Net(classes, end, bias), {"x": ("batch", 4)}, "y")


def softmax(y: Any) -> Any:
    return F.softmax(y, 1)


def weights_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}


def forward(w: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features and logits."""
    h = np.tanh(x.astype(np.float64) @ w["one.weight"].T + w["one.bias"])
    return h, h @ w["head.weight"].T + w.get("head.bias", 0.0)


def shares(y: np.ndarray) -> np.ndarray:
    p = np.exp(y - y.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def gradients(w: dict[str, np.ndarray], x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """The gradients of each sample: weights and biases of both layers, flat."""
    h, _ = forward(w, x)
    dz = (dy @ w["head.weight"]) * (1 - h * h)
    parts = [np.einsum("ni,nj->nij", dz, x), dz, np.einsum("ni,nj->nij", dy, h), dy]
    return np.concatenate([part.reshape(len(x), -1) for part in parts], axis=1)


# --- Laplace --------------------------------------------------------------------------------------------------


def dense_variance(w: dict[str, np.ndarray], structure: str, prior: float, kind: str, noise: float) -> np.ndarray:
    """The variances by the whole covariance of the last layer."""
    bias = "head.bias" in w
    total, outer, middle = 0.0, 0.0, 0.0
    for x in TRAIN:
        h, y = (a[0] for a in forward(w, x[None]))
        p = 1 / (1 + np.exp(-y)) if kind == "sigmoid" else shares(y)
        of_output = {"sigmoid": np.diag(p * (1 - p)), "regression": np.eye(len(y)) / noise**2,
                     "softmax": np.diag(p) - np.outer(p, p)}[kind]  # fmt: skip
        h = np.append(h, 1.0) if bias else h
        total, outer, middle = (
            total + np.kron(of_output, np.outer(h, h)), outer + np.outer(h, h), middle + of_output
        )  # fmt: skip
    matrix = {"full": total, "diag": np.diag(np.diag(total)), "kron": np.kron(middle, outer / len(TRAIN))}[structure]
    covariance = np.linalg.inv(matrix + prior * np.eye(len(matrix)))
    found = []
    for h, y in zip(*forward(w, TEST), strict=True):
        jacobian = np.kron(np.eye(len(y)), np.append(h, 1.0) if bias else h)
        found.append(np.diag(jacobian @ covariance @ jacobian.T))
    return np.array(found)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize(
    ("classes", "end", "bias", "kind"),
    [(3, None, True, "softmax"), (3, softmax, False, "softmax"), (1, None, True, "sigmoid"),
     (2, F.sigmoid, True, "sigmoid"), (2, None, True, "regression"), (1, None, False, "regression")],
)  # fmt: skip
def test_laplace(structure: str, classes: int, end: Any, bias: bool, kind: str) -> None:
    model = net(classes, end, bias)
    options: dict[str, Any] = {"likelihood": "regression", "sigma_noise": 0.3} if kind == "regression" else {}
    made = gg.laplace(model, {"x": TRAIN, "target": LABELS}, hessian_structure=structure, prior_precision=0.7,
                      batch_size=10, **options)  # fmt: skip
    onnx.checker.check_model(made, full_check=True)
    found, w = run(made, {"x": TEST}), weights_of(model)
    expected = dense_variance(w, structure, 0.7, kind, 0.3)
    np.testing.assert_allclose(found["y.variance"], expected, rtol=1e-5)
    assert ("y.probability" in found) == (kind != "regression")
    if kind != "regression":
        scaled = forward(w, TEST)[1] / np.sqrt(1 + np.pi / 8 * expected)
        p = 1 / (1 + np.exp(-scaled)) if kind == "sigmoid" else shares(scaled)
        np.testing.assert_allclose(found["y.probability"], p, rtol=1e-5)


def test_laplace_of_a_fixed_batch() -> None:
    gg.frontend.manual_seed(0)
    model = export(Net(3), {"x": (5, 4)}, "y")
    expected = run(gg.laplace(net(), TRAIN), {"x": TEST})["y.variance"]
    np.testing.assert_allclose(run(gg.laplace(model, TRAIN), {"x": TEST})["y.variance"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (net(3, F.relu), {}, "is computed by a node of type Relu, not by a linear layer"),
        (net(3, softmax), {"likelihood": "regression"}, "is a probability, not a number with noise"),
        (net(), {"sigma_noise": 2.0}, "has no effect on a classification"),
        (net(), {"hessian_structure": "lowrank"}, "it should be one of full, kron, diag"),
        (net(), {"prior_precision": 0}, "prior_precision is 0"),
        (net(), {"data": {"z": TRAIN}}, "'x'"),
        (net(), {"data": np.full((2, 4), np.nan, np.float32)}, "returns NaN or infinity"),
    ],
)
def test_errors_of_laplace(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradgraphError, match=message):
        gg.laplace(model, **{"data": TRAIN, **options})


def test_a_full_hessian_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradgraph.explaining.laplace.MOST", 17)
    with pytest.raises(GradgraphError, match="has 18 parameters, and a full Hessian may have at most 17; use"):
        gg.laplace(net(), TRAIN)
    gg.laplace(net(), TRAIN, hessian_structure="kron")


# --- gradient norm --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("wrt", [None, ["one.*", "head.*"]])
def test_gradient_norm(p: int, wrt: Any) -> None:
    model = net(3, softmax)
    found, w = run(gg.gradient_norm(model, wrt=wrt, p=p, temperature=2.0), {"x": TEST}), weights_of(model)
    h, y = forward(w, TEST)
    slope = (shares(y / 2) - 1 / 3) / 2
    flat = np.einsum("ni,nj->nij", slope, h).reshape(5, -1) if wrt is None else gradients(w, TEST, slope)
    np.testing.assert_allclose(found["y.gradient_norm"], np.linalg.norm(flat, p, axis=1), rtol=1e-5)
    np.testing.assert_allclose(found["y"], shares(y), rtol=1e-5)


def test_errors_of_gradient_norm() -> None:
    with pytest.raises(GradgraphError, match="but 'y' is binary"):
        gg.gradient_norm(net(1))
    with pytest.raises(GradgraphError, match="p is 3; it should be 1 or 2"):
        gg.gradient_norm(net(), p=3)


# --- TracIn ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[gg.Step, list[Path]]:
    folder = tmp_path_factory.mktemp("kept")
    step = gg.build(net(), "cross_entropy", gg.optim.adam(0.1))
    keeper, halved = gg.CheckpointKeeper(folder), lambda done: 0.1 / (1 + done)
    gg.Trainer(step, device="cpu").fit({"x": TRAIN, "target": LABELS}, epochs=2, callbacks=[keeper],
                                       learning_rate=halved, progress=False)  # fmt: skip
    return step, sorted(folder.glob("step-*.ckpt"))


@pytest.mark.parametrize("wrt", [None, "head.*"])
@pytest.mark.parametrize("rates", [None, [0.5, 2.0]])
def test_tracin(kept: Any, wrt: Any, rates: Any) -> None:
    step, files = kept
    found = gg.tracin(step, files, {"x": TRAIN, "target": LABELS}, {"x": TEST, "target": LABELS[:5]}, wrt=wrt,
                      learning_rates=rates, batch_size=10)  # fmt: skip
    expected: Any = 0.0
    for i, file in enumerate(files):
        trainer = gg.Trainer.resume(step, file, device="cpu")
        w = {name: a.astype(np.float64) for name, a in trainer.parameters.items()}
        rate = trainer.progress.hyperparameters["learning_rate"] if rates is None else rates[i]
        parts = []
        for x, labels in ((TEST, LABELS[:5]), (TRAIN, LABELS)):
            rows = gradients(w, x, shares(forward(w, x)[1]) - np.eye(3)[labels])
            parts.append(rows if wrt is None else rows[:, 25:])
        expected = expected + rate * parts[0] @ parts[1].T
    assert len(files) == 2
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_errors_of_tracin(kept: Any) -> None:
    step, files = kept
    data = {"x": TRAIN, "target": LABELS}
    with pytest.raises(GradgraphError, match="1 learning rate for 2 checkpoints; pass one for each"):
        gg.tracin(step, files, data, data, learning_rates=[0.1])
    with pytest.raises(GradgraphError, match="no trained weight matches 'x'"):
        gg.tracin(step, files, data, data, wrt="x")
    with pytest.raises(GradgraphError, match=r"checkpoints is 'file\.ckpt'; it should be a list of paths"):
        gg.tracin(step, "file.ckpt", data, data)
