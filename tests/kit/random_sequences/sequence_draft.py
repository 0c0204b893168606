"""The base class of a random sequence model under construction: choices, nodes, constants and shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, CLASSES, LONGEST = 11, 5, 14
Dim = int | str  # "B" and "S" stand for the batch and the length of sequences
Array = np.ndarray[Any, Any]


class Draft:
    """A random model under construction.

    Attributes:
        batch, length: the sizes of the first batch.
        open: the sizes among "B" and "S" that are symbolic.
        ids: whether the input is ids (int64) or features.
        own_loss: whether the first output is a loss of the model's own; otherwise ``rank`` is the rank of its logits.
        random: whether the model draws masks in training.
    """

    def __init__(self, seed: int, large: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}
        self.inputs: list[tuple[str, int, list[Dim]]] = []
        self.open = self.one_of([(), (), ("B",), ("B", "S")])
        self.batch, self.length = self.one_of([1, 2, 2, 3, 8]), self.one_of([1, 2, 4, 5, 8])
        self.width = self.one_of([4, 8, 8, 12, 16])
        if large:
            self.batch, self.length, self.width = (self.one_of(those) for those in ([4, 16], [8, 12], [32, 64]))
        self.blocks: list[str] = []
        self.random = False
        self.own_loss = False
        self.opset = 21
        self.causal = self.chance(0.4)
        self._dims: dict[str, str] = {}
        self._masks: dict[str, str] = {}

    # --- choices ---

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    # --- what is written ---

    def op(self, op_type: str, *inputs: Any, outputs: int = 1, domain: str = "", **attrs: Any) -> Any:
        """Append a node; return the name of its output, or a list of names; inputs are names, None or constants."""
        names = [f"{op_type.lower()}_{len(self.nodes)}" + (f".{i}" if i else "") for i in range(outputs)]
        given = ["" if x is None else x if isinstance(x, str) else self.constant(x) for x in inputs]
        self.nodes.append(helper.make_node(op_type, given, names, name=names[0], domain=domain, **attrs))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any) -> str:
        """Append an initializer or a Constant; return its name. Python integers are int64, Python floats float32.

        Floats of several elements are Constants, so that they are not trained.
        """
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        if self.chance(0.5) or (array.dtype == np.float32 and array.size > 1):
            name = f"/Constant_{len(self.nodes)}_output_0"
            value = numpy_helper.from_array(array, name)
            self.nodes.append(helper.make_node("Constant", [], [name], value=value))
        else:
            name = f"/Constant_{len(self.constants)}"
            self.constants[name] = array
        return name

    def weight(self, *shape: int, around: float = 0.0, spread: float | None = None, name: str = "weight") -> str:
        spread = 1 / math.sqrt(max(1, shape[0] if shape else 1)) if spread is None else spread
        name = f"{name}_{len(self.weights)}"
        self.weights[name] = (around + spread * self.rng.normal(size=shape)).astype(np.float32)
        return name

    def dim(self, d: Dim) -> Any:
        """Return a size as a number, or the name of a tensor with one element if it is symbolic."""
        if not isinstance(d, str):
            return d
        if d not in self.open:
            return self.batch if d == "B" else self.length
        if d not in self._dims:
            axis = "BS".index(d)
            self._dims[d] = self.op("Gather", self.op("Shape", self.source), np.array([axis]), axis=0)
        return self._dims[d]

    def sizes(self, dims: Sequence[Dim]) -> Any:
        """Return a shape as a constant, or by a Concat of sizes that are read at run time."""
        known = [self.dim(d) for d in dims]
        if not any(isinstance(d, str) for d in known):
            return np.array(known, np.int64)
        return self.op("Concat", *(d if isinstance(d, str) else np.array([d]) for d in known), axis=0)

    def reshape(self, x: str, *dims: Dim) -> str:
        """Append a Reshape to these sizes, one of which may be -1."""
        if sum(isinstance(d, str) and d in self.open for d in dims) <= 1 and self.chance(0.6):
            known = [-1 if isinstance(d, str) and d in self.open else self.dim(d) for d in dims]
            return self.op("Reshape", x, np.array(known, np.int64))
        return self.op("Reshape", x, self.sizes(dims))

    def swap(self, x: str, rank: int) -> str:
        return self.op("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])

    @property
    def model(self) -> onnx.ModelProto:
        dims = {"B": "batch", "S": "length"}
        sizes = {"B": self.batch, "S": self.length}
        inputs = [
            helper.make_tensor_value_info(n, t, [dims[d] if d in self.open else sizes.get(d, d) for d in shape])
            for n, t, shape in self.inputs
        ]
        tensors = [numpy_helper.from_array(v, n) for n, v in {**self.weights, **self.constants}.items()]
        shape = [] if self.own_loss else [*["B", "S"][: self.rank - 1], self.classes]
        shape = [dims[d] if d in self.open else sizes.get(d, d) for d in shape]
        output = [helper.make_tensor_value_info(self.output, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(self.nodes, "random", inputs, output, tensors)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        # onnx 1.23 does not infer the width of Attention's output if dimensions are symbolic
        return onnx.shape_inference.infer_shapes(model) if self.opset < 23 else model

    def feeds(self, seed: int, batch: int | None = None, length: int | None = None) -> dict[str, Array]:
        """Return a random batch of inputs: ids may repeat, and some sequences end with padding (0)."""
        rng = np.random.default_rng((seed, 1))
        batch = batch if batch and "B" in self.open else self.batch
        length = length if length and "S" in self.open else self.length
        lengths = rng.integers(1, length + 1, batch)
        inside = np.arange(length) < lengths[:, None]
        feeds: dict[str, Array] = {}
        for name, kind, shape in self.inputs:
            size = [{"B": batch, "S": length}.get(d, d) for d in shape]  # type: ignore[call-overload]
            if name == "ids":
                feeds[name] = rng.integers(1, VOCABULARY, size) * inside
            elif name == "mask":
                feeds[name] = inside.astype(helper.tensor_dtype_to_np_dtype(kind))
            elif name == "labels":
                feeds[name] = rng.integers(0, CLASSES, size)
            else:
                feeds[name] = rng.normal(size=size).astype(np.float32)
        return feeds
