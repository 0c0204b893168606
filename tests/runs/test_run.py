"""A run as a value: in Python it is what the command line does, and an option is one field."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.building.option import documented, options, spelled, spellings
from gradgraph.cli.app import run as in_shell
from gradgraph.cli.options import declared
from gradgraph.cli.sections import key_of, section_of
from gradgraph.cli.train import _run_of, command
from gradgraph.errors import ArgumentError, BuildError, GradgraphError, OutputError
from gradgraph.runs.run_options import OPTIONS, Run
from gradgraph.runs.spelled_build import SPELLINGS
from tests.kit.command_line import arrays, mlp


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model, arrays and a table."""
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays(96))
    rows = "".join(f"{i},{i % 3},{'abc'[i % 3]}\n" for i in range(40))
    (tmp_path / "table.csv").write_text(f"x,y,z\n{rows}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "a model": (
        "model.onnx --data train.npz --validation train.npz --epochs 2 --batch-size 16 --loss focal(gamma=1) "
        "--optimizer sgd --lr 0.1 --schedule cosine --clip-norm 1 --metric f1 --seed 3 --no-shuffle",
        {"model": "model.onnx", "data": "train.npz", "validation": "train.npz", "epochs": 2, "batch_size": 16,
         "seed": 3, "shuffle": False,
         "build": {"loss": "focal(gamma=1)", "optimizer": "sgd", "lr": 0.1, "schedule": "cosine", "clip_norm": 1.0,
                   "metric": "f1"}},
    ),
    "a table": (
        "--model mlp --data table.csv --target z --column y=category --epochs 2 --accumulate 2",
        {"start": "mlp", "data": "table.csv", "target": "z", "column": {"y": "category"}, "epochs": 2, "accumulate": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SAME)
def test_a_run_is_the_command_line_bit_for_bit(what: str, folder: Path) -> None:
    if what == "a table":
        pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    words, given = SAME[what]
    assert in_shell(["train", *words.split(), "--run", "typed", "--quiet"]) == 0
    done = gg.train(gg.Run(**given, run="value"), progress=False)
    for name in ("history.csv", "trained.onnx", "run.ckpt", "step/train.onnx", "step/manifest.json"):
        assert (folder / "value" / name).read_bytes() == (folder / "typed" / name).read_bytes(), name
    recipes = [(folder / run / "recipe.toml").read_text() for run in ("value", "typed")]
    assert recipes[0].replace("/value", "/typed") == recipes[1]
    assert done.files["export"] == Path("value/trained.onnx") and len(done.history["loss"]) == 2
    assert in_shell(["train", "value/recipe.toml", "--run", "again", "--quiet"]) == 0
    assert (folder / "again" / "trained.onnx").read_bytes() == (folder / "typed" / "trained.onnx").read_bytes()
    resumed = gg.train(gg.Run(**{**given, "epochs": 3}, run="value", resume=True), progress=False)
    assert resumed.history["epoch"] == [1, 2, 3]


def test_a_build_may_be_of_objects(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build = {"loss": gg.losses.focal(gamma=1), "optimizer": gg.optim.sgd(0.1), "metrics": ["f1"], "mask": False}
    run = gg.Run("model.onnx", data="train.npz", epochs=1, build=build)
    with caplog.at_level(logging.INFO, "gradgraph.runs"):
        done = gg.train(run, progress=False)
    assert done.trainer.manifest.optimizer["arguments"]["lr"] == 0.1 and "f1" in done.history and done.files == {}
    assert "building a step from model.onnx, to train on train.npz …" in caplog.messages
    texts = gg.Run("model.onnx", data="train.npz", epochs=1,
                   build={"loss": "focal(gamma=1)", "optimizer": "sgd(0.1)", "metric": "f1"})  # fmt: skip
    assert gg.train(texts, progress=False).history == done.history
    with pytest.raises(OutputError, match="cannot contain 'loss' of build, which is an object; pass its name as text"):
        gg.train(gg.Run("model.onnx", data="train.npz", build=build, run="folder"))
    with pytest.raises(BuildError, match="the optimizer is an object, which has its own learning rate"):
        gg.train(gg.Run("model.onnx", data="train.npz", build={**build, "lr": 0.1}))


def test_trials_return_their_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = gg.Run("model.onnx", data="train.npz", find_lr=True, profile=True)
    assert set(gg.train(run).trials) == {"find_lr", "profile"} and not gg.train(run).history
    assert in_shell(["train", "model.onnx", "--data", "train.npz", "--find-lr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == list(gg.train(run).trials["find_lr"].losses)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "pass model, such as 'model.onnx', or start", "give MODEL, such as model.onnx, or --model NAME"),
    ({"model": None, "start": "mlp"}, "name it with target=", "--model mlp predicts a column of the table"),
    ({"resume": True}, "resume needs checkpoint, the file", "--resume needs --checkpoint, the file"),
    ({"run": "a", "dry_run": True}, "run saves the results of a run, but a trial has none", "--run saves the results"),
    ({"column": {"x": "drop"}}, "column requires preprocess auto", "--column requires --preprocess auto or --model"),
    ({"epochs": 0}, "epochs is 0; it should be a whole number of at least 1", "epochs is 0"),
    ({"batch_size": "many"}, 'it should be a whole number of at least 1, or "auto"', "batch_size is"),
    ({"build": {"los": "mse"}}, "build has no option 'los'; did you mean 'loss'?", "build has no option 'los'"),
    ({"build": {"seed": 1}}, "seed is an option of the run", "seed is an option of the run"),
]


@pytest.mark.parametrize(("given", "python", "shell"), WRONG, ids=lambda value: None)
def test_options_that_contradict_each_other(given: dict[str, Any], python: str, shell: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        gg.Run(**{"model": "model.onnx", "data": "train.npz", **given})
    assert python in str(caught.value) and "--" not in str(caught.value)
    assert shell in caught.value.in_shell()


def test_a_step_folder_is_already_built(folder: Path) -> None:
    gg.build("model.onnx").save("step")
    with pytest.raises(ArgumentError, match="freeze is a build option, but 'step' is a step folder"):
        gg.Run("step", data="train.npz", build={"freeze": "first.*"})
    with pytest.raises(ArgumentError, match="ranks starts processes from the command line only"):
        gg.train(gg.Run("step", data="train.npz", ranks=2))
    with pytest.raises(GradgraphError, match=r"there is no checkpoint 'a\.ckpt' to resume from; omit resume"):
        gg.train(gg.Run("step", data="train.npz", checkpoint="a.ckpt", resume=True))


def test_an_option_of_a_run_is_one_field() -> None:
    """Commands, recipes and the documentation are made of it."""

    @documented
    @options
    class More(Run):
        """A run."""

        caution: float = spelled("How careful to be.", "training", "number", key="care", default=0.5)

    @declared(spellings(More)["caution"])
    def careful() -> None:
        pass

    (option,) = careful.__click_params__  # type: ignore[attr-defined]
    assert (section_of(option), key_of(option), option.opts) == ("training", "care", ["--caution"])
    assert option.get_help_record(click.Context(click.Command("train"))) == (
        "--caution FLOAT", "How careful to be.  [default: 0.5]"
    )  # fmt: skip
    assert "caution: How careful to be." in (More.__doc__ or "")
    with pytest.raises(ArgumentError, match="caution is 'high'; it should be a number"):
        More("model.onnx", data="train.npz", caution="high")  # type: ignore[arg-type]


def test_nobody_declares_an_option_of_a_run_again() -> None:
    others = {p.name for p in command.params} - OPTIONS.keys() - SPELLINGS.keys()
    assert others == {"model", "custom_ops", "as_json", "print_config", "quiet", "debug"}
    assert "click.option(" not in (Path(__file__).parents[2] / "cli" / "train.py").read_text("utf-8")


READ = """
import sys
import gradgraph as gg
run = gg.read_run("recipe.toml")
gg.train(run, progress=False)
assert "click" not in sys.modules
"""


def test_a_recipe_is_read_without_the_command_line(folder: Path) -> None:
    """It describes the run that the command does, and neither reading nor training needs click."""
    words = (
        "model.onnx --data train.npz --epochs 1 --batch-size 16 --no-shuffle --lr 1 --loss-option label_smoothing=0.1"
    )
    words += " --group last.*:lr=1e-3 --train first.* --train last.* --log a.csv --log b.jsonl --metric f1"
    words += " --run here"
    ran = subprocess.run([sys.executable, "-m", "gradgraph", "train", *words.split()], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    recipe = Path("here/recipe.toml").read_text().replace('run = "', '# run = "')
    Path("recipe.toml").write_text(recipe.replace("force = false", "force = true"))
    with command.make_context("train", ["recipe.toml"]) as ctx:
        given = {name: value for name, value in ctx.params.items() if name != "as_json"}
        assert _run_of(ctx, given) == gg.read_run("recipe.toml")
    ran = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    with pytest.raises(ArgumentError, match="there is no key 'epoch' in the table"):
        Path("recipe.toml").write_text(recipe.replace("epochs =", "epoch ="))
        gg.read_run("recipe.toml")
