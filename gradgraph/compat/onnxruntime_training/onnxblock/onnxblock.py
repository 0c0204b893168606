"""Blocks for whole models: a forward model, or a training and an eval model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import onnx

from gradgraph.compat.onnxruntime_training.graphs.inference_graph import eval_graph
from gradgraph.compat.onnxruntime_training.graphs.training_graph import training_graph
from gradgraph.compat.onnxruntime_training.onnxblock import _graph_utils, blocks, model_accessor
from gradgraph.errors import CompatibilityError

T = TypeVar("T")
Parameters = tuple[list[onnx.TensorProto], list[onnx.TensorProto]]


def _built(made: T | None, kind: str) -> T:
    if made is None:
        raise CompatibilityError(f"the {kind} model is not built; call the block within `with onnxblock.base(...):`")
    return made


class ForwardBlock(blocks.Block):
    """A block whose outputs become the outputs of the model; ``build`` of a subclass returns their names."""

    def __init__(self) -> None:
        super().__init__()
        self._model: onnx.ModelProto | None = None

    def to_model_proto(self) -> onnx.ModelProto:
        """Return the model.

        Raises:
            CompatibilityError: if the block has not been called.
        """
        return _built(self._model, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the block within ``with onnxblock.base(model):``; return the names of its outputs."""
        output, self._model = _grown(self, *args, **kwargs)
        self.base.CopyFrom(self._model)
        return output


def _grown(block: blocks.Block, *args: Any, **kwargs: Any) -> tuple[Any, onnx.ModelProto]:
    """Build a block into the current model; return the names of its outputs, and the model with these as outputs."""
    block.base = model_accessor.current_model()
    output = block.build(*args, **kwargs)
    model = block.infer_shapes_on_base()
    _graph_utils.register_graph_outputs(model, output)
    return output, model


class TrainingBlock(blocks.Block):
    """A block that generates a training and an eval model.

    Subclasses implement ``build``, which returns the name of the loss, or a tuple of it and the names of other outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trained: dict[str, None] = {}
        self._frozen: dict[str, None] = {}
        self._parameters: Parameters | None = None
        self._models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Train a parameter, or freeze it with ``value=False``; all other parameters are constants of the model."""
        chosen, other = (self._trained, self._frozen) if value is True else (self._frozen, self._trained)
        other.pop(argument_name, None)
        chosen[argument_name] = None

    def parameters(self) -> Parameters:
        """Return the trained parameters, and the frozen ones.

        Raises:
            CompatibilityError: if the block has not been called.
        """
        return _built(self._parameters, "training")

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Return the training model and the eval model.

        Raises:
            CompatibilityError: if the block has not been called.
        """
        return _built(self._models, "training")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the block within ``with onnxblock.base(model):``, and append gradients.

        Raises:
            DifferentiationError, UnsupportedOperatorError: if a trained parameter has no gradient.
            UnknownNameError: if the model does not have one of the parameters.
        """
        output, model = _grown(self, *args, **kwargs)
        held = model.graph.initializer
        self._parameters = [t for t in held if t.name in self._trained], [t for t in held if t.name in self._frozen]
        outputs = [output] if isinstance(output, str) else list(output)
        training = training_graph(model, outputs, self._trained, self._frozen)
        self._models = training, eval_graph(model, self._trained | self._frozen)
        self.base.CopyFrom(training)
        return output


class LossBlock(TrainingBlock):
    """A training block that applies a loss to a model.

    Args:
        loss: the block of the loss.
        inputs: the names of the values that the loss reads; if empty, all outputs of the model.
        others: the names of further values to return after the loss.
    """

    def __init__(self, loss: blocks.Block, inputs: Sequence[str], others: Sequence[str]) -> None:
        super().__init__()
        self._loss, self._reads, self._others = loss, inputs, others

    def build(self, *names: str) -> tuple[str, ...]:
        output = self._loss(*(self._reads or names))
        return (*((output,) if isinstance(output, str) else output), *self._others)
