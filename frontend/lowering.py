"""``export``: trace a network and lower it to an ONNX model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.arguments import FUNCTION, NAMES, TEXT, as_names, checked, instance
from gradgraph.autodiff.path import reads
from gradgraph.errors import ModelError, counted, listed
from gradgraph.frontend.dims import Dim
from gradgraph.frontend.module import Module
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, Value, as_dtype, shaped, tensor, tracing, wrap
from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.prune import needed
from gradgraph.graph.shape_inference import shape_of


@dataclass(frozen=True)
class Input:
    """The shape and element type of an input of a network.

    A size is a number, a name (a dynamic size; equal names are equal sizes) or ``None`` (a dynamic size without a
    name).
    """

    shape: Sequence[int | str | None]
    dtype: Any = "float32"


Spec = Input | Sequence[int | str | None]


@checked(net=FUNCTION, inputs=instance(Mapping, "a dict of names and shapes, such as {'x': ('batch', 4)}"),
         outputs=NAMES.or_none(), name=TEXT.or_none())  # fmt: skip
def export(
    net: Module | Callable[..., Any],
    inputs: Mapping[str, Spec],
    outputs: str | Sequence[str] | None = None,
    name: str | None = None,
) -> onnx.ModelProto:
    """Trace ``net`` and return it as an ONNX model in inference mode (opset 21, IR 10).

    Args:
        net: a module, or any function of traced tensors.
        inputs: the shape of each input by name, ``{"x": ("batch", 3, 32, 32)}`` (float32), or its ``Input(shape,
            dtype)``. If the names are arguments of ``forward``, they are passed by keyword; otherwise in order.
        outputs: the name or names of the outputs; by default "output", "output_0" and so on, or the keys of the dict
            that ``forward`` returns.
        name: the name of the graph; by default that of the network's class.

    Parameters and buffers that ``forward`` uses become initializers under their paths (``layer1.0.weight``); a shared
    parameter becomes a single initializer. Dropout and BatchNormalization are in inference mode; building a training
    step switches them.

    Raises:
        ModelError: if shapes do not fit, names clash, or ``forward`` needs values that are known only at run time.
    """
    stored: dict[int, str] = {}
    if isinstance(net, Module):
        stored = {id(held): name for name, held in [*net.named_parameters(), *net.named_buffers()]}
    graph_inputs = [input_of(key, spec) for key, spec in inputs.items()]
    if clash := {*inputs} & {*stored.values()}:
        raise ModelError(f"'{min(clash)}' names both an input and a parameter; rename the input")
    trace = Trace(stored, taken=list(inputs))
    if isinstance(net, Module):
        trace.modules = {id(m): path for path, m in net.named_modules()}
    with tracing(trace):
        result = _call(net, {v.name or "": wrap(Var(trace.builder, v)) for v in graph_inputs})
        graph_outputs = _outputs(
            trace,
            dict(_named_outputs(result, None if outputs is None else as_names(outputs))),
            {*inputs, *stored.values()},
        )
    graph = _graph(trace, graph_inputs, graph_outputs, name or str(getattr(net, "__name__", type(net).__name__)))
    model = ir.Model(graph, ir_version=shapes.IR_VERSION, producer_name="gradgraph")
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto


# --- inputs --------------------------------------------------------------------------------------


def input_of(name: str, spec: Spec) -> ir.Value:
    """Return the graph input called ``name`` with the shape and element type in ``spec``."""
    declared = spec if isinstance(spec, Input) else Input(spec)
    if isinstance(declared.shape, str) or not isinstance(declared.shape, Sequence):
        raise ModelError(f"input '{name}' has shape {declared.shape!r}; use a tuple such as ('batch', 3, 32, 32)")
    for dim in declared.shape:
        positive = isinstance(dim, Integral) and int(dim) > 0
        if not (positive or dim is None or (isinstance(dim, str) and dim.isidentifier())):
            raise ModelError(f"input '{name}' has the dimension {dim!r}; use a positive number, a name or None")
    given = [int(d) if isinstance(d, Integral) else d for d in declared.shape]  # including NumPy's integers
    dims = [f"{name}_{i}" if d is None else d for i, d in enumerate(given)]
    return ir.Value(name=name, type=ir.TensorType(as_dtype(declared.dtype)), shape=ir.Shape(dims))


def _call(net: Any, tensors: dict[str, Tensor]) -> Any:
    """Call ``net`` on ``tensors``, by keyword if ``forward`` has arguments of these names, else in order."""
    forward = getattr(net, "forward", None) if isinstance(net, Module) else net
    arguments = inspect.signature(forward).parameters if forward is not None else {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {n for n, p in arguments.items() if p.kind in kinds}
    if known & set(tensors):
        if strange := set(tensors) - known:
            raise ModelError(f"forward has no argument '{min(strange)}'; its arguments are {', '.join(arguments)}")
        missing = [n for n in known - set(tensors) if arguments[n].default is inspect.Parameter.empty]
        if missing:
            raise ModelError(f"forward requires the argument '{min(missing)}'; add it to inputs")
        return net(**tensors)
    try:
        if forward is not None:
            inspect.signature(forward).bind(*tensors.values())
    except TypeError as problem:
        raise ModelError(f"forward takes ({', '.join(arguments)}), but inputs has {len(tensors)}: {problem}") from None
    return net(*tensors.values())


# --- outputs -------------------------------------------------------------------------------------


def _named_outputs(result: Any, names: Sequence[str] | None) -> list[tuple[str, Tensor]]:
    given = dict(_leaves(result, ""))
    if not given:
        raise ModelError("forward returned nothing; return a tensor, a tuple or a dict of tensors")
    if names is None:
        return [(path or "output", value) for path, value in given.items()]
    if len(names) != len(given) or len(set(names)) != len(names):
        raise ModelError(
            f"forward returned {counted(len(given), 'tensor')}; pass the same number of different output names, not "
            f"{listed(names)}"
        )
    return list(zip(names, given.values(), strict=True))


def _leaves(result: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each tensor in a nested result; names join dict keys and positions with ``_``."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield from _leaves(value, f"{path}_{key}" if path else str(key))
    elif isinstance(result, list | tuple):
        for i, value in enumerate(result):
            yield from _leaves(value, f"{path or 'output'}_{i}")
    elif isinstance(result, Value | Dim | int | float):
        yield path, tensor(result)
    elif result is not None:
        raise ModelError(f"forward returned {type(result).__name__}; return a tensor, a tuple or a dict of tensors")


def _outputs(trace: Trace, named: Mapping[str, Tensor], reserved: set[str]) -> list[ir.Value]:
    """Return the graph outputs under the names in ``named``; inputs, which keep their names, are copied by Identity."""
    if clash := reserved & set(named):
        raise ModelError(f"'{min(clash)}' names both an output and an input or parameter; rename the output")
    values: list[ir.Value] = []
    for x in named.values():
        dims = x.shape
        if x.traced.value.producer() is None or x.traced.value in values:
            name = "" if x.traced.const is None else "output"
            x = wrap(trace.builder.emit("Identity", x.traced, name=name))
        values.append(shaped(x, dims).traced.value)
    for node in trace.builder.nodes:  # inner values are renamed if an output has their name
        for value in node.outputs:
            if value.name in named and value not in values:
                value.name = trace.builder.fresh(value.name or "")
    for name, value in zip(named, values, strict=True):
        value.name = name
    return values


# --- the graph -----------------------------------------------------------------------------------


def _graph(trace: Trace, inputs: list[ir.Value], outputs: list[ir.Value], name: str) -> ir.Graph:
    """Return a graph with the nodes on which the outputs depend, and parameters in the order of their first use."""
    builder = trace.builder
    builder.nodes, read = needed(builder.nodes, outputs, lambda node: node.outputs, reads)
    for node in builder.nodes:
        for value in node.outputs:
            shape_of(value)
    parameters = [p for p in trace.initializers.values() if p in read]
    graph = ir.Graph(inputs, outputs, nodes=_with_constants(builder), opset_imports={"": shapes.OPSET}, name=name)
    for value in parameters:
        graph.register_initializer(value)
    return graph


def _with_constants(builder: Builder) -> list[ir.Node]:
    """Return the nodes of ``builder``, with a Constant node before the first use of each constant."""
    constants = set(builder.constants)
    written: dict[ir.Value, ir.Value] = {}
    nodes = []
    for node in builder.nodes:
        for reader in (node, *(inner for body in subgraphs(node) for inner in body.all_nodes())):
            for i, value in enumerate(reader.inputs):
                if value in constants:
                    if value not in written:
                        written[value] = _constant(value)
                        nodes.append(written[value].producer())
                    reader.replace_input_with(i, written[value])
        nodes.append(node)
    return [node for node in nodes if node is not None]


def _constant(value: ir.Value) -> ir.Value:
    assert value.const_value is not None
    node = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)], num_outputs=1, name=value.name)
    (out,) = node.outputs
    out.name, out.type, out.shape = value.name, value.type, value.shape
    return out
