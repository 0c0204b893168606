"""The lowering with native kernels: the lowering for the CPU provider, with kernels inserted."""

from functools import partial

from gradgraph.backends.backend import Layout, Lowering
from gradgraph.backends.ort_cpu.blocked.cheapest_layout import write_blocked_forms
from gradgraph.backends.ort_cpu.cpu_lowering import (
    CHEAP,
    FEW_ROWS,
    HALVES,
    HEADS,
    HIDDEN,
    NORMS,
    NUMBERS,
    PACKED,
    SEQUENCES,
    SHOWN,
)
from gradgraph.backends.ort_cpu.recurrent.shared_states import share_states
from gradgraph.backends.ort_native import native_conv, native_depthwise, native_forms, native_products  # noqa: F401  (they fill the table)
from gradgraph.backends.ort_native.chains import fuse_chains
from gradgraph.backends.ort_native.chunked_scores import compute_scores_in_chunks
from gradgraph.backends.ort_native.native_attention import fold_attentions
from gradgraph.backends.ort_native.native_blocked import WITH_NATIVE
from gradgraph.backends.ort_native.native_conv import fuse_activations
from gradgraph.backends.ort_native.native_depthwise import fold_neighbours
from gradgraph.backends.ort_native.native_norm import fold_activations
from gradgraph.backends.ort_native.native_packed import multiply_stored
from gradgraph.backends.ort_native.native_recurrent import run_of
from gradgraph.backends.ort_native.native_table import FORMS
from gradgraph.backends.ort_native.native_transposes import transpose_by_kernel
from gradgraph.passes.rewrites import Rewrite

LOWERING = Lowering(
    before=(
        HIDDEN,
        Rewrite(multiply_stored, "low-bit weights are dequantized in the cache of their product"),
        Rewrite(compute_scores_in_chunks, "it copies nodes of losses and gradients, to which later forms apply"),
        PACKED,
        HALVES,
        FEW_ROWS,
        Rewrite(partial(share_states, run_of=run_of), "an LSTM with a kernel is one call forward and one backward"),
        Rewrite(fold_attentions, "scores and probabilities are never written; forms would separate them"),
        HEADS,
        SEQUENCES,
        NORMS,
    ),
    forms=FORMS,
    layouts=(
        Layout(
            may_take=WITH_NATIVE.knows,
            rewrites=(
                Rewrite(fold_activations, "a norm's kernel applies the activation after it: fewer nodes for layouts"),
                Rewrite(
                    fold_neighbours, "a depthwise kernel applies the activation before it, and computes both gradients"
                ),
                Rewrite(partial(write_blocked_forms, rows=WITH_NATIVE), "between convolutions, nodes stay in blocks"),
            ),
        ),
    ),
    after=(
        Rewrite(fuse_activations, "a tiled convolution applies the activation after it"),
        NUMBERS,
    ),
    last=(
        CHEAP,
        Rewrite(fuse_chains, "remaining connected elementwise nodes become one kernel"),
        Rewrite(transpose_by_kernel, "earlier passes move and cancel Transposes"),
        SHOWN,
    ),
)
