"""IREE: onnx is imported as MLIR, compiled for the processor at hand, and run by its virtual machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import iree.runtime
import numpy as np
from feeding import Run, main
from iree.compiler.tools.import_onnx import __main__ as importer
from ports import ports

COMPILE = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
HOST = ["--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O1"]


def open_model(path: Path) -> Run:
    program = path.with_suffix(".vmfb")
    tools = Path(sys.executable).parent
    imported = path.with_suffix(".mlir")
    importer.main(importer.parse_arguments([str(path), "-o", str(imported), "--opset-version", "21"]))
    _call(tools / "iree-compile", imported, "-o", program, *COMPILE, *HOST)
    module = iree.runtime.load_vm_flatbuffer_file(str(program), driver="local-sync")
    names = module.vm_module.function_names
    function = next(module[name] for name in names if not name.startswith("__") and "$" not in name)
    names, outputs = ports(path)

    def run(feeds):
        results = function(*(np.array(feeds[name], order="C") for name in names))
        results = results if isinstance(results, (tuple, list)) else [results]
        return {name: result.to_host() for name, result in zip(outputs, results, strict=True)}

    return run


def _call(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        raise SystemExit(errors[0] if errors else done.stderr[-300:])


if __name__ == "__main__":
    main(open_model)
