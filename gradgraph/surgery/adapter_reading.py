"""Loading of adapters from the folders that ``adapter_files`` describes, in the names of this model or of PEFT."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import PATH, TEXT, checked
from gradgraph.errors import DataError, listed, shown
from gradgraph.files.model_metadata import DEFAULT, Adapter, write_adapters
from gradgraph.files.models import Source
from gradgraph.files.untrusted.array_files import safetensors_in
from gradgraph.files.untrusted.contained_paths import path_inside
from gradgraph.files.untrusted.documents import LARGEST, Fields, json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.graph.shape_inference import shape_of
from gradgraph.surgery.adapter_files import (
    LAYERS,
    PREFIX,
    WEIGHTS,
    check_unique,
    factors_of_low_rank,
    groups_of_factors,
    is_low_rank,
    stored_names,
)
from gradgraph.surgery.adapter_kinds import lora_experts
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of
from gradgraph.surgery.adapters import adaptable, put_all, rested
from gradgraph.surgery.expert_files import Given, experts_in
from gradgraph.surgery.grouped_factors import gathered
from gradgraph.surgery.linear_layers import Layer, linear_layers
from gradgraph.surgery.operation import (
    Array,
    Path,
    Result,
    array_named,
    check_patterns,
    closed,
    opened,
    set_numbers,
    value_named,
)
from gradgraph.surgery.peft_names import (
    Factors,
    Renamed,
    as_ours,
    for_layers,
    wrapper_of,
)
from gradgraph.surgery.peft_settings import (
    CONFIG,
    Settings,
    check_settings,
    exact_pattern,
    fits,
    left_out_by,
    own_number,
    settings_of,
)
from gradgraph.surgery.prefix_files import TYPE as PREFIX_TYPE
from gradgraph.surgery.prefix_files import apart, check_counted
from gradgraph.surgery.stored_weights import canonical, is_quantised, write_floats

_NEARER = 0.95  # a square weight is transposed if its transpose is nearer to the old weight by this factor


@checked(folder=PATH, name=TEXT, names=LAYERS.or_none(), out=PATH.or_none())
def load_adapter(
    model: Source,
    folder: Path,
    *,
    name: str = DEFAULT,
    names: Mapping[str, str] | None = None,
    out: Path | None = None,
) -> Result:
    """Add the adapters of a folder written by :func:`save_adapter` or PEFT to a model.

    Args:
        model: the base model. Its layers have the names used in the folder, or the names that onnxruntime-genai's
            builder uses for Hugging Face's layers, packed or not; the names of all layers may begin with that of an
            exported wrapper (``network.``). It may have other adapters.
        folder: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. Fully trained modules
            (``modules_to_save``) replace the weights of the model, as floats.
        name: name for the adapters in the model.
        names: layer names in the folder that cannot be derived, as for :func:`save_adapter`.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``, with the adapters.

    Raises:
        ArgumentError: ``names`` has a ``*`` on one side only.
        DataError: the folder cannot be read, contains an unsupported kind of adapter, or does not fit the model; or it
            contains a PEFT prefix, but the model cannot offset the positions of the text by the prefix's length.
        UnknownNameError: no layer of the model has the name of one in the folder, or the folder lacks one of ``names``.
        BuildError: the model already has adapters of this name.
        OutputError: ``out`` cannot be written.
    """
    settings, arrays = _read(folder)
    kind = check_settings(settings, f"the adapter in '{shown(folder)}'")
    work = opened(model, out)
    owners = _modules(kind, arrays)
    _check_targeted(settings, {module for key, module in owners.items() if _part(kind, key)}, folder)
    names = names or _unwrapped(work, owners.values())
    if names:
        settings, arrays = _renamed(owners, settings, arrays, names)
    before = adapters_of(work)
    experts, arrays = experts_in(work, kind, settings, arrays, PREFIX)
    arrays = _take_whole_weights(work, kind, arrays)
    made = _put_experts(work, experts, name, before) if experts else []
    if arrays or not experts:
        made += _put_layers(work, kind, settings, arrays, name, before, folder)
    write_adapters(work, [*rested(before), *made])
    return closed(work, model, out)


def _put_layers(
    work: ir.Model,
    kind: str,
    settings: Settings,
    arrays: dict[str, Array],
    name: str,
    before: list[Adapter],
    folder: Path,
) -> list[Adapter]:
    """Add the adapters of layers with the tensors ``arrays``; return them."""
    of_peft = settings.peft_type == PREFIX_TYPE
    if not of_peft:
        _check_whole(kind, arrays, folder)
    if is_low_rank(kind):
        settings, arrays = _by_meaning(work, kind, settings, arrays)
    modules = {"*"} if of_peft else {_module(kind, key) for key in arrays}
    layers = adaptable(work, sorted(modules), kind, name, before)
    if of_peft:
        settings, arrays = _prefix(settings, arrays, layers)
    else:
        settings, arrays = _repeated(kind, layers, settings, arrays)
        modules = {_module(kind, key) for key in arrays}
        layers = [layer for layer in layers if layer.name in modules]
    wanted = [_wanted(settings, kind, name, layer, arrays) for layer in layers]
    made = put_all(work, layers, wanted, np.random.default_rng(0))
    if of_peft:
        check_counted(made)
    _fill(work, made, arrays, folder)
    return made


def _put_experts(work: ir.Model, experts: Sequence[Given], name: str, before: list[Adapter]) -> list[Adapter]:
    """Add adapters to the experts of mixtures, with their tensors; return them."""
    adaptable(work, [given.layer.name for given in experts], lora_experts.NAME, name, before)
    wanted = [given.wanted(name) for given in experts]
    made = put_all(work, [given.layer for given in experts], wanted, np.random.default_rng(0))
    for given, adapter in zip(experts, made, strict=True):
        for weight, array in zip(adapter.weights, (given.a, given.b), strict=True):
            value = value_named(work, weight)
            set_numbers(work, value, np.ascontiguousarray(array.astype(array_named(work, weight).dtype)))
    return made


def _unwrapped(work: ir.Model, modules: Iterable[str]) -> dict[str, str]:
    """Return ``names`` for a model whose layer names begin with a wrapper's, which the modules of the folder lack."""
    wrapper = wrapper_of([layer.name for layer in linear_layers(work, "*")[0]], modules)
    return {f"{wrapper}*": "*"} if wrapper else {}


def _modules(kind: str, arrays: Iterable[str]) -> dict[str, str]:
    """Return the module of each tensor by name."""
    parts = (*KINDS[kind].parts, *KINDS[kind].of_embeddings, "base_layer.weight", "weight", "bias")
    places = {key: next((p for p in parts if key.endswith(f".{p}")), "") for key in arrays}
    return {key: key.removeprefix(PREFIX).removesuffix(f".{part}") for key, part in places.items()}


def _check_targeted(settings: Settings, modules: Iterable[str], folder: Path) -> None:
    """Raise DataError if PEFT would ignore the tensors of a module because of the settings."""
    if settings.parameters:  # names of modules with adapters of parameters are not those of the model
        return
    for module in sorted(modules):
        if (field := left_out_by(settings.all, module)) is not None:
            raise DataError(
                f"the adapter in '{shown(folder)}' has tensors of '{shown(module)}', which PEFT ignores because of "
                f"{field} in {CONFIG}; correct the field, or remove the tensors"
            )


def _renamed(
    modules: Mapping[str, str], settings: Settings, arrays: dict[str, Array], names: Mapping[str, str]
) -> tuple[Settings, dict[str, Array]]:
    """Return settings and tensors with the modules in ``names`` renamed to layers of the model."""
    known = sorted({*modules.values()})
    check_patterns([*names.values()], known, "module of the folder", known)
    renamed = Renamed(names)
    ours = {module: layer for module in known if (layer := renamed.ours(module)) is not None}
    check_unique(known, ours)
    moved = {
        f"{PREFIX}{ours[m]}{k.removeprefix(PREFIX + m)}" if (m := modules[k]) in ours else k: a
        for k, a in arrays.items()
    }
    settings = replace(
        settings,
        ranks={exact_pattern(new): own_number(settings.ranks, m, settings.rank) for m, new in ours.items()}
        | dict(settings.ranks),
        alphas={exact_pattern(new): own_number(settings.alphas, m, settings.alpha) for m, new in ours.items()}
        | dict(settings.alphas),
        inward=(*settings.inward, *(layer for m, layer in ours.items() if fits(m, settings.inward))),
    )
    return settings, moved


def _take_whole_weights(work: ir.Model, kind: str, arrays: dict[str, Array]) -> dict[str, Array]:
    """Write fully fine-tuned weights (``modules_to_save``) into the model, and return the other tensors.

    Like PEFT, this uses every tensor with the name of a weight of the model. PEFT also stores the weights of embeddings
    and heads with adapters (``….base_layer.weight``), changed or not.
    """
    whole = [k for k in arrays if k.startswith(PREFIX) and k.endswith((".weight", ".bias")) and not _part(kind, k)]
    every = linear_layers(work, "*")[0] if whole else []
    layers = {as_ours(layer.name): layer for layer in every}
    vectors = {as_ours(name): value for name, value in work.graph.initializers.items()} if whole else {}
    names = {key: as_ours(key.removeprefix(PREFIX).replace(".base_layer.", ".")) for key in whole}
    lying = {}  # by last part of layer names, whether non-square weights are stored as (inputs, outputs)
    for key, name in names.items():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None and layer.sizes[0] != layer.sizes[1]:
            lying[_last(name)] = arrays[key].shape == layer.sizes
    for key, name in names.items():
        array, layer, vector = arrays[key], layers.get(name.removesuffix(".weight")), vectors.get(name)
        if layer is not None and (new := _outputs_first(layer, array, key, lying.get(_last(name)))) is not None:
            if ".base_layer." not in key or _is_changed(layer, new, array.dtype):
                _write_calls(work, [layer, *(call for call in every if call.repeats == layer.name)], new)
        elif layer is None and vector is not None and vector.dtype and array.shape == tuple(shape_of(vector) or ()):
            set_numbers(work, vector, array.astype(vector.dtype.numpy()))
        else:
            raise DataError(
                f"'{shown(key)}' was fully fine-tuned, but the model has no weight with this name and shape; use the "
                "model that the adapter was trained on"
            )
    return {k: a for k, a in arrays.items() if k not in whole}


def _last(weight: str) -> str:
    """Return the last part of a weight's module name, such as ``q_proj`` for ``layers.0.q_proj.weight``."""
    return weight.removesuffix(".weight").rpartition(".")[2]


def _write_calls(work: ir.Model, calls: Sequence[Layer], weight: Array) -> None:
    """Replace the weight (outputs first) of all calls of a module with floats."""
    write_floats(work, calls[0], weight, readers={call.node for call in calls})
    for call in calls[1:]:
        if call.kind == "MatMulNBits" or call.weight is not calls[0].weight:
            write_floats(work, call, weight)


def _outputs_first(layer: Layer, array: Array, key: str, lies_so: bool | None) -> Array | None:
    """Return a fully fine-tuned weight of a PEFT folder with outputs first, or None if it does not fit the layer.

    PyTorch's linear layers store (outputs, inputs); GPT-2's Conv1D stores (inputs, outputs). ``lies_so`` tells whether
    other weights do; None if that is unknown.
    """
    if layer.kind in ("Conv", "Gather"):
        fitting = array.shape == layer.shape
        return (array.T if layer.kind == "Gather" else array) if fitting else None
    if array.shape not in (layer.sizes, layer.sizes[::-1]):
        return None
    is_square = layer.sizes[0] == layer.sizes[1]
    return array.T if (_is_turned(layer, array, key, lies_so) if is_square else array.shape == layer.sizes) else array


def _is_turned(layer: Layer, array: Array, key: str, lies_so: bool | None) -> bool:
    """Whether a square weight is stored as (inputs, outputs): it is similar to the weight that it was trained from.

    PEFT's ``fan_in_fan_out`` describes layers with adapters, not those that were fully fine-tuned.

    Raises:
        DataError: it is not, and other weights do not show it.
    """
    own = canonical(layer)
    near, turned = (float(np.linalg.norm(one - own)) for one in (array, array.T))
    if min(near, turned) < _NEARER * max(near, turned):
        return turned < near
    if lies_so is None and near != turned:
        raise DataError(
            f"'{shown(key)}' is square, was fully fine-tuned and differs so much from the model's weight that it is "
            "unknown whether it is transposed; merge the adapter into its model in PEFT (merge_and_unload), and export "
            "the merged model"
        )
    return bool(lies_so)


def _is_changed(layer: Layer, new: Array, stored_in: np.dtype[Any]) -> bool:
    """Whether a weight differs from the model's after rounding to the coarser of their types; False if quantised."""
    if is_quantised(layer):
        return False
    own = canonical(layer)
    kinds = [np.dtype(d) for d in (stored_in, (layer.weight.dtype or ir.DataType.FLOAT).numpy())]
    coarse = min(kinds, key=lambda kind: kind.itemsize)
    return own.shape != new.shape or not np.array_equal(own.astype(coarse), new.astype(coarse))


def _check_whole(kind: str, arrays: Mapping[str, Array], folder: Path) -> None:
    """Raise DataError if an adapter lacks a tensor, such as one factor of a pair, or if there is no adapter."""
    if not arrays:
        raise DataError(
            f"the adapter in '{shown(folder)}' has no adapter tensors in {WEIGHTS}; download the file again"
        )
    modules: dict[str, set[str]] = {}
    for key in arrays:
        module = _module(kind, key)
        modules.setdefault(module, set()).add(key.removeprefix(f"{PREFIX}{module}."))
    parts, of_embeddings = KINDS[kind].parts, KINDS[kind].of_embeddings
    for module, has in modules.items():
        whole = of_embeddings if has & (set(of_embeddings) - set(parts)) else parts
        missing = [part for part in whole if part not in has]
        if missing:
            raise DataError(
                f"the adapter in '{shown(folder)}' has {listed(sorted(has))} of '{shown(module)}', but "
                f"lacks {listed(missing)}; download {WEIGHTS} again"
            )


def _by_meaning(
    work: ir.Model, kind: str, settings: Settings, arrays: dict[str, Array]
) -> tuple[Settings, dict[str, Array]]:
    """Return settings and tensors under the model's layer names if the folder has Hugging Face's layer names."""
    parts = KINDS[kind].parts
    tensors: dict[str, list[Array]] = {}
    for key, array in arrays.items():
        if key.endswith(tuple(f".{part}" for part in parts)):
            tensors.setdefault(_module(kind, key), []).append(array)
    layers = linear_layers(work, "*")[0]
    names = {name for layer in layers for name in (layer.name, layer.repeats)}
    if tensors.keys() <= names:
        return settings, arrays
    modules = [m for m in tensors if all(f"{PREFIX}{m}.{part}" in arrays for part in parts[: len(tensors[m])])]
    given = {}
    for module in modules:
        rank = own_number(settings.ranks, module, settings.rank)
        alpha = own_number(settings.alphas, module, settings.alpha)
        stored = [arrays[f"{PREFIX}{module}.{part}"] for part in parts[: len(tensors[module])]]
        given[module] = Factors(*factors_of_low_rank(stored, alpha / KINDS[kind].spread(rank)))
    found = for_layers(given, [layer for layer in layers if layer.kind not in ("Conv", "Gather")])
    others = {k: a for k, a in arrays.items() if not any(k.startswith(f"{PREFIX}{m}.") for m in modules)}
    moved = {f"{PREFIX}{m}.{part}": a for m, f in found.items() for part, a in zip(parts, f.tensors, strict=False)}
    ranks = {exact_pattern(m): len(f.a) for m, f in found.items()}
    alphas = {exact_pattern(m): f.scale * KINDS[kind].spread(len(f.a)) for m, f in found.items()}
    settings = replace(
        settings,
        ranks=ranks | dict(settings.ranks),
        alphas=alphas | dict(settings.alphas),
        blocks={m: f.blocks for m, f in found.items()},
        shares={m: f.shares for m, f in found.items()},
    )
    return settings, others | moved


def _repeated(
    kind: str, layers: list[Any], settings: Settings, arrays: dict[str, Array]
) -> tuple[Settings, dict[str, Array]]:
    """Add the tensors, rank and alpha of a module's first call to its repeated calls: PEFT stores them once."""
    ranks, alphas, copies = dict(settings.ranks), dict(settings.alphas), dict[str, Array]()
    for layer in layers:
        if not (isinstance(layer, Layer) and layer.repeats):
            continue
        first, own = (stored_names(Adapter(kind, name, layer.kind)) for name in (layer.repeats, layer.name))
        new = {name: arrays[old] for old, name in zip(first, own, strict=True) if old in arrays and name not in arrays}
        if new:
            copies |= new
            pattern = exact_pattern(layer.name)
            ranks = {pattern: own_number(settings.ranks, layer.repeats, settings.rank)} | ranks
            alphas = {pattern: own_number(settings.alphas, layer.repeats, settings.alpha)} | alphas
    return replace(settings, ranks=ranks, alphas=alphas), arrays | copies


def _prefix(settings: Settings, arrays: Mapping[str, Array], layers: list[Any]) -> tuple[Settings, dict[str, Array]]:
    """Return the settings and the tensor of a PEFT prefix in our own format."""
    length, numbers = apart(settings.all, arrays, layers)
    names = [name for layer in layers for name in stored_names(Adapter("prefix", layer.name, layer.kind))]
    return replace(settings, rank=length, alpha=2.0 * length), dict(zip(names, numbers, strict=True))


def _wanted(settings: Settings, kind: str, name: str, layer: Any, arrays: Mapping[str, Array]) -> Adapter:
    plain = Adapter(kind, layer.name, layer.kind, name=name)
    if kind == "ia3":
        return replace(plain, side="in" if fits(layer.name, settings.inward) else "out")
    rank, alpha = settings.rank, settings.alpha
    if KINDS[kind].peft is not None:
        rank = own_number(settings.ranks, layer.name, rank)
        alpha = own_number(settings.alphas, layer.name, alpha)
        first = arrays.get(stored_names(plain)[0])
        if first is not None and len(first) != rank:
            raise DataError(
                f"'{shown(stored_names(plain)[0])}' has rank {len(first)}, but {CONFIG} has {rank}; use two files of "
                "the same adapter"
            )
    return replace(plain, scale=alpha / KINDS[kind].spread(rank), rank=rank, alpha=alpha, dropout=settings.dropout,
                   blocks=settings.blocks.get(layer.name, ()), shares=settings.shares.get(layer.name, ()))  # fmt: skip


def _fill(work: ir.Model, made: list[Adapter], arrays: Mapping[str, Array], folder: Path) -> None:
    wanted = {key: (a, i) for a in made for i, key in enumerate(stored_names(a))}
    spare, missing = sorted(set(arrays) - set(wanted)), sorted(set(wanted) - set(arrays))
    if spare or missing:
        what = (
            f"no layer for {listed(spare, 3)}" if spare else f"layers that it has no adapter for: {listed(missing, 3)}"
        )
        raise DataError(
            f"the adapter in '{shown(folder)}' does not fit the model, which has {what}; use the model that it was "
            "trained on"
        )
    for key, (adapter, place) in wanted.items():
        weight = adapter.weights[place]
        own = array_named(work, weight)
        shapes = [array_named(work, w).shape for w in adapter.weights]
        given = _back(
            adapter, place, arrays[key], own.shape, groups_of_factors(shapes) if adapter.operator == "Conv" else 1
        )
        if given is None:
            raise DataError(
                f"'{shown(key)}' has shape {list(arrays[key].shape)}, which does not fit the model's layer; use the "
                "model that the adapter was trained on"
            )
        set_numbers(work, value_named(work, weight), given.astype(own.dtype))


def _back(adapter: Adapter, place: int, array: Array, shape: tuple[int, ...], groups: int) -> Array | None:
    """Convert tensor ``place`` (an index) of an adapter from PEFT's layout to ours: the inverse of ``_turned``.

    Returns None if the result would not have ``shape``, or does not consist of ``groups`` groups.
    """
    if adapter.kind == "ia3" or place == 2 or KINDS[adapter.kind].peft is None:
        same = array.shape == shape or (KINDS[adapter.kind].peft is not None and array.size == np.prod(shape))
        return np.ascontiguousarray(array.reshape(shape)) if same else None
    if adapter.operator != "Conv":
        array = array.T
    elif groups > 1 and place == 0:
        wide = (shape[0], shape[1] * groups, *shape[2:])
        return gathered(array, groups) if array.shape == wide else None
    return np.array(array) if array.shape == shape else None


def _module(kind: str, key: str) -> str:
    part = _part(kind, key)
    if not part and key.endswith(tuple(f".{name}" for name in KINDS["lora"].of_embeddings)):
        raise DataError(
            f"'{shown(key)}' belongs to an adapter of kind {kind} on an embedding, which is not supported; merge the "
            "adapter into its model in PEFT (merge_and_unload), and export the merged model"
        )
    if not part:
        raise DataError(
            f"'{shown(key)}' in {WEIGHTS} is not the name of a tensor of an adapter of kind {kind}; save the adapter "
            "again"
        )
    return key.removeprefix(PREFIX).removesuffix(f".{part}")


def _part(kind: str, key: str) -> str:
    """Return the part of a tensor's name after the module, such as ``lora_A.weight``; empty for other tensors."""
    parts = (*KINDS[kind].parts, *KINDS[kind].of_embeddings)
    return next((part for part in parts if key.startswith(PREFIX) and key.endswith(f".{part}")), "")


def _read(folder: Path) -> tuple[Settings, dict[str, Array]]:
    path = FilePath(os.fspath(folder))
    file = CONFIG
    try:
        settings = settings_of(Fields(json_of(regular_bytes(path_inside(path, CONFIG), LARGEST)), "it"))
        file = WEIGHTS
        arrays, _ = safetensors_in(path_inside(path, WEIGHTS))
    except UnreadableError as error:
        raise DataError(
            f"cannot read an adapter in '{shown(path)}' ({file}: {error}); a PEFT folder has {CONFIG} and {WEIGHTS}"
        ) from None
    return settings, arrays
