"""The class of all commands (it keeps line breaks of examples in help), and the options that all commands have."""

from __future__ import annotations

import inspect
from typing import Any

import click

from gradgraph.cli.output import talk


class Command(click.Command):
    """A click command with ``--debug`` and ``--quiet`` that prints indented help verbatim."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.help = keep_indented(inspect.cleandoc(self.help or ""))
        self.params += talk_options()


def keep_indented(text: str) -> str:
    """Begin each paragraph that has an indented line with a backspace, click's mark for "do not rewrap"."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"\b\n{p}" if "\n  " in p or p.startswith("  ") else p for p in paragraphs)


def talk_options() -> list[click.Parameter]:
    return [
        click.Option(["--quiet"], is_flag=True, is_eager=True, expose_value=False, callback=_remember,
                     help="Print nothing on stderr except errors."),
        click.Option(["--debug"], is_flag=True, is_eager=True, expose_value=False, callback=_remember,
                     help="Show the traceback of errors."),
    ]  # fmt: skip


def _remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and parameter.name:
        setattr(talk, parameter.name, True)
