"""Sources of batches: arrays, datasets and iterables in one interface."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import WHOLE, described
from gradgraph.data.annotations import reading
from gradgraph.data.arrays.batch import Array, Batch, BatchChecker, Known, as_column, check_range, check_uncut, to_array
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.data.arrays.remedies import check_counts, for_batch
from gradgraph.data.arrays.rows import Rows, Table
from gradgraph.data.arrays.stored import StoredArray
from gradgraph.data.dataset import Loadable
from gradgraph.data.images.image_files import IMAGES
from gradgraph.data.images.labelled_images import image_folder, image_table, is_image_folder
from gradgraph.data.labelled_files import FileKind, column_of_paths, is_folder_of
from gradgraph.data.prefetch import prefetched
from gradgraph.data.preprocess.frames import Frame, is_table
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.matching import Declared, check_same
from gradgraph.data.record.specs import TargetSpec, TensorSpec, check_some
from gradgraph.data.shards.shards import is_shards, shards
from gradgraph.data.shuffling import permutation
from gradgraph.data.sounds import SOUNDS, folder, table
from gradgraph.data.sources.map_style import MapStyle
from gradgraph.data.tables import first_row, is_table_file, read_table
from gradgraph.errors import DataError, counted, shown
from gradgraph.files.mapped import is_mapped


@dataclass(frozen=True)
class Order:
    """The order of samples, and their division into batches.

    Attributes:
        batch_size, shuffle, drop_last: as for ``Trainer.fit``.
        seed: seed of the order of samples.
        fills: whether the caller pads an incomplete last batch to a fixed batch size.
        augments: whether datasets augment their samples.
        rank, ranks: this process, and the number of processes that share each batch.
    """

    batch_size: int = 32
    shuffle: bool = False
    drop_last: bool = False
    seed: int = 0
    fills: bool = False
    augments: bool = True
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        check_counts(batch_size=self.batch_size)
        if not WHOLE.fits(self.seed):
            raise DataError(f"the seed is {described(self.seed)}; pass a signed 64-bit integer")

    def batch_count(self, rows: int) -> int:
        """Return the number of batches of an epoch of ``rows`` samples."""
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    @property
    def size(self) -> int:
        """The number of samples of a full batch for this process."""
        return self.size_of(self.batch_size)

    def size_of(self, rows: int) -> int:
        """Return this process's number of samples in a batch of ``rows`` samples over all processes, at least 1.

        A process without a sample of its own loads a sample of another process.
        """
        return max(1, -(-(rows - self.rank) // self.ranks))

    def lacks(self, batch: int, rows: int) -> bool:
        """Whether this process has no sample of its own in batch ``batch`` of an epoch of ``rows`` samples."""
        return rows - batch * self.batch_size <= self.rank

    def indices(self, epoch: int, rows: int) -> Array | None:
        """Return the indices of this process's samples in the order of an epoch; None means 0, 1, 2, …"""
        whole = permutation(self.seed, epoch, rows) if self.shuffle else None
        return whole if self.ranks == 1 else self.share(np.arange(rows) if whole is None else whole)

    def share(self, indices: Array) -> Array:
        """Return this process's sample indices: every N-th index of each batch of an epoch's ``indices``."""
        if self.ranks == 1:
            return indices
        full = len(indices) // self.batch_size * self.batch_size
        own = indices[:full].reshape(-1, self.batch_size)[:, self.rank :: self.ranks].ravel()
        rest = indices[full:]
        last = rest[self.rank :: self.ranks] if len(rest) > self.rank else rest[:1]
        return np.concatenate([own, last])


class Source(ABC):
    """Data that are read in batches for a step: the protocol of every kind of data.

    Attributes:
        names: the names of columns and classes that were read from the data.
        rows: number of samples; None if unknown.
        batches_per_epoch: number of batches per epoch; None if unknown.
        shapes: shapes of all batches but the last, by name; None if unknown.
        files: the samples' files, if each is a file.
    """

    names: DataNames
    rows: int | None = None
    batches_per_epoch: int | None = None
    shapes: dict[str, tuple[int, ...]] | None = None
    files: Sequence[Path] = ()

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch (counted from 0), starting with batch ``start``."""

    def text_of(self, i: int, known: DataNames) -> str:
        """Return the text of sample ``i``; empty if it is not a text."""
        return ""

    def usual_terms(self, checker: BatchChecker) -> int | None:
        """Return the number of loss terms in this rank's share of the first batch; None if it is unknown."""
        return None

    @property
    def fingerprint(self) -> str:
        """The number of samples, and a digest by which ranks verify that they have the same data.

        The digest covers names, dtypes, shapes and some rows of arrays, or the file names of datasets.
        """
        digest = hashlib.sha256()
        for trace in self._traces():
            digest.update(trace)
        rows = "batches" if self.rows is None else f"{self.rows} samples"
        return f"{rows}, {digest.hexdigest()[:12]}"

    def _traces(self) -> Iterator[bytes]:
        return iter(["\n".join(file.name for file in self.files).encode()])


class Indexed(Source):
    """Samples that are read by index, in any order.

    Attributes:
        order: the order of the samples, and their division into batches.
    """

    order: Order

    @abstractmethod
    def at(self, batches: Sequence[Sequence[int]]) -> Iterator[dict[str, Array]]:
        """Yield batches of the samples with these indices, without augmentation."""


class Columns(Indexed):
    """A source of arrays with one row per sample.

    A batch in order is a view of the arrays. A shuffled batch is gathered into a buffer that the next batch reuses. (If
    a thread prefetches large batches, there are two buffers.) If all arrays are in memory and were checked as a whole,
    batches are ``Known``, or ``Rows``, which a session may gather itself. Concurrent iterations (in threads, or in a
    callback that evaluates the training data) have separate buffers.
    """

    def __init__(
        self, arrays: Mapping[str, Any], checker: BatchChecker, order: Order, names: DataNames = NO_NAMES
    ) -> None:
        checker.check_names(arrays)
        self.kind, self.names = checker.kind, names
        found = {n: v if isinstance(v, StoredArray) else to_array(n, v) for n, v in arrays.items()}
        self.rows = common_length({n: row_count(n, a.shape) for n, a in found.items()})
        self.arrays = {n: _column(checker, n, a, order) for n, a in found.items()}
        if not any(isinstance(a, StoredArray) for a in self.arrays.values()):
            checker.check_bounds(self.arrays)
        self.order = order
        self.batches_per_epoch = _count_batches(order, self.rows)
        rest = self.rows % order.batch_size
        if rest and not (order.drop_last or order.fills) and checker.fixed_rows:
            raise DataError(
                f"the step has a fixed batch size of {order.batch_size}, but the last batch of {self.rows} samples has "
                f"only {rest}",
                remedy="pass drop_last=True, use a multiple, or build the step from a model with a dynamic batch axis",
                shell="add --drop-last, use a multiple, or build the step from a model with a dynamic batch axis",
            )
        self._size = size = order.size_of(min(order.batch_size, self.rows))
        self._is_prefetched = sum(a.nbytes // self.rows * size for a in self.arrays.values()) >= PREFETCH_BYTES
        # columns in memory, which a session can read in place
        held = {
            n: a
            for n, a in self.arrays.items()
            if not isinstance(a, StoredArray) and a.flags.c_contiguous and not is_mapped(a)
        }
        once = len(held) == len(self.arrays)
        self._counts = checker.counts_of_all(held, size) if once else None  # of each full batch
        self._mapped = {n: a for n, a in self.arrays.items() if not isinstance(a, StoredArray) and is_mapped(a)}
        self._idle = [self._new_tables()]
        self.shapes = self._idle[0][0].shapes

    def _new_tables(self) -> list[Table]:
        return [Table(self.arrays, self._size, None if self._is_prefetched else self._counts) for _ in range(2)]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        assert self.rows is not None
        indices = self.order.indices(epoch, self.rows)
        if indices is None:
            return self._in_order(start)
        return self._shuffled(indices.data, start)

    def at(self, batches: Sequence[Sequence[int]]) -> Iterator[dict[str, Array]]:
        for rows in batches:
            yield {n: np.concatenate([a[i : i + 1] for i in rows]) for n, a in self.arrays.items()}

    def usual_terms(self, checker: BatchChecker) -> int | None:
        return checker.counts(checker(dict(next(iter(self.batches(0))))))[1]

    def _traces(self) -> Iterator[bytes]:
        for name, array in self.arrays.items():
            yield f"{name} {array.dtype} {array.shape}".encode()
            for row in np.linspace(0, len(array) - 1, min(TRACED, len(array)), dtype=np.int64):
                yield np.ascontiguousarray(array[int(row) : int(row) + 1]).tobytes()

    def _in_order(self, start: int) -> Iterator[Batch]:
        for rows in self._ranges(start):
            batch = {name: array[rows] for name, array in self.arrays.items()}
            is_full = rows.stop - rows.start == self._size
            yield batch if self._counts is None or not is_full else Known(batch, self._counts)

    def _shuffled(self, indices: memoryview, start: int) -> Iterator[Batch]:
        """Yield the batches of rows at ``indices`` from batch ``start`` on, then release their buffers for reuse."""
        try:
            tables = self._idle.pop()
        except IndexError:
            tables = self._new_tables()
        gathered = self._gathered(tables, indices, start)
        try:
            yield from prefetched(gathered) if self._is_prefetched else gathered
        finally:
            self._idle.append(tables)

    def _gathered(self, tables: list[Table], indices: memoryview, start: int) -> Iterator[Batch]:
        size, table = self.order.size, tables[0]
        if table.counts is not None:  # runs at every step, so it is kept minimal
            full = len(indices) // size
            for first in range(start * size, full * size, size):
                yield Rows(table, indices[first : first + size])
            start = max(start, full)
        for i, rows in enumerate(self._ranges(start)):
            yield dict(Rows(tables[i % 2 if self._is_prefetched else 0], indices[rows]))

    def _ranges(self, start: int) -> Iterator[slice]:
        assert self.rows is not None and self.batches_per_epoch is not None
        size = self.order.size
        for first in range(start * size, self.batches_per_epoch * size, size):
            for name, array in self._mapped.items():
                check_uncut(name, array)
            yield slice(first, min(first + size, self.rows))


TRACED = 64  # number of rows in a fingerprint
LABEL_ROWS = 1 << 16  # rows loaded at once to check the range of stored labels
# for smaller batches, prefetching is slower: a thread switch takes as long as gathering 1-2 MB
PREFETCH_BYTES = 4 << 20


class Samples(Indexed):
    """A source of a dataset that loads samples by index."""

    def __init__(self, dataset: Any, checker: BatchChecker, order: Order, known: DataNames = NO_NAMES) -> None:
        self.dataset, self.kind, self.order, self.known = dataset, checker.kind, order, known
        self._specs = checker.specs
        self._loadable = dataset if isinstance(dataset, Loadable) else MapStyle(dataset, checker, known)
        self.names, self.files = self._loadable.names_for(checker.specs, known), self._loadable.files
        self.rows = len(self._loadable)
        self.batches_per_epoch = _count_batches(order, self.rows)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        assert self.rows is not None and self.batches_per_epoch is not None
        size, order = self.order.size, self.order
        indices = self.indices(epoch)
        firsts = range(start * size, self.batches_per_epoch * size, size)
        batches = (indices[first : first + size].tolist() for first in firsts)
        seed = (order.seed, epoch) if order.augments else ()
        return self._loadable.load(batches, self._specs, seed, self.names)

    def indices(self, epoch: int) -> Array:
        """Return the indices of this process's samples in the order of an epoch."""
        assert self.rows is not None
        order, every = self.order, np.arange(self.rows)
        return order.share(self._loadable.order(order.seed, epoch, order.batch_size) if order.shuffle else every)

    def at(self, batches: Sequence[Sequence[int]]) -> Iterator[dict[str, Array]]:
        return self._loadable.load(iter(batches), self._specs, (), self.names)

    def text_of(self, i: int, known: DataNames) -> str:
        return self._loadable.text_of(i, known)


class Stream(Source):
    """A source of the user's own batches, from an iterable or a function that returns one per epoch."""

    def __init__(self, batches: Any, checker: BatchChecker, known: DataNames = NO_NAMES) -> None:
        self._batches, self._checker = batches, checker
        # a DataLoader refers to its dataset
        self._declared = Declared.of(getattr(batches, "dataset", None), checker.specs, known)
        self.names = self._declared.names
        self._is_iterable = hasattr(batches, "__iter__")
        self._once = self._is_iterable and iter(batches) is batches
        self._used = False
        self.batches_per_epoch = len(batches) if hasattr(batches, "__len__") else None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        if self._once and self._used:
            raise DataError(
                "a generator can be used for one epoch only; pass a list, or a function that returns a new generator"
            )
        self._used = True
        batches: Iterator[Any] = islice(self._batches if self._is_iterable else self._batches(), start, None)
        if not self._declared.keeps:
            batches = (self._declared.numbered(self._checker.named(batch)) for batch in batches)
        numbered = (self._checker.numbered(batch, self._declared.names.classes) for batch in batches)
        return numbered if start else _not_empty(numbered)


def _not_empty(batches: Iterator[Batch]) -> Iterator[Batch]:
    first = next(batches, None)
    if first is None:
        raise DataError(
            "the data are empty: the iterable yields no batch; pass a list of batches, or a function that returns a "
            "new generator"
        )
    yield first
    yield from batches


TABLES: tuple[tuple[FileKind, Callable[..., Any]], ...] = (IMAGES, image_table), (SOUNDS, table)


def reader_at(path: Path) -> tuple[str, Callable[..., Any]] | None:
    """Return the function that reads the images, sounds or shards at a path, and the word for its options.

    The word is "image" or "sound". Return None for arrays, plain tables and texts.
    """
    if (annotated := reading.reader_of(path)) is not None:
        return "image", annotated
    if is_table_file(path):
        row = first_row(path)
        return next(((kind.noun, read) for kind, read in TABLES if any(map(kind.names, row))), None)
    if is_shards(path):
        return "image", shards
    if is_image_folder(path):
        return "image", image_folder
    return ("sound", folder) if is_folder_of(path, SOUNDS) else None


def read_file(
    path: str | os.PathLike[str], known: DataNames = NO_NAMES, specs: Mapping[str, TensorSpec] | None = None
) -> Any:
    """Return the samples, table or arrays in a file or folder; ``known`` and ``specs`` as for ``read_table``."""
    if (reader := reader_at(Path(path))) is not None:
        return reader[1](path)
    if not is_table_file(Path(path)):
        return load_arrays(path)
    read = read_table(Path(path), known=known, specs=specs)
    check_some(len(read), f"'{shown(path)}' is")
    return read


def read_data(data: Any, known: DataNames = NO_NAMES, specs: Mapping[str, TensorSpec] | None = None) -> Any:
    """Read data given by a path, or by a table that lists images or sounds; return other data unchanged.

    A dict of columns is returned as a table if ``known`` contains a preprocessing.
    """
    if isinstance(data, str | os.PathLike):
        return read_file(data, known, specs)
    plan = known.preprocess
    if isinstance(data, Mapping) and plan is not None and not is_table(data) and plan.holds_columns(data):
        return Frame(data)
    if is_table(data):
        return next((read(data) for kind, read in TABLES if column_of_paths(data, kind) is not None), data)
    return data


def rows_in(path: Path) -> int:
    """Return the number of samples in a file or folder of training data."""
    data = read_file(path)
    return next((len(a) for a in data.values() if a.ndim), 0) if isinstance(data, dict) else len(data)


def as_source(data: Any, checker: BatchChecker, order: Order, known: DataNames = NO_NAMES) -> Source:
    """Return a source of the user's data.

    Supported data: a dict or tuple of arrays, the path of an ``.npz`` or of a folder of ``.npy``; a table (of pandas,
    polars or Arrow, or the path of a ``.csv``, ``.parquet``, …), which may list images or sounds; a folder of
    images, of sounds, or of images with annotations; shards; a dataset with ``len`` and ``[i]``; an iterable of
    batches (list, generator, DataLoader), or a function that returns one. Batches are dicts by name, or tuples in the
    order inputs, targets.

    Raises:
        UnmatchedError: if columns of the training data are missing, or a class is new.
        DataError: if ``data`` is none of these, or does not match the step.
    """
    if isinstance(data, Columns):
        check_same(data.names, known)
        same = data.order == order and data.kind == checker.kind
        return data if same else Columns(data.arrays, checker, order, data.names)
    if isinstance(data, Samples):
        same = data.order == order and data.kind == checker.kind and data.known == known
        return data if same else Samples(data.dataset, checker, order, known)
    if isinstance(data, Stream):
        return data
    data = read_data(data, known, checker.specs)
    if is_table(data) or isinstance(data, Mapping | tuple | np.ndarray):
        arrays, names = checker.arrays_by_name(data, known)
        return Columns(arrays, checker, order, names)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list):
        return Samples(data, checker, order, known)
    if (hasattr(data, "__iter__") or callable(data)) and not isinstance(data, type | str | bytes):
        return Stream(data, checker, known)
    raise DataError(
        f"{described(data)} is not training data; pass a dict of arrays, an .npz file, a folder of .npy files, or an "
        "iterable of batches"
    )


# --- checks before the first step ---------------------------------------------------------------------------


def _column(checker: BatchChecker, name: str, value: Array | StoredArray, order: Order) -> Array | StoredArray:
    """Return a column checked and converted to its dtype; arrays on disk are converted batch by batch in training."""
    spec = checker.specs[name]
    array = value if isinstance(value, StoredArray) else as_column(spec, value)
    if spec.shape and spec.shape[0] == 0:
        raise DataError(f"the step has a fixed batch size of 0 ({spec}); build it from a model with another batch size")
    fixed = spec.shape[0] if len(array.shape) == len(spec.shape) > 0 else None
    if isinstance(fixed, int) and fixed * order.ranks != order.batch_size:
        shared = f", on each of {order.ranks} ranks" if order.ranks > 1 else ""
        raise DataError(
            f"the step has a fixed batch size of {fixed} (the first dimension of '{shown(name)}'){shared}, but the "
            f"batch size is {order.batch_size}",
            **for_batch(f"pass batch_size={fixed * order.ranks}", fixed * order.ranks),
        )
    if isinstance(array, StoredArray):
        checker.typed(spec, array[:1])  # raises an error now if the type cannot be converted
        if array.dtype.kind in "iu" and isinstance(spec, TargetSpec):
            for first in range(0, len(array), LABEL_ROWS):
                check_range(spec, array[first : first + LABEL_ROWS], first)
        return array
    if not is_mapped(array):
        array = checker.typed(spec, array)
    if array.dtype.kind in "iu":
        checker.check_values(spec, array)
    return array


def row_count(name: str, shape: tuple[int, ...]) -> int:
    """Return the number of samples in an array of ``shape``; raise DataError if it has no sample axis."""
    if not shape:
        raise DataError(f"'{shown(name)}' is a scalar without a sample axis; pass an array with one row per sample")
    return shape[0]


def common_length(lengths: Mapping[str, int]) -> int:
    """Return the common length of all arrays; raise DataError if they differ, or are empty."""
    (first, rows), *others = lengths.items()
    for name, length in others:
        if length != rows:
            raise DataError(
                f"'{shown(first)}' has {counted(rows, 'row')} but '{shown(name)}' has {length:,}; give one row per "
                "sample in each"
            )
    check_some(rows)
    return rows


def _count_batches(order: Order, rows: int) -> int:
    check_some(rows)
    count = order.batch_count(rows)
    if count == 0:
        raise DataError.of_options(
            f"the data have {counted(rows, 'sample')}, fewer than one batch of {order.batch_size}; "
            "lower --batch-size, or omit --drop-last"
        )
    return count
