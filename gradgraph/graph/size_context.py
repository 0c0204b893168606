"""The context of shape inference rules: symbolic sizes, and the elements of small integer vectors.

A size that the rules express as a formula, such as ``floor(h/2)``, gets a generated name; equal formulas share one.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from gradgraph.graph import shapes
from gradgraph.graph.ranks import MOST_AXES

GENERATED = "unk__"
PLAIN = re.compile(r"[^\W\d][\w.]*")  # names that onnx-shape-inference does not parse as formulas
MOST_DATA = 64  # maximum elements of a vector whose values are tracked
_MOST_SIZE = 2**63 - 1
_MOST_FORMULA = 100  # maximum characters of the formula of an element; longer ones are replaced by a name
_SYMBOL = ir.SymbolicDim


class Context(ShapeInferenceContext):  # type: ignore[misc]  # the package has no types
    """A context for rules: with a model, unknown sizes get names; without one, for single nodes, they stay unknown."""

    def __init__(self, model: ir.Model | None = None, opset: int = shapes.OPSET) -> None:
        super().__init__({"": opset, **({} if model is None else model.opset_imports)})
        self._named = model is not None
        self._numbers = itertools.count()
        self._formulas: dict[str, ir.SymbolicDim] = {}
        self.lent: list[ir.Value] = []

    def new_symbolic_dim(self) -> ir.SymbolicDim:
        return _SYMBOL(f"{GENERATED}{next(self._numbers)}" if self._named else None)

    def set_shape(self, value: ir.Value, shape: ir.Shape) -> bool:
        return self._record(value, shape.dims)

    def record(self, value: ir.Value, dims: Iterable[Any] | None) -> None:
        if dims is not None:
            self._record(value, list(dims))

    def _record(self, value: ir.Value, dims: Sequence[Any]) -> bool:
        """Record sizes (numbers, names, None or symbols), as far as they are more specific than those of ``value``."""
        if len(dims) > MOST_AXES or value.name == "":  # an absent output
            return False
        new = [d if isinstance(d, int) and 0 <= d <= _MOST_SIZE else self._settled(d) for d in dims]
        old = shapes.recorded_shape(value)
        if old is not None and len(old) == len(new):
            merged = [better(a, b) for a, b in zip(old, new, strict=True)]
            if merged != list(old):
                value.shape = ir.Shape(merged)
        elif old is None:
            value.shape = ir.Shape(new)
        return True

    def _settled(self, dim: Any) -> shapes.Dim:
        name = dim.value if isinstance(dim, _SYMBOL) else dim
        if name is None:
            return self.new_symbolic_dim().value
        if not isinstance(name, str):
            return int(name) if 0 <= name <= _MOST_SIZE else None
        if PLAIN.fullmatch(name):
            return name
        if name.lstrip("-").isdecimal():
            return max(int(name), 0)
        return self.name_of(name).value

    def name_of(self, formula: str) -> ir.SymbolicDim:
        """Return the symbolic size for a formula; equal formulas share one in the inference of a model."""
        if formula not in self._formulas or not self._named:
            self._formulas[formula] = self.new_symbolic_dim()
        return self._formulas[formula]

    def quotient(self, dims: Sequence[shapes.Dim], others: Sequence[shapes.Dim]) -> shapes.Dim:
        """Return the product of ``dims`` divided by the product of ``others``; None if unknown.

        A quotient that is neither a number nor a single symbol gets a generated name.
        """
        if None in (*dims, *others):
            return None
        above, under = (math.prod(shapes.known_sizes(side)) for side in (dims, others))
        if under == 0 or above % under:
            return None
        factor = above // under
        if shapes.is_static((*dims, *others)):
            return factor
        left, below = (Counter(d for d in side if isinstance(d, str)) for side in (dims, others))
        if below - left:
            return None
        names = sorted((left - below).elements())
        if not names or (factor == 1 and len(names) == 1):
            return factor if not names else names[0]
        return self.name_of("*".join([str(factor), *names])).value

    def set_dtype(self, value: ir.Value, dtype: ir.DataType | None) -> bool:
        return dtype is not None and value.name != "" and super().set_dtype(value, dtype)

    def set_symbolic_value(self, value: ir.Value, data: list[Any]) -> None:
        if len(data) > MOST_DATA:
            return
        data = [d if _is_short(d) else self.new_symbolic_dim() for d in data]
        self._symbolic_values[value] = data
        whole = all(isinstance(d, int) for d in data)
        if whole and value.const_value is None and value.shape is not None and len(value.shape) <= 1:
            array = np.array(data if len(value.shape) else data[0], np.int64)
            value.const_value = ir.tensor(array, dtype=value.dtype or ir.DataType.INT64)
            self.lent.append(value)

    def get_symbolic_value(self, value: ir.Value) -> list[Any] | None:
        found: list[Any] | None = self._symbolic_values.get(value)
        if found is None and value.dtype is not None and value.dtype.is_integer():
            data = shapes.small_constant(value)
            if data is not None and data.ndim <= 1 and data.size <= MOST_DATA:
                return [int(n) for n in data.ravel()]
        return found

    def record_error(self, node: ir.Node, message: str) -> None:
        raise ValueError(message)


def _is_short(element: Any) -> bool:
    """Whether an element of a vector is within the limits on numbers and formulas."""
    return abs(element) <= _MOST_SIZE if isinstance(element, int) else len(element.value or "") <= _MOST_FORMULA


def is_generated(dim: shapes.Dim) -> bool:
    """Whether ``dim`` is a name that inference generated."""
    return isinstance(dim, str) and dim.startswith(GENERATED)


def better(old: shapes.Dim, new: shapes.Dim) -> shapes.Dim:
    """Return the more specific of two sizes: number > name from the model > generated name > None; ``old`` if equal."""

    def rank(d: shapes.Dim) -> int:
        return 3 if isinstance(d, int) else 0 if d is None else 1 if is_generated(d) else 2

    return new if rank(new) > rank(old) else old


# --- arithmetic on symbolic sizes -----------------------------------------------------------------------------


def _without_sympy(operation: str, neutral: int) -> None:
    """Make ``operation`` of ir.SymbolicDim compute usual results with numbers itself: importing sympy takes long.

    These are the results for the number ``neutral``, and the multiples of a size with a plain name, such as
    ``64*batch``. They equal those of onnx-ir, which computes all others.
    """
    general = getattr(_SYMBOL, operation)

    @functools.wraps(general)
    def compute(size: ir.SymbolicDim, other: Any) -> Any:
        name = size.value
        if isinstance(other, int) and name is not None and PLAIN.fullmatch(name):
            if other == neutral:
                return _SYMBOL(name)
            if operation == "__mul__" and other > 1:
                return _SYMBOL(f"{other:d}*{name}")
        return general(size, other)

    setattr(_SYMBOL, operation, compute)


for _operation, _neutral in {"__add__": 0, "__sub__": 0, "__mul__": 1, "__floordiv__": 1}.items():
    _without_sympy(_operation, _neutral)
