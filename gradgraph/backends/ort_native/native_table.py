"""The table of forms with native kernels; each file of forms adds its rows."""

from __future__ import annotations

from gradgraph.backends.forms import Forms
from gradgraph.machine.hardware import levels_in_use

FORMS = Forms()
form = FORMS.add

# The lowest level of processors (``gradgraph.machine.hardware.LEVELS``) at which kernels of a family were measured to
# be faster than the forms without them; "" for any (``docs/how-it-works/native.md``, section Depthwise convolutions).
LEAST_LEVEL = {"depthwise convolution": "avx2", "batch normalisation": "avx2", "transpose": "avx2"}


def pays_here(family: str) -> bool:
    """Return whether kernels of this family are used on this processor by default."""
    return LEAST_LEVEL[family] in ("", *levels_in_use())
