"""Onnx's ReferenceEvaluator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from feeding import Run, main
from onnx.reference import ReferenceEvaluator


def open_model(path: Path) -> Run:
    session = ReferenceEvaluator(str(path))

    def run(feeds):
        with np.errstate(over="ignore"):
            values = session.run(None, {k: v for k, v in feeds.items() if k in session.input_names})
        return dict(zip(session.output_names, values, strict=True))

    return run


if __name__ == "__main__":
    main(open_model)
