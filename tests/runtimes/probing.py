"""Runs numbered models in one runtime: ``python probing.py RUNTIME FOLDER FIRST LAST``, by the Python that has it.

Reads ``<number>.onnx`` and ``<number>.npz``, writes ``<number>.out.npz`` or a line that says why not. It may crash at
any model: a line tells which one is begun, and ``probe.py`` starts it anew behind that.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    runtime, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    open_model = importlib.import_module(f"in_{runtime}").open_model
    for number in range(first, last):
        print(f"begin {number}", flush=True)
        try:
            with np.load(folder / f"{number}.npz", allow_pickle=False) as arrays:
                feeds = dict(arrays)
            results = open_model(folder / f"{number}.onnx")(feeds)
            np.savez(folder / f"{number}.out.npz", **{k: np.asarray(v) for k, v in results.items()})
            print(f"done {number}", flush=True)
        except (Exception, SystemExit) as error:
            words = " ".join(str(error).split()) or type(error).__name__
            print(f"refused {number} {words[:300]}", flush=True)


if __name__ == "__main__":
    main()
