"""Named steps that share their state, such as the generator and discriminator of a GAN, and their manifest entries."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gradgraph.arguments import as_names, matching
from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.path import reads
from gradgraph.autodiff.select import trainable
from gradgraph.building.draft import Part
from gradgraph.building.step_options import BuildOptions
from gradgraph.data.record.specs import TargetSpec
from gradgraph.errors import BuildError, Finding, listed, shown
from gradgraph.graph.prune import needed
from gradgraph.step.manifest import PartSpec, StateSpec

_APART = 1_000_003  # distance between the seeds of two steps
_NAMED = 5  # weights listed in a note


def parts_of(options: BuildOptions) -> list[Part]:
    """Return the named steps, or the only step under the name "".

    Each step has its own seed, so that the random numbers of different steps are independent.
    """
    if options.steps is None:
        return [Part("", options, options.seed)]
    return [
        Part(name, own, options.seed + number * _APART if own.seed is None else own.seed)
        for number, (name, own) in enumerate(options.steps.items())
    ]


def keep_needed(part: Part) -> None:
    """Remove the nodes of the model that the objective of ``part`` does not need, in place.

    Without these nodes, running statistics of networks that this step does not use stay unchanged.
    """
    model, trial = part.model, part.model.clone()
    op = builder_for(trial)
    results = part.objective.emit(op, trial.graph).results
    read = part.objective.names_read
    results += [v for node in trial.graph for v in node.outputs if v.name in read]
    kept, _ = needed([*trial.graph, *op.nodes], results, lambda node: node.outputs, reads)
    names = {v.name for node in kept for v in node.outputs}
    gone = [node for node in model.graph if not any(v.name in names for v in node.outputs)]
    ended = {v for node in gone for v in node.outputs}
    model.graph.outputs[:] = [v for v in model.graph.outputs if v not in ended]
    model.graph.remove(gone, safe=True)


def untrained(parts: Sequence[Part], trained: Collection[str]) -> list[Finding]:
    """Return a warning about weights that no step trains or freezes; empty if there are none."""
    usual = list(dict.fromkeys(v.name for p in parts for v in trainable(p.model.graph, p.read) if v.name))
    frozen = {n for p in parts for glob in as_names(p.options.freeze) for n in matching(glob, usual)}
    left = [name for name in usual if name not in trained and name not in frozen]
    if not left:
        return []
    one = len(left) == 1
    return [
        Finding(
            f"the {'weight' if one else 'weights'} {listed(left, _NAMED)}",
            f"{'is' if one else 'are'} not trained by any step",
            f"{'keeps its value' if one else 'keep their values'}",
            f"add {'it' if one else 'them'} to train of a step, or to freeze if that is intended",
            "warning",
        )
    ]


def part_specs(parts: Sequence[Part], inputs: Collection[str], states: Collection[str]) -> dict[str, PartSpec]:
    """Return each step's manifest entry; ``inputs`` are all inputs and targets, ``states`` all state tensors."""
    specs = {}
    for part in parts:
        objective, optimizer, state = part.objective, part.optimizer, part.state
        taken = [v.name or "" for v in part.model.graph.inputs]
        specs[part.name] = PartSpec(
            inputs=tuple(n for n in taken if n in inputs),
            loss={"name": objective.name, "arguments": dict(objective.arguments)},
            **part.figures,
            reports=tuple(state.reports),
            optimizer={"name": optimizer.name, "arguments": dict(optimizer.arguments)},
            hyperparameters=state.hyperparameters,
            reads=tuple(n for n in taken if n in states),
            writes=tuple(s.name for s in state.specs),
            trainable=tuple(part.trained),
        )
    return specs


def targets_of_all(parts: Sequence[Part]) -> tuple[TargetSpec, ...]:
    """Return the targets of all steps, each once.

    Raises:
        BuildError: if two steps use the same name for different targets.
    """
    found: dict[str, TargetSpec] = {}
    for spec in (spec for part in parts for spec in part.objective.targets):
        if found.setdefault(spec.name, spec) != spec:
            raise BuildError(
                f"two steps have targets called '{shown(spec.name)}' that differ in type, shape or classes; give one "
                "of "
                "the steps another target_name"
            )
    return tuple(found.values())


def states_of_all(parts: Sequence[Part], order: Sequence[str]) -> tuple[StateSpec, ...]:
    """Return the state tensors of all steps, each once: parameters first, in the order of the model."""
    found = {s.name: s for part in parts for s in part.state.specs}
    weights = [found.pop(name) for name in order if name in found and found[name].kind == "parameter"]
    return (*weights, *found.values())


def averages_of_all(parts: Sequence[Part]) -> dict[str, str]:
    """Return the averages of all steps: for each averaged weight, the name of the state tensor with its average.

    Raises:
        BuildError: if two steps average the same weight.
    """
    found: dict[str, str] = {}
    for name, average in (pair for part in parts for pair in part.state.averages.items()):
        if name in found:
            raise BuildError(
                f"two steps average the weight '{shown(name)}', but evaluation can read only one average; average it "
                "in "
                "one of the steps only"
            )
        found[name] = average
    return found
