"""Optimizers: chains of small gradient transforms, with PyTorch's names, arguments and defaults.

``adamw(lr) = chain(scale_by_adam(), add_decayed_weights(wd), scale_by_learning_rate(lr))``. A learning rate is either a
number (the default of an input of the step, which each call can override) or a schedule of ``gradgraph.optim``
(``cosine``, ``linear``, ``warmup``, …), which becomes part of the graph.
"""

import types
from typing import TYPE_CHECKING

from gradgraph.optim.adam_family import *
from gradgraph.optim.adam_variants import *
from gradgraph.optim.descent import *
from gradgraph.optim.factored import *
from gradgraph.optim.modifiers import *
from gradgraph.optim.orthogonal import *
from gradgraph.optim.plateau import *
from gradgraph.optim.quasi_newton import *
from gradgraph.optim.recipes import *
from gradgraph.optim.rms import *
from gradgraph.optim.schedule_free import *
from gradgraph.optim.schedules import *
from gradgraph.optim.transform import *
from gradgraph.optim.trust import *
from gradgraph.optim.wrappers import *

if not TYPE_CHECKING:
    _OTHERS = (types.ModuleType, bool)
    __all__ = [n for n, value in globals().items() if not (n.startswith("_") or isinstance(value, _OTHERS))]

    def __dir__() -> list[str]:
        return sorted(__all__)
