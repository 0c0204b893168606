"""PEFT's files of adapters on the experts of a mixture (``target_parameters``), in both directions.

For a parameter of E experts, PEFT stores ``lora_A.weight`` (rank·E, inputs) and ``lora_B.weight`` (outputs, rank·E),
whose columns are ordered by rank and then by expert. The tensors have the name of the module, not of the parameter: the
adapter of its first parameter is ``….experts.base_layer.lora_A.weight``, and that of its last one
``….experts.lora_A.weight``. Before version 0.19, A multiplied the second axis of the parameter and B the third one,
which are outputs and inputs for most models.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.errors import BuildError, DataError, listed, shown
from gradgraph.files.model_metadata import Adapter
from gradgraph.surgery.adapter_kinds import lora_experts
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.surgery.experts import Experts, interleaved, separated
from gradgraph.surgery.operation import Array, array_named
from gradgraph.surgery.peft_names import as_ours, by_meaning, found_by_meaning
from gradgraph.surgery.peft_settings import CONFIG, Settings, own_number, pattern_of

TARGETS, VERSION = "target_parameters", "peft_version"
_INNER, _OWN_VERSION = ".base_layer", "0.19.0"  # the first version of this order of axes
_MOST_ORDERS = 1000  # of parameters that are tried: models have two or three in a module
_MODULE = re.compile(r"\.(mlp|feed_forward|block_sparse_moe)\.experts$")


@dataclass(frozen=True)
class Given:
    """The adapter of one parameter in a folder.

    Attributes:
        layer: the experts in the model.
        a, b: its factors as the model has them: (experts, rank, inputs), (experts, outputs, rank).
        scale: the factor of their product.
    """

    layer: Experts
    a: Array
    b: Array
    scale: float

    def wanted(self, name: str) -> Adapter:
        """Return the adapter to add to the model, in the set ``name``."""
        rank = self.a.shape[1]
        return Adapter(lora_experts.NAME, self.layer.name, self.layer.kind, scale=self.scale, rank=rank,
                       alpha=self.scale * rank, name=name)  # fmt: skip


# --- reading -------------------------------------------------------------------------------------------------------


def experts_in(
    work: ir.Model, kind: str, settings: Settings, arrays: Mapping[str, Array], prefix: str
) -> tuple[list[Given], dict[str, Array]]:
    """Return the adapters on experts in the tensors of a PEFT folder, and the other tensors.

    Args:
        work: the model.
        kind: the kind of the folder's adapters.
        settings: its settings.
        arrays: its tensors; the names begin with ``prefix``.
        prefix: PEFT's prefix of all names.

    Raises:
        DataError: a parameter is not a tensor of experts of the model, sizes do not fit, or the order of axes of square
            matrices is unknown.
    """
    targets = settings.parameters
    if not targets:
        return [], dict(arrays)
    if KINDS[kind].peft != "LORA" or settings.is_dora or settings.dropout:
        raise DataError(f"{CONFIG} has {TARGETS} with DoRA, dropout or another type than LORA, which PEFT rejects, too")
    ends = {target.rpartition(".")[2] for target in targets}
    every, others = lora_experts.found(work, "*")
    theirs = _levels(arrays, prefix)
    found, used = list[Given](), set[str]()
    for parent, layers in _by_parent(layer for layer in every if layer.name.rpartition(".")[2] in ends).items():
        module = _module_of(parent, theirs)
        if module is None:
            continue
        factors = [(arrays[f"{key}.lora_A.weight"], arrays[f"{key}.lora_B.weight"]) for key in theirs[module]]
        found += _assigned(layers, factors, module, kind, settings)
        used |= {f"{key}.{part}" for key in theirs[module] for part in KINDS[kind].parts[:2]}
    reached = {given.layer.name.rpartition(".")[2] for given in found}
    missing = [target for target in targets if target.rpartition(".")[2] not in reached]
    if missing:
        because = f": {others[0]}" if others else ""
        raise DataError(
            f"{CONFIG} has {TARGETS} {listed(map(shown, missing), 3)}, but the model has no such tensor of experts"
            f"{because}; merge the adapter into its model in PEFT (merge_and_unload), and export the merged model"
        )
    return found, {key: array for key, array in arrays.items() if key not in used}


def _by_parent(layers: Iterable[Experts]) -> dict[str, list[Experts]]:
    """Return parameters by their module, in the order of the model."""
    found: dict[str, list[Experts]] = {}
    for layer in layers:
        found.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    return found


def _levels(arrays: Mapping[str, Array], prefix: str) -> dict[str, list[str]]:
    """Return the beginnings of the names of each module's pairs of factors, the innermost first, by module."""
    found: dict[str, list[str]] = {}
    for key in arrays:
        if key.startswith(prefix) and key.endswith(".lora_A.weight"):
            begin = key.removesuffix(".lora_A.weight")
            module = re.sub(rf"({re.escape(_INNER)})*$", "", begin.removeprefix(prefix))
            if f"{begin}.lora_B.weight" in arrays:
                found.setdefault(module, []).append(begin)
    return {module: sorted(begins, key=len, reverse=True) for module, begins in found.items()}


def _meaning(module: str) -> str:
    """Return the name of a module of experts in the form in which both sides are compared."""
    return _MODULE.sub(".moe.experts", as_ours(module))


def _module_of(parent: str, theirs: Iterable[str]) -> str | None:
    """Return the folder's module of a module of the model: of the same name, or of the same end if only one has it."""
    return found_by_meaning(by_meaning({_meaning(module): module for module in theirs}), _meaning(parent))


def _assigned(
    layers: Sequence[Experts], factors: Sequence[tuple[Array, Array]], module: str, kind: str, settings: Settings
) -> list[Given]:
    """Return the pairs of factors of a module, each with the parameter whose sizes fit; in PEFT's order if several do.

    Raises:
        DataError: sizes do not fit.
    """
    for chosen in itertools.islice(itertools.permutations(layers, len(factors)), _MOST_ORDERS):
        pairs = list(zip(chosen, factors, strict=True))
        if all(_fits(layer, a, b) for layer, (a, b) in pairs):
            return [_given(layer, a, b, module, kind, settings) for layer, (a, b) in pairs]
    sizes = listed([f"{a.shape} and {b.shape}" for a, b in factors], 3)
    raise DataError(
        f"the adapters of '{shown(module)}' have the sizes {sizes}, which do not fit the experts of the model; use the "
        "model that the adapter was trained on"
    )


def _fits(layer: Experts, a: Array, b: Array) -> bool:
    shapes = (a.shape[-1], b.shape[0]) in (layer.sizes, layer.sizes[::-1])
    return a.ndim == b.ndim == 2 and shapes and len(a) == b.shape[1] and len(a) > 0 and len(a) % layer.count == 0


def _given(layer: Experts, a: Array, b: Array, module: str, kind: str, settings: Settings) -> Given:
    rank, own = len(a) // layer.count, f"{module}.{layer.name.rpartition('.')[2]}"
    stated = own_number(settings.ranks, own, settings.rank)
    if rank != stated:
        raise DataError(
            f"the adapter of '{shown(own)}' has rank {rank}, but {CONFIG} has {stated}; use two files of the same "
            "adapter"
        )
    alpha = own_number(settings.alphas, own, settings.alpha)
    of_a = a.reshape(layer.count, rank, -1)
    of_b = b.reshape(len(b), rank, layer.count).transpose(2, 0, 1)
    if _is_exchanged(layer, a.shape[-1], settings):
        of_a, of_b = of_b.swapaxes(1, 2), of_a.swapaxes(1, 2)
    if layer.halves_apart:
        of_b = interleaved(of_b)
    return Given(layer, of_a, of_b, alpha / KINDS[kind].spread(rank))


def _is_exchanged(layer: Experts, width: int, settings: Settings) -> bool:
    """Whether A multiplies outputs: so it is before version 0.19, if the parameter is (experts, outputs, inputs)."""
    inputs, outputs = layer.sizes
    if inputs != outputs:
        return width == outputs
    version = re.match(r"(\d+)\.(\d+)", settings.version)
    if version is None or (int(version[1]), int(version[2])) < (0, 19):
        raise DataError(
            f"the experts of '{shown(layer.name)}' are square, and PEFT before 0.19, or without {VERSION} in {CONFIG}, "
            "may have stored their factors in either order; load and save the adapter with a current PEFT"
        )
    return False


# --- writing -------------------------------------------------------------------------------------------------------


def stored_experts(
    work: ir.Model, adapters: Sequence[Adapter], theirs: Mapping[str, str], prefix: str
) -> tuple[dict[str, Array], dict[str, tuple[int, float]]]:
    """Return the tensors of adapters on experts as PEFT stores them, and the rank and scale of each parameter.

    Args:
        work: the model.
        adapters: adapters of the kind ``lora_experts``.
        theirs: the name of each parameter in the folder, by its name in the model.
        prefix: PEFT's prefix of all names.
    """
    layers = {layer.name: layer for layer in lora_experts.found(work, "*")[0]}
    order = {name: i for i, name in enumerate(layers)}
    by_module: dict[str, list[Adapter]] = {}
    for adapter in sorted(adapters, key=lambda one: order[one.module]):
        by_module.setdefault(theirs[adapter.module].rpartition(".")[0], []).append(adapter)
    arrays: dict[str, Array] = {}
    for module, inside in by_module.items():
        for depth, adapter in enumerate(reversed(inside)):  # the first parameter is the innermost
            a, b = (array_named(work, name) for name in adapter.weights)
            if layers[adapter.module].halves_apart:
                b = separated(b)
            begin = f"{prefix}{module}{_INNER * depth}"
            arrays[f"{begin}.lora_A.weight"] = a.reshape(-1, a.shape[2])
            arrays[f"{begin}.lora_B.weight"] = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    ranks = {theirs[adapter.module]: array_named(work, adapter.weights[0]).shape[1] for adapter in adapters}
    return arrays, {theirs[a.module]: (ranks[theirs[a.module]], a.scale) for a in adapters}


def with_experts(config: Mapping[str, Any], experts: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` with adapters on experts: the rank and scale of each parameter.

    Raises:
        BuildError: the other adapters are of a kind that PEFT does not combine with them.
    """
    if config["peft_type"] != "LORA" or config.get("use_dora"):
        raise BuildError(
            f"PEFT cannot combine adapters of kind {lora_experts.NAME} with DoRA or other kinds than lora in one "
            "folder; give them another name, and save each set in a folder of its own"
        )
    if config.get("lora_dropout"):
        raise BuildError("PEFT supports no dropout beside adapters on experts; set dropout to 0")
    usual = next(iter(experts.values()))[0]
    base = {"r": usual, "lora_alpha": usual * 2.0, "rank_pattern": {}, "alpha_pattern": {}, **config}
    spread = KINDS["rslora" if base.get("use_rslora") else "lora"].spread
    every = [*base["target_modules"], *experts]
    ranks = {pattern_of(name, every): rank for name, (rank, _) in experts.items() if rank != base["r"]}
    alphas = {pattern_of(name, every): scale * spread(rank) for name, (rank, scale) in experts.items()}
    return {
        **base,
        "rank_pattern": base["rank_pattern"] | ranks,
        "alpha_pattern": base["alpha_pattern"] | {n: a for n, a in alphas.items() if a != base["lora_alpha"]},
        TARGETS: sorted(experts),
        VERSION: _OWN_VERSION,
    }
