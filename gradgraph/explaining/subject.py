"""The subject of an explanation: the inputs to attribute to, and the score of a class for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import described, matching
from gradgraph.autodiff.calls import Call, Net, Points, repeated
from gradgraph.autodiff.path import Path, carries, is_tensor, reads
from gradgraph.autodiff.reverse import Override
from gradgraph.autodiff.select import Names, find_path, select, target_of
from gradgraph.autodiff.site_values import Baseline, baselines_of
from gradgraph.errors import BuildError, Remedies, UnknownNameError, listed, shown, suggestion
from gradgraph.explaining.points import Places, reduced, zeros_of
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import as_dims, is_elementwise

INT64 = ir.DataType.INT64
Target = Any  # None, a class index, "predicted", or a tuple of indices
Named = tuple[str, Var]
_OTHER: Remedies = {"remedy": "choose another with output=", "shell": "choose another with --output"}


class Subject:
    """A model and the score to explain.

    Args:
        work: the model in normal form; it is rewritten.
        output: the name of the output, or of an inner value such as the logits; by default the first that depends on an
            input.
        inputs: names and globs of the inputs to attribute to.
        target: see ``explain``.
        smooth: whether gradients are needed, so that every operator on the path must have a rule.
        chunk, unroll, named_operators: see ``Net`` and ``looped``.

    Attributes:
        net: the model, whose sites are the values to attribute to.
        output: the output that is explained.
        names: for each site, the name of its input.
        x: the value of each site.
        first: the call at these values.
    """

    def __init__(
        self,
        work: ir.Model,
        output: str | None,
        inputs: Names,
        target: Target,
        *,
        smooth: bool = True,
        chunk: int = 1,
        unroll: bool = False,
        named_operators: bool = False,
    ) -> None:
        y = target_of(work.graph, output)
        if not carries(y) or not is_tensor(y):
            others = [v.name or "" for v in work.graph.outputs if carries(v) and is_tensor(v)]
            such = f" (floating-point: {listed(others, 3)})" if others else ""
            raise BuildError(f"the output '{shown(y.name)}' is not a floating-point tensor{such}", **_OTHER)
        names = _with_rows(work.graph, dict(_sites(work.graph, inputs, y)), y, inputs is not None)
        path = find_path(work, [y], list(names), inputs is None) if smooth else Path(work.graph, [y], names)
        self.output, self.unroll = path.targets[0], unroll
        used = zip(path.wrt, names.values(), strict=True)
        self.names = {x: name for x, name in used if x in path.active or inputs is not None}
        self._check_separate(work.graph)
        if not self.names:
            raise BuildError(f"the output '{shown(y.name)}' depends smoothly on no input", **_OTHER)
        self.net = Net(work, list(self.names), [self.output], chunk, named_operators)
        self.op: Builder = self.net.op
        self.x = self.net.here()
        self.first = self.net.call(self.x)
        self._target = self._chosen(target)

    def _check_separate(self, graph: ir.Graph) -> None:
        """Raise an error if a site is computed from another: calls replace both, and neither is then explained."""
        for x in self.names:
            behind = {x}
            for node in graph:
                if any(v in behind for v in reads(node)):
                    behind.update(node.outputs)
            for y in self.names:
                if y is not x and y in behind:
                    raise BuildError(
                        f"'{shown(y.name)}' is computed from '{shown(x.name)}', so their attributions would overlap; "
                        "name one of them in inputs="
                    )

    def _chosen(self, target: Target) -> Any:
        """Check ``target``, and return it as a vector of class indices or a tuple of indices; None for one number."""
        name, y = shown(self.output.name), self.first[self.output]
        shape = y.shape
        if shape is None:
            raise BuildError(f"the rank of the output '{name}' is unknown; choose another with output=")
        if not shape:
            raise BuildError(f"the output '{name}' is one number for all samples, without a row for each", **_OTHER)
        if len(shape) < 2 or (len(shape) == 2 and shape[1] == 1):
            if target is not None:
                raise BuildError(
                    f"the output '{name}' has one number for each sample, so there is no class; remove target"
                )
            return None
        if len(shape) > 2 or isinstance(target, tuple):
            if not isinstance(target, tuple) or len(target) != len(shape) - 1:
                raise BuildError(
                    f"the output '{name}' has shape {list(shape)}; pass target as a tuple of {len(shape) - 1} indices, "
                    "one for each axis after the first, with None to add up an axis"
                )
            for index, size in zip(target, shape[1:], strict=True):
                self._check_class(index, size)
            return target
        if target is None:
            value = ir.Value(name=self.op.fresh("target"), type=ir.TensorType(INT64), shape=ir.Shape([shape[0]]))
            self.net.graph.inputs.append(value)
            return self.op.wrap(value)
        if isinstance(target, str) and target == "predicted":
            return self.op.ArgMax(y, axis=1, keepdims=0)
        self._check_class(target, shape[1])
        return (int(target),)

    def _check_class(self, index: Any, size: int | str | None) -> None:
        if index is None:
            return
        if not isinstance(index, int | np.integer) or isinstance(index, bool):
            raise BuildError(
                f"target is {described(index)}; pass the index of a class, 'predicted', or None for an input 'target'"
            )
        if isinstance(size, int) and not 0 <= index < size:
            raise BuildError(
                f"there is no class {index}: the output '{shown(self.output.name)}' has the classes 0 to {size - 1}"
            )

    # --- scores and gradients ---

    def score(self, call: Call, rows: int = 1, y: Var | None = None) -> Var:
        """Return the score of the target for each sample, a vector; ``y`` replaces the output."""
        op, y = self.op, call[self.output] if y is None else y
        target = self._target
        if target is None:
            return y if y.rank == 1 else op.Reshape(y, [-1])
        if isinstance(target, tuple):
            for axis in range(len(target), 0, -1):
                index = target[axis - 1]
                y = (
                    op.ReduceSum(y, [axis], keepdims=0)
                    if index is None
                    else op.Gather(y, op.const(np.int64(index)), axis=axis)
                )
            return y
        target = target if rows == 1 else repeated(op, target, rows)
        return op.Squeeze(op.GatherElements(y, op.Unsqueeze(target, [1]), axis=1), [1])

    def loss(self, call: Call) -> Var:
        """Return what an attack increases, for each sample: the cross-entropy for the target, or minus its score."""
        op, y = self.op, call[self.output]
        if self._target is None or y.rank != 2:
            return -self.score(call)
        node = self.output.producer()
        if node is None or node.op_type != "Softmax":
            return -self.score(call, y=op.LogSoftmax(y, axis=1))
        logits = node.inputs[0]
        if logits is None or node.attributes.get_int("axis", -1) not in (-1, 1):
            return -self.score(call, y=op.Log(y))
        return -self.score(call, y=op.LogSoftmax(call[logits], axis=1))  # the logarithm of a probability may be -inf

    def gradients(
        self,
        call: Call,
        rows: int = 1,
        wrt: Sequence[ir.Value] | None = None,
        overrides: Callable[[Call], Mapping[ir.Node, Override]] | None = None,
    ) -> dict[ir.Value, Var]:
        """Return the gradient of the score of each sample."""
        y = self.score(call, rows)
        return call.gradients(y, self.op.ones_like(y), self.net.sites if wrt is None else wrt, overrides)

    def averaged(
        self, points: Places, weights: np.ndarray, factors: Mapping[ir.Value, Var] = {}
    ) -> dict[ir.Value, Var]:
        """Return the weighted sum of the gradients at ``points``, each times the ``factors`` of its points, if any."""

        def evaluate(where: Points, rows: int) -> list[Var]:
            found = self.gradients(self.net.call(where, rows), rows)
            return [g * factors[x] if factors else g for x, g in found.items()]

        zeros = [zeros_of(self.op, self.net.graph, x) for x in self.net.sites]
        return dict(zip(self.net.sites, reduced(self.net, points, evaluate, weights, zeros, self.unroll), strict=True))

    # --- values by name ---

    def baselines(self, given: Baseline, word: str = "baseline") -> dict[ir.Value, Var]:
        """Return the baseline of each site, in its shape."""
        return baselines_of(self.net, given, self.names, word)

    def attributions(self, found: Mapping[ir.Value, Var]) -> list[Named]:
        """Return the attributions with their names, ``<input>.attribution``."""
        return [(f"{self.names[x]}.attribution", y) for x, y in found.items()]

    def sum_of_rows(self, found: Mapping[ir.Value, Var]) -> Var:
        """Return the sum of all attributions for each sample, a vector."""
        op = self.op
        return op.sum_of(
            [op.ReduceSum(y, np.arange(1, y.rank), keepdims=0) if y.rank > 1 else y for y in found.values()]
        )

    def nodes(self) -> Iterator[ir.Node]:
        """Yield the nodes between the sites and the output, in order."""
        return self.net.nodes_before(self.output)

    def layer(self, name: str | None, method: str) -> ir.Value:
        """Return the inner value ``name``; by default the last one with channels and spatial axes."""
        nodes = list(self.nodes())
        inner = {y.name or "": y for node in nodes for y in node.outputs[:1] if carries(y) and y is not self.output}
        maps = self.maps([node.outputs[0] for node in nodes if node.op_type in ("Conv", "ConvTranspose")])
        spatial = [n for n, y in inner.items() if y in maps]
        if name is None:
            if not spatial:
                near = listed(inner, 6) if inner else "none"
                raise BuildError(
                    f"{method} needs a layer with channels and spatial axes, and the model has none before "
                    f"'{shown(self.output.name)}'; its inner values are {near}"
                )
            return inner[spatial[-1]]
        found = matching(name, list(inner))
        if len(found) != 1:
            many = f"{len(found)} inner values match" if found else "no inner value matches"
            raise UnknownNameError(f"{many} layer='{shown(name)}'{suggestion(name, spatial or list(inner))}")
        return inner[found[0]]

    def maps(self, starts: Sequence[ir.Value]) -> set[ir.Value]:
        """Return the values with the channels and spatial axes of ``starts``, possibly at another resolution."""
        found = {y for y in starts if len(self.op.wrap(y).shape or ()) > 2}
        for node in self.nodes():
            if any(x in found for x in node.inputs) and (node.op_type in _KEEP_AXES or is_elementwise(node)):
                y = self.op.wrap(node.outputs[0]).shape
                if y is not None and len(y) > 2 and any(d != 1 for d in y[2:]):
                    found.add(node.outputs[0])
        return found


_KEEP_AXES = frozenset(("AveragePool", "BatchNormalization", "Concat", "Conv", "ConvTranspose", "Dropout",
                        "GroupNormalization", "InstanceNormalization", "LRN", "LpPool", "MaxPool", "Pad", "PRelu",
                        "Resize"))  # fmt: skip


def _sites(graph: ir.Graph, inputs: Names, y: ir.Value) -> Iterator[tuple[ir.Value, str]]:
    """Yield the values to attribute to, and the inputs that they belong to.

    These are the floating-point inputs, and for inputs of token indices the rows that a Gather looks up in a table.
    """
    given = {x.name or "": x for x in graph.inputs if not x.is_initializer()}
    if inputs is not None:
        patterns = [inputs] if isinstance(inputs, str) else list(inputs)
        for pattern in patterns:
            names = matching(pattern, list(given))
            if not names:
                inner = select(graph, pattern, [y])  # raises UnknownNameError
                yield from ((x, x.name or "") for x in inner)
            yield from (pair for name in names for pair in _site(graph, given[name], must=True))
        return
    found = [pair for x in given.values() for pair in _site(graph, x, must=False)]
    if not found:
        raise BuildError(
            "the model has no floating-point input, and no input of token indices that an embedding (Gather) reads; "
            "name a floating-point inner value in inputs=, such as a one-hot encoding"
        )
    yield from found


def _with_rows(graph: ir.Graph, sites: Mapping[ir.Value, str], y: ir.Value, must: bool) -> dict[ir.Value, str]:
    """Return the ``sites`` with a row for each sample of ``y``, such as no temperature; with ``must``, all or none.

    The number of samples is the first size of ``y`` if an input has it, too, or a symbolic first size of a site.
    """
    batch = as_dims(y.shape)[0] if y.shape is not None and len(y.shape) else None
    sizes = [as_dims(x.shape)[:1] for x in graph.inputs if x.shape is not None]
    shapes = {x: as_dims(x.shape) for x in sites if x.shape is not None}
    if batch is None or (batch,) not in sizes:
        batch = next((shape[0] for shape in shapes.values() if shape and isinstance(shape[0], str)), None)
    if batch is None:
        return dict(sites)
    shared = [x for x, shape in shapes.items() if all(isinstance(d, int) and d != batch for d in shape[:1])]
    if shared and (must or len(shared) == len(sites)):
        x = shared[0]
        raise BuildError(
            f"'{shown(x.name)}' of shape {list(shapes[x])} has no row for each sample of the output "
            f"'{shown(y.name)}'; choose other inputs with inputs="
        )
    return {x: name for x, name in sites.items() if x not in shared}


def _site(graph: ir.Graph, x: ir.Value, must: bool) -> list[tuple[ir.Value, str]]:
    if carries(x):
        return [(x, x.name or "")]
    same, found = {x}, list[ir.Value]()
    for node in graph:
        source = node.inputs[0] if node.inputs else None
        is_same = source in same and node.op_type in ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
        if is_same or (node.op_type == "Add" and _is_offset(node, same)):
            same.add(node.outputs[0])
        if node.op_type == "Gather" and node.inputs[1] in same and _is_table(source):
            found.append(node.outputs[0])
    if must and not found:
        raise BuildError(
            f"the input '{shown(x.name)}' is not floating-point, and no embedding reads it; choose other inputs"
        )
    return [(y, x.name or "") for y in found]


def _is_offset(node: ir.Node, same: set[ir.Value]) -> bool:
    """Whether an Add moves indices by constants, as for several tables in one."""
    known = [v in same for v in node.inputs]
    return any(known) and all(
        own or (v is not None and v.is_initializer()) for own, v in zip(known, node.inputs, strict=True)
    )


def _is_table(x: ir.Value | None) -> bool:
    """Whether ``x`` is a floating-point weight, or computed from weights by one node, such as a Cast."""
    node = None if x is None else x.producer()
    sources = [x] if node is None else list(node.inputs)
    return carries(x) and all(v is None or v.is_initializer() for v in sources)
