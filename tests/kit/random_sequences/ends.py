"""The first layers of a network, for tokens or features, and its last ones: logits, or a loss of its own."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from tests.kit.random_sequences.attention_spellings import padding_mask
from tests.kit.random_sequences.layer_spellings import dropout, linear, norm
from tests.kit.random_sequences.sequence_draft import CLASSES, LONGEST, VOCABULARY, Draft


def embedding(net: Draft) -> str:
    d = net.width
    if not net.is_ids:
        x = linear(net, net.source, 6, d)
    else:
        net.table = net.weight(VOCABULARY, d, spread=0.7, name="table")
        x = net.op("Gather", net.table, "ids", axis=0)
        how = net.one_of(["", "", "zero", "scale"])
        if how == "zero":
            pad = net.op("Equal", "ids", np.int64(0))
            x = net.op("Where", net.op("Unsqueeze", pad, np.array([-1])), 0.0, x)
        if how == "scale":
            x = net.op("Mul", x, math.sqrt(d))
    how = net.one_of(["", "range", "slice", "sines", "gather"])
    how = how if net.is_ids or how != "gather" else ""
    table = net.weight(LONGEST, d, spread=0.3, name="positions") if how in ("range", "slice", "gather") else ""
    if how == "range":
        end = net.dim("S")
        end = net.op("Squeeze", end, np.array([0])) if isinstance(end, str) else np.int64(end)
        x = net.op("Add", x, net.op("Gather", table, net.op("Range", np.int64(0), end, np.int64(1))))
    elif how == "slice":
        end = net.dim("S")
        end = end if isinstance(end, str) else np.array([end])
        x = net.op("Add", x, net.op("Slice", table, np.array([0]), end, np.array([0])))
    elif how == "gather":  # positions are counted without padding, as in RoBERTa
        seen = net.op("Cast", net.op("Not", net.op("Equal", "ids", np.int64(0))), to=TensorProto.INT64)
        place = net.op("Mul", net.op("CumSum", seen, np.int64(1)), seen)
        x = net.op("Add", x, net.op("Gather", table, place))
    elif how == "sines" and "S" not in net.open:
        t = np.arange(net.length)[:, None] * 10.0 ** -np.arange(d)
        x = net.op("Add", x, np.sin(t).astype(np.float32)[None])
    if net.chance(0.3):
        x = norm(net, x)
    return dropout(net, x)


def head(net: Draft, x: str) -> None:
    d = net.width
    how = net.one_of(["tokens", "tied", "pooled", "pooled", "contrastive", "own"])
    net.classes = CLASSES
    if how == "tied" and net.is_ids:
        net.classes = VOCABULARY
        y = net.op("MatMul", x, net.swap(net.table, 2))
        net.output, net.rank = y, 3
    elif how in ("tokens", "tied"):
        net.output, net.rank = linear(net, x, d, CLASSES), 3
    elif how == "pooled":
        net.output, net.rank = linear(net, pooled(net, x), d, CLASSES, rank=2), 2
    else:
        net.own_loss = True
        net.output = contrastive(net, x) if how == "contrastive" else own_loss(net, x)


def pooled(net: Draft, x: str) -> str:
    how = net.one_of(["mean", "masked", "first", "last", "attention", "logsumexp", "slice"])
    one = np.array([1])
    if how == "mean":
        return net.op("ReduceMean", x, one, keepdims=0)
    if how == "masked":
        inside = net.op("Unsqueeze", net.op("Cast", padding_mask(net), to=TensorProto.FLOAT), np.array([-1]))
        inside = net.op("Expand", inside, net.op("Shape", x)) if net.chance(0.5) else inside
        total = net.op("ReduceSum", net.op("Mul", x, inside), one, keepdims=0)
        return net.op("Div", total, net.op("Clip", net.op("ReduceSum", inside, one, keepdims=0), 1e-9))
    if how == "first":
        return net.op("Gather", x, np.int64(0), axis=1)
    if how == "slice":
        return net.op("Squeeze", net.op("Slice", x, np.array([-1]), np.array([2**63 - 1]), one), one)
    if how == "last":  # the last token of each sequence, by its length
        count = net.op("ReduceSum", net.op("Cast", padding_mask(net), to=TensorProto.INT64), one, keepdims=1)
        place = net.op("Sub", count, np.int64(1))
        return net.op("GatherND", x, place, batch_dims=1)
    if how == "attention":
        scores = net.op("Softmax", net.op("MatMul", x, net.weight(net.width, 1)), axis=1)
        return net.op("ReduceSum", net.op("Mul", x, scores), one, keepdims=0)
    return net.op("ReduceLogSumExp", x, one, keepdims=0)


def contrastive(net: Draft, x: str) -> str:
    """Append a contrastive loss of each sample against all others, as in CLIP."""
    a, b = (linear(net, pooled(net, x), net.width, 6, rank=2) for _ in range(2))
    a, b = (
        net.op("Div", t, net.op("ReduceL2", t, np.array([1]), keepdims=1))
        if net.chance(0.5)
        else net.op("LpNormalization", t, axis=1)
        for t in (a, b)
    )
    scores = net.op(
        "Mul",
        net.op("MatMul", a, net.swap(b, 2)),
        net.op("Exp", net.weight(around=0.5, spread=0.1, name="temperature")),
    )
    end = net.dim("B")
    end = net.op("Squeeze", end, np.array([0])) if isinstance(end, str) else np.int64(end)
    labels = net.op("Range", np.int64(0), end, np.int64(1))
    losses = [net.op("SoftmaxCrossEntropyLoss", t, labels) for t in (scores, net.swap(scores, 2))]
    return net.op("Div", net.op("Add", *losses), 2.0)


def own_loss(net: Draft, x: str) -> str:
    """Append a loss that the model computes from an input with labels."""
    net.inputs.append(("labels", TensorProto.INT64, ["B"]))
    scores = linear(net, pooled(net, x), net.width, CLASSES, rank=2)
    how = net.one_of(["softmax", "weights", "nll", "hot", "kl", "margin"])
    if how == "softmax":
        return net.op("SoftmaxCrossEntropyLoss", scores, "labels", ignore_index=2)
    if how == "weights":
        return net.op(
            "SoftmaxCrossEntropyLoss",
            scores,
            "labels",
            net.rng.uniform(0.5, 2, CLASSES).astype(np.float32),
            reduction=net.one_of(["mean", "sum"]),
        )
    if how == "nll":
        return net.op("NegativeLogLikelihoodLoss", net.op("LogSoftmax", scores, axis=1), "labels")
    hot = net.op("OneHot", "labels", np.int64(CLASSES), np.array([0.02, 0.92], np.float32))
    if how == "hot":
        each = net.op("ReduceSum", net.op("Mul", net.op("LogSoftmax", scores), hot), np.array([1]), keepdims=0)
        return net.op("Neg", net.op("ReduceMean", each, keepdims=0))
    if how == "kl":
        each = net.op("Mul", hot, net.op("Sub", net.op("Log", hot), net.op("LogSoftmax", scores)))
        return net.op("ReduceMean", each, keepdims=0)
    picked = net.op("GatherElements", scores, net.op("Unsqueeze", "labels", np.array([1])), axis=1)
    return net.op("ReduceMean", net.op("Softplus", net.op("Sub", scores, picked)), keepdims=0)
