"""Commands that accept a recipe: it sets the defaults of options, so the command line overrides it, and ranges are
checked in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gradgraph.building.option import TABLES
from gradgraph.cli import output
from gradgraph.cli.command import Command
from gradgraph.cli.options import typed_by_user
from gradgraph.cli.sections import Option, by_section, key_of, section_of
from gradgraph.errors import ArgumentError, shown
from gradgraph.files.path_kinds import MODEL, RECIPE, Kind, kind_of
from gradgraph.runs.run_recipes import STDIN, Tables, read, tables_of, written

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
        options = (p for p in self.params if isinstance(p, Option) and p.shell.takes in TABLES)
        self.of = {p.name or "": p.shell.of for p in options}

    def make_parser(self, ctx: click.Context) -> Any:
        """Return a parser that also accepts the opposite of each flag (``--no-force``, ``--shuffle``), to override a
        recipe.
        """
        parser = super().make_parser(ctx)
        for flag in self.params:
            if isinstance(flag, Option) and flag.is_flag:
                words = flag.opts[-1].removeprefix("--")
                opposite = f"--{words.removeprefix('no-') if flag.shell.is_opposite else f'no-{words}'}"
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
            recipe = read(given, self.name or "")
        except ArgumentError as error:
            raise click.UsageError(str(error), ctx) from None
        # a resumed run uses the current path of its folder, and does not overwrite files even if its recipe has force
        ctx.default_map = recipe.values | ({} if run is None else {"run": run, "force": False})
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


def _going_on(run: str, typed: Mapping[str, Any], ctx: click.Context) -> str:
    """Return the path of the recipe in the run folder ``run``, passed as MODEL; raise UsageError without --resume."""
    if not typed.get("resume"):
        raise click.UsageError(
            f"'{shown(run)}' is a run folder, not a model; add --resume to resume the run, or pass its model "
            f"'{shown(Path(run) / MODEL)}'",
            ctx,
        )
    return str(Path(run) / RECIPE)


def _merged(recipe: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of recipe and command line, which overrides the recipe; groups in both are merged."""
    both = {k: {**recipe[k], **v} for k, v in typed.items() if isinstance(v, dict) and isinstance(recipe.get(k), dict)}
    return {**recipe, **typed, **both}


# --- printing ------------------------------------------------------------------------------------------


def resolved(ctx: click.Context) -> Tables:
    """Return the values of all options of a command, including defaults, as tables of a recipe; None for unset."""
    return tables_of(ctx.command.name or "", ctx.params, bool(typed_by_user(ctx, ("loss",))))
