"""Low-rank adapters: small trained factors beside frozen, possibly quantised, weights.

With LoRA (Hu et al. 2021, arXiv:2106.09685) a layer ``y = x·W + b`` becomes ``y = x·W + b + s·(x·A)·B`` with A of
(inputs, rank), B of (rank, outputs), ``s = alpha/rank``; rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) has
``s = alpha/√rank``. IA3 (Liu et al. 2022, arXiv:2205.05638) multiplies what comes out by one trained vector. A Conv has
a factor of the layer's own kernel and one of 1×1; an embedding takes rows of A.

The model says in its metadata which adapters it has, so that ``gg.build`` trains them and nothing else, and
:func:`merge_adapters` and :func:`save_adapter` find them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NAMES, NUMBER, PATH, WHOLE, Kind, checked
from gradgraph.errors import BuildError, UnknownNameError, listed
from gradgraph.files import Source
from gradgraph.marks import ADAPTERS
from gradgraph.surgery.linear_layers import Layer, drawn, linear_layers
from gradgraph.surgery.operated import Path, Result, add_weight, closed, free_name, opened

KINDS = ("lora", "rslora", "ia3")


@dataclass(frozen=True)
class Adapter:
    """One adapted layer, as the model's metadata have it.

    Attributes:
        kind: one of ``KINDS``.
        module: the layer's name; PEFT's names are made of it.
        operator: MatMul, Gemm, MatMulNBits, Conv or Gather.
        output: the name of the layer's result, with the adapter.
        weights: the names of A and B, or of IA3's vector.
        scale: s of the formula.
        rank, alpha, dropout: as they were asked for.
    """

    kind: str
    module: str
    operator: str
    output: str
    weights: tuple[str, ...]
    scale: float = 1.0
    rank: int = 0
    alpha: float = 0.0
    dropout: float = 0.0


def adapters_of(work: ir.Model) -> list[Adapter]:
    """Those that the metadata of a model name."""
    text = work.metadata_props.get(ADAPTERS)
    return [Adapter(**{**entry, "weights": tuple(entry["weights"])}) for entry in json.loads(text)] if text else []


def write_adapters(work: ir.Model, adapters: Sequence[Adapter]) -> None:
    """Write them into the metadata; none leaves no trace."""
    if adapters:
        work.metadata_props[ADAPTERS] = json.dumps([asdict(a) for a in adapters])
    else:
        work.metadata_props.pop(ADAPTERS, None)


_ABOVE_ZERO = Kind("a whole number above zero", lambda value: WHOLE.fits(value) and value > 0)
_PART = Kind("a number from 0 to below 1", lambda value: NUMBER.fits(value) and 0 <= value < 1)
_KIND = Kind(f"one of {', '.join(KINDS)}", lambda value: value in KINDS)


@checked(target=NAMES, rank=_ABOVE_ZERO, alpha=NUMBER.or_none(), dropout=_PART, kind=_KIND, seed=WHOLE,
         out=PATH.or_none())  # fmt: skip
def lora(
    model: Source,
    target: str | Sequence[str],
    *,
    rank: int = 8,
    alpha: float | None = None,
    dropout: float = 0.0,
    kind: str = "lora",
    seed: int = 0,
    out: Path | None = None,
) -> Result:
    """The model with low-rank adapters on the layers that ``target`` matches; it computes what it did, until trained.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        target: names or globs, of weights, modules or nodes: ``"*attn*"``, ``["*q_proj*", "*v_proj*"]``, ``"*"``.
            MatMul, Gemm, Conv, Gather and MatMulNBits with a stored weight can have one, also where a
            DequantizeLinear (int8, uint8, int4; whole, by channel or by block) stands between.
        rank: of the two factors.
        alpha: the adapter counts ``alpha/rank`` times; ``2·rank`` by default.
        dropout: of what goes into the first factor, in training.
        kind: ``"lora"``; ``"rslora"``, which counts ``alpha/√rank`` times; ``"ia3"``, one vector for each layer, which
            has neither rank nor alpha.
        seed: of the first factor (uniform in ±1/√(inputs), as PEFT has it; the second one is zeros).
        out: write the result to this path.

    Returns:
        The same kind of model. ``gg.build`` of it trains the adapters alone, unless ``train=`` names others; every
        other weight stays as it is stored.

    Raises:
        UnknownNameError: nothing that can have an adapter matches; the message names what matched and cannot.
        BuildError: the model has adapters already.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    if adapters_of(work):
        raise BuildError(
            "the model has adapters already",
            remedy="merge them first: gg.surgery.merge_adapters(model)",
            shell="merge them first: gradgraph surgery MODEL --merge",
        )
    layers, others = linear_layers(work, target)
    if not layers:
        known, _ = linear_layers(work, "*")
        because = f": {others[0]}" if others else ""
        raise UnknownNameError(
            f"no layer that can have an adapter matches {listed(_names(target))}{because}; choose from "
            f"{listed([layer.name for layer in known][:12])}"
        )
    counts = 2.0 * rank if alpha is None else float(alpha)
    rng = np.random.default_rng(seed)
    made: list[Adapter] = []
    for layer in layers:
        if kind == "ia3":
            made.append(_scaled(work, layer))
        else:
            scale = counts / (math.sqrt(rank) if kind == "rslora" else rank)
            made.append(
                _beside(work, layer, Adapter(kind, layer.name, layer.kind, "", (), scale, rank, counts, dropout), rng)
            )
    write_adapters(work, made)
    return closed(work, model, out)


def _names(target: str | Sequence[str]) -> list[str]:
    return [target] if isinstance(target, str) else list(target)


def _beside(work: ir.Model, layer: Layer, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Write ``y + s·(x·A)·B`` behind a layer."""
    a, b = _factors(work, layer, wanted.rank, rng)
    writer = _Writer(work, layer)
    x = layer.data
    if wanted.dropout and layer.kind != "Gather":
        x = writer.node("Dropout", x, writer.constant(wanted.dropout))
    if layer.kind == "Gather":
        inner = writer.node("Gather", a, x)
    else:
        inner = (
            writer.node("Conv", x, a, **layer.node.attributes) if layer.kind == "Conv" else writer.node("MatMul", x, a)
        )
    product = writer.node("Conv" if layer.kind == "Conv" else "MatMul", inner, b)
    scaled = writer.node("Mul", product, writer.constant(wanted.scale))
    output = writer.instead(lambda y: writer.node("Add", y, scaled))
    return Adapter(**{**asdict(wanted), "output": output, "weights": (a.name or "", b.name or "")})


def _factors(work: ir.Model, layer: Layer, rank: int, rng: np.random.Generator) -> tuple[ir.Value, ir.Value]:
    inputs, outputs = layer.sizes
    kernel = (layer.node.inputs[1].shape or ())[2:] if layer.kind == "Conv" and layer.node.inputs[1] is not None else ()
    sizes = [int(k) for k in kernel if isinstance(k, int)]
    if layer.kind == "Conv":
        shapes = [(rank, inputs, *sizes), (outputs, rank, *[1] * len(sizes))]
    else:
        shapes = [(inputs, rank), (rank, outputs)]
    first = drawn(rng, shapes[0], inputs * math.prod(sizes), layer.dtype)
    second = np.zeros(shapes[1], layer.dtype.numpy())
    if layer.kind == "Gather":  # PEFT begins an embedding the other way round
        first, second = np.zeros(shapes[0], layer.dtype.numpy()), rng.normal(size=shapes[1]).astype(layer.dtype.numpy())
    return (add_weight(work, f"{layer.name}.lora_A", first), add_weight(work, f"{layer.name}.lora_B", second))


def _scaled(work: ir.Model, layer: Layer) -> Adapter:
    """Write ``y·l`` behind a layer."""
    sizes = [layer.sizes[1], *[1] * (len(layer.weight.shape or ()) - 2)] if layer.kind == "Conv" else [layer.sizes[1]]
    vector = add_weight(work, f"{layer.name}.ia3_l", np.ones(sizes, layer.dtype.numpy()))
    writer = _Writer(work, layer)
    output = writer.instead(lambda y: writer.node("Mul", y, vector))
    return Adapter("ia3", layer.name, layer.kind, output, (vector.name or "",))


class _Writer:
    """Writes nodes behind a layer."""

    def __init__(self, work: ir.Model, layer: Layer) -> None:
        self.work, self.layer, self._nodes = work, layer, list[ir.Node]()

    def node(self, op_type: str, *inputs: ir.Value, **attributes: ir.Attr) -> ir.Value:
        name = free_name(self.work, f"{self.layer.name}/adapter/{op_type}_{len(self._nodes)}")
        made = ir.Node("", op_type, inputs, attributes.values(), name=name)
        made.outputs[0].name = name
        made.metadata_props.update(self.layer.node.metadata_props)
        self._nodes.append(made)
        return made.outputs[0]

    def constant(self, number: float) -> ir.Value:
        """A number of the formula, which is no weight."""
        tensor = ir.tensor(np.array(number, self.layer.dtype.numpy()))
        return self.node("Constant", value=ir.AttrTensor("value", tensor))

    def instead(self, write: Callable[[ir.Value], ir.Value]) -> str:
        """Let what ``write`` makes of the layer's result be read in its place; its name."""
        old = self.layer.node.outputs[0]
        readers = list(old.uses())
        new = write(old)
        new.type, new.shape = old.type, old.shape
        for reader, position in readers:
            reader.replace_input_with(position, new)
        graph = self.work.graph
        if old.is_graph_output():
            new.name, old.name = old.name, free_name(self.work, f"{old.name}.base")
            graph.outputs[:] = [new if v is old else v for v in graph.outputs]
        graph.insert_after(self.layer.node, self._nodes)
        return new.name or ""
