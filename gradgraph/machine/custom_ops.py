"""Custom-op libraries for onnxruntime. Users name them; libraries that a model refers to are never loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from gradgraph.errors import RuntimeUnavailableError, shown

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

KNOWN: dict[Path, None] = {}  # libraries that every session of this process registers, in order


def absolute(paths: Paths) -> list[Path]:
    """Return the absolute paths of one path or several, without duplicates."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    return list(dict.fromkeys(Path(path).absolute() for path in given))


def register(options: ort.SessionOptions, paths: Paths = ()) -> None:
    """Register all ``KNOWN`` libraries, and the libraries at ``paths``, with the session options.

    Raises:
        RuntimeUnavailableError: if a library does not exist, or onnxruntime cannot load it.
    """
    for path in dict.fromkeys([*KNOWN, *absolute(paths)]):
        if not path.is_file():
            raise RuntimeUnavailableError(
                f"there is no custom-op library '{shown(path)}'; pass the path of a .so, .dylib or .dll file"
            )
        try:
            options.register_custom_ops_library(str(path))
        except Exception as error:  # any error of the system's loader
            reason = " ".join(shown(word) for word in str(error).split()[:40])
            raise RuntimeUnavailableError(
                f"onnxruntime cannot load the custom operators in '{shown(path)}': {reason}; build the library for "
                f"this machine and onnxruntime {ort.__version__}"
            ) from None
