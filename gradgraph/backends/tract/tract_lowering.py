"""Forms and rewrites for tract."""

from gradgraph.backends.backend import Lowering
from gradgraph.backends.capability import lacking
from gradgraph.backends.forms import Forms
from gradgraph.backends.shared_forms import TRAINING, VECTORS, batch_norm_by_statistics
from gradgraph.backends.shared_rewrites import PART_SLICES, TURN_SCANS
from gradgraph.rules.registry import case, real

FORMS = Forms(TRAINING)


FORMS.add(
    "BatchNormalization",
    case(real(4, 3), *VECTORS),
    case(real(2, 3, 4, 2), *VECTORS, epsilon=0.1),
    when=lacking("tract"),  # it requires constant statistics
)(batch_norm_by_statistics)

LOWERING = Lowering(forms=FORMS, after=(TURN_SCANS,), last=(PART_SLICES,))
