"""Pipelines of scikit-learn as one file: bare onnxruntime gives from the user's columns what the pipeline predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg

pytest.importorskip("sklearn", "1.6", reason="an extra: onnx-gradgraph[sklearn]")

from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_transformer
from sklearn.decomposition import PCA
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    QuantileTransformer,
    StandardScaler,
)

from gradgraph.sklearn import Classifier, Regressor, export

RNG = np.random.default_rng(0)
N = 120
X = np.stack([RNG.normal(40, 10, N), RNG.normal(1e6, 10, N), RNG.normal(0, 1e-3, N)], 1)
YES = np.where((X[:, 0] > 40) ^ (X[:, 2] > 0), "yes", "no")
SIZE = X[:, 0] * 1e3
OPTIONS = {"epochs": 3, "random_state": 0}


def model_of(estimator: Any, x: Any, tmp_path: Path, example: bool = True) -> ort.InferenceSession:
    if hasattr(estimator, "steps") or not estimator.__module__.startswith("gradgraph"):
        pytest.importorskip("skl2onnx", reason="an extra: onnx-gradgraph[sklearn-export]")
    export(estimator, tmp_path / "model.onnx", x if example else None)
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    return ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])


def compare(session: ort.InferenceSession, estimator: Any, x: Any) -> None:
    """Feed the columns as the session wants them, and compare all that it gives."""
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64,
             "tensor(string)": object}  # fmt: skip
    wanted = {i.name: kinds[i.type] for i in session.get_inputs()}
    if hasattr(x, "columns"):
        feeds = {name: x[name].to_numpy()[:, None].astype(kind) for name, kind in wanted.items()}
    else:
        feeds = {"X": x.astype(wanted["X"])}
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    if "label" in found:
        np.testing.assert_array_equal(found["label"], estimator.predict(x))
        np.testing.assert_allclose(found["probabilities"], estimator.predict_proba(x), atol=2e-6)
    else:
        (value,) = found.values()
        np.testing.assert_allclose(value, estimator.predict(x), rtol=1e-5, atol=1e-6)
    for output in session.get_outputs():  # shapes are what they say
        assert [d for d in output.shape if isinstance(d, int)] == list(found[output.name].shape[1:])


LABELS = np.stack([YES == "yes", X[:, 0] > 45], 1).astype(int)
PIPELINES: dict[str, tuple[Any, Any]] = {
    "alone": (Classifier(**OPTIONS), YES),
    "numbers for classes": (Classifier(**OPTIONS), np.where(YES == "yes", 7, -2)),
    "bools for classes": (Classifier(**OPTIONS), YES == "yes"),
    "several labels alone": (Classifier(**OPTIONS), LABELS),
    "a regressor alone": (Regressor(**OPTIONS), X[:, 2]),
    "two values": (Regressor(**OPTIONS), X[:, ::2]),
    "scaled": (make_pipeline(StandardScaler(), Classifier(**OPTIONS)), YES),
    "scaled and turned": (make_pipeline(MinMaxScaler(), "passthrough", PCA(2), Classifier(**OPTIONS)), YES),
    "powers": (make_pipeline(StandardScaler(), PolynomialFeatures(2), Classifier(**OPTIONS)), YES),
    "several labels": (make_pipeline(StandardScaler(), Classifier(**OPTIONS)), LABELS),
    "a regressor": (make_pipeline(StandardScaler(), Regressor(**OPTIONS)), X[:, 0]),
    "a pipeline in one": (make_pipeline(make_pipeline(StandardScaler()), Classifier(**OPTIONS)), YES),
    "a search": (GridSearchCV(make_pipeline(StandardScaler(), Classifier(**OPTIONS)),
                              {"classifier__learning_rate": [1e-3, 1e-2]}, cv=2), YES),
    **{
        f"targets by {name}": (
            TransformedTargetRegressor(make_pipeline(StandardScaler(), Regressor(**OPTIONS)), transformer=transformer),
            SIZE)
        for name, transformer in {
            "StandardScaler": StandardScaler(), "MinMaxScaler": MinMaxScaler(),
            "log": FunctionTransformer(np.log, np.exp), "log1p": FunctionTransformer(np.log1p, np.expm1),
        }.items()
    },
    "two targets": (TransformedTargetRegressor(Regressor(**OPTIONS), transformer=StandardScaler()),
                    np.stack([SIZE, X[:, 2]], 1)),
}  # fmt: skip


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("name", PIPELINES)
def test_one_file_gives_what_the_pipeline_predicts(name: str, example: bool, tmp_path: Path) -> None:
    estimator, y = PIPELINES[name]
    x = X if hasattr(estimator, "steps") and name != "powers" else X - [0.0, 1e6, 0.0]  # powers are float32 there
    estimator.fit(x, y)
    compare(model_of(estimator, x, tmp_path, example), estimator, x)


def table(rows: int = N) -> Any:
    pd = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    frame = pd.DataFrame({
        "age": X[:, 0], "income in €": RNG.integers(0, 10**6, N), "city": RNG.choice(["Rome", "Oslo", "Bonn"], N),
        "kind": RNG.integers(0, 4, N), "the size": RNG.choice(["small", "large"], N),
    })  # fmt: skip
    frame.loc[::7, "age"] = np.nan
    return frame[:rows]


# the columns that are read, and what reads them
COLUMNS: dict[str, tuple[set[str], Any]] = {
    "numbers and categories": (
        {"age", "income in €", "city", "kind", "the size"},
        lambda: make_column_transformer(
            (make_pipeline(SimpleImputer(), StandardScaler()), ["age", "income in €"]),
            (OneHotEncoder(handle_unknown="ignore"), ["city", "kind", "the size"])),
    ),
    "places of columns": (
        {"income in €", "city", "the size"},
        lambda: ColumnTransformer([("numbers", StandardScaler(), slice(1, 2)), ("texts", OrdinalEncoder(), [2, 4])]),
    ),
    "texts in a pipeline": (
        {"income in €", "the size"},
        lambda: make_column_transformer((make_pipeline(OneHotEncoder()), ["the size"]), (StandardScaler(), [1])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_a_table_are_inputs_under_their_names(name: str, example: bool, tmp_path: Path) -> None:
    frame, (read, preprocessing) = table(), COLUMNS[name]
    pipeline = make_pipeline(preprocessing(), Classifier(**OPTIONS)).fit(frame, YES)
    session = model_of(pipeline, frame, tmp_path, example)
    kinds = {"f": "tensor(double)", "i": "tensor(int64)" if example else "tensor(double)"}  # whatever steps compute in
    wanted = {name: kinds.get(frame[name].to_numpy().dtype.kind, "tensor(string)") for name in read}
    assert {i.name: i.type for i in session.get_inputs()} == wanted
    compare(session, pipeline, frame)
    compare(session, pipeline, frame[:1])


def test_columns_may_have_names_that_the_file_uses(tmp_path: Path) -> None:
    names = ["variable", "label", "X", "before/features"]
    frame = table().rename(columns=dict(zip(["age", "income in €", "kind", "city"], names, strict=True))).fillna(0.0)
    steps = make_column_transformer((StandardScaler(), names[:3]), (OneHotEncoder(), names[3:]))
    pipeline = make_pipeline(steps, Regressor(**OPTIONS)).fit(frame, X[:, 2])
    session = model_of(pipeline, frame, tmp_path)
    assert [o.name for o in session.get_outputs()] == ["variable_1"]
    compare(session, pipeline, frame)


def test_columns_that_skl2onnx_takes_for_one_are_refused() -> None:
    frame = table()[["income in €"]].assign(**{"income in $": np.arange(N) % 7.0})
    pipeline = make_pipeline(StandardScaler(), Classifier(**OPTIONS)).fit(frame, YES)
    with pytest.raises(gg.GradgraphError, match=r"'income in €' and 'income in \$' differ only in special characters"):
        export(pipeline)


class Odd(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A step that skl2onnx does not know."""

    def fit(self, X: Any, y: Any = None) -> Odd:
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: Any) -> Any:
        return X

    def __sklearn_is_fitted__(self) -> bool:
        return True


BAD: dict[str, tuple[Any, Any, str]] = {
    "another estimator": (make_pipeline(StandardScaler(), LogisticRegression()), YES, "use skl2onnx for others"),
    "an odd step": (make_pipeline(Odd(), Classifier(**OPTIONS)), YES, "skl2onnx cannot convert the steps before"),
    "an odd target": (TransformedTargetRegressor(Regressor(**OPTIONS), transformer=QuantileTransformer(n_quantiles=9)),
                      SIZE, "cannot be exported; use StandardScaler"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_written_is_one_sentence(name: str, tmp_path: Path) -> None:
    estimator, y, says = BAD[name]
    estimator.fit(X, y)
    if name == "an odd step":
        pytest.importorskip("skl2onnx", reason="an extra: onnx-gradgraph[sklearn-export]")
    with pytest.raises(gg.GradgraphError, match=says) as caught:
        export(estimator, tmp_path / "model.onnx", X)
    assert "\n" not in str(caught.value) and not (tmp_path / "model.onnx").exists()


def test_a_file_that_would_differ_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = make_pipeline(StandardScaler(), Classifier(**OPTIONS)).fit(X, YES)
    model_of(pipeline, X, tmp_path)
    (tmp_path / "model.onnx").unlink()
    right = Classifier.predict_proba
    monkeypatch.setattr(Classifier, "predict_proba", lambda self, x: right(self, x) + 1e-3)
    with pytest.raises(gg.GradgraphError, match=r"differ from the pipeline by 0\.001"):
        export(pipeline, tmp_path / "model.onnx", X)
    assert not (tmp_path / "model.onnx").exists()


def test_without_skl2onnx_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "skl2onnx", None)
    pipeline = make_pipeline(StandardScaler(), Classifier(**OPTIONS)).fit(X, YES)
    with pytest.raises(gg.GradgraphError, match="pip install skl2onnx"):
        export(pipeline)
    assert export(pipeline[-1]).graph.output[0].name == "label"


def test_a_model_that_ends_in_a_softmax_gives_its_own_probabilities(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 3] x) => (float[batch, 2] y) <float[3, 2] w = {0.1, -0.1, 0.0, 0.0, 3.0, 1.0}> {
        s = MatMul (x, w)
        y = Softmax <axis = 1> (s)
    }"""
    x = X.astype(np.float32) / 1e6
    trained = Classifier(onnx.parser.parse_model(text), **OPTIONS).fit(x, YES)
    compare(model_of(trained, x, tmp_path), trained, x)


def test_names_of_classes_are_known_of_the_file(tmp_path: Path) -> None:
    export(Classifier(**OPTIONS).fit(X, YES), tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert [(p.key, "yes" in p.value) for p in model.metadata_props] == [("gradgraph.data", True)]
