"""Untying of shared weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from gradgraph.arguments import NAMES, PATH, checked
from gradgraph.errors import ModelError
from gradgraph.files.model_metadata import add_given_names
from gradgraph.files.models import Source
from gradgraph.passes.normal.weights.places import behind_moves, place_of
from gradgraph.passes.normal.weights.stored_once import find_merged, modules_of
from gradgraph.surgery.operation import Path, Result, add_weight, check_patterns, closed, make_way, opened, tensor_of
from gradgraph.surgery.weight_places import scope_of
from gradgraph.surgery.weights import weights_named


@checked(weights=NAMES.or_none(), out=PATH.or_none())
def untie_weights(model: Source, weights: str | Sequence[str] | None = None, *, out: Path | None = None) -> Result:
    """Give each module that reads one of these weights its own copy.

    PyTorch's exporters store equal tensors once: in an untrained network, all biases of a size may be one tensor of
    zeros, which would train as one. The copies are named after their modules: ``encoder.layer.1.query.bias``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weights: names and globs; by default the weights that an exporter may have merged. These exclude embeddings
            shared by encoder and decoder, or by an embedding and the last layer.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        UnknownNameError: a name matches no floating-point weight, or no weight that several modules read.
        ModelError: none of the weights is read by several modules.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    if weights is None:
        chosen = find_merged(weights_named(work, "*"))
    else:
        chosen = [v for v in weights_named(work, weights) if len(modules_of(v)) > 1]
    if not chosen:
        what = "no weight" if weights is None else "none of these weights"
        raise ModelError(f"{what} is read by several modules, so there is nothing to untie")
    if weights is not None:
        check_patterns(weights, [v.name or "" for v in chosen], "weight that several modules read")
    for value in chosen:
        untie(work, value)
    return closed(work, model, out)


def untie(work: ir.Model, value: ir.Value, is_one: Callable[[str], bool] = lambda _: True) -> None:
    """Copy a weight for each module that reads it, except the module it is named after (or else the first).

    What ``is_one`` rejects is no module but a call of another, and keeps its weight.
    """
    copies, name, numbers = dict[str, str](), value.name or "", tensor_of(value).numpy()
    modules = {m: uses for m, uses in modules_of(value).items() if is_one(scope_of(behind_moves(*uses[0])[0]))}
    owners = [m for m, uses in modules.items() if _is_of(name, m, uses)]
    owners += [m for m in sorted(modules, key=len, reverse=True) if f".{name}".rpartition(".")[0].endswith(f".{m}")]
    owner = next(iter([*owners, *modules]), "")
    for module, uses in modules.items():
        if module == owner:
            continue
        is_exporters = _is_second_name(uses[0][0])
        own = add_weight(work, _name(work, module, uses[0]) or name, numbers)
        own.metadata_props.update(value.metadata_props)
        copies |= {} if is_exporters else {own.name or "": name}
        for node, position in uses:
            if _is_second_name(node):
                node.outputs[0].replace_all_uses_with(own)
            else:
                node.replace_input_with(position, own)
    add_given_names(work, copies)


def _is_of(name: str, module: str, uses: Sequence[tuple[ir.Node, int]]) -> bool:
    """Whether a weight is named after a module, which PyTorch's older exporter may call by its parent's name, too."""
    scopes = {module, *(scope_of(behind_moves(node, position)[0]) for node, position in uses)}
    return any(scope and name.startswith(f"{scope}.") for scope in scopes)


def _name(work: ir.Model, module: str, use: tuple[ir.Node, int]) -> str:
    """Return a name for a module's copy of a shared weight, such as ``query.bias``; empty if its role is unknown."""
    node, position = use
    if _is_second_name(node):
        name = node.outputs[0].name or ""
        make_way(work, node.outputs[0], f"{name}.merged")
        return name
    _, role = place_of(node, position)
    return f"{module}.{role}" if role and not module.startswith("/") else ""


def _is_second_name(node: ir.Node) -> bool:
    """Whether the node is an Identity by which PyTorch's older exporter keeps the names of merged tensors."""
    return node.op_type == "Identity" and not node.domain and not node.outputs[0].is_graph_output()
