"""Help leads with an example and is quick; the table of environment variables is complete."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gradgraph.cli.app import COMMANDS
from gradgraph.cli.app import cli as group
from gradgraph.machine import hardware
from tests.kit.command_line import Cli

ROOT = Path(__file__).parents[2]


def command_of(name: str) -> click.Command:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_help_leads_with_an_example(cli: Cli, name: str) -> None:
    ran = cli(name, "--help")
    assert ran.code == 0
    first, examples, *_ = [p.strip() for p in re.split(r"\n\s*\n", ran.out.split("\n\n", 1)[1])]
    assert first.endswith(".")
    lines = examples.splitlines()
    assert lines[0] in ("Example:", "Examples:")
    assert all(line.strip().startswith(f"gradgraph {name}") for line in lines[1:])
    assert max(map(len, ran.out.splitlines())) <= 110


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of every example exist, so that it can be typed as it stands."""
    (tmp_path / "recipe.toml").write_text('model.path = "model.onnx"\ndata.train = "train.npz"\n')
    monkeypatch.chdir(tmp_path)
    command = command_of(name)
    examples = re.findall(rf"^ *gradgraph {name}(.*)$", command.help or "", re.MULTILINE)
    assert examples
    for words in examples:
        command.make_context(name, shlex.split(words))


def test_every_option_is_explained() -> None:
    bare = [f"{n} {p.name}" for n in COMMANDS for p in command_of(n).params
            if isinstance(p, click.Option) and not (p.help or "").endswith(".")]  # fmt: skip
    assert bare == []


def test_group_help_lists_the_commands_with_their_first_words(cli: Cli) -> None:
    text = cli("--help").out
    assert all(f"  {name}" in text for name in COMMANDS)
    assert cli().out == text
    assert cli("--version").out.startswith("gradgraph")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from gradgraph.cli.app import run; run(['--help']); "
        "print(sorted({'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.strip() == "[]"


def test_the_first_line_of_train_waits_for_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from gradgraph.cli import output; from gradgraph.cli.app import run\n"
        "def say(text): print(text, sorted({'numpy', 'onnx', 'onnxruntime', 'rich'} & set(sys.modules))); sys.exit()\n"
        "output.say = say; run(['train', 'model.onnx', '--data', 'train.npz'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "building a step from model.onnx, to train on train.npz … []", done.stderr


def test_the_table_of_environment_variables_is_complete(cli: Cli) -> None:
    folders = (ROOT / name for name in ("gradgraph", "frontend", "export", "cli"))
    sources = "\n".join(path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get|\.setdefault)?[([]\s*\"(\w+)\"", sources))
    read |= {hardware.VARIABLE, *re.findall(r"_absolute\(\"(\w+)\"", sources)}
    assert {"CXX", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"} <= read
    table = (
        (ROOT / "docs" / "reference" / "cli.md")
        .read_text("utf-8")
        .partition("## Environment variables")[2]
        .partition("## ")[0]
    )
    assert [name for name in read if f"`{name}`" not in table] == []
    assert "docs/reference/cli.md" in cli("--help").out
