"""Assignment of the arrays of a preprocessing to the inputs and targets of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradgraph.errors import DataError, listed, shown
from gradgraph.step.data_names import DataNames
from gradgraph.step.manifest import TargetSpec, TensorSpec

SAMPLE_WEIGHT, MASK = "sample_weight", "mask"


def compared(targets: Sequence[TargetSpec]) -> list[TargetSpec]:
    """Return the targets that outputs are compared with, without sample weights and masks."""
    masks = {t.name for t in targets if t.dtype == "bool" and t.name.endswith(f"_{MASK}")}
    return [t for t in targets if t.name not in {SAMPLE_WEIGHT, MASK, *masks}]


def is_one_number(target: TensorSpec) -> bool:
    """Whether a target is a floating number per sample: [samples], or [samples, 1]."""
    return target.shape[1:] in ((), (1,)) and len(target.shape) > 0 and target.dtype.startswith(("float", "bfloat"))


def fitting(names: DataNames, inputs: Sequence[TensorSpec], targets: Sequence[TargetSpec]) -> DataNames:
    """Return the part of ``names``, another model's, that fits these inputs and targets; raises DataError as
    ``placed``.
    """
    columns = {s.name: s.shape[1] if len(s.shape) == 2 else 1 for s in (*inputs, *targets) if len(s.shape) in (1, 2)}
    labels = {t.name: t.classes for t in targets if t.ignore_index is not None}
    classes = labels or {t.name: 2 for t in compared(targets) if is_one_number(t)}  # no and yes
    return placed(names.fitting(columns, classes), inputs, targets)


def placed(names: DataNames, inputs: Sequence[TensorSpec], targets: Sequence[TargetSpec]) -> DataNames:
    """Return ``names`` with the arrays of its preprocessing renamed to these inputs and targets.

    Its arrays are the inputs of these names, or the only matrices of floating and of whole numbers; each target column
    is the target named after it, or the next one.

    Raises:
        DataError: there is no such input, or there are more or fewer targets.
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
        f"the preprocessing makes a matrix '{shown(name)}', but the model reads {listed([str(s) for s in inputs])}; "
        "give it one such input"
    )


def _learnt(names: DataNames, targets: Sequence[TargetSpec]) -> DataNames:
    """Return the columns and classes of the targets that have none recorded yet."""
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
        raise DataError(f"{listed(columns)} are target columns, but the step has the targets "
                        f"{listed([t.name for t in targets])}; build it with one for each, or for all")  # fmt: skip
    labels = {target.name for target in targets if target.ignore_index is not None}
    classes = {name: plan.targets[own[0]].classes for name, own in of.items() if name in labels and len(own) == 1}
    return DataNames(of, {name: own for name, own in classes.items() if own})
