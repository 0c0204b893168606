"""Names for weights that an exporter has left without one: where they are used."""

from __future__ import annotations

import re

import onnx_ir as ir

from gradgraph.arguments import PATH, checked
from gradgraph.files import Source
from gradgraph.normal.edit import names_of
from gradgraph.surgery.operated import Path, Result, closed, opened, rename

# what PyTorch's two exporters, tf2onnx and others call a tensor that has no name in the source
_ANONYMOUS = re.compile(
    r"(onnx::\w+?_\d+|val_\d+|_val_\d+|t_?\d*|_?\d+|const(ant)?(_fold_opt__|_|__)?\d*|initializer_\d+|tensor_\d+)"
)
_ROLES = {  # of the inputs of an operator, as PyTorch names them
    "Conv": ("", "weight", "bias"),
    "ConvTranspose": ("", "weight", "bias"),
    "Gemm": ("weight", "weight", "bias"),
    "MatMul": ("weight", "weight"),
    "Add": ("bias", "bias"),
    "Mul": ("scale", "scale"),
    "Gather": ("weight", ""),
    "BatchNormalization": ("", "weight", "bias", "running_mean", "running_var"),
    "InstanceNormalization": ("", "weight", "bias"),
    "LayerNormalization": ("", "weight", "bias"),
    "GroupNormalization": ("", "weight", "bias"),
    "PRelu": ("", "weight"),
    "LSTM": ("", "weight_ih", "weight_hh", "bias"),
    "GRU": ("", "weight_ih", "weight_hh", "bias"),
    "RNN": ("", "weight_ih", "weight_hh", "bias"),
}
_SCOPES = ("pkg.torch.onnx.name_scopes", "namespace")  # where PyTorch's exporter writes the modules around a node


@checked(out=PATH.or_none())
def name_weights(model: Source, *, out: Path | None = None) -> Result:
    """The model with names for its anonymous weights that say where they are used.

    ``onnx::MatMul_413``, read by ``/encoder/layer.0/query/MatMul``, becomes ``encoder.layer.0.query.weight``. Names
    that mean something stay; so do those of integers and of single numbers, which are no weights. Where a node has no
    scope in its name or its metadata, its operator and number say which it is: ``MatMul_12.weight``.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        out: write the result to this path.

    Raises:
        ModelError: the model cannot be read.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    taken = set(names_of(work))
    places = {node: i for i, node in enumerate(work.graph)}
    for name, value in list(work.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_floating_point() or tensor.size < 2 or not is_anonymous(name):
            continue
        wanted = _name(value, places)
        if wanted is not None:
            new = _free(wanted, taken)
            taken.add(new)
            rename(value, new)
    return closed(work, model, out)


def is_anonymous(name: str) -> bool:
    """Does the name of a tensor say nothing about it?"""
    return _ANONYMOUS.fullmatch(name) is not None


def _name(value: ir.Value, places: dict[ir.Node, int]) -> str | None:
    for node, position in value.uses():
        reader, at = _behind_moves(node, position)
        roles = _ROLES.get(reader.op_type, ())
        role = roles[at] if at < len(roles) else ""
        if role:
            return f"{module_of(reader) or f'{reader.op_type}_{places.get(reader, 0)}'}.{role}"
    return None


def _behind_moves(node: ir.Node, position: int) -> tuple[ir.Node, int]:
    """The node that computes with a weight, behind those that only turn it or change its type."""
    while node.op_type in ("Transpose", "Cast", "Identity", "DequantizeLinear", "Reshape") and position == 0:
        uses = list(node.outputs[0].uses())
        if len(uses) != 1:
            break
        node, position = uses[0]
    return node, position


def module_of(node: ir.Node) -> str:
    """The module that a node was written by: from its metadata, else from its name."""
    for key in _SCOPES:
        if text := node.metadata_props.get(key):
            scopes = re.findall(r"'([^']*)'", text) or text.split("/")
            modules = [s.partition(":")[0].strip() for s in scopes if s.strip()]
            if key == _SCOPES[0] and len(modules) > 1:
                return modules[-2]  # the last one is the node's own
            return ".".join(m for m in modules[:-1] if m)
    parts = [p for p in (node.name or "").split("/") if p]
    return ".".join(parts[:-1])


def _free(wanted: str, taken: set[str]) -> str:
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name
