"""The table of adapter kinds; each kind is one file of this package, which adds its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import Table
from gradgraph.surgery.adapter_kinds.adapter import Adapter
from gradgraph.surgery.linear_layers import linear_layers

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of adapter.

    Attributes:
        about: a short description.
        put: adds it to a layer: model, layer, requested adapter, random numbers; returns the adapter that was added.
        merge: adapter, weight with outputs first, trained tensors; returns the merged weight. None if it cannot merge.
        offsets: adapter, trained tensors; returns the number added to all weights of each block of a quantised weight
            (outputs, blocks), for a kind that merges so. None for others.
        bias: the same as ``merge`` for a bias inside the layer or right after it, if it changes.
        layers: which parts of a model can have one: model, target; these parts, and why others cannot.
        rest: neutral tensors, with which it computes nothing: model, adapter, its present tensors.
        axes: the rank axis of each tensor, and the same for a Conv; None for a tensor without one.
        factor: the number in the model that multiplies the second tensor, if any: model, adapter.
        finish: called once after all layers have theirs: model, layers, adapters; returns the adapters.
        adds: it is only added to the output of a layer, so that several can share a layer, each with a weight.
        parts: the names of its tensors in a file, in order; for embeddings in ``of_embeddings``.
        peft: its type in PEFT's files; None if PEFT does not have it.
        spread: the divisor of ``alpha``, as a function of the rank.
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
    layers: Callable[..., tuple[list[Any], list[str]]] = linear_layers
    finish: Callable[..., list[Adapter]] | None = None
    adds: bool = False
    of_embeddings: tuple[str, ...] = ()
    peft: str | None = None
    spread: Callable[[int], float] = float


KINDS: Table[Kind] = Table("kind of adapter")
NO_RANK = ((None,), (None,))


def zeros(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """Return neutral tensors for ``Kind.rest`` if they are added."""
    del work, adapter
    return [np.zeros_like(array) for array in arrays]


def ones(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """Return neutral tensors for ``Kind.rest`` if they multiply."""
    del work, adapter
    return [np.ones_like(array) for array in arrays]


def as_they_are(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """Return neutral tensors for ``Kind.rest`` if they are the model's own."""
    del work, adapter
    return arrays
