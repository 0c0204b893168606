"""Models to begin with: of every plan of columns and targets, they learn, and give what they promise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.tables import MODELS, loss

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")

ROWS = 120


def _frame() -> Any:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=ROWS) * 30, "town": rng.choice(["Ulm", "Bonn"], ROWS)})
    signal = frame.a / 30 + (frame.town == "Ulm")
    return frame.assign(price=5000 + 100 * signal, kind=np.where(signal > 0.5, "dear", "cheap"), size=-signal)


COLUMNS = {"all": ["a", "town"], "numbers": ["a"], "categories": ["town"]}
TARGETS: Mapping[str, tuple[list[str], list[str]]] = {
    "a number": (["price"], ["price"]),
    "classes": (["kind"], ["logits", "class", "probabilities"]),
    "numbers": (["price", "size"], ["price", "size"]),
    "both": (["kind", "price"], ["kind_logits", "price", "class", "probabilities"]),
}


def _learnt(model: str, columns: str, target: str, epochs: int) -> tuple[gg.Trainer, Any]:
    targets = TARGETS[target][0]
    frame = _frame()[[*COLUMNS[columns], *targets]]
    plan = gg.preprocess.fit(frame, targets, index=model == "ft_transformer" or columns == "categories")
    step = gg.build(MODELS[model](plan), loss=loss(plan), optimizer=gg.optim.adamw(1e-2))
    trainer = gg.Trainer(step, device="cpu")
    trainer.fit(frame, epochs, 16, progress=False)
    return trainer, frame


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_each_learns_and_is_served(model: str, target: str, tmp_path: Path) -> None:
    trainer, frame = _learnt(model, "all", target, 25)
    assert trainer.history["loss"][-1] < 0.7 * trainer.history["loss"][0]
    trainer.export(tmp_path / "t.onnx")
    session = ort.InferenceSession(tmp_path / "t.onnx")
    assert [value.name for value in session.get_outputs()] == TARGETS[target][1]
    found = dict(zip(TARGETS[target][1], session.run(None, trainer.names.preprocess.feeds(frame)), strict=True))
    for column in set(TARGETS[target][0]) - {"kind"}:  # in the unit of the column
        assert np.corrcoef(found[column][:, 0], frame[column])[0, 1] > 0.9
        assert abs(found[column].mean() - frame[column].mean()) < 0.5 * frame[column].std()
    if "class" in found:
        assert (found["class"] == frame["kind"]).mean() > 0.9


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("model", MODELS)
def test_each_takes_numbers_or_categories_alone(model: str, columns: str) -> None:
    trainer, frame = _learnt(model, columns, "a number", 1)
    assert trainer.predict(frame).shape == (ROWS, 1)


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_of_numbers_is_in_units_of_their_variance(model: str) -> None:
    """And none of the numbers that undo this is trained."""
    trainer, frame = _learnt(model, "all", "a number", 1)
    error = trainer.predict(frame)[:, 0].astype(float) - frame.price
    assert trainer.evaluate(frame)["loss"] == pytest.approx((error**2).mean() / frame.price.var(ddof=0), rel=1e-4)
    assert all(array.ndim for array in trainer.parameters.values())


@pytest.mark.parametrize("model", MODELS)
def test_a_category_that_was_never_seen_changes_nothing_before_training(model: str) -> None:
    frame = _frame()[["town", "price"]]
    plan = gg.preprocess.fit(frame, "price", index=model == "ft_transformer")
    trainer = gg.Trainer(gg.build(MODELS[model](plan), loss=loss(plan)), device="cpu")
    of_columns = "columns.categories.table.weight" if model == "ft_transformer" else "columns.numbers.weight"
    weights = trainer.parameters[of_columns]
    slots = weights if model == "ft_transformer" else weights.T
    assert not slots[-1].any() and slots[:-1].any(axis=1).all()


def test_a_plan_without_a_target_is_refused() -> None:
    plan = gg.preprocess.fit(_frame())
    for made in (*MODELS.values(), loss):
        with pytest.raises(DataError, match="has no target; fit it with a target"):
            made(plan)
