"""Optimizers: chains of small transforms of gradients, with PyTorch's names, arguments and defaults.

``adamw(lr) = chain(scale_by_adam(), add_decayed_weights(wd), scale_by_learning_rate(lr))``. A learning rate
may be a number: then it is an input of the step, fed per call, with that default. Or it is a schedule of
``gradgraph.optim`` (``cosine``, ``linear``, ``warmup``, …), which becomes part of the graph.
"""

from gradgraph.optim import modifiers, plateau, recipes, schedules, transform
from gradgraph.optim.modifiers import *
from gradgraph.optim.plateau import *
from gradgraph.optim.recipes import *
from gradgraph.optim.schedules import *
from gradgraph.optim.transform import *

__all__ = []
__all__ += modifiers.__all__
__all__ += plateau.__all__
__all__ += recipes.__all__
__all__ += schedules.__all__
__all__ += transform.__all__
