"""tract, in Rust, through its Python package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tract
from feeding import Run, main
from ports import ports


def open_model(path: Path) -> Run:
    model = tract.onnx().load(path)
    names, outputs = ports(path)
    model.analyse()
    runnable = model.into_model().into_runnable()

    def run(feeds):
        results = runnable.run([np.array(feeds[name], order="C") for name in names])
        return {name: result.to_numpy() for name, result in zip(outputs, results, strict=True)}

    return run


if __name__ == "__main__":
    try:
        main(open_model)
    except tract.TractError as error:
        said = str(error).partition("Stack backtrace")[0]
        raise SystemExit(" ".join(said.split())) from None
