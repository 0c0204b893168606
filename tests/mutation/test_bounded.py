"""Files of a few lines that ask for 2**40 elements end soon, in little memory: read by the worker of the mutants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gradgraph.passes.normal import normalise
from tests.mutation.campaign import GOOD, Crew

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
HUGE = 2**40


def made_by(
    op_type: str, inputs: str, weights: Mapping[str, object], outputs: str = "c", **attributes: object
) -> onnx.ModelProto:
    """X times the sum of what the node makes, behind operators whose data ONNX's inference follows."""
    first = helper.make_node(op_type, inputs.split(), outputs.split(), **attributes)
    nodes = [
        first,
        helper.make_node("Add", ["c", "c"], ["d"]),
        helper.make_node("Cast", ["d"], ["e"], to=FLOAT),
        helper.make_node("ReduceSum", ["e"], ["r"]),
        helper.make_node("Mul", ["x", "r"], ["y"]),
    ]
    return model(nodes, weights)


def model(nodes: Sequence[onnx.NodeProto], weights: Mapping[str, object], x: Sequence[int] = (2, 3)) -> onnx.ModelProto:
    tensors = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()]
    ends = [helper.make_tensor_value_info("x", FLOAT, x)], [helper.make_tensor_value_info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


N = helper.make_node
ONES = [np.ones(s, np.int64) for s in ((1024, 1, 1), (1, 1024, 1), (1, 1, 1024))]
DOUBLED = [N("Concat", [f"a{i}", f"a{i}"], [f"a{i + 1}"], axis=0) for i in range(50)]

GREEDY = {
    "ConstantOfShape": made_by("ConstantOfShape", "s", {"s": [HUGE]}),
    "Expand": made_by("Expand", "o s", {"o": [1], "s": [HUGE]}),
    "Tile": made_by("Tile", "o s", {"o": [1], "s": [HUGE]}),
    "Range": made_by("Range", "a b k", {"a": 0, "b": HUGE, "k": 1}),
    "Pad": made_by("Pad", "o s", {"o": np.ones(2, np.float32), "s": [0, HUGE]}),
    "OneHot": made_by("OneHot", "o s v", {"o": [1], "s": HUGE, "v": np.array([0, 1], np.float32)}),
    "HannWindow": made_by("HannWindow", "s", {"s": HUGE}),
    "RandomNormal": made_by("RandomNormal", "", {}, shape=[HUGE]),
    "TopK": made_by("TopK", "x s", {"s": [HUGE]}, "c i"),
    "Resize": model([N("Resize", ["x", "", "", "s"], ["y"])], {"s": [HUGE, HUGE]}),
    "a vector of sizes": model(
        [
            N("ConstantOfShape", ["s"], ["c"], value=helper.make_tensor("v", INT64, [1], [1])),
            N("Expand", ["x", "c"], ["y"]),
        ],
        {"s": [HUGE]},
    ),
    "three that broadcast": model(
        [
            N("Where", ["a", "b", "c"], ["d"]),
            N("Cast", ["d"], ["e"], to=FLOAT),
            N("ReduceSum", ["e"], ["r"]),
            N("Mul", ["x", "r"], ["y"]),
        ],
        {"a": ONES[0] > 0, "b": ONES[1], "c": ONES[2]},
    ),
    "pieces of a sequence": model(
        [N("SplitToSequence", ["x"], ["p"]), N("ConcatFromSequence", ["p"], ["y"], axis=0)], {}, [HUGE, 2]
    ),
    "a window": model([N("AveragePool", ["x"], ["y"], kernel_shape=[HUGE], pads=[HUGE - 1] * 2)], {}, [1, 1, 3]),
    "an input": model([N("Mul", ["x", "x"], ["y"])], {}, [2**62]),
    "a kernel": model([N("ConvTranspose", ["x", "k"], ["y"])], {"k": np.ones((1, 1, 2**23), np.float32)}, [1, 1, 3]),
    "a product of sizes": model(
        [
            N("Shape", ["x"], ["s"]),
            N("Gather", ["s", "i"], ["h"]),
            N("Gather", ["s", "j"], ["w"]),
            N("Mul", ["h", "w"], ["n"]),
            N("Reshape", ["x", "n"], ["v"]),
            N("Gather", ["v", "k"], ["y"]),
        ],
        {"i": [0], "j": [1], "k": np.array([3])},
        [2**20, 2**20],
    ),
    "a range of a product, in a branch": model(
        [
            N("Size", ["x"], ["n"]),
            N(
                "If",
                ["q"],
                ["y"],
                then_branch=helper.make_graph(
                    [
                        N("Range", ["zero", "n", "one"], ["r"]),
                        N("Gather", ["r", "k"], ["g"]),
                        N("Add", ["g", "g"], ["t"]),
                    ],
                    "b",
                    [],
                    [helper.make_tensor_value_info("t", INT64, None)],
                ),
                else_branch=helper.make_graph(
                    [N("Identity", ["k"], ["e"])], "b", [], [helper.make_tensor_value_info("e", INT64, None)]
                ),
            ),
        ],
        {"q": True, "zero": 0, "one": 1, "k": np.array([3])},
        [2**20, 2**20],
    ),
    "a power of a size": model(
        [
            N("Shape", ["x"], ["s"]),
            N("ReduceProd", ["s"], ["n"], keepdims=1),
            N("ConstantOfShape", ["n"], ["c"]),
            N("Concat", ["c", "c"], ["d"], axis=0),
            N("Gather", ["d", "k"], ["y"]),
        ],
        {"k": np.array([3])},
        [2**20, 2**20],
    ),
    "doubled behind a length that data tell": model(
        [N("Shape", ["x"], ["s"]), N("ConstantOfShape", ["s"], ["a0"]), *DOUBLED, N("Gather", ["a50", "k"], ["y"])],
        {"k": np.array([3])},
        [3],
    ),
    "fifty times doubled": model([N("Mul", ["x", "x"], ["a0"]), *DOUBLED, N("Add", ["a50", "a50"], ["y"])], {}, [7]),
}


def test_huge_sizes_pass_through_a_loop() -> None:
    kinds = (("i", INT64, []), ("c", TensorProto.BOOL, []), ("s", FLOAT, ["n"]), ("d", TensorProto.BOOL, []))
    i, c, s, d = (helper.make_tensor_value_info(*kind) for kind in kinds)
    t = helper.make_tensor_value_info("t", FLOAT, [HUGE])
    body = helper.make_graph([N("Identity", ["c"], ["d"]), N("Mul", ["s", "s"], ["t"])], "b", [i, c, s], [d, t])
    nodes = [N("Loop", ["k", "", "x"], ["h"], body=body), N("Unsqueeze", ["h", "a"], ["y"])]
    graph = normalise(model(nodes, {"k": 2, "a": [0]}, [HUGE])).graph
    assert {tuple(v.shape or ()) for n in graph.all_nodes() for v in n.outputs} == {(), (HUGE,), (1, HUGE)}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """One process for all of them, as its start takes longer than what it does.

    There the C library fills memory that it hands out: protobuf frees what lies in it where memory ends.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_PERTURB_", "85")
        found = Crew(tmp_path_factory.mktemp("scratch"), 0)
    yield found
    found.dismiss()


@pytest.mark.sweep(0.42)
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_files_end_soon(name: str, crew: Crew, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(GREEDY[name].SerializeToString())
    result = crew.ask(str(tmp_path / "model.onnx"))
    assert result["outcome"] in GOOD, result
