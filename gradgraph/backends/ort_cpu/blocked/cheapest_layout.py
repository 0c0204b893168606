"""Choose the tensors to store in onnxruntime's blocked layout (NCHWc), for whole chains between convolutions.

Blocked convolutions reorder their inputs and outputs. If all nodes between two convolutions have a blocked form
(``blocked_forms.py``), that is unnecessary. Such nodes may compute in either layout. A tensor that is read in a
different layout than it was written in is reordered once, at a cost equal to its size. The cheapest choice is therefore
a minimum cut, with blocked convolutions on one side and all nodes without a blocked form on the other.

A blocked tensor is declared with its plain shape [N, C, H, W]; C is a multiple of the block size, so the sizes agree.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Mapping
from dataclasses import replace

import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.blocked.blocked_forms import STOCK, BlockedForm, BlockedForms, fits
from gradgraph.backends.ort_cpu.conv.conv_blocks import ordered, reordered
from gradgraph.backends.ort_cpu.conv.conv_fusions import fuse_into_convolutions
from gradgraph.backends.ort_operators import BLOCKED
from gradgraph.graph.minimum_cut import NEVER, Network
from gradgraph.graph.prune import prune
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import known_sizes
from gradgraph.passes.normal.edit import Editor

_BLOCKS, _PLAIN = "blocks", "plain"  # the two sides of the cut


def write_blocked_forms(model: ir.Model, rows: BlockedForms = STOCK) -> None:
    """Convert nodes of the main graph to the NCHWc forms in ``rows``, in place, where that saves reordering."""
    if not any(_is_reorder(node) for node in model.graph):
        return
    editor = Editor(model)
    known = (n for n in model.graph if any(map(fits, _values(n))) and rows.knows(n))
    calls = [Call.of(editor.op, n) for n in known]
    forms = {call.node: form for call in calls if (form := rows.of(call)) is not None}
    chosen = _cheapest({call.node: forms[call.node].saves(call) for call in calls if call.node in forms})
    with editor.replacing_many():
        for node in [n for n in model.graph if n in chosen]:
            _write_blocked(editor, node, forms[node])
    _drop_pairs_of_reorders(model.graph)
    prune(model)
    fuse_into_convolutions(model.graph)


def _is_reorder(node: ir.Node | None, op_type: str = "") -> bool:
    known = (op_type,) if op_type else ("ReorderInput", "ReorderOutput")
    return node is not None and node.domain == BLOCKED and node.op_type in known


# --- choice --------------------------------------------------------------------------------------------------


def _values(node: ir.Node) -> list[ir.Value]:
    return [v for v in (*node.inputs, *node.outputs) if v is not None]


def _cheapest(saved: Mapping[ir.Node, float]) -> set[Hashable]:
    """Return the nodes that should compute in NCHWc, by a minimum cut.

    ``saved`` maps each node with an NCHWc form to the number of passes over its largest tensor that this form saves.
    """
    network = Network()
    for node, passes in saved.items():
        network.add(_BLOCKS, node, int(passes * max(_elements(v) for v in _values(node) if fits(v))))
    for value in dict.fromkeys(v for node in saved for v in _values(node) if fits(v)):
        _add_reorders(network, value, saved)
    return network.source_side(_BLOCKS, _PLAIN)


def _add_reorders(network: Network, value: ir.Value, forms: Container[ir.Node]) -> None:
    """Add the cost of reordering ``value`` to ``network``, incurred if any node reads it in the other layout."""
    writer = _side_of(value.producer(), forms)
    readers = {_side_of(node, forms) for node, _ in value.uses()} | ({_PLAIN} if value.is_graph_output() else set())
    price = _elements(value) if value.dtype == ir.DataType.FLOAT else NEVER  # no kernel reorders booleans
    network.add(writer, ("out of blocks", value), price)
    network.add(("into blocks", value), writer, price)
    for reader in readers:
        network.add(("out of blocks", value), reader, NEVER)
        network.add(reader, ("into blocks", value), NEVER)


def _side_of(node: ir.Node | None, forms: Container[ir.Node]) -> ir.Node | str:
    """Return the layout in which ``node`` computes, or ``node`` itself if it has an NCHWc form and may use either."""
    if node is not None and node in forms:
        return node
    return _BLOCKS if _is_reorder(node) else _PLAIN


def _elements(value: ir.Value) -> int:
    """Return the number of elements of ``value``; without the batch size if it is unknown, as all tensors share it."""
    return math.prod(known_sizes(shape_of(value)))


# --- rewriting -----------------------------------------------------------------------------------------------


def _write_blocked(editor: Editor, node: ir.Node, form: BlockedForm) -> None:
    """Replace ``node`` with its NCHWc form, reordering every input and output separately."""
    op, call = editor.op, Call.of(editor.op, node)
    op.scope = node.name or ""
    inputs = tuple(reordered(op, x) if x is not None and fits(x.value) else x for x in call.inputs)
    written = form.write(op, replace(call, inputs=inputs))
    outputs = written if isinstance(written, tuple) else (written,)
    plain = (ordered(op, y) if fits(old) else y for y, old in zip(outputs, node.outputs, strict=True))
    editor.replace(node, *plain)


def _drop_pairs_of_reorders(graph: ir.Graph) -> None:
    """Bypass pairs of nodes that reorder from NCHWc to NCHW and back."""
    for node in graph:
        plain = node.inputs[0] if _is_reorder(node, "ReorderInput") else None
        before = None if plain is None or not fits(plain) else plain.producer()
        if before is not None and _is_reorder(before, "ReorderOutput") and before.inputs[0] is not None:
            node.outputs[0].replace_all_uses_with(before.inputs[0])
