"""Gradients of the shares of a batch are those of the batch, weighed as the manifest says, or ranks refuse the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import losses
from gradgraph.errors import BuildError
from gradgraph.frontend import functional as F
from gradgraph.frontend.anchors import anchors
from gradgraph.parallel.summable_loss import check_loss
from tests.kit.running import Loop, session

RNG = np.random.default_rng(0)
ROWS, CLASSES = 6, 4
LAID = {"image_size": (32, 48), "strides": (8, 16)}
PRIORS = anchors(**LAID, size=2.0, scales=(1.0,), ratios=(1.0,))
MADE = {
    "ctc": losses.ctc(batch_first=True), "fcos": losses.fcos(**LAID), "ssd": losses.ssd(PRIORS),
    "retinanet": losses.retinanet(**LAID, size=2.0, scales=(1.0,), ratios=(1.0,)),
}  # fmt: skip
CALLED = np.array([[1, 0, 2], [-1, -1, -1], [0, -1, 1], [2, 2, -1], [-1, 1, -1], [1, 0, 0]])


def boxes(*shape: int) -> np.ndarray:
    sides = RNG.uniform(0.1, 0.5, (*shape, 2))
    return np.concatenate([RNG.uniform(sides / 2, 1 - sides / 2), sides], -1)


def outputs_for(name: str) -> list[np.ndarray]:
    places = {"detr": 3, "retinanet": 30, "ssd": 30, "fcos": 30}.get(name)
    if places:
        sides = [RNG.uniform(1, 3, (ROWS, places, 1))] if name == "fcos" else []
        return [RNG.normal(size=(ROWS, places, CLASSES)), RNG.uniform(0.2, 0.8, (ROWS, places, 4)), *sides]
    if name in ("iou", "giou", "diou", "ciou"):
        corner = RNG.uniform(0, 0.5, (ROWS, 2))
        return [np.concatenate([corner, corner + 0.4], 1)]
    if name in ("dpo", "ipo", "kto", "orpo", "simpo"):
        counts = [np.full((ROWS, 2), 3.0)] * (len(losses.by_name(name).reads) - 1)
        return [-RNG.uniform(1, 3, (ROWS, 2)), *counts]
    if name == "ctc":
        return [np.log(RNG.dirichlet(np.ones(CLASSES), (ROWS, 9)))]
    if name in ("tversky", "lovasz", "dice"):
        return [RNG.normal(size=(ROWS, CLASSES, 3))]
    if name in ("bce", "kl_div", "gaussian_nll"):
        return [RNG.uniform(0.3, 0.7, (ROWS, CLASSES)) for _ in losses.by_name(name).reads]
    return [RNG.normal(size=(ROWS, CLASSES)) for _ in losses.by_name(name).reads]


def added(outputs: list[np.ndarray], batch: Any = "batch") -> onnx.ModelProto:
    """A model that adds a parameter to each of its inputs, the same to all rows."""
    shapes = [[batch, *x.shape[1:]] for x in outputs]
    graph = helper.make_graph(
        [helper.make_node("Add", [f"x{i}", f"w{i}"], [f"y{i}"]) for i in range(len(outputs))], "added",
        [helper.make_tensor_value_info(f"x{i}", 1, s) for i, s in enumerate(shapes)],
        [helper.make_tensor_value_info(f"y{i}", 1, s) for i, s in enumerate(shapes)],
        [onnx.numpy_helper.from_array(np.full((1, *x.shape[1:]), 0.01, np.float32), f"w{i}")
         for i, x in enumerate(outputs)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def targets_for(step: gg.Step) -> dict[str, np.ndarray]:
    found: dict[str, Any] = {"input_lengths": np.full(ROWS, 9), "target_lengths": np.full(ROWS, 3)}
    for spec in step.manifest.targets:
        shape = [ROWS, *(d if isinstance(d, int) else 3 for d in spec.shape[1:])]
        if spec.padded:
            value = CALLED
        elif step.manifest.loss["name"] == "kto" and spec.dtype == "float32":
            value = RNG.integers(0, 2, shape) if len(shape) == 1 else -RNG.uniform(3, 5, shape)
        elif spec.name == "target_boxes":
            value = boxes(ROWS, 3)
        elif "iou" in step.manifest.loss["name"]:
            value = np.array([[0.2, 0.2, 0.7, 0.7]] * ROWS)
        else:
            value = RNG.integers(1, 3, shape) if spec.dtype == "int64" else RNG.uniform(0.1, 0.9, shape)
        found[spec.name] = found.get(spec.name, value).astype(spec.dtype)
    return {spec.name: found[spec.name] for spec in step.manifest.targets}


def gradients_of(step: gg.Step, batch: dict[str, np.ndarray]) -> Callable[[int, int], dict[str, np.ndarray]]:
    running, state = session(step.separate["gradient"]), Loop(step).state

    def of(first: int, last: int) -> dict[str, np.ndarray]:
        fed = {**state, **{n: x[first:last] for n, x in batch.items()}}
        names = [o.name for o in running.get_outputs()]
        return dict(zip(names, running.run(None, {i.name: fed[i.name] for i in running.get_inputs()}), strict=True))

    return of


COMPARES = "compares the samples of a batch with each other"
REFUSED = {"clip": COMPARES, "info_nce": COMPARES, "kto": COMPARES, "lovasz": "is neither a mean nor a sum",
           "detr": "has terms with different divisors"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_shares_add_up_to_the_batch_or_the_loss_is_refused(name: str) -> None:
    outputs = [x.astype(np.float32) for x in outputs_for(name)]
    step = gg.build(added(outputs), MADE.get(name, losses.by_name(name)), gg.optim.sgd(1.0), separate=True)
    spec = step.manifest.separate
    assert spec is not None
    of = gradients_of(step, {**{f"x{i}": x for i, x in enumerate(outputs)}, **targets_for(step)})
    whole, parts = of(0, ROWS), [of(0, 4), of(4, ROWS)]
    weights = [1.0, 1.0] if spec.adds_up else [float(p[spec.weight]) for p in parts] if spec.weight else [4.0, 2.0]
    below = 1.0 if spec.adds_up else sum(weights)
    joint = {n: sum(w * p[n] for w, p in zip(weights, parts, strict=True)) / below for n in spec.gradients.values()}
    is_same = all(np.allclose(joint[n], whole[n], rtol=1e-4, atol=1e-6) for n in joint)
    assert is_same == (name not in REFUSED)
    if name in REFUSED:
        with pytest.raises(BuildError, match=rf"^the loss '{name}' {REFUSED[name]}.*; train in one process"):
            check_loss(step.manifest)
    else:
        check_loss(step.manifest)


def by_hand(out: Any, batch: Any) -> Any:
    """Written by the user: each row of y0 should be nearest to its own row of y1."""
    scores = out["y0"] @ out["y1"].mT
    return F.cross_entropy(scores, F.arange(scores.shape[0]))


def centred(out: Any, batch: Any) -> Any:
    return ((out["y0"] - F.mean(out["y0"], 0, keepdim=True)) * out["y1"]).square().mean()


def by_row(out: Any, batch: Any) -> Any:
    return (out["y0"] - out["y1"].mean(1, keepdim=True)).square().sum(1).mean()


@pytest.mark.parametrize(
    ("loss", "batch"),
    [("clip", "batch"), ("clip", ROWS), ("info_nce", ROWS), ("kto", ROWS), (by_hand, "batch"), (by_hand, ROWS),
     (centred, "batch")],
)  # fmt: skip
def test_losses_that_compare_samples_are_refused_at_any_batch(loss: Any, batch: Any) -> None:
    step = gg.build(added(outputs_for(loss if loss == "kto" else "clip"), batch), loss, separate=True)
    with pytest.raises(BuildError, match=COMPARES):
        check_loss(step.manifest)


@pytest.mark.parametrize("batch", ["batch", ROWS])
def test_losses_of_each_row_are_not(batch: Any) -> None:
    for loss in (by_row, "cosine_embedding", "mse"):
        check_loss(gg.build(added(outputs_for("clip"), batch), loss, separate=True).manifest)


def two(out: Any, batch: Any) -> Any:
    return F.cross_entropy(out["y0"], batch["a"]) + F.cross_entropy(out["y1"], batch["b"])


def test_several_losses_count_labels_of_their_own() -> None:
    """Named or written as a function: they add up unless a label is ignored; one loss counts what is not."""
    model = added(outputs_for("clip"))
    targets = {n: gg.frontend.Input(("batch",), "int64") for n in "ab"}
    for options in ({"loss": two, "targets": targets}, {"loss": {"y0": "cross_entropy", "y1": "cross_entropy"}}):
        spec = gg.build(model, separate=True, **options).manifest.separate
        assert spec is not None and (spec.differs, spec.every_label) == ("", True)
    spec = gg.build(model, "cross_entropy", separate=True).manifest.separate
    assert spec is not None and not spec.every_label
    several = gg.build(model, {("y0", "y1"): "clip", "y0": "mse"}, separate=True)
    with pytest.raises(BuildError, match=r"^the sum of the losses 'clip', 'mse' compares the samples"):
        check_loss(several.manifest)
