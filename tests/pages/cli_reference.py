"""The commands on docs/reference/cli.md, made from the commands themselves."""

from __future__ import annotations

import inspect

import click

from gradgraph.cli import recipe_command
from gradgraph.cli.app import COMMANDS, cli
from gradgraph.cli.sections import by_section, key_of
from tests.pages.marked import Marked, listed


def commands() -> str:
    """A section for each command."""
    return "\n".join(_section(name) for name in COMMANDS).rstrip()


def names() -> str:
    """The commands, and how to read their options."""
    return listed(
        COMMANDS, "`gradgraph COMMAND --help` lists the options of each. The site (`make docs`) has them here."
    )


def _section(name: str) -> str:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    arguments = " ".join(str(p.name).upper() for p in command.params if isinstance(p, click.Argument))
    is_recipe = isinstance(command, recipe_command.RecipeCommand)
    table = _table_with_keys(command) if is_recipe else _table([p for p in command.params if _is_told(p)])
    title = f"## gradgraph {name} {arguments}".rstrip()
    return "\n".join([title, "", *_text(command.help or ""), *table, ""])


def _is_told(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.name not in ("quiet", "debug", "help")


def _table(options: list[click.Parameter]) -> list[str]:
    rows = [f"| {_spelling(p)} | {_meaning(p)} |" for p in options if isinstance(p, click.Option)]
    return ["| option | meaning |", "|---|---|", *rows] if rows else []


def _table_with_keys(command: click.Command) -> list[str]:
    """The options in their sections, with the keys that they are in a recipe."""
    rows = ["| option | in a recipe | meaning |", "|---|---|---|"]
    for section, parameters in by_section(command, click.Context(command)).items():
        for p in parameters:
            if isinstance(p, click.Option) and _is_told(p) and p.expose_value | (p.name == "print_config"):
                rows.append(f"| {_spelling(p)} | {f'`[{section}] {key_of(p)}`' if section else ''} | {_meaning(p)} |")
    return rows


def _text(text: str) -> list[str]:
    """Help as Markdown: paragraphs stay, indented ones become code."""
    lines = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("\b\n"):
            lines += [paragraph, ""]
            continue
        head, body = [], []
        for line in paragraph[2:].splitlines():
            (body if line.startswith("  ") else head).append(line)
        lines += [*head, *([""] if head else []), "```", *(b[2:] for b in body), "```", ""]
    return lines


def _spelling(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.metavar or _kind(option.type)}"
    return ", ".join(f"`{name}{value}`" for name in option.opts).replace("|", r"\|")


def _kind(kind: click.ParamType) -> str:
    return "|".join(kind.choices) if isinstance(kind, click.Choice) else kind.name.upper().removesuffix(" RANGE")


def _meaning(option: click.Option) -> str:
    notes = [option.help or ""]
    if option.show_default:
        default = option.default if isinstance(option.default, str | int | float) else ", ".join(option.default or ())
        notes.append(f"Default: `{default}`.")
    if option.required:
        notes.append("Required.")
    if option.multiple and "repeatable" not in notes[0].lower():
        notes.append("Repeatable.")
    return " ".join(notes)


MARKED = [Marked("docs/reference/cli.md", "commands", commands, names)]
