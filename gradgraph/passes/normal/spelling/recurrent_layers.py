"""Pass: write recurrent layers in the form that runtimes accept."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import all_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, calls_of, is_wanted

_BATCH_FIRST = (0, 5, 6)  # X, initial_h and initial_c
_ACTIVATIONS = "Affine Elu HardSigmoid LeakyRelu Relu ScaledTanh Sigmoid Softplus Softsign Tanh ThresholdedRelu"
_SPELLING = {name.lower(): name for name in _ACTIVATIONS.split()}
_SWAP = [1, 0, 2]  # [N, T, I] to [T, N, I], [N, D, H] to [D, N, H], and back


def write_recurrent(model: ir.Model) -> bool:
    """Rewrite RNN, GRU and LSTM in the form that onnxruntime supports; return True if nodes were added.

    1. hidden_size, which is optional, is set from the shape of R.
    2. Layout 1 (batch first) becomes layout 0 between transposes.
    3. Activations are spelt as in the specification, which onnxruntime's RNN requires.
    """
    editor: Editor | None = None
    for node in calls_of(model, "RNN", "GRU", "LSTM"):
        size = (shape_of(node.inputs[2]) or (None,))[-1]
        if "hidden_size" not in node.attributes and isinstance(size, int):
            node.attributes["hidden_size"] = ir.AttrInt64("hidden_size", size)
        if (names := node.attributes.get_strings("activations")) is not None:
            spelt = [_SPELLING.get(name.lower(), name) for name in names]
            node.attributes["activations"] = ir.AttrStrings("activations", spelt)
        if node.attributes.get_int("layout", 0):
            editor = editor or Editor(model)
            _put_time_first(editor, node)
    return editor is not None


def _put_time_first(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    inputs = [
        op.Transpose(x, perm=_SWAP) if x is not None and i in _BATCH_FIRST else x
        for i, x in enumerate(map(editor.op.wrap, node.inputs))
    ]
    attrs: dict[str, Any] = {a.name: a for a in node.attributes.values() if a.name != "layout"}
    results = all_of(op.emit(node.op_type, *inputs, outputs=len(node.outputs), **attrs))
    swapped = [
        op.Transpose(y, perm=[2, 0, 1, 3] if i == 0 else _SWAP) if is_wanted(node.outputs[i]) else None
        for i, y in enumerate(results)
    ]
    editor.replace(node, *swapped)
