"""Names for anonymous weights, by where they are used."""

from __future__ import annotations

import re

import onnx_ir as ir

from gradgraph.arguments import PATH, checked
from gradgraph.files.models import Source
from gradgraph.passes.normal.weights.places import behind_moves, place_of
from gradgraph.surgery.operation import Path, Result, closed, free_name, opened, rename

# how PyTorch's two exporters, tf2onnx and others name a tensor that has no name in the source
_ANONYMOUS = re.compile(
    r"(onnx::\w+?_\d+|val_\d+|_val_\d+|t_?\d*|_?\d+|const(ant)?(_fold_opt__|_|__)?\d*|initializer_\d+|tensor_\d+)"
)


@checked(out=PATH.or_none())
def name_weights(model: Source, *, out: Path | None = None) -> Result:
    """Give anonymous weights names that describe where they are used.

    ``onnx::MatMul_413``, read by ``/encoder/layer.0/query/MatMul``, becomes ``encoder.layer.0.query.weight``.
    Meaningful names stay, and so do those of integers and scalars, which are no weights. If a node has no scope in its
    name or its metadata, its operator and number are used: ``MatMul_12.weight``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        out: write the result to this path.

    Returns:
        The same kind of model.

    Raises:
        ModelError: the model cannot be read.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    places = {node: i for i, node in enumerate(work.graph)}
    for name, value in list(work.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or tensor.size < 2 or not is_anonymous(name):
            continue
        wanted = _name(value, places)
        if wanted is not None:
            rename(value, free_name(work, wanted))
    return closed(work, model, out)


def is_anonymous(name: str) -> bool:
    """Whether the name of a tensor says nothing about it."""
    return _ANONYMOUS.fullmatch(name) is not None


def _name(value: ir.Value, places: dict[ir.Node, int]) -> str | None:
    for node, position in value.uses():
        module, role = place_of(node, position)
        if role:
            reader, _ = behind_moves(node, position)
            return f"{module or f'{reader.op_type}_{places.get(reader, 0)}'}.{role}"
    return None
