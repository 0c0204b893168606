"""Assignment of the arrays that table preprocessing computes to the inputs and targets of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import DataError, listed, shown

SAMPLE_WEIGHT, MASK = "sample_weight", "mask"


def compared(targets: Sequence[TargetSpec]) -> list[TargetSpec]:
    """Return the targets that are compared with the model's outputs, unlike sample weights and masks."""
    masks = {t.name for t in targets if t.dtype == "bool" and t.name.endswith(f"_{MASK}")}
    return [t for t in targets if t.name not in {SAMPLE_WEIGHT, MASK, *masks}]


def is_one_number(target: TensorSpec) -> bool:
    """Whether a target is one floating-point number per sample: [samples], or [samples, 1]."""
    return target.shape[1:] in ((), (1,)) and len(target.shape) > 0 and target.dtype.startswith(("float", "bfloat"))


def fitting(names: DataNames, inputs: Sequence[TensorSpec], targets: Sequence[TargetSpec]) -> DataNames:
    """Return the part of another model's ``names`` that matches these inputs and targets.

    Raises:
        DataError: if preprocessed arrays cannot be assigned; see ``placed``.
    """
    columns = {s.name: s.shape[1] if len(s.shape) == 2 else 1 for s in (*inputs, *targets) if len(s.shape) in (1, 2)}
    labels = {t.name: t.classes for t in targets if t.ignore_index is not None}
    classes = labels or {t.name: 2 for t in compared(targets) if is_one_number(t)}  # no and yes
    return placed(names.fitting(columns, classes), inputs, targets)


def placed(names: DataNames, inputs: Sequence[TensorSpec], targets: Sequence[TargetSpec]) -> DataNames:
    """Return ``names`` with the arrays of its preprocessing renamed to these inputs and targets.

    An array is assigned to the input of the same name, or else to the only matrix of its type (floats or integers). A
    target column is assigned to the target named after it; if names do not match, columns are assigned in order.

    Raises:
        DataError: if no input matches an array, or the numbers of target columns and targets differ.
    """
    plan = names.preprocess
    if plan is None:
        return names
    wide = [spec for spec in inputs if len(spec.shape) == 2]
    floats = [spec.name for spec in wide if spec.dtype.startswith(("float", "bfloat"))]
    whole = [spec.name for spec in wide if spec.name not in floats]
    numbers = _input(plan.numbers, floats, inputs) if plan.numbers in plan.features else plan.numbers
    indices = _input(plan.indices, whole, inputs) if plan.indices in plan.features else plan.indices
    names = replace(names, preprocess=replace(plan, numbers=numbers, indices=indices))
    return names.updated(_learnt(names, compared(targets)))


def _input(name: str, fitting: Sequence[str], inputs: Sequence[TensorSpec]) -> str:
    if name in fitting or len(fitting) == 1:
        return name if name in fitting else fitting[0]
    raise DataError(
        f"the preprocessing computes a matrix '{shown(name)}', but the model has the inputs "
        f"{listed([str(s) for s in inputs])}; give the model a matrix input of that name"
    )


def _learnt(names: DataNames, targets: Sequence[TargetSpec]) -> DataNames:
    """Return the columns and class names of targets, from the target columns of the preprocessing.

    The result is empty if ``names`` already has columns for all targets, or there are no target columns.
    """
    plan = names.preprocess
    assert plan is not None
    columns = list(plan.targets)
    unknown = [target.name for target in targets if target.name not in names.columns]
    if not columns or not unknown:
        return DataNames()
    if len(targets) == 1:
        of = {targets[0].name: columns}
    elif len(targets) == len(columns):
        by_name = {target.name: [c for c in columns if target.name in (c, f"{c}_target", f"{c}_logits_target")]
                   for target in targets}  # fmt: skip
        is_called = all(len(own) == 1 for own in by_name.values())
        of = by_name if is_called else {t.name: [c] for t, c in zip(targets, columns, strict=True)}
    else:
        raise DataError(
            f"{listed(columns)} are target columns, but the step has the targets "
            f"{listed([t.name for t in targets])}; build it with one target per column, or a single target"
        )
    labels = {target.name for target in targets if target.ignore_index is not None}
    classes = {name: plan.targets[own[0]].classes for name, own in of.items() if name in labels and len(own) == 1}
    return DataNames(of, {name: own for name, own in classes.items() if own})
