"""Numbers in formulas are told from weights by what exporters say of them, and by what they hold."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import gradgraph as gg
from tests.kit.small_models import model_of, normal_form, real, run


def from_torch(notes: dict[str, tuple[str, str]]) -> onnx.ModelProto:
    """Y = x·w + c + zeros, each initializer with what PyTorch's exporter says beside it."""
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 2] x) => (float[batch, 2] y)
    <float[2, 2] w = {1, 2, 3, 4}, float[2] c = {1, 2}, float[2] zeros = {0, 0}> {
        product = MatMul (x, w)
        shifted = Add (product, c)
        y = Add (shifted, zeros)
    }""")
    for name, (key, value) in notes.items():
        info = helper.make_tensor_value_info(name, 1, [2, 2] if name == "w" else [2])
        info.metadata_props.add(key=f"pkg.{key}", value=value)
        model.graph.value_info.append(info)
    return model


ALL = ["w", "c", "zeros"]
KIND, FOLDED = "torch.export.graph_signature.InputSpec.kind", "onnxscript.optimizer.folded_from"


@pytest.mark.parametrize(
    ("notes", "trained"),
    [
        ({}, ALL),
        ({"w": (KIND, "PARAMETER"), "c": (KIND, "BUFFER"), "zeros": (FOLDED, "['val_0', 'val_2']")}, ["w"]),
        ({"c": (KIND, "CONSTANT_TENSOR"), "zeros": (FOLDED, "['product', 'zeros_like', 'val_2']")}, ["w"]),
        (
            {"c": (FOLDED, "['rotary.full_inv_freq', 'arange_1', 'mul']"), "zeros": (FOLDED, "['lifted_tensor_0']")},
            ["w"],
        ),
        ({"c": (FOLDED, "['ones', 'max_pool1d', 'where_1', 'val_3']")}, ["w", "zeros"]),
        ({"c": (FOLDED, "['arange', 'layer.attn.embed_positions']")}, ["w", "zeros"]),
        ({"c": (FOLDED, "['arange', 'embed_positions.weight']")}, ALL),
        ({"c": (FOLDED, "['arange', 'pos.weight', 'val_1']"), "zeros": (FOLDED, "['cls_token', 'expand']")}, ALL),
        ({"w": (FOLDED, "['layer.weight', 'val_1']"), "zeros": (FOLDED, "['state']")}, ALL),
        ({"zeros": (FOLDED, "not a list")}, ALL),
    ],
)
def test_what_pytorch_says_of_initializers(notes, trained):
    model = from_torch(notes)
    assert [o.name for o in gg.vjp(model).graph.output][1:] == [f"{name}.grad" for name in trained]
    assert list(gg.build(model, "mse", "sgd").manifest.trainable) == trained
    assert [o.name for o in gg.vjp(model, wrt=["c", "zeros"]).graph.output][1:] == ["c.grad", "zeros.grad"]


def test_a_mask_with_infinities_is_no_parameter():
    mask = np.triu(np.full((3, 3), -np.inf, np.float32), 1)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"]),
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["y"]),
    ]
    model = model_of(nodes, {"x": real(2, 3, 4)}, weights={"w": real(4, 3), "mask": mask})
    assert [o.name for o in gg.vjp(model).graph.output] == ["y", "w.grad"]
    assert [o.name for o in gg.vjp(model, wrt=["mask"]).graph.output] == ["y", "mask.grad"]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_chosen_where_there_is_no_result_is_no_parameter(number):
    nodes = [
        helper.make_node("Greater", ["x", "w"], ["there"]),
        helper.make_node("Mul", ["x", "w"], ["result"]),
        helper.make_node("Where", ["there", "result", "none"], ["y"]),
    ]
    model = model_of(nodes, {"x": real(3)}, weights={"w": real(3, seed=1), "none": np.full(3, number, np.float32)})
    assert [o.name for o in gg.vjp(model).graph.output] == ["y", "w.grad"]
    assert [o.name for o in gg.vjp(model, wrt=["none"]).graph.output] == ["y", "none.grad"]


@pytest.mark.parametrize("turned", [False, True])
def test_a_factor_of_a_product_is_a_parameter_whatever_it_holds(turned):
    weight = np.array([[-np.inf, 1.0], [2.0, 3.0]], np.float32)
    nodes = [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0])] if turned else []
    nodes.append(helper.make_node("MatMul", ["x", "t" if turned else "w"], ["y"]))
    model = model_of(nodes, {"x": real(3, 2)}, weights={"w": weight})
    assert [o.name for o in gg.vjp(model).graph.output] == ["y", "w.grad"]


CHAIN = [
    helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.array(2.0, np.float32))),
    helper.make_node("Mul", ["k", "val_1"], ["product"]),
    helper.make_node("Pow", ["x", "product"], ["y"]),
]


def test_what_is_asked_for_by_name_is_not_folded_away():
    x, feeds = np.array([1.5, 2.0], np.float32), {"y.cotangent": np.ones(2, np.float32)}
    model = model_of(CHAIN, {"x": x}, weights={"val_1": np.array(1.5, np.float32)})
    assert [n.op_type for n in normal_form(model).graph.node] == ["Pow"]
    slope = (x**3 * np.log(x)).sum()
    for names, factors in (("k", [1.5]), (["val_1", "k"], [2.0, 1.5])):
        gradients = run(gg.vjp(model, wrt=names), {"x": x} | feeds)[1:]
        np.testing.assert_allclose(gradients, [slope * f for f in factors], rtol=1e-5)


def test_a_second_transform_trains_no_number_of_the_first():
    model = model_of([helper.make_node("Softplus", ["x"], ["y"])], {"x": real(3)})
    first = gg.vjp(model)
    assert {i.name for i in gg.vjp(first).graph.input} - {i.name for i in first.graph.input} == {
        "y.cotangent_1",
        "x.grad.cotangent",
    }
    asked = [o.name for o in gg.vjp(first).graph.output][len(first.graph.output) :]
    assert all(not name.startswith("const/") for name in asked)
