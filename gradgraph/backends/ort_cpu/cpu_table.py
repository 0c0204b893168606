"""The table of forms for onnxruntime's CPU provider; each file of forms adds its rows."""

from gradgraph.backends.forms import Forms

FORMS = Forms()
form = FORMS.add
