"""The table of kinds: a new one is a file with its formula, and a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.surgery.adapter_kinds import bitfit, bottleneck, dora, ia3, low_rank, prefix
from gradgraph.surgery.adapter_kinds.adapter import Adapter
from gradgraph.surgery.linear_layers import linear_layers

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of adapter.

    Attributes:
        said: what it is, in a few words.
        put: writes it beside a layer: model, layer, what is wanted, random numbers; gives the adapter as it is there.
        merge: adapter, weight with outputs first, trained tensors; gives the weight. None, if it is no change of one.
        bias: the same for a bias inside the layer or right behind it, where it changes.
        layers: which parts of a model can have one: model, target; those, and why others cannot.
        rest: what its tensors are where it computes nothing: model, adapter, the tensors that it has.
        axes: which axis of each tensor is the rank, and the same of a Conv; None of one that has none.
        factor: the number in the model that the second tensor is multiplied by, if there is one: model, adapter.
        finish: once after all layers have theirs: model, layers, adapters; gives the adapters.
        adds: it is only added to what the layer gives, so that several can stand beside one layer, each weighed.
        parts: what its tensors are called in a file, in their order; of embeddings in ``of_embeddings``.
        peft: its type in PEFT's files; None, if PEFT has none such.
    """

    said: str
    put: Callable[..., Adapter]
    parts: tuple[str, ...]
    rest: Callable[[ir.Model, Adapter, list[Array]], list[Array]]
    axes: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    factor: Callable[[ir.Model, Adapter], ir.Value | None] | None = None
    merge: Callable[[Adapter, Array, list[Array]], Array] | None = None
    bias: Callable[[Adapter, Array, list[Array]], Array] | None = None
    layers: Callable[..., tuple[list[Any], list[str]]] = linear_layers
    finish: Callable[..., list[Adapter]] | None = None
    adds: bool = False
    of_embeddings: tuple[str, ...] = ()
    peft: str | None = None


def _zeros(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    del work, adapter
    return [np.zeros_like(array) for array in arrays]


def _ones(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    del work, adapter
    return [np.ones_like(array) for array in arrays]


def _as_they_are(work: ir.Model, adapter: Adapter, arrays: list[Array]) -> list[Array]:
    del work, adapter
    return arrays


_FACTORS = ("lora_A.weight", "lora_B.weight")
_ROWS = ("lora_embedding_A", "lora_embedding_B")
_NO_RANK = ((None,), (None,))
_LOW_RANK: dict[str, Any] = {
    "put": low_rank.put, "parts": _FACTORS, "rest": _zeros, "axes": ((1, 0), (0, 1)), "factor": low_rank.factor,
    "merge": low_rank.merge, "adds": True, "of_embeddings": _ROWS, "peft": "LORA",
}  # fmt: skip
KINDS: dict[str, Kind] = {
    "lora": Kind("two factors of low rank beside a weight", **_LOW_RANK),
    "rslora": Kind("the same, counted alpha/√rank times", **_LOW_RANK),
    "dora": Kind("a weight's direction by low rank, its length by itself", dora.put,
                 (*_FACTORS, "lora_magnitude_vector"), dora.rest, ((1, 0, None), (0, 1, None)), dora.factor,
                 dora.merge, peft="LORA"),
    "ia3": Kind("one vector that multiplies what a layer gives", ia3.put, ("ia3_l",), _ones, _NO_RANK, None,
                ia3.merge, ia3.bias, peft="IA3"),
    "bottleneck": Kind("two small layers with a relu between, behind a layer", bottleneck.put,
                       ("down.weight", "down.bias", "up.weight", "up.bias"), _zeros,
                       ((1, 0, 0, None), (0, 0, 1, None))),
    "prefix": Kind("keys and values before those of the text, in an attention", prefix.put, ("key", "value"),
                   prefix.rest, ((1, 1), (1, 1)), layers=prefix.found, finish=prefix.count_positions),
    "bitfit": Kind("the biases that the model has", bitfit.put, ("bias",), _as_they_are, _NO_RANK,
                   layers=bitfit.found),
}  # fmt: skip
