"""Preprocessing of table columns into a model's inputs, learnt from the training data.

This room knows tables, and the ONNX nodes that make arrays of them; it must not know steps, losses or training.
"""

from gradgraph.preprocess.column_kinds import KINDS
from gradgraph.preprocess.computed import Preprocessing
from gradgraph.preprocess.fitting import fit

__all__ = ["KINDS", "Preprocessing", "fit"]


def __dir__() -> list[str]:
    return sorted(__all__)
