"""What a batch must be, and how that is said; what looks like the last one is checked, too."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from gradgraph.data.arrays.batch import BatchChecker
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import DataError
from tests.kit import handmade

SPECS = handmade.classifier().manifest.batch
DATA = handmade.points(10)


def checker(**options: Any) -> BatchChecker:
    return BatchChecker(SPECS, **options)


def batch(**changes: Any) -> dict[str, Any]:
    return {**DATA, **changes}


def without(name: str) -> dict[str, Any]:
    return {n: a for n, a in DATA.items() if n != name}


LABELS = DATA["target"].copy()


LABELS[3] = 12


NAN = DATA["x"].copy()


NAN[5, 2] = np.nan


BAD: dict[str, tuple[Any, str]] = {
    "missing": (without("z"), "'z' is missing; the step expects 'x', 'z', 'target'"),
    "misspelt": ({**without("target"), "targets": DATA["target"]}, "has no input 'targets'; did you mean 'target'?"),
    "several are missing": ({}, "'x', 'z', 'target' are missing; the step expects 'x', 'z', 'target'"),
    "extra": (batch(weights=1), "has no input 'weights'; there is x, z, target"),
    "too few": ((DATA["x"],), "the batch has 1 entry, but the step expects 3 (x, z, target)"),
    "columns": (batch(x=DATA["x"][:, :3]), "'x' has shape [10, 3], but the step expects [batch, 4]"),
    "rank": (batch(x=DATA["x"][:, :, None]), "'x' has shape [10, 4, 1], but the step expects [batch, 4]"),
    "rows": (batch(z=DATA["z"][:7]), "'batch' is 10 in 'x' but 7 in 'z'"),
    "empty": ({n: a[:0] for n, a in DATA.items()}, "'x' is empty"),
    "float labels": (batch(target=DATA["target"] * 1.0), "'target' has dtype float64, but the step expects int64"),
    "complex": (batch(x=DATA["x"] * 1j), "'x' has dtype complex64, but the step expects float32"),
    "text": (batch(x=np.array(["a"] * 10)), "'x' has dtype <U1, but the step expects float32"),
    "object": (batch(x=object()), "'x' has the type object, which NumPy cannot convert"),
    "label": (
        batch(target=LABELS),
        "contains the label 12 at index 3, but labels must be from 0 to 2; number classes from 0, or name",
    ),
    "negative label": (batch(target=DATA["target"] * 0 - 1), "contains the label -1 at index 0"),
    "too large": (batch(x=np.full((10, 4), 1e300)), "'x' has values too large for float32"),
    "nan": (batch(x=NAN), "'x' contains nan at index [5, 2]"),
    "ortvalue": (batch(x=ort.OrtValue.ortvalue_from_numpy(np.zeros((10, 4)))), "'x' is an OrtValue of tensor(double)"),
    "ortvalue rows": (
        batch(x=ort.OrtValue.ortvalue_from_numpy(np.zeros((3, 4), np.float32))),
        "'batch' is 3 in 'x' but 10 in 'z'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_batches_that_do_not_fit(case: str) -> None:
    value, says = BAD[case]
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        checker(finite=True)(value)
    assert "\n" not in str(caught.value)


def test_fitting_batches_are_not_copied() -> None:
    checked = checker()(DATA)
    assert all(checked[n] is a for n, a in DATA.items())


@pytest.mark.parametrize(
    ("labels", "ok"),
    [([0, 2, -100], True), ([-100, -100], False), ([-100, 3], False), ([-1, 0], False), ([2, 2], True)],
)
def test_ignored_labels(labels: list[int], ok: bool) -> None:
    check = BatchChecker([TargetSpec("t", "int64", ("N",), classes=3, ignore_index=-100)])
    if ok:
        check(np.array(labels))
        return
    with pytest.raises(DataError, match=r"contains the label|every label"):
        check(np.array(labels))


@pytest.mark.parametrize(
    ("have", "want", "ok"),
    [
        ("float64", "float32", True),
        ("uint8", "float32", True),
        ("int64", "float32", True),
        ("bool", "float32", True),
        ("int32", "int64", True),
        ("int64", "int32", True),
        ("float32", "int64", False),
        ("int64", "bool", False),
        ("float32", "float16", True),
    ],
)
def test_conversions(have: str, want: str, ok: bool) -> None:
    check = BatchChecker([TensorSpec("x", want, ("N",))])
    value = np.array([0, 1], have)
    if ok:
        assert check({"x": value})["x"].tolist() == [0, 1]
        return
    with pytest.raises(DataError, match=rf"has dtype {have}, but the step expects {want}"):
        check({"x": value})


def test_integers_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="int32 cannot represent"):
        BatchChecker([TensorSpec("x", "int32", ("N",))])({"x": np.array([2**40])})


def test_text_cannot_be_bound() -> None:
    with pytest.raises(DataError, match="'x' is text, which a Trainer does not support"):
        BatchChecker([TensorSpec("x", "str", ("N",))])({"x": np.array(["a", "b"])})


def test_a_buffer_that_comes_again_is_checked_again() -> None:
    check = BatchChecker([TensorSpec("x", "float32", ("n",)), TargetSpec("t", "int64", ("n",), 3, -100)])
    batch = {"x": np.zeros(4, np.float32), "t": np.array([0, 1, 2, 0])}
    for _ in range(3):
        check(batch)
    batch["t"][1] = 3
    with pytest.raises(DataError, match="label 3 at index 1"):
        check(batch)


@pytest.mark.parametrize("classes", [3, None])
def test_counts_follow_the_ignored_labels_of_each_batch(classes: int | None) -> None:
    check = BatchChecker([TensorSpec("x", "float32", ("n",)), TargetSpec("t", "int64", ("n", 2), classes, -100)])
    labels = np.array([[0, 1], [2, 0]])
    for ignored in (0, 0, 1, 0, 3, 2):
        labels.flat[:] = [-100] * ignored + [1] * (4 - ignored)
        checked = check({"x": np.zeros(2, np.float32), "t": labels})
        assert check.counts(checked) == (2, 4 - ignored)


def test_counts_without_labels_to_ignore_are_samples() -> None:
    check = BatchChecker([TensorSpec("x", "float32", ("n",)), TargetSpec("t", "float32", ("n", 2))])
    for rows in (3, 3, 5):
        checked = check({"x": np.zeros(rows, np.float32), "t": np.zeros((rows, 2), np.float32)})
        assert check.counts(checked) == (rows, rows)


@pytest.mark.parametrize("ignore_index", [None, -100, 1])
def test_a_batch_that_looks_like_the_last_is_still_checked(ignore_index: int | None) -> None:
    """What every step asks first is quick, and blind to nothing: each of these follows a batch that fits."""
    check = BatchChecker([TensorSpec("x", "float32", ("n", 2)), TargetSpec("t", "int64", ("n",), 3, ignore_index)])
    good = {"x": np.zeros((4, 2), np.float32), "t": np.array([0, 1, 2, 1])}
    ignored = np.full(4, -100 if ignore_index is None else ignore_index)
    for name, value, says in [
        ("t", np.array([0, 1, 2, 3]), "the label 3 at index 3"),
        ("t", np.array([0, -1, 2, 1]), "the label -1 at index 1"),
        ("t", ignored, "label -100 at index 0" if ignore_index is None else "every label of 't' is the ignored"),
        ("x", np.zeros((4, 3), np.float32), "has shape [4, 3]"),
        ("x", np.zeros((3, 2), np.float32), "'n' is 3 in 'x' but 4 in 't'"),
        ("x", np.zeros((4, 2), complex), "has dtype complex128"),
    ]:
        for _ in range(2):
            assert check(dict(good)).keys() == good.keys()
        with pytest.raises(DataError, match=re.escape(says)):
            check({**good, name: value})
    turned = np.asfortranarray(np.arange(8, dtype=np.float32).reshape(4, 2))
    assert check({**good, "x": turned})["x"].flags.c_contiguous  # type: ignore[union-attr]
    assert check({**good, "x": good["x"].astype(np.float64)})["x"].dtype == np.float32  # type: ignore[union-attr]


def test_finite_values_are_looked_for_in_every_batch() -> None:
    check = BatchChecker([TensorSpec("x", "float32", ("n",))], finite=True)
    for _ in range(3):
        check({"x": np.zeros(4, np.float32)})
        with pytest.raises(DataError, match="nan at index 2"):
            check({"x": np.array([0, 0, np.nan, 0], np.float32)})
