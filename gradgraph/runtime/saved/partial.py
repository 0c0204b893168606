"""Partial loading of weights: matching the tensors of a file to a step by name and shape."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.data.arrays.batch import Array, to_array
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import CheckpointError, counted, listed, shown
from gradgraph.files.path_kinds import Kind as Place
from gradgraph.files.path_kinds import weights_of, wrong_kind
from gradgraph.files.untrusted.array_files import safetensors_in
from gradgraph.files.untrusted.regular import UnreadableError
from gradgraph.passes.normal import load_plain
from gradgraph.runtime.saved.checkpoint import METADATA_KEY
from gradgraph.runtime.saved.record import from_text
from gradgraph.step.manifest import Manifest, StateSpec

WEIGHTS = ("parameter", "statistic")
AS_IN_MODEL = "gradgraph.weights"  # metadata key of safetensors files whose arrays have the layout of the model's nodes


class OfModel(dict[str, Array]):
    """A dict of arrays with the names and layouts of the step's state tensors, as returned by a trainer."""


@dataclass(frozen=True)
class Stored:
    """The content of a weights file.

    Attributes:
        values: arrays by name; an ``OfModel`` if the file is a checkpoint or was written by ``save_weights``.
        names: column and class names of the training data, if the file is a model or a checkpoint.
        model: the model, if the file is an ``.onnx``.
    """

    values: Mapping[str, Any]
    names: DataNames = NO_NAMES
    model: ir.Model | None = None


@dataclass(frozen=True)
class Loaded:
    """The result of ``Trainer.load_state_dict``: names of tensors by outcome.

    Attributes:
        loaded: tensors with new values.
        missing: weights without a new value; unchanged.
        unexpected: values without a weight in the step, including optimizer state.
        mismatched: weights whose new value has a different shape or type, with the reason; unchanged.
        frozen: frozen weights that differ from the new value; unchanged.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"loaded {counted(len(self.loaded), 'tensor')}"]
        if self.missing:
            parts.append(f"missing: {listed(self.missing)}")
        if self.mismatched:
            parts.append(", ".join(f"'{shown(name)}' {why}" for name, why in list(self.mismatched.items())[:8]))
        if self.frozen:
            parts.append(f"not loaded, since frozen in this step with other values: {listed(self.frozen)}")
        if self.unexpected:
            parts.append(f"not used: {listed(self.unexpected)}")
        return "; ".join(parts)


def fitting(
    manifest: Manifest, values: Mapping[str, Any], held: Callable[[str], Array | None]
) -> tuple[Loaded, dict[str, Array]]:
    """Select the values that match weights of the step by name and shape; return a report and the converted arrays.

    The arrays have the step's dtypes. ``held`` returns the step's frozen weight of a name, or None.

    Raises:
        CheckpointError: if no value matches.
        DataError: if NumPy cannot convert a value.
    """
    specs = {s.name: s for s in manifest.state if s.kind in WEIGHTS}
    taken, mismatched, frozen, unexpected = dict[str, Array](), dict[str, str](), list[str](), list[str]()
    for name, given in values.items():
        if name in specs:
            value = to_array(name, given)
            why = _mismatch(specs[name], value)
            if why:
                mismatched[name] = why
            else:
                taken[name] = value.astype(numpy_dtype(specs[name].dtype), copy=False)
        elif name in manifest.frozen and (own := held(name)) is not None:
            if not np.array_equal(own, to_array(name, given)):
                frozen.append(name)
        else:
            unexpected.append(name)
    missing = tuple(name for name in specs if name not in values)
    if not taken:
        why = f": '{shown(next(iter(mismatched)))}' {next(iter(mismatched.values()))}" if mismatched else ""
        raise CheckpointError(
            f"none of the {len(values)} values matches a weight of this step{why} (names of the values: "
            f"{listed(values, 3)}; of the weights: {listed(specs, 3)}); use the names that `gradgraph inspect` prints"
        )
    return Loaded(tuple(taken), missing, tuple(unexpected), mismatched, tuple(frozen)), taken


def _mismatch(spec: StateSpec, value: Array) -> str:
    """Return why the shape or type of ``value`` does not match ``spec``; "" if they match, as all float types do."""
    want = numpy_dtype(spec.dtype)
    if value.shape == spec.shape and (value.dtype == want or (_is_floating(value.dtype) and _is_floating(want))):
        return ""
    return f"is {value.dtype}{list(value.shape)}, but {spec.dtype}{list(spec.shape)} in this step"


def is_there(path: Path) -> bool:
    """Whether ``path`` is an existing file; False for an invalid file name."""
    try:
        return path.is_file()
    except OSError:
        return False


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def read_values(path: str | os.PathLike[str]) -> Stored:
    """Read arrays by name from an ``.onnx``, ``.npz``, safetensors or checkpoint file, or a run folder.

    Raises:
        CheckpointError, DataError, ModelError: if the file does not exist or is damaged.
    """
    path = weights_of(path)
    if path.suffix == ".onnx":
        model = load_plain(path)
        weights = {name: v.const_value for name, v in model.graph.initializers.items()}
        found = {name: t.numpy() for name, t in weights.items() if isinstance(t, ir.TensorProtocol)}
        return Stored(found, DataNames.read_from(model.metadata_props), model)
    if path.suffix == ".npz":
        return Stored(load_arrays(path))
    if not is_there(path):
        raise CheckpointError(
            wrong_kind(path, Place.CHECKPOINT, Place.MODEL)
            or f"there is no file '{shown(path)}'; give a .safetensors, .ckpt, .npz or .onnx"
        )
    try:
        values, metadata = safetensors_in(path)
    except UnreadableError as error:
        raise CheckpointError(
            wrong_kind(path, Place.CHECKPOINT, Place.MODEL)
            or f"'{shown(path)}' cannot be read ({error}); give a .safetensors, .ckpt, .npz or .onnx"
        ) from None
    names = NO_NAMES
    with contextlib.suppress(ValueError):  # the weights can be used even if the record is invalid
        names = from_text(metadata[METADATA_KEY]).progress.names if METADATA_KEY in metadata else NO_NAMES
    return Stored(OfModel(values) if {METADATA_KEY, AS_IN_MODEL} & metadata.keys() else values, names)
