"""LoRA on the experts of a mixture, whose weights are one tensor: ``W[e] + s·B[e]·A[e]`` for each expert e.

A is (experts, rank, inputs) and B is (experts, outputs, rank). PEFT calls such adapters ``target_parameters``. In
training, the whole updated tensor is computed in each step, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.files.model_metadata import Adapter
from gradgraph.graph.quantisers import Quantiser
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import discard, replace_value
from gradgraph.surgery import integer_experts
from gradgraph.surgery.adapter_kinds.kind import KINDS, Kind, Rounding, everything, zeros
from gradgraph.surgery.adapter_kinds.low_rank import FACTORS, factor
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.experts import Experts, experts_of, stored_of
from gradgraph.surgery.gptq import Gptq
from gradgraph.surgery.linear_layers import drawn
from gradgraph.surgery.operation import Array, add_weight, matched, value_named
from gradgraph.surgery.stored_weights import relative_norm

NAME = "lora_experts"


def found(work: ir.Model, target: str | Sequence[str]) -> tuple[list[Experts], list[str]]:
    """Return the experts whose parameter, tensor or node matches names or globs; and why other matches are excluded."""
    every = matched(target, ((one.names, one) for one in experts_of(work)))
    opset = work.opset_imports.get("", 0)
    others = {id(one): integer_experts.why_not(one.node, opset) for one in every if one.kind == "QMoE"}
    return [one for one in every if not others.get(id(one))], [
        f"'{one.name}' belongs to a QMoE {others[id(one)]}" for one in every if others.get(id(one))
    ]


def put(work: ir.Model, layer: Experts, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Add ``s·B·A`` to the weights that the readers of a tensor read; return the adapter with its tensors' names."""
    if layer.kind == "QMoE":
        layer = _as_floats(work, layer)
    old, (inputs, outputs) = layer.value, layer.sizes
    dtype = old.dtype or layer.stored.dtype or ir.DataType.FLOAT
    writer = Writer(work, layer.node, wanted, dtype)
    a = writer.weight("lora_A", drawn(rng, (layer.count, wanted.rank, inputs), inputs, dtype))
    b = writer.weight("lora_B", np.zeros((layer.count, outputs, wanted.rank)))
    factors = [writer.node("Transpose", v, perm=[0, 2, 1]) for v in (a, b)] if layer.inputs_first else [b, a]
    product = writer.node("MatMul", *factors)
    readers = list(old.uses())
    new = writer.node("Add", old, writer.node("Mul", product, writer.constant(wanted.scale * wanted.weight)))
    new.type, new.shape = ir.TensorType(dtype), ir.Shape(shape_of(layer.stored) or (None,) * 3)
    for reader, place in readers:
        reader.replace_input_with(place, new)
    order = {node: i for i, node in enumerate(work.graph)}
    writer.place_before(min((reader for reader, _ in readers), key=lambda node: order[node]))
    return wanted.put_at(new.name or "", a, b)


def _as_floats(work: ir.Model, layer: Experts) -> Experts:
    """Return the experts of a QMoE as read by the MoE that replaces it."""
    if layer.node.graph is not None:  # otherwise it was replaced for another projection
        integer_experts.write_floats(work, layer.node)
    return _experts_in(work, layer.stored)


def _experts_in(work: ir.Model, stored: ir.Value) -> Experts:
    return next(one for one in experts_of(work) if one.stored is stored)


def merge_into(work: ir.Model, adapter: Adapter, factors: list[Array], requantise: bool) -> Rounding | None:
    """Add the update to the stored tensor, and remove the nodes of the adapter.

    Integers become floats, unless ``requantise`` is set; the rounding is then returned.

    Raises:
        BuildError: the nodes of the adapter were changed.
    """
    result = value_named(work, adapter.output)
    stored, added = stored_of(result), result.producer()
    if stored is None or added is None or added.op_type != "Add" or added.inputs[0] is None:
        raise BuildError(
            f"the nodes of the adapter of '{shown(adapter.module)}' were changed",
            remedy="merge the model returned by gg.lora, and pass the trained one as weights=",
            shell="merge the model that --lora wrote, and pass the trained one as --trained",
        )
    replace_value(result, added.inputs[0])
    discard(added)
    layer = _experts_in(work, stored)
    a, b = (np.asarray(array, np.float64) for array in factors)
    delta = adapter.scale * adapter.weight * (b @ a)
    whole = layer.read().astype(np.float64) + (delta.swapaxes(1, 2) if layer.inputs_first else delta)
    if layer.source is None or requantise:
        rounds = _Rounds(delta, layer.inputs_first)
        error = layer.write(work, whole, rounds)
        if error is None:
            return None
        integer_experts.write_integers(work)
        return Rounding(error, relative_norm(delta, whole), rounds.lost)
    floats = layer.source.outputs[0]
    dtype = (floats.dtype or ir.DataType.FLOAT).numpy()
    replace_value(floats, add_weight(work, f"{adapter.module}.merged", whole.astype(dtype)))
    return None


class _Rounds:
    """The rounding of all experts after their updates (experts, outputs, inputs), by GPTQ one expert at a time.

    Attributes:
        lost: as in :class:`Gptq`, of all experts together.
    """

    def __init__(self, updates: Array, inputs_first: bool) -> None:
        self._updates, self._inputs_first, self.lost = updates, inputs_first, 0.0

    def __call__(self, quantiser: Quantiser, weights: Array) -> Array:
        """Return the integers of ``weights``, in their layout."""
        found, grid = np.empty(weights.shape, np.int32), quantiser.grid(weights.shape)
        error = effect = 0.0
        for expert, update in enumerate(self._updates):
            gptq = Gptq(update)
            weight, scales, points = (self._turned(each[expert]) for each in (weights, *grid))
            found[expert] = self._turned(gptq.rounded(weight, quantiser.limits, scales, points))
            error, effect = error + gptq.error, effect + gptq.effect
        self.lost = error / effect if effect else 0.0
        return found

    def _turned(self, weight: Array) -> Array:
        return weight.T if self._inputs_first else weight


KINDS.add(
    NAME,
    Kind("two low-rank factors for each expert of a mixture, added to the tensor of their weights", put, FACTORS, zeros,
         ((1, 2), (1, 2)), factor, layers=found, merge_into=merge_into, adds=True, peft="LORA", default=everything,
         what="tensors of experts"),
)  # fmt: skip
