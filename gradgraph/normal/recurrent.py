"""Pass: recurrent layers have time first."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph.normal.edit import Editor, is_wanted, nodes_of

_OPERATORS = frozenset({"RNN", "GRU", "LSTM"})
_STATES = (5, 6)  # initial_h and initial_c; input 0 is X
_SWAP = [1, 0, 2]  # [N, T, I] to [T, N, I], [N, D, H] to [D, N, H] and back


def put_time_first(model: ir.Model) -> bool:
    """Write RNN, GRU and LSTM with layout 1 (batch first), which onnxruntime does not run, as layout 0 between
    transposes; True if there were any.
    """
    editor: Editor | None = None
    for node in list(nodes_of(model)):
        layout = node.attributes.get("layout") if node.domain == "" and node.op_type in _OPERATORS else None
        if layout is not None and layout.as_int():
            editor = editor or Editor(model)
            _put_time_first(editor, node)
    return editor is not None


def _put_time_first(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    inputs = [
        op.Transpose(x, perm=_SWAP) if x is not None and i in (0, *_STATES) else x
        for i, x in enumerate(map(editor.var, node.inputs))
    ]
    attrs: dict[str, Any] = {a.name: a for a in node.attributes.values() if a.name != "layout"}
    results = op.emit(node.op_type, *inputs, outputs=len(node.outputs), **attrs)
    results = results if isinstance(results, tuple) else (results,)
    swapped = [
        op.Transpose(y, perm=[2, 0, 1, 3] if i == 0 else _SWAP) if is_wanted(node.outputs[i]) else None
        for i, y in enumerate(results)
    ]
    editor.replace(node, *swapped)
