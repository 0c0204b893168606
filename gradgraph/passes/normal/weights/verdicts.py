"""Pass: decide for each stored tensor whether it is a weight, with the reason.

A verdict is based on, in this order: whether the caller names the tensor in full; metadata of the exporter; and the
tensor's roles for its readers (``roles``). A single number that the file does not mark as learned or constant is not
trained, and the verdict is marked as doubtful.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.files.model_metadata import learned_ranges
from gradgraph.graph.constant_nodes import weights_were_nodes
from gradgraph.graph.marks import is_marked_constant, mark_constant
from gradgraph.graph.shapes import is_single
from gradgraph.passes.normal.weights.fixed_tensors import find_fixed
from gradgraph.passes.normal.weights.roles import Role, Uses, roles


@dataclass(frozen=True)
class Verdict:
    """A verdict on whether a tensor is a weight.

    Attributes:
        is_weight: whether the tensor is a weight.
        reason: why it is a weight or not, as a phrase for after a colon; names in it are safe to print.
        doubtful: whether it is a scalar that is not trained but may have been learned.
        is_taken_for_constant: whether only its readers or its values suggest that this tensor of several elements is
            not a weight.
    """

    is_weight: bool
    reason: str
    doubtful: bool = False
    is_taken_for_constant: bool = False


OURS = "gradgraph"  # the producer of files written by gradgraph, which contain Dropout if the network has it
_VERDICTS, _EXPORTER = "gradgraph.verdicts", "gradgraph.exporter"  # in a graph's meta
_TORCH, _OLDER_TORCH = "torch", "older torch"
_WITHOUT_FOLDING = {
    _TORCH: "export the model with torch.onnx.export(..., optimize=False)",
    _OLDER_TORCH: "export the model with torch.onnx.export(..., dynamo=False, do_constant_folding=False)",
}
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"  # metadata of values in files of torch.onnx.export
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
_ROLE = "gradgraph.role"  # metadata of tensors that the frontend wrote
_FROZEN = "frozen"  # a role: a parameter that its module does not train


def judge_weights(model: ir.Model, asked_for: Collection[str] = ()) -> None:
    """Record a verdict for every floating-point initializer, and mark those that are not weights as constants.

    1. The tensors in ``asked_for`` are always weights, as are the numbers from which learned ranges are computed.
    2. Tensors that PyTorch's exporter or the frontend calls parameters are weights; buffers and frozen parameters are
       not.
    3. The following are not weights: Constant nodes of a file that has its weights elsewhere; constants that
       ``graph.builder`` or an exporter wrote into a formula; tensors that PyTorch's exporter folded from constants and
       shapes only; and tensors with nonfinite values, unless they are factors of products (masks of −∞, which JAX uses
       for missing results).
    4. Settings (bounds, scales, zero points, exponents, paddings, coordinates) and initial states of zeros are not
       weights.
    5. A single number is a weight if a layer reads it as one (a slope, a bias, a norm of one channel), if Exp, Sigmoid,
       Softplus or Tanh keeps it in a range, or if the file identifies it: a TensorFlow variable, a state entry named by
       its path in PyTorch's older exporter, a PaddlePaddle parameter. Otherwise it is a constant of a formula.
    6. Constants that normalise inputs, decode outputs or mask (``fixed_tensors``) are not weights.
    7. All other tensors are weights.
    """
    exporter = _exporter(model)
    judge = _Judge(model, exporter)
    verdicts = {}
    learned = set(learned_ranges(model.metadata_props))
    for name, value in model.graph.initializers.items():
        if name in asked_for or name in learned:
            verdict = Verdict(True, "named in full" if name in asked_for else "a trained scale is computed from it")
            mark_constant(value, False)
        elif value.is_graph_input():
            continue
        else:
            verdict = judge.verdict(name, value)
            if not verdict.is_weight and not is_buffer(value):
                mark_constant(value)
        if value.dtype is not None and value.dtype.is_floating_point():
            verdicts[name] = verdict
    model.graph.meta[_VERDICTS] = verdicts
    model.graph.meta[_EXPORTER] = exporter


def verdicts(graph: ir.Graph) -> Mapping[str, Verdict]:
    """Return the verdicts on all tensors that the file stores, by name; the normal form may have removed some."""
    found: Mapping[str, Verdict] = graph.meta.get(_VERDICTS, {})
    return found


def is_named_state(graph: ir.Graph, value: ir.Value) -> bool:
    """Whether the file marks ``value`` as a parameter or buffer, so that it was not computed from other tensors."""
    name = value.name or ""
    return bool(
        _word_of_exporter(value)
        or (graph.meta.get(_EXPORTER) == _OLDER_TORCH and _STATE_OF_TORCH.match(name))
        or _STATE_OF_PADDLE.match(name)
    )


def has_generated_name(value: ir.Value) -> bool:
    """Whether an exporter generated the name of ``value``."""
    return bool(_EXPORTERS_OWN.match(value.name or ""))


def without_folding(graph: ir.Graph) -> str:
    """Return advice on how to disable constant folding in the exporter of this file."""
    return _WITHOUT_FOLDING.get(graph.meta.get(_EXPORTER, ""), "export the model again without constant folding")


def is_buffer(value: ir.Value) -> bool:
    """Whether the frontend or PyTorch marks ``value`` as a buffer, such as a position table, which is not trained."""
    return _word_of_exporter(value) == "buffer"


def _word_of_exporter(value: ir.Value) -> str:
    """Return the exporter's word for an initializer: ``parameter``, ``frozen`` or ``buffer``; empty if unknown."""
    role = "" if value.const_value is None else str(value.const_value.metadata_props.get(_ROLE, ""))
    kind = value.metadata_props.get(_KIND, "")
    return role or {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "buffer"}.get(kind, "")


# --- what exporters write ----------------------------------------------------------------------------------

_BUILDERS_OWN = re.compile(r"const/")
_CONSTANT_NODE = re.compile(r"/.*/Constant(_\d+)?_output_0$")  # converted to an initializer by onnxslim and the like
_EXPORTERS_OWN = re.compile(
    r"(_?val_\d+|scalar_tensor_default.*|/.*|onnx::\w+|\d+|_inlfunc_.*|p2o\.helper\..*|Constant@\d+)$"
)
_STATE_OF_TORCH = re.compile(r"[A-Za-z_]\w*(\.\w+)+$")  # names of parameters and buffers in the older exporter
_STATE_OF_PADDLE = re.compile(r"\w+_\d+\.[wb]_\d+$")  # conv2d_0.w_0
_STEP_OF_TORCH = re.compile(
    r"(_to_copy|abs|add|alias|all|amax|amin|any|arange|argmax|argsort|atan2|avg_pool1d|bitwise_and|"
    r"bitwise_not|bitwise_or|bmm|broadcast_to|cat|chunk|clamp|clamp_max|clamp_min|clone|complex|"
    r"constant_pad_nd|contiguous|convert_element_type_default|cos|cumsum|detach|div|einsum|eq|erf|exp|"
    r"expand|eye|flip|floor|floor_divide|full|full_like|gather|ge|gt|index|index_put|"
    r"index_select|isin|le|lift_fresh_copy|linspace|log|log1p|logical_and|logical_not|logical_or|"
    r"logical_xor|lt|masked_fill|matmul|max_pool1d|maximum|meshgrid|minimum|mm|movedim|mul|ne|"
    r"neg|new_full|new_ones|new_zeros|ones|ones_like|outer|pad|permute|polar|pow|reciprocal|"
    r"remainder|repeat|repeat_interleave|reshape|roll|round|rsqrt|rsub|scalar_tensor|"
    r"scalar_tensor_default|scatter|select|sigmoid|sign|sin|slice|softmax|sort|split|sqrt|square|"
    r"squeeze|stack|sub|sum|swapaxes|tanh|tile|topk|transpose|tril|tril_indices|triu|triu_indices|"
    r"trunc|type_as|unbind|unfold|unsqueeze|val|view|view_as_complex|view_as_real|where|zeros|"
    r"zeros_like)(_\d+)?$"
)
_BUFFER_OF_TORCH = re.compile(r"(.+\.)?(lifted_tensor_\d+|\w*inv_freq|embed_positions|position_ids|token_type_ids)$")
_WRITERS_OF_NUMBERS = frozenset({"jax2onnx", "keras2onnx", "OnnxMLTools", "skl2onnx", "tf2onnx"})
_VARIABLE_OF_TENSORFLOW = "ReadVariableOp"
_FLOATS = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_LARGEST_MASK = 1 << 24  # elements; larger weights are not scanned
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})  # products, in which a mask of −∞ would lead to NaN


def _exporter(model: ir.Model) -> str:
    if model.producer_name != "pytorch":
        return model.producer_name or ""
    said = any(not {_KIND, _FOLDED_FROM}.isdisjoint(v.metadata_props) for v in model.graph.initializers.values())
    return _TORCH if said else _OLDER_TORCH


def exporter_of(graph: ir.Graph) -> str:
    """Return the program that wrote the file of ``graph``, which is in normal form; empty if unknown."""
    return str(graph.meta.get(_EXPORTER, ""))


class _Judge:
    """The rules that decide for each initializer whether it is a weight, from the file's exporter and its readers."""

    def __init__(self, model: ir.Model, exporter: str) -> None:
        self._uses = roles(model)
        self._fixed = find_fixed(model)
        self._computed = {v.name for node in model.graph for v in node.outputs}
        self._writes_numbers = exporter in _WRITERS_OF_NUMBERS
        self._names_state = exporter == _OLDER_TORCH
        self._were_nodes = weights_were_nodes(model)

    def verdict(self, name: str, value: ir.Value) -> Verdict:
        if is_marked_constant(value):
            return Verdict(False, "the file stores it as a Constant node")
        if _BUILDERS_OWN.match(name) or (_CONSTANT_NODE.match(name) and not self._were_nodes):
            return Verdict(False, "its name marks it as a constant")
        if said := _word_of_exporter(value):
            words = "its parameter is frozen" if said == _FROZEN else f"it is a {said}"
            return Verdict(said == "parameter", f"the file says that {words}")
        if _is_folded(value, self._computed):
            return Verdict(False, "the exporter folded it from constants and shapes only")
        if (reason := self._fixed.get(value)) is not None:
            return Verdict(False, reason, is_taken_for_constant=True)
        if _is_mask(value):
            return Verdict(False, "it contains nonfinite numbers")
        uses = self._uses.get(value, {})
        if not uses or value.dtype is None or not value.dtype.is_floating_point():
            return Verdict(True, "nothing reads it" if not uses else f"{next(iter(uses.values()))}")
        return self._of_one(name, uses) if is_single(value) else _of_tensor(value, uses)

    def _of_one(self, name: str, uses: Uses) -> Verdict:
        is_generated = bool(_EXPORTERS_OWN.match(name))
        learned = next((uses[r] for r in (Role.FACTOR, Role.SHAPED) if r in uses), None)
        if learned is None and not is_generated:
            learned = uses.get(Role.BIAS)
        if learned is not None:
            return Verdict(True, str(learned))
        if (setting := uses.get(Role.SETTING)) is not None:
            return Verdict(False, str(setting))
        if _VARIABLE_OF_TENSORFLOW in name:
            return Verdict(True, "its name is that of a TensorFlow variable")
        if self._names_state and _STATE_OF_TORCH.match(name):
            return Verdict(True, "its name is that of an entry of PyTorch's state")
        if _STATE_OF_PADDLE.match(name):
            return Verdict(True, "its name is that of a PaddlePaddle parameter")
        reason = f"one number, {next(iter(uses.values()))}"
        if is_generated or self._writes_numbers or self._were_nodes:
            return Verdict(False, reason)
        return Verdict(False, f"{reason}, which the file does not distinguish from a learned one", doubtful=True)


def _of_tensor(value: ir.Value, uses: Uses) -> Verdict:
    if set(uses) == {Role.SETTING}:
        return Verdict(False, str(uses[Role.SETTING]))
    if Role.STATE in uses and value.const_value is not None and not value.const_value.numpy().any():
        return Verdict(False, f"{uses[Role.STATE]}, all zeros")
    return Verdict(True, str(next(uses[role] for role in Role if role in uses)))


def _is_folded(value: ir.Value, computed: Collection[str | None]) -> bool:
    """Whether the exporter folded ``value`` without parameters; sources in ``computed`` contributed only shapes."""
    sources = re.findall(r"'([^']*)'", value.metadata_props.get(_FOLDED_FROM, ""))
    return bool(sources) and all(
        name in computed or _STEP_OF_TORCH.match(name) or _BUFFER_OF_TORCH.match(name) for name in sources
    )


def _is_mask(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or tensor.dtype not in _FLOATS or tensor.size > _LARGEST_MASK:
        return False
    return not _is_factor(value) and not np.isfinite(tensor.numpy()).all()


def _is_factor(value: ir.Value) -> bool:
    readers = [use.node for use in value.uses()]
    turned = [use.node for n in readers if n.op_type == "Transpose" for use in n.outputs[0].uses()]
    return any(n.op_type in _PRODUCTS and n.domain == "" for n in (*readers, *turned))
