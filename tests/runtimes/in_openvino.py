"""OpenVINO's CPU plugin, in float32 throughout."""

from __future__ import annotations

from pathlib import Path

import openvino
from feeding import Run, main


def open_model(path: Path) -> Run:
    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(str(path)), "CPU", settings)
    request = compiled.create_infer_request()

    def run(feeds):
        taken = {}
        for port in compiled.inputs:
            name = next(n for n in port.get_names() if n in feeds)
            taken[port] = feeds[name]
        results = request.infer(taken)
        return {name: results[port].copy() for port in compiled.outputs for name in port.get_names()}

    return run


if __name__ == "__main__":
    main(open_model)
