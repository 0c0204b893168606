"""The native backend with a user-selected precision for products on AMX tiles."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gradgraph.backends.backend import Backend
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native.native_lowering import LOWERING
from gradgraph.backends.ort_native.native_precision import HIGHEST, Precision, set_precision
from gradgraph.passes.rewrites import Rewrite


def at_precision(precision: Precision) -> Backend:
    """Return the native backend with products computed at ``precision``."""
    if precision == HIGHEST:
        return ORT_NATIVE
    choice = Rewrite(
        partial(set_precision, precision=precision), "each node that multiplies by tiles stores the choice"
    )
    return replace(ORT_NATIVE, load=lambda: replace(LOWERING, after=(*LOWERING.after, choice)))
