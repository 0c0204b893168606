"""A step while it is written: the stages of ``pipeline.build`` hand it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import opset_for
from gradgraph.building.beginning import Beginning
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
        below: the weights that ``freeze_below`` freezes.
        model: what becomes its train graph.
        objective_for: gives the objective for a graph.
        doubts: findings about what that reads.
        optimizer: with the average that ``ema`` asks for.
        read: the values of the model that the loss depends on.
        trained: the weights that it trains.
        figures: the fields of its ``PartSpec`` that name outputs of eval.onnx.
        state, halves: of its train graph, once that is written; ``halves`` is the same step in two files.
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
    """A step, or several over one state, on the way through the stages: each sets what later ones read.

    Attributes:
        model: the model as the last stage has left it. Once the parts have models of their own, this one becomes
            eval.onnx.
        bases: files that hold weights of the model.
        data: the names of what the model was trained on.
        trained: the weights that any part trains.
        taken: what was read beside the model, and what globs take, a line each.
        inputs, outputs: those of the model itself.
        beginning: writes init.onnx.
    """

    options: BuildOptions
    parts: Sequence[Part]
    backend: Backend
    precision: Precision
    beginning: Beginning = field(default_factory=Beginning)
    model: ir.Model = field(init=False)
    bases: Mapping[str, Base] = field(init=False)
    data: DataNames = field(init=False)
    trained: Sequence[str] = field(init=False)
    findings: Sequence[Finding] = field(init=False)
    taken: Sequence[str] = field(init=False)
    inputs: Sequence[ir.Value] = field(init=False)
    outputs: Sequence[str] = field(init=False)
    manifest: Manifest = field(init=False)

    @property
    def is_alone(self) -> bool:
        """Is there one step, without a name?"""
        return self.options.steps is None

    @property
    def opset(self) -> int:
        """The opset of all files."""
        return opset_for(self.backend, self.options.opset)

    @property
    def halves(self) -> Mapping[str, ir.Model]:
        """The graphs of a separate step, by the names of their files."""
        return self.parts[0].halves.models if self.parts[0].halves else {}
