"""Writers of predictions to an ``.npz`` or as CSV, batch by batch."""

from __future__ import annotations

import csv
import io
import math
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.lib import format as npy

from gradgraph.errors import DataError, OutputError, escaped, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.files.paths import output_target
from gradgraph.runtime.execution.joining import Layout

Array = np.ndarray[Any, Any]
Batches = Iterable[tuple[int, Mapping[str, Array]]]
Shapes = dict[str, list[int]]
Layouts = Mapping[str, Layout]
Columns = Mapping[str, Sequence[str]]  # the column names of arrays added to the outputs

MOST_COLUMNS = 1000
CHUNK = 1 << 20


def writer_for(path: Path) -> Callable[[Path, Batches, int, Layouts, Columns], Shapes]:
    """Return the function for the suffix of ``path`` that writes batches of outputs and returns their shapes by name.

    Raises:
        OutputError: if the suffix is neither .npz nor .csv.
    """
    if str(path) == "-":
        return print_csv
    writers = {".npz": write_npz, ".csv": write_csv}
    if path.suffix not in writers:
        raise OutputError(f"'{shown(path)}' should end in .npz or .csv")
    return writers[path.suffix]


@dataclass
class _Plan:
    """The layout of an assembled output: its shape, and its sample axis (None if it has none).

    If ``once``, the array of the first batch is the whole output, as for a constant.
    """

    shape: list[int]
    axis: int | None
    once: bool

    @classmethod
    def of(cls, array: Array, rows: int, all_rows: int, layout: Layout) -> _Plan:
        axis, shape = layout.axis([(array, rows)]), [*array.shape]
        if axis is not None:
            shape[axis] = all_rows
            return cls(shape, axis, False)
        once = rows == all_rows or not layout.varies
        return cls(shape if once else [-(-all_rows // rows), *shape], None, once)

    def fits(self, array: Array, rows: int) -> bool:
        if self.axis is None:
            return list(array.shape) == (self.shape if self.once else self.shape[1:])
        return list(array.shape) == [*self.shape[: self.axis], rows, *self.shape[self.axis + 1 :]]


Part = tuple[_Plan, Array]


def _checked(batches: Batches, all_rows: int, layouts: Layouts, shapes: Shapes) -> Iterator[dict[str, Part]]:
    """Yield (plan, array) for each output of each batch by name; check its shape, and record it in ``shapes``."""
    plans: dict[str, _Plan] = {}
    for rows, found in batches:
        for name, array in found.items():
            if not isinstance(array, np.ndarray):
                raise DataError(f"the output '{shown(name)}' is not a tensor; select other outputs with --output")
            if name not in plans:
                plans[name] = _Plan.of(array, rows, all_rows, layouts[name])
                shapes[name] = plans[name].shape
            elif not plans[name].fits(array, rows):
                raise DataError(
                    f"the output '{shown(name)}' changes shape between batches ({list(array.shape)} for {rows} "
                    f"samples, which does not fit {shapes[name]}); pad the inputs to one length, or select other "
                    "outputs with --output"
                )
        yield {name: (plans[name], array) for name, array in found.items()}


# --- .npz ----------------------------------------------------------------------------------------------


def write_npz(path: Path, batches: Batches, rows: int, layouts: Layouts, added: Columns) -> Shapes:
    """Write an ``.npz`` atomically.

    Each output is first written to a temporary file, since the members of a zip file cannot grow in parallel.
    """
    shapes: Shapes = {}
    with tempfile.TemporaryDirectory(prefix=".gradgraph-", dir=output_target(path).parent) as folder:
        files: dict[str, _Growing] = {}
        for found in _checked(batches, rows, layouts, shapes):
            for name, (plan, array) in found.items():
                if name not in files:
                    if array.dtype.hasobject:
                        raise DataError(f"the output '{shown(name)}' is text, which an .npz cannot store; write a .csv")
                    files[name] = _Growing(Path(folder) / str(len(files)), plan, array.dtype)
                files[name].add(array)
        write_atomically(path, _zipped({name: file.path for name, file in files.items()}))
    return shapes


class _Growing:
    """A ``.npy`` file that is written in parts."""

    def __init__(self, path: Path, plan: _Plan, dtype: np.dtype[Any]) -> None:
        self.path, self._plan, self._done = path, plan, 0
        npy.open_memmap(path, "w+", dtype, tuple(plan.shape))

    def add(self, array: Array) -> None:
        """Write the array of the next batch."""
        if self._plan.once and self._done:
            return
        whole: Array = npy.open_memmap(self.path, "r+")  # opened for each batch, so that written pages are released
        whole = whole[np.newaxis] if self._plan.once else whole
        axis, part = (0, array[np.newaxis]) if self._plan.axis is None else (self._plan.axis, array)
        end = self._done + part.shape[axis]
        whole[(slice(None),) * axis + (slice(self._done, end),)] = part
        self._done = end


class _Pipe(io.RawIOBase):
    """A stream in memory to which a zip file is written; ``taken`` returns the bytes written since its last call."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _zipped(files: Mapping[str, Path]) -> Iterator[bytes]:
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w") as archive:
        for name, path in files.items():
            member = zipfile.ZipInfo(f"{name}.npy")
            with path.open("rb") as source, archive.open(member, "w", force_zip64=True) as target:
                while chunk := source.read(CHUNK):
                    target.write(chunk)
                    yield pipe.taken()
    yield pipe.taken()


# --- .csv ----------------------------------------------------------------------------------------------


def write_csv(path: Path, batches: Batches, rows: int, layouts: Layouts, added: Columns) -> Shapes:
    """Write a ``.csv`` atomically, with one line per sample; for outputs without a sample axis, one line per batch."""
    shapes: Shapes = {}
    write_atomically(path, (text.encode() for text in _lines(_checked(batches, rows, layouts, shapes), added)))
    return shapes


def print_csv(path: Path, batches: Batches, rows: int, layouts: Layouts, added: Columns) -> Shapes:
    """Print the lines of ``write_csv`` on stdout."""
    shapes: Shapes = {}
    for text in _lines(_checked(batches, rows, layouts, shapes), added):
        click.echo(text, nl=False)
    return shapes


def _lines(batches: Iterable[Mapping[str, Part]], added: Columns) -> Iterator[str]:
    names: list[str] = []
    for found in batches:
        columns = [_columns(name, *part, added.get(name, ())) for name, part in found.items()]
        if not names:
            names = [name for part, _ in columns for name in part]
            own = sum(len(part) for name, (part, _) in zip(found, columns, strict=True) if name not in added)
            if own > MOST_COLUMNS:
                raise OutputError(f"the outputs have {own:,} numbers per sample; write an .npz")
            yield _line(names)
        elif all(plan.once for plan, _ in found.values()):
            continue
        if len({len(lines) for _, lines in columns}) > 1:
            raise DataError("the outputs have different numbers of rows; choose one with --output, or write an .npz")
        for cells in zip(*(lines for _, lines in columns), strict=True):
            yield _line([str(cell) for part in cells for cell in part])


def _columns(name: str, plan: _Plan, array: Array, called: Sequence[str]) -> tuple[list[str], Array]:
    """Return the column names of an output, such as ``name``, ``name[0]`` or ``name[cat]``, and its rows."""
    rows = array[np.newaxis] if plan.axis is None else np.moveaxis(array, plan.axis, 0)
    inner = ["".join(f"[{i}]" for i in index) for index in np.ndindex(*rows.shape[1:])]
    inner = [f"[{column}]" for column in called] or ([""] if rows.shape[1:] == (1,) else inner)
    return [name + index for index in inner], rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _line(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([escaped(cell) for cell in cells])
    return text.getvalue()
