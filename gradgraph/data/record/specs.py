"""The inputs and targets of a step as plain data: name, element type, shape, and the labels that a target allows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import DataError, ModelError, shown
from gradgraph.graph.shape_inference import shape_of

Dim = int | str | None
Specs: TypeAlias = "Mapping[str, TensorSpec]"  # the inputs and targets of a step by name


@dataclass(frozen=True)
class TensorSpec:
    """A tensor: its name, element type (``"float32"``, ``"int64"``, …) and shape (int, symbol, or None if unknown)."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class TargetSpec(TensorSpec):
    """An input of the loss: labels, values, weights or a mask.

    Attributes:
        classes: the number of classes, for labels: each is in [0, classes), or equals ``ignore_index``.
        ignore_index: the label that the loss ignores; None if the target does not contain labels.
        most: the largest allowed number (the smallest is 0), or the name of a dimension with this size in the batch.
        counted_by: the name of the target with the number of valid entries in each row; further entries are ignored.
        padded: whether rows with fewer objects are padded with ``ignore_index``; a batch may then have no object.
    """

    classes: int | None = None
    ignore_index: int | None = None
    most: Dim = None
    counted_by: str | None = None
    padded: bool = False


def spec_of(value: ir.Value) -> TensorSpec:
    """Return the name, element type and shape of a value of a graph."""
    assert value.dtype is not None
    return TensorSpec(value.name or "", dtype_name(int(value.dtype)), shape_of(value) or ())


def dtype_name(elem_type: int) -> str:
    """Return the name of an ONNX element type: ``"float32"`` for ``TensorProto.FLOAT``, ``"undefined"`` if unknown."""
    try:
        return (
            str(onnx.helper.tensor_dtype_to_np_dtype(elem_type).name) if elem_type != onnx.TensorProto.STRING else "str"
        )
    except (KeyError, ValueError):
        return "undefined"


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for the element type of a spec; ml_dtypes provides bfloat16 and similar types."""
    if name == "str":
        return np.dtype(object)
    for elem_type in onnx.TensorProto.DataType.values():
        if elem_type and dtype_name(elem_type) == name:
            found: np.dtype[Any] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
            return found
    raise ModelError(f"'{shown(name)}' is not an ONNX element type; use names such as float32 or int64")


def check_some(rows: int, where: str = "the data are") -> None:
    """Raise DataError if there are no samples; ``where`` begins the message, such as ``'a.csv' is``."""
    if rows == 0:
        raise DataError(f"{where} empty; give at least one sample")
