"""Large weights stay in the file of the model: in a step that is built, in folders that share them, and in sessions."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx_ir as ir
import onnxruntime as ort
import pytest

import gradgraph as gg
from benchmarks.large_models import backbone, language_model
from gradgraph.cli.app import run
from gradgraph.errors import ModelError, OutputError
from gradgraph.files import large_weights, spilled
from gradgraph.files.external import is_external
from gradgraph.files.held_files import HeldFile
from gradgraph.files.models import load_model
from gradgraph.runtime.execution import memory, session, step_session
from gradgraph.runtime.execution.frozen_weights import FrozenWeights
from gradgraph.runtime.execution.memory import Prediction
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.step import bases
from tests.kit.npz import npz

MAPPED, PACKED = RuntimeOptions(pack_weights=False), RuntimeOptions(pack_weights=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two blocks with 12 MB of external data; weights of 1 MB and more are six of its products'."""
    path = tmp_path_factory.mktemp("base") / "model" / "base.onnx"
    path.parent.mkdir()
    backbone(path, 0.026, layers=2)
    return path


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_weights, "LEAST_KEPT", 1 << 20)


def built(model: Path | ir.Model) -> gg.Step:
    return gg.build(model, "cross_entropy", gg.optim.sgd(0.1), train="head.*")


def batch(step: gg.Step) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, *(int(d) for d in step.manifest.inputs[0].shape[1:])), np.float32)
    return {"x": x, "target": np.arange(4)}


def locations(model: onnx.ModelProto) -> set[str]:
    return {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}


def trained(step: gg.Step | Path, options: RuntimeOptions, **more: Any) -> tuple[gg.Trainer, list[float]]:
    trainer = gg.Trainer(step, device="cpu", options=options, **more)
    data = batch(trainer.definition)
    losses = [float(trainer.step(data)["loss"]) for _ in range(3)]
    return trainer, [*losses, trainer.evaluate(data)["loss"], float(np.abs(trainer.predict(data["x"])["logits"]).sum())]


def test_a_step_that_is_built_leaves_large_weights_where_they_lie(model: Path) -> None:
    step = built(model)
    data = str(model.with_name("base.onnx.data"))
    assert locations(step.train) == locations(step.eval) == {data} and locations(step.init) == set()
    held = sum(len(t.raw_data) for t in step.train.graph.initializer)
    assert held < 1 << 20 < Path(data).stat().st_size // 2
    whole = step.resolved("eval")
    assert not locations(whole)
    source = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}
    assert all(
        np.array_equal(onnx.numpy_helper.to_array(t), source[t.name])
        for t in whole.graph.initializer
        if t.name in source
    )


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
def test_a_file_that_changes_before_a_copy_of_a_step_reads_it_is_refused(how: str, model: Path, tmp_path: Path) -> None:
    moved = tmp_path / model.name
    for file in (model, model.with_name("base.onnx.data")):
        shutil.copy(file, tmp_path)
    step, data = built(moved), tmp_path / "base.onnx.data"
    content = pickle.dumps(step)
    time.sleep(0.01)  # file systems have times in steps of some milliseconds
    if how == "replaced":
        (tmp_path / "new").write_bytes(bytes(data.stat().st_size))
        (tmp_path / "new").replace(data)
    else:
        data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(ModelError, match=r"base\.onnx\.data'.* has changed since the step was built"):
        gg.Trainer(pickle.loads(content), device="cpu").step(batch(step))


def test_few_weights_are_taken_in(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_weights, "LEAST_KEPT", 1 << 26)
    step = built(model)
    assert not locations(step.train) and not step.bases
    with pytest.raises(OutputError, match="there is nothing to share"):
        step.save(model.parent / "nothing", share_weights=True)


@pytest.mark.sweep(0)
def test_all_kinds_of_folders_and_sessions_train_alike(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = built(model)
    step.save(tmp_path / "own")
    step.save(model.parent / "shared", share_weights=True)
    with monkeypatch.context() as patch:
        patch.setattr(large_weights, "LEAST_KEPT", 1 << 40)
        built(model).save(tmp_path / "copied")
    for name in ("train.onnx", "eval.onnx", "init.onnx", "frozen.bin", "manifest.json"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "copied" / name).read_bytes()
    files = {p.name: p.stat().st_size for p in (model.parent / "shared").iterdir()}
    assert "frozen.bin" not in files and sum(files.values()) < 1 << 20
    known, expected = trained(tmp_path / "own", PACKED)
    for found in (step, pickle.loads(pickle.dumps(step)), tmp_path / "own", model.parent / "shared"):
        other, results = trained(found, MAPPED)
        np.testing.assert_allclose(results, expected, rtol=1e-5)
        _same_weights(other.export(), known.export())


@pytest.mark.sweep(0)
@pytest.mark.parametrize("pack", ["auto", True])
def test_what_evaluates_beside_training_packs_no_second_copy(
    pack: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = built(model)
    expected = trained(step, PACKED)[1]
    for module in ("session", "step_session"):
        monkeypatch.setattr(f"gradgraph.runtime.execution.{module}.LEAST_PASSED", 1)
    trainer, found = trained(step, RuntimeOptions(pack_weights=pack))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    read, passing_through = [], FrozenWeights.passing_through

    def counted(weights: FrozenWeights) -> Any:
        read.append(weights)
        return passing_through(weights)

    monkeypatch.setattr(FrozenWeights, "passing_through", counted)
    assert trainer.evaluate(batch(step))["loss"] == found[3]
    assert len(read) == (pack == "auto")


@pytest.mark.sweep(0)
def test_each_session_copies_weights_as_predicted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, told, usual = built(model), list[bool](), session.copies_weights
    for module in (step_session, memory):
        monkeypatch.setattr(module, "LEAST_PASSED", 1)

    def listening(*given: Any) -> bool:
        told.append(usual(*given))
        return told[-1]

    monkeypatch.setattr(session, "copies_weights", listening)  # of sessions that are opened
    trainer, whole = gg.Trainer(step, device="cpu"), batch(step)
    trainer.step(whole)
    trainer.step({name: array[:1] for name, array in whole.items()})
    trainer.evaluate(whole)
    trainer.predict(whole)
    found = Prediction.here(step, None, {})
    assert told[-4:] == [True, False, False, True]
    large = sum(t.nbytes for t in large_weights.large_outside(load_model(model)))
    assert found.training.weights >= large, "mapped, where the first session reads its copies"
    assert found.evaluation.weights < large / 4 < large <= found.prediction.weights


def _same_weights(a: onnx.ModelProto, b: onnx.ModelProto) -> None:
    first, second = ({t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in (a, b))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_allclose(array, second[name], rtol=1e-4, atol=1e-6)


@pytest.mark.sweep(0)
def test_a_folder_that_shares_moves_with_its_base(model: Path, tmp_path: Path) -> None:
    built(model).save(model.parent / "step", share_weights=True, force=True)
    shutil.copytree(model.parent, tmp_path / "elsewhere")
    step = gg.Step.load(tmp_path / "elsewhere" / "step")
    assert locations(step.train) == {"../base.onnx.data"}
    expected = trained(step, MAPPED)[1]
    step.save(tmp_path / "own")  # with a copy
    assert (tmp_path / "own" / "frozen.bin").exists() and trained(tmp_path / "own", MAPPED)[1] == expected
    deep = tmp_path / "deep" / "er" / "step"
    deep.parent.mkdir(parents=True)
    step.save(deep, share_weights=True)
    assert locations(gg.Step.load(deep).train) == {"../../../elsewhere/base.onnx.data"}


def _of_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "step" / "manifest.json"
        data = json.loads(path.read_text())
        change(data["base_files"])
        path.write_text(json.dumps(data))

    return edit


def _named(name: str) -> Callable[[Path], None]:
    return _of_manifest(lambda files: files.update({name: files.pop("../base.onnx.data")}))


def _spoil(folder: Path) -> None:
    with (folder / "base.onnx.data").open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"\0\1\2\3")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda p: (p / "base.onnx.data").unlink(),
        "is missing; restore it, or build the step again",
    ),
    "moved alone": (lambda p: (p / "sub").mkdir() or (p / "base.onnx.data").rename(p / "sub" / "x"), "is missing"),
    "cut": (lambda p: os.truncate(p / "base.onnx.data", 1 << 21), "bytes instead of"),
    "changed": (_spoil, "has changed since the step was built; restore it"),
    "fifo": (lambda p: ((p / "base.onnx.data").unlink(), os.mkfifo(p / "base.onnx.data")), "is not a regular file"),
    "absolute": (_named("/etc/passwd"), "its base_files are invalid"),
    "drive": (_named("c:/base.onnx.data"), "its base_files are invalid"),
    "share": (_named("\\\\host\\share"), "its base_files are invalid"),
    "no digest": (_of_manifest(lambda f: f["../base.onnx.data"].pop("digest")), "its base_files are invalid"),
    "empty digest": (_of_manifest(lambda f: f["../base.onnx.data"].update(digest="")), "its base_files are invalid"),
    "tiny": (_of_manifest(lambda f: f["../base.onnx.data"].update(bytes=100)), "its base_files are invalid"),
    "not named": (_of_manifest(lambda f: f.clear()), "are in '../base.onnx.data'"),
    "list": (_of_manifest(lambda f: f.update({"../base.onnx.data": []})), "its base_files are invalid"),
}


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_base_that_is_not_as_it_was_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    damage, words = DAMAGE[name]
    shutil.copytree(model.parent, tmp_path / "m", ignore=shutil.ignore_patterns("s*"))
    built(tmp_path / "m" / "base.onnx").save(tmp_path / "m" / "step", share_weights=True)
    damage(tmp_path / "m")
    with pytest.raises(ModelError) as caught:
        trained(tmp_path / "m" / "step", MAPPED)
    assert words in str(caught.value) and len(str(caught.value)) < 500


def test_a_base_cannot_be_another_secret(model: Path, tmp_path: Path) -> None:
    """A folder that names a file which its writer did not have gets no byte of it."""
    built(model).save(model.parent / "step", share_weights=True, force=True)
    shutil.copytree(model.parent / "step", tmp_path / "inner" / "step")
    (tmp_path / "inner" / "base.onnx.data").write_bytes(os.urandom(model.with_name("base.onnx.data").stat().st_size))
    with pytest.raises(ModelError, match="has changed"):
        gg.Trainer(tmp_path / "inner" / "step", device="cpu").export()


@pytest.mark.sweep(0)
def test_a_large_model_is_exported_beside_its_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained(built(model), MAPPED)
    whole = trainer.export()
    monkeypatch.setattr("gradgraph.files.models.INLINE_LIMIT", 1 << 20)
    returned = trainer.export(tmp_path / "out.onnx")
    assert locations(returned) == {"out.onnx.data"} and (tmp_path / "out.onnx").stat().st_size < 1 << 20
    _same_weights(onnx.load(tmp_path / "out.onnx"), whole)
    monkeypatch.setattr("gradgraph.files.models.PROTOBUF_LIMIT", 1 << 20)
    with pytest.raises(ModelError, match=r"a ModelProto can store at most .* the path of export"):
        trainer.export()


def test_what_export_returns_is_a_message_of_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever calls ``CopyFrom``, as functions of onnx do, gets the weights, too; no file is held open for it."""
    monkeypatch.setattr("gradgraph.files.models.LEAST_HELD", 1 << 20)
    trainer = gg.Trainer(gg.build(model, "cross_entropy", gg.optim.sgd(0.1)), device="cpu")
    path, copied, whole = tmp_path / "out.onnx", onnx.ModelProto(), trainer.export()
    returned = trainer.export(path)
    written = onnx.load(path)
    path.write_bytes(b"another one")
    copied.CopyFrom(returned)
    assert type(returned) is onnx.ModelProto and copied == returned == written
    _same_weights(returned, whole)
    onnx.checker.check_model(onnx.compose.add_prefix(returned, "a/"), full_check=True)


def test_what_lay_in_a_file_lies_in_one_again(model: Path, tmp_path: Path) -> None:
    """Otherwise a small change would bring all weights into memory."""
    gg.lora(model, "*.q.*", out=tmp_path / "adapted.onnx")
    written = onnx.load(tmp_path / "adapted.onnx", load_external_data=False)
    assert locations(written) == {"adapted.onnx.data"}
    step = gg.build(tmp_path / "adapted.onnx", "cross_entropy", train="head.*")
    assert locations(step.train) == {str(tmp_path / "adapted.onnx.data")}


# --- models above protobuf's 2 GB, here above 1 MB ------------------------------------------------------------------


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradgraph.files.models.PROTOBUF_LIMIT", 1 << 21)
    monkeypatch.setattr("gradgraph.files.models.INLINE_LIMIT", 1 << 20)
    monkeypatch.setattr("gradgraph.runtime.execution.session.MOST_PACKED", 0)


TRANSFORMS: dict[str, Callable[[Path, Path], Any]] = {
    "vjp": lambda m, out: gg.vjp(m, outputs="logits", wrt="head.*", out=out),
    "jvp": lambda m, out: gg.jvp(m, wrt="head.*", out=out),
    "value_and_grad": lambda m, out: gg.value_and_grad(m, output="total", wrt="head.*", out=out),
    "new_head": lambda m, out: gg.new_head(m, 7, output="logits", out=out),
    "lora": lambda m, out: gg.lora(m, "*.q.*", out=out),
    "cut": lambda m, out: gg.surgery.cut(m, outputs="pooled", out=out),
}


@pytest.mark.sweep(0.64)
@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_large_models_write_them_beside_their_weights(name: str, model: Path, tmp_path: Path) -> None:
    TRANSFORMS[name](model, tmp_path / "out.onnx")
    slim = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    assert locations(slim) == {"out.onnx.data"} and slim.ByteSize() < 1 << 20
    held = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out.onnx").graph.initializer}
    source = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}
    assert all(np.array_equal(held[n], source[n]) for n in source if n in held and not n.startswith("head"))
    onnx.checker.check_model(tmp_path / "out.onnx")
    with pytest.raises(ModelError, match="write the result to a file"):
        TRANSFORMS[name](model, None)  # type: ignore[arg-type]


@pytest.mark.sweep(0)
@pytest.mark.usefixtures("little_room")
def test_commands_take_large_models(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ok(*words: object) -> str:
        code = run([str(word) for word in words])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    checked = json.loads(ok("check", model, "--wrt", "head.bias", "--json"))
    assert checked["precision"] == "float64" and checked["ok"]
    ok("inspect", model)
    ok("build", model, "--train", "head.*", "--share-weights", "-o", model.parent / "by-shell", "--force")
    shared = model.parent / "by-shell"
    assert not (shared / "frozen.bin").exists()
    ok("inspect", shared)
    data = batch(gg.Step.load(shared))
    np.savez(tmp_path / "data.npz", **data)
    ok("train", shared, "--data", tmp_path / "data.npz", "--epochs", 1, "--export", tmp_path / "trained.onnx")
    assert locations(onnx.load(tmp_path / "trained.onnx", load_external_data=False)) == {"trained.onnx.data"}
    ok("export", shared, "-o", tmp_path / "first.onnx")
    for source in (shared, tmp_path / "first.onnx", model):
        untrained = ["--untrained"] if source.is_dir() else []
        ok("predict", source, *untrained, "--data", tmp_path / "data.npz", "-o", tmp_path / f"{source.name}.npz")
    found = [npz(tmp_path / f"{n}.npz")["logits"] for n in ("by-shell", "first.onnx", "base.onnx")]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)


@pytest.mark.sweep(0)
def test_weights_of_four_bits_stay_in_the_file(tmp_path: Path) -> None:
    """Also the packed ones: in the step, in a folder that shares them, and in sessions that map them."""
    language_model(tmp_path / "base.onnx", 0.02, layers=1)
    adapted = gg.lora(ir.load(tmp_path / "base.onnx"), "*.q*", rank=2)
    step = gg.build(adapted, "cross_entropy", gg.optim.sgd(0.1))
    outside = {t.name for t in step.train.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    assert {"tokens.weight", "head.weight"} <= outside
    step.save(tmp_path / "shared", share_weights=True)
    step.save(tmp_path / "own")
    assert sum(p.stat().st_size for p in (tmp_path / "shared").iterdir()) < 2_500_000
    rng = np.random.default_rng(0)
    data = {"ids": rng.integers(0, 100, (2, 128)), "target": rng.integers(0, 100, 256)}
    losses = []
    for source in (step, tmp_path / "shared", tmp_path / "own"):
        for options in (MAPPED, PACKED):
            trainer = gg.Trainer(source, device="cpu", options=options)
            losses.append([float(trainer.step(data)["loss"]) for _ in range(2)])
    np.testing.assert_allclose(losses, [losses[0]] * len(losses), rtol=1e-5)
    exported = {t.name: t.raw_data for t in trainer.export().graph.initializer}
    stored = {t.name: t.raw_data for t in onnx.load(tmp_path / "base.onnx").graph.initializer}
    assert exported["head.weight"] == stored["head.weight"]


# --- weights in memory that protobuf cannot hold -----------------------------------------------------------------


def in_memory(model: Path) -> ir.Model:
    work = ir.load(model)
    for value in work.graph.initializers.values():
        value.const_value = ir.tensor(value.const_value.numpy().copy(), name=value.name)
    return work


def temporary(step: gg.Step) -> list[Path]:
    return [base.path for base in step.bases.values() if base.folder is not None]


@pytest.fixture
def _little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bases, "MOST_IN_MEMORY", 1 << 20)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()


@pytest.mark.sweep(0)
@pytest.mark.usefixtures("_little_memory")
def test_a_model_in_memory_that_no_message_holds_goes_the_whole_way(model: Path, tmp_path: Path) -> None:
    source = in_memory(model)
    before = {name: v.const_value for name, v in source.graph.initializers.items()}
    step = built(source)
    assert {name: v.const_value for name, v in source.graph.initializers.items()} == before  # they are the caller's
    (file,) = temporary(step)
    assert file.parent.parent == tmp_path / "temporary"
    assert locations(step.train) == locations(step.eval) == {str(file)}
    trainer, found = trained(step, MAPPED)
    np.testing.assert_array_equal(found, trained(built(model), MAPPED)[1])
    trainer.export(tmp_path / "out.onnx")
    x = batch(step)["x"]
    wanted = trainer.predict(x)["logits"]
    exported = trainer.exported()
    other = pickle.loads(pickle.dumps(step))
    assert other.eval == step.eval
    step.save(tmp_path / "step")
    assert trained(tmp_path / "step", MAPPED)[1] == found
    with pytest.raises(OutputError, match="there is nothing to share"):
        step.save(tmp_path / "shared", share_weights=True)
    del step, trainer, other
    gc.collect()
    assert not file.parent.exists()
    for of in (exported, tmp_path / "out.onnx"):  # both have what they need
        again = gg.Trainer(gg.build(of, "cross_entropy", train="head.*"), device="cpu", options=MAPPED)
        np.testing.assert_array_equal(again.predict(x)["logits"], wanted)


@pytest.mark.sweep(0)
@pytest.mark.usefixtures("_little_memory")
def test_no_room_for_them_is_said(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OutputError("cannot write 'weights.data': no space left on device")

    monkeypatch.setattr(spilled, "store_outside", full)
    with pytest.raises(OutputError, match=r"cannot be written to a temporary file.*TMPDIR"):
        built(in_memory(model))
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_an_optimized_model_contains_no_weights_of_several_folders(tmp_path: Path) -> None:
    """They are all read below one folder, and none is written into the model that onnxruntime optimized."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(64, 64)).astype(np.float32) for name in ("near", "far")}
    files = {name: tmp_path / name / "w.data" for name in arrays}
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[b, 64] x) => (float[b, 64] y)'
        "{ h = MatMul (x, near) y = MatMul (h, far) }"
    )
    for name, array in arrays.items():
        files[name].parent.mkdir()
        files[name].write_bytes(array.tobytes())
        tensor = onnx.TensorProto(name=name, dims=array.shape, data_type=onnx.TensorProto.FLOAT)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", "0"), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=value)
        model.graph.initializer.append(tensor)
    held = {}
    for name, path in files.items():
        with path.open("rb") as file:
            held[name] = HeldFile(path, file, own=False)
    weights = FrozenWeights(lambda t: held[t.name], list(model.graph.initializer))
    settings = ort.SessionOptions()
    settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    slim = weights.given_to(settings, model, copied=False)
    session = ort.InferenceSession(slim.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    x = rng.normal(size=(2, 64)).astype(np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ arrays["near"] @ arrays["far"], rtol=1e-3, atol=1e-3)
    written = onnx.load(tmp_path / "optimized.onnx", load_external_data=False)
    assert all(is_external(t) for t in written.graph.initializer) and len(written.graph.initializer) == 2
