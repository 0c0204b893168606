"""The backend ``coreml``: nodes that onnxruntime's CoreML provider supports as an ML Program, on iPhones and Macs.

The list is from the provider's own table; we had no Apple machine to run it. onnxruntime computes unsupported nodes on
the CPU, so a file for this backend runs everywhere. Each switch costs a copy; the forms avoid some of them: Core ML
requires some inputs as constants (a Gemm's second factor, a Conv's bias), but weights are inputs of a step.
"""

from gradgraph.backends.backend import Backend, lowering_in

COREML = Backend(
    name="coreml",
    about="standard nodes in the forms that onnxruntime's CoreML provider supports (from its table; not run by us)",
    provider="CoreMLExecutionProvider",
    load=lowering_in(f"{__name__}.coreml_lowering"),
)
