"""The names of two classes, where a model has one output for both: from data to predictions and to the exported file.

The plain reference is the model's own output, and the Sigmoid of it in NumPy.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.parser import parse_model

import gradgraph as gg
from gradgraph.errors import DataError
from tests.kit.command_line import Cli

pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2)).astype(np.float32)
NAMES = np.where(X.sum(1) > 0, "yes", "no")
SHAPES = {"rows": "y = Squeeze (q, last)", "rows, 1": "y = Identity (q)"}
ENDS = {"logits": "q = Identity (z)", "sigmoid": "q = Sigmoid (z)"}
UNSEEN = [
    ("logits", "multilabel_soft_margin"),  # it takes rows of classes
    ("sigmoid", "bce_with_logits"),  # behind a Squeeze; building warns that it takes probabilities for logits
]
CASES = [(shape, *case) for shape in SHAPES for case in [
    ("logits", "bce_with_logits"), ("logits", "sigmoid_focal"), ("logits", "multilabel_soft_margin"),
    ("sigmoid", "bce"), ("sigmoid", "bce_with_logits"), ("sigmoid", "mse"),
] if shape == "rows, 1" or case not in UNSEEN]  # fmt: skip


def network(shape: str = "rows, 1", end: str = "logits") -> onnx.ModelProto:
    size = "batch" if shape == "rows" else "batch, 1"
    return parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 2] x) => (float[{size}] y)
    <float[2, 1] w = {{1.0, 0.7}}, float[1] b = {{0.1}}, int64[1] last = {{1}}> {{
        p = MatMul (x, w)
        z = Add (p, b)
        {ENDS[end]}
        {SHAPES[shape]}
    }}""")


def table(path: str, labels: Any = NAMES) -> str:
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "churn"], *zip(*X.T, labels, strict=True)])
    return path


def train(cli: Cli, loss: str, *words: str) -> Any:
    table("d.csv")
    return cli("train", "m.onnx", "--loss", loss, "--data", "d.csv", "--validation", "d.csv", "--target", "churn",
               "--epochs", "2", "--run", "run", "--json", *words)  # fmt: skip


def probable(y: np.ndarray, end: str) -> np.ndarray:
    y = y.reshape(-1).astype(np.float64)
    return y if end == "sigmoid" else 1 / (1 + np.exp(-y))


def rows_of(path: str) -> list[dict[str, str]]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize(("shape", "end", "loss"), CASES)
def test_from_a_table_to_named_predictions(shape: str, end: str, loss: str, cli: Cli) -> None:
    onnx.save(network(shape, end), "m.onnx")
    ran = train(cli, loss, *(["--metric", "accuracy"] if loss != "mse" else []))  # which has none of numbers
    assert ran.code == 0, ran.err
    for model in ("run", "run/trained.onnx"):  # a step with its checkpoint, and a file
        assert cli("predict", model, "--data", "d.csv", "-o", "p.csv").code == 0
        found = rows_of("p.csv")
        column = "y" if shape == "rows" else next(name for name in found[0] if name.startswith("y"))
        assert [*found[0]] == [column, "class", "probability[no]", "probability[yes]"]
        yes = probable(np.array([float(row[column]) for row in found]), end)
        np.testing.assert_allclose([float(row["probability[yes]"]) for row in found], yes, rtol=1e-5)
        np.testing.assert_allclose([float(row["probability[no]"]) for row in found], 1 - yes, rtol=1e-4, atol=1e-6)
        called = [row["class"] for row in found]
        assert called == np.where(yes > 0.5, "yes", "no").tolist() and set(called) == {"yes", "no"}
    right = float(np.mean(np.array(called) == NAMES))
    if loss != "mse":
        evaluated = json.loads(cli("evaluate", "run", "--data", "d.csv", "--json").out)
        assert evaluated["scores"]["accuracy"] == pytest.approx(right)
    worst = gg.Trainer.resume("run", "run/run.ckpt").worst("d.csv", 60)
    assert [one.label for one in worst] == [NAMES[one.index] for one in worst]
    assert [one.called for one in worst] == [called[one.index] for one in worst]
    counted = gg.Trainer.resume("run", "run/run.ckpt").confusions("d.csv").table
    assert counted.names == ("no", "yes") and counted.accuracy == pytest.approx(right)


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize(("shape", "end", "loss"), [case for case in CASES if case[2].startswith("bce")])
def test_the_exported_file_calls_them(shape: str, end: str, loss: str, cli: Cli) -> None:
    """With preprocessing the file takes columns, and gives the class and both probabilities."""
    onnx.save(network(shape, end), "m.onnx")
    ran = train(cli, loss, "--preprocess", "auto")
    assert ran.code == 0, ran.err
    session = ort.InferenceSession("run/trained.onnx")
    assert [o.name for o in session.get_outputs()] == ["y", "class", "probabilities"]
    feeds = {"a": X[:, 0].astype(np.float64), "b": X[:, 1].astype(np.float64)}
    y, called, shares = (np.asarray(found) for found in session.run(None, feeds))
    yes = probable(y, end)
    np.testing.assert_allclose(shares, np.stack([1 - yes, yes], 1), rtol=1e-5, atol=1e-6)
    assert called.tolist() == np.where(yes > 0.5, "yes", "no").tolist()
    assert cli("predict", "run/trained.onnx", "--data", "d.csv", "-o", "p.csv").code == 0
    assert [row["class"] for row in rows_of("p.csv")] == called.tolist()


def test_a_step_made_of_the_exported_file_has_the_names(cli: Cli) -> None:
    onnx.save(network(), "m.onnx")
    assert train(cli, "bce_with_logits").code == 0
    names = gg.Trainer(gg.build("run/trained.onnx", "bce_with_logits"), device="cpu").names
    assert names.classes == {"target": ("no", "yes")} and names.sigmoid == ("target",)
    again = gg.Trainer(gg.build(network(), "bce_with_logits"), device="cpu")
    again.load_state_dict("run/trained.onnx", strict=False)
    assert again.names.classes == names.classes and again.names.sigmoid == names.sigmoid
    flipped = np.where(NAMES == "yes", "no", "maybe")
    with pytest.raises(DataError, match="the new class 'maybe', and lacks the class 'yes'"):
        again.evaluate(table("flipped.csv", flipped))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", ["hinge", "soft_margin", "hinge_embedding"])
def test_losses_of_signs_take_no_names(loss: str, shape: str, cli: Cli) -> None:
    """The numbers of classes are 0 and 1, of which 0 would teach nothing."""
    onnx.save(network(shape), "m.onnx")
    ran = train(cli, loss)
    assert ran.code == 1 and f"become the numbers 0 and 1, but the loss {loss} expects −1 and 1; add --loss" in ran.err


@pytest.mark.parametrize("shape", SHAPES)
def test_three_names_are_refused(shape: str, cli: Cli) -> None:
    onnx.save(network(shape), "m.onnx")
    table("d.csv", [*NAMES[:-1], "maybe"])
    ran = cli("train", "m.onnx", "--loss", "bce_with_logits", "--data", "d.csv", "--target", "churn")
    assert ran.code == 1 and "'churn'" in ran.err


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_folder_of_pictures(classes: int, shape: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")
    for i in range(12):
        path = tmp_path / "photos" / "abc"[i % classes] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((1, 1, 3), 20 * i, np.uint8)).save(path)
    model = parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 3, 1, 1] x) => (float[{"batch" if shape == "rows" else "batch, 1"}] y)
    <float[3, 1] w = {{1.0, 0.7, -2.0}}, int64[1] last = {{1}}> {{
        f = Flatten (x)
        q = MatMul (f, w)
        {SHAPES[shape]}
    }}""")
    trainer = gg.Trainer(gg.build(model, "bce_with_logits"), device="cpu")
    if classes == 3:
        with pytest.raises(DataError, match="has 3 classes, but 'target' is one number per sample"):
            trainer.fit(tmp_path / "photos", 1, progress=False)
        return
    trainer.fit(tmp_path / "photos", 1, progress=False)
    assert trainer.names.classes == {"target": ("a", "b")} and trainer.names.sigmoid == ("target",)
