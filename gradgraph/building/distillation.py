"""What a student with a teacher minimises: ``(1 − α)·loss + α·T²·KL(teacher ‖ student)``, and hidden states matched.

A position that does not count in the loss, by its label, a mask or the weight of its sample, counts in none of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.building.measured import Written, measured
from gradgraph.building.objective import NamedLoss, Objective, output_of, renamed, value_names
from gradgraph.building.same_sizes import named_sizes
from gradgraph.building.weighted_losses import MASK, SAMPLE_WEIGHT, WeightedLosses, aligned, factor_input
from gradgraph.building.with_metrics import WithMetrics
from gradgraph.errors import BuildError, shown
from gradgraph.frontend.activations import log_softmax, softmax
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.reductions import mean, sum
from gradgraph.frontend.shaping import stack
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, op, tensor, tracing, wrap
from gradgraph.graph.builder import Builder
from gradgraph.graph.marks import TEACHER
from gradgraph.graph.shapes import shape_of
from gradgraph.step.manifest import TargetSpec


@dataclass(frozen=True)
class Imitation:
    """What ``gradgraph.surgery.teachers`` has written into a model's metadata.

    Attributes:
        pairs: names of what is compared, the student's first; the first pair has the logits.
        own: the outputs that are the student's, and no hidden states.
    """

    temperature: float
    alpha: float
    match_weight: float
    pairs: tuple[tuple[str, str], ...]
    own: tuple[str, ...]

    @property
    def values(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.pairs for name in pair))


def imitation_of(metadata: Mapping[str, str]) -> Imitation | None:
    """What a student is to imitate, if it has a teacher."""
    if TEACHER not in metadata:
        return None
    given = json.loads(metadata[TEACHER])
    pairs, own = tuple((mine, its) for mine, its in given["pairs"]), tuple(given["own"])
    return Imitation(given["temperature"], given["alpha"], given["match_weight"], pairs, own)


@dataclass(frozen=True)
class Distilled:
    """An objective, and a teacher beside it; without one, the teacher alone, and ``factors`` that weigh positions."""

    imitation: Imitation
    objective: Objective | None
    factors: tuple[TargetSpec, ...] = ()

    @property
    def name(self) -> str:
        return "distillation" if self.objective is None else self.objective.name

    @property
    def arguments(self) -> Mapping[str, Any]:
        told = {"temperature": self.imitation.temperature, "alpha": self.imitation.alpha}
        return {**(self.objective.arguments if self.objective else {}), "distillation": told}

    @property
    def outputs(self) -> Sequence[str]:
        return list(dict.fromkeys([*(self.objective.outputs if self.objective else ()), *self.imitation.values]))

    @property
    def kept(self) -> Sequence[str]:
        before = self.objective.kept if self.objective else ()
        return [*before, *(n for n in self.imitation.values if n not in self.imitation.own)]

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        return self.objective.targets if self.objective else self.factors

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        mine = [output_of(graph, student) for student, _ in self.imitation.pairs]
        return list(dict.fromkeys([*(self.objective.read(graph) if self.objective else ()), *mine]))

    def emit(self, builder: Builder, graph: ir.Graph) -> Written:
        checked = named_sizes(graph)
        written = self.objective.emit(builder, graph) if self.objective else None
        graph.inputs.extend(map(factor_input, self.factors))
        builder.scope = "distillation"
        share = self.imitation.alpha
        with tracing(Trace({}, builder=builder)):
            above, below = self._sums(builder, graph, checked)
            soft = above / below
            total = soft * share
            if written is not None:
                loss = written.loss
                hard = cast(wrap(builder.wrap(loss)), total.dtype)
                total = hard * (1 - share) + total
                loss.name = builder.fresh("student_loss")
                builder.release("loss")
            value = renamed(builder, op.Identity(total).traced, "loss")
            rows = stack([cast(above, "float32"), cast(below, "float32")])
            column = measured(builder, "distillation_loss", rows, (2,), "ratio", {})
        if written is None:
            return Written(value, (), [column])
        measures = [(m, v) for m, v in written.measures if m.name != "loss"]
        return Written(value, [loss, *written.metrics], [*measures, column], written.weight, written.adds_up)

    def _sums(self, builder: Builder, graph: ir.Graph, checked: Collection[str]) -> tuple[Tensor, Tensor]:
        """What a batch's loss is the quotient of: weighted divergences and their weights."""
        (student, teacher), *others = [
            [wrap(builder.wrap(output_of(graph, name))) for name in pair] for pair in self.imitation.pairs
        ]
        t, axis = self.imitation.temperature, self._axis()
        p = softmax(cast(teacher, "float32") / t, axis)
        gap = log_softmax(cast(teacher, "float32") / t, axis) - log_softmax(cast(student, "float32") / t, axis)
        values = {v.name: wrap(builder.wrap(v)) for v in graph.inputs if v.name}
        given = [values[spec.name] for spec in self.targets if spec.name in (SAMPLE_WEIGHT, MASK)]
        labels = [values[spec.name] for spec in self._labels()]
        counted = [op.Not(op.Equal(x, spec.ignore_index)) for x, spec in zip(labels, self._labels(), strict=True)]
        above, below = _mean_parts(sum(p * gap, axis) * (t * t), [*given, *counted], checked)
        for mine, its in others:
            gap = cast(mine, "float32") - cast(its, "float32")
            found = [c for x, c in zip(labels, counted, strict=True) if _has_axes_of(mine, x)]
            _check_lies_over(given, mine)
            squares, count = _mean_parts(gap * gap, [*given, *found], checked)
            above = above + below * (squares / count * self.imitation.match_weight)
        return above, below

    def _labels(self) -> list[TargetSpec]:
        """The labels that say by a number of their own that a position does not count."""
        term = self._term()
        return [s for s in term.targets[:1] if s.ignore_index is not None] if term is not None else []

    def _term(self) -> Any:
        """What compares the student's logits with class numbers."""
        inner = self.objective.objective if isinstance(self.objective, WithMetrics) else self.objective
        terms: Sequence[Any] = inner.terms if isinstance(inner, WeightedLosses) else [inner]
        named = [t for t in terms if isinstance(inner, NamedLoss | WeightedLosses) and t.loss.labels]
        return next((t for t in named if self.imitation.pairs[0][0] in t.outputs), None)

    def _axis(self) -> int:
        """The axis of the classes: that of the loss on class numbers; else the last."""
        term = self._term()
        return -1 if term is None else int(term.loss.axis)


def _mean_parts(each: Tensor, factors: Sequence[Tensor], checked: Collection[str]) -> tuple[Tensor, Tensor]:
    """Weighted numbers, and their weights, added up; ``factors`` belong to the first axes of ``each``."""
    depth = max((f.ndim for f in factors), default=0)
    if factors and each.ndim > depth:
        each = mean(each, list(range(depth, each.ndim)))
    weight = op.Expand(tensor(1.0), op.Shape(each))
    for factor in factors:
        weight = weight * aligned(factor, each, checked)
    below = sum(weight)
    above = sum(op.Where(weight == 0.0, 0.0, each * weight))  # not times 0: what does not count may be infinite
    return above, op.Where(below == 0.0, 1.0, below)


def _has_axes_of(state: Tensor, labels: Tensor) -> bool:
    """Are the first axes of hidden states known to be those of labels?"""
    mine, its = state.traced.shape, labels.traced.shape
    if mine is None or its is None or len(its) > len(mine):
        return False
    return all(a is not None and a == b for a, b in zip(mine, its, strict=False))


def _check_lies_over(factors: Sequence[Tensor], state: Tensor) -> None:
    """Raise BuildError for weights that belong to other axes than a hidden state has."""
    for factor in factors:
        mine, its = state.traced.shape or (), factor.traced.shape or ()
        unlike = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(mine, its, strict=False))
        if unlike or factor.ndim > state.ndim:
            name = shown(factor.traced.value.name)
            raise BuildError(
                f"'{name}' of shape {_told(its)} says which positions count, and '{shown(state.traced.value.name)}' of "
                f"shape {_told(mine)}, which is to be like the teacher's, does not have them; match values with these "
                f"positions, or give '{name}' fewer axes"
            )


def _told(shape: Sequence[Any]) -> str:
    return f"[{', '.join('?' if d is None else str(d) for d in shape)}]"


def taught(
    model: ir.Model, write: Callable[[ir.Graph], Objective], is_alone: bool, sample_weight: Any, mask: Any
) -> Callable[[ir.Graph], Objective]:
    """How to write the objective of ``model`` with its teacher, if it has one.

    Args:
        write: gives the objective without it.
        is_alone: there is no other loss.
        sample_weight, mask: as ``gg.build`` takes them.

    Raises:
        BuildError: there is no other loss, and the teacher's share is not all.
    """
    imitation = imitation_of(model.metadata_props)
    if imitation is None:
        return write
    if isinstance(mask, Mapping):
        raise BuildError(
            "masks of single outputs say nothing of what the teacher imitates",
            remedy="give mask=True, which masks every term",
            shell="give --mask, which masks every term, in the place of --mask-of",
        )
    if is_alone and imitation.alpha < 1.0:
        raise BuildError(
            f"the teacher's share of what is minimised is {imitation.alpha}, and there is no other loss",
            remedy="name one, or give it all: gg.distill(..., alpha=1)",
            shell="name one by --loss, or give it all: --teacher-share 1",
        )
    if not is_alone:
        return lambda graph: Distilled(imitation, write(graph))
    return lambda graph: Distilled(imitation, None, _factors(graph, imitation, sample_weight, mask))


def _factors(graph: ir.Graph, imitation: Imitation, sample_weight: Any, mask: Any) -> tuple[TargetSpec, ...]:
    """The inputs that weigh positions where no loss has any: all axes of the logits but their last."""
    logits = shape_of(output_of(graph, imitation.pairs[0][0])) or ()
    free = Builder(value_names(graph))
    return tuple(
        TargetSpec(free.fresh(name), dtype, tuple(logits[:end]) if given is True else tuple(given))
        for name, given, dtype, end in ((SAMPLE_WEIGHT, sample_weight, "float32", 1), (MASK, mask, "bool", -1))
        if given is not False and given is not None
    )
