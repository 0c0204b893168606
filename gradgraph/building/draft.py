"""A step under construction: the object that the stages of ``pipeline.build`` pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import opset_for
from gradgraph.building.init_model import InitModel
from gradgraph.building.objective import Objective
from gradgraph.building.separate import Halves
from gradgraph.building.step_options import BuildOptions, StepOptions
from gradgraph.building.step_state import StepState
from gradgraph.errors import Finding
from gradgraph.optim import Optimizer
from gradgraph.passes.autocast import Precision
from gradgraph.step.bases import Base
from gradgraph.step.data_names import DataNames
from gradgraph.step.manifest import Manifest


@dataclass
class Part:
    """One of several named steps over one state, or the only step, whose name is "".

    Attributes:
        below: the weights frozen by ``freeze_below``.
        model: becomes its train graph.
        objective_for: returns the objective for a graph.
        doubts: findings about the values that the objective reads.
        optimizer: with the average requested by ``ema``.
        read: the values of the model that the loss depends on.
        trained: the weights that it trains.
        figures: the fields of its ``PartSpec`` that name outputs of eval.onnx.
        state, halves: of its train graph, once written; ``halves`` is the same step split into two files.
    """

    name: str
    options: StepOptions
    seed: int
    below: Sequence[str] = field(init=False)
    model: ir.Model = field(init=False)
    objective_for: Callable[[ir.Graph], Objective] = field(init=False)
    doubts: Sequence[Finding] = field(init=False)
    optimizer: Optimizer = field(init=False)
    objective: Objective = field(init=False)
    read: Sequence[ir.Value] = field(init=False)
    trained: Sequence[str] = field(init=False)
    figures: Mapping[str, Any] = field(init=False)
    state: StepState = field(init=False)
    halves: Halves | None = field(init=False)


@dataclass
class Draft:
    """A step, or several over one state, passed from stage to stage; each stage sets fields that later ones read.

    Attributes:
        model: the model after the last stage. Once the parts have models of their own, this one becomes eval.onnx.
        bases: files that hold weights of the model.
        data: the column and class names of the model's training data.
        trained: the weights that any part trains.
        reported: one line for each external file that was read and each glob, with what it matched.
        inputs, outputs: those of the model itself.
        init_model: writes init.onnx.
    """

    options: BuildOptions
    parts: Sequence[Part]
    backend: Backend
    precision: Precision
    init_model: InitModel = field(default_factory=InitModel)
    model: ir.Model = field(init=False)
    bases: Mapping[str, Base] = field(init=False)
    data: DataNames = field(init=False)
    trained: Sequence[str] = field(init=False)
    findings: Sequence[Finding] = field(init=False)
    reported: Sequence[str] = field(init=False)
    inputs: Sequence[ir.Value] = field(init=False)
    outputs: Sequence[str] = field(init=False)
    manifest: Manifest = field(init=False)

    @property
    def is_alone(self) -> bool:
        """Whether there is a single, unnamed step."""
        return self.options.steps is None

    @property
    def opset(self) -> int:
        """The opset of all files."""
        return opset_for(self.backend, self.options.opset)

    @property
    def halves(self) -> Mapping[str, ir.Model]:
        """The graphs of a separate step, keyed by file name."""
        return self.parts[0].halves.models if self.parts[0].halves else {}
