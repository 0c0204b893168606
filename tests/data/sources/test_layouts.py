"""The rows that a source gives are those of the array, however it lies in memory or in a file.

Every source, dtype and layout is held against ``array[rows]``; three axes of different lengths, so that no order of
the bytes but the right one gives the right numbers.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.data.arrays import numpy_files as arrays_module
from gradgraph.data.arrays.batch import BatchChecker
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.data.shards.shards import shards
from gradgraph.data.sources.in_order import in_order
from gradgraph.data.sources.sources import Order, as_source
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

pytestmark = pytest.mark.any_kernels

Array = np.ndarray[Any, Any]
ROWS, SIZE = 7, 3
SPECS = [
    TensorSpec("x", "float32", ("batch", 2, 5)),
    TensorSpec("flat", "float32", ("batch",)),
    TargetSpec("target", "int64", ("batch",), 10),
]


def _big(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder(">"))


def _spaced(array: Array) -> Array:
    wide = np.full((array.shape[0] * 2, *array.shape[1:]), 9, array.dtype)
    wide[::2] = array
    return wide[::2]


def _inner(array: Array) -> Array:
    """A part of wider rows."""
    wide = np.full((array.shape[0], *(n + 3 for n in array.shape[1:])), 9, array.dtype)
    part = wide[(slice(None), *(slice(1, n + 1) for n in array.shape[1:]))]
    part[...] = array
    return part


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "axes moved": lambda a: np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 0, -1)), -1, 0),
    "backwards": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "Fortran backwards": lambda a: np.asfortranarray(a[::-1])[::-1],
    "every second row": _spaced,
    "part of wider rows": _inner,
    "big-endian": _big,
    "big-endian Fortran": lambda a: np.asfortranarray(_big(a)),
}
DTYPES = ["float32", "float64", "float16", "int64", "int32", "uint8", "bool"]


def _columns(dtype: str, layout: str) -> dict[str, Array]:
    """Numbers that each dtype holds exactly; labels are bool nowhere."""
    lay = LAYOUTS[layout]
    x = np.arange(ROWS * 10).reshape(ROWS, 2, 5) * 37 % (2 if dtype == "bool" else 127)
    labels = np.arange(ROWS) * 3 % 10
    kept = "int64" if np.dtype(dtype).kind not in "iu" else dtype
    return {"x": lay(x.astype(dtype)), "flat": lay(x[:, 0, 1].astype(dtype)), "target": lay(labels.astype(kept))}


def _npy_folder(columns: Mapping[str, Array], path: Path) -> Path:
    for name, array in columns.items():
        np.save(path / f"{name}.npy", array)
    return path


def _npz(columns: Mapping[str, Array], path: Path, save: Callable[..., None] = np.savez) -> Path:
    save(path / "data.npz", **columns)
    return path / "data.npz"


def _shards(columns: Mapping[str, Array], path: Path) -> Any:
    with tarfile.open(path / "data.tar", "w") as tar:
        for i in range(ROWS):
            for name, array in columns.items():
                buffer = io.BytesIO()
                np.save(buffer, array[i])
                info = tarfile.TarInfo(f"{i:06}.{name}.npy")
                info.size = buffer.tell()
                tar.addfile(info, io.BytesIO(buffer.getvalue()))
    return shards(path / "data.tar")


class Samples:
    def __init__(self, columns: Mapping[str, Array]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: array[i] for name, array in self.columns.items()}


def _mapped(columns: Mapping[str, Array], path: Path) -> dict[str, Array]:
    _npy_folder(columns, path)
    return {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in columns}


def _batches(columns: Mapping[str, Array], path: Path) -> list[dict[str, Array]]:
    return [{n: a[i : i + SIZE] for n, a in columns.items()} for i in range(0, ROWS, SIZE)]


SOURCES: dict[str, Callable[[Mapping[str, Array], Path], Any]] = {
    "dict": lambda columns, path: dict(columns),
    "tuple": lambda columns, path: tuple(columns.values()),
    "npz": _npz,
    "compressed npz": lambda columns, path: _npz(columns, path, np.savez_compressed),
    "folder": _npy_folder,
    "large folder": _npy_folder,
    "mapped": _mapped,
    "dataset": lambda columns, path: Samples(columns),
    "batches": _batches,
    "shards": _shards,
}
FILES = ["npz", "compressed npz", "folder", "large folder", "shards"]


def _joined(batches: Iterator[Mapping[str, Any]], checker: BatchChecker) -> dict[str, Array]:
    seen = [{name: np.array(value) for name, value in checker(batch).items()} for batch in batches]
    return {name: np.concatenate([batch[name] for batch in seen]) for name in seen[0]}


def _check_rows(found: Mapping[str, Array], true: Mapping[str, Array], order: Any, what: tuple[str, ...]) -> None:
    for spec in SPECS:
        rows = found[spec.name]
        wanted = np.array([true[spec.name][i].tolist() for i in order])
        assert rows.dtype == np.dtype(spec.dtype) or what[0] == "in order", what
        assert rows.shape == wanted.shape and (rows == wanted).all(), (*what, spec.name)


@pytest.mark.sweep(0.24)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_rows_of_the_array(
    source: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "large folder":
        monkeypatch.setattr(arrays_module, "IN_MEMORY", 0)
    checker = BatchChecker(SPECS)
    for dtype in DTYPES:
        true = _columns(dtype, layout)
        path = tmp_path / dtype
        path.mkdir()
        data = SOURCES[source](true, path)
        for shuffle in [False] if source in ("batches", "shards") else [False, True]:
            made = as_source(data, checker, Order(SIZE, shuffle))
            indices = made.order.indices(0, ROWS) if shuffle else range(ROWS)  # type: ignore[attr-defined]
            _check_rows(_joined(made.batches(0), checker), true, indices, (source, layout, dtype, str(shuffle)))


@pytest.mark.sweep(0.49)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", FILES)
def test_what_is_read_once_gives_the_rows_of_the_array(
    source: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "large folder":
        monkeypatch.setattr(arrays_module, "IN_MEMORY", 0)
    for dtype in DTYPES:
        true = _columns(dtype, layout)
        path = tmp_path / dtype
        path.mkdir()
        data = SOURCES[source](true, path)
        with in_order(data, {s.name: s for s in SPECS}) as ordered:
            batches = list(ordered.batches(SIZE))
        found = {s.name: np.concatenate([batch[s.name] for batch in batches]) for s in SPECS}
        _check_rows(found, true, range(ROWS), ("in order", source, layout, dtype))


@pytest.mark.sweep(0.13)
@pytest.mark.parametrize("layout", ["Fortran", "transposed", "backwards", "big-endian Fortran"])
@pytest.mark.parametrize("source", ["dict", "npz", "folder", "mapped"])
def test_a_trainer_computes_on_these_rows(source: str, layout: str, tmp_path: Path) -> None:
    true = handmade.points(ROWS)
    laid = {name: LAYOUTS[layout](array) for name, array in true.items()}
    step, data = handmade.classifier(), SOURCES[source](laid, tmp_path)
    trainer, again = Trainer(step, device="cpu"), Trainer(step, device="cpu")
    np.testing.assert_equal(trainer.evaluate(data, SIZE), trainer.evaluate(true, SIZE))
    np.testing.assert_equal(trainer.predict(data, SIZE), trainer.predict(true, SIZE))
    trainer.fit(data, 1, SIZE, progress=False)
    again.fit(true, 1, SIZE, progress=False)
    np.testing.assert_equal(trainer.evaluate(true), again.evaluate(true))
