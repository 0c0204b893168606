"""Select differentiation variables and targets by names and globs, and check the path between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from gradgraph.arguments import as_names, matching
from gradgraph.autodiff.path import Path, carries, is_tensor, reads
from gradgraph.autodiff.reverse import check_rules
from gradgraph.errors import DifferentiationError, Remedies, UnknownNameError, listed, shown, suggestion
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import is_marked_constant
from gradgraph.passes.normal import expand, has_body
from gradgraph.passes.normal.weights.verdicts import is_buffer
from gradgraph.rules import registry

Names: TypeAlias = str | Sequence[str] | None
UNUSED: Remedies = {
    "remedy": "remove it from `wrt`, or pass allow_unused=True for zeros",
    "shell": "remove it from --wrt",
}


def select(graph: ir.Graph, wrt: Names, targets: Sequence[ir.Value], inner: bool = True) -> list[ir.Value]:
    """Return the inputs and initializers that match ``wrt``, in the order of its patterns.

    If ``wrt`` is None, these are the trainable initializers, or all floating-point inputs if there are none. With
    ``inner``, a pattern that matches none of them may match inner values: outputs of the graph's nodes.
    """
    if wrt is None:
        found = trainable(graph, targets)
        if not found:
            found = [x for x in graph.inputs if carries(x)]
        if not found:
            raise DifferentiationError(
                "the model has no floating-point initializer or input to differentiate with respect to",
                remedy="name some in `wrt`",
                shell="name some with --wrt",
            )
        return found
    known = {v.name: v for v in (*graph.inputs, *graph.initializers.values()) if v.name}
    chosen: dict[ir.Value, None] = {}
    for pattern in as_names(wrt):
        values, names = known, matching(pattern, list(known))
        if not names and inner:
            values = {v.name: v for node in graph for v in node.outputs if v.name}
            names = matching(pattern, list(values))
        if not names:
            what = "input, initializer or inner value" if inner else "input or initializer"
            raise UnknownNameError(f"no {what} matches '{shown(pattern)}'{suggestion(pattern, [*known, *values])}")
        for name in names:
            value = values[name]
            if not carries(value) and name == pattern:
                raise DifferentiationError(
                    f"'{shown(name)}' {content_of(value)}, but only floating-point tensors have gradients",
                    remedy="remove it from `wrt`",
                    shell="remove it from --wrt",
                )
            if carries(value) and (name == pattern or not is_marked_constant(value)):
                chosen[value] = None
    if not chosen:
        some = ", ".join(shown(name) for name in list(known)[:12])
        raise UnknownNameError(f"no floating-point input or initializer matches {wrt!r}; choose from {some}")
    return list(chosen)


def _matching(pattern: str, known: Iterable[str]) -> list[str]:
    names = list(known)
    matches = matching(pattern, names)
    if not matches:
        raise UnknownNameError(f"no output matches '{shown(pattern)}'{suggestion(pattern, names)}")
    return matches


def trainable(graph: ir.Graph, targets: Sequence[ir.Value]) -> list[ir.Value]:
    """Return the trainable initializers: the floating-point ones that affect the targets.

    Running statistics are excluded, and constants of formulas (see ``gradgraph.passes.normal.weights.verdicts``).
    """
    floating = [v for v in graph.initializers.values() if carries(v) and not v.is_graph_input()]
    statistics = running_statistics(graph)
    candidates = [v for v in floating if not is_marked_constant(v) and v not in statistics]
    path = Path(graph, targets, candidates)
    return [v for v in candidates if v in targets or (v in path.active and path.has_reader(v))]


def running_statistics(graph: ir.Graph) -> set[ir.Value]:
    """Return the running means and variances (inputs 3 and 4 of every BatchNormalization), and marked buffers."""
    nodes = [n for n in graph if n.op_type == "BatchNormalization" and n.domain == ""]
    buffers = {v for v in graph.initializers.values() if is_buffer(v)}
    return {_before_cast(v) for n in nodes for v in n.inputs[3:5] if v is not None} | buffers


def _before_cast(value: ir.Value) -> ir.Value:
    """Return the tensor that ``value`` is a cast of, or ``value`` if no Cast computes it."""
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    return source or value


def computed_outputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the outputs that depend on an input, or all outputs if none does.

    Defaults are chosen from these outputs: an exported policy, for example, also outputs a constant version number.
    """
    reached = {v for v in graph.inputs if not v.is_initializer()}
    for node in graph:
        if any(v in reached for v in reads(node)):
            reached.update(node.outputs)
    return [v for v in graph.outputs if v in reached] or [*graph.outputs]


def target_of(graph: ir.Graph, name: str | None) -> ir.Value:
    if name is None:
        if not graph.outputs:
            raise DifferentiationError("the model has no output to differentiate")
        return computed_outputs(graph)[0]
    known = {v.name: v for v in graph.outputs} | {v.name: v for n in graph for v in n.outputs if v.name}
    if name not in known:
        raise UnknownNameError(
            f"the model has no output '{shown(name)}'{suggestion(name, [v.name or '' for v in graph.outputs])}"
        )
    return known[name]


def float_outputs(graph: ir.Graph, names: Names) -> list[ir.Value]:
    if names is None:
        found = [y for y in graph.outputs if carries(y)]
        if not found:
            raise DifferentiationError("the model has no floating-point output to differentiate")
        return list(dict.fromkeys(found))
    known = {y.name: y for y in graph.outputs if y.name}
    chosen = [known[n] for p in as_names(names) for n in _matching(p, known)]
    for y in chosen:
        if not carries(y):
            raise DifferentiationError(
                f"output '{shown(y.name)}' {content_of(y)}, but only floating-point outputs can be differentiated; "
                "choose another output"
            )
    return list(dict.fromkeys(chosen))


def content_of(value: ir.Value) -> str:
    """Return a phrase on the type of a value, to follow its name in a message: ``has dtype int64``."""
    if not is_tensor(value):
        return "is a sequence or an optional"
    return f"has dtype {'unknown' if value.dtype is None else value.dtype.name.lower()}"


def check_scalar(target: ir.Value) -> None:
    """Raise an error unless ``target`` is a floating-point tensor of one element; unknown sizes are accepted."""
    if not carries(target) or not is_tensor(target):
        raise DifferentiationError(
            f"output '{shown(target.name)}' {content_of(target)}, but a gradient needs a floating-point scalar; choose "
            "another output"
        )
    shape = Var(Builder(), target).shape
    if shape is not None and any(d not in (1, None) for d in shape):
        raise DifferentiationError(
            f"output '{shown(target.name)}' has shape {list(shape)}, but a gradient needs a scalar",
            remedy="reduce it to one element (mean, sum or a loss), or use vjp",
            shell="reduce it to one element (mean, sum or a loss)",
        )


def seed_of(op: Builder, target: ir.Value) -> Var:
    """Return the cotangent of a scalar: a one in the shape of ``target``.

    If this shape is unknown, the graph fails at run time for a target of several elements.
    """
    y = op.wrap(target)
    known = y.shape is not None and None not in y.shape
    return op.ones_like(y) if known else op.like(op.Reshape(op.const([1], y.dtype), op.shape(y)), y)


# --- the path ------------------------------------------------------------------------------------------


def find_path(
    model: ir.Model,
    targets: Sequence[ir.Value],
    wrt: Sequence[ir.Value],
    allow_unused: bool = False,
    leave_out: Callable[[Sequence[str]], Remedies] = lambda names: UNUSED,
) -> Path:
    """Return the path from ``wrt`` to ``targets``, after replacing operators without a rule by their function bodies.

    A target, or an inner value in ``wrt``, that such an operator computes is replaced by a new value of the same name,
    so use ``path.targets`` and ``path.wrt``.

    Args:
        model: the model in normal form; changed in place.
        targets: the values to differentiate.
        wrt: the values to differentiate with respect to.
        allow_unused: accept values in ``wrt`` that no target depends on.
        leave_out: called with the names of values that no target depends on; returns the remedies for the error.

    Raises:
        DifferentiationError: no target depends on a value in ``wrt``.
        UnsupportedOperatorError: an operator on the path has no gradient rule.
    """
    names = [t.name for t in targets]
    asked: set[ir.Node] = set()  # each node once: ONNX defines function bodies for some inputs of an operator only
    while True:
        path = Path(model.graph, targets, wrt)
        bodies = [n for n in path.every_node if registry.rule_of(n) is None and has_body(n) and n not in asked]
        if not bodies:
            break
        asked.update(bodies)
        expand(model, bodies)
        known = {v.name: v for n in model.graph for v in n.outputs}
        targets = [known.get(name, t) for name, t in zip(names, targets, strict=True)]
        wrt = [known.get(x.name, x) for x in wrt]
    check_rules(path)
    unused = [] if allow_unused else [x for x in path.wrt if x not in path.active]
    if unused:
        name, why = shown(unused[0].name), path.where_it_ends(unused[0])
        more = f" (nor on {listed(x.name for x in unused[1:])})" if unused[1:] else ""
        remedies = leave_out([x.name or "" for x in unused])
        raise DifferentiationError(f"the output does not depend on '{name}'{more}: {why}", **remedies)
    return path
