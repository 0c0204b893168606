"""Recipes: every option of build and train in a TOML file."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest

from gradgraph.building.option import Shell, option_of
from gradgraph.building.step_options import BuildOptions
from gradgraph.cli.sections import Option, by_section, key_of, section_of
from gradgraph.files.untrusted.documents import tomllib
from gradgraph.runs import run_recipes as toml
from gradgraph.runs.spelled_build import SPELLINGS
from tests.kit.command_line import Cli
from tests.pages.marked import ROOT

RECIPE = """
[model]
path = "../model.onnx"
[data]
train = "../train.npz"
validation = "../held_out.npz"
batch_size = 16
shuffle = false
[loss]
options = { label_smoothing = 0.1 }
metrics = "f1"
[optimizer]
name = "sgd"
lr = 0.1
options = { momentum = 0.9 }
[optimizer.groups."last.*"]
lr = "function('rates.py:fall', 20)"
weight_decay = 0.01
[training]
epochs = 2
seed = 3
[output]
history = "log.csv"
force = true
"""


def command_of(name: str) -> click.Command:
    command: click.Command = importlib.import_module(f"gradgraph.cli.{name}").command
    return command


@pytest.fixture
def recipe(folder: Path) -> str:
    """A recipe in a folder of its own, to which its paths are relative."""
    (folder / "runs").mkdir()
    (folder / "runs" / "rates.py").write_text("def fall(step):\n    return 0.1 / (1 + step)\n")
    (folder / "runs" / "recipe.toml").write_text(RECIPE)
    return "runs/recipe.toml"


def history(cli: Cli, *words: str) -> object:
    ran = cli("train", *words, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)["history"]


def printed(cli: Cli, *words: str) -> dict[str, dict[str, object]]:
    ran = cli(*words, "--print-config")
    assert ran.code == 0, ran.err
    return tomllib.loads(ran.out)


def test_a_recipe_is_the_command_line(cli: Cli, recipe: str, folder: Path) -> None:
    words = ["model.onnx", "--data", "train.npz", "--validation", "held_out.npz", "--batch-size", "16", "--no-shuffle",
             "--loss-option", "label_smoothing=0.1", "--metric", "f1", "--optimizer", "sgd", "--lr", "0.1",
             "--optimizer-option", "momentum=0.9", "--epochs", "2", "--seed", "3",
             "--group", "last.*:lr=function('runs/rates.py:fall', 20),weight_decay=0.01"]  # fmt: skip
    assert history(cli, recipe) == history(cli, *words)
    assert (folder / "runs" / "log.csv").exists()


def test_what_is_printed_gives_the_same_run_from_anywhere(cli: Cli, recipe: str, folder: Path) -> None:
    words = [recipe, "--epochs", "3", "--optimizer-option", "nesterov=true", "--shuffle", "--clip-norm", "1"]
    text = cli("train", *words, "--print-config").out
    elsewhere = folder / "a" / "b"
    elsewhere.mkdir(parents=True)
    (elsewhere / "full.toml").write_text(text)
    assert history(cli, "a/b/full.toml") == history(cli, *words)
    assert cli("train", "a/b/full.toml", "--print-config").out == text
    assert json.loads(cli("train", *words, "--print-config", "--json").out)["training"]["epochs"] == 3
    step = printed(cli, "train", "model.onnx", "--data", "train.npz")
    assert step["optimizer"]["name"] == "adamw" and "lr" not in step["optimizer"]
    assert cli("build", "model.onnx").code == 0
    (folder / "step.toml").write_text(cli("train", "step", "--data", "train.npz", "--print-config").out)
    assert cli("train", "step.toml", "--epochs", "1").code == 0  # options of building are not in it


def test_the_command_line_wins(cli: Cli, recipe: str) -> None:
    found = printed(cli, "train", recipe, "--lr", "0.5", "--no-force", "--shuffle",
                    "--optimizer-option", "momentum=0.8", "--group", "last.*:lr=0.2", "--group", "first.*:lr=0.3",
                    "--metric", "top_k")  # fmt: skip
    assert found["optimizer"]["lr"] == 0.5
    assert found["optimizer"]["options"] == {"momentum": 0.8}
    assert found["optimizer"]["groups"] == {"last.*": {"lr": 0.2, "weight_decay": 0.01}, "first.*": {"lr": 0.3}}
    assert found["loss"]["metrics"] == ["top_k"] and found["loss"]["options"] == {"label_smoothing": 0.1}
    assert found["output"]["force"] is False and found["data"]["shuffle"] is True
    other = printed(cli, "train", recipe, "--optimizer", "lion", "--loss", "nll")
    assert "options" not in other["optimizer"] and "options" not in other["loss"]


def test_build_reads_the_same_recipe(cli: Cli, recipe: str, folder: Path) -> None:
    path = folder / recipe
    path.write_text(path.read_text().replace("epochs = 2", "epochs = 2\naccumulate = 4") + 'step = "made"\n')
    assert cli("build", recipe).code == 0
    manifest = json.loads((folder / "runs" / "made" / "manifest.json").read_text())
    assert manifest["optimizer"]["arguments"]["momentum"] == 0.9
    assert printed(cli, "build", recipe)["training"] == {"accumulate": 1, "seed": 3}


def test_a_recipe_from_stdin(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'model.path = "model.onnx"\ndata.train = "train.npz"\ntraining.epochs = 1\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert cli("train", "-").code == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.replace("train.npz", "-").encode())))
    assert "are both read from stdin" in cli("train", "-").err
    (folder / "piped.toml").write_text(text.replace("train.npz", "-"))
    assert printed(cli, "train", "piped.toml")["data"]["train"] == "-"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((folder / "train.npz").read_bytes())))
    assert cli("train", "piped.toml").code == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("batch_size", "batchsize", "no key 'batchsize' in the table [data] of recipes ('runs/recipe.toml'); "
                                    "did you mean 'batch_size'?"),
        ("seed = 3", "lr = 3", "it belongs to [optimizer]"),
        ("[training]", "[trainning]", "no table [trainning] in recipes ('runs/recipe.toml'); did you mean 'tr"),
        ("epochs = 2", 'epochs = "two"', 'epochs in \'runs/recipe.toml\' should be a whole number, not "two"'),
        ("epochs = 2", "epochs = true", "should be a whole number, not true"),
        ("epochs = 2", "epochs = 0", "[training] epochs in 'runs/recipe.toml': 0 is not in the range"),
        ("lr = 0.1", 'lr = "fast"', "should be a number"),
        ("force = true", 'force = "yes"', "should be true or false"),
        ('name = "sgd"', "name = 3", "should be a string"),
        ('metrics = "f1"', "metrics = [1]", "a string or a list of strings"),
        ("options = { momentum = 0.9 }", 'options = "momentum"', "should be a table"),
        ('[optimizer.groups."last.*"]', "[optimizer.groups]", "should contain tables"),
        ('path = "../model.onnx"', "", "names no model"),
        ('train = "../train.npz"', "", "Missing option '--data'"),
    ],
)  # fmt: skip
def test_a_slip_is_named(cli: Cli, recipe: str, folder: Path, old: str, new: str, says: str) -> None:
    (folder / recipe).write_text(RECIPE.replace(old, new, 1))
    ran = cli("train", recipe)
    assert ran.code == 2 and says in ran.err and "see 'gradgraph train --help'" in ran.err, ran.err


@pytest.mark.parametrize(("content", "says"), [(b"\xff", "is not valid TOML"), (b"a" * (1 << 21), "larger than 1 MiB")])
def test_what_is_no_recipe(cli: Cli, folder: Path, content: bytes, says: str) -> None:
    (folder / "r.toml").write_bytes(content)
    assert says in cli("train", "r.toml").err
    assert "cannot be read (No such file" in cli("train", "missing.toml").err


def test_resume_takes_back_what_a_recipe_replaces(cli: Cli, recipe: str) -> None:
    assert cli("train", recipe, "--checkpoint", "run.ckpt").code == 0
    assert "give one of them" in cli("train", recipe, "--checkpoint", "run.ckpt", "--resume").err
    assert cli("train", recipe, "--checkpoint", "run.ckpt", "--resume", "--no-force").code == 0


@pytest.mark.parametrize("name", toml.COMMANDS)
def test_every_option_has_a_key_of_its_own(name: str) -> None:
    command = command_of(name)
    places = [(section_of(p), key_of(p)) for p in command.params if section_of(p)]
    assert len(set(places)) == len(places)
    out_of_recipes = {p.name for p in command.params if not section_of(p)}
    assert out_of_recipes - {"custom_ops"} == {"as_json", "quiet", "debug", "print_config"}  # no file names a library


@pytest.mark.parametrize("name", toml.COMMANDS)
def test_recipes_know_the_options_of_commands(name: str) -> None:
    """They are read without the commands, whose parser they must agree with."""
    places = {(section, key_of(p)): p.name for p in command_of(name).params if (section := section_of(p))}
    assert {(s.section, s.key or s.name): option for option, s in toml.COMMANDS[name].items()} == places


def test_an_option_needs_a_section() -> None:
    with pytest.raises(TypeError, match="more belongs to no section of a recipe; declare it with a Shell"):
        section_of(click.Option(["--more"]))
    with pytest.raises(TypeError, match="more belongs to no section"):
        section_of(Option(["--more"], shell=Shell("unheard of")))  # type: ignore[arg-type]


def test_every_build_option_is_on_the_command_line() -> None:
    """Each field of ``BuildOptions`` has a spelling, but those that only Python can say; nobody lists them again."""
    build = {p.name: p for p in command_of("build").params}
    train = {p.name for p in command_of("train").params}
    assert set(SPELLINGS) <= set(build) and set(SPELLINGS) - train == {"separate", "size"}
    for name, shell in SPELLINGS.items():
        assert (section_of(build[name]), key_of(build[name])) == (shell.section, shell.key or name)
    unspelled = {f.name for f in fields(BuildOptions) if (one := option_of(f)) is not None and not one.shell}
    assert unspelled == {"model", "targets", "steps"}


def test_help_shows_sections(cli: Cli) -> None:
    text = cli("train", "--help").out
    titles = re.findall(r"^(\w[\w ]*):$", text.split("\n\n", 4)[-1], re.MULTILINE)
    assert titles == [*(section.capitalize() for section in toml.SECTIONS), "Other options"]
    context = click.Context(command_of("train"))
    for parameters in by_section(context.command, context).values():
        assert all(opt in text for p in parameters if isinstance(p, click.Option) for opt in p.opts)


def test_the_recipe_of_the_page(cli: Cli, folder: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8"), re.DOTALL)
    (folder / "recipe.toml").write_text(block)
    assert printed(cli, "train", "recipe.toml")["optimizer"]["groups"] == {"head.*": {"lr": 1e-3}}


@pytest.mark.parametrize(
    "value",
    [
        'a"b\\c\n\t\x7f\x01é',
        True,
        3,
        -1e-30,
        1e300,
        float("inf"),
        [1, 2.5, "x", []],
        {"a b": 1, "c": {"d": [{"e": 1}]}},
    ],
)
def test_what_is_written_is_read_again(value: object) -> None:
    tables = {"model": {"one": value, "none": None, "inner": {"x.*": {"lr": value}, "y": 1}}}
    read = tomllib.loads(toml.written(tables))
    assert read == {"model": {"one": value, "inner": {"x.*": {"lr": value}, "y": 1}}}
