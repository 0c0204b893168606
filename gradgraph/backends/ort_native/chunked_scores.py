"""Compute scores over many classes in chunks of rows, so that [tokens, vocabulary] is never in memory at once.

The logits of a language model, the log-probabilities, and the gradients of both are tensors of [tokens, vocabulary],
whose rows are independent. The nodes that read and write such tensors are therefore copied once per chunk of rows,
forward and backward, and a chunk starts only after the previous one has finished (``After``).

The weight of the product must be a stored low-bit weight (``native_packed.py``): the gradient of a trained weight is a
sum over all rows, and of other frozen weights, onnxruntime would keep a copy per product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from gradgraph.autodiff.after import after, turn_after
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_operators import kernel_of_several
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.nodes import is_standard
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import all_sizes, small_constant
from gradgraph.passes.normal.edit import Editor, replace_value
from gradgraph.rules.named_operators import DOMAIN
from gradgraph.rules.registry import attributes, key_of

PIECE = 1 << 24  # maximum scores per chunk, 64 MiB in float32
LEAST_ROWS = 128  # minimum rows per chunk: dequantizing the weight for a chunk then takes a tenth of its product's time

# supported operators, with the indices of inputs that have a row for each row of the result; others are shared
_ROWS: dict[tuple[str, str], tuple[int, ...]] = {
    **{("", name): (0,) for name in ("LogSoftmax", "Reshape", "Cast", "Identity", "Tanh", "Neg")},
    **{("", name): (0,) for name in ("ArgMax", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceSum")},
    **{("", name): (0, 1) for name in ("Add", "Sub", "Mul", "Div", "GatherElements")},
    (library.DOMAIN, "PackedMatMul"): (0,),
    (DOMAIN, "LogSoftmaxGrad"): (0, 1),
    (DOMAIN, "CrossEntropyGrad"): (0, 1, 2),
}
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div")
_ALONG_CLASSES = ("LogSoftmax", "GatherElements", "LogSoftmaxGrad", "CrossEntropyGrad")


def compute_scores_in_chunks(model: ir.Model) -> None:
    """Divide the computation around each LogSoftmax of the main graph into chunks of rows, in place."""
    graph = model.graph
    for node in [n for n in graph if is_standard(n, "LogSoftmax")]:
        region = _Region.around(node) if node.graph is graph else None
        if region is not None and region.stands_alone():
            _write(Editor(model), graph, region)
            graph.sort()


class _NotByRowsError(Exception):
    """Raised for an unsupported node, or one that combines several rows of its input."""


@dataclass
class _Region:
    """The nodes, connected to a LogSoftmax, that read or write tensors of ``rows`` x ``classes``.

    Attributes:
        rows: the product of all axes but the last.
        classes: the size of the last axis.
        nodes: the nodes as keys, in the order of the graph.
    """

    rows: int
    classes: int
    nodes: dict[ir.Node, None] = field(default_factory=dict)

    @classmethod
    def around(cls, softmax: ir.Node) -> _Region | None:
        """Return the region of a LogSoftmax; None for unknown sizes or unsupported nodes, or if one chunk suffices."""
        sizes = all_sizes(shape_of(softmax.outputs[0]))
        if not sizes or not math.prod(sizes):
            return None
        found = cls(math.prod(sizes[:-1]), sizes[-1])
        if found.pieces == 1:
            return None
        try:
            found._collect(softmax)
        except _NotByRowsError:
            return None
        # the last node in graph order computes the gradient; after it, the scores of a chunk are freed
        own = dict.fromkeys(node for node in softmax.graph or () if node in found.nodes)
        is_whole, found.nodes = len(own) == len(found.nodes), own  # not supported if a subgraph reads scores
        return found if is_whole else None

    @property
    def pieces(self) -> int:
        return math.ceil(self.rows / max(LEAST_ROWS, PIECE // self.classes))

    @property
    def lengths(self) -> list[int]:
        """The number of rows of each chunk; they differ by at most one."""
        each, more = divmod(self.rows, self.pieces)
        return [each + (i < more) for i in range(self.pieces)]

    def is_wide(self, value: ir.Value) -> bool:
        sizes = all_sizes(shape_of(value))
        return sizes is not None and sizes[-1:] == [self.classes] and math.prod(sizes) == self.rows * self.classes

    def by_rows(self, node: ir.Node) -> list[int]:
        """Return the indices of inputs of ``node`` that have one entry per row instead of being shared by all rows."""
        places = [i for i in _ROWS[key_of(node)] if i < len(node.inputs)]
        return [i for i in places if node.op_type not in _ELEMENTWISE or not self._is_for_all(node.inputs[i])]

    def _is_for_all(self, value: ir.Value | None) -> bool:
        """Return whether ``value`` is shared by all rows: a scalar, or one number per class."""
        sizes = all_sizes(shape_of(value))
        return sizes is not None and math.prod(sizes) in (1, sizes[-1] if sizes else 1)

    def _has_rows(self, sizes: Sequence[int]) -> bool:
        return len(sizes) > 1 and self.rows > 1 and math.prod(sizes[:-1]) == self.rows

    def _collect(self, softmax: ir.Node) -> None:
        waiting = [softmax]
        while waiting:
            node = waiting.pop()
            if node in self.nodes:
                continue
            self._check(node)
            self.nodes[node] = None
            for i in self.by_rows(node):
                x = node.inputs[i]
                if x is not None and self.is_wide(x) and (producer := x.producer()) is not None:
                    waiting.append(producer)
            waiting.extend(use.node for y in node.outputs if self.is_wide(y) for use in y.uses())

    def _check(self, node: ir.Node) -> None:
        """Raise _NotByRowsError unless ``node`` is supported and computes each row of its result from one row."""
        if key_of(node) not in _ROWS or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            raise _NotByRowsError
        places, attrs = self.by_rows(node), attributes(node)
        given = [all_sizes(shape_of(x)) for x in node.inputs]
        made = all_sizes(shape_of(node.outputs[0]))
        if made is None or not places or any(given[i] is None or not self._has_rows(given[i] or ()) for i in places):
            raise _NotByRowsError
        last = len(given[0] or ()) - 1
        fits = {
            "ArgMax": attrs.get("axis", 0) in (-1, last),
            **dict.fromkeys(_ALONG_CLASSES, attrs.get("axis", -1) in (-1, last)),
        }.get(node.op_type, True)
        if node.op_type.startswith("Reduce"):
            axes = small_constant((*node.inputs, None)[1])
            fits = axes is not None and axes.tolist() in ([-1], [last])
        reduced = node.op_type.startswith("Reduce") or node.op_type == "ArgMax"
        if not fits or not (reduced or self._has_rows(made)):
            raise _NotByRowsError

    def given(self) -> list[ir.Value]:
        """Return the distinct inputs of the region that have one entry per row."""
        found = (node.inputs[i] for node in self.nodes for i in self.by_rows(node))
        return list(dict.fromkeys(x for x in found if x is not None and x.producer() not in self.nodes))

    def results(self) -> list[ir.Value]:
        """Return the values of the region that are read outside of it."""
        values = (y for node in self.nodes for y in node.outputs)
        return [y for y in values if any(use.node not in self.nodes for use in y.uses())]

    def stands_alone(self) -> bool:
        """Return whether no input from outside depends on a result of the region."""
        seen, waiting = set[ir.Node](), [x.producer() for x in self.read_outside()]
        while waiting:
            node = waiting.pop()
            if node in self.nodes:
                return False
            if node is not None and node not in seen:
                seen.add(node)
                waiting.extend(x.producer() for x in node.inputs if x is not None)
        return True

    def read_outside(self) -> Iterator[ir.Value]:
        for node in self.nodes:
            yield from (x for x in node.inputs if x is not None and x.producer() not in self.nodes)


def _write(editor: Editor, graph: ir.Graph, region: _Region) -> None:
    """Write the nodes of ``region`` once per chunk, and concatenate results that are read outside."""
    op, ordered = editor.op, [node for node in graph if node in region.nodes]
    results, given, lengths = region.results(), region.given(), region.lengths
    op.scope = f"{ordered[0].name}/pieces"
    cut = {x: all_of(op.Split(_as_rows(op, x, region), lengths, axis=0, outputs=len(lengths))) for x in given}
    made: list[list[Var]] = []
    for i, rows in enumerate(lengths):
        values = {x: parts[i] for x, parts in cut.items()}
        if made:
            turn = turn_after(op, made[-1])
            with op.naming_operators():
                values = {x: after(op, part, turn) for x, part in values.items()}
        for node in ordered:
            values[node.outputs[0]] = _written_for(op, node, region, values, rows)
        made.append([values[y] for y in results])
    for old, parts in zip(results, zip(*made, strict=True), strict=True):
        sizes = all_sizes(shape_of(old))
        assert sizes is not None
        whole = op.Reshape(op.Concat(*parts, axis=0), sizes)
        replace_value(old, whole.value)
    editor.place(ordered[-1])
    for node in ordered:
        node.resize_inputs(0)
    graph.remove(ordered, safe=True)


def _as_rows(op: Builder, value: ir.Value, region: _Region) -> Var:
    """Return ``value`` with its axes before the last one merged into an axis of rows."""
    sizes = all_sizes(shape_of(value))
    assert sizes is not None
    return op.wrap(value) if len(sizes) == 2 else op.Reshape(op.wrap(value), [region.rows, sizes[-1]])


def _written_for(op: Builder, node: ir.Node, region: _Region, values: dict[ir.Value, Var], rows: int) -> Var:
    """Copy ``node`` for a chunk of ``rows`` rows with the inputs in ``values``; the result has two axes."""
    of_rows = region.by_rows(node)
    inputs: list[Var | None] = [
        values[x] if x is not None and i in of_rows else _for_all(op, node, x) for i, x in enumerate(node.inputs)
    ]
    attrs, sizes = attributes(node), all_sizes(shape_of(node.outputs[0])) or []
    first = inputs[0]
    if node.op_type in ("Reshape", "Identity") and first is not None:
        return first
    if "axis" in attrs:
        attrs["axis"] = 1
    if node.op_type.startswith("Reduce"):
        inputs[1:] = [op.const([1], ir.DataType.INT64)]
    shape = (rows, sizes[-1]) if attrs.get("keepdims", 1) else (rows,)
    copied = kernel_of_several(op, node.op_type, node.domain, inputs, [shape], **attrs)[0]
    copied.value.type = node.outputs[0].type
    return copied


def _for_all(op: Builder, node: ir.Node, value: ir.Value | None) -> Var | None:
    """Return ``value``, an input that all rows share, or None if ``node`` omits it.

    For an elementwise ``node``, a tensor of more than two axes becomes a vector of the length of its last axis.
    """
    sizes = all_sizes(shape_of(value)) or []
    is_deep = node.op_type in _ELEMENTWISE and len(sizes) > 2
    return op.Reshape(op.wrap(value), [sizes[-1]]) if is_deep else op.wrap(value)
