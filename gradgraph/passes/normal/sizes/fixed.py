"""Fix symbolic dimensions of a model's inputs to numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.arguments import WHOLE, Kind
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.passes.normal.edit import nodes_of


def _is_size(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(map(WHOLE.fits, value))
    return WHOLE.fits(value)


Sizes = Mapping[str, int | Sequence[int]]

SIZES = Kind(
    "a dict of numbers by dimension, such as {'batch': 32}, or of all sizes by input, such as {'x': (1, 3, 8, 8)}",
    lambda value: isinstance(value, Mapping) and all(map(_is_size, value.values())),
)
GIVEN = SIZES.or_none()


def fix_sizes(model: ir.Model, sizes: Sizes) -> dict[str, int]:
    """Replace symbolic dimensions with ``sizes`` everywhere, in place.

    Args:
        sizes: the number of each dimension by its name, or all sizes of an input by its name (for unnamed dimensions).

    Returns:
        The number of each named dimension.

    Raises:
        UnknownNameError: no input has a dimension of this name, or there is no input of this name.
        BuildError: the sizes of an input do not match its shape, or a dimension is given two different numbers.
    """
    fed = {
        v.name or "": v for v in model.graph.inputs if v.shape is not None and v.name not in model.graph.initializers
    }
    symbols = {d.value for v in fed.values() for d in v.shape or () if isinstance(d, ir.SymbolicDim) and d.value}
    dims: dict[str, int] = {}
    for name, size in sizes.items():
        if not isinstance(size, Sequence):
            if name not in symbols:
                raise UnknownNameError(
                    f"no input has a dimension called '{shown(name)}'{suggestion(name, sorted(symbols))}"
                )
            _set(dims, name, int(size))
        elif name not in fed:
            raise UnknownNameError(
                f"there is no input '{shown(name)}' whose sizes could be fixed{suggestion(name, fed)}"
            )
        else:
            _fix_input(fed[name], [*map(int, size)], dims)
    for value in (*model.graph.inputs, *model.graph.outputs, *(v for node in nodes_of(model) for v in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape(
                dims.get(d.value or "", d) if isinstance(d, ir.SymbolicDim) else d for d in value.shape
            )
    return dims


def _fix_input(value: ir.Value, sizes: Sequence[int], dims: dict[str, int]) -> None:
    """Set the shape of an input to ``sizes``, and record the sizes of its named dimensions in ``dims``."""
    assert value.shape is not None
    known = [None if isinstance(d, int) and d < 0 else d for d in value.shape]  # old exporters wrote -1 for any size
    if len(known) != len(sizes) or any(isinstance(d, int) and d != n for d, n in zip(known, sizes, strict=True)):
        written = ", ".join("?" if str(d) == "None" else shown(str(d)) for d in known)
        raise BuildError(f"the input '{shown(value.name)}' has shape [{written}], which does not match {list(sizes)}")
    for d, size in zip(known, sizes, strict=True):
        _set(dims, d.value or "" if isinstance(d, ir.SymbolicDim) else "", size)
    value.shape = ir.Shape(sizes)


def _set(dims: dict[str, int], name: str, size: int) -> None:
    if size < 1:
        raise BuildError(f"a size must be at least 1, not {size}")
    if name and dims.setdefault(name, size) != size:
        raise BuildError(f"the dimension '{shown(name)}' cannot be both {dims[name]} and {size}")
