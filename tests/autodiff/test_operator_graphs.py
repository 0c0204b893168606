"""Gradients of random graphs over the whole operator table, in float32, float64 and float16."""

from __future__ import annotations

import warnings
from itertools import count, islice

import numpy as np
import pytest

from gradgraph.rules.registry import RULES, Rule
from tests.kit.operator_graphs import disagreements, drawn, in_turn, judged, trials

CHUNK = 10
GRAPHS = 510


@pytest.mark.sweep(0.13)
@pytest.mark.parametrize("first", range(0, GRAPHS, CHUNK))
def test_gradients_of_random_operators(first: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, in the reference evaluator
        found = [judged((seed, in_turn(seed))) for seed in range(first, first + CHUNK)]
    assert [f"seed {seed}, {name}: {s}" for seed, name, _, sentences in found for s in sentences] == []
    assert sum(verdict == "right" for *_, verdict, _ in found) > CHUNK // 2  # most are judged


@pytest.mark.sweep(0)
def test_a_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by a thousandth by one input of one operator."""
    right = RULES["", "Mul"]
    wrong = Rule(**{**vars(right), "emit": lambda op, dz, z, x, y: (dz * y * 1.001, dz * x)})
    seeds = list(islice((s for s in count() if "Mul" in drawn(s, np.float32).operators), 3))
    assert [disagreements(s, "float32")[0] for s in seeds] == ["right"] * 3
    monkeypatch.setitem(RULES, ("", "Mul"), wrong)
    assert [disagreements(s, "float32")[0] for s in seeds] == ["wrong"] * 3


def test_the_whole_table_is_drawn_from() -> None:
    assert len(trials()) > 120
