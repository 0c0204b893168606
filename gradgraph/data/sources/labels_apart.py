"""Inputs and labels as two arguments, as in ``fit(x, y)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from gradgraph.data.preprocess.frames import Frame, is_column, is_table
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import DataError, listed, shown

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


def paired(x: Any, y: Any, inputs: Sequence[TensorSpec], targets: Sequence[TargetSpec], known: DataNames) -> Any:
    """Combine inputs and labels to a dict under the input and target names of the step.

    If ``x`` is a table, and ``known``, the names of the training data, contain a preprocessing, ``y`` is added as a
    column. If ``y`` is None, ``x`` is returned unchanged.

    Raises:
        DataError: if it is ambiguous which input or target is meant.
    """
    if y is None:
        return x
    read, learnt = [s.name for s in inputs], [t.name for t in targets]
    is_named, plan = isinstance(x, Mapping) and not is_table(x), known.preprocess
    if plan is not None and len(learnt) == 1 and (is_table(x) or (is_named and plan.holds_columns(x))):
        column, *others = known.columns.get(learnt[0], learnt)
        if not others:
            return Frame(x).with_column(column, y)
    if len(learnt) != 1 or not (is_named or len(read) == 1):
        have = f"the inputs {listed(read)}" if len(read) > 1 else f"the input {listed(read)}"
        have += f" and the targets {listed(learnt)}" if learnt else " and no target"
        names = ", ".join(f"'{shown(name)}': …" for name in (*read, *learnt))
        raise DataError(
            f"the step has {have}, so x and y are ambiguous",
            remedy=f"give a dict with these names: {{{names}}}",
        )
    if is_named:
        return {**x, learnt[0]: y}
    return {**dict.fromkeys(read, x), learnt[0]: y}
