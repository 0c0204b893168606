"""Writing of predictions while they are made: to an ``.npz``, or as CSV."""

from __future__ import annotations

import csv
import io
import math
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.lib import format as npy

from gradgraph.atomic import write_atomically
from gradgraph.errors import DataError, OutputError, escaped, shown
from gradgraph.paths import output_target

Array = np.ndarray[Any, Any]
Batches = Iterable[tuple[int, Mapping[str, Array]]]
Shapes = dict[str, list[int]]

MOST_COLUMNS = 1000
CHUNK = 1 << 20


def writer_for(path: Path) -> Callable[[Path, Batches, int], Shapes]:
    """What writes batches of outputs to ``path`` and returns their shapes, given how many samples there are.

    Raises:
        OutputError: the name does not say how.
    """
    if str(path) == "-":
        return print_csv
    writers = {".npz": write_npz, ".csv": write_csv}
    if path.suffix not in writers:
        raise OutputError(f"'{shown(path)}' should end in .npz or .csv")
    return writers[path.suffix]


def _checked(batches: Batches, all_rows: int, shapes: Shapes) -> Iterator[Mapping[str, Array]]:
    """The outputs of batches that can be put together; ``shapes`` receives those of the whole."""
    for rows, found in batches:
        for name, array in found.items():
            if not isinstance(array, np.ndarray):
                raise DataError(f"the output '{shown(name)}' is no tensor; choose others with --output")
            if rows < all_rows and (array.ndim == 0 or len(array) != rows):
                raise DataError(
                    f"the output '{shown(name)}' has no leading axis of samples, so batches cannot be put together; "
                    f"add --batch-size {all_rows}, or choose others with --output"
                )
            whole = [all_rows, *array.shape[1:]] if rows < all_rows else [*array.shape]
            if shapes.setdefault(name, whole) != whole:
                raise DataError(
                    f"the output '{shown(name)}' has another shape in each batch ({shapes[name][1:]} and {whole[1:]} "
                    "for each sample); pad the inputs to one length, or choose others with --output"
                )
        yield found


# --- .npz ----------------------------------------------------------------------------------------------


def write_npz(path: Path, batches: Batches, rows: int) -> Shapes:
    """Write to an ``.npz``, atomically; outputs grow in files beside it first, as one follows the other in a zip."""
    shapes: Shapes = {}
    with tempfile.TemporaryDirectory(prefix=".gradgraph-", dir=output_target(path).parent) as folder:
        files: dict[str, Path] = {}
        for found in _checked(batches, rows, shapes):
            for name, array in found.items():
                if name not in files:
                    files[name] = Path(folder) / str(len(files))
                    files[name].write_bytes(_header(name, array.dtype, shapes[name]))
                with files[name].open("ab") as file:
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        write_atomically(path, _zipped(files))
    return shapes


def _header(name: str, dtype: np.dtype[Any], shape: list[int]) -> bytes:
    if dtype.hasobject:
        raise DataError(f"the output '{shown(name)}' is text, which an .npz cannot hold; write a .csv")
    head = io.BytesIO()
    description = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
    npy.write_array_header_1_0(head, description)
    return head.getvalue()


class _Pipe(io.RawIOBase):
    """What a zip file is written to and read from at once."""

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


def write_csv(path: Path, batches: Batches, rows: int) -> Shapes:
    """Write one line per sample, atomically."""
    shapes: Shapes = {}
    write_atomically(path, (text.encode() for text in _lines(_checked(batches, rows, shapes))))
    return shapes


def print_csv(path: Path, batches: Batches, rows: int) -> Shapes:
    """Likewise, on stdout."""
    shapes: Shapes = {}
    for text in _lines(_checked(batches, rows, shapes)):
        click.echo(text, nl=False)
    return shapes


def _lines(batches: Iterable[Mapping[str, Array]]) -> Iterator[str]:
    names: list[str] = []
    for found in batches:
        columns = [_columns(name, array) for name, array in found.items()]
        if not names:
            names = [name for part, _ in columns for name in part]
            if len(names) > MOST_COLUMNS:
                raise OutputError(f"the outputs have {len(names):,} numbers for each sample; write an .npz")
            yield _line(names)
        if len({len(lines) for _, lines in columns}) > 1:
            raise DataError("the outputs have different numbers of rows; choose one with --output, or write an .npz")
        for cells in zip(*(lines for _, lines in columns), strict=True):
            yield _line([str(cell) for part in cells for cell in part])


def _columns(name: str, array: Array) -> tuple[list[str], Array]:
    """``name`` or ``name[0]``, ``name[1]``, …, and a line of cells for each sample."""
    if array.ndim == 0:
        return [name], array.reshape(1, 1)
    lines = array.reshape(len(array), math.prod(array.shape[1:]))
    inner = ["".join(f"[{i}]" for i in index) for index in np.ndindex(*array.shape[1:])]
    return [name + index for index in inner], lines


def _line(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([escaped(cell) for cell in cells])
    return text.getvalue()
