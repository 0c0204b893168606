"""Weight files that change under a step or a model: each use refuses other bytes, and none computes with them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.errors import BuildError, ModelError
from gradgraph.files import large_weights
from gradgraph.files.held_files import HeldFile
from gradgraph.files.models import load_model, save_model
from gradgraph.parallel.fingerprints import digest_of_step
from gradgraph.runtime.execution import openings
from gradgraph.runtime.execution.binding import BoundSession
from gradgraph.runtime.execution.computing import ComputingSession
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.runtime.execution.session import RuntimeOptions

WIDTH, DATA = 192, "weights.bin"  # products of 147 KB
X = np.random.default_rng(5).normal(size=(4, WIDTH)).astype(np.float32)
BATCH = {"x": X, "target": np.arange(4)}
OTHER = {name: array[:3] for name, array in BATCH.items()}
REFUSED = r"' ?, from which weights are read, was overwritten or truncated since it was opened; restore it"
KINDS = ["built", "folder", "shared"]
needs_posix = pytest.mark.skipif(os.name == "nt", reason="Windows neither changes nor replaces an open file")


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_weights, "LEAST_KEPT", 1 << 16)


def network(path: Path, seed: int = 0) -> Path:
    """Write a network of a product, a product of a computed weight, and a head, with its weights in ``DATA``."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "head.weight": (WIDTH, 4), "head.bias": (4,)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Neg", ["v"], ["vn"], "negated"),
        helper.make_node("MatMul", ["b", "vn"], ["c"], "second"),
        helper.make_node("Gemm", ["c", "head.weight", "head.bias"], ["logits"], "head"),
    ]
    arrays = {n: rng.normal(size=s).astype(np.float32) / WIDTH**0.5 for n, s in shapes.items()}
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", WIDTH])
    y = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 4])
    graph = helper.make_graph(nodes, "n", [x], [y], [numpy_helper.from_array(a, n) for n, a in arrays.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=DATA)
    return path


def built(model: Any) -> gg.Step:
    return gg.build(model, "cross_entropy", gg.optim.sgd(0.1), train="head.*")


def opened(kind: str, folder: Path, pack: bool = False) -> tuple[gg.Trainer, Path]:
    """Return a trainer that maps weights, and their file."""
    step: Any = built(network(folder / "model" / "m.onnx"))
    data = folder / "model" / DATA
    if kind != "built":
        step.save(folder / "step", share_weights=kind == "shared")
        step = folder / "step"
        data = data if kind == "shared" else step / "frozen.bin"
    return gg.Trainer(step, device="cpu", options=RuntimeOptions(pack_weights=pack)), data


def overwrite(file: Path) -> None:
    """Overwrite a file in place, as if the clock had moved on: file systems have times in steps of milliseconds."""
    before = file.stat().st_mtime_ns
    file.write_bytes(bytes(file.stat().st_size))
    os.utime(file, ns=(1, before + 10**7))


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(bytes(file.stat().st_size))
    other.replace(file)


USES: dict[str, Callable[[gg.Trainer, Path], Any]] = {
    "step": lambda t, out: t.step(BATCH),
    "step of another shape": lambda t, out: t.step(OTHER),
    "fit": lambda t, out: t.fit(BATCH, epochs=1, batch_size=4, progress=False),
    "keep_features": lambda t, out: t.fit(BATCH, epochs=1, batch_size=4, progress=False, keep_features=True),
    "evaluate": lambda t, out: t.evaluate(BATCH),
    "predict": lambda t, out: t.predict(X),
    "worst": lambda t, out: t.worst(BATCH, 1),
    "save": lambda t, out: t.save(out / "c.ckpt"),
    "export": lambda t, out: t.export(),
    "export_file": lambda t, out: t.export_file(out / "e.onnx"),
    "exported": lambda t, out: t.exported(),
    "Step.save": lambda t, out: t.definition.save(out / "again"),
    "Step.resolved": lambda t, out: t.definition.resolved("eval"),
    "another trainer": lambda t, out: gg.Trainer(t.definition, device="cpu").predict(X),
}


@needs_posix
@pytest.mark.parametrize("pack", [False, True], ids=["mapped", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_use_of_a_step_computes_with_an_overwritten_file(kind: str, pack: bool, tmp_path: Path) -> None:
    trainer, data = opened(kind, tmp_path, pack)
    for name in ("step", "evaluate", "predict"):
        USES[name](trainer, tmp_path)
    exported, steps = trainer.exported(), trainer.progress.steps
    overwrite(data)
    for use in [*USES.values(), lambda t, out: save_model(exported, out / "x.onnx")]:
        with pytest.raises(ModelError, match=rf"{data.name}{REFUSED}"):
            use(trainer, tmp_path)
    assert trainer.progress.steps == steps
    assert not any((tmp_path / name).exists() for name in ("c.ckpt", "e.onnx", "again", "x.onnx"))
    assert set(trainer.state_dict()) >= {"head.weight"}


@needs_posix
@pytest.mark.parametrize("kind", KINDS)
def test_every_use_of_a_step_reads_a_file_that_was_replaced_or_removed(kind: str, tmp_path: Path) -> None:
    def results(change: Callable[[Path], None] | None, at: Path) -> list[Any]:
        trainer, data = opened(kind, at)
        USES["evaluate"](trainer, at)
        if change:
            change(data)
        found = [USES[name](trainer, at) for name in ("step of another shape", "evaluate", "predict")]
        trainer.export_file(at / "e.onnx")
        written = {t.name: numpy_helper.to_array(t) for t in onnx.load(at / "e.onnx").graph.initializer}
        return [*found, written]

    wanted = results(None, tmp_path / "0")
    for i, change in enumerate((replace, Path.unlink), 1):
        np.testing.assert_equal(results(change, tmp_path / str(i)), wanted)


@needs_posix
def test_a_file_that_changes_in_the_last_step_of_an_epoch_is_refused(tmp_path: Path) -> None:
    class Change:
        def on_step(self, trainer: gg.Trainer, *_: object) -> None:
            overwrite(data)

    trainer, data = opened("built", tmp_path)
    with pytest.raises(ModelError, match=REFUSED):
        trainer.fit(BATCH, epochs=1, batch_size=4, progress=False, callbacks=[Change()])
    assert trainer.progress.steps == 1


@needs_posix
@pytest.mark.parametrize("use", ["keep_features", "evaluate", "predict", "worst"])
def test_a_file_that_changes_in_the_last_run_of_a_use_is_refused(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features of it are not kept either."""
    trainer, data = opened("built", tmp_path)
    for name in ("step", "evaluate", "predict"):
        USES[name](trainer, tmp_path)

    def change(*_: Any, **__: Any) -> Any:
        try:
            return run(*_, **__)
        finally:
            overwrite(data)

    name = "run" if use in ("evaluate", "worst") else "_computed"
    owner = BoundSession if name == "run" else ComputingSession
    run = getattr(owner, name)
    monkeypatch.setattr(owner, name, change)
    steps = trainer.progress.steps
    with pytest.raises(ModelError, match=REFUSED):
        USES[use](trainer, tmp_path)
    assert trainer.progress.steps == steps


@needs_posix
@pytest.mark.parametrize("change", [overwrite, replace, Path.unlink])
def test_a_file_that_changes_while_onnxruntime_reads_it_is_refused(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, data = opened("built", tmp_path, pack=True)

    def slowly(*arguments: Any, **more: Any) -> Any:
        change(data)
        return start(*arguments, **more)

    start = RuntimeOptions.session_type
    monkeypatch.setattr(RuntimeOptions, "session_type", property(lambda self: lambda *a, **k: slowly(self, *a, **k)))
    with pytest.raises(ModelError, match=rf"{DATA}', .* was (overwritten|replaced or removed)"):
        trainer.predict(X)


@needs_posix
def test_a_predictor_refuses_an_overwritten_file(tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx")
    for model in (load_model(path), ir.load(path)):
        predictor = Predictor(model, device="cpu", packs=False)
        predictor({"x": X})
        overwrite(tmp_path / DATA)
        with pytest.raises(ModelError, match=rf"{DATA}{REFUSED}"):
            predictor({"x": X})


@needs_posix
def test_a_model_that_was_loaded_before_its_file_changed_is_built_from_its_own_bytes(tmp_path: Path) -> None:
    path = network(tmp_path / "m.onnx")
    wanted = gg.Trainer(built(path), device="cpu").evaluate(BATCH)
    model = load_model(path)
    replace(tmp_path / DATA)
    step = built(model)
    assert gg.Trainer(step, device="cpu").evaluate(BATCH) == wanted
    with pytest.raises(ModelError, match=rf"{DATA}', .* has changed since the step was built"):
        step.save(tmp_path / "shared", share_weights=True)
    step = built(path)
    step.apart()
    replace(tmp_path / DATA)
    with pytest.raises(BuildError, match="the model of this step has changed since it was built"):
        step.apart()
    path = network(tmp_path / "m.onnx")
    model = load_model(path)
    overwrite(tmp_path / DATA)
    with pytest.raises(ModelError, match=rf"{DATA}{REFUSED}"):
        gg.Trainer(built(model), device="cpu").evaluate(BATCH)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Not the path that is written."""
    path = network(tmp_path / "m.onnx")
    model = ir.load(path)
    (tmp_path / DATA).unlink()
    uses: list[Callable[[], Any]] = [
        lambda: save_model(model, tmp_path / "out.onnx"),
        lambda: built(model),
        lambda: Predictor(model, device="cpu"),
    ]
    for use in uses:
        with pytest.raises(ModelError, match=rf"{DATA}', to which the model refers for the data of '.*', is missing"):
            use()
    assert not (tmp_path / "out.onnx").exists()


def test_a_step_is_found_after_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = opened("folder", tmp_path)[0].evaluate(BATCH)
    (tmp_path / "else").mkdir()
    for shared in (False, True):
        monkeypatch.chdir(tmp_path)
        step = built(Path("model") / "m.onnx")
        step.save(Path(f"step{shared}"), share_weights=shared)
        loaded = gg.Step.load(f"step{shared}")
        monkeypatch.chdir(tmp_path / "else")
        for found in (step, loaded):
            assert gg.Trainer(found, device="cpu", options=RuntimeOptions(pack_weights=False)).evaluate(BATCH) == wanted


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "on")
    monkeypatch.setattr(openings, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(openings, "LEAST", 1)
    yield
    assert openings.kept()[0] > 0


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_session_has_no_constants_of_another_file(kind: str, tmp_path: Path) -> None:
    """The model that is cached contains the negated weight, folded by onnxruntime."""
    found = []
    for seed in (0, 1):
        folder = tmp_path / "same"
        shutil.rmtree(folder, ignore_errors=True)
        step: Any = built(network(folder / "m.onnx", seed))
        if kind != "built":
            step.save(folder / "step", share_weights=kind == "shared")
            step = folder / "step"
        found.append(gg.Trainer(step, device="cpu").predict(X))
        whole = gg.build(onnx.load(folder / "m.onnx"), "cross_entropy", train="head.*")
        np.testing.assert_allclose(found[-1], gg.Trainer(whole, device="cpu").predict(X), atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_ranks_compare_the_bytes_of_frozen_weights(tmp_path: Path) -> None:
    first, copy, other = (built(network(tmp_path / str(i) / "m.onnx", seed)) for i, seed in enumerate((0, 0, 1)))
    assert digest_of_step(first) == digest_of_step(copy) != digest_of_step(other)
    saved = [first.save(tmp_path / str(shared), share_weights=shared) for shared in (False, True)]
    assert digest_of_step(gg.Step.load(saved[0])) == digest_of_step(gg.Step.load(saved[1]))


def test_a_file_is_unchanged_until_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / DATA
    path.write_bytes(bytes(100))
    with path.open("rb") as file:
        held = HeldFile(path, file, own=False)
    os.link(path, tmp_path / "linked")
    path.chmod(0o400)
    path.rename(tmp_path / "moved")
    held.check_unchanged()
    os.truncate(tmp_path / "linked", 99)
    with pytest.raises(ModelError, match=REFUSED.replace(" ?", "")):
        held.check_unchanged()


@needs_posix
def test_too_many_open_files_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    import resource

    path = network(tmp_path / "m.onnx")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    data = load_model(path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        for use in (lambda: load_model(path), lambda: data.graph.initializers["w"].const_value.numpy()):
            with pytest.raises(ModelError, match="too many files are open: raise the limit"):
                use()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
