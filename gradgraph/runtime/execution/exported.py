"""Export of the trained model as plain ONNX: a protobuf message, an onnx-ir model, or a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import BuildError
from gradgraph.files.models import save_model, to_proto
from gradgraph.graph.marks import QUANTISED
from gradgraph.passes.full_precision import in_float32, with_low_weights
from gradgraph.passes.stored_integers import store_integers
from gradgraph.runtime.execution.served import serve
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.step.inference import without_loss

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Exported:
    """An export of a trainer's model with the arguments of ``Trainer.export``.

    Args:
        outputs: names of the model outputs to keep; all if None.
        averaged, mixed, preprocess: as for ``Trainer.export``.

    Raises:
        BuildError: if ``mixed`` is True and the step is not in mixed precision.
    """

    session: StepSession
    outputs: Sequence[str] | None
    averaged: bool
    mixed: bool
    preprocess: bool

    def __post_init__(self) -> None:
        if self.mixed and not self.session.manifest.precision:
            raise BuildError(
                "mixed exports need a step in mixed precision, and this step is in float32",
                remedy="remove mixed=True",
                shell="remove --mixed",
            )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the model to ``path`` without copying weights."""
        with self.session.turns.taken():
            save_model(plain(self.model()), path)

    def model(self, mapped: bool = False) -> ir.Model:
        """Return an onnx-ir model, whose large frozen weights stay in their files.

        Trained weights share the memory of the state, which the next step changes. In mixed precision, and if the model
        stores integers, weights are converted and inside.

        Args:
            mapped: let frozen weights refer to the step's memory mappings, as for ``Step.opened``.
        """
        definition, manifest, values = self.session.definition, self.session.manifest, self._values()
        proto = without_loss(definition.eval, manifest, self.outputs)
        for key, text in self.session.data.names.as_metadata().items():
            proto.metadata_props.add(key=key, value=text)
        converts = self.mixed or any(entry.key == QUANTISED for entry in proto.metadata_props)
        model = definition.opened(proto, mapped=mapped or converts)
        for value in [v for v in model.graph.inputs if v.name in values]:
            model.graph.inputs.remove(value)
            value.const_value = ir.Tensor(values[value.name or ""], name=value.name)
            model.graph.register_initializer(value)
        store_integers(model)
        if self.mixed:
            with_low_weights(model)
        elif manifest.precision:
            in_float32(model)
        if self.preprocess:
            serve(model, self.session.data.names, own_outputs=self.outputs is None)
        return model

    def proto(self) -> onnx.ModelProto:
        """Return the model as a protobuf message with all weights inside.

        Raises:
            ModelError: if the weights exceed the size limit of a message.
        """
        with self.session.turns.taken():
            return to_proto(plain(self.model(mapped=True)))

    def _values(self) -> Arrays:
        manifest, read = self.session.manifest, {i.name for i in self.session.definition.eval.graph.input}
        needed = [s.name for s in manifest.state if s.name in read]
        return self.session.state.seen_for_use(needed, manifest.averages if self.averaged else {})


def plain(model: ir.Model) -> ir.Model:
    """Remove type and shape from the values of initializers, in place, except graph outputs; return ``model``.

    They are redundant, since the initializers' tensors have both.
    """
    for value in model.graph.initializers.values():
        if not value.is_graph_output():
            value.type = value.shape = None
    return model
