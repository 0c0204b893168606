"""Prefixes as stored by PEFT: one tensor ``prompt_embeddings`` [length, layers · 2 · heads · size] for all layers.

A row contains, layer by layer, the keys of all heads and then their values. In PEFT every attention has a prefix of the
same length and size, and positions of the text are offset by this length. Other prefixes are stored in a format of our
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, shown
from gradgraph.files.model_metadata import Adapter
from gradgraph.files.untrusted.documents import Fields
from gradgraph.surgery.adapter_kinds.prefix import POSITIONS, Attention
from gradgraph.surgery.operation import Array, array_named

TYPE, TENSOR = "PREFIX_TUNING", "prompt_embeddings"


def is_as_in_peft(work: ir.Model, adapters: Sequence[Adapter]) -> bool:
    """Whether PEFT's format can represent these prefixes."""
    if not all(a.kind == "prefix" and a.counted for a in adapters):
        return False
    return len({array.shape for pair in _numbers(work, adapters) for array in pair}) == 1


def _numbers(work: ir.Model, adapters: Sequence[Adapter]) -> list[list[Array]]:
    """Return the prefix keys and prefix values [heads, length, size] of each adapter."""
    return [[array_named(work, name) for name in adapter.weights] for adapter in adapters]


def joined(work: ir.Model, adapters: Sequence[Adapter]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return prefixes as PEFT stores them: the tensor by its name, and the entries of ``adapter_config.json``."""
    every = np.stack([array for pair in _numbers(work, adapters) for array in pair])
    _, heads, length, size = every.shape
    settings = {
        "peft_type": TYPE,
        "task_type": "CAUSAL_LM",  # without a task type, PEFT ignores the prefix
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
    """Return the length of a PEFT prefix, and its keys and values [heads, length, size] of layer 0, of layer 1, ….

    Raises:
        DataError: the settings, the tensor and the model's attentions do not match.
    """
    stored = arrays.get(TENSOR)
    if stored is None or len(arrays) > 1 or stored.ndim != 2:
        other = next((name for name in arrays if name != TENSOR), None)
        found = f"'{shown(other)}'" if other is not None else "a tensor of a different rank"
        raise DataError(f"a PEFT prefix is a single matrix '{TENSOR}', but the file has {found}; save the prefix again")
    if config.value("num_transformer_submodules") not in (None, 1):
        raise DataError(
            "the prefix is for an encoder-decoder model (num_transformer_submodules is not 1), which is not supported"
        )
    sizes = {(layer.heads, layer.size, layer.value_size) for layer in layers}
    heads, size, _ = next(iter(sizes))
    held = {"num_layers": len(layers), "num_attention_heads": heads, "token_dim": heads * size}
    for key, own in held.items():
        if config.value(key) != own:
            raise DataError(
                f"the prefix has {key} {shown(config.value(key))}, but the model's attentions have {own}; use the "
                "model that the prefix was trained on"
            )
    if len(sizes) > 1 or size != layers[0].value_size or stored.shape[1] != 2 * len(layers) * heads * size:
        raise DataError(
            f"the prefix of shape {list(stored.shape)} does not fit {len(layers)} attention layers with {heads} heads "
            f"of size {size}; use the model that the prefix was trained on"
        )
    return len(stored), list(stored.reshape(len(stored), -1, heads, size).transpose(1, 2, 0, 3))


def check_counted(made: Sequence[Adapter]) -> None:
    """Raise DataError unless the model offsets the positions of the text by the prefix length, as PEFT does."""
    if not all(a.counted for a in made):
        raise DataError(
            "PEFT offsets the positions of the text by the length of the prefix, but this model has neither an input "
            f"'{POSITIONS}' nor rotary positions in GroupQueryAttention, or some attentions cannot have a prefix; "
            f"export it with an input '{POSITIONS}'"
        )
