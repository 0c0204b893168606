"""``cli/names.txt``: the names that options take, for help, which is to import none of their tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from gradgraph.cli.app import COMMANDS, cli
from gradgraph.cli.choices import Listed

PATH = Path(__file__).parents[2] / "cli" / "names.txt"


def commands(group: click.Group, names: list[str]) -> Iterator[click.Command]:
    """Commands and those within them."""
    for name in names:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from commands(command, list(command.commands))


def text() -> str:
    """A line for each table that an option reads its names from."""
    kinds = [p.type for command in commands(cli, [*COMMANDS]) for p in command.params if isinstance(p.type, Listed)]
    places = sorted({place for kind in kinds for place in kind.places if ":" in place})
    return "".join(f"{place} {' '.join(Listed(place).choices)}\n" for place in places)
