"""The order of the passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from gradgraph.collector import paused_collection
from gradgraph.errors import GradgraphError, ModelError
from gradgraph.files import Source, load_model
from gradgraph.normal import contrib_attention, flex_attention, ml
from gradgraph.normal.blocks import block_size, check_same
from gradgraph.normal.bodies import instantiate_body
from gradgraph.normal.branches import take_known_branches
from gradgraph.normal.consistent import check_consistent, check_forms, check_sizes
from gradgraph.normal.constants import gather_constants
from gradgraph.normal.contrib import decompose
from gradgraph.normal.defaults import write_defaults
from gradgraph.normal.edit import Editor, nodes_of
from gradgraph.normal.fake_quantization import write_fake_quantization
from gradgraph.normal.fold import fold_constants, remove_unused
from gradgraph.normal.infer import forget_lies, infer_shapes, objection
from gradgraph.normal.inline import inline_functions
from gradgraph.normal.loops import settle_states, write_conditions
from gradgraph.normal.maps import write_maps
from gradgraph.normal.names import make_names_unique
from gradgraph.normal.nchwc import has_blocks, undo_blocks
from gradgraph.normal.opset import convert_to_opset
from gradgraph.normal.padding import write_pads
from gradgraph.normal.precision import compute_in_float32
from gradgraph.normal.recurrent import write_recurrent
from gradgraph.normal.repair import repair
from gradgraph.normal.sequences import resolve_sequences
from gradgraph.normal.weights import judge_weights

assert contrib_attention and flex_attention and ml  # importing them fills the table of contrib


@paused_collection()
def normalise(
    model: Source,
    keep_inputs: bool = False,
    parameters: str | Iterable[str] | None = None,
    keep_quantization: bool = False,
    look: Callable[[ir.Model], object] = lambda read: None,
) -> ir.Model:
    """A copy of ``model`` in normal form; its inputs, outputs and initializers keep their names.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not modified, and weights are shared.
        keep_inputs: leave initializers that are also graph inputs (defaults that a caller may override) inputs.
        parameters: names that the caller asks for: these are parameters, even if they look like numbers in formulas.
        keep_quantization: leave it to the caller to ``pass_quantization``.
        look: called with the model as it was read, before anything of it changes.

    Raises:
        ModelError: the model is not well formed, a node gets what its operator does not take, or has no equivalent at
            opset 21.
    """
    read = load_model(model)
    look(read)
    with blaming(model):
        in_blocks = _rewrite(read, keep_inputs, {parameters} if isinstance(parameters, str) else set(parameters or ()))
    if not keep_quantization:
        pass_quantization(read)
    if in_blocks:
        check_same(load_model(model), read)
    return read


@contextlib.contextmanager
def blaming(model: Source) -> Iterator[None]:
    """Where code of ours stumbles over what none of the checks saw, and ONNX finds a fault in ``model``: say that.

    Raises:
        ModelError: in place of an error that is none of ours.
    """
    try:
        yield
    except GradgraphError:
        raise
    except Exception as error:
        if (words := objection(load_model(model))) is None:
            raise
        raise ModelError(f"ONNX finds a fault in the model: {words}; correct it, or export it again") from error


def _rewrite(model: ir.Model, keep_inputs: bool, parameters: set[str]) -> bool:
    """Bring ``model`` into normal form in place, but for quantization; True if it had channels in blocks."""
    if (opset := model.opset_imports.pop("ai.onnx", None)) is not None:
        model.opset_imports.setdefault("", opset)
    make_names_unique(model)
    if inline_functions(model):
        make_names_unique(model)
    check_forms(model)
    gather_constants(model, keep_inputs)
    take_known_branches(model)
    judge_weights(model, parameters)
    compute_in_float32(model)
    infer_shapes(model)
    forget_lies(model)
    check_consistent(model)
    if in_blocks := has_blocks(model):
        undo_blocks(model, block_size())
    decomposed = decompose(model)
    if convert_to_opset(model) or decomposed:
        infer_shapes(model)
    _tidy(model)
    return in_blocks


def _tidy(model: ir.Model) -> ir.Model:
    """The passes that know one opset only."""
    gather_constants(model, keep_inputs=True)
    if write_maps(model):
        infer_shapes(model)
    told = False
    # what is folded may tell shapes, which may tell more
    while repair(model) | fold_constants(model) | (news := resolve_sequences(model) | settle_states(model)):
        told |= news
        take_known_branches(model)
        gather_constants(model, keep_inputs=True)
        infer_shapes(model)
    if told:  # what could not be known before: of elements that other operators read now, and in bodies of loops
        forget_lies(model)
        check_sizes(model)
    if write_recurrent(model):
        infer_shapes(model)
    write_defaults(nodes_of(model))
    if write_pads(model):
        write_defaults(nodes_of(model))
        infer_shapes(model)
        forget_lies(model)
    write_conditions(model)
    remove_unused(model)
    make_names_unique(model)
    return model


def pass_quantization(model: ir.Model) -> None:
    """Where straight_through asks for it, write QuantizeLinear and DequantizeLinear as arithmetic, in place."""
    if write_fake_quantization(model):
        write_defaults(nodes_of(model))
        infer_shapes(model)
        remove_unused(model)


def expand(model: ir.Model, nodes: Iterable[ir.Node]) -> bool:
    """Replace ``nodes`` of a normal-form ``model`` in place by their operators' function bodies, in normal form again.

    Returns:
        True if every one of them had a body; those without stay as they are.
    """
    editor = Editor(model)
    done = []
    for node in nodes:
        outputs = instantiate_body(editor.op, node)
        done.append(outputs is not None)
        if outputs is not None:
            for new in editor.replace(node, *outputs):
                new.version = None
    if any(done):
        make_names_unique(model)
        infer_shapes(model)
        _tidy(model)
    return all(done)
