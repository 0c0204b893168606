"""Functions of traced tensors, under the names of ``torch.nn.functional`` and ``torch``.

Every function accepts tensors, parameters, numbers, arrays and dynamic sizes. Each family is in a module of its own.
"""

from typing import TYPE_CHECKING

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

if not TYPE_CHECKING:
    __all__ = [name for name in globals() if not name.startswith(("_", "TYPE_"))]
