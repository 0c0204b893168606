"""Small language models of random weights with a convolution's or a recurrence's state, as exporters write them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS, VOCABULARY, HEADS = 8, 20, 2
RNG = np.random.default_rng(0)


def tensor(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array((RNG.normal(size=shape) * 0.3).astype(np.float32), name)


def whole(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def standard_convolution(past: str = "past.0.conv") -> onnx.ModelProto:
    """Concat of the state and the tokens, Conv, Slice: as torch.onnx exports LFM2 and Mamba."""
    nodes = [
        helper.make_node("Transpose", ["e"], ["et"], perm=[0, 2, 1]),
        helper.make_node("Concat", [past, "et"], ["full"], axis=2),
        helper.make_node("Conv", ["full", "layers.0.conv.conv.weight"], ["c"], group=CHANNELS),
        helper.make_node("Slice", ["full", "minus 2", "end", "axis 2"], ["present.0.conv"]),
        helper.make_node("Transpose", ["c"], ["mixed"], perm=[0, 2, 1]),
    ]
    weights = [tensor("layers.0.conv.conv.weight", CHANNELS, 1, 3)]
    constants = [whole("minus 2", -2), whole("end", 2**62), whole("axis 2", 2)]
    return decoder(nodes, [*weights, *constants], {past: ["batch", CHANNELS, 2]}, ["present.0.conv"])


def fused_convolution() -> onnx.ModelProto:
    """CausalConvWithState: as onnxruntime-genai's builder writes LFM2."""
    nodes = [
        helper.make_node("Transpose", ["e"], ["et"], perm=[0, 2, 1]),
        helper.make_node(
            "CausalConvWithState",
            ["et", "layers.0.conv.conv.weight", "", "past.0.conv"],
            ["c", "present.0.conv"],
            domain="com.microsoft",
            activation="silu",
        ),
        helper.make_node("Transpose", ["c"], ["mixed"], perm=[0, 2, 1]),
    ]
    weights = [tensor("layers.0.conv.conv.weight", CHANNELS, 1, 3)]
    return decoder(nodes, weights, {"past.0.conv": ["batch", CHANNELS, 2]}, ["present.0.conv"])


def fused_recurrence() -> onnx.ModelProto:
    """LinearAttention with its gates and norm: as onnxruntime-genai's builder writes Qwen3.5."""
    projected = [("q", CHANNELS), ("k", CHANNELS), ("v", CHANNELS), ("a", HEADS), ("b", HEADS), ("z", CHANNELS)]
    names = {name: f"layers.0.linear_attn.in_proj_{name}.weight" for name, _ in projected}
    nodes = [helper.make_node("MatMul", ["e", names[name]], [name]) for name, _ in projected]
    nodes += [
        helper.make_node("LinearAttentionGate", ["a", "dt_bias", "A", "b"], ["decay", "beta"], domain="com.microsoft"),
        helper.make_node(
            "LinearAttention",
            ["q", "k", "v", "past.0.recurrent", "decay", "beta"],
            ["o", "present.0.recurrent"],
            domain="com.microsoft",
            q_num_heads=HEADS,
            kv_num_heads=HEADS,
        ),
        helper.make_node("GatedRMSNorm", ["o", "norm.weight", "z"], ["n"], domain="com.microsoft"),
        helper.make_node("MatMul", ["n", "layers.0.linear_attn.out_proj.weight"], ["mixed"]),
    ]
    weights = [tensor(names[name], CHANNELS, size) for name, size in projected]
    weights += [tensor("dt_bias", HEADS), tensor("A", HEADS), tensor("norm.weight", CHANNELS // HEADS)]
    weights += [tensor("layers.0.linear_attn.out_proj.weight", CHANNELS, CHANNELS)]
    state = ["batch", HEADS, CHANNELS // HEADS, CHANNELS // HEADS]
    return decoder(nodes, weights, {"past.0.recurrent": state}, ["present.0.recurrent"])


def standard_recurrence() -> onnx.ModelProto:
    """A state of four axes that one Mul decays, written out: no keys, although its rank is theirs."""
    nodes = [
        helper.make_node("Mul", ["past.0.ssm", "decay"], ["kept"]),
        helper.make_node("ReduceMean", ["e"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Reshape", ["mean", "one head"], ["update"]),
        helper.make_node("Add", ["kept", "update"], ["present.0.ssm"]),
        helper.make_node("ReduceSum", ["present.0.ssm", "axis 2"], ["state"], keepdims=0),
        helper.make_node("Reshape", ["state", "one row"], ["row"]),
        helper.make_node("MatMul", ["row", "layers.0.mixer.out_proj.weight"], ["mixed"]),
    ]
    weights = [tensor("decay", HEADS, 1, 1), tensor("layers.0.mixer.out_proj.weight", HEADS * CHANNELS, CHANNELS)]
    constants = [whole("one head", 0, 1, 1, CHANNELS), whole("axis 2", 2), whole("one row", 0, 1, HEADS * CHANNELS)]
    return decoder(nodes, [*weights, *constants], {"past.0.ssm": ["batch", HEADS, 3, CHANNELS]}, ["present.0.ssm"])


def unrolled_recurrence(length: int = 3) -> onnx.ModelProto:
    """Selective steps over a fixed number of tokens, one by one: as torch.onnx exports Mamba. It has no state."""
    names = {name: f"layers.0.mixer.{name}_proj.weight" for name in ("in", "dt", "out")}
    nodes = [
        helper.make_node("MatMul", ["e", names["in"]], ["u"]),
        helper.make_node("MatMul", ["u", names["dt"]], ["dt"]),
        helper.make_node("Softplus", ["dt"], ["steps"]),
        helper.make_node("Mul", ["steps", "A"], ["log"]),
        helper.make_node("Exp", ["log"], ["decays"]),
        helper.make_node("Mul", ["steps", "u"], ["inputs"]),
    ]
    for t in range(length):
        nodes += [helper.make_node("Gather", [x, f"at {t}"], [f"{x} {t}"], axis=1) for x in ("decays", "inputs")]
        kept = f"inputs {t}" if t == 0 else f"kept {t}"
        if t:
            nodes.append(helper.make_node("Mul", [f"decays {t}", f"state {t - 1}"], [kept]))
        nodes.append(helper.make_node("Add", [kept, f"inputs {t}"], [f"state {t}"]))
    nodes += [helper.make_node("Concat", [f"state {t}" for t in range(length)], ["y"], axis=1)]
    nodes += [helper.make_node("MatMul", ["y", names["out"]], ["mixed"])]
    weights = [tensor(name, CHANNELS, CHANNELS) for name in names.values()]
    return decoder(nodes, [*weights, tensor("A", CHANNELS), *(whole(f"at {t}", t) for t in range(length))], {}, [])


MODELS = {f.__name__: f for f in (standard_convolution, fused_convolution, fused_recurrence, standard_recurrence)}


def decoder(
    nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], pasts: dict[str, list[str | int]], presents: list[str]
) -> onnx.ModelProto:
    """Embed tokens to "e", add what ``nodes`` make of it ("mixed"), and score the next token."""
    every = [
        helper.make_node("Gather", ["embed_tokens.weight", "input_ids"], ["e"]),
        *nodes,
        helper.make_node("Add", ["mixed", "e"], ["h"]),
        helper.make_node("MatMul", ["h", "layers.0.feed_forward.w1.weight"], ["f"]),
        helper.make_node("Add", ["f", "h"], ["g"]),
        helper.make_node("MatMul", ["g", "lm_head.weight"], ["logits"]),
    ]
    weights = [
        *weights,
        tensor("embed_tokens.weight", VOCABULARY, CHANNELS),
        tensor("lm_head.weight", CHANNELS, VOCABULARY),
    ]
    weights += [tensor("layers.0.feed_forward.w1.weight", CHANNELS, CHANNELS)]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in pasts.items()]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY])]
    states = zip(presents, pasts.values(), strict=True)
    outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in states]
    graph = helper.make_graph(every, "decoder", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)
