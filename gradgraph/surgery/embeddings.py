"""Resizing of an embedding."""

from __future__ import annotations

import numpy as np

from gradgraph.arguments import PATH, TEXT, WHOLE, Kind, checked
from gradgraph.errors import ModelError, shown
from gradgraph.files.models import Source
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operation import (
    Path,
    Result,
    closed,
    forget_sizes_behind,
    numbers_of,
    opened,
    set_numbers,
    value_named,
)


@checked(weight=TEXT, rows=Kind("a whole number above zero", lambda value: WHOLE.fits(value) and value > 0),
         out=PATH.or_none())  # fmt: skip
def resize_embedding(model: Source, weight: str, rows: int, *, out: Path | None = None) -> Result:
    """Resize the embedding ``weight`` to ``rows`` rows: existing rows stay, and each new row is their mean.

    A tied head (the same tensor, read by a product, possibly transposed) is resized with it, and so are the columns of
    the logits. For a head with a weight of its own, use :func:`new_head`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weight: the name of a two-dimensional initializer that a Gather reads rows from.
        rows: the new number of rows.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        UnknownNameError: the model has no value of this name.
        ModelError: the weight is not an embedding.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    table = value_named(work, weight, weight=True)
    tensor = numbers_of(table)
    if tensor is None or tensor.shape.rank() != 2 or not tensor.dtype.is_floating_point():
        raise ModelError(
            f"'{shown(weight)}' is not a floating-point matrix, so it is not an embedding; pass the weight of one"
        )
    if not any(Layer(node).takes_rows and place == 0 for node, place in table.uses()):
        raise ModelError(f"no Gather reads rows from '{shown(weight)}', so it is not an embedding; pass the "
                         "weight of one")  # fmt: skip
    old = tensor.numpy()
    new = np.repeat(old.mean(0, keepdims=True, dtype=np.float64).astype(old.dtype), rows, axis=0)
    new[: len(old)] = old[:rows]
    set_numbers(work, table, new)
    for node, _ in table.uses():
        for result in node.outputs:
            forget_sizes_behind(result)
    return closed(work, model, out)
