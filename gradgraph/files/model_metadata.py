"""Entries of a model's metadata that gradgraph writes, and that anybody may have written.

Whoever opens a model has had them checked by :func:`check_metadata`; what is read here later has the types that it
should have.
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
from gradgraph.graph.marks import ADAPTERS, QUANTISED, TEACHER

DEFAULT = "default"  # the name of adapters that nobody has named, as in PEFT
T = TypeVar("T")


@dataclass(frozen=True)
class Adapter:
    """One adapted layer.

    Attributes:
        kind: one of the table ``KINDS``.
        module: the layer's name; PEFT's names are made of it.
        operator: of the layer, such as MatMul, Gemm, MatMulNBits, Conv or Gather.
        output: the name of what is read in the place of the layer's result.
        weights: the names of the trained tensors, in the order of the kind's formula.
        scale: s of the formula.
        rank, alpha, dropout: as they were asked for.
        name: all adapters of one name are one fine-tuning: trained, weighed, saved and merged together.
        weight: how much it counts; the factor in the model is ``scale · weight``.
        trained: does a step train it, where nobody chooses?
        side: ``"in"``, where it changes what goes into the layer.
        counted: of a prefix, whether the positions of the text follow its own, as those of PEFT do.
        blocks: of one that is joined of the adapters of several layers, the outputs and the ranks of each: the second
            factor is zero beside these blocks, and stays so in training.
        pieces: of a layer that packs several, the outputs of each, where the model says them.
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
    pieces: tuple[int, ...] = ()

    def put_at(self, output: str, *weights: ir.Value) -> Adapter:
        """The adapter, once it is in the model."""
        return replace(self, output=output, weights=tuple(v.name or "" for v in weights))


@dataclass(frozen=True)
class Imitation:
    """How a student imitates its teacher, as ``gradgraph.surgery.teachers`` has written it.

    Attributes:
        pairs: names of what is compared, the student's first; the first pair has the logits.
        own: the outputs that are the student's, and no hidden states.
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
    """How the layers of a model that trains through its rounding are stored.

    Attributes:
        weights, activations: the integers that they are rounded to; empty where they are not.
        learned: the names of the trained numbers that scales are made of.
    """

    weights: str = ""
    activations: str = ""
    learned: tuple[str, ...] = ()


# --- reading ------------------------------------------------------------------------------------------


def adapters_in(metadata: Mapping[str, str]) -> list[Adapter]:
    """The adapters of a model, the oldest first."""
    return _read(metadata, ADAPTERS, lambda value: [_made(Adapter, entry) for entry in tables_of(value, "it")]) or []


def adapter_weights(metadata: Mapping[str, str]) -> list[str]:
    """The names of the weights of a model's adapters that are trained in place of all others."""
    return [name for adapter in adapters_in(metadata) if adapter.trained for name in adapter.weights]


def imitation_in(metadata: Mapping[str, str]) -> Imitation | None:
    """How a model imitates its teacher, if it has one."""
    return _read(metadata, TEACHER, lambda value: _checked_imitation(_made(Imitation, Fields(value, "it"))))


def quantisation_in(metadata: Mapping[str, str]) -> Quantisation:
    """How a model is quantised; without a mark it is not."""
    return _read(metadata, QUANTISED, lambda value: _made(Quantisation, Fields(value, "it"))) or Quantisation()


def learned_ranges(metadata: Mapping[str, str]) -> list[str]:
    """The names of the trained numbers that scales of a quantised model are made of."""
    return list(quantisation_in(metadata).learned)


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise ModelError unless each entry of ours reads well."""
    for read in (adapters_in, imitation_in, quantisation_in):
        read(metadata)


def _read(metadata: Mapping[str, str], key: str, parsed: Callable[[Any], T]) -> T | None:
    """The entry ``key`` as ``parsed`` reads its JSON, None where it is left out; raises ModelError."""
    if key not in metadata:
        return None
    try:
        return parsed(json_of(metadata[key]))
    except UnreadableError as error:
        remedy = "take the model that it was made of, or remove the entry"
        raise refused(Finding(f"the entry '{key}' of its metadata", f"is damaged ({error})", "", remedy)) from None


_KINDS: dict[str, Callable[..., Any]] = {
    "str": Fields.text,
    "int": Fields.whole,
    "float": Fields.number,
    "bool": Fields.flag,
    "tuple[str, ...]": Fields.texts,
    "tuple[int, ...]": Fields.wholes,
    "tuple[tuple[str, str], ...]": Fields.pairs_of_texts,
    "tuple[tuple[int, int], ...]": Fields.pairs_of_wholes,
}


def _made(kind: type[T], fields: Fields) -> T:
    """The dataclass whose fields a table holds, each of its declared type; those left out have their defaults."""
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
    """Write them into the metadata; none leaves no trace."""
    if adapters:
        work.metadata_props[ADAPTERS] = json.dumps([dataclasses.asdict(a) for a in adapters])
    else:
        work.metadata_props.pop(ADAPTERS, None)


def write_imitation(work: ir.Model, imitation: Imitation) -> None:
    work.metadata_props[TEACHER] = json.dumps(dataclasses.asdict(imitation))


def write_quantisation(work: ir.Model, **changed: Any) -> None:
    """Write what is ``changed`` of how the model is quantised; what is empty is left out."""
    described = dataclasses.asdict(replace(quantisation_in(work.metadata_props), **changed))
    work.metadata_props[QUANTISED] = json.dumps({name: value for name, value in described.items() if value})
