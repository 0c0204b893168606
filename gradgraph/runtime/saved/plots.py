"""Images of curves, where matplotlib is there."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradgraph.errors import DataError, RuntimeUnavailableError, shown
from gradgraph.files.atomic import write_atomically


def drawn(draw: Callable[[Any], None], size: tuple[float, float], path: str | os.PathLike[str] | None = None) -> Any:
    """A figure that ``draw`` has drawn, also written to ``path`` if given.

    Raises:
        RuntimeUnavailableError: matplotlib is not installed.
        DataError: the suffix of ``path`` names no image format.
        OutputError: ``path`` cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeUnavailableError("plots need matplotlib; install it with: pip install matplotlib") from None
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    if path is not None:
        image = io.BytesIO()
        try:
            figure.savefig(image, format=Path(path).suffix.lstrip(".") or "png", dpi=120)
        except ValueError:
            raise DataError(f"'{shown(Path(path).suffix)}' is no image format; use .png, .svg or .pdf") from None
        write_atomically(path, image.getvalue())
    return figure
