"""Metadata entries of gradgraph in models: adapters, distillation, quantisation, and derived names.

Files are untrusted, so :func:`check_metadata` checks the entries when a model is opened; afterwards, all fields have
the declared types.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import onnx_ir as ir

from gradgraph.errors import Finding, refused
from gradgraph.files.untrusted.documents import Fields, json_of, tables_of
from gradgraph.files.untrusted.regular import UnreadableError
from gradgraph.graph.marks import ADAPTERS, GIVEN_NAMES, QUANTISED, TEACHER

DEFAULT = "default"  # the name of unnamed adapters, as in PEFT
T = TypeVar("T")


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer.

    Attributes:
        kind: the kind of adapter, a key of the table ``KINDS``.
        module: the layer's name, from which PEFT's names are derived.
        operator: the layer's operator, such as MatMul, Gemm, MatMulNBits, Conv or Gather.
        output: the value that replaces the layer's result.
        weights: the names of the trained tensors, in the order of the kind's formula.
        scale: the factor s in the kind's formula.
        rank, alpha, dropout: the hyperparameters that the user requested.
        name: the name shared by the adapters of several layers that are trained, weighted, saved and merged together.
        weight: the weight of the adapter; the factor in the model is ``scale · weight``.
        trained: whether a step trains the adapter by default.
        side: ``"in"`` if the adapter changes the layer's input, ``"out"`` if it changes the result.
        counted: for a prefix, whether text positions are counted from the end of the prefix, as in PEFT.
        blocks: for an adapter that joins the adapters of several layers, (outputs, rank) of each adapter: the second
            factor is zero outside these blocks, and remains zero in training.
        shares: the scale of each of these adapters, relative to ``scale``; empty if they are equal.
        pieces: for a layer that packs several layers, such as q, k and v, the number of outputs of each, if recorded.
    """

    kind: str
    module: str
    operator: str
    output: str = ""
    weights: tuple[str, ...] = ()
    scale: float = 1.0
    rank: int = 0
    alpha: float = 0.0
    dropout: float = 0.0
    name: str = DEFAULT
    weight: float = 1.0
    trained: bool = True
    side: str = "out"
    counted: bool = False
    blocks: tuple[tuple[int, int], ...] = ()
    shares: tuple[float, ...] = ()
    pieces: tuple[int, ...] = ()

    def put_at(self, output: str, *weights: ir.Value) -> Adapter:
        """Return a copy of the adapter with its output and weights in the model, after it was inserted."""
        return replace(self, output=output, weights=tuple(v.name or "" for v in weights))


@dataclass(frozen=True)
class Imitation:
    """The distillation of a student from its teacher, as written by ``gradgraph.surgery.teachers``.

    Attributes:
        pairs: pairs of names of compared values (student, teacher); the first pair is the logits.
        own: the outputs of the student that are not hidden states.
    """

    temperature: float
    alpha: float
    match_weight: float
    pairs: tuple[tuple[str, str], ...]
    own: tuple[str, ...]

    @property
    def values(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.pairs for name in pair))


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of a model that is trained with rounded values (quantisation-aware training).

    Attributes:
        weights, activations: the integer type to which weights and activations are rounded; empty if not rounded.
        learned: the names of the trained tensors from which scales are computed.
    """

    weights: str = ""
    activations: str = ""
    learned: tuple[str, ...] = ()


@dataclass(frozen=True)
class GivenNames:
    """Names that gradgraph derived from where weights are used, and that the exporter did not write.

    Attributes:
        weights: pairs of the name and the one before it.
    """

    weights: tuple[tuple[str, str], ...]


# --- reading ------------------------------------------------------------------------------------------


def adapters_in(metadata: Mapping[str, str]) -> list[Adapter]:
    """Return the adapters of a model, the oldest first."""
    return _read(metadata, ADAPTERS, lambda value: [_made(Adapter, entry) for entry in tables_of(value, "it")]) or []


def adapter_weights(metadata: Mapping[str, str]) -> list[str]:
    """Return the names of the trained adapter weights of a model; if there are any, no other weights are trained."""
    return [name for adapter in adapters_in(metadata) if adapter.trained for name in adapter.weights]


def imitation_in(metadata: Mapping[str, str]) -> Imitation | None:
    """Return the distillation of a model; None if it has none."""
    return _read(metadata, TEACHER, lambda value: _checked_imitation(_made(Imitation, Fields(value, "it"))))


def quantisation_in(metadata: Mapping[str, str]) -> Quantisation:
    """Return the quantisation of a model; ``Quantisation()`` if it has none."""
    return _read(metadata, QUANTISED, lambda value: _made(Quantisation, Fields(value, "it"))) or Quantisation()


def learned_ranges(metadata: Mapping[str, str]) -> list[str]:
    """Return the names of the trained tensors from which the scales of a quantised model are computed."""
    return list(quantisation_in(metadata).learned)


def given_names(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the exporter's names of weights by the names that gradgraph derived from where they are used."""
    found = _read(metadata, GIVEN_NAMES, lambda value: _made(GivenNames, Fields(value, "it")))
    return dict(found.weights) if found else {}


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise ModelError unless all entries of gradgraph are valid."""
    for read in (adapters_in, imitation_in, quantisation_in, given_names):
        read(metadata)


def _read(metadata: Mapping[str, str], key: str, parsed: Callable[[Any], T]) -> T | None:
    """Return the JSON in the entry ``key``, converted by ``parsed``; None if there is no such entry.

    Raises:
        ModelError: if the entry is damaged.
    """
    if key not in metadata:
        return None
    try:
        return parsed(json_of(metadata[key]))
    except UnreadableError as error:
        remedy = "use the original model, or remove the entry"
        raise refused(Finding(f"the entry '{key}' of its metadata", f"is damaged ({error})", "", remedy)) from None


_KINDS: dict[str, Callable[..., Any]] = {
    "str": Fields.text,
    "int": Fields.whole,
    "float": Fields.number,
    "bool": Fields.flag,
    "tuple[str, ...]": Fields.texts,
    "tuple[int, ...]": Fields.wholes,
    "tuple[float, ...]": Fields.numbers,
    "tuple[tuple[str, str], ...]": Fields.pairs_of_texts,
    "tuple[tuple[int, int], ...]": Fields.pairs_of_wholes,
}


def _made(kind: type[T], fields: Fields) -> T:
    """Return a dataclass ``kind`` made from a table, after type checks; missing fields get their defaults."""
    declared = dataclasses.fields(kind)  # type: ignore[arg-type]
    fields.check_keys(*(f.name for f in declared))
    given = {}
    for f in declared:
        default = () if f.default is dataclasses.MISSING else (f.default,)
        given[f.name] = _KINDS[str(f.type)](fields, f.name, *default)
    return kind(**given)


def _checked_imitation(imitation: Imitation) -> Imitation:
    if not imitation.pairs or imitation.temperature <= 0:
        what = "it compares nothing" if not imitation.pairs else f"its temperature is {imitation.temperature:g}"
        raise UnreadableError(what)
    return imitation


# --- writing ------------------------------------------------------------------------------------------


def write_adapters(work: ir.Model, adapters: Sequence[Adapter]) -> None:
    """Write ``adapters`` into the metadata of ``work``; an empty list removes the entry."""
    if adapters:
        work.metadata_props[ADAPTERS] = json.dumps([dataclasses.asdict(a) for a in adapters])
    else:
        work.metadata_props.pop(ADAPTERS, None)


def write_imitation(work: ir.Model, imitation: Imitation) -> None:
    work.metadata_props[TEACHER] = json.dumps(dataclasses.asdict(imitation))


def write_quantisation(work: ir.Model, **changed: Any) -> None:
    """Update fields of the quantisation record in the metadata of ``work``; empty fields are not stored."""
    described = dataclasses.asdict(replace(quantisation_in(work.metadata_props), **changed))
    work.metadata_props[QUANTISED] = json.dumps({name: value for name, value in described.items() if value})


def add_given_names(work: ir.Model, names: Mapping[str, str]) -> None:
    """Record names that gradgraph gave to weights of ``work``, with the names before, in its metadata."""
    given = given_names(work.metadata_props)
    every = given | {new: given.get(old, old) for new, old in names.items()}
    if every:
        work.metadata_props[GIVEN_NAMES] = json.dumps({"weights": sorted(every.items())})
