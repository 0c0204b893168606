"""Core ML, on iPhones and Macs: the nodes that onnxruntime's CoreML provider takes as an ML Program, by its own table.

We had no Apple machine to run it on. onnxruntime computes nodes that the provider does not take on the CPU, so a file
for this backend runs everywhere. Each change of side costs a copy; the forms below avoid some. Core ML wants some
inputs as constants (the second factor of a Gemm, a bias of a Conv), and in a step of training weights are inputs: such
nodes are written as operators that take any tensor.
"""

from __future__ import annotations

from gradgraph.backends.backend import Backend, lowering_in

COREML = Backend(
    name="coreml",
    about="standard nodes in the forms that onnxruntime's CoreML provider takes (from its table; not run by us)",
    provider="CoreMLExecutionProvider",
    load=lowering_in(f"{__name__}.coreml_lowering"),
)
