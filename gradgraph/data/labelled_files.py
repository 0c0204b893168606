"""Files with labels: in one folder per class, or listed in a table with labels of any kind in another column."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import PATH
from gradgraph.data.arrays.batch import LABELS, Array
from gradgraph.data.labels import Labels
from gradgraph.data.preprocess.frames import Frame, is_table
from gradgraph.data.record.classes import Classes
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TensorSpec, check_some
from gradgraph.data.tables import is_table_file, read_table, written_in
from gradgraph.errors import DataError, listed, row_at, shown, suggestion
from gradgraph.files.untrusted.regular import readable


@dataclass(frozen=True)
class FileKind:
    """A kind of file: the word for one in messages, and its suffixes in lower case."""

    noun: str
    suffixes: tuple[str, ...]

    def names(self, value: Any) -> bool:
        """Whether a value is the path of such a file, by its suffix."""
        return isinstance(value, str) and value.lower().endswith(self.suffixes)

    def __str__(self) -> str:
        return f"{self.noun}s ({', '.join(self.suffixes)})"


@dataclass(frozen=True)
class LabelledFiles:
    """Files, with a label for each in one or several columns.

    Attributes:
        where: the folder or table, for messages.
        path: its path; None for a data frame.
        files: the files.
        columns: the labels by column of the table; for class folders, a single column "".
        label: the column that the user chose.
        noun: the word for a file in messages.
    """

    where: str
    path: Path | None
    files: list[Path]
    noun: str
    columns: Mapping[str, Labels] = field(default_factory=dict)
    label: str | None = None

    @cached_property
    def alone(self) -> tuple[Array | None, list[str]]:
        """The labels as numbers, and the class names, if the label column is clear without the model's target."""
        column = self._column("", NO_NAMES)
        return (None, []) if column is None else self.columns[column].alone

    def names_for(self, target: TensorSpec, known: DataNames) -> DataNames:
        """Return the label column and the classes of a target; names in ``known`` take precedence.

        Raises:
            UnmatchedError: a class is not known from training.
            DataError: no column is clearly the target, or the step has fewer classes.
        """
        column = self._labels_of(target.name, known)
        _, classes = self.columns[column].matched(target, Classes.known(known, target.name))
        return DataNames({target.name: [column]} if column else {}).updated(classes.of(target.name))

    def targets(self, target: TensorSpec, known: DataNames) -> Array:
        """Return the rows of a target for all files; errors as for :meth:`names_for`."""
        column = self._labels_of(target.name, known)
        return self.columns[column].targets(target, Classes.known(known, target.name))

    def _labels_of(self, target: str, known: DataNames) -> str:
        column = self._column(target, known)
        if column is not None:
            return column
        if self.path is not None and self.path.is_dir():
            raise DataError(
                f"{self.where} has no subfolders of classes, so its {self.noun}s have no '{shown(target)}'; sort them "
                "into one folder per class, or pass a dataset with labels"
            )
        raise DataError(
            f"none of the columns of {self.where} ({listed(self.columns) or 'only paths'}) is clearly the target "
            f"'{shown(target)}'",
            remedy="name the column: label='…'",
            shell="name the column with --target",
        )

    def _column(self, target: str, known: DataNames) -> str | None:
        """Return the label column for a target; None if it is ambiguous.

        Candidates, in this order: the user's choice, the label column of the training data, a column named like the
        target, one with a usual name for labels, and the only column.
        """
        if self.label is not None:
            return self.label
        wanted = [*known.columns.get(target, ()), target, *sorted(LABELS), "target"]
        usual = (name for want in wanted for name in self.columns if want in (name, name.lower()))
        return next(usual, next(iter(self.columns)) if len(self.columns) == 1 else None)


# --- folders ------------------------------------------------------------------------------------------------------


def files_below(folder: Path, kind: FileKind) -> list[Path]:
    """Return the files of a kind in a folder and its subfolders, sorted; raise DataError if it cannot be read."""

    def refuse(error: OSError) -> None:
        raise error

    with readable(folder, "path"):
        found = [
            Path(root, name) for root, _, names in os.walk(folder, onerror=refuse) for name in names if kind.names(name)
        ]
    return sorted(found)


def labelled_folder(path: Path, kind: FileKind) -> LabelledFiles:
    """Read a folder with one subfolder per class; without subfolders, its own files have no labels.

    Classes are the sorted names of the subfolders. Files are sorted within them.

    Raises:
        DataError: the folder cannot be read, or it or one of its subfolders contains no files of this kind.
    """
    where = f"'{shown(path)}'"
    with readable(path, "path"):
        classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    found = {name: files_below(path / name, kind) for name in classes or [""]}
    if empty := [name for name, files in found.items() if not files]:
        there = f"the folders {listed(empty)} of {where} contain" if classes else f"{where} contains"
        raise DataError(f"{there} no {kind}; add some, or remove the empty folder")
    numbers = np.repeat(np.arange(len(found), dtype=np.int64), [len(files) for files in found.values()])
    labels = {"": Labels(where, numbers, classes)} if classes else {}
    return LabelledFiles(where, path, [file for files in found.values() for file in files], kind.noun, labels)


def is_folder_of(path: Path, kind: FileKind) -> bool:
    """Whether the path is a folder of files of this kind, or of subfolders of them."""
    try:
        folders = [path, *(p for p in path.iterdir() if p.is_dir())] if path.is_dir() else []
        return any(kind.names(p.name) for folder in folders for p in folder.iterdir())
    except OSError:  # such as a name that is too long; reading the path raises the error
        return False


# --- tables -------------------------------------------------------------------------------------------------------


def labelled_table(
    table: Any, path: str | None, label: str | None, root: str | os.PathLike[str] | None, kind: FileKind
) -> LabelledFiles:
    """Read a table of paths and labels.

    Args:
        table: a data frame, or the path of a table file.
        path: the column of paths; by default the only one whose first row is the path of such a file.
        label: the label column, if the user chose one.
        root: the folder of relative paths; by default that of the table file.
        kind: the kind of files.

    Raises:
        DataError: the table or a column does not exist, or a row has no path.
    """
    is_frame = is_table(table)
    if not is_frame and not (PATH.fits(table) and is_table_file(Path(table))):
        raise DataError(f"'{shown(table)}' is not a table; pass a data frame, or the path of a .csv, .parquet, …")
    read, where = (table, "the table") if is_frame else (read_table(Path(table)), f"'{shown(table)}'")
    frame = Frame(read)
    names = list(frame)
    for column in (path, label):
        if column is not None and column not in names:
            raise DataError(f"{where} has no column '{shown(column)}'{suggestion(column, names)}")
    if names:
        check_some(len(frame[names[0]]), f"{where} is")
    of_paths = column_of_paths(frame, kind) if path is None else path
    if of_paths is None:
        raise DataError(
            f"none of the columns of {where} ({listed(names)}) is clearly the column of {kind.noun} paths",
            remedy="name the column: path='…'",
            shell=f"keep exactly one column with paths of {kind.noun}s",
        )
    values = frame[of_paths].tolist()
    odd = next((i for i, value in enumerate(values) if not isinstance(value, str) or not value), None)
    if odd is not None:
        row = row_at(odd, in_file=not is_frame)
        raise DataError(f"the column '{shown(of_paths)}' of {where} has no path in {row}; add it, or drop the row")
    written, columns = written_in(table), dict[str, Labels]()
    for name in names:
        if name != of_paths:
            texts = None if written is None else Frame(written)[name]
            columns[name] = Labels(f"the column '{shown(name)}' of {where}", frame[name], written=texts)
    at = None if is_frame else Path(table)
    begins = Path(root) if root is not None else Path() if at is None else at.parent
    return LabelledFiles(where, at, [begins / value for value in values], kind.noun, columns, label)


def column_of_paths(table: Any, kind: FileKind) -> str | None:
    """Return the only column whose first row is the path of a file of this kind; None unless there is exactly one."""
    frame = Frame(table)
    columns = [name for name in frame if any(map(kind.names, frame[name][:1].tolist()))]
    return columns[0] if len(columns) == 1 else None
