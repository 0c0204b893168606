"""The yardstick instead of a library: one product of 2048 x 2048 matrices by onnxruntime's MatMul."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime as ort

from benchmarks.job import Job
from benchmarks.roster import YARDSTICK_SIZE

MATRIX = f"float[{YARDSTICK_SIZE},{YARDSTICK_SIZE}]"
MODEL = f"""<ir_version: 10, opset_import: ["" : 21]>
product ({MATRIX} a, {MATRIX} b) => ({MATRIX} c) {{ c = MatMul(a, b) }}"""


class Peer:
    versions = f"onnxruntime {ort.__version__}"

    def __init__(self, job: Job) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = job.threads
        model = onnx.parser.parse_model(MODEL).SerializeToString()
        providers = [*["CUDAExecutionProvider"] * (job.device == "cuda"), "CPUExecutionProvider"]
        self.session = ort.InferenceSession(model, options, providers=providers)
        self.binding = self.session.io_binding()
        rng = np.random.default_rng(0)
        for name in ("a", "b"):
            matrix = rng.normal(size=(YARDSTICK_SIZE, YARDSTICK_SIZE)).astype(np.float32)
            self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(matrix, job.device, 0))
        self.binding.bind_output("c", job.device)

    def step(self) -> float:
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()
        return 0.0
