"""The order of rewrites and forms for the CPU provider."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from gradgraph.backends.backend import Backend, Layout, Lowering
from gradgraph.backends.ort_cpu import (  # noqa: F401  (they fill the table)
    activation_forms,
    linear_forms,
    movement_forms,
    norm_forms,
    optimizer_forms,
    pool_forms,
    softmax_forms,
)
from gradgraph.backends.ort_cpu.blocked.blocked_forms import STOCK
from gradgraph.backends.ort_cpu.blocked.cheapest_layout import write_blocked_forms
from gradgraph.backends.ort_cpu.cheap_again import compute_cheap_again
from gradgraph.backends.ort_cpu.conv import conv_forms  # noqa: F401  (fills the table)
from gradgraph.backends.ort_cpu.conv.conv_norm import fold_norms
from gradgraph.backends.ort_cpu.cpu_table import FORMS
from gradgraph.backends.ort_cpu.halves import round_in_between
from gradgraph.backends.ort_cpu.packed_products import multiply_packed
from gradgraph.backends.ort_cpu.recurrent.shared_states import share_states
from gradgraph.backends.ort_cpu.scalars import reshape_numbers
from gradgraph.backends.ort_cpu.stacks import stack_products
from gradgraph.passes.rewrites import Rewrite

PACKED = Rewrite(multiply_packed, "weights of few bits are read as they are; what follows sees no product of them")
HALVES = Rewrite(round_in_between, "all that follows sees float32, and has forms for it")
FEW_ROWS = Rewrite(stack_products, "products of few rows with one weight read it once; forms see one product")
NORMS = Rewrite(fold_norms, "a BatchNormalization and the convolution below it share passes; forms take them apart")
CHEAP = Rewrite(compute_cheap_again, "equal nodes are merged by now, and copies of them stay")
NUMBERS = Rewrite(reshape_numbers, "numbers get the rank of what forms have made them meet")


LOWERING = Lowering(
    before=(
        PACKED,
        HALVES,
        FEW_ROWS,
        Rewrite(share_states, "the loop forward keeps what the loop backwards needs; forms see neither"),
        NORMS,
    ),
    forms=FORMS,
    layouts=(
        Layout(
            may_take=STOCK.knows,
            rewrites=(Rewrite(write_blocked_forms, "between convolutions in blocks, nodes stay in blocks"),),
        ),
    ),
    after=(NUMBERS,),
    last=(CHEAP,),
)


def packing(backend: Backend, copied: bool | Literal["auto"]) -> Backend:
    """Return ``backend`` for sessions that may copy weights of few bits, or may not."""
    lowering = backend.lowering
    if copied == "auto" or PACKED not in lowering.before:
        return backend
    chosen = Rewrite(partial(multiply_packed, copied=copied), PACKED.reason)
    before = tuple(chosen if r == PACKED else r for r in lowering.before)
    return replace(backend, load=lambda: replace(lowering, before=before))
