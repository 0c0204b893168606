"""Removal of declared sizes of inner values."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.arguments import PATH, checked
from gradgraph.files.atomic import check_writable
from gradgraph.files.models import Source, load_model, save_model, to_proto
from gradgraph.surgery.operation import Path, Result


@checked(out=PATH.or_none())
def forget_sizes(model: Source, *, out: Path | None = None) -> Result:
    """Remove the declared sizes of inner values; inputs, outputs and weights keep theirs, and all values their types.

    Runtimes infer these sizes. Some exporters declare wrong ones, and onnxruntime then fails with "Shape mismatch
    attempting to re-use buffer": float16 CPU models of onnxruntime-genai's builder 0.18 do so once a past is fed.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        OutputError: ``out`` cannot be written.
    """
    if out is not None:
        check_writable(out)
    work = load_model(model)
    ends = set(work.graph.outputs)
    for node in ir.traversal.RecursiveGraphIterator(work.graph):
        for value in node.outputs:
            if value not in ends:
                value.shape = None
    if out is not None:
        save_model(work, out)
    return work if out is not None or isinstance(model, ir.Model) else to_proto(work)
