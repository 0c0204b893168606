"""Fingerprints by which ranks verify that they have the same data, and the number of loss terms in a batch."""

from __future__ import annotations

import hashlib

import numpy as np

from gradgraph.data.arrays.batch import BatchChecker
from gradgraph.data.sources.sources import Columns, Samples, Source

ROWS = 64  # number of rows in a fingerprint


def seen(source: Source | None) -> str:
    """Return a fingerprint of the data: the number of samples, and a digest.

    The digest covers names, dtypes, shapes and some rows of arrays, or the file names of datasets.
    """
    if source is None:
        return "none"
    digest = hashlib.sha256()
    if isinstance(source, Columns):
        for name, array in source.arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            for row in np.linspace(0, len(array) - 1, min(ROWS, len(array)), dtype=np.int64):
                digest.update(np.ascontiguousarray(array[int(row) : int(row) + 1]).tobytes())
    elif isinstance(source, Samples):
        digest.update("\n".join(file.name for file in source.files).encode())
    rows = "batches" if source.rows is None else f"{source.rows} samples"
    return f"{rows}, {digest.hexdigest()[:12]}"


def usual_terms(source: Source, checker: BatchChecker, batch_size: int) -> int:
    """Return the number of loss terms in this rank's share of the first batch; ``batch_size`` if that is unknown."""
    if not isinstance(source, Columns):
        return batch_size
    return checker.counts(checker(dict(next(iter(source.batches(0))))))[1]
