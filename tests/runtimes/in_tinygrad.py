"""tinygrad, on the processor at hand (it wants clang or LLVM there)."""

from __future__ import annotations

from pathlib import Path

from feeding import Run, main
from tinygrad import Tensor, TinyJit
from tinygrad.nn.onnx import OnnxRunner


def open_model(path: Path) -> Run:
    runner = OnnxRunner(path)
    names = list(runner.graph_inputs)

    @TinyJit
    def together(*fed):
        return {name: result.realize() for name, result in runner(dict(zip(names, fed, strict=True))).items()}

    def run(feeds):
        results = together(*(Tensor(feeds[name]).clone().realize() for name in names))
        return {name: result.numpy() for name, result in results.items()}

    return run


if __name__ == "__main__":
    main(open_model)
