"""Check that nodes match their operators' schemas and the assumptions of ONNX shape inference.

ONNX shape inference and onnxruntime, in C++, crash or never return on some malformed nodes. Nodes are therefore checked
when a model is opened (``gradgraph.graph.checks.validate``). Operators of custom domains have no schema and are not
checked.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import onnx_ir as ir

from gradgraph.errors import Finding, counted, shown, suggestion
from gradgraph.graph.schemas import Signature, known_since, signature

_AGAIN = "export the model again"
_TYPES = frozenset(int(kind) for kind in ir.DataType if kind != ir.DataType.UNDEFINED)


class Call(NamedTuple):
    """The form of a node: operator and arity without names and values, so that equal forms are checked only once."""

    op_type: str
    opset: int
    inputs: tuple[bool, ...]  # False for an omitted one
    outputs: int
    attributes: tuple[tuple[str, int], ...]  # names and types; type 0: a reference to a function attribute


class Body(NamedTuple):
    """The number of inputs and outputs of a subgraph in an attribute."""

    inputs: int
    outputs: int


class _Fault(NamedTuple):
    """A finding without the node's name; ``attribute`` is the name of the attribute that it concerns, if any."""

    what: str
    expected: str = ""
    remedy: str = _AGAIN
    attribute: str = ""


def described(name: str | None, domain: str, op_type: str, outputs: Iterable[str | None]) -> str:
    """Return ``node '/head/Gemm' (Gemm)``, or ``the node that computes 'y' (Gemm)`` for an unnamed node."""
    given = next((o for o in outputs if o), None)
    subject = f"node '{shown(name or '')}'" if name or given is None else f"the node that computes '{shown(given)}'"
    return f"{subject} ({shown(domain + '.' if domain else '')}{shown(op_type)})"


def form_findings(node: ir.Node, opset: int, subject: Callable[[], str]) -> Iterator[Finding]:
    """Yield findings about the form of ``node``; ``subject`` returns its description for messages."""
    given = tuple([(name, 0 if a.is_ref() else int(a.type)) for name, a in node.attributes.data.items()])
    call = Call(node.op_type, opset, tuple([v is not None for v in node.inputs]), len(node.outputs), given)
    faults = _faults(call)
    if not faults and call.op_type in _JUDGED:
        faults = (*_JUDGED[call.op_type](call, _values(node)),)
    elif not faults and not _WATCHED.isdisjoint(name for name, _ in call.attributes):
        known = signature(call.op_type, call.opset) is not None  # other operators may have any attributes
        faults = (*_watched(call, _values(node)),) if known else ()
    for fault in faults:
        named = f"the attribute '{shown(fault.attribute)}' of {subject()}" if fault.attribute else subject()
        yield Finding(named, fault.what, fault.expected, fault.remedy)


def _values(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of ``node`` by name, with a Body for each graph."""
    return {name: _value(a) for name, a in node.attributes.items() if not a.is_ref()}


def _value(attr: ir.Attr) -> Any:
    if attr.type == ir.AttributeType.GRAPH:
        graph = attr.as_graph()
        return Body(sum(not v.is_initializer() for v in graph.inputs), len(graph.outputs))
    return attr.value


# --- checks by schema ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _faults(call: Call) -> tuple[_Fault, ...]:
    schema = signature(call.op_type, call.opset)
    if schema is None:
        return (*_lacking(call),)
    return (*_arity(call, schema), *_attributes(call, schema))


# onnxruntime accepts them at any opset: its optimiser writes the first; the second was experimental before opset 10
_OF_ANY_OPSET = frozenset({"LayerNormalization", "ThresholdedRelu"})
_WITHOUT_MEANING = "consumed_inputs"  # BatchNormalization requires it at opset 1


def _lacking(call: Call) -> Iterator[_Fault]:
    """Yield a fault if ONNX introduced the operator after the opset of ``call``; unknown operators are accepted."""
    since = known_since().get(call.op_type)
    if since is not None and since > call.opset and call.op_type not in _OF_ANY_OPSET:
        yield _Fault(f"calls an operator that opset {call.opset} does not have", f"ONNX has it since opset {since}")


def _arity(call: Call, schema: Signature) -> Iterator[_Fault]:
    count, least, most = len(call.inputs), schema.least, schema.most
    if not least <= count <= most:
        takes = _range(least, most)
        yield _Fault(f"has {counted(count, 'input')}", f"at opset {call.opset} this operator takes {takes}")
    elif lacking := [f for i, given in enumerate(call.inputs) if not given and (f := schema.formal(i, False)).required]:
        yield _Fault(f"lacks the input '{lacking[0].name}', which this operator requires")
    if not call.outputs <= schema.most_outputs:
        has = _range(schema.least_outputs, schema.most_outputs)
        yield _Fault(f"has {counted(call.outputs, 'output')}", f"at opset {call.opset} this operator has {has}")


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"at least {least}" if most > 10**6 else f"{least} to {most}"


def _attributes(call: Call, schema: Signature) -> Iterator[_Fault]:
    for name, kind in call.attributes:
        expected = schema.attributes.get(name)
        if expected is None and not name.startswith("__"):
            words = f"has the attribute '{shown(name)}', which this operator does not have at opset {call.opset}"
            yield _Fault(words, "", f"remove it{suggestion(name, schema.attributes)}")
        if expected is not None and kind and kind != expected[0]:
            words = f"is {_attribute(ir.AttributeType(kind))}"
            yield _Fault(words, f"must be {_attribute(expected[0])}", attribute=name)
    if call.op_type == "Constant" and len(call.attributes) != 1:
        yield _Fault(f"has {counted(len(call.attributes), 'attribute')}", "a Constant must have exactly one")
    given = {name for name, _ in call.attributes}
    for name, (_, required) in schema.attributes.items():
        if required and name not in given and name != _WITHOUT_MEANING:
            yield _Fault(f"lacks the attribute '{name}', which this operator requires", "", "add it")


def _attribute(kind: ir.AttributeType) -> str:
    name = kind.name.lower()
    return f"a list of {name}" if name.endswith("s") else f"{'an' if name == 'int' else 'a'} {name}"


# --- attribute values that ONNX shape inference and our passes rely on --------------------------------------

_Judge = Callable[[Call, Mapping[str, Any]], Iterable[_Fault]]
_HEADS = ("num_heads", "q_num_heads", "kv_num_heads")
_WINDOWS = ("kernel_shape", "strides", "dilations", "pooled_shape")
_COUNTS = ("blocksize", "group", "hidden_size", "num_groups", "offset_group", "output_height", "output_width")
_RECURRENT = "forward reverse bidirectional"
_SCATTERED = "none add mul max min"
_AVERAGED = "none sum mean"
CHOICES = {  # by operator and attribute, or by attribute for all operators
    "auto_pad": " NOTSET SAME_UPPER SAME_LOWER VALID",
    "approximate": "none tanh",
    "keep_aspect_ratio_policy": "stretch not_larger not_smaller",
    "nearest_mode": "round_prefer_floor round_prefer_ceil floor ceil",
    "padding_mode": "zeros border reflection",
    "BitShift.direction": "LEFT RIGHT",
    "DepthToSpace.mode": "DCR CRD",
    "GRU.direction": _RECURRENT,
    "GridSample.mode": "linear bilinear nearest cubic bicubic",
    "LSTM.direction": _RECURRENT,
    "NegativeLogLikelihoodLoss.reduction": _AVERAGED,
    "Pad.mode": "constant reflect edge wrap",
    "RNN.direction": _RECURRENT,
    "Resize.coordinate_transformation_mode": (
        "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric tf_half_pixel_for_nn "
        "tf_crop_and_resize"
    ),
    "Resize.mode": "nearest linear cubic",
    "RoiAlign.coordinate_transformation_mode": "half_pixel output_half_pixel",
    "RoiAlign.mode": "avg max",
    "ScatterElements.reduction": _SCATTERED,
    "ScatterND.reduction": _SCATTERED,
    "SoftmaxCrossEntropyLoss.reduction": _AVERAGED,
}
_CHOSEN = frozenset(key.rpartition(".")[2] for key in CHOICES)
_WATCHED = frozenset(
    {"axis", "perm", "sampling_ratio", "to", "softmax_precision", *_CHOSEN, *_COUNTS, *_HEADS, *_WINDOWS}
)
_MOST_AXES = 1024  # far beyond any runtime's limit; ONNX shape inference counts some in 32 bits
WIDEST = 2**22  # elements of an axis covered by one window; gradients of pools number them


def _watched(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    for name in ("to", "softmax_precision"):
        if isinstance(kind := values.get(name), int) and kind not in _TYPES:  # the type's name before opset 6
            yield _Fault(f"is element type {kind}, which ONNX does not define", "", "correct it", name)
    if not -_MOST_AXES <= (axis := values.get("axis", 0)) < _MOST_AXES:
        yield _Fault(f"is {axis}", "no tensor has as many axes", attribute="axis")
    if sorted(perm := values.get("perm", ())) != [*range(len(perm))]:
        expected = f"must contain each axis from 0 to {len(perm) - 1} once"
        yield _Fault(f"is {shown(list(perm))}", expected, attribute="perm")
    yield from _counts(values)
    for name in _CHOSEN & values.keys():
        among = CHOICES.get(f"{call.op_type}.{name}", CHOICES.get(name))
        if among is not None and (chosen := _decoded(values[name])) not in among.split(" "):
            yield _Fault(f"is '{shown(chosen)}'", f"must be one of {', '.join(among.split())}", "correct it", name)
    for name in _HEADS:
        if (count := values.get(name)) is not None and count < 0:
            yield _Fault(f"is {count}", "", "give it a positive number", name)


def _counts(values: Mapping[str, Any]) -> Iterator[_Fault]:
    for name in _WINDOWS:
        if wrong := [size for size in values.get(name, ()) if not 0 < size <= WIDEST]:
            yield _Fault(f"contains {wrong[0]}", f"must contain numbers from 1 to {WIDEST:,}", attribute=name)
    for name, least in (*((name, 1) for name in _COUNTS), ("sampling_ratio", 0)):
        if not least <= (count := values.get(name, least)) <= WIDEST:
            yield _Fault(f"is {count}", f"must be a number from {least} to {WIDEST:,}", attribute=name)


def _decoded(text: str | bytes) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _split(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    """Yield a fault if num_outputs is not the number of outputs: ONNX shape inference would write out of bounds."""
    parts = values.get("num_outputs")
    if parts is not None and parts != call.outputs:
        yield _Fault(f"has {counted(call.outputs, 'output')}", f"its attribute num_outputs is {parts}")


def _einsum(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    """Yield a fault for a malformed equation, or one whose number of terms differs from the number of inputs."""
    text = _decoded(values["equation"])
    terms = text.partition("->")[0]
    if not re.fullmatch(r"[A-Za-z.,\s]*(->[A-Za-z.\s]*)?", text):
        yield _Fault(f"is '{shown(text)}'", "may contain only letters, '...', ',' and '->'", "correct it", "equation")
    elif terms.count(",") + 1 != len(call.inputs):
        expected = f"its equation '{shown(text)}' has {counted(terms.count(',') + 1, 'term')}"
        yield _Fault(f"has {counted(len(call.inputs), 'input')}", expected)


def _gather_nd(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    """Yield a fault if batch_dims is negative: ONNX shape inference would read out of bounds."""
    if (axes := values.get("batch_dims", 0)) < 0:
        yield _Fault(f"is {axes}", "must be 0 or more", attribute="batch_dims")


def _if(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    then, other = (values.get(name, Body(0, call.outputs)) for name in ("then_branch", "else_branch"))
    if not call.outputs <= then.outputs == other.outputs:
        yield _Fault(
            f"has {counted(call.outputs, 'output')}, but its then_branch has {then.outputs} and its else_branch "
            f"{other.outputs}"
        )


def _loop(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    body: Body = values["body"]
    states = len(call.inputs) - 2
    if body.inputs != 2 + states:
        own = _besides(body.inputs, 2, "input", "iteration number and condition")
        yield _Fault(f"has {counted(states, 'state')}", f"its body has {own}")
    elif not max(states, call.outputs) <= body.outputs - 1:
        yield _Fault(
            f"has {counted(states, 'state')} and {counted(call.outputs, 'output')}",
            f"its body has {_besides(body.outputs, 1, 'output', 'the condition')}",
        )


def _besides(count: int, fixed: int, what: str, others: str) -> str:
    return f"{counted(count - fixed, what)} besides {others}" if count >= fixed else f"{counted(count, what)} in all"


def _scan(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    body: Body = values["body"]
    scanned = values["num_scan_inputs"]
    inputs = len(call.inputs) - (call.opset < 9)  # before opset 9, the first input was the lengths of the sequences
    if not 0 < scanned <= inputs:
        yield _Fault(f"is {scanned}", f"the node has {counted(inputs, 'input')}", attribute="num_scan_inputs")
    elif body.inputs != inputs:
        yield _Fault(f"has {counted(inputs, 'input')}", f"its body has {body.inputs}")
    elif not max(call.outputs, inputs - scanned) <= body.outputs:
        yield _Fault(
            f"has {counted(call.outputs, 'output')} and {counted(inputs - scanned, 'state')}",
            f"its body has {counted(body.outputs, 'output')}",
        )


def _sequence_map(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    body: Body = values["body"]
    if body.inputs != len(call.inputs) or body.outputs < call.outputs:
        yield _Fault(
            f"has {counted(len(call.inputs), 'input')} and {counted(call.outputs, 'output')}",
            f"its body has {counted(body.inputs, 'input')} and {counted(body.outputs, 'output')}",
        )


def _celu(call: Call, values: Mapping[str, Any]) -> Iterator[_Fault]:
    if values.get("alpha") == 0:
        yield _Fault("is 0", "the operator divides by it", attribute="alpha")


_JUDGED: dict[str, _Judge] = {
    "Celu": _celu,
    "Einsum": _einsum,
    "GatherND": _gather_nd,
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
    "Split": _split,
}
