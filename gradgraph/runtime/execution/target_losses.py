"""The loss of each target, and what follows from it for class names: Softmax logits, Sigmoid logits, or signs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gradgraph.data.record.column_assignment import is_one_number
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TargetSpec
from gradgraph.errors import DataError, shown
from gradgraph.step.manifest import Manifest

if TYPE_CHECKING:
    from gradgraph.frontend.loss import Loss


def with_activations(names: DataNames, manifest: Manifest) -> DataNames:
    """Return a copy of ``names`` that also lists the targets with a loss on logits.

    ``softmax`` lists targets with logits of a Softmax, ``sigmoid`` targets with one Sigmoid logit per sample.
    """
    of = {name: _computed_by(loss_of(name, manifest)) for name in names.classes}
    return replace(
        names,
        softmax=[name for name, computed in of.items() if computed == "Softmax"],
        sigmoid=[t.name for t in manifest.targets if t.name in of and is_yes_or_no(t, manifest)],
    )


def is_yes_or_no(target: TargetSpec, manifest: Manifest) -> bool:
    """Whether a target is one number per sample, and its loss treats the model's output as the logit of a Sigmoid."""
    return is_one_number(target) and _computed_by(loss_of(target.name, manifest)) == "Sigmoid"


def _computed_by(loss: Loss | None) -> str:
    return "" if loss is None else "Softmax" if loss.of_logs else loss.activation


def loss_of(target: str, manifest: Manifest) -> Loss | None:
    """Return the loss of a target; None if the loss is a user's function or the target has none."""
    from gradgraph.losses import LOSSES

    for part in manifest.parts.values():
        call = part.loss
        if call.get("name") not in LOSSES:  # several, by output
            of_output = {f"{output}_target": call for output, call in call.get("arguments", {}).items()}
            call = of_output.get(target, {})
        if target in part.inputs and isinstance(call, Mapping) and call.get("name") in LOSSES:
            return LOSSES.by_name(call["name"], **call["arguments"])
    return None


def check_numbers_mean(names: DataNames, manifest: Manifest) -> None:
    """Raise DataError if a target has class names, which are encoded as 0 and 1, but its loss expects −1 and 1."""
    for target in names.classes:
        loss = loss_of(target, manifest)
        if loss is not None and any(one.is_sign for one in loss.targets):
            raise DataError(
                f"the named classes of '{shown(target)}' become the numbers 0 and 1, but the loss {loss.name} expects "
                "−1 and 1",
                remedy="build the step with loss='bce_with_logits', or use the numbers −1 and 1",
                shell="add --loss bce_with_logits, or use the numbers −1 and 1",
            )
