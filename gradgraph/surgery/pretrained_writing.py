"""Weights that were trained elsewhere, written into a finished model, in the form in which it stores each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, DataError, counted, shown
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.weights.stored_once import find_merged
from gradgraph.surgery.linear_layers import INTEGER, REWRITES
from gradgraph.surgery.operation import Array, add_weight, layers_log, reached, set_numbers, tensor_of
from gradgraph.surgery.pretrained_evidence import check_evidence
from gradgraph.surgery.pretrained_files import Pretrained
from gradgraph.surgery.pretrained_matches import Match, is_integer
from gradgraph.surgery.pretrained_weights import Plan
from gradgraph.surgery.quantised_tables import write_table
from gradgraph.surgery.stored_weights import (
    is_quantised,
    write_floats,
    write_integer_bias,
    write_quantised,
)
from gradgraph.surgery.untied import untie
from gradgraph.surgery.weight_names import TensorNames
from gradgraph.surgery.weight_places import TABLE, Place, places_of
from gradgraph.surgery.weights import first_names, weights_named, weights_of


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
        epsilon: the epsilon of BatchNormalizations that are merged into layers of the model.
        exported: the weights from which the model was exported, to check each match; None if they are unknown.
        errors: receives the rounding error ``‖stored − W‖/‖W‖`` of each quantised layer, by module.
        done: called with the model after each weight.

    Raises:
        BuildError: the model computes with integers, as after onnxruntime's ``quantize_dynamic``.
        DataError: nothing fits, weights or tensors remain, a shape differs, or a number does not fit the stored type.
    """
    untie_all(work, source)
    if exported is not None:
        _restore_zero_biases(work, exported)
    plan = Plan(work, source, epsilon)
    check_evidence(plan, None if exported is None else Plan(work, exported, epsilon), strict)
    _check_all(plan, strict)
    groups: dict[ir.Value, list[Match]] = defaultdict(list)
    weights_first = sorted(plan.matches, key=lambda match: match.place.layer is None)  # scales of biases depend on them
    for match in weights_first:
        groups[match.place.value].append(match)
    for group in groups.values():
        _write(work, plan, _writer(group), errors)
        done(work)


def untie_all(work: ir.Model, source: Pretrained) -> None:
    """Give each module that has weights of its own in the file its own copy of a weight that the exporter merged."""
    known = {*weights_of(work)}
    merged = find_merged(value for value in weights_named(work, "*") if value.name in known)
    if merged:
        names = TensorNames(source.tensors, [name for place in places_of(work) for name in place.names])
        for value in merged:
            untie(work, value, lambda module: bool(names.module_called(module)))


def _restore_zero_biases(work: ir.Model, exported: Pretrained) -> None:
    """Give layers the biases that are zeros in the weights of the export, which PyTorch's exporter removes."""
    names: TensorNames | None = None
    added: dict[str, ir.Value] = {}
    places = places_of(work)
    for place in places:
        layer = place.layer
        if layer is None or layer.kind not in ("Conv", "Gemm") or layer.bias is not None or layer.added is not None:
            continue
        names = names or TensorNames(exported.tensors, [name for one in places for name in one.names])
        name = f"{place.module}.bias"
        key = names.find(name)
        zeros = np.zeros(layer.sizes[1], (place.value.dtype or ir.DataType.FLOAT).numpy())
        if key is None or exported.tensors[key].shape != zeros.shape or np.any(exported.tensors[key]):
            continue
        if layer.node.attributes.get_float("beta", 1.0) == 1 and not is_integer(place):
            value = added.get(name) or add_weight(work, name, zeros)
            added[name] = value
            layer.node.resize_inputs(3)
            layer.node.replace_input_with(2, value)


def report(plan: Plan) -> str:
    """Return the counts of a plan: ``took 291 of 293 tensors for 146 of 146 weights; left 2 (a, b)``.

    Constants of the model that are no weights, and have no tensor, follow.
    """
    total = len(plan.source.tensors)
    left = [*plan.spare, *plan.buffers]
    values = len({match.place.value for match in plan.matches})
    lost = len(dict.fromkeys(plan.missing))
    text = f"took {total - len(left)} of {counted(total, 'tensor')} for {values} of {counted(values + lost, 'weight')}"
    text += f"; left {len(left)} ({first_names(left)})" if left else ""
    kept = counted(len(plan.constants), "constant")
    text += f"; {kept} unchanged ({first_names(plan.constants)})" if plan.constants else ""
    return text + (f"; {counted(lost, 'weight')} unchanged ({first_names(plan.missing)})" if lost else "")


def _check_all(plan: Plan, strict: bool) -> None:
    where, tensors = f"'{shown(plan.source.where)}'", counted(len(plan.source.tensors), "tensor")
    integer = next((node for node in nodes_of(plan.work) if node.op_type in INTEGER), None)
    if integer is not None and plan.spare:
        raise BuildError(
            f"the model computes with integers ('{shown(integer.name)}' is a {integer.op_type}), so "
            f"{counted(len(plan.spare), 'tensor')} cannot be written ({first_names(plan.spare)}); load the weights "
            "into the model before it was quantised, and quantise it again"
        )
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


def _write(work: ir.Model, plan: Plan, match: Match, errors: dict[str, float] | None) -> None:
    """Write a weight in the form in which the model stores it, for all that read it."""
    place, weight = match.place, plan.numbers.weight(match)
    if not np.isfinite(weight).all():
        odd = next((key for key in match.keys if not np.isfinite(plan.source.tensors[key]).all()), match.keys[0])
        raise DataError(f"'{shown(odd)}' contains NaN or infinity, or makes such weights; use other weights")
    readers = _readers(place.value)
    _check_range(place, weight, ir.DataType.FLOAT if is_integer(place) else place.value.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        error = _written(work, place, weight, readers)
    if error is not None:
        _note(errors, place, error)


def _written(work: ir.Model, place: Place, weight: Array, readers: set[ir.Node]) -> float | None:
    """Write a weight; return its rounding error, or None if the model stores it as floats."""
    if place.experts is not None:
        return place.experts.write(work, weight)
    if place.layer is None and place.node.op_type == TABLE:
        return write_table(work, place.node, weight)
    if place.layer is None:
        _write_plain(work, place, weight)
    elif is_quantised(place.layer):
        return write_quantised(work, place.layer, weight, readers=readers)
    else:
        write_floats(work, place.layer, weight, readers=readers)
    return None


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
    tensor = tensor_of(place.value)
    if not tensor.dtype.is_floating_point():
        write_integer_bias(work, place.node, weight.reshape(-1))
        return
    new = weight.reshape(tuple(tensor.shape.numpy()))
    set_numbers(work, place.value, np.ascontiguousarray(new.astype(tensor.dtype.numpy())))


def _check_range(place: Place, weight: Array, dtype: ir.DataType | None) -> None:
    """Raise DataError for numbers beyond the floating-point type of a weight in the model."""
    kind = dtype or ir.DataType.FLOAT
    if weight.size and max(weight.max(), -weight.min()) > float(ml_dtypes.finfo(kind.numpy()).max):
        is_short = kind == ir.DataType.FLOAT16
        raise DataError(
            f"'{shown(place.name)}' has numbers beyond {kind.numpy().name}, in which the model stores it; "
            f"{'convert the model first' if is_short else 'use other weights'}",
            shell="convert the model first: --in-float32" if is_short else None,
        )


def _readers(value: ir.Value) -> set[ir.Node]:
    """Return the nodes that read a stored tensor: those that only rewrite it, and those that read their results."""
    kinds = (*REWRITES, "Reshape")
    values = reached([value], lambda v: [y for node in v.consumers() if node.op_type in kinds for y in node.outputs])
    return {node for v in values for node in v.consumers()}
