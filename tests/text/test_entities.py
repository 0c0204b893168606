"""Entities among tags, and their scores, are those of seqeval."""

from __future__ import annotations

import random

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.text.entities import entities_in

# tags of a sentence, and the entities that seqeval 1.2.2 finds there
KNOWN = [
    ("O O", []),
    ("B-A I-A O B-B", [("A", 0, 1), ("B", 3, 3)]),
    ("I-A I-A I-B B-B", [("A", 0, 1), ("B", 2, 2), ("B", 3, 3)]),
    ("B-A B-A I-A", [("A", 0, 0), ("A", 1, 2)]),
    ("S-A E-A I-A E-A", [("A", 0, 0), ("A", 1, 1), ("A", 2, 3)]),
    ("O I-C-D I-C-D B-C", [("C-D", 1, 2), ("C", 3, 3)]),
    ("B I O B", [("_", 0, 1), ("_", 3, 3)]),
]


@pytest.mark.parametrize(("tags", "entities"), KNOWN)
def test_entities(tags: str, entities: list[tuple[str, int, int]]) -> None:
    assert list(entities_in(tags.split())) == entities


def test_bilou_means_what_iobes_means() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tags = [f"{rng.choice('BIESO')}-{rng.choice('XY')}" for _ in range(8)]
        tags = ["O" if tag[0] == "O" else tag for tag in tags]
        other = [tag.replace("E-", "L-").replace("S-", "U-") for tag in tags]
        assert list(entities_in(tags)) == list(entities_in(other))


def test_scores_are_those_of_seqeval() -> None:
    """By hand: three are there, three are found, two of which are right."""
    there = [["B-A", "I-A", "O", "B-B"], ["O", "B-A"]]
    found = [["B-A", "I-A", "O", "B-A"], ["O", "B-A"]]
    scores = gg.text.entity_scores(there, found)
    assert (scores.precision, scores.recall, scores.f1) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert scores.kinds["A"].precision == pytest.approx(2 / 3) and scores.kinds["A"].recall == 1.0
    assert scores.kinds["B"].as_data() == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1}
    assert [line.split()[0] for line in str(scores).splitlines()] == ["entities", "A", "B", "all"]
    with pytest.raises(DataError, match="one tag per word"):
        gg.text.entity_scores([["O"]], [["O", "O"]])


def test_scores_are_those_of_seqeval_on_any_tags() -> None:
    seqeval = pytest.importorskip("seqeval.metrics", reason="in no extra")
    rng = np.random.default_rng(0)
    tags = ["O", "B-A", "I-A", "E-A", "S-A", "B-B", "I-B"]
    for _ in range(100):
        there = [rng.choice(tags, 6).tolist() for _ in range(5)]
        found = [[tag if rng.random() < 0.7 else str(rng.choice(tags)) for tag in row] for row in there]
        scores = gg.text.entity_scores(there, found)
        assert scores.f1 == pytest.approx(seqeval.f1_score(there, found), abs=1e-12)
        assert scores.precision == pytest.approx(seqeval.precision_score(there, found), abs=1e-12)
