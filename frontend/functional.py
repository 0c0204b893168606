"""Functions of traced tensors, under the names of ``torch.nn.functional`` and ``torch``.

Every function accepts tensors, parameters, numbers, arrays and dynamic sizes. Each family is in a module of its own.
"""

from gradgraph.frontend import (
    activations,
    assignment,
    attention,
    boxes,
    convolution,
    losses_boxes,
    losses_classes,
    losses_detection,
    losses_embeddings,
    losses_margins,
    losses_preferences,
    losses_regions,
    losses_sequences,
    losses_values,
    normalization,
    pointwise,
    pooling,
    products,
    random_numbers,
    reductions,
    resampling,
    shaping,
    subscripts,
)
from gradgraph.frontend.activations import *
from gradgraph.frontend.assignment import *
from gradgraph.frontend.attention import *
from gradgraph.frontend.boxes import *
from gradgraph.frontend.convolution import *
from gradgraph.frontend.losses_boxes import *
from gradgraph.frontend.losses_classes import *
from gradgraph.frontend.losses_detection import *
from gradgraph.frontend.losses_embeddings import *
from gradgraph.frontend.losses_margins import *
from gradgraph.frontend.losses_preferences import *
from gradgraph.frontend.losses_regions import *
from gradgraph.frontend.losses_sequences import *
from gradgraph.frontend.losses_values import *
from gradgraph.frontend.normalization import *
from gradgraph.frontend.pointwise import *
from gradgraph.frontend.pooling import *
from gradgraph.frontend.products import *
from gradgraph.frontend.random_numbers import *
from gradgraph.frontend.reductions import *
from gradgraph.frontend.resampling import *
from gradgraph.frontend.shaping import *
from gradgraph.frontend.subscripts import *

__all__ = []
__all__ += activations.__all__
__all__ += assignment.__all__
__all__ += attention.__all__
__all__ += boxes.__all__
__all__ += convolution.__all__
__all__ += losses_boxes.__all__
__all__ += losses_classes.__all__
__all__ += losses_detection.__all__
__all__ += losses_embeddings.__all__
__all__ += losses_margins.__all__
__all__ += losses_preferences.__all__
__all__ += losses_regions.__all__
__all__ += losses_sequences.__all__
__all__ += losses_values.__all__
__all__ += normalization.__all__
__all__ += pointwise.__all__
__all__ += pooling.__all__
__all__ += products.__all__
__all__ += random_numbers.__all__
__all__ += reductions.__all__
__all__ += resampling.__all__
__all__ += shaping.__all__
__all__ += subscripts.__all__
