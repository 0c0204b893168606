"""Remedies in error messages about data that do not match, for Python and for the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import WHOLE, described
from gradgraph.data.record.classes import takes_labels
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import DataError, Remedies, shown


def for_type(spec: TensorSpec, array: np.ndarray[Any, Any]) -> Remedies:
    """Return the remedies for an array whose dtype cannot be converted to the dtype of ``spec``."""
    name, kind = shown(spec.name), array.dtype.kind
    if kind in "USTO":
        if takes_labels(spec):
            return {
                "remedy": f"number the classes, for example by {name} = np.unique({name}, return_inverse=True)",
                "shell": "save class numbers, from 0 on, instead of names",
            }
        return _both("encode text as numbers first")
    if kind == "c":
        return _both("use its real part, its absolute value, or both parts as an axis of two")
    if kind in "mM":
        return _both("use a number instead of a date, such as seconds or days since the first one")
    if array.dtype.names is not None:
        return _both("use one numeric array per input instead of one with named fields")
    if takes_labels(spec) and (axis := _axis_of_classes(spec, array.shape)) is not None:
        return one_hot(spec, axis)
    if kind == "f" and array.size and not (array == np.round(array)).all():
        if takes_labels(spec):
            return _both("use class numbers from 0 on, or build the step with a regression loss, such as mse")
        return _both("it contains fractions, so round it to integers")
    return {"remedy": f"convert it with .astype('{spec.dtype}')", "shell": f"save it as {spec.dtype}"}


def for_shape(spec: TensorSpec, shape: Sequence[int]) -> Remedies:
    """Return the remedies for an array whose ``shape`` does not match ``spec``."""
    if spec.shape and isinstance(spec.shape[0], int) and len(shape) == len(spec.shape) and shape[0] != spec.shape[0]:
        return for_batch(f"use batches of {spec.shape[0]}", spec.shape[0])
    if takes_labels(spec):
        if (axis := _axis_of_classes(spec, shape)) is not None:
            return one_hot(spec, axis)
        when = "if the class axis of the model is the last one"
        return {
            "remedy": f"reshape it, or build the step with cross_entropy(axis=-1) {when}",
            "shell": f"save it in that shape, or build the step with --loss-option axis=-1 {when} (of several losses "
            "OUTPUT.axis=-1)",
        }
    return {"remedy": "reshape it", "shell": "save it in that shape"}


def for_batch(way: str, size: int) -> Remedies:
    """Return the remedies for a batch size that differs from ``size``, the model's fixed batch size over all ranks.

    ``way`` describes how to use the fixed batch size in Python.
    """
    return {
        "remedy": f"{way}, or build the step from a model with a dynamic batch: gradgraph.surgery.open_axes(model, "
        f"{{'INPUT': {{0: 'batch'}}}})",
        "shell": f"add --batch-size {size}, or make the batch of the model dynamic: gradgraph surgery MODEL --open "
        "INPUT:0=batch -o OPENED",
    }


def for_label(spec: TargetSpec, label: int) -> Remedies:
    """Return the remedies for a label that is not a class index; it may be a class name, such as a star rating."""
    if label < 0:
        return _both("correct it")
    return {
        "remedy": "number classes from 0, or name them before training: trainer.names = gradgraph.DataNames("
        f'classes={{\'{shown(spec.name)}\': ["1", "2", …]}})',
        "shell": "number classes from 0",
    }


def one_hot(spec: TensorSpec, axis: int) -> Remedies:
    """Return the remedies for an array with one entry per class on ``axis``, where class indices are expected."""
    return {
        "remedy": f"it looks one-hot, so use class numbers: {shown(spec.name)}.argmax(axis={axis})",
        "shell": f"it looks one-hot, so save class numbers instead: the index of the largest entry on axis {axis}",
    }


def _both(words: str) -> Remedies:
    return {"remedy": words, "shell": words}


def _axis_of_classes(spec: TensorSpec, shape: Sequence[int]) -> int | None:
    """Return the class axis of one-hot labels, which have one axis more than class indices; None for other shapes."""
    classes = spec.classes if isinstance(spec, TargetSpec) else None
    if classes is None or len(shape) != len(spec.shape) + 1:
        return None
    return next((axis for axis in (1, len(shape) - 1) if 0 < axis < len(shape) and shape[axis] == classes), None)


def check_counts(**counts: int | None) -> None:
    """Raise DataError unless each argument is a positive integer, or None (except for ``epochs``).

    For an array instead of a number, the message explains how to pass inputs and targets as one argument.
    """
    for name, value in counts.items():
        if (value is None and name != "epochs") or (value is not None and WHOLE.fits(value) and value > 0):
            continue
        problem = f"{name} must be a whole number above zero, but is {described(value)}"
        if isinstance(value, Iterable) and not isinstance(value, str):
            remedy = "pass inputs and targets as one argument, such as {'x': x, 'target': y}, or (x, y)"
            raise DataError(problem, remedy=remedy)
        raise DataError(problem)


# --- files of other formats --------------------------------------------------------------------------------------

FORMATS = "arrays are read from an .npz file or a folder of .npy files"
_READ = {
    ".csv": "np.genfromtxt({file!r}, delimiter=',', skip_header=1)",
    ".tsv": "np.genfromtxt({file!r}, delimiter='\\t', skip_header=1)",
    ".txt": "np.loadtxt({file!r})",
    ".parquet": "pandas.read_parquet({file!r}).to_numpy()",
    ".feather": "pandas.read_feather({file!r}).to_numpy()",
    ".json": "pandas.read_json({file!r}).to_numpy()",
    ".jsonl": "pandas.read_json({file!r}, lines=True).to_numpy()",
    ".xlsx": "pandas.read_excel({file!r}).to_numpy()",
}
_SPLIT = "np.savez({out!r}, x=t[:, :-1].astype('float32'), target=t[:, -1].astype('int64'))"


def for_file(path: Path) -> Remedies:
    """Return the remedies for a data file that is not an ``.npz``: how to convert it, if the suffix is known."""
    suffix = path.suffix.lower()
    if suffix == ".npy":
        words = "move it into a folder, named like the model's input, next to one file for each other input"
        return _both(words)
    if suffix not in _READ:
        return {"remedy": "save it with np.savez, one array per input", "shell": "save it as .npz, one array per input"}
    file = path if shown(path) == str(path) else Path(f"table{suffix}")  # the printed command must be valid code
    read = _READ[suffix].format(file=str(file))
    line = f"t = {read}; {_SPLIT.format(out=str(file.with_suffix('.npz')))}"
    code = f"import numpy as np{', pandas' if 'pandas' in read else ''}; {line}"
    quoted = shlex.quote(code) if any(c in str(file) for c in "'\"$`!") else f'"{code}"'
    where = "if the last column has class numbers; use float32 for regression targets, and the model's names of inputs"
    return {
        "remedy": f"convert it ({where}): {line}",
        "shell": f"convert it ({where}): python -c {quoted}",
    }
