"""Texts: tables of sentences, pairs, choices and tagged words as what a transformer takes, by a tokenizer's file.

It knows tokenizers (of the package of that name), which column of a table is what, and how entities are scored; it must
not know how a model is trained: it gives a dataset to those that train.
"""

from __future__ import annotations

from gradgraph.text.entities import EntityScores, entity_scores, evaluate_entities
from gradgraph.text.text_table import TextTable, table
from gradgraph.text.tokenizer import Tokenizer, tokenizer_beside

__all__ = [
    "EntityScores",
    "TextTable",
    "Tokenizer",
    "entity_scores",
    "evaluate_entities",
    "table",
    "tokenizer_beside",
]


def __dir__() -> list[str]:
    return sorted(__all__)
