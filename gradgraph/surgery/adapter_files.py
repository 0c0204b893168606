"""Adapter checkpoints in the format of Hugging Face's PEFT: adapter_config.json, adapter_model.safetensors.

PEFT's names are ``base_model.model.<module>.lora_A.weight`` of shape (rank, inputs) and ``….lora_B.weight`` of
(outputs, rank). DoRA adds ``….lora_magnitude_vector``. An embedding has ``….lora_embedding_A`` (rank, rows) and
``….lora_embedding_B`` (columns, rank), and IA3 has ``….ia3_l``; for prefixes see ``prefix_files``. Kinds that PEFT does
not support (bottlenecks, biases, prefixes of some attentions only) use the same files with names of our own.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import safetensors.numpy

from gradgraph.arguments import NAMES, PATH, TEXT, Kind, checked
from gradgraph.errors import ArgumentError, BuildError, DataError, listed, shown
from gradgraph.files.atomic import explain_errors, write_atomically
from gradgraph.files.models import Source
from gradgraph.files.suffixes import FOLDER, check_suffix
from gradgraph.files.untrusted.array_files import safetensors_in
from gradgraph.files.untrusted.contained_paths import path_inside
from gradgraph.files.untrusted.documents import LARGEST, Fields, json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.graph.shape_inference import shape_of
from gradgraph.surgery.adapter_kinds.adapter import DEFAULT, Adapter, names_of_adapters, write_adapters
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of
from gradgraph.surgery.adapters import adaptable, chosen_adapters, put_all, rested
from gradgraph.surgery.grouped_factors import gathered, spread
from gradgraph.surgery.linear_layers import Layer, linear_layers
from gradgraph.surgery.operation import (
    Path,
    Result,
    array_named,
    check_patterns,
    closed,
    opened,
    set_numbers,
    value_named,
)
from gradgraph.surgery.ort_adapters import SUFFIX, save_ort_adapter
from gradgraph.surgery.peft_names import (
    FAMILIES,
    Factors,
    Family,
    Renamed,
    as_ours,
    as_theirs,
    for_layers,
    for_modules,
    pieces_of,
    split,
    wrapper_of,
)
from gradgraph.surgery.peft_settings import CONFIG, Settings, check_settings, fits, own_number, settings_of
from gradgraph.surgery.prefix_files import TYPE as PREFIX_TYPE
from gradgraph.surgery.prefix_files import apart, check_counted, is_as_in_peft, joined
from gradgraph.surgery.stored_weights import canonical, is_quantised, write_floats
from gradgraph.surgery.weights import give_weights

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
Array = np.ndarray[Any, Any]
N = TypeVar("N", int, float)


_LAYERS = Kind(
    'a dict of names in the folder by layer, such as {"model.layers.*.attn.o_proj": "h.*.attn.out"}',
    lambda value: isinstance(value, Mapping) and all(map(TEXT.fits, (*value, *value.values()))),
)


@checked(folder=PATH, name=NAMES.or_none(), family=TEXT.or_none(), names=_LAYERS.or_none())
def save_adapter(
    model: Source,
    folder: Path,
    weights: Mapping[str, Array] | Path | None = None,
    *,
    name: str | None = None,
    family: str | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Save the adapters of a model, without the model, in PEFT's format.

    Args:
        model: the result of :func:`lora`.
        folder: destination of ``adapter_config.json`` and ``adapter_model.safetensors``; created if missing. A path
            that ends in ``.onnx_adapter`` is written as one file in onnxruntime's adapter format (:func:`switchable`).
        weights: the trained weights, as for :func:`merge_adapters`.
        name: name of the set of adapters to save, if the model has several sets.
        family: write the layer names of Hugging Face's models, for use with PEFT in PyTorch: ``"llama"`` for all models
            with projections q_proj, k_proj, v_proj and o_proj; ``"phi3"``, which packs them; ``"phi"``. Adapters of
            packed layers are split into adapters of their pieces, and vice versa. By default layers keep the model's
            names.
        names: layer names in the folder, by layer of the model, if they are neither the model's nor the family's:
            ``{"model.layers.*.attn.o_proj": "transformer.h.*.attn.out"}``; ``*`` stands for the same text in both.

    Raises:
        ArgumentError: ``names`` has a ``*`` on one side only, or two layers would have the same name.
        BuildError: the model has no adapters, or several sets of them; or their kind does not support a family
            (supported: lora, rslora, dora).
        UnknownNameError: the model has no adapters called ``name``, or no layer of a name in ``names``; or the family
            is unknown.
        DataError: the weights cannot be read.
        OutputError: the folder cannot be written.
    """
    check_suffix(folder, FOLDER)
    work = opened(model, None)
    adapters = chosen_adapters(work, name, "save")
    if len(names_of_adapters(adapters)) > 1:
        raise BuildError(
            f"the model has several sets of adapters, but a folder stores one: {listed(names_of_adapters(adapters))}",
            remedy="choose one: save_adapter(model, folder, name=...)",
            shell="choose one: --name NAME",
        )
    if weights is not None:
        give_weights(work, weights)
    if os.fspath(folder).endswith(SUFFIX):
        if family is not None or names:
            raise BuildError(
                f"a {SUFFIX} file uses the model's names",
                remedy=f"remove the argument {'names' if names else 'family'}",
                shell="remove --family",
            )
        save_ort_adapter(work, adapters, folder)
        return
    called = _called(names or {}, [adapter.module for adapter in adapters])
    if is_as_in_peft(work, adapters):
        if called:
            raise BuildError(
                "PEFT stores the prefixes of all layers as one tensor, without layer names; remove the argument names"
            )
        arrays, config = joined(work, adapters)
    elif family is not None:
        arrays, config = _of_family(work, adapters, FAMILIES.named(family), called)
    else:
        arrays, config = _in_one_folder([one for a in adapters for one in _stored_apart(work, a, called)])
    target = FilePath(os.fspath(folder))
    with explain_errors(folder):
        target.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}  # as safetensors requires
    write_atomically(target / WEIGHTS, safetensors.numpy.save(whole, {"format": "pt"}))
    write_atomically(target / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def _called(names: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Return the name in the folder of each layer that ``names`` renames.

    Raises UnknownNameError if no layer has one of the names, and ArgumentError if two layers would have the same name.
    """
    check_patterns([*names], layers, "layer with an adapter", layers)
    renamed = Renamed(names)
    called = {layer: theirs for layer in layers if (theirs := renamed.theirs(layer)) is not None}
    _check_unique(layers, called)
    return called


def _check_unique(names: Sequence[str], called: Mapping[str, str]) -> None:
    """Raise ArgumentError if two of the names coincide after renaming."""
    again, count = Counter(called.get(name, name) for name in {*names}).most_common(1)[0]
    if count > 1:
        raise ArgumentError(f"{count} layers would have the name '{shown(again)}'; use a different name for each")


def _as_stored(work: ir.Model, adapter: Adapter) -> dict[str, Array]:
    arrays = [array_named(work, name) for name in adapter.weights]
    groups = _groups([a.shape for a in arrays]) if adapter.operator == "Conv" else 1
    turned = [_turned(adapter, i, a, groups, arrays[0].ndim) for i, a in enumerate(arrays)]
    return dict(zip(stored_names(adapter), turned, strict=True))


def _stored_apart(
    work: ir.Model, adapter: Adapter, called: Mapping[str, str]
) -> list[tuple[Adapter, dict[str, Array]]]:
    """Return an adapter with its tensors in PEFT's layout, by the name in the folder.

    An adapter that joins the adapters of a packed layer's pieces is split into these, under the names of the pieces,
    unless ``called`` renames the layer.
    """
    own, tensors = replace(adapter, module=called.get(adapter.module, adapter.module)), _as_stored(work, adapter)
    if not adapter.blocks:
        return [(own, dict(zip(stored_names(own), tensors.values(), strict=True)))]
    whole, apart = _factors_of(adapter, tensors), own.module == adapter.module
    parts = split(whole, [size for size, _ in adapter.blocks]) if apart else [whole.plain]
    names = pieces_of(adapter.module) if apart else [own.module]
    return [_with_tensors(adapter, name, part) for name, part in zip(names, parts, strict=True) if part]


def _factors_of(adapter: Adapter, tensors: Mapping[str, Array]) -> Factors:
    whole = Factors(*_factors(list(tensors.values()), adapter.scale))
    return replace(whole, blocks=adapter.blocks, shares=adapter.shares)


def _with_tensors(adapter: Adapter, module: str, factors: Factors) -> tuple[Adapter, dict[str, Array]]:
    """Return a copy of ``adapter`` for a module, with the rank and scale of ``factors``, and its tensors by name."""
    rank = len(factors.a)
    one = replace(adapter, module=module, scale=factors.scale, rank=rank, blocks=(), shares=(), pieces=(),
                  alpha=factors.scale * KINDS[adapter.kind].spread(rank))  # fmt: skip
    return one, dict(zip(stored_names(one), factors.tensors, strict=True))


def _groups(shapes: list[tuple[int, ...]]) -> int:
    """Return the number of groups of a Conv, from the shapes of its adapter's tensors; 1 for other layers."""
    return shapes[0][0] // shapes[1][1] if len(shapes) > 1 and len(shapes[1]) > 1 else 1


def stored_names(adapter: Adapter) -> list[str]:
    kind = KINDS[adapter.kind]
    parts = kind.of_embeddings if adapter.operator == "Gather" and kind.of_embeddings else kind.parts
    return [f"{_PREFIX}{adapter.module}.{part}" for part in parts]


def _turned(adapter: Adapter, place: int, array: Array, groups: int, rank: int) -> Array:
    """Convert tensor ``place`` (an index) of an adapter from our layout to PEFT's.

    In PEFT, matrices are transposed, and the first factor of a Conv, with ``rank`` axes, covers the inputs of all
    groups.
    """
    if adapter.kind == "ia3" and adapter.operator == "Conv":
        return array[None]
    if adapter.kind == "ia3":
        return np.ascontiguousarray(array.reshape((1, -1) if adapter.side == "in" else (-1, 1)))
    if KINDS[adapter.kind].peft is None:
        return array
    if place == 2:
        return np.ascontiguousarray(array.reshape((1, -1, *[1] * (rank - 2)) if adapter.operator == "Conv" else (-1,)))
    if adapter.operator != "Conv":
        return np.ascontiguousarray(array.T)
    return array if place == 1 or groups == 1 else spread(array, groups)


def _is_low_rank(kind: str) -> bool:
    return KINDS[kind].peft == "LORA"


def _of_family(
    work: ir.Model, adapters: list[Adapter], family: Family, called: Mapping[str, str]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the adapters' tensors and the content of ``adapter_config.json`` under Hugging Face's layer names.

    ``called`` maps layers to other names in the folder.
    """
    other = next((a for a in adapters if not _is_low_rank(a.kind)), None)
    if other is not None:
        if KINDS[other.kind].peft is None:
            raise BuildError(
                f"PEFT has no file format for adapters of kind {other.kind}, as on '{shown(other.module)}'; remove the "
                "family to write a folder for load_adapter, or use kind lora"
            )
        low_rank = ", ".join(filter(_is_low_rank, KINDS))
        raise BuildError(
            f"'{shown(other.module)}' has an adapter of kind {other.kind} on a {other.operator}, whose name does not "
            f"depend on the family; a family requires {low_rank}"
        )
    layers = {layer.name: layer for layer in linear_layers(work, "*")[0]}
    linear = [a for a in adapters if a.operator not in ("Conv", "Gather")]
    given = {a.module: _factors_of(a, _as_stored(work, a)) for a in linear}
    found = for_modules({name: factors for name, factors in given.items() if name not in called}, family, layers)
    again = next((theirs for theirs in called.values() if theirs in found), None)
    if again is not None:
        raise ArgumentError(
            f"'{shown(again)}' is also the family's name of another layer with an adapter; use another name in names"
        )
    found |= {theirs: given[name] for name, theirs in called.items() if name in given}
    stored = [_with_tensors(linear[0], module, factors.plain) for module, factors in found.items()]
    their_names = {**{a.module: as_theirs(a.module, family) for a in adapters}, **called}
    stored += [one for a in adapters if a not in linear for one in _stored_apart(work, a, their_names)]
    return _in_one_folder(stored)


def _in_one_folder(stored: Sequence[tuple[Adapter, dict[str, Array]]]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the tensors of all adapters, and the content of ``adapter_config.json``."""
    ranks = {one.module: len(next(iter(tensors.values()))) for one, tensors in stored if _is_low_rank(one.kind)}
    return {n: a for _, tensors in stored for n, a in tensors.items()}, _config([one for one, _ in stored], ranks)


def _config(adapters: list[Adapter], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``; ``ranks`` are the adapters' ranks by module."""
    first = adapters[0]
    modules = sorted({a.module for a in adapters})
    common = {"base_model_name_or_path": None, "task_type": None, "bias": "none", "inference_mode": True}
    if first.kind == "ia3":
        inward = sorted(a.module for a in adapters if a.side == "in")
        return {"peft_type": "IA3", "target_modules": modules, "feedforward_modules": inward, **common}
    if KINDS[first.kind].peft is None:
        own = {"r": first.rank, "lora_alpha": first.alpha, "lora_dropout": first.dropout}
        return {"peft_type": first.kind.upper(), **own, "target_modules": modules, **common}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    alphas = {a.module: a.alpha if ranks[a.module] == a.rank else a.scale * KINDS[a.kind].spread(ranks[a.module])
              for a in adapters}  # fmt: skip  # with which PEFT computes the same scale
    alpha = next(alphas[m] for m, r in ranks.items() if r == usual)
    return {
        "peft_type": "LORA",
        "r": usual,
        "lora_alpha": alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.kind == "rslora",
        "use_dora": first.kind == "dora",
        "rank_pattern": {m: r for m, r in ranks.items() if r != usual},
        "alpha_pattern": {m: a for m, a in alphas.items() if a != alpha},
        "target_modules": modules,
        **common,
    }


# --- reading -----------------------------------------------------------------------------------------------------


@checked(folder=PATH, name=TEXT, names=_LAYERS.or_none(), out=PATH.or_none())
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
    names = names or _unwrapped(work, owners.values())
    if names:
        settings, arrays = _renamed(owners, settings, arrays, names)
    before = adapters_of(work)
    arrays = _take_whole_weights(work, kind, settings, arrays)
    of_peft = settings.peft_type == PREFIX_TYPE
    if not of_peft:
        _check_whole(kind, arrays, folder)
    if _is_low_rank(kind):
        settings, arrays = _by_meaning(work, kind, settings, arrays)
    modules = {"*"} if of_peft else {_module(kind, key) for key in arrays}
    layers = adaptable(work, sorted(modules), kind, name, before)
    if of_peft:
        settings, arrays = _prefix(settings, arrays, layers)
    else:
        arrays |= _repeated(kind, layers, arrays)
        modules = {_module(kind, key) for key in arrays}
        layers = [layer for layer in layers if layer.name in modules]
    wanted = [_wanted(settings, kind, name, layer, arrays) for layer in layers]
    made = put_all(work, layers, wanted, np.random.default_rng(0))
    if of_peft:
        check_counted(made)
    _fill(work, made, arrays, folder)
    write_adapters(work, [*rested(before), *made])
    return closed(work, model, out)


def _unwrapped(work: ir.Model, modules: Iterable[str]) -> dict[str, str]:
    """Return ``names`` for a model whose layer names begin with a wrapper's, which the modules of the folder lack."""
    wrapper = wrapper_of([layer.name for layer in linear_layers(work, "*")[0]], modules)
    return {f"{wrapper}*": "*"} if wrapper else {}


def _modules(kind: str, arrays: Iterable[str]) -> dict[str, str]:
    """Return the module of each tensor by name."""
    parts = (*KINDS[kind].parts, *KINDS[kind].of_embeddings, "base_layer.weight", "weight", "bias")
    places = {key: next((p for p in parts if key.endswith(f".{p}")), "") for key in arrays}
    return {key: key.removeprefix(_PREFIX).removesuffix(f".{part}") for key, part in places.items()}


def _renamed(
    modules: Mapping[str, str], settings: Settings, arrays: dict[str, Array], names: Mapping[str, str]
) -> tuple[Settings, dict[str, Array]]:
    """Return settings and tensors with the modules in ``names`` renamed to layers of the model."""
    known = sorted({*modules.values()})
    check_patterns([*names.values()], known, "module of the folder", known)
    renamed = Renamed(names)
    ours = {module: layer for module in known if (layer := renamed.ours(module)) is not None}
    _check_unique(known, ours)
    moved = {
        f"{_PREFIX}{ours[m]}{k.removeprefix(_PREFIX + m)}" if (m := modules[k]) in ours else k: a
        for k, a in arrays.items()
    }
    settings = replace(
        settings,
        ranks={new: own_number(settings.ranks, m, settings.rank) for m, new in ours.items()} | dict(settings.ranks),
        alphas={new: own_number(settings.alphas, m, settings.alpha) for m, new in ours.items()} | dict(settings.alphas),
        inward=(*settings.inward, *(layer for m, layer in ours.items() if fits(m, settings.inward))),
    )
    return settings, moved


def _take_whole_weights(work: ir.Model, kind: str, settings: Settings, arrays: dict[str, Array]) -> dict[str, Array]:
    """Write fully fine-tuned weights (``modules_to_save``) into the model, and return the other tensors.

    Like PEFT, this uses every tensor with the name of a weight of the model. PEFT also stores the weights of embeddings
    and heads with adapters (``….base_layer.weight``), changed or not.
    """
    whole = [k for k in arrays if k.startswith(_PREFIX) and k.endswith((".weight", ".bias")) and not _part(kind, k)]
    layers = {as_ours(layer.name): layer for layer in linear_layers(work, "*")[0]} if whole else {}
    vectors = {as_ours(name): value for name, value in work.graph.initializers.items()} if whole else {}
    names = {key: as_ours(key.removeprefix(_PREFIX).replace(".base_layer.", ".")) for key in whole}
    lying = {}  # by last part of layer names, whether non-square weights are stored as (inputs, outputs)
    for key, name in names.items():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None and layer.sizes[0] != layer.sizes[1]:
            lying[_last(name)] = arrays[key].shape == layer.sizes
    for key, name in names.items():
        array, layer, vector = arrays[key], layers.get(name.removesuffix(".weight")), vectors.get(name)
        inputs_first = lying.get(_last(name), settings.inputs_first)
        if layer is not None and (new := _outputs_first(layer, array, inputs_first)) is not None:
            _check_lying(layer, key, new)
            if ".base_layer." not in key or _is_changed(layer, new, array.dtype):
                write_floats(work, layer, new)
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


def _outputs_first(layer: Layer, array: Array, inputs_first: bool) -> Array | None:
    """Return a fully fine-tuned weight of a PEFT folder with outputs first, or None if it does not fit the layer.

    PyTorch's linear layers store (outputs, inputs); GPT-2's Conv1D stores (inputs, outputs). ``inputs_first`` decides
    for a square weight, whose shape is the same in both layouts.
    """
    if layer.kind in ("Conv", "Gather"):
        fitting = array.shape == layer.shape
        return (array.T if layer.kind == "Gather" else array) if fitting else None
    if array.shape not in (layer.sizes, layer.sizes[::-1]):
        return None
    is_square = layer.sizes[0] == layer.sizes[1]
    return array.T if (inputs_first if is_square else array.shape == layer.sizes) else array


def _check_lying(layer: Layer, key: str, new: Array) -> None:
    """Raise DataError if a square weight is much closer to the original weight when transposed."""
    if layer.kind in ("Conv", "Gather") or layer.sizes[0] != layer.sizes[1]:
        return
    own = canonical(layer)
    if np.linalg.norm(new.T - own) < 0.5 * np.linalg.norm(new - own):
        raise DataError(
            f"'{shown(key)}' is square and was fully fine-tuned, and its transpose is closer to the model's weight, "
            f"contrary to fan_in_fan_out in {CONFIG}; set it to true for a Conv1D, which stores (inputs, outputs), "
            "and to false for a Linear"
        )


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
        modules.setdefault(module, set()).add(key.removeprefix(f"{_PREFIX}{module}."))
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
    modules = [m for m in tensors if all(f"{_PREFIX}{m}.{part}" in arrays for part in parts[: len(tensors[m])])]
    given = {}
    for module in modules:
        rank = own_number(settings.ranks, module, settings.rank)
        alpha = own_number(settings.alphas, module, settings.alpha)
        stored = [arrays[f"{_PREFIX}{module}.{part}"] for part in parts[: len(tensors[module])]]
        given[module] = Factors(*_factors(stored, alpha / KINDS[kind].spread(rank)))
    found = for_layers(given, [layer for layer in layers if layer.kind not in ("Conv", "Gather")])
    others = {k: a for k, a in arrays.items() if not any(k.startswith(f"{_PREFIX}{m}.") for m in modules)}
    moved = {f"{_PREFIX}{m}.{part}": a for m, f in found.items() for part, a in zip(parts, f.tensors, strict=False)}
    ranks = {m: len(f.a) for m, f in found.items()}
    alphas = {m: f.scale * KINDS[kind].spread(len(f.a)) for m, f in found.items()}
    settings = replace(
        settings,
        ranks=ranks | dict(settings.ranks),
        alphas=alphas | dict(settings.alphas),
        blocks={m: f.blocks for m, f in found.items()},
        shares={m: f.shares for m, f in found.items()},
    )
    return settings, others | moved


def _factors(stored: list[Array], scale: float) -> tuple[Array, Array, float, Array | None]:
    return stored[0], stored[1], scale, stored[2] if len(stored) > 2 else None


def _repeated(kind: str, layers: list[Any], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return adapter tensors for each repeated call of a module, copied from its first call: PEFT stores them once."""
    copies: dict[str, Array] = {}
    for layer in layers:
        if isinstance(layer, Layer) and layer.repeats:
            first, own = (stored_names(Adapter(kind, name, layer.kind)) for name in (layer.repeats, layer.name))
            copies |= {new: arrays.get(new, arrays[old]) for old, new in zip(first, own, strict=True) if old in arrays}
    return copies


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
        given = _back(adapter, place, arrays[key], own.shape, _groups(shapes) if adapter.operator == "Conv" else 1)
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
    if not part:
        raise DataError(
            f"'{shown(key)}' in {WEIGHTS} is not the name of a tensor of an adapter of kind {kind}; save the adapter "
            "again"
        )
    return key.removeprefix(_PREFIX).removesuffix(f".{part}")


def _part(kind: str, key: str) -> str:
    """Return the part of a tensor's name after the module, such as ``lora_A.weight``; empty for other tensors."""
    parts = (*KINDS[kind].parts, *KINDS[kind].of_embeddings)
    return next((part for part in parts if key.startswith(_PREFIX) and key.endswith(f".{part}")), "")


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
