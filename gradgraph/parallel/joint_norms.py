"""BatchNormalization over the samples of all ranks: the gradient graph exchanges sums at certain nodes.

In the forward pass, each rank sends the count, mean and sum of squared deviations of its own values, and receives the
values of all ranks (Chan et al., 1979). In the backward pass, it sends Σ dy and Σ dy·(x − mean), and receives the sums
over all ranks. Then ``dx = a·(dy − k·(x − mean) − s)`` with ``a = scale/√(var + ε)``, ``k = Σ dy·(x − mean)/(n·(var +
ε))`` and ``s = Σ dy/n``, where n is the number of values of a channel on all ranks. Gradients of scale and bias remain
separate per rank, as all gradients do until the all-reduce. Placeholder nodes ``Told`` mark where sums are received;
the lowered graph is cut there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.autodiff.after import NAME as AFTER
from gradgraph.data.arrays.batch import Array
from gradgraph.errors import BuildError
from gradgraph.graph.builder import Var
from gradgraph.graph.checks import describe
from gradgraph.graph.nodes import is_standard
from gradgraph.graph.prune import prune
from gradgraph.graph.scoped_names import DOMAIN, operator_name
from gradgraph.passes.normal.edit import Editor, attributes
from gradgraph.rules.norm import batch_size, channel_sums, columns, inverse_deviation
from gradgraph.step.manifest import Manifest
from gradgraph.step.step import Step

RANKS, TOLD = "gradgraph.ranks", "Told"  # domain and operator of the placeholder nodes that receive sums


@dataclass(frozen=True)
class Message:
    """The sums of one norm that each rank sends and receives.

    Attributes:
        name: the name of the placeholder node, whose output is received.
        channels: the number of channels of the norm.
        dtype: the type of the numbers.
        is_gradient: if true, Σ dy and Σ dy·(x − mean), [2 · channels], are exchanged; otherwise a rank sends count,
            mean and sum of squared deviations, and receives count, mean and variance, [1 + 2 · channels].
    """

    name: str
    channels: int
    dtype: np.dtype[np.generic]
    is_gradient: bool

    @property
    def size(self) -> int:
        """The number of elements of the array sent by each rank, and of the array it receives."""
        return 2 * self.channels + (not self.is_gradient)

    def given(self, own: Array, unit: float) -> Array:
        """Return this rank's float64 share of the sums, from its values ``own``; gradients are scaled by ``unit``."""
        if self.is_gradient:
            return np.asarray(own, np.float64) * unit
        count, mean, squares = self._parts(np.asarray(own, np.float64))
        return np.concatenate([count, count * mean, squares + count * mean * mean])

    def taken(self, sums: Array, unit: float) -> Array:
        """Return this rank's values from ``sums`` over all ranks; gradients are divided by ``unit``."""
        if self.is_gradient:
            return sums / unit
        count, total, squares = self._parts(sums)
        mean = total / count
        return np.concatenate([count, mean, np.maximum(squares / count - mean * mean, 0)])

    def _parts(self, array: Array) -> tuple[Array, Array, Array]:
        return array[:1], array[1 : self.channels + 1], array[self.channels + 1 :]


def norms_of(manifest: Manifest) -> list[str]:
    """Return the running statistics, by name, that training updates; their norms use batch statistics."""
    state = {s.name: s for s in manifest.state}
    spec = manifest.separate
    return [] if spec is None else [n for n in spec.gradient.writes if state[n].kind == "statistic"]


@dataclass(frozen=True)
class JointNorms:
    """A gradient graph whose norms use sums over all ranks, and the messages that exchange these sums."""

    gradient: onnx.ModelProto
    messages: Sequence[Message]


def joint_norms(step: Step) -> JointNorms:
    """Return the gradient graph of ``step``, which must have two halves, with norms over all ranks.

    Raises:
        BuildError: if there is no BatchNormalization in training mode, or if one cannot be synchronised: its statistics
            are computed by the graph, are used other than in its output, or are differentiated twice.
    """
    model: ir.Model = ir.from_proto(step.separate["gradient"])
    spec = step.manifest.separate
    assert spec is not None
    work = _Joining(model, {s.next for s in step.manifest.state if s.kind == "statistic"})
    for node in list(model.graph):
        if is_standard(node, "BatchNormalization"):
            work.forward(node)
        elif node.domain == DOMAIN and operator_name(node.op_type) in _GRADIENTS:
            work.backward(node)
    if not work.messages:
        raise BuildError.of_options(
            "the model has no BatchNormalization in training mode, so there is nothing to synchronise; "
            "remove --sync-batch-norm"
        )
    if spec.weight:
        _never_by_zero(work.editor, next(o for o in model.graph.outputs if o.name == spec.weight))
    model.opset_imports[RANKS] = 1
    return JointNorms(ir.to_proto(prune(model)), work.messages)


_GRADIENTS = ("BatchNormalizationGrad", "UnscaledBatchNormalizationGrad")


class _Joining:
    """A rewriter that synchronises norms and their gradients in place, and collects their messages in ``messages``."""

    def __init__(self, model: ir.Model, nexts: set[str]) -> None:
        self.editor = Editor(model)
        self.messages: list[Message] = []
        self._nexts = nexts
        self._counts: dict[ir.Value | None, Var] = {}  # by the mean of a norm

    def forward(self, node: ir.Node) -> None:
        """Make a norm in training mode use the statistics of all ranks."""
        if not attributes(node).get("training_mode"):
            if any(v is not None and v.producer() is not None for v in node.inputs[3:5]):
                raise BuildError(f"{describe(node)} reads statistics that the graph computes, which cannot be "
                                 "synchronised; remove sync_batch_norm, or use its running statistics")  # fmt: skip
            return
        self._check(node)
        op = self.editor.op
        op.scope = node.name or ""
        x, scale, bias = (op.wrap(v) for v in node.inputs[:3] if v is not None)
        mean, var = node.outputs[1:3]
        wide = op.cast(x, ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT)
        count = op.cast(op.const(batch_size(op, wide)), wide.dtype)
        own = channel_sums(op, wide) / count
        centred = wide - columns(op, own, wide)
        squares = channel_sums(op, centred * centred)
        channels = _channels(node, x)
        received = self._received(op.Concat(op.Reshape(count, [1]), own, squares, axis=0), channels, is_gradient=False)
        parts = op.Split(received, [1, channels, channels], axis=0, outputs=3)
        assert isinstance(parts, tuple)
        by = [op.cast(part, _dtype(old)) for part, old in zip(parts[1:], (mean, var), strict=True)]
        y = op.BatchNormalization(x, scale, bias, *by, epsilon=attributes(node)["epsilon"])
        self.editor.replace(node, y, *by)
        self._counts[by[0].value] = parts[0]

    def backward(self, node: ir.Node) -> None:
        """Make the gradient of a norm use the sums of all ranks."""
        count = self._counts.get(_kept(node.inputs[3]))
        if count is None or operator_name(node.op_type) != _GRADIENTS[0]:
            raise BuildError(f"{describe(node)} is the gradient of a norm that cannot be synchronised; remove "
                             "sync_batch_norm")  # fmt: skip
        op = self.editor.op
        op.scope = node.name or ""
        inputs = [op.wrap(v) for v in node.inputs if v is not None]
        dy, x, scale, mean, var = (op.like(op.cast(v, count.dtype), v) for v in inputs)
        centred = x - columns(op, mean, x)
        own = channel_sums(op, dy), channel_sums(op, dy * centred)
        channels = _channels(node, x)
        parts = op.Split(
            self._received(op.Concat(*own, axis=0), channels, is_gradient=True), [channels] * 2, axis=0, outputs=2
        )
        assert isinstance(parts, tuple)
        inv = inverse_deviation(op, var, attributes(node)["epsilon"])
        k, s = parts[1] * inv * inv / count, parts[0] / count
        dx = (dy - (centred * columns(op, k, x) + columns(op, s, x))) * columns(op, scale * inv, x)
        results = zip((dx, own[1] * inv, own[0]), node.outputs, strict=True)
        self.editor.replace(node, *(op.cast(new, _dtype(old)) for new, old in results))

    def _received(self, own: Var, channels: int, is_gradient: bool) -> Var:
        """Add a placeholder node that sends ``own`` and returns the values received from all ranks."""
        op = self.editor.op
        name = op.fresh_in(op.scope, TOLD)
        node = ir.Node(RANKS, TOLD, [own.value], name=name)
        received, kind = node.outputs[0], own.dtype
        received.name, received.type = name, ir.TensorType(kind)
        message = Message(name, channels, np.dtype(kind.numpy()), is_gradient)
        received.shape = ir.Shape([message.size])
        op.nodes.append(node)
        self.messages.append(message)
        return op.wrap(received)

    def _check(self, node: ir.Node) -> None:
        """Raise BuildError if batch statistics affect any output but running statistics and the norm's gradient."""
        seen, waiting = set[ir.Node](), [use.node for v in node.outputs[1:3] for use in v.uses()]
        while waiting:
            reader = waiting.pop()
            if reader in seen or reader.domain == DOMAIN or is_standard(reader, "BatchNormalization"):
                continue
            seen.add(reader)
            if any(v.is_graph_output() and v.name not in self._nexts for v in reader.outputs):
                raise BuildError(f"{describe(node)} cannot be synchronised, as the loss reads its batch statistics "
                                 "directly and not only its output; remove sync_batch_norm")  # fmt: skip
            waiting += [use.node for v in reader.outputs for use in v.uses()]


def _never_by_zero(editor: Editor, weight: ir.Value) -> None:
    """Make divisions by ``weight`` 0 divide by 1: gradients become 0, not NaN, which would spread to all ranks."""
    op = editor.op
    divisions = [use.node for use in weight.uses() if use.idx == 1 and is_standard(use.node, "Div")]
    if not divisions:
        return
    by = op.wrap(weight)
    op.scope = "norms"
    safe = op.Where(op.Equal(by, op.const(0.0, by.dtype)), op.const(1.0, by.dtype), by)
    editor.place(divisions[0])
    for node in divisions:
        node.replace_input_with(1, safe.value)


def _kept(value: ir.Value | None) -> ir.Value | None:
    """Return the value that ``value`` copies through ``After`` nodes, or ``value`` itself, which may be None."""
    while value is not None and (node := value.producer()) is not None:
        if node.domain != DOMAIN or operator_name(node.op_type) != AFTER:
            break
        value = node.inputs[0]
    return value


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def _channels(node: ir.Node, x: Var) -> int:
    """Return the number of channels of a norm or its gradient; raise BuildError if it is unknown."""
    vectors = [v.shape[0] for v in (*node.inputs[1:], *node.outputs[1:]) if v is not None and v.shape is not None
               and len(v.shape) == 1]  # fmt: skip
    found = next((size for size in (*vectors, x.dim(1)) if isinstance(size, int)), None)
    if found is None:
        raise BuildError(f"{describe(node)} has an unknown number of channels; export the model with fixed sizes")
    return found
