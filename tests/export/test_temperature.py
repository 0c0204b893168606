"""Temperature scaling: the temperature of labels that were drawn at one, on every kind of loss and end of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.cli.app import run as shell
from gradgraph.export import with_temperature

RNG = np.random.default_rng(0)
N, C, TRUE = 4000, 3, 2.5
Z = (RNG.normal(size=(N, C)) * 4).astype(np.float32)


def drawn(z: np.ndarray) -> np.ndarray:
    """Labels of these logits over the true temperature."""
    noise = RNG.gumbel(size=z.shape)
    return (z / TRUE + noise).argmax(1)


Y = drawn(Z)
YES = (RNG.random((N, 2)) < 1 / (1 + np.exp(-Z[:, :2] / TRUE))).astype(np.float32)


def model(end: str = "", width: int = C) -> onnx.ModelProto:
    """Logits that are the inputs, behind a weight of zeros; then this operator."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, {width}] x) => (float[batch, {width}] y) <float[{width}] w = {{{", ".join(["0"] * width)}}}> {{
        {"z" if end else "y"} = Add (x, w)
        {f"y = {end} (z)" if end else ""}
    }}"""
    return onnx.parser.parse_model(text)


def run(proto: onnx.ModelProto, x: np.ndarray) -> Any:
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(1, keepdims=True), dtype=np.float64)
    return p / p.sum(1, keepdims=True)


# the end of the model, its loss -> what its outputs are at a temperature
KINDS: dict[str, tuple[str, Any, Any]] = {
    "logits": ("", "cross_entropy", lambda z, t: z / t),
    "softmax": ("Softmax <axis = 1>", "cross_entropy", lambda z, t: softmax(z / t)),
    "log_softmax": ("LogSoftmax <axis = 1>", "nll", lambda z, t: np.log(softmax(z / t))),
    "yes or no": ("", "bce_with_logits", lambda z, t: z / t),
    "sigmoid": ("Sigmoid", "bce", lambda z, t: 1 / (1 + np.exp(-z / t))),
}


@pytest.mark.sweep(0.34)
@pytest.mark.parametrize("name", KINDS)
def test_the_temperature_of_the_labels_is_found(name: str, tmp_path: Path) -> None:
    end, loss, outputs = KINDS[name]
    x, y = (Z[:, :2], YES) if name in ("yes or no", "sigmoid") else (Z, Y)
    step = gg.build(model(end, x.shape[1]), loss, gg.optim.sgd(0.0), metrics=["log_loss", "ece"])
    trainer, data = gg.Trainer(step, device="cpu"), {"x": x, "target": y}
    found = gg.calibrate(trainer, data, 300)
    assert found.temperature == pytest.approx(TRUE, rel=0.06) and found.labels == y.size
    before = trainer.evaluate(data)
    assert found.nll[0] == pytest.approx(before["log_loss"], rel=1e-4)
    assert found.ece[0] == pytest.approx(before["ece"], abs=2e-4)
    assert found.ece[1] < 0.03 < 0.1 < found.ece[0] and found.nll[1] < found.nll[0] - 0.05
    found.export(tmp_path / "calibrated.onnx")
    exported = onnx.load(tmp_path / "calibrated.onnx")
    onnx.checker.check_model(exported, full_check=True)
    assert [n.op_type for n in exported.graph.node].count("Div") == 1
    np.testing.assert_allclose(run(exported, x), outputs(x, found.temperature), rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(run(trainer.export(), x), outputs(x, 1.0), rtol=2e-4, atol=1e-6)  # as it was
    again = gg.Trainer(gg.build(exported, loss, gg.optim.sgd(0.0), metrics=["log_loss", "ece"]), device="cpu")
    after = again.evaluate(data)
    assert found.nll[1] == pytest.approx(after["log_loss"], rel=1e-4)
    assert found.ece[1] == pytest.approx(after["ece"], abs=2e-4)
    assert gg.calibrate(again, data).temperature == pytest.approx(1.0, rel=1e-3)
    for other in (0.9, 1.1):  # nothing nearby is better
        changed = with_temperature(trainer.export(), found.temperature * other)
        nearby = gg.Trainer(gg.build(changed, loss, gg.optim.sgd(0.0), metrics="log_loss"), device="cpu")
        assert nearby.evaluate(data)["log_loss"] > found.nll[1]


def test_only_labels_that_count_say_it() -> None:
    """Masks, ignored labels and weights of samples; classes on another axis."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 2, 3] x) => (float[batch, 2, 3] y) <float[3] w = {0, 0, 0}> { y = Add (x, w) }"""
    x, y = Z.reshape(-1, 2, C), Y.reshape(-1, 2).copy()
    loss = gg.losses.cross_entropy(axis=-1, ignore_index=-1)
    step = gg.build(onnx.parser.parse_model(text), loss, gg.optim.sgd(0.0), mask=True, sample_weight=True)
    trainer = gg.Trainer(step, device="cpu")
    mask, weight = RNG.random(y.shape) < 0.7, (RNG.random(len(y)) < 0.5).astype(np.float32) * 2
    y[RNG.random(y.shape) < 0.2] = -1
    counts = mask & (y >= 0) & (weight > 0)[:, None]
    clean = gg.Trainer(gg.build(model(), "cross_entropy", gg.optim.sgd(0.0)), device="cpu")
    wanted = gg.calibrate(clean, {"x": x[counts], "target": y[counts]})
    wrong = np.where(counts, y, np.where(y < 0, -1, (y + 1) % C))
    found = gg.calibrate(trainer, {"x": x, "target": wrong, "mask": mask, "sample_weight": weight}, 77)
    assert found.temperature == pytest.approx(wanted.temperature, rel=1e-6) and found.labels == counts.sum()
    np.testing.assert_allclose([found.nll, found.ece], [wanted.nll, wanted.ece], rtol=1e-6)


def test_what_has_no_temperature_is_refused() -> None:
    data = {"x": Z, "target": Z}
    with pytest.raises(gg.GradgraphError, match="class indices or on binary targets"):
        gg.calibrate(gg.Trainer(gg.build(model(), "mse"), device="cpu"), data)
    trainer = gg.Trainer(gg.build(model(), "cross_entropy"), device="cpu")
    with pytest.raises(gg.GradgraphError, match="has no output 'z'"):
        gg.calibrate(trainer, {"x": Z, "target": Y}, output="z")
    with pytest.raises(gg.GradgraphError, match="NaN or infinity"):
        gg.calibrate(trainer, {"x": np.full_like(Z, np.inf), "target": Y})
    hidden = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 3] x) => (float[3, batch] y) { p = Softmax <axis = 1> (x)
        y = Transpose <perm = [1, 0]> (p) }""")
    with pytest.raises(gg.GradgraphError, match="logits cannot be found"):
        with_temperature(hidden, 2.0)


def test_the_shell_writes_it_and_says_what_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gg.build(model("Softmax <axis = 1>"), "cross_entropy").save(tmp_path / "step")
    np.savez(tmp_path / "held_out.npz", x=Z, target=Y)
    out = tmp_path / "calibrated.onnx"
    given = ["export", tmp_path / "step", "--untrained", "--calibrate", tmp_path / "held_out.npz", "-o", out]
    assert shell([*map(str, given)]) == 0
    said = capsys.readouterr().err
    assert "temperature 2." in said and "NLL" in said
    assert shell([*map(str, given), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["calibration"]
    np.testing.assert_allclose(run(onnx.load(out), Z), softmax(Z / facts["temperature"]), rtol=1e-4, atol=1e-6)
    assert facts["ece"][1] < facts["ece"][0]
