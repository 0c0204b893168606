"""Plots of curves with matplotlib, if installed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradgraph.errors import DataError, RuntimeUnavailableError, shown
from gradgraph.files.atomic import write_atomically
from gradgraph.runtime.saved.curves import ACROSS, Panel


def drawn(draw: Callable[[Any], None], size: tuple[float, float], path: str | os.PathLike[str] | None = None) -> Any:
    """Create a matplotlib figure, also written to ``path`` if given.

    Args:
        size: width and height in inches.
        path: image file to write; its suffix is the format.

    Raises:
        RuntimeUnavailableError: if matplotlib is not installed.
        DataError: if the suffix of ``path`` is not an image format.
        OutputError: if ``path`` cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeUnavailableError("plots need matplotlib; pip install matplotlib") from None
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    if path is not None:
        image = io.BytesIO()
        try:
            figure.savefig(image, format=Path(path).suffix.lstrip(".") or "png", dpi=120)
        except ValueError:
            raise DataError(f"'{shown(Path(path).suffix)}' is not an image format; use .png, .svg or .pdf") from None
        write_atomically(path, image.getvalue())
    return figure


def drawn_panels(panels: Sequence[Panel], path: str | os.PathLike[str] | None = None) -> Any:
    """Create a matplotlib figure of several panels; ``path`` and errors as for :func:`drawn`."""
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)

    def draw(figure: Any) -> None:
        spots = figure.subplots(down, across, squeeze=False).ravel()
        for spot in spots[len(panels) :]:
            spot.remove()
        for axes, panel in zip(spots, panels, strict=False):
            for curve in panel.curves:
                (line,) = axes.plot(curve.x, curve.y, marker="." if len(curve.x) < 50 else "", label=curve.name)
                at = [i for i, x in enumerate(curve.x) if x == curve.kept]
                axes.plot([curve.x[i] for i in at], [curve.y[i] for i in at], "o", fillstyle="none", markersize=9,
                          color=line.get_color(), label="kept" if at and curve is panel.curves[-1] else "")  # fmt: skip
            axes.set_title(panel.title)
            axes.set_xlabel(panel.x_label)
            axes.set_ylabel(panel.y_label)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend()
            axes.grid(alpha=0.3)

    return drawn(draw, (5 * across, 3.5 * down), path)
