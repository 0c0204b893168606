"""What a student with a teacher minimises: ``(1 − α)·loss + α·T²·KL(teacher ‖ student)``, and hidden states matched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.builder import Builder
from gradgraph.errors import BuildError
from gradgraph.frontend.activations import log_softmax, softmax
from gradgraph.frontend.pointwise import cast
from gradgraph.frontend.reductions import mean, sum
from gradgraph.frontend.shaping import stack
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, op, tensor, tracing, wrap
from gradgraph.manifest import TargetSpec
from gradgraph.marks import TEACHER
from gradgraph.measured import Written, measured
from gradgraph.objective import NamedLoss, Objective, output_of, renamed
from gradgraph.weighted_losses import MASK, SAMPLE_WEIGHT, WeightedLosses, aligned
from gradgraph.with_metrics import WithMetrics


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
    """An objective, and a teacher beside it; without one, the teacher alone."""

    imitation: Imitation
    objective: Objective | None

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
        return self.objective.targets if self.objective else ()

    def read(self, graph: ir.Graph) -> list[ir.Value]:
        mine = [output_of(graph, student) for student, _ in self.imitation.pairs]
        return list(dict.fromkeys([*(self.objective.read(graph) if self.objective else ()), *mine]))

    def emit(self, builder: Builder, graph: ir.Graph) -> Written:
        written = self.objective.emit(builder, graph) if self.objective else None
        builder.scope = "distillation"
        share = self.imitation.alpha
        with tracing(Trace({}, builder=builder)):
            above, below = self._sums(builder, graph)
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

    def _sums(self, builder: Builder, graph: ir.Graph) -> tuple[Tensor, Tensor]:
        """What a batch's loss is the quotient of: weighted divergences and their weights."""
        (student, teacher), *others = [
            [wrap(builder.wrap(output_of(graph, name))) for name in pair] for pair in self.imitation.pairs
        ]
        t, axis = self.imitation.temperature, self._axis()
        p = softmax(cast(teacher, "float32") / t, axis)
        gap = log_softmax(cast(teacher, "float32") / t, axis) - log_softmax(cast(student, "float32") / t, axis)
        each = sum(p * gap, axis) * (t * t)
        weight = op.Expand(tensor(1.0), op.Shape(each))
        values = {v.name: v for v in graph.inputs}
        for spec in self.targets:
            if spec.name in (SAMPLE_WEIGHT, MASK):
                weight = weight * aligned(wrap(builder.wrap(values[spec.name])), each)
        below = sum(weight)
        above = sum(op.Where(weight == 0.0, 0.0, each * weight))
        below = op.Where(below == 0.0, 1.0, below)
        for mine, its in others:
            gap = cast(mine, "float32") - cast(its, "float32")
            above = above + below * (mean(gap * gap) * self.imitation.match_weight)
        return above, below

    def _axis(self) -> int:
        """The axis of the classes: that of the loss on class numbers; else the last."""
        inner = self.objective.objective if isinstance(self.objective, WithMetrics) else self.objective
        terms: Sequence[Any] = inner.terms if isinstance(inner, WeightedLosses) else [inner]
        for term in terms:
            of_classes = isinstance(inner, NamedLoss | WeightedLosses) and term.loss.labels
            if of_classes and self.imitation.pairs[0][0] in term.outputs:
                return int(term.loss.axis)
        return -1


def taught(model: ir.Model, write: Callable[[ir.Graph], Objective], is_alone: bool) -> Callable[[ir.Graph], Objective]:
    """How to write the objective of ``model`` with its teacher, if it has one.

    Args:
        write: gives the objective without it.
        is_alone: there is no other loss.

    Raises:
        BuildError: there is no other loss, and the teacher's share is not all.
    """
    imitation = imitation_of(model.metadata_props)
    if imitation is None:
        return write
    if is_alone and imitation.alpha < 1.0:
        raise BuildError(
            f"the teacher's share of what is minimised is {imitation.alpha}, and there is no other loss",
            remedy="name one, or give it all: gg.distill(..., alpha=1)",
            shell="name one by --loss, or give it all: --teacher-share 1",
        )
    return lambda graph: Distilled(imitation, None if is_alone else write(graph))
