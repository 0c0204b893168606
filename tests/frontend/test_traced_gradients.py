"""Gradients inside traced functions: what is refused, where they stop, and what becomes of it in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import DifferentiationError, GradgraphError, ModelError
from gradgraph.frontend import Input, export, nn
from gradgraph.frontend import functional as F
from tests.kit.frontend_parity import declared_shapes_hold, drawn, run_model
from tests.kit.running import Loop, resumed, run

X = drawn((5, 3))
BATCH = {"x": ("batch", 3)}


class Network(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def test_shapes_are_those_of_what_is_differentiated_by() -> None:
    def slopes(x: Any, w: Any) -> Any:
        y = (x @ w).tanh()
        both = frontend.grad(y.square().sum(), [x, w])
        assert [str(g.shape) for g in both] == ["(batch, 3)", "(3, 2)"]
        return {"dx": both[0], "dw": both[1], "same": frontend.grad(y.sum(), y),
                "zeros": frontend.grad(y.sum(), w.abs(), allow_unused=True),
                "pushed": frontend.jvp(y, [x, w], [1.0, w])}  # fmt: skip

    model = export(slopes, {**BATCH, "w": (3, 2)})
    onnx.checker.check_model(model, full_check=True)
    arrays = {"x": X, "w": drawn((3, 2), 1)}
    declared_shapes_hold(model, arrays)
    found = run_model(model, arrays)
    y = np.tanh(X @ arrays["w"])
    np.testing.assert_allclose(found["dw"], X.T @ (2 * y * (1 - y**2)), rtol=1e-4)
    np.testing.assert_allclose(found["pushed"], (1 - y**2) * ((np.ones_like(X) + X) @ arrays["w"]), rtol=1e-4)
    assert not found["zeros"].any()
    assert (found["same"] == 1).all()


def test_a_tensor_and_one_that_is_computed_from_it() -> None:
    def both(x: Any) -> Any:
        y = x.tanh()
        dx, dy = frontend.grad(y.square().sum(), [x, y])
        return {"dx": dx, "dy": dy}

    found = run_model(export(both, BATCH), {"x": X})
    y = np.tanh(X)
    np.testing.assert_allclose(found["dy"], 2 * y, rtol=1e-5)
    np.testing.assert_allclose(found["dx"], 2 * y * (1 - y**2), rtol=1e-4, atol=1e-6)


BAD: dict[str, tuple[Any, str]] = {
    "several elements": (lambda x: frontend.grad(x * 2, x), r"shape \(batch, 3\); grad requires a scalar: reduce it"),
    "whole numbers": (lambda x: frontend.grad(x.argmax(1).sum(), x), "y '.*' is int64; only floating-point"),
    "by whole numbers": (lambda x: frontend.grad(x.sum(), x.argmax(1)), "x '.*' is int64; only floating-point"),
    "by a number": (lambda x: frontend.grad(x.sum(), 3.0), "x is float; gradients require traced tensors"),
    "of a number": (lambda x: frontend.grad(3.0, x), "y is float"),
    "by nothing": (lambda x: frontend.grad(x.sum(), []), "x is an empty list"),
    "what was not read": (
        lambda x: frontend.grad(x.sum(), x * 2),
        "does not depend on.*nothing reads it; differentiate with",
    ),
    "no way": (lambda x: frontend.grad(x.round().sum(), x), "ends at node .*Round.*which has no gradient"),
    "a detached way": (lambda x: frontend.grad(x.detach().sum(), x), "ends at node .* the model detaches it"),
    "tangents": (lambda x: frontend.jvp(x, [x, x], [1.0]), "2 tensors got 1 tangent;"),
    "a cotangent": (lambda x: frontend.vjp(x, x, np.ones((7, 2), np.float32)), "2"),
    "Dropout": (lambda x: frontend.grad(F.dropout(x).sum(), x), "training mode differs.*in a loss func"),
    "BatchNorm": (Network(nn.BatchNorm1d(3)), "training mode differs"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_gradient_is_refused_in_one_sentence(name: str) -> None:
    net, says = BAD[name]
    function = (lambda x: frontend.grad(net(x).square().sum(), x)) if isinstance(net, nn.Module) else net

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net if isinstance(net, nn.Module) else nn.Identity()

        def forward(self, x: Any) -> Any:
            return function(x)

    with pytest.raises((DifferentiationError, ModelError), match=says) as caught:
        export(Whole(), BATCH)
    assert "\n" not in str(caught.value)


# --- detached values in files --------------------------------------------------------------------------


def passed_straight(x: Any, w: Any) -> Any:
    """Rounded forwards, and not rounded backwards; the plain Identity beside it must not take the mark's place."""
    hidden = x * w
    plain = F.max(hidden.clone(), 1)[0]
    return ((hidden + frontend.stop_gradient(hidden.round() - hidden)) * frontend.detach(w)).sum() + 0 * plain.sum()


def test_a_detached_value_stays_so_in_a_file(tmp_path: Path) -> None:
    model = export(passed_straight, {**BATCH, "w": (3,)}, outputs=["loss"])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    arrays = {"x": X, "w": drawn((3,), 1)}
    for source in (model, tmp_path / "model.onnx"):
        found = run_model(gg.value_and_grad(source, wrt=["x", "w"]), arrays)
        np.testing.assert_allclose(found["loss"], (np.round(X * arrays["w"]) * arrays["w"]).sum(), rtol=1e-5)
        np.testing.assert_allclose(found["w.grad"], (X * arrays["w"]).sum(0), rtol=1e-5)
        np.testing.assert_allclose(found["x.grad"], np.tile(arrays["w"] ** 2, (5, 1)), rtol=1e-5)
    twice = gg.value_and_grad(gg.value_and_grad(model, wrt="w", backend="auto"), output="loss", wrt="w")
    np.testing.assert_allclose(run_model(twice, arrays)["w.grad_1"], (X * arrays["w"]).sum(0), rtol=1e-5)


def test_a_check_of_gradients_says_that_it_cannot_go_through() -> None:
    model = export(lambda x, w: {"y": (x * w).sin() + (x * 2).detach(), "z": x * w}, {**BATCH, "w": (3,)})
    assert all(t.ok for t in gg.check_gradients(model, output="z").tensors)
    assert all(t.ok for t in gg.check_gradients(model, output="y", wrt="w").tensors)
    with pytest.raises(gg.errors.DataError, match=r"node .*Identity.* is detached: differences pass through it"):
        gg.check_gradients(model, wrt="x")


def test_forward_mode_stops_there_too() -> None:
    model = export(lambda x: {"y": x.sin() * x.detach()}, BATCH)
    found = run(gg.jvp(model, wrt="x"), {"x": X, "x.tangent": np.ones_like(X)})
    np.testing.assert_allclose(found["y.tangent"], np.cos(X) * X, rtol=1e-5)


class Halves(nn.Module):
    """A network that learns by the first of its two ways only, whose second reads the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return {"y": self.first(x) + self.first(x).detach() + self.second(x).detach()}


def test_what_is_only_read_detached_is_not_trained_before_and_after_an_export() -> None:
    frontend.manual_seed(0)
    model = export(Halves(), BATCH)
    for _ in range(2):
        step = gg.build(model, lambda out, batch: out["y"].square().mean(), gg.optim.sgd(0.1))
        assert step.manifest.trainable == ("first.weight", "first.bias")
        marked = [{p.value for p in n.metadata_props} for n in step.train.graph.node]
        assert not any("detached" in values for values in marked)  # its gradients are written
        trainer = gg.Trainer(step)
        before = trainer.predict({"x": X})
        first = trainer.state_dict()["first.bias"].copy()
        trainer.step({"x": X})
        np.testing.assert_allclose(trainer.state_dict()["first.bias"], first - 0.1 * before.mean(0), rtol=1e-4)
        model = trainer.export()
        onnx.checker.check_model(model, full_check=True)
    detached = [n for n in model.graph.node if any(p.value == "detached" for p in n.metadata_props)]
    assert {n.op_type for n in detached} == {"Identity"}


def _marked(model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    for node in model.graph.node:
        if node.output[0] in names:
            node.metadata_props.add(key="gradgraph.role", value="detached")
    return model


def test_beside_a_plain_identity_of_the_same_of_a_weight_and_at_an_output() -> None:
    model = _marked(parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[2] x) => (float loss, float[2] last) <float[2] w = {2, 3}> {
        plain = Identity (x)
        kept = Identity (x)
        k = Identity (w)
        p = Mul (plain, kept)
        q = Mul (w, k)
        pq = Add (p, q)
        twice = Add (pq, pq)
        last = Identity (twice)
        loss = ReduceSum <keepdims = 0> (pq)
        s = ReduceSum <keepdims = 0> (last)
    }"""), "kept", "k", "last")  # fmt: skip
    for _ in range(2):
        found = run(gg.value_and_grad(model, output="loss", wrt=["x", "w"]), {"x": np.array([5, 7], np.float32)})
        np.testing.assert_allclose(found["x.grad"], [5, 7])
        np.testing.assert_allclose(found["w.grad"], [2, 3])
        step = gg.build(model, lambda out, batch: out["loss"] + out["last"].sum(), gg.optim.sgd(1.0))
        trainer = gg.Trainer(step)
        trainer.step({"x": np.array([5, 7], np.float32)})
        np.testing.assert_allclose(trainer.state_dict()["w"], [0, 0])
        trainer.load_state_dict({"w": np.array([2, 3], np.float32)})
        model = trainer.export()


def test_in_the_body_of_a_loop() -> None:
    model = parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[2] x) => (float[2] y, float loss) <int64 trips = {2}, bool go = {1}> {
        y = Loop (trips, go, x) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) {
            d = Identity (c)
            kept = Identity (s)
            t = Mul (s, kept)
        }>
        loss = ReduceSum <keepdims = 0> (y)
    }""")
    body = model.graph.node[0].attribute[0].g
    body.node[1].metadata_props.add(key="gradgraph.role", value="detached")
    found = run(gg.value_and_grad(model, output="loss", wrt="x"), {"x": np.array([2.0, 3.0], np.float32)})
    np.testing.assert_allclose(found["x.grad"], [2 * 4, 3 * 9])  # s² in the first, its square in the second


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1, padding=1), (1, 2, 4, 4)),
    "Conv2d": (lambda: nn.Conv2d(2, 4, 3, stride=2, groups=2, padding=1), (1, 2, 5, 5)),
    "LSTM": (lambda: nn.LSTM(3, 4, batch_first=True, bidirectional=True), (2, 3, 3)),
    "GRU": (lambda: nn.GRU(3, 4), (2, 3, 3)),
    "MaxPool2d": (lambda: nn.MaxPool2d(3, 2, 1), (1, 2, 5, 5)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 3, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_as_the_frontend_writes_them(name: str) -> None:
    """Central differences along one direction; rules meet nodes that no normal form has gone over."""
    frontend.manual_seed(0)
    make, shape = LAYERS[name]

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()

        def forward(self, x: Any) -> Any:
            y = self.layer(x)
            energy = (y[0] if isinstance(y, tuple) else y).square().sum()
            return {"energy": energy, "slope": frontend.grad(energy, x)}

    model, x, along = export(Energy(), {"x": shape}), drawn(shape), drawn(shape, 1)
    slope = float((run_model(model, {"x": x})["slope"] * along).sum())
    up, down = (float(run_model(model, {"x": x + h * along})["energy"]) for h in (1e-2, -1e-2))
    assert slope == pytest.approx((up - down) / 2e-2, rel=1e-2, abs=1e-3)


# --- in loss functions ---------------------------------------------------------------------------------


def _penalty(out: Any, batch: Any) -> Any:
    slope = frontend.grad(out["output"].sum(), batch["x"])
    return (slope.square().sum(1) - 1).square().mean()


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(8), nn.LayerNorm(8)], ids=lambda m: type(m).__name__)
def test_layers_in_the_mode_of_the_step(layer: nn.Module) -> None:
    """Central differences of the training step's own loss along its gradient, the mask being the same."""
    frontend.manual_seed(3)
    model = export(Network(nn.Linear(3, 8), nn.Tanh(), layer, nn.Linear(8, 1)), BATCH)
    step = gg.build(model, _penalty, gg.optim.sgd(1e-3), train="layers.0.weight")
    loop = Loop(step)
    before = dict(loop.state)
    loop({"x": X})
    slope = (before["layers.0.weight"] - loop.state["layers.0.weight"]) / 1e-3
    losses = []
    for sign in (1, -1):
        moved = before["layers.0.weight"] + sign * 1e-2 * slope / np.linalg.norm(slope)
        loop.state = {**before, "layers.0.weight": moved.astype(np.float32)}
        losses.append(float(loop({"x": X})["loss"]))
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(np.linalg.norm(slope), rel=2e-2)
    assert not isinstance(layer, nn.Dropout) or abs(float(loop.evaluate({"x": X})["loss"]) - losses[0]) > 1e-4


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("net", ["Conv2d", "LSTM", "attention"])
def test_inner_values_and_weights_of_a_model_as_it_was_read(net: str) -> None:
    frontend.manual_seed(0)
    if net == "Conv2d":
        model = export(Network(nn.Conv2d(1, 2, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                               nn.Linear(8, 1)), {"x": ("batch", 1, 4, 4)})  # fmt: skip
        x = drawn((2, 1, 4, 4))
    elif net == "LSTM":
        lstm = nn.LSTM(3, 4, batch_first=True)

        class Last(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm, self.head = lstm, nn.Linear(4, 1)

            def forward(self, x: Any) -> Any:
                return self.head(self.lstm(x)[0][:, -1])

        model, x = export(Last(), {"x": ("batch", 4, 3)}), drawn((2, 4, 3))
    else:
        model = export(Network(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Linear(4, 1)),
                       {"x": ("batch", 4, 4)})  # fmt: skip
        x = drawn((2, 4, 4))

    def loss(out: Any, batch: Any) -> Any:
        slope = frontend.grad(out["output"].square().sum(), batch["x"])
        return slope.square().mean() + out["output"].mean()

    trainer = gg.Trainer(gg.build(model, loss, gg.optim.sgd(1e-3)))
    losses = [float(trainer.step({"x": x})["loss"]) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert float(trainer.evaluate({"x": x})["loss"]) < losses[-1]
    assert [i.name for i in trainer.export().graph.input] == ["x"]


def test_a_gradient_in_forward_is_exported_and_trained(tmp_path: Path) -> None:
    """Forces as outputs of the network itself, resumed to the bit."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))

        def forward(self, x: Any) -> Any:
            energy = self.body(x)
            return {"energy": energy, "force": -frontend.grad(energy.sum(), x)}

    frontend.manual_seed(0)
    step = gg.build(export(Forces(), BATCH), {"energy": "mse", "force": ("mse", 0.5)}, gg.optim.adam(1e-2))
    data = {"x": drawn((12, 3)), "energy_target": drawn((12, 1), 1), "force_target": drawn((12, 3), 2)}
    trained, _ = resumed(step, data, tmp_path, 4, epochs=3, batch_size=4)
    session_outputs = run_model(trained.export(), {"x": X})
    np.testing.assert_allclose(session_outputs["force"], trained.predict({"x": X})["force"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", ["batch", 5])
def test_weights_that_only_the_value_depends_on_are_not_trained(rows: Any) -> None:
    model = export(Network(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), {"x": (rows, 3)})
    step = gg.build(model, _penalty, gg.optim.sgd(0.1))
    assert step.manifest.trainable == ("layers.0.weight", "layers.0.bias", "layers.2.weight")
    with pytest.raises(DifferentiationError, match=r"does not depend on 'layers\.2\.bias'"):
        gg.build(model, _penalty, gg.optim.sgd(0.1), train=["layers.*"])


def test_a_loss_that_reads_what_it_must_not() -> None:
    def loss(out: Any, batch: Any) -> Any:
        return frontend.grad(out["output"].sum(), batch["other"]).mean()

    with pytest.raises(GradgraphError, match=r"does not depend on 'other'.*nothing reads it"):
        gg.build(export(Network(nn.Linear(3, 1)), BATCH), loss, targets={"other": Input(("batch", 3))})
