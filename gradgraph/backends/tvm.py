"""TVM, which compiles models by Relax. LayerNormalization's mean and deviation are zeros there without a word."""

from __future__ import annotations

from gradgraph.backends.backend import Backend
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import (
    STATISTICS,
    TRAINING_NORMS,
    compared_winners,
    reads_statistics,
    written_out_batch_norm,
    written_out_layer_norm,
)
from gradgraph.backends.shared_rewrites import NARROW_NUMBERS

FORMS = Forms()
FORMS.add("MaxPoolGrad")(compared_winners)
FORMS.add("BatchNormalization", *TRAINING_NORMS, domain="")(written_out_batch_norm)
FORMS.add("LayerNormalization", *STATISTICS, domain="", when=reads_statistics)(written_out_layer_norm)

TVM = Backend(
    name="tvm",
    about="standard nodes that TVM has, for fixed sizes and no loops",
    forms=FORMS,
    after=(NARROW_NUMBERS,),
)
