"""Evidence that a tensor of a model without a name is a tensor of a file, rather than computed from it.

PyTorch's older exporter evaluates constants, so a model may contain 0.5·W, |W| or the softmax of W where a module has
W, and nothing in the file says so. The numbers show it if the new weights are similar to the old ones, as after
fine-tuning; otherwise the weights from which the model was exported are required.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_COSINE, _RATIO = 0.9, 1.1  # of similar tensors: at least this cosine, and lengths that differ by this factor at most
_ROW_RATIO, _OTHER_ROWS = 1.25, 0.1  # lengths of rows that differ by this factor at most, except for this part
_ROUNDED, _EXACT = 0.3, 1e-4  # relative distances between a stored weight and its source: integers, and float32


def resembles(old: Array, new: Array) -> bool:
    """Whether a tensor is so similar to another that it is not a multiple or function of it.

    Args:
        old: the numbers in the model.
        new: the numbers that would replace them, of the same size; for matrices and kernels, outputs first.
    """
    a, b = (array.astype(np.float64, copy=False).reshape(-1) for array in (old, new))
    if np.array_equal(a, b):
        return True
    lengths = np.linalg.norm(a), np.linalg.norm(b)
    if not all(np.isfinite(lengths)) or min(lengths) == 0 or float(a @ b) < _COSINE * lengths[0] * lengths[1]:
        return False
    if not 1 / _RATIO < lengths[0] / lengths[1] < _RATIO:
        return False
    return _have_similar_rows(a, b, len(new) if new.ndim > 1 else 1)


def _have_similar_rows(a: Array, b: Array, rows: int) -> bool:
    lengths = [np.linalg.norm(array.reshape(rows, -1), axis=1) for array in (a, b)]
    low, high = np.minimum(*lengths), np.maximum(*lengths)
    return bool(np.mean(high > _ROW_RATIO * low) <= _OTHER_ROWS)


def is_stored(old: Array, new: Array, is_rounded: bool) -> bool:
    """Whether a model stores ``new`` as ``old``, apart from rounding to integers or floats of 16 bits."""
    a, b = (array.astype(np.float64, copy=False).reshape(-1) for array in (old, new))
    distance = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), np.finfo(np.float64).tiny)
    if not is_rounded:
        return distance <= _EXACT or np.array_equal(a, b)
    return distance <= _EXACT or (distance < _ROUNDED and resembles(old, new))
