"""``from_onnx``: load a model file as a module, for networks written in Python."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NAMES, as_names, checked
from gradgraph.autodiff.path import carries
from gradgraph.autodiff.select import running_statistics
from gradgraph.errors import ModelError, UnknownNameError, listed, shown, suggestion
from gradgraph.files.models import Source, load_model
from gradgraph.frontend.module import Buffer, Module, Parameter
from gradgraph.frontend.tensor import Tensor
from gradgraph.frontend.trace import Trace, current, tensor, wrap
from gradgraph.graph.builder import Var
from gradgraph.graph.marks import is_marked_constant
from gradgraph.graph.prune import prune
from gradgraph.passes.normal import blaming, normalise
from gradgraph.passes.normal.functions.inline import applied


@checked(outputs=NAMES.or_none())
def from_onnx(model: Source, outputs: str | Sequence[str] | None = None) -> OnnxModule:
    """Load a model as a module, such as a backbone for a new head, an encoder or a teacher.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        outputs: the values that the module returns: names of outputs or of inner values. Nodes and weights that they do
            not depend on are removed. By default all outputs.

    Returns:
        A module whose ``forward`` takes the model's inputs, by position or by name. It returns a tensor if ``outputs``
        is a string, or by default if the model has one output; otherwise a dict by name. Weights become parameters
        with their names in the file, and running statistics become buffers. Other initializers, such as constants of
        formulas, are not trained.

    Raises:
        ModelError: if the file is damaged, or its operators have no equivalent at opset 21.
        UnknownNameError: if the model has no value of that name.
    """
    read = load_model(model)
    names = [v.name or "" for v in read.graph.outputs] if outputs is None else as_names(outputs)
    _keep_outputs(read, names)
    with blaming(model):
        graph = normalise(read, keep_quantization=True).graph
    single = isinstance(outputs, str) or (outputs is None and len(names) == 1)
    return OnnxModule(graph, names, single)


class OnnxModule(Module):
    """A model loaded from a file; created by ``from_onnx``."""

    def __init__(self, graph: ir.Graph, names: Sequence[str], single: bool) -> None:
        super().__init__()
        self._graph, self._names, self._single = graph, tuple(names), single
        statistics = running_statistics(graph)
        for name, value in graph.initializers.items():
            if value.const_value is None:
                continue
            if value in statistics:
                self.register_buffer(name, _array(value))
            elif carries(value) and not is_marked_constant(value):
                self.register_parameter(name, Parameter(_array(value), value.dtype))

    def forward(self, *given: Any, **by_name: Any) -> Tensor | dict[str, Tensor]:
        trace = current()
        inputs = self._inputs(given, by_name)
        nodes, copies = applied(
            self._graph,
            [x.traced.value for x in inputs],
            functools.cache(functools.partial(trace.builder.fresh_in, trace.builder.scope)),
            {v: self._stored_in(trace, name, v) for name, v in self._graph.initializers.items()},
        )
        sizes: dict[str, int | str] = {}  # for each symbolic size of the model, that of the surrounding network
        for declared, x in zip(self._graph.inputs, inputs, strict=True):
            for dim, here in zip(declared.shape or (), x.shape, strict=False):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    sizes[dim.value] = here if isinstance(here, int) else str(here)
        for node in nodes:
            for value in node.outputs:
                _rename_sizes(trace, value, sizes)
        trace.builder.nodes.extend(nodes)
        results = [copies[v] for v in self._graph.outputs]
        found = {name: wrap(Var(trace.builder, v)) for name, v in zip(self._names, results, strict=True)}
        return found[self._names[0]] if self._single else found

    def extra_repr(self) -> str:
        return f"{', '.join(v.name or '' for v in self._graph.inputs)} -> {', '.join(self._names)}"

    def _inputs(self, given: Sequence[Any], by_name: Mapping[str, Any]) -> list[Tensor]:
        """Return a tensor for each of the model's inputs, after checking types and shapes."""
        wanted = {v.name or "": v for v in self._graph.inputs}
        found = {**dict(zip(wanted, given, strict=False)), **by_name}
        if len(given) > len(wanted) or set(found) != set(wanted) or len(found) != len(given) + len(by_name):
            raise ModelError(
                f"the model takes {listed(wanted)}; pass each once, in this order or by name, not {len(given)} in "
                f"order and {listed(by_name) if by_name else 'none'} by name"
            )
        tensors = {name: tensor(x) for name, x in found.items()}
        for name, x in tensors.items():
            _check_fits(wanted[name], x)
        return [tensors[name] for name in wanted]

    def _stored_in(self, trace: Trace, name: str, value: ir.Value) -> ir.Value:
        held: Parameter | Buffer | None = self._parameters.get(name)
        held = held if held is not None else self._buffers.get(name)
        if held is None:
            return trace.builder.const(_array(value), value.dtype).value
        if held.traced.dtype != value.dtype or held.data.shape != tuple(value.shape or ()):
            raise ModelError(
                f"'{shown(name)}' is now {held.traced.dtype.name.lower()}{list(held.data.shape)}, but the model from "
                "the file was built for its original type and shape; convert the file instead, or leave its weights "
                "unchanged"
            )
        return held.traced.value


def _keep_outputs(model: ir.Model, names: Sequence[str]) -> None:
    """Make the values ``names`` the outputs of ``model``, and remove nodes, weights and inputs that become unused."""
    graph = model.graph
    known = {v.name or "": v for v in (*(o for node in graph for o in node.outputs), *graph.outputs)}
    for name in names:
        if name not in known or not name:
            raise UnknownNameError(f"the model has no output or inner value '{shown(name)}'{suggestion(name, known)}")
    graph.outputs[:] = [known[name] for name in names]
    prune(model)
    unread = [v for v in graph.inputs if not v.uses() and v not in graph.outputs]
    for value in unread:
        graph.inputs.remove(value)


def _check_fits(declared: ir.Value, x: Tensor) -> None:
    name, shape = shown(declared.name), declared.shape
    if declared.dtype is not None and x.traced.dtype != declared.dtype:
        raise ModelError(
            f"input '{name}' of the model is {declared.dtype.name.lower()}, but got {x.traced.dtype.name.lower()}; "
            "convert it first"
        )
    if shape is None:
        return
    here = x.shape
    wrong = len(here) != len(shape) or any(
        isinstance(d, int) and str(d) != str(e) for d, e in zip(shape, here, strict=True)
    )
    if wrong:
        wanted, given = (", ".join(str(d) for d in dims) for dims in (shape, here))
        raise ModelError(f"input '{name}' of the model has shape ({wanted}), but got ({given}); reshape it first")


def _rename_sizes(trace: Trace, value: ir.Value, sizes: dict[str, int | str]) -> None:
    """Rename the symbolic sizes of ``value`` to those of the network, by ``sizes``; add a new name for others."""
    if value.shape is None:
        return
    dims: list[int | str | None] = []
    for dim in value.shape:
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
            if dim.value not in sizes:
                sizes[dim.value] = trace.builder.fresh_in(trace.builder.scope, dim.value)
            dims.append(sizes[dim.value])
        else:
            dims.append(dim if isinstance(dim, int) else None)
    value.shape = ir.Shape(dims)


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
