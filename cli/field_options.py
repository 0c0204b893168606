"""Command-line options made from the fields of a dataclass, whose metadata have help and types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from gradgraph.arguments import Kind
from gradgraph.cli.choices import Briefly, Suggested

F = TypeVar("F", bound=Callable[..., Any])


def options_of(kind: type) -> Callable[[F], F]:
    """Return a decorator that adds an option to a command for each field of the dataclass ``kind``, in order."""

    def decorate(command: F) -> F:
        for option in reversed(fields(kind)):
            told, name = option.metadata, option.name.replace("_", "-")
            settings: dict[str, Any] = {"default": option.default, "help": told["words"]}
            if isinstance(option.default, bool):
                settings["is_flag"] = True
            elif isinstance(option.default, tuple):
                settings |= {"multiple": True, "metavar": told.get("metavar", "NAME")}
            else:
                settings |= {"type": _type_of(option), "metavar": told.get("metavar")}
            settings["show_default"] = option.default is not None and option.default is not False
            settings["callback"] = _check_of(told["kind"])
            declared = [f"--{told.get('flag', name)}", *([f"--{name}"] if "flag" in told else []), option.name]
            command = click.option(*declared, **settings)(command)
        return command

    return decorate


def _check_of(kind: Kind) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback that raises ArgumentError with the option's name unless the value is of ``kind``."""

    def check(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        kind.check(parameter.opts[0], value)
        return value

    return check


def _type_of(option: Field[Any]) -> Any:
    told = option.metadata
    if "choices" in told:
        return click.Choice(told["choices"])
    if "suggested" in told:
        return Suggested(told["suggested"])
    return Briefly(told["names"]) if "names" in told else told.get("typed", type(option.default))
