"""Estimators of scikit-learn: its own checks, and how they work with its tools."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from tests.kit.command_line import mlp

pytest.importorskip("sklearn", "1.6", reason="an extra: onnx-gradgraph[sklearn]")

from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from gradgraph.sklearn import Classifier, Regressor

IRIS = load_iris(return_X_y=True)
X, Y = np.asarray(IRIS[0], np.float32), np.asarray(IRIS[1])
NAMES = np.array(["setosa", "versicolor", "virginica"])[Y]


# as of scikit-learn's own SGD: whose samples come twice has other batches than who gives them a weight of 2
REPEATED = {
    f"check_sample_weight_equivalence_on_{kind}_data": "training goes in batches" for kind in ("dense", "sparse")
}


# all others pass; scikit-learn itself skips those that need pandas or SCIPY_ARRAY_API where these are not there
@pytest.mark.sweep(0.05)
@parametrize_with_checks([Classifier(), Regressor()], expected_failed_checks=lambda _: REPEATED)
def test_what_scikit_learn_asks_of_estimators(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.sweep(0)
def test_a_pipeline_is_searched_and_its_best_model_exported(tmp_path: Path) -> None:
    pipeline = make_pipeline(StandardScaler(), Classifier(epochs=20, random_state=0))
    search = GridSearchCV(pipeline, {"classifier__learning_rate": [1e-6, 1e-2]}, cv=3, refit=True).fit(X, NAMES)
    assert search.best_params_ == {"classifier__learning_rate": 1e-2} and search.best_score_ > 0.9
    assert list(search.classes_) == ["setosa", "versicolor", "virginica"]
    best = search.best_estimator_
    best[-1].export(tmp_path / "best.onnx")
    session = ort.InferenceSession(tmp_path / "best.onnx", providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"x": best[0].transform(X).astype(np.float32)})
    assert (search.classes_[scores.argmax(1)] == search.predict(X)).all()
    np.testing.assert_allclose(search.predict_proba(X).sum(1), 1)


@pytest.mark.sweep(0)
def test_it_is_copied_and_pickled_with_what_it_has_learnt() -> None:
    trained = Classifier(epochs=3, random_state=1).fit(X, Y)
    copy = pickle.loads(pickle.dumps(trained))
    np.testing.assert_array_equal(copy.predict_proba(X), trained.predict_proba(X))
    again = pickle.loads(pickle.dumps(copy))
    np.testing.assert_array_equal(again.predict_proba(X), trained.predict_proba(X))
    fresh = clone(trained)
    assert not hasattr(fresh, "classes_")
    np.testing.assert_array_equal(fresh.fit(X, Y).predict_proba(X), trained.predict_proba(X))
    assert cross_val_score(fresh, X, Y, cv=3).shape == (3,)


def test_partial_fit_goes_on() -> None:
    parts = Classifier(learning_rate=1e-2, random_state=0)
    order = np.random.default_rng(0).permutation(len(X))
    losses = []
    for epoch in range(6):
        for half in (order[:75], order[75:]):
            parts.partial_fit(X[half], NAMES[half], classes=np.unique(NAMES) if epoch == 0 else None)
            losses += parts.history_["loss"]
    assert losses[-1] < 0.5 * losses[0] and parts.score(X, NAMES) > 0.85
    with pytest.raises(ValueError, match="not among the classes"):
        parts.partial_fit(X[:2], ["setosa", "rose"])
    with pytest.raises(ValueError, match="classes differ from the first call"):
        parts.partial_fit(X[:2], NAMES[:2], classes=["rose"])


@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_samples_have_weights(kind: Any) -> None:
    """In one batch, a sample of weight 2 counts as two, and one of weight 0 not at all."""
    y = Y if kind is Classifier else X[:, 0] - X[:, 2]
    weights = np.where(Y == 0, 2.0, np.where(Y == 1, 1.0, 0.0))
    weights[-1] = 1.0  # so each class is there
    options = {"epochs": 20, "batch_size": 500, "random_state": 0}
    weighed = kind(**options).fit(X, y, sample_weight=weights)
    twice = np.repeat(np.arange(len(X)), weights.astype(int))
    repeated = kind(**options).fit(X[twice], y[twice])
    predict = "predict_proba" if kind is Classifier else "predict"
    found, expected, plain = (getattr(e, predict)(X) for e in (weighed, repeated, kind(**options).fit(X, y)))
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert np.abs(found - plain).max() > 0.05
    weighed.partial_fit(X, y)  # all weigh the same
    with pytest.raises(ValueError, match="was not in the first call of partial_fit"):
        repeated.partial_fit(X, y, sample_weight=weights)
    with pytest.raises(ValueError, match="sample_weight"):
        kind().fit(X, y, sample_weight=weights[:3])


def test_a_model_from_a_file_is_trained(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "model.onnx")
    head = Classifier(tmp_path / "model.onnx", train="last.*", optimizer="sgd", optimizer_options={"momentum": 0.9},
                      learning_rate=0.05, epochs=5, fit_options={"shuffle": False})  # fmt: skip
    head.fit(X, Y)
    trained = {t.name: onnx.numpy_helper.to_array(t) for t in head.export().graph.initializer}
    before = {t.name: onnx.numpy_helper.to_array(t) for t in mlp().graph.initializer}
    assert {n: np.array_equal(trained[n], before[n]) for n in before} == {
        "first.weight": True, "first.bias": True, "last.weight": False, "last.bias": False}  # fmt: skip
    step = gg.build(mlp(), train="last.*", optimizer=gg.optim.sgd(0.05, momentum=0.9), loss="cross_entropy")
    alone = gg.Trainer(step, device="cpu")
    expected = alone.fit(X, Y, epochs=5, shuffle=False, progress=False)
    np.testing.assert_allclose(head.history_["loss"], expected["loss"], rtol=1e-6)
    with pytest.raises(gg.GradgraphError, match="the model has 3 classes, but y has 2"):
        Classifier(tmp_path / "model.onnx").fit(X, Y > 0)


def test_a_regressor_has_one_value_or_several() -> None:
    x, y = make_regression(200, 5, n_targets=2, noise=0.1, random_state=0)
    y = y / y.std(0)
    several = Regressor(epochs=60, random_state=0).fit(x, y)
    assert several.predict(x).shape == (200, 2) and several.score(x, y) > 0.95
    one = Regressor(epochs=60, random_state=0).fit(x, y[:, 0])
    assert one.predict(x).shape == (200,) and one.score(x, y[:, 0]) > 0.95
    column = Regressor(epochs=2, random_state=0).fit(x, y[:, :1])
    assert column.predict(x).shape == (200, 1)


def test_without_scikit_learn_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gradgraph.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(gg.GradgraphError, match=r"pip install 'scikit-learn>=1\.6'"):
        importlib.import_module("gradgraph.sklearn")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_that_were_pickled_train(dtype: str) -> None:
    """Their dtype is equal to NumPy's, and another object: it looked like one of ml_dtypes."""
    step = gg.build(mlp(), loss="cross_entropy")
    x = X.astype(dtype)
    losses = []
    for array in (x, pickle.loads(pickle.dumps(x))):
        trainer = gg.Trainer(step, device="cpu")
        losses.append((trainer.step({"x": array, "target": Y})["loss"], trainer.evaluate({"x": array, "target": Y})))
    assert losses[0] == losses[1]


def test_probabilities_of_a_model_that_ends_in_a_softmax() -> None:
    model = mlp()
    ended = onnx.ModelProto()
    ended.CopyFrom(model)
    ended.graph.node.append(onnx.helper.make_node("Softmax", [model.graph.output[0].name], ["p"], axis=1))
    ended.graph.output[0].name = "p"
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = x[:, :3].argmax(1)
    found, wanted = (Classifier(m, epochs=2, random_state=0).fit(x, y) for m in (ended, model))
    np.testing.assert_allclose(found.predict_proba(x), wanted.predict_proba(x), atol=1e-5)


def test_names_of_columns_and_classes_are_exported_and_kept_in_a_pickle(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    columns = ["sepal length", "sepal width", "petal length", "petal width"]
    frame = pd.DataFrame(X, columns=columns)
    trained = pickle.loads(pickle.dumps(Classifier(epochs=2, random_state=1).fit(frame, NAMES)))
    names = trained.trained_.trainer.names
    assert names == gg.DataNames({"x": columns}, {"target": sorted(set(NAMES))}, softmax=["target"])
    trained.export(tmp_path / "trained.onnx")
    again = gg.Trainer(gg.build(tmp_path / "trained.onnx", loss="cross_entropy"), device="cpu")
    mixed = frame[columns[::-1]]
    np.testing.assert_array_equal(again.predict(mixed), again.predict(X))
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        trained.predict(mixed)
    with pytest.raises(ValueError, match=r"trained on 'sepal length', .*; reorder them"):
        Classifier(tmp_path / "trained.onnx", epochs=1).fit(mixed, NAMES)
    assert gg.build(Regressor(epochs=1).fit(X, X[:, 0]).export(), loss="mse").manifest.data == gg.DataNames()


@pytest.mark.sweep(0)
def test_classes_have_weights() -> None:
    """A weight of a class is one of each of its samples, and multiplies those that are given."""
    of_class, own = np.array([1.0, 3.0, 0.5]), np.random.default_rng(0).random(len(X))
    options = {"epochs": 5, "random_state": 0}
    weights = dict(zip(np.unique(NAMES), of_class, strict=True))
    found = Classifier(class_weight=weights, **options).fit(X, NAMES, own).predict_proba(X)
    wanted = Classifier(**options).fit(X, NAMES, own * of_class[Y]).predict_proba(X)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    few = np.r_[0:50, 50:55, 100:102]
    balanced = Classifier(class_weight="balanced", **options).fit(X[few], Y[few]).predict_proba(X)
    inverse = len(few) / (3 * np.bincount(Y[few])[Y[few]])
    np.testing.assert_allclose(balanced, Classifier(**options).fit(X[few], Y[few], inverse).predict_proba(X), rtol=1e-6)
    parts = Classifier(class_weight=weights, **options).partial_fit(X, NAMES)
    one = Classifier(epochs=1, random_state=0).fit(X, NAMES, of_class[Y])
    np.testing.assert_allclose(parts.predict_proba(X), one.predict_proba(X), rtol=1e-6)
    with pytest.raises(ValueError, match="partial_fit does not support class_weight='balanced'"):
        Classifier(class_weight="balanced").partial_fit(X, Y)


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("kind", [Classifier, Regressor, "labels"])
def test_training_stops_early_and_goes_back_to_the_best(kind: Any) -> None:
    y = {Classifier: NAMES, Regressor: X[:, 3] - X[:, 0]}.get(kind, np.stack([Y == 0, X[:, 1] > 3], 1).astype(int))
    kind = Classifier if kind == "labels" else kind
    options = {"early_stopping": True, "n_iter_no_change": 3, "validation_fraction": 0.2, "random_state": 0}
    trained = kind(epochs=200, learning_rate=0.03, **options).fit(X, y)
    assert trained.n_iter_ == len(trained.loss_curve_) == len(trained.validation_scores_) < 200
    scores = trained.validation_scores_
    assert trained.best_validation_score_ == max(scores) and trained.best_loss_ is None
    best = max(i for i, score in enumerate(scores) if score > max(scores[:i], default=-9) + 1e-4)
    assert trained.n_iter_ == best + 1 + 3
    held_out = trained._held_out({"x": X, "y": y}, None if y.ndim > 1 or kind is Regressor else Y)[1]
    assert trained.score(held_out["x"], held_out["y"]) == pytest.approx(scores[best], abs=1e-5)
    if kind is Classifier and y.ndim == 1:  # of each class the same share
        assert set(np.unique(held_out["y"], return_counts=True)[1]) == {10}
    with pytest.raises(ValueError, match="partial_fit does not support early_stopping"):
        trained.partial_fit(X, y)


@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_a_warm_start_goes_on(kind: Any) -> None:
    y = NAMES if kind is Classifier else X[:, 0]
    warm = kind(epochs=3, warm_start=True, random_state=0).fit(X, y)
    first = list(warm.loss_curve_)
    warm.fit(X, y)
    whole = kind(epochs=6, random_state=0).fit(X, y)
    assert warm.n_iter_ == 6 and warm.loss_curve_[:3] == first and warm.loss_ == warm.loss_curve_[-1]
    np.testing.assert_allclose(warm.loss_curve_, whole.loss_curve_, rtol=1e-6)
    np.testing.assert_allclose(warm.predict(X) == whole.predict(X), True)
    cold = kind(epochs=3, random_state=0).fit(X, y).fit(X, y)
    assert cold.loss_curve_ == first and cold.n_iter_ == 3
    if kind is Classifier:
        with pytest.raises(ValueError, match="not among the classes"):
            warm.fit(X, np.where(Y == 0, "rose", NAMES))


def test_several_labels_of_a_sample() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    y = np.stack([Y == 0, X[:, 1] > 3, X[:, 2] > 4], 1).astype(int)
    trained = Classifier(epochs=60, learning_rate=1e-2, random_state=0).fit(X, y)
    found, p = trained.predict(X), trained.predict_proba(X)
    assert found.shape == p.shape == y.shape and trained.score(X, y) > 0.8  # all three of a sample
    np.testing.assert_array_equal(found, p > 0.5)
    again = Classifier(epochs=60, learning_rate=1e-2, random_state=0).fit(X, sparse.csr_matrix(y))
    np.testing.assert_array_equal(again.predict_proba(X), p)
    assert again.partial_fit(X, y).n_iter_ == 61
    with pytest.raises(ValueError, match="differs in form"):
        again.partial_fit(X, y[:, :2])
    with pytest.raises(gg.GradgraphError, match="several labels per sample, but the loss expects one"):
        Classifier(loss="cross_entropy").fit(X, y)


@pytest.mark.sweep(0.15)
@pytest.mark.parametrize("kind", [Classifier, Regressor])
@pytest.mark.parametrize("form", ["csr_matrix", "csc_array", "coo_array"])
def test_a_sparse_matrix_trains_as_a_dense_one(kind: Any, form: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    x = np.where(np.random.default_rng(0).random((300, 6)) < 0.6, 0, X[:, [0, 1, 2, 3, 0, 1]].repeat(2, 0))
    y = Y.repeat(2) if kind is Classifier else x[:, 0] - x[:, 1]
    weights = np.random.default_rng(1).random(300)
    options = {"epochs": 4, "random_state": 0, "early_stopping": True}
    found, wanted = (kind(**options).fit(matrix, y, weights) for matrix in (getattr(sparse, form)(x), x))
    np.testing.assert_allclose(found.loss_curve_, wanted.loss_curve_, rtol=1e-6)
    np.testing.assert_allclose(found.validation_scores_, wanted.validation_scores_, rtol=1e-6)
    predict = "predict_proba" if kind is Classifier else "predict"
    np.testing.assert_allclose(
        getattr(found, predict)(getattr(sparse, form)(x)), getattr(wanted, predict)(x), rtol=1e-5
    )
    parts = [kind(random_state=0).partial_fit(matrix, y) for matrix in (getattr(sparse, form)(x), x)]
    np.testing.assert_allclose(parts[0].loss_curve_, parts[1].loss_curve_, rtol=1e-6)


def network(outputs: int, end: str = "") -> onnx.ModelProto:
    weights = ", ".join(["0.1"] * 4 * outputs)
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, {outputs}] y) <float[4, {outputs}] w = {{{weights}}}> {{
        {"s" if end else "y"} = MatMul (x, w)
        {f"y = {end} (s)" if end else ""}
    }}"""
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize(("end", "loss"), [("", "bce_with_logits"), ("Sigmoid", "bce"), ("Sigmoid", "bce_with_logits")])
def test_two_classes_may_have_one_score(end: str, loss: str) -> None:
    yes = np.where(Y == 0, "yes", "no")
    trained = Classifier(network(1, end), loss=loss, epochs=20, learning_rate=1e-2, random_state=0).fit(X, yes)
    p = trained.predict_proba(X)
    assert p.shape == (150, 2) and trained.score(X, yes) > 0.95
    np.testing.assert_allclose(p.sum(1), 1)
    np.testing.assert_array_equal(trained.predict(X), np.where(p[:, 1] > 0.5, "yes", "no"))
    with pytest.raises(gg.GradgraphError, match="the model has 1 classes, but y has 3"):
        Classifier(network(1, end), loss=loss).fit(X, Y)


@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_a_prediction_does_not_depend_on_the_samples_beside_it(kind: Any) -> None:
    predict = "predict_proba" if kind is Classifier else "predict"
    trained = kind(epochs=2, random_state=0).fit(X, Y)
    for rows in (1, 2, 7):
        parts = [getattr(trained, predict)(X[i : i + rows]) for i in range(0, len(X), rows)]
        np.testing.assert_array_equal(np.concatenate(parts), getattr(trained, predict)(X))


def test_later_labels_are_matched_with_the_classes() -> None:
    """Those of an estimator are names: 5 is the class 5, in training with a share held out, and in its trainer."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 3, 60)
    X = rng.normal(size=(60, 3)) + np.eye(3)[numbers] * 5
    y = np.array([1, 2, 5])[numbers]
    found = Classifier(hidden=(), learning_rate=0.1, epochs=20, random_state=0, early_stopping=True).fit(X, y)
    assert found.score(X, y) > 0.9
    trainer = found.trained_.trainer
    some = y != 1
    data = {trainer.manifest.inputs[0].name: X[some].astype(np.float32), trainer.manifest.targets[0].name: y[some]}
    scores = found.predict_proba(X[some])
    expected = -np.log(scores[np.arange(len(scores)), numbers[some]]).mean()
    assert trainer.evaluate(data)["loss"] == pytest.approx(expected, rel=1e-4)
