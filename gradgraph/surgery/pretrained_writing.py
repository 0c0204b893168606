"""Weights that were trained elsewhere, written into a finished model, in the form in which it stores each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from gradgraph.errors import DataError, counted, shown
from gradgraph.passes.normal.weights.stored_once import find_merged
from gradgraph.surgery.linear_layers import rewritten
from gradgraph.surgery.operation import layers_log, numbers_of, set_numbers
from gradgraph.surgery.pretrained_files import Pretrained
from gradgraph.surgery.pretrained_weights import Match, Plan, is_integer
from gradgraph.surgery.quantised_tables import write_table
from gradgraph.surgery.stored_weights import (
    is_quantised,
    write_floats,
    write_integer_bias,
    write_quantised,
)
from gradgraph.surgery.unnamed_weights import is_stored, resembles
from gradgraph.surgery.untied import untie
from gradgraph.surgery.weight_places import TABLE, Place
from gradgraph.surgery.weights import first_names, weights_named, weights_of

Array = np.ndarray[Any, Any]


def take_pretrained(
    work: ir.Model,
    source: Pretrained,
    *,
    strict: bool = True,
    epsilon: float | None = None,
    exported: Pretrained | None = None,
    errors: dict[str, float] | None = None,
    done: Callable[[ir.Model], None] = lambda _: None,
) -> None:
    """Write the weights of ``source`` into ``work``, and log the number of tensors and weights.

    Args:
        work: the model; its weights keep their types, layouts, packing and quantisation.
        source: the new weights.
        strict: require a tensor for each weight of the model, and a weight for each tensor, except for buffers.
        epsilon: the epsilon of BatchNormalizations that are merged into convolutions.
        exported: the weights from which the model was exported, to check each match; None if they are unknown.
        errors: receives the rounding error ``‖stored − W‖/‖W‖`` of each quantised layer, by module.
        done: called with the model after each weight.

    Raises:
        DataError: nothing fits, weights or tensors remain, a shape differs, or a number does not fit the stored type.
    """
    known = {*weights_of(work)}
    for value in find_merged(value for value in weights_named(work, "*") if value.name in known):
        untie(work, value)
    plan = Plan(work, source, epsilon)
    if exported is None:
        plan.check_computed()
        _leave_doubtful(plan, strict)
    else:
        _check_exported(plan, Plan(work, exported, epsilon))
    _check_all(plan, strict)
    groups: dict[ir.Value, list[Match]] = defaultdict(list)
    for match in sorted(
        plan.matches, key=lambda match: match.place.layer is None
    ):  # scales of biases depend on weights
        groups[match.place.value].append(match)
    for group in groups.values():
        _write(work, plan, _writer(group), group, errors)
        done(work)


def _leave_doubtful(plan: Plan, strict: bool) -> None:
    """Raise DataError, or without ``strict`` drop the matches, if the exporter may have computed tensors of the model.

    A tensor without a name in the model must resemble the tensor of the file that its module has.
    """
    doubtful = [m for m in plan.matches if not m.is_named and not resembles(plan.stored(m), plan.weight(m))]
    if not doubtful:
        return
    names = list(dict.fromkeys(f"{m.place.value.name} of {m.place.module}" for m in doubtful))
    if strict:
        raise DataError(
            f"the exporter may have computed weights of the model ({first_names(names)}), which have no names and "
            f"differ greatly from those of '{shown(plan.source.where)}'",
            remedy="pass the weights from which the model was exported as exported_from, or export the new weights",
            shell="add --exported-from FILE with the weights from which the model was exported, or export the new "
            "weights",
        )
    plan.drop(doubtful)


def _check_exported(plan: Plan, before: Plan) -> None:
    """Raise DataError unless the model stores what the weights from which it was exported would become."""
    old = {match.place.value: match for match in before.matches}
    for match in plan.matches:
        other = old.get(match.place.value)
        same = other is not None and (other.parts, other.norm is None) == (match.parts, match.norm is None)
        if other is None or not same or not is_stored(before.stored(other), before.weight(other), _is_rounded(match)):
            raise DataError(
                f"'{shown(match.place.value.name)}' of '{shown(match.place.module)}' in the model is not what "
                f"'{shown(before.source.where)}' contains, so the exporter computed it, or other weights were "
                "exported; export the new weights"
            )


def report(plan: Plan) -> str:
    """Return the counts of a plan: ``took 291 of 293 tensors for 146 of 146 weights; left 2 (a, b)``."""
    total = len(plan.source.tensors)
    left = [*plan.spare, *plan.buffers]
    values = len({match.place.value for match in plan.matches})
    lost = len(dict.fromkeys(plan.missing))
    text = f"took {total - len(left)} of {counted(total, 'tensor')} for {values} of {counted(values + lost, 'weight')}"
    text += f"; left {len(left)} ({first_names(left)})" if left else ""
    return text + (f"; {counted(lost, 'weight')} unchanged ({first_names(plan.missing)})" if lost else "")


def _check_all(plan: Plan, strict: bool) -> None:
    where, tensors = f"'{shown(plan.source.where)}'", counted(len(plan.source.tensors), "tensor")
    if not plan.matches:
        raise DataError(
            f"none of the {tensors} in {where} ({first_names([*plan.source.tensors])}) is a weight of the model "
            f"({first_names(plan.missing)}); pass weights of the same family"
        )
    parts = []
    if plan.missing:
        have = "has" if len(plan.missing) == 1 else "have"
        lost = counted(len(plan.missing), "weight")
        parts.append(f"{lost} of the model {have} no tensor ({first_names(plan.missing)})")
    if plan.spare:
        have = "has" if len(plan.spare) == 1 else "have"
        parts.append(f"{counted(len(plan.spare), 'tensor')} {have} no weight ({first_names(plan.spare)})")
    if strict and parts:
        raise DataError(
            f"{where} does not fit the model: {' and '.join(parts)}",
            remedy="pass weights of the same family and size, or strict=False to take what fits",
            shell="pass weights of the same family and size, or add --partly to take what fits",
        )
    layers_log.info("%s", report(plan))


def _write(work: ir.Model, plan: Plan, match: Match, group: Sequence[Match], errors: dict[str, float] | None) -> None:
    place, weight = match.place, plan.weight(match)
    if not np.isfinite(weight).all():
        odd = next((key for key in match.keys if not np.isfinite(plan.source.tensors[key]).all()), match.keys[0])
        raise DataError(f"'{shown(odd)}' contains NaN or infinity, or makes such weights; use other weights")
    readers = {node for m in group for node in _readers(m.place)}
    _check_range(place, weight, ir.DataType.FLOAT if is_integer(place) else place.value.dtype)
    if place.layer is None and place.node.op_type == TABLE:
        with np.errstate(over="ignore", invalid="ignore"):
            error = write_table(work, place.node, weight)
        _note(errors, place, error)
        return
    if place.layer is None:
        _write_plain(work, place, weight)
        return
    if is_quantised(place.layer):
        with np.errstate(over="ignore", invalid="ignore"):
            error = write_quantised(work, place.layer, weight, readers=readers)
        _note(errors, place, error)
        return
    write_floats(work, place.layer, weight, readers=readers)


def _writer(group: Sequence[Match]) -> Match:
    """Return the reader of a tensor by which it is written: a product rather than an embedding tied to it."""
    return next((m for m in group if m.place.layer is not None and m.place.layer.kind != "Gather"), group[0])


def _note(errors: dict[str, float] | None, place: Place, error: float) -> None:
    """Report the rounding error of a quantised weight; raise DataError if its scales are not finite."""
    if not np.isfinite(error):
        raise DataError(f"'{shown(place.name)}' has numbers too large for its scales in the model; use other weights")
    if errors is not None:
        errors[place.module] = error


def _write_plain(work: ir.Model, place: Place, weight: Array) -> None:
    tensor = numbers_of(place.value)
    assert tensor is not None
    if not tensor.dtype.is_floating_point():
        write_integer_bias(work, place.node, weight.reshape(-1))
        return
    new = weight.reshape(tuple(tensor.shape.numpy()))
    set_numbers(work, place.value, np.ascontiguousarray(new.astype(tensor.dtype.numpy())))


def _check_range(place: Place, weight: Array, dtype: ir.DataType | None) -> None:
    """Raise DataError for numbers beyond the floating-point type of a weight in the model."""
    kind = dtype or ir.DataType.FLOAT
    if weight.size and float(np.abs(weight).max()) > float(ml_dtypes.finfo(kind.numpy()).max):
        is_short = kind == ir.DataType.FLOAT16
        raise DataError(
            f"'{shown(place.name)}' has numbers beyond {kind.numpy().name}, in which the model stores it; "
            f"{'convert the model first' if is_short else 'use other weights'}",
            shell="convert the model first: --in-float32" if is_short else None,
        )


def _readers(place: Place) -> list[ir.Node]:
    """Return the node that reads a weight, and the nodes from the stored tensor to it."""
    if place.layer is not None:
        return [place.node, *rewritten(place.layer.weight)[1]]
    nodes, value = [place.node], place.node.inputs[0] if place.node.op_type == TABLE else None
    while value is not None and value is not place.value and (node := value.producer()) is not None:
        nodes.append(node)
        value = node.inputs[0]
    return nodes


def _is_rounded(match: Match) -> bool:
    """Whether a weight is stored as integers, or as floats of 16 bits."""
    layer, tensor = match.place.layer, numbers_of(match.place.value)
    is_short = tensor is not None and tensor.dtype.itemsize < 4
    return is_short or is_integer(match.place) or (layer is not None and is_quantised(layer))
