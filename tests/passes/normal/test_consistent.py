"""Models that cannot be computed get one sentence that names the node; all others get none."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from gradgraph.errors import ModelError
from gradgraph.passes.normal import normalise, order
from tests.kit.small_models import run

FLOAT, DOUBLE, HALF, INT32, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.FLOAT16,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.BOOL,
)


def value(name, kind=FLOAT, shape=None):
    return helper.make_tensor_value_info(name, kind, shape)


def node(op, inputs, outputs="y", name="n", **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), name, **attributes)


def model(nodes, inputs, outputs=(FLOAT,), weights=(), opset=21, infos=(), functions=(), imports=()):
    """Outputs are called y, y1, …; given by element type, or as they are."""
    ends = [value("y" + str(i or ""), o) if isinstance(o, int) else o for i, o in enumerate(outputs)]
    tensors = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in dict(weights).items()]
    graph = helper.make_graph(nodes, "g", inputs, ends, tensors, value_info=list(infos))
    assert len({n.name for n in nodes}) == len(nodes)
    opsets = [helper.make_opsetid("", opset), *imports]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def x(*shape, kind=FLOAT, name="x"):
    return value(name, kind, shape)


def branches(then, other, kind=BOOL):
    graphs = [helper.make_graph([n], "b", [], [value(n.output[0], t)]) for n, t in (then, other)]
    return node("If", "c", then_branch=graphs[0], else_branch=graphs[1])


def zeros(*shape, kind=np.float32):
    return np.zeros(shape, kind)


HALVES = (node("Cast", "x", "h", to=HALF), HALF)
FLOATS = (node("Neg", "x", "f"), FLOAT)
C = value("c", BOOL, [])

ILL_TYPED = {
    "two types": (
        model([node("Add", "x w")], [x(2)], weights={"w": zeros(2, kind=np.float64)}),
        r"node 'n' \(Add\) reads 'x' of type float32 and 'w' of type float64, .* put a Cast before one",
    ),
    "two types behind nodes of which nothing is declared": (
        model(
            [node("Exp", "x", "a"), node("Exp", "z", "b", "m"), node("Mul", "a b", name="k")],
            [x(2), x(2, kind=DOUBLE, name="z")],
        ),
        r"node 'k' \(Mul\) reads 'a' of type float32 and 'b' of type float64",
    ),
    "an index": (
        model([node("Gather", "x i")], [x(2), x(1, name="i")]),
        r"\(Gather\) reads 'i' of type float32 as its indices, which must be one of int32, int64; put a Cast",
    ),
    "a power before powers were mixed": (
        model([node("Pow", "x i")], [x(2), x(2, kind=INT64, name="i")], opset=11),
        r"\(Pow\) reads 'x' of type float32 and 'i' of type int64",
    ),
    "logic on numbers": (
        model([node("And", "x x")], [x(2)], [BOOL]),
        "of type float32 as its A, which must be one of bool",
    ),
    "a result": (
        model([node("Neg", "x")], [x(2)], [DOUBLE]),
        r"outputs 'y', declared as float64, but 'x' has type float32; correct the declared type",
    ),
    "a truth": (
        model([node("Greater", "x x")], [x(2)]),
        "outputs 'y' of type float32 as its C, which must be one of bool",
    ),
    "a Cast": (
        model([node("Cast", "x", to=HALF)], [x(2)]),
        r"\(Cast\) casts to float16, and its output 'y' is declared as float32; correct one of the two",
    ),
    "branches": (
        model([branches(HALVES, FLOATS)], [x(2), C]),
        "outputs 'h' of type float16 in one branch and 'f' of type float32 in the other; put a Cast at the end of one",
    ),
    "inside a branch": (
        model([branches((node("Add", "x z", "a", "inner"), FLOAT), FLOATS)], [x(2), C, x(2, kind=DOUBLE, name="z")]),
        r"node 'inner' \(Add\) reads 'x' of type float32 and 'z' of type float64",
    ),
    "a sequence": (
        model([node("Neg", "s")], [helper.make_tensor_sequence_value_info("s", FLOAT, None)]),
        "reads 's' of type a sequence of float32 as its X",
    ),
    "a default": (
        model([node("Neg", "w")], [x(2, name="w")], weights={"w": zeros(2, kind=np.float64)}),
        "initializer 'w' contains float64, and is declared as float32",
    ),
}

ILL_FORMED = {
    "an input too few": (model([node("Add", "x")], [x(2)]), "has 1 input, and at opset 21 this operator takes 2;"),
    "an input too many": (
        model([node("Clip", "x x x x")], [x()]),
        "has 4 inputs, and at opset 21 this operator takes 1 to 3",
    ),
    "an input left out": (model([helper.make_node("MatMul", ["", "x"], ["y"], "n")], [x(2, 2)]), "lacks the input 'A'"),
    "an output too many": (model([node("Neg", "x", "y y1")], [x(2)], [FLOAT, FLOAT]), "has 2 outputs, and .* has 1"),
    "an attribute": (
        model([node("Softmax", "x", axes=1)], [x(2, 2)]),
        "has the attribute 'axes', which this operator does not have at opset 21; remove it; did you mean 'axis'",
    ),
    "an attribute's type": (
        model([node("Softmax", "x", axis=1.0)], [x(2, 2)]),
        r"the attribute 'axis' of node 'n' \(Softmax\) is a float, and must be an int",
    ),
    "an attribute left out": (
        model([node("Concat", "x x")], [x(2)]),
        "lacks the attribute 'axis', which this operator requires",
    ),
}

ILL_FORMED |= {
    "a type that there is not": (
        model([node("Cast", "x", to=99)], [x(2)]),
        r"'to' of node 'n' \(Cast\) is element type 99, which ONNX does not define",
    ),
    "heads fewer than none": (
        model([node("Attention", "x x x", q_num_heads=-1, kv_num_heads=1)], [x(2, 4, 8)], opset=23),
        r"'q_num_heads' of node 'n' \(Attention\) is -1; give it a positive number",
    ),
    "a constant of nothing": (model([node("Constant", "")], []), r"\(Constant\) has 0 attributes"),
    "a Cast without a type": (model([node("Cast", "x")], [x(2)]), "lacks the attribute 'to'"),
    "a Cast whose type is no number": (
        model([node("Cast", "x", to=1.0)], [x(2)]),
        "'to' .* is a float, and must be an int",
    ),
}
ILL_SIZED = {
    "Add": (
        model([node("Add", "x w")], [x(2, 3)], weights={"w": zeros(4)}),
        r"'x' of shape \[2, 3\] and 'w' of shape \[4\], which do not broadcast: 3 against 4",
    ),
    "Where": (
        model([node("Where", "c x w")], [x("n", 3), C], weights={"w": zeros(2, 1, 4)}),
        "do not broadcast: 3 against 4",
    ),
    "MatMul": (
        model([node("MatMul", "x w")], [x(2, 3)], weights={"w": zeros(4, 5)}),
        r"multiplies 'x' of shape \[2, 3\] and 'w' of shape \[4, 5\], whose inner sizes are 3 and 4",
    ),
    "MatMul with a vector": (
        model([node("MatMul", "x w")], [x("n", 3)], weights={"w": zeros(4)}),
        r"shape \[n, 3\] .* inner sizes are 3 and 4",
    ),
    "MatMul of stacks": (
        model([node("MatMul", "x w")], [x(2, 4, 3)], weights={"w": zeros(5, 3, 4)}),
        "leading axes do not broadcast",
    ),
    "Gemm": (
        model([node("Gemm", "x w", transB=1)], [x(2, 3)], weights={"w": zeros(3, 4)}),
        r"\(transposed\), whose inner sizes are 3 and 4",
    ),
    "Gemm of stacks": (
        model([node("Gemm", "x w")], [x(1, 2, 3)], weights={"w": zeros(3, 4)}),
        "multiplies matrices, but reads 'x'",
    ),
    "Gemm's summand": (
        model([node("Gemm", "x w b")], [x(2, 3)], weights={"w": zeros(3, 4), "b": zeros(3)}),
        r"adds 'b' of shape \[3\] to a product of shape \[2, 4\]",
    ),
    "Conv": (
        model([node("Conv", "x w")], [x("n", 3, 8, 8)], weights={"w": zeros(4, 2, 3, 3)}),
        r"reads 'x' of shape \[n, 3, 8, 8\], but its weights 'w' .* in 1 group\(s\) expect 2 channels",
    ),
    "Conv's groups": (
        model([node("Conv", "x w", group=2)], [x(1, 4, 8, 8)], weights={"w": zeros(3, 2, 3, 3)}),
        "3 kernels do not divide into 2 groups",
    ),
    "Conv's axes": (
        model([node("Conv", "x w")], [x(1, 3, 8)], weights={"w": zeros(4, 3, 3, 3)}),
        "must have the same number of axes",
    ),
    "Conv's kernel": (
        model([node("Conv", "x w", kernel_shape=[3, 3])], [x(1, 3, 8, 8)], weights={"w": zeros(4, 3, 5, 5)}),
        r"declares kernels of shape \[3, 3\], but reads weights 'w'",
    ),
    "Conv's bias": (
        model([node("Conv", "x w b")], [x(1, 3, 8, 8)], weights={"w": zeros(4, 3, 3, 3), "b": zeros(3)}),
        r"adds 'b' of shape \[3\] to 4 channels",
    ),
    "ConvTranspose": (
        model([node("ConvTranspose", "x w")], [x(1, 4, 8, 8)], weights={"w": zeros(3, 4, 3, 3)}),
        "expect 3 channels",
    ),
    "MaxPool": (
        model([node("MaxPool", "x", kernel_shape=[2, 2])], [x(1, 3, 8)]),
        r"windows of 2 axes, but reads 'x' of shape \[1, 3, 8\]",
    ),
    "BatchNormalization": (
        model([node("BatchNormalization", "x w w w v")], [x(1, 3, 8, 8)], weights={"w": zeros(3), "v": zeros(4)}),
        r"reads 'v' of shape \[4\], which must have 3 elements, the channels of 'x'",
    ),
    "LayerNormalization": (
        model([node("LayerNormalization", "x w")], [x("n", 3)], weights={"w": zeros(4)}),
        r"reads 'x' of shape \[n, 3\] and 'w' of shape \[4\], which must have 3 elements",
    ),
    "Concat": (
        model([node("Concat", "x w", axis=1)], [x(2, 3)], weights={"w": zeros(3, 3)}),
        "along axis 1, which differ on axis 0",
    ),
    "Concat's axes": (
        model([node("Concat", "x w", axis=0)], [x(2, 3)], weights={"w": zeros(3)}),
        "different numbers of axes",
    ),
    "Reshape": (
        model([node("Reshape", "x s")], [x(2, 3)], weights={"s": np.array([4, 2])}),
        r"reads 'x' of shape \[2, 3\], whose 6 elements cannot have the shape \[4, 2\]",
    ),
    "Reshape to the rest": (
        model([node("Reshape", "x s")], [x(2, 3)], weights={"s": np.array([4, -1])}),
        r"6 elements cannot have the shape \[4, -1\]",
    ),
    "Reshape by copies": (
        model([node("Reshape", "x s")], [x(2, 3)], weights={"s": np.array([0, 4])}),
        r"cannot have the shape \[2, 4\]",
    ),
    "Transpose": (
        model([node("Transpose", "x", perm=[0, 2, 1])], [x(2, 3)]),
        r"permutes axes by \[0, 2, 1\], but reads 'x'",
    ),
    "Flatten": (model([node("Flatten", "x", axis=3)], [x(2, 3)]), "has axis 2, but reads"),
    "Squeeze": (
        model([node("Squeeze", "x a")], [x(2, 3)], weights={"a": np.array([1])}),
        r"drops axis 1 of 'x' of shape \[2, 3\], which has 3 elements",
    ),
    "Unsqueeze": (model([node("Unsqueeze", "x", axes=[4])], [x(2, 3)], opset=11), "has axis 4"),
    "Softmax": (
        model([node("Softmax", "x", axis=2)], [x("n", 3)]),
        r"has axis 2, but reads 'x' of shape \[n, 3\]",
    ),
    "ReduceSum": (model([node("ReduceSum", "x a")], [x(2, 3)], weights={"a": np.array([-3])}), "has axis -3"),
    "Gather": (
        model([node("Gather", "x i", axis=1)], [x(2, 3)], weights={"i": np.array([0, 3])}),
        "reads element 3 along axis 1 of 'x'",
    ),
    "GatherElements": (
        model([node("GatherElements", "x i")], [x(2, 3)], weights={"i": np.array([0])}),
        "must have the same number of axes",
    ),
    "ScatterElements": (
        model([node("ScatterElements", "x i u")], [x(2, 3)], weights={"i": np.array([[0]]), "u": zeros(1, 2)}),
        "must have the same shape",
    ),
    "Split": (
        model([node("Split", "x s", "y y1")], [x(2, 3)], [FLOAT, FLOAT], {"s": np.array([1, 2])}),
        r"splits axis 0 of 'x' of shape \[2, 3\] into \[1, 2\], which add up to 3",
    ),
    "Expand": (
        model([node("Expand", "x s")], [x(2, 3)], weights={"s": np.array([2, 4])}),
        "do not broadcast: 3 against 4",
    ),
    "Tile": (model([node("Tile", "x s")], [x(2, 3)], weights={"s": np.array([2])}), "has 1 repeats, but reads"),
    "Pad of an odd number": (
        model([node("Pad", "x s")], [x()], weights={"s": np.array([1])}),
        "has 1 pads, but reads",
    ),
    "Pad of two axes": (
        model(
            [helper.make_node("Pad", ["x", "s", "", "a"], ["y"], "n")],
            [x(2, 3)],
            weights={"s": np.array([1, 1]), "a": np.array([0, 1])},
        ),
        "has 2 pads, but axes 'a'",
    ),
    "Pad": (model([node("Pad", "x s")], [x(2, 3)], weights={"s": np.array([1, 1])}), "has 2 pads, but reads"),
    "LSTM": (
        model(
            [node("LSTM", "x w r", hidden_size=5)], [x(7, 2, 3)], weights={"w": zeros(1, 20, 4), "r": zeros(1, 20, 5)}
        ),
        "expect 4 features",
    ),
    "RotaryEmbedding": (
        model(
            [node("RotaryEmbedding", "x w w p", num_heads=3)],
            [x(1, 2, 8), x(1, 2, kind=INT64, name="p")],
            weights={"w": zeros(4, 2)},
            opset=23,
        ),
        "has 3 heads, but reads 'x'",
    ),
    "SplitToSequence": (
        model(
            [node("SplitToSequence", "x", axis=2)],
            [x(2, 3)],
            [helper.make_tensor_sequence_value_info("y", FLOAT, None)],
        ),
        "has axis 2",
    ),
    "GRU's bias": (
        model(
            [node("GRU", "x w r b", hidden_size=5)],
            [x(7, 2, 3)],
            weights={"w": zeros(1, 15, 3), "r": zeros(1, 15, 5), "b": zeros(1, 15)},
        ),
        "to 15 rows of 'w'",
    ),
    "ConstantOfShape": (
        model([node("ConstantOfShape", "s")], [x(2)], weights={"s": np.array([2, -5])}),
        r"\(ConstantOfShape\) reads 's' of shape \[2\], which contains -5; its numbers must be at least 0",
    ),
    "Reshape to less than nothing": (
        model([node("Reshape", "x s")], [x("n", 3)], weights={"s": np.array([-2, 3])}),
        "contains -2; its numbers must be at least -1",
    ),
    "Expand to less than nothing": (
        model([node("Expand", "x s")], [x(1, 3)], weights={"s": np.array([-5, 3])}),
        "contains -5; its numbers must be at least 0",
    ),
    "Tile fewer than no times": (
        model([node("Tile", "x s")], [x(1, 3)], weights={"s": np.array([-1, 1])}),
        "contains -1; its numbers must be at least 0",
    ),
    "Conv's strides": (
        model([node("Conv", "x w", strides=[2])], [x(1, 3, 8, 8)], weights={"w": zeros(4, 3, 3, 3)}),
        r"has strides=\[2\], but reads 'x' of shape",
    ),
    **{
        f"Col2Im's {name}": (
            model(
                [node("Col2Im", "x i b", **{name: count})], [x(1, 3, 4)], weights={k: np.array([2, 2]) for k in "ib"}
            ),
            rf"has {name}=\[.*\], but reads 'x' of shape",
        )
        for name, count in (("pads", [0] * 3), ("strides", [1]), ("dilations", [1] * 3))
    },
    "Col2Im's blocks": (
        model([node("Col2Im", "x i b")], [x(1, 3, 4)], weights={"i": np.array([2, 2]), "b": np.array([1, 2, 2])}),
        "reads the sizes of an image 'i' .* and of a block 'b' .*, which must have equal length",
    ),
    "MaxPool's pads": (
        model([node("MaxPool", "x", kernel_shape=[2, 2], pads=[1, 1])], [x(1, 3, 8, 8)]),
        r"has pads=\[1, 1\], but reads 'x' of shape",
    ),
    **{
        f"{op_type}'s {name} {count}, rounded up": (
            model([node(op_type, "x", kernel_shape=[2, 2], ceil_mode=1, **{name: count})], [x(1, 3, 8, 8)]),
            rf"has {name}=\[.*\], but reads 'x' of shape",
        )
        for op_type in ("AveragePool", "LpPool", "MaxPool")
        for name, count in (("strides", [2]), ("strides", [2] * 3), ("dilations", [2] * 3), ("pads", [1] * 6))
    },
    "blocks": (
        model(
            [node("DequantizeLinear", "q s", block_size=2, axis=0)],
            [x(2), x(2, 3, name="q", kind=TensorProto.INT8)],
            weights={"s": zeros()},
        ),
        "in blocks, and the scale 's' of shape .* must have the same rank",
    ),
    "Einsum": (
        model([node("Einsum", "x", equation="ijk->i")], [x(2, 3)]),
        r"reads 'x' of shape \[2, 3\], but its equation 'ijk->i' requires 3 axes",
    ),
    "Einsum of many axes": (
        model([node("Einsum", "x", equation="ijk...->i")], [x(2, 3)]),
        "requires 3 or more axes",
    ),
    "Einsum of two sizes": (
        model([node("Einsum", "x w", equation="ij,jk->ik")], [x(2, 3)], weights={"w": zeros(4, 3)}),
        r"reads 'w' of shape \[4, 3\], but an earlier input has 3 elements along axis 'j'",
    ),
    "behind other nodes": (
        model([node("Neg", "x", "a"), node("MatMul", "a w", name="k")], [x(2, 3)], weights={"w": zeros(4, 5)}),
        r"node 'k' \(MatMul\) multiplies 'a' of shape \[2, 3\]",
    ),
}


UNTYPED = {
    "no type": onnx.ValueInfoProto(name="z"),
    "an undefined element type": helper.make_tensor_value_info("z", 0, None),
}


@pytest.mark.parametrize("name", UNTYPED)
def test_an_input_has_a_type(name):
    proto = model([node("Add", "x z")], [x(2), UNTYPED[name]])
    assert refused_by_onnxruntime(proto, load_only=True)
    with pytest.raises(ModelError, match="input 'z' has no element type, and a graph input must have one; declare it"):
        normalise(proto)


def feeds_of(proto):
    given = {t.name for t in proto.graph.initializer}
    feeds = {}
    for info in proto.graph.input:
        if info.name not in given:
            kind = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            feeds[info.name] = np.ones(
                [d.dim_value if d.HasField("dim_value") else 2 for d in info.type.tensor_type.shape.dim], kind
            )
    return feeds


def refused_by_onnxruntime(proto, load_only=False):
    try:
        session = ort.InferenceSession(proto.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])
    except Exception:
        return True
    if load_only:
        return False
    feeds = feeds_of(proto)
    try:
        session.run(None, feeds)
    except Exception:
        return True
    return False


def test_a_stage_that_attention_does_not_have():
    attention = node("Attention", "x x x", "y y1 y2 y3", qk_matmul_output_mode=99)
    proto = model([attention], [x(2, 2, 4, 8)], [FLOAT] * 4, opset=23)
    assert refused_by_onnxruntime(proto)
    with pytest.raises(ModelError, match="qk_matmul_output_mode of an Attention is 99; expected 0 to 3"):
        normalise(proto)


def stumble(model):
    raise KeyError("a pass")


def test_what_a_pass_stumbles_over_is_said_in_onnx_s_words(monkeypatch):
    proto = model([node("Attention", "x x w")], [x(2, 2, 4, 8)], weights={"w": zeros(4, 8)}, opset=23)
    assert refused_by_onnxruntime(proto)
    monkeypatch.setattr(order, "decompose", stumble)
    with pytest.raises(ModelError, match=r"ONNX finds a fault in the model: .*Attention"):
        normalise(proto)


def test_a_pass_that_stumbles_over_a_good_model_is_our_bug(monkeypatch):
    monkeypatch.setattr(order, "decompose", stumble)
    with pytest.raises(KeyError, match="a pass"):
        normalise(model([node("Neg", "x")], [x(2)]))


OPTIONS = ort.SessionOptions()
OPTIONS.log_severity_level = 4
CASES = {**ILL_TYPED, **ILL_FORMED, **ILL_SIZED}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_computed_is_named(name):
    proto, words = CASES[name]
    assert refused_by_onnxruntime(proto)
    with pytest.raises(ModelError, match=words) as caught:
        normalise(proto)
    assert "\n" not in str(caught.value)


def in_a_body(proto, op_type):
    """The nodes of ``proto`` in the first branch of an If, or in a Loop."""
    graph, ends = proto.graph, [value("turn", INT64, []), value("go", BOOL, []), value("on", BOOL, [])]
    inner = helper.make_graph(graph.node, "b", [], graph.output)
    nodes, inputs, weights = [], [*graph.input, value("c0", BOOL, [])], {"most": np.array(2)}
    if op_type == "If":
        others = [node("Neg", "x", f"{o.name}e", f"e{i}") for i, o in enumerate(graph.output)]
        other = helper.make_graph(others, "e", [], [value(n.output[0]) for n in others])
        nodes = [
            node("If", "c0", " ".join(n.output[0] + "o" for n in others), "i", then_branch=inner, else_branch=other)
        ]
    else:
        inner.input.extend(ends[:2])
        inner.node.append(node("Identity", "go", "on", "loops"))
        inner.output.insert(0, ends[2])
        nodes = [node("Loop", "most c0", " ".join(f"{o.name}eo" for o in graph.output), "i", body=inner)]
    outer = helper.make_graph(nodes, "g", inputs, [value(o) for o in nodes[0].output], graph.initializer)
    outer.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    return helper.make_model(outer, opset_imports=proto.opset_import, ir_version=10)


OTHERWISE = {  # than a runtime that loads what ONNX's inference does not object to
    "SplitToSequence",  # the other branch gives a tensor
    "Tile fewer than no times",  # onnxruntime's copy of ONNX is older than the one that objects
}


@pytest.mark.sweep(0.63)
@pytest.mark.parametrize("name", sorted(ILL_SIZED.keys() - OTHERWISE))
@pytest.mark.parametrize("op_type", ["If", "Loop"])
def test_bodies_are_looked_at_like_the_main_graph(name, op_type):
    """Of a branch only what a runtime would not even load: it may never be taken."""
    proto, words = in_a_body(ILL_SIZED[name][0], op_type), ILL_SIZED[name][1]
    if op_type == "If" and not refused_by_onnxruntime(proto, load_only=True):
        normalise(proto)
        return
    with pytest.raises(ModelError, match=words):
        normalise(proto)


OWN = helper.make_function(
    "own",
    "Along",
    ["a"],
    ["b"],
    [helper.make_node("Softmax", ["a"], ["b"])],
    [helper.make_opsetid("", 21)],
    ["axis"],
)
OWN.node[0].attribute.add(name="axis", ref_attr_name="axis", type=onnx.AttributeProto.INT)
LOST = (helper.make_node("Reshape", ["x", "s"], ["h"]), FLOAT)

FINE = {
    "declared sizes that are wrong": model(
        [node("Neg", "x", "a"), node("MatMul", "a w", name="k")],
        [x(2, 3)],
        [x(9, 9, name="y")],
        {"w": zeros(3, 5)},
        infos=[x(7, 8, name="a")],
    ),
    "a declared type of a weight that is wrong": model(
        [node("Mul", "x w")], [x(2, 3)], weights={"w": zeros(3)}, infos=[x(3, kind=HALF, name="w")]
    ),
    "dimensions with two names": model([node("Add", "x z")], [x("a", 3), x("b", 3, name="z")]),
    "sizes that are unknown": model([node("MatMul", "x z")], [x(2, 2), value("z", FLOAT, [None, None])]),
    "a branch that is not taken": model([branches(LOST, FLOATS)], [x(2, 3), C], weights={"s": np.array([5])}),
    "powers of two types": model([node("Pow", "x i")], [x(2), x(2, kind=INT64, name="i")], opset=12),
    "inputs left out": model([helper.make_node("Clip", ["x", "", "w"], ["y"])], [x(2)], weights={"w": zeros()}),
    "Concat with nothing": model([node("Concat", "x w", axis=0)], [x(2, 3)], weights={"w": zeros(0, 3)}),
    "Gemm with a number": model([node("Gemm", "x w b")], [x(2, 3)], weights={"w": zeros(3, 4), "b": zeros(1)}),
    "Gemm with a column": model([node("Gemm", "x w b")], [x(2, 3)], weights={"w": zeros(3, 4), "b": zeros(2, 1)}),
    "a vector times a vector": model([node("MatMul", "x w")], [x(3)], weights={"w": zeros(3)}),
    "copies and the rest": model([node("Reshape", "x s")], [x(2, 3, 4)], weights={"s": np.array([0, -1])}),
    "nothing into nothing": model([node("Reshape", "x s", allowzero=1)], [x(0, 3)], weights={"s": np.array([3, 0])}),
    "the last element": model([node("Gather", "x i")], [x(2, 3)], weights={"i": np.array(-2)}),
    "Flatten at the end": model([node("Flatten", "x", axis=2)], [x(2, 3)]),
    "Unsqueeze behind the end": model([node("Unsqueeze", "x a")], [x(2, 3)], weights={"a": np.array([2, -4])}),
    "Pad of one axis": model(
        [helper.make_node("Pad", ["x", "s", "", "a"], ["y"])],
        [x(2, 3)],
        weights={"s": np.array([1, 1]), "a": np.array([1])},
    ),
    "an attribute of a function": model(
        [node("Along", "x", domain="own", axis=1)],
        [x(2, 3)],
        functions=[OWN],
        imports=[helper.make_opsetid("own", 1)],
    ),
    "an operator of another domain": model(
        [node("QuickGelu", "x", "a", "m", domain="com.microsoft"), node("Add", "a x")],
        [x(2, 3)],
        imports=[helper.make_opsetid("com.microsoft", 1)],
    ),
    "half precision": model([node("Add", "x x")], [x(2, kind=HALF)], [HALF]),
    "groups": model([node("Conv", "x w", group=2)], [x(1, 4, 8, 8)], weights={"w": zeros(6, 2, 3, 3)}),
    "a mask of booleans": model([node("Dropout", "x", "y y1")], [x(2)], [FLOAT, BOOL]),
    "old Softmax": model([node("Softmax", "x", axis=1)], [x(2, 3)], opset=11),
}


@pytest.mark.parametrize("name", FINE)
def test_what_onnxruntime_computes_is_not_refused(name):
    proto = FINE[name]
    feeds = {k: np.zeros_like(v) if v.dtype == bool else v for k, v in feeds_of(proto).items()}
    expected = run(proto, feeds)
    for a, b in zip(expected, run(ir.to_proto(normalise(proto)), feeds), strict=True):
        np.testing.assert_allclose(b, a)
