"""Images whose paths are listed in a table, with labels of any kind in another column."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradgraph.arguments import PATH, TEXT, checked
from gradgraph.data.arrays.batch import LABELS
from gradgraph.data.images.image_folders import SUFFIXES, Images
from gradgraph.data.images.image_form import KINDS, Augment, ImageForm, Layout, Order, form_of
from gradgraph.data.images.image_labels import Labels
from gradgraph.data.preprocess.frames import is_table
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.tables import column_of, columns_in, first_row, is_table_file, read_table, written_in
from gradgraph.errors import DataError, listed, row_at, shown, suggestion

_THE_TABLE = "the table"  # how messages call a table that is not a file


class ImageTable(Images):
    """A dataset of pairs (array, label); see :func:`image_table`.

    Attributes:
        files: the image files.
        labels: class indices or numbers, if the label column can be determined without a model; otherwise None.
        classes: class names, if labels are text.
    """

    def __init__(
        self, table: Any, where: str, path: str, label: str | None, root: Path, form: ImageForm, augment: Augment,
        threads: int, written: Any = None,
    ) -> None:  # fmt: skip
        values = column_of(table, path)
        odd = next((i for i, value in enumerate(values) if not isinstance(value, str) or not value), None)
        if odd is not None:
            raise DataError(
                f"the column '{shown(path)}' of {where} has no path in {row_at(odd, where != _THE_TABLE)}; add the "
                "path of an image"
            )
        others = {name: column_of(table, name) for name in columns_in(table) if name != path}
        if label is not None and label not in others:
            raise DataError(f"{where} has no column '{shown(label)}'{suggestion(label, others)}")
        self._others, self._label, self._written = others, label, written
        super().__init__(where, [root / value for value in values], None, form, augment, threads)
        column = self._column("", {})
        self.labelled = None if column is None else self._labels_in(column)

    def _labels_of(self, target: str, known: DataNames) -> tuple[Labels, dict[str, list[str]]]:
        column = self._column(target, known.columns)
        if column is None:
            raise DataError(
                f"none of the columns of {self.where} ({listed(self._others) or 'only paths'}) is clearly the target "
                f"'{shown(target)}'",
                remedy="name the column: image_table(table, label='…')",
                shell="name the column with --target",
            )
        return self._labels_in(column), {target: [column]}

    def _column(self, target: str, known: Mapping[str, Sequence[str]]) -> str | None:
        """Return the name of the label column for a target; None if it is ambiguous.

        Candidates, in this order: the user's choice, the label column of the training data, a column named like the
        target, one with a common label name, and the only column besides the paths.
        """
        if self._label is not None:
            return self._label
        wanted = [*known.get(target, ()), target, *LABELS, "target"]
        usual = (name for want in wanted for name in self._others if want in (name, name.lower()))
        alone = next(iter(self._others)) if len(self._others) == 1 else None
        return next(usual, alone)

    def _labels_in(self, column: str) -> Labels:
        where = f"the column '{shown(column)}' of {self.where}"
        written = None if self._written is None else column_of(self._written, column)
        return Labels(where, self._others[column], written=written)


def is_image_table(path: Path) -> bool:
    """Whether the path is a table file whose first row contains the path of an image."""
    return is_table_file(path) and any(map(_names_image, first_row(path)))


def column_of_images(table: Any) -> str | None:
    """Return the name of the column whose first row is the path of an image; None unless there is exactly one."""
    columns = [name for name in columns_in(table) if any(map(_names_image, column_of(table, name)[:1].tolist()))]
    return columns[0] if len(columns) == 1 else None


def _names_image(value: Any) -> bool:
    return isinstance(value, str) and value.lower().endswith(SUFFIXES)


def _table_at(table: Any) -> tuple[Any, str, Path]:
    """Return the loaded table, its description for messages, and the folder of its relative paths."""
    if is_table(table):
        return table, _THE_TABLE, Path()
    if not PATH.fits(table) or not is_table_file(Path(table)):
        raise DataError(f"'{shown(table)}' is not a table; pass a DataFrame, or the path of a .csv, .parquet, …")
    return read_table(Path(table)), f"'{shown(table)}'", Path(table).parent


@checked(path=TEXT.or_none(), label=TEXT.or_none(), root=PATH.or_none(), **KINDS)
def image_table(
    table: Any,
    path: str | None = None,
    label: str | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    size: tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: Layout | None = None,
    shorter: int | None = None,
    resample: str | None = None,
    order: Order | None = None,
    scale: float | None = None,
    augment: Augment = None,
    threads: int | None = None,
) -> ImageTable:
    """Read images listed in a table, for ``fit``, ``evaluate`` and ``predict``.

    ::

        photos = gg.image_table("labels.csv", "path", "label", augment="flip")
        trainer.fit(photos, epochs=3, batch_size=32)

    Text labels are matched by name with the model's classes. Integers are class indices, unless the classes have
    integers as names; other numbers are regression targets. Images are read as by :func:`gradgraph.image_folder`.

    Args:
        table: a DataFrame, or the path of a ``.csv``, ``.parquet``, …
        path: name of the column of paths; by default the only one with paths of images.
        label: name of the label column; by default the one used in training, the one named like the target, ``label``
            or ``class``, or the only other one.
        root: the folder to which paths are relative; by default the folder of the table file.
        size, mean, std, layout, shorter, resample, order, scale, augment, threads: as for
            :func:`gradgraph.image_folder`.

    Raises:
        DataError: if the table or a column does not exist.
    """
    read, where, folder = _table_at(table)
    names = columns_in(read)
    if path is not None and path not in names:
        raise DataError(f"{where} has no column '{shown(path)}'{suggestion(path, names)}")
    column = column_of_images(read) if path is None else path
    if column is None:
        raise DataError(
            f"none of the columns of {where} ({listed(names)}) is clearly the column of image paths",
            remedy="name the column: image_table(table, path='…')",
            shell="keep exactly one column with paths of images",
        )
    form = form_of(size, mean, std, layout, shorter, resample, order, scale)
    begins, workers = folder if root is None else Path(root), threads or min(8, os.cpu_count() or 1)
    return ImageTable(read, where, column, label, begins, form, augment, workers, written_in(table))
