"""Every loss that has a name: values and gradients of a step against PyTorch's, in float32 and exactly in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import losses
from gradgraph.frontend.anchors import anchors
from gradgraph.verify.reference import Oracle
from tests.kit.running import Loop, run

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch
F = torch.nn.functional
from tests.kit.detectors_by_hand import (  # noqa: E402
    ciou_loss,
    detr,
    diou_loss,
    drawn_boxes,
    fcos,
    giou_loss,
    iou_loss,
    retinanet,
    ssd,
)

RNG = np.random.default_rng(0)
N, C = 6, 5


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def unit(*shape: int) -> np.ndarray:
    return RNG.uniform(0.05, 0.95, size=shape)


def signs(*shape: int) -> np.ndarray:
    return RNG.choice([-1.0, 1.0], size=shape)


def labels(*shape: int) -> np.ndarray:
    return RNG.integers(0, C, shape)


def focal(x: Any, t: Any, gamma: float = 2.0, weight: Any = None, ignore: int = -100) -> Any:
    log_p = F.log_softmax(x, 1)
    kept = t != ignore
    at = torch.where(kept, t, 0)
    log_p = log_p.gather(1, at.unsqueeze(1)).squeeze(1)
    share = kept.to(x.dtype) if weight is None else weight[at] * kept
    return (-log_p * (1 - log_p.exp()) ** gamma * share).sum() / share.sum()


def sigmoid_focal(x: Any, t: Any, alpha: float = 0.25, gamma: float = 2.0) -> Any:
    """As torchvision has it."""
    p = torch.sigmoid(x)
    losses = F.binary_cross_entropy_with_logits(x, t, reduction="none") * (1 - (p * t + (1 - p) * (1 - t))) ** gamma
    return ((alpha * t + (1 - alpha) * (1 - t)) * losses if alpha >= 0 else losses).mean()


def dice(x: Any, t: Any, smooth: float = 1.0, activation: Callable[..., Any] = torch.sigmoid) -> Any:
    p, axes = activation(x), tuple(range(2, x.ndim)) or (1,)
    return (1 - (2 * (p * t).sum(axes) + smooth) / (p.sum(axes) + t.sum(axes) + smooth)).mean()


def tversky(x: Any, t: Any, alpha: float = 0.5, beta: float = 0.5, smooth: float = 1.0, ignore: int = -100) -> Any:
    kept = (t != ignore).unsqueeze(1)
    truth = F.one_hot(t.clamp(min=0), x.shape[1]).movedim(-1, 1) * kept
    p = torch.softmax(x, 1) * kept
    both, called, there = (y.flatten(2).sum(2) for y in (p * truth, p * (1 - truth), (1 - p) * truth))
    return (1 - (both + smooth) / (both + alpha * called + beta * there + smooth)).mean()


def lovasz(x: Any, t: Any, ignore: int = -100) -> Any:
    """As bermanmaxim/LovaszSoftmax has it, with the classes that are present."""
    kept = t != ignore
    p, t = torch.softmax(x, 1).movedim(1, -1)[kept], t[kept]
    found = []
    for c in t.unique():
        there = (t == c).to(x.dtype)
        errors, order = torch.sort((there - p[:, c]).abs(), descending=True)
        there = there[order]
        jaccard = 1 - (there.sum() - there.cumsum(0)) / (there.sum() + (1 - there).cumsum(0))
        found.append((errors * torch.diff(jaccard, prepend=jaccard.new_zeros(1))).sum())
    return torch.stack(found).mean()


def info_nce(q: Any, k: Any, temperature: float = 0.07) -> Any:
    return F.cross_entropy(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T / temperature, torch.arange(len(q)))


def clip(x: Any, y: Any, scale: float = 1 / 0.07) -> Any:
    return (info_nce(x, y, 1 / scale) + info_nce(y, x, 1 / scale)) / 2


def gap(x: Any) -> Any:
    return x[:, 0] - x[:, 1]


def dpo(p: Any, r: Any, beta: float = 0.1, smoothing: float = 0.0) -> Any:
    """As TRL has its sigmoid, with the smoothing of its CPO trainer."""
    x = beta * (gap(p) - gap(r))
    return (-F.logsigmoid(x) * (1 - smoothing) - F.logsigmoid(-x) * smoothing).mean()


def orpo(p: Any, n: Any, beta: float = 0.1) -> Any:
    a = p / n
    odds = gap(a) - gap(torch.log(-torch.expm1(a)))
    return -(a[:, 0] + beta * F.logsigmoid(odds)).mean()


def kto(p: Any, r: Any, y: Any, beta: float = 0.1, good: float = 1.0, bad: float = 1.0) -> Any:
    ratio, kl = (p - r)[:, 0], (p - r)[:, 1].mean().detach().clamp(min=0)
    chosen, rejected = (1 - torch.sigmoid(beta * s * (ratio - kl)) for s in (1, -1))
    return torch.cat([good * chosen[y > 0], bad * rejected[y == 0]]).mean()


X, Y, IMAGES = real(N, C), real(N, C), real(4, 3, 2, C)
MULTI = np.array(
    [[3, 0, -1, 1, 2], [1, 2, 3, -1, -1], [-1, 0, 1, 2, 3], [4, 3, 2, 1, 0], [0, -1, -1, -1, -1], [2, 4, -1, 0, 0]]
)
W = [0.5, 2.0, 1.0, 3.0, 0.2]
WT = torch.tensor(W, dtype=torch.float64)
TIES = np.repeat(np.array([[1.0, 0.0, 1.0, 0.5, 1.0]]), N, 0)
SCORES, SPELT = real(N, 9, C) * 2, RNG.integers(1, C, (N, 4))
SPELT[0] = [2, 2, 2, 3]  # repeated labels need a blank between them
STEPS, LENGTHS = np.array([9, 7, 4, 9, 5, 8]), np.array([4, 3, 2, 0, 1, 4])
SPELT[LENGTHS[:, None] <= np.arange(4)] = -7  # not read


def ctc(blank: int = 0, batch_first: bool = True, **options: Any) -> Callable[..., Any]:
    def theirs(x: Any, t: Any, steps: Any, lengths: Any) -> Any:
        log_p = F.log_softmax(x.transpose(0, 1) if batch_first else x, 2)
        return F.ctc_loss(log_p, t, steps, lengths, blank, **options)

    return theirs


# objects of pictures, −1 for none; the first picture has as many as there are predictions, the second none
CALLED = np.array([[1, 0, 2], [-1, -1, -1], [0, -1, 3], [2, 2, -1], [-1, 1, -1], [3, 0, 0]])
PLACED = np.where(CALLED[..., None] >= 0, drawn_boxes(1, N, 3), 0.0)
LAID = {"image_size": (32, 48), "strides": (8, 16)}
CELLS = {**LAID, "size": 2.0, "scales": (1.0, 1.5), "ratios": (0.5, 1.0)}
PRIORS = anchors(**CELLS)
APART = np.where(np.arange(N)[:, None, None] % 2, 1.5, 0.0) * [1, 0, 1, 0] + [0.1, 0.2, 0.3, 0.5] + unit(N, 1, 4) / 20
MET = {"xywh": drawn_boxes(2, N, 4), "cxcywh": drawn_boxes(6, N, 4)}
MET["xyxy"] = np.sort(drawn_boxes(3, N, 4).reshape(N, 4, 2, 2), 2).reshape(N, 4, 4)

ODDS, MET_ODDS = unit(N, 2) * 4, unit(N, 2) * 4
COUNTS, KINDS = np.array([[3.0, 1.0], [2, 2], [5, 1], [1, 4], [2, 3], [7, 7]]), np.array([1.0, 0, 0, 1, 1, 0])

Row = tuple[losses.Loss, Callable[..., Any], list[np.ndarray], list[np.ndarray]]
L = losses

# name -> ours; theirs, of outputs and then targets; the outputs; the targets
ROWS: dict[str, Row] = {
    "cross_entropy-z": (
        L.cross_entropy(ignore_index=2, label_smoothing=0.1, z_loss=0.3),
        lambda x, t: F.cross_entropy(x, t, ignore_index=2, label_smoothing=0.1)
        + 0.3 * (torch.logsumexp(x, 1) ** 2)[t != 2].mean(), [X], [labels(N)]),
    "cross_entropy-z-weight": (
        L.cross_entropy(W, reduction="sum", axis=-1, z_loss=0.3),
        lambda x, t: F.cross_entropy(x, t, WT, reduction="sum")
        + 0.3 * (WT[t] * torch.logsumexp(x, 1) ** 2).sum(), [X], [labels(N)]),
    "soft_cross_entropy": (L.soft_cross_entropy(), F.cross_entropy, [X], [unit(N, C)]),
    "soft_cross_entropy-options": (
        L.soft_cross_entropy(W, "sum", 0.2),
        lambda x, t: F.cross_entropy(x, t, WT, label_smoothing=0.2, reduction="sum"), [X], [unit(N, C)]),
    "soft_cross_entropy-last": (
        L.soft_cross_entropy(axis=-1),
        lambda x, t: F.cross_entropy(x.flatten(0, 2), t.flatten(0, 2)), [IMAGES], [unit(4, 3, 2, C)]),
    "smooth_l1": (L.smooth_l1(0.7), lambda x, t: F.smooth_l1_loss(x, t, beta=0.7), [X], [Y]),
    "smooth_l1-at-the-edge": (L.smooth_l1(0.5), lambda x, t: F.smooth_l1_loss(x, t, beta=0.5), [TIES], [TIES * 0]),
    "smooth_l1-0": (L.smooth_l1(0.0), lambda x, t: F.smooth_l1_loss(x, t, beta=0.0), [X], [Y]),
    "log_cosh": (L.log_cosh(), lambda x, t: torch.log(torch.cosh(x - t)).mean(), [X * 3], [Y]),
    "log_cosh-equal": (L.log_cosh(), lambda x, t: torch.log(torch.cosh(x - t)).mean(), [X], [X]),
    "bce": (L.bce(), F.binary_cross_entropy, [unit(N, C)], [unit(N, C)]),
    "kl_div": (L.kl_div(), lambda x, t: F.kl_div(x, t, reduction="none").mean(), [X], [unit(N, C)]),
    "kl_div-log-0": (L.kl_div(reduction="batchmean"), lambda x, t: F.kl_div(x, t, reduction="batchmean"),
                     [X], [np.round(unit(N, C))]),
    "kl_div-logs": (L.kl_div(True, "sum"), lambda x, t: F.kl_div(x, t, log_target=True, reduction="sum"), [X], [Y]),
    "poisson_nll": (L.poisson_nll(), F.poisson_nll_loss, [X], [np.abs(Y) * 3]),
    "poisson_nll-full": (
        L.poisson_nll(False, True), lambda x, t: F.poisson_nll_loss(x, t, False, True), [unit(N, C)],
        [np.round(np.abs(Y) * 3)]),
    "gaussian_nll": (L.gaussian_nll(), lambda x, v, t: F.gaussian_nll_loss(x, t, v), [X, unit(N, C)], [Y]),
    "gaussian_nll-full": (
        L.gaussian_nll(True, 1e-3, "sum"),
        lambda x, v, t: F.gaussian_nll_loss(x, t, v, True, 1e-3, "sum"), [X, unit(N, C)], [Y]),
    "hinge": (L.hinge(), lambda x, t: F.relu(1 - t * x).mean(), [X], [signs(N, C)]),
    "hinge-at-the-edge": (L.hinge(), lambda x, t: F.relu(1 - t * x).mean(), [TIES], [TIES * 0 + 1]),
    "hinge-squared": (L.hinge(0.5, True), lambda x, t: (F.relu(0.5 - t * x) ** 2).mean(), [X], [signs(N, C)]),
    "hinge_embedding": (L.hinge_embedding(0.7), lambda x, t: F.hinge_embedding_loss(x, t, 0.7), [X], [signs(N, C)]),
    "soft_margin": (L.soft_margin(), F.soft_margin_loss, [X], [signs(N, C)]),
    "multi_margin": (L.multi_margin(), F.multi_margin_loss, [X], [labels(N)]),
    "multi_margin-ties": (L.multi_margin(), F.multi_margin_loss, [TIES], [labels(N)]),
    "multi_margin-options": (
        L.multi_margin(2, 0.6, W), lambda x, t: F.multi_margin_loss(x, t, 2, 0.6, WT), [X], [labels(N)]),
    "multilabel_margin": (L.multilabel_margin(), F.multilabel_margin_loss, [X], [MULTI]),
    "multilabel_margin-ties": (L.multilabel_margin("sum"),
                               lambda x, t: F.multilabel_margin_loss(x, t, reduction="sum"), [TIES], [MULTI]),
    "multilabel_soft_margin": (L.multilabel_soft_margin(), F.multilabel_soft_margin_loss, [X], [np.round(unit(N, C))]),
    "multilabel_soft_margin-weight": (
        L.multilabel_soft_margin(W), lambda x, t: F.multilabel_soft_margin_loss(x, t, WT), [X], [np.round(unit(N, C))]),
    "cosine_embedding": (L.cosine_embedding(), F.cosine_embedding_loss, [X, Y], [signs(N)]),
    "cosine_embedding-margin": (
        L.cosine_embedding(0.3, "sum"), lambda x, y, t: F.cosine_embedding_loss(x, y, t, 0.3, reduction="sum"),
        [X, Y], [signs(N)]),
    "triplet": (L.triplet(), F.triplet_margin_loss, [X, Y, real(N, C)], []),
    "triplet-options": (
        L.triplet(2.0, 1.0, 1e-3, True, "sum"),
        lambda a, p, n: F.triplet_margin_loss(a, p, n, 2.0, 1.0, 1e-3, True, reduction="sum"), [X, Y, real(N, C)], []),
    "triplet-equal": (L.triplet(), F.triplet_margin_loss, [X, X, X], []),
    "info_nce": (L.info_nce(0.2), lambda q, k: info_nce(q, k, 0.2), [X, Y], []),
    "clip": (L.clip(5.0), lambda x, y: clip(x, y, 5.0), [X, Y], []),
    "focal": (L.focal(), focal, [X], [labels(N)]),
    "focal-options": (
        L.focal(1.5, W, 2), lambda x, t: focal(x, t, 1.5, WT, 2), [real(4, C, 3)], [labels(4, 3)]),
    "focal-0": (L.focal(0.0), F.cross_entropy, [X], [labels(N)]),
    "sigmoid_focal": (L.sigmoid_focal(), sigmoid_focal, [X], [np.round(unit(N, C))]),
    "sigmoid_focal-soft": (L.sigmoid_focal(-1, 3.0), lambda x, t: sigmoid_focal(x, t, -1, 3.0), [X], [unit(N, C)]),
    "ctc": (L.ctc(batch_first=True), ctc(), [SCORES], [SPELT, STEPS, LENGTHS]),
    "ctc-sum": (L.ctc(reduction="sum"), ctc(batch_first=False, reduction="sum"),
                [SCORES.swapaxes(0, 1)], [SPELT, STEPS, LENGTHS]),
    "ctc-blank": (L.ctc(4, True), ctc(4), [SCORES], [SPELT % 4, STEPS, LENGTHS]),
    "ctc-too-long": (L.ctc(0, True, True), ctc(zero_infinity=True), [SCORES], [SPELT, STEPS // 2, LENGTHS]),
    "ctc-no-steps": (L.ctc(0, True, True), ctc(zero_infinity=True), [SCORES], [SPELT, STEPS * 0, LENGTHS]),
    "iou": (L.iou(), iou_loss, [MET["xyxy"]], [MET["xyxy"][::-1]]),
    "iou-xywh": (L.iou("xywh"), lambda x, t: iou_loss(x, t, "xywh"), [MET["xywh"]], [MET["xywh"][::-1]]),
    "giou": (L.giou(), giou_loss, [MET["xyxy"]], [MET["xyxy"][::-1]]),
    "giou-cxcywh": (L.giou("cxcywh"), lambda x, t: giou_loss(x, t, "cxcywh"), [MET["cxcywh"]], [MET["xywh"]]),
    "giou-apart": (L.giou(), giou_loss, [APART], [APART[::-1]]),
    "giou-without-area": (L.giou(), giou_loss, [APART[..., [0, 1, 0, 3]]], [APART + np.array([-0.01, 0.02, 0, 0.03])]),
    "diou": (L.diou(), diou_loss, [MET["xyxy"]], [MET["xyxy"][::-1]]),
    "diou-apart": (L.diou(), diou_loss, [APART], [APART[::-1]]),
    "ciou-xyxy": (L.ciou(), ciou_loss, [MET["xyxy"]], [MET["xyxy"][::-1]]),
    "ciou-cxcywh": (L.ciou("cxcywh"), lambda x, t: ciou_loss(x, t, "cxcywh"), [MET["cxcywh"]], [MET["xywh"]]),
    "ciou-apart": (L.ciou(), ciou_loss, [APART], [APART[::-1]]),
    "detr": (L.detr(), detr, [real(N, 3, C), drawn_boxes(4, N, 3)], [CALLED, PLACED]),
    "detr-options": (L.detr(0.4, 2.0, 1.0, 3.0, 0.5, 2.0, 1.5),
                     lambda *x: detr(*x, 0.4, (2, 1, 3), (0.5, 2, 1.5)),
                     [real(N, 7, C), drawn_boxes(5, N, 7)], [CALLED, PLACED]),
    "detr-nothing": (L.detr(), detr, [real(N, 3, C), drawn_boxes(4, N, 3)], [CALLED * 0 - 1, PLACED]),
    "detr-no-room-for-any": (L.detr(), detr, [real(N, 3, C), drawn_boxes(4, N, 3)], [CALLED[:, :0], PLACED[:, :0]]),
    "retinanet": (L.retinanet(**CELLS), lambda *x: retinanet(*x, **CELLS),
                  [real(N, 120, 4), real(N, 120, 4)], [CALLED, PLACED]),
    "retinanet-no-room-for-any": (L.retinanet(**CELLS), lambda *x: retinanet(*x, **CELLS),
                  [real(N, 120, 4), real(N, 120, 4)], [CALLED[:, :0], PLACED[:, :0]]),
    "ssd": (L.ssd(PRIORS), lambda *x: ssd(*x, PRIORS), [real(N, 120, 5), real(N, 120, 4)], [CALLED, PLACED]),
    "ssd-options": (L.ssd(PRIORS, (1.0, 0.5), negatives=1.0), lambda *x: ssd(*x, PRIORS, (1.0, 0.5), 1.0),
                    [real(N, 120, 5), real(N, 120, 4)], [CALLED, PLACED]),
    "ssd-nothing": (L.ssd(PRIORS), lambda *x: ssd(*x, PRIORS) + 0 * x[0].sum(),
                    [real(N, 120, 5), real(N, 120, 4)], [CALLED * 0 - 1, PLACED]),
    "fcos": (L.fcos(**LAID), lambda *x: fcos(*x, **LAID),
             [real(N, 30, 4), unit(N, 30, 4) * 3, real(N, 30, 1)], [CALLED, PLACED]),
    "fcos-no-room-for-any": (L.fcos(**LAID), lambda *x: fcos(*x, **LAID),
             [real(N, 30, 4), unit(N, 30, 4) * 3, real(N, 30, 1)], [CALLED[:, :0], PLACED[:, :0]]),
    "dice": (L.dice(), dice, [IMAGES], [np.round(unit(4, 3, 2, C))]),
    "tversky": (L.tversky(), tversky, [real(4, C, 3, 2)], [labels(4, 3, 2)]),
    "tversky-options": (L.tversky(0.3, 0.7, 0.1, 2), lambda x, t: tversky(x, t, 0.3, 0.7, 0.1, 2),
                        [real(4, C, 3, 2)], [labels(4, 3, 2)]),
    "tversky-last": (L.tversky(axis=-1), lambda x, t: tversky(x.movedim(-1, 1), t), [IMAGES], [labels(4, 3, 2)]),
    "lovasz": (L.lovasz(), lovasz, [real(4, C, 3, 2)], [labels(4, 3, 2)]),
    "lovasz-options": (L.lovasz(2), lambda x, t: lovasz(x, t, 2), [real(4, C, 3, 2)], [labels(4, 3, 2)]),
    "lovasz-last": (L.lovasz(axis=-1), lambda x, t: lovasz(x.movedim(-1, 1), t), [IMAGES], [labels(4, 3, 2)]),
    "dpo": (L.dpo(), lambda p, r: dpo(p, r), [-ODDS], [-MET_ODDS]),
    "dpo-options": (L.dpo(0.7, 0.2, "sum"), lambda p, r: dpo(p, r, 0.7, 0.2) * N, [-ODDS * 99], [-MET_ODDS * 99]),
    "ipo": (L.ipo(0.3), lambda p, n, r: ((gap(p / n) - gap(r / n) - 1 / 0.6) ** 2).mean(),
            [-ODDS, COUNTS], [-MET_ODDS]),
    "orpo": (L.orpo(), orpo, [-ODDS, COUNTS], []),
    "orpo-sure": (L.orpo(0.5), lambda p, n: orpo(p, n, 0.5), [-ODDS * 1e-3, COUNTS], []),
    "simpo": (L.simpo(), lambda p, n: -F.logsigmoid(2 * gap(p / n) - 1).mean(), [-ODDS, COUNTS], []),
    "simpo-options": (L.simpo(3.0, 0.0, 0.1), lambda p, n: dpo(p / n, p * 0, 3.0, 0.1), [-ODDS, COUNTS], []),
    "kto": (L.kto(), kto, [-ODDS], [-MET_ODDS, KINDS]),
    "kto-options": (L.kto(0.5, 1.5, 0.7), lambda p, r, y: kto(p, r, y, 0.5, 1.5, 0.7), [-MET_ODDS], [-ODDS, KINDS]),
    "dice-vectors": (L.dice(0.1), lambda x, t: dice(x, t, 0.1), [X], [np.round(unit(N, C))]),
    "dice-softmax": (
        L.dice(1.0, "softmax"), lambda x, t: dice(x, t, 1.0, lambda x: torch.softmax(x, 1)), [IMAGES],
        [np.round(unit(4, 3, 2, C))]),
    "dice-nothing": (L.dice(1.0, "none"), lambda x, t: dice(x, t, 1.0, lambda x: x), [unit(N, C)], [X * 0]),
}  # fmt: skip


def shifted(outputs: list[np.ndarray], dynamic: bool = True) -> onnx.ModelProto:
    """A model of several outputs, each an input and a parameter added up: a parameter's gradient is its output's."""
    dtype = helper.np_dtype_to_tensor_dtype(outputs[0].dtype)
    shapes = [["batch", *x.shape[1:]] if dynamic else list(x.shape) for x in outputs]
    graph = helper.make_graph(
        [helper.make_node("Add", [f"x{i}", f"w{i}"], [f"y{i}"]) for i in range(len(outputs))], "shift",
        [helper.make_tensor_value_info(f"x{i}", dtype, s) for i, s in enumerate(shapes)],
        [helper.make_tensor_value_info(f"y{i}", dtype, s) for i, s in enumerate(shapes)],
        [onnx.numpy_helper.from_array(np.zeros_like(x), f"w{i}") for i, x in enumerate(outputs)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def fed(step: gg.Step, outputs: list[np.ndarray], targets: list[np.ndarray]) -> dict[str, np.ndarray]:
    names = [t.name for t in step.manifest.targets]
    dtypes = [np.dtype(t.dtype) for t in step.manifest.targets]
    given = {n: t.astype(d) for n, t, d in zip(names, targets, dtypes, strict=True)}
    return {**{f"x{i}": x for i, x in enumerate(outputs)}, **given}


def expected(theirs: Callable[..., Any], outputs: list[np.ndarray], targets: list[np.ndarray]) -> list[np.ndarray]:
    """The value and its gradients, in float64."""
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in outputs]
    value = theirs(*leaves, *(torch.tensor(t.astype(np.float64) if t.dtype.kind == "f" else t) for t in targets))
    gradients = torch.autograd.grad(value, leaves)
    return [value.detach().numpy(), *(g.numpy() for g in gradients)]


@pytest.mark.parametrize("name", ROWS)
def test_a_loss_is_that_of_torch(name: str) -> None:
    loss, theirs, outputs, targets = ROWS[name]
    narrow = [x.astype(np.float32) for x in outputs]
    step = gg.build(shifted(narrow), loss, gg.optim.sgd(1.0))
    loop = Loop(step)
    value = loop(fed(step, narrow, targets))["loss"]
    truth = expected(theirs, narrow, targets)
    assert (value.shape, value.dtype) == ((), np.float32)
    np.testing.assert_allclose(value, truth[0], rtol=2e-5, atol=1e-6)
    for i, gradient in enumerate(truth[1:]):
        np.testing.assert_allclose(-loop.state[f"w{i}"], gradient, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ROWS)
def test_in_float64_to_the_last_digits(name: str) -> None:
    """Through the oracle, which computes each operator in float64."""
    loss, theirs, outputs, targets = ROWS[name]
    step = gg.build(shifted(outputs), loss, gg.optim.sgd(1.0), backend="portable")
    zeros = {f"w{i}": np.zeros_like(x) for i, x in enumerate(outputs)}
    found = Oracle(step.train)({**fed(step, outputs, targets), **zeros, "learning_rate": np.array(1.0, np.float32)})
    value, *gradients = expected(theirs, outputs, targets)
    np.testing.assert_allclose(found["loss"], value, rtol=1e-12, atol=1e-14)
    for i, gradient in enumerate(gradients):
        np.testing.assert_allclose(-found[f"w{i}.next"], gradient, rtol=1e-9, atol=1e-14)
    if "-" not in name:  # onnxruntime has kernels for it in float64
        loop = Loop(gg.build(shifted(outputs), loss, gg.optim.sgd(1.0)))
        np.testing.assert_allclose(loop(fed(step, outputs, targets))["loss"], value, rtol=1e-10)


@pytest.mark.parametrize("name", [n for n in ROWS if "-" not in n])
def test_batches_of_every_size(name: str) -> None:
    loss, theirs, outputs, targets = ROWS[name]
    step = gg.build(shifted([x[:1].astype(np.float32) for x in outputs]), loss, gg.optim.sgd(1.0))
    loop = Loop(step)
    for rows in (1, 3, N):
        cut, compared = [x[:rows].astype(np.float32) for x in outputs], [t[:rows] for t in targets]
        truth = expected(theirs, cut, compared)[0]
        np.testing.assert_allclose(loop.evaluate(fed(step, cut, compared))["loss"], truth, rtol=1e-4, atol=1e-6)


def test_labels_that_do_not_fit_into_their_input_cost_infinitely_much() -> None:
    step = gg.build(shifted([SCORES.astype(np.float32)]), losses.ctc(batch_first=True), gg.optim.sgd(1.0))
    found = Loop(step)(fed(step, [SCORES.astype(np.float32)], [SPELT, STEPS * 0 + 2, LENGTHS]))
    assert float(found["loss"]) == np.inf


def test_ctc_as_a_function_for_any_sizes() -> None:
    """Time, rows and labels are all open; each row by itself."""
    from gradgraph.frontend import Input, export, functional

    model = export(
        lambda x, t, steps, lengths: functional.ctc_loss(functional.log_softmax(x, 2), t, steps, lengths, 0, "none"),
        {"x": ("T", "N", C), "t": Input(("N", "S"), "int64"), "steps": Input(("N",), "int64"),
         "lengths": Input(("N",), "int32")},
    )  # fmt: skip
    for rows, most in ((N, 9), (2, 9), (1, 11)):
        x = np.resize(SCORES, (most, rows, C)).astype(np.float32)
        steps, lengths = np.full(rows, most), LENGTHS[:rows]
        (found,) = run(model, {"x": x, "t": SPELT[:rows], "steps": steps, "lengths": lengths.astype(np.int32)}).values()
        given = torch.tensor(SPELT[:rows]), torch.tensor(steps), torch.tensor(lengths)
        truth = F.ctc_loss(F.log_softmax(torch.tensor(x), 2), *given, reduction="none")
        np.testing.assert_allclose(found, truth.numpy(), rtol=1e-5)


TRAJECTORIES = ["soft_cross_entropy", "smooth_l1", "poisson_nll", "multi_margin", "focal", "clip", "dice", "ctc"]


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_fifty_steps_go_where_those_of_torch_go(name: str) -> None:
    loss, theirs, outputs, targets = ROWS[name]
    outputs = [x.astype(np.float32) for x in outputs]
    step = gg.build(shifted(outputs), loss, gg.optim.adam(0.02))
    loop = Loop(step)
    inputs = [torch.tensor(x) for x in outputs]
    weights = [torch.zeros_like(x, requires_grad=True) for x in inputs]
    compared = [torch.tensor(t.astype(np.float32) if t.dtype.kind == "f" else t) for t in targets]
    optimizer = torch.optim.Adam(weights, 0.02)
    fields = fed(step, outputs, targets)
    ours, truth = [], []
    for _ in range(50):
        value = theirs(*(x + w for x, w in zip(inputs, weights, strict=True)), *compared)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        truth.append(value.item())
        ours.append(float(loop(fields)["loss"]))
    assert truth[-1] < truth[0]
    np.testing.assert_allclose(ours, truth, rtol=1e-4, atol=1e-5)


def test_every_loss_with_a_name_has_a_row() -> None:
    from tests.frontend.test_losses import TORCH

    assert {name.split("-")[0] for name in ROWS} | {row[0].name for row in TORCH.values()} >= set(losses.LOSSES) - {
        "ctc"
    }


def test_probabilities_of_0_and_1() -> None:
    """The value is PyTorch's; a logarithm of 0 has no gradient, where PyTorch's is up to 1e12."""
    p = np.array([[0.0, 1.0, 0.0, 1.0, 0.3]], np.float32)
    t = np.array([[0.0, 1.0, 1.0, 0.0, 1.0]], np.float32)
    step = gg.build(shifted([p]), "bce", gg.optim.sgd(1.0))
    loop = Loop(step)
    value = loop(fed(step, [p], [t]))["loss"]
    np.testing.assert_allclose(value, expected(F.binary_cross_entropy, [p], [t])[0], rtol=1e-6)
    np.testing.assert_allclose(-loop.state["w0"] * 5, [[1, -1, 0, 0, -1 / 0.3]], rtol=1e-5)


def test_regions_that_are_empty() -> None:
    nothing = np.zeros((2, 1, 3), np.float32)
    step = gg.build(shifted([nothing]), losses.dice(0.0, "none"), gg.optim.sgd(1.0))
    loop = Loop(step)
    assert float(loop(fed(step, [nothing], [nothing]))["loss"]) == 0.0
    assert np.isfinite(loop.state["w0"]).all()
