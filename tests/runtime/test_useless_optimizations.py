"""onnxruntime optimizations are disabled only where they cannot apply."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph.backends import BACKENDS
from gradgraph.backends.engine import for_machine
from gradgraph.frontend import export, nn
from gradgraph.runtime.execution.useless_optimizations import useless_optimizations


def model(*nodes: onnx.NodeProto, functions: tuple[onnx.FunctionProto, ...] = ()) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph(list(nodes), "g", [], []), functions=list(functions))


def in_a_body(node: onnx.NodeProto) -> onnx.ModelProto:
    body = helper.make_graph([node], "body", [], [])
    inner = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    return model(helper.make_node("Loop", ["n"], ["z"], body=helper.make_graph([inner], "outer", [], [])))


def in_a_function(node: onnx.NodeProto) -> onnx.ModelProto:
    function = helper.make_function("own", "F", ["x"], ["y"], [node], [helper.make_opsetid("", 21)])
    return model(helper.make_node("F", ["x"], ["y"], domain="own"), functions=(function,))


@pytest.mark.parametrize("place", [model, in_a_body, in_a_function])
@pytest.mark.parametrize(
    ("op_type", "works"),
    [
        ("DequantizeLinear", ["WhereDummyDq", "QDQSelectorActionTransformer", "MatMulNBitsFusion"]),
        ("QuantizeLinear", ["QDQPropagationTransformer", "DoubleQDQPairsRemover"]),
        ("MatMulInteger", ["MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion"]),
        ("Softmax", ["BiasSoftmaxFusion"]),
        ("Dropout", ["BiasDropoutFusion"]),
        ("Erf", ["GeluFusionL1", "GeluFusionL2", "BiasGeluFusion"]),
        ("Tanh", ["FastGeluFusion", "BiasGeluFusion"]),
        ("Gelu", ["BiasGeluFusion"]),
        ("Sigmoid", ["QuickGeluFusion"]),
        ("ReduceMean", ["LayerNormFusionL1", "SimplifiedLayerNormFusion", "SkipLayerNormFusion"]),
        ("LayerNormalization", ["SkipLayerNormFusion", "BiasSkipLayerNormFusion", "EmbedLayerNormFusion"]),
        ("Slice", ["SliceConcatToSpaceToDepthFusion"]),
    ],
)
def test_what_a_node_may_need_is_kept_wherever_it_is(place: object, op_type: str, works: list[str]) -> None:
    assert callable(place)
    idle = useless_optimizations(place(helper.make_node(op_type, ["x"], ["y"])))
    assert idle
    assert not set(works) & set(idle)
    assert set(works) <= set(useless_optimizations(place(helper.make_node("Relu", ["x"], ["y"]))))


def executed(step: onnx.ModelProto, path: Path, idle: list[str]) -> bytes:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    content = step.SerializeToString()
    ort.InferenceSession(content, options, providers=["CPUExecutionProvider"], disabled_optimizers=idle)
    return onnx.load(path).SerializeToString(deterministic=True)


def quantised() -> onnx.ModelProto:
    """A product whose factors come from integers: onnxruntime makes one integer kernel of it."""
    scale = helper.make_tensor("s", 1, [], [0.1])
    zero = helper.make_tensor("z", onnx.TensorProto.UINT8, [], [3])
    weight = onnx.numpy_helper.from_array(np.arange(6, dtype=np.uint8).reshape(2, 3), "w")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "s", "z"], ["mq"]),
        helper.make_node("DequantizeLinear", ["mq", "s", "z"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, 1, [4, n]) for name, n in (("x", 2), ("y", 3))]
    graph = helper.make_graph(nodes, "q", ends[:1], ends[1:], [scale, zero, weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def a_step() -> onnx.ModelProto:
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.GELU()
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5), nn.Dropout(0.5))
    step = gg.build(export(network, {"x": ("batch", 3, 12, 12)}), "cross_entropy", "adamw")
    return for_machine(step.train, BACKENDS["ort-cpu"], {"batch": 2})


@pytest.mark.parametrize("make", [a_step, quantised])
def test_the_same_graph_is_executed(make: object, tmp_path: Path) -> None:
    assert callable(make)
    given = make()
    whole = executed(given, tmp_path / "whole.onnx", [])
    assert executed(given, tmp_path / "spared.onnx", useless_optimizations(given)) == whole
