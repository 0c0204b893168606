"""The order of the passes that convert a model to normal form, each with the reason for its place."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import onnx_ir as ir

from gradgraph.passes.normal.dialects.contrib import decompose
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.functions.inline import inline_functions
from gradgraph.passes.normal.opsets.opset import convert_old, convert_to_opset
from gradgraph.passes.normal.simplifying.fold import fold_constants, remove_unused
from gradgraph.passes.normal.sizes.infer import correct_shapes, infer_shapes
from gradgraph.passes.normal.sizes.loop_states import settle_states
from gradgraph.passes.normal.sizes.wrong_body_shapes import drop_wrong_body_shapes
from gradgraph.passes.normal.sizes.wrong_dim_names import rename_wrong_dims
from gradgraph.passes.normal.spelling.branches import take_known_branches
from gradgraph.passes.normal.spelling.constants import gather_constants
from gradgraph.passes.normal.spelling.defaults import write_defaults
from gradgraph.passes.normal.spelling.explicit_pads import write_pads
from gradgraph.passes.normal.spelling.fake_quantization import write_fake_quantization
from gradgraph.passes.normal.spelling.names import make_names_unique, write_one_domain
from gradgraph.passes.normal.spelling.padded_convolutions import merge_pads
from gradgraph.passes.normal.spelling.precision import compute_in_float32
from gradgraph.passes.normal.spelling.recurrent_layers import write_recurrent
from gradgraph.passes.normal.spelling.repair import repair, write_conditions
from gradgraph.passes.normal.spelling.sequence_maps import write_maps
from gradgraph.passes.normal.spelling.sequences import resolve_sequences
from gradgraph.passes.normal.validating.consistent import check_consistent, check_inlined, check_inputs, check_sizes
from gradgraph.passes.normal.weights.verdicts import judge_weights
from gradgraph.passes.rewrites import Rewrite, run


def reading(parameters: Collection[str]) -> tuple[Rewrite, ...]:
    """Return the passes that convert a model of any opset to opset 21; for the arguments see ``normalise``."""
    judge = partial(judge_weights, asked_for=parameters)
    return (
        Rewrite(write_one_domain, "later passes support only one of the two names of ONNX's domain"),
        Rewrite(make_names_unique, "findings refer to nodes by name, and inference to values by name"),
        Rewrite(
            inline_functions,
            "nodes of functions are handled like all others; their attributes may come from the call",
            then=(make_names_unique, check_inlined),
        ),
        Rewrite(check_inputs, "all types that nodes do not compute must be known before they are inferred"),
        Rewrite(gather_constants, "later passes look for constant conditions and weights among the initializers"),
        Rewrite(convert_old, "ONNX infers few types and shapes before opset 7"),
        Rewrite(take_known_branches, "tensors of a dead branch are not weights, and its sizes do not matter"),
        Rewrite(judge, "weights still have the names and readers that the exporter wrote"),
        Rewrite(compute_in_float32, "types are final before they are inferred and checked"),
        Rewrite(infer_shapes, "checks compare sizes, and forms of operators depend on them"),
        Rewrite(correct_shapes, "a wrong declared size would be reported as a fault of a node"),
        Rewrite(
            drop_wrong_body_shapes,
            "shapes that enter bodies are known, and their wrong declarations have been corrected",
            then=(infer_shapes, correct_shapes),
        ),
        Rewrite(check_consistent, "findings name the author's nodes, not our rewrites"),
        Rewrite(_write_standard_operators, "later passes support one opset only", then=(infer_shapes,)),
    )


def _settle(model: ir.Model) -> bool:
    """Repeat the passes in ``ROUND`` until nothing changes; return True if sequences or loop states were resolved."""
    learned = False
    while changed := run(ROUND, model):
        learned |= resolve_sequences in changed or settle_states in changed
        run(AFTER_A_ROUND, model)
    return learned


def _write_standard_operators(model: ir.Model) -> bool:
    """Rewrite operators of other domains, then of other opsets, in this order; return True on any change."""
    return any([decompose(model), convert_to_opset(model)])


def _write_all_defaults(model: ir.Model) -> None:
    write_defaults(nodes_of(model))


AT_ONE_OPSET = (
    Rewrite(gather_constants, "forms of operators and function bodies add Constant nodes"),
    Rewrite(write_maps, "a SequenceMap is a Loop, whose states are settled next", then=(infer_shapes,)),
    Rewrite(
        _settle,
        "attributes depend on ranks, and pads on sizes; newly known sizes are checked, also in bodies of loops",
        then=(correct_shapes, check_sizes),
    ),
    Rewrite(
        write_recurrent, "the sizes of weights, which determine those of layers, are settled", then=(infer_shapes,)
    ),
    Rewrite(_write_all_defaults, "explicit pads need strides and dilations"),
    Rewrite(write_pads, "all sizes that can be are known", then=(_write_all_defaults, infer_shapes, correct_shapes)),
    Rewrite(merge_pads, "pads, strides and dilations are explicit"),
    Rewrite(rename_wrong_dims, "all sizes that can be are known, and losses derive target sizes from outputs"),
    Rewrite(write_conditions, "no Loop is written later; some runtimes read a missing condition as false"),
    Rewrite(remove_unused, "every pass above leaves unread nodes behind"),
    Rewrite(make_names_unique, "the passes above have written new nodes"),
)
ROUND = (
    Rewrite(repair, "valid axes and sizes can be folded"),
    Rewrite(fold_constants, "constants determine shapes, indices of sequences and conditions"),
    Rewrite(resolve_sequences, "lengths and indices of sequences are known once folded"),
    Rewrite(settle_states, "a loop preserves the shapes of its states"),
)
AFTER_A_ROUND = (
    Rewrite(drop_wrong_body_shapes, "the shapes that enter a body may be known now"),
    Rewrite(take_known_branches, "a condition may have become constant"),
    Rewrite(gather_constants, "branches may have contained Constant nodes, which the next round reads as initializers"),
    Rewrite(infer_shapes, "known sizes determine others"),
)


def quantization(trained: Collection[str] | None) -> tuple[Rewrite, ...]:
    """Return the passes that let gradients pass through quantization; for ``trained`` see ``pass_quantization``."""
    return (
        Rewrite(
            partial(write_fake_quantization, trained=trained),
            "on request only; checks and verdicts must see the operators as in the file",
            then=(_write_all_defaults, infer_shapes, remove_unused),
        ),
    )
