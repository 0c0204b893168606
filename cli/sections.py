"""Sections of the options of ``build`` and ``train``: groups in help, and tables in recipes.

An option declares its section: ``placed("data", "--validation", …)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gradgraph.cli.choices import Named

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS = ("model", "data", "loss", "optimizer", "schedule", "training", "output")


class Option(Named):
    """An option with a key in recipes.

    Args:
        section: its table in recipes, and its group in help.
        key: its name there; by default that of the parameter.
        of: in a recipe, it is a table with the arguments of this option, or of none (""); None if it is not a table.
    """

    def __init__(self, *declared: Any, section: str, key: str = "", of: str | None = None, **settings: Any) -> None:
        super().__init__(*declared, **settings)
        self.section, self.key, self.of = section, key or self.name or "", of


def placed(section: str, *declared: str, **settings: Any) -> Callable[[F], F]:
    """Declare a ``click.option`` with a key in recipes."""
    return click.option(*declared, cls=Option, section=section, **settings)


def section_of(parameter: click.Parameter) -> str | None:
    """Return the section of a parameter; None for parameters about output that recipes do not set.

    Raises:
        TypeError: it was declared without a section.
    """
    if not parameter.expose_value or parameter.name == "as_json":
        return None
    if isinstance(parameter, click.Argument):
        return "model"
    if not isinstance(parameter, Option) or parameter.section not in SECTIONS:
        raise TypeError(f"{parameter.name} has no section of recipes; declare it with placed(SECTION, …)")
    return parameter.section


def key_of(parameter: click.Parameter) -> str:
    """Return the name of a parameter in its table of a recipe."""
    return parameter.key if isinstance(parameter, Option) else "path"


def of_table(parameter: click.Parameter) -> str | None:
    """Return the option whose arguments are in a table of a recipe ("" for none); None if this is not a table."""
    return parameter.of if isinstance(parameter, Option) else None


def by_section(command: click.Command, ctx: click.Context) -> dict[str, list[click.Parameter]]:
    """Return the parameters of a command by section, in order; the others are under an empty name."""
    parts: dict[str, list[click.Parameter]] = {section: [] for section in (*SECTIONS, "")}
    for parameter in command.get_params(ctx):
        parts[section_of(parameter) or ""].append(parameter)
    return {section: parameters for section, parameters in parts.items() if parameters}
