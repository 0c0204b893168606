"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gradgraph.cli.choices import PATH, Briefly, Suggested
from gradgraph.cli.key_values import arguments, groups, sizes
from gradgraph.cli.sections import placed
from gradgraph.runs.spelled_build import SPELLINGS

F = TypeVar("F", bound=Callable[..., Any])

_TAKES: dict[str, dict[str, Any]] = {
    "text": {},
    "flag": {"is_flag": True},
    "number": {"type": float},
    "whole": {"type": int},
    "count": {"type": click.IntRange(min=1)},
    "list": {"multiple": True},
    "arguments": {"multiple": True, "metavar": "KEY=VALUE", "callback": arguments},
    "groups": {"multiple": True, "metavar": "GLOB:KEY=VALUE,…", "callback": groups},
    "sizes": {"multiple": True, "metavar": "NAME=NUMBER", "callback": sizes},
}


def build_option(name: str, help: str = "") -> Callable[[F], F]:
    """Return a decorator that adds the option ``name`` of ``gradgraph.build``; ``help`` replaces its help text."""
    shell = SPELLINGS[name]
    settings = {**_TAKES[shell.takes], "help": help or shell.help}
    if shell.metavar is not None:
        settings["metavar"] = shell.metavar
    if shell.span is not None:
        settings["type"] = click.IntRange(*shell.span)
    if shell.names:
        settings["type"] = Briefly(*shell.names) if shell.strict else Suggested(*shell.names)
    if shell.default is not None:
        settings |= {"default": shell.default, "show_default": True}
    table = shell.of if shell.takes in ("arguments", "groups", "sizes") else None
    return placed(shell.section, f"--{name.replace('_', '-')}", key=shell.key, of=table, **settings)


def build_options(*left_out: str) -> Callable[[F], F]:
    """Return a decorator that adds all options of ``gradgraph.build`` in order, except the names in ``left_out``."""

    def decorate(command: F) -> F:
        for name in reversed([name for name in SPELLINGS if name not in left_out]):
            command = build_option(name)(command)
        return command

    return decorate


STORE = placed("output", "--store", type=click.Choice(["float32", "float16"]), default="float32", show_default=True,
               help="Storage type of the weights. float16 halves the file; the weights are float32 again once the "
                    "file is loaded.")  # fmt: skip


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
    kinds = click.Choice(["auto", "cpu", "cuda"])
    return placed("training", "--device", type=kinds, default="auto", show_default=True, help=f"Where to {what}.")


def _register(ctx: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> None:
    for path in paths:
        from gradgraph.extend import library

        library(path)


# not a parameter of the command, so that a recipe cannot load a library
CUSTOM_OPS = click.option("--custom-ops", type=PATH, multiple=True, expose_value=False, callback=_register,
                          help="Custom operator library for onnxruntime. Its code runs with your permissions; "
                               "repeatable.")  # fmt: skip
SHARE_WEIGHTS = placed("output", "--share-weights", is_flag=True,
                       help="Refer to the model's external data by relative path and digest instead of copying large "
                            "weights.")  # fmt: skip
FORCE = placed("output", "--force", is_flag=True, help="Overwrite the output of an earlier run.")


def typed_by_user(ctx: click.Context, names: Sequence[str]) -> list[str]:
    """Return the flags of the parameters in ``names`` that the command line or a recipe sets."""
    default = click.core.ParameterSource.DEFAULT
    return [f"--{n.replace('_', '-')}" for n in names if ctx.get_parameter_source(n) not in (default, None)]
