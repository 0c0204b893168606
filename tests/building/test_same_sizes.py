"""A target, a weight or a mask of one row does not stand for all rows, where the file says no sizes either."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import losses
from gradgraph.errors import BuildError, DataError, ModelError
from tests.kit.running import Loop

RNG = np.random.default_rng(0)
N, C = 5, 4
SCORES = RNG.uniform(0.1, 0.9, (N, C)).astype(np.float32)
STEPS = RNG.uniform(0.1, 0.9, (N, 9, C)).astype(np.float32)
FAILS = "is_as_long_as"


def model(sizes: list[Any] | None, outputs: int) -> onnx.ModelProto:
    """Each output adds a parameter to the input; without ``sizes`` the number of axes is open."""
    nodes = [helper.make_node("Add", ["x", f"w{i}"], [f"y{i}"]) for i in range(outputs)]
    weights = [onnx.numpy_helper.from_array(np.zeros(C, np.float32), f"w{i}") for i in range(outputs)]
    x, *ys = [helper.make_tensor_value_info(n, 1, sizes) for n in ("x", *(f"y{i}" for i in range(outputs)))]
    graph = helper.make_graph(nodes, "open", [x], ys, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def step_of(name: str, sizes: list[Any] | None, **options: Any) -> gg.Step:
    count = len(losses.by_name(name).reads)
    arguments = {"batch_first": True} if name == "ctc" else {}
    loss = losses.by_name(name, **arguments)
    return gg.build(model(sizes, count), loss, gg.optim.sgd(0.1), output=[f"y{i}" for i in range(count)], **options)


def batch_of(step: gg.Step) -> dict[str, np.ndarray]:
    """Numbers that fit; of ctc also two lengths."""
    lengths = {"input_lengths": np.full(N, 9), "target_lengths": np.full(N, 3)}
    batch: dict[str, np.ndarray] = {"x": STEPS if len(step.manifest.inputs[0].shape) == 3 else SCORES}
    for spec in step.manifest.targets:
        sizes = [N if i == 0 else d if isinstance(d, int) else 3 for i, d in enumerate(spec.shape)]
        random = RNG.integers(1, C, sizes) if spec.dtype == "int64" else RNG.uniform(0.1, 0.9, sizes)
        batch[spec.name] = lengths.get(spec.name, random).astype(spec.dtype)
    return batch


def sizes_for(name: str, first: str | None) -> list[Any]:
    return [first, 9, C] if name == "ctc" else [first, C]


# those of detectors and of pairs of answers read outputs of other shapes
OTHER_SHAPES = {"detr", "retinanet", "ssd", "fcos", "dpo", "ipo", "kto", "orpo", "simpo"}
COMPARING = sorted(n for n in {*losses.LOSSES} - OTHER_SHAPES if losses.by_name(n).targets)


@pytest.mark.sweep(0.23)
@pytest.mark.parametrize("name", COMPARING)
def test_a_target_of_one_row_is_refused(name: str) -> None:
    """By the graph itself, and so in every runtime; what fits gives the numbers that it gives with named sizes."""
    free, named = Loop(step_of(name, sizes_for(name, None))), Loop(step_of(name, sizes_for(name, "batch")))
    batch = batch_of(free.step)
    for short in (spec.name for spec in free.step.manifest.targets):
        with pytest.raises(Exception, match=f"{short}/{FAILS}/y0"):
            free({**batch, short: batch[short][:1]})
    expected, found = named(batch), free(batch)
    assert {n: v.tobytes() for n, v in found.items()} == {n: v.tobytes() for n, v in expected.items()}


@pytest.mark.parametrize("option", ["sample_weight", "mask"])
@pytest.mark.parametrize("given", [True, [None], ["rows"]])
def test_a_weight_of_one_row_is_refused(option: str, given: Any) -> None:
    step = step_of("mse", [None, C], **{option: given})
    batch = batch_of(step) | {
        option: np.ones([N, C][: len(step.manifest.targets[-1].shape)], step.manifest.targets[-1].dtype)
    }
    trainer = gg.Trainer(step, device="cpu")
    with pytest.raises(DataError, match=f"'{option}' does not match another input of the batch .*give all inputs"):
        trainer.step({**batch, option: batch[option][:1]})
    assert float(trainer.step(batch)["loss"]) == pytest.approx(((SCORES - batch["target"]) ** 2).mean(), rel=1e-5)


def test_a_size_of_one_that_is_asked_for_repeats() -> None:
    step = step_of("mse", [None, C], mask=[None, 1])
    batch = batch_of(step) | {"mask": np.arange(N)[:, None] < 2}
    found = gg.Trainer(step, device="cpu").step(batch)["loss"]
    assert float(found) == pytest.approx(((SCORES - batch["target"])[:2] ** 2).mean(), rel=1e-5)


def test_sizes_that_inputs_have_names_for_are_compared_by_the_trainer() -> None:
    step = step_of("mse", ["batch", C])
    assert "Split" not in [n.op_type for n in step.train.graph.node]
    batch = batch_of(step)
    with pytest.raises(DataError, match="'batch' is 5 in 'x' but 1 in 'target'"):
        gg.Trainer(step, device="cpu").step({**batch, "target": batch["target"][:1]})


def test_a_teacher_alone_has_such_weights() -> None:
    student, teacher = model([None, C], 1), model([None, C], 1)
    step = gg.build(gg.distill(student, teacher, alpha=1.0), None, gg.optim.sgd(0.1), sample_weight=True)
    trainer = gg.Trainer(step, device="cpu")
    with pytest.raises(DataError, match="the size of 'sample_weight' does not match another input"):
        trainer.step({"x": SCORES, "sample_weight": np.ones(1, np.float32)})
    trainer.step({"x": SCORES, "sample_weight": np.ones(N, np.float32)})


@pytest.mark.parametrize("name", COMPARING)
def test_an_output_of_unknown_rank_is_refused(name: str) -> None:
    """Its target was a scalar."""
    with pytest.raises((BuildError, ModelError), match=r"y0|the rank of 'x' is unknown"):
        step_of(name, None)
