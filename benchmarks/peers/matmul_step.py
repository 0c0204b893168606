"""Not a peer but the yardstick: one product of 2048 x 2048 matrices by onnxruntime's MatMul."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime as ort

from benchmarks.job import Job
from benchmarks.roster import YARDSTICK_SIZE

SIZE = YARDSTICK_SIZE
MODEL = f"""<ir_version: 10, opset_import: ["" : 21]>
product (float[{SIZE},{SIZE}] a, float[{SIZE},{SIZE}] b) => (float[{SIZE},{SIZE}] c) {{ c = MatMul(a, b) }}"""


class Peer:
    versions = f"onnxruntime {ort.__version__}"

    def __init__(self, job: Job) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = job.threads
        model = onnx.parser.parse_model(MODEL).SerializeToString()
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        rng = np.random.default_rng(0)
        self.feeds = {name: rng.normal(size=(SIZE, SIZE)).astype(np.float32) for name in ("a", "b")}

    def step(self) -> float:
        self.session.run(None, self.feeds)
        return 0.0
