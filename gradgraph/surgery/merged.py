"""Merging of adapters into the weights of their layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path as FilePath

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, NAMES, PATH, checked
from gradgraph.errors import BuildError, counted, shown
from gradgraph.files.model_metadata import Adapter, write_adapters
from gradgraph.files.models import Source
from gradgraph.files.spilled import SpilledWeights
from gradgraph.passes.normal.edit import discard, replace_value
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of
from gradgraph.surgery.adapter_kinds.kind import Rounding
from gradgraph.surgery.adapters import chosen_adapters
from gradgraph.surgery.gptq import Gptq, Grams
from gradgraph.surgery.linear_layers import Layer, layer_at, stored
from gradgraph.surgery.operation import (
    Array,
    Path,
    Result,
    add_weight,
    array_named,
    as_model,
    clear_away,
    closed,
    free_name,
    layers_log,
    numbers_of,
    opened,
    value_named,
)
from gradgraph.surgery.stored_weights import (
    as_read,
    canonical,
    is_quantised,
    relative_norm,
    write_floats,
    write_offsets,
    write_quantised,
)
from gradgraph.surgery.weights import give_weights

log = logging.getLogger("gradgraph")

_Part = tuple[Adapter, list[Array]]


@checked(names=NAMES.or_none(), requantise=FLAG, out=PATH.or_none())
def merge_adapters(
    model: Source,
    weights: Mapping[str, Array] | Path | None = None,
    *,
    names: str | Sequence[str] | None = None,
    requantise: bool = False,
    errors: dict[str, float] | None = None,
    out: Path | None = None,
) -> Result:
    """Merge adapters into the weights, which become ``W + s·A·B`` (LoRA), ``(W + s·A·B)·m/n`` (DoRA) or ``W·l`` (IA3).

    A quantised weight becomes float, since the sum has other ranges; all other layers stay quantised. Adapters of kind
    qalora are merged without loss: they become float zero points of their layer, which stays quantised. Prefixes and
    bottlenecks cannot be merged: they stay as ordinary nodes and weights.

    Args:
        model: the model returned by :func:`lora`.
        weights: the trained weights: ``trainer.state_dict()``, an ``.onnx`` exported by a trainer, a checkpoint, a
            ``.safetensors`` or ``.npz`` file; by default the model's own. Other trained weights (a head, biases) are
            used, too.
        names: names of the sets of adapters to merge, if the model has several; all by default.
        requantise: quantise merged weights as before, with the same type, blocks, channels and kind of zero points.
            GPTQ rounds them, so that they keep what the update reads; a warning is logged if rounding undoes at least
            half of an update's effect. Scales change if numbers exceed their range. Weights without adapters stay the
            same, bit for bit.
        errors: a dict that receives the rounding error ``‖stored − W‖/‖W‖`` of each quantised merged weight, by module.
        out: write the result to this path.

    Raises:
        BuildError: the model has no adapters, or their nodes were changed.
        UnknownNameError: the model has no adapters of one of the names.
        DataError: the file cannot be read, or a shape in it does not fit.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    roundings = _merge_all(work, weights, names, requantise)
    warn_of_rounding(roundings)
    if errors is not None:
        errors.update({name: rounding.error for name, rounding in roundings.items()})
    return closed(work, model, out)


def merge_to_folder(
    model: ir.Model,
    weights: Mapping[str, Array],
    folder: FilePath,
    *,
    requantise: bool = False,
    inputs: Callable[[str], Grams | None] | None = None,
) -> tuple[ir.Model, dict[str, Rounding]]:
    """Merge all adapters like :func:`merge_adapters`, but store large merged weights in ``folder``, not in memory.

    The weights of one layer at a time are in memory. The result can be read while the folder exists. The roundings of
    quantised merged weights are returned by module, without a warning.

    Args:
        inputs: a function of a module that returns the products of its inputs on calibration data, for GPTQ; None for
            modules without.

    Raises:
        OutputError: the folder cannot be written to.
    """
    work = opened(model, None)
    roundings = _merge_all(work, weights, None, requantise, SpilledWeights(folder), inputs or _no_inputs)
    return as_model(closed(work, model, None)), roundings


def kept_share(roundings: Iterable[Rounding]) -> float | None:
    """Return the median share of the layers' updates that remains after rounding; None without updates."""
    updates = [rounding for rounding in roundings if rounding.update]
    return float(np.median([max(0.0, 1 - rounding.lost) for rounding in updates])) if updates else None


def warn_of_rounding(roundings: Mapping[str, Rounding]) -> None:
    """Log how much of the updates remains in layers that were quantised again, and warn if rounding undoes some."""
    kept = kept_share(roundings.values())
    if kept is not None:
        layers_log.info("%s requantised, which keeps %.0f %% of an update (median)",
                        counted(len(roundings), "layer"), 100 * kept)  # fmt: skip
    drowned = [rounding for rounding in roundings.values() if rounding.drowns]
    if drowned:
        size = float(np.median([rounding.update for rounding in drowned]))
        log.warning(
            "rounding undoes the adapter's update in %d of %d requantised layers (medians: update %.2g of the weight's "
            "norm, %.0f %% of it kept); merge as float, or keep the adapter separate",
            len(drowned), len(roundings), size, 100 * (kept_share(drowned) or 0),
        )  # fmt: skip


def _no_inputs(module: str) -> None:
    del module


def _merge_all(
    work: ir.Model,
    weights: Mapping[str, Array] | Path | None,
    names: str | Sequence[str] | None,
    requantise: bool,
    done: Callable[[ir.Model], None] = lambda _: None,
    inputs: Callable[[str], Grams | None] = _no_inputs,
) -> dict[str, Rounding]:
    """Merge adapters in place as :func:`merge_adapters` does; call ``done`` with the model after each layer.

    Return the rounding of each quantised merged weight, by module.
    """
    chosen, roundings = chosen_adapters(work, names, "merge"), dict[str, Rounding]()
    if weights is not None:
        give_weights(work, weights)
    for adapter in reversed(chosen):  # the newest is next to the readers
        merge_into = KINDS[adapter.kind].merge_into
        if merge_into is not None:
            rounding = merge_into(work, adapter, [array_named(work, name) for name in adapter.weights], requantise)
            if rounding is not None:
                roundings[adapter.module] = rounding
            done(work)
    for layer, parts in _taken_out(work, chosen):
        rounding = _merge(work, layer, parts, requantise, inputs)
        if rounding is not None:
            roundings[layer.name] = rounding
        done(work)
    gone = set(chosen)
    write_adapters(work, [a for a in adapters_of(work) if a not in gone])
    return roundings


def layer_of(work: ir.Model, adapter: Adapter) -> tuple[Layer, list[ir.Node]]:
    """Return the layer of an adapter, and the nodes from it to the value that replaces its output.

    Raises:
        BuildError: the nodes of the adapter were changed.
    """
    result = value_named(work, adapter.output)
    node, path = result.producer(), list[ir.Node]()
    while node is not None and node.op_type != adapter.operator and node.inputs and len(path) < 64:
        path.append(node)
        before = next((v for v in node.inputs if v is not None and numbers_of(v) is None), None)
        node = None if before is None else before.producer()
    layer = None if node is None or node.op_type != adapter.operator else layer_at(node, adapter.module)
    if layer is None:
        raise BuildError(
            f"the nodes of the adapter of '{shown(adapter.module)}' were changed",
            remedy="merge the model returned by gg.lora, and pass the trained one as weights=",
            shell="merge the model that --lora wrote, and pass the trained one as --trained",
        )
    return layer, path[::-1]


def _taken_out(work: ir.Model, chosen: Sequence[Adapter]) -> list[tuple[Layer, list[_Part]]]:
    """Remove the nodes of mergeable adapters; return their layers, each with its adapters and their tensors."""
    found: dict[ir.Node, tuple[Layer, list[_Part]]] = {}
    for adapter in reversed(chosen):  # the newest is next to the layer
        if KINDS[adapter.kind].merge is not None:
            layer, path = layer_of(work, adapter)
            factors = [np.asarray(array_named(work, name)) for name in adapter.weights]
            found.setdefault(layer.node, (layer, []))[1].append((adapter, factors))
            _take_out(work, adapter, layer, path)
    clear_away(work)
    return list(found.values())


def _merge(
    work: ir.Model, layer: Layer, parts: Sequence[_Part], requantise: bool, inputs: Callable[[str], Grams | None]
) -> Rounding | None:
    """Merge adapters into the weight of their layer; return its rounding, or None if it is stored as float."""
    quantises = requantise and is_quantised(layer)
    read = inputs(layer.name) if quantises else None
    before = new = canonical(layer)
    parts = [(adapter, [np.asarray(factor, np.float64) for factor in factors]) for adapter, factors in parts]
    for adapter, factors in parts:
        kind = KINDS[adapter.kind]
        assert kind.merge is not None
        new = kind.merge(adapter, new, factors)
        _change_bias(work, layer, adapter, factors)
    added = [change(adapter, factors) for adapter, factors in parts if (change := KINDS[adapter.kind].offsets)]
    by_offsets = len(added) == len(parts)
    if not by_offsets and not quantises:
        write_floats(work, layer, new)
        return None
    update = np.subtract(new, before, out=before) if new is not before else np.zeros((1, 1))
    size, gptq = relative_norm(update, new), None
    if not by_offsets and size and layer.kind != "Gather":  # its inputs are one number each, which compensate nothing
        gptq = Gptq(update.reshape(len(update), -1), read)
    del before, update  # quantising requires their memory
    if by_offsets:
        return Rounding.to_nearest(write_offsets(work, layer, np.asarray(sum(added)), new), size)
    error = write_quantised(work, layer, new, gptq=gptq)
    return Rounding.to_nearest(error, size) if gptq is None else Rounding(error, size, gptq.lost)


def _take_out(work: ir.Model, adapter: Adapter, layer: Layer, path: list[ir.Node]) -> None:
    """Disconnect an adapter's nodes: their readers (for IA3 on an input, the layer) read the original value."""
    result = value_named(work, adapter.output)
    if adapter.side == "in":
        turned = layer.data.producer()
        assert turned is not None
        layer.node.replace_input_with(0, turned.inputs[0])
        return
    alone = adapter.kind == "dora"  # its nodes begin at the layer itself, before the bias
    old = layer.node.outputs[0] if alone else path[-1].inputs[0]
    assert old is not None
    if result.is_graph_output():
        old.name, result.name = result.name, None
    old.shape = result.shape
    last = path[-1]
    replace_value(result, old)
    discard(last)


def _change_bias(work: ir.Model, layer: Layer, adapter: Adapter, factors: list[Array]) -> None:
    """Merge an adapter into the bias of its layer, an input of the node or of an Add after it."""
    change = KINDS[adapter.kind].bias
    node, bias = layer.result.producer(), layer.bias
    if node is None or change is None or adapter.side == "in":
        return
    if node is not layer.node:
        bias = next(v for v in node.inputs if v is not layer.node.outputs[0])
    if bias is None:
        return
    place, kind = list(node.inputs).index(bias), (bias.dtype or ir.DataType.FLOAT).numpy()
    if stored(bias) is not None:
        new = change(adapter, np.asarray(as_read(bias), np.float64), factors).astype(kind)
        node.replace_input_with(place, add_weight(work, f"{bias.name}.merged", new))
        return
    factor = change(adapter, np.ones(layer.sizes[1]), factors).astype(
        kind
    )  # a computed bias is multiplied in the graph
    product = ir.Node("", "Mul", [bias, add_weight(work, f"{layer.name}.bias_factor", factor)])
    product.name = product.outputs[0].name = free_name(work, f"{bias.name}.merged")
    work.graph.insert_before(node, product)
    node.replace_input_with(place, product.outputs[0])
