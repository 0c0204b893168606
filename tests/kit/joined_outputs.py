"""A model whose outputs have samples on different axes, or no samples, for tests of joining outputs of batches."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

# outputs: a row per sample, samples on the second axis, samples on an axis of unknown size, a sum, a vector of sums, a
# weight, and a selection of numbers
MODEL = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x) => (float[N, 2] rows, float[3, N] turned,
    float[2, M, 3] guessed, float total, float[3] sums, float[3, 2] weight, float[k] some)
<float[3, 2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}> {
    rows = MatMul (x, w)
    turned = Transpose <perm = [1, 0]> (x)
    axes = Constant <value_ints = [0]> ()
    one = Unsqueeze (x, axes)
    guessed = Concat <axis = 0> (one, one)
    total = ReduceSum <keepdims = 0> (x)
    sums = ReduceSum <keepdims = 0> (x, axes)
    weight = Identity (w)
    zero = Constant <value_float = 0.0> ()
    positive = Greater (x, zero)
    row = Constant <value_ints = [-1]> ()
    flat = Reshape (positive, row)
    some = Compress (x, flat)
}"""
X = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)


def model(*outputs: str) -> onnx.ModelProto:
    """Return the model with only these outputs."""
    whole = onnx.parser.parse_model(MODEL)
    kept = [o for o in whole.graph.output if o.name in outputs]
    del whole.graph.output[:]
    whole.graph.output.extend(kept)
    return whole
