"""The order of the passes that bring a model to its normal form, each with its reason."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import onnx_ir as ir

from gradgraph.passes.normal.dialects.contrib import decompose
from gradgraph.passes.normal.dialects.nchwc_machine import undo_machine_blocks
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.functions.inline import inline_functions
from gradgraph.passes.normal.opsets.opset import convert_to_opset
from gradgraph.passes.normal.simplifying.fold import fold_constants, remove_unused
from gradgraph.passes.normal.sizes.false_entries import forget_false_entries
from gradgraph.passes.normal.sizes.false_names import forget_false_names
from gradgraph.passes.normal.sizes.infer import forget_lies, infer_shapes
from gradgraph.passes.normal.sizes.loop_states import settle_states
from gradgraph.passes.normal.spelling.branches import take_known_branches
from gradgraph.passes.normal.spelling.constants import gather_constants
from gradgraph.passes.normal.spelling.defaults import write_defaults
from gradgraph.passes.normal.spelling.explicit_pads import write_pads
from gradgraph.passes.normal.spelling.fake_quantization import write_fake_quantization
from gradgraph.passes.normal.spelling.loop_conditions import write_conditions
from gradgraph.passes.normal.spelling.names import make_names_unique, write_one_domain
from gradgraph.passes.normal.spelling.precision import compute_in_float32
from gradgraph.passes.normal.spelling.recurrent_layers import write_recurrent
from gradgraph.passes.normal.spelling.repair import repair
from gradgraph.passes.normal.spelling.sequence_maps import write_maps
from gradgraph.passes.normal.spelling.sequences import resolve_sequences
from gradgraph.passes.normal.validating.consistent import check_consistent, check_forms, check_sizes
from gradgraph.passes.normal.weights.verdicts import judge_weights
from gradgraph.passes.rewrites import Rewrite, run


def reading(keep_inputs: bool, parameters: Collection[str]) -> tuple[Rewrite, ...]:
    """The passes that read any model, up to one opset; for the arguments see ``normalise``."""
    gather = partial(gather_constants, keep_inputs=keep_inputs)
    judge = partial(judge_weights, asked_for=parameters)
    return (
        Rewrite(write_one_domain, "all that follows knows the domain of ONNX by one of its two names"),
        Rewrite(make_names_unique, "findings name nodes, and inference goes by names of values"),
        Rewrite(inline_functions, "nodes of functions are read like all others", then=(make_names_unique,)),
        Rewrite(check_forms, "the next passes read inputs and attributes without asking whether they are there"),
        Rewrite(gather, "conditions and weights are found in one place"),
        Rewrite(
            take_known_branches, "tensors of a branch that is never taken are no weights, and its sizes cannot be wrong"
        ),
        Rewrite(judge, "names and readers of weights are still those that the exporter wrote"),
        Rewrite(compute_in_float32, "types are final before they are inferred and checked"),
        Rewrite(infer_shapes, "the checks compare sizes, and forms of operators ask for them"),
        Rewrite(forget_lies, "a size that the file declares wrongly would be reported as the fault of a node"),
        Rewrite(forget_false_entries, "what enters bodies is known without lies", then=(infer_shapes, forget_lies)),
        Rewrite(check_consistent, "a finding names what the author of the file wrote, not what we write for it"),
        Rewrite(undo_machine_blocks, "operators on blocks of channels mean standard ones on plain channels"),
        Rewrite(_write_standard_operators, "all that follows knows one opset only", then=(infer_shapes,)),
    )


def _settle(model: ir.Model) -> bool:
    """Repeat ``ROUND`` while it changes anything; True if sequences or loops told what nobody could know before."""
    told = False
    while changed := run(ROUND, model):
        told |= resolve_sequences in changed or settle_states in changed
        run(AFTER_A_ROUND, model)
    return told


def _write_standard_operators(model: ir.Model) -> bool:
    """Other domains first: their operators are written with those of any opset. True if either changed anything."""
    return any([decompose(model), convert_to_opset(model)])


def _write_all_defaults(model: ir.Model) -> None:
    write_defaults(nodes_of(model))


_gather_kept = partial(gather_constants, keep_inputs=True)  # inputs that may go have gone

AT_ONE_OPSET = (
    Rewrite(_gather_kept, "forms of operators and function bodies bring Constant nodes"),
    Rewrite(write_maps, "a SequenceMap is a Loop, whose states are settled next", then=(infer_shapes,)),
    Rewrite(
        _settle,
        "attributes depend on ranks, and pads on sizes; sizes that are news are checked now, also in bodies of loops",
        then=(forget_lies, check_sizes),
    ),
    Rewrite(write_recurrent, "the sizes of weights, which tell those of layers, are settled", then=(infer_shapes,)),
    Rewrite(_write_all_defaults, "explicit pads need strides and dilations"),
    Rewrite(write_pads, "sizes are as known as they get", then=(_write_all_defaults, infer_shapes, forget_lies)),
    Rewrite(forget_false_names, "sizes are as known as they get, and losses take those of their targets from outputs"),
    Rewrite(write_conditions, "no Loop is written after it; some runtimes take a condition that is absent for false"),
    Rewrite(remove_unused, "every pass above leaves nodes behind that nobody reads"),
    Rewrite(make_names_unique, "the passes above have written new nodes"),
)
ROUND = (
    Rewrite(repair, "proper axes and sizes can be folded"),
    Rewrite(fold_constants, "known numbers tell shapes, places in sequences and conditions"),
    Rewrite(resolve_sequences, "a number of elements and their places are known once they are folded"),
    Rewrite(settle_states, "a loop keeps shapes that it is given"),
)
AFTER_A_ROUND = (
    Rewrite(forget_false_entries, "it may be known now what enters a body"),
    Rewrite(take_known_branches, "a condition may have become known"),
    Rewrite(_gather_kept, "so that branches bring no Constant nodes and the next round finds all numbers"),
    Rewrite(infer_shapes, "what is known of some sizes tells others"),
)
QUANTIZATION = (
    Rewrite(
        write_fake_quantization,
        "on request only; checks and verdicts have seen the pair of operators as the file has it",
        then=(_write_all_defaults, infer_shapes, remove_unused),
    ),
)
