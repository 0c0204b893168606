"""Nodes that are no calls of their operators: refused with all findings, before any library sees the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from gradgraph.errors import ModelError
from gradgraph.files.models import load_model
from gradgraph.graph.node_forms import _WATCHED, CHOICES
from gradgraph.passes.normal import normalise

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
INPUTS = {"x": (FLOAT, [6, 4]), "v": (FLOAT, [4]), "i": (INT64, [2, 1]), "n": (INT64, []), "c": (BOOL, [])}


def model(*nodes: onnx.NodeProto, opset: int = 21, weights: Sequence[TensorProto] = ()) -> onnx.ModelProto:
    """The first output of the last node is the model's."""
    inputs = [helper.make_tensor_value_info(name, *kind) for name, kind in INPUTS.items()]
    output = helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, None)
    graph = helper.make_graph(list(nodes), "g", inputs, [output], list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def node(op_type: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), outputs.split(), f"n_{op_type}", **attributes)


def body(inputs: int, outputs: int) -> onnx.GraphProto:
    """Gives its first input, or the outer ``v``, again and again."""
    taken = [helper.make_tensor_value_info(f"in{i}", FLOAT, None) for i in range(inputs)]
    given = [helper.make_tensor_value_info(f"out{i}", FLOAT, None) for i in range(outputs)]
    nodes = [helper.make_node("Identity", ["in0" if inputs else "v"], [f"out{i}"]) for i in range(outputs)]
    return helper.make_graph(nodes, "body", taken, given)


def with_attribute(found: onnx.NodeProto, *attributes: onnx.AttributeProto) -> onnx.NodeProto:
    found.attribute.extend(attributes)
    return found


def stored_elsewhere() -> onnx.AttributeProto:
    attribute = helper.make_attribute("axis", 1)
    attribute.floats.append(1.0)
    return attribute


TWICE = (helper.make_attribute("axis", 0), helper.make_attribute("axis", 1))
SCAN = {"body": body(2, 2), "num_scan_inputs": 1}

# name: node, what is said of it
MALFORMED: dict[str, tuple[onnx.NodeProto, str]] = {
    "an input too many": (node("Relu", "x x"), "has 2 inputs, and at opset 21 this operator takes 1; export"),
    "an input too few": (node("MatMul", "x"), "has 1 input, and at opset 21 this operator takes 2"),
    "no input at all": (node("Concat", "", axis=0), "has 0 inputs, and at opset 21 this operator takes at least 1"),
    "a required input left out": (helper.make_node("Clip", ["", "v"], ["y"], "n_Clip"), "lacks the input 'input'"),
    "an output too many": (node("Relu", "x", "y z"), "has 2 outputs, and at opset 21 this operator has 1"),
    "an unknown attribute": (
        node("Relu", "x", alpha=1.0),
        "has the attribute 'alpha', which this operator does not have",
    ),
    "an attribute of another type": (
        node("Softmax", "x", axis=1.0),
        "'axis' of node .* is a float, and must be an int",
    ),
    "a list for a number": (node("Softmax", "x", axis=[1]), "is a list of ints, and must be an int"),
    "an attribute twice": (
        with_attribute(node("Softmax", "x"), *TWICE),
        "'axis' of node .* appears twice; remove one",
    ),
    "an attribute stored as another type": (
        with_attribute(node("Softmax", "x"), stored_elsewhere()),
        "is declared as int, and its value is stored as 'floats'",
    ),
    "an attribute that is required": (
        node("Concat", "x x"),
        "lacks the attribute 'axis', which this operator requires",
    ),
    "an operator of a later opset": (
        node("Swish", "x"),
        "calls an operator that opset 21 does not have, and ONNX has it since opset 24",
    ),
    "more parts than outputs": (
        node("Split", "x", "y z", num_outputs=3),
        "has 2 outputs, and its attribute num_outputs is 3",
    ),
    "more outputs than parts": (node("Split", "x", "y z w", num_outputs=2), "has 3 outputs, and its .* is 2"),
    "2**40 parts": (node("Split", "x", "y z", num_outputs=2**40), "num_outputs is 1099511627776"),
    "a term too few": (node("Einsum", "x v", equation="ij->i"), "has 2 inputs, and its equation 'ij->i' has 1"),
    "no terms": (node("Einsum", "x v v", equation=""), "has 3 inputs, and its equation '' has 1"),
    "no equation": (node("Einsum", "x", equation="0"), "the attribute 'equation' of node .* is '0'"),
    "a negative number of axes": (node("GatherND", "x i", batch_dims=-5), "'batch_dims' of node .* is -5"),
    "a window without size": (node("MaxPool", "x", kernel_shape=[0]), "'kernel_shape' of node .* contains 0, and must"),
    "2**40 elements in a window": (node("MaxPool", "x", kernel_shape=[2**40]), "contains 1099511627776, and must"),
    "steps back": (node("Conv", "x x", strides=[-1, 1]), "'strides' of node .* contains -1, and must contain numbers"),
    "axis 2**31": (
        node("LayerNormalization", "x v", "y z", axis=2**31),
        "'axis' of node .* is 2147483648, and no tensor",
    ),
    "an element type": (node("Cast", "x", to=99), "is element type 99, which ONNX does not define"),
    "a value too many for a Loop": (node("Loop", "n c x v", body=body(3, 3)), "has 2 states, and its body has 1"),
    "a value too few for a Loop": (node("Loop", "n c x", body=body(4, 2)), "has 1 state, and its body has 2 inputs"),
    "an output too many for a Loop": (
        node("Loop", "n c x", "y z", body=body(3, 2)),
        "its body has 1 output besides the condition",
    ),
    "an input too many for a Scan": (node("Scan", "v x x", "y z", **SCAN), "has 3 inputs, and its body has 2"),
    "an input too few for a Scan": (node("Scan", "x", "y z", **SCAN), "has 1 input, and its body has 2"),
    "an output too many for a Scan": (node("Scan", "v x", "y z w", **SCAN), "has 3 outputs and 1 state, and its body"),
    "scanned inputs": (node("Scan", "v x", body=body(2, 2), num_scan_inputs=-1), "'num_scan_inputs' of node .* is -1"),
    "2**31 places to sample": (
        node("RoiAlign", "x x i", output_width=2**31 - 1),
        "'output_width' of node .* is 2147483647, and must be a number from 1 to 4,194,304",
    ),
    "2**31 samples": (node("RoiAlign", "x x i", sampling_ratio=2**31), "must be a number from 0 to"),
    "blocks of nothing": (node("SpaceToDepth", "x", blocksize=0), "'blocksize' of node .* is 0, and must be"),
    "a division by nothing": (node("Celu", "x", alpha=0.0), "'alpha' of node .* is 0, and the operator divides by it"),
    "groups fewer than one": (
        node("GroupNormalization", "x v v", num_groups=-1),
        "'num_groups' of node .* is -1, and must be a number from 1",
    ),
    "no group": (node("Conv", "x x", group=0), "'group' of node .* is 0, and must be a number from 1"),
    "axes twice": (node("Transpose", "x", perm=[0, 0]), r"'perm' of node .* is \[0, 0\], and must contain each axis"),
    "axes from 1": (node("Transpose", "x", perm=[2, 1]), "must contain each axis from 0 to 1 once"),
    "branches": (
        node("If", "c", "y", then_branch=body(0, 1), else_branch=body(0, 2)),
        "but its then_branch has 1 and its else_branch 2",
    ),
}


def called(key: str) -> onnx.NodeProto:
    """A call of the operator, or of one that has such an attribute, with all that it must have."""
    op_type, _, name = key.rpartition(".")
    having = [s for s in onnx.defs.get_all_schemas() if s.domain == "" and name in s.attributes]
    schema = onnx.defs.get_schema(op_type or having[0].name, 21)
    required = {n: 1 if a.type.name == "INT" else [1] for n, a in schema.attributes.items() if a.required}
    return node(schema.name, " ".join(["x"] * schema.min_input), **{**required, name: "sideways"})


MALFORMED |= {f"a choice of {key}": (called(key), "is 'sideways', and must be one of ") for key in CHOICES}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("read", ["file", "memory", "body", "function"])
def test_malformed_nodes_are_named(name: str, read: str) -> None:
    broken, words = MALFORMED[name]
    whole = model(broken)
    if read == "body":
        inner = helper.make_graph([broken], "b", [], [helper.make_tensor_value_info("y", FLOAT, None)])
        outer = node("If", "c", "out", then_branch=inner, else_branch=body(0, 1))
        whole = model(outer)
    elif read == "function":
        imports = [helper.make_opsetid("", 21)]
        whole = model(helper.make_node("F", [*INPUTS], ["out"], domain="own"))
        whole.functions.append(helper.make_function("own", "F", [*INPUTS], ["y"], [broken], imports))
        whole.opset_import.append(helper.make_opsetid("own", 1))
    if read != "memory":
        with pytest.raises(ModelError, match=words) as caught:
            load_model(whole)
        assert len(caught.value.findings) == 1
        return
    if name in IN_THE_FILE:
        return
    with pytest.raises(ModelError, match=words):
        normalise(ir.from_proto(whole))


IN_THE_FILE = ("an attribute twice", "an attribute stored as another type")  # an onnx-ir model cannot have them


@pytest.mark.parametrize("in_file", [True, False])
def test_all_of_them_are_found_at_once(in_file: bool) -> None:
    some = {name: row for name, row in MALFORMED.items() if (name in IN_THE_FILE) == in_file}
    nodes = [node(n.op_type, " ".join(n.input), f"y{i}") for i, (n, _) in enumerate(some.values())]
    for made, (broken, _) in zip(nodes, some.values(), strict=True):
        made.CopyFrom(broken)
        made.output[:] = [f"{made.op_type}_{name}_{id(made)}" for name in made.output]
    words = "appears twice" if in_file else "has 2 inputs, .*"
    with pytest.raises(ModelError, match=words + r" \(and \d+ more: `gradgraph check` lists them\); ") as caught:
        load_model(model(*nodes))
    assert len(caught.value.findings) == len(some)
    assert all(f.subject and f.what and f.remedy and f.severity == "error" for f in caught.value.findings)


def test_names_in_functions_are_text() -> None:
    whole = model(helper.make_node("F", ["x"], ["out"], domain="own"))
    imports = [helper.make_opsetid("", 21)]
    whole.functions.append(helper.make_function("own", "F", ["x"], ["y"], [node("Selu", "x", qqqq=1.0)], imports))
    whole.opset_import.append(helper.make_opsetid("own", 1))
    damaged = onnx.ModelProto.FromString(whole.SerializeToString().replace(b"qqqq", b"\xff\xff\xff\xff"))
    with pytest.raises(ModelError, match=r"the name .* is not UTF-8; the file is damaged"):
        load_model(damaged)


def stored_twice(**more: Any) -> TensorProto:
    return TensorProto(name="w", dims=[2], data_type=FLOAT, raw_data=bytes(8), **more)


TENSORS = {
    "raw and typed data": stored_twice(float_data=[1, 2]),
    "data of two types": TensorProto(name="w", dims=[2], data_type=FLOAT, float_data=[1, 2], int64_data=[1, 2]),
    "data of another type": TensorProto(name="w", dims=[2], data_type=INT64, int32_data=[1, 2]),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("inside", ["initializer", "attribute"])
def test_data_are_stored_once(name: str, inside: str) -> None:
    tensor = TENSORS[name]
    constant = node("Constant", "", "w", value=tensor)
    whole = (
        model(node("Add", "x w"), weights=[tensor]) if inside == "initializer" else model(constant, node("Add", "x w"))
    )
    with pytest.raises(
        ModelError, match=r"tensor 'w' of shape \[2\] has data in '\w+', and its data must be in '\w+' only"
    ):
        load_model(whole)


def test_empty_fields_beside_the_data_do_no_harm() -> None:
    empty = TensorProto(name="w", dims=[0], data_type=FLOAT, raw_data=b"")
    load_model(model(node("Concat", "w v", axis=0), weights=[empty]))
    scalar = onnx.numpy_helper.from_array(np.float32(2).reshape(()), "w")
    load_model(model(node("Mul", "x w"), weights=[scalar]))


def test_an_attribute_of_a_function_has_none_outside() -> None:
    whole = model(node("Softmax", "x", axis=1))
    attribute = whole.graph.node[0].attribute[0]
    attribute.ClearField("i")
    attribute.ref_attr_name = "a"
    with pytest.raises(ModelError, match="refers to 'a', an attribute of a function, and this node is not in"):
        load_model(whole)


@pytest.mark.parametrize("opset", [2**40, 0])
def test_opsets_of_functions_are_known(opset: int) -> None:
    whole = model(helper.make_node("F", ["x"], ["out"], domain="own"))
    body = [node("Relu", "x")]
    whole.functions.append(helper.make_function("own", "F", ["x"], ["y"], body, [helper.make_opsetid("", opset)]))
    whole.opset_import.append(helper.make_opsetid("own", 1))
    with pytest.raises(ModelError, match=f"function 'F' uses ai.onnx opset {opset}, but up to"):
        load_model(whole)


@pytest.mark.parametrize("domain", ["own", "ai.onnx.ml", "com.microsoft"])
def test_other_domains_are_not_looked_at(domain: str) -> None:
    proto = model(helper.make_node("Split", ["x", "x", "x"], ["y"], domain=domain, num_outputs=7, any=1))
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    load_model(proto)


@pytest.mark.parametrize("name", sorted(_WATCHED))
def test_attributes_of_an_operator_that_onnx_does_not_have_are_not_looked_at(name: str) -> None:
    """They may be of any type; the operator itself is an error where a gradient has to pass it."""
    for value in ("text", 1.5, [1, 2], ["a"]):
        load_model(model(node("Unheard", "x", **{name: value})))
