"""The step folder trains wherever models run: the same losses in onnx's ReferenceEvaluator and in onnxruntime-node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from gradgraph.step.step import Step
from tests.kit.running import Loop

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
STEPS = 5


def small_cnn() -> onnx.ModelProto:
    """Convolutions of two kinds, batch normalisation, pooling, dropout, a linear layer; exported in evaluation mode."""
    rng = np.random.default_rng(0)
    node = helper.make_node
    weights = {
        "conv.weight": rng.normal(size=(4, 1, 3, 3)) * 0.5,
        "pointwise.weight": rng.normal(size=(4, 4, 1, 1)) * 0.5,
        "bn.weight": np.ones(4),
        "bn.bias": np.zeros(4),
        "bn.running_mean": np.zeros(4),
        "bn.running_var": np.ones(4),
        "fc.weight": rng.normal(size=(3, 16)) * 0.3,
        "fc.bias": np.zeros(3),
        "ratio": np.array(0.25),
    }
    nodes = [
        node("Conv", ["x", "conv.weight"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"], ["n"]),
        node("Relu", ["n"], ["a"]),
        node("Conv", ["a", "pointwise.weight"], ["r"], kernel_shape=[1, 1]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["p"], ["f"]),
        node("Dropout", ["f", "ratio"], ["d"]),
        node("Gemm", ["d", "fc.weight", "fc.bias"], ["logits"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "cnn",
        [helper.make_tensor_value_info("x", 1, ["batch", 1, 4, 4])],
        [helper.make_tensor_value_info("logits", 1, ["batch", 3])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# of losses around 1, in units of each type: runtimes round at other places, and NumPy adds up float16 in float16
TOLERANCE = {"float32": 0.0, "float16": 8 * 2.0**-10, "bfloat16": 2 * 2.0**-7}


@pytest.fixture(scope="module", params=TOLERANCE)
def step(request: pytest.FixtureRequest) -> Step:
    precision = gg.Precision(request.param, init_scale=256.0)  # at which no gradient overflows: not all would see it
    # in its first steps Adam goes as far for a rounding error as for a gradient
    optimizer = gg.optim.adamw(0.05) if request.param == "float32" else gg.optim.sgd(0.05, momentum=0.9)
    return gg.build(small_cnn(), "cross_entropy", optimizer, seed=3, precision=precision)


@pytest.fixture
def atol(step: Step) -> float:
    return TOLERANCE[step.manifest.precision.get("name", "float32")]


@pytest.fixture(scope="module")
def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    sizes = [6, 6, 2, 6, 1]
    return [{"x": rng.normal(size=(n, 1, 4, 4)).astype(np.float32), "target": rng.integers(0, 3, n)} for n in sizes]


@pytest.fixture(scope="module")
def losses(step: Step, batches: list[dict[str, np.ndarray]]) -> list[float]:
    loop = Loop(step)
    found = [float(loop(b)["loss"]) for b in batches]
    assert len({round(x, 6) for x in found}) == STEPS
    return found


@pytest.fixture(scope="module")
def two_steps() -> Step:
    """One trains the convolutions, the other one what follows."""
    head = gg.StepOptions(optimizer=gg.optim.sgd(0.05), train="fc.*")
    return gg.build(
        small_cnn(), steps={"body": gg.StepOptions(optimizer=gg.optim.adam(0.01), freeze="fc.*"), "head": head}
    )


@pytest.fixture(scope="module")
def losses_of_two(two_steps: Step, batches: list[dict[str, np.ndarray]]) -> list[float]:
    trainer = gg.Trainer(two_steps, device="cpu")
    return [float(trainer.step(name, batch)["loss"]) for batch in batches for name in ("body", "head")]


@pytest.mark.sweep(0)
def test_reference_evaluator_runs_several_steps(
    two_steps: Step, batches: list[dict[str, np.ndarray]], losses_of_two: list[float]
) -> None:
    init = ReferenceEvaluator(two_steps.init)
    state: dict[str, Any] = dict(zip(init.output_names, init.run(None, {}), strict=True))
    trains = {name: ReferenceEvaluator(model) for name, model in two_steps.trains.items()}
    found = []
    for batch in batches:
        for name, part in two_steps.manifest.steps.items():
            rates = {k: np.array(v, np.float32) for k, v in part.hyperparameters.items()}
            read = {k: state[k] for k in part.reads}
            with np.errstate(over="ignore"):
                values = trains[name].run(None, {**batch, **rates, **read})
            results = dict(zip(trains[name].output_names, values, strict=True))
            state |= {s.name: results[s.next] for s in two_steps.manifest.state if s.name in part.writes}
            found.append(float(results[part.loss_output]))
    np.testing.assert_allclose(found, losses_of_two, rtol=1e-4)


def test_reference_evaluator_gives_the_same_losses(
    step: Step, batches: list[dict[str, np.ndarray]], losses: list[float], atol: float
) -> None:
    train, init = ReferenceEvaluator(step.train), ReferenceEvaluator(step.init)
    state: dict[str, Any] = dict(zip(init.output_names, init.run(None, {}), strict=True))
    rates = {k: np.array(v, np.float32) for k, v in step.manifest.hyperparameters.items()}
    found = []
    for batch in batches:
        with np.errstate(over="ignore"):  # the mask generator's unsigned arithmetic wraps around
            results = dict(zip(train.output_names, train.run(None, {**batch, **rates, **state}), strict=True))
        state = {s.name: results[s.next] for s in step.manifest.state}
        found.append(float(results["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-5, atol=atol)


@pytest.mark.node
def test_onnxruntime_node_gives_the_same_losses(
    step: Step, batches: list[dict[str, np.ndarray]], losses: list[float], atol: float, tmp_path: Path
) -> None:
    found = [line["loss"] for line in in_node(step, batches, tmp_path)]
    np.testing.assert_allclose(found, losses, rtol=1e-5, atol=atol)


@pytest.mark.node
def test_onnxruntime_node_runs_several_steps(
    two_steps: Step, batches: list[dict[str, np.ndarray]], losses_of_two: list[float], tmp_path: Path
) -> None:
    found = in_node(two_steps, batches, tmp_path)
    assert [f["step"] for f in found] == ["body", "head"] * STEPS
    np.testing.assert_allclose([f["loss"] for f in found], losses_of_two, rtol=1e-4)


def in_node(step: Step, batches: list[dict[str, np.ndarray]], folder: Path) -> list[dict[str, Any]]:
    """What train.mjs prints."""
    packages = EXAMPLE / "node_modules"
    if shutil.which("node") is None or not all((packages / p).is_dir() for p in ("onnxruntime-node", "gradgraph")):
        pytest.skip("onnxruntime-node is not installed: make node")
    step.save(folder / "step")
    as_json = [{k: {"dims": v.shape, "data": v.ravel().tolist()} for k, v in b.items()} for b in batches]
    (folder / "batches.json").write_text(json.dumps(as_json))
    command = ["node", str(EXAMPLE / "train.mjs"), str(folder / "step"), str(folder / "batches.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
