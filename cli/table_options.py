"""Options of ``gradgraph train`` for tables: a starting model, and preprocessing of columns."""

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

LOOKED_AT = 1000  # rows to inspect for numeric codes


def _kinds(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Parse values such as ``zip=category``, or with a JSON object as the kind, into a dict of kinds by column."""
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
    help="Train this network on the columns of a table, in place of MODEL; --target is required.",
)
PREPROCESS = placed(
    "data",
    "--preprocess",
    type=click.Choice(["auto"]),
    help="Learn the preprocessing of the columns of --data (scaling, imputation, categories, dates, text), and make "
    "it part of the exported model. Always on with --model.",
)
COLUMN = placed(
    "data",
    "--column",
    of="",
    multiple=True,
    callback=_kinds,
    type=Suggested("preprocess.column_kinds:KINDS"),
    metavar="NAME=KIND",
    help="Column kind, if the detected one is wrong, such as zip=category; or with arguments, "
    'notes=\'{"kind": "text", "buckets": 256}\'; repeatable.',
)


DRIFT = click.option(
    "--drift",
    is_flag=True,
    help="For each column of a table, print the share of missing values and of values outside the training data.",
)


@dataclass(frozen=True)
class DriftTable:
    """A printable comparison of the columns of a table with the columns of the training data."""

    found: Drift

    def __str__(self) -> str:
        from gradgraph.runtime.saved.printed import text_table

        return "\n".join(text_table(self.found.as_rows(), (0, 1, 6)))

    def as_data(self) -> list[dict[str, Any]]:
        """Return the comparison as plain data for JSON."""
        return self.found.as_data()


def drift_of(names: DataNames, data: Path, asked: bool, as_json: bool) -> dict[str, DriftTable]:
    """Return the table of ``--drift`` as ``{"drift": table}``; empty if it is not requested.

    Args:
        names: the ``DataNames`` of the model, which contain the preprocessing.
        data: the path of the data.
        asked: whether ``--drift`` was given.
        as_json: whether ``--json`` was given; then the table is returned whenever it can be computed.

    Raises:
        DataError: if ``--drift`` was given, but the model has no preprocessing of columns, or the data are not a table.
    """
    from gradgraph.runtime.data.tables import is_table_file, read_table

    if names.preprocess is not None and is_table_file(data):
        is_wanted = asked or as_json
        return {"drift": DriftTable(names.preprocess.drift(read_table(data, known=names)))} if is_wanted else {}
    if asked:
        raise DataError("--drift requires a table, and a model trained with --model or --preprocess auto, which has "
                        "statistics of its training columns; omit --drift")  # fmt: skip
    return {}


def learnt(data: Path, target: Sequence[str], kinds: Mapping[str, Any], index: bool) -> Preprocessing:
    """Learn preprocessing from the table in a file, print it, and return it.

    Args:
        data: the path of the table.
        target: the names of the target columns.
        kinds: the kinds of columns given by ``--column``.
        index: whether the model has an input for indices of categories.

    Raises:
        DataError: if the file does not exist, or is not a table.
    """
    from gradgraph.preprocess import fit
    from gradgraph.preprocess.column_kinds import Category, Number
    from gradgraph.preprocess.frames import Frame
    from gradgraph.runtime.data.arrays import check_exists
    from gradgraph.runtime.data.tables import codes_in, is_table_file, read_table

    if str(data) != "-":
        check_exists(data)
    if not is_table_file(data):
        raise DataError(
            f"'{shown(data)}' is not a table, so there are no columns to preprocess; pass a .csv, .parquet, …"
        )
    table = Frame(read_table(data))
    said = {name: kind if isinstance(kind, str) else kind.get("kind") for name, kind in kinds.items()}
    table = _with_codes(table, data, [name for name, kind in said.items() if kind == Category.name and name in table])
    plan = fit(table, target, kinds, index=index)
    labels = [name for name, learnt in plan.targets.items() if learnt.classes and name not in kinds]
    if codes_in(data, labels):
        plan = fit(_with_codes(table, data, labels), target, kinds, index=index)
    numbers = [name for name, kind in plan.read.items() if isinstance(kind, Number) and name not in kinds]
    for name in codes_in(data, numbers, rows=LOOKED_AT):
        log.warning("the column '%s' is read as numbers, but some values begin with 0 or have more digits than a float "
                    "can store; if they are codes, add --column %s=category, or %s=drop",
                    *[shown(name)] * 3)  # fmt: skip
    for line in str(plan).split("\n"):
        output.say(f"  {line}")
    return plan


def _with_codes(table: Frame, data: Path, names: Sequence[str]) -> Frame:
    """Return ``table`` with the columns ``names`` as text where the file ``data`` contains codes, such as "007"."""
    from gradgraph.runtime.data.tables import codes_in

    for name, texts in codes_in(data, names).items():
        table = table.with_column(name, texts)
    return table


def starting_model(
    name: str, data: Path, target: Sequence[str], kinds: Mapping[str, Any], begun: Path | None
) -> tuple[onnx.ModelProto, Any]:
    """Return a starting model for the table in a file, and its loss.

    Args:
        name: the name of the model.
        data, target, kinds: as for :func:`learnt`.
        begun: the step folder of a resumed run, whose preprocessing is used again.
    """
    from gradgraph.step.step import Step
    from gradgraph.tables import INDEXED, MODELS, loss

    if not target:
        raise click.UsageError(f"--model {name} predicts a column of the table; name it with --target COLUMN")
    known = None if begun is None else Step.load(begun).manifest.data.preprocess
    plan = known or learnt(data, target, kinds, name in INDEXED)
    return MODELS[name](plan), loss(plan)


def preprocess(trainer: Trainer, data: Path, target: Sequence[str], kinds: Mapping[str, Any]) -> None:
    """Learn preprocessing from the table in a file, and set it in ``trainer.names``, unless it is already set."""
    from gradgraph.step.column_assignment import compared
    from gradgraph.step.data_names import DataNames

    if trainer.names.preprocess is not None:  # the run is resumed
        return
    manifest = trainer.manifest
    index = any(len(spec.shape) == 2 and "int" in spec.dtype for spec in manifest.inputs)
    plan = learnt(data, target or [t.name for t in compared(manifest.targets)], kinds, index)
    trainer.names = DataNames(preprocess=plan)


def check_same_data(trainer: Trainer, step: Step) -> None:
    """Raise CheckpointError if ``trainer``, loaded from a checkpoint, and ``step`` have different preprocessing."""
    if trainer.names.preprocess != step.manifest.data.preprocess:
        raise CheckpointError(
            "the checkpoint's model was made for other data; resume with the data of the first command, or resume from "
            "a run folder (gradgraph train FOLDER --resume)"
        )
