"""Optimum's merged decoders: one file with a decoder for each case, with and without a cache, that share weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.passes.normal.spelling.names import make_names_unique
from gradgraph.surgery.fixed_inputs import fix_input
from gradgraph.surgery.language_models import USE_CACHE
from gradgraph.surgery.operation import clear_away, learn_sizes
from gradgraph.surgery.weights import give_weights

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def is_merged(model: ir.Model) -> bool:
    """Whether this is a merged model of optimum, with a decoder for each case (with and without a cache)."""
    return any(value.name == USE_CACHE for value in model.graph.inputs)


def one_decoder(whole: ir.Model, has_cache: bool) -> ir.Model:
    """Return a copy of the decoder with or without a cache of a merged model."""
    one = whole.clone()
    fix_input(one, USE_CACHE, has_cache)
    clear_away(one)
    learn_sizes(one)
    return one


def give_both(whole: ir.Model, changed: ir.Model) -> bool:
    """Copy the changed weights of one decoder into the merged model; return False if not all are shared."""
    shared = set(whole.graph.initializers)
    make_names_unique(whole)  # also done when a decoder was extracted, so names agree
    before, after = _weights(whole), _weights(changed)
    new = {name: tensor for name, tensor in after.items()
           if (not _alike(tensor, before[name]) if name in before else _is_learnt(name, tensor))}  # fmt: skip
    if not all(n in shared and n in before and tensor.shape == before[n].shape for n, tensor in new.items()):
        return False
    give_weights(whole, {name: tensor.numpy() for name, tensor in new.items()})
    return True


def _weights(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Return the tensors that a model stores, including the integers of quantised weights."""
    return {name: v.const_value for name, v in model.graph.initializers.items() if v.const_value is not None}


def _is_learnt(name: str, tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor of one decoder only may be a trained weight; integers are sizes and axes."""
    return tensor.dtype in _FLOATS or name.endswith(".merged")


def _alike(one: ir.TensorProtocol, other: ir.TensorProtocol) -> bool:
    return one is other or np.array_equal(one.numpy(), other.numpy())
