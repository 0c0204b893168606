"""The passes of the normal form, one by one and together."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.graph.marks import is_marked_constant
from gradgraph.passes.normal import expand, has_body, normalise
from gradgraph.passes.normal.edit import Editor
from tests.kit.small_models import assert_same, model_of, normal_form, op_types, real, run

M = real(3, 5)
RESULT = helper.make_value_info("r", onnx.TypeProto())  # of a branch; its type is inferred
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs.split(), outputs.split(), **attrs)


def initializers(model):
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


# --- functions ----------------------------------------------------------------------------------------------------


def function(name, inputs, outputs, nodes, opset=21, attributes=(), defaults=()):
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, inputs, outputs, nodes, imports, list(attributes), list(defaults))


SCALE = function(
    "Scale",
    ["a"],
    ["b"],
    [
        helper.make_node("Constant", [], ["k"]),
        helper.make_node("Elu", ["a"], ["e"]),
        helper.make_node("Mul", ["e", "k"], ["b"]),
    ],
    attributes=["k"],
    defaults=[helper.make_attribute("alpha", 0.5)],
)
for _body, _target, _name in ((SCALE.node[0], "value_float", "k"), (SCALE.node[1], "alpha", "alpha")):
    _body.attribute.add(name=_target, ref_attr_name=_name, type=onnx.AttributeProto.FLOAT)
TWICE = function(
    "Twice",
    ["a"],
    ["b"],
    [node("Scale", "a", "t", domain="own", k=2.0), node("Scale", "t", "b", domain="own", k=3.0, alpha=1.0)],
)
OLD = function("Old", ["a"], ["b"], [node("ReduceSum", "a", "b", axes=[1], keepdims=0)], opset=11)
PASS = function("Pass", ["a", "unused"], ["a", "b"], [node("Neg", "a", "b")])
BRANCH = function(
    "Branch",
    ["a"],
    ["b"],
    [
        node("ReduceMax", "a", "m", keepdims=0),
        node("Constant", "", "zero", value_float=0.0),
        node("Greater", "m zero", "c"),
        node(
            "If",
            "c",
            "b",
            then_branch=helper.make_graph([node("Neg", "a", "r")], "t", [], [RESULT]),
            else_branch=helper.make_graph([node("Exp", "a", "r")], "e", [], [RESULT]),
        ),
    ],
)


def _elu(x, alpha):
    return np.where(x > 0, x, alpha * (np.exp(x) - 1))


FUNCTIONS = [
    ([node("Twice", "x", "y", domain="own")], lambda x: 3 * _elu(2 * _elu(x, 0.5), 1.0)),
    ([node("Scale", "x", "y", domain="own", k=-1.5)], lambda x: -1.5 * _elu(x, 0.5)),
    ([node("Old", "x", "y", domain="own")], lambda x: x.sum(1)),
    ([node("Pass", "x", "p q", domain="own"), node("Add", "p q", "y")], lambda x: x * 0),
    ([node("Branch", "x", "b1", domain="own"), node("Branch", "b1", "y", domain="own")], lambda x: x),
    (
        [node("Abs", "x", "a"), node("Neg", "a", "n"), node("Branch", "n", "y", domain="own")],
        lambda x: np.exp(-np.abs(x)),
    ),
]


@pytest.mark.parametrize(("nodes", "expected"), FUNCTIONS, ids=lambda v: v[0].op_type if isinstance(v, list) else "")
def test_functions_are_inlined(nodes, expected):
    functions = [SCALE, TWICE, OLD, PASS, BRANCH]
    model = model_of(nodes, {"x": M}, functions=functions, domains={"own": 1})
    found = normal_form(model)
    assert len(found.functions) == 0
    assert all(n.domain == "" for n in found.graph.node)
    assert_same([expected(M).astype(np.float32)], run(found, {"x": M}), atol=1e-5)


def test_a_function_that_returns_its_input_keeps_the_output_name():
    model = model_of([node("Pass", "x", "y", domain="own")], {"x": M}, functions=[PASS], domains={"own": 1})
    assert_same([M], run(normal_form(model), {"x": M}))


def test_a_call_with_too_many_inputs_is_refused():
    model = model_of([node("Scale", "x x", "y", domain="own")], {"x": M}, functions=[SCALE], domains={"own": 1})
    with pytest.raises(ModelError, match="passes 2 inputs, but it has 1"):
        normalise(ir.from_proto(model))


def test_nodes_of_other_domains_are_left_alone():
    typed = helper.make_tensor_value_info("r", TensorProto.FLOAT, [])
    inner = helper.make_graph([node("Constant", "", "r", value_float=1.0)], "g", [], [typed])
    foreign = helper.make_node("Fused", ["x"], ["t"], domain="com.microsoft", alpha=1.0, body=inner)
    model = model_of([foreign, node("Relu", "t", "y")], {"x": M}, opset=13, domains={"com.microsoft": 1})
    found = ir.to_proto(normalise(ir.from_proto(model)))
    assert found.graph.node[0] == helper.make_node(
        "Fused", ["x"], ["t"], name="Fused", domain="com.microsoft", alpha=1.0, body=inner
    )


# --- names ---------------------------------------------------------------------------------------------------------


def test_names_that_onnxruntime_adds_blindly_are_given_up():
    """In models that it has optimised; it fuses MatMul and Add, and refuses a model that has these names already."""
    shape = np.array([-1, 4])
    nodes = [
        helper.make_node("Reshape", ["x", "gemm_input_shape"], ["r"]),
        helper.make_node("Gemm", ["r", "w", "b"], ["g"]),
        helper.make_node("Reshape", ["g", "gemm_output_shape"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["y"]),
    ]
    weights = {"w": real(4, 4), "b": real(4), "gemm_input_shape": shape, "gemm_output_shape": np.array([2, 3, 4])}
    feeds = {"x": real(2, 3, 4)}
    found = normal_form(model_of(nodes, feeds, weights=weights))
    with pytest.raises(Exception, match="replace the existing tensor"):  # else the pass may go
        run(model_of(nodes, feeds, weights=weights), feeds)
    x = feeds["x"] @ weights["w"] + weights["b"]
    assert_same([x @ weights["w"] + weights["b"]], run(found, feeds))


def test_names_are_unique_across_bodies_and_those_of_the_interface_stay():
    def branch(op):
        weight = onnx.numpy_helper.from_array(real(5, seed=len(op)), "w")
        nodes = [
            helper.make_node(op, ["x"], ["t"], name="same"),
            helper.make_node("Add", ["t", "w"], ["r"], name="same"),
        ]
        return helper.make_graph(nodes, "b", [], [RESULT], [weight])

    nodes = [
        helper.make_node("If", ["c"], ["t"], then_branch=branch("Neg"), else_branch=branch("Exp"), name="same"),
        helper.make_node("Mul", ["t", "w"], ["y"]),
    ]
    inputs = {"c": (np.bool_, []), "x": (np.float32, ["rows", 5])}
    model = model_of(nodes, inputs, weights={"w": real(5, seed=7)})
    found = normal_form(model)
    assert set(initializers(found)) == {"w", "w_1", "w_2"}
    assert_same([initializers(found)["w"]], [real(5, seed=7)])
    names = [n.name for n in ir.from_proto(found).graph.all_nodes()]
    assert len(names) == len(set(names)) == 6
    w, of_then, of_else = real(5, seed=7), real(5, seed=3), real(5, seed=3)
    for condition, expected in ((True, (of_then - M) * w), (False, (of_else + np.exp(M)) * w)):
        assert_same([expected], run(found, {"c": np.array(condition), "x": M}))


def test_an_initializer_returned_by_a_branch_is_returned_through_identity():
    def branch(value):
        tensor = onnx.numpy_helper.from_array(np.float32(value), "r")
        return helper.make_graph([], "b", [], [RESULT], [tensor])

    model = model_of([node("If", "c", "y", then_branch=branch(1), else_branch=branch(2))], {"c": (np.bool_, [])})
    found = normal_form(model)
    assert [run(found, {"c": np.array(c)})[0] for c in (True, False)] == [1.0, 2.0]


def test_absent_outputs_stay_absent():
    found = normal_form(
        model_of([helper.make_node("MaxPool", ["x"], ["y", ""], kernel_shape=[2])], {"x": real(1, 1, 4)})
    )
    assert list(found.graph.node[0].output) == ["y"]


# --- constants and folding -----------------------------------------------------------------------------------------


def test_constant_nodes_become_marked_initializers_and_weights_do_not():
    nodes = [
        node("Constant", "", "c", value=onnx.numpy_helper.from_array(real(5))),
        node("Constant", "", "k", value_ints=[1, 0]),
        node("Identity", "w", "tied"),
        node("Mul", "x tied", "a"),
        node("Add", "a c", "b"),
        node("Transpose", "w2", "w2t", perm=[1, 0]),
        node("MatMul", "b w2t", "m"),
        node("Cast", "k", "kf", to=1),
        node("ReduceSum", "kf", "s", keepdims=0),
        node("Mul", "m s", "y"),
    ]
    model = model_of(nodes, {"x": M}, weights={"w": real(5), "w2": real(4, 5)}, opset=13)
    result = normalise(ir.from_proto(model))
    marked = {n: is_marked_constant(v) for n, v in result.graph.initializers.items()}
    assert not marked["w"] and not marked["w2"] and marked["c"]
    assert [n.op_type for n in result.graph] == ["Mul", "Add", "Transpose", "MatMul", "ReduceSum", "Mul"]
    assert_same(run(model, {"x": M}), run(ir.to_proto(result), {"x": M}))


def test_initializers_are_inputs_no_longer():
    model = model_of([node("Mul", "x w", "y")], {"x": M, "w": real(5)}, weights={"w": real(5)})
    assert [i.name for i in normal_form(model).graph.input] == ["x"]


SHAPES = [
    ("static", [3, 5], ["Reshape"]),
    ("rows unknown", ["n", 5], ["Shape", "Gather", "Unsqueeze", "Concat", "Reshape"]),
    ("columns unknown", [3, "m"], ["Reshape"]),
]


@pytest.mark.parametrize(("dims", "expected"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES])
def test_shape_arithmetic_is_done_as_far_as_dimensions_are_known(dims, expected):
    """The chain that exporters write for x.view(x.shape[0], 1, -1)."""
    nodes = [
        node("Shape", "x", "s"),
        node("Constant", "", "zero", value_int=0),
        node("Gather", "s zero", "n"),
        node("Constant", "", "axes", value_ints=[0]),
        node("Unsqueeze", "n axes", "n1"),
        node("Constant", "", "rest", value_ints=[1, -1]),
        node("Concat", "n1 rest", "target", axis=0),
        node("Reshape", "x target", "y"),
    ]
    model = model_of(nodes, {"x": (np.float32, dims)})
    found = normal_form(model)
    assert op_types(found) == expected
    assert_same([M.reshape(3, 1, 5)], run(found, {"x": M}))


def test_the_known_part_of_a_partly_symbolic_shape_is_found():
    nodes = [
        node("Shape", "x", "s"),
        node("Slice", "s start end", "two"),
        node("Concat", "two two", "four", axis=0),
        node("Gather", "four index", "width"),
        node("Cast", "width", "wf", to=1),
        node("Sqrt", "wf", "root"),
        node("Div", "x root", "y"),
    ]
    weights = {"start": np.array([0]), "end": np.array([2]), "index": np.array(3)}
    result = normalise(ir.from_proto(model_of(nodes, {"x": (np.float32, ["n", 5])}, weights=weights)))
    assert [n.op_type for n in result.graph] == ["Div"]
    assert_same([M / np.sqrt(np.float32(5))], run(ir.to_proto(result), {"x": M}))


def test_cast_like_becomes_cast():
    model = model_of([node("CastLike", "x k", "y")], {"x": M}, weights={"k": np.zeros(1, np.float64)})
    found = normal_form(model)
    assert op_types(found) == ["Cast"]
    assert run(found, {"x": M})[0].dtype == np.float64


@pytest.mark.parametrize("condition", [True, False])
def test_an_if_with_a_known_condition_is_its_branch(condition):
    def branch(op):
        return helper.make_graph([node(op, "x", "r")], "b", [], [RESULT])

    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n"),
        node("Equal", "n wanted", "c"),
        node("If", "c", "y", then_branch=branch("Neg"), else_branch=branch("Abs")),
    ]
    weights = {"zero": np.array(0), "wanted": np.array(3 if condition else 4)}
    found = normal_form(model_of(nodes, {"x": M}, weights=weights))
    assert op_types(found) == ["Neg" if condition else "Abs"]
    assert not found.graph.initializer


# --- attributes and shapes -------------------------------------------------------------------------------------------


def test_defaults_of_the_schema_are_written():
    nodes = [node("Gemm", "x w", "g"), node("Softmax", "g", "s"), node("Cast", "s", "y", to=11)]
    found = normal_form(model_of(nodes, {"x": M}, weights={"w": real(5, 2)}))
    attrs = [{a.name: helper.get_attribute_value(a) for a in n.attribute} for n in found.graph.node]
    assert attrs[0] == {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
    assert attrs[1:] == [{"axis": -1}, {"saturate": 1, "to": 11}]


def test_bodies_are_normalised_too():
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["c2"]),
            helper.make_node("Softmax", ["h"], ["t"]),
            helper.make_node("Squeeze", ["t"], ["out"], axes=[0]),
            helper.make_node("Unsqueeze", ["out"], ["h2"], axes=[0]),
        ],
        "body",
        [info("i", 7, []), info("c", 9, []), info("h", 1, [1, 3, 5])],
        [info("c2", 9, []), info("h2", 1, [1, 3, 5]), info("out", 1, [3, 5])],
    )
    loop = helper.make_node("Loop", ["n", "", "x"], ["last", "y"], body=body)
    x = M[None]
    model = model_of([loop], {"x": x, "n": np.array(2)}, opset=11)
    found = normal_form(model)
    inner = found.graph.node[0].attribute[0].g
    assert [n.op_type for n in inner.node] == ["Identity", "Flatten", "Softmax", "Reshape", "Squeeze", "Unsqueeze"]
    feeds = {"x": x, "n": np.array(2)}
    assert_same(run(model, feeds), run(found, feeds))


def test_axes_and_sizes_in_a_file_of_their_own_are_read(tmp_path):
    """ONNX's inference cannot, and knows no type behind them."""
    weights = {"axes": np.array([1]), "to": np.array([0, 2, 2])}
    model = model_of(
        [node("ReduceSum", "x axes", "s"), node("Reshape", "s to", "y")],
        {"x": (np.float32, ["N", 3, 4])},
        weights=weights,
    )
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0)
    values = {o.name: o for n in normalise(path).graph for o in n.outputs}
    assert values["s"].shape == ["N", 1, 4] and values["y"].shape == ["N", 2, 2]
    assert values["y"].dtype == ir.DataType.FLOAT


RANKS = [
    ("ReduceSum", {}, {"axes": ["K"]}),
    ("ReduceMax", {"keepdims": 1}, {"axes": [1]}),
    ("Resize", {}, {"roi": None, "scales": None, "sizes": ["K"]}),
    ("Split", {}, {"lengths": [2]}),
    ("CenterCropPad", {}, {"sizes": [4]}),
    ("MaxUnpool", {"kernel_shape": [2, 2]}, {"i": ["N", 3, "H", "W"], "sizes": [4]}),
]


@pytest.mark.parametrize(("op_type", "attrs", "settings"), RANKS, ids=[r[0] for r in RANKS])
def test_operators_whose_settings_are_known_at_run_time_keep_their_rank(op_type, attrs, settings):
    names = " ".join(["x", *(name if dims else "" for name, dims in settings.items())])
    outputs = "y z" if op_type == "Split" else "y"
    inputs = {"x": (np.float32, ["N", 3, "H", "W"])}
    inputs |= {name: (np.int64, dims) for name, dims in settings.items() if dims}
    made = helper.make_node(op_type, names.split(" "), outputs.split(), **attrs)
    result = normalise(ir.from_proto(model_of([made], inputs, outputs=outputs.split())))
    assert [len(v.shape) for v in result.graph.outputs] == [4] * len(outputs.split())


def test_symbolic_dimensions_survive_and_interfaces_gain_none():
    nodes = [node("Shape", "x", "s"), node("Reshape", "x s", "t"), node("Conv", "t w", "c"), node("Relu", "c", "y")]
    model = model_of(nodes, {"x": (np.float32, ["batch", 3, None, -1])}, weights={"w": real(2, 3, 3, 3)})
    result = normalise(ir.from_proto(model))
    shapes = {v.name: v.shape for n in result.graph for v in n.outputs}
    assert shapes["t"][0].value == "batch" and shapes["c"][0].value == "batch" and shapes["c"][1] == 2
    assert [d.value for d in result.graph.inputs[0].shape[2:]] == [None, None]
    assert [d.value for d in result.graph.outputs[0].shape[2:]] == [None, None]


RESHAPES = [
    (["n", 4, 6], [0, 2, -1], ["n", 2, 12]),
    (["n", 4, 6], [-1, 24], ["n", 24]),
    (["n", "m", 6], [-1, 3], [None, 3]),
    (["n", 4, 6], [2, -1], [2, None]),
]


@pytest.mark.parametrize(("dims", "target", "expected"), RESHAPES, ids=str)
def test_reshape_keeps_what_cancels(dims, target, expected):
    model = model_of(
        [node("Reshape", "x t", "r"), node("Relu", "r", "y")],
        {"x": (np.float32, dims)},
        weights={"t": np.array(target)},
    )
    shape = normalise(ir.from_proto(model)).graph[0].outputs[0].shape
    found = [d if isinstance(d, int) else d.value for d in shape]
    assert [None if str(d).startswith("unk__") else d for d in found] == expected


def test_reshape_to_a_partly_symbolic_shape_has_a_constant_target():
    nodes = [node("Shape", "x", "s", end=1), node("Concat", "s k", "t", axis=0), node("Reshape", "x t", "y")]
    model = model_of(nodes, {"x": (np.float32, ["n", 6])}, weights={"k": np.array([2, 3])})
    found = normal_form(model)
    assert op_types(found) == ["Reshape"]
    assert initializers(found)[found.graph.node[0].input[1]].tolist() == [-1, 2, 3]
    assert_same([real(4, 6).reshape(4, 2, 3)], run(found, {"x": real(4, 6)}))


def test_resize_keeps_the_axes_that_it_does_not_scale():
    weights = {"scales": np.array([1, 1, 2, 2], np.float32)}
    nodes = [helper.make_node("Resize", ["x", "", "scales"], ["r"]), node("Relu", "r", "y")]
    result = normalise(ir.from_proto(model_of(nodes, {"x": (np.float32, ["n", 3, 4, "w"])}, weights=weights)))
    for value in (result.graph[0].outputs[0], result.graph[1].outputs[0]):
        assert value.shape[0] == "n" and value.shape[2] == 8
        assert value.shape[3] != "w"


def test_large_weights_are_shared_not_copied():
    model = ir.from_proto(model_of([node("MatMul", "x w", "y")], {"x": M}, weights={"w": real(5, 400)}))
    result = normalise(model)
    assert result.graph.initializers["w"].const_value is model.graph.initializers["w"].const_value


# --- function bodies --------------------------------------------------------------------------------------------------

BODIES = [
    ("Gelu", {"approximate": "tanh"}, {"x": M}),
    ("Celu", {"alpha": 0.7}, {"x": M}),
    ("HardSwish", {}, {"x": M}),
    ("LayerNormalization", {"axis": 1}, {"x": M, "s": real(5)}),
    ("SoftmaxCrossEntropyLoss", {"reduction": "sum"}, {"x": M, "t": np.array([0, 4, 2])}),
    ("MeanVarianceNormalization", {"axes": [0, 1]}, {"x": M}),
    ("ReduceLogSumExp", {"keepdims": 0}, {"x": M}),
    ("AffineGrid", {}, {"theta": real(2, 2, 3), "size": np.array([2, 1, 3, 4])}),
    ("CenterCropPad", {"axes": [1]}, {"x": M, "shape": np.array([3])}),
]


@pytest.mark.parametrize(("op", "attrs", "feeds"), BODIES, ids=[b[0] for b in BODIES])
def test_expanding_a_body(op, attrs, feeds):
    model = model_of([helper.make_node(op, list(feeds), ["y"], **attrs)], feeds)
    result = normalise(ir.from_proto(model))
    assert has_body(result.graph[0])
    assert expand(result, [result.graph[0]])
    found = ir.to_proto(result)
    assert op not in op_types(found)
    assert ir.to_proto(normalise(result)) == found
    assert_same(run(model, feeds), run(found, feeds), rtol=1e-4)


def test_expanding_what_has_no_body_says_no():
    result = normalise(ir.from_proto(model_of([node("Relu", "x", "t"), node("Erf", "t", "y")], {"x": M})))
    assert [has_body(n) for n in result.graph] == [True, False]
    assert not expand(result, list(result.graph))
    assert "Relu" not in op_types(ir.to_proto(result)) and "Erf" in op_types(ir.to_proto(result))


# --- whole models ------------------------------------------------------------


@pytest.mark.sweep(0)
@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda p: p.stem)
def test_light_networks_give_the_same_numbers(path):
    model = onnx.load(path)
    found = normal_form(model)
    feeds = {i.name: real(*(d.dim_value for d in i.type.tensor_type.shape.dim)) for i in found.graph.input}
    assert_same(run(model, feeds), run(found, feeds))
    assert all(v.shape is not None for n in normalise(ir.from_proto(model)).graph for v in n.outputs)


def _chain(length):
    nodes = [helper.make_node("Softplus" if i % 2 else "Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]
    return ir.from_proto(model_of(nodes, {"v0": M}, [f"v{length}"], 13))


@pytest.mark.sweep(0)
def test_a_long_chain_needs_no_recursion():
    result = normalise(_chain(10_000))
    assert result.graph.num_nodes() == 10_000


def test_new_names_are_free_when_they_are_given():
    model = ir.from_proto(model_of([node("Neg", "x", "y")], {"x": M}))
    editor = Editor(model)
    model.graph[0].name = "Exp"  # after the editor was made
    assert editor.op.Exp(editor.op.wrap(model.graph.inputs[0])).value.name == "Exp_1"


def test_an_unsorted_model_is_sorted():
    model = model_of([node("Neg", "t", "y"), node("Exp", "x", "t")], {"x": M})
    assert op_types(normal_form(model)) == ["Exp", "Neg"]


def test_a_sequence_goes_through():
    nodes = [node("SplitToSequence", "x", "s", axis=1), node("SequenceAt", "s i", "y")]
    model = model_of(nodes, {"x": M}, weights={"i": np.array(2)})
    assert_same([M[:, 2:3]], run(normal_form(model), {"x": M}))


def test_string_constants_stay():
    nodes = [node("Constant", "", "s", value_string="a"), node("Equal", "x s", "y")]
    model = model_of(nodes, {"x": (object, [2])}, opset=19)
    assert "Constant" in op_types(normal_form(model))
    assert model.graph.input[0].type.tensor_type.elem_type == TensorProto.STRING


def test_axes_that_are_a_scalar_become_a_vector() -> None:
    """PyTorch's exporter writes some for grouped queries; the specification wants a vector, onnxruntime takes both."""
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[n, 3] x) => (float[n] y) {
        one = Constant <value_int = 1> ()
        wide = Unsqueeze (x, one)
        sum = ReduceSumSquare (wide, one)
        tall = ReduceMax (sum, last)
        flat = Squeeze (tall, one)
        y = Squeeze (flat, one)
    }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(-1), "last"))
    x = np.array([[1, -3, 2], [0, 1, 4]], np.float32)
    _, gradient = run(gg.vjp(model, wrt="x"), {"x": x, "y.cotangent": np.ones(2, np.float32)})
    np.testing.assert_array_equal(gradient, [[0, -6, 0], [0, 0, 8]])
