"""Attention in a Scan over groups of heads: scores and probabilities are never in memory as a whole.

For each group, the forward Scan computes

    S = mask(scale·Q·Kᵀ)      P = Softmax(S)      O = P·V

and the backward Scan computes S and P again, and from them the three gradients. The scores of a group stay in the
processor's cache. This takes 0.67 to 0.8 of the time of whole tensors for 1,024 x 1,024 scores of heads of 8 numbers
and 256 x 256 of 16, and 0.96 to 1.0 for 128 x 128, 197 x 197 and 512 x 512 of 64, forward and backward; but 1.05 for
1,500 x 1,500 of 64 (onnxruntime 1.31, one thread of an AMD EPYC with AVX512).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.autodiff.after import behind_orders
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.nodes import is_standard, made_by, read_once
from gradgraph.graph.prune import prune
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes, small_constant
from gradgraph.passes.normal.edit import Editor
from gradgraph.rules.composites.dot_product_attention import attention_gradient
from gradgraph.rules.linalg import transposed
from gradgraph.rules.named_operators import DOMAIN
from gradgraph.rules.patterns import MismatchError, need, some
from gradgraph.rules.registry import attributes

LEAST_SCORES = 1 << 19  # scores of all heads: with fewer, a Scan takes longer, and little memory is saved
MOST_AT_ONCE = 1 << 18  # scores of a group, unless a head has more; 2 MB take up to 0.1 longer, 8 MB 0.2
SHORT_HEAD = 16  # numbers per head; scores of short heads are cheap, so they may leave the second-level cache
MOST_HEAD_SIZE = 64  # numbers per head; not measured for more

_SHARED = ("Add", "Sub", "Mul", "Div", "Where")  # between scores and probabilities, with inputs that all heads share


def attend_by_heads(model: ir.Model) -> bool:
    """Write trained attentions of the main graph as two Scans each, in place; return whether there were any."""
    editor = Editor(model)
    written = False
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type == "AttentionGrad"]:
        try:
            attention = _Attention.of(node)
        except MismatchError:
            continue
        attention.write(editor)
        written = True
    if written:
        model.graph.sort()
        prune(model)
    return written


@dataclass(frozen=True)
class _Weights:
    """The nodes that compute probabilities P from Q and Kᵀ.

    Attributes:
        nodes: the product, nodes with an input that all heads of a sample share, and the Softmax, each with the index
            of the input that the preceding one computes.
        guarded: whether NaN in P (of fully masked rows) is replaced by zeros.
    """

    nodes: tuple[tuple[ir.Node, int], ...]
    guarded: bool

    @classmethod
    def of(cls, p: ir.Value, readers: set[ir.Node]) -> _Weights:
        """Return the nodes that compute ``p``, if ``readers`` are all readers of it.

        Raises:
            MismatchError: if another node reads scores or ``p``, or heads differ in anything but Q, K and V.
        """
        found, sizes = list[tuple[ir.Node, int]](), some(all_sizes(shape_of(p)))
        need({reader for reader, _ in p.uses()} == readers and not p.is_graph_output())
        value, readers = unguarded(p, readers)
        is_guarded = value is not p
        while True:
            node = some(value.producer())
            need({reader for reader, _ in value.uses()} == readers and not value.is_graph_output())
            if is_standard(node, "MatMul"):
                break
            place = _place_of_scores(node, sizes)
            found.append((node, place))
            value, readers = some(node.inputs[place]), {node}
        need([is_standard(n, "Softmax") for n, _ in found] == [True] + [False] * (len(found) - 1))
        return cls(((node, 0), *reversed(found)), is_guarded)

    @property
    def factors(self) -> tuple[ir.Value, ir.Value]:
        """Q and Kᵀ."""
        q, k = self.nodes[0][0].inputs
        return some(q), some(k)

    @property
    def shared(self) -> list[ir.Value]:
        """The inputs that all heads of a sample share."""
        return [some(x) for node, place in self.nodes[1:] for i, x in enumerate(node.inputs) if i != place]

    def write(self, op: Builder, scores: Var, shared: Mapping[ir.Value, Var]) -> Var:
        """Write the nodes after the product, and return P."""
        for node, place in self.nodes[1:]:
            if is_standard(node, "Softmax"):
                p = op.Softmax(scores, axis=-1)
                scores = op.Where(op.IsNaN(p), 0.0, p) if self.guarded else p
            else:
                inputs = [scores if i == place else shared[some(x)] for i, x in enumerate(node.inputs)]
                scores = op.emit(node.op_type, *inputs)
        return scores


def unguarded(p: ir.Value, readers: set[ir.Node]) -> tuple[ir.Value, set[ir.Node]]:
    """Return P before the Where that replaces NaN of masked rows with 0 (PyTorch), and its two readers.

    Without such a Where, return ``p`` and ``readers``.
    """
    guard = made_by(p, "Where")
    asked = None if guard is None else made_by(guard.inputs[0], "IsNaN")
    if guard is None or asked is None:
        return p, readers
    zero = small_constant(guard.inputs[1])
    need(asked.inputs[0] is guard.inputs[2] and zero is not None and zero.size == 1 and not zero.any())
    need(read_once(asked.outputs[0], guard))
    return some(guard.inputs[2]), {asked, guard}


def _place_of_scores(node: ir.Node, sizes: Sequence[int]) -> int:
    """Return the index of the only input of ``node`` that has the given ``sizes``; heads must share the other inputs.

    Raises:
        MismatchError: if there is no such input, or ``node`` is neither a Softmax along the last axis nor elementwise.
    """
    if is_standard(node, "Softmax"):
        need(attributes(node)["axis"] in (-1, len(sizes) - 1))
        return 0
    need(is_standard(node, *_SHARED))
    given = [some(all_sizes(shape_of(x))) for x in node.inputs]
    own = [i for i, each in enumerate(given) if each == list(sizes)]
    need(len(own) == 1 and all(_is_shared(some(x), sizes) for i, x in enumerate(node.inputs) if i != own[0]))
    return own[0]


@dataclass(frozen=True)
class _Attention:
    """An attention and its gradient.

    Attributes:
        gradient: the node ``AttentionGrad(dO, O, P, Q, K, V, ...)``.
        weighed: the node that computes O.
        weights, again: the computation of P for O, and for the gradient.
        sizes: the shape of P.
        condition: the condition of the gradient, if any.
    """

    gradient: ir.Node
    weighed: ir.Node
    weights: _Weights
    again: _Weights
    sizes: list[int]
    condition: ir.Value | None

    @classmethod
    def of(cls, gradient: ir.Node) -> _Attention:
        """Return the attention of an ``AttentionGrad``.

        Raises:
            MismatchError: if a Scan would not be faster, or heads cannot be computed separately.
        """
        dy, o, p, *factors = (some(x) for x in gradient.inputs[:6])
        spread, condition = (*gradient.inputs[6:], None, None)[:2]
        need(spread is None and not gradient.outputs[3].uses() and not gradient.outputs[3].is_graph_output())
        sizes, weighed = some(all_sizes(shape_of(p))), some(o.producer())
        need(p.dtype == ir.DataType.FLOAT and math.prod(sizes) >= LEAST_SCORES)
        need(is_standard(weighed, "MatMul") and weighed.graph is gradient.graph)
        first = some(weighed.inputs[0])
        weights = _Weights.of(first, {weighed, gradient} if first is p else {weighed})
        again = weights if first is p else _Weights.of(p, {gradient})
        found = cls(gradient, weighed, weights, again, sizes, condition)
        left, right = again.factors
        need(_moved(left) == _moved(factors[0]) and _moved(right) == _moved(factors[1], swapped=True))
        given = [some(all_sizes(shape_of(x))) for x in (*weights.factors, *factors, dy, o)]
        need(all(each[:-2] == sizes[:-2] for each in given))
        size = max(given[0][-1], given[-1][-1])
        need(size <= (SHORT_HEAD if math.prod(sizes[-2:]) > MOST_AT_ONCE else MOST_HEAD_SIZE) and found.turns > 1)
        need(condition is None or _is_shared(condition, sizes))
        return found

    @property
    def shared(self) -> list[ir.Value]:
        """The inputs that all heads of a sample share."""
        condition = [] if self.condition is None else [self.condition]
        return list(dict.fromkeys((*self.weights.shared, *self.again.shared, *condition)))

    @property
    def turns(self) -> int:
        """The number of groups of heads; a group is of one sample if samples have different masks."""
        heads, scores = math.prod(self.sizes[:-2]), math.prod(self.sizes[-2:])
        together = heads // self.sizes[0] if any(_of_sample(x, self.sizes) for x in self.shared) else heads
        most = max(1, MOST_AT_ONCE // max(1, scores))
        return heads // max((d for d in range(1, min(most, together) + 1) if together % d == 0), default=heads or 1)

    def write(self, editor: Editor) -> None:
        """Write the two Scans in place of the nodes."""
        op, kept = editor.op, attributes(self.gradient).get("kept", 1)
        op.scope = self.weighed.name or ""
        matrices = {x: self._as_matrices(op, x) for x in self.shared}

        def forward(sample: Var, q: Var, k: Var, v: Var) -> list[Var]:
            return [self.weights.write(op, q @ k, self._of(op, matrices, sample, self.weights.shared)) @ v]

        def backward(sample: Var, dy: Var, o: Var, q: Var, k: Var, v: Var) -> list[Var]:
            shared = self._of(op, matrices, sample, self.shared)
            p = self.again.write(op, q @ transposed(op, k), shared)
            condition = None if self.condition is None else shared[self.condition]
            return list(attention_gradient(op, dy, o, p, q, k, v, None, condition, kept=kept)[:3])

        first = [op.wrap(x) for x in (*self.weights.factors, some(self.weighed.inputs[1]))]
        made = self._scan(op, forward, dict(zip("qkv", first, strict=True)), [op.wrap(self.weighed.outputs[0])])
        editor.replace(self.weighed, *made)
        op.scope = self.gradient.name or ""
        dy, o, _, q, k, v = (op.wrap(some(x)) for x in self.gradient.inputs[:6])
        given = {"dy": dy, "o": o, "q": q, "k": k, "v": v}
        editor.replace(self.gradient, *self._scan(op, backward, given, [q, k, v]))

    def _as_matrices(self, op: Builder, x: ir.Value) -> Var:
        """Return ``x`` as one matrix, or as [samples, rows, columns] if it differs between samples."""
        sizes = some(all_sizes(shape_of(x)))
        if _of_sample(x, self.sizes):
            return op.Reshape(op.wrap(x), [sizes[0], *sizes[-2:]])
        return op.Reshape(op.wrap(x), sizes[-2:]) if len(sizes) > 2 else op.wrap(x)

    def _of(
        self, op: Builder, matrices: Mapping[ir.Value, Var], sample: Var, wanted: Sequence[ir.Value]
    ) -> dict[ir.Value, Var]:
        """Return the matrix of one sample for each of ``wanted``."""
        values = dict.fromkeys(wanted)
        return {x: op.Gather(matrices[x], sample) if _of_sample(x, self.sizes) else matrices[x] for x in values}

    def _scan(
        self, op: Builder, write: Callable[..., Sequence[Var]], given: Mapping[str, Var], like: Sequence[Var]
    ) -> list[Var]:
        """Write a Scan over groups of heads; return its results, with the shapes of ``like``.

        ``write`` gets the index of the sample, and the parts of ``given``.
        """
        turns, heads = self.turns, math.prod(self.sizes[:-2])
        sample = op.const(np.arange(turns) * self.sizes[0] // turns)
        split, pieces = [sample], [ir.Value(name="sample", type=sample.value.type, shape=ir.Shape([]))]
        for name, x in given.items():
            shape = [heads // turns, *some(all_sizes(x.shape))[-2:]]
            split.append(op.Reshape(x, [turns, *shape]))
            pieces.append(ir.Value(name=name, type=x.value.type, shape=ir.Shape(shape)))
        body = op.graph(pieces, write, "heads")
        made = all_of(op.Scan(*split, outputs=len(like), body=body, num_scan_inputs=len(split)))
        for y in made:
            y.value.type = like[0].value.type
        return [op.Reshape(y, some(all_sizes(x.shape))) for y, x in zip(made, like, strict=True)]


def _moved(x: ir.Value, swapped: bool = False) -> tuple[ir.Value, list[int]]:
    """Return the tensor that Transposes turn into ``x``, and the order of its axes, with the last two ``swapped``."""
    x = behind_orders(x)
    axes = list(range(len(some(shape_of(x)))))
    while (node := made_by(x, "Transpose")) is not None:
        order = attributes(node).get("perm", [*range(len(axes))][::-1])
        axes, x = [order[axis] for axis in axes], behind_orders(some(node.inputs[0]))
    return x, [*axes[:-2], axes[-1], axes[-2]] if swapped else axes


def _is_shared(x: ir.Value, sizes: Sequence[int]) -> bool:
    """Return whether all heads of a sample share ``x``, which broadcasts to scores of the given ``sizes``."""
    given = all_sizes(shape_of(x))
    if given is None or len(given) > len(sizes):
        return False
    return all(size == 1 for size in given[:-2]) or (_of_sample(x, sizes) and all(size == 1 for size in given[1:-2]))


def _of_sample(x: ir.Value, sizes: Sequence[int]) -> bool:
    """Return whether ``x`` differs between samples, on the first axis of scores of the given ``sizes``."""
    given = all_sizes(shape_of(x)) or []
    return len(given) == len(sizes) > 2 and given[0] == sizes[0] != 1
