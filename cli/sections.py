"""Sections of the options of ``build`` and ``train``: groups in the help, and tables in recipes."""

from __future__ import annotations

from typing import Any

import click

from gradgraph.building.option import Shell
from gradgraph.cli.choices import Named
from gradgraph.runs.run_recipes import SECTIONS


class Option(Named):
    """An option with a key in recipes, declared by ``shell``."""

    def __init__(self, *declared: Any, shell: Shell, **settings: Any) -> None:
        super().__init__(*declared, **settings)
        self.shell = shell


def section_of(parameter: click.Parameter) -> str | None:
    """Return the section of a parameter; None for parameters that recipes cannot set, such as ``--json``.

    Raises:
        TypeError: if another parameter was declared without a section.
    """
    if not parameter.expose_value or parameter.name == "as_json":
        return None
    if isinstance(parameter, click.Argument):
        return "model"
    if not isinstance(parameter, Option) or parameter.shell.section not in SECTIONS:
        raise TypeError(f"{parameter.name} belongs to no section of a recipe; declare it with a Shell")
    return parameter.shell.section


def key_of(parameter: click.Parameter) -> str:
    """Return the key of a parameter in its table of a recipe."""
    return parameter.shell.place[1] if isinstance(parameter, Option) else "path"


def by_section(command: click.Command, ctx: click.Context) -> dict[str, list[click.Parameter]]:
    """Return the parameters of a command by section, in order; parameters without a section are under ""."""
    parts: dict[str, list[click.Parameter]] = {section: [] for section in (*SECTIONS, "")}
    for parameter in command.get_params(ctx):
        parts[section_of(parameter) or ""].append(parameter)
    return {section: parameters for section, parameters in parts.items() if parameters}
