"""Pass: rewrite float16 products with a transposed operand that would crash onnxruntime.

If one operand of a float16 MatMul is a matrix, and the other a Transpose that moves leading axes (such as ``perm=[1, 0,
2]`` of [N, T, I]), onnxruntime 1.32 crashes (SIGSEGV) when it fuses them. It does not fuse operands of equal rank, so
leading axes of size 1, which broadcast, are added to the matrix.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.nodes import made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, calls_of


def align_product_ranks(model: ir.Model) -> ir.Model:
    """Add leading axes to matrices that multiply transposed float16 tensors, in place; return ``model``."""
    editor: Editor | None = None
    for node in calls_of(model, "MatMul"):
        for moved, matrix in ((0, 1), (1, 0)):
            x, w = node.inputs[moved], node.inputs[matrix]
            rank = _moved_rank(x)
            if rank is None or w is None or len(shape_of(w) or ()) != 2:
                continue
            editor = editor or Editor(model)
            operands = [editor.op.wrap(x), editor.op.Unsqueeze(editor.op.wrap(w), list(range(rank - 2)))]
            editor.replace(node, editor.op.MatMul(*operands[:: 1 if moved == 0 else -1]))
            break
    return model


def _moved_rank(x: ir.Value | None) -> int | None:
    """Return the rank of ``x`` if it is the float16 output of a Transpose that permutes axis 0, else None."""
    while (maker := made_by(x, "Identity")) is not None:
        x = maker.inputs[0]
    maker = made_by(x, "Transpose")
    if x is None or x.dtype != ir.DataType.FLOAT16 or maker is None:
        return None
    perm = maker.attributes.get_ints("perm") or ()
    return len(perm) if len(perm) > 2 and perm[0] != 0 else None
