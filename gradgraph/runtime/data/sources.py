"""Sources of batches."""

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
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.mapped import is_mapped
from gradgraph.preprocess.frames import Frame, is_table
from gradgraph.runtime.data.ahead import ahead
from gradgraph.runtime.data.arrays import load_arrays
from gradgraph.runtime.data.batch import (
    Array,
    Batch,
    BatchChecker,
    Known,
    as_column,
    check_range,
    check_uncut,
    to_array,
)
from gradgraph.runtime.data.image_tables import column_of_images, image_table, is_image_table
from gradgraph.runtime.data.images import image_folder, is_image_folder
from gradgraph.runtime.data.loadable import Loadable
from gradgraph.runtime.data.matching import Declared, check_same
from gradgraph.runtime.data.padded import Padded
from gradgraph.runtime.data.remedies import check_counts, for_batch
from gradgraph.runtime.data.rows import Rows, Table
from gradgraph.runtime.data.shards import is_shards, shards
from gradgraph.runtime.data.shuffling import permutation
from gradgraph.runtime.data.stored import StoredArray
from gradgraph.runtime.data.tables import is_table_file, read_table
from gradgraph.step.data_names import NO_NAMES, DataNames
from gradgraph.step.manifest import TargetSpec, TensorSpec

log = logging.getLogger("gradgraph")


@dataclass(frozen=True)
class Order:
    """How samples become batches.

    Attributes:
        batch_size, shuffle, drop_last, seed: as for ``Trainer.fit``.
        fills: who takes the batches fills up a last, smaller one where the step is fixed to a size.
        augments: samples are changed at random, where their dataset does so.
        rank, ranks: of so many processes that share each batch, which one takes the samples.
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
            raise DataError(f"the seed is {described(self.seed)}; give a whole number that 64 bits can hold")

    def batch_count(self, rows: int) -> int:
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    @property
    def size(self) -> int:
        """The samples of a full batch that this process takes."""
        return self.size_of(self.batch_size)

    def size_of(self, rows: int) -> int:
        """The samples of a batch of ``rows`` that this process takes: one that has none takes another's."""
        return max(1, -(-(rows - self.rank) // self.ranks))

    def lacks(self, batch: int, rows: int) -> bool:
        """Whether this process has no sample of its own in a batch of an epoch of ``rows``."""
        return rows - batch * self.batch_size <= self.rank

    def indices(self, epoch: int, rows: int) -> Array | None:
        """The samples of an epoch in order; None is 0, 1, 2, …"""
        whole = permutation(self.seed, epoch, rows) if self.shuffle else None
        return whole if self.ranks == 1 else self.share(np.arange(rows) if whole is None else whole)

    def share(self, indices: Array) -> Array:
        """The samples of an epoch that this process takes, batch after batch."""
        if self.ranks == 1:
            return indices
        full = len(indices) // self.batch_size * self.batch_size
        own = indices[:full].reshape(-1, self.batch_size)[:, self.rank :: self.ranks].ravel()
        rest = indices[full:]
        last = rest[self.rank :: self.ranks] if len(rest) > self.rank else rest[:1]
        return np.concatenate([own, last])


class Source(Protocol):
    """Batches for one epoch, from any of its batches on.

    ``rows``, ``batches_per_epoch`` and ``shapes`` (of all batches but the last) are None where nobody knows before the
    end. ``names`` are those of the columns and classes that its numbers stand for.
    """

    names: DataNames
    rows: int | None
    batches_per_epoch: int | None
    shapes: dict[str, tuple[int, ...]] | None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]: ...


class Columns:
    """Arrays with one row per sample. A batch is a view where samples come in order, else a gather into a buffer
    that the next batch reuses, or the next but one where a thread gathers large batches ahead. Where arrays in memory
    need be checked only once, it is ``Known``, or ``Rows``, which a session may gather itself. Two that go through the
    same columns at once (threads, or a callback that evaluates what is trained on) have buffers of their own.
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
                f"the step takes batches of exactly {order.batch_size}, but {self.rows} samples leave {rest} for the "
                "last one",
                remedy="pass drop_last=True, give a multiple, or build the step from a model with a dynamic batch",
                shell="add --drop-last, give a multiple, or build the step from a model with a dynamic batch",
            )
        self._size = size = order.size_of(min(order.batch_size, self.rows))
        self._is_ahead = sum(a.nbytes // self.rows * size for a in self.arrays.values()) >= AHEAD_BYTES
        # those whose rows a session can read where they lie, without waiting for a disk
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
        return [Table(self.arrays, self._size, None if self._is_ahead else self._counts) for _ in range(2)]

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
        """Gather batches; the tables are idle again once the caller is done with the last one."""
        try:
            tables = self._idle.pop()
        except IndexError:
            tables = self._new_tables()
        gathered = self._gathered(tables, indices, start)
        try:
            yield from ahead(gathered) if self._is_ahead else gathered
        finally:
            self._idle.append(tables)

    def _gathered(self, tables: list[Table], indices: memoryview, start: int) -> Iterator[Batch]:
        size, table = self.order.size, tables[0]
        if table.counts is not None:  # every step asks for a batch, so nothing more is done for it than must be
            full = len(indices) // size
            for first in range(start * size, full * size, size):
                yield Rows(table, indices[first : first + size])
            start = max(start, full)
        for i, rows in enumerate(self._ranges(start)):
            yield dict(Rows(tables[i % 2 if self._is_ahead else 0], indices[rows]))

    def _ranges(self, start: int) -> Iterator[slice]:
        assert self.rows is not None and self.batches_per_epoch is not None
        size = self.order.size
        for first in range(start * size, self.batches_per_epoch * size, size):
            for name, array in self._mapped.items():
                check_uncut(name, array)
            yield slice(first, min(first + size, self.rows))


LABEL_ROWS = 1 << 16  # read at once to look for labels out of range
AHEAD_BYTES = 4 << 20  # handing a batch from thread to thread takes as long as gathering one of 1 to 2 MB


class Samples:
    """A map-style dataset: ``dataset[i]`` is one sample (a dict or a tuple), ``len(dataset)`` their number."""

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
        self.files = dataset.files if is_ours else []  # of the samples
        self._told = False  # what it leaves out

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        assert self.rows is not None and self.batches_per_epoch is not None
        size, indices = self.order.size, self.order.indices(epoch, self.rows)
        if self.order.shuffle and isinstance(self.dataset, Loadable):  # some lie next to each other, or are alike
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
        """``batch`` with the numbers that classes have here."""
        return self._checker.numbered(self._declared.numbered(batch), self._declared.names.classes)

    def text_of(self, i: int, known: DataNames) -> str:
        """The text that a sample is made of; empty where it is none."""
        return self.dataset.text_of(i, known) if isinstance(self.dataset, Loadable) else ""

    def _wanted_part(self, sample: Any) -> Any:
        """The part of a sample that the step takes: datasets have further columns, such as an identifier."""
        if not isinstance(sample, Mapping) or not self._checker.specs.keys() < sample.keys():
            return sample
        further = [name for name in sample if name not in self._checker.specs]
        if further and not self._told:
            log.info("the step takes no %s of the dataset", listed(further))
            self._told = True
        return {name: sample[name] for name in self._checker.specs}


class Stream:
    """Ready batches from an iterable, or from a function that returns one for each epoch. Their order is their own."""

    def __init__(self, batches: Any, checker: BatchChecker, known: DataNames = NO_NAMES) -> None:
        self._batches, self._checker = batches, checker
        # a DataLoader has the dataset that its batches come from
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
                "the generator is used up after one epoch; pass a list, or a function that returns a new generator"
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
    """The table, the images, the samples of shards or the arrays in a file or folder; ``known`` and ``specs`` are as
    for a table.
    """
    if is_image_table(Path(path)):
        return image_table(path)
    if is_shards(Path(path)):
        return shards(path)
    if is_image_folder(Path(path)):
        return image_folder(path)
    return read_table(Path(path), known=known, specs=specs) if is_table_file(Path(path)) else load_arrays(path)


def read_data(data: Any, known: DataNames = NO_NAMES, specs: Mapping[str, TensorSpec] | None = None) -> Any:
    """The data at a path, a dict of columns as a table, and the images that a table names; other data as they are."""
    if isinstance(data, str | os.PathLike):
        return read_file(data, known, specs)
    plan = known.preprocess
    if isinstance(data, Mapping) and plan is not None and not is_table(data) and plan.holds_columns(data):
        return Frame(data)
    return image_table(data) if is_table(data) and column_of_images(data) is not None else data


def rows_in(path: Path) -> int:
    """How many samples a file or folder of training data holds."""
    if is_table_file(path) or is_image_folder(path) or is_shards(path):
        return len(read_file(path))
    return next((len(a) for a in load_arrays(path).values() if a.ndim), 0)


def as_source(data: Any, checker: BatchChecker, order: Order, known: DataNames = NO_NAMES) -> Source:
    """The right source for what the user has.

    A dict or a tuple of arrays, the path of an ``.npz`` or of a folder of ``.npy``; a table (of pandas, polars or
    Arrow, or the path of a ``.csv``, ``.parquet``, …), also one that names images; a folder of images; shards; a
    dataset with ``len`` and ``[i]``; an iterable of batches (list, generator, DataLoader), or a function that returns
    one. Batches are dicts by name, or tuples in the order inputs, targets. Columns and classes are matched by name with
    those that are ``known``.

    Raises:
        UnmatchedError: names that are known are missing, or classes are new.
        DataError: ``data`` is none of these, or does not fit the step.
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
        f"{described(data)} is no training data; give a dict of arrays, an .npz file, a folder of .npy files, "
        "or an iterable of batches"
    )


def rows_at(source: Source, numbers: Sequence[int], specs: Mapping[str, TensorSpec]) -> dict[int, dict[str, Array]]:
    """The arrays of some samples, without their axis, where they can be read again."""
    if isinstance(source, Columns):
        return {n: {name: np.asarray(array[n : n + 1])[0] for name, array in source.arrays.items()} for n in numbers}
    if not isinstance(source, Samples) or not isinstance(source.dataset, Loadable):
        return {}
    batches = source.dataset.load(iter([[n] for n in numbers]), specs, (), source.names)
    return {n: {name: array[0] for name, array in batch.items()} for n, batch in zip(numbers, batches, strict=True)}


# --- checks before the first step ---------------------------------------------------------------------------


def _column(checker: BatchChecker, name: str, value: Any, order: Order) -> Array | StoredArray:
    """The whole array, checked; converted now if that is needed at all, so that no batch has to be. One that stays in
    its file is converted batch by batch.
    """
    spec = checker.specs[name]
    array = value if isinstance(value, StoredArray) else as_column(spec, to_array(name, value))
    row_count(name, array.shape)
    if spec.shape and spec.shape[0] == 0:
        raise DataError(f"the step takes batches of 0 samples ({spec}); build it from a model with another batch size")
    fixed = spec.shape[0] if len(array.shape) == len(spec.shape) > 0 else None
    if isinstance(fixed, int) and fixed * order.ranks != order.batch_size:
        shared = f", on each of {order.ranks} ranks" if order.ranks > 1 else ""
        raise DataError(
            f"the step takes batches of exactly {fixed} ('{shown(name)}' has a fixed first dimension){shared}, and "
            f"the batch size is {order.batch_size}",
            **for_batch(f"pass batch_size={fixed * order.ranks}", fixed * order.ranks),
        )
    if isinstance(array, StoredArray):
        checker.typed(spec, array[:1])  # refused now if it cannot be converted
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
    """The number of samples of an array, or DataError if it has no axis of them."""
    if not shape:
        raise DataError(f"'{shown(name)}' has no axis of samples; give one row per sample")
    return shape[0]


def common_length(lengths: Mapping[str, int]) -> int:
    """The number of rows that all arrays have, or DataError."""
    (first, rows), *others = lengths.items()
    for name, length in others:
        if length != rows:
            raise DataError(
                f"'{shown(first)}' has {rows} rows but '{shown(name)}' has {length}; give one row per sample in each"
            )
    return rows


def _count_batches(order: Order, rows: int) -> int:
    if rows == 0:
        raise DataError("the data are empty; give at least one sample")
    count = order.batch_count(rows)
    if count == 0:
        raise DataError(
            f"the data hold {rows} samples, less than one batch of {order.batch_size}",
            remedy="lower batch_size, or leave drop_last out",
            shell="lower --batch-size, or leave --drop-last out",
        )
    return count


def _stack(name: str, values: Sequence[Any]) -> Array:
    try:
        return np.stack([to_array(name, v) for v in values])
    except ValueError:
        shapes = sorted({to_array(name, v).shape for v in values})
        raise DataError(
            f"the samples of '{shown(name)}' have different shapes ({shapes[0]} and {shapes[-1]}); "
            f"gradgraph.Padded(dataset, {{'{shown(name)}': 0}}) pads them, or pad them first"
        ) from None
