"""Preprocessing of table columns into a model's inputs, learnt from the training data.

This package converts tables to arrays, by ONNX nodes; it must not depend on steps, losses or training.
"""

from gradgraph.data.preprocess.column_kinds import KINDS
from gradgraph.data.preprocess.computed import Preprocessing
from gradgraph.data.preprocess.fitting import fit

__all__ = ["KINDS", "Preprocessing", "fit"]


def __dir__() -> list[str]:
    return sorted(__all__)
