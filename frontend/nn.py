"""Modules, layers and losses, under the names of ``torch.nn``."""

from gradgraph.arguments import Table
from gradgraph.frontend import (
    init,
    layers,
    layers_activation,
    layers_attention,
    layers_losses,
    layers_recurrent,
    layers_spatial,
    module,
)
from gradgraph.frontend.layers import *
from gradgraph.frontend.layers_activation import *
from gradgraph.frontend.layers_attention import *
from gradgraph.frontend.layers_losses import *
from gradgraph.frontend.layers_recurrent import *
from gradgraph.frontend.layers_spatial import *
from gradgraph.frontend.module import *

__all__ = ["init"]
__all__ += layers.__all__
__all__ += layers_activation.__all__
__all__ += layers_attention.__all__
__all__ += layers_losses.__all__
__all__ += layers_spatial.__all__
__all__ += module.__all__
__all__ += layers_recurrent.__all__

LAYERS: Table[type[module.Module]] = Table("layer")
LAYERS.update({n: made for n in __all__ if isinstance(made := globals()[n], type) and issubclass(made, module.Module)})
