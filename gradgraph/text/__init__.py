"""The public functions for texts: tables of sentences, pairs, choices and tagged words, tokenizers, and entity scores.

The datasets are in ``gradgraph.data.texts``; entity scores of a trained model are computed here.
"""

from __future__ import annotations

from gradgraph.data.texts.text_table import TextTable, table
from gradgraph.data.texts.tokenizer import Tokenizer, tokenizer_beside
from gradgraph.text.entities import EntityScores, entity_scores, evaluate_entities

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
