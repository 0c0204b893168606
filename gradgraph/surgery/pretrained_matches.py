"""Weights of a model, matched with the tensors of a file that contain them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.surgery.folded_norms import Norm
from gradgraph.surgery.linear_layers import rewritten
from gradgraph.surgery.operation import Array, numbers_of
from gradgraph.surgery.quantised_tables import read_table, table_rounding
from gradgraph.surgery.stored_weights import as_read, canonical, canonical_rounding, rounding_of
from gradgraph.surgery.weight_places import TABLE, Place


@dataclass(frozen=True)
class Part:
    """A tensor of the file, or the rows of it, that is a weight or a piece of one.

    Attributes:
        key: the name of the tensor; empty for zeros.
        begin, end: the rows; all if ``end`` is None.
    """

    key: str
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Match:
    """A weight of the model with its tensors.

    Attributes:
        place: the weight.
        parts: the tensors, joined along the outputs.
        is_tied: whether the tensor belongs to another weight of the model, with which this one is tied.
        norm: the BatchNormalization that is merged into this weight or bias; None if there is none.
        is_named: whether the model's file says that the stored tensor is this parameter. Otherwise it was matched by
            the module that reads it, and the exporter may have computed it from the parameter.
    """

    place: Place
    parts: tuple[Part, ...]
    is_tied: bool = False
    norm: Norm | None = None
    is_named: bool = True

    @property
    def is_kernel(self) -> bool:
        """Whether this is the weight of a layer, other than its bias."""
        return self.place.layer is not None or self.place.is_transposed_kernel

    @property
    def groups(self) -> int:
        """The number of groups of the kernel of a ConvTranspose; 0 for other weights."""
        return self.place.node.attributes.get_int("group", 1) if self.place.is_transposed_kernel else 0

    @property
    def keys(self) -> list[str]:
        """The names of the tensors of the file that this weight consists of."""
        return [*(part.key for part in self.parts if part.key), *(self.norm.keys if self.norm else ())]


def is_integer(place: Place) -> bool:
    """Whether a weight is stored as integers."""
    tensor = numbers_of(place.value)
    return tensor is not None and not tensor.dtype.is_floating_point()


def size_of(place: Place) -> int:
    if place.layer is not None:
        return int(np.prod(place.layer.shape))
    if place.experts is not None:
        return place.experts.size
    tensor = numbers_of(place.value)
    return 0 if tensor is None else tensor.size


def read_from(place: Place) -> ir.Value:
    """Return the input of the reader that a stored tensor becomes."""
    found = [v for v in place.node.inputs if v is not None and rewritten(v)[0] is place.value]
    return found[0] if found else place.value


def stored(place: Place) -> Array:
    """Return the numbers of a weight in the model: for a layer outputs first."""
    if place.layer is not None:
        return canonical(place.layer)
    if place.experts is not None:
        return place.experts.read()
    if place.node.op_type == TABLE:
        return read_table(place.node)
    return as_read(read_from(place)) if is_integer(place) else as_read(place.value)


def rounding(place: Place) -> Array:
    """Return the largest rounding error of each number of a weight in the model, in the shape of ``stored``."""
    if place.layer is not None:
        return canonical_rounding(place.layer)
    if place.experts is not None:
        return place.experts.rounding()
    if place.node.op_type == TABLE:
        return table_rounding(place.node)
    return rounding_of(read_from(place)) if is_integer(place) else rounding_of(place.value)
