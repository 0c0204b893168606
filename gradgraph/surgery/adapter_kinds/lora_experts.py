"""LoRA on the experts of a mixture, whose weights are one tensor: ``W[e] + s·B[e]·A[e]`` for each expert e.

A is (experts, rank, inputs) and B is (experts, outputs, rank). Such tensors are inputs of an MoE operator, or rows of
them are gathered by expert and multiplied, as PyTorch's exporter writes it. PEFT calls such adapters
``target_parameters``. In training, the whole updated tensor is computed in each step, as in PEFT.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import discard, replace_value
from gradgraph.surgery import integer_experts
from gradgraph.surgery.adapter_kinds.adapter import Adapter
from gradgraph.surgery.adapter_kinds.kind import KINDS, Kind, zeros
from gradgraph.surgery.adapter_kinds.low_rank import FACTORS, factor
from gradgraph.surgery.adapter_kinds.writer import Writer
from gradgraph.surgery.linear_layers import drawn
from gradgraph.surgery.operation import add_weight, matched, numbers_of, set_numbers, value_named
from gradgraph.surgery.stored_weights import quantiser_of, write_in_blocks
from gradgraph.surgery.weight_places import recorded_names

Array = np.ndarray[Any, Any]
NAME = "lora_experts"
_WEIGHT = re.compile(r"\.q?weight$")
_OPERATORS = {"MoE": integer_experts.IN_MOE, "QMoE": integer_experts.IN_QMOE}  # and the inputs with their weights
_FIRST = 2  # the input of MoE and QMoE with the weights of the first projection
_KEPT = ("Add", "DequantizeLinear")  # nodes between a stored tensor and its reader


@dataclass(frozen=True)
class Experts:
    """The weights of all experts of one projection.

    Attributes:
        node: the node that reads them: MoE, QMoE, Gather or GatherND.
        place: the index of the weights among its inputs.
        stored: the stored tensor; ``node`` may read it with earlier adapters added.
        inputs_first: whether the tensor is (experts, inputs, outputs) rather than (experts, outputs, inputs).
    """

    node: ir.Node
    place: int
    stored: ir.Value
    inputs_first: bool

    @property
    def kind(self) -> str:
        return self.node.op_type

    @property
    def weighs(self) -> bool:
        return False

    @property
    def name(self) -> str:
        """The path of the parameter, such as ``model.layers.0.mlp.experts.gate_up_proj``."""
        recorded = recorded_names(self.stored)
        return _WEIGHT.sub("", recorded[0] if len(recorded) == 1 else self.stored.name or "")

    @property
    def names(self) -> list[str]:
        """The names that a pattern can match: of the parameter, the tensor and the node."""
        return [name for name in (self.name, self.stored.name, self.node.name) if name]

    @property
    def value(self) -> ir.Value:
        """The value that the node reads: the tensor, with earlier adapters added."""
        value = self.node.inputs[self.place]
        assert value is not None
        return value

    @property
    def count(self) -> int:
        """The number of experts."""
        return self._sizes[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of an expert."""
        first, second = self._sizes[1:]
        return (first, second) if self.inputs_first else (second, first)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        tensor = numbers_of(self.stored)
        assert tensor is not None
        experts, first, second = map(int, tensor.shape.numpy())
        if self.kind == "QMoE":
            second = second * 8 // integer_experts.bits_of(self.node, integer_experts.IN_QMOE.index(self.place))
        return experts, first, second

    @property
    def halves_apart(self) -> bool:
        """Whether rows alternate between gate and up here, but Hugging Face stores all rows of the gate first.

        An MoE computes ``gate·σ(α·gate)·(up + β)`` of alternating rows. Models with this order of rows in Hugging Face,
        too (gpt-oss), add β = 1.
        """
        get = self.node.attributes.get_int
        alternate = self.kind in ("MoE", "QMoE") and self.place == _FIRST and get("swiglu_fusion", 0) == 1
        return alternate and self.node.attributes.get_float("activation_beta", 0.0) == 0


def found(work: ir.Model, target: str | Sequence[str]) -> tuple[list[Experts], list[str]]:
    """Return the experts whose parameter, tensor or node matches names or globs; and why other matches are excluded."""
    every = matched(target, ((one.names, one) for one in {id(one.stored): one for one in _experts(work)}.values()))
    opset = work.opset_imports.get("", 0)
    others = {id(one): integer_experts.why_not(one.node, opset) for one in every if one.kind == "QMoE"}
    return [one for one in every if not others.get(id(one))], [
        f"'{one.name}' belongs to a QMoE {others[id(one)]}" for one in every if others.get(id(one))
    ]


def _experts(work: ir.Model) -> Iterator[Experts]:
    for node in work.graph:
        if node.op_type in _OPERATORS and node.domain == integer_experts.DOMAIN:
            places: Sequence[int] = _OPERATORS[node.op_type]
            inputs_first: bool | None = False
        elif _gathers_experts(node):
            places, inputs_first = (0,), _is_second_factor(node.outputs[0])
        else:
            continue
        for place in places:
            stored = _stored(node.inputs[place]) if place < len(node.inputs) else None
            if stored is not None and inputs_first is not None:
                yield Experts(node, place, stored, inputs_first)


def _gathers_experts(node: ir.Node) -> bool:
    """Whether a node gathers along the first axis of its first input only."""
    if node.domain or node.op_type not in ("Gather", "GatherND"):
        return False
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) == 0
    indices = shape_of(node.inputs[1]) if node.inputs[1] is not None else None
    return node.attributes.get_int("batch_dims", 0) == 0 and indices is not None and indices[-1:] in ((1,), [1])


def _stored(value: ir.Value | None) -> ir.Value | None:
    """Return the stored tensor [experts, …, …] that ``value`` is, perhaps with adapters added; otherwise None."""
    while value is not None and not value.is_initializer():
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in _KEPT and not node.domain else None
    tensor = numbers_of(value)
    return value if tensor is not None and tensor.shape.rank() == 3 else None


def _is_second_factor(gathered: ir.Value) -> bool | None:
    """Whether matrices of experts are the second factor of a product (inputs first); None if they are not multiplied.

    A Transpose in between exchanges inputs and outputs.
    """
    uses, turned = list(gathered.uses()), False
    while len(uses) == 1 and uses[0].node.op_type == "Transpose" and not uses[0].node.domain:
        turned ^= list(uses[0].node.attributes.get_ints("perm", ())) == [0, 2, 1]
        uses = list(uses[0].node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "MatMul" or uses[0].node.domain:
        return None
    return (uses[0].idx == 1) != turned


def put(work: ir.Model, layer: Experts, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Add ``s·B·A`` to the weights that the readers of a tensor read; return the adapter with its tensors' names."""
    if wanted.dropout:
        raise BuildError(f"adapters of kind {NAME} have no dropout, as they change weights; remove dropout")
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
    name = layer.stored.name
    return next(one for one in _experts(work) if one.stored.name == name)


def merge_into(work: ir.Model, adapter: Adapter, factors: list[Array], requantise: bool) -> float | None:
    """Add the update to the stored tensor, and remove the nodes of the adapter.

    Integers become floats, unless ``requantise`` is set; the rounding error ``‖stored - W‖/‖W‖`` is then returned.

    Raises:
        BuildError: the nodes of the adapter were changed.
    """
    result = value_named(work, adapter.output)
    stored, added = _stored(result), result.producer()
    tensor, product = numbers_of(stored), None
    if added is not None and len(added.inputs) == 2 and added.inputs[1] is not None:
        scaled = added.inputs[1].producer()
        product = scaled.inputs[0].producer() if scaled is not None and scaled.inputs[0] is not None else None
    if added is None or added.inputs[0] is None or stored is None or tensor is None or product is None:
        raise BuildError(
            f"the nodes of the adapter of '{shown(adapter.module)}' were changed",
            remedy="merge the model returned by gg.lora, and pass the trained one as weights=",
            shell="merge the model that --lora wrote, and pass the trained one as --trained",
        )
    a, b = (np.asarray(array, np.float64) for array in factors)
    delta = adapter.scale * adapter.weight * (b @ a)
    inputs_first = product.inputs[0] is not value_named(work, adapter.weights[1])
    source = next((use.node for use in stored.uses() if use.node.op_type == "DequantizeLinear"), None)
    numbers = tensor.numpy() if source is None else quantiser_of(source).dequantised(tensor.numpy())
    whole = numbers.astype(np.float64) + (delta.swapaxes(1, 2) if inputs_first else delta)
    replace_value(result, added.inputs[0])
    discard(added)
    if source is None:
        set_numbers(work, stored, whole.astype(numbers.dtype))
    elif requantise:
        rounding = write_in_blocks(work, source, whole)
        integer_experts.write_integers(work)
        return rounding
    else:
        dtype = (source.outputs[0].dtype or ir.DataType.FLOAT).numpy()
        replace_value(source.outputs[0], add_weight(work, f"{adapter.module}.merged", whole.astype(dtype)))
    return None


KINDS.add(
    NAME,
    Kind("two low-rank factors for each expert of a mixture, added to the tensor of their weights", put, FACTORS, zeros,
         ((1, 2), (1, 2)), factor, layers=found, merge_into=merge_into, adds=True, peft="LORA"),
)  # fmt: skip
