"""gradgraph runs: runs of a folder in a table, as JSON and on a page."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from gradgraph.cli.app import run
from tests.kit.command_line import Cli, arrays, mlp

HELD = ("--validation", "held_out.npz")
RUNS = {
    "low": ("--lr", "0.001", "--epochs", "2"),
    "high": ("--lr", "0.1", "--epochs", "4", "--patience", "2"),
    "sgd": ("--optimizer", "sgd", "--schedule", "cosine(0.5, 9)", "--epochs", "2", "--eval-every", "2"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of these runs."""
    folder = tmp_path_factory.mktemp("runs")
    onnx.save(mlp(), folder / "model.onnx")
    np.savez(folder / "train.npz", **arrays(96))
    np.savez(folder / "held_out.npz", **arrays(32, seed=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, words in RUNS.items():
            train = ["train", "model.onnx", "--data", "train.npz", *HELD, *words, "--run", f"runs/{name}", "--quiet"]
            assert run(train) == 0
    return folder / "runs"


@pytest.fixture
def runs(cli: Cli, trained: Path) -> Cli:
    shutil.copytree(trained, "runs")
    return cli


def facts(cli: Cli, *words: str) -> dict[str, dict[str, object]]:
    ran = cli("runs", "runs", "--json", *words)
    assert ran.code == 0, ran.err
    return {run["run"]: run for run in json.loads(ran.out)["runs"]}


@pytest.mark.sweep(0)
def test_figures_and_what_differs(runs: Cli) -> None:
    found = facts(runs)
    for name in RUNS:
        with Path("runs", name, "history.csv").open() as file:
            rows = list(csv.DictReader(file))
        losses = [float(row["val_loss"]) for row in rows]
        kept = rows[int(np.argmin(losses))] if name == "high" else rows[-1]
        for column in ("loss", "val_loss", "val_accuracy"):
            assert found[name][column] == float(kept[column])
        assert found[name]["steps"] == int(float(rows[-1]["step"])) and found[name]["seconds"] > 0  # type: ignore[operator]
        assert found[name]["best"] == {"column": "val_loss", "value": min(losses)}
    options = {name: run["options"] for name, run in found.items()}
    assert {name: o["lr"] for name, o in options.items()} == {"low": 0.001, "high": 0.1, "sgd": None}
    assert set(options["low"]) == {"lr", "epochs", "patience", "optimizer.name", "schedule.name", "eval_every"}
    table = runs("runs", "runs").out.splitlines()
    assert table[0].split()[:5] == ["run", "epochs", "steps", "time", "loss"] and len(table) == 4


def recipe(name: str, text: str) -> None:
    """Write the folder of a run that has not begun, with these options."""
    folder = Path("made", name)
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(text, encoding="utf-8")


def test_columns_of_options_have_the_table_in_their_names_where_the_key_alone_is_unclear(cli: Cli) -> None:
    """A column `name` was that of the loss in one comparison, and of the optimizer in the next."""
    rest = '[optimizer]\nname = "adamw"\nlr = {}\n[training]\nepochs = 2\n'
    recipe("a", '[model]\npath = "a.onnx"\n[loss]\nname = "mse"\n' + rest.format(0.1))
    recipe("b", '[model]\npath = "b.onnx"\n[loss]\nname = "mae"\noptions = { beta = 2 }\n' + rest.format(0.2))
    ran = cli("runs", "made", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["differ"] == ["model.path", "loss.name", "lr", "loss.options.beta"]
    assert cli("runs", "made").out.splitlines()[0].split()[4:] == ["model.path", "loss.name", "lr", "loss.options.beta"]


@pytest.mark.parametrize(("column", "sign"), [(None, 1), ("val_loss", 1), ("val_accuracy", -1), ("steps", 1)])
def test_the_better_one_comes_first(runs: Cli, column: str | None, sign: int) -> None:
    found = facts(runs, *(() if column is None else ("--sort", column)))
    values = [sign * float(run[column or "val_loss"]) for run in found.values()]  # type: ignore[arg-type]
    assert values == sorted(values)
    assert list(facts(runs, "--sort", "run")) == sorted(RUNS)


def test_a_page(runs: Cli) -> None:
    Path("runs/low").rename("runs/a <b>")
    ran = runs("runs", "runs", "--html", "runs.html")
    assert ran.code == 0 and "wrote runs.html" in ran.err
    page = Path("runs.html").read_text()
    assert "a &lt;b&gt;" in page and "<b>" not in page
    assert page.count("<polyline") >= 3 * 3 and "<script" not in page
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    titles = re.findall(r'font-weight="600">([^<]+)<', page)
    assert titles == ["val_loss", "loss", "val_accuracy", "accuracy", "learning_rate"]


def test_runs_that_are_not_done_or_damaged(runs: Cli) -> None:
    """Of one that still trains its log tells; what cannot be read is left out."""
    Path("runs/low/history.csv").unlink()
    for name in ("history.csv", "log.jsonl"):
        Path("runs/sgd", name).write_bytes(b"\xff\x00{")
    shutil.copytree("runs/high", "runs/more/deep")
    Path("runs/more/deep/recipe.toml").write_text("no = = toml")
    found = facts(runs)
    assert list(found) == ["high", "more/deep", "low", "sgd"]
    assert found["low"]["epochs"] == 2 and found["low"]["val_loss"] > 0  # type: ignore[operator]
    assert found["sgd"]["epochs"] == 0 and found["sgd"]["best"] is None
    assert runs("runs", "runs").code == 0 and runs("runs", "runs", "--html", "p.html").code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("runs", "step"), "contains no run; give the folder"),
        (("runs", "nowhere"), "contains no run"),
        (("runs", "runs", "--sort", "val_acuracy"), "did you mean 'val_accuracy'?"),
        (("runs", "runs", "--html", "runs"), "is a folder"),
    ],
)
def test_refused(runs: Cli, words: tuple[str, ...], says: str) -> None:
    assert runs("build", "model.onnx", "-o", "step").code == 0
    ran = runs(*words)
    assert ran.code == 1 and says in ran.err


def test_a_single_run(runs: Cli) -> None:
    ran = runs("runs", "runs/high")
    assert ran.code == 0 and ran.out.splitlines()[1].split()[0] == "high"


def test_the_order_is_by_what_most_runs_watch(runs: Cli) -> None:
    before = [name for name in facts(runs) if name != "sgd"]
    history = Path("runs/low/history.csv").read_text(encoding="utf-8").splitlines()
    shutil.copytree("runs/low", "runs/a")  # the first by name, which has no held-out data
    columns = [i for i, name in enumerate(history[0].split(",")) if not name.startswith("val_")]
    rows = [",".join(row.split(",")[i] for i in columns) for row in history]
    Path("runs/a/history.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert [name for name in facts(runs) if name in before] == before
    assert list(facts(runs))[-1] == "a"
