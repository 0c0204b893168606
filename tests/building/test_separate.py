"""gradient.onnx and apply.onnx: together one step, and the gradients may go through anything in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import optim
from gradgraph.errors import BuildError, ModelError
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn
from tests.backends.test_other_runtimes import small_cnn
from tests.kit.command_line import mlp
from tests.kit.optim_cases import OPTIMIZERS, X, Y, network
from tests.kit.running import Loop, session

BATCHES = [{"x": X[i], "target": Y[i]} for i in range(6)]


class Apart:
    """Trains with the two files alone, as the manifest says."""

    def __init__(self, step: gg.Step) -> None:
        assert step.manifest.separate is not None
        self.step, self.spec = step, step.manifest.separate
        self.state: dict[str, np.ndarray] = Loop(step).state
        self._sessions = {name: session(model) for name, model in step.separate.items()}

    def gradient(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._run("gradient", self.spec.gradient, batch)

    def apply(
        self, gradients: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        return self._run("apply", self.spec.apply, {n: gradients[n] for n in self.spec.gradients.values()}, given or {})

    def _run(
        self, name: str, half: Any, fed: Mapping[str, Any], given: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        known = {n: np.array(v, np.float32) for n, v in self.step.manifest.hyperparameters.items()} | dict(given or {})
        rates = {n: known[n] for n in half.hyperparameters}
        state = {n: self.state[n].copy() for n in half.reads}
        outputs = [o.name for o in self._sessions[name].get_outputs()]
        found = dict(zip(outputs, self._sessions[name].run(None, {**fed, **rates, **state}), strict=True))
        nexts = {s.name: s.next for s in self.step.manifest.state}
        self.state |= {n: found.pop(nexts[n]) for n in half.writes}
        return found


def assert_same_steps(step: gg.Step, batches: list[dict[str, Any]], rtol: float = 1e-5) -> Apart:
    whole, apart = Loop(step), Apart(step)
    for batch in batches:
        expected, found = whole(batch), apart.gradient(batch)
        found |= apart.apply(found)
        for name in (step.manifest.loss_output, *step.manifest.metrics, *step.manifest.reports):
            np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=1e-6, err_msg=name)
    for name, value in whole.state.items():
        np.testing.assert_allclose(apart.state[name], value, rtol=rtol, atol=1e-6, err_msg=name)
    return apart


@pytest.mark.sweep(0.28)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_are_one_step_of_each_optimizer(name: str) -> None:
    case = OPTIMIZERS[name]
    freeze = ["b1", "b2"] if case.only_matrices else []
    assert_same_steps(gg.build(network(), "mse", case.optimizer(), freeze=freeze, separate=True), BATCHES)


WRAPPED: dict[str, optim.Optimizer] = {
    "scheduled": optim.adamw(optim.cosine(0.05, 20)),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.05)),
    "groups": optim.nadam(0.05, groups={"b*": {"lr": 0.1}, "w2": {"start": 3}}),
    "averages": optim.ema(optim.lookahead(optim.sgd(0.2), 2), 0.9),
    "uphill": optim.sam(optim.sgd(0.2, momentum=0.9), 0.05),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_both_are_one_step_of_what_stands_around_an_optimizer(name: str) -> None:
    assert_same_steps(gg.build(network(), "mse", WRAPPED[name], separate=True, grad_norm=True), BATCHES)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_statistics_and_masks_move_with_the_gradient(precision: str) -> None:
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 1, 4, 4)).astype(np.float32), "target": np.arange(8) % 3}
    step = gg.build(small_cnn(), optimizer="adamw", precision=precision, separate=True)
    apart = assert_same_steps(step, [batch] * 4)
    kinds = {s.name: s.kind for s in step.manifest.state}
    assert {kinds[n] for n in apart.spec.gradient.writes} == {"statistic", "counter"}
    assert {kinds[n] for n in apart.spec.apply.writes} == {"parameter", "optimizer", "counter"}
    assert not {*apart.spec.gradient.writes} & {*apart.spec.apply.writes}
    assert {*apart.spec.gradient.writes, *apart.spec.apply.writes} == {*kinds}


def traced(out: Any, batch: Any) -> dict[str, Any]:
    return {"classes": F.cross_entropy(out["logits"], batch["y"]), "size": 0.1 * out["first.weight"].square().mean()}


ROWS = {"x": X[0][:6], "target": np.arange(6) % 3}
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a function": (
        {"loss": traced, "targets": {"y": gg.frontend.Input(("N",), "int64")}},
        {"x": ROWS["x"], "y": ROWS["target"]},
    ),
    "weights of samples": ({"sample_weight": True}, {**ROWS, "sample_weight": np.linspace(0, 1, 6, dtype=np.float32)}),
    "sums": ({"metrics": ["f1", "accuracy"], "backend": "portable"}, ROWS),
    "lowered": ({"optimizer": "adam", "backend": "ort-cpu"}, ROWS),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_whatever_is_minimised_and_measured_comes_with_the_gradient(name: str) -> None:
    options, batch = OBJECTIVES[name]
    assert_same_steps(gg.build(mlp(), separate=True, **options), [batch] * 2)


def test_large_frozen_weights_lie_once_in_the_folder(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(512, 600), nn.Tanh(), nn.Linear(600, 3))
    step = gg.build(gg.frontend.export(net, {"x": ("n", 512)}), freeze="0.*", separate=True)
    step.save(tmp_path / "step")
    sizes = {f.name: f.stat().st_size for f in (tmp_path / "step").iterdir()}
    assert sizes.pop("frozen.bin") == 512 * 600 * 4 and max(sizes.values()) < 40_000
    ort.InferenceSession(tmp_path / "step" / "gradient.onnx", providers=["CPUExecutionProvider"])
    models = [s.resolved("gradient") for s in (gg.Step.load(tmp_path / "step"), step)]
    loaded, kept = ({t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in models)
    np.testing.assert_array_equal(loaded["0.weight"], kept["0.weight"])
    (tmp_path / "step" / "apply.onnx").unlink()
    with pytest.raises(ModelError, match=r"apply\.onnx"):
        gg.Step.load(tmp_path / "step")


def test_gradients_of_parts_of_a_batch_are_those_of_the_batch() -> None:
    """Labels that do not count make the parts unequal, and ``weight`` says by how much."""
    step = gg.build(mlp(), optimizer=optim.adam(0.05), separate=True)
    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(12, 4)).astype(np.float32), rng.integers(0, 3, 12)
    target[:5] = -100
    whole, apart = Loop(step), Apart(step)
    for _ in range(3):
        loss = whole({"x": x, "target": target})["loss"]
        parts = [apart.gradient({"x": x[i : i + 4], "target": target[i : i + 4]}) for i in (0, 4, 8)]
        weights = [float(part[apart.spec.weight]) for part in parts]
        assert weights == [0, 3, 4]
        names = ("loss", *apart.spec.gradients.values())
        mean = {n: sum(w * p[n] for w, p in zip(weights, parts, strict=True) if w) / 7 for n in names}
        np.testing.assert_allclose(mean["loss"], loss, rtol=1e-6)
        apart.apply({n: np.asarray(v, np.float32) for n, v in mean.items()})
    for name, value in whole.state.items():
        np.testing.assert_allclose(apart.state[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_trainer_goes_on_where_the_files_stopped() -> None:
    step = gg.build(network(), "mse", "adamw", separate=True)
    whole, apart, trainer = Loop(step), Apart(step), gg.Trainer(step, device="cpu")
    for batch in BATCHES[:3]:
        whole(batch)
        apart.apply(apart.gradient(batch))
    trainer.load_state_dict(apart.state)
    np.testing.assert_allclose(trainer.step(BATCHES[3])["loss"], whole(BATCHES[3])["loss"], rtol=1e-5)
    apart.state = trainer.state_dict()
    np.testing.assert_allclose(apart.gradient(BATCHES[4])["loss"], whole(BATCHES[4])["loss"], rtol=1e-5)


@pytest.mark.parametrize(("reduction", "weighed"), [("sum", False), ("mean", True)])
def test_the_manifest_says_how_gradients_add_up(reduction: str, weighed: bool) -> None:
    spec = gg.build(network(), gg.losses.mse(reduction), separate=True).manifest.separate
    assert spec is not None
    assert (spec.adds_up, bool(spec.weight)) == (not weighed, weighed)


def test_a_gradient_that_is_no_node_has_its_file() -> None:
    """Those of both weights are the cotangent itself, or the same value."""
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[3] x) => (float loss) <float[3] a = {1, 2, 3}, float[3] b = {3, 2, 1}> {
            s = Add(a, b)
            t = Add(s, x)
            loss = ReduceSum<keepdims = 0>(t)
        }""")
    step = gg.build(graph, None, optim.sgd(0.5), separate=True)
    found = Apart(step).gradient({"x": np.zeros(3, np.float32)})
    assert [found[f"{n}.grad"].tolist() for n in "ab"] == [[1, 1, 1]] * 2
    assert_same_steps(step, [{"x": np.zeros(3, np.float32)}] * 2)


def test_a_step_without_them_is_what_it_was(tmp_path: Path) -> None:
    gg.build(mlp()).save(tmp_path / "plain")
    assert "separate" not in (tmp_path / "plain" / "manifest.json").read_text()
    assert sorted(f.name for f in (tmp_path / "plain").iterdir()) == [
        "eval.onnx", "init.onnx", "manifest.json", "train.onnx",
    ]  # fmt: skip


@pytest.mark.parametrize("loss", ["cross_entropy", traced])
def test_an_update_that_adds_up_gradients_is_fed_what_they_are_means_over(loss: Any) -> None:
    options = {} if loss == "cross_entropy" else {"targets": {"y": gg.frontend.Input(("N",), "int64")}}
    step = gg.build(mlp(), loss, "adamw", accumulate=True, grad_norm=True, separate=True, **options)
    assert step.manifest.separate is not None
    assert {"update", "batch_weight"} == {*step.manifest.separate.apply.hyperparameters} - {"learning_rate"}
    whole, apart = Loop(step), Apart(step)
    rates = {n: np.array(v, np.float32) for n, v in step.manifest.hyperparameters.items()}
    for number, rows in enumerate((6, 2, 4, 5)):
        batch = {s.name: ROWS["x" if s.name == "x" else "target"][:rows] for s in step.manifest.batch}
        fed = {"update": np.array(number % 2, np.float32)}
        if not step.manifest.separate.weight:
            fed["batch_weight"] = np.array(rows, np.float32)
        expected = whole(batch, **fed)
        found = apart.gradient(batch)
        apart.apply(found, {"batch_weight": found.get("batch_weight", rates.get("batch_weight")), **fed})
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    for name, value in whole.state.items():
        np.testing.assert_allclose(apart.state[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_several_named_steps_have_none() -> None:
    with pytest.raises(BuildError, match="named steps do not support separate"):
        gg.build(mlp(), separate=True, steps={"a": gg.StepOptions()})


def test_a_step_that_was_just_built_comes_apart_and_one_from_disk_says_what_to_do(tmp_path: Path) -> None:
    model = mlp()
    step = gg.build(model, optimizer="adamw")
    apart = step.apart()
    assert apart.manifest.separate is not None and apart.train is step.train and apart.apart() is apart
    assert_same_steps(apart, [ROWS] * 3)
    step.save(tmp_path / "step")
    with pytest.raises(BuildError, match=r"no gradient\.onnx") as said:
        gg.Step.load(tmp_path / "step").apart()
    assert "--separate" in said.value.in_shell() and "separate=True" in str(said.value)
    apart.save(tmp_path / "apart")
    assert_same_steps(gg.Step.load(tmp_path / "apart").apart(), [ROWS])
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((4, 9), np.float32), "other"))
    with pytest.raises((BuildError, ModelError)):
        step.apart()


def test_files_of_another_step_are_refused() -> None:
    step = gg.build(mlp(), separate=True)
    spec = step.manifest.separate
    assert spec is not None
    half = dataclasses.replace(spec.apply, reads=spec.apply.reads[1:])
    forged = [
        dataclasses.replace(spec, gradients={**spec.gradients, "x": "y"}),
        dataclasses.replace(spec, apply=half),
        dataclasses.replace(spec, gradient=dataclasses.replace(spec.gradient, writes=("nothing",))),
        None,
    ]
    for wrong in forged:
        with pytest.raises(ModelError, match="build the step again"):
            dataclasses.replace(step, manifest=dataclasses.replace(step.manifest, separate=wrong))
