"""Prefixes as PEFT stores them: one tensor ``prompt_embeddings`` [length, layers · 2 · heads · size] for all layers.

A row holds, layer by layer, the keys of all heads and then their values. PEFT gives every attention a prefix of one
length and size, and counts the positions of the text on from it; prefixes that are otherwise have files of our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.documents import Fields
from gradgraph.surgery.adapter_kinds.adapter import Adapter
from gradgraph.surgery.adapter_kinds.prefix import POSITIONS, Attention
from gradgraph.surgery.operated import array_named

TYPE, TENSOR = "PREFIX_TUNING", "prompt_embeddings"
Array = np.ndarray[Any, Any]


def is_as_in_peft(work: ir.Model, adapters: Sequence[Adapter]) -> bool:
    """Are these prefixes such as PEFT has?"""
    if not all(a.kind == "prefix" and a.counted for a in adapters):
        return False
    return len({array.shape for pair in _numbers(work, adapters) for array in pair}) == 1


def _numbers(work: ir.Model, adapters: Sequence[Adapter]) -> list[list[Array]]:
    """Keys and values [heads, length, size] of each layer."""
    return [[array_named(work, name) for name in adapter.weights] for adapter in adapters]


def joined(work: ir.Model, adapters: Sequence[Adapter]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensor of PEFT's file, and what is said of it in the settings."""
    every = np.stack([array for pair in _numbers(work, adapters) for array in pair])
    _, heads, length, size = every.shape
    settings = {
        "peft_type": TYPE,
        "task_type": "CAUSAL_LM",  # without one PEFT computes the model as it was
        "num_virtual_tokens": length,
        "token_dim": heads * size,
        "num_attention_heads": heads,
        "num_layers": len(adapters),
        "num_transformer_submodules": 1,
        "prefix_projection": False,
        "encoder_hidden_size": heads * size,
        "inference_mode": True,
    }
    return {TENSOR: np.ascontiguousarray(every.transpose(2, 0, 1, 3).reshape(length, -1))}, settings


def apart(config: Fields, arrays: Mapping[str, Array], layers: Sequence[Attention]) -> tuple[int, list[Array]]:
    """Length, and keys and values [heads, length, size] of one layer after the other.

    Raises:
        DataError: the settings, the tensor and the model's attentions do not fit each other.
    """
    stored = arrays.get(TENSOR)
    if stored is None or len(arrays) > 1 or stored.ndim != 2:
        other = next((name for name in arrays if name != TENSOR), None)
        found = f"'{shown(other)}'" if other is not None else "it with another number of axes"
        raise DataError(f"a prefix of PEFT is a matrix '{TENSOR}' and nothing else, and the file holds {found}")
    if config.value("num_transformer_submodules") not in (None, 1):
        raise DataError(
            "the prefix is of an encoder with a decoder (num_transformer_submodules), whose attentions share it; that "
            "is not supported"
        )
    sizes = {(layer.heads, layer.size, layer.value_size) for layer in layers}
    heads, size, _ = next(iter(sizes))
    held = {"num_layers": len(layers), "num_attention_heads": heads, "token_dim": heads * size}
    for key, own in held.items():
        if config.value(key) != own:
            raise DataError(f"the prefix has {key} {shown(config.value(key))}, and the model's attentions have {own}")
    if len(sizes) > 1 or size != layers[0].value_size or stored.shape[1] != 2 * len(layers) * heads * size:
        raise DataError(
            f"the prefix of shape {list(stored.shape)} does not fit {len(layers)} attentions of {heads} heads of {size}"
        )
    return len(stored), list(stored.reshape(len(stored), -1, heads, size).transpose(1, 2, 0, 3))


def check_counted(made: Sequence[Adapter]) -> None:
    """Raise DataError where the text's positions do not follow the prefix, as those of PEFT do."""
    if not all(a.counted for a in made):
        raise DataError(
            f"PEFT counts the text's positions on from a prefix of all attentions; this model has neither an input "
            f"'{POSITIONS}' nor GroupQueryAttention that turns queries itself, or attentions that cannot have one; "
            f"export it with an input '{POSITIONS}'"
        )
