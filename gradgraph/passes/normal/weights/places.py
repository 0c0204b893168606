"""Find the source module, and the parameter name in it, for a weight that a node reads."""

from __future__ import annotations

import re

import onnx_ir as ir

_ROLES = {  # PyTorch's parameter names for the inputs of an operator
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
_SCOPES = ("pkg.torch.onnx.name_scopes", "namespace")  # metadata in which PyTorch's exporter records the modules


def place_of(node: ir.Node, position: int) -> tuple[str, str]:
    """Return the module and parameter name of an input, such as ``encoder.query`` and ``weight``; each may be empty."""
    reader, at = behind_moves(node, position)
    roles = _ROLES.get(reader.op_type, ())
    return module_of(reader), roles[at] if at < len(roles) else ""


def behind_moves(node: ir.Node, position: int) -> tuple[ir.Node, int]:
    """Return the node that computes with a weight, behind nodes that reshape or cast it, and the input index."""
    while node.op_type in ("Transpose", "Cast", "Identity", "DequantizeLinear", "Reshape") and position == 0:
        uses = list(node.outputs[0].uses())
        if len(uses) != 1:
            break
        node, position = uses[0]
    return node, position


def module_of(node: ir.Node) -> str:
    """Return the module that a node belongs to, from its metadata or else from its name."""
    for key in _SCOPES:
        if text := node.metadata_props.get(key):
            scopes = re.findall(r"'([^']*)'", text) or text.split("/")
            modules = [s.partition(":")[0].strip() for s in scopes if s.strip()]
            if key == _SCOPES[0] and len(modules) > 1:
                return modules[-2]  # the last entry is the node's own
            return ".".join(m for m in modules[:-1] if m)
    parts = [p for p in (node.name or "").split("/") if p]
    return ".".join(parts[:-1])
