"""Walks with tables: odd columns and gaps, in memory or in a file, in Python or in the shell."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd

import gradgraph as gg
from gradgraph.errors import GradgraphError
from gradgraph.frontend import nn
from tests.data_walks.random_walk import (
    ODD_CLASSES,
    ODD_NAMES,
    Array,
    ShellError,
    Walk,
    bare,
    classifier_scores,
    entropies,
    regression_scores,
    softmax,
)
from tests.data_walks.run_laws import check_rates, check_runs

WORDS = ("red", "Green", "grün", "a,b", "x y", 'say "x"', "-", "inf", "x=1")
SUFFIXES = (".csv", ".tsv", ".parquet", ".feather", ".jsonl")
Column = Any  # a list of values


# --- columns ------------------------------------------------------------------------------------------------------


def _column(walk: Walk, kind: str, rows: int) -> Column:
    rng = walk.rng
    if kind == "number":
        return (rng.normal(size=rows) * 10.0 ** rng.integers(-3, 6)).tolist()
    if kind == "integer":
        return rng.integers(-5, 60, rows).tolist()
    if kind == "boolean":
        return [bool(one) for one in rng.random(rows) > 0.5]
    if kind == "constant":
        return [7.5] * rows
    if kind == "word":
        return rng.choice(walk.some(WORDS, 4), rows).tolist()
    if kind == "code":  # numbers with zeros in front, and a few letters
        return [f"{one:02d}" if one < 7 else f"A{one}" for one in rng.integers(0, 9, rows).tolist()]
    if kind == "version":  # numbers but for some
        return [str(one) for one in rng.choice(np.array(["1.0", "1.50", "2", "2b"]), rows)]
    if kind == "truth":  # booleans but for some
        return [str(one) for one in rng.choice(np.array(["True", "False", "unknown"]), rows, p=[0.5, 0.4, 0.1])]
    if kind == "date":
        days = pd.Timestamp("2020-02-27") + pd.to_timedelta(rng.integers(0, 900, rows), unit="D")
        return [str(day.date()) for day in days]
    return [" ".join(rng.choice(WORDS, 6)) for _ in range(rows)]


KINDS = ("number", "integer", "boolean", "constant", "word", "code", "version", "truth", "date", "prose")
HAVE_NO_GAPS = ("constant",)


def _frame(walk: Walk, kinds: dict[str, str], rows: int) -> pd.DataFrame:
    columns: dict[str, Column] = {}
    for name, kind in kinds.items():
        values = _column(walk, kind, rows)
        if kind not in HAVE_NO_GAPS and walk.rng.random() < 0.4:
            values = [None if walk.rng.random() < 0.15 else value for value in values]
        columns[name] = values
    return pd.DataFrame({name: pd.Series(values, dtype=_dtype(values)) for name, values in columns.items()})


def _dtype(values: list[Any]) -> Any:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {float} or (kinds == {int} and None in values):
        return np.float64
    return object if kinds == {str} or None in values else None


@dataclass
class Target:
    """What is to be predicted.

    Attributes:
        values: [rows], of the frame.
        classes: their names, in the order that the page on tables tells; none of numbers.
    """

    name: str
    values: list[Any]
    classes: list[str]


def _target(walk: Walk, name: str, rows: int) -> Target:
    kind = walk.choose("target", ["text", "text", "integers", "booleans", "numbers", "floats as classes"])
    if kind == "numbers":
        return Target(name, (walk.rng.normal(size=rows) * 30 + 100).tolist(), [])
    if kind == "booleans":
        values: list[Any] = [bool(one) for one in walk.rng.random(rows) > 0.4]
    elif kind == "integers":
        values = walk.rng.choice([-1, 0, 3, 10], rows).tolist()
    elif kind == "floats as classes":
        values = walk.rng.choice([0.5, 1.0, 10.0], rows).tolist()
    else:
        values = walk.rng.choice(walk.some(ODD_CLASSES, int(walk.rng.integers(2, 6))), rows).tolist()
    values[:2] = [values[0], next((one for one in values if one != values[0]), values[0])]
    return Target(name, values, sorted({_called(one) for one in values}, key=_order))


def _called(value: Any) -> str:
    """The name of a class: whole numbers have no point."""
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)


def _order(name: str) -> Any:
    try:
        return (0, float(name), name)
    except ValueError:
        return (1, 0.0, name)


# --- files ------------------------------------------------------------------------------------------------------


def _written(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True, double_precision=15)
    else:
        (frame.to_parquet if path.suffix == ".parquet" else frame.to_feather)(path)
    return path


def _fed(frame: pd.DataFrame, path: Path) -> dict[str, Array]:
    """What the page on tables says that the exported file takes."""
    feeds: dict[str, Array] = {}
    for value in onnx.load(path).graph.input:
        column = frame[value.name].tolist()
        if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            feeds[value.name] = np.array(["" if one is None or one != one else str(one) for one in column], object)
        else:
            numbers = [np.nan if one is None or one != one else float(one) for one in column]
            feeds[value.name] = np.array(numbers, np.float64)
    return feeds


# --- the walk ------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """What a walk goes on: frames, and how a model is made and trained."""

    walk: Walk
    kinds: dict[str, str]
    target: Target
    train: pd.DataFrame
    held: pd.DataFrame
    new: pd.DataFrame
    suffix: str
    model: str
    overrides: dict[str, str]
    epochs: int
    batch: int

    def data(self, frame: pd.DataFrame, name: str) -> Any:
        """A frame as it is, or the path of its file."""
        return frame if self.suffix == "frame" else _written(frame, self.walk.folder / f"{name}{self.suffix}")


def _case(walk: Walk) -> Case:
    names = walk.some(ODD_NAMES, int(walk.rng.integers(2, 7)))
    kinds = {name: walk.choose(f"'{name}'", KINDS) for name in names[:-1]}
    rows, batch = 0, int(walk.choose("batch", [8, 16]))
    rows = batch * int(walk.rng.integers(2, 5)) + int(walk.choose("rest", [0, 1, 1, 5]))
    whole = _frame(walk, kinds, rows + 30)
    target = _target(walk, names[-1], rows + 30)
    whole[target.name] = target.values
    train, rest = whole[:rows], whole[rows:]
    called = [_called(one) for one in train[target.name]]
    if target.classes:
        target.classes = sorted(set(called), key=_order)
        rest = rest[[_called(one) in target.classes for one in rest[target.name]]]
    if target.classes and walk.flag("a class is missing in validation"):
        rest = rest[[_called(one) != target.classes[0] for one in rest[target.name]]]
    overrides = {target.name: "category" if target.classes else "number"}
    if len(target.classes) == 1 or len(rest) < 3:
        return _case(walk)
    new = rest.drop(columns=[target.name])
    model = walk.choose("model", ["mlp", "resnet", "ft_transformer", "own"])
    suffix = walk.choose("source", ["frame", *SUFFIXES])
    return Case(
        walk, kinds, target, train, rest, new, suffix, model, overrides, int(walk.choose("epochs", [1, 2, 3])), batch
    )


def _metrics(case: Case) -> list[str]:
    every = ("accuracy", "log_loss", "mcc", "cohen_kappa") if case.target.classes else ("mae", "mse", "rmse", "r2")
    return case.walk.some(every, 2)


def _python(case: Case, metrics: list[str]) -> gg.Trainer:
    """Train as the page on tables does in Python."""
    walk = case.walk
    indexed = case.model == "ft_transformer" or (case.model == "mlp" and walk.flag("index", 0.3))
    table = case.data(case.train, "train")
    frame = case.train if case.suffix == "frame" else _read(table)
    plan = gg.preprocess.fit(frame, case.target.name, case.overrides, index=indexed)
    options: dict[str, Any] = {}
    if walk.flag("ema", 0.3):
        options["ema"] = 0.9
    if walk.flag("accumulate", 0.3):
        options["accumulate"] = True
    if walk.flag("precision", 0.2):
        options["precision"] = walk.choose("precision", ["bfloat16", "float16"])
    if walk.flag("freeze", 0.3):
        options["freeze"] = "heads.*" if case.model != "own" else "2.*"
    rate = gg.optim.cosine(1e-2, 20) if walk.flag("schedule", 0.3) else 1e-2
    optimizer = gg.optim.adamw(rate) if walk.flag("adamw") else gg.optim.sgd(rate, momentum=0.9)
    outputs = max(len(case.target.classes), 1)
    loss: Any = gg.tables.loss(plan)
    if case.model == "own":
        width = len(plan.features["x"])
        gg.frontend.manual_seed(walk.seed)
        layers = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, outputs))
        model = gg.frontend.export(layers, {"points": ("batch", width)}, outputs=["scores"])
        loss = "cross_entropy" if case.target.classes else "mse"
    else:
        model = getattr(gg.tables, case.model)(plan, **({"hidden": [8, 8]} if case.model == "mlp" else {"width": 8}))
    if case.target.classes and walk.flag("class weights", 0.3):
        loss = gg.losses.cross_entropy(weight=walk.rng.uniform(0.2, 3, outputs).tolist())
    step = gg.build(model, loss, optimizer, metrics=metrics, seed=walk.seed, **options)
    fit: dict[str, Any] = {"batch_size": case.batch, "progress": False, "epochs": case.epochs}
    if walk.flag("accumulate in fit") and options.get("accumulate"):
        fit["accumulate"] = 2
    if walk.flag("validation", 0.7):
        fit["validation"] = case.data(case.held, "held")
        if walk.flag("patience"):
            fit["patience"] = 1

    def trained(validation: Any = None, **more: Any) -> gg.Trainer:
        trainer = gg.Trainer(step, device="cpu", seed=walk.seed)
        if case.model == "own":
            trainer.names = gg.DataNames(preprocess=plan)
        trainer.fit(table, **fit, **more)
        return trainer

    trainer = trained(checkpoint=walk.folder / "whole.ckpt")
    frozen = [name for name in trainer.parameters if options.get("freeze") and name.startswith(options["freeze"][:-1])]
    begun = gg.Trainer(step, device="cpu").state_dict()
    for name in frozen:
        walk.same(f"the frozen '{name}' is as before", trainer.state_dict()[name], begun[name])
    steps = trainer.progress.steps
    if steps > 1:
        at = int(walk.rng.integers(1, steps))
        stopped = trained(checkpoint=walk.folder / "part.ckpt", max_steps=at)
        resumed = gg.Trainer.resume(step, walk.folder / "part.ckpt", device="cpu")
        resumed.fit(table, **fit, checkpoint=walk.folder / "part.ckpt")
        del stopped
        walk.same(
            f"a run that is resumed at {at} of {steps} has the bits of one", resumed.state_dict(), trainer.state_dict()
        )
        walk.same("its history is that of one", _history(resumed), _history(trainer))
    return trainer


def _history(trainer: gg.Trainer) -> dict[str, list[Any]]:
    return {
        name: list(values) for name, values in trainer.history.items() if "second" not in name and "time" not in name
    }


def _read(path: Path) -> pd.DataFrame:
    if path.suffix in (".csv", ".tsv"):
        return pd.read_csv(path, sep="," if path.suffix == ".csv" else "\t")
    if path.suffix == ".jsonl":
        return pd.read_json(path, lines=True)
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_feather(path)


def _shell(case: Case, metrics: list[str]) -> gg.Trainer:
    """Train as the page on tables does in the shell."""
    walk = case.walk
    if case.suffix == "frame":
        case.suffix = walk.choose("suffix", SUFFIXES)
    case.model = "mlp" if case.model == "own" else case.model
    data, held = case.data(case.train, "train"), case.data(case.held, "held")
    words: list[Any] = [
        "--model",
        case.model,
        "--data",
        data,
        "--target",
        _typed(case.target.name),
        "--epochs",
        case.epochs,
    ]
    words += ["--batch-size", case.batch, "--quiet"]
    for name, kind in case.overrides.items():
        words += ["--column", f"{name}={kind}"]
    for metric in metrics:
        words += ["--metric", metric]
    for said, more in (
        ("ema", ["--ema", "0.9"]),
        ("accumulate", ["--accumulate", 2]),
        ("validation", ["--validation", held]),
        ("precision", ["--precision", "bfloat16"]),
        ("schedule", ["--schedule", "cosine(1e-2, 20)"]),
        ("freeze", ["--freeze", "heads.*"]),
    ):
        if walk.flag(said, 0.35):
            words += more
    if "--validation" in words and walk.flag("patience"):
        words += ["--patience", 1]
    run, again = walk.folder / "run", walk.folder / "again"
    walk.shell("train", *words, "--run", run)
    trainer = gg.Trainer(run, device="cpu")
    last = gg.Trainer.resume(run, device="cpu")
    steps = last.progress.steps
    if steps > 1:
        at = int(walk.rng.integers(1, steps))
        walk.shell("train", *words, "--run", again, "--max-steps", at)
        walk.shell("train", *words, "--run", again, "--resume")
        resumed = gg.Trainer.resume(again, device="cpu")
        walk.same(f"a run resumed at {at} of {steps} has the bits of one", resumed.state_dict(), last.state_dict())
        walk.same("its history is that of one", _history(resumed), _history(last))
        walk.same("its best is that of one", gg.Trainer(again, device="cpu").state_dict(), trainer.state_dict())
    return trainer


def _typed(name: str) -> str:
    """A column as --target takes it: one with a comma stands in quotes."""
    return f'"{name}"' if "," in name else name


def _labels(case: Case, frame: pd.DataFrame) -> Array:
    at = {name: i for i, name in enumerate(case.target.classes)}
    return np.array([at[_called(one)] for one in frame[case.target.name]])


def _only(found: Any) -> Array:
    return np.asarray(next(iter(found.values())) if isinstance(found, dict) else found)


def _check_use(case: Case, trainer: gg.Trainer, metrics: list[str]) -> None:
    """The laws of predictions, evaluation and export."""
    walk, folder = case.walk, case.walk.folder
    low = "precision" in " ".join(walk.chosen)
    tolerance = 3e-2 if low else 2e-4
    found = _only(trainer.predict(case.new))
    rows = len(case.new)
    # whatever order, whatever else is there
    order = walk.rng.permutation(rows)
    other = case.new.iloc[order][walk.some(list(case.new.columns), case.new.shape[1])]
    other.insert(int(walk.rng.integers(0, other.shape[1] + 1)), "one more", walk.rng.normal(size=rows))
    walk.close(
        "rows and columns in another order give the same", _only(trainer.predict(other)), found[order], tolerance
    )
    if case.suffix != "frame":
        walk.close(
            "a file gives what the frame gives", _only(trainer.predict(case.data(case.new, "new"))), found, tolerance
        )
        part = sorted(walk.some(range(rows), int(walk.rng.integers(1, 4))))
        path = case.data(case.new.iloc[part], "part")
        walk.close(
            "a file of some rows gives what they give among all", _only(trainer.predict(path)), found[part], tolerance
        )
    # metrics
    scores = trainer.evaluate(case.data(case.held, "held2"))
    if case.target.classes:
        labels = _labels(case, case.held)
        expected = classifier_scores(found, labels)
        walk.same(
            "the classes are those of the training data, in order",
            tuple(trainer.names.classes[_target_name(trainer)]),
            tuple(case.target.classes),
        )
        if "class weights" not in walk.chosen:
            expected["loss"] = float(entropies(found, labels).mean())
    else:
        wanted = np.array(case.held[case.target.name], np.float64)
        expected = regression_scores(found.reshape(-1), wanted)
        if case.model == "own":
            expected["loss"] = expected["mse"]
        else:
            expected["loss"] = expected["mse"] / np.std(np.array(case.train[case.target.name], np.float64)) ** 2
    for name in ("loss", *metrics):
        if name in expected:
            walk.close(f"evaluate says the {name} of scikit-learn", scores[name], expected[name], max(tolerance, 1e-3))
    # the exported file, in bare onnxruntime
    path = folder / "bare.onnx"
    trainer.export(path)
    made = bare(path, _fed(case.new, path))
    exact = _only(trainer.predict(case.new))
    walk.close("the exported file gives what predict gives", next(iter(made.values())), exact, 5e-2 if low else 2e-4)
    if case.target.classes:
        first = next(iter(made.values()))
        names = np.array(case.target.classes)[first.argmax(axis=1)].tolist()
        walk.law(
            "the exported file calls classes by name",
            made[_free("class", case)].tolist() == names,
            made[_free("class", case)][:5],
        )
        walk.close(
            "its probabilities are the Softmax of its scores", made[_free("probabilities", case)], softmax(first), 1e-5
        )
    csv_path = folder / "p.csv"
    try:
        new_path = _written(case.new, folder / f"n{'.csv' if case.suffix == 'frame' else case.suffix}")
        walk.shell("predict", path, "--data", new_path, "-o", csv_path, "--quiet")
        _check_csv(case, csv_path, next(iter(made.values())))
    except (ShellError, GradgraphError) as error:
        walk.law("predict reads the exported file", False, error)
    _check_smaller(case, trainer, path, made)
    _check_refusals(case, trainer)


def _free(name: str, case: Case) -> str:
    """What an output is called where a column has its name already."""
    return f"{name}_1" if name in case.kinds else name


def _target_name(trainer: gg.Trainer) -> str:
    return str(trainer.manifest.targets[0].name)


def _check_csv(case: Case, path: Path, scores: Array) -> None:
    walk = case.walk
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    walk.law("the CSV has a line for each row", len(rows) == len(scores), len(rows))
    if case.target.classes:
        names = np.array(case.target.classes)[scores.argmax(axis=1)].tolist()
        walk.law(
            "the CSV calls classes by name", [row["class"] for row in rows] == names, [row["class"] for row in rows][:4]
        )
        shares = [[float(row[f"probability[{name}]"]) for name in case.target.classes] for row in rows]
        walk.close("the CSV has the probability of each class", np.array(shares), softmax(scores), 1e-3)
    else:
        walk.close(
            "the CSV has the predictions", [float(next(iter(row.values()))) for row in rows], scores.reshape(-1), 1e-3
        )


def _check_smaller(case: Case, trainer: gg.Trainer, path: Path, made: dict[str, Array]) -> None:
    """Calibrated and quantised exports."""
    walk, folder = case.walk, case.walk.folder
    first = next(iter(made.values()))
    run = folder / "run"
    if case.target.classes and walk.flag("calibrate", 0.4):
        from gradgraph.export.temperature import calibrate

        found = calibrate(trainer, case.held)
        labels = _labels(case, case.held)
        walk.close(
            "the NLL before calibration is that of the predictions",
            found.nll[0],
            entropies(first, labels).mean(),
            2e-2 if "precision" in " ".join(walk.chosen) else 1e-3,
        )
        walk.close(
            "the NLL after is that of the divided logits",
            found.nll[1],
            entropies(first / found.temperature, labels).mean(),
            2e-2,
        )
        walk.law("calibration does not make the NLL worse", found.nll[1] <= found.nll[0] + 1e-6, found.nll)
        if run.exists():
            held = case.data(case.held, "held3")
            walk.shell("export", run, "--calibrate", held, "-o", folder / "calibrated.onnx", "--quiet")
            divided = bare(folder / "calibrated.onnx", _fed(case.new, folder / "calibrated.onnx"))
            walk.law(
                "calibrated classes are as before",
                divided[_free("class", case)].tolist() == made[_free("class", case)].tolist(),
            )
            walk.close(
                "calibrated probabilities are those of the divided logits",
                divided[_free("probabilities", case)],
                softmax(first / found.temperature),
                2e-2,
            )
    if walk.flag("quantize", 0.4):
        samples = None if walk.flag("weights alone") else case.train.drop(columns=[case.target.name])
        if run.exists():
            words = [] if samples is None else ["--calibration", case.data(samples, "calibration")]
            facts = walk.json("export", run, "--quantize", "int8", *words, "-o", folder / "int8.onnx")
            told = next(iter(facts["quantized_outputs"].values()))["relative"]
        else:
            small = gg.quantize(path, samples)
            onnx.save(small.result, folder / "int8.onnx")
            told = next(iter(small.outputs.values())).relative
        rounded = bare(folder / "int8.onnx", _fed(case.new, folder / "int8.onnx"))
        walk.law("int8 has the outputs of the exported file", rounded.keys() == made.keys(), rounded.keys())
        shares = 0.3  # on data that were drawn it says little of these
        if samples is not None:
            shares = told * 1.01 + 1e-6
            exact, rounded = (bare(one, _fed(samples, one)) for one in (path, folder / "int8.onnx"))
            first = next(iter(exact.values()))
        off, size = np.abs(next(iter(rounded.values())) - first).max(), np.abs(first).max()
        walk.law("int8 is as near as it says", off <= shares * size, (off, size, told))


def _check_refusals(case: Case, trainer: gg.Trainer) -> None:
    walk = case.walk
    name = str(case.new.columns[0])
    read = trainer.names.preprocess.read if trainer.names.preprocess else {}
    if name in read:
        walk.refused(
            "a misspelt column is refused",
            lambda: trainer.predict(case.new.rename(columns={name: f"{name}s"})),
            "column",
        )
    if case.target.classes:
        stranger = case.held.assign(**{case.target.name: ["nobody"] * len(case.held)})
        walk.refused("a class that is new is refused", lambda: trainer.evaluate(stranger), "nobody")


def _check_leaks(case: Case, trainer: gg.Trainer) -> None:
    """What was learnt is that of the training rows, by pandas and NumPy."""
    walk, plan = case.walk, trainer.names.preprocess
    assert plan is not None
    for name, kind in case.kinds.items():
        learnt, column = plan.columns[name], case.train[name]
        if learnt.name == "number" and kind in ("number", "integer"):
            there = np.array([one for one in column if one is not None and one == one], np.float64)
            walk.close(
                f"the mean of '{name}' is that of the training rows",
                learnt.mean,
                there.mean() if there.size else 0,
                1e-9,
            )
        if learnt.name == "category" and kind in ("word", "code", "truth", "version"):
            values = {"" if one is None or one != one else one for one in column}
            walk.law(
                f"the categories of '{name}' are those of the training rows",
                set(learnt.values) == values,
                (sorted(learnt.values), sorted(values)),
            )


def _check_renamed(case: Case) -> None:
    """Other names for the classes, in the same order or not: the same model, but for the names."""
    if not case.target.classes:
        return
    walk, name = case.walk, case.target.name
    count = len(case.target.classes)
    plan = gg.preprocess.fit(case.train, name, case.overrides)
    (width,), order = map(len, plan.features.values()), walk.rng.permutation(count)
    weight, bias = walk.rng.normal(size=(count, width)) / 4, walk.rng.normal(size=count)

    def scores(names: list[str], places: Array) -> tuple[Array, list[str]]:
        """Of a linear model whose rows are in the order of these names."""
        at = dict(zip(case.target.classes, names, strict=True))
        train = case.train.assign(**{name: [at[_called(one)] for one in case.train[name]]})
        layer = nn.Linear(width, count)
        layer.weight.data[...], layer.bias.data[...] = weight[places], bias[places]
        model = gg.frontend.export(layer, {"points": ("batch", width)})
        trainer = gg.Trainer(gg.build(model, "cross_entropy", gg.optim.sgd(0.1)), device="cpu")
        trainer.names = gg.DataNames(preprocess=gg.preprocess.fit(train, name))
        trainer.fit(train, 2, case.batch, progress=False)
        return np.asarray(trainer.predict(case.new)), list(trainer.names.classes["target"])

    first, _ = scores([f"c{i:02d}" for i in range(count)], np.arange(count))
    other, names = scores([f"c{order[i]:02d}" for i in range(count)], np.argsort(order))
    walk.law("classes are sorted", names == sorted(names), names)
    walk.close("classes of other names give the same scores by name", other[:, order], first, 1e-4)


def walk_tables(walk: Walk) -> None:
    case = _case(walk)
    metrics = _metrics(case)
    through_shell = walk.flag("shell", 0.4)
    trainer = (_shell if through_shell else _python)(case, metrics)
    _check_leaks(case, trainer)
    _check_use(case, trainer, metrics)
    if walk.flag("renamed", 0.3):
        _check_renamed(case)
    if walk.flag("find_lr", 0.4):
        check_rates(walk, trainer, case.data(case.train, "rates"), case.batch)
    if through_shell:
        check_runs(walk, trainer)
