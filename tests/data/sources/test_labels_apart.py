"""``fit(x, y)`` is ``fit`` of both by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.frontend import nn
from tests.kit.command_line import arrays

DATA = arrays(40)
X, Y = DATA["x"], DATA["target"]


def trainer(**options: Any) -> gg.Trainer:
    gg.frontend.manual_seed(0)
    model = gg.frontend.export(nn.Linear(4, 3), {"x": ("N", 4)})
    return gg.Trainer(gg.build(model, **{"loss": "cross_entropy", **options}), device="cpu")


class PlainTable(dict):
    """What tables have in common."""

    columns = property(lambda self: list(self))

    def to_numpy(self) -> np.ndarray:
        return np.column_stack(list(self.values()))


def frame() -> Any:
    return PlainTable({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "d": X[:, 3]})


WAYS: dict[str, Callable[[gg.Trainer, Any], Any]] = {
    "two arrays": lambda t, o: t.fit(X, Y, **o),
    "labels by keyword": lambda t, o: t.fit(X, y=Y, **o),
    "a list of labels": lambda t, o: t.fit(X, Y.tolist(), **o),
    "inputs by name": lambda t, o: t.fit({"x": X}, Y, **o),
    "a table": lambda t, o: t.fit(frame(), Y, **o),
    "as one": lambda t, o: t.fit((X, Y), **o),
    "epochs by position": lambda t, o: t.fit(X, Y, o.pop("epochs"), **o),
}


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_fit_of_both_by_name(way: str) -> None:
    options = {"epochs": 2, "batch_size": 8, "progress": False, "validation": (X[:8], Y[:8])}
    expected = trainer().fit(DATA, **{**options, "validation": {"x": X[:8], "target": Y[:8]}})
    assert dict(WAYS[way](trainer(), options)) == dict(expected)


def test_evaluate_takes_both_too() -> None:
    t = trainer(metrics=["accuracy"])
    assert t.evaluate(X, Y) == t.evaluate(DATA)
    assert t.evaluate(X, Y, 7) == t.evaluate(DATA, 7) == t.evaluate(X, y=Y, batch_size=7)


def test_what_is_not_clear_is_refused_with_names() -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] a, float[N, 2] b) => (float[N, 2] y) '
    text += "<float[2, 2] w = {1, 2, 3, 4}> { s = Add (a, b)  y = MatMul (s, w) }"
    two = gg.Trainer(gg.build(onnx.parser.parse_model(text), loss="cross_entropy"), device="cpu")
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    says = r"the inputs 'a', 'b' and the targets 'target', so .* \{'a': …, 'b': …, 'target': …\}"
    with pytest.raises(DataError, match=says):
        two.fit(x, y, progress=False)
    two.fit({"a": x, "b": x}, y, progress=False)
    weighted = trainer(sample_weight=True)
    with pytest.raises(DataError, match="and the targets 'target', 'sample_weight'"):
        weighted.fit(X, Y, progress=False)
    own = onnx.parser.parse_model(text.replace("float[N, 2] y", "float y").replace("y = MatMul", "p = MatMul"))
    own.graph.node.append(onnx.helper.make_node("ReduceSum", ["p"], ["y"], keepdims=0))
    with pytest.raises(DataError, match="the inputs 'a', 'b' and no target"):
        gg.Trainer(gg.build(own, loss=None), device="cpu").fit(x, y, progress=False)


@pytest.mark.parametrize("value", ["3", 2.5, np.float32(3), {"a": 1}, max])
def test_what_is_neither_labels_nor_a_number_is_said(value: Any) -> None:
    with pytest.raises(DataError, match="epochs must be a whole number above zero"):
        trainer().fit(DATA, value, progress=False)


def test_labels_apart_of_other_lengths_are_said() -> None:
    with pytest.raises(DataError, match="'x' has 40 rows but 'target' has 30"):
        trainer().fit(X, Y[:30], progress=False)
