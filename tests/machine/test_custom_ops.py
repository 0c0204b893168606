"""A model with operators that onnxruntime does not have trains: their library, compiled here, and rules for them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference.op_run import OpRun

import gradgraph as gg
from gradgraph import export, extend
from gradgraph.backends.ort_native.library import COMPILERS
from gradgraph.cli.app import run
from gradgraph.compat.onnxruntime_training import api, artifacts
from gradgraph.errors import ArgumentError, ModelError, RuntimeUnavailableError
from gradgraph.extend import case, operator, real, vjp
from gradgraph.machine import custom_ops, processes
from gradgraph.rules.registry import RULES

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "gradgraph" / "backends" / "ort_native" / "kernels"  # the C API, declared by position
DOMAIN = "my.ops"


class Snake(OpRun):
    op_domain = DOMAIN

    def _run(self, x: np.ndarray, alpha: float = 1.0) -> tuple[np.ndarray]:
        return (x + np.sin(alpha * x) ** 2 / alpha,)


class SnakeSlope(OpRun):
    op_domain = DOMAIN

    def _run(self, x: np.ndarray, alpha: float = 1.0) -> tuple[np.ndarray]:
        return (1.0 + np.sin(2 * alpha * x),)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next((found for name in COMPILERS if (found := processes.program(name))), None)
    if compiler is None:
        pytest.skip(f"a library of operators needs a C++ compiler ({', '.join(COMPILERS)}), and there is none")
    path = tmp_path_factory.mktemp("library") / "snake_ops.so"
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", f"-I{KERNELS}"]
    subprocess.run([*command, str(HERE / "snake_ops.cc"), "-o", str(path)], check=True)
    return path


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    rules, known = dict(RULES), dict(custom_ops.KNOWN)
    for kernel in (Snake, SnakeSlope):
        operator(kernel.__name__, DOMAIN, inputs=["T"], outputs=["T"], attributes={"alpha": 1.0},
                 shape=lambda x, **_: [x], reference=kernel)  # fmt: skip

    @vjp("Snake", case(real(2, 3)), case(real(4), alpha=2.0), domain=DOMAIN)
    def snake(op: Any, dy: Any, y: Any, x: Any, *, alpha: float) -> Any:
        return (dy * op.SnakeSlope(x, domain=DOMAIN, alpha=alpha),)

    @vjp("SnakeSlope", case(real(2, 3)), case(real(4), alpha=2.0), domain=DOMAIN)
    def snake_slope(op: Any, dy: Any, y: Any, x: Any, *, alpha: float) -> Any:
        return (dy * op.Cos(x * (2.0 * alpha)) * (2.0 * alpha),)

    yield
    for table, before in ((RULES, rules), (custom_ops.KNOWN, known)):
        table.clear()
        table.update(before)


def model(foreign: bool = True) -> onnx.ModelProto:
    """A layer, Snake, a layer; ``foreign``, or in standard operators."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(3, 8)), "v": rng.normal(size=(8, 2)), "alpha": np.array(2.0)}
    node = onnx.helper.make_node
    snake = [node("Snake", ["h"], ["s"], domain=DOMAIN, alpha=2.0)]
    standard = [node("Mul", ["h", "alpha"], ["a"]), node("Sin", ["a"], ["b"]), node("Mul", ["b", "b"], ["c"]),
                node("Div", ["c", "alpha"], ["d"]), node("Add", ["h", "d"], ["s"])]  # fmt: skip
    middle = snake if foreign else standard
    graph = onnx.helper.make_graph(
        [node("MatMul", ["x", "w"], ["h"]), *middle, node("MatMul", ["s", "v"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 3])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n", 2])],
        [onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items() if not foreign or a.ndim],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


DATA = {
    "x": np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32),
    "target": np.random.default_rng(2).normal(size=(16, 2)).astype(np.float32),
}


def losses(trainer: gg.Trainer) -> list[float]:
    return [float(trainer.step(DATA)["loss"]) for _ in range(5)]


def built(foreign: bool = True) -> gg.Step:
    return gg.build(model(foreign), "mse", gg.optim.adam(0.02), train=["w", "v"])


@pytest.mark.sweep(0)
def test_it_trains_as_the_same_model_in_standard_operators(library: Path, tmp_path: Path) -> None:
    step = built()
    assert {n.op_type for n in step.train.graph.node if n.domain == DOMAIN} == {"Snake", "SnakeSlope"}
    step.save(tmp_path / "step")
    expected = losses(gg.Trainer(built(foreign=False), device="cpu"))
    options = gg.RuntimeOptions(custom_ops=library)
    trainer = gg.Trainer(tmp_path / "step", device="cpu", options=options)
    np.testing.assert_allclose(losses(trainer), expected, rtol=1e-5)
    assert trainer.evaluate(DATA)["loss"] < expected[0]
    exported = trainer.export()
    session = ort.InferenceSession(exported.SerializeToString(), options.session_options(),
                                   providers=["CPUExecutionProvider"])  # fmt: skip
    np.testing.assert_allclose(session.run(None, {"x": DATA["x"]})[0], trainer.predict(DATA["x"]), rtol=1e-5)


@pytest.mark.sweep(0)
def test_a_library_that_is_named_once_serves_all_sessions(library: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"my\.ops"):
        losses(gg.Trainer(built(), device="cpu"))
    extend.library(library)
    extend.library(str(library))  # once is enough, twice does no harm
    step = built()
    np.testing.assert_allclose(
        losses(gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(custom_ops=[library]))),
        losses(gg.Trainer(built(foreign=False), device="cpu")),
        rtol=1e-5,
    )
    extend.check("Snake", DOMAIN)
    step.save(tmp_path / "step")
    assert export.required_operators(tmp_path / "step").count("my.ops;1;Snake,SnakeSlope") == 1


@pytest.mark.sweep(0)
def test_the_command_line_trains_a_step_folder_with_it(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built().save(tmp_path / "step")
    np.savez(tmp_path / "data.npz", **DATA)
    monkeypatch.chdir(tmp_path)
    train = ["train", "step", "--data", "data.npz", "--epochs", "1", "--batch-size", "16", "--checkpoint", "run.ckpt"]
    assert run(train) == 1
    assert "load the library with this operator by --custom-ops" in " ".join(capsys.readouterr().err.split())
    assert run([*train, "--custom-ops", str(library)]) == 0
    custom_ops.KNOWN.clear()
    for words in (["evaluate", "step", "--data", "data.npz"], ["predict", "step", "--data", "data.npz", "-o", "p.npz"],
                  ["export", "step", "-o", "m.ort"]):  # fmt: skip
        assert run([*words, "--checkpoint", "run.ckpt", "--custom-ops", str(library)]) == 0, capsys.readouterr().err
        custom_ops.KNOWN.clear()


def test_check_runs_the_library(library: Path) -> None:
    """A library that computes another function than the reference is noticed."""
    extend.library(library)

    @vjp("Snake", case(real(2, 3), alpha=2.0), domain=DOMAIN)
    def wrong(op: Any, dy: Any, y: Any, x: Any, *, alpha: float) -> Any:
        return (dy * op.SnakeSlope(x, domain=DOMAIN, alpha=1.0),)

    with pytest.raises(AssertionError, match="case 0, first order"):
        extend.check("Snake", DOMAIN)


@pytest.mark.parametrize("name", ["none.so", "text.so"])
def test_what_is_no_library_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.so").write_text("no library")
    said = "there is no custom-op library" if name == "none.so" else "onnxruntime cannot load the custom operators"
    with pytest.raises(RuntimeUnavailableError, match=said):
        extend.library(tmp_path / name)
    with pytest.raises(RuntimeUnavailableError, match=said):
        gg.RuntimeOptions(custom_ops=tmp_path / name).session_options()
    with pytest.raises(ArgumentError):
        extend.library(3)  # type: ignore[arg-type]
    assert not custom_ops.KNOWN


def test_the_drop_in_for_onnxruntime_training_takes_a_library(library: Path, tmp_path: Path) -> None:
    found = []
    for foreign in (True, False):
        folder = tmp_path / str(foreign)
        folder.mkdir()
        artifacts.generate_artifacts(
            model(foreign), ["w", "v"], loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder, custom_op_library=library,
        )  # fmt: skip
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library))
        state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
        module = api.Module(folder / "training_model.onnx", state, session_options=options)
        optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
        for _ in range(5):
            found.append(module(DATA["x"], DATA["target"]).item())
            optimizer.step()
            module.lazy_reset_grad()
    assert found[:5] == pytest.approx(found[5:], rel=1e-5)
    assert found[4] < found[0]
