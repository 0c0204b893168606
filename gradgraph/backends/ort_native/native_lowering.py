"""The order of rewrites and forms with native kernels: those of the CPU provider, and where kernels come in."""

from __future__ import annotations

from functools import partial

from gradgraph.backends.backend import Layout, Lowering
from gradgraph.backends.ort_cpu.blocked.cheapest_layout import write_blocked_forms
from gradgraph.backends.ort_cpu.cpu_lowering import CHEAP, FEW_ROWS, HALVES, NORMS, NUMBERS, PACKED
from gradgraph.backends.ort_cpu.recurrent.shared_states import share_states
from gradgraph.backends.ort_native import native_conv, native_depthwise, native_forms, native_products  # noqa: F401  (they fill the table)
from gradgraph.backends.ort_native.chains import fuse_chains
from gradgraph.backends.ort_native.native_attention import fold_attentions
from gradgraph.backends.ort_native.native_blocked import WITH_NATIVE
from gradgraph.backends.ort_native.native_conv import fuse_activations
from gradgraph.backends.ort_native.native_depthwise import fold_neighbours
from gradgraph.backends.ort_native.native_norm import fold_activations
from gradgraph.backends.ort_native.native_packed import multiply_stored
from gradgraph.backends.ort_native.native_recurrent import run_of
from gradgraph.backends.ort_native.native_table import FORMS
from gradgraph.backends.ort_native.scores_in_pieces import compute_scores_in_pieces
from gradgraph.passes.rewrites import Rewrite

LOWERING = Lowering(
    before=(
        Rewrite(multiply_stored, "weights of few bits become floats in the cache of their product"),
        Rewrite(compute_scores_in_pieces, "it copies nodes of losses and gradients, which have forms in what follows"),
        PACKED,
        HALVES,
        FEW_ROWS,
        Rewrite(partial(share_states, run_of=run_of), "an LSTM that has a kernel is one call there and one back"),
        Rewrite(fold_attentions, "scores and weights are never written; forms would take them apart"),
        NORMS,
    ),
    forms=FORMS,
    layouts=(
        Layout(
            may_take=WITH_NATIVE.knows,
            rewrites=(
                Rewrite(fold_activations, "a norm's kernel applies the activation behind it: fewer nodes to lay out"),
                Rewrite(fold_neighbours, "so does a depthwise convolution's, and its two gradients are one kernel"),
                Rewrite(partial(write_blocked_forms, rows=WITH_NATIVE), "between convolutions, nodes stay in blocks"),
            ),
        ),
    ),
    after=(
        Rewrite(fuse_activations, "a convolution by tiles applies the activation behind it"),
        NUMBERS,
    ),
    last=(
        CHEAP,
        Rewrite(fuse_chains, "element-wise nodes that are left and hang together become one kernel"),
    ),
)
