"""``Draft``: a step under construction, which the stages of ``pipeline.build`` pass on."""

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
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import Finding
from gradgraph.optim import Optimizer
from gradgraph.passes.autocast import Precision
from gradgraph.step.bases import Base
from gradgraph.step.manifest import Manifest


@dataclass
class Part:
    """One of several named steps that share their state, or the only step, whose name is "".

    Attributes:
        name: the name of the step.
        options: its options.
        seed: the seed of its random numbers.
        below: the names of the weights frozen by ``freeze_below``.
        model: the model that becomes the train graph of this step.
        objective_for: a function that returns the objective for a graph.
        doubts: findings about the values that the objective reads.
        optimizer: the optimizer, including the average requested by ``ema``.
        objective: the loss and the metrics.
        read: the values of the model that the loss depends on.
        trained: the names of the weights that this step trains.
        figures: the fields of its ``PartSpec`` that name outputs of eval.onnx.
        state: the state of the train graph, once the graph is written.
        halves: the train graph split into gradient.onnx and apply.onnx, if requested.
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
    """A step under construction, or several named steps that share their state. Stages set fields for later ones.

    Attributes:
        options: the options of ``gg.build``.
        parts: the named steps, or the only step.
        backend: the backend that the step is built for.
        precision: the precision of the forward and backward pass.
        init_model: the writer of init.onnx.
        model: the model after the last stage. Once the parts have models of their own, it becomes eval.onnx.
        bases: external files with weights of the model, by location.
        data: the column and class names of the model's training data.
        trained: the names of the weights that any part trains.
        findings: warnings of the build.
        reported: notes of the build, one line each: files that were read, and the weights matched by each glob.
        inputs: the inputs of the model itself, without targets.
        outputs: the names of the outputs of the model itself, without loss and metrics.
        manifest: the manifest of the step.
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
        """The models of gradient.onnx and apply.onnx, by name; empty for a step built without ``separate``."""
        return self.parts[0].halves.models if self.parts[0].halves else {}
