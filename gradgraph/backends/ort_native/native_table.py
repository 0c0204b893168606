"""The table of forms that native kernels add; each file of forms adds its rows."""

from __future__ import annotations

from gradgraph.backends.forms import Forms

FORMS = Forms()
form = FORMS.add
