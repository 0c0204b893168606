"""Linear attention with a recurrent state, and the causal convolution with a state that precedes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.passes.normal.edit import is_wanted
from gradgraph.passes.normal.opsets.attention_formula import in_heads
from gradgraph.passes.normal.opsets.downgrade import since


@since(27, "CausalConvWithState")
def causal_conv_with_state(
    op: Builder,
    node: ir.Node,
    x: Var,
    weight: Var,
    bias: Var | None = None,
    past: Var | None = None,
    *,
    activation: str = "none",
    dilation: int = 1,
) -> Any:
    """Apply a causal depthwise convolution to x [batch, channels, length], and return the next state.

    For a kernel of size k, x is preceded by (k − 1) · dilation earlier positions: ``past``, or zeros. Only
    com.microsoft's operator of this name has a dilation.
    """
    channels = next((d for d in (weight.dim(0), x.dim(1)) if isinstance(d, int)), None)
    if channels is None:
        raise ModelError(f"{describe(node)} has an unknown number of channels; export the model with fixed weights")
    before = (op.dim(weight, 2) - 1) * dilation
    y_input, pads = x if past is None else op.Concat(past, x, axis=2), None
    known = weight.dim(2)
    if past is None and isinstance(known, int):
        pads = [(known - 1) * dilation, 0]
    elif past is None:
        y_input = _padded(op, x, before)
    y = op.Conv(y_input, weight, bias, group=channels, pads=pads, dilations=[dilation])
    if activation in ("silu", "swish"):
        y = y * op.Sigmoid(y)
    if len(node.outputs) < 2 or not is_wanted(node.outputs[1]):
        return y, None
    whole = _padded(op, x, before) if past is None else y_input
    return y, op.Slice(whole, op.dim(x, 2), [2**62], [2])  # the last (k - 1) * dilation of all positions


def _padded(op: Builder, x: Var, before: Var) -> Var:
    return op.Pad(x, op.Concat([0, 0], before, [0, 0, 0], axis=0))


@since(27, "LinearAttention")
def linear_attention(
    op: Builder,
    node: ir.Node,
    query: Var,
    key: Var,
    value: Var,
    past: Var | None = None,
    decay: Var | None = None,
    beta: Var | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> Any:
    """Compute linear attention by a Scan over time, in float32.

    At each position the state S is updated and the output o is computed: S ← exp(decay) · S; S ← S + k ⊗ v, or with the
    delta rule S ← S + k ⊗ β(v − Sᵀk); o = scale · Sᵀq.

    Axes are b (batch), t (time), h (heads, each shared by g query heads), d (size of a key) and m (size of a value);
    the state is [b, h, d, m]. com.microsoft's operator of this name also allows more value heads than query or key
    heads; value heads then share queries or keys.
    """
    wide = [op.cast(x, ir.DataType.FLOAT) for x in (query, key, value)]
    q = _queries(op, wide[0], q_num_heads, kv_num_heads)
    keys = _repeated(op, wide[1], _key_heads(query, key, q_num_heads, kv_num_heads), kv_num_heads)
    k, v = op.Unsqueeze(keys, [4]), op.Unsqueeze(in_heads(op, wide[2], kv_num_heads), [3])
    inputs = {"q": q * (scale or _default_scale(op, q)), "k": k, "v": v}  # q [b,t,h,g,d]  k [..d,1]  v [..1,m]
    if decay is not None:
        by_head = in_heads(op, op.Exp(op.cast(decay, ir.DataType.FLOAT)), kv_num_heads)
        inputs["decay"] = op.Unsqueeze(by_head, [4])  # [b, t, h, 1 or d, 1]
    if beta is not None:
        inputs["beta"] = op.Unsqueeze(op.cast(beta, ir.DataType.FLOAT), [3, 4])  # [b, t, h or 1, 1, 1]
    if past is not None:
        state = op.cast(past, ir.DataType.FLOAT)
    else:
        shape = op.Concat(op.dim(k, 0), op.dim(k, 2), op.dim(k, 3), op.dim(v, 4), axis=0)
        state = op.full(shape, 0.0, ir.DataType.FLOAT)
    last, outputs = _scan(op, state, inputs, _step(op, list(inputs)))
    size = value.dim(2)
    hidden = size // kv_num_heads * max(q_num_heads, kv_num_heads) if isinstance(size, int) else -1
    y = op.cast(op.Reshape(outputs, [0, 0, hidden]), query.dtype)  # [b, t, h, g, m] has the heads in order
    return y, op.cast(last, query.dtype if past is None else past.dtype)


def _queries(op: Builder, query: Var, heads: int, kv_heads: int) -> Var:
    """Reshape [b, t, heads · d] to [b, t, h, g, d], one group of g queries for each of h value heads."""
    if kv_heads > heads:
        return op.Unsqueeze(_repeated(op, query, heads, kv_heads), [3])
    width = query.dim(2)
    return op.Reshape(query, [0, 0, kv_heads, heads // kv_heads, width // heads if isinstance(width, int) else -1])


def _key_heads(query: Var, key: Var, heads: int, kv_heads: int) -> int:
    """Return the number of key heads, whose size is that of query heads; ``kv_heads`` if sizes are unknown."""
    queries, keys = query.dim(2), key.dim(2)
    return keys // (queries // heads) if isinstance(queries, int) and isinstance(keys, int) else kv_heads


def _repeated(op: Builder, x: Var, heads: int, wanted: int) -> Var:
    """Reshape [b, t, heads · d] to [b, t, wanted, d], with each head ``wanted / heads`` times in a row."""
    if heads == wanted:
        return in_heads(op, x, heads)
    width = x.dim(2)
    size = width // heads if isinstance(width, int) else -1
    repeated = op.Tile(op.Reshape(x, [0, 0, heads, 1, size]), [1, 1, 1, wanted // heads, 1])
    return op.Reshape(repeated, [0, 0, wanted, size])


def _default_scale(op: Builder, q: Var) -> Any:
    size = q.dim(-1)
    return 1 / math.sqrt(size) if isinstance(size, int) else op.Reciprocal(op.Sqrt(op.cast(op.dim(q, -1), q.dtype)))


def _step(op: Builder, names: list[str]) -> Callable[..., list[Var]]:
    """Return the function of one Scan step, from the state and a slice of each of ``names`` to the next state and o."""

    def write(state: Var, *slices: Var) -> list[Var]:
        now = dict(zip(names, slices, strict=True))
        if "decay" in now:
            state = state * now["decay"]
        v = now["v"]
        if "beta" in now:
            v = now["beta"] * (v - op.ReduceSum(state * now["k"], [2], keepdims=1))
        state = state + now["k"] * v
        return [state, now["q"] @ state]

    return write


def _scan(op: Builder, state: Var, inputs: dict[str, Var], write: Callable[..., list[Var]]) -> tuple[Var, Var]:
    """Scan the inputs along axis 1; return the last state, and the outputs stacked along axis 1."""
    slices = {name: x.shape for name, x in inputs.items()}
    parameters = [_parameter("state", state, state.shape)]
    parameters += [_parameter(n, inputs[n], s if s is None else (s[0], *s[2:])) for n, s in slices.items()]
    body = op.graph(parameters, write)
    count = len(inputs)
    last, outputs = op.Scan(
        state,
        *inputs.values(),
        body=body,
        num_scan_inputs=count,
        scan_input_axes=[1] * count,
        scan_output_axes=[1],
        outputs=2,
    )
    for y in (last, outputs):
        y.value.type = ir.TensorType(ir.DataType.FLOAT)
    return last, outputs


def _parameter(name: str, like: Var, shape: Any) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(like.dtype), shape=None if shape is None else ir.Shape(shape))
