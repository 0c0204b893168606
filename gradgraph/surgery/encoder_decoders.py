"""Models of an encoder and a decoder in two files, as optimum exports them: one model for training."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from gradgraph.errors import ModelError, listed
from gradgraph.files.model_metadata import Adapter, write_adapters
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.normal.opsets.opset import convert_to_opset
from gradgraph.surgery.adapter_kinds.adapter_table import adapters_of
from gradgraph.surgery.floats import compute_in_float32
from gradgraph.surgery.joined_models import prefix_names, take_in
from gradgraph.surgery.language_models import MASK, language_model
from gradgraph.surgery.operation import as_model, closed, forget_sizes_behind, opened

STATES, MASK_OF_STATES = "encoder_hidden_states", "encoder_attention_mask"  # inputs of the decoder
PREFIX = "decoder."  # of the decoder's names in the joined model
TOKENS = f"{PREFIX}input_ids"


def encoder_decoder(encoder: ir.Model, decoder: ir.Model) -> ir.Model:
    """Join an encoder and a decoder, with their adapters, in one model from two texts to scores.

    Args:
        encoder: from tokens and their mask to states [batch, length, width].
        decoder: from tokens and the encoder's states to scores, with or without a cache.

    Returns:
        A model with the encoder's inputs and ``decoder.input_ids`` [batch, length], and the output ``decoder.logits``.
        All other names of the decoder begin with ``decoder.``, too. It computes in float32.

    Raises:
        ModelError: the decoder has no input for the encoder's states, or other unknown inputs.
    """
    work = opened(encoder, None)
    compute_in_float32(work)
    other = _without_cache(decoder)
    if work.opset_imports.get("", OPSET) != other.opset_imports.get("", OPSET):
        convert_to_opset(work)
        convert_to_opset(other)
    given = {v.name or "": v for v in other.graph.inputs if not v.is_initializer()}
    own = {v.name or "": v for v in work.graph.inputs}
    tokens = [v for name, v in given.items() if name not in (STATES, MASK_OF_STATES)]
    if STATES not in given or len(tokens) != 1 or (MASK_OF_STATES in given and MASK not in own):
        raise ModelError(
            f"the decoder has the inputs {listed(given)}, and the encoder {listed(own)}, but '{STATES}' and one input "
            "of tokens are expected; export the model with optimum"
        )
    adapters = [*adapters_of(work), *(_prefixed(adapter) for adapter in adapters_of(other))]
    prefix_names(other, PREFIX)
    if MASK_OF_STATES in given and _length(work.graph.outputs[0]) != _length(own[MASK]):
        forget_sizes_behind(given[STATES], given[MASK_OF_STATES])  # of samples or of states, by the same symbol
    given[STATES].replace_all_uses_with(work.graph.outputs[0])
    if MASK_OF_STATES in given:
        given[MASK_OF_STATES].replace_all_uses_with(own[MASK])
    other.graph.inputs.clear()
    tokens[0].name = TOKENS
    work.graph.inputs.append(tokens[0])
    scores = list(other.graph.outputs)
    take_in(work, other)
    work.graph.outputs[:] = scores
    write_adapters(work, adapters)
    return as_model(closed(work, work, None))


def _length(value: ir.Value) -> object:
    """Return the second size of a value, or its symbol; None if it is unknown."""
    shape = shape_of(value) or ()
    return shape[1] if len(shape) > 1 else None


def _without_cache(decoder: ir.Model) -> ir.Model:
    """Return a copy of the decoder from tokens and states to scores, in float32."""
    fed = {v.name for v in decoder.graph.inputs if not v.is_initializer()}
    if len(decoder.graph.outputs) > 1 or len(fed - {STATES, MASK_OF_STATES}) > 1:
        return opened(language_model(decoder), None)
    other = opened(decoder, None)
    compute_in_float32(other)
    return other


def _prefixed(adapter: Adapter) -> Adapter:
    return replace(adapter, module=f"{PREFIX}{adapter.module}", output=f"{PREFIX}{adapter.output}",
                   weights=tuple(f"{PREFIX}{name}" for name in adapter.weights))  # fmt: skip
