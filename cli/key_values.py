"""Options of the form ``momentum=0.9``: click callbacks that parse them into dicts."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import click
from click.core import ParameterSource

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


def columns(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Parse column names separated by commas (``a,b``); a name that contains a comma is quoted, as in a .csv."""
    if len(given) != 1 or ctx.get_parameter_source(parameter.name or "") is not ParameterSource.COMMANDLINE:
        return tuple(given)  # a recipe has a list of names
    from gradgraph.files.untrusted.documents import csv_head

    return tuple(name for name in csv_head(given[0].encode())[0] if name)


def kinds(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Parse values such as ``zip=category``, or with a JSON object as the kind, into a dict of kinds by column."""
    found = {}
    for text in given:
        parts = re.fullmatch(r"(.+?)=(\{.*\}|[^={}]+)", text, re.DOTALL)
        if parts is None:
            raise click.BadParameter(f"'{shown(text)}' should be NAME=KIND, such as zip=category", ctx, parameter)
        found[parts[1]] = value_of(parts[2])
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
