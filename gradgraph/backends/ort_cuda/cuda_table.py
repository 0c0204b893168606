"""The table of forms for onnxruntime's CUDA provider; each file of forms adds its rows."""

from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import UNPOOLING

FORMS = Forms(UNPOOLING)
form = FORMS.add
