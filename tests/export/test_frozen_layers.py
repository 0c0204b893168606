"""Frozen layers as a model, and a step of the rest: together the whole step, in Python and on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import export
from gradgraph.cli.app import run
from gradgraph.errors import BuildError, OutputError
from tests.kit.small_models import parsed

RNG = np.random.default_rng(7)
MODEL = parsed("""(float[n, 6] x) => (float[n, 3] y) {
                   h = MatMul(x, a)  r = Relu(h)  l = MatMul(r, c)  y = Add(l, d)
               }""", a=RNG.standard_normal((6, 8)), c=RNG.standard_normal((8, 3)), d=np.zeros(3))  # fmt: skip
X, TARGET = RNG.standard_normal((20, 6)).astype(np.float32), RNG.integers(0, 3, 20)


def losses(step: gg.Step | Path, data: dict[str, np.ndarray]) -> list[float]:
    trainer = gg.Trainer(step, device="cpu", seed=3)
    history = trainer.fit(data, epochs=3, batch_size=8, learning_rate=0.05, progress=False, validation=data)
    return [*history["loss"], *history["val_loss"]]


def test_both_parts_are_the_whole(tmp_path: Path) -> None:
    step = gg.build(MODEL, loss="cross_entropy", optimizer="adam", train=["c", "d"])
    head = export.save_split(step, tmp_path / "parts")
    assert [s.name for s in head.manifest.inputs] == ["r"]
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["README.md", "features.onnx", "step"]
    features = np.asarray(ort.InferenceSession(tmp_path / "parts" / "features.onnx").run(None, {"x": X})[0])
    whole = losses(step, {"x": X, "target": TARGET})
    assert losses(tmp_path / "parts" / "step", {"r": features, "target": TARGET}) == pytest.approx(whole, rel=1e-6)
    assert "`r`: float32 [samples, 8]" in (tmp_path / "parts" / "README.md").read_text()
    with pytest.raises(OutputError, match="is not empty"):
        export.save_split(step, tmp_path / "parts")
    export.save_split(step, tmp_path / "parts", force=True)
    with pytest.raises(BuildError, match="reads the trained weight 'a'"):
        export.save_split(gg.build(MODEL, loss="cross_entropy", optimizer="sgd"), tmp_path / "other")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnx

    onnx.save(MODEL, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X, target=TARGET)
    model, data = str(tmp_path / "m.onnx"), str(tmp_path / "d.npz")
    assert run(["build", model, "--train", "[cd]", "--split-frozen", "-o", str(tmp_path / "parts")]) == 0
    assert "parts/step" in capsys.readouterr().err
    assert (
        run(["predict", str(tmp_path / "parts" / "features.onnx"), "--data", data, "-o", str(tmp_path / "f.npz")]) == 0
    )
    assert np.load(tmp_path / "f.npz")["r"].shape == (20, 8)
    rows = []
    for i, further in enumerate([[], ["--keep-features"]]):
        history = tmp_path / f"{i}.csv"
        command = ["train", model, "--data", data, "--train", "[cd]", "--epochs", "2", "--history", str(history)]
        assert run([*command, *further]) == 0
        rows.append(history.read_text())
    assert rows[0] == rows[1]
    capsys.readouterr()
    assert run(["train", model, "--data", data, "--keep-features"]) == 1
    assert "no frozen layer can be computed once for each sample" in capsys.readouterr().err


def test_features_of_each_token(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    weights = {
        "table": rng.standard_normal((64, 4)),
        "k": rng.standard_normal((4, 4)),
        "w": rng.standard_normal((4, 3)),
    }
    model = parsed("""(int64[n, t] ids) => (float[n, t, 3] y) {
        e = Gather(table, ids)  h = MatMul(e, k)  s = Tanh(h)  y = MatMul(s, w)
    }""", **weights)  # fmt: skip
    step = gg.build(model, loss=gg.losses.cross_entropy(axis=-1), optimizer="sgd", train="w")
    head = export.save_split(step, tmp_path / "parts")
    assert [(s.name, s.shape[1:]) for s in head.manifest.inputs] == [("s", ("t", 4))]
    assert "`s`: float32 [samples, t, 4]" in (tmp_path / "parts" / "README.md").read_text()
    session = ort.InferenceSession(tmp_path / "parts" / "features.onnx")
    for tokens in (5, 40):
        ids, target = rng.integers(0, 64, (20, tokens)), rng.integers(0, 3, (20, tokens))
        features = np.asarray(session.run(None, {"ids": ids})[0])
        whole = losses(step, {"ids": ids, "target": target})
        assert losses(tmp_path / "parts" / "step", {"s": features, "target": target}) == pytest.approx(whole, rel=1e-6)
