"""Modules, layers and losses, under the names of ``torch.nn``."""

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

__all__ = [name for name in globals() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]

LAYERS: _Table[type[_module.Module]] = _Table("layer")
LAYERS.update({n: made for n in __all__ if isinstance(made := globals()[n], type) and issubclass(made, _module.Module)})
