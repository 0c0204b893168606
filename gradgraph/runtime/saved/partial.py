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

from gradgraph.errors import CheckpointError, listed, shown
from gradgraph.files.path_kinds import Kind as Place
from gradgraph.files.path_kinds import weights_of, wrong_kind
from gradgraph.files.untrusted.array_files import safetensors_in
from gradgraph.files.untrusted.regular import UnreadableError
from gradgraph.passes.normal import load_plain
from gradgraph.runtime.data.arrays import load_arrays
from gradgraph.runtime.data.batch import Array, to_array
from gradgraph.runtime.saved.checkpoint import METADATA_KEY
from gradgraph.runtime.saved.record import from_text
from gradgraph.step.data_names import NO_NAMES, DataNames
from gradgraph.step.manifest import Manifest, StateSpec, numpy_dtype

WEIGHTS = ("parameter", "statistic")
AS_IN_MODEL = "gradgraph.weights"  # metadata of a safetensors file: its arrays have the layout of the model's nodes


class OfModel(dict[str, Array]):
    """Arrays by name in the layout of the model's nodes, as returned by a trainer."""


@dataclass(frozen=True)
class Stored:
    """The content of a weights file.

    Attributes:
        values: arrays by name; ``OfModel`` for a checkpoint or ``save_weights``.
        names: names of the training data, for a model or checkpoint.
        model: the model, for an ``.onnx`` file.
    """

    values: Mapping[str, Any]
    names: DataNames = NO_NAMES
    model: ir.Model | None = None


@dataclass(frozen=True)
class Loaded:
    """The result of ``Trainer.load_state_dict``, by name.

    Attributes:
        loaded: tensors with new values.
        missing: weights without a value; unchanged.
        unexpected: values without a weight in the step, including optimizer state.
        mismatched: weights whose value has another shape or type, with the reason; unchanged.
        frozen: frozen weights that differ from the given value; unchanged.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} tensors"]
        if self.missing:
            parts.append(f"no values came for {listed(self.missing)}")
        if self.mismatched:
            parts.append(", ".join(f"'{shown(name)}' {why}" for name, why in list(self.mismatched.items())[:8]))
        if self.frozen:
            parts.append(f"{listed(self.frozen)}: frozen in this step, with other values")
        if self.unexpected:
            parts.append(f"not used: {listed(self.unexpected)}")
        return "; ".join(parts)


def fitting(
    manifest: Manifest, values: Mapping[str, Any], held: Callable[[str], Array | None]
) -> tuple[Loaded, dict[str, Array]]:
    """Find the ``values`` that are weights of the step, and convert them to its types.

    Args:
        held: returns a frozen weight of the step by name.

    Raises:
        CheckpointError: no value matches.
        DataError: NumPy cannot read a value.
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
            f"none of the {len(values)} values fits this step{why} (they are called {listed(values, 3)}, weights of "
            f"the step {listed(specs, 3)}); give them the names that `gradgraph inspect` shows"
        )
    return Loaded(tuple(taken), missing, tuple(unexpected), mismatched, tuple(frozen)), taken


def _mismatch(spec: StateSpec, value: Array) -> str:
    """Return why a value does not match a tensor, or ""; floating-point types are converted."""
    want = numpy_dtype(spec.dtype)
    if value.shape == spec.shape and (value.dtype == want or (_is_floating(value.dtype) and _is_floating(want))):
        return ""
    return f"is {value.dtype}{list(value.shape)} there and {spec.dtype}{list(spec.shape)} here"


def is_there(path: Path) -> bool:
    """Whether it is a file; False for an invalid name."""
    try:
        return path.is_file()
    except OSError:
        return False


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def read_values(path: str | os.PathLike[str]) -> Stored:
    """Read arrays by name from an ``.onnx``, ``.npz``, safetensors or checkpoint file, or a run folder.

    Raises:
        CheckpointError, DataError, ModelError: it does not exist or is damaged.
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
    with contextlib.suppress(ValueError):  # weights are usable without the record
        names = from_text(metadata[METADATA_KEY]).progress.names if METADATA_KEY in metadata else NO_NAMES
    return Stored(OfModel(values) if {METADATA_KEY, AS_IN_MODEL} & metadata.keys() else values, names)
