"""Tables tell, without a GPU, which nodes onnxruntime has CUDA kernels for and what a CUDA graph cannot record.

The tables hold onnxruntime's CUDA kernels for opset 21, as far as steps use them, and what it refuses in spite of a
kernel; ``python -m benchmarks.placement --table`` compares them with the real ones. Nodes without a kernel run on the
CPU: their inputs and outputs travel between the memories in every step, and no CUDA graph can be captured.

Arithmetic on shapes runs on the CPU by design: Shape gives its result there, and what reads only such results follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from gradgraph.backends.ort_operators import CONTRIB
from gradgraph.normal.edit import nodes_of
from gradgraph.shapes import constant_of, is_static

_FLOATS = "FLOAT DOUBLE FLOAT16"
_WIDER = f"{_FLOATS} BFLOAT16"
_NUMBERS = "INT32 INT64 UINT32 UINT64"
_ALL = f"{_WIDER} BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64"

KERNELS: dict[str, str] = {}  # operator -> element types


def _rows(types: str, operators: str) -> None:
    KERNELS.update(dict.fromkeys(operators.split(), types))


_rows(_ALL, "Cast Compress Concat ConstantOfShape Expand Flatten Gather GatherElements Identity If Loop Reshape")
_rows(_ALL, "ReverseSequence Scan ScatterElements ScatterND Shape Size Slice Split Squeeze Transpose Trilu Unsqueeze")
_rows(_ALL, "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength")
_rows(f"{_WIDER} INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64", "Abs Add Div Mul Sign Sub")
_rows(f"{_WIDER} {_NUMBERS}", "Max Min Mod")
_rows(f"{_WIDER} INT8 INT16 INT32 INT64", "Neg")
_rows(f"{_WIDER} INT32 INT64", "Pow ReduceSum Tile")
_rows(f"{_WIDER} INT32 INT64 UINT8", "Where")
_rows(f"{_WIDER} BOOL INT64", "GatherND")
_rows(_WIDER, "Dropout Erf Exp Gelu Gemm IsInf IsNaN LayerNormalization MatMul Relu Sigmoid Softmax Sqrt Sum Tanh")
_rows(
    _FLOATS, "ArgMax ArgMin AveragePool BatchNormalization Ceil Conv ConvTranspose Cos DeformConv DepthToSpace Einsum"
)
_rows(_FLOATS, "Elu Floor")
_rows(_FLOATS, "GRU GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish InstanceNormalization LRN LSTM LeakyRelu Log")
_rows(_FLOATS, "LogSoftmax PRelu RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Reciprocal")
_rows(_FLOATS, "ReduceLogSum ReduceLogSumExp ReduceSumSquare Round Selu Sin Softplus Softsign SpaceToDepth")
_rows(_FLOATS, "ThresholdedRelu")
_rows(f"{_FLOATS} INT32", "ReduceL1 ReduceL2 ReduceProd")
_rows(f"{_WIDER} INT32", "ReduceMean")
_rows(f"{_FLOATS} INT32 INT64 INT8 UINT8", "ReduceMax ReduceMin")
_rows(f"{_FLOATS} INT8 INT16 INT32 INT64 UINT8", "TopK")
_rows(f"{_FLOATS} INT8 UINT8", "MaxPool")
_rows(f"{_FLOATS} INT64 INT8 UINT64 UINT8", "Clip")
_rows(f"{_FLOATS} {_NUMBERS}", "CumSum Greater GreaterOrEqual Less LessOrEqual")
_rows(f"{_FLOATS} {_NUMBERS} BOOL", "Equal")
_rows(f"{_FLOATS} BOOL", "Pad")
_rows(f"{_FLOATS} INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64", "Shrink")
_rows(f"{_FLOATS} INT32 UINT8", "Resize")
_rows("DOUBLE FLOAT INT16 INT32 INT64", "Range")
_rows("DOUBLE FLOAT INT32 INT64 UINT64", "EyeLike")
_rows(_FLOATS, "RoiAlign")
_rows("FLOAT FLOAT16 INT64", "OneHot")
_rows("BOOL", "And Not Or Xor")
_rows("BOOL FLOAT FLOAT16 INT32 INT64 UINT8", "NonZero")
_rows("FLOAT", "GridSample NonMaxSuppression")
_rows("INT8", "MatMulInteger")
_rows("FLOAT FLOAT16", "LpNormalization QuantizeLinear")
_rows("INT4 INT8 UINT4 UINT8", "DequantizeLinear")

CONTRIB_KERNELS = dict.fromkeys(("FusedMatMul", "BiasGelu", "FastGelu", "Gelu"), _WIDER)

_DECIDES = {"Where": 1, "OneHot": 2}  # the input whose type is looked up, where it is not the first
_BY_RESULT = ("ConstantOfShape", "RandomNormalLike", "RandomUniformLike")

_ON_HOST = ("Shape", "Size", "SequenceLength")
_CONTROL = ("If", "Loop", "Scan")
_COUNTS = ("Compress", "NonZero", "Unique")  # the size of their result is read back from the device
MOST_ELEMENTS_ON_HOST = 100  # elements of a constant up to which it does not keep arithmetic on the device


@dataclass(frozen=True)
class Stray:
    """A node that onnxruntime would run on the CPU, or refuse."""

    name: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operator} (node '{self.name}'): {self.reason}"


def without_kernel(model: ir.Model) -> list[Stray]:
    """The nodes of a step, lowered for CUDA, that have no CUDA kernel for their types and attributes.

    Args:
        model: without calls of functions; element types known, as lowering leaves them.

    Returns:
        None of those that onnxruntime runs on the CPU by design (``on_host``).
    """
    host = set(on_host(model))
    found = []
    for node in nodes_of(model):
        reason = None if node in host else _lacks(node)
        if reason and not all(v is None or constant_of(v) is not None for v in node.inputs):
            found.append(Stray(node.name or "", node.op_type, reason))
    return found


def on_host(model: ir.Model) -> list[ir.Node]:
    """The nodes that onnxruntime runs on the CPU by design: Shape, and what reads only shapes."""
    values: set[ir.Value] = set()
    nodes = []
    for node in nodes_of(model):
        if not node.domain and (node.op_type in _ON_HOST or _follows(node, values)):
            values.update(node.outputs)
            nodes.append(node)
    return nodes


def deciding_type(schema: onnx.defs.OpSchema) -> str:
    """The type, by its name in the schema, that the tables list for an operator."""
    if schema.name in _BY_RESULT or not schema.inputs:
        return str(schema.outputs[0].type_str)
    return str(schema.inputs[_DECIDES.get(schema.name, 0)].type_str)


def obstacles_to_capture(model: ir.Model) -> list[Stray]:
    """Why a step cannot run as a CUDA graph: work for the CPU, control flow, sizes that only a run tells."""
    return [*without_kernel(model), *_read_back(model)]


def _read_back(model: ir.Model) -> Iterator[Stray]:
    for value in model.graph.inputs:
        if not is_static(value.shape):
            yield Stray(value.name or "", "input", "its size is open")
    for node in nodes_of(model):
        if node.op_type in _CONTROL:
            yield Stray(node.name or "", node.op_type, "the CPU decides what runs")
        elif node.op_type in _COUNTS:
            yield Stray(node.name or "", node.op_type, "the size of its result is read back by the CPU")


def _follows(node: ir.Node, host: set[ir.Value]) -> bool:
    """Arithmetic on what is in the memory of the host anyway."""
    read = [v for v in node.inputs if v is not None]
    return any(v in host for v in read) and all(v in host or v.is_graph_input() or _is_small_constant(v) for v in read)


def _is_small_constant(value: ir.Value) -> bool:
    known = constant_of(value)
    return known is not None and bool(known.size <= MOST_ELEMENTS_ON_HOST)


def _lacks(node: ir.Node) -> str | None:
    """Why CUDA cannot run ``node``; None if it can."""
    types = {"": KERNELS, CONTRIB: CONTRIB_KERNELS}.get(node.domain, {}).get(node.op_type)
    if types is None:
        return "there is no CUDA kernel"
    for value in _deciding(node):
        if value.dtype is None:
            return "its element type is unknown"
        if value.dtype.name not in types.split():
            return f"there is no CUDA kernel for {value.dtype.name.lower()}"
    limit = _LIMITS.get(node.op_type)
    return limit(node) if limit is not None and not node.domain else None


def _deciding(node: ir.Node) -> list[ir.Value]:
    """The values whose types choose a kernel."""
    if node.op_type in _CONTROL:
        return []  # they carry values of every type
    decides = node.inputs[_DECIDES.get(node.op_type, 0) :][:1]
    if node.op_type in _BY_RESULT or not decides:
        decides = node.outputs[:1]
    elif node.op_type == "Cast":
        decides = [*decides, node.outputs[0]]
    return [v for v in decides if v is not None]


# --- what kernels refuse ------------------------------------------------------------------------------------


def _ints(node: ir.Node, name: str) -> list[int]:
    attribute = node.attributes.get(name)
    return [] if attribute is None else [int(v) for v in attribute.as_ints()]


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else int(attribute.as_int())


def _batch_statistics(node: ir.Node) -> str | None:
    return "CUDA refuses it in training mode, so no session starts" if _int(node, "training_mode") else None


def _uneven_pads(node: ir.Node) -> str | None:
    pads = _ints(node, "pads")
    half = len(pads) // 2
    return "cuDNN pads both ends alike" if pads[:half] != pads[half:] else None


def _even_window(node: ir.Node) -> str | None:
    return "cuDNN sums over odd numbers of channels only, so no session starts" if _int(node, "size") % 2 == 0 else None


_ACTIVATIONS = {"RNN": ["tanh"], "GRU": ["sigmoid", "tanh"], "LSTM": ["sigmoid", "tanh", "tanh"]}


def _recurrent(node: ir.Node) -> str | None:
    if not _int(node, "hidden_size"):
        return "CUDA wants its hidden_size written, or no session starts"
    own = [name for name in ("activation_alpha", "activation_beta", "clip") if name in node.attributes]
    chosen = node.attributes.get("activations")
    usual = itertools.cycle(_ACTIVATIONS[node.op_type])
    if chosen is not None and any(a.lower() != b for a, b in zip(chosen.as_strings(), usual, strict=False)):
        own.append("activations")
    if own or _int(node, "layout") or _int(node, "input_forget"):
        return f"cuDNN knows the usual form only, without {', '.join(own) or 'layout and input_forget'}"
    if node.op_type == "LSTM" and len(node.inputs) > 7 and node.inputs[7] is not None:
        return "cuDNN has no peepholes"
    if node.op_type == "GRU" and not _int(node, "linear_before_reset"):
        return "cuDNN resets after the product only (linear_before_reset=1)"
    return None


def _index_of_the_last(node: ir.Node) -> str | None:
    return "CUDA finds the first of equals only" if _int(node, "select_last_index") else None


_LIMITS: dict[str, Callable[[ir.Node], str | None]] = {
    "BatchNormalization": _batch_statistics,
    "ConvTranspose": _uneven_pads,
    "LRN": _even_window,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "ArgMax": _index_of_the_last,
    "ArgMin": _index_of_the_last,
}
