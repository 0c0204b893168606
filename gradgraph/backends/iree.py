"""IREE, which compiles models with MLIR. It takes the direction of a Scan for forward without saying so."""

from __future__ import annotations

from gradgraph.backends.backend import Backend
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import TRAINING_NORMS, compared_winners, written_out_batch_norm
from gradgraph.backends.shared_rewrites import NARROW_NUMBERS, TURN_SCANS

FORMS = Forms()
FORMS.add("MaxPoolGrad")(compared_winners)
FORMS.add("BatchNormalization", *TRAINING_NORMS, domain="")(written_out_batch_norm)

IREE = Backend(
    name="iree",
    about="standard nodes that IREE has, for fixed sizes",
    forms=FORMS,
    after=(NARROW_NUMBERS, TURN_SCANS),
)
