"""Modules, layers and losses, under the names of ``torch.nn``."""

from typing import TYPE_CHECKING

from gradgraph.arguments import Table as _Table
from gradgraph.frontend import init as init
from gradgraph.frontend import module as _module
from gradgraph.frontend.layers import *
from gradgraph.frontend.layers_activation import *
from gradgraph.frontend.layers_attention import *
from gradgraph.frontend.layers_losses import *
from gradgraph.frontend.layers_recurrent import *
from gradgraph.frontend.layers_spatial import *
from gradgraph.frontend.module import *

if not TYPE_CHECKING:
    __all__ = [name for name in globals() if not name.startswith(("_", "TYPE_"))]

LAYERS: _Table[type[_module.Module]] = _Table("layer")
LAYERS.update({n: made for n, made in globals().items() if isinstance(made, type) and issubclass(made, _module.Module)})
