"""Functions shared by all operations of surgery.

Each operation opens a copy of a model, changes it, infers the new sizes and returns it in the type of the original.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.arguments import as_names, matching
from gradgraph.data.record.image_preprocessing import learn_preprocessing
from gradgraph.errors import UnknownNameError, listed, shown, suggestion
from gradgraph.files.atomic import check_writable
from gradgraph.files.models import Source, save_model, to_proto
from gradgraph.files.suffixes import check_suffix
from gradgraph.graph.constant_nodes import own_tensor
from gradgraph.graph.prune import prune
from gradgraph.passes.normal import load_plain
from gradgraph.passes.normal.edit import names_of, next_free
from gradgraph.passes.normal.edit import value_named as value_named
from gradgraph.passes.normal.sizes.infer import infer_shapes

Result: TypeAlias = onnx.ModelProto | ir.Model
Path: TypeAlias = str | os.PathLike[str]
Array: TypeAlias = np.ndarray[Any, Any]
T = TypeVar("T")

log = logging.getLogger("gradgraph")
layers_log = logging.getLogger("gradgraph.surgery")

_TAKEN = "gradgraph.taken"  # Model.meta key: names in use


def opened(model: Source, out: Path | None) -> ir.Model:
    """Return a copy of ``model`` with inferred sizes; raise OutputError if ``out`` cannot be written."""
    if out is not None:
        check_suffix(out, ".onnx")
        check_writable(out)
    work = load_plain(model)
    if told := learn_preprocessing(work, model):
        log.info("%s", told)
    learn_sizes(work)
    return work


def closed(work: ir.Model, given: Source, out: Path | None) -> Result:
    """Clean up ``work`` and return it in the type of ``given``; with ``out``, write it and return an ``ir.Model``."""
    clear_away(work)
    learn_sizes(work)
    if out is not None:
        save_model(work, out)
    return work if out is not None or isinstance(given, ir.Model) else to_proto(work)


def as_model(result: Result) -> ir.Model:
    """Return the result of an operation on an ``onnx_ir.Model``, which has the same type."""
    assert isinstance(result, ir.Model)
    return result


def log_matches(what: str, layers: Sequence[str], kind: str = "layer") -> None:
    """Log the layers that a target matches: ``adapters at 2 layers: 'q_proj', 'v_proj'``; shown on the command line."""
    layers_log.info("%s %d %s%s: %s", what, len(layers), kind, "" if len(layers) == 1 else "s", listed(layers))


def learn_sizes(work: ir.Model) -> None:
    """Infer missing types and shapes of node outputs, in place."""
    unknown = [v for node in work.graph for v in node.outputs if v.type is None or v.shape is None]
    if not unknown:
        return
    copy = work.clone()
    infer_shapes(copy)
    known = {v.name: v for v in (*copy.graph.outputs, *(v for node in copy.graph for v in node.outputs)) if v.name}
    for value in unknown:
        found = known.get(value.name or "")
        if found is None:
            continue
        if value.type is None:
            value.type = found.type
        if value.shape is None:
            value.shape = found.shape


def forget_sizes_behind(*values: ir.Value) -> None:
    """Remove the shapes of ``values`` and of everything computed from them, so that they are inferred again."""
    for value in reached(values, lambda value: [v for reader in value.consumers() for v in reader.outputs]):
        value.shape = None


def reached(starts: Iterable[ir.Value], onward: Callable[[ir.Value], Iterable[ir.Value | None]]) -> Iterator[ir.Value]:
    """Yield values and all those to which ``onward`` leads from them, each once."""
    waiting, seen = list[ir.Value | None](starts), set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value is not None and value not in seen:
            seen.add(value)
            yield value
            waiting += onward(value)


def free_name(work: ir.Model, wanted: str) -> str:
    """Return ``wanted``, or the first of ``wanted_1``, ``wanted_2``, … that is not in use."""
    if _TAKEN not in work.meta:  # collected once, since a search for each name would take quadratic time
        work.meta[_TAKEN] = set(names_of(work))
    taken: set[str] = work.meta[_TAKEN]
    name = next_free(wanted, taken)
    taken.add(name)
    return name


def make_way(work: ir.Model, value: ir.Value, new: str) -> None:
    """Rename ``value`` to ``new``, or the next free name, to make its former name available."""
    before, value.name = value.name, free_name(work, new)
    work.meta[_TAKEN].discard(before)


def clear_away(work: ir.Model) -> None:
    """Remove unused nodes and weights, to make their names available."""
    prune(work)
    work.meta.pop(_TAKEN, None)


def rename(weight: ir.Value, name: str) -> None:
    """Rename an initializer without renaming its tensor, which may be the caller's."""
    if weight.const_value is not None:
        weight.const_value = own_tensor(weight.const_value, weight.name)
    weight.name = name


def add_weight(work: ir.Model, name: str, data: np.ndarray) -> ir.Value:
    """Add a new initializer under ``name``, or the next free name, and return it."""
    free = free_name(work, name)
    tensor = ir.tensor(data, name=free)
    value = ir.Value(name=free, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(data.shape))
    work.graph.register_initializer(value)
    return value


def numbers_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or of a Constant node; None for computed and fed values."""
    if value is None:
        return None
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain:
        return None
    attribute = next(iter(node.attributes.values()))
    if attribute.type == ir.AttributeType.TENSOR:  # onnx-ir's own function would rename the tensor
        return attribute.as_tensor()
    numeric = attribute.name in ("value_int", "value_ints", "value_float", "value_floats")
    kind = np.float32 if "float" in attribute.name else np.int64
    return ir.tensor(np.asarray(attribute.value, kind)) if numeric else None


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol:
    """Return the tensor of a value that is known to be stored, as ``numbers_of`` does."""
    tensor = numbers_of(value)
    assert tensor is not None
    return tensor


def matched(target: str | Sequence[str], named: Iterable[tuple[Sequence[str], T]]) -> list[T]:
    """Return the objects in ``named`` with a name that matches ``target`` (names and globs), in their order."""
    patterns = as_names(target)
    return [thing for names, thing in named if any(matching(pattern, names) for pattern in patterns)]


def check_patterns(target: str | Sequence[str], names: Iterable[str], what: str, known: Iterable[str] = ()) -> None:
    """Raise UnknownNameError for a name or glob in ``target`` that matches none of ``names``.

    Args:
        target: names and globs.
        names: the names that can be matched.
        what: a noun for the named objects, for the message.
        known: names to suggest in the message; by default ``names``.
    """
    every = list(dict.fromkeys(names))
    for pattern in as_names(target):
        if not matching(pattern, every):
            hint = suggestion(pattern, list(known) or every)
            raise UnknownNameError(f"'{shown(pattern)}' matches no {what}{hint}")


def parts_of(target: ir.Value | None) -> list[ir.Value | None]:
    """Return the inputs of the Concat that computes a target shape; for another target shape, the shape itself."""
    node = None if target is None else target.producer()
    return list(node.inputs) if node is not None and node.op_type == "Concat" else [target]


def array_named(work: ir.Model, name: str) -> np.ndarray:
    """Return the array of the weight of this name."""
    return tensor_of(value_named(work, name)).numpy()


def set_numbers(work: ir.Model, value: ir.Value, data: np.ndarray) -> None:
    """Replace the data, and the shape, of an initializer or of the output of a Constant node."""
    tensor = ir.tensor(data, name=value.name)
    node = value.producer()
    if node is not None:
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)
    value.const_value = None if node is not None else tensor
    value.shape = ir.Shape(data.shape)
