"""Another number of rows in an embedding."""

from __future__ import annotations

import numpy as np

from gradgraph.arguments import PATH, TEXT, WHOLE, Kind, checked
from gradgraph.errors import ModelError, shown
from gradgraph.files.models import Source
from gradgraph.surgery.linear_layers import Layer
from gradgraph.surgery.operated import (
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
    """The model with ``rows`` rows in the embedding ``weight``: the first ones stay, new ones are the mean of the old.

    A head that is tied to it (the same tensor, read by a product as it is or transposed) grows with it: the model's
    logits have as many columns then. A head with a weight of its own is resized by :func:`new_head`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weight: the name of a two-dimensional initializer that a Gather takes rows from.
        rows: how many it shall have.
        out: write the result to this path.

    Raises:
        UnknownNameError: the model has no value of this name.
        ModelError: it is no embedding.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    table = value_named(work, weight, weight=True)
    tensor = numbers_of(table)
    if tensor is None or tensor.shape.rank() != 2 or not tensor.dtype.is_floating_point():
        raise ModelError(f"'{shown(weight)}' is no floating matrix of the model's weights, so no embedding")
    if not any(Layer(node).takes_rows and place == 0 for node, place in table.uses()):
        raise ModelError(f"no Gather takes rows from '{shown(weight)}', so it is no embedding")
    old = tensor.numpy()
    new = np.repeat(old.mean(0, keepdims=True, dtype=np.float64).astype(old.dtype), rows, axis=0)
    new[: len(old)] = old[:rows]
    set_numbers(work, table, new)
    for node, _ in table.uses():
        for result in node.outputs:
            forget_sizes_behind(result)
    return closed(work, model, out)
