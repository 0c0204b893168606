"""An LSTM that is trained on a CPU is written as one loop forward and one backwards."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from running import run

import gradgraph as gg
from gradgraph.passes.lower import ORT_CPU, for_machine
from gradgraph.passes.lower.recurrent import share_states

T, N, FEATURES, H = 4, 3, 2, 5
rng = np.random.default_rng(0)


def model(read: str, direction: str, first: bool, count: int = 1) -> onnx.ModelProto:
    """An LSTM of which ``read`` (Y, Y_h or Y_c) is summed up, with weights as initializers."""
    weights = {
        "W": (count, 4 * H, FEATURES),
        "R": (count, 4 * H, H),
        "B": (count, 8 * H),
        "h": (count, N, H),
        "c": (count, N, H),
    }
    names = ["x", "W", "R", "B", "", *(["h", "c"] if first else [])]
    outputs = [name if name == read else "" for name in ("Y", "Y_h", "Y_c")]
    nodes = [
        onnx.helper.make_node("LSTM", names, outputs, hidden_size=H, direction=direction),
        onnx.helper.make_node("Sin", [read], ["s"]),
        onnx.helper.make_node("ReduceSum", ["s"], ["loss"], keepdims=0),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "lstm",
        [onnx.helper.make_tensor_value_info("x", 1, ["T", N, FEATURES])],
        [onnx.helper.make_tensor_value_info("loss", 1, [])],
        [
            onnx.numpy_helper.from_array(rng.uniform(-0.9, 0.9, shape).astype(np.float32), name)
            for name, shape in weights.items()
            if name in names
        ],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def feeds(train: onnx.ModelProto) -> dict[str, np.ndarray]:
    sizes = {"T": T}
    shapes = {
        v.name: [d.dim_value or sizes[d.dim_param] for d in v.type.tensor_type.shape.dim] for v in train.graph.input
    }
    return {name: rng.uniform(-0.9, 0.9, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("first", [False, True], ids=["zeros", "initial state"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("read", ["Y", "Y_h", "Y_c"])
def test_one_loop_each_way(read: str, direction: str, first: bool) -> None:
    train = gg.build(model(read, direction, first), "output", gg.optim.sgd(0.1)).train
    lowered = for_machine(train, ORT_CPU)
    kinds = [n.op_type for n in lowered.graph.node]
    assert kinds.count("Scan") == 2 and "LSTM" not in kinds
    given = feeds(train)
    expected, found = run(train, given), run(lowered, given)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_two_directions_stay() -> None:
    train = gg.build(model("Y", "bidirectional", False, count=2), "output", gg.optim.sgd(0.1)).train
    assert [n.op_type for n in for_machine(train, ORT_CPU).graph.node].count("LSTM") == 1


def test_a_model_without_gradients_is_left_alone() -> None:
    plain = ir.from_proto(model("Y", "forward", True))
    assert [n.op_type for n in share_states(plain).graph] == ["LSTM", "Sin", "ReduceSum"]
