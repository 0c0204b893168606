"""Labels that are text name their classes wherever they come from; and the names go on, into histories and weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.frontend import nn
from gradgraph.runtime.saved.monitor import Monitor
from gradgraph.step.finishes import as_row

pytestmark = pytest.mark.any_kernels

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")

CLASSES = ("cat", "dog", "emu")
X = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
NUMBERS = X[:, :3].argmax(1)
TEXT = np.array(CLASSES)[NUMBERS]
METRICS = ["accuracy", gg.metrics.recall(average="none")]

KINDS: dict[str, Callable[[Any], Any]] = {
    "an array": lambda labels: labels,
    "an array of objects": lambda labels: labels.astype(object),
    "a column of one": lambda labels: labels.reshape(-1, 1),
    "a list": lambda labels: labels.tolist(),
    "a Series": pd.Series,
    "a Series of categories": lambda labels: pd.Series(labels, dtype="category"),
}


def trainer(loss: str = "cross_entropy", outputs: int = 3) -> gg.Trainer:
    gg.frontend.manual_seed(0)
    model = gg.frontend.export(nn.Linear(4, outputs), {"x": ("batch", 4)})
    metrics = METRICS if outputs == 3 else []
    return gg.Trainer(gg.build(model, loss, gg.optim.sgd(0.1), metrics=metrics), device="cpu")


@pytest.mark.parametrize("door", ["fit", "fit(x, y)", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_train_as_their_numbers_do(kind: str, door: str) -> None:
    text, plain = trainer(), trainer()
    labels = KINDS[kind](TEXT)
    if door == "step":
        text.step({"x": X, "target": labels})
        plain.step({"x": X, "target": NUMBERS})
    elif door == "fit":
        text.fit({"x": X, "target": labels}, 8, progress=False)
        plain.fit({"x": X, "target": NUMBERS}, 8, progress=False)
    else:
        text.fit(X, labels, progress=False)
        plain.fit(X, NUMBERS, progress=False)
    np.testing.assert_equal(text.state_dict(), plain.state_dict())
    assert text.names.classes == {"target": CLASSES}
    assert (
        text.evaluate({"x": X, "target": labels})["accuracy"] == plain.evaluate({"x": X, "target": NUMBERS})["accuracy"]
    )


def test_a_part_of_the_classes_has_the_numbers_that_it_had() -> None:
    it = trainer()
    it.fit({"x": X, "target": TEXT}, progress=False)
    some = TEXT != "cat"
    found = it.evaluate({"x": X[some], "target": TEXT[some]})
    assert found["loss"] == it.evaluate({"x": X[some], "target": NUMBERS[some]})["loss"]
    with pytest.raises(DataError, match="has the new class 'yak'"):
        it.evaluate({"x": X[:1], "target": ["yak"]})


def test_more_classes_than_the_model_has_are_refused() -> None:
    with pytest.raises(DataError, match="'target' has 4 classes"):
        trainer().fit({"x": X[:4], "target": ["a", "b", "c", "d"]}, progress=False)


def test_two_classes_of_a_loss_on_numbers() -> None:
    it, plain = trainer("bce_with_logits", 1), trainer("bce_with_logits", 1)
    yes = X[:, 0] > 0
    it.fit({"x": X, "target": np.where(yes, "yes", "no")}, progress=False)
    plain.fit({"x": X, "target": yes.astype(np.float32)}, progress=False)
    np.testing.assert_equal(it.state_dict(), plain.state_dict())
    assert it.names.classes == {"target": ("no", "yes")}


def test_text_that_names_no_classes_is_refused() -> None:
    with pytest.raises(DataError, match="encode text as numbers"):
        trainer("mse", 1).fit({"x": X, "target": np.array([f"{i}" for i in range(30)])}, progress=False)


# --- where the names go ------------------------------------------------------------------------------------------


def test_columns_of_the_history_have_the_names_of_classes() -> None:
    it = trainer()
    data = {"x": X, "target": TEXT}
    history = it.fit(data, epochs=2, validation=data, patience=3, monitor="val_recall.1", progress=False)
    assert [name for name in history if "recall" in name] == [
        f"{of}recall.{name}" for of in ("", "val_") for name in CLASSES
    ]
    plain = trainer().fit({"x": X, "target": NUMBERS}, epochs=2, progress=False)
    assert plain["recall.1"] == history["recall.dog"]
    assert Monitor("val_recall.1").value({"val_recall.cat": 1.0, "val_recall.dog": 2.0}) == 2.0
    with pytest.raises(DataError, match=r"no column 'val_recall\.2'"):
        Monitor("val_recall.2").value({"val_recall.cat": 1.0, "val_recall.dog": 2.0})


def test_names_that_may_be_of_two_targets_are_left_out() -> None:
    columns = {"f1": np.array([1.0, 2.0]), "matrix": np.eye(2), "loss": 3.0}
    assert as_row(columns, [["a", "b"], ["x", "y", "z"]]) == {"f1.a": 1.0, "f1.b": 2.0, "loss": 3.0}
    assert as_row(columns, [["a", "b"], ["c", "d"]]) == {"f1.0": 1.0, "f1.1": 2.0, "loss": 3.0}


@pytest.mark.parametrize("kind", ["checkpoint", "model", "npz"])
def test_weights_bring_the_names_of_their_data(kind: str, tmp_path: Path) -> None:
    it = trainer()
    frame = pd.DataFrame(X, columns=list("abcd"))
    frame["target"] = TEXT
    it.fit(frame, progress=False)
    path = tmp_path / {"checkpoint": "a.ckpt", "model": "a.onnx", "npz": "a.npz"}[kind]
    if kind == "checkpoint":
        it.save(path)
    elif kind == "model":
        onnx.save(it.export(), path)
    else:
        np.savez(path, **it.parameters)
    other = trainer()
    other.load_state_dict(path, strict=False)
    assert (other.names.columns, other.names.classes) == (
        ({}, {}) if kind == "npz" else ({"x": tuple("abcd")}, {"target": CLASSES})
    )
    if kind != "npz":
        mixed = frame[["c", "target", "a", "d", "b"]]
        np.testing.assert_equal(other.evaluate(mixed), it.evaluate(frame))


def test_names_of_another_head_are_left_behind(tmp_path: Path) -> None:
    it = trainer()
    it.fit({"x": X, "target": TEXT}, progress=False)
    it.save(tmp_path / "a.ckpt")
    gg.frontend.manual_seed(0)
    five = gg.frontend.export(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)), {"x": ("batch", 4)})
    other = gg.Trainer(gg.build(five, "cross_entropy", gg.optim.sgd(0.1)), device="cpu")
    values = dict(zip(("0.weight", "0.bias"), it.parameters.values(), strict=True))
    other.load_state_dict(values, strict=False)
    assert not other.names
    other.fit({"x": X, "target": np.array(list("abcde") * 6)}, progress=False)
    assert other.names.classes == {"target": tuple("abcde")}


# --- whole numbers that are names ----------------------------------------------------------------------------------

STARS = np.array([1, 2, 5])[NUMBERS]


def test_whole_numbers_are_names_from_training_to_a_batch_that_diverged(tmp_path: Path) -> None:
    """In a fit, an evaluation, a step, after a resume, in an exported model, and in the batch of an error."""
    it, plain = trainer(), trainer()
    it.fit({"x": X, "target": STARS}, 8, progress=False)
    plain.fit({"x": X, "target": NUMBERS}, 8, progress=False)
    np.testing.assert_equal(it.state_dict(), plain.state_dict())
    assert it.names.classes == {"target": ("1", "2", "5")}
    some, expected = NUMBERS > 0, plain.evaluate({"x": X[NUMBERS > 0], "target": NUMBERS[NUMBERS > 0]})
    for labels in (STARS[some], STARS[some].tolist(), STARS[some].astype(str), STARS[some].astype(float)):
        assert it.evaluate({"x": X[some], "target": labels})["loss"] == expected["loss"]
    it.save(tmp_path / "a.ckpt")
    it.export(tmp_path / "a.onnx")
    resumed = gg.Trainer.resume(it.definition, tmp_path / "a.ckpt", device="cpu")
    exported = gg.Trainer(gg.build(tmp_path / "a.onnx", "cross_entropy"), device="cpu")
    for other in (resumed, exported):
        assert other.evaluate({"x": X[some], "target": STARS[some]})["loss"] == pytest.approx(expected["loss"])
    assert it.step({"x": X[:8], "target": STARS[:8]})["loss"] == plain.step({"x": X[:8], "target": NUMBERS[:8]})["loss"]
    with pytest.raises(DataError, match="the new class '0'"):
        it.step({"x": X[:1], "target": [0]})
    with pytest.raises(gg.errors.DivergedError) as raised:
        it.step({"x": X[:3] * np.nan, "target": STARS[:3]})
    assert raised.value.batch["target"].tolist() == NUMBERS[:3].tolist()
    with pytest.raises(gg.errors.DivergedError):
        it.step(raised.value.batch)


def test_a_model_that_was_trained_on_numbers_takes_no_names() -> None:
    it = trainer()
    it.fit({"x": X, "target": NUMBERS}, progress=False)
    expected = it.evaluate({"x": X, "target": NUMBERS})
    np.testing.assert_equal(it.evaluate({"x": X, "target": NUMBERS.astype(str)}), expected)
    with pytest.raises(DataError, match=r"has the classes .*, but the model was trained on class indices"):
        it.evaluate({"x": X, "target": TEXT})
    it.names = gg.DataNames(classes={"target": CLASSES})
    np.testing.assert_equal(it.evaluate({"x": X, "target": TEXT}), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_validation_labels_mean_what_those_of_training_do(kind: str) -> None:
    """Class indices in the training data: 1, 2, 3 in the validation data are no names, even before the first step."""
    with pytest.raises(DataError):
        trainer().fit(
            {"x": X, "target": NUMBERS}, validation={"x": X, "target": KINDS[kind](NUMBERS + 1)}, progress=False
        )
