"""Arrays of .npz files."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return all arrays of a file, which is closed: from Python 3.14 on, a file left open fails some later test."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)
