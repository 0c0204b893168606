"""``fit(keep_features=…)``: train on values of the frozen layers, computed once for each sample."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradgraph.data.arrays.padded import Padded
from gradgraph.data.dataset import Loadable
from gradgraph.data.sources.sources import Columns, Indexed, Samples, Source
from gradgraph.errors import ArgumentError, BuildError, DataError, listed, shown
from gradgraph.runtime.execution.shaped import Sizes
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.features.computed_layers import FrozenLayers
from gradgraph.runtime.features.head import HeadSession
from gradgraph.runtime.features.kept_columns import KeptColumns, OrderOf, checked_batches
from gradgraph.runtime.features.kept_rows import KeptRows
from gradgraph.runtime.features.kept_tokens import Widths
from gradgraph.runtime.features.split import Split, split
from gradgraph.runtime.features.variants import Variants

log = logging.getLogger("gradgraph.runs")  # which `gradgraph train` prints

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
    source: Indexed
    validation: Indexed | None
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
    variants: Variants | None = None,
) -> Kept | None:
    """Compute the frozen layers once for each sample.

    Args:
        whole: the session of the whole step.
        source, validation: training and validation data.
        keep: True, or "auto" to return None instead of raising an error.
        checkpoint: the path next to which files are written if memory does not suffice; None for a temporary folder.
        variants: the augmented variants of each sample to compute; None for data that are not augmented.

    Raises:
        ArgumentError: if there are ``variants``, but the data are not augmented.
        BuildError: if no layer is the same in every epoch.
        DataError: if the samples differ between epochs without ``variants``, or in size.
    """
    folder = None if checkpoint is None else Path(checkpoint).with_suffix(".features")
    try:
        return _kept(whole, source, validation, folder, variants)
    except (BuildError, DataError) as error:
        if keep != "auto":
            raise
        log.info("frozen layers are computed in every epoch: %s", error)
        return None


def _kept(
    whole: StepSession, source: Source, validation: Source | None, folder: Path | None, variants: Variants | None
) -> Kept:
    if getattr(whole.team, "joint_norms", None) is not None:
        raise BuildError("features cannot be kept with sync_batch_norm; train without one of them")
    if not whole.team.is_first:
        folder = None  # each rank keeps all samples; only rank 0 writes next to the checkpoint
    if whole.manifest.steps:
        raise BuildError(f"keep_features supports a single step only, but there are {listed(whole.manifest.steps)}")
    lasting = _lasting(source, "training") if variants is None else _varying(source)
    held_out = None if validation is None else _lasting(validation, "validation")
    widths = None if variants is not None else Widths.of(lasting, whole.manifest.batch)
    if widths is None:
        first, _ = next(checked_batches(whole, lasting, fills=True))
        parts = split(whole.definition, {s.name: first[s.name].shape for s in whole.manifest.inputs})
        sizes = whole.part.sizes(first)
    else:
        parts = split(whole.definition, widths.wide, widths.open)
        sizes = _first_sizes(whole, lasting)
        widths = widths if _differ(parts, widths) else None
    log.info("computed once for each sample: %s; after it, %s", _described(parts), parts.changing)
    head = HeadSession(whole, parts, sizes)
    trained, held = _computed(head, lasting, folder, widths, variants), None
    if widths is not None:
        head.expect_usual()
    if held_out is not None:
        held = _computed(head, held_out, folder, widths, None, trains=False)
    stores = [each[0] for each in (trained, held) if each is not None]
    return Kept(head, trained[1], None if held is None else held[1], stores)


def _computed(
    head: HeadSession, source: Columns | Samples, folder: Path | None, widths: Widths | None,
    variants: Variants | None, trains: bool = True,
) -> tuple[KeptRows, Indexed]:  # fmt: skip
    """Compute the frozen layers for all samples, and return the storage and the source of their values.

    Args:
        widths: the sizes of the training data that differ between batches; None if the head reads none of them.
        trains: whether ``source`` is the training data.
    """
    layers = FrozenLayers(head, trains)
    if variants is not None:
        assert isinstance(source, Samples)
        return layers.over_variants(source, folder, variants)
    if widths is not None:
        own = widths if trains else Widths.of(source, head.whole.manifest.batch)
        return layers.over_tokens(source, folder, own, widths.places)
    store, arrays = layers.over(source, folder)
    exact = layers.last_batch(source, arrays, store.in_memory) if trains else None
    return store, KeptColumns(arrays, head.data.checker, OrderOf.samples(source), source.names, exact)


def _described(parts: Split) -> str:
    dims = {name: ", ".join(map(str, row.dims)) for name, row in parts.kept.items()}
    return ", ".join(f"'{shown(name)}' {row.dtype}[{dims[name]}]" for name, row in parts.kept.items())


def _first_sizes(whole: StepSession, source: Columns | Samples) -> Sizes:
    """Return the sizes for which the training session of the whole step is, or would be, created."""
    p = whole.progress
    if p.sizes is not None:
        return p.sizes
    batch = next(iter(source.batches(p.epoch, p.batch)))
    return whole.part.sizes(whole.data.checker(batch))


def _differ(parts: Split, widths: Widths) -> bool:
    """Whether a kept value, or an input or target that the head reads, has a size that differs between batches."""
    read = {*parts.passed, *(target.name for target in parts.head.manifest.targets)}
    return any(any(row.open) for row in parts.kept.values()) or not read.isdisjoint(widths.differing)


def _lasting(source: Source, what: str) -> Columns | Samples:
    """Return ``source``; raise DataError if its samples are not the same in every epoch."""
    if isinstance(source, Columns):
        return source
    varies = _how_it_varies(_dataset(source, what))
    if varies is not None:
        keep_some = "pass feature_variants to keep some variants of each sample, or " if what == "training" else ""
        in_shell = "add --feature-variants to keep some variants of each sample, or " if keep_some else ""
        raise DataError(
            f"{varies.format(f'the {what} data')}, so their features cannot be kept",
            remedy=f"{keep_some}omit keep_features",
            shell=f"{in_shell}omit --keep-features",
        )
    return _dataset(source, what)


def _varying(source: Source) -> Samples:
    """Return ``source``; raise an error unless its samples are augmented anew in each epoch."""
    if isinstance(source, Columns) or _how_it_varies(samples := _dataset(source, "training")) is None:
        raise ArgumentError("feature_variants has no effect, since the training data are not augmented; omit it")
    if isinstance(samples.dataset, Padded):
        raise DataError("samples are padded to the longest of their batch, which feature_variants does not support; "
                        "pad all samples to one length, or omit keep_features and feature_variants")  # fmt: skip
    return samples


def _dataset(source: Source, what: str) -> Samples:
    """Return ``source``; raise DataError if it is an iterable of batches."""
    if isinstance(source, Samples):
        return source
    raise DataError(f"the {what} data are an iterable of batches, whose samples may differ in each epoch, so their "
                    "features cannot be kept; pass arrays or a dataset")  # fmt: skip


def _how_it_varies(source: Samples) -> str | None:
    """Return a clause about ``{}``, the data, that says how they differ between epochs; None if they do not."""
    if isinstance(source.dataset, Loadable):
        return "{} are augmented anew in each epoch" if source.dataset.augments and source.order.augments else None
    for i in range(min(TRIED, len(source.dataset))):
        if not _same(source.dataset[i], source.dataset[i]):
            return f"sample {i} of {{}} differs each time it is read"
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two samples of a dataset are equal."""
    if isinstance(a, Mapping):
        return all(_same(a[name], b[name]) for name in a)
    if isinstance(a, tuple | list):
        return all(map(_same, a, b))
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
