"""onnxruntime's CPU provider."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
from feeding import Run, main


def open_model(path: Path) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    taken = {x.name for x in session.get_inputs()}
    names = [y.name for y in session.get_outputs()]

    def run(feeds):
        return dict(zip(names, session.run(None, {k: v for k, v in feeds.items() if k in taken}), strict=True))

    return run


if __name__ == "__main__":
    main(open_model)
