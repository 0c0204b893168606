"""Options that several commands share, and those that are declared by fields of ``BuildOptions`` and ``Run``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradgraph.building.option import TABLES, Shell, default_of, option_of, spellings
from gradgraph.building.option import Option as FieldOption
from gradgraph.cli.choices import BATCH_SIZE, PATH, Briefly, Suggested
from gradgraph.cli.key_values import arguments, columns, groups, kinds, sizes
from gradgraph.cli.sections import Option
from gradgraph.runs.run_options import OPTIONS, Run
from gradgraph.runs.run_recipes import COMMANDS
from gradgraph.runs.run_recipes import STORE as STORE_OPTION
from gradgraph.runs.spelled_build import SPELLINGS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound=Callable[..., Any])

_TAKES: dict[str, dict[str, Any]] = {
    "text": {},
    "flag": {"is_flag": True},
    "number": {"type": float},
    "share": {"type": click.FloatRange(min=0)},
    "seconds": {"type": click.FloatRange(min=0, min_open=True)},
    "whole": {"type": int},
    "count": {"type": click.IntRange(min=1)},
    "path": {"type": PATH},
    "batch size": {"type": BATCH_SIZE},
    "list": {"multiple": True},
    "paths": {"multiple": True, "type": PATH},
    "columns": {"multiple": True, "callback": columns},
    "arguments": {"multiple": True, "metavar": "KEY=VALUE", "callback": arguments},
    "kinds": {"multiple": True, "callback": kinds},
    "groups": {"multiple": True, "metavar": "GLOB:KEY=VALUE,…", "callback": groups},
    "sizes": {"multiple": True, "metavar": "NAME=NUMBER", "callback": sizes},
}
_DEFAULTS = {f.name: default_of(f) for f in fields(Run)}


def declared(shell: Shell, help: str = "") -> Callable[[F], F]:
    """Return a decorator that adds an option with a key in recipes to a command; ``help`` replaces its help text."""
    default = _DEFAULTS[shell.field] if OPTIONS.get(shell.name) is shell else shell.unset
    return click.option(*_flags(shell), cls=Option, shell=shell, **_settings(shell, help, default))


def _flags(shell: Shell) -> tuple[str, ...]:
    return (*(shell.flags.split() or [f"--{shell.name.replace('_', '-')}"]), shell.name)


def _settings(shell: Shell, help: str, default: Any) -> dict[str, Any]:
    """Return the arguments of ``click.option`` for an option."""
    settings = {**_TAKES[shell.takes], "help": help or shell.help, "required": shell.required}
    if shell.metavar is not None:
        settings["metavar"] = shell.metavar
    if shell.span is not None:
        settings["type"] = click.IntRange(*shell.span)
    if shell.names:
        settings["type"] = Briefly(*shell.names) if shell.strict else Suggested(*shell.names)
    if shell.choices:
        settings["type"] = click.Choice(shell.choices)
    if shell.default is not None:
        settings |= {"default": shell.default, "show_default": True}
    elif not shell.required and shell.takes not in TABLES:
        settings["default"] = False if shell.is_opposite else default
    return settings


def _all(decorators: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
    """Return a decorator that applies ``decorators``, so that their options are listed in this order."""
    every = [*decorators]

    def decorate(command: F) -> F:
        for decorator in reversed(every):
            command = decorator(command)
        return command

    return decorate


def recipe_options(command: str) -> Callable[[F], F]:
    """Return a decorator that adds all options that a recipe of ``command`` may set, in order."""
    return _all(declared(shell) for name, shell in COMMANDS[command].items() if name != "model")


def build_option(name: str) -> Callable[[F], F]:
    """Return a decorator that adds the option ``name`` of ``gradgraph.build``."""
    return declared(SPELLINGS[name])


def options_of(kind: type[DataclassInstance]) -> Callable[[F], F]:
    """Return a decorator that adds all options of an options class, in order, to a command without recipes."""
    known = ((f, one) for f in fields(kind) if (one := option_of(f)) is not None)
    return _all(_checked_option(spellings(kind)[f.name], one, default_of(f)) for f, one in known)


def _checked_option(shell: Shell, option: FieldOption, default: Any) -> Callable[[F], F]:
    """Return a decorator that adds an option; a value of the wrong type raises ArgumentError, which names the flag."""

    def check(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
        option.check(parameter.opts[0], value)
        return value

    return click.option(*_flags(shell), callback=check, **_settings(shell, "", default))


reading_options = _all(declared(OPTIONS[name]) for name in ("image", "tokenizer", "text", "sound"))

STORE, FORCE = declared(STORE_OPTION), declared(OPTIONS["force"])
CHECKPOINT = click.option(
    "--checkpoint",
    type=PATH,
    help="Checkpoint of the step. Default: the checkpoint in the folder of `train --run` that contains the step.",
)
UNTRAINED = click.option("--untrained", is_flag=True, help="Use the initial weights of the step.")
NOT_AVERAGED = click.option(
    "--not-averaged", is_flag=True, help="Use the trained weights themselves instead of their moving averages."
)


def device_option(what: str) -> Callable[[F], F]:
    """Return a decorator that adds the option ``--device``, whose help is "Where to ``what``."."""
    return declared(OPTIONS["device"], f"Where to {what}.")


def _register(ctx: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> None:
    for path in paths:
        from gradgraph.extend import library

        library(path)


# not a parameter of the command, so that a recipe cannot load a library
CUSTOM_OPS = click.option("--custom-ops", type=PATH, multiple=True, expose_value=False, callback=_register,
                          help="Custom operator library for onnxruntime. Its code runs with your permissions; "
                               "repeatable.")  # fmt: skip


def typed_by_user(ctx: click.Context, names: Iterable[str]) -> list[str]:
    """Return those parameters in ``names`` that the command line or a recipe sets."""
    default = click.core.ParameterSource.DEFAULT
    return [name for name in names if ctx.get_parameter_source(name) not in (default, None)]
