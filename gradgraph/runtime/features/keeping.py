"""``fit(keep_features=…)``: train on values of the frozen layers, computed once for each sample."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.sources.sources import Columns, Samples, Source
from gradgraph.errors import BuildError, DataError, counted, listed, shown
from gradgraph.files.external import is_external
from gradgraph.runtime.execution.computing import ComputingSession
from gradgraph.runtime.execution.shaped import Sizes
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.features.head import HeadSession
from gradgraph.runtime.features.kept_columns import KeptColumns, LastBatch, OrderOf, batch_of, checked_batches
from gradgraph.runtime.features.kept_rows import Arrays, KeptRows, Writer, digest_of_data
from gradgraph.runtime.features.split import Split, split
from gradgraph.runtime.features.static_values import Row
from gradgraph.step.manifest import package_version

log = logging.getLogger("gradgraph.runs")  # which `gradgraph train` prints

ROUNDING = 1e-4  # of a kept value, relative to the largest, between lengths of padding
ALONE = 32  # samples that are read alone or in small batches, to find a short one or a difference in rounding
TRIED = 32  # samples of a dataset that are read twice, to see whether they change


@dataclass
class Kept:
    """The head of a step, and the data that it trains on.

    Attributes:
        session: trains the head, with the state and progress of the whole step.
        source, validation: the kept values of training and validation data.
        rows: the storage of these values.
    """

    session: StepSession
    source: Columns
    validation: Columns | None
    rows: list[KeptRows]

    def remove_files(self) -> None:
        """Remove the files of kept values."""
        for rows in self.rows:
            rows.remove()


def keep_features(
    whole: StepSession,
    source: Source,
    validation: Source | None,
    keep: bool | Literal["auto"],
    checkpoint: str | os.PathLike[str] | None,
) -> Kept | None:
    """Compute the frozen layers once for each sample.

    Args:
        whole: the session of the whole step.
        source, validation: training and validation data.
        keep: True, or "auto" to return None instead of raising an error.
        checkpoint: the path next to which files are written if memory does not suffice; None for a temporary folder.

    Raises:
        BuildError: if no layer is the same in every epoch.
        DataError: if the samples differ between epochs, or in size.
    """
    try:
        return _kept(
            whole, source, validation, None if checkpoint is None else Path(checkpoint).with_suffix(".features")
        )
    except (BuildError, DataError) as error:
        if keep != "auto":
            raise
        log.info("frozen layers are computed in every epoch: %s", error)
        return None


def _kept(whole: StepSession, source: Source, validation: Source | None, folder: Path | None) -> Kept:
    if getattr(whole.team, "joint_norms", None) is not None:
        raise BuildError("features cannot be kept with sync_batch_norm; train without one of them")
    if not whole.team.is_first:
        folder = None  # each rank keeps all samples; only rank 0 writes next to the checkpoint
    if whole.manifest.steps:
        raise BuildError(f"keep_features supports a single step only, but there are {listed(whole.manifest.steps)}")
    lasting = _lasting(source, "training")
    held_out = None if validation is None else _lasting(validation, "validation")
    first = next(checked_batches(whole, lasting, fills=True))[0]
    parts = split(whole.definition, {s.name: first[s.name].shape for s in whole.manifest.inputs})
    log.info("computed once for each sample: %s; after it, %s", _described(parts), parts.changing)
    head, stores = HeadSession(whole, parts, whole.part.sizes(first)), list[KeptRows]()

    def kept(data: Columns | Samples, trains: bool) -> Columns:
        layers = _FrozenLayers(head, trains)
        store, arrays = layers.over(data, folder)
        stores.append(store)
        exact = layers.last_batch(data, arrays, store.in_memory) if trains else None
        return KeptColumns(arrays, head.data.checker, OrderOf.samples(data), data.names, exact)

    trained = kept(lasting, trains=True)
    return Kept(head, trained, None if held_out is None else kept(held_out, trains=False), stores)


def _described(parts: Split) -> str:
    return ", ".join(f"'{shown(name)}' {row.dtype}{list(row.shape)}" for name, row in parts.kept.items())


def _lasting(source: Source, what: str) -> Columns | Samples:
    """Return ``source``; raise DataError if its samples are not the same in every epoch."""
    if isinstance(source, Columns):
        return source
    if not isinstance(source, Samples):
        raise DataError(f"the {what} data are an iterable of batches, whose samples may differ in each epoch, so their "
                        "features cannot be kept; pass arrays or a dataset")  # fmt: skip
    if isinstance(source.dataset, Loadable):
        if source.dataset.augments and source.order.augments:
            raise DataError(f"the {what} data are augmented anew in each epoch, so their features cannot be kept; omit "
                            "augment, or keep_features")  # fmt: skip
        return source
    for i in range(min(TRIED, len(source.dataset))):
        if not _same(source.dataset[i], source.dataset[i]):
            raise DataError(f"sample {i} of the {what} data differs each time it is read, so its features cannot be "
                            "kept; omit random transforms, or keep_features")  # fmt: skip
    return source


def _same(a: Any, b: Any) -> bool:
    """Whether two samples of a dataset are equal."""
    if isinstance(a, Mapping):
        return all(_same(a[name], b[name]) for name in a)
    if isinstance(a, tuple | list):
        return all(map(_same, a, b))
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


class _FrozenLayers:
    """The frozen layers of a step, as in training or as in evaluation, applied to all samples of a source."""

    def __init__(self, head: HeadSession, trains: bool) -> None:
        self._head, self._trains = head, trains
        self._opened, self._sessions = list[Sizes | None](), list[ComputingSession]()
        self._what = "training" if trains else "validation"

    def over(self, source: Columns | Samples, folder: Path | None) -> tuple[KeptRows, Arrays]:
        """Return the storage and the arrays that the head reads, with a row for each sample.

        Besides the kept values, inputs and targets of a dataset are stored, so that it is not read again.
        """
        manifest, parts = self._head.whole.manifest, self._head.split
        batches = checked_batches(self._head.whole, source, fills=self._trains)
        first, rows = next(batches)
        kept, given = dict(parts.kept), Arrays()
        for name in (*parts.passed, *(t.name for t in manifest.targets)):
            if isinstance(source, Columns):
                given[name] = source.arrays[name]
            else:
                kept[name] = Row(first[name].shape[1:], first[name].dtype.name)
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
            own = array[0].astype(np.float64)
            for padded in (beside[name][0], np.asarray(kept[name][short : short + 1])[0]):
                limit = ROUNDING * np.abs(own).max(initial=0)
                if own.shape != padded.shape or np.abs(own - padded).max(initial=0) > limit:
                    raise DataError(
                        f"padding changes '{shown(name)}', so its value for a sample depends on the longest sample of "
                        "the batch and cannot be kept; pad all samples to one length, or omit keep_features"
                    )

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
