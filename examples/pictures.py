"""What the examples draw with: ``--plot FILE`` writes a picture of what was learnt (``.svg`` or ``.png``).

It needs matplotlib (the extra ``demo``). The same numbers give the same file.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

WIDTH = 7.5  # of a picture, in inches
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "gradgraph", "font.size": 9, "axes.spines.top": False,
         "axes.spines.right": False, "image.cmap": "gray_r", "image.interpolation": "nearest"}  # fmt: skip
NO_NOTES = {
    "svg": dict.fromkeys(["Creator", "Date", "Format", "Type"]),
    "png": {"Software": None},
}


def begin(main: Callable[..., None]) -> None:
    """Run an example with what its command line asks for."""
    parser = argparse.ArgumentParser(description=str(sys.modules[main.__module__].__doc__).partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="write a picture there, .svg or .png (needs matplotlib)")
    main(plot=parser.parse_args().plot)


@contextlib.contextmanager
def panels(path: str, rows: int = 1, columns: int = 1, height: float = 2.6, **options: Any) -> Iterator[Any]:
    """Axes ``[rows, columns]`` (or ``[columns]``, if there is one row), written to ``path`` at the end."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **options)
        yield axes[0] if rows == 1 else axes
        kind = "png" if path.endswith(".png") else "svg"
        figure.savefig(path, format=kind, dpi=100, metadata=NO_NOTES[kind])


def gallery(path: str, images: Sequence[np.ndarray], titles: Sequence[str], columns: int) -> None:
    """Images in rows, each below its title."""
    rows = -(-len(images) // columns)
    with panels(path, rows, columns, height=WIDTH / columns * 1.25 * rows) as axes:
        for place, image, title in zip(np.ravel(axes), images, titles, strict=True):
            show(place, image, title)


def show(axes: Any, image: np.ndarray, title: str = "", **options: Any) -> None:
    """An image without ticks."""
    axes.imshow(image, **options)
    axes.set_title(title, fontsize=8)
    axes.set_axis_off()
