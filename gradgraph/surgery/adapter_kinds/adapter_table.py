"""The table of kinds: a new one is a file with its formula, and a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

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
        adds: it is only added to what the layer gives, so that several can stand beside one layer, each weighed.
        parts: what its tensors are called in a file, in their order; of embeddings in ``of_embeddings``.
        peft: its type in PEFT's files; None, if PEFT has none such.
    """

    said: str
    put: Callable[..., Adapter]
    parts: tuple[str, ...]
    merge: Callable[[Adapter, Array, list[Array]], Array] | None = None
    bias: Callable[[Adapter, Array, list[Array]], Array] | None = None
    layers: Callable[..., tuple[list[Any], list[str]]] = linear_layers
    adds: bool = False
    of_embeddings: tuple[str, ...] = ()
    peft: str | None = None


_FACTORS = ("lora_A.weight", "lora_B.weight")
_ROWS = ("lora_embedding_A", "lora_embedding_B")
KINDS: dict[str, Kind] = {
    "lora": Kind("two factors of low rank beside a weight", low_rank.put, _FACTORS, low_rank.merge, adds=True,
                 of_embeddings=_ROWS, peft="LORA"),
    "rslora": Kind("the same, counted alpha/√rank times", low_rank.put, _FACTORS, low_rank.merge, adds=True,
                   of_embeddings=_ROWS, peft="LORA"),
    "dora": Kind("a weight's direction by low rank, its length by itself", dora.put,
                 (*_FACTORS, "lora_magnitude_vector"), dora.merge, peft="LORA"),
    "ia3": Kind("one vector that multiplies what a layer gives", ia3.put, ("ia3_l",), ia3.merge, ia3.bias, peft="IA3"),
    "bottleneck": Kind("two small layers with a relu between, behind a layer", bottleneck.put,
                       ("down.weight", "down.bias", "up.weight", "up.bias")),
    "prefix": Kind("keys and values before those of the text, in an attention", prefix.put, ("key", "value"),
                   layers=prefix.found),
    "bitfit": Kind("the biases that the model has", bitfit.put, ("bias",), layers=bitfit.found),
}  # fmt: skip
