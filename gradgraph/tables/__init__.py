"""Starting models for tables, sized by the training data.

This package builds on preprocessing and on the layers of the frontend; it must not depend on steps or training.
"""

from gradgraph.tables.starting_models import INDEXED, MODELS, ft_transformer, loss, mlp, resnet

__all__ = ["INDEXED", "MODELS", "ft_transformer", "loss", "mlp", "resnet"]


def __dir__() -> list[str]:
    return sorted(__all__)
