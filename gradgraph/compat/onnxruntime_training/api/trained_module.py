"""The module: gradients of a batch, evaluation, and the model for inference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.arguments import FLAG, PATH, TEXT, checked
from gradgraph.compat.onnxruntime_training.api.bound_run import BoundRun, options_of, placement_of
from gradgraph.compat.onnxruntime_training.api.checkpoint_state import CheckpointState
from gradgraph.compat.onnxruntime_training.api.held import Held, placed, zeros
from gradgraph.compat.onnxruntime_training.graphs import value_names as names
from gradgraph.compat.onnxruntime_training.graphs.inference_graph import inference_graph
from gradgraph.compat.onnxruntime_training.graphs.old_artifacts import is_old, made_anew
from gradgraph.compat.onnxruntime_training.graphs.training_graph import specialised
from gradgraph.errors import CompatibilityError, listed, shown
from gradgraph.files.models import load_model, save_model, to_proto
from gradgraph.graph.shapes import known_sizes, shape_of_type
from gradgraph.runtime.execution.shaped import ShapedSessions, Sizes
from gradgraph.step.manifest import TensorSpec

Given: TypeAlias = Any  # an array or an OrtValue


class Module:
    """Trains and evaluates a model. Its artifacts come from ``artifacts.generate_artifacts``.

    Args:
        train_model_uri: the training model.
        state: parameters and more, which it shares.
        eval_model_uri: the eval model, for evaluation and export.
        device: "cpu", "cuda" or "cuda:1".
        session_options: of onnxruntime.

    Attributes:
        training: whether a call trains; it evaluates otherwise.

    Raises:
        ModelError: a model cannot be read, or onnxruntime refuses it.
        CompatibilityError: the training model was made by onnxruntime-training and cannot be made anew, or the
            checkpoint is of another one.
        RuntimeUnavailableError: onnxruntime cannot use the device.
    """

    training: bool

    @checked(train_model_uri=PATH, eval_model_uri=PATH.or_none(), device=TEXT)
    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: ort.SessionOptions | None = None,
    ) -> None:
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state is a CheckpointState, and {type(state).__name__} is given")
        self.training = True
        self._state, self._held = state, state._state
        self._placement, self._options = placement_of(device), options_of(session_options)
        self._train = _Model(self._training_model(train_model_uri), self._held.parameters)
        self._eval = None if eval_model_uri is None else _Model(_read(eval_model_uri), self._held.parameters)
        self._check(train_model_uri)
        self._held.move_to(self._placement)
        self._attach()
        self._begins = True  # gradients of the next batch take the place of those before
        self._runs: dict[bool | str, ShapedSessions[BoundRun]] = {}

    def _training_model(self, path: str | os.PathLike[str]) -> onnx.ModelProto:
        """Read the training model, or make it from its forward part if onnxruntime-training made the file."""
        model = _read(path)
        if not is_old(model):
            return model
        filled = {} if self._held.nominal else self._held.parameters
        return made_anew(model, {name: self._held.read(held) for name, held in filled.items()})

    def _check(self, path: str | os.PathLike[str]) -> None:
        """Raise CompatibilityError unless the parameters that are trained are those that have gradients."""
        buffers = {p for n in self._train.inputs if (p := names.parameter_of_buffer(n)) is not None}
        lost = buffers ^ {h.name for h in self._held.trained()}
        if lost:
            raise CompatibilityError(
                f"'{shown(path)}' and the checkpoint are not of one model: only one of them trains {listed(lost)}; "
                "give those that were made together"
            )

    def _attach(self) -> None:
        """Make gradients of zero; take shapes from the models where the state is nominal."""
        shapes = {v.name: _shape(v) for v in (self._eval or self._train).model.graph.input}
        shapes |= {v.name: _shape(v) for v in self._train.model.graph.input}
        constants = {t.name for t in self._train.model.graph.initializer}
        for held in self._held.parameters.values():
            held.is_constant = held.name in constants
            if self._held.nominal:
                held.shape = shapes.get(held.name, ())
            if held.requires_grad and held.gradient is None:
                held.gradient = zeros(held.shape, held.dtype, self._placement)

    def __call__(self, *user_inputs: Given) -> Given | tuple[Given, ...]:
        """Train on a batch, or evaluate it.

        Args:
            user_inputs: arrays or OrtValues, in the order of ``input_names()``.

        Returns:
            The outputs: arrays if any input is one, OrtValues otherwise; a single one by itself.

        Raises:
            CompatibilityError: there are more inputs or fewer, there is no eval model, or the state is nominal.
            ModelError: onnxruntime refuses the inputs, or fails.
        """
        model = self._train if self.training else self._evaluating()
        feeds = self._feeds(model, user_inputs)
        found = self._trained(feeds) if self.training else self._run_of("eval", model, feeds)(feeds, {})
        results = [found[name] for name in model.outputs]
        if any(isinstance(x, np.ndarray) for x in user_inputs):
            results = [value.numpy() for value in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _evaluating(self) -> _Model:
        if self._eval is None:
            raise CompatibilityError("the module has no eval model; pass eval_model_uri to evaluate and to export")
        return self._eval

    def _feeds(self, model: _Model, given: tuple[Given, ...]) -> dict[str, ort.OrtValue]:
        if len(given) != len(model.user_inputs):
            raise CompatibilityError(
                f"the model takes {len(model.user_inputs)} inputs, {listed(model.user_inputs)}, and {len(given)} are "
                "given"
            )
        feeds = {n: self._held.filled(h) for n, h in self._held.parameters.items() if n in model.inputs}
        for spec, value in zip(model.specs, given, strict=True):
            feeds[spec.name] = value if isinstance(value, ort.OrtValue) else _as_ortvalue(spec.name, value)
            rank = len(feeds[spec.name].shape())
            if spec.shape and rank != len(spec.shape):
                raise CompatibilityError(
                    f"the input '{shown(spec.name)}' has rank {rank}, and the model takes {shown(spec.shape)}; "
                    "reshape it"
                )
        return feeds

    def _trained(self, feeds: dict[str, ort.OrtValue]) -> dict[str, ort.OrtValue]:
        trained = self._held.trained()
        feeds |= {names.buffer(h.name): h.gradient for h in trained if h.gradient is not None}
        next_of = {names.buffer(h.name): names.accumulated(h.name) for h in trained}
        found = self._run_of(self._begins, self._train, feeds)(feeds, next_of)
        for held in self._held.trained():
            held.gradient = found[names.accumulated(held.name)]
        for name in self._train.moved:
            self._held.parameters[name].value = found[names.following(name)]
        self._begins = False
        return found

    def _run_of(self, key: bool | str, model: _Model, feeds: Mapping[str, ort.OrtValue]) -> BoundRun:
        """The session: one that evaluates, one that adds gradients up, one that begins anew and reads no buffers."""
        if key not in self._runs:
            evaluates = key == "eval"
            written = model.model if evaluates else specialised(model.model, resets=bool(key))

            def make(sizes: Sizes) -> BoundRun:
                return BoundRun(written, self._placement, self._options, sizes, lower=not evaluates)

            self._runs[key] = ShapedSessions([] if evaluates else model.specs, make)
        return self._runs[key].of(feeds)

    @checked(mode=FLAG)
    def train(self, mode: bool = True) -> Module:
        """Let calls train, or evaluate; returns the module."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Let calls evaluate; returns the module."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Let the gradients of the next batch take the place of those that have been added up."""
        self._begins = True

    @checked(trainable_only=FLAG)
    def get_contiguous_parameters(self, trainable_only: bool = False) -> ort.OrtValue:
        """A copy of the parameters as one vector, in the order of the training model.

        Raises:
            CompatibilityError: the state is nominal, or a parameter is not float32.
        """
        parts = [self._held.read(h).ravel() for h in self._contiguous(trainable_only)]
        return placed(np.concatenate(parts) if parts else np.empty(0, np.float32), self._placement)

    @checked(trainable_only=FLAG)
    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """How many numbers the parameters have."""
        return sum(h.size for h in self._held.parameters.values() if h.requires_grad or not trainable_only)

    @checked(trainable_only=FLAG)
    def copy_buffer_to_parameters(self, buffer: ort.OrtValue, trainable_only: bool = True) -> None:
        """Take the parameters from a vector, in the order of ``get_contiguous_parameters``.

        A state of a nominal checkpoint becomes a complete one by this, with ``trainable_only=False``.

        Raises:
            CompatibilityError: the vector has another length or element type.
        """
        if self._held.nominal and trainable_only:
            raise CompatibilityError("the checkpoint is nominal, so all parameters are to be given; pass False")
        numbers, size = buffer.numpy(), self.get_parameters_size(trainable_only)
        if numbers.size != size or numbers.dtype != np.float32:
            raise CompatibilityError(
                f"the buffer holds {numbers.size} numbers of {numbers.dtype}, and {size} of float32 are expected"
            )
        rows = self._contiguous(trainable_only)
        ends = np.cumsum([h.size for h in rows])
        for held, part in zip(rows, np.split(numbers.ravel(), ends[:-1]), strict=True):
            held.value = placed(part.reshape(held.shape), self._placement)
        self._held.nominal = False

    def _contiguous(self, trainable_only: bool) -> list[Held]:
        order = {name: i for i, name in enumerate(self._train.inputs)}
        held = [h for h in self._held.parameters.values() if h.requires_grad or not trainable_only]
        for h in held:
            if h.dtype != np.float32:
                raise CompatibilityError(
                    f"parameter '{shown(h.name)}' is {h.dtype}, and a buffer holds float32; pass trainable_only=True"
                )
        return sorted(held, key=lambda h: order.get(h.name, len(order)))

    @checked(inference_model_uri=PATH)
    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """Write the model with its parameters inside, without loss and gradients.

        Args:
            graph_output_names: outputs or inner values of the eval model that it is to have.

        Raises:
            CompatibilityError: there is no eval model, or it has no such value.
            OutputError: the file cannot be written.
        """
        model, held = self._evaluating(), self._held.parameters
        arrays = {n: self._held.read(held[n]) for n in model.inputs if n in held}
        save_model(inference_graph(model.model, graph_output_names, arrays), inference_model_uri)

    def input_names(self) -> list[str]:
        """The inputs that a call takes; none where it would evaluate, and there is no eval model."""
        model = self._train if self.training else self._eval
        return [] if model is None else list(model.user_inputs)

    def output_names(self) -> list[str]:
        """The outputs that a call gives; likewise."""
        model = self._train if self.training else self._eval
        return [] if model is None else list(model.outputs)


class _Model:
    """A training or eval model, and what is whose among its inputs and outputs."""

    def __init__(self, model: onnx.ModelProto, parameters: Mapping[str, Held]) -> None:
        self.model, graph = model, model.graph
        self.inputs = [v.name for v in graph.input]
        given = [v.name for v in graph.output if names.parameter_of_accumulated(v.name) is None]
        self.moved = [p for p in parameters if names.following(p) in given]
        self.outputs = [n for n in given if n not in {names.following(p) for p in self.moved}]
        self.specs = [
            TensorSpec(v.name, "", shape_of_type(v.type) or ())
            for v in graph.input
            if v.name not in parameters and v.name != names.RESET and names.parameter_of_buffer(v.name) is None
        ]
        self.user_inputs = [s.name for s in self.specs]


def _read(path: str | os.PathLike[str]) -> onnx.ModelProto:
    if Path(path).suffix == ".ort":
        raise CompatibilityError(
            f"'{shown(path)}' is for runtimes that read no .onnx files, and cannot be changed; give the .onnx file "
            "that generate_artifacts has written beside it"
        )
    return to_proto(load_model(Path(path)))


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(known_sizes(shape_of_type(value.type)))


def _as_ortvalue(name: str, value: Any) -> ort.OrtValue:
    if not isinstance(value, np.ndarray):
        raise CompatibilityError(f"the input '{shown(name)}' is {type(value).__name__}; give an array or an OrtValue")
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
