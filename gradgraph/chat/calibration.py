"""Calibration of merged layers that are requantised: what they read in a part of the training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph import surgery
from gradgraph.chat.chat_batches import ChatBatches
from gradgraph.chat.tokens import Tokens
from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.specs import Specs
from gradgraph.surgery.layer_inputs import LayerInputs
from gradgraph.surgery.operation import as_model
from gradgraph.surgery.weights import give_weights

TOKENS = 2048  # read for calibration, in random rows
LONGEST = 512  # tokens read of a row


def inputs_on(texts: ChatBatches, adapted: ir.Model, state: Mapping[str, Any], memory: int) -> LayerInputs:
    """Return what the layers with adapters of a trained model read in random rows of ``texts``.

    Args:
        texts: the training data.
        adapted: the generative model with adapters.
        state: their trained weights.
        memory: as for :class:`LayerInputs`.
    """
    model = as_model(surgery.language_model(adapted))
    give_weights(model, state)
    chosen, left = list[Tokens](), TOKENS
    for i in np.random.default_rng(0).permutation(len(texts.samples)):
        if left > 0:
            whole = texts.samples[i]
            chosen.append(Tokens(whole.ids[:LONGEST], whole.learnt[:LONGEST]))
            left -= len(chosen[-1])
    rows = ChatBatches(chosen, texts.length, pad=texts.pad)

    def batches(specs: Specs) -> Iterator[tuple[Mapping[str, Array], Array]]:
        every = rows.load(([i] for i in range(len(rows))), specs, ())
        for tokens, batch in zip(chosen, every, strict=True):
            (ids,) = batch.values()
            yield batch, np.arange(ids.shape[1])[None] < len(tokens)

    return LayerInputs(model, batches, memory)
