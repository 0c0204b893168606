"""Pass: convert every ai.onnx node to opset 21, IR version 10."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.constant_nodes import set_ir_version
from gradgraph.graph.schemas import signature
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.passes.normal.edit import Editor, nodes_of
from gradgraph.passes.normal.opsets import downgrade, upgrade


def convert_to_opset(model: ir.Model) -> bool:
    """Rewrite nodes whose meaning or form differs at opset 21; return True if the model had a different opset.

    1. Of opsets 1 to 20, nodes whose form changed are rewritten (``upgrade``); all others mean the same at opset 21.
    2. Of opsets 22 to 28, operators and attributes that opset 21 does not have are rewritten (``downgrade``); others
       differ only in the element types that they support.
    3. Nodes in bodies of If, Loop and Scan are included. A node inlined from a function has that function's opset.

    Raises:
        ModelError: an operator has no form at opset 21.
    """
    opset = model.opset_imports.get("", OPSET)
    nodes = [n for n in nodes_of(model) if n.domain == ""]
    changed = opset != OPSET or any(n.version not in (None, OPSET) for n in nodes)
    if changed:
        editor = Editor(model)
        for node in nodes:
            convert(editor, node, node.version or opset)
            _record_types(node)
    model.opset_imports[""] = OPSET
    set_ir_version(model, IR_VERSION)
    return changed


def convert_below(model: ir.Model, least: int) -> bool:
    """Convert a model with inferred types if its opset is below ``least``; return True if it was converted."""
    return model.opset_imports.get("", OPSET) < least and convert_to_opset(model)


def convert_old(model: ir.Model) -> bool:
    """Convert a model if it has nodes of opset 1 to 6; return True if it was converted.

    ONNX cannot infer the types of all operators of these opsets, so each node's types are inferred after its
    conversion.
    """
    opset = model.opset_imports.get("", OPSET)
    oldest = min([opset, *(n.version or opset for n in nodes_of(model) if n.domain == "")])
    return oldest < upgrade.FULLY_INFERRED and convert_to_opset(model)


def convert(editor: Editor, node: ir.Node, opset: int) -> None:
    """Convert one node from ``opset`` to 21, in place; if its function body replaces it, convert the body's nodes."""
    node.version = None
    if opset < 6:
        node.attributes.pop("consumed_inputs", None)  # allowed buffers to be reused
    form = upgrade.form_for(node.op_type, opset) or downgrade.form_for(node.op_type, opset)
    if form is None:
        return
    for new in editor.write_form(node, form, f"does not fit opset {opset}"):
        if new.version is not None:
            convert(editor, new, new.version)


def _record_types(node: ir.Node) -> None:
    """Record element types of outputs that are known by now; converters of later nodes read them."""
    schema = signature(node.op_type, OPSET)
    tensors_only = all(v is None or isinstance(v.type, ir.TensorType) for v in node.inputs)
    if node.graph is None or schema is None or not tensors_only:
        return
    dtypes = schema.output_dtypes(node.inputs, {**node.attributes}, len(node.outputs))
    for out, dtype in zip(node.outputs, dtypes, strict=True):
        if out.type is None and dtype is not None:
            out.type = ir.TensorType(dtype)
