"""The frozen layers of a step, applied once to each sample of a source of data."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array
from gradgraph.data.sources.sources import Columns, Samples
from gradgraph.errors import DataError, counted, shown
from gradgraph.files.external import is_external
from gradgraph.runtime.execution.computing import ComputingSession
from gradgraph.runtime.execution.shaped import Sizes
from gradgraph.runtime.features.head import HeadSession
from gradgraph.runtime.features.kept_columns import LastBatch, batch_of, checked_batches
from gradgraph.runtime.features.kept_rows import Arrays, KeptRows, Writer, digest_of_data, part_of
from gradgraph.runtime.features.kept_tokens import KeptTokens, Place, Widths, cut_to
from gradgraph.runtime.features.static_values import Row
from gradgraph.runtime.features.variants import OrderOfVariant, VariantColumns, Variants, batches_of_variant
from gradgraph.step.manifest import package_version

log = logging.getLogger("gradgraph.runs")  # which `gradgraph train` prints

ROUNDING = 1e-4  # of a kept value, relative to the largest, between lengths of padding
ALONE = 32  # samples that are read alone or in small batches, to find a short one or a difference in rounding
PADDED = 8  # samples that are computed at their own width, too, to see whether padding changes their values


class FrozenLayers:
    """The frozen layers of a step, as in training or as in evaluation, applied to all samples of a source."""

    def __init__(self, head: HeadSession, trains: bool) -> None:
        self._head, self._trains = head, trains
        self._opened, self._sessions = list[Sizes | None](), list[ComputingSession]()
        self._what = "training" if trains else "validation"

    def over(self, source: Columns | Samples, folder: Path | None) -> tuple[KeptRows, Arrays]:
        """Return the storage and the arrays that the head reads, with a row for each sample.

        Besides the kept values, inputs and targets of a dataset are stored, so that it is not read again.
        """
        batches = checked_batches(self._head.whole, source, fills=self._trains)
        first, rows = next(batches)
        if isinstance(source, Columns):
            kept, given = dict(self._head.split.kept), {name: source.arrays[name] for name in self._read}
        else:
            kept, given = self._rows(first), {}
        ranks = self._head.team.ranks
        store = KeptRows(kept, source.rows or 0, folder and folder / self._what, ranks)
        digest = self._digest(source) if store.folder is not None and folder is not None else ""
        found, told = store.found(digest), f"{counted(store.count, 'sample')} of the {self._what} data, {store}"
        if found is None:
            log.info("computing features of %s …", told)
            with store.written(digest) as writer:
                self._compute(first, rows, batches, writer)
            found = writer.arrays
            self._check_padding(source, found)
        else:
            log.info("found features of %s", told)
        return store, {**found, **given}

    @property
    def _read(self) -> list[str]:
        """The inputs and targets that the head reads itself."""
        return [*self._head.split.passed, *(target.name for target in self._head.whole.manifest.targets)]

    def _rows(self, batch: Mapping[str, Array]) -> dict[str, Row]:
        """Return the rows to keep of a dataset: those of the kept values, and those of inputs and targets."""
        read = {name: Row(batch[name].shape[1:], batch[name].dtype.name) for name in self._read}
        return {**self._head.split.kept, **read}

    def over_variants(
        self, source: Samples, folder: Path | None, variants: Variants
    ) -> tuple[KeptRows, VariantColumns]:
        """Return the storage and the source of the rows of several augmented variants of each sample."""
        head, used, count = self._head, variants.used, source.rows or 0
        first, _ = next(batches_of_variant(head.whole, source, used[0]))
        store = KeptRows(self._rows(first), count * len(used), folder and folder / self._what, head.team.ranks)
        log.info("computing features of %s × %s of the %s data, %s …", counted(count, "sample"),
                 counted(len(used), "augmented variant"), self._what, store)  # fmt: skip
        orders = dict[int, OrderOfVariant]()
        with store.written("") as writer:  # without a digest: a resumed run may need other variants
            for variant in used:
                numbers = list[int]()
                for batch, own in batches_of_variant(head.whole, source, variant):
                    writer.append({**batch, **self._computed(batch)}, len(own))
                    numbers += own
                orders[variant] = OrderOfVariant.of(source, numbers)
        arrays = {v: {n: part_of(a, i * count, count) for n, a in writer.arrays.items()} for i, v in enumerate(used)}
        return store, VariantColumns(arrays, orders, head.data.checker, source.names, variants.count)

    def over_tokens(
        self, source: Columns | Samples, folder: Path | None, widths: Widths | None, places: Mapping[str, Place]
    ) -> tuple[KeptRows, KeptTokens]:
        """Return the storage and the source of values of samples that are padded to the longest of their batch.

        Args:
            widths: the sizes that differ between batches of ``source``; None if all batches have the same width.
            places: an input and its axis with each size that differs between batches, by name.

        Raises:
            DataError: if padding changes the values by more than rounding.
        """
        whole, count, size = self._head.whole, source.rows or 0, source.order.size
        longest, shortest = ((), ()) if widths is None else (widths.longest, widths.shortest)
        parts = [np.arange(i, min(i + size, count)) for i in range(0, count, size)]
        found = (self._computed(batch_of(whole, source, np.array([*own, *longest], np.int64))) for own in parts)
        first = next(found)
        kept = {n: Row(first[n].shape[1:], row.dtype, row.open) for n, row in self._head.split.kept.items()}
        store = KeptRows(kept, count, folder and folder / self._what, self._head.team.ranks)
        log.info("computing features of %s of the %s data, %s …", counted(count, "sample"), self._what, store)
        with store.written("") as writer:
            for own, values in zip(parts, itertools.chain([first], found), strict=True):
                writer.append(values, len(own))
        arrays = writer.arrays
        from_end = self._pads_at_beginning(source, arrays, kept, places, shortest)
        return store, KeptTokens(source, arrays, kept, places, self._read, from_end)

    def _pads_at_beginning(
        self,
        source: Columns | Samples,
        arrays: Arrays,
        kept: Mapping[str, Row],
        places: Mapping[str, Place],
        shortest: Sequence[int],
    ) -> bool:
        """Whether samples are padded at their beginning: the ``shortest`` are padded, others may not be.

        Raises:
            DataError: if kept values of some samples differ from those of the samples alone by more than rounding.
        """
        rows, whole = source.rows or 0, self._head.whole
        ends, exact = {False, True}, True
        spaced = np.linspace(0, rows - 1, min(PADDED, rows), dtype=np.int64)
        for number in np.unique([*spaced, *shortest]):
            batch = batch_of(whole, source, np.array([number]))
            sizes = {name: batch[place].shape[axis] for name, (place, axis) in places.items()}
            for name, alone in self._computed(batch).items():
                values = np.asarray(arrays[name][number : number + 1])
                cuts = {end: cut_to(values, kept[name], sizes, end) for end in ends}
                ends = {end for end in ends if _differ_by_rounding(alone, cuts[end])}
                exact &= any(np.array_equal(alone, cuts[end]) for end in ends)
                if not ends:
                    raise _changed_by_padding(name)
        if not exact:
            log.info("the length of padding changes the rounding of features, so losses may differ in rounding from "
                     "those without keep_features")  # fmt: skip
        return False not in ends

    def _compute(
        self, first: Mapping[str, Array], rows: int, batches: Iterator[tuple[Mapping[str, Array], int]], writer: Writer
    ) -> None:
        """Write the kept values of the ``first`` batch, of ``rows`` samples, and of all following ``batches``."""
        batch: Mapping[str, Array] | None = first
        while batch is not None:
            writer.append({**batch, **self._computed(batch)}, rows)
            batch, rows = next(batches, (None, 0))

    def _layers(self, batch: Mapping[str, Array]) -> ComputingSession:
        """Return the session of the frozen layers for a batch.

        In training, it is the session for the usual sizes if the batch has them, or else the session for any sizes.
        """
        sizes = self._head.whole.part.sizes(batch) if self._trains else None
        if sizes is not None and sizes != self._head.sizes:
            sizes = {}
        if sizes not in self._opened:
            self._opened.append(sizes)
            self._sessions.append(self._head.frozen_layers(sizes))
        return self._sessions[self._opened.index(sizes)]

    def _check_padding(self, source: Columns | Samples, kept: Arrays) -> None:
        """Raise DataError if the length to which samples are padded changes the kept values by more than rounding.

        A short sample is computed alone and together with a long one, and compared with its kept value, too.
        """
        if not self._is_padded(source):
            return
        whole, rows = self._head.whole, source.rows or 0
        numbers = np.unique(np.linspace(0, rows - 1, min(ALONE, rows), dtype=np.int64))
        sizes = [sum(feed.size for feed in batch_of(whole, source, at.reshape(1)).values()) for at in numbers]
        short, long = int(numbers[np.argmin(sizes)]), int(numbers[np.argmax(sizes)])
        alone, beside = (self._computed(batch_of(whole, source, np.array(of))) for of in ([short], [short, long]))
        for name, array in alone.items():
            own = array[0]
            for padded in (beside[name][0], np.asarray(kept[name][short : short + 1])[0]):
                if not _differ_by_rounding(own, padded):
                    raise _changed_by_padding(name)

    def _computed(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return the kept values of a batch."""
        layers = self._layers(batch)
        return layers.compute({name: feed for name, feed in batch.items() if name in layers.inputs})

    def _is_padded(self, source: Columns | Samples) -> bool:
        """Whether batches of a dataset may be padded to different lengths."""
        open_ = any(not isinstance(d, int) for s in self._head.whole.manifest.inputs for d in s.shape[1:])
        return open_ and isinstance(source, Samples)

    def last_batch(self, source: Columns | Samples, arrays: Arrays, in_memory: bool) -> LastBatch | None:
        """Return an object that computes the kept values of incomplete batches with the session for any sizes.

        None if there are no such batches, or if the values are equal.
        """
        rows, order = source.rows or 0, source.order
        rest = rows % order.batch_size
        varies = self._head.whole.part.has_sizes and not self._is_padded(source)
        if not rest or rest == rows or order.drop_last or not varies:
            return None
        rest = order.size_of(rest)  # of this process
        last = LastBatch(self._head, source, in_memory)
        groups = [np.arange(i, i + rest) for i in range(0, min(ALONE, rows - rest), rest)]
        differs = (not np.array_equal(a, arrays[n][i[0] : i[-1] + 1]) for i in groups for n, a in last(i).items())
        return last if any(differs) else None

    def _digest(self, source: Columns | Samples) -> str:
        """Return a digest of data, frozen weights and kernels; "" if the data have none."""
        digest = digest_of_data(source)
        if digest is None:
            return ""
        head = self._head
        model = head.split.trained if self._trains else head.split.evaluated
        digest.update_text(f"{package_version()} {ort.__version__} {head.kernels} {head.sizes}")
        digest.update(model.SerializeToString(deterministic=True))
        for tensor in model.graph.initializer:
            if is_external(tensor):
                for piece in head.whole.definition.pieces(tensor):
                    digest.update(piece)
        return digest.text()


def _differ_by_rounding(a: Array, b: Array) -> bool:
    """Whether two kept values are equal except for rounding."""
    if a.shape != b.shape:
        return False
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.abs(a - b).max(initial=0) <= ROUNDING * np.abs(a).max(initial=0))


def _changed_by_padding(name: str) -> DataError:
    return DataError(
        f"padding changes '{shown(name)}', so its value for a sample depends on the longest sample of the batch and "
        "cannot be kept; pad all samples to one length, or omit keep_features"
    )
