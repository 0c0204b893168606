"""Texts: tables of sentences, pairs, choices and tagged words as inputs of a transformer, by a tokenizer file.

This package contains tokenizers (with the package ``tokenizers``), the columns of a table, and entity scores. It only
provides datasets; it must not depend on how a model is trained.
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
