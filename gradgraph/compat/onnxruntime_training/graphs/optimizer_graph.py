"""Conversion of optimizer models from the operators of onnxruntime-training to standard nodes.

The operators of onnxruntime-training (in the domain com.microsoft) read all parameters, gradients and moments as
sequences and update them in place. Stock onnxruntime does not have them. In the converted model, each parameter has its
own inputs and outputs, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.backends.functions import write_functions
from gradgraph.compat.onnxruntime_training.graphs import value_names as names
from gradgraph.errors import CompatibilityError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.optim.updates import adam_update
from gradgraph.passes.normal.simplifying.clean import clean_up

DOMAIN = "com.microsoft"
_CLIP = "InplaceClipGradNorm"
_CLIP_FLOOR = 1e-6  # added to the norm of the gradients when it is the divisor in clipping

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class ParameterSpec:
    """A trained parameter."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Algorithm:
    """The update rule of an optimizer operator, whose moments are called ``slots`` in checkpoints.

    ``prepare`` computes values shared by all parameters, and ``move`` the new value and moments of a parameter from
    these and its gradient.
    """

    slots: tuple[str, ...]
    prepare: Callable[[Builder, Var, Var, Attributes], Any]
    move: Callable[[Builder, Any, Attributes, Var, Var, list[Var]], tuple[Var, list[Var]]]


def _prepare_adamw(op: Builder, rate: Var, step: Var, attributes: Attributes) -> tuple[Var, Var, Var | None]:
    """Return the negative bias-corrected learning rate, the epsilon of the divisor, and the weight decay factor.

    The bias corrections are computed from the step, in float32 after a power in float64. In adam_mode 1, as in Hugging
    Face's AdamW, the weight decays after the update. In adam_mode 0, as in PyTorch, it decays before the update, and
    the bias correction also applies to epsilon. The factor is ``1 − rate · decay``, or None if the decay is 0.
    """
    mode, epsilon = int(attributes.get("adam_mode", 0)), float(attributes.get("epsilon", 1e-8))
    decay = float(attributes.get("weight_decay", 1e-2 if mode == 0 else 0.0))
    floor, corrected = op.const(np.float32(epsilon)), rate
    if attributes.get("correct_bias", 1):
        t = op.cast(step, ir.DataType.DOUBLE)
        first, second = (
            1.0 - op.cast(op.Pow(op.const(np.float64(np.float32(attributes.get(name, default)))), t), ir.DataType.FLOAT)
            for name, default in (("alpha", 0.9), ("beta", 0.999))
        )
        root = op.Sqrt(second)
        corrected = rate * (root / first)
        if mode == 0:
            floor = floor * root
    keep = 1.0 - rate * decay if decay else None
    return -corrected, floor, keep


def _move_adamw(
    op: Builder, shared: tuple[Var, Var, Var | None], attributes: Attributes, p: Var, g: Var, moments: list[Var]
) -> tuple[Var, list[Var]]:
    (rate, floor, keep), (first, second) = shared, moments
    takes = [float(1 - np.float32(attributes.get(n, d))) for n, d in (("alpha", 0.9), ("beta", 0.999))]
    if int(attributes.get("adam_mode", 0)) == 1:
        p, m, v = adam_update(op, p, g, first, second, rate, floor, takes=takes)
        return p if keep is None else p * keep, [m, v]
    p, m, v = adam_update(op, p, g, first, second, rate, floor, keep, takes=takes)
    return p, [m, v]


_ALGORITHMS = {
    "AdamWOptimizer": _Algorithm(("momentum0", "momentum1"), _prepare_adamw, _move_adamw),
    "SGDOptimizerV2": _Algorithm(
        ("momentum0",),  # present in checkpoints, but never read
        lambda op, rate, step, attributes: rate,
        lambda op, rate, attributes, p, g, moments: (p - g * rate, []),
    ),
}


def is_of_sequences(model: onnx.ModelProto) -> bool:
    """Whether ``model`` calls the operators of onnxruntime-training, which read sequences."""
    return any(n.domain == DOMAIN for n in model.graph.node)


def slots_of(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the names of the moments that an optimizer model of onnxruntime-training has for each parameter."""
    return _ALGORITHMS[_optimizer_node(model).op_type].slots


def slots_in(model: onnx.ModelProto, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the moments that an optimizer model in standard nodes has for each parameter.

    Raises:
        CompatibilityError: if ``model`` is not an optimizer model of these parameters.
    """
    known = {v.name for v in model.graph.input}
    lost = next((p for p in parameters if not {p, names.buffer(p)} <= known), None)
    if lost is not None or names.LEARNING_RATE not in known:
        raise CompatibilityError(
            f"this is not an optimizer model for '{shown(lost)}'; use the optimizer_model.onnx generated with the "
            "training model and the checkpoint"
        )
    slots = {s: None for a in _ALGORITHMS.values() for s in a.slots}
    used = tuple(s for s in slots if names.moment(parameters[0], s) in known)
    return used or _ALGORITHMS["SGDOptimizerV2"].slots


def optimizer_graph(model: onnx.ModelProto, parameters: Sequence[ParameterSpec]) -> onnx.ModelProto:
    """Convert an optimizer model of onnxruntime-training to standard nodes for these parameters.

    The inputs are the learning rate, the number of the update, and for each parameter its value, gradient and moments.
    The outputs are a flag that there was an update, and the next values of parameters, moments and, with clipping,
    gradients, because onnxruntime-training overwrites gradients with clipped ones.

    Raises:
        CompatibilityError: if ``model`` is not an optimizer model of onnxruntime-training, or has other nodes.
    """
    node = _optimizer_node(model)
    algorithm, attributes = _ALGORITHMS[node.op_type], _attributes(node)
    norms = _clipping(model, node)
    op = Builder(scope="update", named_operators=True)
    rate = _input(op, names.LEARNING_RATE, ir.DataType.FLOAT, (1,))
    step = _input(op, names.STEP, ir.DataType.INT64, (1,))
    inputs, outputs = [rate.value, step.value], []
    weights = [_input(op, p.name, p.dtype, p.shape) for p in parameters]
    buffers = [_input(op, names.buffer(p.name), p.dtype, p.shape) for p in parameters]
    gradients = buffers
    for norm in norms:
        squares = [op.cast(op.ReduceSum(g * g, keepdims=0), ir.DataType.FLOAT) for g in gradients]
        factor = op.Min(norm / (op.Sqrt(op.sum_of(squares)) + _CLIP_FLOOR), 1.0)
        gradients = [g * op.cast(factor, g.dtype) for g in gradients]
    shared = algorithm.prepare(op, op.Squeeze(rate, [0]), op.Squeeze(step, [0]), attributes)
    used = algorithm.slots if node.op_type != "SGDOptimizerV2" else ()
    for spec, weight, buffer, gradient in zip(parameters, weights, buffers, gradients, strict=True):
        moments = [_input(op, names.moment(spec.name, slot), spec.dtype, spec.shape) for slot in used]
        moved, after = algorithm.move(op, shared, attributes, weight, gradient, moments)
        inputs += [v.value for v in (weight, buffer, *moments)]
        written = [*([gradient] if norms else []), moved, *after]
        before = [*([buffer] if norms else []), weight, *moments]
        for old, new in zip(before, written, strict=True):
            outputs.append(op.Identity(new, name=names.following(old.value.name or "")).value)
            outputs[-1].type, outputs[-1].shape = old.value.type, old.value.shape
    flag = op.Identity(op.const(np.array([True])), name=names.UPDATED).value
    flag.type, flag.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape((1,))
    graph = ir.Graph(inputs, [flag, *outputs], nodes=(), name="update", opset_imports={"": OPSET})
    op.finish(graph)
    built = ir.Model(graph, ir_version=IR_VERSION, producer_name="gradgraph")
    return ir.to_proto(write_functions(clean_up(built)))


def _optimizer_node(model: onnx.ModelProto) -> onnx.NodeProto:
    found = [n for n in model.graph.node if n.domain == DOMAIN and n.op_type in _ALGORITHMS]
    if len(found) != 1:
        raise CompatibilityError(
            f"an optimizer model must have one AdamWOptimizer or SGDOptimizerV2, but this one has {len(found)}; write "
            "it with onnxblock.optim.AdamW or SGD, or use an optimizer of gradgraph.optim with gradgraph.build"
        )
    return found[0]


def _clipping(model: onnx.ModelProto, optimizer: onnx.NodeProto) -> list[float]:
    """Return the maximum norm of each gradient-clipping node, in order; raise CompatibilityError for other nodes."""
    others = [n for n in model.graph.node if n.name != optimizer.name or n.op_type != optimizer.op_type]
    strange = next((n for n in others if (n.domain, n.op_type) != (DOMAIN, _CLIP)), None)
    if strange is not None:
        raise CompatibilityError(
            f"an optimizer model with a node {shown(strange.op_type)} ('{shown(strange.name)}') cannot be converted "
            "to standard nodes, only AdamW and SGD with ClipGradNorm; use an optimizer of gradgraph.optim with "
            "gradgraph.build"
        )
    return [float(_attributes(n).get("max_norm", 1.0)) for n in others]


def _input(op: Builder, name: str, dtype: ir.DataType, shape: Sequence[int]) -> Var:
    fresh = op.fresh(name)
    if fresh != name:
        raise CompatibilityError(f"two tensors of the optimizer would be called '{shown(name)}'; rename a parameter")
    return op.wrap(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)))


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
