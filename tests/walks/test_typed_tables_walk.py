"""Random tables of typed columns: each library's form of a column trains, predicts, is scored and exported as one.

The reference is scikit-learn, on the plain Python values that the columns were made from.
"""

from __future__ import annotations

import datetime
import decimal
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import GradgraphError

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
pa: Any = pytest.importorskip("pyarrow", reason="an extra: onnx-gradgraph[tables]")
parquet: Any = pytest.importorskip("pyarrow.parquet", reason="an extra: onnx-gradgraph[tables]")
sklearn: Any = pytest.importorskip("sklearn.preprocessing", reason="an extra: onnx-gradgraph[sklearn]")
from tests.data_walks.random_walk import Walk, bare, entropies  # noqa: E402

MIDNIGHT, SECOND, MS = datetime.datetime(2020, 1, 1), datetime.timedelta(seconds=1), datetime.timedelta(milliseconds=1)
# kind of values: how one is drawn, its type in Arrow, and its number (of None: its text is a category)
KINDS: dict[str, tuple[Callable[[Any], Any], Any, Callable[[Any], float] | None]] = {
    "integer": (lambda rng: int(rng.integers(-9, 99)), pa.int32(), float),
    "float": (lambda rng: float(np.round(rng.normal(), 3)), pa.float64(), float),
    "decimal": (lambda rng: decimal.Decimal(int(rng.integers(-999, 999))).scaleb(-2), pa.decimal128(9, 3), float),
    "truth": (lambda rng: bool(rng.random() < 0.5), pa.bool_(), float),
    "duration": (lambda rng: MS * int(rng.integers(-9e6, 9e9)), pa.duration("ms"), lambda value: value / SECOND),
    "time": (
        lambda rng: (MIDNIGHT + SECOND * int(rng.integers(86400))).time(),
        pa.time64("us"),
        lambda value: float(value.hour * 3600 + value.minute * 60 + value.second),
    ),
    "word": (lambda rng: str(rng.choice(["red", "Ünï", "a;b", "01", "x y"])), pa.string(), None),
}


def _of_pandas(column: Any) -> Any:
    return pa.table({"c": column}).to_pandas()["c"]


def _on_arrow(column: Any) -> Any:
    return pd.Series(pd.array(column, dtype=pd.ArrowDtype(column.type)))


def _unused(column: Any) -> Any:
    """An ordered category with one more value than the column has, in another order."""
    words = [*sorted({value for value in column.to_pylist() if value is not None}, reverse=True), "unused"]
    return pd.Series(pd.Categorical(column.to_pylist(), categories=words, ordered=True))


FORMS: dict[str, Callable[[Any], Any]] = {
    "Arrow": lambda column: column,
    "a dictionary": lambda column: column.dictionary_encode(),
    "chunks": lambda column: pa.chunked_array([column[:3].dictionary_encode(), column[3:].dictionary_encode()]),
    "pandas": _of_pandas,
    "objects": lambda column: pd.Series(column.to_pylist(), dtype=object),
    "pandas on Arrow": _on_arrow,
    "a category": lambda column: _of_pandas(column).astype("category"),
    "a category on Arrow": lambda column: pd.Series(pd.Categorical(_on_arrow(column))),
    "an ordered category": _unused,
}
try:
    import polars

    FORMS["polars"] = polars.from_arrow
except ImportError:  # nobody's extra
    pass


def _table(walk: Walk, columns: dict[str, Any], called: str) -> Any:
    """The columns in drawn order and forms, in a drawn kind of table."""
    names = walk.some(list(columns), len(columns))
    forms = [name for name in FORMS if name != "an ordered category"]
    made = {}
    for name in names:
        is_text = pa.types.is_string(columns[name].type)
        made[name] = FORMS[walk.choose(f"{called} {name}", list(FORMS) if is_text else forms)](columns[name])
    kind = walk.choose(called, ["dict", "pandas", "Arrow", "Parquet", "CSV"])
    if kind == "dict":
        return made
    made = {n: c.to_arrow() if type(c).__module__.startswith("polars") else c for n, c in made.items()}
    frame = pd.DataFrame({n: c if isinstance(c, pd.Series) else pd.Series(c.to_pylist()) for n, c in made.items()})
    if kind == "pandas":
        return frame
    if kind == "CSV":
        frame.to_csv(walk.folder / f"{called}.csv", index=False)
        return walk.folder / f"{called}.csv"
    table = pa.table({n: pa.array(c, from_pandas=True) if isinstance(c, pd.Series) else c for n, c in made.items()})
    # Parquet stores durations in a dictionary as integers, which are refused
    if kind == "Arrow" or any("values=duration" in str(field.type) for field in table.schema):
        return table
    parquet.write_table(table, walk.folder / f"{called}.parquet")
    return walk.folder / f"{called}.parquet"


def _reference(kind: str, train: list[Any], other: list[Any]) -> np.ndarray:
    """What scikit-learn makes of the values."""
    number = KINDS[kind][2]
    if number is None:
        known, given = ([[value or ""] for value in values] for values in (train, other))
        hot = sklearn.OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(known).transform(given)
        return np.hstack([hot, 1 - hot.sum(axis=1, keepdims=True)])
    known, given = ([[np.nan if v is None else number(v)] for v in values] for values in (train, other))
    scaled = np.nan_to_num(sklearn.StandardScaler().fit(known).transform(given))
    return np.hstack([scaled, np.isnan(given)]) if np.isnan(known).any() else scaled


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("seed", range(200))
def test_a_column_is_one_column_in_every_form(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    walk, rows, held = Walk(seed, tmp_path), 30, 12
    caplog.set_level(logging.ERROR, logger="gradgraph")
    warnings.simplefilter("ignore")
    kinds = {f"c{i}": walk.choose(f"c{i}", list(KINDS)) for i in range(int(walk.rng.integers(1, 4)))}
    values = {}
    for name, kind in kinds.items():
        gaps = walk.rng.random(rows + held) < (0.2 if walk.flag(f"gaps in {name}") else 0)
        values[name] = [None if gap else KINDS[kind][0](walk.rng) for gap in gaps]
    values["y"] = ["b", "a", *walk.rng.choice(["a", "b", "c d"], rows + held - 2).tolist()]
    types = {name: KINDS[kind][1] for name, kind in kinds.items()} | {"y": pa.string()}
    train, other = (
        {name: pa.array(of[part], types[name]) for name, of in values.items()}
        for part in (slice(rows), slice(rows, None))
    )
    plan = gg.preprocess.fit({name: FORMS[walk.choose(name, list(FORMS)[:7])](c) for name, c in train.items()}, "y")
    features = plan.arrays(other)["x"]
    expected = np.hstack([_reference(k, train[n].to_pylist(), other[n].to_pylist()) for n, k in kinds.items()])
    walk.close("features are those of scikit-learn", features, expected, 1e-5)
    trainer = gg.Trainer(gg.build(gg.tables.mlp(plan, hidden=[4]), gg.tables.loss(plan)), device="cpu")
    trainer.fit(_table(walk, train, "train"), batch_size=16, progress=False)
    scores = np.asarray(trainer.predict({name: column for name, column in other.items() if name != "y"}))
    labels = np.array([sorted({*values["y"][:rows]}).index(label) for label in values["y"][rows:]])
    for called in ("first", "second"):
        table = _table(walk, other, called)
        try:
            walk.close(f"{called}: predictions", trainer.predict(table), scores)
            walk.close(f"{called}: loss", trainer.evaluate(table)["loss"], entropies(scores, labels).mean())
        except GradgraphError as error:
            walk.law(f"{called}: read", False, error)
    trainer.export(tmp_path / "m.onnx")
    walk.close("the exported file", next(iter(bare(tmp_path / "m.onnx", plan.feeds(other)).values())), scores)
    assert not walk.broken, "\n".join([" · ".join(walk.chosen), *walk.broken])
