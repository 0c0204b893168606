"""The training model: a model with its loss, the gradients of its parameters, and their accumulation buffers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.reverse import backward
from gradgraph.autodiff.select import check_scalar, find_path, seed_of, target_of
from gradgraph.backends.functions import write_functions
from gradgraph.building.selection import as_input
from gradgraph.compat.onnxruntime_training.graphs import value_names as names
from gradgraph.errors import CompatibilityError, DifferentiationError, UnknownNameError, listed, shown, suggestion
from gradgraph.files.models import to_proto
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import is_marked_constant
from gradgraph.graph.prune import prune
from gradgraph.machine.garbage_collection import paused_collection
from gradgraph.passes.normal import blaming, normalise
from gradgraph.passes.normal.simplifying.clean import clean_up

log = logging.getLogger("gradgraph")


@paused_collection()
def training_graph(
    model: onnx.ModelProto, outputs: Sequence[str], trained: Collection[str], frozen: Collection[str]
) -> onnx.ModelProto:
    """Return the training model of ``model``, which is not changed; its parameters are initializers.

    The inputs are the inputs of the model, the parameters (frozen parameters only if nodes read them and they are not
    marked as constants), a buffer for each gradient, and a flag whether to reset the gradients. The outputs are
    ``outputs``, the first of which is the loss; then for each trained parameter the sum of buffer and gradient; then
    the next running statistics of BatchNormalization nodes in training mode.

    Raises:
        UnknownNameError: if the model does not have one of the trained parameters.
        DifferentiationError, UnsupportedOperatorError: if a trained parameter has no gradient.
    """
    if not trained:
        raise CompatibilityError(
            "no parameters to train",
            remedy="pass names in requires_grad; candidates are [t.name for t in model.graph.initializer]",
        )
    with blaming(model):
        work = normalise(model, parameters=trained)
        graph = work.graph
        chosen = _parameters(graph, trained, frozen)
        op = builder_for(work, named_operators=True)
        statistics = _moved_statistics(op, graph)
        target = target_of(graph, outputs[0])
        check_scalar(target)
        path = find_path(work, [target], chosen, allow_unused=True)
        for value in chosen:
            if value not in path.active:
                raise DifferentiationError(
                    f"the loss does not depend on '{shown(value.name)}': {path.where_it_ends(value)}; remove it from "
                    "requires_grad"
                )
        (target,) = path.targets
        gradients = backward(op, path, {target: seed_of(op, target)})
        reset = ir.Value(name=op.fresh(names.RESET), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape((1,)))
        begins = op.Squeeze(op.wrap(reset), [0])
        rows = [_accumulated(op, p, gradients.get(p), begins) for p in chosen]
        op.finish(graph)
        held = {**{v.name: v for v in graph.outputs}, outputs[0]: target}
        graph.inputs[:] = [*_inputs(graph, chosen, model), *(buffer for buffer, _ in rows), reset]
        graph.outputs[:] = [*(held[name] for name in outputs), *(total for _, total in rows), *statistics]
        return to_proto(write_functions(clean_up(work)))


def _parameters(graph: ir.Graph, trained: Collection[str], frozen: Collection[str]) -> list[ir.Value]:
    """Return the trained parameters, and turn frozen parameters into inputs, except values marked as constants."""
    known = {v.name or "": v for v in (*graph.inputs, *graph.initializers.values())}
    for name in trained:
        if name not in known:
            raise UnknownNameError(f"the model has no parameter '{shown(name)}'{suggestion(name, graph.initializers)}")
    for name in frozen:
        value = graph.initializers.get(name)
        if value is not None and value.uses() and carries(value) and not is_marked_constant(value):
            as_input(graph, name)
    return [v for name, v in known.items() if name in trained]


def _inputs(graph: ir.Graph, trained: Sequence[ir.Value], model: onnx.ModelProto) -> list[ir.Value]:
    """Turn trained parameters into inputs; return all inputs: the model's own, then parameters in its order."""
    for value in trained:
        if value.name in graph.initializers:
            as_input(graph, value.name or "")
    order = {t.name: i for i, t in enumerate(model.graph.initializer)}
    return sorted(graph.inputs, key=lambda v: order.get(v.name or "", -1))


def _moved_statistics(op: Builder, graph: ir.Graph) -> list[ir.Value]:
    """Return the updated running statistics of BatchNormalization nodes in training mode, if they are parameters."""
    found: list[ir.Value] = []
    still: list[str] = []
    for node in graph:
        if (node.domain, node.op_type) != ("", "BatchNormalization"):
            continue
        if not node.attributes["training_mode"].as_int():
            still.append(node.name or "")
            continue
        for i, value in enumerate(node.inputs[3:], 1):
            if value is not None and value.is_graph_input():
                new = op.output(op.wrap(node.outputs[0]), i)
                moved = op.Identity(new, name=names.following(value.name or "")).value
                moved.type, moved.shape = value.type, value.shape
                found.append(moved)
    if still:
        log.warning(
            "BatchNormalization in evaluation mode (%s) trains with its running statistics; export the model in "
            "training mode to use those of the batch, as onnxruntime-training always does",
            listed(still, 3),
        )
    return found


def _accumulated(op: Builder, parameter: ir.Value, gradient: Var | None, begins: Var) -> tuple[ir.Value, ir.Value]:
    """Return the gradient buffer of a parameter, and the sum of buffer and gradient (the gradient if ``begins``)."""
    name = parameter.name or ""
    if gradient is None:
        raise DifferentiationError(
            f"no gradient reaches '{shown(name)}': it is read only through inputs that have no derivative; remove it "
            "from requires_grad"
        )
    buffer = ir.Value(name=op.fresh(names.buffer(name)), type=parameter.type, shape=parameter.shape)
    total = op.Where(begins, gradient, op.wrap(buffer) + gradient, name=names.accumulated(name)).value
    total.type, total.shape = parameter.type, parameter.shape
    return buffer, total


def specialised(model: onnx.ModelProto, resets: bool) -> onnx.ModelProto:
    """Return a training model without the reset flag: gradients replace the buffers (``resets``) or are added.

    With ``resets``, the buffers are not inputs.
    """
    work: ir.Model = ir.from_proto(model)
    graph = work.graph
    kept = 1 if resets else 2
    for node in [v.producer() for v in graph.outputs if names.parameter_of_accumulated(v.name or "") is not None]:
        assert node is not None and node.op_type == "Where"
        value = node.inputs[kept]
        node.resize_inputs(0)
        node.op_type = "Identity"
        node.resize_inputs(1)
        node.replace_input_with(0, value)
    prune(work)
    graph.inputs[:] = [
        v for v in graph.inputs
        if v.uses() or (v.name != names.RESET and names.parameter_of_buffer(v.name or "") is None)
    ]  # fmt: skip
    return to_proto(work)
