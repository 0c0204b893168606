"""Options of the form ``momentum=0.9``: click callbacks that parse them into dicts."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from gradgraph.errors import shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError


def arguments(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Parse values such as ``momentum=0.9``, a name and a JSON value, into a dict; see :func:`value_of`."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.rpartition(".")[2].isidentifier():
            example = "generator=5" if parameter.name == "every" else "momentum=0.9"
            raise click.BadParameter(
                f"'{shown(text)}' should be {parameter.metavar}, such as {example}", ctx, parameter
            )
        found[key] = value_of(value)
    return found


def groups(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Parse values such as ``head.*:lr=1e-3,betas=[0.8,0.9]`` into a dict from glob to arguments by name.

    Values are JSON; ``lr`` may be a schedule.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        glob, colon, _ = text.partition("=")[0].rpartition(":")
        pairs = [part.partition("=") for part in _split_at_commas(text[len(glob) + 1 :])]
        if not colon or not glob or not all(equals and key.isidentifier() for key, equals, _ in pairs):
            raise click.BadParameter(
                f"'{shown(text)}' should be GLOB:KEY=VALUE, such as head.*:lr=1e-3", ctx, parameter
            )
        found.setdefault(glob, {}).update({key: value_of(value) for key, _, value in pairs})
    return found


def _split_at_commas(text: str) -> list[str]:
    """Split a text at the commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def sizes(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, int | tuple[int, ...]]:
    """Parse values such as ``batch=32`` (a dimension and its size) or ``x=1,3,224,224`` (an input and its shape)."""
    found: dict[str, int | tuple[int, ...]] = {}
    for text in given:
        name, equals, numbers = text.rpartition("=")
        every: list[int] = []
        with contextlib.suppress(ValueError):
            every = [int(n) for n in numbers.split(",")]
        if not every or not equals or not name:
            raise click.BadParameter(f"'{shown(text)}' should be {parameter.metavar}, such as batch=32", ctx, parameter)
        found[name] = tuple(every) if len(every) > 1 else every[0]
    return found


def value_of(text: str) -> Any:
    """Parse a JSON value, or ``True``, ``False`` or ``None``; any other text is returned as a string."""
    python = {"True": True, "False": False, "None": None}
    if text in python:
        return python[text]
    try:
        return json_of(text, finite=False)
    except UnreadableError:
        return text
