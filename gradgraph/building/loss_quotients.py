"""Divisors of a loss, found from its nodes: they determine how losses of batches combine into the loss of all data.

Most losses are a quotient of two sums over the batch, or a sum of such quotients: a mean divides by its number of
elements, a class-weighted mean by the sum of the labels' weights, a masked mean by the number of unmasked elements; a
sum has no divisor. Numerators and divisors add up from batch to batch, so the loss of all samples does not depend on
the batch size. A loss of a different form, such as the root of a mean or the product of two means, has no quotients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from gradgraph.autodiff.path import reads
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import Dim, constant_of

_SAME = frozenset({"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"})  # the identity on a single number
_TINY = 1e-5  # added to a divisor to keep it from 0


class Quotient(NamedTuple):
    """A term of a loss: ``above / below``, two scalars that are summed over batches.

    Attributes:
        above: the numerator.
        below: the divisor; None if the term is a sum. If it is 0, ``above`` is 0, too.
        counts_elements: whether ``below`` is a number of elements, which depends on shapes only.
        varies: whether the term depends on the batch; if not, ``below`` is 1.
        compares: whether a summand of ``above`` depends on several samples.
    """

    above: Var
    below: Var | None
    counts_elements: bool = False
    varies: bool = True
    compares: bool = False


class _Pending(NamedTuple):
    """A value that the search from the loss back to its sums has yet to examine."""

    value: ir.Value
    scaled: Callable[[Var], Var]  # applies the linear operations between this value and the loss
    below: Var | None = None  # the divisor found so far
    of_mean: bool = False  # whether that divisor is a mean instead of a sum


def quotients(op: Builder, graph: ir.Graph, loss: ir.Value) -> list[Quotient] | None:
    """Return the quotients whose sum is the scalar ``loss``; None if it is not a sum of quotients.

    The loss is searched in ``graph`` and in the nodes of its builder ``op``, which writes after ``graph``.
    """
    return _Reading(op, graph).of(loss)


class _Reading:
    def __init__(self, op: Builder, graph: ir.Graph) -> None:
        self._op = op
        stored = set(graph.initializers.values())
        fed = [v for v in graph.inputs if v not in stored]
        first = next((shape for v in fed if (shape := shape_of(v))), ())
        self._batch: Dim = first[0] if first else None
        self._data = set(fed)
        self._varying = set(fed)  # includes the state of random numbers, which is no input yet
        for node in (*graph, *op.nodes):
            if any(v in self._varying or (v.producer() is None and v not in stored) for v in reads(node)):
                self._varying.update(node.outputs)
            if node.op_type not in ("Shape", "Size") and any(v in self._data for v in reads(node)):
                self._data.update(node.outputs)
        self._of_loss = set(op.nodes)

    def of(self, loss: ir.Value) -> list[Quotient] | None:
        found: list[Quotient] = []
        waiting = [_Pending(loss, lambda x: x)]
        while waiting:
            pending = waiting.pop()
            if (met := self._met(pending)) is not None:
                found.append(met._replace(compares=met.varies and self._compares(pending.value)))
            elif (behind := self._behind(pending)) is not None:
                waiting += behind
            else:
                return None
        return found[::-1]

    # --- where the search ends --------------------------------------------------------------------------------

    def _met(self, pending: _Pending) -> Quotient | None:
        """Return the quotient if ``pending.value`` is a sum or mean over the batch, or does not depend on the batch.

        None for any other value.
        """
        op, value, node = self._op, pending.value, pending.value.producer()
        if value not in self._varying and pending.below is None:
            return Quotient(pending.scaled(op.wrap(value)), op.const(1.0, ir.DataType.FLOAT), varies=False)
        if node is None or node.domain:
            return None
        if node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and pending.below is None:
            return self._of_labels(pending, node)
        if node.op_type not in ("ReduceSum", "ReduceMean"):
            return None
        x = node.inputs[0]
        if x is None or not self._has_batch(x) or value not in self._varying:
            return None
        is_mean = node.op_type == "ReduceMean"
        above = op.wrap(value)
        if is_mean:
            if pending.below is not None and not pending.of_mean:
                return None
            count = self._size(x)
            scaled = self._wide(pending.scaled(above)) * count
            return Quotient(scaled, pending.below or count, pending.below is None)
        if pending.of_mean:
            return None
        return Quotient(pending.scaled(above), pending.below)

    def _of_labels(self, pending: _Pending, node: ir.Node) -> Quotient | None:
        """Return the quotient of an ONNX loss on class indices, such as SoftmaxCrossEntropyLoss.

        None if its ``reduction`` is neither "sum" nor "mean".
        """
        op, (_, labels, *rest) = self._op, node.inputs
        reduction, ignored = (node.attributes.get(name) for name in ("reduction", "ignore_index"))
        kind = "mean" if reduction is None else reduction.as_string()
        value = pending.scaled(op.wrap(pending.value))
        if kind == "sum":
            return Quotient(value, None)
        if kind != "mean" or labels is None:
            return None
        weight = next((v for v in rest if v is not None), None)
        if weight is None and ignored is None:
            count = self._size(labels)
            return Quotient(self._wide(value) * count, count, True)
        label = op.cast(op.wrap(labels), ir.DataType.INT64)
        counted = op.Not(op.Equal(label, ignored.as_int())) if ignored is not None else op.Equal(label, label)
        share = op.cast(counted, ir.DataType.FLOAT)
        if weight is not None:
            share = share * self._wide(op.Gather(op.wrap(weight), op.Where(counted, label, 0)))
        below = op.ReduceSum(share, keepdims=0)
        return Quotient(op.Where(op.Equal(below, 0.0), 0.0, self._wide(value) * below), below)

    def _compares(self, summed: ir.Value) -> bool:
        """Whether a summand of ``summed`` (the loss of a sample) depends on other samples, as in a contrastive loss.

        Only nodes of the loss are considered. Nodes of the model compute each sample alone, except batch norms, which
        the option ``sync_batch_norm`` handles.
        """
        if self._batch is None or self._batch == 1:
            return False
        last = summed.producer()
        waiting, seen = [] if last is None else [v for v in last.inputs if v in self._data], set[ir.Value]()
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if value is None or value in seen or node not in self._of_loss:
                continue
            seen.add(value)
            sources = [v for v in node.inputs if v in self._data]
            if self._meets(value, node, sources):
                return True
            waiting += sources
        return False

    def _meets(self, value: ir.Value, node: ir.Node, sources: Sequence[ir.Value]) -> bool:
        """Whether ``node`` mixes samples: it reduces the batch axis, or its output has two batch axes."""
        shape = shape_of(value)
        if shape is None or any(shape_of(v) is None for v in sources) or not any(map(self._has_batch, sources)):
            return False
        if not self._has_batch(value):
            return True
        is_sure = isinstance(self._batch, str) or (node.op_type == "MatMul" and len(sources) == 2)
        return is_sure and list(shape).count(self._batch) > 1

    def _has_batch(self, x: ir.Value) -> bool:
        """Whether ``x`` has a batch axis; True if that is unknown."""
        shape = shape_of(x)
        if shape is None or isinstance(self._batch, int):
            return shape is None or any(d != 1 for d in shape)
        return any(d is None or (isinstance(d, str) and (self._batch is None or self._batch in d)) for d in shape)

    # --- where the search continues ---------------------------------------------------------------------------

    def _behind(self, pending: _Pending) -> Sequence[_Pending] | None:
        """Return the values that ``pending.value`` is a linear function of; None if it is not a linear function."""
        node = pending.value.producer()
        if node is None or node.domain:
            return None
        inputs = [v for v in node.inputs if v is not None]
        kind, scaled = node.op_type, pending.scaled
        if kind in _SAME:
            return [pending._replace(value=inputs[0])]
        if kind in ("Add", "Sum"):
            return [pending._replace(value=v) for v in inputs]
        if kind in ("Neg", "Sub"):
            *added, subtracted = inputs
            negated = pending._replace(value=subtracted, scaled=lambda x: scaled(-x))
            return [*(pending._replace(value=v) for v in added), negated]
        if kind == "Mul":
            return self._product(pending, *inputs)
        if kind == "Div":
            return self._divided(pending, *inputs)
        if kind == "Where":
            return self._chosen(pending, *inputs)
        return None

    def _product(self, pending: _Pending, a: ir.Value, b: ir.Value) -> Sequence[_Pending] | None:
        value, factor = (a, b) if self._is_factor(b) else (b, a)
        if not self._is_factor(factor):
            return None
        scaled = pending.scaled
        return [pending._replace(value=value, scaled=lambda x: scaled(x * self._alike(factor, x)))]

    def _divided(self, pending: _Pending, a: ir.Value, b: ir.Value) -> Sequence[_Pending] | None:
        scaled = pending.scaled
        if self._is_factor(b):
            return [pending._replace(value=a, scaled=lambda x: scaled(x / self._alike(b, x)))]
        if pending.below is not None:
            return None
        found = self._divisor(b)
        if found is None:
            return None
        below, factors, of_mean = found

        def divided(x: Var) -> Var:
            for factor in factors:
                x = x / self._alike(factor, x)
            return scaled(x)

        return [_Pending(a, divided, below, of_mean)]

    def _chosen(self, pending: _Pending, is_so: ir.Value, a: ir.Value, b: ir.Value) -> Sequence[_Pending] | None:
        """Return the ``x`` of ``where(is_so, x, NaN)`` or ``where(is_so, NaN, x)``; None for other Where nodes."""
        scaled, op = pending.scaled, self._op
        for first, (value, other) in enumerate([(b, a), (a, b)]):
            number = constant_of(other)
            if number is not None and number.size == 1 and math.isnan(number.item()):

                def chosen(x: Var, first: int = first) -> Var:
                    nan = op.const(np.nan, x.dtype)
                    return scaled(op.Where(op.wrap(is_so), *((x, nan) if first else (nan, x))))

                return [pending._replace(value=value, scaled=chosen)]
        return None

    def _is_factor(self, value: ir.Value) -> bool:
        """Whether ``value`` does not depend on the samples or their number."""
        return value not in self._varying or self._is_count(value) is False

    # --- divisors --------------------------------------------------------------------------------------------

    def _divisor(self, value: ir.Value) -> tuple[Var, list[ir.Value], bool] | None:
        """Return a divisor as (sum over the batch, constant factors, whether it is a mean); None for other forms."""
        factors: list[ir.Value] = []
        while not self._is_count(value):
            node = value.producer()
            if node is None or node.domain:
                return None
            inputs = [v for v in node.inputs if v is not None]
            if node.op_type in ("ReduceSum", "ReduceMean"):
                if not self._has_batch(inputs[0]):
                    return None
                below, is_mean = self._wide(self._op.wrap(value)), node.op_type == "ReduceMean"
                return (below * self._size(inputs[0]) if is_mean else below), factors, is_mean
            if (within := self._within_divisor(node.op_type, inputs)) is None:
                return None
            if node.op_type == "Mul":
                factors += [v for v in inputs if v is not within]
            value = within
        count = self._op.Reshape(self._wide(self._op.wrap(value)), self._op.const([], ir.DataType.INT64))
        return count, factors, False

    def _within_divisor(self, op_type: str, inputs: Sequence[ir.Value]) -> ir.Value | None:
        """Return the input that a divisor's node only scales by a constant or changes near zero; None if none."""
        if op_type in _SAME:
            return inputs[0]
        if op_type == "Where":
            return self._kept_from_zero(*inputs)
        if op_type == "Mul":
            varying = [v for v in inputs if not self._is_factor(v)]
        elif op_type in ("Max", "Clip", "Add"):
            most = _TINY if op_type == "Add" else 1.0
            varying = [v for v in inputs if not self._is_at_most(v, most)]
        else:
            return None
        return varying[0] if len(varying) == 1 else None

    def _kept_from_zero(self, is_so: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value | None:
        """Return the ``x`` of ``where(x == 0, 1, x)`` or ``where(x > 0, x, 1)``; None for other Where nodes."""
        node = is_so.producer()
        if node is None or node.op_type not in ("Equal", "Greater", "LessOrEqual"):
            return None
        value, one = (a, b) if self._is_at_most(b, 1.0) else (b, a)
        return value if self._is_at_most(one, 1.0) and node.inputs[0] is value else None

    def _is_at_most(self, value: ir.Value, most: float) -> bool:
        number = constant_of(value)
        return number is not None and number.size == 1 and 0.0 < float(number.item()) <= most

    def _is_count(self, value: ir.Value) -> bool | None:
        """Whether ``value`` is a size that includes the batch axis, so that it grows with the number of samples.

        A size is the length of an axis, or the number of elements. None for other values.
        """
        node = value.producer()
        while node is not None and node.op_type in (*_SAME, "Gather", "Slice", "ReduceProd"):
            value = node.inputs[0] or value
            before, node = node, value.producer()
            if before.op_type == "ReduceProd" and node is not None and node.op_type == "Shape":
                x = node.inputs[0]
                return None if x is None else self._has_batch(x)
            if before.op_type == "Gather" and node is not None and node.op_type == "Shape":
                at = constant_of(before.inputs[1])
                return None if at is None or at.size != 1 else self._axis(node, int(at.item()))
        if node is None or node.op_type not in ("Shape", "Size"):
            return None
        x = node.inputs[0]
        if x is None:
            return None
        if node.op_type == "Size":
            return self._has_batch(x)
        start, end = (node.attributes[n].as_int() if n in node.attributes else None for n in ("start", "end"))
        return self._axis(node, start) if start is not None and end == start + 1 else None

    def _axis(self, node: ir.Node, axis: int) -> bool | None:
        x = node.inputs[0]
        shape = None if x is None else shape_of(x)
        if shape is None or not -len(shape) <= axis < len(shape):
            return None
        size = shape[axis]
        return axis == 0 if isinstance(self._batch, int) or size is None else self._batch == size

    # --- writing the sums -------------------------------------------------------------------------------------

    def _size(self, x: ir.Value) -> Var:
        return self._op.cast(self._op.Size(self._op.wrap(x)), ir.DataType.FLOAT)

    def _wide(self, x: Var) -> Var:
        return x if x.dtype == ir.DataType.DOUBLE else self._op.cast(x, ir.DataType.FLOAT)

    def _alike(self, factor: ir.Value, x: Var) -> Var:
        return self._op.cast(self._op.wrap(factor), x.dtype)


def joint_divisor(parts: Sequence[Quotient]) -> Var | None:
    """Return the common divisor of all parts; None if their divisors differ.

    Divisors are equal if they are computed by equal operations from equal values. Divisors that count elements are
    considered equal, because all of them are proportional to the number of samples.
    """
    first = next((part.below for part in parts), None)
    if first is None or any(part.below is None for part in parts):
        return None
    if all(part.counts_elements for part in parts):
        return first
    return first if all(p.below is not None and _computed_alike(p.below.value, first.value) for p in parts) else None


def counts(part: Quotient) -> bool:
    """Whether the divisor of ``part`` counts elements or labels, each with weight 1, or 0 if it is ignored."""
    if part.below is None or part.counts_elements:
        return part.below is not None
    value, flags = part.below.value, ("Cast", "Not", "Equal", "And", "Where", "Expand", "Mul", "Reshape", "Identity")
    node = value.producer()
    while node is not None and node.op_type in _SAME:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "ReduceSum":
        return False
    waiting = [v for v in node.inputs[:1] if v is not None]
    while waiting:
        value = waiting.pop()
        if value.dtype == ir.DataType.BOOL:
            continue
        if (number := constant_of(value)) is not None:
            if number.size != 1 or number.item() not in (0, 1):
                return False  # class weights
            continue
        node = value.producer()
        if value.dtype is not None and value.dtype.is_floating_point() and (node is None or node.op_type not in flags):
            return False
        if node is not None and node.op_type in flags:
            waiting += [v for v in node.inputs[: 1 if node.op_type == "Expand" else None] if v is not None]
    return True


def _computed_alike(a: ir.Value, b: ir.Value) -> bool:
    waiting, seen = [(a, b)], set[tuple[ir.Value, ir.Value]]()
    while waiting:
        a, b = pair = waiting.pop()
        if a is b or pair in seen:
            continue
        seen.add(pair)
        first, second = constant_of(a), constant_of(b)
        if first is not None and second is not None:
            if not np.array_equal(first, second):
                return False
            continue
        x, y = a.producer(), b.producer()
        if x is None or y is None or x.op_identifier() != y.op_identifier() or len(x.inputs) != len(y.inputs):
            return False
        if x.attributes.keys() != y.attributes.keys() or a.index() != b.index():
            return False
        if any(str(x.attributes[n].value) != str(y.attributes[n].value) for n in x.attributes):
            return False
        for i, j in zip(x.inputs, y.inputs, strict=True):
            if (i is None) != (j is None):
                return False
            if i is not None and j is not None:
                waiting.append((i, j))
    return True
