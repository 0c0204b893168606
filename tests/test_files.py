"""Reading never trusts the file, writing never leaves half of one."""

import errno
import json
import os
import stat

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph import atomic, files
from gradgraph.atomic import check_writable, write_atomically, write_folder_atomically
from gradgraph.checks import NODE_LIMIT, validate
from gradgraph.errors import ModelError, OutputError, shown
from gradgraph.files import load_model, save_model

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
Z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [])
Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])


def model(nodes=None, weights=(), inputs=(X,), outputs=(Y,), opset=17, ir_version=10, functions=()):
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="r")] if nodes is None else nodes
    graph = helper.make_graph(nodes, "g", list(inputs), list(outputs), list(weights))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=list(functions))


def node(op, inputs, outputs, **attrs):
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"n_{op}", **attrs)


def tensor(name="w", dims=(3,), dtype=TensorProto.FLOAT, raw=bytes(12)):
    return TensorProto(name=name, dims=dims, data_type=dtype, raw_data=raw)


def external(location, name="w", dims=(3,), **entries):
    found = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        found.external_data.add(key=key, value=str(value))
    return found


ADD = [node("Add", "x w", "y")]


def external_model(*args, **kwargs):
    return model(ADD, [external(*args, **kwargs)])


# --- files that are no models -------------------------------------------------------------------------------------


def _bytes(content):
    return lambda path: path.write_bytes(content)


NOT_MODELS = [
    ("empty", _bytes(b""), "is empty"),
    ("text", _bytes(b"hello, this is no model\n" * 9), "is no ONNX model"),
    ("image", _bytes(b"\x89PNG\r\n\x1a\n" + bytes(99)), "is no ONNX model|no graph"),
    ("truncated", lambda p: p.write_bytes(model().SerializeToString()[:60]), "is no ONNX model"),
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
    "opset 9999": (model(opset=9999), "opset 9999, but 7 to 28"),
    "opset 0": (model(opset=0), "opset 0, but 7 to 28"),
    "opset 6": (model(opset=6), "opset 6, but 7 to 28"),
    "IR version": (model(ir_version=999), "IR version 999, but 3 to 14"),
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
    "sparse constant": (model([SPARSE_CONSTANT]), r"the node that gives 'y' \(Constant\) holds a sparse tensor"),
    "too little data": (model(ADD, [tensor(raw=bytes(8))]), r"'w' of shape \[3\] holds 8 bytes .* need 12"),
    "too much data": (model(ADD, [tensor(raw=bytes(16))]), "holds 16 bytes"),
    "too few entries": (
        model(ADD, [TensorProto(name="w", dims=[3], data_type=1, float_data=[1, 2])]),
        "holds 2 entries",
    ),
    "huge dims": (model(ADD, [tensor(dims=[2**40, 3])]), "where its type and shape need"),
    "overflowing dims": (model(ADD, [tensor(dims=[2**40, 2**40])]), r"more than 2\*\*63 bytes"),
    "more axes than arrays have": (
        model(ADD, [TensorProto(name="w", dims=[1] * 71, data_type=1, float_data=[1])]),
        "'w' has 71 axes, and 64 is the most",
    ),
    "an input of more axes": (
        model(inputs=(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"] * 65),)),
        "input 'x' is declared with 65 axes, and 64 is the most",
    ),
    "an input of 2**80 elements": (
        model(inputs=(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2**40, "n", 2**40]),)),
        r"input 'x' is declared with the sizes .*, more than 2\*\*63 elements",
    ),
    "overflowing dims of nothing": (model(ADD, [tensor(dims=[0, 2**62])]), r"more than 2\*\*63 bytes"),
    "negative dims": (model(ADD, [tensor(dims=[-3])]), "negative dimension"),
    "unknown type": (model(ADD, [tensor(dtype=77)]), "unknown element type 77"),
    "no type": (model(ADD, [tensor(dtype=0)]), "unknown element type 0"),
    "bad attribute tensor": (model([helper.make_node("Constant", [], ["y"], value=tensor(raw=b"1"))]), "holds 1 bytes"),
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


# --- external data --------------------------------------------------------------------------------------------------


def _saved(tmp_path, proto, data=b"\0" * 12, name="w.bin"):
    folder = tmp_path / "models"
    folder.mkdir(exist_ok=True)
    if data is not None:
        (folder / name).write_bytes(data)
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return folder / "m.onnx"


ESCAPES = ["../w.bin", "a/../../w.bin", "/etc/passwd", "/dev/zero", "C:\\w.bin", "\\\\host\\share\\w", "..\\w.bin", ""]


@pytest.mark.parametrize("location", ESCAPES)
def test_external_data_outside_the_folder_are_refused(tmp_path, location):
    (tmp_path / "w.bin").write_bytes(bytes(12))
    with pytest.raises(ModelError, match=r"outside the model's folder|name no file"):
        load_model(_saved(tmp_path, external_model(location)))


RANGES = [
    ({"offset": -4, "length": 12}, "from -4"),
    ({"offset": 4, "length": 12}, "end at byte 16 of a file of 12"),
    ({"length": 2**50}, "its type and shape need 12"),
    ({"length": 8}, "span 8 bytes"),
    ({"offset": "one"}, "that is no number"),
    ({"offset": 2**62}, "end at byte"),
]


@pytest.mark.parametrize(("entries", "message"), RANGES, ids=[m for _, m in RANGES])
def test_ranges_of_external_data_are_checked(tmp_path, entries, message):
    with pytest.raises(ModelError, match=message):
        load_model(_saved(tmp_path, external_model("w.bin", **entries)))


def _symlink_out(folder):
    (folder / "w.bin").unlink()
    (folder.parent / "secret").write_bytes(bytes(12))
    (folder / "w.bin").symlink_to("../secret")


def _hard_link(folder):
    os.link(folder / "w.bin", folder.parent / "other")


def _fifo(folder):
    (folder / "w.bin").unlink()
    os.mkfifo(folder / "w.bin")


def _folder(folder):
    (folder / "w.bin").unlink()
    (folder / "w.bin").mkdir()


def _missing(folder):
    (folder / "w.bin").unlink()


KINDS = [
    (_symlink_out, "symlink out of the model's folder"),
    (_hard_link, "hard link"),
    (_fifo, "not a regular file"),
    (_folder, "not a regular file"),
    (_missing, "are missing"),
]


@pytest.mark.parametrize(("change", "message"), KINDS, ids=[m for _, m in KINDS])
def test_only_regular_files_of_the_folder_hold_external_data(tmp_path, change, message):
    path = _saved(tmp_path, external_model("w.bin"))
    change(path.parent)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert "'w'" in str(caught.value)


def test_external_data_are_read_from_the_folder_and_below(tmp_path):
    data = np.arange(3, dtype=np.float32)
    path = _saved(tmp_path, external_model("w.bin", offset=4, length=12), b"skip" + data.tobytes())
    assert load_model(path).graph.initializers["w"].const_value.numpy().tolist() == [0, 1, 2]
    proto = onnx.load(path, load_external_data=False)
    assert load_model(proto, base_dir=path.parent).graph.initializers["w"].const_value.numpy().tolist() == [0, 1, 2]


def test_the_layout_of_download_caches_is_read(tmp_path):
    """snapshots/<revision>/model.onnx -> ../../blobs/<hash>, and its data likewise."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_bytes(external_model("model.onnx_data").SerializeToString())
    (blobs / "5678").write_bytes(np.ones(3, np.float32).tobytes())
    (snapshot / "model.onnx").symlink_to("../../blobs/1234")
    (snapshot / "model.onnx_data").symlink_to("../../blobs/5678")
    assert load_model(snapshot / "model.onnx").graph.initializers["w"].const_value.numpy().sum() == 3
    (snapshot / "model.onnx_data").unlink()
    (tmp_path / "secret").write_bytes(bytes(12))
    (snapshot / "model.onnx_data").symlink_to("../../secret")
    with pytest.raises(ModelError, match="symlink out of"):
        load_model(snapshot / "model.onnx")


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


# --- writing ----------------------------------------------------------------------------------------------------------


def _names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_replaced_with_its_mode_kept(tmp_path):
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")
    path.chmod(0o640)
    write_atomically(path, iter([b"ne", memoryview(b"w")]))
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert _names(tmp_path) == ["a.bin"]


def test_the_target_of_a_symlink_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real/a")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_bytes() == b"new"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device"), MemoryError])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_failure_leaves_the_old_artefact_and_no_temporary(tmp_path, failure, folder):
    def data():
        yield b"half"
        raise failure

    path = tmp_path / "out"
    if folder:
        write_folder_atomically(path, {"manifest.json": b"{}"})
    else:
        write_atomically(path, b"old")
    expected = OutputError if isinstance(failure, OSError) else failure
    with pytest.raises(expected) as caught:
        if folder:
            write_folder_atomically(path, {"manifest.json": b"[]", "train.onnx": data()}, force=True)
        else:
            write_atomically(path, data())
    assert _names(tmp_path) == ["out"]
    assert (path / "manifest.json" if folder else path).read_bytes() == (b"{}" if folder else b"old")
    if isinstance(failure, OSError):
        assert "No space left" in str(caught.value) and "untouched" in str(caught.value)


def test_check_writable_changes_nothing(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    for name in ("there", "new"):
        check_writable(tmp_path / name)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("there", b"old")]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_check_writable_says_why_not(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(atomic.Path, "touch", refuse)
    with pytest.raises(OutputError, match=f"cannot write .*new.*{os.strerror(code)}"):
        check_writable(tmp_path / "new")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_check_writable_of_a_closed_folder_and_file(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "there").chmod(0o444)
    with pytest.raises(OutputError, match="Permission denied"):
        check_writable(tmp_path / "there")
    tmp_path.chmod(0o555)
    with pytest.raises(OutputError, match="choose a folder that you may write to"):
        check_writable(tmp_path / "new")
    tmp_path.chmod(0o755)


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    write_folder_atomically(tmp_path / "step", {"manifest.json": b"{}"})
    rename = atomic.Path.rename

    def failing(self, target):
        if atomic.Path(target).name == "step" and self.name.endswith("tmp"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(atomic.Path, "rename", failing)
    with pytest.raises(OutputError, match="Permission denied"):
        write_folder_atomically(tmp_path / "step", {"manifest.json": b"[]"}, force=True)
    assert _names(tmp_path) == ["step"]
    assert (tmp_path / "step" / "manifest.json").read_bytes() == b"{}"


PATHS = [
    ("missing/a", "create the folder"),
    ("file/a", "a part of its path is a file"),
    ("folder", "not a regular file"),
    ("fifo", "not a regular file"),
]


@pytest.mark.parametrize(("path", "message"), PATHS, ids=[p for p, _ in PATHS])
def test_a_path_that_cannot_be_written_is_named(tmp_path, path, message):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OutputError, match=message):
        write_atomically(tmp_path / path, b"new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="you may write to"):
        write_atomically(tmp_path / "a", b"new")


def test_what_killed_writers_left_is_swept_and_live_ones_are_spared(tmp_path):
    dead, live = f"{atomic._host()}-999999999-aa", f"{atomic._host()}-{os.getpid()}-bb"
    for name in (f".a.{dead}.gradgraph-tmp", f".a.{live}.gradgraph-tmp", ".a.elsewhere-1-cc.gradgraph-tmp", ".b.txt"):
        (tmp_path / name).write_bytes(b"")
    write_atomically(tmp_path / "a", b"new")
    assert _names(tmp_path) == [".a.elsewhere-1-cc.gradgraph-tmp", f".a.{live}.gradgraph-tmp", ".b.txt", "a"]


def test_a_folder_whose_replacement_was_killed_comes_back(tmp_path):
    old = tmp_path / f".step.{atomic._host()}-999999999-aa.gradgraph-old"
    old.mkdir()
    (old / "manifest.json").write_bytes(b"{}")
    with pytest.raises(OutputError, match="not empty"):
        write_folder_atomically(tmp_path / "step", {"manifest.json": b"[]"})
    assert (tmp_path / "step" / "manifest.json").read_bytes() == b"{}"


FOLDERS = [
    ({"notes.txt": b"mine"}, True, "holds 'notes.txt'"),
    ({"train.onnx": b"", "run.ckpt": b"", "manifest.json": b"{}"}, True, "holds 'run.ckpt'"),
    ({"train.onnx": b""}, True, "has no manifest.json"),
    ({"manifest.json": b"not json"}, True, "has no manifest.json"),
    ({"manifest.json": b"{}"}, False, "not empty"),
]


@pytest.mark.parametrize(("there", "force", "message"), FOLDERS, ids=[m for *_, m in FOLDERS])
def test_a_folder_of_others_is_not_replaced(tmp_path, there, force, message):
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OutputError, match=message):
        write_folder_atomically(tmp_path, {"manifest.json": b"[]", "train.onnx": b"new"}, force)
    assert {n: (tmp_path / n).read_bytes() for n in _names(tmp_path)} == there


def test_a_folder_is_written_and_replaced_as_a_whole(tmp_path):
    path = tmp_path / "step"
    path.mkdir()  # an empty one may be there
    write_folder_atomically(path, {"manifest.json": json.dumps({"a": 1}).encode(), "old.onnx": b"1"})
    write_folder_atomically(path, {"manifest.json": b"{}", "new.onnx": iter([b"2", b"3"])}, force=True)
    assert _names(path) == ["manifest.json", "new.onnx"]
    assert (path / "new.onnx").read_bytes() == b"23"
    assert _names(tmp_path) == ["step"]


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".."])
def test_names_in_a_folder_are_plain(tmp_path, name):
    with pytest.raises(OutputError, match="use a plain name"):
        write_folder_atomically(tmp_path / "step", {name: b""})
    assert _names(tmp_path) == []


# --- saving models ------------------------------------------------------------


def _weighted(value=1.0):
    return model(ADD, [onnx.numpy_helper.from_array(np.full(3, value, np.float32), "w")])


@pytest.mark.parametrize("source", [lambda m: m, ir.from_proto], ids=["proto", "ir"])
def test_a_model_is_saved_and_loaded(tmp_path, source):
    save_model(source(_weighted()), tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"))
    assert load_model(tmp_path / "m.onnx").graph.initializers["w"].const_value.numpy().tolist() == [1, 1, 1]
    assert _names(tmp_path) == ["m.onnx"]


def test_external_data_are_brought_in_when_a_model_moves(tmp_path):
    path = _saved(tmp_path, external_model("w.bin"), np.ones(3, np.float32).tobytes())
    save_model(load_model(path), tmp_path / "copy.onnx")
    assert load_model(tmp_path / "copy.onnx").graph.initializers["w"].const_value.numpy().sum() == 3


@pytest.mark.parametrize("transform", [gg.vjp, gg.jvp], ids=["vjp", "jvp"])
def test_gradients_of_a_model_with_external_data_are_complete_files(tmp_path, transform):
    path = _saved(tmp_path, external_model("w.bin"), np.full(3, 2.0, np.float32).tobytes())
    found = transform(path, wrt="w")
    assert [t.data_location for t in found.graph.initializer] == [TensorProto.DEFAULT] * len(found.graph.initializer)
    assert {t.name: onnx.numpy_helper.to_array(t).tolist() for t in found.graph.initializer}["w"] == [2, 2, 2]


def test_a_model_with_external_data_becomes_a_step_that_stands_alone(tmp_path):
    path = _saved(tmp_path, external_model("w.bin"), np.full(3, 2.0, np.float32).tobytes())
    trainer = gg.Trainer(gg.build(path, "mse", gg.optim.sgd(0.1)).save(tmp_path / "step"), device="cpu")
    (path.parent / "w.bin").unlink()
    trainer.step({"x": np.zeros((2, 3), np.float32), "target": np.zeros((2, 3), np.float32)})
    assert trainer.parameters["w"] == pytest.approx(2.0 - 0.1 * 2 * 2.0 / 3)


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
