"""The manifest of a step: the role of each input, output and state tensor, as plain data and as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec, numpy_dtype
from gradgraph.errors import ModelError, UnknownNameError, escaped_json, shown, suggestion
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError
from gradgraph.graph.shapes import size_factors

VERSION = 1
LEARNING_RATE = "learning_rate"  # the hyperparameter, or the report of a schedule in the graph
UPDATE, BATCH_WEIGHT = "update", "batch_weight"  # hyperparameters of steps that accumulate gradients
LOSS_SCALE, SKIPPED_STEPS = "loss_scale", "skipped_steps"  # state of steps in mixed precision
DIGESTS = "digests"  # key in manifest.json: the digest of each file in the folder
BASES = "base_files"  # key in manifest.json: the external files with weights of the step

StateKind = Literal["parameter", "statistic", "optimizer", "counter"]


@dataclass(frozen=True)
class StateSpec(TensorSpec):
    """A tensor carried from step to step: train.onnx reads it as ``name`` and writes it as ``next``."""

    next: str
    kind: StateKind

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(int(d or 0) for d in self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class MeasureSpec:
    """A history column computed from sums over all samples (``gradgraph.step.finishes``).

    Attributes:
        name: the name of the column.
        sums: the name of the floating-point output of train.onnx and eval.onnx with the sums over a batch.
        shape: the shape of that output; with ``rows``, the shape of a row.
        finish: the name of the function in ``gradgraph.step.finishes`` that computes the column from the totals.
        arguments: further arguments of that function.
        rows: whether the output has a row for each sample instead of sums. If so, only eval.onnx has it, and the
            function gets all rows.
    """

    name: str
    sums: str
    shape: tuple[int, ...]
    finish: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rows: bool = False


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """The loss, metrics and optimizer of a step, with the names of their inputs and outputs.

    Attributes:
        loss, optimizer: ``{"name": ..., "arguments": {...}}``, for summaries and for rebuilding the step.
        loss_output: the name of the loss in train.onnx and eval.onnx.
        metrics: names of further scalar floating-point outputs of train.onnx and eval.onnx.
        measures: columns computed from sums over all samples; one may be called "loss".
        reports: names of scalar float32 outputs of train.onnx alone, such as the gradient norm.
        hyperparameters: names of scalar float32 inputs of train.onnx, with their defaults.
    """

    loss: Mapping[str, Any] = field(default_factory=dict)
    loss_output: str = "loss"
    metrics: tuple[str, ...] = ()
    measures: tuple[MeasureSpec, ...] = ()
    reports: tuple[str, ...] = ()
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    hyperparameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def trained_measures(self) -> tuple[MeasureSpec, ...]:
        """The measures that train.onnx also computes: all but those with ``rows``."""
        return tuple(m for m in self.measures if not m.rows)

    def __post_init__(self) -> None:
        for name in (f.name for f in dataclasses.fields(self)):
            if name in _SEQUENCES:
                object.__setattr__(self, name, tuple(getattr(self, name)))
            elif name in _PLAIN:
                object.__setattr__(self, name, _plain(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class PartSpec(StepSpec):
    """One of several named steps that share their state; its history columns are called ``<step>.<column>``.

    Attributes:
        inputs: names of the inputs and targets that the step reads from a batch.
        reads, writes: names of the state tensors that the step reads, and of those that it updates.
        trainable: names of the weights that the step trains.
    """

    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    trainable: tuple[str, ...]

    def results(self, step: str) -> dict[str, str]:
        """Return the output names of loss and metrics by column, without the prefix ``<step>.``."""
        return {"loss": self.loss_output, **{name.removeprefix(f"{step}."): name for name in self.metrics}}

    def reported(self, step: str) -> dict[str, str]:
        """Return the output names of loss, metrics and reports by column, without the prefix ``<step>.``."""
        return {**self.results(step), **{name.removeprefix(f"{step}."): name for name in self.reports}}

    def columns_of_sums(self, step: str) -> tuple[MeasureSpec, ...]:
        """Return the measures that train.onnx computes, with column names without the prefix ``<step>.``."""
        return tuple(dataclasses.replace(m, name=m.name.removeprefix(f"{step}.")) for m in self.trained_measures)


@dataclass(frozen=True, kw_only=True)
class HalfSpec:
    """One of the two files of a ``SeparateSpec``.

    Attributes:
        reads, writes: names of the state tensors that the file reads, and of those that it updates.
        hyperparameters: names of its hyperparameters.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    hyperparameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class SeparateSpec:
    """The step split into two files: ``gradient.onnx`` computes gradients, ``apply.onnx`` updates the state.

    Attributes:
        gradients: for each weight, the name of its gradient, an output of gradient.onnx and an input of apply.onnx.
        gradient, apply: the other inputs and outputs of each file; gradient.onnx also reads the batch.
        weight: the name of the output of gradient.onnx with the divisor of the loss (the number of samples, or of
            labels that are not ignored). A mean over the gradients of several batches is weighted by it. Empty if only
            the caller knows the divisor.
        adds_up: whether the loss is a sum, so that gradients of several batches are added without weights.
        differs: the reason (a verb phrase with the loss as subject) why the weighted mean over several batches differs
            from the gradient of one large batch; empty if they are equal.
        every_label: whether the reason in ``differs`` applies only if labels are ignored: several losses then have
            different divisors.
    """

    gradients: Mapping[str, str]
    gradient: HalfSpec = HalfSpec()
    apply: HalfSpec = HalfSpec()
    weight: str = ""
    adds_up: bool = False
    differs: str = ""
    every_label: bool = False


def column(step: str, name: str) -> str:
    """Return the column name of a result of a named step, such as ``discriminator.loss``."""
    return f"{step}.{name}" if step else name


def train_file(step: str) -> str:
    """Return the file name of the train graph of a named step; ``train.onnx`` for a single step."""
    return f"train.{step}.onnx" if step else "train.onnx"


@dataclass(frozen=True, kw_only=True)
class Manifest(StepSpec):
    """The roles of all names in a step; the docstring of :mod:`gradgraph.step.step` lists where each occurs.

    Attributes:
        inputs, targets: the entries of a batch.
        outputs: the names of the model's own outputs, as in eval.onnx.
        state: every tensor that a step updates, parameters first.
        averages: for parameters with an average, the state tensor that evaluation and export read instead.
        precision: ``{"name": ..., "arguments": {...}, "state": {...}}`` of a step in mixed precision; ``state`` has the
            names of the tensors ``loss_scale`` and ``skipped_steps``, if any.
        trainable, frozen: names of the trained and the frozen weights of the model.
        backend, machine: the backend of the step, and its hardware requirements (``gradgraph.backends``).
        opset: the ONNX opset version of the models.
        gradgraph: the version of gradgraph that wrote the step.
        version: the version of the manifest's format.
        steps: the named steps, if several share the state; each has its own loss and optimizer.
        separate: the inputs and outputs of gradient.onnx and apply.onnx, if the step has them.
        data: the names in the training data of the step or its model, with which later data are matched.
    """

    inputs: tuple[TensorSpec, ...]
    targets: tuple[TargetSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    state: tuple[StateSpec, ...]
    averages: Mapping[str, str] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    backend: str = "auto"
    machine: str = ""
    opset: int = 21
    gradgraph: str = ""
    version: int = VERSION
    steps: Mapping[str, PartSpec] = field(default_factory=dict)
    separate: SeparateSpec | None = None
    data: DataNames = NO_NAMES

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gradgraph:
            object.__setattr__(self, "gradgraph", package_version())
        _check_names(self)

    def to_json(self) -> str:
        """Return the manifest as JSON text; ``from_json`` reads it back."""
        first: dict[str, Any] = dict.fromkeys(("inputs", "targets", "outputs"))
        data: dict[str, Any] = first | dataclasses.asdict(self) | {"data": self.data.as_data()}
        for name in _OF_A_STEP if self.steps else ():
            del data[name]
        for target in data["targets"]:
            for name in [n for n in ("most", "counted_by", "padded") if target[n] is None or target[n] is False]:
                del target[name]
        for spec in (data, *data["steps"].values()):
            for measure in spec.get("measures", ()):
                if not measure["rows"]:
                    del measure["rows"]
            for name in [n for n in _IF_ANY if not spec.get(n, True)]:
                del spec[name]
        return escaped_json(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False))

    @classmethod
    def from_json(cls, text: str, source: str = "the manifest") -> Manifest:
        """Parse JSON text and check every field.

        Args:
            text: the JSON text.
            source: the origin of the text, for messages.

        Raises:
            ModelError: if the text is not JSON, has a newer version, or has missing, unknown or ill-typed fields.
        """
        try:
            data = json_of(text)
        except UnreadableError as error:
            raise ModelError(f"{source} is damaged ({error}); build the step again") from None
        if not isinstance(data, dict):
            raise ModelError(f"{source} is damaged: expected a JSON object; build the step again")
        _check_version(data, source)
        for of_files in (DIGESTS, BASES):  # only in manifest.json, not in the copies inside the models
            data.pop(of_files, None)
        try:
            return cls(**_parsed(data))
        except RecursionError:
            raise ModelError(f"{source} is damaged (it is nested too deeply); build the step again") from None
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise ModelError(f"{source} is damaged ({shown(error)}); build the step again") from None

    @property
    def batch(self) -> tuple[TensorSpec, ...]:
        """The entries of a batch: inputs, then targets."""
        return (*self.inputs, *self.targets)

    def spec(self, name: str) -> TensorSpec | None:
        """Return the input or target of that name, or None if there is no such input or target."""
        return next((s for s in self.batch if s.name == name), None)

    @property
    def open_dimensions(self) -> tuple[str, ...]:
        """The symbolic sizes of inputs and targets."""
        return tuple(dict.fromkeys(d for s in self.batch for d in s.shape if isinstance(d, str)))

    def check_sizes(self, sizes: Iterable[str]) -> None:
        """Raise UnknownNameError unless each of ``sizes`` is an open dimension, or a factor of one (``11*batch``)."""
        known = dict.fromkeys([*self.open_dimensions, *(f for d in self.open_dimensions for f in size_factors(d))])
        for name in sizes:
            if name not in known:
                raise UnknownNameError(f"the step has no dynamic dimension '{shown(name)}'{suggestion(name, known)}")

    @functools.cached_property
    def parts(self) -> Mapping[str, PartSpec]:
        """The named steps by name; a single step has the name ""."""
        if self.steps:
            return self.steps
        state = tuple(s.name for s in self.state)
        same: dict[str, Any] = {name: getattr(self, name) for name in (*_OF_A_STEP, "trainable")}
        batch = tuple(s.name for s in self.batch)
        return {"": PartSpec(inputs=batch, reads=state, writes=state, **same)}

    @functools.cached_property
    def results(self) -> dict[str, str]:
        """The names of the scalar outputs of eval.onnx, by evaluation column."""
        found = ((column(step, c), output) for step, p in self.parts.items() for c, output in p.results(step).items())
        return dict(found)

    @functools.cached_property
    def columns_of_sums(self) -> tuple[MeasureSpec, ...]:
        """The columns of an evaluation that are computed from sums."""
        return tuple(m for part in self.parts.values() for m in part.measures)

    def specs_of(self, step: str) -> list[TensorSpec]:
        """Return the inputs, then the targets, of a batch for one of the ``parts``."""
        names = set(self.parts[step].inputs)
        return [s for s in self.batch if s.name in names]

    def named(self, step: str) -> PartSpec:
        """Return the step of this name.

        Raises:
            UnknownNameError: if there is no such step.
        """
        if step not in self.steps:
            if not self.steps:
                raise UnknownNameError(
                    f"there is no step '{shown(step)}': this is a single step without a name",
                    remedy="call trainer.step(batch)",
                )
            raise UnknownNameError(f"there is no step '{shown(step)}'{suggestion(step, self.steps)}")
        return self.steps[step]


_IF_ANY = ("averages", "measures", "precision", "reports", "steps", "separate", "data")  # written only if set
_OF_A_STEP = tuple(f.name for f in dataclasses.fields(StepSpec))
_SEQUENCES = ("inputs", "targets", "outputs", "metrics", "measures", "reports", "state", "reads", "writes", "trainable",
              "frozen")  # fmt: skip
_PLAIN = ("loss", "optimizer", "precision")


@functools.cache
def package_version() -> str:
    """Return the version of this package, or ``"0"`` in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("onnx-gradgraph")
    except metadata.PackageNotFoundError:
        return "0"


def alone_in(part: PartSpec) -> dict[str, Any]:
    """Return the ``StepSpec`` fields of ``part``, for the manifest of a single step."""
    return {name: getattr(part, name) for name in _OF_A_STEP}


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON types: lists, numbers, and strings for infinities, which JSON does not support."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | str | None) else str(value)


# --- checks --------------------------------------------------------------------------------------------


def _check_version(data: dict[str, Any], source: str) -> None:
    version = data.get("version")
    if not isinstance(version, int) or version < 1:
        raise ModelError(f"{source} has no version field; build the step again")
    if version > VERSION:
        raise ModelError(
            f"{source} has version {version}, written by gradgraph {data.get('gradgraph', '?')}; this gradgraph reads "
            f"versions up to {VERSION}: upgrade it, or build the step again"
        )


def _parsed(data: dict[str, Any]) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(Manifest)}
    for name in data:
        if name not in fields:
            raise ValueError(f"unknown field {name!r}")
    parsed = _parsed_step(data, ("outputs", "frozen"))
    parsed["inputs"] = tuple(_spec(TensorSpec, s) for s in data["inputs"])
    parsed["targets"] = tuple(_spec(TargetSpec, s) for s in data.get("targets", ()))
    parsed["state"] = tuple(_spec(StateSpec, s) for s in data["state"])
    parsed["steps"] = {
        str(name): PartSpec(**_parsed_step(part, ("inputs", "reads", "writes")))
        for name, part in data.get("steps", {}).items()
    }
    for spec in data["steps"].values() if parsed["steps"] else [data]:
        for name in ("loss", "optimizer"):
            _check_call(name, spec[name])
    if precision := data.get("precision"):
        _check_call("precision", precision)
        names = precision.get("state", {})
        if not isinstance(names, dict) or not set(names.values()) <= {s.name for s in parsed["state"]}:
            raise ValueError("field 'precision' should name tensors of the state")
    if "separate" in data:
        parsed["separate"] = _separate(data["separate"])
    parsed["data"] = DataNames.from_data(data.get("data", {}))
    return parsed


def _parsed_step(data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the parsed fields of a ``StepSpec``; the fields in ``names`` must be lists of strings."""
    for name, kind in _TYPES.items():
        if name in data and (not isinstance(data[name], kind) or isinstance(data[name], bool)):
            raise ValueError(f"field {name!r} should be a {kind.__name__}")
    _check_texts(data, (*names, "metrics", "reports", "trainable"))
    rates = {str(k): float(v) for k, v in data.get("hyperparameters", {}).items()}
    return {**data, "hyperparameters": rates, "measures": tuple(_measure(m) for m in data.get("measures", ()))}


def _check_texts(data: Any, names: Sequence[str]) -> None:
    for name in names:
        if not all(isinstance(x, str) for x in data.get(name, ())):
            raise ValueError(f"field {name!r} should be a list of names")


def _check_call(name: str, call: Any) -> None:
    if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        raise ValueError(f"field {name!r} should have a name and arguments")


_TYPES: dict[str, type] = {
    **dict.fromkeys(_SEQUENCES, list),
    **dict.fromkeys((*_PLAIN, "hyperparameters", "averages", "steps"), dict),
    **dict.fromkeys(("loss_output", "backend", "machine", "gradgraph"), str),
    "opset": int,
}


def _spec(kind: type, data: Any) -> Any:
    spec = kind(**{**data, "shape": tuple(data["shape"])})
    if not isinstance(spec.name, str) or not all(d is None or isinstance(d, int | str) for d in spec.shape):
        raise ValueError(f"the entry of {spec.name!r} is ill-typed")
    numpy_dtype(spec.dtype)
    if isinstance(spec, TargetSpec):
        numbers = all(n is None or type(n) is int for n in (spec.classes, spec.ignore_index))
        bound = spec.most is None or type(spec.most) is int or isinstance(spec.most, str)
        padded = isinstance(spec.padded, bool)
        if not numbers or not bound or not padded or not isinstance(spec.counted_by, str | None):
            raise ValueError(f"the target {spec.name!r} is ill-typed")
    return spec


def _measure(data: Any) -> MeasureSpec:
    spec = MeasureSpec(**{**data, "shape": tuple(data["shape"])})
    texts = all(isinstance(text, str) for text in (spec.name, spec.sums, spec.finish))
    kinds = isinstance(spec.arguments, dict) and isinstance(spec.rows, bool)
    if not texts or not kinds or not all(type(d) is int and d > 0 for d in spec.shape):
        raise ValueError(f"the measure {spec.name!r} is ill-typed")
    return spec


def _separate(data: Any) -> SeparateSpec:
    halves = {half: HalfSpec(**{n: tuple(names) for n, names in data[half].items()}) for half in ("gradient", "apply")}
    for half in halves.values():
        _check_texts(vars(half), ("reads", "writes", "hyperparameters"))
    gradients = {str(name): str(gradient) for name, gradient in data["gradients"].items()}
    return SeparateSpec(**{**data, "gradients": gradients, "weight": str(data["weight"]), **halves})


def _check_once(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelError(f"the manifest has the name '{shown(name)}' twice; build the step again")
        seen.add(name)


def _check_part(manifest: Manifest, name: str, part: PartSpec) -> None:
    """Raise ModelError unless a named step's name is an identifier and all tensors in its ``PartSpec`` exist."""
    if not (name.isidentifier() and name.isascii()):
        raise ModelError(
            f"the manifest has a step called '{shown(name)}', which is not a valid name; build the step again"
        )
    batch = {s.name for s in manifest.batch}
    state = {s.name for s in manifest.state}
    for names, known in ((part.inputs, batch), (part.reads, state), (part.writes, {*part.reads}),
                         (part.trainable, {*part.writes})):  # fmt: skip
        for missing in names:
            if missing not in known:
                raise ModelError(
                    f"the step '{shown(name)}' of the manifest names '{shown(missing)}', which does not exist; build "
                    "the step again"
                )


def _check_names(manifest: Manifest) -> None:
    fed = [s.name for s in (*manifest.batch, *manifest.state)]
    following = [s.next for s in manifest.state]
    for part in manifest.parts.values():
        sums = (m.sums for m in part.measures)
        _check_once([*fed, *part.hyperparameters])
        _check_once([part.loss_output, *part.metrics, *part.reports, *sums, *following])
    _check_once(manifest.outputs)
    for name, part in manifest.steps.items():
        _check_part(manifest, name, part)
    for s in manifest.state:
        name, kind = shown(s.name), shown(s.kind)
        if s.kind not in get_args(StateKind):
            raise ModelError(f"the manifest has the unknown kind '{kind}' for '{name}'; build the step again")
        if not all(isinstance(d, int) and d >= 0 for d in s.shape):
            raise ModelError(f"the manifest has no fixed shape for the state tensor '{name}'; build the step again")
    states = {s.name: s for s in manifest.state}
    for name, average in manifest.averages.items():
        like, spec = states.get(name), states.get(average)
        if (
            like is None
            or spec is None
            or like.kind != "parameter"
            or (like.dtype, like.shape) != (spec.dtype, spec.shape)
        ):
            raise ModelError(
                f"the manifest calls '{shown(average)}' an average of '{shown(name)}', but it is not one; build the "
                "step again"
            )
    parameters = {s.name for s in manifest.state if s.kind == "parameter"}
    for name in manifest.trainable:
        if name not in parameters:
            raise ModelError(
                f"the manifest calls '{shown(name)}' trainable, but no parameter has that name; build the step again"
            )
