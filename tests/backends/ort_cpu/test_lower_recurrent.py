"""A recurrent layer that is trained on a CPU is written as one loop forward and one backwards for each direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine, opened
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from gradgraph.backends.ort_cpu.recurrent.recurrent_layouts import Blocks, Columns, layout_of
from gradgraph.backends.ort_cpu.recurrent.shared_states import share_states
from gradgraph.graph.builder import Builder
from gradgraph.machine.hardware import nchwc_block
from tests.kit.running import run

T, N, V = 4, 4, 3
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
OUTPUTS = {"RNN": ["Y", "Y_h"], "GRU": ["Y", "Y_h"], "LSTM": ["Y", "Y_h", "Y_c"]}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {}),
    ("RNN", {"activations": ["Relu"]}),
    ("GRU", {}),
    ("GRU", {"linear_before_reset": 1}),
    ("LSTM", {}),
]
COUNT = {"forward": 1, "reverse": 1, "bidirectional": 2}
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of tests are small."""
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)


def model(
    op_type: str,
    direction: str = "forward",
    read: str = "Y",
    first: bool = True,
    units: int = 5,
    features: int = 2,
    bias: bool = True,
    **attrs: Any,
) -> onnx.ModelProto:
    """A layer of which one output is squared and summed up, with weights as initializers."""
    count, rows = COUNT[direction], GATES[op_type] * units
    sizes = {"W": (count, rows, features), "R": (count, rows, units), "B": (count, 2 * rows)}
    states = ["h", "c"][: len(OUTPUTS[op_type]) - 1]
    sizes |= dict.fromkeys(states, (count, N, units))
    names = ["x", "W", "R", "B" if bias else "", "", *(states if first else [])]
    nodes = [
        onnx.helper.make_node(
            op_type,
            names,
            [name if name == read else "" for name in OUTPUTS[op_type]],
            hidden_size=units,
            direction=direction,
            **(attrs | ({"activations": attrs["activations"] * count} if "activations" in attrs else {})),
        ),
        onnx.helper.make_node("ReduceSumSquare", [read], ["loss"], keepdims=0),
    ]
    weights = {name: rng.uniform(-0.9, 0.9, shape).astype(np.float32) for name, shape in sizes.items()}
    graph = onnx.helper.make_graph(
        nodes,
        "layer",
        [onnx.helper.make_tensor_value_info("x", 1, ["T", N, features])],
        [onnx.helper.make_tensor_value_info("loss", 1, [])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items() if name in names],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def trained(layer: onnx.ModelProto) -> onnx.ModelProto:
    return gg.build(layer, None, gg.optim.sgd(0.1)).train


def kinds(lowered: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in lowered.graph.node]


def agree(train: onnx.ModelProto, lowered: onnx.ModelProto) -> None:
    sizes = {v.name: [d.dim_value or T for d in v.type.tensor_type.shape.dim] for v in train.graph.input}
    sizes |= {"target": [1, 1]} if "target" in sizes else {}
    feeds = {name: rng.uniform(-0.3, 0.3, shape).astype(np.float32) for name, shape in sizes.items()}  # none saturates
    if "ids" in sizes:
        kind = onnx.helper.tensor_dtype_to_np_dtype(
            train.graph.input[list(sizes).index("ids")].type.tensor_type.elem_type
        )
        feeds["ids"] = rng.integers(-V, V - 1, sizes["ids"], kind)  # the last row is read as -1 only
    expected, found = run(train, feeds), run(lowered, feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.sweep(0.19)
@pytest.mark.parametrize("sizes", [(5, 2), (32, 2), (32, 16)], ids=["columns", "blocks", "blocks both"])
@pytest.mark.parametrize("direction", COUNT)
@pytest.mark.parametrize(("op_type", "attrs"), KINDS, ids=[f"{k} {''.join(a)}" for k, a in KINDS])
def test_one_loop_each_way(op_type: str, attrs: dict[str, Any], direction: str, sizes: tuple[int, int]) -> None:
    train = trained(model(op_type, direction, units=sizes[0], features=sizes[1], **attrs))
    lowered = for_machine(train, ORT_CPU, {"T": T})
    assert kinds(lowered).count("Scan") == 2 * COUNT[direction] and op_type not in kinds(lowered)
    agree(train, lowered)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("first", [False, True], ids=["zeros", "initial state"])
@pytest.mark.parametrize("direction", COUNT)
@pytest.mark.parametrize(("op_type", "read"), [(k, y) for k, ys in OUTPUTS.items() for y in ys])
def test_whichever_output_is_read(op_type: str, read: str, direction: str, first: bool) -> None:
    train = trained(model(op_type, direction, read, first, units=16))
    for dims in ({"T": T}, None):
        lowered = for_machine(train, ORT_CPU, dims)
        assert op_type not in kinds(lowered)
        agree(train, lowered)


@pytest.mark.sweep(0.41)
@pytest.mark.parametrize("direction", COUNT)
@pytest.mark.parametrize(("op_type", "read"), [(k, y) for k, ys in OUTPUTS.items() for y in ys])
def test_cotangents_of_unknown_sizes(op_type: str, read: str, direction: str) -> None:
    """The number of steps has no name, and a target of any size stands beside what the loss compares."""
    layer = model(op_type, direction, read, units=16)
    count, graph = 16 * N * COUNT[direction], layer.graph
    graph.node.pop()
    graph.node[0].input[0] = "every other step"
    graph.node.insert(0, onnx.helper.make_node("Slice", ["x", "start", "end", "start", "two"], ["every other step"]))
    for name, number in {"start": [0], "end": [2**31], "two": [2], "rows": [-1, count]}.items():
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(number), name))
    graph.input.append(onnx.helper.make_tensor_value_info("target", 1, ["R", "C"]))
    graph.node.extend([
        onnx.helper.make_node("Reshape", [read, "rows"], ["flat"]),
        onnx.helper.make_node("Sub", ["flat", "target"], ["gap"]),
        onnx.helper.make_node("ReduceSumSquare", ["gap"], ["loss"], keepdims=0),
    ])  # fmt: skip
    train = trained(layer)
    lowered = for_machine(train, ORT_CPU, {"T": T})
    assert op_type not in kinds(lowered)
    agree(train, lowered)


@pytest.mark.parametrize(
    "options", [{"clip": 0.5}, {"bias": False}, {"activations": ["Sigmoid", "Sigmoid", "Tanh"]}], ids=str
)
def test_what_is_not_plain_stays(options: dict[str, Any]) -> None:
    train = trained(model("LSTM", units=16, **options))
    lowered = for_machine(train, ORT_CPU, {"T": T})
    assert kinds(lowered).count("LSTM") == 1
    agree(train, lowered)


def test_one_plain_direction_of_two_stays() -> None:
    layer = model("RNN", "bidirectional")
    layer.graph.node[0].attribute.append(onnx.helper.make_attribute("activations", ["Tanh", "Sigmoid"]))
    train = trained(layer)
    lowered = for_machine(train, ORT_CPU)
    assert kinds(lowered).count("RNN") == 1
    agree(train, lowered)


def test_a_model_without_gradients_is_left_alone() -> None:
    plain = ir.from_proto(model("LSTM"))
    assert [n.op_type for n in share_states(plain).graph] == ["LSTM", "ReduceSumSquare"]


@pytest.mark.parametrize(("units", "kind"), [(4, "LSTM"), (5, "Scan")])
def test_small_layers_stay(units: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_WORK", 5 * 5 * N)
    assert kind in [n.op_type for n in share_states(opened(trained(model("LSTM", units=units)), {})).graph]


def test_an_open_number_of_sequences_stays() -> None:
    layer = model("LSTM", first=False)
    layer.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "N"
    assert "LSTM" in kinds(for_machine(trained(layer), ORT_CPU)) and "LSTM" not in kinds(
        for_machine(trained(layer), ORT_CPU, {"N": N})
    )


@pytest.mark.skipif(not nchwc_block(), reason="this processor has no blocked layout")
def test_blocks_want_known_sizes_and_whole_blocks() -> None:
    op, block = Builder(), nchwc_block()
    known, open_, empty = (
        op.wrap(ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims)))
        for dims in ([T, N, 2], ["T", N, 2], [T, 0, 2])
    )
    assert isinstance(layout_of(op, known, 2 * block), Blocks)
    rest = [(known, block + 1), (known, None), (open_, block), (empty, block)]
    assert all(isinstance(layout_of(op, x, units), Columns) for x, units in rest)


# --- rows of a table ------------------------------------------------------------------------------------------


def of_rows(
    layer: onnx.ModelProto,
    *also: onnx.NodeProto,
    rows: int = V,
    turned: bool = False,
    kind: int = onnx.TensorProto.INT64,
) -> onnx.ModelProto:
    """The layer reads rows of a table E; ``also`` is computed, too, and its last output squared is part of the loss."""
    graph, x = layer.graph, layer.graph.input.pop()
    features = x.type.tensor_type.shape.dim[2].dim_value
    read = onnx.helper.make_node("Gather", ["E", "ids"], ["rows" if turned else "x"], axis=0)
    turn = [onnx.helper.make_node("Transpose", ["rows"], ["x"], perm=[1, 0, 2])] if turned else []
    squares = [onnx.helper.make_node("ReduceSumSquare", [n.output[-1]], ["square"], keepdims=0) for n in also[-1:]]
    added = [onnx.helper.make_node("Add", ["loss", "square"], ["total"])] if also else []
    nodes = [read, *turn, *graph.node, *also, *squares, *added]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(onnx.helper.make_tensor_value_info("ids", kind, [N, "T"] if turned else ["T", N]))
    graph.output[0].name = "total" if also else "loss"
    table = rng.uniform(-0.9, 0.9, (rows, features)).astype(np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(table, "E"))
    return layer


def reads_the_table(lowered: onnx.ModelProto) -> bool:
    return any(n.op_type == "Gather" and n.input[0] == "E" for n in lowered.graph.node)


@pytest.mark.sweep(0.135)
@pytest.mark.parametrize("turned", [False, True], ids=["steps first", "sequences first"])
@pytest.mark.parametrize("units", [5, 16], ids=["columns", "blocks"])
@pytest.mark.parametrize("direction", COUNT)
@pytest.mark.parametrize(("op_type", "attrs"), KINDS, ids=[f"{k} {''.join(a)}" for k, a in KINDS])
def test_a_small_table_is_multiplied_before_it_is_read(
    op_type: str, attrs: dict[str, Any], direction: str, units: int, turned: bool
) -> None:
    train = trained(of_rows(model(op_type, direction, units=units, features=16, **attrs), turned=turned))
    lowered = for_machine(train, ORT_CPU, {"T": T})
    assert not reads_the_table(lowered)
    agree(train, lowered)


def test_tokens_of_32_bits() -> None:
    train = trained(of_rows(model("GRU", units=16, features=16), kind=onnx.TensorProto.INT32))
    lowered = for_machine(train, ORT_CPU, {"T": T})
    assert not reads_the_table(lowered)
    agree(train, lowered)


def test_a_table_that_is_read_elsewhere_too() -> None:
    tied = onnx.helper.make_node("Identity", ["E"], ["tied"])
    train = trained(of_rows(model("LSTM", units=16, features=16), tied, turned=True))
    lowered = for_machine(train, ORT_CPU, {"T": T})
    assert not reads_the_table(lowered)
    agree(train, lowered)


@pytest.mark.parametrize(
    "also",
    [
        [onnx.helper.make_node("Identity", ["x"], ["again"])],
        [onnx.helper.make_node("LSTM", ["x", "W", "R"], ["", "second"], hidden_size=16)],
        [onnx.helper.make_node("Gather", ["E", "ids"], ["again"])],
    ],
    ids=["rows read elsewhere", "two layers", "read twice"],
)
def test_rows_that_more_than_the_layer_reads(also: list[onnx.NodeProto]) -> None:
    train = trained(of_rows(model("LSTM", units=16, features=16), *also))
    lowered = for_machine(train, ORT_CPU, {"T": T})
    assert reads_the_table(lowered)
    agree(train, lowered)


def test_a_large_table_or_open_sizes_stay() -> None:
    large = trained(of_rows(model("LSTM", units=16, features=16), rows=T * N))
    small = trained(of_rows(model("LSTM", units=16, features=16)))
    for train, lowered in [(large, for_machine(large, ORT_CPU, {"T": T})), (small, for_machine(small, ORT_CPU))]:
        assert reads_the_table(lowered)
        agree(train, lowered)
