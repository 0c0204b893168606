"""Pass: convert convolutions in blocked layout (NCHWc), as onnxruntime saves them at level "all", to ONNX's layout.

A blocked tensor [N, C, H, W] is stored as [N, C/B, H, W, B]: B channels, as many as a processor register contains, are
adjacent, and the last block is zero-padded. Weights are stored as

- OIHWBiBo, [O/B, I/B, kH, kW, B, B], if the input is blocked;
- OIHWBo, [O/B, I, kH, kW, B], in depthwise convolutions, and if the input has fewer than B channels and is not blocked.

The file declares all of them with their plain shape. It does not contain B, which depends on the machine, so the file
is read as this machine's onnxruntime would: ``nchwc_machine.py`` determines B and compares the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.graph.constant_nodes import own_tensor
from gradgraph.graph.shapes import is_single, recorded_shape, stored_sizes
from gradgraph.passes.normal.dialects.contrib import fused, fused_conv
from gradgraph.passes.normal.edit import discard, nodes_of

BLOCKED = "com.microsoft.nchwc"
REMEDY = "save the model at onnxruntime's level 'extended', or use the original one"

_LIKE_INPUT = frozenset({"MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample"})
_POINTWISE = frozenset(
    {"Add", "Sum", "Mul", "Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "HardSigmoid", "Gelu", "QuickGelu"}
)

Axis = tuple[ir.Value, int]  # an axis of channels: axis 1 of a blocked value, or an axis of a weight or bias


def has_blocks(model: ir.Model) -> bool:
    return any(node.domain == BLOCKED for node in nodes_of(model))


def undo_blocks(model: ir.Model, block: int) -> list[str]:
    """Convert tensors in blocks of ``block`` channels to plain layout, in place; return the names of changed weights.

    1. Weights are reordered, and padding channels are removed from weights, biases and ``group``.
    2. Reshape nodes that onnxruntime wrote around an addition, because its inputs might broadcast, are removed.

    The other nodes of the domain become standard operators later, by the forms below.

    Raises:
        ModelError: a node reads blocks in an unsupported way, or blocks of another size.
    """
    layout = _Layout(block)
    for node in nodes_of(model):
        layout.read(node)
    channels = layout.channels.count(block)
    changed = [w.value.name or "" for w in layout.weights.values() if _rewrite(w, layout, channels)]
    for node in layout.depthwise:
        node.attributes["group"] = ir.AttrInt64("group", channels[layout.channels.root((node.outputs[0], 1))])
    for node in layout.reshapes:
        assert node.inputs[0] is not None
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        discard(node)
    _keep_names(model)
    return changed


def _rewrite(weight: _Weight, layout: _Layout, channels: dict[Axis, int]) -> bool:
    """Convert a weight or bias to plain layout, without padding channels; return False if it already was plain."""
    assert weight.value.const_value is not None
    data = weight.value.const_value.numpy()
    plain = data if data.ndim == 1 else _reordered(data, layout.block, weight.inputs_blocked)
    for axis in weight.channel_axes:
        count = channels[layout.channels.root((weight.value, axis))]
        kept, rest = np.split(plain, [count], axis)
        if rest.any() and weight.value not in layout.factors:
            raise layout.misfit(weight.reader)
        plain = kept
    if data.ndim == 1 and plain.shape == data.shape:
        return False
    if any(user not in layout.convolutions for user, _ in weight.value.uses()):
        raise layout.refuse(weight.reader, "shares its weight with a node that reads it in another layout")
    weight.value.const_value = own_tensor(ir.Tensor(np.ascontiguousarray(plain)), weight.value.name)
    weight.value.shape = ir.Shape(plain.shape)
    return True


def _reordered(data: np.ndarray, block: int, inputs_blocked: bool) -> np.ndarray:
    """Reorder OIHWBiBo (if ``inputs_blocked``) or OIHWBo to [O, I, kH, kW]."""
    o, i, *kernel = data.shape
    if inputs_blocked:
        split = data.reshape(o // block, i // block, *kernel, block, block).transpose(0, 5, 1, 4, 2, 3)
    else:
        split = data.reshape(o // block, i, *kernel, block).transpose(0, 4, 1, 2, 3)
    return split.reshape(data.shape)


def _keep_names(model: ir.Model) -> None:
    """Restore the original model's name of each value that leaves the blocked region."""
    for node in nodes_of(model):
        last = node.attributes.get_int("channels_last", 0)
        if node.domain == BLOCKED and node.op_type == "ReorderOutput" and not last:
            source, out = node.inputs[0], node.outputs[0]
            if source is not None and not out.is_graph_output():
                name, out.name = out.name, source.name
                source.name = name


@dataclass
class _Weight:
    """A blocked weight or bias, the node that reads it, and the axes that index channels of blocked values."""

    value: ir.Value
    reader: ir.Node
    inputs_blocked: bool = False
    channel_axes: tuple[int, ...] = (0,)


class _Channels:
    """The number of channels of every channel axis.

    Channel axes that must have equal sizes form a group (by union-find), such as the axes that a pool or sum reads and
    writes, and the axes of the weights in between.
    """

    def __init__(self) -> None:
        self._parent: dict[Axis, Axis] = {}
        self._declared: list[tuple[ir.Node, Axis, int]] = []
        self._sums: list[tuple[ir.Node, list[Axis], Axis]] = []
        self._weights: list[tuple[_Weight, int]] = []

    def root(self, axis: Axis) -> Axis:
        while (parent := self._parent.setdefault(axis, axis)) != axis:
            self._parent[axis] = self._parent[parent]  # path halving
            axis = parent
        return axis

    def join(self, a: Axis, b: Axis) -> None:
        self._parent[self.root(a)] = self.root(b)

    def record(self, node: ir.Node, axis: Axis, count: int) -> None:
        self._declared.append((node, axis, count))

    def record_sum(self, node: ir.Node, parts: list[Axis], whole: Axis) -> None:
        """Record that ``whole`` concatenates ``parts``, each of which consists of whole blocks."""
        self._sums.append((node, parts, whole))

    def record_weight(self, weight: _Weight, axis: int) -> None:
        """Record that ``axis`` of ``weight`` has one entry per channel of its group, padded to whole blocks."""
        self._weights.append((weight, axis))

    def count(self, block: int) -> dict[Axis, int]:
        """Return the number of channels of each group, by the root of the group.

        Nodes at the borders of the blocked region declare the number. Inside the region, trailing channels count as
        padding if all weights that write and read them are zeros.
        """
        counts: dict[Axis, int] = {}
        for node, end, count in self._declared:
            self._agree(counts, node, end, count)
        held: dict[Axis, list[tuple[_Weight, int]]] = {}
        for weight, axis in self._weights:
            held.setdefault(self.root((weight.value, axis)), []).append((weight, axis))
        wide = {root: -(-count // block) * block for root, count in counts.items()}
        for root, members in held.items():
            for weight, axis in members:
                self._agree(wide, weight.reader, root, stored_sizes(weight.value)[axis])
        self._add_up(counts, wide)
        for root, members in held.items():
            if root not in counts:
                counts[root] = max(_last_used(members, block), wide[root] - block + 1)
        return counts

    def _add_up(self, counts: dict[Axis, int], wide: dict[Axis, int]) -> None:
        """Record the channels of concatenations, the sums over their parts, in ``counts`` and ``wide``, in order.

        Raises:
            ModelError: the number of channels of a part is unknown.
        """
        for node, parts, whole in self._sums:
            sizes = [wide.get(self.root(part), 0) for part in parts]
            if not all(sizes):
                raise ModelError(f"{describe(node)} concatenates blocked channels of unknown number; {REMEDY}")
            for part, size in [*zip(parts, sizes, strict=True), (whole, sum(sizes))]:
                self._agree(wide, node, part, size)
                self._agree(counts, node, part, size)

    def _agree(self, counts: dict[Axis, int], node: ir.Node, axis: Axis, count: int) -> None:
        if counts.setdefault(self.root(axis), count) != count:
            raise ModelError(f"{describe(node)} has blocked channels that do not match its neighbours; {REMEDY}")


def _last_used(members: Iterable[tuple[_Weight, int]], block: int) -> int:
    """Return the number of channels up to the last one in which a weight is nonzero."""
    last = 0
    for weight, axis in members:
        assert weight.value.const_value is not None
        data = weight.value.const_value.numpy()
        plain = data if data.ndim == 1 else _reordered(data, block, weight.inputs_blocked)
        used = np.flatnonzero(np.moveaxis(plain, axis, 0).reshape(plain.shape[axis], -1).any(1))
        last = max(last, int(used[-1]) + 1 if used.size else 0)
    return last


class _Layout:
    """The blocked tensors of a model, found by calling ``read`` for each node in execution order."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.channels = _Channels()
        self.weights: dict[ir.Value, _Weight] = {}
        self.convolutions: set[ir.Node] = set()
        self.depthwise: list[ir.Node] = []
        self.factors: set[ir.Value] = set()  # weights of depthwise convolutions, whose padding may contain any numbers
        self.reshapes: list[ir.Node] = []
        self._blocked: set[ir.Value] = set()

    def refuse(self, node: ir.Node, reason: str) -> ModelError:
        return ModelError(f"{describe(node)} {reason}; {REMEDY}")

    def misfit(self, node: ir.Node) -> ModelError:
        return self.refuse(node, f"is not made for the blocks of {self.block} channels of this machine's onnxruntime")

    def read(self, node: ir.Node) -> None:
        blocked = [v for v in node.inputs if v is not None and v in self._blocked]
        if node.domain == BLOCKED:
            self._read_own(node)
        elif not blocked:
            return
        elif node.op_type == "Reshape":
            self._read_reshape(node)
        elif node.op_type == "Concat" and node.attributes.get_int("axis", 0) == 1 and len(blocked) == len(node.inputs):
            self._write(node)
            self.channels.record_sum(node, [(v, 1) for v in blocked], (node.outputs[0], 1))
        elif node.op_type in _POINTWISE and all(v in self._blocked or v is None or is_single(v) for v in node.inputs):
            self._write(node, *blocked)
        else:
            raise self.refuse(node, "reads blocked channels in an unsupported way")

    def _write(self, node: ir.Node, *like: ir.Value) -> None:
        """Record that the output of ``node`` is blocked, with as many channels as the blocked values ``like``."""
        self._blocked.add(node.outputs[0])
        for value in like:
            self.channels.join((node.outputs[0], 1), (value, 1))

    def _read_own(self, node: ir.Node) -> None:
        x = node.inputs[0]
        assert x is not None
        if node.op_type == "ReorderInput":
            self._write(node)
            dims = recorded_shape(x) or ()
            count = dims[-1 if node.attributes.get_int("channels_last", 0) else 1] if dims else None
            if isinstance(count, int):
                self.channels.record(node, (node.outputs[0], 1), count)
        elif node.op_type == "Conv":
            self._read_conv(node, x)
        elif x not in self._blocked:
            raise self.refuse(node, "reads a tensor that is not blocked")
        elif node.op_type == "ReorderOutput":
            self.channels.record(node, (x, 1), node.attributes.get_int("channels", 0))
        elif node.op_type in _LIKE_INPUT:
            self._write(node, x)
        else:
            raise self.refuse(node, "is an unknown operator on blocked channels")

    def _read_conv(self, node: ir.Node, x: ir.Value) -> None:
        w, bias, added = (*node.inputs[1:], None, None)[:3]
        if w is None or w.const_value is None or len(stored_sizes(w)) != 4:
            raise self.refuse(node, "has blocked channels and a weight that is not constant")
        group, o, i = node.attributes.get_int("group", 1), *stored_sizes(w)[:2]
        depthwise = i == 1 and 1 < group == o
        inputs_blocked = not depthwise and i >= self.block
        whole = o % self.block == 0 and (not inputs_blocked or i % self.block == 0)
        if not whole or (x in self._blocked) != (depthwise or inputs_blocked):
            raise self.misfit(node)
        if added is not None and added not in self._blocked:
            raise self.refuse(node, "adds a tensor that is not blocked")
        self._write(node, *([x] if depthwise else []), *([] if added is None else [added]))
        if depthwise:
            self.depthwise.append(node)
            self.factors.add(w)
        self._hold(node, w, inputs_blocked)
        if bias is not None:
            self._hold(node, bias)
        if inputs_blocked and group == 1:
            self.weights[w].channel_axes = (0, 1)
            self.channels.join((x, 1), (w, 1))
            self.channels.record_weight(self.weights[w], 1)
        elif inputs_blocked:  # each group has whole blocks
            self.channels.record(node, (x, 1), i * group)
            self.channels.record(node, (w, 0), o)
        self.convolutions.add(node)

    def _hold(self, node: ir.Node, value: ir.Value, inputs_blocked: bool = False) -> None:
        """Record that ``value`` is a weight or bias of ``node`` whose axis 0 indexes the channels of the output."""
        weight = self.weights.setdefault(value, _Weight(value, node, inputs_blocked))
        if value.const_value is None or value.is_graph_input() or weight.inputs_blocked != inputs_blocked:
            raise self.refuse(node, "has blocked channels and a weight that is not constant, or is read in two layouts")
        self.channels.join((node.outputs[0], 1), (value, 0))
        if value not in self.factors:
            self.channels.record_weight(weight, 0)

    def _read_reshape(self, node: ir.Node) -> None:
        """Record a Reshape from the declared shape [N, C, H, W] to the stored [N, C/B, H, W, B], or back.

        onnxruntime writes these around an addition, which broadcasts over all axes except channels, so the addition
        works in plain layout as well.
        """
        source, target = node.inputs
        assert source is not None
        sizes = [] if target is None or target.const_value is None else target.const_value.numpy().tolist()
        if len(sizes) not in (4, 5) or [sizes[i] for i in (0, 2, 3)] != [0, 0, 0]:
            raise self.refuse(node, "reads blocked channels in an unsupported way")
        if len(sizes) == 5 and sizes[4] != self.block:
            raise self.misfit(node)
        self._write(node, source)
        self.reshapes.append(node)


# --- other operators of the domain -----------------------------------------------------------------

fused("Conv", domain=BLOCKED)(fused_conv)


@fused("ReorderInput", domain=BLOCKED)
def reorder_input(op: Builder, node: ir.Node, x: Var, *, channels_last: int = 0) -> Any:
    return op.Transpose(x, perm=[0, 3, 1, 2]) if channels_last else x


@fused("ReorderOutput", domain=BLOCKED)
def reorder_output(op: Builder, node: ir.Node, x: Var, *, channels: int, channels_last: int = 0) -> Any:
    return op.Transpose(x, perm=[0, 2, 3, 1]) if channels_last else x


@fused("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", domain=BLOCKED)
def pool(op: Builder, node: ir.Node, x: Var, **attrs: Any) -> Any:
    return op.emit(node.op_type, x, **attrs)


@fused("Upsample", domain=BLOCKED)
def upsample(
    op: Builder,
    node: ir.Node,
    x: Var,
    *,
    scales: Any,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "asymmetric",
) -> Any:
    factors = op.const(np.array(scales, np.float32))
    rounding = "floor" if mode == "nearest" else None
    at = coordinate_transformation_mode
    return op.Resize(x, None, factors, mode=mode, coordinate_transformation_mode=at, nearest_mode=rounding)
