"""Pass: one kind of constant, the initializer of the main graph."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.builder import mark_constant
from gradgraph.normal.edit import graph_of, nodes_of, own_tensor


def gather_constants(model: ir.Model, keep_inputs: bool = False) -> None:
    """Make constants initializers.

    1. a Constant node (value, value_int(s), value_float(s)) becomes an initializer marked as constant, which is
       never trained; one with a string or sparse value stays;
    2. an initializer that is also a graph input (as IR version 3 wanted) is an input no longer, unless ``keep_inputs``;
    3. Identity of an initializer is that initializer, unless it is a graph output;
    4. an initializer has the type of its data, as for onnxruntime, whatever else is declared of it.
    """
    main = model.graph
    for value in main.initializers.values():
        if value.const_value is not None and value.const_value.dtype != value.dtype:
            value.type = ir.TensorType(value.const_value.dtype)
    if not keep_inputs:
        main.inputs[:] = [v for v in main.inputs if not v.is_initializer()]
    for node in list(nodes_of(model)):
        if node.domain:
            continue
        if node.op_type == "Constant":
            _register(node, main)
        elif (
            node.op_type == "Identity"
            and _is_plain_initializer(node.inputs[0])
            and not node.outputs[0].is_graph_output()
        ):
            source = node.inputs[0]
            assert source is not None
            node.outputs[0].replace_all_uses_with(source)
            graph_of(node).remove(node, safe=True)


_EXPORTERS_OWN = re.compile(r"(_?val_\d+|scalar_tensor_default.*|/.*)$")
_CONSTANT_NODE = re.compile(r"/.*/Constant(_\d+)?_output_0$")  # made an initializer by onnxslim and its like
_EXPORTERS_SCALAR = re.compile(r"(onnx::\w+|\d+|_inlfunc_.*)$")  # old exporters called weights so, too
_BUILDERS_OWN = re.compile(r"const/")
_FLOATS = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"  # beside values in files of torch.onnx.export
_STEP_OF_TORCH = re.compile(
    r"(_to_copy|abs|add|alias|all|any|arange|bitwise_and|bitwise_not|bitwise_or|cat|clamp|clone|"
    r"constant_pad_nd|convert_element_type_default|cos|cumsum|div|einsum|eq|exp|expand|eye|floor|"
    r"floor_divide|full|full_like|gather|ge|gt|index|le|linspace|log|logical_and|logical_not|logical_or|lt|"
    r"masked_fill|matmul|maximum|minimum|mul|ne|neg|new_full|new_ones|new_zeros|ones|ones_like|pad|permute|"
    r"pow|reciprocal|remainder|repeat|repeat_interleave|reshape|rsqrt|scalar_tensor|scalar_tensor_default|"
    r"select|sin|slice|split|sqrt|squeeze|stack|sub|sum|transpose|tril|triu|unsqueeze|val|view|where|zeros|"
    r"zeros_like)(_\d+)?$"
)
_BUFFER_OF_TORCH = re.compile(r"(.+\.)?(lifted_tensor_\d+|\w*inv_freq|position_ids|token_type_ids)$")
_WRITERS_OF_NUMBERS = frozenset({"jax2onnx", "keras2onnx", "OnnxMLTools", "skl2onnx", "tf2onnx"})
_VARIABLE_OF_TENSORFLOW = "ReadVariableOp"
_LARGEST_MASK = 1 << 24  # elements; larger weights are not looked through
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})  # in these −∞ would give no number


def mark_numbers(model: ir.Model, asked_for: Collection[str] = ()) -> None:
    """Mark initializers that are numbers in formulas, as their names tell, so that nobody trains them.

    1. what ``gradgraph.builder`` wrote into an earlier form of the model, ``const/…``, or what was a Constant node of
       PyTorch's, ``/layer/Constant_output_0``;
    2. floats of shape [] or [1] that an exporter named itself, ``val_12`` or ``/layer/Sqrt_output_0``, and of
       shape [] also ``onnx::Mul_7`` and ``12``: factors such as 1/√d;
    3. floats of which some are not finite, and that no product reads as a factor: masks of −∞ that are added to scores,
       what JAX chooses where there is no result;
    4. what PyTorch's exporter folded from numbers and shapes alone, as it says beside the value: initial states of
       zeros, tables of positions and of rotations;
    5. floats of shape [] in files of exporters that write every number so (6.0 of ReLU6, ε of a norm), unless their
       name says that TensorFlow reads a variable;
    6. exponents of shape [] or [1] that are whole, as 2.0 in a square: they have a slope over positive bases only;
    7. those in ``asked_for`` are parameters, whatever they are called and wherever they come from.
    """
    computed = {v.name for node in model.graph for v in node.outputs}
    writes_numbers = model.producer_name in _WRITERS_OF_NUMBERS
    for name, value in model.graph.initializers.items():
        if name in asked_for:
            mark_constant(value, False)
        elif value.is_graph_input():
            continue
        elif (
            _is_number(name, value)
            or _is_folded(value, computed)
            or _hides(value)
            or _is_exponent(value)
            or (writes_numbers and _shape(value) == () and _VARIABLE_OF_TENSORFLOW not in name)
        ):
            mark_constant(value)


def _is_number(name: str, value: ir.Value) -> bool:
    if _BUILDERS_OWN.match(name) or _CONSTANT_NODE.match(name):
        return True
    shape = _shape(value)
    if shape not in ((), (1,)):
        return False
    return bool(_EXPORTERS_OWN.match(name) or (shape == () and _EXPORTERS_SCALAR.match(name)))


def _shape(value: ir.Value) -> tuple[Any, ...] | None:
    """Of floats, where it is known."""
    if value.dtype is None or not value.dtype.is_floating_point() or value.shape is None:
        return None
    return tuple(value.shape)


def _is_exponent(value: ir.Value) -> bool:
    if _shape(value) not in ((), (1,)) or value.const_value is None or value.is_graph_output():
        return False
    uses = list(value.uses())
    if not uses or any(use.node.op_type != "Pow" or use.node.domain or use.idx != 1 for use in uses):
        return False
    return float(value.const_value.numpy().item()).is_integer()


def _is_folded(value: ir.Value, computed: Collection[str | None]) -> bool:
    """Whether no source can be a parameter; of what is ``computed`` still, only the shape can have been read."""
    sources = re.findall(r"'([^']*)'", value.metadata_props.get(_FOLDED_FROM, ""))
    return bool(sources) and all(
        name in computed or _STEP_OF_TORCH.match(name) or _BUFFER_OF_TORCH.match(name) for name in sources
    )


def _hides(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or tensor.dtype not in _FLOATS or tensor.size > _LARGEST_MASK:
        return False
    return not _is_factor(value) and not np.isfinite(tensor.numpy()).all()


def _is_factor(value: ir.Value) -> bool:
    readers = [use.node for use in value.uses()]
    turned = [use.node for n in readers if n.op_type == "Transpose" for use in n.outputs[0].uses()]
    return any(n.op_type in _PRODUCTS and n.domain == "" for n in (*readers, *turned))


def _is_plain_initializer(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and not value.is_graph_input()


def _register(node: ir.Node, main: ir.Graph) -> None:
    if not _is_numeric(node):
        return
    given = node.attributes.get("value")  # onnx-ir's own way to read it renames the tensor, which may be the caller's
    tensor = given.as_tensor() if given is not None else ir.convenience.get_const_tensor(node.outputs[0])
    if tensor is not None:
        become_constant(node, tensor, main)


def _is_numeric(node: ir.Node) -> bool:
    if not {"value", "value_int", "value_ints", "value_float", "value_floats"} & set(node.attributes):
        return False
    return "value" not in node.attributes or node.attributes["value"].as_tensor().dtype != ir.DataType.STRING


def become_constant(node: ir.Node, tensor: ir.TensorProtocol, main: ir.Graph) -> bool:
    """Replace the one output of ``node`` by an initializer of the same name, marked; False if it must stay."""
    old = node.outputs[0]
    graph = graph_of(node)
    if old.is_graph_output() and graph is not main:
        return False  # a body's outputs must be computed in the body
    new = ir.Value(name=old.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
    new.const_value = own_tensor(tensor, old.name)
    mark_constant(new)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = None
    graph.remove(node, safe=True)
    main.register_initializer(new)
    return True
