"""Models to begin with, for those who have a table and no model: sized by what was learnt of the table.

It knows what a preprocessing makes, and layers; it must not know steps or training.
"""

from gradgraph.tables.starting_models import INDEXED, MODELS, ft_transformer, loss, mlp, resnet

__all__ = ["INDEXED", "MODELS", "ft_transformer", "loss", "mlp", "resnet"]


def __dir__() -> list[str]:
    return sorted(__all__)
