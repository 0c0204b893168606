"""Random walks from data of each kind to a model in use keep the laws of a plain reference."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest

from data_walks.random_walk import Walk
from data_walks.walk_kinds import KINDS, walk_of

SEEDS = range(40)


@pytest.mark.sweep(0.05)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_breaks_no_law(kind: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for package in ("pandas", "sklearn", "pyarrow", "PIL", *(["tokenizers"] if kind == "texts" else [])):
        pytest.importorskip(package, reason="an extra")
    walk = Walk(seed, tmp_path)
    caplog.set_level(logging.ERROR, logger="gradgraph")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tables that lack a class, of rounds that do not suffice
        walk_of(kind)(walk)
    assert not walk.broken, "\n".join([" · ".join(walk.chosen), *walk.broken])


def test_a_law_that_is_broken_is_told(tmp_path: Path) -> None:
    walk = Walk(0, tmp_path)
    walk.close("numbers are equal", [1.0, 2.0], [1.0, 2.1])
    walk.same("bits are equal", {"a": [1]}, {"a": [2]})
    walk.refused("nothing goes", lambda: None)
    assert len(walk.broken) == 3
