"""The lowering for onnxruntime's CPU provider: the order of its rewrites and forms."""

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
from gradgraph.backends.ort_cpu.attention_by_heads import attend_by_heads
from gradgraph.backends.ort_cpu.blocked.blocked_forms import STOCK
from gradgraph.backends.ort_cpu.blocked.cheapest_layout import write_blocked_forms
from gradgraph.backends.ort_cpu.cheap_recomputation import recompute_cheap_values
from gradgraph.backends.ort_cpu.conv import conv_forms  # noqa: F401  (fills the table)
from gradgraph.backends.ort_cpu.conv.conv_norm import fold_norms
from gradgraph.backends.ort_cpu.conv.conv_sequences import write_images
from gradgraph.backends.ort_cpu.cpu_table import FORMS
from gradgraph.backends.ort_cpu.float16_rounding import round_in_between
from gradgraph.backends.ort_cpu.integer_groups import hide_integer_groups, show_integer_groups
from gradgraph.backends.ort_cpu.packed_products import multiply_packed
from gradgraph.backends.ort_cpu.recurrent.shared_states import share_states
from gradgraph.backends.ort_cpu.scalars import reshape_numbers
from gradgraph.backends.ort_cpu.stacked_products import stack_products
from gradgraph.passes.rewrites import Rewrite

HIDDEN = Rewrite(hide_integer_groups, "onnxruntime fuses standard operators only; no rewrite below sees these")
SHOWN = Rewrite(show_integer_groups, "onnxruntime fuses the groups again; all other rewrites have run")
PACKED = Rewrite(multiply_packed, "low-bit weights are read as stored; later rewrites do not see their products")
HALVES = Rewrite(round_in_between, "later rewrites see float32, which has forms")
FEW_ROWS = Rewrite(stack_products, "products of few rows read their weight once; forms then see a single product")
HEADS = Rewrite(attend_by_heads, "scores stay in the cache; forms would see them as a whole")
SEQUENCES = Rewrite(write_images, "a convolution of sequences has few forms, and its images have many")
NORMS = Rewrite(fold_norms, "a BatchNormalization and the convolution before it share passes; forms would split them")
CHEAP = Rewrite(recompute_cheap_values, "the clean-up, which merges equal nodes, has run, so copies stay")
NUMBERS = Rewrite(reshape_numbers, "scalars get the rank of the tensors that forms combine them with")


LOWERING = Lowering(
    before=(
        HIDDEN,
        PACKED,
        HALVES,
        FEW_ROWS,
        Rewrite(share_states, "the forward loop saves what the backward loop needs; forms see neither"),
        HEADS,
        SEQUENCES,
        NORMS,
    ),
    forms=FORMS,
    layouts=(
        Layout(
            may_take=STOCK.knows,
            rewrites=(Rewrite(write_blocked_forms, "nodes between blocked convolutions stay in blocks"),),
        ),
    ),
    after=(NUMBERS,),
    last=(CHEAP, SHOWN),
)


def packing(backend: Backend, copied: bool | Literal["auto"]) -> Backend:
    """Return ``backend`` for sessions that may (``copied``) or must not copy low-bit weights; unchanged for "auto"."""
    lowering = backend.lowering
    if copied == "auto" or PACKED not in lowering.before:
        return backend
    chosen = Rewrite(partial(multiply_packed, copied=copied), PACKED.reason)
    before = tuple(chosen if r == PACKED else r for r in lowering.before)
    return replace(backend, load=lambda: replace(lowering, before=before))
