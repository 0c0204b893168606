"""Pass: compute a float32 model in float16 or bfloat16 where the operator table in ``autocast`` says so.

Every named tensor of the model stays float32: weights, inputs, outputs, and inner values, which losses and metrics may
read. Operators that run in the low precision (low operators) read low-precision copies of these tensors:

1. float16: ``w → Cast → w.float16``, once for all readers; an operator in float16 writes ``y.float16 → Cast → y``, and
   the next low operator reads ``y.float16``;
2. bfloat16, for which runtimes have few kernels, is emulated by rounding: ``w → Cast to bfloat16 → Cast to float32``.
   Operators read rounded numbers and accumulate in float32, and their results are rounded in the same way.

Gradients pass through the Casts: they are computed in the precision of their operators, and weights get float32
gradients.

Products are always low operators. An operator that runs in the precision of its inputs is low if each input is the
result of a low operator, a scalar constant that the type can represent, or the bias of a product. Bodies of If, Loop
and Scan, and operators outside the table, are computed in float32. The Casts are marked, so that an export can remove
them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import matching
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.graph.builder import Builder
from gradgraph.graph.checks import describe
from gradgraph.graph.marks import is_marked_constant, mark_precision
from gradgraph.graph.schemas import signature
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import OPSET, constant_of
from gradgraph.passes.autocast import FOLLOWS, MOVES, PRODUCTS, Precision
from gradgraph.passes.normal.edit import graph_of, names_of, replace_value

WIDE = ir.DataType.FLOAT


def compute_low(model: ir.Model, precision: Precision) -> int:
    """Convert operators of a model in normal form to low precision, in place; return the number of low operators.

    Raises:
        UnknownNameError: a name or glob matches neither a node nor an operator.
        BuildError: a requested operator cannot be computed in the precision.
    """
    if precision.dtype is None:
        return 0
    return _Pass(model, precision).run()


class _Pass:
    def __init__(self, model: ir.Model, precision: Precision) -> None:
        assert precision.dtype is not None
        self.graph, self.dtype, self.suffix = model.graph, precision.dtype, precision.name
        self.op = Builder(names_of(model))
        self.emulates = self.dtype == ir.DataType.BFLOAT16
        self.results: set[ir.Value] = set()  # float32 copies of low results
        self.copies: dict[ir.Value, ir.Value] = {}  # float32 value -> the value that low operators read instead
        self.products: set[ir.Value] = set()
        every = list(model.graph)
        self.wide = _chosen(every, precision.float32)
        self.forced = _chosen(every, precision.lower)
        for node in self.forced:
            if not _can_be_low(node):
                raise BuildError(f"{describe(node)} cannot be computed in {self.suffix}; remove it from `lower`")

    def run(self) -> int:
        count = 0
        for node in list(self.graph):
            if self._is_low(node):
                self._lower(node)
                count += 1
        return count

    # --- selection --------------------------------------------------------------------------------------------

    def _is_low(self, node: ir.Node) -> bool:
        if node in self.wide or not _can_be_low(node):
            return False
        if node in self.forced or node.op_type in PRODUCTS:
            return True
        if node.op_type not in MOVES and node.op_type not in FOLLOWS:
            return False
        read = [node.inputs[i] for i in _places(node)]
        follows = [v in self.results for v in read]
        return any(follows) and all(
            low or self._fits(value) or self._is_bias(node, value) for value, low in zip(read, follows, strict=True)
        )

    def _fits(self, value: ir.Value | None) -> bool:
        """Whether ``value`` is a constant scalar in the range of the low-precision type."""
        array = constant_of(value) if value is not None and is_marked_constant(value) else None
        if array is None or array.size != 1:
            return False
        number = abs(float(array.reshape(())))
        limits = ir.DataType.FLOAT16 if self.dtype == ir.DataType.FLOAT16 else WIDE
        info = np.finfo(limits.numpy())
        return number == 0 or not np.isfinite(number) or float(info.tiny) <= number <= float(info.max)

    def _is_bias(self, node: ir.Node, value: ir.Value | None) -> bool:
        """Whether ``value`` is a vector of weights that ``node`` adds to a product."""
        others = [v for v in node.inputs if v is not value]
        is_vector = value is not None and value.is_initializer() and len(shape_of(value) or (0, 0)) <= 1
        return node.op_type == "Add" and is_vector and all(v in self.products for v in others)

    # --- rewriting --------------------------------------------------------------------------------------------

    def _lower(self, node: ir.Node) -> None:
        for i in _places(node):
            value = node.inputs[i]
            assert value is not None
            node.replace_input_with(i, self._low_copy(value, node))
        for i, output in enumerate(node.outputs):
            if output.name and _is_alike(node, i, of_output=True):
                self._widen(node, output)

    def _low_copy(self, value: ir.Value, reader: ir.Node) -> ir.Value:
        """Return the low-precision copy of ``value`` for ``reader``; constants are not rounded to bfloat16."""
        if value not in self.copies:
            if self.emulates and is_marked_constant(value):
                return value  # constants are not rounded, as in PyTorch
            narrow = self._cast(value, self.dtype, is_read=True)
            self.copies[value] = self._cast(narrow, WIDE, is_read=True) if self.emulates else narrow
            graph_of(reader).insert_before(reader, self._take_nodes())
        return self.copies[value]

    def _widen(self, node: ir.Node, computed: ir.Value) -> None:
        """Make all readers of ``computed``, an output of a low operator, read its float32 copy."""
        if self.emulates and node.op_type in MOVES and not any(v and is_marked_constant(v) for v in node.inputs):
            wide = computed  # the operator only moves numbers that are already rounded
        else:
            name, shape = computed.name or "", computed.shape
            computed.name = self.op.fresh(f"{name}.{self.suffix}")
            wide = ir.Value(name=name, type=ir.TensorType(WIDE), shape=shape)
            replace_value(computed, wide)
            computed.type = ir.TensorType(WIDE if self.emulates else self.dtype)
            rounded = self._cast(computed, self.dtype, is_read=False) if self.emulates else computed
            self._cast(rounded, WIDE, is_read=False, output=wide)
            graph_of(node).insert_after(node, self._take_nodes())
        self.results.add(wide)
        self.copies[wide] = wide if self.emulates else computed
        if node.op_type in PRODUCTS:
            self.products.add(wide)

    def _cast(self, value: ir.Value, to: ir.DataType, is_read: bool, output: ir.Value | None = None) -> ir.Value:
        node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(to))], outputs=None if output is None else [output])
        result = node.outputs[0]
        if output is None:
            result.name = self.op.fresh(f"{value.name}.{self.suffix if to == self.dtype else 'rounded'}")
            result.type, result.shape = ir.TensorType(to), value.shape
        node.name = self.op.fresh(f"{result.name}/Cast")
        mark_precision(node, is_read)
        self.op.nodes.append(node)
        return result

    def _take_nodes(self) -> list[ir.Node]:
        nodes, self.op.nodes = self.op.nodes, []
        return nodes


# --- operators ---------------------------------------------------------------------------------------------


def _chosen(nodes: Sequence[ir.Node], patterns: Collection[str]) -> set[ir.Node]:
    """Return the nodes whose name or operator matches one of ``patterns``, which are names and globs."""
    found = set[ir.Node]()
    names = [n.name or "" for n in nodes]
    operators = sorted({n.op_type for n in nodes})
    for pattern in patterns:
        by_name, by_type = set(matching(pattern, names)), set(matching(pattern, operators))
        if not by_name and not by_type:
            raise UnknownNameError(
                f"'{shown(pattern)}', whose precision is given, is neither a node nor an operator of the model "
                f"(except bodies of loops){suggestion(pattern, dict.fromkeys([*operators, *names]))}"
            )
        found |= {n for n in nodes if n.name in by_name or n.op_type in by_type}
    return found


def _can_be_low(node: ir.Node) -> bool:
    """Whether the operator supports low precision, and all inputs that would be converted are float32."""
    places = _places(node)
    known = signature(node.op_type, OPSET) if node.domain == "" else None
    if known is None or not places or any((v := node.inputs[i]) is None or v.dtype != WIDE for i in places):
        return False
    return "tensor(float16)" in known.formal(0, of_output=True).allowed and node.op_type != "Cast"


def _places(node: ir.Node) -> list[int]:
    """Return the indices of the inputs that must have the element type of the first output."""
    return [i for i, v in enumerate(node.inputs) if v is not None and _is_alike(node, i, of_output=False)]


def _is_alike(node: ir.Node, i: int, of_output: bool) -> bool:
    known = signature(node.op_type, OPSET) if node.domain == "" else None
    if known is None or not known.outputs or known.formal(0, of_output=True).variable is None:
        return False
    return known.formal(i, of_output).variable == known.formal(0, of_output=True).variable
