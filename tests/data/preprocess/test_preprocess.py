"""What becomes of columns of any kind: equal to scikit-learn and pandas, in training and in the exported file.

Random frames × learn, train, export, run in bare onnxruntime; each transformation is computed a second time here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.data.preprocess import Preprocessing, fit
from gradgraph.errors import ArgumentError, BuildError, DataError
from gradgraph.export import export_report
from gradgraph.frontend import nn

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
pytest.importorskip("sklearn", reason="an extra: onnx-gradgraph[sklearn]")

Array = np.ndarray[Any, Any]
Rng = np.random.Generator
ROWS = 60
WORDS = ["red", "Green", "blau", "grün", "the", "of", "Äpfel", "x1", "über-all", "4.5"]


def _gaps(rng: Rng, values: Any, gap: Any) -> Any:
    return [gap if rng.random() < 0.15 else value for value in values]


def _dates(rng: Rng) -> Any:
    return pd.Series(pd.Timestamp("2019-11-30") + pd.to_timedelta(rng.integers(0, 2_000_000, ROWS), unit="min"))


# --- columns, and the numbers that should become of them: of the training frame, for any frame ------------------


def _number(train: Any, frame: Any) -> Array:
    from sklearn.preprocessing import StandardScaler

    known, given = (column.astype("Float64").to_numpy(float, na_value=np.nan) for column in (train, frame))
    scaled = StandardScaler().fit(known[:, None]).transform(given[:, None])
    gaps = [np.isnan(given)[:, None]] if np.isnan(known).any() else []
    return np.hstack([np.nan_to_num(scaled), *gaps])


def _filled(column: Any) -> Any:
    return column.astype(object).where(column.notna(), "")


def _category(train: Any, frame: Any) -> Array:
    from sklearn.preprocessing import OneHotEncoder

    known, given = (_filled(column).to_numpy(object)[:, None] for column in (train, frame))
    hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(known).transform(given)
    return np.hstack([hot, 1 - hot.sum(axis=1, keepdims=True)])


def _numbered_category(train: Any, frame: Any) -> Array:
    values = sorted(set(train.dropna()))
    hot = [frame == value for value in values] + ([frame.isna()] if train.isna().any() else [])
    return np.column_stack([*hot, ~np.any(hot, axis=0)]).astype(float)


def _date(train: Any, frame: Any) -> Array:
    known, given = (pd.to_datetime(column.replace("", None), format="ISO8601") for column in (train, frame))
    years = known.dt.year.dropna()
    day = (given.dt.hour * 60 + given.dt.minute) / 1440
    has_times = ((known.dt.hour > 0) | (known.dt.minute > 0)).any()
    turns = [
        (given.dt.day_of_year - 1) / (365 + given.dt.is_leap_year),
        given.dt.day_of_week / 7,
        *([day] if has_times else []),
    ]
    circles = [f(2 * np.pi * turn) for turn in turns for f in (np.sin, np.cos)]
    year = (given.dt.year - years.mean()) / (years.std(ddof=0) or 1)
    gaps = [given.isna()] if known.isna().any() else []
    return np.column_stack([np.nan_to_num(column.to_numpy(float)) for column in (year, *circles, *gaps)])


def _text(train: Any, frame: Any) -> Array:
    from sklearn.feature_extraction.text import HashingVectorizer

    lower = str.maketrans({chr(i): chr(i + 32) for i in range(65, 91)})
    vectors = HashingVectorizer(n_features=64, alternate_sign=False, lowercase=False, token_pattern=None,
                                tokenizer=lambda text: text.translate(lower).split())  # fmt: skip
    return vectors.transform(_filled(frame).to_list()).toarray()


def _spaced(rng: Rng) -> str:
    """Words between white space of every kind, and of none."""
    spaces = [chr(i) for i in range(0x110000) if chr(i).isspace()]
    return "".join(rng.choice([*WORDS[:5], *rng.choice(spaces, 5)], rng.integers(0, 30)))


Made = Callable[[Rng], Any]
KINDS: Mapping[str, tuple[Made, Callable[[Any, Any], Array], str | None]] = {
    "floats": (lambda rng: rng.normal(size=ROWS) * 1e5 + 1e6, _number, None),
    "floats with gaps": (lambda rng: _gaps(rng, rng.normal(size=ROWS) / 1e4, np.nan), _number, None),
    "float32": (lambda rng: rng.normal(size=ROWS).astype(np.float32), _number, None),
    "integers": (lambda rng: rng.integers(-5, 5, ROWS), _number, None),
    "large integers": (lambda rng: 1_700_000_000 + rng.integers(0, 50, ROWS), _number, None),
    "bytes": (lambda rng: rng.integers(0, 255, ROWS).astype(np.uint8), _number, None),
    "nullable integers": (lambda rng: pd.array(_gaps(rng, rng.integers(0, 9, ROWS), None), "Int64"), _number, None),
    "booleans": (lambda rng: rng.random(ROWS) > 0.5, _number, None),
    "constant": (lambda rng: np.full(ROWS, 0.1), _number, None),
    "words": (lambda rng: rng.choice(WORDS, ROWS), _category, None),
    "words with gaps": (lambda rng: _gaps(rng, rng.choice(WORDS[:4], ROWS), None), _category, None),
    "words with NaN": (lambda rng: _gaps(rng, rng.choice(WORDS[:4], ROWS), np.nan), _category, None),
    "strings": (lambda rng: pd.array(_gaps(rng, rng.choice(WORDS, ROWS), None), "string"), _category, None),
    "categorical": (lambda rng: pd.Categorical(rng.choice(WORDS[:3], ROWS)), _category, None),
    "codes": (lambda rng: rng.integers(10_000, 10_005, ROWS), _numbered_category, "category"),
    "codes with gaps": (lambda rng: _gaps(rng, rng.integers(0, 4, ROWS) / 2, np.nan), _numbered_category, "category"),
    "dates": (lambda rng: _dates(rng), _date, None),
    "days": (lambda rng: _dates(rng).dt.normalize(), _date, None),
    "dates with gaps": (lambda rng: pd.Series(_gaps(rng, _dates(rng), pd.NaT)), _date, None),
    "ISO days": (lambda rng: _gaps(rng, _dates(rng).dt.strftime("%Y-%m-%d"), None), _date, None),
    "ISO times": (lambda rng: _dates(rng).dt.strftime("%Y-%m-%dT%H:%M:%S"), _date, None),
    "ISO of several forms": (
        lambda rng: [date.strftime(rng.choice(["%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S.250"]))
                     for date in _dates(rng)], _date, None,
    ),
    "prose": (lambda rng: [" ".join(rng.choice(WORDS, rng.integers(4, 9))) for _ in range(ROWS)], _text, None),
    "prose with gaps": (
        lambda rng: _gaps(rng, [" ".join(rng.choice(WORDS, 7)) + "  " for _ in range(ROWS)], None), _text, "text",
    ),
    "prose between any white space": (lambda rng: [_spaced(rng) for _ in range(ROWS)], _text, "text"),
    "nothing but gaps": (lambda rng: [None] * ROWS, _text, "text"),
}  # fmt: skip


def _frames(names: Any, seed: int) -> tuple[Any, Any]:
    """A frame to learn from, and another one, with gaps and values that the first one lacks."""
    rng = np.random.default_rng(seed)
    train, other = (pd.DataFrame({name: KINDS[name][0](rng) for name in names}) for _ in range(2))
    for name in names:
        if KINDS[name][1] is not _numbered_category and other[name].dtype.kind in "fOM" and rng.random() < 0.5:
            other.loc[::9, name] = None
        if KINDS[name][1] is _category and name != "categorical":
            other.loc[::11, name] = "never seen"
    return train, other


def _expected(names: Any, train: Any, frame: Any) -> Array:
    return np.hstack([KINDS[name][1](train[name], frame[name]) for name in names])


def _overrides(names: Any) -> dict[str, str]:
    return {name: kind for name in names if (kind := KINDS[name][2]) is not None}


@pytest.mark.parametrize("name", KINDS)
def test_a_column_of_each_kind(name: str) -> None:
    train, other = _frames([name], 0)
    plan = fit(train, kinds=_overrides([name]))
    assert plan == Preprocessing.from_data(plan.as_data())
    for frame in (train, other, other.iloc[:1], other.iloc[::-1]):
        made = plan.arrays(frame)["x"]
        assert made.shape[1] == len(plan.features["x"]) and made.dtype == np.float32
        np.testing.assert_allclose(made, _expected([name], train, frame), rtol=1e-5, atol=1e-5)


def _fed(frame: Any, session: ort.InferenceSession) -> dict[str, Array]:
    """What somebody without gradgraph feeds: text, or float64."""
    feeds = {}
    for value in session.get_inputs():
        column = frame[value.name]
        if value.type == "tensor(string)":
            text = column.dt.strftime("%Y-%m-%dT%H:%M:%S") if column.dtype.kind == "M" else column
            feeds[value.name] = _filled(text).to_numpy(object)
        else:
            feeds[value.name] = column.astype("Float64").to_numpy(float, na_value=np.nan)
    return feeds


@pytest.mark.parametrize("seed", range(8))
def test_random_frames_train_export_and_predict_alike(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    names = rng.permutation(list(KINDS))[: rng.integers(1, 9)].tolist()
    train, other = _frames(names, seed)
    text = rng.random() < 0.5
    train["y"] = rng.choice(["no", "yes", "maybe"], ROWS) if text else rng.normal(size=ROWS)
    plan = fit(train, "y", _overrides(names))
    width = _expected(names, train, train).shape[1]
    gg.frontend.manual_seed(seed)
    model = gg.frontend.export(nn.Linear(width, 3 if text else 1), {"points": ("batch", width)})
    trainer = gg.Trainer(gg.build(model, loss="cross_entropy" if text else "mse"), device="cpu")
    trainer.names = gg.DataNames(preprocess=plan)
    trainer.fit(train, 2, 16, progress=False)

    shuffled = other[rng.permutation(names)]
    weights = {name.rpartition(".")[2]: array for name, array in trainer.parameters.items()}
    expected = _expected(names, train, other) @ weights["weight"].T + weights["bias"]
    np.testing.assert_allclose(trainer.predict(shuffled), expected, rtol=1e-4, atol=1e-4)
    trainer.export(tmp_path / "t.onnx")
    session = ort.InferenceSession(tmp_path / "t.onnx")
    exported = ir.load(tmp_path / "t.onnx").graph
    assert [name for name, value in exported.initializers.items() if not value.uses()] == []
    assert {value.name for value in session.get_inputs()} == set(names)
    found = dict(zip((o.name for o in session.get_outputs()), session.run(None, _fed(other, session)), strict=True))
    np.testing.assert_allclose(found["output"], expected, rtol=1e-4, atol=1e-4)
    assert ("class" in found) == text
    if text:
        assert found["class"].tolist() == [trainer.names.classes["target"][i] for i in found["output"].argmax(1)]
        np.testing.assert_allclose(found["probabilities"].sum(1), 1, rtol=1e-5)

    compared = export_report(tmp_path / "t.onnx", trainer.definition, weights=trainer.state_dict()).compared
    assert compared["output"].relative < 1e-5

    again = gg.Trainer(gg.build(tmp_path / "t.onnx", loss="cross_entropy" if text else "mse"), device="cpu")
    np.testing.assert_allclose(again.predict(shuffled), expected, rtol=1e-4, atol=1e-4)
    trainer.save(tmp_path / "t.ckpt")
    resumed = gg.Trainer.resume(trainer.definition, tmp_path / "t.ckpt", device="cpu")
    assert resumed.names == trainer.names
    assert resumed.evaluate(train) == trainer.evaluate(train)


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name][1] in (_category, _numbered_category)])
def test_categories_may_be_numbered_for_embeddings(name: str) -> None:
    train, other = _frames([name], 1)
    plan = fit(train, kinds={name: {"kind": "category", "index": True}})
    for frame in (train, other):
        indices = plan.arrays(frame)["categories"]
        assert indices.dtype == np.int64 and indices.shape == (ROWS, 1)
        np.testing.assert_array_equal(indices[:, 0], _expected([name], train, frame).argmax(axis=1))


def test_values_that_are_rare_are_as_those_that_were_never_seen() -> None:
    frame = pd.DataFrame({"town": ["Ulm"] * 5 + ["Bonn"] * 4 + ["Kiel"]})
    plan = fit(frame, kinds={"town": {"kind": "category", "min_count": 2}})
    assert plan.features["x"] == ["town=Bonn", "town=Ulm", "town=(another)"]
    assert plan.arrays(frame)["x"][-1].tolist() == [0, 0, 1]


def test_columns_of_the_names_of_a_model_are_its_inputs_nevertheless(tmp_path: Path) -> None:
    """Its own input, output, weights and inner values are called like columns."""
    model = gg.frontend.export(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)), {"x": ("batch", 5)})
    inner = [name for node in model.graph.node for name in node.output if name != "output"]
    called = ["x", *inner[:2], model.graph.initializer[0].name, "rows"]
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.normal(size=ROWS) for name in (*called, "price")})
    trainer = gg.Trainer(gg.build(model, loss="mse"), device="cpu")
    trainer.names = gg.DataNames(preprocess=fit(frame, "price"))
    trainer.fit(frame, progress=False)
    trainer.export(tmp_path / "t.onnx")
    session = ort.InferenceSession(tmp_path / "t.onnx")
    assert sorted(value.name for value in session.get_inputs()) == sorted(called)
    found = session.run(None, {name: frame[name].to_numpy() for name in called})[0]
    np.testing.assert_allclose(found, trainer.predict(frame), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "called", ["preprocess/x", "logits", "class", "probabilities", "a,b", " ", "rows", "temperature", "x", "target"]
)
def test_a_column_may_have_any_name(called: str, tmp_path: Path) -> None:
    """Also that of an output, or of what stands in front of the model: exported, calibrated and read again."""
    from gradgraph.export.temperature import calibrate

    rng = np.random.default_rng(0)
    frame = pd.DataFrame({called: rng.choice(["a", "b"], ROWS), "n": rng.normal(size=ROWS), "y": ["no", "yes"] * 30})
    frame = frame.drop(columns="n") if called in ("x", "target") else frame
    plan = fit(frame, "y")
    trainer = gg.Trainer(gg.build(gg.tables.mlp(plan, [4]), gg.tables.loss(plan)), device="cpu")
    trainer.fit(frame, progress=False)
    trainer.export(tmp_path / "t.onnx")
    expected = trainer.predict(frame)
    found = ort.InferenceSession(tmp_path / "t.onnx").run(None, plan.feeds(frame))
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    again = gg.Trainer(gg.build(tmp_path / "t.onnx"), device="cpu")
    np.testing.assert_allclose(again.predict(frame), expected, rtol=1e-5, atol=1e-6)
    told = calibrate(trainer, frame)
    divided = ort.InferenceSession(told.model.SerializeToString()).run(None, plan.feeds(frame))
    np.testing.assert_allclose(divided[0], expected / told.temperature, rtol=1e-5, atol=1e-6)
    assert divided[1].tolist() == found[1].tolist()


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("called", ["x", "categories", "target", "class", "logits"])
def test_a_target_may_have_any_name(called: str, index: bool) -> None:
    frame = pd.DataFrame({"a": ["u", "v"] * 30, "n": np.arange(60) / 9, called: np.arange(60) / 7})
    plan = fit(frame, called, index=index)
    trainer = gg.Trainer(gg.build(gg.tables.mlp(plan, [4]), gg.tables.loss(plan)), device="cpu")
    trainer.fit(frame, progress=False)
    found = np.asarray(trainer.predict(frame.drop(columns=called))).reshape(-1)
    scale = frame[called].std(ddof=0) ** 2
    assert trainer.evaluate(frame)["loss"] == pytest.approx(np.mean((found - frame[called]) ** 2) / scale, rel=1e-4)


def _plan() -> tuple[Preprocessing, Any]:
    frame = pd.DataFrame({"age": np.arange(20.0), "town": ["Ulm", "Bonn"] * 10, "y": np.arange(20) * 0.5})
    return fit(frame, "y"), frame


def test_what_later_tables_lack_is_named() -> None:
    plan, frame = _plan()
    with pytest.raises(DataError, match=r"lacks the column 'town', which the model reads, and has the new 'city'"):
        plan.arrays(frame.rename(columns={"town": "city"}))
    with pytest.raises(
        DataError, match=r"the column 'age' contains 'old' in row 1 \(index 0\), but the model expects numbers"
    ):
        plan.arrays(frame.assign(age=["old", *range(19)]))


def test_what_cannot_be_learnt_is_said() -> None:
    _, frame = _plan()
    with pytest.raises(DataError, match="the table has no column 'prize'; there is age, town, y"):
        fit(frame, "prize")
    with pytest.raises(ArgumentError, match=r"table is 'train.csv'; it should be a DataFrame .*read_csv"):
        fit("train.csv", "y")
    with pytest.raises(DataError, match="target column 'y' has 2 missing values"):
        fit(frame.assign(y=[None, np.nan, *range(18)]), "y")
    with pytest.raises(BuildError, match="there is no kind of column 'categories'; did you mean 'category'"):
        fit(frame, "y", {"town": "categories"})
    with pytest.raises(ArgumentError, match=r"'bucket'.*did you mean 'buckets'"):
        fit(frame, "y", {"town": {"kind": "text", "bucket": 3}})
    with pytest.raises(
        DataError, match=r"the column 'age' contains inf in row 1 \(index 0\), but the model expects finite numbers"
    ):
        fit(frame.assign(age=np.inf), "y")
    with pytest.raises(ArgumentError, match="reads no column"):
        fit(frame[["y"]], "y")


def test_a_model_of_another_size_is_told_what_is_made() -> None:
    plan, frame = _plan()
    trainer = gg.Trainer(gg.build(gg.frontend.export(nn.Linear(3, 1), {"x": ("batch", 3)}), loss="mse"), device="cpu")
    trainer.names = gg.DataNames(preprocess=plan)
    with pytest.raises(DataError, match=r"computes 4 features .* \('age', 'town=Bonn'.*'x' expects 3"):
        trainer.fit(frame, progress=False)


@pytest.mark.parametrize("name", ["floats with gaps", "dates with gaps"])
def test_missing_values_need_no_feature_of_their_own(name: str) -> None:
    frame = pd.DataFrame({name: KINDS[name][0](np.random.default_rng(0))})
    kind = "date" if name.startswith("dates") else "number"
    plan = fit(frame, kinds={name: {"kind": kind, "indicator": False}})
    assert plan == Preprocessing.from_data(plan.as_data())
    np.testing.assert_array_equal(plan.arrays(frame)["x"], fit(frame).arrays(frame)["x"][:, :-1])


TARGETS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "text": (["b", "a"] * 20, ("a", "b")),
    "booleans": ([True, False] * 20, ("False", "True")),
    "few whole numbers": ([10, 9] * 20, ("9", "10")),
    "many whole numbers": (list(range(40)), ()),
    "numbers": (np.linspace(0, 1, 40), ()),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_classes_or_numbers(name: str) -> None:
    values, classes = TARGETS[name]
    plan = fit(pd.DataFrame({"a": np.arange(40.0), "y": values}), "y")
    assert plan.targets["y"].classes == classes
    if not classes:
        assert plan.targets["y"].mean == pytest.approx(np.mean(values))
        assert plan.targets["y"].std == pytest.approx(np.std(values))


DAMAGED: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "None": lambda data: None,
    "a list": lambda data: [],
    "nothing": lambda data: {},
    "more": lambda data: {**data, "more": 1},
    "a name that is none": lambda data: {**data, "numbers": 3},
    "two names alike": lambda data: {**data, "numbers": data["indices"]},
    "rows below zero": lambda data: {**data, "rows": -1},
    "half a character": lambda data: {**data, "columns": {"\ud800": data["columns"]["age"]}},
    "a kind that is none": lambda data: {**data, "columns": {"a": {"kind": []}}},
    "a column that is none": lambda data: {**data, "columns": {"a": 3}},
    "no columns": lambda data: {**data, "columns": {}},
    "no buckets": lambda data: {**data, "columns": {"a": {"kind": "text", "buckets": 0}}},
    "too many buckets": lambda data: {**data, "columns": {"a": {"kind": "text", "buckets": 1 << 40}}},
    "not a number": lambda data: {**data, "columns": {"a": {**data["columns"]["age"], "std": float("nan")}}},
    "text for a number": lambda data: {**data, "columns": {"a": {**data["columns"]["age"], "mean": "1"}}},
    "too large a number": lambda data: {**data, "columns": {"a": {**data["columns"]["age"], "mean": 10**400}}},
    "no spread": lambda data: {**data, "columns": {"a": {**data["columns"]["age"], "std": 0}}},
    "a value twice": lambda data: {**data, "columns": {"a": {"kind": "category", "values": ["a", "a"]}}},
    "text for values": lambda data: {**data, "columns": {"a": {"kind": "category", "values": "ab"}}},
    "values of both": lambda data: {**data, "columns": {"a": {"kind": "category", "values": ["a", 1]}}},
    "half a character in values": lambda data: {**data, "columns": {"a": {"kind": "category", "values": ["\udfff"]}}},
    "half a date": lambda data: {**data, "columns": {"a": {"kind": "date", "mean": 1, "std": 1}}},
    "a target without spread": lambda data: {**data, "targets": {"y": {"std": 0.0}}},
    "classes that are none": lambda data: {**data, "targets": {"y": {"classes": [1]}}},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_plans_are_refused(name: str) -> None:
    data = DAMAGED[name](_plan()[0].as_data())
    for read in (Preprocessing.from_data, lambda found: gg.DataNames.from_data({"preprocess": found})):
        if name != "None" or read is Preprocessing.from_data:
            with pytest.raises(ArgumentError):
                read(data)


def test_a_run_that_begins_keeps_its_preprocessing() -> None:
    """Tables that it does not fit are refused, and not taken as they are, and so are data that another has prepared."""
    plan, frame = _plan()
    model = gg.frontend.export(nn.Linear(4, 1), {"x": ("batch", 4)})
    trainers = [gg.Trainer(gg.build(model, loss="mse"), device="cpu") for _ in range(2)]
    trainers[0].names = gg.DataNames(preprocess=plan)
    with pytest.raises(DataError, match="the table lacks the column 'town'"):
        trainers[0].fit(frame.rename(columns={"town": "city"}), progress=False)
    trainers[1].names = gg.DataNames(preprocess=fit(frame[:10], "y"))
    with pytest.raises(DataError, match="not prepared with the model's preprocessing"):
        trainers[0].fit(trainers[1].prepare(frame), progress=False)


@pytest.mark.parametrize(
    "name", [name for name in KINDS if name not in ("categorical", "nullable integers", "strings")]
)
def test_tables_of_arrow_and_dicts_are_read_as_frames_are(name: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="an extra: onnx-gradgraph[tables]")
    train, other = _frames([name], 2)
    plan = fit(train, kinds=_overrides([name]))
    made = [arrow.Table.from_pandas, lambda frame: {key: frame[key].to_numpy() for key in frame}]
    for table in made:
        assert fit(table(train), kinds=_overrides([name])) == plan
        np.testing.assert_array_equal(plan.arrays(table(other))["x"], plan.arrays(other)["x"])
