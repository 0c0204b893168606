"""The table of adapter kinds; each kind is one file of this package, which adds its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import Table
from gradgraph.files.model_metadata import Adapter
from gradgraph.surgery.layer_kinds import default_layers
from gradgraph.surgery.linear_layers import linear_layers
from gradgraph.surgery.operation import Array


def below_head(decoder: ir.Model) -> list[str]:
    """Return the names of all linear layers except the head and routers, for ``Kind.default``."""
    return [layer.name for layer in default_layers(decoder)]


def everything(decoder: ir.Model) -> list[str]:
    """Return a glob that matches all parts, for ``Kind.default``."""
    del decoder
    return ["*"]


class Rounding(NamedTuple):
    """The rounding of a merged weight W that was quantised again.

    Attributes:
        error: the relative rounding error ``‖stored - W‖/‖W‖``.
        update: the relative size of the adapter's update, ``‖W - W before‖/‖W‖``.
        lost: the share of the update's effect that rounding loses, as GPTQ estimates it: the squared change of the
            layer's outputs by rounding, relative to that by the update. It is 1 if rounding returns the weight before
            the update, and may be larger.
    """

    error: float
    update: float
    lost: float

    @classmethod
    def to_nearest(cls, error: float, update: float) -> Rounding:
        """Return the rounding of numbers to the nearest ones, whose errors affect all outputs alike."""
        return cls(error, update, (error / update) ** 2 if update else 0.0)

    @property
    def drowns(self) -> bool:
        """Whether rounding undoes the update: at least half of its effect is lost."""
        return self.lost >= 0.5


@dataclass(frozen=True)
class Kind:
    """One kind of adapter.

    Attributes:
        about: a short description.
        put: a function of model, layer, requested adapter and random generator that adds an adapter to the layer and
            returns it.
        parts: the names of the adapter's tensors in a file, in order.
        rest: a function of model, adapter and its current tensors that returns neutral tensors, with which the adapter
            has no effect.
        axes: the rank axis of each tensor (None for a tensor without one), first for linear layers, then for a Conv.
        factor: a function of model and adapter that returns the graph value that contains the adapter's scale; None for
            kinds that cannot be scaled.
        merge: a function of adapter, weight (outputs first) and trained tensors that returns the merged weight; None if
            the kind cannot be merged.
        bias: a function of adapter, bias and trained tensors that returns the merged bias; None if merging keeps it.
        offsets: a function of adapter and trained tensors that returns the number added to the weights of each block of
            a quantised weight, (outputs, blocks); None for kinds that do not merge in this way.
        merge_into: a function of model, adapter, trained tensors and whether to quantise again, that merges the
            adapter, in place of ``merge``, for kinds whose weights are not those of linear layers; returns the
            rounding, or None if nothing was rounded.
        layers: a function of model and target that returns the parts of the model that can have an adapter, and for
            other matches the reason why they cannot. Of kinds that can be merged, each part has the number of its
            weights (``size``).
        what: these parts, in the plural.
        default: a function of a decoder that returns the names or globs of the parts that get adapters by default.
        finish: a function of model, layers and adapters that is called once after all adapters have been added, and
            returns the adapters.
        drops: whether the adapter's input, or what it computes, can have dropout in training.
        adds: whether the adapter is added to a layer's output, so that several, each with a scale, can share a layer.
        of_embeddings: the names of an embedding's tensors in a file; empty if they are the same as ``parts``.
        peft: the kind's ``peft_type`` in PEFT's files; None if PEFT does not support the kind.
        spread: a function of the rank that returns the divisor of ``alpha``.
    """

    about: str
    put: Callable[..., Adapter]
    parts: tuple[str, ...]
    rest: Callable[[ir.Model, Adapter, list[Array]], list[Array]]
    axes: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    factor: Callable[[ir.Model, Adapter], ir.Value | None] | None = None
    merge: Callable[[Adapter, Array, list[Array]], Array] | None = None
    bias: Callable[[Adapter, Array, list[Array]], Array] | None = None
    offsets: Callable[[Adapter, list[Array]], Array] | None = None
    merge_into: Callable[[ir.Model, Adapter, list[Array], bool], Rounding | None] | None = None
    layers: Callable[..., tuple[list[Any], list[str]]] = linear_layers
    what: str = "linear layers"
    default: Callable[[ir.Model], list[str]] = below_head
    finish: Callable[..., list[Adapter]] | None = None
    drops: bool = False
    adds: bool = False
    of_embeddings: tuple[str, ...] = ()
    peft: str | None = None
    spread: Callable[[int], float] = float

    @property
    def has_rank(self) -> bool:
        """Whether an adapter has a rank, or a width or length in its place."""
        return self.axes != NO_RANK

    @property
    def has_alpha(self) -> bool:
        """Whether an adapter is scaled by alpha / rank."""
        return self.factor is not None


NO_RANK = ((None,), (None,))
KINDS: Table[Kind] = Table("kind of adapter")


def zeros(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """Return neutral tensors, for ``Kind.rest`` of adapters that are added."""
    del work, adapter
    return [np.zeros_like(array) for array in arrays]


def ones(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """Return neutral tensors, for ``Kind.rest`` of adapters that multiply."""
    del work, adapter
    return [np.ones_like(array) for array in arrays]


def as_they_are(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """Return the tensors unchanged, for ``Kind.rest`` of adapters that train the model's own tensors."""
    del work, adapter
    return arrays
