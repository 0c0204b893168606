"""Metrics from sums: against scikit-learn or their formula, over batches of any sizes, in training and evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import metrics
from gradgraph.frontend import Input
from gradgraph.frontend import functional as F
from tests.kit.running import resumed

RNG = np.random.default_rng(0)
N, C = 41, 4
SCORES = RNG.normal(size=(N, C)).astype(np.float32)
LABELS = RNG.integers(0, C - 1, N)  # the last class never occurs, and is called at times
YES = (RNG.random((N, 2)) < 0.4).astype(np.float32)
SIZES = (SCORES[:, :2] * 0.5 + RNG.normal(size=(N, 2)) + 3).astype(np.float32)


def model(*shapes: tuple[int, ...]) -> onnx.ModelProto:
    """Outputs y0, y1, …, each an input and a parameter added up."""
    count = range(len(shapes))
    dims = [["batch", *shape] for shape in shapes]
    graph = helper.make_graph(
        [helper.make_node("Add", [f"x{i}", f"w{i}"], [f"y{i}"]) for i in count],
        "shift",
        [helper.make_tensor_value_info(f"x{i}", 1, dims[i]) for i in count],
        [helper.make_tensor_value_info(f"y{i}", 1, dims[i]) for i in count],
        [onnx.numpy_helper.from_array(np.zeros((1, *shapes[i]), np.float32), f"w{i}") for i in count],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def matrix(called: np.ndarray, truth: np.ndarray, classes: int = C) -> np.ndarray:
    found = np.zeros((classes, classes))
    np.add.at(found, (truth.ravel(), called.ravel()), 1)
    return found


def by_sklearn(name: str, truth: np.ndarray, called: np.ndarray, **options: Any) -> Any:
    found = pytest.importorskip("sklearn.metrics", reason="compares with scikit-learn")
    return getattr(found, name)(truth.ravel(), called.ravel(), zero_division=0, **options)


def of_scores(name: str, truth: np.ndarray, scores: np.ndarray, **options: Any) -> Any:
    found = pytest.importorskip("sklearn.metrics", reason="compares with scikit-learn")
    return getattr(found, name)(truth, scores, **options)


def of_those_there(name: str, scores: np.ndarray, average: str) -> Any:
    """Each of the classes that occur against the rest."""
    yes = np.eye(C)[LABELS][:, : C - 1]
    if average == "micro":
        return of_scores(name, np.eye(C)[LABELS].ravel(), scores.ravel())
    each = [of_scores(name, yes[:, c], scores[:, c]) for c in range(C - 1)]
    if average == "none":
        return [*each, math.nan if name == "roc_auc_score" else 0.0]
    return np.average(each, weights=yes.sum(0) if average == "weighted" else None)


def calibration_error(p: np.ndarray, hit: np.ndarray, bins: int) -> float:
    """As Guo et al. write it: a loop over bins (m, M]."""
    found = 0.0
    for m in range(bins):
        here = (p > m / bins) & (p <= (m + 1) / bins)
        if here.any():
            found += here.mean() * abs(hit[here].mean() - p[here].mean())
    return found


CALLED = SCORES.argmax(1)
NLL = -(SCORES - np.log(np.exp(SCORES).sum(1, keepdims=True)))[np.arange(N), LABELS]
D = SCORES[:, :2] - SIZES
P = np.exp(SCORES.astype(np.float64)) / np.exp(SCORES.astype(np.float64)).sum(1, keepdims=True)
P_YES = 1 / (1 + np.exp(-SCORES[:, :2].astype(np.float64)))
TIED = np.round(SCORES * 2)  # scores with many ties
P_TIED = np.exp((TIED - TIED.max(1, keepdims=True)).astype(np.float64))
P_TIED /= P_TIED.sum(1, keepdims=True)  # in this order, which decides what ties in the last bit
TWO = LABELS % 2
RANKED = {"roc_auc": "roc_auc_score", "average_precision": "average_precision_score"}
SENTENCES = RNG.integers(0, 3, (N, 7))  # labels 0, 1 and 2, and what is found of them
FOUND = np.eye(3)[np.where(RNG.random((N, 7)) < 0.3, RNG.integers(0, 3, (N, 7)), SENTENCES)]
BY_TIME = gg.losses.cross_entropy(axis=-1)
SKLEARN = {"precision": "precision_score", "recall": "recall_score", "f1": "f1_score", "iou": "jaccard_score"}


def edits(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The fewest, as the recurrence says."""
    distance = {(i, j): i + j for i in range(len(a) + 1) for j in range(len(b) + 1)}
    for i, j in ((i, j) for i in range(1, len(a) + 1) for j in range(1, len(b) + 1)):
        replaced = distance[i - 1, j - 1] + (a[i - 1] != b[j - 1])
        distance[i, j] = min(distance[i - 1, j] + 1, distance[i, j - 1] + 1, replaced)
    return distance[len(a), len(b)]


def words(labels: Any) -> list[str]:
    return "".join("ab "[label] for label in labels).split()


EDITS = [edits(a, b) for a, b in zip(FOUND.argmax(-1), SENTENCES, strict=True)]
EDITS_OF_WORDS = [edits(words(a), words(b)) for a, b in zip(FOUND.argmax(-1), SENTENCES, strict=True)]

# the metric, its loss, prediction, target -> its value
CASES: dict[str, tuple[Any, Any, np.ndarray, np.ndarray, Any]] = {
    **{
        f"{name}-{average}": (
            getattr(metrics, name)(average=average), "cross_entropy", SCORES, LABELS,
            lambda n=theirs, a=average: by_sklearn(n, LABELS, CALLED, average=None if a == "none" else a))
        for name, theirs in SKLEARN.items() for average in ("macro", "micro", "weighted", "none")
    },
    **{
        f"{name}-yes-or-no": (getattr(metrics, name)(average="binary"), "bce_with_logits", SCORES[:, :2], YES,
                              lambda n=theirs: by_sklearn(n, YES, SCORES[:, :2] > 0))
        for name, theirs in SKLEARN.items()
    },
    "balanced_accuracy": ("balanced_accuracy", "cross_entropy", SCORES, LABELS,
                          lambda: np.mean([(c == CALLED)[c == LABELS].mean() for c in range(C - 1)])),
    "confusion_matrix": ("confusion_matrix", "cross_entropy", SCORES, LABELS, lambda: matrix(CALLED, LABELS)),
    "accuracy": ("accuracy", "cross_entropy", SCORES, LABELS, lambda: (CALLED == LABELS).mean()),
    "accuracy-yes-or-no": ("accuracy", "bce_with_logits", SCORES[:, :2], YES,
                           lambda: ((SCORES[:, :2] > 0) == (YES > 0.5)).mean()),
    "accuracy-of-probabilities": ("accuracy", "bce", 1 / (1 + np.exp(-SCORES[:, :2])), YES,
                                  lambda: ((SCORES[:, :2] > 0) == (YES > 0.5)).mean()),
    "top_2": (metrics.top_k(2), "cross_entropy", SCORES, LABELS,
              lambda: (np.argsort(-SCORES, 1)[:, :2] == LABELS[:, None]).any(1).mean()),
    "top_5": ("top_k", "cross_entropy", SCORES, LABELS, lambda: 1.0),
    "perplexity": ("perplexity", "cross_entropy", SCORES, LABELS, lambda: np.exp(NLL.astype(np.float64).mean())),
    "mcc": ("mcc", "cross_entropy", SCORES, LABELS, lambda: of_scores("matthews_corrcoef", LABELS, CALLED)),
    "mcc-yes-or-no": ("mcc", "bce_with_logits", SCORES[:, :2], YES,
                      lambda: of_scores("matthews_corrcoef", YES.ravel(), SCORES[:, :2].ravel() > 0)),
    "mcc-of-one-class": ("mcc", "cross_entropy", SCORES, np.zeros_like(LABELS), lambda: 0.0),
    **{
        f"cohen_kappa-{weights}": (
            metrics.cohen_kappa(weights), "cross_entropy", SCORES, LABELS,
            lambda w=weights: of_scores("cohen_kappa_score", LABELS, CALLED, weights=w, labels=range(C)))
        for weights in (None, "linear", "quadratic")
    },
    "exact_match": ("exact_match", "bce_with_logits", SCORES[:, :2], YES,
                    lambda: of_scores("accuracy_score", YES > 0, SCORES[:, :2] > 0)),
    "exact_match-of-classes": ("exact_match", "cross_entropy", SCORES, LABELS, lambda: (CALLED == LABELS).mean()),
    "log_loss": ("log_loss", "cross_entropy", SCORES, LABELS,
                 lambda: of_scores("log_loss", LABELS, P, labels=range(C))),
    "log_loss-yes-or-no": ("log_loss", "bce_with_logits", SCORES[:, :2], YES,
                           lambda: of_scores("log_loss", YES.ravel(), P_YES.ravel())),
    "log_loss-of-probabilities": ("log_loss", "bce", P_YES, YES,
                                  lambda: of_scores("log_loss", YES.ravel(), P_YES.ravel())),
    "log_loss-of-shares": (metrics.log_loss(probable=True), "cross_entropy", P, LABELS,
                           lambda: of_scores("log_loss", LABELS, P, labels=range(C))),
    "brier": ("brier", "cross_entropy", SCORES, LABELS,
              lambda: of_scores("brier_score_loss", LABELS, P, labels=range(C))),
    "brier-of-two": ("brier", "cross_entropy", np.log(P_YES / P_YES.sum(1, keepdims=True)), TWO,
                     lambda: of_scores("brier_score_loss", TWO, (P_YES / P_YES.sum(1, keepdims=True))[:, 1])),
    "brier-yes-or-no": ("brier", "bce_with_logits", SCORES[:, :2], YES,
                        lambda: of_scores("brier_score_loss", YES.ravel(), P_YES.ravel())),
    "brier-of-probabilities": ("brier", "bce", P_YES, YES,
                               lambda: of_scores("brier_score_loss", YES.ravel(), P_YES.ravel())),
    **{
        f"ece-{bins}": (metrics.ece(bins), "cross_entropy", SCORES, LABELS,
                        lambda b=bins: calibration_error(P.max(1), CALLED == LABELS, b))
        for bins in (1, 5, 15)
    },
    "ece-yes-or-no": ("ece", "bce_with_logits", SCORES[:, :2], YES, lambda: calibration_error(
        np.maximum(P_YES, 1 - P_YES).ravel(), ((P_YES > 0.5) == (YES > 0)).ravel(), 15)),
    **{
        f"{name}-{average}{'-of-ties' if tied else ''}": (
            getattr(metrics, name)(average), "cross_entropy", TIED if tied else SCORES, LABELS,
            lambda n=theirs, a=average, p=P_TIED if tied else P: of_those_there(n, p, a))
        for name, theirs in RANKED.items() for average in ("macro", "micro", "weighted", "none")
        for tied in (False, True)
    },
    **{
        f"{name}-yes-or-no-{average}-{loss}": (
            getattr(metrics, name)(average), loss, x, YES,
            lambda n=theirs, a=average, x=x: of_scores(n, YES, x, average=None if a == "none" else a))
        for name, theirs in RANKED.items() for average in ("macro", "micro", "weighted", "none")
        for loss, x in (("bce_with_logits", TIED[:, :2]), ("bce", P_YES))
    },
    **{
        f"{name}-of-two": (getattr(metrics, name)("binary"), "cross_entropy", TIED[:, :2], TWO,
                           lambda n=theirs: of_scores(n, TWO, TIED[:, 1] - TIED[:, 0]))
        for name, theirs in RANKED.items()
    },
    "edit_distance": ("edit_distance", BY_TIME, FOUND, SENTENCES, lambda: np.mean(EDITS)),
    "cer": ("cer", BY_TIME, FOUND, SENTENCES, lambda: np.sum(EDITS) / SENTENCES.size),
    "wer": ("wer", BY_TIME, FOUND, SENTENCES, lambda: np.sum(EDITS) / SENTENCES.size),
    "wer-of-letters": (metrics.wer(space=2), BY_TIME, FOUND, SENTENCES,
                       lambda: np.sum(EDITS_OF_WORDS) / sum(len(words(row)) for row in SENTENCES)),
    "mape": ("mape", "huber", SCORES[:, :2], SIZES,
             lambda: of_scores("mean_absolute_percentage_error", SIZES, SCORES[:, :2])),
    "explained_variance": ("explained_variance", "huber", SCORES[:, :2], SIZES,
                           lambda: of_scores("explained_variance_score", SIZES, SCORES[:, :2])),
    "reward_accuracy": ("reward_accuracy", "dpo", SCORES[:, :2], SIZES,
                        lambda: ((SCORES[:, 0] - SIZES[:, 0]) > (SCORES[:, 1] - SIZES[:, 1])).mean()),
    "mae": ("mae", "huber", SCORES[:, :2], SIZES, lambda: np.abs(D).mean()),
    "mse": ("mse", "huber", SCORES[:, :2], SIZES, lambda: (D**2).mean()),
    "rmse": ("rmse", "huber", SCORES[:, :2], SIZES, lambda: np.sqrt((D**2).mean())),
    "r2": ("r2", "huber", SCORES[:, :2], SIZES,
           lambda: (1 - (D**2).sum(0) / ((SIZES - SIZES.mean(0)) ** 2).sum(0)).mean()),
}  # fmt: skip


def test_every_metric_has_a_case() -> None:
    tried = {getattr(metric, "name", metric) for metric, *_ in CASES.values()}
    assert tried == {*metrics.METRICS} - {"token_accuracy"}  # which has a test of its own


@pytest.mark.sweep(0.08)
@pytest.mark.parametrize("name", CASES)
def test_a_metric_is_exact_over_unequal_batches(name: str) -> None:
    metric, loss, x, target, value = CASES[name]
    step = gg.build(model(x.shape[1:]), loss, gg.optim.sgd(0.0), metrics=metric)
    column = name.split("-")[0]
    trainer, feeds = gg.Trainer(step), {"x0": x.astype(np.float32), "target": target}
    for size in (7, N):
        np.testing.assert_allclose(trainer.evaluate(feeds, size)[column], value(), rtol=2e-5)
    if step.manifest.measures and step.manifest.measures[-1].rows:
        assert column not in trainer.step(feeds, learning_rate=0.0)
    else:
        np.testing.assert_allclose(trainer.step(feeds, learning_rate=0.0)[column], value(), rtol=2e-5)


@pytest.mark.parametrize("name", RANKED)
def test_what_ranks_samples_counts_those_that_count(name: str, tmp_path: Path) -> None:
    """A mask and ignored labels leave samples out, weights of samples do not; of one class there is no area."""
    mask, weights = RNG.random(N) < 0.7, RNG.random(N).astype(np.float32)
    loss = gg.losses.cross_entropy(ignore_index=2)
    step = gg.build(model((3,)), loss, gg.optim.sgd(0.0), mask=True, sample_weight=True, metrics=f"{name}('none')")
    step.save(tmp_path / "step")
    trainer = gg.Trainer(tmp_path / "step")
    feeds = {"x0": TIED[:, :3], "target": LABELS, "mask": mask, "sample_weight": weights}
    kept, p = mask & (LABELS != 2), np.exp((TIED[:, :3] - TIED[:, :3].max(1, keepdims=True)).astype(np.float64))
    p /= p.sum(1, keepdims=True)
    wanted = [of_scores(RANKED[name], LABELS[kept] == c, p[kept, c]) for c in (0, 1)]
    found = trainer.evaluate(feeds, 23)[name]
    np.testing.assert_allclose(found[:2], wanted, rtol=1e-6)
    one = trainer.evaluate({**feeds, "target": np.zeros_like(LABELS)}, 23)[name]
    np.testing.assert_equal(one, [math.nan] * 3 if name == "roc_auc" else [1.0, 0.0, 0.0])
    wrong = {**feeds, "x0": np.full_like(TIED[:, :3], math.nan)}
    assert np.isnan(trainer.evaluate(wrong)[name]).all()


def test_what_ranks_samples_is_a_column_of_validation_alone() -> None:
    step = gg.build(model((C,)), "cross_entropy", gg.optim.sgd(0.1), metrics=["roc_auc", "accuracy"])
    feeds = {"x0": SCORES, "target": LABELS}
    trainer = gg.Trainer(step)
    history = trainer.fit(feeds, 2, 6, validation=feeds, progress=False, patience=2, monitor="val_roc_auc")
    assert [*history] == [
        "epoch",
        "step",
        "loss",
        "accuracy",
        "val_loss",
        "val_accuracy",
        "val_roc_auc",
        "learning_rate",
    ]
    assert max(history["val_roc_auc"]) == trainer.evaluate(feeds)["roc_auc"]
    with pytest.raises(gg.GradgraphError, match="no column 'val_roc_auc' to monitor; pass validation data"):
        trainer.fit(feeds, 2, progress=False, patience=2, monitor="val_roc_auc")


def test_probabilities_are_seen_where_the_model_gives_them(caplog: pytest.LogCaptureFixture) -> None:
    """A Softmax or Sigmoid that the loss reads as it is, is not taken a second time."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, 4] p) <float[4] w = {0, 0, 0, 0}> {
        scores = Add (x, w)
        p = Softmax <axis = 1> (scores)
    }"""
    chosen = ["log_loss", "brier", "ece", "roc_auc('macro')"]
    options = {"loss": gg.losses.nll(), "optimizer": gg.optim.sgd(0.0), "metrics": chosen, "output": "p"}
    step = gg.build(onnx.parser.parse_model(text), **options)
    assert "output 'p' contains probabilities" in caplog.text
    found = gg.Trainer(step).evaluate({"x": SCORES, "target": LABELS})
    wanted = gg.build(model((C,)), "cross_entropy", gg.optim.sgd(0.0), metrics=chosen)
    expected = gg.Trainer(wanted).evaluate({"x0": SCORES, "target": LABELS})
    for name in ("log_loss", "brier", "ece", "roc_auc"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


def test_whole_texts_are_hit_where_every_token_is() -> None:
    x, target = np.round(RNG.normal(size=(N, 2, C))).astype(np.float32), RNG.integers(0, C, (N, 2))
    target[RNG.random((N, 2)) < 0.3] = 0
    loss = gg.losses.cross_entropy(ignore_index=0, axis=-1)
    found = gg.Trainer(gg.build(model((2, C)), loss, metrics="exact_match")).evaluate({"x0": x, "target": target}, 9)
    hit = ((x.argmax(-1) == target) | (target == 0)).all(1)[(target != 0).any(1)]
    assert 0 < hit.mean() < 1 and found["exact_match"] == pytest.approx(hit.mean(), rel=1e-6)


def test_a_metric_of_an_epoch_is_a_column_and_of_each_class_several() -> None:
    chosen = ["accuracy", "rmse"], ["accuracy", metrics.f1(average="none"), "confusion_matrix", "perplexity"]
    with pytest.raises(gg.errors.BuildError, match="compares numbers"):
        gg.build(model((C,)), "cross_entropy", metrics=chosen[0])
    step = gg.build(model((C,)), "cross_entropy", gg.optim.sgd(0.0), metrics=chosen[1])
    feeds = {"x0": SCORES, "target": LABELS}
    history = gg.Trainer(step).fit(feeds, 2, 6, validation=feeds, progress=False)
    assert step.manifest.metrics == ("accuracy",)
    columns = ["accuracy", "f1.0", "f1.1", "f1.2", "f1.3", "perplexity"]
    assert list(history) == [
        "epoch",
        "step",
        "loss",
        *columns,
        "val_loss",
        *(f"val_{c}" for c in columns),
        "learning_rate",
    ]
    for column in columns:
        np.testing.assert_allclose(history[column], history[f"val_{column}"], rtol=1e-5)


TRUE = ["abc ab d", "dad cab", "a", "bad cabbad", "cab  dad", "", ""]
HEARD = ["abd ab", "dad cab", "", "bad ca bad", "cab dda d", "", "d"]


def spelt(text: str) -> list[int]:
    return [" abcd".index(letter) + 1 for letter in text]


def frames(labels: list[int]) -> list[int]:
    """A path of CTC that spells them: some twice, and a blank (0) between two that are equal."""
    between = [[0] * (a == b or i % 3 == 0) for i, (a, b) in enumerate(itertools.pairwise(labels))]
    repeated = [[label] * (1 + i % 2) for i, label in enumerate(labels)]
    return [x for pair in zip(repeated, [*between, []], strict=False) for part in pair for x in part]


def rows_of(sequences: list[list[int]], fill: int) -> np.ndarray:
    width = max(map(len, sequences)) + 1
    return np.array([row + [fill] * (width - len(row)) for row in sequences])


@pytest.mark.sweep(0.47)
@pytest.mark.parametrize(("rows", "wanted"), [
    (slice(5), (1.4, 0.20588235294117646, 0.7)),  # jiwer 4.0.0: process_characters, process_words
    (slice(2, 4), (1.0, 0.18181818181818182, 1.0)),
    (slice(5, 6), (0.0, math.nan, math.nan)),  # nothing is true, and nothing found
    (slice(5, 7), (0.5, math.inf, math.inf)),
])  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_error_rates_of_what_ctc_spells(first: bool, rows: slice, wanted: tuple[float, ...], tmp_path: Path) -> None:
    """Repeats, blanks, padding that would be labels, samples that are empty or do not count; batches of any size."""
    paths, labels = [frames(spelt(text)) for text in HEARD], [spelt(text) for text in TRUE]
    found = np.eye(6)[rows_of(paths, 4)]  # behind their ends: labels
    shape = (found.shape[1], 6)
    step = gg.build(
        by_time(shape) if not first else model(shape), gg.losses.ctc(batch_first=first), gg.optim.sgd(0.0),
        mask=["batch"], metrics=["edit_distance", "cer", "wer(space=1)"],
    )  # fmt: skip
    step.save(tmp_path / "step")
    feeds = {
        "x0": found, "target": rows_of(labels, 3), "mask": np.isin(np.arange(len(TRUE)), np.arange(len(TRUE))[rows]),
        "input_lengths": np.array([*map(len, paths)]), "target_lengths": np.array([*map(len, labels)]),
    }  # fmt: skip
    figures = gg.Trainer(tmp_path / "step").evaluate(feeds, 3)
    np.testing.assert_allclose([figures[name] for name in ("edit_distance", "cer", "wer")], wanted, rtol=1e-6)


def by_time(shape: tuple[int, ...]) -> onnx.ModelProto:
    """``model``, with times before samples."""
    made = model(shape)
    made.graph.node[0].output[0] = "by_sample"
    made.graph.node.append(helper.make_node("Transpose", ["by_sample"], ["y0"], perm=[1, 0, 2]))
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y0", 1, [shape[0], "batch", shape[1]]))
    return made


def test_error_rates_leave_padding_out() -> None:
    """Labels that are ignored, wherever they are, count neither in what is true nor in what is found there."""
    target = np.where(RNG.random(SENTENCES.shape) < 0.3, 9, SENTENCES)
    loss = gg.losses.cross_entropy(axis=-1, ignore_index=9)
    step = gg.build(model(FOUND.shape[1:]), loss, gg.optim.sgd(0.0), metrics=["edit_distance", "wer(space=2)"])
    found = gg.Trainer(step).evaluate({"x0": FOUND.astype(np.float32), "target": target}, 9)
    pairs = [(f.argmax(-1)[t != 9], t[t != 9]) for f, t in zip(FOUND, target, strict=True)]
    assert found["edit_distance"] == pytest.approx(np.mean([edits(a, b) for a, b in pairs]), rel=1e-6)
    of_words = [(edits(words(a), words(b)), len(words(b))) for a, b in pairs]
    assert found["wer"] == pytest.approx(np.divide(*np.sum(of_words, axis=0)), rel=1e-6)


@pytest.mark.parametrize("time", [3])
def test_tokens_with_padding(time: int) -> None:
    x, target = RNG.normal(size=(N, time, C)).astype(np.float32), RNG.integers(0, C, (N, time))
    target[RNG.random((N, time)) < 0.3] = 0
    loss = gg.losses.cross_entropy(ignore_index=0, axis=-1)
    step = gg.build(model((time, C)), loss, gg.optim.sgd(0.0), metrics=["token_accuracy", "f1", "perplexity"])
    target[:, 0] = 1
    kept = target != 0
    found = gg.Trainer(step).evaluate({"x0": x, "target": target}, 9)
    assert found["token_accuracy"] == pytest.approx((x.argmax(-1) == target)[kept].mean())
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-5)
    found_f1 = by_sklearn("f1_score", target[kept], x.argmax(-1)[kept], average="macro")
    assert found["f1"] == pytest.approx(found_f1, rel=1e-5)


def test_masks_count_in_metrics_and_weights_do_not() -> None:
    mask = RNG.random(N) < 0.5
    step = gg.build(
        model((C,)), "cross_entropy", gg.optim.sgd(0.0), mask=True, sample_weight=True, metrics=["recall", "accuracy"]
    )
    feeds = {"x0": SCORES, "target": LABELS, "mask": mask, "sample_weight": RNG.random(N).astype(np.float32)}
    found = gg.Trainer(step).evaluate(feeds, 10)
    assert found["accuracy"] == pytest.approx((CALLED == LABELS)[mask].mean())
    assert found["recall"] == pytest.approx(by_sklearn("recall_score", LABELS[mask], CALLED[mask], average="macro"))


SEVERAL = {"y0": "cross_entropy", "y1": ("huber", 0.1)}
FEEDS = {"x0": SCORES, "x1": SCORES[:, :2], "y0_target": LABELS, "y1_target": SIZES}


def test_metrics_of_several_outputs() -> None:
    default = gg.build(model((C,), (2,)), SEVERAL, gg.optim.sgd(0.0))
    assert [m.name for m in default.manifest.measures] == ["y0_loss", "y1_loss", "loss", "y0_accuracy"]
    step = gg.build(model((C,), (2,)), SEVERAL, gg.optim.sgd(0.0), metrics={"y0": ["f1", "accuracy"], "y1": "rmse"})
    found = gg.Trainer(step).evaluate(FEEDS, 6)
    assert found["y0_accuracy"] == pytest.approx((CALLED == LABELS).mean())
    assert found["y1_rmse"] == pytest.approx(np.sqrt((D**2).mean()), rel=1e-5)
    assert "y0_f1" in found


def test_functions_are_metrics(tmp_path: Path) -> None:
    """A number is averaged over samples, a pair is a quotient of sums, and sums of a metric are finished as it is."""

    def width(out: Any, batch: Any) -> Any:
        return (out["y1"][:, 0] - out["y1"][:, 1]).abs().mean()

    step = gg.build(
        model((C,), (2,)), SEVERAL, gg.optim.sgd(0.0),
        metrics=[width, {
            "relative": lambda out, batch: ((out["y1"] - batch["y1_target"]).abs().sum(), batch["y1_target"].sum()),
            "sum": lambda out, batch: metrics.rmse()(out["y1"].sum(1), batch["y1_target"].sum(1)),
            "weight": lambda out, batch: out["w0"].square().sum(),
        }],
    )  # fmt: skip
    step.save(tmp_path / "step")
    found = gg.Trainer(tmp_path / "step").evaluate(FEEDS, 6)
    assert found["width"] == pytest.approx(np.abs(SCORES[:, 0] - SCORES[:, 1]).mean(), rel=1e-5)
    assert found["relative"] == pytest.approx(np.abs(D).sum() / SIZES.sum(), rel=1e-5)
    assert found["sum"] == pytest.approx(np.sqrt((D.sum(1) ** 2).mean()), rel=1e-5)
    assert found["weight"] == 0.0


def test_functions_beside_a_loss_that_is_one() -> None:
    """Targets by the names that the loss uses; inner values stay, and are no outputs."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, 4] score) <float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
        h = MatMul (x, w)
        first = Tanh (h)
        second = Tanh (h)
        score = Add (first, second)
    }"""
    step = gg.build(
        onnx.parser.parse_model(text),
        lambda out, batch: F.cross_entropy(out["score"], batch["score"]),
        gg.optim.sgd(0.0),
        targets={"score": Input(("batch",), "int64")},
        metrics={"f1": lambda out, batch: metrics.f1()(out["score"], batch["score"]),
                 "inner": lambda out, batch: out["second"].mean()},
    )  # fmt: skip
    assert step.manifest.outputs == ("score",)
    found = gg.Trainer(step).evaluate({"x": SCORES, "score_target": LABELS}, 8)
    assert found["f1"] == pytest.approx(by_sklearn("f1_score", LABELS, CALLED, average="macro"), rel=1e-5)
    assert found["inner"] == pytest.approx(np.tanh(SCORES).mean(), rel=1e-4)


def test_resume_is_exact_to_the_bit(tmp_path: Path) -> None:
    step = gg.build(model((C,)), "cross_entropy", gg.optim.adam(1e-2), metrics=["f1", "confusion_matrix"])
    feeds = {"x0": SCORES, "target": LABELS}
    again, _ = resumed(step, feeds, tmp_path, 10, epochs=3, batch_size=6)
    assert [i.name for i in again.export().graph.input] == ["x0"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown one": ({"metrics": "f2"}, "there is no metric 'f2'"),
    "an unknown option": ({"metrics": "f1(avg='macro')"}, "has no argument 'avg'"),
    "no call": ({"metrics": "f1 + f1"}, "there is no metric"),
    "an average": ({"metrics": "f1(average='mean')"}, "the average of f1 is 'mean'"),
    "no scores": ({"metrics": "top_k(k=0)"}, "at least 1"),
    "a kappa": ({"metrics": "cohen_kappa('cubic')"}, "use 'linear', 'quadratic' or None"),
    "no bins": ({"metrics": "ece(bins=0)"}, "at least 1"),
    "a rival's": ({"metrics": "auroc"}, "'roc_auc'"),
    "something else": ({"metrics": 3.5}, "3.5 is not a metric"),
    "two of a name": ({"metrics": ["f1", metrics.f1("none")]}, "two metrics are called 'f1'"),
    "no name": ({"metrics": [lambda out, batch: 1]}, "needs a column"),
    "one argument": ({"metrics": {"m": lambda out: 1}}, "has two parameters"),
    "no tensor": ({"metrics": {"m": lambda out, batch: 1}}, "returned 1; return a scalar"),
    "a vector": ({"metrics": {"m": lambda out, batch: out["y0"]}}, "did not return a scalar"),
    "another output": ({"metrics": {"y1": "f1"}}, "no loss compares 'y1'"),
    "no sequences": ({"loss": "cross_entropy", "metrics": "cer"}, r"requires targets \[rows, times\] of class indices"),
    "labels of numbers": ({"loss": "mse", "metrics": "f1"}, "a loss whose targets are class indices"),
    "which of several": ({"loss": {"y0": "mse", "y1": "l1"}, "metrics": "mae"}, "name its output"),
    "beside a function": ({"loss": lambda out, batch: out["y0"].mean(), "metrics": "mae"}, "write it as a function"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_sentence(name: str) -> None:
    arguments, says = BAD[name]
    with pytest.raises(gg.GradgraphError, match=says) as caught:
        gg.build(model((C,), (2,)), **arguments)
    assert "\n" not in str(caught.value)
