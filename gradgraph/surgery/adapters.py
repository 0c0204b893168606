"""Adapters: small trained tensors added to frozen, possibly quantised, weights; ``adapter_kinds`` has the formulas.

The adapters of a model are listed in its metadata, so that ``gg.build`` trains only them, and :func:`merge_adapters`
and :func:`save_adapter` find them. Adapters with the same name belong together; a model may have several names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NAMES, NUMBER, PATH, TEXT, WHOLE, as_names, checked
from gradgraph.arguments import Kind as Checked
from gradgraph.errors import BuildError, UnknownNameError, listed, shown
from gradgraph.files.model_metadata import DEFAULT, Adapter, write_adapters
from gradgraph.files.models import Source
from gradgraph.graph.marks import QUANTISED
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of, check_stored
from gradgraph.surgery.integer_products import write_pairs
from gradgraph.surgery.linear_layers import linear_layers
from gradgraph.surgery.operation import (
    Path,
    Result,
    check_patterns,
    closed,
    learn_sizes,
    log_matches,
    matched,
    numbers_of,
    opened,
    set_numbers,
)
from gradgraph.surgery.peft_names import known_pieces

_ABOVE_ZERO = Checked("a whole number above zero", lambda value: WHOLE.fits(value) and value > 0)
_PART = Checked("a number from 0 to below 1", lambda value: NUMBER.fits(value) and 0 <= value < 1)
_NAME = Checked("a name of letters, digits, _ and -",
                lambda value: TEXT.fits(value) and value.replace("_", "").replace("-", "").isalnum())  # fmt: skip
_WEIGHTS = Checked(
    'the scale of each, such as {"fr": 1.0, "de": 0}',
    lambda value: isinstance(value, Mapping) and all(map(TEXT.fits, value)) and all(map(NUMBER.fits, value.values())),
)


@checked(target=NAMES, rank=_ABOVE_ZERO, alpha=NUMBER.or_none(), dropout=_PART, kind=TEXT, name=_NAME,
         feedforward=NAMES, seed=WHOLE, out=PATH.or_none())  # fmt: skip
def lora(
    model: Source,
    target: str | Sequence[str],
    *,
    rank: int = 8,
    alpha: float | None = None,
    dropout: float = 0.0,
    kind: str = "lora",
    name: str = DEFAULT,
    feedforward: str | Sequence[str] = (),
    seed: int = 0,
    out: Path | None = None,
) -> Result:
    """Add adapters to the layers that match ``target``. Until trained, they do not change the model's outputs.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        target: names or globs, of weights, modules or nodes: ``"*attn*"``, ``["*q_proj*", "*v_proj*"]``, ``"*"``.
            MatMul, Gemm, Conv, Gather and MatMulNBits with a stored weight are supported, also with a DequantizeLinear
            (int8, uint8, int4; per tensor, channel or block). For a prefix, attentions; for bitfit, biases.
        rank: rank of the two factors; width of a bottleneck; length of a prefix.
        alpha: the adapter is scaled by ``alpha/rank``; ``2·rank`` by default.
        dropout: dropout probability of the input of the first factor, in training.
        kind: one of the kinds below. A prefix, unlike others, changes the model's outputs immediately; if all
            attentions get one, the input ``position_ids`` is offset by its length, as in PEFT.
        name: name of this set of adapters. Existing adapters with other names stay in the model, but are no longer
            trained (:func:`use_adapters`).
        feedforward: for ia3, the layers whose input is multiplied instead of their output.
        seed: seed of the initial values (the first factor is uniform in ±1/√(inputs), as in PEFT; the second is zero).
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``. ``gg.build`` trains only its adapters, unless ``train=`` names other
        weights; all other weights stay as stored.

    Raises:
        UnknownNameError: no supported layer matches a name or glob; the message lists unsupported matches.
        BuildError: the model already has adapters of this name, or of a kind that cannot share a layer.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    before = adapters_of(work)
    _check_used(kind, alpha, dropout)
    layers = adaptable(work, target, kind, name, before)
    inward = _inward(layers, feedforward, kind)
    counts = 2.0 * rank if alpha is None else float(alpha)
    scale = counts / KINDS[kind].spread(rank)
    rng = np.random.default_rng(seed)
    wanted = [
        Adapter(kind, layer.name, layer.kind, scale=scale, rank=rank, alpha=counts, dropout=dropout, name=name,
                side="in" if layer.name in inward else "out")
        for layer in layers
    ]  # fmt: skip
    made = put_all(work, layers, wanted, rng)
    write_adapters(work, [*rested(before), *made])
    log_matches("adapters at", [adapter.module for adapter in made])
    return closed(work, model, out)


lora.__doc__ = (lora.__doc__ or "").rstrip() + "\n\n    Kinds:\n" + "".join(
    f"\n    - ``\"{name}\"``: {kind.about}." for name, kind in KINDS.items()
)  # fmt: skip


def _check_used(kind: str, alpha: float | None, dropout: float) -> None:
    """Raise BuildError for an alpha or dropout that adapters of this kind do not have."""
    made = KINDS.named(kind)
    for name, given, has in (("alpha", alpha is not None, made.has_alpha), ("dropout", dropout > 0, made.drops)):
        if given and not has:
            raise BuildError(
                f"adapters of kind {shown(kind)} have no {name}", remedy=f"remove {name}", shell=f"remove --{name}"
            )


def _inward(layers: Sequence[Any], feedforward: str | Sequence[str], kind: str) -> set[str]:
    """Return the names of the layers that ``feedforward`` matches: an IA3 adapter multiplies their input."""
    if not as_names(feedforward):
        return set()
    if kind != "ia3":
        raise BuildError(
            f"feedforward applies to adapters of kind ia3, but these are of kind {shown(kind)}; remove feedforward"
        )
    known = [layer.name for layer in layers]
    check_patterns(feedforward, _names_of(layers), "layer that gets an adapter", known)
    return {layer.name for layer in matched(feedforward, ((layer.names, layer) for layer in layers))}


def _names_of(layers: Sequence[Any]) -> list[str]:
    return [name for layer in layers for name in layer.names]


def _weighable() -> str:
    """Return the adapter types (``kind=``) that can share a layer, as text for a message."""
    return " and ".join(name for name, kind in KINDS.items() if kind.adds)


def names_of_adapters(adapters: Sequence[Adapter]) -> list[str]:
    """Return each adapter name once, in order."""
    return list(dict.fromkeys(a.name for a in adapters))


def put_all(
    work: ir.Model, layers: Sequence[Any], wanted: Sequence[Adapter], rng: np.random.Generator
) -> list[Adapter]:
    """Add the adapters ``wanted`` to ``layers``, one each; return them with the names of their tensors."""
    wanted = [replace(one, pieces=known_pieces(layer)) for layer, one in zip(layers, wanted, strict=True)]
    made = [KINDS[one.kind].put(work, layer, one, rng) for layer, one in zip(layers, wanted, strict=True)]
    finish = KINDS[wanted[0].kind].finish
    return made if finish is None else finish(work, layers, made)


def rested(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Return copies of the adapters, marked as not trained."""
    return [replace(a, trained=False) for a in adapters]


def adaptable(
    work: ir.Model, target: str | Sequence[str], kind: str, name: str, before: Sequence[Adapter]
) -> list[Any]:
    """Return the layers (for some kinds attentions or biases) that ``target`` matches, for adapters of ``kind``.

    Layers of existing adapters (``before``) are excluded. Integer products are converted to float products first.

    Raises:
        UnknownNameError, BuildError: as :func:`lora` does.
    """
    _check_new(name, before)
    if write_pairs(work):
        learn_sizes(work)
    if any(node.op_type == "QuantizeLinear" for node in work.graph):
        work.metadata_props.setdefault(QUANTISED, "{}")  # gradients must reach layers below rounded data
    own = {weight for adapter in before for weight in adapter.weights}
    search = KINDS.named(kind).layers
    found, others = search(work, target)
    layers = [layer for layer in found if not any(v is not None and v.name in own for v in layer.node.inputs[:2])]
    if KINDS[kind].merge is not None:
        scaled = [layer for layer in layers if layer.weighs]
        others += [f"'{x.name}' is a Gemm that scales its product or its bias (alpha, beta)" for x in scaled]
        layers = [layer for layer in layers if not layer.weighs]
    what = f"{'layer' if search is linear_layers else 'part'} that can have an adapter"
    if not layers:
        raise _unmatched(work, as_names(target), what, search(work, "*")[0], others)
    if len(as_names(target)) > 1 and all(hasattr(layer, "names") for layer in layers):  # kinds of users may lack names
        check_patterns(target, _names_of(layers), what, [layer.name for layer in search(work, "*")[0]])
    _check_shares(kind, layers, before)
    return layers


def _check_new(name: str, before: Sequence[Adapter]) -> None:
    """Raise BuildError if one of the adapters ``before`` has the name."""
    if name in names_of_adapters(before):
        called = "" if name == DEFAULT else f" '{name}'"
        raise BuildError(
            f"the model already has adapters{called}",
            remedy="give these another name, such as name='second', or merge the others first",
            shell="give these another name, such as --name second, or merge the others first",
        )


def _unmatched(
    work: ir.Model, patterns: list[str], what: str, known: Sequence[Any], others: Sequence[str]
) -> UnknownNameError:
    """Return the error for patterns that match no layer; ``others`` says why matching layers were excluded."""
    if not known and any(node.op_type == "If" for node in work.graph):
        return UnknownNameError(
            f"no {what} matches {listed(patterns)}; layers in branches of an If are not supported",
            remedy="select one of its branches first: gg.surgery.fix_inputs(model, {input: value})",
            shell="select one of its branches first: --fix INPUT=VALUE",
        )
    if not known and not others:
        return UnknownNameError(f"no {what} matches {listed(patterns)}, as the model has none; choose another kind")
    because = f": {others[0]}" if others else ""
    return UnknownNameError(
        f"no {what} matches {listed(patterns)}{because}; choose from {listed([layer.name for layer in known][:12])}"
    )


def _check_shares(kind: str, layers: Sequence[Any], before: Sequence[Adapter]) -> None:
    """Raise BuildError if a layer has an adapter that cannot share it with one of ``kind``."""
    taken = {a.module: a for a in before}
    shared = next((taken[x.name] for x in layers if x.name in taken), None) if taken else None
    if shared is not None and not (KINDS[kind].adds and KINDS[shared.kind].adds):
        raise BuildError(
            f"'{shown(shared.module)}' has an adapter of kind {shared.kind}, which cannot share a layer with one "
            f"of kind {kind}; {_weighable()} can"
        )


# --- several names -----------------------------------------------------------------------------------------------


@checked(weights=_WEIGHTS.or_none(), train=NAMES.or_none(), out=PATH.or_none())
def use_adapters(
    model: Source,
    weights: Mapping[str, float] | None = None,
    *,
    train: str | Sequence[str] | None = None,
    out: Path | None = None,
) -> Result:
    """Set the scale of each adapter in the model, and which of them are trained.

    Args:
        model: a model with adapters.
        weights: the scale of each set of adapters, by name: 1 as trained, 0 off, or any other number. Adapters of other
            names get 0. The scale of kinds that cannot be scaled is 1.
        train: the names of the adapters that a step trains; by default unchanged.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        UnknownNameError: the model has no adapters of one of the names.
        BuildError: the scale of a kind that cannot be scaled would change.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    adapters = adapters_of(work)
    named = names_of_adapters(adapters)
    for one in (*(weights or {}), *as_names(train or ())):
        if one not in named:
            raise UnknownNameError(f"the model has no adapters '{shown(one)}'; choose from {listed(named)}")
    changed = []
    for adapter in adapters:
        if weights is not None:
            adapter = _weighed(work, adapter, float(weights.get(adapter.name, 0)))
        if train is not None:
            adapter = replace(adapter, trained=adapter.name in as_names(train))
        changed.append(adapter)
    write_adapters(work, changed)
    return closed(work, model, out)


def _weighed(work: ir.Model, adapter: Adapter, weight: float) -> Adapter:
    if weight == adapter.weight:
        return adapter
    if not KINDS[adapter.kind].adds:
        raise BuildError(
            f"adapters of kind {adapter.kind} have no scale: '{shown(adapter.name)}' cannot be set "
            f"to {weight:g}; {_weighable()} can"
        )
    set_numbers(work, *factor_of(work, adapter, adapter.scale * weight))
    return replace(adapter, weight=weight)


def factor_of(work: ir.Model, adapter: Adapter, number: float) -> tuple[ir.Value, np.ndarray]:
    """Return the graph value of an adapter's scale, and ``number`` as an array of its type.

    Raises:
        BuildError: the adapter's nodes were changed.
    """
    find = KINDS[adapter.kind].factor
    factor = None if find is None else find(work, adapter)
    held = numbers_of(factor)
    if factor is None or held is None:
        raise BuildError(
            f"the nodes of the adapter of '{shown(adapter.module)}' were changed, so its scale cannot be found; use "
            "the model as the adapters were added to it"
        )
    return factor, np.asarray(number, held.dtype.numpy())


def chosen_adapters(work: ir.Model, names: str | Sequence[str] | None, what: str) -> list[Adapter]:
    """Return the adapters of these names; all adapters without names.

    Args:
        names: names of sets of adapters.    what: the verb in the message "the model has no adapters to …".

    Raises:
        BuildError: the model has no adapters, or their weights are missing.
        UnknownNameError: the model has no adapters of one of the names.
    """
    adapters = adapters_of(work)
    if not adapters:
        raise BuildError(
            f"the model has no adapters to {what}",
            remedy="gg.lora(model, target) adds some",
            shell="gradgraph surgery MODEL --lora GLOB adds some",
        )
    wanted, known = as_names(names or ()), names_of_adapters(adapters)
    for one in wanted:
        if one not in known:
            raise UnknownNameError(f"the model has no adapters '{shown(one)}'; choose from {listed(known)}")
    chosen = [a for a in adapters if not wanted or a.name in wanted]
    check_stored(work, chosen)
    return chosen
