"""Outputs that the command line puts together from batches: of samples on any axis, and of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from tests.kit.command_line import Cli
from tests.kit.joined_outputs import X, model
from tests.kit.npz import npz

WEIGHT = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32)
WHOLE = {"rows": X @ WEIGHT, "turned": X.T, "guessed": np.stack([X, X]), "weight": WEIGHT}


def csv_of(folder: Path, name: str) -> None:
    pandas: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    columns = {"a": X[:, 0], "target": np.zeros(11, int), "b": X[:, 1], "c": X[:, 2]}
    pandas.DataFrame(columns).to_csv(folder / name, index=False)


@pytest.mark.parametrize("size", [2, 4, 11])
def test_the_command_line_puts_them_together_too(cli: Cli, folder: Path, size: int) -> None:
    onnx.save(model(*WHOLE, "sums"), folder / "several.onnx")
    np.savez(folder / "x.npz", x=X)
    ran = cli("predict", "several.onnx", "--data", "x.npz", "--batch-size", str(size), "--json")
    assert ran.code == 0, ran.err
    found = npz("predictions.npz")
    for name, whole in WHOLE.items():
        np.testing.assert_allclose(found[name], whole, rtol=1e-5, atol=1e-6, err_msg=name)
    sums = [X[i : i + size].sum(0) for i in range(0, 11, size)]
    np.testing.assert_allclose(found["sums"], sums if size < 11 else sums[0], rtol=1e-5, atol=1e-6)
    words = ["several.onnx", "--data", "x.npz", "--batch-size", str(size), "-o", "-"]
    lines = cli("predict", *words, "--output", "turned", "--output", "rows").out.splitlines()
    assert lines[0] == "turned[0],turned[1],turned[2],rows[0],rows[1]" and len(lines) == 12
    np.testing.assert_allclose([float(line.split(",")[1]) for line in lines[1:]], X[:, 1], rtol=1e-6)
    assert len(cli("predict", *words, "--output", "sums").out.splitlines()) == 1 + len(sums)
    assert len(cli("predict", *words, "--output", "weight").out.splitlines()) == 2


def test_a_model_of_fixed_batches_leaves_copies_out(cli: Cli, folder: Path) -> None:
    fixed = model(*WHOLE, "total")
    for value in (fixed.graph.input[0], *fixed.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = 4
    onnx.save(fixed, folder / "fixed.onnx")
    np.savez(folder / "x.npz", x=X)
    words = ["fixed.onnx", "--data", "x.npz", "--output", "turned", "--output", "rows", "--output", "weight"]
    ran = cli("predict", *words)
    assert ran.code == 0, ran.err
    np.testing.assert_array_equal(npz("predictions.npz")["turned"], X.T)
    ran = cli("predict", *words, "--output", "total")
    assert ran.code == 1 and "'total' is one value for a batch of 4 samples, but the last batch has only 3" in ran.err


@pytest.mark.parametrize("is_step", [False, True])
def test_tables_on_the_command_line(cli: Cli, folder: Path, is_step: bool) -> None:
    csv_of(folder, "x.csv")
    if is_step:
        gg.build(model("rows"), loss="cross_entropy").save(folder / "classifier")
    else:
        onnx.save(model("rows"), folder / "classifier")
    untrained = ["--untrained"] if is_step else []
    ran = cli("predict", "classifier", *untrained, "--data", "x.csv", "--batch-size", "4")
    assert ran.code == 0 and "ignored: 'target'" in ran.err, ran.err
    np.testing.assert_allclose(npz("predictions.npz")["rows"], WHOLE["rows"], rtol=1e-5, atol=1e-6)
