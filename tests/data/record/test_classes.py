"""Which number a label stands for is decided in one place: by name, or it is refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph
from gradgraph.data.record.classes import Classes, labelled
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TargetSpec
from gradgraph.data.tables import array_labels
from gradgraph.errors import DataError, UnmatchedError

pytestmark = pytest.mark.any_kernels

ANIMALS, STARS, MIXED = ("cat", "dog", "emu"), ("1", "2", "3"), ("1", "2", "x")


def target(classes: int | None = 3) -> TargetSpec:
    return TargetSpec("target", "int64", ("n",), classes=classes, ignore_index=-100)


def array(values: Any) -> np.ndarray[Any, Any]:
    return values if isinstance(values, np.ndarray) else np.array(values, object)


MATCHED: list[tuple[Classes, Any, list[int]]] = [  # what is known, labels, their numbers
    (Classes(ANIMALS), ["emu", "cat"], [2, 0]),
    (Classes(ANIMALS), np.array([2, 0]), [2, 0]),
    (Classes(ANIMALS), ["2", "0"], [2, 0]),
    (Classes(ANIMALS), np.array([2.0, 0.0]), [2, 0]),
    (Classes(ANIMALS), [2, -100], [2, -100]),
    (Classes(STARS), ["3", "1"], [2, 0]),
    (Classes(STARS), [3, 1], [2, 0]),
    (Classes(STARS), np.array([3, -100]), [2, -100]),
    (Classes(STARS), np.array([3.0, 1.0]), [2, 0]),
    (Classes(STARS), ["3.0"], [2]),
    (Classes(STARS), ["1", 2, np.int64(3)], [0, 1, 2]),
    (Classes(STARS, numbered=True), np.array([1, 2]), [1, 2]),
    (Classes(MIXED), [1, 2], [0, 1]),
    (Classes(MIXED), [2, "x"], [1, 2]),
    (Classes(("0", "1", "2")), np.array([2, 0]), [2, 0]),
    (Classes(("1.0", "1.5", "2b")), np.array([1.5, 1.0]), [1, 0]),
    (Classes(("False", "True")), [True, False], [1, 0]),
    (Classes(("False", "True")), np.array([True, False]), [1, 0]),
    (Classes(("False", "True")), ["TRUE", "false"], [1, 0]),
    (Classes(("True", "False")), [True, False], [0, 1]),
    (Classes(("no", "yes")), [True, False], [1, 0]),
    (Classes(("False", "True", "maybe")), [True, False], [1, 0]),
    (Classes(("01", "1")), ["01", "1"], [0, 1]),
    (Classes(numbered=True), [2, 0], [2, 0]),
    (Classes(numbered=True), ["2", "0"], [2, 0]),
    (Classes(numbered=True), ["True", "False"], [1, 0]),
    (Classes(numbered=True), [True, False], [1, 0]),
]
REFUSED: list[tuple[Classes, Any, str]] = [
    (Classes(ANIMALS), ["yak"], "the new class 'yak', and lacks the classes 'cat', 'dog', 'emu'"),
    (Classes(ANIMALS), ["cat", "0"], "the new class '0'"),
    (Classes(ANIMALS), [3], "the class index 3"),
    (Classes(STARS), np.array([0, 1]), "the new class '0'"),
    (Classes(STARS), [1, 2, 3, 4, 5], "the new classes '4', '5'"),
    (Classes(STARS), ["01"], "the new class '01'"),
    (Classes(STARS), ["1e0"], "the new class '1e0'"),
    (Classes(STARS, numbered=True), ["1", "2"], "may be a name or an index"),
    (Classes(("01", "1")), [1], "may be the classes '01', '1'"),
    (Classes(("01", "02")), [1], "the new class '1'"),
    (Classes(("True", "False")), [1, 0], "use class names as labels"),
    (Classes(ANIMALS), [True], "matches no class"),
    (Classes(numbered=True), ["cat"], "was trained on class indices, without names"),
    (Classes(ANIMALS), ["cat", None], "lacks 1 of 2 labels"),
    (Classes(ANIMALS), np.array([0, np.nan]), "lacks 1 of 2 labels"),
]
FIRST: list[tuple[Any, list[int], tuple[str, ...]]] = [  # labels, their numbers, the names of the classes
    (["b", "a"], [1, 0], ("a", "b")),
    ([1, 0], [1, 0], ()),
    (["1", "0"], [1, 0], ()),
    (["1", "01", "2"], [1, 0, 2], ("01", "1", "2")),
    (["10", "1e1"], [0, 1], ("10", "1e1")),
    ([1, 3, 5], [0, 1, 2], ("1", "3", "5")),
    (["10", "9"], [1, 0], ("9", "10")),
    ([0, 1, 255], [0, 1, 255], ()),  # which is out of range: no name among numbers of classes
    ([1, 2, 3, 4], [1, 2, 3, 4], ()),
    ([True], [1], ("False", "True")),
    (["True"], [1], ("False", "True")),
    (["false"], [0], ("false", "true")),
    (["maybe", "True"], [1, 0], ("True", "maybe")),
]


@pytest.mark.parametrize(("known", "labels", "numbers"), MATCHED)
def test_labels_are_matched_by_name(known: Classes, labels: Any, numbers: list[int]) -> None:
    found, classes = labelled(array(labels), target(), known, "it")
    assert found.tolist() == numbers and classes == known and found.dtype == np.int64


@pytest.mark.parametrize(("known", "labels", "says"), REFUSED)
def test_what_has_no_match_is_refused_by_name(known: Classes, labels: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        labelled(array(labels), target(), known, "it")


@pytest.mark.parametrize(("labels", "numbers", "names"), FIRST)
def test_at_first_sight(labels: Any, numbers: list[int], names: tuple[str, ...]) -> None:
    found, classes = labelled(array(labels), target(), None, "it")
    assert (found.tolist(), classes.names) == (numbers, names)


def test_a_source_with_names_of_its_own() -> None:
    """Its numbers are its own: matched by name, and what is trained on them first has numbers in its data."""
    numbers, classes = labelled(array([0, 1, -100]), target(), Classes(ANIMALS), "it", own=["emu", "cat"])
    assert numbers.tolist() == [2, 0, -100] and classes == Classes(ANIMALS)
    assert labelled(array([0, 1]), target(), None, "it", own=STARS)[1] == Classes(STARS, numbered=True)
    assert labelled(array(["emu"]), target(), Classes(ANIMALS), "it", own=["emu", "cat"])[0].tolist() == [2]
    with pytest.raises(UnmatchedError, match="new class 'yak'"):
        labelled(array([0]), target(), Classes(ANIMALS), "it", own=["emu", "yak"])


def test_labels_of_objects_are_numbers_however_many_there_are() -> None:
    spec, known = TargetSpec("target", "int64", ("n", "objects"), ignore_index=-1), DataNames({}, {"target": STARS})
    for objects in (1, 2):
        assert array_labels(np.ones((4, objects), np.int64), spec, known) is None


def test_the_record_keeps_whether_numbers_were_written() -> None:
    names = DataNames(classes={"target": STARS}, numbered=["target"])
    assert DataNames.from_data(names.as_data()) == names
    assert Classes.known(names, "target") == Classes(STARS, numbered=True)
    assert names.updated(DataNames(classes={"target": STARS})).numbered == ("target",)
    assert names.updated(DataNames(classes={"target": ANIMALS})).numbered == ()
    assert names.fitting({}, {"other": 3}).numbered == ("other",)
    assert Classes.known(DataNames(), "target") is None
    assert DataNames(numbered=["target"]).as_metadata() == {}


@pytest.mark.sweep(0)
def test_no_reader_has_a_rule_of_its_own() -> None:
    """The words by which names become numbers stand in one module."""
    root = Path(gradgraph.__file__).parent
    own = re.compile(r"enumerate\([a-z_.]*(classes|names)\)|return_inverse|\.index\(")
    readers = [*(root / "runtime" / "data").glob("*.py"), *(root / "text").glob("*.py"), *(root / "sound").glob("*.py"),
               *(root / "vision").glob("*.py")]  # fmt: skip
    for path in readers:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and own.search(ast.unparse(node)) and "abel" in ast.unparse(node):
                pytest.fail(f"{path.name}:{node.lineno} numbers labels: {ast.unparse(node)}")
