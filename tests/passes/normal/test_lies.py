"""What a file declares of sizes and gets wrong: data and inference win; windows that do not fit are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph.errors import DataError, ModelError
from gradgraph.passes.normal import normalise

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Info = tuple[str, int, Any]


def node(op_type: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), outputs.split(), f"n_{op_type}", **attributes)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def model(
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, np.ndarray],
    inputs: Sequence[Info],
    output: Info = ("y", FLOAT, None),
    infos: Sequence[Info] = (),
) -> onnx.ModelProto:
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()]
    ends = [helper.make_tensor_value_info(*i) for i in inputs], [helper.make_tensor_value_info(*output)]
    between = [helper.make_tensor_value_info(*i) for i in infos]
    graph = helper.make_graph(nodes, "g", *ends, tensors, value_info=between)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


LAYER = [node("Gemm", "x w b", "h"), node("Relu", "h")]
WEIGHTS = {"w": ones(3, 4), "b": ones(4)}
X = ("x", FLOAT, ["N", 3])
Y = ("y", FLOAT, ["N", 4])

LIES = {
    "an initializer's size": model(LAYER, WEIGHTS, [X], Y, [("w", FLOAT, [3, 10]), ("b", FLOAT, [10])]),
    "an initializer's rank": model(LAYER, WEIGHTS, [X], Y, [("w", FLOAT, [30]), ("b", FLOAT, [])]),
    "an initializer's type": model(LAYER, WEIGHTS, [X], Y, [("w", INT64, [3, 10])]),
    "an initializer that is an input, too": model(LAYER, WEIGHTS, [X, ("w", FLOAT, [3, 10])], Y),
    "a hidden size": model(LAYER, WEIGHTS, [X], Y, [("h", FLOAT, ["N", 10])]),
    "a hidden rank": model(LAYER, WEIGHTS, [X], Y, [("h", FLOAT, [])]),
    "an output's size": model(LAYER, WEIGHTS, [X], ("y", FLOAT, ["N", 10])),
    "an output that is no scalar": model(LAYER, WEIGHTS, [X], ("y", FLOAT, [])),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_about_sizes_do_no_harm(name: str) -> None:
    step = gg.build(LIES[name], "mse", "sgd", backend="portable")
    for part in (step.train, step.init, step.eval):
        ort.InferenceSession(part.SerializeToString(), providers=["CPUExecutionProvider"])
    trainer = gg.Trainer(step, device="cpu")
    first = trainer.step({"x": ones(2, 3), "target": np.zeros((2, 4), np.float32)})
    assert np.isclose(first["loss"], 16.0)
    assert {s.name: s.shape for s in step.manifest.state} == {"w": (3, 4), "b": (4,)}
    output = normalise(LIES[name]).graph.outputs[0].shape
    assert output is not None
    assert output[1] == 4


def in_a_loop(inner: onnx.NodeProto) -> list[onnx.NodeProto]:
    ends = [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", FLOAT, [])]  # fmt: skip
    nodes = [inner, node("ReduceSum", "q", "r", keepdims=0), node("Add", "s r", "t"), node("Identity", "c", "d")]
    body = helper.make_graph(
        nodes,
        "body",
        ends,
        [helper.make_tensor_value_info(n, k, []) for n, k in (("d", TensorProto.BOOL), ("t", FLOAT))],
    )
    return [node("Loop", "n c0 s0", body=body)]


LOOP = {"n": np.array(2), "c0": np.array(True), "s0": ones()}
IMAGE, VECTOR = ("x", FLOAT, [1, 3, 4, 4]), ("x", FLOAT, [3])

OPEN = ("x", FLOAT, ["N", 3, "H", "W"])
KERNELS = ("k", FLOAT, ["M", 3, "A", "B"])
UNKNOWN_RANK = ("x", FLOAT, None)
# a model, the value that lies, and its rank; None where nothing tells it
FALSE_RANKS = {
    "of a Conv by kernels of unknown size": (
        model([node("Conv", "x k")], {}, [OPEN, KERNELS], ("y", FLOAT, [2, 3])), "y", 4
    ),
    "behind such a Conv": (
        model([node("Conv", "x k", "h"), node("GroupNormalization", "h s s", num_groups=1)], {"s": ones(2)},
              [OPEN, KERNELS], ("y", FLOAT, [])), "y", 4
    ),
    "of a Softmax of who knows what": (model([node("Softmax", "x")], {}, [UNKNOWN_RANK], ("y", FLOAT, [])), "y", None),
    "of a pool of who knows what": (
        model([node("MaxPool", "x", kernel_shape=[3, 3], ceil_mode=1)], {}, [UNKNOWN_RANK], ("y", FLOAT, [1, 2, 8, 6])),
        "y", 4
    ),
    "of a pool of windows that have two axes": (
        model([node("MaxPool", "x", "y z", kernel_shape=[2, 2], strides=[2, 2])], {}, [UNKNOWN_RANK],
              ("y", FLOAT, [1, 2, 3])),
        "y", 4
    ),
    **{
        f"of a {kind} with a vector and who knows what": (
            model([node(kind, "x v")], {}, [UNKNOWN_RANK, ("v", FLOAT, [3])], ("y", FLOAT, [])), "y", None
        )
        for kind in ("Add", "Min", "Sum", "Pow")
    },
    "in a body, of a state that is a scalar only at first": (
        model(in_a_loop(node("Mul", "x x", "q")), LOOP, [VECTOR]), "t", None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FALSE_RANKS)
def test_false_ranks_are_forgotten(name: str) -> None:
    proto, value, rank = FALSE_RANKS[name]
    if name.startswith("in a body"):  # the state grows from s0, as large as x
        body = proto.graph.node[0].attribute[0].g
        body.node[1].CopyFrom(node("Identity", "q", "r"))
    normal = normalise(proto)
    found = next(v.shape for n in normal.graph.all_nodes() for v in n.outputs if v.name == value)
    assert found is None if rank is None else found is not None and len(found) == rank
    gg.vjp(proto, wrt=["x"])


# scores of a sample, what is declared of them behind a Squeeze without axes, and what is true
SQUEEZED = {
    "two scores": (2, ["N"], [2]),
    "one score": (1, ["N"], ["N"]),
    "scores of samples": (2, ["N", 2], ["N", 2]),
    "two scores, as they are": (2, [2], [2]),
    "scores in a row": (2, ["N"], ["y.0"]),
}


@pytest.mark.parametrize("name", SQUEEZED)
def test_scores_are_not_called_by_the_name_of_the_samples(name: str) -> None:
    """An exporter traced one sample, whose axis the Squeeze took: a target of one number would be taken for all."""
    scores, declared, true = SQUEEZED[name]
    nodes = [node("MatMul", "x w", "h"), node("Squeeze", "h", "s"), node("Sigmoid", "s")]
    if "row" in name:
        nodes[2:] = [node("Reshape", "s all")]
    proto = model(
        nodes, {"w": ones(3, scores), "all": np.array([-1])}, [("x", FLOAT, ["N", 1, 3])], ("y", FLOAT, declared)
    )
    (target,) = gg.build(proto, "mse", "sgd").manifest.targets
    assert list(target.shape) == true
    trainer = gg.Trainer(gg.build(proto, "mse", "sgd"), device="cpu")
    rows = 1 if true == [2] else 3
    fits = np.ones([{"N": rows, "y.0": rows * scores}.get(size, size) for size in true], np.float32)
    trainer.step({"x": ones(rows, 1, 3), "target": fits})
    with pytest.raises(DataError, match="target"):
        trainer.step({"x": ones(rows, 1, 3), "target": fits[:-1]})


def test_a_sequence_of_nobody_knows_what_is_named() -> None:
    """ONNX's inference gives such a type where it does not know the operator that makes the elements."""
    kinds = helper.make_tensor_value_info("e", FLOAT, ["n"]), helper.make_tensor_value_info("q", FLOAT, ["n"])
    body = helper.make_graph([helper.make_node("", ["e"], ["q"])], "b", kinds[:1], [onnx.ValueInfoProto(name="q")])
    nodes = [node("SequenceConstruct", "x x", "s"), node("SequenceMap", "s", "m", body=body)]
    with pytest.raises(ModelError, match="the element type of 'q' is unknown"):
        normalise(model([*nodes, node("ConcatFromSequence", "m", axis=0)], {}, [VECTOR]))


MISFITS = {
    "Conv": (
        model([node("Conv", "x w")], {"w": ones(2, 3, 7, 7)}, [IMAGE]),
        "a window of 7 elements, more than axis 2",
    ),
    "Conv of open sizes": (
        model([node("Conv", "x w")], {"w": ones(2, 3, 3, 7)}, [("x", FLOAT, ["N", 3, "H", 4])]),
        "a window of 7 elements, more than axis 3",
    ),
    "Conv with pads": (
        model([node("Conv", "x w", pads=[1, 1, 1, 1])], {"w": ones(2, 3, 7, 7)}, [IMAGE]),
        r"of 'x' of shape \[1, 3, 4, 4\] and 2 of padding",
    ),
    "Conv with holes": (model([node("Conv", "x w", dilations=[2, 2])], {"w": ones(2, 3, 3, 3)}, [IMAGE]), "5 elements"),
    "MaxPool": (model([node("MaxPool", "x", kernel_shape=[1, 5])], {}, [IMAGE]), "5 elements, more than axis 3"),
    "AveragePool": (
        model([node("AveragePool", "x", kernel_shape=[5, 1])], {}, [IMAGE]),
        "5 elements, more than axis 2",
    ),
    "GridSample": (model([node("GridSample", "x g")], {"g": ones(3)}, [VECTOR]), "must have the same number of axes"),
    "GridSample in a body": (
        model(in_a_loop(node("GridSample", "x g", "q")), {"g": ones(3), **LOOP}, [VECTOR]),
        r"\(GridSample\) samples 'x' of shape \[3\]",
    ),
    "ConvTranspose in a body": (
        model(in_a_loop(node("ConvTranspose", "x g", "q")), {"g": ones(3), **LOOP}, [VECTOR]),
        r"\(ConvTranspose\) reads 'x' of shape \[3\] and weights 'g'",
    ),
    "MaxPool in a body": (
        model(in_a_loop(node("MaxPool", "x", "q", kernel_shape=[2])), LOOP, [VECTOR]),
        r"\(MaxPool\) has windows of 1 axes",
    ),
    "LayerNormalization": (
        model([node("LayerNormalization", "x s")], {"s": ones(1, 3)}, [VECTOR]),
        r"reads 'x' of shape \[3\] and 's' of shape \[1, 3\], which has more axes",
    ),
    "RNN": (
        model([node("RNN", "x w r", hidden_size=2)], {"w": ones(1, 2, 4), "r": ones(2, 2)}, [("x", FLOAT, [5, 1, 4])]),
        "has weights 'w' of shape .* and 'r' of shape .*, which must have three axes",
    ),
    "LpNormalization": (model([node("LpNormalization", "x")], {}, [("x", FLOAT, [])]), "has axis -1"),
    "PRelu": (model([node("PRelu", "x s")], {"s": ones(1, 3)}, [VECTOR]), "the slope 's' .*, which has more axes"),
    "GridSample of no mode": (
        model([node("GridSample", "x g", mode="near")], {"g": ones(1, 2, 2, 2)}, [IMAGE]),
        "is 'near', and must be one of linear",
    ),
    "Clip": (
        model([node("Clip", "x b")], {"b": ones(1, 3)}, [VECTOR]),
        "reads the bound 'b' .*, which must be one number",
    ),
    "an element of another rank": (
        model(
            [node("SequenceConstruct", "x v", "s"), node("ConcatFromSequence", "s", axis=-1)],
            {"v": ones(1, 3)},
            [VECTOR],
        ),
        "joins 'x' of shape .* and 'v' of shape .*, which have different numbers of axes",
    ),
    "STFT": (
        model([node("STFT", "x n w", onesided=1)], {"n": np.array(1), "w": ones(4)}, [("x", FLOAT, [4])]),
        "reads 'x' of shape .* as its signal, which must have 2 to 3 axes",
    ),
    "DequantizeLinear": (
        model([node("DequantizeLinear", "q s")], {"q": np.ones((2, 3), np.int8), "s": ones(2, 3)}, [VECTOR]),
        "the scale 's' of shape .*, which must have at most one axis",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(name: str) -> None:
    proto, words = MISFITS[name]
    with pytest.raises(ModelError, match=words):
        normalise(proto)


@pytest.mark.parametrize("pads", [[0, 0], [2, 2]])
@pytest.mark.parametrize("auto_pad", ["NOTSET", "VALID", "SAME_UPPER"])
def test_windows_that_fit_are_let_be(pads: list[int], auto_pad: str) -> None:
    size, padding = (2, {"pads": pads}) if auto_pad == "NOTSET" else (6, {"auto_pad": auto_pad})
    if auto_pad == "NOTSET" and not any(pads):
        size = 6
    if auto_pad == "SAME_UPPER":
        size = 2
    conv = model([node("Conv", "x w", **padding)], {"w": ones(1, 1, 6)}, [("x", FLOAT, [1, 1, size])])
    normalise(conv)


def test_absent_outputs_share_no_shape() -> None:
    """Absent outputs have no name, so the rank of one (Y_h: 3) must not become that of another (Y: 4)."""
    lstm = helper.make_node("LSTM", ["x", "w", "r"], ["", "", "y"], hidden_size=2)
    weights = {"w": ones(1, 8, 3), "r": ones(1, 8, 2)}
    found = normalise(model([lstm], weights, [("x", FLOAT, [5, 1, 3])], ("y", FLOAT, [1, 1, 2])))
    (layer,) = [n for n in found.graph if n.op_type == "LSTM"]
    assert [None if v.shape is None else len(v.shape) for v in layer.outputs] in ([4, 3, 3], [None, None, 3])
