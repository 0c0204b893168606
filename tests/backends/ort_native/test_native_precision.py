"""matmul_precision="high": where it can be chosen, which nodes carry it, and what it does to gradients and training."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_cpu.recurrent import shared_states as recurrent
from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native.native_precision import TILED, Precision, at_precision
from gradgraph.cli.app import run
from gradgraph.errors import RuntimeUnavailableError
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from gradgraph.runtime.execution.tuner import Tuner
from tests.kit.command_line import arrays, mlp
from tests.kit.lowered_networks import batches, step

pytestmark = [pytest.mark.one_level, pytest.mark.usefixtures("library")]  # lower levels have no tiles

CPU = Placement(("CPUExecutionProvider",))
HIGH = RuntimeOptions(native_kernels=True, matmul_precision="high")


@pytest.fixture
def tiles(library: native.Library) -> None:
    if not library.has_tiles:
        pytest.skip("this processor has no tiles (AMX with bfloat16)")


# y = ((x·v) ⊙ m)·w: every product of it, forward and backward, is large enough for tiles
LINEAR = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
linear (float[256, 192] x, float[192, 160] v, float[256, 160] m, float[160, 224] w) => (float[256, 224] y) {
    h = MatMul (x, v)
    k = Mul (h, m)
    y = MatMul (k, w)
}""")


def gradients(precision: Precision, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    model = for_machine(gg.vjp(LINEAR, backend="auto"), at_precision(precision))
    products = [n for n in model.graph.node if n.op_type == "MatMul"]
    assert len(products) == 6 and {n.domain for n in products} == {native.DOMAIN}
    session = create_session(model, CPU, RuntimeOptions(native_kernels=True, threads=2))
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.usefixtures("tiles")
def test_gradients_keep_the_bound() -> None:
    """Two products that follow each other: at most twice 2^-15 of the magnitudes that are added up."""
    rng = np.random.default_rng(0)
    sizes = {"x": (256, 192), "v": (192, 160), "m": (256, 160), "w": (160, 224), "y.cotangent": (256, 224)}
    feeds = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}

    def by_hand(x: np.ndarray, v: np.ndarray, m: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, np.ndarray]:
        dh = dy @ w.T * m
        return {"x": dh @ v.T, "v": x.T @ dh, "w": (x @ v * m).T @ dy}

    wide = [feeds[name].astype(np.float64) for name in sizes]
    exact, magnitude = by_hand(*wide), by_hand(*map(np.abs, wide))
    high, highest = gradients("high", feeds), gradients("highest", feeds)
    for name, wanted in exact.items():
        errors = [np.abs(found[f"{name}.grad"] - wanted) / magnitude[name] for found in (high, highest)]
        assert errors[0].max() <= 2 * 2.0**-15, name
        assert 2.0**-22 < errors[0].max() > 3 * errors[1].max(), name


def parts(model: onnx.ModelProto) -> dict[str, set[int]]:
    """What the nodes by tiles say, by operator; 3 where they say nothing."""
    found: dict[str, set[int]] = {}
    for node in model.graph.node:
        if node.domain == native.DOMAIN and node.op_type in TILED:
            said = {a.i for a in node.attribute if a.name == "parts"}
            found.setdefault(node.op_type, set()).update(said or {3})
    return found


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("name", "kernels"), [("residual", {"Conv", "ConvGradInput", "ConvGradWeight"}),
                                               ("lstm", {"LSTM", "LSTMGrad"})])  # fmt: skip
def test_the_nodes_carry_it(name: str, kernels: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)
    train = step(name, 8, gg.optim.sgd(0.05)).train
    high, highest = (for_machine(train, at_precision(p)) for p in ("high", "highest"))
    assert kernels <= set(parts(high)) and parts(high) == {kind: {2} for kind in parts(high)}
    assert parts(highest) == {kind: {3} for kind in parts(high)}
    assert [n.op_type for n in high.graph.node] == [n.op_type for n in highest.graph.node]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["residual", "lstm"])
def test_steps_train_with_it(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(recurrent, "LEAST_WORK", 1)
    built = step(name, "n", gg.optim.sgd(0.05, momentum=0.9))
    exact = gg.Trainer(built, device="cpu", options=RuntimeOptions(native_kernels=True, threads=2))
    with caplog.at_level(logging.INFO, "gradgraph"):
        high = gg.Trainer(built, device="cpu", options=HIGH)
    assert "training on cpu with native kernels at matmul_precision high" in caplog.messages
    for batch in batches(name, 8, 3) + batches(name, 3, 1):
        np.testing.assert_allclose(high.step(batch)["loss"], exact.step(batch)["loss"], rtol=1e-3)
    states = [trainer.state_dict() for trainer in (exact, high)]
    assert any((states[0][n] != states[1][n]).any() for n in states[0])
    assert native.DOMAIN not in str(high.export())


def test_it_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    built = gg.build(mlp(), "cross_entropy", gg.optim.sgd(0.05))
    monkeypatch.setattr(native.Library, "has_tiles", False)
    cases = {
        "needs a processor with AMX": HIGH,
        "requires native kernels, which are turned off; remove native_kernels=False": replace(
            HIGH, native_kernels=False
        ),
        "there is no matmul_precision 'medium'; use highest or high": RuntimeOptions(matmul_precision="medium"),  # type: ignore[arg-type]
    }
    for message, options in cases.items():
        with pytest.raises(RuntimeUnavailableError, match=message):
            gg.Trainer(built, device="cpu", options=options)
    gg.Trainer(built, device="cpu", options=RuntimeOptions(native_kernels=True, matmul_precision="highest"))


def test_what_was_timed_with_it_is_kept_apart() -> None:
    tuners = [Tuner(ORT_CPU, CPU, RuntimeOptions(matmul_precision=p)) for p in ("highest", "high")]
    assert tuners[0]._machine != tuners[1]._machine and "high" not in tuners[0]._machine


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], library: native.Library
) -> None:
    onnx.save(mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", **arrays(64))
    monkeypatch.chdir(tmp_path)
    words = ("train", "model.onnx", "--data", "train.npz", "--device", "cpu", "--epochs", "1")
    assert run((*words, "--no-native-kernels", "--matmul-precision", "high")) == 2
    assert "omit --no-native-kernels" in capsys.readouterr().err
    code = run((*words, "--matmul-precision", "high"))
    said = capsys.readouterr().err
    if library.has_tiles:
        assert code == 0 and "training on cpu with native kernels at matmul_precision high: " in said
    else:
        assert code == 1 and "needs a processor with AMX" in said
