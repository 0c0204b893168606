"""Adapters, as the metadata of a model describe them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import onnx_ir as ir

from gradgraph.graph.marks import ADAPTERS

DEFAULT = "default"  # the name of adapters that nobody has named, as in PEFT


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

    def put_at(self, output: str, *weights: ir.Value) -> Adapter:
        """The adapter, once it is in the model."""
        return replace(self, output=output, weights=tuple(v.name or "" for v in weights))


def adapters_of(work: ir.Model) -> list[Adapter]:
    """Read the adapters of a model from its metadata, the oldest first."""
    text = work.metadata_props.get(ADAPTERS)
    return [Adapter(**{**entry, "weights": tuple(entry["weights"])}) for entry in json.loads(text)] if text else []


def write_adapters(work: ir.Model, adapters: Sequence[Adapter]) -> None:
    """Write them into the metadata; none leaves no trace."""
    if adapters:
        work.metadata_props[ADAPTERS] = json.dumps([asdict(a) for a in adapters])
    else:
        work.metadata_props.pop(ADAPTERS, None)


def names_of_adapters(adapters: Sequence[Adapter]) -> list[str]:
    """Each name once, in their order."""
    return list(dict.fromkeys(a.name for a in adapters))
