"""Optimizers: chains of small gradient transforms, with PyTorch's names, arguments and defaults.

``adamw(lr) = chain(scale_by_adam(), add_decayed_weights(wd), scale_by_learning_rate(lr))``. A learning rate is either a
number (the default of an input of the step, which each call can override) or a schedule of ``gradgraph.optim``
(``cosine``, ``linear``, ``warmup``, …), which becomes part of the graph.
"""

from gradgraph.optim import (
    adam_family,
    adam_variants,
    descent,
    factored,
    modifiers,
    orthogonal,
    plateau,
    quasi_newton,
    recipes,
    rms,
    schedule_free,
    schedules,
    transform,
    trust,
    wrappers,
)
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

__all__ = []
__all__ += adam_family.__all__
__all__ += adam_variants.__all__
__all__ += descent.__all__
__all__ += factored.__all__
__all__ += modifiers.__all__
__all__ += orthogonal.__all__
__all__ += plateau.__all__
__all__ += quasi_newton.__all__
__all__ += recipes.__all__
__all__ += rms.__all__
__all__ += schedule_free.__all__
__all__ += schedules.__all__
__all__ += transform.__all__
__all__ += trust.__all__
__all__ += wrappers.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
