"""Help comes at once: it imports nothing heavy, and the names that it tells are those of the tables."""

import subprocess
import sys

import pytest

import gradgraph as gg
from gradgraph.cli.app import COMMANDS
from gradgraph.cli.choices import Listed
from tests.pages import names_in_help

HEAVY = ("numpy", "onnx", "onnx_ir", "onnxruntime", "rich", "gradgraph.frontend", "gradgraph.rules")
CODE = f"""
import sys
import gradgraph as gg
from gradgraph.cli.app import run
for command in sys.argv[1:]:
    assert run([*command.split(), "--help"]) == 0
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def test_help_imports_no_tables() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE, *COMMANDS], capture_output=True, text=True, check=True)
    assert dict(zip(COMMANDS, ran.stderr.splitlines(), strict=True)) == dict.fromkeys(COMMANDS, "[]")


def test_the_names_in_help_are_those_of_the_tables() -> None:
    assert names_in_help.PATH.read_text("utf-8") == names_in_help.text(), "run make pages"


def test_names_of_other_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program or an installed package extends gradgraph, help reads the tables."""
    from gradgraph.losses import LOSSES

    kind = Listed("losses:LOSSES", "none")
    monkeypatch.setitem(LOSSES, "of_a_stranger", LOSSES["mse"])
    assert {"of_a_stranger", "mse", "none"} <= {*kind.listed()}
    monkeypatch.delitem(sys.modules, "gradgraph.losses")
    assert "of_a_stranger" not in kind.listed() and {"mse", "none"} <= {*kind.listed()}
    monkeypatch.setitem(sys.modules, "gradgraph.losses", gg.losses)
    monkeypatch.setattr("gradgraph.cli.choices.metadata.entry_points", lambda group: ["a point of " + group])
    assert "of_a_stranger" in kind.listed()
