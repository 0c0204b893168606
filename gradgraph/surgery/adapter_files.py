"""Adapter checkpoints in the format of Hugging Face's PEFT: adapter_config.json, adapter_model.safetensors.

PEFT's names are ``base_model.model.<module>.lora_A.weight`` of shape (rank, inputs) and ``….lora_B.weight`` of
(outputs, rank). DoRA adds ``….lora_magnitude_vector``. An embedding has ``….lora_embedding_A`` (rank, rows) and
``….lora_embedding_B`` (columns, rank), and IA3 has ``….ia3_l``; for prefixes see ``prefix_files``. Kinds that PEFT does
not support (bottlenecks, biases, prefixes of some attentions only) use the same files with names of our own.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import safetensors.numpy

from gradgraph.arguments import NAMES, PATH, TEXT, Kind, checked
from gradgraph.errors import ArgumentError, BuildError, listed, shown
from gradgraph.files.atomic import explain_errors, write_atomically
from gradgraph.files.model_metadata import Adapter
from gradgraph.files.models import Source
from gradgraph.files.suffixes import FOLDER, check_suffix
from gradgraph.surgery.adapter_kinds import lora_experts
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.adapters import chosen_adapters, names_of_adapters
from gradgraph.surgery.expert_files import stored_experts, with_experts
from gradgraph.surgery.grouped_factors import spread
from gradgraph.surgery.linear_layers import linear_layers
from gradgraph.surgery.operation import (
    Array,
    Path,
    array_named,
    check_patterns,
    opened,
)
from gradgraph.surgery.ort_adapters import SUFFIX, save_ort_adapter
from gradgraph.surgery.peft_names import (
    FAMILIES,
    Factors,
    Family,
    Renamed,
    as_theirs,
    for_modules,
    packs_of,
    pieces_of,
    split,
)
from gradgraph.surgery.peft_settings import CONFIG, pattern_of
from gradgraph.surgery.prefix_files import is_as_in_peft, joined
from gradgraph.surgery.weights import give_weights

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
N = TypeVar("N", int, float)


LAYERS = Kind(
    'a dict of names in the folder by layer, such as {"model.layers.*.attn.o_proj": "h.*.attn.out"}',
    lambda value: isinstance(value, Mapping) and all(map(TEXT.fits, (*value, *value.values()))),
)


@checked(folder=PATH, name=NAMES.or_none(), family=TEXT.or_none(), names=LAYERS.or_none())
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
    of_family = None if family is None else FAMILIES.named(family)
    experts = [adapter for adapter in adapters if adapter.kind == lora_experts.NAME]
    adapters = [adapter for adapter in adapters if adapter.kind != lora_experts.NAME]
    if adapters and is_as_in_peft(work, adapters):
        if called:
            raise BuildError(
                "PEFT stores the prefixes of all layers as one tensor, without layer names; remove the argument names"
            )
        arrays, config = joined(work, adapters)
    elif of_family is not None and adapters:
        arrays, config = _of_family(work, adapters, of_family, called)
    else:
        arrays, config = _in_one_folder([one for a in adapters for one in _stored_apart(work, a, called)])
    if experts:
        more, own = stored_experts(work, experts, _names_of_experts(experts, of_family, called), PREFIX)
        arrays, config = arrays | more, with_experts(config, own)
    if isinstance(config.get("target_modules"), list):
        every = [layer.name for layer in linear_layers(work, "*")[0]]
        known = [called.get(layer, theirs) for layer in every for theirs in _names_of(layer, of_family)]
        config["target_modules"] = _targets(config["target_modules"], known)
    target = FilePath(os.fspath(folder))
    with explain_errors(folder):
        target.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}  # as safetensors requires
    write_atomically(target / WEIGHTS, safetensors.numpy.save(whole, {"format": "pt"}))
    write_atomically(target / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def _names_of_experts(experts: Sequence[Adapter], family: Family | None, called: Mapping[str, str]) -> dict[str, str]:
    """Return the name in the folder of each parameter of experts: as in ``called``, or the family's."""
    found = {}
    for adapter in experts:
        module, point, parameter = adapter.module.rpartition(".")
        own = module if family is None else as_theirs(module, family)
        found[adapter.module] = called.get(adapter.module, f"{own}{point}{parameter}")
    return found


def _names_of(layer: str, family: Family | None) -> list[str]:
    """Return the names that a layer, its pieces or the layer that packs it may have in the folder."""
    return [layer] if family is None else [as_theirs(n, family) for n in (layer, *pieces_of(layer), *packs_of(layer))]


def _targets(modules: list[str], names: Sequence[str]) -> list[str] | str:
    """Return PEFT's ``target_modules``: names, or a regular expression if a name is also the end of another module's.

    PEFT adapts all modules that end with a name; it matches an expression with whole names. ``names`` are those of all
    layers.
    """
    paths = [name.split(".") for name in names]
    every = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}  # layers, and modules of layers
    ends = {".".join(path[begin:]) for path in every if ".".join(path) not in modules for begin in range(1, len(path))}
    return modules if ends.isdisjoint(modules) else "|".join(map(re.escape, modules))


def _called(names: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Return the name in the folder of each layer that ``names`` renames.

    Raises UnknownNameError if no layer has one of the names, and ArgumentError if two layers would have the same name.
    """
    check_patterns([*names], layers, "layer with an adapter", layers)
    renamed = Renamed(names)
    called = {layer: theirs for layer in layers if (theirs := renamed.theirs(layer)) is not None}
    check_unique(layers, called)
    return called


def check_unique(names: Sequence[str], called: Mapping[str, str]) -> None:
    """Raise ArgumentError if two of the names coincide after renaming."""
    again, count = Counter(called.get(name, name) for name in {*names}).most_common(1)[0]
    if count > 1:
        raise ArgumentError(f"{count} layers would have the name '{shown(again)}'; use a different name for each")


def _as_stored(work: ir.Model, adapter: Adapter) -> dict[str, Array]:
    arrays = [array_named(work, name) for name in adapter.weights]
    groups = groups_of_factors([a.shape for a in arrays]) if adapter.operator == "Conv" else 1
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
    whole = Factors(*factors_of_low_rank(list(tensors.values()), adapter.scale))
    return replace(whole, blocks=adapter.blocks, shares=adapter.shares)


def _with_tensors(adapter: Adapter, module: str, factors: Factors) -> tuple[Adapter, dict[str, Array]]:
    """Return a copy of ``adapter`` for a module, with the rank and scale of ``factors``, and its tensors by name."""
    rank = len(factors.a)
    one = replace(adapter, module=module, scale=factors.scale, rank=rank, blocks=(), shares=(), pieces=(),
                  alpha=factors.scale * KINDS[adapter.kind].spread(rank))  # fmt: skip
    return one, dict(zip(stored_names(one), factors.tensors, strict=True))


def groups_of_factors(shapes: list[tuple[int, ...]]) -> int:
    """Return the number of groups of a Conv, from the shapes of its adapter's tensors; 1 for other layers."""
    return shapes[0][0] // shapes[1][1] if len(shapes) > 1 and len(shapes[1]) > 1 else 1


def stored_names(adapter: Adapter) -> list[str]:
    kind = KINDS[adapter.kind]
    parts = kind.of_embeddings if adapter.operator == "Gather" and kind.of_embeddings else kind.parts
    return [f"{PREFIX}{adapter.module}.{part}" for part in parts]


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


def is_low_rank(kind: str) -> bool:
    return KINDS[kind].peft == "LORA"


def _of_family(
    work: ir.Model, adapters: list[Adapter], family: Family, called: Mapping[str, str]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the adapters' tensors and the content of ``adapter_config.json`` under Hugging Face's layer names.

    ``called`` maps layers to other names in the folder.
    """
    other = next((a for a in adapters if not is_low_rank(a.kind)), None)
    if other is not None:
        if KINDS[other.kind].peft is None:
            raise BuildError(
                f"PEFT has no file format for adapters of kind {other.kind}, as on '{shown(other.module)}'; remove the "
                "family to write a folder for load_adapter, or use kind lora"
            )
        low_rank = ", ".join(filter(is_low_rank, KINDS))
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
    ranks = {one.module: len(next(iter(tensors.values()))) for one, tensors in stored if is_low_rank(one.kind)}
    return {n: a for _, tensors in stored for n, a in tensors.items()}, _config([one for one, _ in stored], ranks)


def _config(adapters: list[Adapter], ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``; ``ranks`` are the adapters' ranks by module."""
    modules = sorted({a.module for a in adapters})
    common = {"base_model_name_or_path": None, "task_type": None, "bias": "none", "inference_mode": True}
    if not adapters:
        return {"peft_type": "LORA", "lora_dropout": 0.0, "target_modules": [], **common}
    first = adapters[0]
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
        "rank_pattern": {pattern_of(m, ranks): r for m, r in ranks.items() if r != usual},
        "alpha_pattern": {pattern_of(m, alphas): a for m, a in alphas.items() if a != alpha},
        "target_modules": modules,
        **common,
    }


def factors_of_low_rank(stored: list[Array], scale: float) -> tuple[Array, Array, float, Array | None]:
    return stored[0], stored[1], scale, stored[2] if len(stored) > 2 else None
