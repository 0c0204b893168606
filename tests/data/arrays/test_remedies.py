"""What to do about data that do not fit: a remedy that helps, in Python and on the command line."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.data.arrays.batch import BatchChecker
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import DataError

LABELS = TargetSpec("target", "int64", ("N",), 3, -100)
PIXELS = TargetSpec("target", "int64", ("N", "H", "W"), 3, -100)
NUMBERS = TensorSpec("x", "float32", ("N", 4))
INDICES = TensorSpec("x", "int64", ("N", 4))

UNFIT: dict[str, tuple[TensorSpec, np.ndarray[Any, Any], str, str]] = {
    "one-hot floats": (LABELS, np.eye(3, dtype=np.float32), "target.argmax(axis=1)", "save class numbers"),
    "one-hot integers": (LABELS, np.eye(3, dtype=np.int64), "target.argmax(axis=1)", "save class numbers"),
    "one-hot pixels": (PIXELS, np.zeros((2, 3, 5, 5)), "target.argmax(axis=1)", "the largest entry on axis 1"),
    "one-hot last": (PIXELS, np.zeros((2, 5, 5, 3), np.uint8), "target.argmax(axis=3)", "the largest entry on axis 3"),
    "whole floats": (LABELS, np.array([0.0, 2.0]), "convert it with .astype('int64')", "save it as int64"),
    "values": (LABELS, np.array([0.5, 2.0]), "a regression loss, such as mse", "a regression loss, such as mse"),
    "indices": (INDICES, np.zeros((2, 4)), "convert it with .astype('int64')", "save it as int64"),
    "fractions": (INDICES, np.full((2, 4), 0.5), "round it to integers", "round it to integers"),
    "text": (NUMBERS, np.full((2, 4), "a"), "encode text as numbers", "encode text as numbers"),
    "complex": (NUMBERS, np.zeros((2, 4), complex), "real part", "real part"),
    "dates": (NUMBERS, np.zeros((2, 4), "M8[s]"), "instead of a date", "instead of a date"),
    "a table": (NUMBERS, np.zeros((2,), [("a", "f4")]), "per input", "per input"),
    "shape": (NUMBERS, np.zeros((2, 5), np.float32), "reshape it", "save it in that shape"),
    "labels' shape": (LABELS, np.zeros((2, 7), np.int64), "cross_entropy(axis=-1)", "--loss-option axis=-1"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_the_remedy_helps(case: str) -> None:
    spec, array, python, shell = UNFIT[case]
    with pytest.raises(DataError) as caught:
        BatchChecker([spec])({spec.name: array})
    assert python in str(caught.value)
    assert shell in caught.value.in_shell()
    assert "astype" not in caught.value.in_shell()


@pytest.mark.parametrize("case", ["one-hot floats", "one-hot last", "whole floats"])
def test_the_remedy_is_python_that_works(case: str) -> None:
    spec, array, python, _ = UNFIT[case]
    values = {"np": np, "target": array}
    if "=" in python.split("(")[0]:
        exec(python, values)
    else:
        values["target"] = eval(python.replace("convert it with ", "target"), values)
    BatchChecker([spec])({"target": values["target"]})


TABLE = "a,b,class\n0.5,1,0\n1.5,2,2\n"


@contextlib.contextmanager
def inside(folder: Path) -> Any:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def advised(path: Path) -> DataError:
    with pytest.raises(DataError, match=r"an \.npz file or a folder of \.npy files") as caught:
        load_arrays(path)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("form", ["python", "shell"])
@pytest.mark.parametrize(("name", "separator"), [("table.csv", ","), ("table.tsv", "\t"), ("data/table.csv", ","),
                                                 ("it's $HOME `id`.csv", ",")])  # fmt: skip
def test_the_line_that_converts_a_table_works(name: str, separator: str, form: str, tmp_path: Path) -> None:
    """Where it stands, as it stands, whatever the file is called; the types are those that a classifier takes."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(TABLE.replace(",", separator))
    with inside(tmp_path):
        error = advised(Path(name))
        if form == "python":
            exec(str(error.remedy).split("): ", 1)[1], {"np": np})
        else:
            line = error.in_shell().split("): python", 1)[1]
            subprocess.run(["sh", "-c", shlex.quote(sys.executable) + line], check=True)
        arrays = load_arrays(Path(name).with_suffix(".npz"))
    assert {name: (a.dtype, a.shape) for name, a in arrays.items()} == {
        "x": (np.float32, (2, 2)),
        "target": (np.int64, (2,)),
    }


def test_a_name_that_cannot_be_shown_is_not_part_of_the_line(tmp_path: Path) -> None:
    path = tmp_path / f"{'long' * 40}.csv"
    path.write_text(TABLE)
    assert "np.genfromtxt('table.csv'" in str(advised(path))


@pytest.mark.parametrize(
    ("name", "says"),
    [("t.parquet", "pandas.read_parquet('t.parquet')"), ("T.XLSX", "pandas.read_excel('T.XLSX')"), ("t.npy", "folder"),
     ("t.jsonl", "lines=True"), ("t.pkl", "np.savez"), ("t", "np.savez")],
)  # fmt: skip
def test_other_files_are_told_how_to_become_arrays(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1 or anything else")
    with inside(tmp_path):
        assert says in str(advised(Path(name)))
