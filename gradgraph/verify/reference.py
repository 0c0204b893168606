"""The float64 oracle: onnx's ReferenceEvaluator, with wrong, incomplete and single-precision kernels replaced.

Central differences are computed with it, because onnxruntime has no float64 kernels for convolution, pooling, Erf and
many other operators. Some kernels of the ReferenceEvaluator return float64 but compute in float32 inside.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from gradgraph.files.external import is_external
from gradgraph.files.mapped import pieces
from gradgraph.files.protos import proto_nodes, reads
from gradgraph.files.streamed import without_weights
from gradgraph.graph.checks import DRAWING
from gradgraph.verify import (  # noqa: F401  (importing these modules fills the list of kernels)
    kernels_control,
    kernels_conv,
    kernels_elementwise,
    kernels_indexing,
    kernels_norm,
    kernels_recurrent,
    kernels_spatial,
)
from gradgraph.verify.kernel import KERNELS, Kernel


class Erf(Kernel):
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype),)


class Gelu(Kernel):
    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            y = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        else:
            y = 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
        return (y.astype(x.dtype),)


_ADDED: dict[tuple[str, str], type[OpRun]] = {}


def use_kernel(kernel: type[OpRun]) -> None:
    """Use ``kernel`` in the oracle for the operator with the name of the class, in the domain ``op_domain``."""
    _ADDED[kernel.op_domain, kernel.__name__] = kernel


class Oracle:
    """A model run in the ReferenceEvaluator; ``oracle({"x": ..., "y": ...})`` returns its outputs by name.

    Tensors are arrays; a sequence is a list of arrays, an empty optional ``None``. ``weights`` are initializers that
    are not stored in the model: each is read when a node needs it, and up to KEPT bytes stay in memory.
    """

    def __init__(self, model: onnx.ModelProto, weights: Mapping[str, ir.TensorProtocol] | None = None) -> None:
        model = _all_named(model)
        self.outputs = [o.name for o in model.graph.output]
        self._evaluator = ReferenceEvaluator(model, new_ops=[*KERNELS, *_ADDED.values()])
        self._weights = _Weights(weights or {})
        self._reads = [reads(node) for node in model.graph.node]

    def __call__(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(self.stream(feeds))
        return {name: found[name] for name in self.outputs}

    def stream(self, feeds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield each output with its name, as soon as it is computed; unused values are freed on the way."""
        return self._run(feeds, range(len(self._reads)), {})

    def _run(
        self, feeds: Mapping[str, Any], places: Iterable[int], computed: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the outputs as :meth:`stream` does, but run only the nodes at ``places``; others are ``computed``."""
        known = {"": None, **self._evaluator.rt_inits_, **computed, **feeds}
        wanted = set(self.outputs)
        for name in wanted & {*known, *self._weights.names}:
            yield name, _as_array(known[name] if name in known else self._weights[name])
        last = {name: place for place in places for name in self._reads[place]}
        for place in places:
            node, names = self._evaluator.rt_nodes_[place], self._reads[place]
            self._compute(node, names, known)
            for name in (*node.output, *names):
                read_later = last.get(name, -1) > place
                if name in node.output and name in wanted:
                    yield name, _as_array(known[name] if read_later else known.pop(name))
                elif name and not read_later:
                    known.pop(name, None)

    def _compute(self, node: OpRun, names: Iterable[str], known: dict[str, Any]) -> None:
        """Compute the outputs of ``node``, which reads ``names``, and add them to ``known``."""
        seen = known
        if weights := {name for name in names if name not in known and name in self._weights.names}:
            seen = known | {name: self._weights[name] for name in weights}
        inputs = [seen[name] for name in node.input]
        with np.errstate(all="ignore"):
            outputs = node.run(*inputs, **({"context": seen} if node.need_context() else {}))
        known.update(zip(node.output, outputs, strict=False))


MOST_REMEMBERED, LARGEST_REMEMBERED = 1 << 24, 1 << 20  # bytes of all remembered values, and of each


class RepeatedOracle(Oracle):
    """An oracle for many runs whose feeds differ in few arrays: what does not depend on these is computed once.

    A feed has not changed if it is the same object as in the first run. Values of the first run are remembered if they
    depend on feeds, are small, and a later run that changes one array may read them without computing them; the latest
    ones, up to MOST_REMEMBERED bytes. Outputs are remembered if there is room. Other values are computed again for the
    nodes that read them. Operators that draw random numbers, and those of other domains, always run. If all feeds have
    changed, the run counts as the first.

    Args:
        model, weights: as for :class:`Oracle`.
        changing: names of the inputs and weights that differ between runs; by default, all. Results are correct if
            others differ, too.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Mapping[str, ir.TensorProtocol] | None = None,
        changing: Collection[str] | None = None,
    ) -> None:
        super().__init__(model, weights)
        nodes = self._evaluator.rt_nodes_
        self._made = [tuple(filter(None, node.output)) for node in nodes]
        self._maker = {name: place for place, names in enumerate(self._made) for name in names}
        self._varying = {i for i, node in enumerate(nodes) if any(map(_varies, proto_nodes([node.onnx_node])))}
        if changing is None:
            changing = [*(i.name for i in model.graph.input), *self._evaluator.rt_inits_, *self._weights.names]
        self._read_again = self._boundary(changing)
        self._first: Mapping[str, Any] | None = None
        self._remembered: dict[str, Any] = {}
        self._of_feeds, self._room = set[int](), 0  # nodes whose results are to be remembered, and bytes left for them

    def _boundary(self, changing: Iterable[str]) -> set[str]:
        """Return the names of values that runs which change one of ``changing`` read without computing them.

        A set of changed names is an integer with one bit per name, and one for the nodes that always run.
        """
        found, computed_for = set[str](), {name: 2 << i for i, name in enumerate(dict.fromkeys(changing))}
        for place, names in enumerate(self._reads):
            runs = int(place in self._varying)
            for name in names:
                runs |= computed_for.get(name, 0)
            found.update(name for name in names if runs & ~computed_for.get(name, 0))
            computed_for.update(dict.fromkeys(self._made[place], runs))
        return found

    def stream(self, feeds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        first = self._first or {}
        changed = {name for name in {*feeds, *first} if feeds.get(name) is not first.get(name)}
        return self._run_first(feeds) if changed.issuperset(first) else self._run_changed(feeds, changed)

    def _run_first(self, feeds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        self._first, self._remembered, self._room = None, {}, MOST_REMEMBERED
        self._of_feeds = self._depending(set(feeds), set())
        yield from self._run(feeds, range(len(self._reads)), {})
        self._first, self._of_feeds = dict(feeds), set()

    def _run_changed(self, feeds: Mapping[str, Any], changed: set[str]) -> Iterator[tuple[str, Any]]:
        places = self._depending(changed, self._varying)
        stale = {name for place in places for name in self._made[place]}
        known = {name: value for name, value in self._remembered.items() if name not in stale}
        waiting = [*self.outputs, *(name for place in places for name in self._reads[place])]
        while waiting:
            name = waiting.pop()
            place = self._maker.get(name)
            if place is not None and place not in places and name not in known:
                places.add(place)
                waiting += self._reads[place]
        return self._run(feeds, sorted(places), known)

    def _depending(self, names: set[str], places: set[int]) -> set[int]:
        """Return ``places`` and all nodes that depend on them or on the values ``names``."""
        found, names = set(places), set(names)
        for place, read in enumerate(self._reads):
            if place in found or not names.isdisjoint(read):
                found.add(place)
                names.update(self._made[place])
        return found

    def _compute(self, node: OpRun, names: Iterable[str], known: dict[str, Any]) -> None:
        super()._compute(node, names, known)
        if not self._of_feeds or self._maker[next(filter(None, node.output))] not in self._of_feeds:
            return
        for name in filter(None, node.output):
            value, is_read = known[name], name in self._read_again
            if isinstance(value, np.ndarray) and (is_read or name in self.outputs):
                self._remember(name, value, min(LARGEST_REMEMBERED, MOST_REMEMBERED if is_read else self._room))

    def _remember(self, name: str, value: np.ndarray[Any, Any], most: int) -> None:
        """Remember ``value``, if it has at most ``most`` bytes, in place of the oldest values if memory is short."""
        if value.nbytes > most:
            return
        while self._room < value.nbytes:
            self._room += self._remembered.pop(next(iter(self._remembered))).nbytes
        self._room -= value.nbytes
        self._remembered[name] = value


def _varies(node: onnx.NodeProto) -> bool:
    """Whether the results of ``node`` may differ between runs with equal inputs."""
    return bool(node.domain) or node.op_type in (*DRAWING, "Dropout")


def _as_array(value: Any) -> Any:
    return value if value is None or isinstance(value, list) else np.asarray(value)


KEPT = 1 << 24  # bytes of weights that stay in memory, so that small models read their weights once


class _Weights:
    """Weights by name, read on access; up to KEPT bytes stay in memory."""

    def __init__(self, tensors: Mapping[str, ir.TensorProtocol]) -> None:
        self._tensors, self.names = tensors, tensors.keys()
        self._kept: dict[str, np.ndarray[Any, Any]] = {}
        self._room = KEPT

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        if name in self._kept:
            return self._kept[name]
        array = self._tensors[name].numpy()
        if array.nbytes <= self._room:
            self._room -= array.nbytes
            self._kept[name] = array
        return array


def _all_named(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with names for omitted outputs, or ``model`` if none is omitted.

    The ReferenceEvaluator stores an omitted output under the name "", and would pass it to a node that omits an input.
    """
    if not any("" in node.output for node in _nodes(model)):
        return model
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for i, node in enumerate(_nodes(named)):
        for k, name in enumerate(node.output):
            node.output[k] = name or f"left out/{i}/{k}"
    return named


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes, including those of subgraphs and functions."""
    return proto_nodes([*model.graph.node, *(n for function in model.functions for n in function.node)])


# --- the same model in another precision -----------------------------------------------------------------

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
_FLOATS = frozenset(
    {onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
)


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose float16, bfloat16 and float32 tensors, inputs, outputs, casts and constants are float64."""
    return in_precision(model, onnx.TensorProto.DOUBLE)


def in_precision(model: onnx.ModelProto, precision: int) -> onnx.ModelProto:
    """Return a copy in which all floating-point tensors of more than 8 bits have the element type ``precision``."""
    converted = onnx.ModelProto()
    converted.CopyFrom(model)
    _convert_graph(converted.graph, precision)
    for function in converted.functions:
        _convert_nodes(function.node, precision)
    return converted


def _convert_graph(graph: onnx.GraphProto, precision: int) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        _convert_type(value.type, precision)
    for tensor in graph.initializer:
        _convert_tensor(tensor, precision)
    _convert_nodes(graph.node, precision)


def _convert_type(kind: onnx.TypeProto, precision: int) -> None:
    """Change the floating-point type of a tensor, sequence or optional to ``precision``, in place."""
    while (held := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, held).elem_type
    if held == "tensor_type" and kind.tensor_type.elem_type in _FLOATS:
        kind.tensor_type.elem_type = precision


def _convert_nodes(nodes: Any, precision: int) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _convert_tensor(attribute.t, precision)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _convert_graph(attribute.g, precision)
            elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in _FLOATS:
                attribute.i = precision
        if node.op_type == "Constant":
            _write_as_tensor(node, precision)


def _write_as_tensor(node: onnx.NodeProto, precision: int) -> None:
    """Rewrite a Constant's value_float or value_floats, which are float32 by definition, as a tensor."""
    for attribute in list(node.attribute):
        if attribute.name in ("value_float", "value_floats"):
            data = np.array(onnx.helper.get_attribute_value(attribute), np.float64)
            tensor = onnx.numpy_helper.from_array(data)
            _convert_tensor(tensor, precision)
            node.attribute.remove(attribute)
            node.attribute.append(onnx.helper.make_attribute("value", tensor))


def _convert_tensor(tensor: onnx.TensorProto, precision: int) -> None:
    if tensor.data_type not in _FLOATS or tensor.data_type == precision:
        return
    if is_external(tensor):  # the data are converted on access
        tensor.data_type = precision
    else:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(precision)
        array = onnx.numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def model_in_float64(model: ir.Model) -> ir.Model:
    """Return a copy of ``model`` in float64, as ``in_float64`` does; large weights are converted when they are read."""
    proto, weights = without_weights(model)
    double: ir.Model = ir.from_proto(in_float64(proto))
    for name, tensor in weights.items():
        value = double.graph.initializers[name]
        value.const_value = _widened(tensor) if tensor.dtype in _FLOATS else tensor
    return double


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if tensor.dtype == ir.DataType.DOUBLE:
        return tensor

    def read() -> ir.Tensor[Any]:
        narrow = tensor.numpy()
        wide, done = np.empty(narrow.shape), 0
        for piece in pieces(narrow):
            numbers = np.frombuffer(piece, narrow.dtype)
            wide.reshape(-1)[done : done + len(numbers)] = numbers
            done += len(numbers)
        return ir.Tensor(wide, name=tensor.name)

    return ir.LazyTensor(read, ir.DataType.DOUBLE, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def oracle_of(model: ir.Model, changing: Collection[str] | None = None) -> RepeatedOracle:
    """Return an oracle that runs ``model``, and reads large weights from their files when a node needs them.

    ``changing`` as for :class:`RepeatedOracle`.
    """
    proto, weights = without_weights(model)
    inside = [tensor for tensor in proto.graph.initializer if tensor.name not in weights]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(inside)
    return RepeatedOracle(proto, weights, changing)
