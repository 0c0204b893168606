"""Walks with written forms: one table as CSV, Parquet, frame, dict and in the exported file, beside pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

import gradgraph as gg
from gradgraph.data.preprocess.frames import GAP_WORDS
from tests.data_walks.random_walk import Array, Walk, bare

# written form: how strftime of pandas writes it, and what is said of it
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ISO": ("%Y-%m-%d", {}),
    "ISO with times": ("%Y-%m-%d %H:%M", {}),
    "ISO with T": ("%Y-%m-%dT%H:%M:%S.250", {}),
    "days of digits": ("%Y%m%d", {}),
    "slashes": ("%Y/%m/%d", {}),
    "German": ("%d.%m.%Y", {"dayfirst": True}),
    "German with times": ("%d.%m.%Y %H:%M", {"dayfirst": True}),
    "British": ("%d/%m/%y", {"dayfirst": True}),
    "American": ("%m/%d/%Y", {"dayfirst": False}),
    "American, short": ("%m/%d/%y", {"dayfirst": False}),
    "names": ("%d %b %Y", {}),
    "names, short": ("%d-%b-%y", {}),
    "names, American": ("%B %d, %Y %I:%M %p", {}),
    "American with AM and PM": ("%m/%d/%Y %I:%M:%S%p", {"dayfirst": False}),
    "zone": ("%Y-%m-%d %H:%M:%S%z", {}),
}
DIGITS = "days of digits"
Made = tuple[pd.Series, dict[str, Any] | None, Callable[[pd.Series, pd.Series], Array]]


def _number(train: Any, other: Any) -> Array:
    mean, std = train.mean(), train.std(ddof=0)
    gaps = [other.isna()] if train.isna().any() else []
    return np.column_stack([((other - mean) / (std or 1)).fillna(0), *gaps]).astype(float)


def _category(train: Any, other: Any) -> Array:
    from sklearn.preprocessing import OneHotEncoder

    known, given = (c.where(c.notna() & ~c.isin(GAP_WORDS), "").to_numpy(object)[:, None] for c in (train, other))
    hot = (
        OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(known.astype(str)).transform(given.astype(str))
    )
    return np.hstack([hot, 1 - hot.sum(axis=1, keepdims=True)])


def _date(train: Any, other: Any) -> Array:
    years = train.dt.year.dropna()
    days = (other.dt.day_of_year - 1) / (365 + other.dt.is_leap_year.astype(float))
    has_times = bool(((train.dt.hour > 0) | (train.dt.minute > 0)).any())
    clock = (other.dt.hour * 60 + other.dt.minute) / 1440
    turns = [days, other.dt.day_of_week / 7, *([clock] if has_times else [])]
    circles = [f(2 * np.pi * turn) for turn in turns for f in (np.sin, np.cos)]
    year = (other.dt.year - years.mean()) / (years.std(ddof=0) or 1)
    gaps = [other.isna()] if train.isna().any() else []
    return np.column_stack([np.nan_to_num(column.to_numpy(float)) for column in (year, *circles, *gaps)])


def _column(walk: Walk, name: str, rows: int) -> tuple[pd.Series, dict[str, Any] | None, Any, str]:
    """What is written, what is said of its kind, its reference values, and the kind of these."""
    rng = walk.rng
    kind = walk.choose(name, ["number", "word", "id", "date", "date", "typed date"])
    gaps = rng.random(rows) < (0.2 if walk.flag(f"gaps in {name}") else 0)
    if kind == "number":
        values = pd.Series(rng.normal(size=rows) * 10.0 ** rng.integers(-3, 6)).mask(gaps)
        return values, None, values, "number"
    if kind == "word":
        values = pd.Series(rng.choice(walk.some(["red", "a,b", "Ünï", "x y", "no"], 3), rows), dtype=object)
        values = values.mask(gaps, walk.choose("gap", [None, "NA", "None", "n/a", ""]))
        return values, {"kind": "category"}, values, "category"
    if kind == "id":
        values = pd.Series(2**53 + rng.integers(0, 5, rows))
        return values, {"kind": "category"}, values.astype(str).astype(object), "category"
    dates = pd.Series(pd.Timestamp("2019-11-30") + pd.to_timedelta(rng.integers(0, 1_500_000, rows), unit="min"))
    dates = dates.mask(gaps)
    if kind == "typed date":
        unit = walk.choose("unit", ["s", "ms", "us", "ns"])
        return dates.dt.floor("s").astype(f"datetime64[{unit}]"), {"kind": "date"}, dates, "date"
    form = walk.choose("form", list(FORMS))
    pattern, said = FORMS[form]
    if form == "zone":
        zoned = dates.dt.tz_localize("UTC").dt.tz_convert(
            walk.choose("zone", ["Asia/Tokyo", "America/New_York", "UTC"])
        )
        texts = zoned.dt.strftime(pattern).astype(object).mask(gaps, None)
        return texts, {"kind": "date"}, dates, "date"
    texts = dates.dt.strftime(pattern).astype(object).mask(gaps, None)
    if ":" not in pattern:
        dates = dates.dt.normalize()
    if form == DIGITS and not gaps.any() and walk.flag("digits as integers"):
        return texts.astype(np.int64), {"kind": "date"}, dates, "date"
    return texts, {"kind": "date", **said}, dates, "date"


REFERENCES: dict[str, Callable[[Any, Any], Array]] = {"number": _number, "category": _category, "date": _date}


def walk_columns(walk: Walk) -> None:
    """The numbers that are made of each column are those of pandas and scikit-learn, for every kind of table."""
    rows, held = 60, 20
    names = [f"c{i}" for i in range(int(walk.rng.integers(1, 5)))]
    made = {name: _column(walk, name, rows + held) for name in names}
    whole = pd.DataFrame({name: column for name, (column, *_) in made.items()})
    whole["y"] = walk.rng.normal(size=rows + held)
    kinds = {name: kind for name, (_, kind, *_) in made.items() if kind is not None}
    train, other = whole[:rows].reset_index(drop=True), whole[rows:].reset_index(drop=True)
    expected = np.hstack([
        REFERENCES[kind](values[:rows].reset_index(drop=True), values[rows:].reset_index(drop=True))
        for _, _, values, kind in made.values()
    ])  # fmt: skip
    plan = gg.preprocess.fit(train, "y", kinds)
    walk.same("the record is read as it was written", gg.preprocess.Preprocessing.from_data(plan.as_data()), plan)
    walk.close("a frame gives the numbers of pandas", plan.arrays(other)["x"], expected, 1e-5)
    trainer = gg.Trainer(gg.build(gg.tables.mlp(plan, hidden=[8]), gg.tables.loss(plan)), device="cpu")
    trainer.fit(train, batch_size=16, progress=False)
    found = np.asarray(trainer.predict(other))
    other.to_csv(walk.folder / "o.csv", index=False)
    other.to_parquet(walk.folder / "o.parquet")
    import pyarrow as pa

    tables: dict[str, Any] = {
        "CSV": walk.folder / "o.csv",
        "Parquet": walk.folder / "o.parquet",
        "Arrow": pa.Table.from_pandas(other),
        "a dict of arrays": {name: other[name].to_numpy() for name in names},
        "a dict of series": {name: other[name] for name in names},
        "a dict of lists": {name: other[name].tolist() for name in names},
        "one row": other.iloc[:1],
    }
    for called, table in tables.items():
        walk.close(
            f"{called} predicts as a frame does", trainer.predict(table), found[: 1 if called == "one row" else None]
        )
    trainer.export(walk.folder / "m.onnx")
    served = bare(walk.folder / "m.onnx", _fed(other, walk.folder / "m.onnx"))
    walk.close("bare onnxruntime predicts as the trainer does", next(iter(served.values())), found)
    for name, (_, _, _, kind) in made.items():
        if kind == "date":
            text = walk.choose(
                "no date", ["soon", "31-31-2024", "2024-02-30", "30/02/2024", "May 5", "2024-05", "20241301"]
            )
            wrong = other.astype({name: object})
            wrong.loc[3, name] = text
            walk.refused(f"{text} as a date", lambda wrong=wrong: trainer.predict(wrong), name, "index 3")
            feeds = {**_fed(other, walk.folder / "m.onnx"), name: np.array([text] * held, object)}
            walk.law(f"{text} as a date in the file is refused", _fails(walk, feeds), feeds[name][0])
        elif kind == "number":
            for value in ("soon", np.inf, "1_0"):
                wrong = other.astype({name: object})
                wrong.loc[3, name] = value
                walk.refused(f"{value} as a number", lambda wrong=wrong: trainer.predict(wrong), name, "index 3")
            feeds = {**_fed(other, walk.folder / "m.onnx"), name: np.full(held, np.inf)}
            walk.law("an infinite number in the file is refused", _fails(walk, feeds))


def _fed(frame: pd.DataFrame, path: Any) -> dict[str, Array]:
    """What somebody without gradgraph feeds."""
    import onnx

    feeds: dict[str, Array] = {}
    for value in onnx.load(path).graph.input:
        column = frame[value.name]
        if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            texts = column.dt.strftime("%Y-%m-%dT%H:%M:%S") if column.dtype.kind == "M" else column
            feeds[value.name] = np.array(["" if v is None or v != v else str(v) for v in texts], object)
        else:
            feeds[value.name] = column.astype(float).to_numpy()
    return feeds


def _fails(walk: Walk, feeds: dict[str, Array]) -> bool:
    try:
        bare(walk.folder / "m.onnx", feeds)
    except Exception as error:  # of a class of onnxruntime's
        return "preprocess/" in str(error)
    return False
