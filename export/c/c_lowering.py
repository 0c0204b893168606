"""Rewrite a model into the operators that ``c_reading`` supports, with all sizes fixed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import onnx
import onnx_ir as ir

from gradgraph.backends.engine import opened
from gradgraph.export.c import c_control, c_matmul, c_windows  # noqa: F401  (register operators)
from gradgraph.export.c.c_reading import READERS
from gradgraph.export.c.composites import FORMULAS
from gradgraph.export.c.loop_forms import write_scans
from gradgraph.passes.normal.edit import Editor, attributes, nodes_of
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.passes.normal.simplifying.fold import fold_constants
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.rules.named_operators import DOMAIN, operator_of, write_portable


def lowered(model: onnx.ModelProto, sizes: Mapping[str, int]) -> ir.Model:
    """Return a copy of ``model`` (without external data) for ``c_reading``; ``sizes`` fix symbolic sizes by name."""
    work = opened(model, sizes)
    infer_shapes(work)
    _replace(work)
    _simplify(work)
    while write_scans(work):  # the gradient of a Loop has as many steps as the Loop, which is then a constant
        _simplify(work)
    return work


def _simplify(work: ir.Model) -> None:
    clean_up(work)
    infer_shapes(work)
    while fold_constants(work):  # Shape and Size
        clean_up(work)
        infer_shapes(work)


def _replace(model: ir.Model) -> None:
    """Replace composite operators by their formulas, and named operators without a C kernel by portable forms."""
    editor = Editor(model)
    op = editor.op
    waiting = deque(nodes_of(model))
    while waiting:
        node = waiting.popleft()
        key = f"{node.domain}:{node.op_type}" if node.domain else node.op_type
        if key in READERS and key not in FORMULAS:
            continue
        op.scope = node.name or ""
        outputs = None
        if key in FORMULAS:
            inputs = [op.wrap(v) for v in node.inputs]
            found = FORMULAS[key](op, *inputs, **attributes(node))
            outputs = found if isinstance(found, tuple) or found is None else (found,)
            if outputs is not None:
                outputs = tuple(
                    made if old.uses() or old.is_graph_output() else None
                    for made, old in zip(outputs, node.outputs, strict=False)
                )
        elif operator_of(node) is not None:
            with op.naming_operators():
                outputs = write_portable(op, node)
        if outputs is not None:
            waiting.extend(editor.replace(node, *outputs))
    model.opset_imports.setdefault(DOMAIN, 1)
