"""Find parameters that a normalisation cancels: their exact gradient is zero, and the computed one is rounding noise.

A bias before BatchNormalization in training mode is subtracted again with the channel mean. Optimizers that divide by
the magnitude of a gradient turn the noise into steps, in directions that differ between runtimes.

The path from a parameter to a loss is followed through additions, and through multiplications by factors that are
constant along the axes of the normalisation's mean:

1. ``Add`` and ``Sub``; the biases of ``Conv``, ``ConvTranspose``, ``Gemm`` and ``BatchNormalization``.
2. ``Mul`` and ``Div`` by a tensor that is constant along these axes, ``Neg``, ``Identity``, ``Cast`` and ``Transpose``.
3. ``Reshape``, ``Squeeze`` and ``Unsqueeze`` of the parameter itself.

A parameter is cancelled if each of its paths ends at a normalisation that subtracts a mean over axes along which the
parameter's contribution is constant.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.autodiff.path import Path
from gradgraph.graph.shape_inference import shape_of

Axes = frozenset[int]  # the axes along which a tensor may vary, as negative indices: −1 is the last axis

_BIASES = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "BatchNormalization": 2}


def cancelled(path: Path, weights: Sequence[ir.Value]) -> set[ir.Value]:
    """Return the parameters among ``weights`` that a normalisation cancels on every path to the targets of ``path``."""
    return {weight for weight in weights if weight in path.active and _is_cancelled(path, weight)}


def _is_cancelled(path: Path, weight: ir.Value) -> bool:
    axes = _varying(weight)
    if axes is None or len(axes) > 2:
        return False
    waiting, seen = [(weight, axes)], set[tuple[ir.Value, Axes]]()
    while waiting:
        value, axes = waiting.pop()
        if value in path.targets:
            return False
        if (value, axes) in seen:
            continue
        seen.add((value, axes))
        for node, place in value.uses():
            if not path.is_on(node):
                continue
            if node.graph is not weight.graph and node.graph is not None and weight.graph is not None:
                return False  # the node is in a body of If, Loop or Scan
            if _subtracts(path, node, place, axes):
                continue
            after = _behind(node, place, axes)
            if after is None or any(y in path.active for y in node.outputs[1:]):
                return False
            waiting.append((node.outputs[0], after))
    return True


def _varying(value: ir.Value) -> Axes | None:
    shape = shape_of(value)
    return None if shape is None else frozenset(i - len(shape) for i, d in enumerate(shape) if d != 1)


def _behind(node: ir.Node, place: int, axes: Axes) -> Axes | None:
    """Return the axes along which the contribution of input ``place`` to the node's result varies.

    ``axes`` are the axes along which the input varies. None if the contribution is not an added term, or unknown.
    """
    kind = node.op_type
    if node.domain:
        return None
    result = shape_of(node.outputs[0])
    if kind in ("Add", "Sub", "Neg", "Identity", "Cast"):
        return axes
    if kind in _BIASES:
        if place != _BIASES[kind] or result is None:
            return None
        return axes if kind == "Gemm" else frozenset({1 - len(result)}) if axes else axes
    if kind == "Mul" or (kind == "Div" and place == 0):
        other = node.inputs[1 - place]
        more = None if other is None else _varying(other)
        return None if more is None else axes | more
    if kind in ("Reshape", "Squeeze", "Unsqueeze") and place == 0 and len(axes) < 2:
        sizes = (*(shape_of(node.inputs[0]) or [None]), *(result or [None])) if node.inputs[0] is not None else [None]
        return _varying(node.outputs[0]) if all(isinstance(d, int) for d in sizes) else None
    if kind == "Transpose" and result is not None:
        before = [p - len(result) for p in node.attributes.get_ints("perm", range(len(result))[::-1])]
        return frozenset(i - len(result) for i, p in enumerate(before) if p in axes)
    return None


def _subtracts(path: Path, node: ir.Node, place: int, axes: Axes) -> bool:
    """Whether the node subtracts a mean over axes along which input ``place`` is constant.

    ``axes`` are the axes along which the input varies. False for nodes whose further outputs are used.
    """
    x = node.inputs[0]
    shape = None if x is None else shape_of(x)
    if node.domain or place != 0 or shape is None or any(y in path.active for y in node.outputs[1:]):
        return False
    rank, kind = len(shape), node.op_type
    channel, sample = 1 - rank, -rank
    if kind == "BatchNormalization":
        return bool(node.attributes["training_mode"].as_int()) and axes <= {channel}
    if kind == "InstanceNormalization":
        return axes <= {sample, channel}
    if kind == "GroupNormalization":
        own = isinstance(shape[1], int) and shape[1] == node.attributes["num_groups"].as_int()
        return axes <= ({sample, channel} if own else {sample})
    if kind == "LayerNormalization":
        first = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        first -= rank if first >= 0 else 0
        return all(axis < first for axis in axes)
    return False
