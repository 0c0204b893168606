"""BitFit (Ben Zaken et al. 2022, arXiv:2106.10199): only the model's own biases are trained.

It adds no tensors, so there is nothing to merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.files.model_metadata import Adapter
from gradgraph.passes.normal.weights.places import module_of
from gradgraph.surgery.adapter_kinds.kind import KINDS, NO_RANK, Kind, as_they_are, everything
from gradgraph.surgery.operation import matched, numbers_of

# inputs that are added to a result
_PLACES = {
    "Gemm": (2,), "Conv": (2,), "ConvTranspose": (2,), "DeformConv": (3,), "LayerNormalization": (2,),
    "BatchNormalization": (2,), "InstanceNormalization": (2,), "GroupNormalization": (2,), "LSTM": (3,), "GRU": (3,),
    "RNN": (3,), "MatMulNBits": (5,), "SkipLayerNormalization": (3, 4), "EmbedLayerNormalization": (6,),
    "FusedGemm": (2,), "FusedConv": (2,), "BiasGelu": (1,), "FastGelu": (1,), "MultiHeadAttention": (3,),
    "Attention": (2,),
}  # fmt: skip
_PRODUCTS = ("MatMul", "MatMulNBits", "Gemm", "Conv", "FusedMatMul")
_ONLY_FUSED = ("Attention", "MultiHeadAttention")  # other operators of ai.onnx have these names, too


@dataclass(frozen=True)
class Bias:
    """A bias tensor and the node that adds it."""

    node: ir.Node
    value: ir.Value
    name: str

    @property
    def kind(self) -> str:
        return self.node.op_type

    @property
    def names(self) -> list[str]:
        """The names that a pattern can match: of the bias tensor, of its module and of its node."""
        return [n for n in (self.name, self.name.removesuffix(".bias"), module_of(self.node), self.node.name) if n]


def found(work: ir.Model, target: str | Sequence[str]) -> tuple[list[Bias], list[str]]:
    """Return the biases whose tensor, module or node matches names or globs; and an empty list (see ``Kind``)."""
    every = {bias.name: bias for bias in _biases(work)}.values()
    return matched(target, ((bias.names, bias) for bias in every)), []


def _biases(work: ir.Model) -> Iterator[Bias]:
    for node in work.graph:
        places = _PLACES.get(node.op_type, ())
        if node.op_type in _ONLY_FUSED and node.domain != "com.microsoft":
            places = ()
        values = [node.inputs[i] for i in places if i < len(node.inputs)]
        if node.op_type == "Add" and not node.domain:
            values += [node.inputs[1 - i] for i in (0, 1) if _is_product(node.inputs[i])]
        for value in values:
            tensor = numbers_of(value) if value is not None and value.is_initializer() else None
            if value is None or tensor is None or not tensor.dtype.is_floating_point():
                continue
            if node.op_type != "Add" or _is_a_row(tensor.shape.numpy()):
                yield Bias(node, value, value.name or "")


def _is_product(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return node is not None and node.op_type in _PRODUCTS


def _is_a_row(sizes: Sequence[int]) -> bool:
    """Whether a shape is a bias's: at most one axis is longer than 1, as in [n], or in [n, 1, 1] after a Conv."""
    return sum(size > 1 for size in sizes) <= 1 and len(sizes) > 0


def put(work: ir.Model, bias: Bias, wanted: Adapter, rng: np.random.Generator) -> Adapter:
    """Return ``wanted`` with the bias as its trained tensor; the graph does not change."""
    del work, rng
    return wanted.put_at("", bias.value)


KINDS.add(
    "bitfit",
    Kind("the model's own biases", put, ("bias",), as_they_are, NO_RANK, layers=found, what="biases",
         default=everything),
)  # fmt: skip
