"""Losses that expect logits while the model outputs probabilities: they read the logits before Softmax or Sigmoid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from gradgraph.autodiff.probabilities import Probabilities, probabilities
from gradgraph.building.outputs import output_of, value_names
from gradgraph.building.terms import Term
from gradgraph.errors import Finding, shown
from gradgraph.graph.builder import Builder, all_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.losses import class_axis


def logits_behind(graph: ir.Graph, terms: Sequence[Term], named: bool) -> tuple[dict[str, str], list[Finding]]:
    """Map outputs of probabilities to the names of the logits that losses read instead; also return findings.

    There is a finding for each output of probabilities. Outputs that the user ``named`` are not replaced.
    """
    taken: dict[str, str] = {}
    findings = []
    for term in terms:
        name = term.outputs[0] if term.outputs else ""
        found = probabilities(output_of(graph, name)) if term.loss.activation or term.loss.of_logs else None
        if found is None:
            continue
        doubt = _doubt(term, name, found)
        logits = found.source if found.kind == term.loss.activation and _over_classes(graph, term, found) else None
        if logits is None or not logits.name or (named and found.logits is None):
            findings.append(doubt)
        elif named:
            findings.append(replace(doubt, remedy=f"name the logits that it is computed from, '{shown(logits.name)}'"))
        else:
            moved = ", reshaped in the same way" * bool(found.moves)
            read = f"{'the negative of ' * found.negated}'{shown(logits.name)}'{moved}"
            taken[name] = _as_output(graph, logits, found)
            findings.append(replace(doubt, remedy=f"the loss reads the logits that it is computed from, {read}"))
    return taken, findings


def _as_output(graph: ir.Graph, logits: ir.Value, found: Probabilities) -> str:
    """Return the name of an output with the logits, with axes in the order of the probabilities.

    Nodes for this are added if necessary.
    """
    assert logits.name is not None
    if found.logits is not None:
        return logits.name
    op = Builder(value_names(graph))
    at = op.wrap(logits)
    at = op.like(-at, at) if found.negated else at
    for move in found.moves:
        others = [op.wrap(x) for x in move.inputs[1:]]
        (at,) = all_of(op.emit(move.op_type, at, *others, **{a.name: a.value for a in move.attributes.values()}))
        at.value.shape = move.outputs[0].shape
    name = op.nodes[-1].name = at.value.name = op.fresh(f"{logits.name}.{'moved' if found.moves else 'negative'}")
    op.finish(graph)
    return name


def reading(terms: Sequence[Term], taken: Mapping[str, str]) -> tuple[Term, ...]:
    """Return ``terms`` that read logits: ``taken`` maps names of outputs to names of logits."""
    return tuple(replace(t, outputs=tuple(taken.get(name, name) for name in t.outputs)) for t in terms)


def _over_classes(graph: ir.Graph, term: Term, found: Probabilities) -> bool:
    """Whether the probabilities are normalised over the class axis of the loss; True for a Sigmoid."""
    shape = shape_of(output_of(graph, term.outputs[0]))
    return found.kind != "Softmax" or (shape is not None and found.axis == class_axis(shape, term.loss.axis))


def _doubt(term: Term, name: str, found: Probabilities) -> Finding:
    subject, loss = f"output '{shown(name)}'", term.loss
    if loss.of_logs:
        expected = f"{loss.name} takes their logarithm"
        return Finding(subject, "contains probabilities", expected, "use a LogSoftmax, or pass logits to cross_entropy",
                       "warning")  # fmt: skip
    same = found.kind == loss.activation
    expected = f"{loss.name} {'applies one itself' if same else f'applies a {loss.activation}'}"
    remedy = "pass it the logits: name an output that has them, or cut the model there (gradgraph surgery)"
    return Finding(subject, f"ends in a {found.kind}", expected, remedy, "warning")
