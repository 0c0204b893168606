"""Weights stay in the files that hold them, also inside the ``.onnx``: the same model as one that is read whole."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data

import gradgraph as gg
from benchmarks.large_models import backbone
from gradgraph.cli.app import run
from gradgraph.errors import BuildError, ModelError
from gradgraph.files import large_weights, models, streamed
from gradgraph.files.held_files import CAN_HOLD, own_file
from gradgraph.files.models import load_model, save_model, to_proto
from gradgraph.files.streamed import model_pieces
from gradgraph.files.untrusted import messages
from gradgraph.runtime.execution.predictor import Predictor
from tests.kit.lowered_networks import exported

pytestmark = pytest.mark.skipif(not CAN_HOLD, reason="Windows lets nobody replace a file that is open")

KINDS = [kind for kind in TensorProto.DataType.values() if kind not in (TensorProto.UNDEFINED, TensorProto.STRING)]


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LEAST_HELD", 1)
    monkeypatch.setattr(messages, "LEAST_APART", 1)
    monkeypatch.setattr(streamed, "LEAST_STREAMED", 1)
    monkeypatch.setattr(large_weights, "LEAST_KEPT", 1 << 20)


def every_kind(rng: np.random.Generator) -> onnx.ModelProto:
    """Weights of all types, odd and empty, in raw bytes or fields of their own; in bodies, functions, attributes."""
    weights = []
    for kind in KINDS:
        for dims in ((5,), (3, 0), (), (2, 3)):
            size = -(-int(np.prod(dims)) * ir.DataType(kind).bitwidth // 8)
            raw = rng.integers(0, 2, size).astype(np.uint8) if kind == TensorProto.BOOL else rng.bytes(size)
            if ir.DataType(kind).bitwidth < 8:
                raw = bytes(raw)[:-1] + bytes(min(size, 1))  # bits behind the last number are zero
            name = f"{TensorProto.DataType.Name(kind)} {dims}"
            weights.append(TensorProto(name=name, data_type=kind, dims=dims, raw_data=bytes(raw)))
    weights[0].doc_string = "a weight"
    helper.set_model_props(weights[3], {"ü": "b"})
    weights.append(helper.make_tensor("typed", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0]))
    weights.append(helper.make_tensor("text", TensorProto.STRING, [2], [b"a", b"b"]))
    rng.shuffle(weights)  # type: ignore[arg-type]
    inner = numpy_helper.from_array(np.float32([4, 5]), "inner")
    value = helper.make_tensor_value_info
    then = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["t"])], "then", [], [value("t", 1, [2])], [inner]
    )
    other = helper.make_graph([helper.make_node("Constant", [], ["e"], value=inner)], "else", [], [value("e", 1, [2])])
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.float32([6, 7]), "held"))
    nodes = [constant, helper.make_node("If", ["q"], ["i"], then_branch=then, else_branch=other)]
    nodes += [helper.make_node("Plus", ["i", "c"], ["y"], domain="own")]
    body = [helper.make_node("Constant", [], ["k"], value=inner), helper.make_node("Sum", ["a", "b", "k"], ["s"])]
    plus = helper.make_function("own", "Plus", ["a", "b"], ["s"], body, [helper.make_opsetid("", 21)])
    graph = helper.make_graph(nodes, "all", [value("q", TensorProto.BOOL, [])], [value("y", 1, [2])], weights)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=11, functions=[plus], doc_string="a model")
    helper.set_model_props(model, {"a": "b"})
    return model


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{f"every kind {seed}": lambda seed=seed: every_kind(np.random.default_rng(seed)) for seed in range(3)},
    **{name: lambda name=name: exported(name, "batch") for name in ("residual", "transformer")},
}


def outcome(path: Path) -> bytes | str:
    """What a model becomes where it is written again, or the sentence that refuses it."""
    try:
        return b"".join(model_pieces(load_model(path)))
    except ModelError as error:
        return str(error)
    except ir.serde.SerdeError as error:  # numbers of 6 bits with more bits behind them
        return str(error.__cause__)


def whole(path: Path) -> bytes | str:
    """``outcome`` of a model that is read at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "LEAST_HELD", 1 << 60)
        return outcome(path)


@pytest.mark.parametrize("least", [1, 100])
@pytest.mark.parametrize("name", MODELS)
def test_what_stays_in_the_file_is_what_is_read(
    name: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "LEAST_APART", least)
    monkeypatch.setattr(streamed, "LEAST_STREAMED", least)
    path = tmp_path / "m.onnx"
    path.write_bytes(MODELS[name]().SerializeToString())
    held, read = load_model(path), whole(path)
    assert isinstance(read, bytes) and b"".join(model_pieces(held)) == read
    weights = [v.const_value for v in held.graph.initializers.values() if v.const_value is not None]
    assert any(own_file(t) for t in weights) is (least == 1 or not name.startswith("every"))
    message = onnx.ModelProto.FromString(path.read_bytes())
    stored = {t.name: t for t in message.graph.initializer}
    for tensor in weights:
        proto = stored[tensor.name or ""]
        if own_file(tensor):
            assert tensor.tobytes() == proto.raw_data
        if tensor.dtype == ir.DataType.STRING or tensor.dtype.bitwidth == 6:  # of which onnx makes no array
            continue
        assert tensor.numpy().tobytes() == numpy_helper.to_array(proto).tobytes()
        assert (tensor.doc_string or "") == proto.doc_string


@pytest.mark.sweep(0.43)
@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_file_is_refused_as_one_that_is_read(seed: int, tmp_path: Path) -> None:
    """Bytes that are changed, cut, doubled or put elsewhere: the same model, or the same sentence."""
    rng = np.random.default_rng(seed)
    good, path, refused = every_kind(rng).SerializeToString(), tmp_path / "m.onnx", 0
    for _ in range(40):
        a, b = sorted(rng.integers(0, len(good), 2).tolist())
        damaged = (
            good[:a],
            good[:a] + good[b:],
            good + good[a:b],
            good + good,
            good[:a] + rng.bytes(int(rng.integers(1, 4))) + good[a + 1 :],
            good[:a] + good[a:b] * 2 + good[b:],
        )[rng.integers(6)]
        path.write_bytes(damaged or b"\0")
        found = outcome(path)
        assert found == whole(path)
        refused += isinstance(found, str)
    assert refused > 10


def _field(number: int, content: bytes) -> bytes:
    return messages.varint(number << 3 | 2) + messages.varint(len(content)) + content


_TENSOR = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], raw_data=bytes(8)).SerializeToString()
ODD = {
    "data twice": _TENSOR + _field(9, b"12345678"),
    "data of two kinds": _TENSOR + helper.make_tensor("", TensorProto.FLOAT, [2], [1.0, 2.0]).SerializeToString(),
    "a type twice": _TENSOR + TensorProto(data_type=TensorProto.INT32).SerializeToString(),
    "too short": TensorProto(name="w", data_type=1, dims=[3], raw_data=bytes(8)).SerializeToString(),
    "too long": TensorProto(name="w", data_type=1, dims=[1], raw_data=bytes(8)).SerializeToString(),
    "no such type": TensorProto(name="w", data_type=99, dims=[2], raw_data=bytes(8)).SerializeToString(),
    "text": TensorProto(name="w", data_type=TensorProto.STRING, dims=[2], raw_data=bytes(8)).SerializeToString(),
    "also elsewhere": _TENSOR + TensorProto(data_location=TensorProto.EXTERNAL).SerializeToString(),
    "a group": _TENSOR + b"\x53\x54",
    "a field that nobody knows": _TENSOR + _field(90, b"?"),
    "a long varint": _TENSOR + b"\x10" + b"\x81" * 11,
}


@pytest.mark.parametrize("name", ODD)
def test_a_tensor_that_is_written_oddly_is_read_as_before(name: str, tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    graph_bytes = model.graph.SerializeToString() + _field(5, ODD[name])
    model.ClearField("graph")
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString() + _field(7, graph_bytes))
    assert outcome(path) == whole(path)
    sparse = onnx.SparseTensorProto(dims=[4], values=TensorProto.FromString(_TENSOR))
    path.write_bytes(model.SerializeToString() + _field(7, graph_bytes + _field(15, sparse.SerializeToString())))
    assert "sparse" in str(whole(path)) or name in ("a group", "a long varint")
    assert outcome(path) == whole(path)


# --- what becomes of the file meanwhile -----------------------------------------------------------------


@pytest.fixture
def inline(tmp_path: Path) -> Path:
    """A model of 13 MB with all weights inside."""
    backbone(tmp_path / "base.onnx", 0.013, layers=1)
    (tmp_path / "one").mkdir()
    onnx.save(onnx.load(tmp_path / "base.onnx"), tmp_path / "one" / "m.onnx")
    return tmp_path / "one" / "m.onnx"


def built(path: Path) -> gg.Step:
    return gg.build(path, "cross_entropy", gg.optim.sgd(0.1), train="head.*")


def trained(step: gg.Step | Path) -> list[float]:
    trainer = gg.Trainer(step, device="cpu")
    width = int(trainer.manifest.inputs[0].shape[-1])
    data = {"x": np.random.default_rng(0).standard_normal((4, 16, width), np.float32), "target": np.arange(4)}
    return [float(trainer.step(data)["loss"]) for _ in range(2)] + [float(trainer.evaluate(data)["loss"])]


def weights_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


@pytest.mark.sweep(0)
def test_a_step_outlives_the_file_that_it_was_built_from(inline: Path, tmp_path: Path) -> None:
    """Replaced by another model or deleted, the file is still what was read; a pickle and a folder have their own."""
    step = built(inline)
    assert step.train.ByteSize() < inline.stat().st_size / 4
    expected = trained(built(inline).save(tmp_path / "before"))
    assert trained(step) == pytest.approx(expected, rel=1e-6)
    (inline.parent / "other").write_bytes(bytes(100))
    (inline.parent / "other").replace(inline)
    assert trained(step) == pytest.approx(expected, rel=1e-6)
    inline.unlink()
    copy = pickle.loads(pickle.dumps(step))
    assert not copy.bases
    assert trained(copy) == pytest.approx(expected, rel=1e-6)
    step.save(tmp_path / "after")
    assert (tmp_path / "after" / "frozen.bin").read_bytes() == (tmp_path / "before" / "frozen.bin").read_bytes()


@pytest.mark.sweep(0.08)
@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_weights_that_begin_between_two_numbers_are_read_right(
    shift: int, room: bool, inline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are packed from a temporary file, and from memory where there is no room for one."""
    model = load_model(inline)
    x = np.random.default_rng(0).standard_normal((4, 16, 520), np.float32)
    expected = Predictor(ir.from_proto(to_proto(model)), device="cpu")({"x": x})
    model.doc_string = "d" * shift
    save_model(model, tmp_path / "shifted.onnx")
    aside = tmp_path / "aside"
    monkeypatch.setattr("tempfile.tempdir", str(aside))
    monkeypatch.setattr("gradgraph.runtime.execution.frozen_weights.LEAST_KEPT", 1)
    if room:
        aside.mkdir()
    predictor = Predictor(load_model(tmp_path / "shifted.onnx"), device="cpu")
    for name, array in predictor({"x": x}).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5)
    if room:
        assert any(aside.iterdir()) == _between(tmp_path / "shifted.onnx")
        del predictor
        gc.collect()
        assert not any(aside.iterdir())


def _between(path: Path) -> bool:
    """Does a large weight begin at another byte than a multiple of four?"""
    return any(t.offset % 4 for t in large_weights.large_outside(load_model(path)))


@pytest.mark.sweep(0)
def test_a_step_is_taken_apart_while_its_file_is_the_same(inline: Path) -> None:
    """The model is opened again; its weights are those that the step holds."""
    step = built(inline)
    assert trained(step.apart()) == pytest.approx(trained(step), rel=1e-6)
    shutil.copyfile(inline, inline.parent / "other")
    (inline.parent / "other").replace(inline)
    with pytest.raises(BuildError, match="has changed since it was built"):
        step.apart()


WRITTEN: dict[str, Callable[[bytes], bytes]] = {
    "shorter": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"\0",
    "as long": lambda content: content[:-9] + bytes(9),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_file_that_is_written_over_is_refused(how: str, inline: Path, tmp_path: Path) -> None:
    """In place: nothing of the new one is taken for weights of the old one."""
    step, model = built(inline), load_model(inline)
    trainer = gg.Trainer(step, device="cpu")
    inline.write_bytes(WRITTEN[how](inline.read_bytes()))
    os.utime(inline, ns=(1, inline.stat().st_mtime_ns + 10**7))  # as if the clock had moved on
    width = int(step.manifest.inputs[0].shape[-1])
    uses: list[Callable[[], Any]] = [
        lambda: trainer.step({"x": np.zeros((2, 16, width), np.float32), "target": np.zeros(2, int)}),
        lambda: trainer.export(tmp_path / "exported.onnx"),
        lambda: step.save(tmp_path / "step"),
        lambda: pickle.dumps(step),
        lambda: save_model(model, tmp_path / "out.onnx"),
        lambda: to_proto(model),
    ]
    for use in uses:
        with pytest.raises(ModelError, match="was overwritten or truncated since it was opened"):
            use()
    assert not any((tmp_path / name).exists() for name in ("exported.onnx", "step", "out.onnx"))


IN_PLACE: dict[str, Callable[[Path], Any]] = {
    "new head": lambda path: gg.new_head(path, 7, output="logits", out=path),
    "lora": lambda path: gg.lora(path, "*.q.*", out=path),
    "cut": lambda path: gg.surgery.cut(path, outputs="pooled", out=path),
    "shell": lambda path: run(["surgery", str(path), "--new-head", "7", "-o", str(path)]),
    "export": lambda path: gg.Trainer(built(path), device="cpu").export(path),
}


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_result_takes_the_place_of_its_source(name: str, outside: bool, inline: Path) -> None:
    if outside:
        onnx.save(onnx.load(inline), inline, save_as_external_data=True, location="m.onnx.data")
    other = inline.parent.parent / "other" / "m.onnx"
    shutil.copytree(inline.parent, other.parent)
    before = weights_of(inline)
    result = IN_PLACE[name](inline)
    after = weights_of(inline)
    shared = [n for n in before if n in after and not n.startswith("head")]
    assert len(shared) > 10 and all(np.array_equal(before[n], after[n]) for n in shared)
    assert bool([p for p in inline.parent.glob("*.data") if p.stat().st_size]) is outside  # it lies as it did
    if name in ("new head", "lora"):  # what comes back has the weights of the old file, whatever the new one says
        assert all(np.array_equal(result.graph.initializers[n].const_value.numpy(), before[n]) for n in shared)


def test_a_trainer_exports_over_its_source_twice(inline: Path) -> None:
    before, trainer = weights_of(inline), gg.Trainer(built(inline), device="cpu")
    for _ in range(2):
        trainer.export(inline)
        after = weights_of(inline)
        assert all(np.array_equal(before[n], after[n]) for n in before if n in after)


# --- external data --------------------------------------------------------------------------------------


def test_one_handle_serves_all_tensors_of_a_file(tmp_path: Path) -> None:
    """Systems give a process as few as 256."""
    weights = [numpy_helper.from_array(np.full(300, i, np.float32), f"w{i}") for i in range(300)]
    nodes = [helper.make_node("Add", ["x" if i == 0 else f"y{i - 1}", f"w{i}"], [f"y{i}"]) for i in range(300)]
    ends = [helper.make_tensor_value_info(n, 1, ["n", 300]) for n in ("x", "y299")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx",
              save_as_external_data=True, size_threshold=0, location="m.data")  # fmt: skip
    handles = Path("/proc/self/fd")
    if not handles.is_dir():
        pytest.skip("nothing tells how many there are")
    before, model = len(list(handles.iterdir())), load_model(tmp_path / "m.onnx")
    assert all(int(v.const_value.numpy()[0]) == i for i, v in enumerate(model.graph.initializers.values()))  # type: ignore[union-attr]
    assert len(list(handles.iterdir())) - before < 5


def test_external_data_in_bodies_and_attributes_come_with_the_model(tmp_path: Path) -> None:
    """Also the smallest, which no data file of ours holds."""
    model = every_kind(np.random.default_rng(0))
    del model.graph.initializer[:]
    convert_model_to_external_data(model, location="m.data", size_threshold=0, convert_attribute=True)
    (tmp_path / "a").mkdir()
    onnx.save(model, tmp_path / "a" / "m.onnx")
    assert (tmp_path / "a" / "m.data").stat().st_size
    save_model(load_model(tmp_path / "a" / "m.onnx"), tmp_path / "n.onnx")
    for found in (str(tmp_path / "n.onnx"), to_proto(load_model(tmp_path / "a" / "m.onnx")).SerializeToString()):
        session = ort.InferenceSession(found, providers=["CPUExecutionProvider"])
        assert session.run(None, {"q": np.array(True)})[0].tolist() == [14, 17]
