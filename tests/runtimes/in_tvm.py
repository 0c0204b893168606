"""TVM: onnx is imported as Relax and compiled for the processor at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import tvm
from feeding import Run, main
from ports import ports
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx


def open_model(path: Path) -> Run:
    proto = onnx.load(path)
    module = from_onnx(proto, opset=21, keep_params_in_input=False, sanitize_input_names=False)
    machine = relax.VirtualMachine(tvm.compile(relax.transform.DecomposeOpsForInference()(module), "llvm"), tvm.cpu())
    names, outputs = ports(path)

    def run(feeds):
        results = machine["main"](*(tvm.runtime.tensor(np.array(feeds[name], order="C")) for name in names))
        results = [results] if hasattr(results, "numpy") else list(results)
        return {name: result.numpy() for name, result in zip(outputs, results, strict=True)}

    return run


if __name__ == "__main__":
    main(open_model)
