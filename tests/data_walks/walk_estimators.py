"""Walks with estimators: alone or in a pipeline, weighed, stopped early, and exported as one file."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import onnxruntime as ort
import pandas as pd

from gradgraph.sklearn import Classifier, Regressor, export
from tests.data_walks.random_walk import ODD_CLASSES, ODD_NAMES, Array, Walk

LIKE_OTHERS = ("a/b", "a:b", "a=b")  # which skl2onnx takes for "a,b", and which are refused with it
Rows = Any  # a matrix or a frame


def _run(path: Any, rows: Rows) -> list[Array]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    if isinstance(rows, pd.DataFrame) and [one.name for one in inputs] != ["X"]:
        return list(session.run(None, {one.name: rows[[one.name]].to_numpy() for one in inputs}))
    return list(session.run(None, {inputs[0].name: np.asarray(rows)}))


def _estimator(walk: Walk, kind: type, **more: Any) -> Any:
    stops = walk.flag("early stopping", 0.3)
    return kind(
        hidden=(6,),
        epochs=int(walk.choose("epochs", [1, 3])),
        batch_size=int(walk.choose("batch", [7, 16])),
        random_state=walk.seed,
        early_stopping=stops,
        validation_fraction=0.3,
        n_iter_no_change=1,
        optimizer=walk.choose("optimizer", ["adamw", "sgd"]),
        learning_rate=0.02,
        **more,
    )


def _piped(walk: Walk, estimator: Any) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    is_known = importlib.util.find_spec("skl2onnx") is not None
    return make_pipeline(StandardScaler(), estimator) if walk.flag("pipeline") and is_known else estimator


def walk_estimators(walk: Walk) -> None:
    from sklearn.base import clone

    rng, rows = walk.rng, int(walk.choose("rows", [33, 40, 64]))
    names = walk.some([name for name in ODD_NAMES if name not in LIKE_OTHERS], int(rng.integers(2, 5)))
    x: Rows = (rng.normal(size=(rows, len(names))) * 3 + 1).astype(np.float32)
    is_frame = walk.flag("frame")
    x = pd.DataFrame(x, columns=names) if is_frame else x
    if walk.flag("regressor", 0.35):
        y: Array = rng.normal(size=(rows, 2) if walk.flag("several", 0.3) else rows) * 5
        estimator = _piped(walk, _estimator(walk, Regressor)).fit(x, y)
        _check_regressor(walk, estimator, x, y)
    else:
        kind = walk.choose("labels", ["text", "numbers", "booleans", "objects"])
        every: Any = {
            "text": np.array(walk.some(ODD_CLASSES, 3)),
            "numbers": np.array([-3, 0, 7]),
            "booleans": np.array([False, True]),
            "objects": np.array(walk.some(ODD_CLASSES, 3), object),
        }[kind]
        y = every[np.concatenate([np.arange(len(every)).repeat(3), rng.integers(0, len(every), rows - 3 * len(every))])]
        weights = walk.choose("class_weight", [None, None, "balanced", "dict"])
        weights = None if kind == "objects" else weights  # of which scikit-learn makes numbers
        weights = {one: float(rng.uniform(0.3, 3)) for one in every.tolist()} if weights == "dict" else weights
        estimator = _piped(walk, _estimator(walk, Classifier, class_weight=weights)).fit(x, y)
        _check_classifier(walk, estimator, x, y, every)
        if weights is None and kind in ("text", "objects"):
            _check_renamed(walk, estimator, x, y)
    again = clone(estimator).fit(x, y)
    walk.same("a fit with the same random_state has the same bits", again.predict(x), estimator.predict(x))


def _check_regressor(walk: Walk, estimator: Any, x: Rows, y: Array) -> None:
    from sklearn.metrics import r2_score

    found = estimator.predict(x)
    walk.close("score is R²", estimator.score(x, y), r2_score(y, found), 1e-6)
    export(estimator, walk.folder / "m.onnx", x[:20])
    made = _run(walk.folder / "m.onnx", x)[0]
    walk.close("the file gives what predict gives", np.asarray(made).reshape(found.shape), found, 2e-4)
    _check_rows(walk, estimator.predict, x, found)


def _check_classifier(walk: Walk, estimator: Any, x: Rows, y: Array, every: Array) -> None:
    from sklearn.metrics import accuracy_score

    found, shares = estimator.predict(x), estimator.predict_proba(x)
    walk.law("classes_ are the sorted labels", list(estimator.classes_) == sorted(every.tolist()), estimator.classes_)
    walk.law("predict is the most probable class", np.array_equal(found, estimator.classes_[shares.argmax(axis=1)]))
    walk.close("probabilities add up to 1", shares.sum(axis=1), np.ones(len(shares)), 1e-5)
    walk.close("score is the accuracy", estimator.score(x, y), accuracy_score(y, found), 1e-9)
    export(estimator, walk.folder / "m.onnx", x[:20])
    label, made = _run(walk.folder / "m.onnx", x)
    walk.law(
        "the file calls labels as predict does",
        [str(one) for one in np.asarray(label).ravel().tolist()] == [str(one) for one in found.tolist()],
        np.asarray(label).ravel()[:5],
    )
    walk.close("the file has the probabilities", made, shares, 2e-4)
    _check_rows(walk, estimator.predict_proba, x, shares)


def _check_rows(walk: Walk, predict: Any, x: Rows, found: Array) -> None:
    order = walk.rng.permutation(len(x))
    mixed = x.iloc[order] if isinstance(x, pd.DataFrame) else x[order]
    walk.close("rows in another order give the same", predict(mixed), found[order], 1e-5)
    walk.close("some rows give what they give among all", predict(mixed[:3]), found[order[:3]], 1e-4)
    if isinstance(x, pd.DataFrame):
        other = x.rename(columns={x.columns[0]: "a name that nobody gave"})
        walk.refused("a misspelt column is refused", lambda: predict(other), "feature names")


def _check_renamed(walk: Walk, estimator: Any, x: Rows, y: Array) -> None:
    """Other names in the same order of classes: the same model, to the bit."""
    from sklearn.base import clone

    order = {name: f"class {i}" for i, name in enumerate(estimator.classes_)}
    renamed = clone(estimator).fit(x, np.array([order[one] for one in y]))
    walk.same(
        "classes of other names in the same order have the same bits",
        renamed.predict_proba(x),
        estimator.predict_proba(x),
    )
