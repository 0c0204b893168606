"""tinygrad, on the processor at hand (it wants clang or LLVM there)."""

from __future__ import annotations

from pathlib import Path

from feeding import Run, main
from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner


def open_model(path: Path) -> Run:
    runner = OnnxRunner(path)

    def run(feeds):
        results = runner({name: Tensor(feeds[name]) for name in runner.graph_inputs})
        return {name: result.numpy() for name, result in results.items()}

    return run


if __name__ == "__main__":
    main(open_model)
