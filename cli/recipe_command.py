"""TOML recipes: the options of ``build`` and ``train`` in a file.

Every option is a key in the table of its section (``gradgraph.cli.sections``). A recipe sets the defaults of
options, so the command line overrides it, and types and ranges are checked in the same way.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import BatchSize
from gradgraph.cli.command import Command
from gradgraph.cli.options import typed_by_user
from gradgraph.cli.sections import by_section, key_of, of_table, section_of
from gradgraph.errors import shown, suggestion
from gradgraph.files.path_kinds import MODEL, RECIPE, Kind, kind_of
from gradgraph.files.untrusted.documents import toml_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.runs.run_recipes import STDIN, Tables, moved, placed, shown_value, tables_of, written

COMMANDS = ("build", "train")
LARGEST = 1 << 20  # bytes
FROM_RECIPE = click.core.ParameterSource.DEFAULT_MAP


class RecipeCommand(Command):
    """A command whose MODEL may be a recipe, and whose help lists the options by section."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params.append(
            click.Option(["--print-config"], is_flag=True, expose_value=False, callback=_remember,
                         help="Print the resolved options as a recipe (TOML) and exit.")
        )  # fmt: skip
        self.by_name = {p.name or "" for p in self.params}
        self.of = {p.name or "": of for p in self.params if (of := of_table(p)) is not None}

    def make_parser(self, ctx: click.Context) -> Any:
        """Return a parser that also accepts the opposite of each flag (``--no-force``, ``--shuffle``), to override a
        recipe.
        """
        parser = super().make_parser(ctx)
        for flag in self.params:
            if isinstance(flag, click.Option) and flag.is_flag and section_of(flag):
                words = flag.opts[-1].removeprefix("--")
                opposite = f"--{words.removeprefix('no-') if _is_inverted(flag) else f'no-{words}'}"
                parser.add_option(flag, [opposite], dest=flag.name, action="store_const", const=False)
        return parser

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        given, run = typed.get("model"), None
        if "resume" in self.by_name and isinstance(given, str) and kind_of(given) is Kind.RUN:
            run, given = given, _going_on(given, typed, ctx)
            args = [given if word == run else word for word in args]
        if not isinstance(given, str) or not (given == STDIN or given.lower().endswith(".toml")):
            return super().parse_args(ctx, args)
        try:
            recipe = read(given, self)
        except click.UsageError as error:
            error.ctx = ctx
            raise
        # a resumed run uses the current path of its folder, and does not overwrite files even if its recipe has force
        ctx.default_map = recipe.defaults | ({} if run is None else {"run": run, "force": False})
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            if error.param is None or ctx.get_parameter_source(error.param.name or "") is not FROM_RECIPE:
                raise
            where = f"[{section_of(error.param)}] {key_of(error.param)}"
            raise click.UsageError(f"{where} in '{shown(given)}': {error.message}", ctx) from None
        ctx.params["model"] = recipe.model
        if given == STDIN == str(ctx.params.get("data")):
            raise click.UsageError("the recipe and --data are both read from stdin; pass one of them as a file", ctx)
        for name, arguments in recipe.arguments.items():
            if not isinstance(typed.get(self.of[name]), str | list):  # else the command line chose another one
                ctx.params[name] = _merged(arguments, ctx.params[name])
                ctx.set_parameter_source(name, FROM_RECIPE)
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx.meta.get(__name__):
            return super().invoke(ctx)
        tables = resolved(ctx)
        if ctx.params["as_json"]:
            output.emit_json(tables)
        else:
            output.emit(written(tables))
        return None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, parameters in by_section(self, ctx).items():
            records = [p.get_help_record(ctx) for p in parameters if isinstance(p, click.Option)]
            with formatter.section(section.capitalize() or "Other options"):
                formatter.write_dl([record for record in records if record is not None])


def _remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    ctx.meta[__name__] = value


def _is_inverted(flag: click.Parameter) -> bool:
    return isinstance(flag, click.Option) and flag.is_flag and (flag.name or "").startswith("no_")


def _going_on(run: str, typed: Mapping[str, Any], ctx: click.Context) -> str:
    """Return the path of the recipe in the run folder ``run``, passed as MODEL; raise UsageError without --resume."""
    if not typed.get("resume"):
        raise click.UsageError(
            f"'{shown(run)}' is a run folder, not a model; add --resume to resume the run, or pass its model "
            f"'{shown(Path(run) / MODEL)}'",
            ctx,
        )
    return str(Path(run) / RECIPE)


# --- reading -------------------------------------------------------------------------------------------


@dataclass
class Given:
    """The contents of a recipe, for one command.

    Attributes:
        model: the path of MODEL.
        defaults: the values of options, by parameter name.
        arguments: the tables of options with arguments, such as ``loss_option``, by parameter name.
    """

    model: Path | None
    defaults: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)


def read(path: str, command: click.Command) -> Given:
    """Return the contents of the recipe at ``path`` (or on stdin, for "-") for ``command``.

    For ``build``, keys of options that only ``train`` has are ignored, and vice versa.

    Raises:
        UsageError: if the recipe cannot be read, or has an unknown key or a value of the wrong type.
    """
    tables = _load(path)
    name = "stdin" if path == STDIN else path
    folder = Path.cwd() if path == STDIN else Path(path).parent.absolute()
    known = {other: _parameters(_command(other)) for other in COMMANDS}
    every = {section: set[str]() for parameters in known.values() for section, _ in parameters}
    for section, key in (place for parameters in known.values() for place in parameters):
        every[section].add(key)
    own = _parameters(command)
    given = Given(None)
    for section, keys in tables.items():
        if section not in every or not isinstance(keys, dict):
            raise click.UsageError(f"there is no table [{shown(section)}] in recipes ('{shown(name)}')"
                                   f"{suggestion(section, every)}")  # fmt: skip
        for key, value in keys.items():
            if key not in every[section]:
                raise click.UsageError(_unknown(section, key, name, every))
            if parameter := own.get((section, key)):
                _take(given, parameter, value, folder, f"[{section}] {key} in '{shown(name)}'")
    if "path" not in tables.get("model", {}) and "start" not in given.defaults:
        raise click.UsageError(f"'{shown(name)}' names no model; write path = \"model.onnx\" in its table [model]")
    return given


def _command(name: str) -> click.Command:
    command: click.Command = importlib.import_module(f"gradgraph.cli.{name}").command
    return command


def _parameters(command: click.Command) -> dict[tuple[str, str], click.Parameter]:
    """Return the parameters of a command that recipes may set, by table and key."""
    return {(section, key_of(p)): p for p in command.params if (section := section_of(p))}


def _load(path: str) -> Tables:
    try:
        if path == STDIN:
            content = sys.stdin.buffer.read(LARGEST + 1)
        else:
            content = regular_bytes(path, LARGEST)
    except UnreadableError as error:
        raise click.UsageError(f"'{shown(path)}' cannot be read ({error}); give a recipe (.toml)") from None
    if len(content) > LARGEST:
        raise click.UsageError("the recipe is larger than 1 MiB; pass a recipe (.toml)")
    try:
        return toml_of(content)
    except UnreadableError as error:
        raise click.UsageError(f"'{shown(path)}' is not valid TOML: {error}") from None


def _unknown(section: str, key: str, name: str, every: Mapping[str, set[str]]) -> str:
    others = [other for other, keys in every.items() if key in keys]
    there = f"; it belongs to [{others[0]}]" if others else suggestion(key, sorted(every[section]))
    return f"there is no key '{shown(key)}' in the table [{section}] of recipes ('{shown(name)}'){there}"


def _take(given: Given, parameter: click.Parameter, value: Any, folder: Path, where: str) -> None:
    name = parameter.name or ""
    if of_table(parameter) is not None:
        given.arguments[name] = _arguments(name, value, folder, where)
        return
    converted = _checked(parameter, value, where)
    if isinstance(parameter.type, click.Path) and isinstance(converted, list):
        converted = [placed(c, folder) for c in converted]
    elif isinstance(parameter.type, click.Path):
        converted = placed(converted, folder)
    elif name == "schedule":
        converted = moved(converted, folder)
    if name == "model":
        given.model = Path(str(converted))
    else:
        given.defaults[name] = converted


def _checked(parameter: click.Parameter, value: Any, where: str) -> Any:
    """Return a value of a recipe as a default for click; raise UsageError if its type does not fit ``parameter``."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if (
            parameter.name == "accumulate" and type(value) is int
        ):  # for `build`, it is a flag, and for `train` the number of batches
            return True
        if isinstance(value, bool):
            return value is not _is_inverted(parameter)
        raise click.UsageError(f"{where} should be true or false, not {shown_value(value)}")
    if isinstance(parameter, click.Option) and parameter.multiple:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(v, str) for v in values):
            return values
        raise click.UsageError(f"{where} should be a string or a list of strings, not {shown_value(value)}")
    kinds: dict[type, tuple[tuple[type, ...], str]] = {
        click.types.IntParamType: ((int,), "a whole number"),
        click.types.FloatParamType: ((int, float), "a number"),
        BatchSize: ((int, str), 'a whole number or "auto"'),
    }
    wanted, words = next((k for base, k in kinds.items() if isinstance(parameter.type, base)), ((str,), "a string"))
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise click.UsageError(f"{where} should be {words}, not {shown_value(value)}")
    return value


def _arguments(name: str, value: Any, folder: Path, where: str) -> dict[str, Any]:
    """Return a table of a recipe in the form that the click callback of the option ``name`` returns."""
    if not isinstance(value, dict):
        raise click.UsageError(f"{where} should be a table, not {shown_value(value)}")
    if name == "loss_option":  # [loss.options.boxes] applies to the loss of the output "boxes"
        parts = [(f"{k}.{n}", v) for k, own in value.items() if isinstance(own, dict) for n, v in own.items()]
        return dict(parts) | {k: v for k, v in value.items() if not isinstance(v, dict)}
    if name == "group":
        for glob, group in value.items():
            if not isinstance(group, dict):
                raise click.UsageError(f'{where} should contain tables, such as [optimizer.groups."{shown(glob)}"]')
            if isinstance(group.get("lr"), str):
                group["lr"] = moved(group["lr"], folder)
    return value


def _merged(recipe: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of recipe and command line, which overrides the recipe; groups in both are merged."""
    both = {k: {**recipe[k], **v} for k, v in typed.items() if isinstance(v, dict) and isinstance(recipe.get(k), dict)}
    return {**recipe, **typed, **both}


# --- printing ------------------------------------------------------------------------------------------


def resolved(ctx: click.Context) -> Tables:
    """Return the values of all options of a command, including defaults, as tables of a recipe; None for unset."""
    places = [(section, key_of(p), p.name or "") for p in ctx.command.params if (section := section_of(p))]
    return tables_of(places, ctx.params, bool(typed_by_user(ctx, ("loss",))))
