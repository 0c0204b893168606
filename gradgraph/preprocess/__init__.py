"""Preprocessing of table columns into a model's inputs, learnt from the training data.

This package converts tables to arrays, by ONNX nodes; it must not depend on steps, losses or training.
"""

from gradgraph.preprocess.column_kinds import KINDS
from gradgraph.preprocess.computed import Preprocessing
from gradgraph.preprocess.fitting import fit

__all__ = ["KINDS", "Preprocessing", "fit"]


def __dir__() -> list[str]:
    return sorted(__all__)
