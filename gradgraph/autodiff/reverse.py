"""The backward pass: rules are applied in reverse order, and the cotangents of all readers of a value are added."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from gradgraph.autodiff.path import Path, carries
from gradgraph.autodiff.subgraph import BodiesOnPath
from gradgraph.errors import DifferentiationError, Finding, UnsupportedOperatorError, listed, shown
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.checks import FINDINGS_LIMIT, describe
from gradgraph.graph.scoped_names import scoped
from gradgraph.graph.shapes import clash
from gradgraph.rules import registry
from gradgraph.rules.broadcasting import unbroadcast
from gradgraph.rules.composites.table import Call, calls
from gradgraph.rules.containers import added, is_sequence

Override = Callable[[Sequence[Var | None]], Sequence[Var | None]]


def backward(
    op: Builder,
    path: Path,
    seeds: Mapping[ir.Value, Var | Sequence[Var]],
    begins: dict[ir.Node, int] | None = None,
    overrides: Mapping[ir.Node, Override] | None = None,
) -> dict[ir.Value, Var]:
    """Emit the backward pass along ``path``; return the gradient of each of ``path.wrt`` that has one.

    Args:
        op: the builder that receives the nodes.
        path: the nodes to differentiate; each must have a rule (see ``check_rules``).
        seeds: the cotangent of each target value (or several, which are summed).
        begins: receives, for each node of the path, the index in ``op.nodes`` where its gradient begins.
        overrides: for single nodes, functions that are called instead of their rules, with the cotangents of the
            outputs; each returns one gradient (or None) per input.
    """
    scope = op.scope
    cotangents: dict[ir.Value, list[Var]] = defaultdict(list)
    for target, seed in seeds.items():
        cotangents[target].extend(all_of(seed))
    wanted = set(path.wrt)
    composites = calls(path.nodes, path.active, wanted)
    for node in reversed(path.nodes):
        if begins is not None:
            begins[node] = len(op.nodes)
        dys = [_total(op, cotangents.pop(y, []), y) for y in node.outputs]
        if any(dy is not None for dy in dys):
            cotangents.update(
                (y, [dy]) for y, dy in zip(node.outputs, dys, strict=True) if dy is not None and y in wanted
            )
            op.scope = scoped("grad", node.name or "")
            known, own = composites.get(node), overrides.get(node) if overrides else None
            if own is not None:
                pulled: Iterable[tuple[ir.Value, Var]] = _by_override(node, own(dys))
            else:
                pulled = _by_rule(op, path, node, dys) if known is None else _by_composite(op, known, node, dys[0])
            for x, dx in pulled:
                if x in path.active:
                    cotangents[x].append(dx)
    op.scope = scope
    totals = {x: _total(op, cotangents[x], x) for x in path.wrt if x in cotangents}
    return {x: dx for x, dx in totals.items() if dx is not None}


def _total(op: Builder, terms: Sequence[Var], value: ir.Value) -> Var | None:
    if terms and is_sequence(terms[0]):
        return functools.reduce(functools.partial(added, op), terms)
    return op.like(op.sum_of(terms), op.wrap(value)) if terms else None


def _by_rule(op: Builder, path: Path, node: ir.Node, dys: Sequence[Var | None]) -> Iterator[tuple[ir.Value, Var]]:
    """Yield each input of ``node``, and each value captured by its bodies, with the gradient that the rule returns."""
    rule = registry.rule_of(node)
    assert rule is not None
    if not rule.whole and (dys[0] is None or any(dy is not None for dy in dys[1:])):
        extra = next(y.name for y, dy in zip(node.outputs[1:], dys[1:], strict=True) if dy is not None)
        raise UnsupportedOperatorError(
            f"{describe(node)} has a gradient rule for its first output only, "
            f"but the target reads '{shown(extra)}' too; remove that output from the target"
        )
    bodies = BodiesOnPath(path, node, op, backward) if rule.captures else None
    sources = [*node.inputs, *(x.value for x in bodies.captured)] if bodies is not None else node.inputs
    for x, dx in zip(sources, rule(op, node, dys, bodies), strict=True):
        if x is None or dx is None or not (carries(x) or x.type is None):
            continue
        if rule.broadcasts:
            dx = unbroadcast(op, dx, op.wrap(node.outputs[0]), op.wrap(x))
        # the gradient of a sequence is a sequence, that of an optional a tensor
        yield x, dx if isinstance(x.type, ir.SequenceType | ir.OptionalType) else _fitting(op, node, x, dx)


def _by_override(node: ir.Node, gradients: Sequence[Var | None]) -> Iterator[tuple[ir.Value, Var]]:
    """Yield each input of ``node`` with the gradient that replaces the one of its rule."""
    for x, dx in zip(node.inputs, gradients, strict=False):
        if x is not None and dx is not None:
            yield x, dx


def _by_composite(op: Builder, composite: Call, node: ir.Node, dy: Var | None) -> Iterator[tuple[ir.Value, Var]]:
    """Yield each input of a composite with its gradient; ``node`` is the composite's last node."""
    assert dy is not None
    gradients = composite.gradients(op, dy, op.wrap(node.outputs[0]))
    for x, dx in zip(composite.found.inputs, gradients, strict=True):
        if x is not None and dx is not None and carries(x):
            yield x, _fitting(op, node, x, dx)


def _fitting(op: Builder, node: ir.Node, value: ir.Value, dx: Var) -> Var:
    """Return ``dx`` with the type and shape of ``value``, an input of ``node``; raise an error if they do not match."""
    x = op.wrap(value)
    known = dx.value.shape is not None and x.value.shape is not None
    wrong = known and (dx.rank != x.rank or clash(dx.shape or (), x.shape or ()))
    if dx.value.dtype not in (None, x.dtype) or wrong:
        raise DifferentiationError(
            f"the gradient rule of {describe(node)} returned {dx!r} for the input {x!r}; "
            "a gradient must have its input's type and shape: either the model declares a wrong shape (export it "
            "again), or the rule has a bug"
        )
    return op.like(dx, x)


def check_rules(path: Path) -> None:
    """Raise one error that lists every operator on the path without a rule."""
    missing: dict[str, list[ir.Node]] = defaultdict(list)
    for node in path.every_node:
        if registry.rule_of(node) is None:
            missing[f"{node.domain + '.' if node.domain else ''}{node.op_type}"].append(node)
    if missing:
        kinds = ", ".join(
            f"{shown(kind)} (node{'s' if len(nodes) > 1 else ''} {listed([n.name for n in nodes], most=3)})"
            f"{_because(nodes[0])}"
            for kind, nodes in missing.items()
        )
        every = [node for nodes in missing.values() for node in nodes]
        why = "is between an input or weight and an output"
        refusal = registry.refusal_of(every[0])
        by_default = "freeze the weights before it (--freeze), or register a rule in Python (gradgraph.extend.vjp)"
        raise UnsupportedOperatorError(
            f"no gradient rule for {kinds}",
            findings=[
                Finding(describe(node), f"has no gradient rule{_because(node)}", why, _remedy(node))
                for node in every[:FINDINGS_LIMIT]
            ],
            remedy=_remedy(every[0]),
            shell=by_default if refusal is None else refusal.remedy,
        )


def _because(node: ir.Node) -> str:
    """Return the reason for which an operator is refused, as a clause; "" if it is not in the tables."""
    refusal = registry.refusal_of(node)
    return "" if refusal is None else f", as {refusal.reason}"


def _remedy(node: ir.Node) -> str:
    refusal = registry.refusal_of(node)
    if refusal is not None:
        return refusal.remedy
    where = f', domain="{shown(node.domain)}"' if node.domain else ""
    return f'register one with gradgraph.extend.vjp("{shown(node.op_type)}"{where}), or freeze the weights before it'
