"""Files whose cells have no types: what was learnt as text stays text where some rows hold numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TargetSpec
from gradgraph.data.tables import read_table
from gradgraph.frontend import nn

pytestmark = pytest.mark.any_kernels

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")

WRITERS: dict[str, Callable[[Any, Path], None]] = {
    ".csv": lambda frame, path: frame.to_csv(path, index=False),
    ".tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    ".jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, double_precision=15),
}
VALUES = {  # each time the last one keeps the others from being numbers, booleans or so
    "zeros in front": ["01", "02", "A3"],
    "whole numbers": ["1", "3", "x"],
    "decimals": ["1.0", "1.50", "2b"],
    "truth": ["True", "False", "maybe"],
    "infinity": ["inf", "-inf", "none of them"],
    "exponents": ["1e3", "2e3", "e"],
}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", VALUES)
def test_some_rows_say_what_they_say_among_all(name: str, suffix: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"code": rng.choice(VALUES[name], 60), "n": rng.normal(size=60)})
    frame["kind"] = rng.choice(VALUES[name], 60)
    whole, part = tmp_path / f"whole{suffix}", tmp_path / f"part{suffix}"
    WRITERS[suffix](frame, whole)
    rows = np.flatnonzero((frame.code != VALUES[name][2]) & (frame.kind != VALUES[name][2]))
    WRITERS[suffix](frame.iloc[rows], part)
    plan = gg.preprocess.fit(read_table(whole), "kind")
    in_memory = gg.preprocess.fit(frame, "kind")
    assert (plan.columns["code"], plan.targets) == (in_memory.columns["code"], in_memory.targets)
    trainer = gg.Trainer(gg.build(gg.tables.mlp(plan, [4]), gg.tables.loss(plan)), device="cpu")
    trainer.fit(whole, epochs=1, progress=False)
    np.testing.assert_allclose(trainer.predict(part), trainer.predict(frame)[rows], rtol=1e-5, atol=1e-6)
    scores = trainer.evaluate(frame.iloc[rows])
    assert trainer.evaluate(part)["loss"] == pytest.approx(scores["loss"], rel=1e-5)


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("name", VALUES)
def test_labels_of_some_rows_are_those_of_all(name: str, suffix: str, tmp_path: Path) -> None:
    """Without preprocessing: names of classes, of which a file holds those that look like numbers."""
    frame = pd.DataFrame({"a": np.arange(30) / 9.0, "b": np.arange(30) % 7.0, "target": VALUES[name] * 10})
    whole, part = tmp_path / f"whole{suffix}", tmp_path / f"part{suffix}"
    WRITERS[suffix](frame, whole)
    rows = np.flatnonzero(frame.target != VALUES[name][2])
    WRITERS[suffix](frame.iloc[rows], part)
    model = gg.frontend.export(nn.Linear(2, 3), {"x": ("batch", 2)})
    trainer = gg.Trainer(gg.build(model, "cross_entropy"), device="cpu")
    trainer.fit(whole, epochs=1, progress=False)
    assert trainer.names.classes["target"] == tuple(sorted(VALUES[name]))
    scores = trainer.evaluate(frame.iloc[rows])
    assert trainer.evaluate(part)["loss"] == pytest.approx(scores["loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["images", "sounds"])
@pytest.mark.parametrize("name", VALUES)
def test_labels_beside_paths_are_names_that_the_model_knows(name: str, kind: str, tmp_path: Path) -> None:
    known = sorted(VALUES[name])
    labels = VALUES[name][:2] * 2
    suffix = ".png" if kind == "images" else ".wav"
    pd.DataFrame({"path": [f"{i}{suffix}" for i in range(4)], "label": labels}).to_csv(tmp_path / "t.csv", index=False)
    read = gg.image_table if kind == "images" else gg.sound.table
    names = DataNames(classes={"target": known})
    spec = TargetSpec("target", "int64", ("n",), classes=3, ignore_index=-100)
    numbers = read(tmp_path / "t.csv")._found.targets(spec, names)
    assert [known[i] for i in numbers] == labels


def test_numbers_of_classes_stay_numbers(tmp_path: Path) -> None:
    """Where the model knows other names."""
    frame = pd.DataFrame({"a": np.arange(6) / 6, "target": [0, 1, 2] * 2})
    frame.to_csv(tmp_path / "t.csv", index=False)
    model = gg.frontend.export(nn.Linear(1, 3), {"x": ("batch", 1)})
    trainer = gg.Trainer(gg.build(model, "cross_entropy"), device="cpu")
    trainer.names = DataNames(columns={"x": ["a"]}, classes={"target": ["ant", "bee", "cat"]})
    assert trainer.evaluate(tmp_path / "t.csv") == trainer.evaluate(frame)
