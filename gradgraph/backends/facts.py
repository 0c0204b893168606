"""Facts about a node on which a runtime's support may depend, as short texts for the tables of runtimes.

A fact is one of these, where numbers of inputs and outputs count from 0:

======================  =========================================================================================
``T int64``             a type variable of the operator's schema, and its type
``mode=linear``         an attribute that is an integer or a string, including defaults
``alpha set``           an attribute that differs from its default, in the schema or the documentation
``size even``           an attribute that is an even positive integer
``pads uneven``         a list of even length whose second half differs from its first
``pads not 0``          a list in which not all numbers are 0; also ``not 1``
``input 2``             an optional or variadic input that is present
``input 2 computed``    an input that depends on model inputs
``input 2 derived``     an input that is computed from constants and known sizes only
``input 2 negative``    constant integers, some negative; ``zero``: some are 0; ``empty``: no elements
``input 2 open``        some sizes are unknown; ``input 2 open inside``: some size after the first is unknown;
                        ``open`` and ``open inside``: for any input
``channels open``       axis 1 of a first input with three axes or more is unknown; ``space open``: a later axis is
``input 2 rank 3``      an input's rank; ``rank 3``: the first input's rank; ``rank unknown``: it is not known
``channels in threes``  a Conv over 6, 9, 15, … channels: more than 3, a multiple of 3 and not of 4
``filters in fours``    a Conv with 4, 8, 12, … filters
``depthwise``           a Conv or ConvTranspose with one filter for each of several channels
``size 0``              an input that is not constant and has no elements
``broadcasts``          inputs of different shapes
``output 1``            an output other than the first is read
``captures``            bodies that read values of outer graphs
``slices read``         a scan output that is also read in the body
``outputs alike``       an Identity of a constant that another graph output also copies
======================  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.autodiff.path import captures
from gradgraph.backends.static_facts import is_derived
from gradgraph.graph.checks import has_bodies
from gradgraph.graph.nodes import is_standard, made_by, plain
from gradgraph.graph.prune import is_wanted
from gradgraph.graph.schemas import Signature, default_attributes, signature
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import OPSET, Shape, is_static, small_constant
from gradgraph.rules.registry import attributes, key_of

Facts = frozenset[str]

TYPE_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}
_MOST_WRITTEN = 64  # maximum value of an integer attribute that is listed as a fact
_ACTIVATIONS = {"RNN": ["tanh"], "GRU": ["sigmoid", "tanh"], "LSTM": ["sigmoid", "tanh", "tanh"]}
_SCANS = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
_USUAL = {"pads": 0, "strides": 1, "dilations": 1, **dict.fromkeys(_SCANS, 0)}
_OF_TYPES = frozenset({"to", "dtype", "stash_type", "output_dtype"})  # attributes that are types, not numbers


def facts_of(node: ir.Node) -> Facts:
    """Return all facts of ``node``, from the shapes and types of its inputs and outputs."""
    read = (f"output {i}" for i, value in enumerate(node.outputs) if i and is_wanted(value))
    found = [*_type_facts(node), *_attribute_facts(node), *_input_facts(node), *_channel_facts(node), *read]
    found += ["outputs alike"] if is_output_twice(node) else []
    found += ["slices read"] if read_slices(node) else []
    return frozenset(found)


def type_name(dtype: ir.DataType) -> str:
    """Return NumPy's name of an element type: ``float32``, ``int64``, …."""
    return TYPE_NAMES.get(dtype.name, dtype.name.lower())


def _type_facts(node: ir.Node) -> Iterator[str]:
    """Yield the type of each input and output, with its type variable in the schema."""
    schema = signature(node.op_type, OPSET) if key_of(node)[0] == "" else None
    for values, outputs in ((node.inputs, False), (node.outputs, True)):
        for i, value in enumerate(values):
            if value is not None and value.dtype is not None and (name := _type_variable(schema, i, outputs)):
                yield f"{name} {type_name(value.dtype)}"


def _type_variable(schema: Signature | None, i: int, outputs: bool) -> str | None:
    if schema is None:
        return "T" if i == 0 and not outputs else None
    formals = schema.outputs if outputs else schema.inputs
    return schema.formal(i, outputs).variable if formals else None


def _attribute_facts(node: ir.Node) -> Iterator[str]:
    """Yield facts about attributes (values, differences from defaults, parity, sign), and ``captures`` for bodies."""
    defaults = plain(default_attributes(node.op_type, OPSET, key_of(node)[0]))
    for name, value in attributes(node).items():
        if name in _OF_TYPES or isinstance(value, ir.Graph):
            continue
        if name in node.attributes and value != defaults.get(name) and not _is_default(node, name, value):
            yield f"{name} set"
        if isinstance(value, str) or (isinstance(value, int) and abs(value) <= _MOST_WRITTEN):
            yield f"{name}={value}"
        if isinstance(value, int) and value > 0 and value % 2 == 0:
            yield f"{name} even"
        if isinstance(value, list):
            yield from _list_facts(name, value)
    if has_bodies(node) and next(captures(node), None) is not None:
        yield "captures"


def _list_facts(name: str, values: list[Any]) -> Iterator[str]:
    """Yield facts about a list of integers or strings; other lists have none."""
    yield from (f"{name}={v}" for v in values if isinstance(v, str))
    if not values or not isinstance(values[0], int):
        return
    half = len(values) // 2
    if len(values) % 2 == 0 and values[:half] != values[half:]:
        yield f"{name} uneven"
    yield from (f"{name} not {n}" for n in (0, 1) if any(v != n for v in values))
    if any(v < 0 for v in values):
        yield f"{name} negative"


def _is_default(node: ir.Node, name: str, value: Any) -> bool:
    """Return whether ``value`` is the default of attribute ``name`` by ONNX's documentation of the operator."""
    if name == "activations" and node.op_type in _ACTIVATIONS:
        usual = _ACTIVATIONS[node.op_type]  # for each direction
        return [a.lower() for a in value] == usual * (len(value) // len(usual))
    return name in _USUAL and isinstance(value, list) and all(v == _USUAL[name] for v in value)


def _input_facts(node: ir.Node) -> Iterator[str]:
    """Yield facts about inputs: presence, origin of values, ranks, unknown sizes, and whether their shapes differ."""
    shapes = []
    for i, value in enumerate(node.inputs):
        if value is None:
            continue
        yield f"input {i}"
        constant, dims = small_constant(value), shape_of(value)
        yield from (f"input {i} {word}" for word in _origin(value, constant))
        if constant is None and dims is not None and 0 in dims:
            yield "size 0"
        rank = "unknown" if dims is None else len(dims)
        yield f"input {i} rank {rank}"
        if i == 0:
            yield f"rank {rank}"
        yield from _open_sizes(i, dims)
        shapes.append(dims)
    if len(shapes) > 1 and any(s != shapes[0] for s in shapes):
        yield "broadcasts"


def _origin(value: ir.Value, constant: np.ndarray[Any, Any] | None) -> Iterator[str]:
    """Yield the origin of an input's values (``derived`` or ``computed``), and facts about constant integers."""
    if is_derived(value):
        yield "derived"
    elif constant is None and not (value.is_initializer() and not value.is_graph_input()):
        yield "computed"
    if constant is None:
        return
    if constant.dtype.kind == "i" and (constant < 0).any():
        yield "negative"
    if constant.dtype.kind == "i" and (constant == 0).any():
        yield "zero"
    if constant.size == 0:
        yield "empty"


def _open_sizes(i: int, dims: Shape | None) -> Iterator[str]:
    """Yield facts about unknown sizes in ``dims``, the shape of input ``i``."""
    if not is_static(dims):
        yield from (f"input {i} open", "open")
    if dims is None or not is_static(dims[1:]):
        yield from (f"input {i} open inside", "open inside")
    if i == 0 and (dims is None or len(dims) > 2):
        if dims is None or not is_static(dims[1:2]):
            yield "channels open"
        if dims is None or not is_static(dims[2:]):
            yield "space open"


def _channel_facts(node: ir.Node) -> Iterator[str]:
    """Yield facts about the channels of a Conv or ConvTranspose, as vectorised kernels may fail on remainders."""
    if node.op_type not in ("Conv", "ConvTranspose") or node.inputs[1] is None:
        return
    filters, channels = (shape_of(node.inputs[1]) or (None, None))[:2]
    if channels == 1 and filters != 1 and filters == attributes(node).get("group"):
        yield "depthwise"
    if node.op_type == "ConvTranspose":
        return
    if isinstance(channels, int) and channels > 3 and channels % 3 == 0 and channels % 4:
        yield "channels in threes"
    if isinstance(filters, int) and filters % 4 == 0:
        yield "filters in fours"


def read_slices(node: ir.Node) -> list[int]:
    """Return the indices of outputs of a Scan's body that are stacked (not states) and also read in the body."""
    if node.op_type != "Scan" or node.domain:
        return []
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    body = node.attributes["body"].as_graph()
    return [i for i, value in enumerate(body.outputs) if i >= states and value.uses()]


def is_output_twice(node: ir.Node) -> bool:
    """Return whether ``node`` copies a constant to a graph output, and another graph output copies it, too."""
    if not is_standard(node, "Identity") or not node.outputs[0].is_graph_output():
        return False
    source = copied(node.inputs[0])
    if source is None or not _is_constant(source):
        return False
    waiting, found = [source], 0
    while waiting:
        value = waiting.pop()
        found += value.is_graph_output()
        waiting += [user.outputs[0] for user in value.consumers() if is_standard(user, "Identity")]
    return found > 1


def copied(value: ir.Value | None) -> ir.Value | None:
    """Return the value that ``value`` copies through Identities; ``value`` itself, even None, if it is no copy."""
    while (node := made_by(value, "Identity")) is not None:
        value = node.inputs[0]
    return value


def _is_constant(value: ir.Value) -> bool:
    """Return whether ``value`` is an initializer that is not a graph input, or the output of a Constant."""
    node = value.producer()
    return value.is_initializer() and not value.is_graph_input() if node is None else node.op_type == "Constant"
