"""Two decoders in one file, as optimum merges them: a small model whose cache holds sums of what its tokens say."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BRANCH, PAST, PRESENT = "use_cache_branch", "past_key_values.0.key", "present.0.key"
WORDS, WIDTH = 98, 8
LAYER, HEAD = "model.layers.0.attn.q_proj.MatMul.weight", "lm_head.MatMul.weight"
GAIN = "model.norm.weight"


def model(apart: bool = False) -> onnx.ModelProto:
    """h[t] = Σ E[token] up to t; scores (g ∘ tanh(h·Q))·W.

    Without a past the sum begins at 0, with one at its last row. ``apart`` stores Q in each branch, not once for both.
    """
    rng = np.random.default_rng(0)
    weights = {"E": (WORDS, WIDTH), LAYER: (WIDTH, WIDTH), GAIN: (WIDTH,), HEAD: (WIDTH, WORDS)}
    tensors = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in weights.items()]
    inner = [tensor for tensor in tensors if apart and tensor.name == LAYER]
    outer = [tensor for tensor in tensors if tensor not in inner]
    outer.append(numpy_helper.from_array(np.array(2), "along"))
    decides = helper.make_node(
        "If", [BRANCH], ["logits", PRESENT], name="optimum::if",
        then_branch=_branch(True, inner), else_branch=_branch(False, inner),
    )  # fmt: skip
    tokens = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    past = helper.make_tensor_value_info(PAST, TensorProto.FLOAT, ["batch", 1, "past", WIDTH])
    branch = helper.make_tensor_value_info(BRANCH, TensorProto.BOOL, [1])
    scores = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", WORDS])
    present = helper.make_tensor_value_info(PRESENT, TensorProto.FLOAT, ["batch", 1, "all", WIDTH])
    graph = helper.make_graph([decides], "merged", [tokens, past, branch], [scores, present], outer)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _branch(with_past: bool, weights: list[onnx.TensorProto]) -> onnx.GraphProto:
    node = helper.make_node
    nodes = [
        node("Gather", ["E", "input_ids"], ["said"], name="embed"),
        node("Unsqueeze", ["said", "one"], ["each"]),
        node("CumSum", ["each", "along"], ["sums"]),
    ]
    if with_past:
        nodes += [
            node("Slice", [PAST, "last", "end", "two"], ["before"]),
            node("Add", ["sums", "before"], ["h"]),
            node("Concat", [PAST, "h"], ["present"], axis=2),
        ]
    else:
        nodes += [node("Identity", ["sums"], ["h"]), node("Identity", ["sums"], ["present"])]
    nodes += [
        node("Squeeze", ["h", "one"], ["rows"]),
        node("MatMul", ["rows", LAYER], ["q"], name="/model/layers.0/attn/q_proj/MatMul"),
        node("Tanh", ["q"], ["t"]),
        node("Mul", ["t", GAIN], ["g"]),
        node("MatMul", ["g", HEAD], ["scores"], name="/lm_head/MatMul"),
    ]
    small = {"one": [1], "two": [2], "last": [-1], "end": [2**62]}
    own = [numpy_helper.from_array(np.array(numbers), name) for name, numbers in small.items()]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("scores", "present")]
    return helper.make_graph(nodes, "with_past" if with_past else "no_past", [], results, own + weights)


def scores(model: onnx.ModelProto, ids: np.ndarray) -> np.ndarray:
    """The formula, in NumPy."""
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return np.asarray((stored[GAIN] * np.tanh(stored["E"][ids].cumsum(1) @ stored[LAYER])) @ stored[HEAD])


def quantised(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with int8 matrices, which both branches read by a DequantizeLinear of their own."""
    graph, stored = model.graph, {t.name: t for t in model.graph.initializer}
    for name in (LAYER, HEAD):
        numbers = numpy_helper.to_array(stored[name])
        scale = np.abs(numbers).max(0) / 127
        tensors = {"whole": np.round(numbers / scale).astype(np.int8), "scale": scale, "zero": scale.astype(np.int8)}
        graph.initializer.remove(stored[name])
        graph.initializer.extend(numpy_helper.from_array(a, f"{name}_{part}") for part, a in tensors.items())
        for attribute in graph.node[0].attribute:
            nodes = attribute.g.node
            at, reader = next((i, node) for i, node in enumerate(nodes) if name in node.input)
            reader.input[1] = f"{name}_{attribute.name}"
            parts = [f"{name}_{part}" for part in tensors]
            nodes.insert(at, helper.make_node("DequantizeLinear", parts, reader.input[1:], axis=1))
    return model
