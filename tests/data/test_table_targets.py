"""Targets of tables: one number a sample, in any shape that a model has it; several of them; and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.tables import target_columns
from gradgraph.errors import DataError
from gradgraph.frontend import nn

pytestmark = pytest.mark.any_kernels

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")

ROWS = 24
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = (X @ RNG.normal(size=(3, 2))).astype(np.float32)
FEATURES = dict(zip("abc", X.T, strict=True))


class _Apart(nn.Module):
    """Two outputs [rows, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Any) -> dict[str, Any]:
        return {"left": self.left(x), "right": self.right(x)}


class _Flat(nn.Linear):
    """One output [rows]."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).squeeze(1)


NETS: Mapping[str, tuple[Any, Any]] = {
    "a column": (lambda: nn.Linear(3, 1), "mse"),
    "flat": (lambda: _Flat(3, 1), "mse"),
    "binary": (lambda: nn.Linear(3, 1), "bce_with_logits"),
    "flat binary": (lambda: _Flat(3, 1), "bce_with_logits"),
}


def _trainer(net: Any, loss: Any) -> gg.Trainer:
    gg.frontend.manual_seed(0)
    model = gg.frontend.export(net(), {"x": ("batch", 3)})
    return gg.Trainer(gg.build(model, loss=loss, optimizer=gg.optim.sgd(0.05)), device="cpu", seed=1)


def _fitted(trainer: gg.Trainer, data: Any) -> list[float]:
    return list(trainer.fit(data, 2, 8, progress=False)["loss"])


def _csv(frame: Any, folder: Path) -> Path:
    frame.to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


def _parquet(frame: Any, folder: Path) -> Path:
    frame.to_parquet(folder / "t.parquet")
    return folder / "t.parquet"


SOURCES: Mapping[str, Any] = {
    "frame": lambda y, path: pd.DataFrame({**FEATURES, "target": y}),
    "csv": lambda y, path: _csv(pd.DataFrame({**FEATURES, "target": y}).astype(np.float64), path),
    "parquet": lambda y, path: _parquet(pd.DataFrame({**FEATURES, "target": y}), path),
    "flat arrays": lambda y, path: {"x": X, "target": y},
    "arrays with an axis": lambda y, path: {"x": X, "target": y[:, None]},
    "a column by itself": lambda y, path: (pd.DataFrame(FEATURES), pd.Series(y)),
    "batches": lambda y, path: [{"x": X[i : i + 8], "target": y[i : i + 8]} for i in range(0, ROWS, 8)],
    "samples": lambda y, path: _Samples(y),
}


class _Samples:
    def __init__(self, y: Any) -> None:
        self.y = y

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return X[i], self.y[i]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("source", SOURCES)
def test_one_number_a_sample_trains_from_everywhere(source: str, net: str, tmp_path: Path) -> None:
    y = Y[:, 0] if "binary" not in net else (Y[:, 0] > 0).astype(np.float32)
    data, trainer = SOURCES[source](y, tmp_path), _trainer(*NETS[net])
    (shape,) = (spec.shape for spec in trainer.manifest.targets)
    reference = {"x": X, "target": y.reshape(-1, *shape[1:])}
    if source == "batches":
        reference = [{name: array[i : i + 8] for name, array in reference.items()} for i in range(0, ROWS, 8)]
    assert _fitted(trainer, data) == pytest.approx(_fitted(_trainer(*NETS[net]), reference), rel=1e-6)
    assert len(trainer.predict(pd.DataFrame(FEATURES))) == ROWS


@pytest.mark.parametrize("net", ["binary", "flat binary"])
def test_two_classes_may_be_text_where_numbers_are_wanted(net: str) -> None:
    yes = Y[:, 0] > 0
    words = pd.DataFrame({**FEATURES, "target": np.where(yes, "yes", "no")})
    trainer = _trainer(*NETS[net])
    assert _fitted(trainer, words) == _fitted(_trainer(*NETS[net]), pd.DataFrame({**FEATURES, "target": yes * 1.0}))
    assert trainer.names.classes == {"target": ("no", "yes")}
    assert trainer.evaluate(words.iloc[::-1])["loss"] == pytest.approx(trainer.evaluate(words)["loss"], rel=1e-5)


def test_columns_of_one_target_are_found_by_name_in_any_order() -> None:
    frame = pd.DataFrame({"p": Y[:, 0], **FEATURES, "q": Y[:, 1]})
    trainer = _trainer(lambda: nn.Linear(3, 2), "mse")
    trainer.names = target_columns(trainer.manifest.targets, ["p", "q"])
    assert _fitted(trainer, frame) == _fitted(_trainer(lambda: nn.Linear(3, 2), "mse"), {"x": X, "target": Y})
    assert trainer.evaluate(frame[["q", "c", "b", "p", "a"]]) == trainer.evaluate({"x": X, "target": Y})
    assert np.array_equal(trainer.predict(frame), trainer.predict(X))


def test_each_of_several_targets_has_a_column() -> None:
    frame = pd.DataFrame({"p": Y[:, 0], **FEATURES, "q": Y[:, 1]})
    losses = {"left": "mse", "right": "mse"}
    trainer = _trainer(_Apart, losses)
    names = [t.name for t in trainer.manifest.targets]
    trainer.names = target_columns(trainer.manifest.targets, ["p", "q"])
    arrays = {"x": X, **dict(zip(names, Y.T, strict=True))}
    assert _fitted(trainer, frame) == _fitted(_trainer(_Apart, losses), arrays)
    with pytest.raises(
        DataError,
        match=r"the step has 2 targets \('left_target', 'right_target'\), but the column 'p' is given for them",
    ):
        target_columns(trainer.manifest.targets, ["p"])


BAD: Mapping[str, tuple[Any, str]] = {
    "no target": ({"y": Y[:, 0]}, r"there is no column 'target'; .*trainer\.names = gradgraph\.DataNames"),
    "too many": ({"target": Y[:, 0], "id": X[:, 0]}, "'x' requires 3 columns, but 4 remain for it;"),
    "text": (
        {"target": Y[:, 0], "town": ["Ulm"] * ROWS},
        r"'x' requires 3 columns, but 4 remain for it \('town' contains",
    ),
    "text to learn": ({"target": list("xyz") * 8}, "the column 'target' contains .*, not numbers; encode it"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case: str) -> None:
    columns, says = BAD[case]
    with pytest.raises(DataError, match=says):
        _fitted(_trainer(lambda: nn.Linear(3, 1), "mse"), pd.DataFrame({**FEATURES, **columns}))


def test_targets_that_are_named_must_be_there_and_as_many() -> None:
    trainer = _trainer(lambda: nn.Linear(3, 1), "mse")
    trainer.names = gg.DataNames(columns={"target": ["price"]})
    with pytest.raises(DataError, match=r"lacks the column 'price' of the target 'target'; did you mean 'prices'"):
        _fitted(trainer, pd.DataFrame({**FEATURES, "prices": Y[:, 0]}))
    trainer.names = gg.DataNames(columns={"target": ["p", "q"]})
    with pytest.raises(
        DataError, match="the target 'target' requires 1 column, but the columns 'p', 'q' are given for it"
    ):
        _fitted(trainer, pd.DataFrame({**FEATURES, "p": Y[:, 0], "q": Y[:, 1]}))


def test_the_shell_is_told_which_columns_are_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnx

    frame = pd.DataFrame({"p": Y[:, 0], **FEATURES, "q": Y[:, 1]}).astype(np.float64)
    frame.to_csv(tmp_path / "t.csv", index=False)
    onnx.save(gg.frontend.export(nn.Linear(3, 2), {"x": ("batch", 3)}), tmp_path / "m.onnx")
    words = ["train", str(tmp_path / "m.onnx"), "--loss", "mse", "--data", str(tmp_path / "t.csv"), "--epochs", "1"]
    assert run([*words, "--target", "p,q", "--run", str(tmp_path / "run"), "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)["history"]["loss"]
    assert trained[0] > 0
    step = str(tmp_path / "run" / "step")
    assert run(["evaluate", step, "--data", str(tmp_path / "t.csv"), "--json"]) == 0
    assert run(["predict", step, "--data", str(tmp_path / "t.csv"), "-o", str(tmp_path / "p.csv")]) == 0
    assert 'target = ["p", "q"]' in (tmp_path / "run" / "recipe.toml").read_text()
    assert run(words) == 1
    assert "name it with --target COLUMN" in capsys.readouterr().err
