"""Pass: recurrent layers in the form that runtimes take."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.passes.normal.edit import Editor, is_wanted, nodes_of

_OPERATORS = frozenset({"RNN", "GRU", "LSTM"})
_BATCH_FIRST = (0, 5, 6)  # X, initial_h and initial_c
_ACTIVATIONS = "Affine Elu HardSigmoid LeakyRelu Relu ScaledTanh Sigmoid Softplus Softsign Tanh ThresholdedRelu"
_SPELLING = {name.lower(): name for name in _ACTIVATIONS.split()}
_SWAP = [1, 0, 2]  # [N, T, I] to [T, N, I], [N, D, H] to [D, N, H], and back


def write_recurrent(model: ir.Model) -> bool:
    """Rewrite RNN, GRU and LSTM where onnxruntime would not run them; True if there are new nodes.

    1. hidden_size, which the specification leaves out, is taken from the shape of R;
    2. layout 1 (batch first) becomes layout 0 between transposes;
    3. activations are spelt as the specification spells them, which onnxruntime's RNN insists on.
    """
    editor: Editor | None = None
    for node in list(nodes_of(model)):
        if node.domain == "" and node.op_type in _OPERATORS:
            _write_hidden_size(node)
            _spell_activations(node)
            if "layout" in node.attributes and node.attributes["layout"].as_int():
                editor = editor or Editor(model)
                _put_time_first(editor, node)
    return editor is not None


def _write_hidden_size(node: ir.Node) -> None:
    weight = node.inputs[2]
    shape = shapes.shape_of(weight)
    if "hidden_size" not in node.attributes and shape is not None and isinstance(shape[-1], int):
        node.attributes["hidden_size"] = ir.AttrInt64("hidden_size", shape[-1])


def _spell_activations(node: ir.Node) -> None:
    if "activations" in node.attributes:
        names = [_SPELLING.get(name.lower(), name) for name in node.attributes["activations"].as_strings()]
        node.attributes["activations"] = ir.AttrStrings("activations", names)


def _put_time_first(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    inputs = [
        op.Transpose(x, perm=_SWAP) if x is not None and i in _BATCH_FIRST else x
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
