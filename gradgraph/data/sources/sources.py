"""Sources of batches: arrays, datasets and iterables in one interface."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gradgraph.arguments import WHOLE, described
from gradgraph.data.arrays.batch import (
    Array,
    Batch,
    BatchChecker,
    Known,
    as_column,
    check_range,
    check_uncut,
    to_array,
)
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.data.arrays.padded import Padded
from gradgraph.data.arrays.remedies import check_counts, for_batch
from gradgraph.data.arrays.rows import Rows, Table
from gradgraph.data.arrays.stored import StoredArray
from gradgraph.data.dataset import Loadable
from gradgraph.data.images.image_folders import image_folder, is_image_folder
from gradgraph.data.images.image_tables import column_of_images, image_table, is_image_table
from gradgraph.data.prefetch import prefetched
from gradgraph.data.preprocess.frames import Frame, is_table
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.matching import Declared, check_same
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.data.shards.shards import is_shards, shards
from gradgraph.data.shuffling import permutation
from gradgraph.data.tables import is_table_file, read_table
from gradgraph.errors import DataError, counted, listed, shown
from gradgraph.files.mapped import is_mapped

log = logging.getLogger("gradgraph")


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


class Source(Protocol):
    """The interface of data that are read in batches.

    Attributes:
        names: names of the columns and classes.
        rows: number of samples; None if unknown.
        batches_per_epoch: number of batches per epoch; None if unknown.
        shapes: shapes of all batches but the last, by name; None if unknown.
    """

    names: DataNames
    rows: int | None
    batches_per_epoch: int | None
    shapes: dict[str, tuple[int, ...]] | None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch (counted from 0), starting with batch ``start``."""
        ...


class Columns:
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
        self.arrays = {n: _column(checker, n, v, order) for n, v in arrays.items()}
        if not any(isinstance(a, StoredArray) for a in self.arrays.values()):
            checker.check_bounds(self.arrays)
        self.order = order
        self.rows: int | None = common_length({n: len(a) for n, a in self.arrays.items()})
        self.batches_per_epoch: int | None = _count_batches(order, self.rows)
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
        self.shapes: dict[str, tuple[int, ...]] | None = self._idle[0][0].shapes

    def _new_tables(self) -> list[Table]:
        return [Table(self.arrays, self._size, None if self._is_prefetched else self._counts) for _ in range(2)]

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        assert self.rows is not None
        indices = self.order.indices(epoch, self.rows)
        if indices is None:
            return self._in_order(start)
        return self._shuffled(indices.data, start)

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


LABEL_ROWS = 1 << 16  # rows loaded at once to check the range of stored labels
PREFETCH_BYTES = (
    4 << 20
)  # for smaller batches, prefetching is slower: a thread switch takes as long as gathering 1-2 MB


class Samples:
    """A source of a map-style dataset with ``len(dataset)`` samples; ``dataset[i]`` is a dict or a tuple."""

    def __init__(self, dataset: Any, checker: BatchChecker, order: Order, known: DataNames = NO_NAMES) -> None:
        self.dataset, self.kind, self.order = dataset, checker.kind, order
        self._checker = checker
        self.known = known
        is_ours = isinstance(dataset, Loadable)
        self._declared = Declared() if is_ours else Declared.of(dataset, checker.specs, known)
        self.names = dataset.names_for(checker.specs, known) if is_ours else self._declared.names
        self.rows: int | None = len(dataset)
        self.batches_per_epoch: int | None = _count_batches(order, self.rows)
        self.shapes: dict[str, tuple[int, ...]] | None = None
        self.files = dataset.files if is_ours else []  # files of the samples, if each is a file
        self._told = False  # whether ignored fields were logged

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        assert self.rows is not None and self.batches_per_epoch is not None
        size, indices = self.order.size, self.order.indices(epoch, self.rows)
        if self.order.shuffle and isinstance(self.dataset, Loadable):  # may keep nearby or similar samples together
            indices = self.order.share(self.dataset.order(self.order.seed, epoch, self.order.batch_size))
        batches = (
            range(first, min(first + size, self.rows)) if indices is None else indices[first : first + size].tolist()
            for first in range(start * size, self.batches_per_epoch * size, size)
        )
        if isinstance(self.dataset, Loadable):
            seed = (self.order.seed, epoch) if self.order.augments else ()
            yield from self.dataset.load(batches, self._checker.specs, seed, self.names)
            return
        for rows in batches:
            samples = [self.dataset[i] for i in rows]
            if isinstance(self.dataset, Padded):
                yield self._numbered(self.dataset.batch(samples, list(self._checker.specs)))
            else:
                named = [self._checker.named(self._wanted_part(sample)) for sample in samples]
                stacked = {name: _stack(name, [s[name] for s in named]) for name in self._checker.specs}
                yield self._numbered(stacked)

    def _numbered(self, batch: Mapping[str, Any]) -> Any:
        """Return ``batch`` with the dataset's class indices or class names replaced by the model's class indices."""
        return self._checker.numbered(self._declared.numbered(batch), self._declared.names.classes)

    def text_of(self, i: int, known: DataNames) -> str:
        """Return the text of sample ``i``; empty if it is not a text."""
        return self.dataset.text_of(i, known) if isinstance(self.dataset, Loadable) else ""

    def _wanted_part(self, sample: Any) -> Any:
        """Return a sample without fields that the step does not use, such as an identifier; log them once."""
        if not isinstance(sample, Mapping) or not self._checker.specs.keys() < sample.keys():
            return sample
        further = [name for name in sample if name not in self._checker.specs]
        if further and not self._told:
            log.info("fields of the dataset that are not inputs of the step are ignored: %s", listed(further))
            self._told = True
        return {name: sample[name] for name in self._checker.specs}


class Stream:
    """A source of the user's own batches, from an iterable or a function that returns one per epoch."""

    def __init__(self, batches: Any, checker: BatchChecker, known: DataNames = NO_NAMES) -> None:
        self._batches, self._checker = batches, checker
        # a DataLoader refers to its dataset
        self._declared = Declared.of(getattr(batches, "dataset", None), checker.specs, known)
        self.names = self._declared.names
        self._is_iterable = hasattr(batches, "__iter__")
        self._once = self._is_iterable and iter(batches) is batches
        self._used = False
        self.rows: int | None = None
        self.shapes: dict[str, tuple[int, ...]] | None = None
        self.batches_per_epoch: int | None = len(batches) if hasattr(batches, "__len__") else None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        if self._once and self._used:
            raise DataError(
                "a generator can be used for one epoch only; pass a list, or a function that returns a new generator"
            )
        self._used = True
        batches = islice(self._batches if self._is_iterable else self._batches(), start, None)
        if self._declared.keeps:
            return (self._checker.numbered(batch, self._declared.names.classes) for batch in batches)
        declared = (self._declared.numbered(self._checker.named(batch)) for batch in batches)
        return (self._checker.numbered(batch, self._declared.names.classes) for batch in declared)


def read_file(
    path: str | os.PathLike[str], known: DataNames = NO_NAMES, specs: Mapping[str, TensorSpec] | None = None
) -> Any:
    """Return the table, images, shards or arrays in a file or folder; ``known`` and ``specs`` as for ``read_table``."""
    if is_image_table(Path(path)):
        return image_table(path)
    if is_shards(Path(path)):
        return shards(path)
    if is_image_folder(Path(path)):
        return image_folder(path)
    return read_table(Path(path), known=known, specs=specs) if is_table_file(Path(path)) else load_arrays(path)


def read_data(data: Any, known: DataNames = NO_NAMES, specs: Mapping[str, TensorSpec] | None = None) -> Any:
    """Read data given by a path, or by a table that lists images; return other data unchanged.

    A dict of columns is returned as a table if ``known`` contains a preprocessing.
    """
    if isinstance(data, str | os.PathLike):
        return read_file(data, known, specs)
    plan = known.preprocess
    if isinstance(data, Mapping) and plan is not None and not is_table(data) and plan.holds_columns(data):
        return Frame(data)
    return image_table(data) if is_table(data) and column_of_images(data) is not None else data


def rows_in(path: Path) -> int:
    """Return the number of samples in a file or folder of training data."""
    if is_table_file(path) or is_image_folder(path) or is_shards(path):
        return len(read_file(path))
    return next((len(a) for a in load_arrays(path).values() if a.ndim), 0)


def as_source(data: Any, checker: BatchChecker, order: Order, known: DataNames = NO_NAMES) -> Source:
    """Return a source of the user's data.

    Supported data: a dict or tuple of arrays, the path of an ``.npz`` or of a folder of ``.npy``; a table (of pandas,
    polars or Arrow, or the path of a ``.csv``, ``.parquet``, …), which may list image files; a folder of images;
    shards; a dataset with ``len`` and ``[i]``; an iterable of batches (list, generator, DataLoader), or a function that
    returns one. Batches are dicts by name, or tuples in the order inputs, targets.

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


def rows_at(source: Source, numbers: Sequence[int], specs: Mapping[str, TensorSpec]) -> dict[int, dict[str, Array]]:
    """Return the arrays by name, without the sample axis, for each sample index in ``numbers``.

    The result is empty if the source cannot load single samples again.
    """
    if isinstance(source, Columns):
        return {n: {name: np.asarray(array[n : n + 1])[0] for name, array in source.arrays.items()} for n in numbers}
    if not isinstance(source, Samples) or not isinstance(source.dataset, Loadable):
        return {}
    batches = source.dataset.load(iter([[n] for n in numbers]), specs, (), source.names)
    return {n: {name: array[0] for name, array in batch.items()} for n, batch in zip(numbers, batches, strict=True)}


# --- checks before the first step ---------------------------------------------------------------------------


def _column(checker: BatchChecker, name: str, value: Any, order: Order) -> Array | StoredArray:
    """Return a column checked and converted to its dtype; arrays on disk are converted batch by batch in training."""
    spec = checker.specs[name]
    array = value if isinstance(value, StoredArray) else as_column(spec, to_array(name, value))
    row_count(name, array.shape)
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
    """Return the common length of all arrays; raise DataError if they differ."""
    (first, rows), *others = lengths.items()
    for name, length in others:
        if length != rows:
            raise DataError(
                f"'{shown(first)}' has {counted(rows, 'row')} but '{shown(name)}' has {length:,}; give one row per "
                "sample in each"
            )
    return rows


def _count_batches(order: Order, rows: int) -> int:
    if rows == 0:
        raise DataError("the data are empty; give at least one sample")
    count = order.batch_count(rows)
    if count == 0:
        raise DataError(
            f"the data have {counted(rows, 'sample')}, fewer than one batch of {order.batch_size}",
            remedy="lower batch_size, or omit drop_last",
            shell="lower --batch-size, or omit --drop-last",
        )
    return count


def _stack(name: str, values: Sequence[Any]) -> Array:
    try:
        return np.stack([to_array(name, v) for v in values])
    except ValueError:
        shapes = sorted({to_array(name, v).shape for v in values})
        raise DataError(
            f"the samples of '{shown(name)}' have different shapes ({shapes[0]} and {shapes[-1]}); pad them, such as "
            f"with gradgraph.Padded(dataset, {{'{shown(name)}': 0}})"
        ) from None
