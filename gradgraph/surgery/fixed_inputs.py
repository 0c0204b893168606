"""Inputs replaced by constants; branches that depend on them are resolved."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NUMBER, PATH, TEXT, Kind, checked
from gradgraph.errors import ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.models import Source
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes
from gradgraph.passes.normal.spelling.branches import take_known_branches
from gradgraph.passes.normal.spelling.names import make_names_unique
from gradgraph.surgery.operation import Path, Result, add_weight, clear_away, closed, opened

_VALUES = Kind(
    'a dict of numbers by input, such as {"use_cache_branch": False}',
    lambda value: (
        isinstance(value, Mapping)
        and all(TEXT.fits(name) and (isinstance(number, bool) or NUMBER.fits(number)) for name, number in value.items())
    ),
)


@checked(values=_VALUES, out=PATH.or_none())
def fix_inputs(model: Source, values: Mapping[str, float], *, out: Path | None = None) -> Result:
    """Replace inputs with constants; an If whose condition becomes constant is replaced by the branch that it takes.

    Inputs that only removed branches read are removed, too. In optimum's ``decoder_model_merged.onnx``, for example,
    False for ``use_cache_branch`` selects the decoder without a cache.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        values: the number that fills each input, by name (0 or 1 for a bool). The sizes of these inputs must be known.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        UnknownNameError: the model has no such input.
        ModelError: the sizes of an input are unknown, or its type cannot represent the number.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    read = [v for v in work.graph.inputs if v.uses() and not v.is_initializer()]
    for name, number in values.items():
        fix_input(work, name, number)
    clear_away(work)
    gone = {v for v in read if not v.uses() and not v.is_graph_output()}
    work.graph.inputs[:] = [v for v in work.graph.inputs if v not in gone]
    return closed(work, model, out)


def fix_input(work: ir.Model, name: str, number: float) -> None:
    """Replace an input with a constant, in place, and resolve If nodes; raises the errors of :func:`fix_inputs`."""
    inputs = {v.name or "": v for v in work.graph.inputs if not v.is_initializer()}
    if name not in inputs:
        raise UnknownNameError(f"the model has no input '{shown(name)}'{suggestion(name, inputs)}")
    value = inputs[name]
    sizes = all_sizes(shape_of(value))
    if sizes is None or value.dtype is None:
        raise ModelError(
            f"the sizes of the input '{shown(name)}' are unknown, so it cannot be filled with a number; export the "
            "model with fixed sizes of this input"
        )
    kind = value.dtype.numpy()
    filled = np.full(sizes, number).astype(kind)
    if filled.size and filled.flat[0] != number:
        raise ModelError(
            f"the input '{shown(name)}' is {value.dtype}, which cannot represent {number}; use another number"
        )
    make_names_unique(work)  # values in different branches may share names
    value.replace_all_uses_with(add_weight(work, f"{name}.fixed", filled))
    work.graph.inputs.remove(value)
    take_known_branches(work)
