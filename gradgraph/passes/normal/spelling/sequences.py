"""Pass: replace sequences and optionals whose elements are known with plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Var, all_of
from gradgraph.graph.nodes import input_at, made_by, source_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, attributes, calls_of

Elements = dict[ir.Value, list[Var]]  # the elements of each known sequence

MOST_PIECES = 64  # maximum pieces of a Split; with more, a Gather for each element that is read is faster


def resolve_sequences(model: ir.Model) -> bool:
    """Replace nodes that read sequences with known elements, in bodies too; return True if there were any.

    1. Elements are known for SequenceConstruct and SequenceEmpty; for SequenceInsert and SequenceErase at constant
       indices of a known sequence; and for SplitToSequence into a known number of pieces, which becomes a Split (and
       Squeeze).
    2. SequenceAt with a constant index becomes the element, ConcatFromSequence a Concat, and SequenceLength a constant.
    3. For SplitToSequence into single slices, with any index and length, SequenceAt becomes a Gather and SequenceLength
       the size of the axis.
    4. OptionalGetElement of a tensor, or of an Optional of it, becomes the tensor, and OptionalHasElement becomes true.

    Nodes that are no longer read are removed by a later pass.
    """
    editor = Editor(model)
    known: Elements = {}
    changed = False
    for node in calls_of(model, *_MAKERS, *_READERS):
        if node.op_type in _MAKERS:
            elements = _MAKERS[node.op_type](editor, node, known)
            if elements is not None:
                known[node.outputs[0]] = elements
        elif (result := _READERS[node.op_type](editor, node, known)) is not None:
            editor.replace(node, result)
            changed = True
    return changed


# --- construction -----------------------------------------------------------------------------------------


def _construct(editor: Editor, node: ir.Node, known: Elements) -> list[Var] | None:
    return [editor.op.wrap(v) for v in node.inputs if v is not None]


def _insert(editor: Editor, node: ir.Node, known: Elements) -> list[Var] | None:
    sequence, x = node.inputs[:2]
    elements = None if sequence is None else known.get(sequence)
    place = len(elements or ()) if input_at(node, 2) is None else _place(node, 2)
    if elements is None or place is None or x is None or not -len(elements) <= place <= len(elements):
        return None
    place += len(elements) if place < 0 else 0
    return [*elements[:place], editor.op.wrap(x), *elements[place:]]


def _erase(editor: Editor, node: ir.Node, known: Elements) -> list[Var] | None:
    sequence = node.inputs[0]
    elements = None if sequence is None else known.get(sequence)
    place = -1 if input_at(node, 1) is None else _place(node, 1)
    if elements is None or place is None or not -len(elements) <= place < len(elements):
        return None
    place %= len(elements)
    return [*elements[:place], *elements[place + 1 :]]


def _place(node: ir.Node, i: int) -> int | None:
    found = shapes.constant_of(input_at(node, i))
    return None if found is None else int(found.item())


def _split(editor: Editor, node: ir.Node, known: Elements) -> list[Var] | None:
    x, axis, sizes = node.inputs[0], attributes(node).get("axis", 0), _piece_sizes(node)
    if x is None or not sizes or not any(_needs_pieces(n) for n in node.outputs[0].consumers()):
        return None
    pieces = all_of(editor.op.Split(editor.op.wrap(x), sizes, axis=axis, outputs=len(sizes)))
    if _drops_axis(node):
        pieces = [editor.op.Squeeze(p, [axis]) for p in pieces]
    editor.place(node)
    return pieces


def _needs_pieces(reader: ir.Node) -> bool:
    """Whether replacing ``reader`` requires every element of its sequence, not just the tensor that was split."""
    return reader.op_type in _MAKERS or reader.op_type == "ConcatFromSequence" or _place(reader, 1) is not None


def _piece_sizes(node: ir.Node) -> list[int] | None:
    """Return the sizes of a SplitToSequence's pieces along its axis; None if unknown or over ``MOST_PIECES``."""
    shape, axis = shape_of(node.inputs[0]), attributes(node).get("axis", 0)
    size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    split = shapes.constant_of(input_at(node, 1))
    if split is not None and split.ndim == 1:
        return split.tolist() if split.size <= MOST_PIECES else None
    length = 1 if input_at(node, 1) is None else 0 if split is None else int(split)
    if not isinstance(size, int) or length <= 0 or size > MOST_PIECES * length:
        return None
    return [min(length, size - start) for start in range(0, size, length)]


def _drops_axis(node: ir.Node) -> bool:
    return input_at(node, 1) is None and not attributes(node).get("keepdims", 1)


_MAKERS: Mapping[str, Callable[[Editor, ir.Node, Elements], list[Var] | None]] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SplitToSequence": _split,
}


# --- readers ----------------------------------------------------------------------------------------------


def _at(editor: Editor, node: ir.Node, known: Elements) -> Var | None:
    sequence, place = node.inputs
    assert sequence is not None and place is not None
    elements, number = known.get(sequence), _place(node, 1)
    if elements is not None and number is not None and -len(elements) <= number < len(elements):
        return elements[number]
    source = _slices(sequence)
    if source is None or source.inputs[0] is None:
        return None
    axis = attributes(source).get("axis", 0)
    at = editor.op.wrap(place)
    if not _drops_axis(source):
        at = editor.op.Reshape(at, [1])
    return editor.op.Gather(editor.op.wrap(source.inputs[0]), at, axis=axis)


def _slices(sequence: ir.Value) -> ir.Node | None:
    """Return the SplitToSequence that computes ``sequence`` as single slices of a tensor, or None if none does."""
    source = made_by(sequence, "SplitToSequence")
    return source if source is not None and input_at(source, 1) is None else None


def _concat(editor: Editor, node: ir.Node, known: Elements) -> Var | None:
    sequence = node.inputs[0]
    elements = None if sequence is None else known.get(sequence)
    if not elements:
        return None
    attrs = attributes(node)
    if attrs.get("new_axis", 0):
        elements = [editor.op.Unsqueeze(x, [attrs["axis"]]) for x in elements]
    return editor.op.Concat(*elements, axis=attrs["axis"])


def _length(editor: Editor, node: ir.Node, known: Elements) -> Var | None:
    sequence = node.inputs[0]
    assert sequence is not None
    if sequence in known:
        return editor.op.const(len(known[sequence]))
    source = _slices(sequence)
    if source is None or source.inputs[0] is None:
        return None
    return editor.op.Gather(editor.op.Shape(editor.op.wrap(source.inputs[0])), attributes(source).get("axis", 0))


def _content(editor: Editor, node: ir.Node, known: Elements) -> Var | None:
    source = input_at(node, 0)
    if source is None or source.type is None:
        return None
    optional = isinstance(source.type, ir.OptionalType)
    return editor.op.wrap(source_of(source, "Optional") if optional else source)


def _has_content(editor: Editor, node: ir.Node, known: Elements) -> Var | None:
    return None if _content(editor, node, known) is None else editor.op.const(True)


_READERS: Mapping[str, Callable[[Editor, ir.Node, Elements], Var | None]] = {
    "ConcatFromSequence": _concat,
    "OptionalGetElement": _content,
    "OptionalHasElement": _has_content,
    "SequenceAt": _at,
    "SequenceLength": _length,
}
