"""The table of the kinds of adapters; each kind is one file of this room, which adds its row."""

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
        about: what it is, in a few words.
        put: writes it beside a layer: model, layer, what is wanted, random numbers; gives the adapter as it is there.
        merge: adapter, weight with outputs first, trained tensors; gives the weight. None, if it is no change of one.
        offsets: adapter, trained tensors; gives what is added to all weights of each block of a quantised weight
            (outputs, blocks), of a kind that merges so. None of others.
        bias: the same as ``merge`` for a bias inside the layer or right behind it, where it changes.
        layers: which parts of a model can have one: model, target; those, and why others cannot.
        rest: what its tensors are where it computes nothing: model, adapter, the tensors that it has.
        axes: which axis of each tensor is the rank, and the same of a Conv; None of one that has none.
        factor: the number in the model that the second tensor is multiplied by, if there is one: model, adapter.
        finish: once after all layers have theirs: model, layers, adapters; gives the adapters.
        adds: it is only added to what the layer gives, so that several can stand beside one layer, each weighed.
        parts: what its tensors are called in a file, in their order; of embeddings in ``of_embeddings``.
        peft: its type in PEFT's files; None, if PEFT has none such.
        spread: what ``alpha`` is divided by, of a rank.
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
    """``Kind.rest`` of tensors that are added."""
    del work, adapter
    return [np.zeros_like(array) for array in arrays]


def ones(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """``Kind.rest`` of tensors that multiply."""
    del work, adapter
    return [np.ones_like(array) for array in arrays]


def as_they_are(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    """``Kind.rest`` of tensors that the model had."""
    del work, adapter
    return arrays
