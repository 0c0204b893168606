"""Forms of the recurrent layers of hybrid language models in com.microsoft (see ``contrib``).

Linear attention and the causal convolution use the formulas of the ai.onnx operators of the same names.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.dialects.contrib import fused, reads_output, refuse
from gradgraph.passes.normal.opsets import linear_attention as formulas
from gradgraph.passes.normal.opsets.downgrade import rms_normalization

_FLOAT = ir.DataType.FLOAT


@fused("CausalConvWithState")
def causal_conv_with_state(
    op: Builder,
    node: ir.Node,
    x: Var,
    weight: Var,
    bias: Var | None = None,
    past: Var | None = None,
    *,
    activation: str = "none",
    channels_last: int = 0,
    dilation: int = 1,
    ndim: int = 1,
    state_window: int = 0,
) -> Any:
    """Convert CausalConvWithState; with ``channels_last``, x and the state have shape [batch, length, *channels]."""
    if ndim != 1:
        raise refuse(node, f"convolves {ndim} axes")
    past = _newest_state(op, node, past, state_window)
    attrs: dict[str, Any] = {"activation": activation, "dilation": dilation}
    if not channels_last:
        return formulas.causal_conv_with_state(op, node, x, weight, bias, past, **attrs)
    past = None if past is None else _channels_first(op, past)
    y, present = formulas.causal_conv_with_state(op, node, _channels_first(op, x), weight, bias, past, **attrs)
    own_axes = [0] if x.rank == 3 else op.Slice(op.shape(x), [2], [x.rank], [0])
    return tuple(v if v is None else _channels_last(op, v, own_axes) for v in (y, present))


def _channels_first(op: Builder, x: Var) -> Var:
    return op.Transpose(x if x.rank == 3 else op.Reshape(x, [0, 0, -1]), perm=[0, 2, 1])


def _channels_last(op: Builder, y: Var, own_axes: Any) -> Var:
    last = op.Transpose(y, perm=[0, 2, 1])
    return last if isinstance(own_axes, list) else op.Reshape(last, op.Concat([0, 0], own_axes, axis=0))


@fused("LinearAttention")
def linear_attention(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var,
    value: Var,
    past: Var | None = None,
    *gates: Var | None,
    **attrs: Any,
) -> Any:
    past = _newest_state(op, node, past, attrs.pop("state_window", 0))
    return formulas.linear_attention(op, node, query, key, value, past, *gates, **attrs)


def _newest_state(op: Builder, node: ir.Node, past: Var | None, window: int) -> Var | None:
    """Return the newest of ``window`` past states, which are stacked along axis 0 of ``past``.

    If ``window`` is 0, return ``past``, a single state. None if ``past`` is None.
    """
    if window and reads_output(node, 1):
        raise refuse(node, "returns a window of states")
    return past if past is None or not window else op.Squeeze(op.Slice(past, [-1], [2**62], [0]), [0])


@fused("LinearAttentionGate")
def linear_attention_gate(op: Builder, node: ir.Node, a: Var, bias: Var, scale: Var, b: Var | None = None) -> Any:
    """Compute decay = scale · softplus(a + bias) and beta = sigmoid(b), in float32."""
    decay = op.cast(scale * op.Softplus(op.cast(a, _FLOAT) + bias), a.dtype)
    return decay, None if b is None else op.cast(op.Sigmoid(op.cast(b, _FLOAT)), b.dtype)


@fused("GatedRMSNorm")
def gated_rms_norm(
    op: Builder, node: ir.Node, x: Var, scale: Var, gate: Var, *, activation: str = "silu", epsilon: float = 1e-5
) -> Any:
    """Compute RMSNorm(x) · scale · activation(gate) in float32.

    The mean of squares is over groups of C = len(scale) consecutive entries of the last axis.
    """
    wide, z = op.cast(x, _FLOAT), op.cast(gate, _FLOAT)
    size = scale.dim(0)
    whole = isinstance(size, int) and x.dim(-1) == size
    groups = wide if whole else op.Reshape(wide, op.Concat([0] * (x.rank - 1), [-1], op.dim(scale, 0), axis=0))
    y = rms_normalization(op, node, groups, op.cast(scale, _FLOAT), epsilon=epsilon)
    y = y if whole else op.Reshape(y, op.shape(x))
    activated = op.Sigmoid(z) if activation == "sigmoid" else z * op.Sigmoid(z)
    return op.cast(y * activated, x.dtype)


@fused("GatedAdd")
def gated_add(op: Builder, node: ir.Node, x: Var, y: Var, gate: Var) -> Any:
    return x + y * gate
