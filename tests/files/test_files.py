"""Reading never trusts the file."""

import errno
import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from gradgraph.errors import ModelError, OutputError, shown
from gradgraph.files import atomic
from gradgraph.files import models as files
from gradgraph.files.models import load_model, save_model
from gradgraph.graph.checks import NODE_LIMIT, validate
from tests.kit.raw_models import ADD, X, Y, Z, external_model, model, node, tensor


def _names(folder):
    return sorted(p.name for p in folder.iterdir())


# --- files that are no models -------------------------------------------------------------------------------------


def _bytes(content):
    return lambda path: path.write_bytes(content)


NOT_MODELS = [
    ("empty", _bytes(b""), "is empty"),
    ("text", _bytes(b"hello, this is no model\n" * 9), "is not an ONNX model"),
    ("image", _bytes(b"\x89PNG\r\n\x1a\n" + bytes(99)), "is not an ONNX model|no graph"),
    ("truncated", lambda p: p.write_bytes(model().SerializeToString()[:60]), "is not an ONNX model"),
    ("another message", lambda p: p.write_bytes(X.SerializeToString()), "no ONNX model|no graph"),
    ("folder", lambda p: p.mkdir(), "is a folder"),
    ("fifo", lambda p: os.mkfifo(p), "not a regular file"),
    ("missing", lambda p: None, "there is no file"),
]


@pytest.mark.parametrize(("make", "message"), [c[1:] for c in NOT_MODELS], ids=[c[0] for c in NOT_MODELS])
def test_what_is_no_model(tmp_path, make, message):
    path = tmp_path / "model.onnx"
    make(path)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    assert "model.onnx" in str(caught.value)


# --- models that are damaged --------------------------------------------------------------------------------------


def function(name, calls):
    nodes = [helper.make_node(c, ["a"], [f"t{i}"], domain="own") for i, c in enumerate(calls)]
    nodes.append(helper.make_node("Neg", ["a"], ["b"]))
    return helper.make_function("own", name, ["a"], ["b"], nodes, [helper.make_opsetid("", 17)])


def nested(nodes):
    body = helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)])
    condition = onnx.numpy_helper.from_array(np.array(True), "c")
    return model([node("If", "c", "y", then_branch=body, else_branch=body)], [condition])


def sparse_model():
    found = model()
    found.graph.sparse_initializer.add().values.CopyFrom(tensor("s"))
    return found


SPARSE_CONSTANT = helper.make_node(
    "Constant",
    [],
    ["y"],
    sparse_value=helper.make_sparse_tensor(tensor("s"), onnx.numpy_helper.from_array(np.arange(3), "i"), [9]),
)
CALL = helper.make_node("F0", ["x"], ["y"], domain="own")
RING = helper.make_function(
    "own", "F0", ["a"], ["b"], [node("Add", "a c", "b"), node("Neg", "b", "c")], [helper.make_opsetid("", 17)]
)
BOMB = [function(f"F{i}", [f"F{i + 1}"] * 2) for i in range(60)] + [function("F60", [])]

DAMAGED = {
    "opset 9999": (model(opset=9999), "opset 9999, but 1 to 28 can be read; export it again at opset 28 or older$"),
    "opset 0": (model(opset=0), "opset 0, but 1 to 28 can be read; export it again at opset 1 or newer$"),
    "an old IR version": (
        model(ir_version=2),
        "IR version 2, but 3 to 14 can be read; export it again with one of these",
    ),
    "IR version": (model(ir_version=999), "IR version 999, but 3 to 14 can be read; export it again with one of these"),
    "no graph": (onnx.ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 17)]), "no graph"),
    "no outputs": (model(outputs=()), "no outputs"),
    "output without producer": (model(outputs=[Z]), "'z' is produced by no node"),
    "dangling input": (model([node("Add", "x nowhere", "y")]), "reads 'nowhere'"),
    "dangling in a body": (nested([node("Neg", "nowhere", "r")]), "reads 'nowhere'"),
    "cycle": (model([node("Add", "x b", "a"), node("Neg", "a", "b"), node("Exp", "a", "y")]), "cycle through"),
    "cycle in a function": (model([CALL], functions=[RING]), "cycle through"),
    "duplicate output": (model([node("Neg", "x", "y"), node("Exp", "x", "y")]), "are called 'y'"),
    "duplicate initializer": (model(ADD, [tensor(), tensor()]), "two initializers are called 'w'"),
    "initializer and output": (model([node("Neg", "x", "w"), *ADD], [tensor()]), "are called 'w'"),
    "duplicate input": (model(inputs=(X, X)), "two graph inputs are called 'x'"),
    "nameless initializer": (model(ADD, [tensor(), tensor(name="")]), "has no name"),
    "sparse": (sparse_model(), "is sparse"),
    "sparse constant": (model([SPARSE_CONSTANT]), r"the node that computes 'y' \(Constant\) has a sparse tensor"),
    "too little data": (model(ADD, [tensor(raw=bytes(8))]), r"'w' of shape \[3\] has 8 bytes, .* need 12"),
    "too much data": (model(ADD, [tensor(raw=bytes(16))]), "has 16 bytes"),
    "too few entries": (
        model(ADD, [TensorProto(name="w", dims=[3], data_type=1, float_data=[1, 2])]),
        "has 2 elements",
    ),
    "huge dims": (model(ADD, [tensor(dims=[2**40, 3])]), "but its type and shape need"),
    "overflowing dims": (model(ADD, [tensor(dims=[2**40, 2**40])]), r"more than 2\*\*63 bytes"),
    "more axes than arrays have": (
        model(ADD, [TensorProto(name="w", dims=[1] * 71, data_type=1, float_data=[1])]),
        "'w' has 71 axes, more than the 64 that NumPy supports",
    ),
    "an input of more axes": (
        model(inputs=(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"] * 65),)),
        "input 'x' is declared with 65 axes, more than the 64 that NumPy supports",
    ),
    "an input of 2**80 elements": (
        model(inputs=(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2**40, "n", 2**40]),)),
        r"input 'x' is declared with the sizes .*, more than 2\*\*63 elements",
    ),
    "overflowing dims of nothing": (model(ADD, [tensor(dims=[0, 2**62])]), r"more than 2\*\*63 bytes"),
    "negative dims": (model(ADD, [tensor(dims=[-3])]), "negative dimension"),
    "unknown type": (model(ADD, [tensor(dtype=77)]), "unknown element type 77"),
    "no type": (model(ADD, [tensor(dtype=0)]), "unknown element type 0"),
    "bad attribute tensor": (model([helper.make_node("Constant", [], ["y"], value=tensor(raw=b"1"))]), "has 1 byte,"),
    "recursive functions": (
        model([CALL], functions=[function("F0", ["F1"]), function("F1", ["F0"])]),
        "'F0' -> 'F1' -> 'F0'",
    ),
    "function bomb": (model([CALL], functions=BOMB), r"more than 10\*\*18 nodes, and the limit is 2,000,000"),
    "external data without a folder": (external_model("w.bin"), "pass the model's path, or onnx_ir.load"),
    "memory marker": (external_model("*/_ORT_MEM_ADDR_/*", offset=1, length=12), "another process's memory"),
}


@pytest.mark.parametrize(("broken", "message"), DAMAGED.values(), ids=list(DAMAGED))
def test_damage_is_named(broken, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_model(broken)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("the model cannot be used: ")


def test_invalid_utf8_is_named(tmp_path):
    content = model([helper.make_node("Relu", ["x"], ["y"], name="NAME")]).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(content.replace(b"NAME", b"\xff\xfe\xfd\xfc"))
    with pytest.raises(ModelError, match=r"m\.onnx' cannot be used: .* is not UTF-8"):
        load_model(tmp_path / "m.onnx")


def _varint(number):
    return bytes([number]) if number < 128 else bytes([number & 0x7F | 0x80]) + _varint(number >> 7)


def test_a_graph_nested_too_deep_is_refused(tmp_path):
    def message(*fields):  # protobuf's own library cannot write it either
        return b"".join(bytes([number << 3 | 2]) + _varint(len(content)) + content for number, content in fields)

    graph = message((2, b"g"))
    for _ in range(40):
        attribute = message((1, b"then_branch"), (6, graph))
        graph = message((1, message((4, b"If"), (5, attribute))), (2, b"g"))
    (tmp_path / "m.onnx").write_bytes(message((7, graph)))
    with pytest.raises(ModelError, match="more than 32 deep"):
        load_model(tmp_path / "m.onnx")


# --- models that are fine ------------------------------------------------------------------------------------------


def test_unsorted_nodes_are_sorted_and_the_source_stays():
    proto = model([node("Neg", "t", "y"), node("Exp", "x", "t")])
    before = proto.SerializeToString()
    assert [n.op_type for n in load_model(proto).graph] == ["Exp", "Neg"]
    assert proto.SerializeToString() == before
    own = ir.from_proto(proto)
    assert [n.op_type for n in load_model(own).graph] == ["Exp", "Neg"]
    assert [n.op_type for n in own.graph] == ["Neg", "Exp"]


def test_what_a_body_reads_from_outside_is_sorted_before_it():
    branch = helper.make_graph([helper.make_node("Identity", ["t"], ["r"])], "b", [], [Y])
    branch.output[0].name = "r"
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    choice = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    proto = model([choice, node("Exp", "x", "t")], inputs=(X, condition))
    assert [n.op_type for n in load_model(proto).graph] == ["Exp", "If"]


def test_functions_that_multiply_within_the_limit_pass():
    depth = NODE_LIMIT.bit_length() - 3
    functions = [function(f"F{i}", [f"F{i + 1}"] * 2) for i in range(depth)] + [function(f"F{depth}", [])]
    assert len(load_model(model([CALL], functions=functions)).functions) == depth + 1


@pytest.mark.sweep(0)
def test_a_deep_chain_and_a_wide_fan_need_no_recursion():
    count = 10_000
    chain = [helper.make_node("Neg", [f"v{i}" if i else "x"], [f"v{i + 1}"]) for i in range(count)]
    fan = [helper.make_node("Neg", ["x"], [f"f{i}"]) for i in range(count)]
    proto = model([*chain, *fan, helper.make_node("Identity", [f"v{count}"], ["y"])])
    assert load_model(proto).graph.num_nodes() == 2 * count + 1


def test_an_ir_model_is_copied_and_checked():
    own = ir.from_proto(model())
    copy = load_model(own)
    copy.graph[0].op_type = "Exp"
    assert own.graph[0].op_type == "Relu"
    own.graph[0].replace_input_with(0, ir.Value(name="nowhere"))
    with pytest.raises(ModelError, match="reads 'nowhere'"):
        validate(own)


# --- names in messages ----------------------------------------------------------------------------------------------

NAMES = [
    ("plain/name:0", "plain/name:0"),
    ("a\x1b[31mb", "a\\x1b[31mb"),
    ("two\nlines", "two\\nlines"),
    ("abc\u202edcba", "abc\\u202edcba"),
    ("Gewicht_ä", "Gewicht_ä"),
]


@pytest.mark.parametrize(("name", "expected"), NAMES, ids=range(len(NAMES)))
def test_names_cannot_steer_the_terminal(name, expected):
    assert shown(name) == expected


def test_long_names_are_cut():
    assert len(shown("x" * 10**6)) < 200
    with pytest.raises(ModelError) as caught:
        load_model(model([helper.make_node("Neg", ["z" * 10**5], ["y"])]))
    assert len(str(caught.value)) < 600


# --- saving models ------------------------------------------------------------


def _weighted(value=1.0):
    return model(ADD, [onnx.numpy_helper.from_array(np.full(3, value, np.float32), "w")])


@pytest.mark.parametrize("source", [lambda m: m, ir.from_proto], ids=["proto", "ir"])
def test_a_model_is_saved_and_loaded(tmp_path, source):
    save_model(source(_weighted()), tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"))
    assert load_model(tmp_path / "m.onnx").graph.initializers["w"].const_value.numpy().tolist() == [1, 1, 1]
    assert _names(tmp_path) == ["m.onnx"]


def test_large_weights_go_beside_the_model_and_an_overwritten_one_stays_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "INLINE_LIMIT", 1000)
    path = tmp_path / "m.onnx"
    for value in (1.0, 2.0, 3.0):
        arrays = [onnx.numpy_helper.from_array(np.full((100, 3), value, np.float32), n) for n in ("w", "w2")]
        nodes = [node("MatMul", "x wt", "t"), node("Transpose", "w", "wt"), node("MatMul", "t w2", "y")]
        save_model(model(nodes, arrays), path)
        found = onnx.load(path)
        assert {onnx.numpy_helper.to_array(t).mean() for t in found.graph.initializer} == {value}
        assert len(_names(tmp_path)) == 2
    assert path.stat().st_size < 1000


@pytest.mark.parametrize(("limit", "names"), [(12, ["m.onnx", "m.onnx.data"]), (1 << 20, ["m.onnx"])])
def test_large_weights_that_are_computed_when_read_go_beside_the_model(tmp_path, monkeypatch, limit, names):
    monkeypatch.setattr(files, "LEAST_KEPT", limit)
    array = np.arange(2000, dtype=np.float32)
    opened = ir.from_proto(model(ADD, [onnx.numpy_helper.from_array(array, "w")]))
    lazy = ir.LazyTensor(lambda: ir.tensor(array, name="w"), ir.DataType.FLOAT, ir.Shape([2000]), name="w")
    opened.graph.initializers["w"].const_value = lazy
    save_model(opened, tmp_path / "m.onnx")
    assert _names(tmp_path) == names
    assert load_model(tmp_path / "m.onnx").graph.initializers["w"].const_value.numpy().tolist() == array.tolist()


def test_a_model_whose_data_cannot_be_written_stays(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    save_model(_weighted(1.0), path)

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(atomic.os, "replace", refuse)
    with pytest.raises(OutputError, match="Read-only"):
        save_model(_weighted(2.0), path)
    assert load_model(path).graph.initializers["w"].const_value.numpy().tolist() == [1, 1, 1]
    assert _names(tmp_path) == ["m.onnx"]
