"""Names of dimensions that keep onnxruntime from reusing a buffer across segments of recomputation.

Before a run, onnxruntime plans buffers: a later tensor of equal shape may reuse the buffer of a dead tensor, and the
buffer stays allocated in between. Reuse of forward buffers for recomputed tensors would cost half of the memory that
recomputation saves. Shapes with different dimension names count as different. So in a saved step the first size of
recomputed tensors, and of the gradients computed from them, gets its own name per segment: ``batch.again2``,
``64.again2``.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from gradgraph.autodiff.recompute import AGAIN
from gradgraph.passes.normal.edit import nodes_of

_LATE = f"{AGAIN}/After"  # name prefix of the After nodes that recomputation adds
_NAME = re.compile(rf"(.*)\.{AGAIN}\d+")


def separate_buffers(model: ir.Model) -> ir.Model:
    """Rename the first size of recomputed tensors, and of the gradients computed from them, in place.

    Shapes must not be inferred afterwards, as this would undo the names.
    """
    turns: dict[ir.Value, int] = {}
    part: dict[ir.Value, int] = {}
    for node in model.graph:
        own = (node.name or "").startswith(_LATE)
        turn = next((x for x in node.inputs[1:] if x is not None), None) if own else None
        if turn is not None:
            maker = turn.producer()
            if maker is not None and maker.op_type == "Expand":  # the turn, expanded to the rank of the tensor
                turn = maker.inputs[0] or turn
            at = turns.setdefault(turn, len(turns) + 1)
        else:
            at = max((part[x] for x in node.inputs if x in part), default=0)
        for y in node.outputs if at else ():
            part[y] = at
            if y.shape is not None and len(y.shape) and not y.is_graph_output():
                first, *others = y.shape
                name = first if isinstance(first, int) else first.value
                if name is not None:
                    y.shape = ir.Shape([f"{name}.{AGAIN}{at}", *others])
    return model


def restore_sizes(model: ir.Model) -> None:
    """Restore the original names and numbers of the sizes, in place."""
    for node in nodes_of(model):
        for y in node.outputs:
            first = y.shape[0] if y.shape is not None and len(y.shape) else None
            found = _NAME.fullmatch(first.value or "") if isinstance(first, ir.SymbolicDim) else None
            if found is not None and y.shape is not None:
                name = found.group(1)
                y.shape = ir.Shape([int(name) if name.isdecimal() else name, *[*y.shape][1:]])
