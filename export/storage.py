"""Storage of weights as float16, which halves the size of a file; a Cast in the model restores float32."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.arguments import checked, instance
from gradgraph.errors import ModelError, shown
from gradgraph.files.external import is_external
from gradgraph.files.float16_weights import LEAST, STORED
from gradgraph.files.mapped import forget_pages
from gradgraph.files.protos import copied
from gradgraph.passes.normal.edit import names_of, next_free
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from gradgraph.step.step import Step

__all__ = ["Float16Storage", "float16_storage"]

_MODEL = instance(onnx.ModelProto | Step, "an onnx.ModelProto, such as that of trainer.export(), or a gradgraph.Step")


@dataclass(frozen=True, repr=False)
class Float16Storage:
    """The result of ``float16_storage``.

    Attributes:
        result: the model, or the step with the converted init.onnx.
        tensors: the number of weights stored as float16.
        bytes_before, bytes_after: the size of all initializers before and after the conversion.
        largest_error: the largest absolute rounding error of an element.
        relative_error: the largest relative error of a tensor: the norm of the difference over the norm of the tensor.
        kept: the names of weights that float16 cannot represent (beyond 65504, or not finite), which stay float32.
    """

    result: Any
    tensors: int
    bytes_before: int
    bytes_after: int
    largest_error: float
    relative_error: float
    kept: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(map(shown, self.kept))
        kept = f"; kept as float32, as float16 cannot represent them: {names}" if names else ""
        return (
            f"{self.tensors} {'tensor' if self.tensors == 1 else 'tensors'} stored as float16: {self.bytes_before:,} "
            f"bytes before, {self.bytes_after:,} after; largest error of a number {self.largest_error:.2g}, largest "
            f"relative error of a tensor {self.relative_error:.2g}{kept}"
        )


@checked(model=_MODEL)
def float16_storage(model: onnx.ModelProto | Step) -> Float16Storage:
    """Return a copy of a model whose float32 weights are stored as float16, each followed by a Cast to float32.

    Runtimes fold the Casts when they load the file, so the model is not slower; only weights are rounded. Tensors of
    fewer than 256 numbers stay float32.

    Args:
        model: an inference model; or a step, whose init.onnx is converted.

    Raises:
        ArgumentError: if ``model`` is neither a model nor a step.
        ModelError: if the weights of the model are external.
    """
    if isinstance(model, Step):
        stored = _stored(model.resolved("init"))
        init, digests = stored.result, {**model._digests}
        separate = dict(model.separate)
        train: Any = dict(model.trains) if model.manifest.steps else model.train
        step = dataclasses.replace(model, train=train, init=init, separate=separate)
        step._digests = digests
        return dataclasses.replace(stored, result=step)
    return _stored(model)


def _stored(model: onnx.ModelProto) -> Float16Storage:
    for tensor in model.graph.initializer:
        if is_external(tensor):
            raise ModelError(
                f"the weight '{shown(tensor.name)}' is stored in an external file; load the model with its external "
                "data first"
            )
    work: ir.Model = ir.from_proto(model)
    found = store_as_float16(work)
    return dataclasses.replace(found, result=_with_weights_of(work, model, found.tensors))


def _with_weights_of(work: ir.Model, model: onnx.ModelProto, casts: int) -> onnx.ModelProto:
    """Return a copy of ``model`` with initializers of ``work``, preceded by the first ``casts`` nodes of ``work``."""
    result, graph = copied(model, lambda f: f.name != "graph"), copied(model.graph, lambda f: f.name != "initializer")
    del graph.node[:]
    graph.node.extend(map(ir.to_proto, itertools.islice(work.graph, casts)))
    graph.node.extend(model.graph.node)
    result.graph.CopyFrom(graph)
    former = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, value in work.graph.initializers.items():
        assert value.const_value is not None
        result.graph.initializer.append(former[name] if name in former else ir.to_proto(value.const_value))
    return result


def store_as_float16(model: ir.Model) -> Float16Storage:
    """Convert ``model`` as ``float16_storage`` does, in place; each weight is rounded when it is written to a file."""
    graph = model.graph
    before = after = count = 0
    largest = relative = 0.0
    kept, casts = list[str](), list[ir.Node]()
    taken = {name.removesuffix(STORED) for name in names_of(model) if name.endswith(STORED)}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            continue
        before, after = before + tensor.nbytes, after + tensor.nbytes
        if tensor.dtype != ir.DataType.FLOAT or tensor.size < LEAST or value.is_graph_input():
            continue
        errors = _errors(tensor)
        if errors is None:
            kept.append(name)
            continue
        largest, relative = max(largest, errors[0]), max(relative, errors[1])
        count, after = count + 1, after - tensor.nbytes // 2
        stem = next_free(name, taken)
        taken.add(stem)
        casts.append(_widened_in(graph, value, tensor, f"{stem}{STORED}"))
    if len(graph):
        graph.insert_before(graph[0], casts)
    else:
        graph.extend(casts)
    return Float16Storage(model, count, before, after, largest, relative, tuple(kept))


# onnxruntime converts ten times as fast as NumPy, which does not use the processor's instruction for it
_ROUNDING = """<ir_version: 10, opset_import: ["" : 21]>
  rounding (float[n] x) => (float16[n] y, float largest, float error, float square) {
    y = Cast <to = 10> (x)
    wide = Cast <to = 1> (y)
    difference = Sub(wide, x)
    size = Abs(difference)
    largest = ReduceMax <keepdims = 0> (size)
    error = ReduceSumSquare <keepdims = 0> (difference)
    square = ReduceSumSquare <keepdims = 0> (x) }"""
_PIECE = 1 << 18  # elements rounded at a time, which stay in the processor's cache


@functools.cache
def _rounding() -> ort.InferenceSession:
    options = RuntimeOptions(threads=1, flush_denormals=False, native_kernels=False)
    return create_session(onnx.parser.parse_model(_ROUNDING), Placement.choose("cpu"), options)


def _rounded(tensor: ir.TensorProtocol, *outputs: str) -> Iterator[tuple[slice, Sequence[Any]]]:
    """Yield slices of the flattened float32 ``tensor``, each with these outputs of ``_ROUNDING`` for the slice."""
    wide = tensor.numpy()
    flat = np.ascontiguousarray(wide).reshape(-1)
    for start in range(0, flat.size, _PIECE):
        part = slice(start, start + _PIECE)
        yield part, cast("Sequence[Any]", _rounding().run(outputs, {"x": flat[part]}))
    forget_pages(wide)


def _narrow(tensor: ir.TensorProtocol) -> np.ndarray[Any, Any]:
    narrow = np.empty(tensor.shape.numpy(), np.float16)
    for part, (rounded,) in _rounded(tensor, "y"):
        narrow.reshape(-1)[part] = rounded
    return narrow


def _errors(tensor: ir.TensorProtocol) -> tuple[float, float] | None:
    """Return the largest absolute rounding error, and the norm of all errors over the norm of ``tensor``.

    None if float16 cannot represent an element.
    """
    largest = errors = squares = 0.0
    for _, (most, error, square) in _rounded(tensor, "largest", "error", "square"):
        largest, errors, squares = max(largest, float(most)), errors + float(error), squares + float(square)
    if not math.isfinite(errors):
        return None
    return largest, math.sqrt(errors / squares) if squares else 0.0


def _widened_in(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, called: str) -> ir.Node:
    """Store the initializer ``value`` as float16 under the name ``called``; return the Cast that restores it."""
    name, half, shape = value.name or "", ir.DataType.FLOAT16, ir.Shape(tensor.shape.numpy())
    kept = ir.LazyTensor(lambda: ir.tensor(_narrow(tensor)), half, shape, name=called)
    stored = ir.Value(name=called, type=ir.TensorType(half), shape=shape, const_value=kept)
    graph.initializers.pop(name)
    graph.register_initializer(stored)
    widened = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT}, name=f"{name}.widen")
    value.replace_all_uses_with(widened.outputs[0], replace_graph_outputs=True)
    made = widened.outputs[0]
    made.name, made.type, made.shape = name, ir.TensorType(ir.DataType.FLOAT), shape
    return widened
