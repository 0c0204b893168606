"""Assignments in a graph are the cheapest; losses of detectors have the slopes of differences; what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import losses
from gradgraph.frontend import Input, export, nn
from gradgraph.frontend import functional as F
from gradgraph.frontend.anchors import anchors, points
from gradgraph.verify.reference import Oracle
from tests.kit.running import run, session

# --- assignments -------------------------------------------------------------------------------------------


def cheapest(cost: np.ndarray) -> float:
    """By all permutations of columns, one row after the other."""
    rows, columns = cost.shape
    best = {frozenset[int](): 0.0}
    for row in range(rows):
        after: dict[frozenset[int], float] = {}
        for taken, total in best.items():
            for column in set(range(columns)) - taken:
                key, value = taken | {column}, total + float(cost[row, column])
                after[key] = min(value, after.get(key, np.inf))
        best = after
    return min(best.values())


@pytest.fixture(scope="module")
def assigner() -> Any:
    inputs = {"cost": ("batch", "n", "m"), "counts": Input(("batch", "n"), "bool")}
    return session(export(lambda cost, counts: F.linear_sum_assignment(cost, counts), inputs))


@pytest.mark.parametrize("draw", ["numbers", "ties", "equal"])
@pytest.mark.parametrize("seed", range(12))
def test_an_assignment_is_the_cheapest(assigner: Any, seed: int, draw: str) -> None:
    rng = np.random.default_rng(seed)
    batch, rows, columns = rng.integers(1, 4), rng.integers(0, 7), rng.integers(1, 7)
    draws = {
        "numbers": rng.normal(size=(batch, rows, columns)) * 10,
        "ties": rng.integers(0, 3, (batch, rows, columns)),
    }
    cost = draws.get(draw, np.ones((batch, rows, columns))).astype(np.float32)
    counts = np.zeros((batch, rows), bool)
    for flags in counts:  # none in some
        flags[rng.permutation(rows)[: rng.integers(0, min(rows, columns) + 1)]] = True
    (found,) = assigner.run(None, {"cost": cost, "counts": counts})
    assert (found.dtype, found.shape) == (np.int64, (batch, columns))
    for costs, flags, row_of in zip(cost, counts, found, strict=True):
        pairs = [(int(row), column) for column, row in enumerate(row_of) if row >= 0]
        assert sorted(row for row, _ in pairs) == list(np.flatnonzero(flags))
        total = sum(float(costs[pair]) for pair in pairs)
        assert total == pytest.approx(cheapest(costs[flags]), abs=1e-9)


def test_many_objects_as_scipy_assigns_them(assigner: Any) -> None:
    scipy = pytest.importorskip("scipy.optimize", reason="compares with scipy")
    rng = np.random.default_rng(0)
    cost = rng.normal(size=(4, 40, 100)).astype(np.float32)
    (found,) = assigner.run(None, {"cost": cost, "counts": np.ones((4, 40), bool)})
    for costs, row_of in zip(cost, found, strict=True):
        rows, columns = scipy.linear_sum_assignment(costs)
        np.testing.assert_array_equal(row_of[columns], rows)
        assert (row_of >= 0).sum() == 40


def test_more_rows_than_columns_and_numbers_that_are_none_come_to_an_end(assigner: Any) -> None:
    for value in (1.0, np.nan, np.inf, -np.inf):
        cost = np.full((1, 5, 3), value, np.float32)
        assigner.run(None, {"cost": cost, "counts": np.ones((1, 5), bool)})


def test_the_cost_of_an_assignment_of_wrong_shape() -> None:
    with pytest.raises(gg.GradgraphError, match=r"linear_sum_assignment expects cost \[B, n, m\] and counts \[B, n\]"):
        export(lambda x: F.linear_sum_assignment(x, x), {"x": ("n", "m")})


# --- boxes -------------------------------------------------------------------------------------------------

BOXES = {"xyxy": [0.25, 0.5, 0.75, 0.875], "xywh": [0.25, 0.5, 0.5, 0.375], "cxcywh": [0.5, 0.6875, 0.5, 0.375]}


@pytest.mark.parametrize("to", BOXES)
@pytest.mark.parametrize("of", BOXES)
def test_boxes_in_other_forms(of: str, to: str) -> None:
    model = export(lambda x: F.box_convert(x, of, to), {"x": ("n", 4)})
    (found,) = run(model, {"x": np.array([BOXES[of]] * 2, np.float32)}).values()
    np.testing.assert_array_equal(found, [BOXES[to]] * 2)


def test_overlaps_of_pairs() -> None:
    model = export(lambda x, y: (F.box_iou(x, y), F.generalized_box_iou(x, y)), {"x": ("n", 4), "y": ("m", 4)})
    x, y = np.array([[0, 0, 2, 2], [0, 0, 1, 1]], np.float32), np.array([[1, 1, 3, 3], [0, 0, 2, 2], [2, 0, 3, 1]])
    iou, giou = run(model, {"x": x, "y": y.astype(np.float32)}).values()
    expected = np.array([[1 / 7, 1, 0], [0, 1 / 4, 0]])
    np.testing.assert_allclose(iou, expected, rtol=1e-5)
    np.testing.assert_allclose(giou, expected - [[2 / 9, 0, 1 / 6], [4 / 9, 0, 1 / 3]], rtol=1e-5)


NAMED = {
    "iou": F.box_iou_loss, "giou": F.generalized_box_iou_loss, "diou": F.distance_box_iou_loss,
    "ciou": F.complete_box_iou_loss, "detr": F.detr_loss, "retinanet": F.retinanet_loss, "ssd": F.ssd_loss,
    "fcos": F.fcos_loss, "tversky": F.tversky_loss, "lovasz": F.lovasz_softmax_loss,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_name_and_its_function_are_one(name: str) -> None:
    assert losses.by_name(name).function is NAMED[name]


# --- slopes ------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(3)
CALLED = np.array([[1, 0, -1], [-1, -1, -1], [2, 1, 1]])
SIDES = RNG.uniform(0.2, 0.5, (3, 3, 2))
PLACED = np.concatenate([RNG.uniform(SIDES / 2, 1 - SIDES / 2), SIDES], -1)
LAID = {"image_size": (32, 48), "strides": (8, 16)}


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def unit(*shape: int) -> np.ndarray:
    return RNG.uniform(0.1, 0.9, shape)


APART = np.array([[[0.1, 0.2, 0.3, 0.4], [0.6, 0.7, 0.9, 0.8]]])
SLOPES: dict[str, tuple[losses.Loss, list[np.ndarray], list[np.ndarray]]] = {
    "iou": (losses.iou("cxcywh"), [PLACED], [PLACED + 0.05]),
    "giou": (losses.giou("cxcywh"), [PLACED], [PLACED + 0.05]),
    "giou-apart": (losses.giou(), [APART], [APART[:, ::-1] + 0.03]),
    "diou-apart": (losses.diou(), [APART], [APART[:, ::-1] + 0.03]),
    "detr": (losses.detr(), [real(3, 5, 4), unit(3, 5, 4)], [CALLED, PLACED]),
    "retinanet": (losses.retinanet(**LAID, scales=(1.0,)), [real(3, 90, 3), real(3, 90, 4)], [CALLED, PLACED]),
    "ssd": (losses.ssd(anchors(**LAID, size=2.0, scales=(1.0,))), [real(3, 90, 4), real(3, 90, 4)], [CALLED, PLACED]),
    "fcos": (losses.fcos(**LAID), [real(3, 30, 3), unit(3, 30, 4), real(3, 30, 1)], [CALLED, PLACED]),
    "tversky": (losses.tversky(0.3, 0.7), [real(3, 4, 5)], [RNG.integers(0, 4, (3, 5))]),
    "lovasz": (losses.lovasz(), [real(3, 4, 5)], [RNG.integers(0, 4, (3, 5))]),
}  # fmt: skip


def shifted(outputs: list[np.ndarray]) -> onnx.ModelProto:
    """A model whose parameters are added to its inputs: a parameter's gradient is that of an output."""
    dtype = helper.np_dtype_to_tensor_dtype(outputs[0].dtype)
    shapes = [["batch", *x.shape[1:]] for x in outputs]
    graph = helper.make_graph(
        [helper.make_node("Add", [f"x{i}", f"w{i}"], [f"y{i}"]) for i in range(len(outputs))], "shift",
        [helper.make_tensor_value_info(f"x{i}", dtype, s) for i, s in enumerate(shapes)],
        [helper.make_tensor_value_info(f"y{i}", dtype, s) for i, s in enumerate(shapes)],
        [onnx.numpy_helper.from_array(np.zeros_like(x), f"w{i}") for i, x in enumerate(outputs)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.sweep(0.26)
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_are_those_of_central_differences(name: str) -> None:
    loss, outputs, targets = SLOPES[name]
    step = gg.build(shifted(outputs), loss, gg.optim.sgd(1.0), backend="portable")
    fields = {f"x{i}": x for i, x in enumerate(outputs)}
    fields |= {t.name: x.astype(t.dtype) for t, x in zip(step.manifest.targets, targets, strict=True)}
    way = {f"w{i}": RNG.normal(size=x.shape) for i, x in enumerate(outputs)}
    rate = {"learning_rate": np.array(1.0, np.float32)}
    oracle = Oracle(step.train)
    at = oracle({**fields, **{k: 0 * v for k, v in way.items()}, **rate})
    slope = sum(float((-at[f"{k}.next"] * v).sum()) for k, v in way.items())
    eps = 1e-6
    above, below = (
        float(oracle({**fields, **{k: sign * eps * v for k, v in way.items()}, **rate})["loss"]) for sign in (1, -1)
    )
    assert slope == pytest.approx((above - below) / (2 * eps), rel=1e-6, abs=1e-9)


@pytest.mark.sweep(0.7)
@pytest.mark.parametrize("name", [n for n in SLOPES if n not in ("tversky", "lovasz")])
def test_models_of_float16_have_losses_of_float32(name: str) -> None:
    """Boxes of 300 × 300 pixels, whose area float16 cannot hold, among them."""
    loss, outputs, targets = SLOPES[name]
    if "-apart" in name:
        outputs, targets = [outputs[0] * 1000], [targets[0] * 1000]
    halves = [x.astype(np.float16) for x in outputs]
    step = gg.build(shifted(halves), loss, gg.optim.sgd(1.0))
    fields = {f"x{i}": x for i, x in enumerate(halves)} | {f"w{i}": 0 * x for i, x in enumerate(halves)}
    fields |= {t.name: x.astype(t.dtype) for t, x in zip(step.manifest.targets, targets, strict=True)}
    value = float(run(step.eval, fields)["loss"])
    singles = [x.astype(np.float32) for x in halves]
    wide = gg.build(shifted(singles), loss, gg.optim.sgd(1.0))
    fields = {f"x{i}": x for i, x in enumerate(singles)} | {f"w{i}": 0 * x for i, x in enumerate(singles)}
    fields |= {t.name: x.astype(step.manifest.targets[i].dtype).astype(t.dtype)
               for i, (t, x) in enumerate(zip(wide.manifest.targets, targets, strict=True))}  # fmt: skip
    assert value == pytest.approx(float(run(wide.eval, fields)["loss"]), rel=2e-3)


# --- errors ------------------------------------------------------------------------------------------------


def detr_loss_of(queries: int, objects: int) -> float:
    given = [np.zeros((1, queries, 4), np.float32), np.full((1, queries, 4), 0.5, np.float32)]
    step = gg.build(shifted(given), "detr", "sgd")
    fields = {"x0": given[0], "x1": given[1], "w0": given[0] * 0, "w1": given[1] * 0}
    targets = [np.zeros((1, objects), np.int64), np.full((1, objects, 4), 0.3, np.float32)]
    fields |= {t.name: x for t, x in zip(step.manifest.targets, targets, strict=True)}
    return float(run(step.eval, fields)["loss"])


@pytest.mark.sweep(0)
def test_more_objects_than_predictions_are_no_number() -> None:
    assert np.isfinite(detr_loss_of(3, 3))
    assert np.isnan(detr_loss_of(3, 4))


def test_a_step_says_that_there_are_more_objects_than_predictions() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits, self.boxes = nn.Linear(2, 3), nn.Linear(2, 4)

        def forward(self, x: Any) -> Any:  # of three predictions
            return self.logits(x), self.boxes(x).sigmoid()

    model = gg.frontend.export(Three(), {"x": ("batch", 3, 2)}, outputs=["logits", "boxes"])
    trainer = gg.Trainer(gg.build(model, "detr"), device="cpu")
    targets = {s.name: s.shape for s in trainer.manifest.targets}
    names = list(targets)
    batch = {"x": np.ones((1, 3, 2), np.float32), names[0]: np.zeros((1, 4), np.int64),
             names[1]: np.full((1, 4, 4), 0.5, np.float32)}  # fmt: skip
    with pytest.raises(gg.errors.DivergedError, match="more objects than the model predicts"):
        trainer.step(batch)
    assert np.isfinite(trainer.step({**batch, names[0]: np.array([[0, 1, 0, -1]])})["loss"])


REFUSED: dict[str, tuple[losses.Loss, list[tuple[int, ...]], str]] = {
    "no size": (losses.retinanet(), [(1, 90, 3), (1, 90, 4)], "the loss retinanet requires the height and width"),
    "no priors": (losses.ssd(), [(1, 90, 3), (1, 90, 4)], "the loss ssd requires the prior boxes"),
    "other priors": (losses.ssd([[0.5, 0.5, 0.1, 0.1]]), [(1, 90, 3), (1, 90, 4)], "the options of ssd result"
                     " in 1 priors, but the model has outputs for 90; pass the priors that"),
    "other cells": (losses.fcos((32, 32)), [(1, 30, 3), (1, 30, 4), (1, 30, 1)], "the options of fcos result in 23"
                    " points, but the model has outputs for 30"),
    "no classes": (losses.detr(), [(1, 30), (1, 30, 4)], r"must be scores of shape \[images, predictions, classes"),
    "boxes of 3": (losses.detr(), [(1, 30, 3), (1, 30, 3)], "boxes must have 4 numbers on the last axis"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_fit_are_refused(name: str) -> None:
    loss, shapes, says = REFUSED[name]
    with pytest.raises(gg.GradgraphError, match=says) as caught:
        gg.build(shifted([np.zeros(s, np.float32) for s in shapes]), loss)
    assert "\n" not in str(caught.value)


def test_arguments_that_cannot_be_meant() -> None:
    with pytest.raises(gg.GradgraphError, match="0 ≤ negative ≤ positive ≤ 1"):
        losses.retinanet(positive=0.3)
    with pytest.raises(gg.GradgraphError, match="must be two numbers above zero, for centres"):
        losses.ssd(np.full((3, 4), 0.5), variances=(0.1, 0.1, 0.2, 0.2))
    for priors in (np.zeros((3, 4)), np.full((3, 5), 0.5)):
        with pytest.raises(gg.GradgraphError, match="the priors of ssd must be an array"):
            losses.ssd(priors)
    with pytest.raises(gg.GradgraphError, match="a list of rows of numbers"):
        losses.ssd("priors.npy")
    with pytest.raises(gg.GradgraphError, match="not 'yxyx'"):
        losses.giou("yxyx")


# --- places ------------------------------------------------------------------------------------------------


def test_anchors_lie_as_torchvision_lays_them() -> None:
    """Its AnchorGenerator, written down: ratios height over width, cells row by row, from a corner shifted by half."""
    found = anchors((32, 48), (16,), 2.0, (1.0, 1.5), (0.5, 2.0)) * [48, 32, 48, 32]
    expected = []
    for y in (8, 24):
        for x in (8, 24, 40):
            for ratio in (0.5, 2.0):
                for scale in (1.0, 1.5):
                    side = 2.0 * 16 * scale
                    expected.append([x, y, side / ratio**0.5, side * ratio**0.5])
    np.testing.assert_allclose(found, expected)
    assert len(anchors((33, 17))) == 9 * sum(-(-33 // s) * -(-17 // s) for s in (8, 16, 32, 64, 128))
    np.testing.assert_array_equal(points((16, 24), (8, 16))[[0, 1, 3, 6, 7]],
                                  [[4, 4, 8], [12, 4, 8], [4, 12, 8], [8, 8, 16], [24, 8, 16]])  # fmt: skip
