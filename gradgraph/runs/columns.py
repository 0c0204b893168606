"""Tabular data of a run: a starting model, and preprocessing of columns."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradgraph.errors import CheckpointError, DataError, shown

if TYPE_CHECKING:
    import onnx

    from gradgraph.data.preprocess import Preprocessing
    from gradgraph.data.preprocess.frames import Frame
    from gradgraph.runtime.trainer import Trainer
    from gradgraph.step.step import Step

log = logging.getLogger("gradgraph.runs")

LOOKED_AT = 1000  # rows to inspect for numeric codes


def learnt(data: Path, target: Sequence[str], kinds: Mapping[str, Any], index: bool) -> Preprocessing:
    """Fit the preprocessing to the table in a file, log it, and return it.

    Args:
        data: the path of the table.
        target: the names of the target columns.
        kinds: the column kinds given by ``--column``, by column name.
        index: whether the model has an input for category indices.

    Raises:
        DataError: the file does not exist or is not a table.
    """
    from gradgraph.data.arrays.numpy_files import check_exists
    from gradgraph.data.preprocess import fit
    from gradgraph.data.preprocess.column_kinds import Category, Number
    from gradgraph.data.preprocess.frames import Frame
    from gradgraph.data.tables import codes_in, is_table_file, read_table

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
        log.info("  %s", line)
    return plan


def _with_codes(table: Frame, data: Path, names: Sequence[str]) -> Frame:
    """Return ``table`` with the columns ``names`` as text where the file ``data`` contains codes, such as "007"."""
    from gradgraph.data.tables import codes_in

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
        begun: the step folder of a resumed run, to reuse its preprocessing; None for a new run.
    """
    from gradgraph.step.step import Step
    from gradgraph.tables import INDEXED, MODELS, loss

    known = None if begun is None else Step.load(begun).manifest.data.preprocess
    plan = known or learnt(data, target, kinds, name in INDEXED)
    return MODELS[name](plan), loss(plan)


def preprocess(trainer: Trainer, data: Path, target: Sequence[str], kinds: Mapping[str, Any]) -> None:
    """Fit the preprocessing to the table in a file and store it in ``trainer.names``, unless one is already there."""
    from gradgraph.data.record.column_assignment import compared
    from gradgraph.data.record.data_names import DataNames

    if trainer.names.preprocess is not None:  # a resumed run
        return
    manifest = trainer.manifest
    index = any(len(spec.shape) == 2 and "int" in spec.dtype for spec in manifest.inputs)
    plan = learnt(data, target or [t.name for t in compared(manifest.targets)], kinds, index)
    trainer.names = DataNames(preprocess=plan)


def check_same_data(trainer: Trainer, step: Step) -> None:
    """Raise CheckpointError if ``trainer``, loaded from a checkpoint, and ``step`` have different preprocessing."""
    if trainer.names.preprocess != step.manifest.data.preprocess:
        raise CheckpointError.of_options(
            "the checkpoint's model was made for other data; resume with the data of the first command, or resume from "
            "a run folder (gradgraph train FOLDER --resume)"
        )
