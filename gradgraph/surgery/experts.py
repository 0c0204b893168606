"""The experts of a mixture: stored tensors with a matrix for each expert, in every form that exporters write.

The nodes that read a tensor decide whether it contains experts: it is a weight of MoE or QMoE (com.microsoft), its
matrices are gathered by expert and multiplied, as PyTorch's exporter writes it, or a MatMul multiplies all of them.
Values are floats, integers behind a DequantizeLinear, or the packed integers of QMoE.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.graph.shape_inference import shape_of
from gradgraph.surgery.integer_experts import DOMAIN, IN_MOE, IN_QMOE, Integers, why_not_read
from gradgraph.surgery.naming import recorded_names
from gradgraph.surgery.operation import Array, numbers_of, set_numbers, tensor_of
from gradgraph.surgery.stored_weights import Rounds, quantiser_of, rounding_as, write_in_blocks

_WEIGHT = re.compile(r"\.q?weight$")
_WEIGHTS = {"MoE": IN_MOE, "QMoE": IN_QMOE}  # the inputs with the weights of each projection
_FIRST = {"MoE": (2, 3), "QMoE": (2, 4)}  # weights and biases of the first projection
_KEPT = ("Add", "DequantizeLinear")  # nodes between a stored tensor and its reader
_MOST_NODES = 8  # of an adapter, between its factors and the Add
# model types of transformers that store rows of gate and linear half alternately (is_concatenated=False)
_ALTERNATING = frozenset({"gpt_oss"})


@dataclass(frozen=True)
class Experts:
    """The weights of all experts of one projection.

    Attributes:
        node: the node that reads them: MoE, QMoE, Gather, GatherND or MatMul.
        place: the index of the weights among its inputs.
        stored: the stored tensor; ``node`` may read it with adapters added.
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
        """The value that the node reads: the tensor, with adapters added."""
        value = self.node.inputs[self.place]
        assert value is not None
        return value

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the tensor; for packed integers, (experts, outputs, inputs)."""
        if self.integers is not None:
            return self.integers.shape
        experts, first, second = map(int, tensor_of(self.stored).shape.numpy())
        return experts, first, second

    @property
    def count(self) -> int:
        """The number of experts."""
        return self.shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of an expert."""
        _, first, second = self.shape
        return (first, second) if self.inputs_first else (second, first)

    @property
    def size(self) -> int:
        """The number of weights."""
        return int(np.prod(self.shape))

    @property
    def integers(self) -> Integers | None:
        """The packed integers of a QMoE; None for other nodes."""
        return Integers.of(self.node, IN_QMOE.index(self.place)) if self.kind == "QMoE" else None

    @property
    def why_not_read(self) -> str:
        """Why the integers of a QMoE cannot be read, as the end of a sentence; empty if they can, and for floats."""
        return why_not_read(self.node) if self.kind == "QMoE" else ""

    @property
    def source(self) -> ir.Node | None:
        """The DequantizeLinear that reads the tensor; None if there is none."""
        return next((use.node for use in self.stored.uses() if use.node.op_type == "DequantizeLinear"), None)

    @property
    def halves_apart(self) -> bool:
        """Whether rows of gate and linear half alternate, but Hugging Face stores all rows of the gate first."""
        return is_reordered(self.node, self.place)

    def read(self) -> Array:
        """Return the weights as floats, in the shape of the tensor."""
        if self.integers is not None:
            return self.integers.dequantised()
        numbers = tensor_of(self.stored).numpy()
        return numbers if self.source is None else quantiser_of(self.source).dequantised(numbers)

    def rounding(self) -> Array:
        """Return the largest rounding error of each weight, in the shape of the tensor."""
        if self.integers is not None:
            return self.integers.rounding()
        numbers = tensor_of(self.stored).numpy()
        return (
            rounding_as(numbers.dtype, numbers) if self.source is None else quantiser_of(self.source).rounding(numbers)
        )

    def write(self, work: ir.Model, weights: Array, rounds: Rounds | None = None) -> float | None:
        """Replace the weights, in the format in which they are stored.

        Args:
            work: the model.
            weights: floats in the shape of the tensor.
            rounds: a function that rounds floats to the integers behind a DequantizeLinear; by default to the nearest.

        Returns:
            The rounding error ``‖stored - W‖/‖W‖`` of integers; None for floats.

        Raises:
            BuildError: the integers are not supported for writing.
        """
        if self.integers is not None:
            return self.integers.write(work, weights)
        if self.source is not None:
            return write_in_blocks(work, self.source, weights, rounds)
        dtype = tensor_of(self.stored).dtype.numpy()
        set_numbers(work, self.stored, np.ascontiguousarray(weights.astype(dtype)))
        return None


def experts_of(work: ir.Model) -> list[Experts]:
    """Return the experts of a model, in the order of their readers; a tensor with several readers counts once."""
    found: dict[ir.Value, Experts] = {}
    for node in work.graph:
        for place, inputs_first in _reads(node):
            stored = stored_of(node.inputs[place]) if place < len(node.inputs) else None
            if stored is None or stored in found:
                continue
            one = Experts(node, place, stored, inputs_first)
            if node.op_type != "MatMul" or min(one.shape) > 1:
                found[stored] = one
    return list(found.values())


def _reads(node: ir.Node) -> Iterator[tuple[int, bool]]:
    """Yield the inputs that may be experts, and whether these have inputs first."""
    if node.domain == DOMAIN:
        yield from ((place, False) for place in _WEIGHTS.get(node.op_type, ()))
    elif node.op_type == "MatMul" and not node.domain:
        yield from ((0, False), (1, True))
    elif _gathers_experts(node) and (inputs_first := _is_second_factor(node.outputs[0])) is not None:
        yield 0, inputs_first


def _gathers_experts(node: ir.Node) -> bool:
    """Whether a node gathers along the first axis of its first input only."""
    if node.domain or node.op_type not in ("Gather", "GatherND"):
        return False
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) == 0
    indices = shape_of(node.inputs[1]) if node.inputs[1] is not None else None
    return node.attributes.get_int("batch_dims", 0) == 0 and indices is not None and indices[-1:] in ((1,), [1])


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


def stored_of(value: ir.Value | None) -> ir.Value | None:
    """Return the stored tensor [experts, …, …] that ``value`` is, dequantised or with adapters added; or None."""
    while value is not None and not value.is_initializer():
        node = value.producer()
        is_kept = node is not None and node.op_type in _KEPT and not node.domain
        if node is None or not is_kept or (node.op_type == "Add" and not _is_update(node.inputs[1])):
            return None
        value = node.inputs[0]
    tensor = numbers_of(value)
    return value if tensor is not None and tensor.shape.rank() == 3 else None


def _is_update(value: ir.Value | None) -> bool:
    """Whether ``value`` is computed from stored tensors alone, by a few nodes, as an adapter's update is."""
    waiting, seen = [value], 0
    while waiting:
        one = waiting.pop()
        if one is None or one.is_initializer():
            continue
        node, seen = one.producer(), seen + 1
        if node is None or seen > _MOST_NODES:
            return False
        waiting += node.inputs
    return True


# --- the order of the rows of gates and linear halves ---------------------------------------------------------------


def is_reordered(node: ir.Node, place: int, types: Collection[str] = (), are_separate: bool = False) -> bool:
    """Whether rows of gate and linear half alternate in an input of MoE or QMoE, but not as Hugging Face stores them.

    Hugging Face stores all rows of the gate first, except for gpt-oss. If the type of the model is unknown, the
    activation ``gate·σ(α·gate)·(up + β)`` decides: among the families with MoE operators, only gpt-oss has a β.

    Args:
        node: the node that reads the weight or bias.
        place: the index of the weight or bias among its inputs.
        types: the types of the model in its ``config.json``; empty if they are unknown.
        are_separate: whether gate and linear half are tensors of their own.
    """
    if node.domain != DOMAIN or place not in _FIRST.get(node.op_type, ()):
        return False
    if node.attributes.get_int("swiglu_fusion", 0) != 1:
        return False
    has_beta = node.attributes.get_float("activation_beta", 0.0) != 0
    return are_separate or not (_ALTERNATING.intersection(types) if types else has_beta)


def interleaved(halves: Array) -> Array:
    """Return an array whose second axis has the rows of two halves alternately."""
    return np.stack(np.split(halves, 2, axis=1), axis=2).reshape(halves.shape)


def separated(rows: Array) -> Array:
    """Return the inverse of ``interleaved``: all even rows, then all odd rows."""
    return np.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1)
