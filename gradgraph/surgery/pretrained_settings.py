"""Settings of new weights that a model contains as constants and attributes: positions, windows and epsilons.

No weight shows them, and onnxruntime-genai's builder writes no ``config.json`` in which they could be looked up:
Llama 3 and 3.1 have the same weights by name and shape, but other rotary frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, shown
from gradgraph.graph.shapes import known_sizes
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.weights.roles import rotary_tables
from gradgraph.surgery.operation import Array, numbers_of
from gradgraph.surgery.pretrained_files import CONFIG, Pretrained, flat, with_older_keys
from gradgraph.surgery.weight_places import BUILDER

_FREQUENCIES = "rotary_emb.inv_freq"  # end of the name of the buffer in transformers
_EPSILON = "rms_norm_eps"  # the builder writes a number of its own for families that have another key
_UNSCALED = ("default", "mrope")
_CLOSE = {"float32": 1e-4, "float64": 1e-4}  # relative differences of frequencies; in 16 bits more
_CLOSE_IN_16_BITS = 2e-2
_LARGEST = 1e100  # settings: an integer of JSON may be beyond all floats


def check_settings(work: ir.Model, source: Pretrained) -> None:
    """Raise DataError if constants or attributes of a model differ from the configuration of new weights.

    Only settings that the configuration contains are compared, and rotary frequencies of usual kinds.
    """
    config = with_older_keys(flat(source.config))
    for what, fits in (("rotary frequencies", _has_rotations), ("an epsilon of its norms", _has_epsilon),
                       ("a sliding window", _has_window)):  # fmt: skip
        if not fits(work, config):
            raise DataError(
                f"the model has {what} other than {CONFIG} of '{shown(source.where)}' says, which weights cannot "
                "change; export the new weights instead"
            )


# --- rotary frequencies --------------------------------------------------------------------------------------------


def _has_rotations(work: ir.Model, config: Mapping[str, Any]) -> bool:
    tables = [*_rotations(config)]
    return not tables or all(
        any(_could_be(found, table, slack) for table in tables) for found, slack in _frequencies(work)
    )


def _rotations(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary positions; sliding attention may have its own."""
    if "rope_theta" in config:
        scaling = config.get("rope_scaling")
        yield {**(scaling if isinstance(scaling, Mapping) else {}), "rope_theta": config["rope_theta"]}
    if "rope_local_base_freq" in config:
        yield {"rope_theta": config["rope_local_base_freq"]}


def _frequencies(work: ir.Model) -> Iterator[tuple[Array, float]]:
    """Yield the rotary frequencies of a model, and how close to a formula they are if they are computed by it."""
    pairs: dict[tuple[ir.Value | None, ...], None] = {}
    for node in nodes_of(work):
        if (tables := rotary_tables(node)) is not None:
            pairs[tables] = None
    for cosines, sines in (tuple(map(numbers_of, pair)) for pair in pairs):
        if cosines is None or sines is None or any(len(known_sizes(cache.shape)) != 2 for cache in (cosines, sines)):
            continue
        cosine, sine = (np.asarray(cache.numpy()[1:2], np.float64).reshape(-1) for cache in (cosines, sines))
        if cosine.size == sine.size:
            yield np.arctan2(sine, cosine), _CLOSE.get(cosines.dtype.numpy().name, _CLOSE_IN_16_BITS)
    for name, value in work.graph.initializers.items():
        tensor = numbers_of(value) if name.endswith(_FREQUENCIES) else None
        if tensor is not None:
            yield (
                np.asarray(tensor.numpy(), np.float64).reshape(-1),
                _CLOSE.get(tensor.dtype.numpy().name, _CLOSE_IN_16_BITS),
            )


def _could_be(found: Array, table: Mapping[str, Any], slack: float) -> bool:
    """Whether frequencies are those of a table of settings, or of an unknown kind."""
    theta, kind = _number(table, "rope_theta"), table.get("rope_type", table.get("type", "default"))
    if theta is None or not found.size:
        return True
    plain = theta ** -(np.arange(found.size) / found.size)
    factor = _number(table, "factor")
    if kind == "yarn":
        return factor == 1 or not np.allclose(found, plain, rtol=slack, atol=0)
    wanted = plain if kind in _UNSCALED else None
    if kind == "linear" and factor:
        wanted = plain / factor
    if kind == "llama3" and factor:
        wanted = _of_llama_3(plain, table, factor)
    return wanted is None or np.allclose(found, wanted, rtol=slack, atol=0)


def _of_llama_3(plain: Array, table: Mapping[str, Any], factor: float) -> Array | None:
    """Return frequencies of which low ones are divided by ``factor``, and high ones are not."""
    low, high, length = (
        _number(table, key) for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if low is None or high is None or length is None or low == high:
        return None
    share = np.clip((length * plain / (2 * math.pi) - low) / (high - low), 0, 1)
    return np.asarray((1 - share) * plain / factor + share * plain)


def _number(table: Mapping[str, Any], key: str) -> float | None:
    """Return a positive number of a configuration; None if it is anything else."""
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < _LARGEST else None


# --- attributes ----------------------------------------------------------------------------------------------------


def _has_epsilon(work: ir.Model, config: Mapping[str, Any]) -> bool:
    """Whether an epsilon of the builder's norms is that of the configuration; families also have fixed ones."""
    found = {
        node.attributes.get_float("epsilon", 0.0) for node in nodes_of(work) if node.op_type.endswith("Normalization")
    }
    wanted = _number(config, _EPSILON)
    if work.producer_name != BUILDER or not found or wanted is None:
        return True
    return any(math.isclose(one, wanted, rel_tol=1e-3) for one in found)


def _has_window(work: ir.Model, config: Mapping[str, Any]) -> bool:
    """Whether the windows of attentions, if they have any, are those of the configuration, if it says something."""
    found = {node.attributes.get_int("local_window_size", -1) for node in nodes_of(work)} - {-1, 0}
    return not found or "sliding_window" not in config or config["sliding_window"] in [*found]
