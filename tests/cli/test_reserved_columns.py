"""A table whose column to predict is called as a step calls something of its own."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.command_line import Cli

pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")

NAMES = [
    "loss",
    "target_loss",
    "target",
    "learning_rate",
    "step",
    "update",
    "rng",
    "numbers",
    "sample_weight",
    "val_loss",
]
X = np.random.default_rng(0).normal(size=(60, 2))
EXPECTED: dict[str, Any] = {}  # of each kind, of a column that is called as nothing else is
KINDS: dict[str, Any] = {"quantities": X.sum(1), "classes": np.where(X[:, 0] > 0, "yes", "no")}


def learnt(cli: Cli, column: str, kind: str) -> Any:
    """The losses of a run on a table with this column, and what its export predicts."""
    with Path("d.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", column], *zip(*X.T, KINDS[kind], strict=True)])
    words = ["train", "--model", "mlp", "--data", "d.csv", "--validation", "d.csv", "--target", column]
    ran = cli(*words, "--epochs", "2", "--export", "t.onnx", "--force", "--json")
    assert ran.code == 0, ran.err
    assert cli("predict", "t.onnx", "--data", "d.csv", "-o", "p.csv").code == 0
    predicted = Path("p.csv").read_text().splitlines()[1:]
    Path("p.csv").unlink()
    return json.loads(ran.out)["history"]["val_loss"], predicted


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_on_and_predicted_as_any_other(cli: Cli, kind: str, name: str) -> None:
    if kind not in EXPECTED:
        EXPECTED[kind] = learnt(cli, "price", kind)
    assert learnt(cli, name, kind) == EXPECTED[kind]
