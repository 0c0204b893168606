"""Sections of the options of ``build`` and ``train``: groups in the help, and tables in recipes.

``placed("data", "--validation", …)`` declares an option in the section "data".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gradgraph.cli.choices import Named
from gradgraph.runs.run_recipes import SECTIONS

F = TypeVar("F", bound=Callable[..., Any])


class Option(Named):
    """An option with a key in recipes.

    Args:
        section: the name of the table in recipes and of the group in the help that contain the option.
        key: the option's key in that table; by default the name of its parameter.
        of: None if the value in a recipe is not a table. Otherwise the name of the option whose arguments the table
            contains, such as "loss" for ``--loss-option``; "" if no option has these arguments.
    """

    def __init__(self, *declared: Any, section: str, key: str = "", of: str | None = None, **settings: Any) -> None:
        super().__init__(*declared, **settings)
        self.section, self.key, self.of = section, key or self.name or "", of


def placed(section: str, *declared: str, **settings: Any) -> Callable[[F], F]:
    """Return a decorator that adds an option with a key in recipes; the arguments are those of ``click.option``."""
    return click.option(*declared, cls=Option, section=section, **settings)


def section_of(parameter: click.Parameter) -> str | None:
    """Return the section of a parameter; None for parameters that recipes cannot set, such as ``--json``.

    Raises:
        TypeError: if another parameter was declared without a section.
    """
    if not parameter.expose_value or parameter.name == "as_json":
        return None
    if isinstance(parameter, click.Argument):
        return "model"
    if not isinstance(parameter, Option) or parameter.section not in SECTIONS:
        raise TypeError(f"{parameter.name} has no section of recipes; declare it with placed(SECTION, …)")
    return parameter.section


def key_of(parameter: click.Parameter) -> str:
    """Return the key of a parameter in its table of a recipe."""
    return parameter.key if isinstance(parameter, Option) else "path"


def of_table(parameter: click.Parameter) -> str | None:
    """Return the attribute ``of`` of an ``Option``; None for other parameters."""
    return parameter.of if isinstance(parameter, Option) else None


def by_section(command: click.Command, ctx: click.Context) -> dict[str, list[click.Parameter]]:
    """Return the parameters of a command by section, in order; parameters without a section are under ""."""
    parts: dict[str, list[click.Parameter]] = {section: [] for section in (*SECTIONS, "")}
    for parameter in command.get_params(ctx):
        parts[section_of(parameter) or ""].append(parameter)
    return {section: parameters for section, parameters in parts.items() if parameters}
