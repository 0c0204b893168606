"""Tables of pandas, polars and Arrow, and files of tables, train as the arrays do that they hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.frontend import nn

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
TARGET = (X.sum(axis=1) > 0).astype(np.int64)
COLUMNS: dict[str, Any] = {"width": X[:, 0], "target": TARGET, "height": X[:, 1], "age": X[:, 2]}


def trainer() -> gg.Trainer:
    gg.frontend.manual_seed(0)
    step = gg.build(gg.frontend.export(nn.Linear(3, 2), {"x": ("batch", 3)}), loss="cross_entropy")
    return gg.Trainer(step, device="cpu", seed=1)


def fitted(data: Any) -> dict[str, Any]:
    return dict(trainer().fit(data, epochs=2, batch_size=8, progress=False))


def pandas_frame(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]").DataFrame(columns)


def polars_frame(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("polars", reason="nobody's extra").DataFrame(columns)


def arrow_table(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("pyarrow", reason="an extra: onnx-gradgraph[tables]").table(columns)


class PlainTable(dict):
    """What tables have in common."""

    columns = property(lambda self: list(self))

    def to_numpy(self) -> np.ndarray:
        return np.column_stack(list(self.values()))


MAKERS = [PlainTable, pandas_frame, polars_frame, arrow_table]


@pytest.mark.parametrize("made", MAKERS)
def test_columns_that_have_no_part_of_their_own_are_the_matrix(made: Callable[[Any], Any]) -> None:
    assert fitted(made(COLUMNS)) == fitted({"x": X, "target": TARGET})


@pytest.mark.parametrize("library", ["pandas", "polars", "Arrow"])
@pytest.mark.parametrize("labels", [["b", "a"] * 20, [True, False] * 20, [2, 1] * 20])
def test_labels_in_a_column_of_their_own_are_those_of_a_list(library: str, labels: list[Any]) -> None:
    column = {"pandas": pandas_frame, "polars": polars_frame, "Arrow": arrow_table}[library]({"y": labels})["y"]
    names = []
    for y in (labels, column):
        fresh = trainer()
        fresh.fit(X, y, epochs=1, progress=False)
        names.append(fresh.names.classes["target"])
    assert names[0] == names[1]


BAD = {
    "a column too many": (COLUMNS | {"id": TARGET}, r"columns 'width', .* rename or choose columns"),
    "no target": ({k: v for k, v in COLUMNS.items() if k != "target"}, r"the step expects .*target int64\[batch\]"),
    "text": (COLUMNS | {"age": np.array(["a"] * 40)}, "the column 'age' contains .*, not numbers; encode it"),
    "whole numbers with gaps": (COLUMNS | {"age": [None, *range(39)]}, "'age' has 1 missing value; fill or drop"),
    "gaps": (COLUMNS | {"age": np.where(X[:, 2] > 1, np.nan, X[:, 2])}, r"'age' has \d+ missing values; fill or drop"),
}


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("name", BAD)
def test_other_tables_are_refused(name: str, made: Callable[[Any], Any]) -> None:
    columns, says = BAD[name]
    with pytest.raises(DataError, match=says):
        fitted(made(columns))


@pytest.mark.parametrize("name", ["gaps", "text", "a column too many"])
def test_the_remedy_in_the_shell_is_preprocessing(name: str) -> None:
    with pytest.raises(DataError) as raised:
        fitted(pandas_frame(BAD[name][0]))
    assert "--preprocess auto" in raised.value.in_shell()


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".feather", ".jsonl"])
def test_files_of_tables(suffix: str, tmp_path: Path) -> None:
    frame, path = pandas_frame(COLUMNS), tmp_path / f"data{suffix}"
    write: dict[str, Callable[[], Any]] = {
        ".csv": lambda: frame.to_csv(path, index=False),
        ".tsv": lambda: frame.to_csv(path, index=False, sep="\t"),
        ".parquet": lambda: frame.to_parquet(path),
        ".feather": lambda: frame.to_feather(path),
        ".jsonl": lambda: frame.to_json(path, orient="records", lines=True, double_precision=15),
    }
    write[suffix]()
    assert fitted(path)["loss"] == pytest.approx(fitted({"x": X, "target": TARGET})["loss"], rel=1e-6)


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(DataError, match=r"t\.parquet' cannot be read \("):
        fitted(tmp_path / "t.parquet")


def test_without_a_library_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    says = r"requires pandas or polars, and neither is installed; install the extra: pip install \"\.\[tables\]\""
    with pytest.raises(DataError, match=says):
        fitted(tmp_path / "t.csv")
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="requires pandas with pyarrow or polars, and neither is installed"):
        fitted(tmp_path / "t.parquet")


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t")])
def test_of_many_columns_none_may_have_the_name_of_another(suffix: str, separator: str, tmp_path: Path) -> None:
    """It would take pandas a minute to give them names."""
    pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    path = tmp_path / f"wide{suffix}"
    path.write_text("\n" + separator.join(["first", *(str(i // 2) for i in range(200_000))]) + "\n")
    with pytest.raises(DataError, match=rf"2 of the 200,001 columns of .*wide{suffix}' have the name '0'"):
        trainer().fit(path, epochs=1, progress=False)
    path.write_text(2 * (separator.join(map(str, range(10_001))) + "\n"))
    with pytest.raises(DataError, match="the table has the columns '0', '1'"):
        trainer().fit(path, epochs=1, progress=False)
