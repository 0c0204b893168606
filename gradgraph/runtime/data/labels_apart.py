"""Inputs and labels as two arguments, as in ``fit(x, y)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gradgraph.errors import DataError, listed, shown
from gradgraph.preprocess.frames import Frame, is_column, is_table
from gradgraph.step.data_names import DataNames
from gradgraph.step.manifest import Manifest

R = TypeVar("R")
Method = TypeVar("Method", bound=Callable[..., Any])


def labels_apart(method: Method) -> Method:
    """Decorate a method with the arguments ``(data, …, y=None)`` so that it also accepts ``(x, y, …)``.

    A second positional argument that is an array, a list or a table column is used as ``y``.
    """

    @functools.wraps(method)
    def call(self: Any, *given: Any, **options: Any) -> Any:
        if len(given) > 1 and options.get("y") is None:
            data, y, *others = given
            if isinstance(y, list | tuple) or is_column(y) or len(getattr(y, "shape", ())) > 0:
                return method(self, data, *others, **{**options, "y": y})
        return method(self, *given, **options)

    return call  # type: ignore[return-value]


def paired(x: Any, y: Any, manifest: Manifest, known: DataNames) -> Any:
    """Combine inputs and labels to a dict under the input and target names of the step.

    If ``x`` is a table, and ``known``, the names of the training data, contain a preprocessing, ``y`` is added as a
    column. If ``y`` is None, ``x`` is returned unchanged.

    Raises:
        DataError: if it is ambiguous which input or target is meant.
    """
    if y is None:
        return x
    inputs = {s.name: s for s in manifest.inputs}
    targets = [t.name for t in manifest.targets]
    is_named, plan = isinstance(x, Mapping) and not is_table(x), known.preprocess
    if plan is not None and len(targets) == 1 and (is_table(x) or (is_named and plan.holds_columns(x))):
        column, *others = known.columns.get(targets[0], targets)
        if not others:
            return Frame(x).with_column(column, y)
    if len(targets) != 1 or not (is_named or len(inputs) == 1):
        have = f"the inputs {listed(inputs)}" if len(inputs) > 1 else f"the input {listed(inputs)}"
        have += f" and the targets {listed(targets)}" if targets else " and no target"
        names = ", ".join(f"'{shown(name)}': …" for name in (*inputs, *targets))
        raise DataError(
            f"the step has {have}, so x and y are ambiguous",
            remedy=f"give a dict with these names: {{{names}}}",
        )
    if is_named:
        return {**x, targets[0]: y}
    return {**dict.fromkeys(inputs, x), targets[0]: y}
