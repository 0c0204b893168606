"""Options of those who have a table and columns: a model to begin with, and preprocessing that goes with it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import Listed, Suggested
from gradgraph.cli.key_values import value_of
from gradgraph.cli.sections import placed
from gradgraph.errors import CheckpointError, DataError, shown

if TYPE_CHECKING:
    import onnx

    from gradgraph.preprocess import Preprocessing
    from gradgraph.preprocess.drift import Drift
    from gradgraph.preprocess.frames import Frame
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.data_names import DataNames
    from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")

LOOKED_AT = 1000  # rows, to see whether numbers are codes


def _kinds(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """``zip=category``, or a JSON object with the arguments of a kind; a name may have ``=`` in it."""
    found = {}
    for text in given:
        parts = re.fullmatch(r"(.+?)=(\{.*\}|[^={}]+)", text, re.DOTALL)
        if parts is None:
            raise click.BadParameter(f"'{shown(text)}' should be NAME=KIND, such as zip=category", ctx, parameter)
        found[parts[1]] = value_of(parts[2])
    return found


START = placed(
    "model",
    "--model",
    "start",
    key="start",
    type=Listed("tables.starting_models:MODELS"),
    metavar="NAME",
    help="Begin with this network for the columns of a table, in place of MODEL; --target says what it predicts.",
)
PREPROCESS = placed(
    "data",
    "--preprocess",
    type=click.Choice(["auto"]),
    help="Learn from the table of --data how its columns become numbers (scaling, gaps, categories, dates, text), and "
    "let the exported model take the columns themselves. With --model this is always so.",
)
COLUMN = placed(
    "data",
    "--column",
    of="",
    multiple=True,
    callback=_kinds,
    type=Suggested("preprocess.column_kinds:KINDS"),
    metavar="NAME=KIND",
    help="A column that is not what it looks like, such as zip=category; or with arguments, "
    """notes='{"kind": "text", "buckets": 256}'; repeatable.""",
)


DRIFT = click.option(
    "--drift",
    is_flag=True,
    help="Print, for each column of a table, the share of values that are missing or that training data never had.",
)


@dataclass(frozen=True)
class DriftTable:
    """How the columns of a table differ from those of the training data."""

    found: Drift

    def __str__(self) -> str:
        from gradgraph.runtime.saved.printed import text_table

        return "\n".join(text_table(self.found.as_rows(), (0, 1, 6)))

    def as_data(self) -> list[dict[str, Any]]:
        """Plain data, for JSON."""
        return self.found.as_data()


def drift_of(names: DataNames, data: Path, asked: bool, as_json: bool) -> dict[str, DriftTable]:
    """The table of ``--drift``, under that name; with ``--json`` wherever there is one.

    Raises:
        DataError: it is asked for, and the model knows no columns, or the data are no table.
    """
    from gradgraph.runtime.data.tables import is_table_file, read_table

    if names.preprocess is not None and is_table_file(data):
        is_wanted = asked or as_json
        return {"drift": DriftTable(names.preprocess.drift(read_table(data, known=names)))} if is_wanted else {}
    if asked:
        raise DataError("--drift compares a table with the columns that a model was trained on (with --model, or "
                        "--preprocess auto), and there is no such table or no such model; leave it out")  # fmt: skip
    return {}


def learnt(data: Path, target: Sequence[str], kinds: Mapping[str, Any], index: bool) -> Preprocessing:
    """The preprocessing that the table in a file gives; raises DataError."""
    from gradgraph.preprocess import fit
    from gradgraph.preprocess.column_kinds import Category, Number
    from gradgraph.preprocess.frames import Frame
    from gradgraph.runtime.data.tables import codes_in, is_table_file, read_table

    if not is_table_file(data):
        raise DataError(f"'{shown(data)}' is no table whose columns could be preprocessed; give a .csv, .parquet, …")
    table = Frame(read_table(data))
    said = {name: kind if isinstance(kind, str) else kind.get("kind") for name, kind in kinds.items()}
    table = _with_codes(table, data, [name for name, kind in said.items() if kind == Category.name and name in table])
    plan = fit(table, target, kinds, index=index)
    labels = [name for name, learnt in plan.targets.items() if learnt.classes and name not in kinds]
    if codes_in(data, labels):
        plan = fit(_with_codes(table, data, labels), target, kinds, index=index)
    numbers = [name for name, kind in plan.read.items() if isinstance(kind, Number) and name not in kinds]
    for name in codes_in(data, numbers, rows=LOOKED_AT):
        log.warning("the column '%s' is read as numbers, and some begin with 0 or have more digits than floats keep; "
                    "if they are codes, add --column %s=category, or %s=drop", *[shown(name)] * 3)  # fmt: skip
    for line in str(plan).split("\n"):
        output.say(f"  {line}")
    return plan


def _with_codes(table: Frame, data: Path, names: Sequence[str]) -> Frame:
    """``table`` with those of the columns as text that hold codes in the file."""
    from gradgraph.runtime.data.tables import codes_in

    for name, texts in codes_in(data, names).items():
        table = table.with_column(name, texts)
    return table


def starting_model(
    name: str, data: Path, target: Sequence[str], kinds: Mapping[str, Any], begun: Path | None
) -> tuple[onnx.ModelProto, Any]:
    """A model to begin with for the table in a file, and its loss.

    Args:
        name: of the model.
        data, target, kinds: as for :func:`learnt`.
        begun: the step of a run that goes on, whose columns are those of the model.
    """
    from gradgraph.step.step import Step
    from gradgraph.tables import INDEXED, MODELS, loss

    if not target:
        raise click.UsageError(f"--model {name} predicts a column of the table; name it with --target COLUMN")
    known = None if begun is None else Step.load(begun).manifest.data.preprocess
    plan = known or learnt(data, target, kinds, name in INDEXED)
    return MODELS[name](plan), loss(plan)


def preprocess(trainer: Trainer, data: Path, target: Sequence[str], kinds: Mapping[str, Any]) -> None:
    """Let a trainer that has no preprocessing learn it from the table in a file."""
    from gradgraph.step.column_assignment import compared
    from gradgraph.step.data_names import DataNames

    if trainer.names.preprocess is not None:  # it goes on
        return
    manifest = trainer.manifest
    index = any(len(spec.shape) == 2 and "int" in spec.dtype for spec in manifest.inputs)
    plan = learnt(data, target or [t.name for t in compared(manifest.targets)], kinds, index)
    trainer.names = DataNames(preprocess=plan)


def check_same_data(trainer: Trainer, step: Step) -> None:
    """Raise CheckpointError if a run goes on whose starting model was made for other data."""
    if trainer.names.preprocess != step.manifest.data.preprocess:
        raise CheckpointError(
            "the run began with other data, of which its model was made; go on with those, or from a run folder"
        )
