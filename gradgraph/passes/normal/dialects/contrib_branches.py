"""Forms of operators of com.microsoft that normalise, mix and gate parallel streams of a layer (see ``contrib``)."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.dialects.contrib import fused, reads_output, refuse
from gradgraph.passes.normal.opsets.attention_formula import split_heads

_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64


@fused("BranchwiseRMSNorm")
def branchwise_rms_norm(
    op: Builder, node: ir.Node, x: Var, scale: Var | None = None, *, num_branches: int = 0, epsilon: float = 1e-5
) -> Any:
    """Normalise each branch of x [..., branches, hidden] by its root mean square, in float32.

    With ``num_branches``, x is flattened to [..., branches · hidden]. The scale has shape [branches · hidden],
    [branches, hidden] or [hidden].
    """
    grouped = _grouped(op, op.cast(x, _FLOAT), num_branches)
    y = _normalised(op, grouped, epsilon)
    if scale is not None:
        y = y * _scale_by_branch(op, node, op.cast(scale, _FLOAT), grouped)
    return op.cast(op.Reshape(y, op.shape(x)) if num_branches else y, x.dtype)


def _scale_by_branch(op: Builder, node: ir.Node, scale: Var, grouped: Var) -> Var:
    if scale.rank == 2:
        return scale
    size, hidden = scale.dim(0), grouped.dim(-1)
    if not (isinstance(size, int) and isinstance(hidden, int)):
        raise refuse(node, "has a scale or a hidden axis of unknown size")
    return scale if size == hidden else op.Reshape(scale, [-1, hidden])


def _normalised(op: Builder, x: Var, epsilon: float) -> Var:
    return x / op.Sqrt(op.ReduceMean(x * x, [-1], keepdims=1) + epsilon)


def _grouped(op: Builder, x: Var, branches: int) -> Var:
    """Return x as [..., branches, hidden]; it has this shape already unless ``branches`` is positive."""
    return op.Reshape(x, [*[0] * (x.rank - 1), branches, -1]) if branches else x


@fused("HyperConnectionPreMix")
def hyper_connection_pre_mix(
    op: Builder, node: ir.Node, streams: Var, gates: Var, *, num_branches: int = 0, reduction_scale: float = 1.0
) -> Any:
    """Sum the streams [..., branches, hidden], each multiplied by its gates, in float32."""
    wide = _grouped(op, op.cast(streams, _FLOAT), num_branches)
    y = op.ReduceSum(wide * _gates(op, node, gates, wide, num_branches), [-2], keepdims=0)
    return op.cast(y if reduction_scale == 1.0 else y * reduction_scale, streams.dtype)


@fused("HyperConnectionPostMix")
def hyper_connection_post_mix(
    op: Builder,
    node: ir.Node,
    streams: Var,
    block: Var,
    gates: Var,
    mix: Var | None = None,
    *,
    num_branches: int = 0,
) -> Any:
    """Mix the streams [..., branches, hidden] by ``mix`` and add the gated output of a block [..., hidden], in float32.

    y[k] = Σ_c mix[c, k] · streams[c] + gates[k] · block
    """
    wide = _grouped(op, op.cast(streams, _FLOAT), num_branches)
    if mix is not None:
        perm = [*range(mix.rank - 2), mix.rank - 1, mix.rank - 2]
        mixed = op.Transpose(op.cast(mix, _FLOAT), perm=perm) @ wide
    else:
        mixed = wide
    y = mixed + _gates(op, node, gates, wide, num_branches) * op.Unsqueeze(op.cast(block, _FLOAT), [-2])
    return op.cast(op.Reshape(y, op.shape(streams)) if num_branches else y, streams.dtype)


def _gates(op: Builder, node: ir.Node, gates: Var, streams: Var, branches: int) -> Var:
    """Return gates that broadcast against ``streams`` [..., branches, hidden].

    They are declared as [..., branches], [..., branches, 1 or hidden] or, for flattened streams, [..., branches ·
    hidden].
    """
    wide = op.cast(gates, _FLOAT)
    if gates.rank == streams.rank:
        return wide
    last = gates.dim(-1)
    if not branches or last == branches:
        return op.Unsqueeze(wide, [-1])
    if not isinstance(last, int):
        raise refuse(node, "has gates of unknown size")
    return _grouped(op, wide, branches)


_SMALLEST = 1e-6  # of the product of key and query, before its root


@fused("EngramGate")
def engram_gate(
    op: Builder,
    node: ir.Node,
    key: Var,
    query: Var,
    value: Var,
    key_scale: Var,
    query_scale: Var,
    out_scale: Var | None = None,
    *,
    epsilon: float = 1e-5,
) -> Any:
    """Gate ``value`` [batch, length, hidden] by the normalised product p of key and query, in float32.

    Key, query and outputs have shape [batch, length, branches, hidden], the scales of the norms [branches, hidden]. The
    gate is sigmoid(sign(p) · √max(|p|, 1e-6)).
    """
    k, q, v, k_scale, q_scale = (op.cast(x, _FLOAT) for x in (key, query, value, key_scale, query_scale))
    products = _normalised(op, k, epsilon) * k_scale * _normalised(op, q, epsilon) * q_scale
    size = op.cast(op.dim(key, -1), _FLOAT)
    dot = op.ReduceSum(products, [-1], keepdims=1) / op.Sqrt(size)
    root = op.Sqrt(op.Max(op.Abs(dot), _SMALLEST))
    gated = op.Sigmoid(op.Sign(dot) * root) * op.Unsqueeze(v, [2])
    if not reads_output(node, 1):
        return op.cast(gated, key.dtype)
    if out_scale is None:
        raise TypeError("it has no scale for its second output")
    normed = _normalised(op, gated, epsilon) * op.cast(out_scale, _FLOAT)
    return op.cast(gated, key.dtype), op.cast(normed, key.dtype)


@fused("GatedRelativePositionBias")
def gated_relative_position_bias(
    op: Builder,
    node: ir.Node,
    query: Var,
    query_bias: Var,
    positions: Var,
    weight: Var,
    bias: Var,
    scale: Var,
    token_offset: Var | None = None,
    *,
    num_heads: int,
) -> Any:
    """Multiply a bias of relative positions [1, heads, length, length] by a gate computed from the query.

    ``weight`` has shape [head size, 2 · d]; the sums over d of both halves of the product are the two gates u and r.
    """
    if token_offset is not None:
        raise refuse(node, "has a query without padding")
    heads = split_heads(op, query + query_bias, num_heads)
    sums = op.ReduceSum(op.Reshape(heads @ weight + bias, [0, 0, 0, 2, -1]), [-1], keepdims=0)
    u, r = op.Split(op.Sigmoid(sums), axis=-1, num_outputs=2, outputs=2)
    return (u * (r * scale - 1.0) + 2.0) * positions


@fused("RelativePositionBias")
def relative_position_bias(
    op: Builder,
    node: ir.Node,
    table: Var,
    query_length: Var,
    key_length: Var,
    *,
    max_distance: int,
    is_bidirectional: int = 0,
) -> Any:
    """Look up T5's attention bias [1, heads, queries, keys] in ``table`` [buckets, heads].

    Half of the buckets are for one distance each. The others are logarithmic, up to ``max_distance``. With
    ``is_bidirectional``, keys after the query have buckets of their own.
    """
    buckets = table.dim(0)
    if not isinstance(buckets, int):
        raise refuse(node, "has an unknown number of buckets")
    lengths = [op.Range(0, op.Reshape(n, op.const([], _INT64)), 1) for n in (query_length, key_length)]
    distance = op.Unsqueeze(lengths[1], [0]) - op.Unsqueeze(lengths[0], [1])
    buckets = buckets // 2 if is_bidirectional else buckets
    far = op.Abs(distance) if is_bidirectional else op.Max(-distance, 0)
    exact = buckets // 2
    ratio = op.cast(op.Max(far, exact), _FLOAT) / float(exact)
    steps = op.Log(ratio) / math.log(max_distance / exact) * float(buckets - exact)
    large = op.Min(op.cast(steps, _INT64) + exact, buckets - 1)
    bucket = op.Where(far < exact, far, large)
    bucket = op.Where(distance > 0, bucket + buckets, bucket) if is_bidirectional else bucket
    return op.Unsqueeze(op.Transpose(op.Gather(table, bucket), perm=[2, 0, 1]), [0])
