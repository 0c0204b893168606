"""``from_torch``: export a PyTorch module as an ONNX model whose initializers have the names of its parameters."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from gradgraph.arguments import as_names
from gradgraph.errors import ModelError, RuntimeUnavailableError, counted
from gradgraph.frontend.trace import mark_role
from gradgraph.graph.prune import prune_graph

Dynamic = Mapping[str, Mapping[int, str]]


def from_torch(
    module: Any,
    example_inputs: Any,
    input_names: str | Sequence[str] | None = None,
    output_names: str | Sequence[str] | None = None,
    dynamic: Dynamic | None = None,
) -> onnx.ModelProto:
    """Export a ``torch.nn.Module``; parameters and buffers keep their names.

    The model is in inference mode, but can be trained: every BatchNormalization is one node with its running
    statistics, and every ``nn.Dropout`` or ``torch.nn.functional.dropout`` is an inactive Dropout node. Parameters with
    ``requires_grad=False`` are also frozen in the file, unless all parameters are: a training step trains them only if
    their full names are given. Dropout inside ``scaled_dot_product_attention`` is absent, as PyTorch omits it in
    evaluation mode.

    Args:
        module: the module; its weights are copied, and it is not changed.
        example_inputs: a tensor or a tuple of tensors, with which PyTorch traces the module.
        input_names: the names of the inputs; by default the names of the arguments of ``forward``.
        output_names: the names of the outputs; by default "output", or "output_0" and so on if there are several.
        dynamic: the dynamic axes of each input, such as ``{"x": {0: "batch", 1: "time"}}``; axes with the same name
            have the same size. By default axis 0 of every input, named "batch"; with ``{}``, all sizes are fixed. The
            example must have a size of at least 2 along a dynamic axis.

    Returns:
        The model.

    Raises:
        RuntimeUnavailableError: if torch or onnxscript is not installed.
        ModelError: if the example does not fit the module, or PyTorch cannot export it (see the cause).
    """
    try:
        import onnxscript  # noqa: F401 (the exporter needs it)
        import torch
    except ImportError as missing:
        raise RuntimeUnavailableError(
            f"from_torch requires {missing.name}, which is not installed; pip install torch onnxscript"
        ) from missing
    args = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
    names = _input_names(module, args, None if input_names is None else as_names(input_names))
    axes = _dynamic_axes(torch, dict(zip(names, args, strict=True)), dynamic)
    with _evaluating(torch, module), _quiet():
        model = _export(torch, module, args, names, axes)
    _name_outputs(model.graph, as_names(output_names or ()))
    _switch_off_dropout(model.graph)
    _drop_misshapen_biases(model.graph)
    # parameters without a gradient are frozen, unless all are: then gradients were only switched off for inference
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    frozen = [name for name, trains in trained.items() if not trains] if any(trained.values()) else []
    roles = dict.fromkeys(frozen, "frozen") | {name: "buffer" for name, _ in module.named_buffers()}
    for value in model.graph.initializers.values():
        if value.name in roles:
            mark_role(value, roles[value.name])
    model.producer_name = "gradgraph"
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto


def _input_names(module: Any, args: tuple[Any, ...], names: Sequence[str] | None) -> list[str]:
    if names is not None:
        if len(names) != len(args):
            raise ModelError(
                f"input_names has {counted(len(names), 'name')}, but there are {len(args)} example "
                "inputs; pass one name for each"
            )
        return list(names)
    try:
        bound = inspect.signature(module.forward).bind(*args)
    except TypeError as problem:
        raise ModelError(f"the example inputs do not fit {type(module).__name__}.forward: {problem}") from None
    found: list[str] = []
    for name, value in bound.arguments.items():
        starred = inspect.signature(module.forward).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        found += [f"{name}_{i}" for i in range(len(value))] if starred else [name]
    return found


def _dynamic_axes(torch: Any, examples: dict[str, Any], dynamic: Dynamic | None) -> list[dict[int, Any] | None]:
    """Return the dynamic axes of each input in the format of ``torch.onnx.export``; None for an input without any."""
    if dynamic is None:
        dynamic = {name: {0: "batch"} for name, x in examples.items() if getattr(x, "ndim", 0) > 0}
    if strange := set(dynamic) - set(examples):
        raise ModelError(f"dynamic names '{min(strange)}', which is not an input; the inputs are {', '.join(examples)}")
    for name, axes in dynamic.items():
        for axis in axes:
            shape = tuple(examples[name].shape)
            if not 0 <= axis < len(shape) or shape[axis] < 2:
                raise ModelError(
                    f"axis {axis} of '{name}' is dynamic, but the example has shape {shape}; PyTorch treats 0 and 1 "
                    "as fixed sizes, so use a size of at least 2 there"
                )
    dims = {label: torch.export.Dim(label) for axes in dynamic.values() for label in axes.values()}
    return [{axis: dims[label] for axis, label in dynamic.get(name, {}).items()} or None for name in examples]


def _export(
    torch: Any, module: Any, args: tuple[Any, ...], names: list[str], axes: list[dict[int, Any] | None]
) -> ir.Model:
    try:
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            optimize=False,  # optimising folds BatchNormalization into Conv and loses the names of Linear's weights
            verbose=False,
            input_names=names,
            dynamic_shapes=tuple(axes) if any(axes) else None,
        )
    except Exception as problem:
        cause = problem.__cause__ or problem
        first = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise ModelError(f"PyTorch could not export {type(module).__name__}: {first}") from problem
    model: ir.Model = program.model
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's warnings about its internals and about missing packages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _evaluating(torch: Any, module: Any) -> Iterator[None]:
    """Put the module into evaluation mode, but let the exporter record dropout; restore the module at the end."""
    flags = {m: m.training for m in module.modules()}
    functional = torch.nn.functional
    original = functional.dropout

    def recorded(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.dropout(x, p, True) if 0.0 < p < 1.0 else original(x, p, training, inplace)

    module.eval()
    functional.dropout = recorded
    try:
        yield
    finally:
        functional.dropout = original
        for m, training in flags.items():
            m.training = training


def _switch_off_dropout(graph: ir.Graph) -> None:
    """Put Dropout nodes into inference mode: remove their input training_mode."""
    for node in list(graph.all_nodes()):
        if node.op_type == "Dropout" and len(node.inputs) > 2:
            flag = node.inputs[2]
            node.resize_inputs(2)
            constant = flag.producer() if flag is not None and not flag.uses() else None
            if constant is not None and constant.op_type == "Constant":
                graph.remove(constant, safe=True)


def _drop_misshapen_biases(graph: ir.Graph) -> None:
    """Remove the bias of shape [channels, 2], zeros, that PyTorch 2.13 writes for a Conv3d without bias; no runtime
    accepts it.
    """
    misshapen = [n for n in graph if n.op_type == "Conv" and len(n.inputs) == 3 and _is_misshapen(n.inputs[2])]
    for node in misshapen:
        node.resize_inputs(2)
    if misshapen:
        prune_graph(graph)


def _is_misshapen(bias: ir.Value | None) -> bool:
    expand = None if bias is None else bias.producer()
    sizes = None if expand is None or expand.op_type != "Expand" else expand.inputs[1]
    concat = None if sizes is None else sizes.producer()
    return concat is not None and concat.op_type == "Concat" and len(concat.inputs) == 2


def _name_outputs(graph: ir.Graph, names: Sequence[str]) -> None:
    outputs = list(graph.outputs)
    names = names or (["output"] if len(outputs) == 1 else [f"output_{i}" for i in range(len(outputs))])
    if len(names) != len(outputs):
        raise ModelError(
            f"the module returns {counted(len(outputs), 'tensor')}, but output_names has {len(names)}; pass one name "
            "for each"
        )
    taken = {v.name: v for node in graph.all_nodes() for v in node.outputs if v.name in names}
    for name, value in taken.items():
        value.name = f"{name}.inner"
    for value, name in zip(outputs, names, strict=True):
        value.name = name
