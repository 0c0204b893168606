"""Data are matched by the names of what a model was trained on, wherever they come from and however they lie.

Every source of names × every use of it: columns and classes in any order give the same numbers, and those that are
missing or new are refused, or left out and told.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.data.record.data_names import NAMES_KEY, NO_NAMES, DataNames
from gradgraph.data.record.specs import TensorSpec
from gradgraph.data.sources.in_order import in_order
from gradgraph.errors import DataError, ModelError
from gradgraph.export.artifacts import save_inference
from gradgraph.frontend import nn
from gradgraph.runtime.saved.record import Progress, body_of, from_text, to_text
from gradgraph.step.manifest import Manifest

pytestmark = pytest.mark.any_kernels

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")

Array = np.ndarray[Any, Any]
ROWS, SIZE = 30, 8
FEATURES, CLASSES = ["width", "height", "age", "0"], ["cat", "dog", "emu"]
ORDERS = range(2)  # seeds of orders


def _columns() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {name: rng.normal(size=ROWS).astype(np.float32) * 3**i for i, name in enumerate(FEATURES)}
    return {**columns, "target": rng.integers(0, 3, ROWS)}


COLUMNS = _columns()


@functools.cache
def _step() -> gg.Step:
    gg.frontend.manual_seed(0)
    model = gg.frontend.export(nn.Linear(4, 3), {"x": ("batch", 4)})
    return gg.build(model, loss="cross_entropy", optimizer=gg.optim.sgd(0.01), metrics=["confusion_matrix"])


def _trainer() -> gg.Trainer:
    return gg.Trainer(_step(), device="cpu", seed=1)


def _frame(columns: Mapping[str, Any]) -> Any:
    return pd.DataFrame(columns)


def _written(suffix: str) -> Callable[[Mapping[str, Any], Path], Any]:
    def write(columns: Mapping[str, Any], folder: Path) -> Path:
        path, frame = folder / f"data{suffix}", _frame({name: np.float64(a) for name, a in columns.items()})
        frame["target"] = columns["target"]
        how: dict[str, Callable[[], Any]] = {
            ".csv": lambda: frame.to_csv(path, index=False),
            ".tsv": lambda: frame.to_csv(path, index=False, sep="\t"),
            ".parquet": lambda: frame.to_parquet(path),
            ".feather": lambda: frame.to_feather(path),
            ".jsonl": lambda: frame.to_json(path, orient="records", lines=True, double_precision=15),
        }
        how[suffix]()
        return path

    return write


def _apart(columns: Mapping[str, Any]) -> tuple[Any, Array]:
    return _frame({name: a for name, a in columns.items() if name != "target"}), columns["target"]


def _batches(columns: Mapping[str, Any], made: Callable[[Any, Array], Any]) -> list[Any]:
    frame, labels = _apart(columns)
    return [made(frame[i : i + SIZE], labels[i : i + SIZE]) for i in range(0, ROWS, SIZE)]


def _arrow(columns: Mapping[str, Any]) -> Any:
    return pytest.importorskip("pyarrow", reason="an extra: onnx-gradgraph[tables]").table(dict(columns))


SOURCES: dict[str, Callable[[Mapping[str, Any], Path], Any]] = {
    "frame": lambda columns, path: _frame(columns),
    "Arrow": lambda columns, path: _arrow(columns),
    **{suffix: _written(suffix) for suffix in (".csv", ".tsv", ".parquet", ".feather", ".jsonl")},
    "dict of frames": lambda columns, path: dict(zip(("x", "target"), _apart(columns), strict=True)),
    "tuple of frames": lambda columns, path: _apart(columns),
    "batches of frames": lambda columns, path: _batches(columns, lambda x, y: x.assign(target=y)),
    "batches of dicts": lambda columns, path: _batches(columns, lambda x, y: {"x": x, "target": y}),
    "batches of tuples": lambda columns, path: _batches(columns, lambda x, y: (x, y)),
}


def _ordered(columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
    names = list(columns)
    return {names[i]: columns[names[i]] for i in np.random.default_rng(seed).permutation(len(names))}


def _numbers(found: Any) -> Any:
    """What does not tell how often something was done before."""
    if not isinstance(found, Mapping):
        return found
    return {name: np.asarray(value).tolist() for name, value in found.items() if name not in ("epoch", "step")}


def _goes_on(trainer: gg.Trainer, data: Any, folder: Path) -> Any:
    trainer.save(folder / "run.ckpt")
    again = gg.Trainer.resume(trainer.definition, folder / "run.ckpt", device="cpu")
    again.fit(data, 3, SIZE, shuffle=False, progress=False)
    return again.parameters


def _exported(trainer: gg.Trainer, data: Any, folder: Path) -> Any:
    """Build again from what was exported: the names came with it."""
    trainer.export(folder / "trained.onnx")
    step = gg.build(folder / "trained.onnx", loss="cross_entropy")
    return gg.Trainer(step, device="cpu").evaluate(data)


def _reopened(trainer: gg.Trainer, data: Any, folder: Path) -> Any:
    step = copy.copy(trainer.definition)
    step.remember(trainer.names)
    step.save(folder / "step")
    again = gg.Trainer(folder / "step", device="cpu")
    again.load_state_dict(trainer.state_dict())
    return again.evaluate(data)


USES: dict[str, Callable[[gg.Trainer, Any, Path], Any]] = {
    "evaluate": lambda trainer, data, folder: trainer.evaluate(data),
    "worst": lambda trainer, data, folder: str(trainer.worst(data, 5)),
    "per_class": lambda trainer, data, folder: str(trainer.per_class(data)),
    "fit": lambda trainer, data, folder: trainer.fit(data, 1, SIZE, shuffle=False, progress=False),
    "goes on": _goes_on,
    "exported": _exported,
    "reopened": _reopened,
}


def _fitted(data: Any) -> gg.Trainer:
    trainer = _trainer()
    trainer.fit(data, 2, SIZE, shuffle=False, progress=False)
    return trainer


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("source", SOURCES)
def test_columns_in_any_order_give_the_same_numbers(source: str, use: str, tmp_path: Path) -> None:
    told = SOURCES[source](COLUMNS, tmp_path)
    trainer = _fitted(told)
    assert trainer.names.columns == {"x": tuple(FEATURES)}
    start = trainer.state_dict()
    expected = _numbers(USES[use](trainer, told, tmp_path))
    for seed in ORDERS:
        trainer.load_state_dict(start)
        columns, folder = _ordered(COLUMNS, seed), tmp_path / str(seed)
        folder.mkdir()
        assert _numbers(USES[use](trainer, SOURCES[source](columns, folder), folder)) == expected, list(columns)


PREDICTED: dict[str, Callable[[Mapping[str, Any], Path], Any]] = {
    **{source: SOURCES[source] for source in ("frame", "Arrow", ".csv", ".parquet", "dict of frames")},
    "frame of inputs": lambda columns, path: _apart(columns)[0],
    "batches": lambda columns, path: _batches(columns, lambda x, y: x),
    "batches of dicts": lambda columns, path: _batches(columns, lambda x, y: {"x": x}),
}


@pytest.mark.parametrize("source", PREDICTED)
def test_predictions_do_not_depend_on_the_order_of_columns(source: str, tmp_path: Path) -> None:
    trainer = _fitted(_frame(COLUMNS))
    expected = trainer.predict(np.column_stack([COLUMNS[name] for name in FEATURES]))
    for seed in ORDERS:
        found = trainer.predict(PREDICTED[source](_ordered({**COLUMNS, "id": COLUMNS["target"]}, seed), tmp_path))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_what_is_read_once_is_matched_too(suffix: str, tmp_path: Path) -> None:
    names = DataNames({"x": FEATURES})
    for seed in ORDERS:
        path = SOURCES[suffix](_ordered({**COLUMNS, "id": COLUMNS["target"]}, seed), tmp_path)
        with in_order(path, {"x": TensorSpec("x", "float32", ("batch", 4))}, ["target"], names) as ordered:
            rows = np.concatenate([batch["x"] for batch in ordered.batches(SIZE)])
        np.testing.assert_allclose(rows, np.column_stack([COLUMNS[name] for name in FEATURES]), rtol=1e-6)


# --- what is missing or new --------------------------------------------------------------------------------------

DOORS: dict[str, Callable[[gg.Trainer, Any], Any]] = {
    "fit": lambda trainer, data: trainer.fit(data, 1, SIZE, progress=False),
    "validation": lambda trainer, data: trainer.fit(_frame(COLUMNS), 1, SIZE, validation=data, progress=False),
    "evaluate": lambda trainer, data: trainer.evaluate(data),
    "predict": lambda trainer, data: trainer.predict(data),
    "worst": lambda trainer, data: trainer.worst(data, 3),
    "prepare": lambda trainer, data: trainer.prepare(data),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_missing_column_is_refused_by_name(door: str) -> None:
    trainer = _fitted(_frame(COLUMNS))
    before = trainer.state_dict()
    renamed = _frame({"length" if name == "height" else name: a for name, a in COLUMNS.items()})
    says = r"the table lacks the column 'height' of 'x', and has the new column 'length'; rename columns"
    with pytest.raises(DataError, match=says):
        DOORS[door](trainer, renamed)
    np.testing.assert_equal(trainer.state_dict(), before)


@pytest.mark.parametrize("door", DOORS)
def test_a_new_column_is_left_out_and_told(door: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = _fitted(_frame(COLUMNS))
    with caplog.at_level(logging.WARNING, "gradgraph"):
        DOORS[door](trainer, _frame({"id": COLUMNS["target"], **COLUMNS}))
    assert "the column 'id' of the table is ignored: 'x' is made from 'width', 'height', 'age', '0'" in caplog.messages


def test_columns_of_one_name_are_refused() -> None:
    frame = _frame(COLUMNS)
    frame.columns = ["width", "height", "age", "age", "target"]
    with pytest.raises(DataError, match="the table has two columns 'age'; rename one of them"):
        _fitted(frame)


def test_columns_that_a_library_knows_by_numbers() -> None:
    frame = _frame(COLUMNS)
    frame.columns = [0, 1, 2, 3, "target"]
    trainer = _fitted(frame)
    assert trainer.names.columns == {"x": ("0", "1", "2", "3")}
    np.testing.assert_equal(trainer.evaluate(frame[["target", 3, 1, 0, 2]]), trainer.evaluate(frame))


def test_data_that_were_prepared_before_names_were_known_are_compared() -> None:
    trainer, frame = _trainer(), _frame(COLUMNS)
    prepared = trainer.prepare(frame[["age", *[name for name in frame if name != "age"]]], SIZE)
    trainer.fit(frame, 1, SIZE, progress=False)
    for door in (trainer.evaluate, trainer.predict, trainer.fit):
        with pytest.raises(DataError, match=r"prepared with the columns 'age', .* prepare them again"):
            door(prepared)
    np.testing.assert_equal(trainer.evaluate(trainer.prepare(frame)), trainer.evaluate(frame))


def test_a_run_that_begins_may_have_other_columns_than_its_model(caplog: pytest.LogCaptureFixture) -> None:
    model = _fitted(_frame(COLUMNS)).export()
    other = _frame(
        {f"{name} in cm": a for name, a in COLUMNS.items() if name != "target"} | {"target": COLUMNS["target"]}
    )
    trainer = gg.Trainer(gg.build(model, loss="cross_entropy"), device="cpu")
    with pytest.raises(DataError, match="lacks the columns 'width'"):
        trainer.evaluate(other)
    trainer.fit(other, 1, progress=False)
    assert any("lacks the columns 'width', " in m and "starts with the new names" in m for m in caplog.messages)
    assert trainer.names.columns == {"x": tuple(f"{name} in cm" for name in FEATURES)}
    with pytest.raises(DataError, match="lacks the columns 'width in cm'"):
        trainer.fit(_frame(COLUMNS), 1, progress=False)


def test_arrays_have_no_names_and_are_taken_as_they_are() -> None:
    x = np.column_stack([COLUMNS[name] for name in FEATURES])
    trainer = _fitted({"x": x, "target": COLUMNS["target"]})
    assert not trainer.names
    assert trainer.export().metadata_props == []
    trainer.fit(_frame(COLUMNS), 1, progress=False)  # what is learnt later is kept, too
    assert trainer.names.columns == {"x": tuple(FEATURES)}
    np.testing.assert_equal(trainer.evaluate({"x": x, "target": COLUMNS["target"]}), trainer.evaluate(_frame(COLUMNS)))


def test_batches_of_a_loop_are_matched() -> None:
    one, other = _trainer(), _trainer()
    frame = _frame(COLUMNS)
    for seed in range(4):
        mixed = frame[list(_ordered(dict.fromkeys(frame), seed))]
        one.step(frame)
        other.step(frame if seed == 0 else mixed)
    assert one.names == other.names
    np.testing.assert_equal(one.state_dict(), other.state_dict())


# --- classes -----------------------------------------------------------------------------------------------------


class Declared:
    """A dataset with names of classes, as those of torchvision are."""

    def __init__(self, classes: list[str], named: list[str]) -> None:
        self.classes = classes
        self.labels = [classes.index(name) for name in named]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Array, int]:
        return np.array([COLUMNS[name][i] for name in FEATURES]), self.labels[i]


class Loader:
    """Batches of a dataset, as a DataLoader gives them."""

    def __init__(self, dataset: Declared) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self.dataset), SIZE):
            samples = [self.dataset[i] for i in range(first, min(first + SIZE, len(self.dataset)))]
            yield np.stack([x for x, _ in samples]), np.array([label for _, label in samples])


class Features(dict[str, Any]):
    """The features of a dataset of Hugging Face."""


class Label:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class Described:
    def __init__(self, classes: list[str], named: list[str]) -> None:
        self._inner = Declared(classes, named)
        self.features = Features(target=Label(classes), x="float32")

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(zip(("x", "target"), self._inner[i], strict=True))


NAMED = [CLASSES[i] for i in COLUMNS["target"]]
LABELLED: dict[str, Callable[[list[str], list[str]], Any]] = {
    "dataset": Declared,
    "loader": lambda classes, named: Loader(Declared(classes, named)),
    "features": Described,
    "text": lambda classes, named: _frame({**COLUMNS, "target": named}),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("source", LABELLED)
def test_classes_in_any_order_give_the_same_numbers(source: str, use: str, tmp_path: Path) -> None:
    told = LABELLED[source](CLASSES, NAMED)
    trainer = _fitted(told)
    assert trainer.names.classes == {"target": tuple(CLASSES)} and trainer.names.softmax == ("target",)
    start = trainer.state_dict()
    expected = _numbers(USES[use](trainer, told, tmp_path))
    for i, order in enumerate((["emu", "cat", "dog"], ["dog", "cat", "emu"])):
        trainer.load_state_dict(start)
        (tmp_path / str(i)).mkdir()
        assert _numbers(USES[use](trainer, LABELLED[source](order, NAMED), tmp_path / str(i))) == expected, order


@pytest.mark.parametrize("source", LABELLED)
def test_classes_that_are_missing_or_new(source: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = _fitted(LABELLED[source](CLASSES, NAMED))
    few = [name if name != "cat" else "emu" for name in NAMED]
    scores = trainer.evaluate({"x": np.column_stack([COLUMNS[n] for n in FEATURES]),
                               "target": np.array([CLASSES.index(name) for name in few])}, SIZE)  # fmt: skip
    caplog.clear()
    np.testing.assert_equal(trainer.evaluate(LABELLED[source](["dog", "emu"], few), SIZE), scores)
    lacks = [m for m in caplog.messages if "lacks the class 'cat', known from training" in m]
    assert len(lacks) == (source != "text")  # a column need not have a row of each
    others = [name if name != "cat" else "ant" for name in NAMED]
    says = r"has the new class 'ant', and lacks the class 'cat'; the model has 'cat', 'dog', 'emu'; drop such"
    for door in (trainer.evaluate, lambda data: trainer.fit(data, 1, progress=False)):
        with pytest.raises(DataError, match=says):
            door(LABELLED[source](["ant", "dog", "emu"], others))


def test_more_classes_in_a_column_than_the_model_has() -> None:
    with pytest.raises(DataError, match=r"has 4 classes \('a', 'b', 'c', 'd'\), but .* labels range from 0 to 2"):
        _fitted(_frame({**COLUMNS, "target": ["a", "b", "c", "d", *"a" * (ROWS - 4)]}))


def test_ignored_labels_stay() -> None:
    trainer = _fitted(Declared(CLASSES, NAMED))
    ignoring = Declared(CLASSES[::-1], NAMED)
    ignoring.labels[::2] = [-100] * (ROWS // 2)
    plain = {"x": np.stack([x for x, _ in map(ignoring.__getitem__, range(ROWS))]),
             "target": np.where(np.arange(ROWS) % 2, COLUMNS["target"], -100)}  # fmt: skip
    np.testing.assert_equal(trainer.evaluate(ignoring), trainer.evaluate(plain))


# --- where names are kept ----------------------------------------------------------------------------------------

NAMES = DataNames({"x": ["a", "b"]}, {"target": ["no", "yes"]}, {"photo": {"size": (2, 3), "mean": (0.5,)}}, ["target"])


def test_names_come_back_from_each_place() -> None:
    assert DataNames.from_data(json.loads(json.dumps(NAMES.as_data()))) == NAMES
    assert DataNames.read_from(NAMES.as_metadata()) == NAMES
    assert from_text(to_text(body_of(Progress(names=NAMES)), "")).progress.names == NAMES
    manifest = _step().manifest
    assert Manifest.from_json(replace(manifest, data=NAMES).to_json()).data == NAMES


def test_steps_and_checkpoints_without_names_open() -> None:
    assert "names" not in json.loads(body_of(Progress()))
    assert from_text(to_text(body_of(Progress()), "")).progress.names == NO_NAMES
    assert "data" not in json.loads(_step().manifest.to_json())
    assert Manifest.from_json(_step().manifest.to_json()).data == NO_NAMES


HOSTILE = {
    "no JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "a number": "1",
    "another field": '{"rows": []}',
    "columns of numbers": '{"columns": {"x": [1, 2]}}',
    "columns that are text": '{"columns": {"x": "ab"}}',
    "columns that are a list": '{"columns": [["a"]]}',
    "a class twice": '{"classes": {"target": ["a", "a"]}}',
    "images by name": '{"images": {"x": "small"}}',
    "an argument that is none": '{"images": {"x": {"path": "/etc/passwd"}}}',
    "an image of terabytes": '{"images": {"x": {"size": [1000000, 1000000]}}}',
    "a negative size": '{"images": {"x": {"size": [-1, 4]}}}',
    "a mean that is none": '{"images": {"x": {"mean": [NaN, 0, 0]}}}',
    "infinite": '{"images": {"x": {"std": [1e999, 1, 1]}}}',
    "a layout that is none": '{"images": {"x": {"layout": "CHWN"}}}',
    "a side that is true": '{"images": {"x": {"shorter": true}}}',
    "softmax of numbers": '{"softmax": [1]}',
    "null": '{"columns": null}',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_names_are_a_sentence(what: str) -> None:
    with pytest.raises(ModelError, match=f"the metadata '{NAMES_KEY}' of the model is damaged .*; export"):
        DataNames.read_from({NAMES_KEY: HOSTILE[what]})
    model = onnx.ModelProto()
    model.CopyFrom(_trainer().export())
    model.metadata_props.add(key=NAMES_KEY, value=HOSTILE[what])
    with pytest.raises(ModelError, match="is damaged"):
        gg.build(model, loss="cross_entropy")


@pytest.mark.parametrize("what", [name for name in HOSTILE if name not in ("no JSON", "deep")])
def test_hostile_names_in_a_step_or_a_checkpoint_are_a_sentence(what: str) -> None:
    names = json.loads(HOSTILE[what])
    manifest = {**json.loads(_step().manifest.to_json()), "data": names}
    with pytest.raises(ModelError, match="the manifest is damaged"):
        Manifest.from_json(json.dumps(manifest))
    record = {**json.loads(to_text(body_of(Progress()), "")), "names": names}
    with pytest.raises(ValueError, match=r"\w"):
        from_text(json.dumps(record))


def test_names_that_steer_a_terminal_come_back(tmp_path: Path) -> None:
    trainer, odd = _fitted(_frame(COLUMNS)), ["\x1b[31m", "\u202e", "\n"]
    trainer.names = DataNames(classes={"target": odd})
    trainer.save(tmp_path / "run.ckpt")
    assert gg.Trainer.resume(_step(), tmp_path / "run.ckpt", device="cpu").names == trainer.names
    trainer.export(tmp_path / "trained.onnx")
    (text,) = (p.value for p in onnx.load(tmp_path / "trained.onnx").metadata_props)
    assert text.isprintable()
    assert DataNames.read_from({NAMES_KEY: text}) == trainer.names
    with pytest.raises(gg.errors.ArgumentError, match="contains an unpaired surrogate"):
        DataNames(classes={"target": ["\udcff"]})  # as of a path that is no UTF-8


def test_names_of_another_head_are_left_behind() -> None:
    trainer = _fitted(Declared(CLASSES, NAMED))
    trainer.names = DataNames({"x": FEATURES})
    model = trainer.export()
    kept = gg.build(model, loss={"output": "cross_entropy"}).manifest.data
    assert kept.columns == {"x": tuple(FEATURES)} and kept.classes == {"output_target": tuple(CLASSES)}
    heads = [(gg.new_head(model, classes), "cross_entropy") for classes in (3, 5)]
    for other, loss in (*heads, (model, "mse")):
        assert gg.build(other, loss=loss).manifest.data == DataNames({"x": FEATURES})


@pytest.mark.parametrize("kept", ["mixed", "sizes", "as it is"])
def test_names_are_in_whatever_is_exported(kept: str, tmp_path: Path) -> None:
    trainer = _fitted(Declared(CLASSES, NAMED))
    trainer.names = DataNames({"x": FEATURES})
    path = tmp_path / "trained.onnx"
    if kept == "mixed":
        step = gg.build(trainer.export(), loss="cross_entropy", precision="bfloat16")
        gg.Trainer(step, device="cpu").export(path, mixed=True)
    else:
        trainer.save(tmp_path / "run.ckpt")
        sizes = {"batch": 2} if kept == "sizes" else None
        save_inference(trainer.definition, path, tmp_path / "run.ckpt", sizes=sizes)
    found = DataNames.read_from({p.key: p.value for p in onnx.load(path).metadata_props})
    assert (found.columns, found.classes) == (trainer.names.columns, trainer.names.classes)
