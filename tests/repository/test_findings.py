"""Errors and findings: sentences of bounded length, and their parts as data."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from gradgraph import errors
from gradgraph.errors import LONGEST_MESSAGE, Finding, GradgraphError, ModelError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, GradgraphError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_messages_end_somewhere(kind: type[GradgraphError]) -> None:
    whole = "begin " + "x" * 10**6 + " end"
    message = str(kind(whole))
    assert len(message) <= LONGEST_MESSAGE
    assert message.startswith("begin x")
    assert "x…x" in message
    assert message.endswith("x end")
    assert str(kind("short")) == "short"


def test_errors_carry_findings_wherever_they_go() -> None:
    finding = Finding("node 'a' (Add)", "has 3 inputs", "this operator takes 2", "export the model again")
    error = ModelError("two things are wrong", [finding, finding])
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert same.findings == (finding, finding)
        assert str(same) == "two things are wrong"


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (("a", "is b"), "a is b"),
        (("a", "is b", "must be c"), "a is b, and must be c"),
        (("a", "is b", "", "do d"), "a is b; do d"),
        (("a", "is b", "must be c", "do d"), "a is b, and must be c; do d"),
    ],
)
def test_a_finding_is_one_sentence(parts: tuple[str, ...], sentence: str) -> None:
    assert str(Finding(*parts)) == sentence  # type: ignore[arg-type]
