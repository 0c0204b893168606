"""Models of one operator that a runtime is asked to run: the cases of rules, chosen so that every fact is seen.

Each operator is tried with the cases that show new facts (``gradgraph.backends.facts``), then with sizes left open,
one at a time and all of them (``open_sizes.py``), with literals fed or computed from constants, with all inputs but the
first constant, and with every type that its schema allows; integers of 32 and 64 bits also beyond 2^24 and 2^31, where
runtimes that compute them as float32 or int32 give other numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper, numpy_helper

import gradgraph.rules.families  # noqa: F401  (fills the table)
from gradgraph.backends.facts import Facts, facts_of
from gradgraph.backends.static_facts import derive_facts
from gradgraph.graph.schemas import Signature, signature
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.rules.registry import RULES, Case, Rule, boolean, case, integers, positive, real
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle
from tests.runtimes.open_sizes import left_open

Array = np.ndarray[Any, Any]

TYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint32", "bool", "uint8", "int8", "uint64",
         "int16", "uint16", "int4", "uint4")  # fmt: skip
FEW_TYPES = TYPES[:9]
RANDOM = {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
          "RandomUniformLike"}  # fmt: skip

_COUNTING = {"ConstantOfShape", "HannWindow", "Loop"}  # whose first input says how often, or how large
_LOGIC = (case(boolean(2, 3), boolean(3)), case(boolean(2, 3), boolean(2, 3)))
_COMPARED = (case(integers(0, 3, 2, 3), integers(0, 3, 3)), case(real(2, 3), real(2, 3)), case(real(2, 1), real(3)))
_BYTES = np.arange(3, 15, dtype=np.uint8).reshape(3, 4)
_PLAIN = (case(real(2, 3)), case(real()), case(real(0, 3)))
_BITS = (case(integers(1, 90, 2, 3), integers(1, 90, 3)),)
_BEST = (
    case(real(2, 3), axis=1),
    case(real(2, 3), axis=0, keepdims=0),
    case([[1.0, 3.0, 3.0]], axis=1),
    case([[1.0, 3.0, 3.0]], axis=-1, select_last_index=1),
)
_SCAN = (
    "y0, y1 = Scan <num_scan_inputs = 1{}, body = b (real[{n}] s, real[{n}] x) => (real[{n}] t, real[{n}] y) {{ {} }}>"
)
_ADDS, _READS = "t = Add(s, x) y = Mul(t, x)", "t = Add(s, x) y = Mul(t, x2)"


_TWO_STATES = """y0, y1, y2 = Scan <num_scan_inputs = 1,
    body = b (real[3] s, real[3] r, real[3] x) => (real[3] t, real[3] u, real[3] y) {
        t = Add(s, x) u = Mul(r, x) y = Sub(t, u) }> (x0, x1, x2)"""


def _scan(how: str = "", body: str = _ADDS, sizes: str = "3") -> str:
    """A Scan over x1 from the state x0; ``x2`` is read from outside."""
    return _SCAN.format(how, body, n=sizes) + "(x0, x1)"


_SCANS = (  # one thing after the other
    case(real(3), real(4, 3), outputs=2, graph=_scan()),
    case(real(2, 3), real(4, 2, 3), outputs=2, graph=_scan(sizes="2, 3")),
    case(real(2, 3), real(4, 2, 3), outputs=2, graph=_scan(sizes="n2, 3")),  # a batch of any size
    case(real(3), real(4, 3), outputs=2, graph=_scan(", scan_input_directions = [1]")),
    case(real(3), real(4, 3), outputs=2, graph=_scan(", scan_output_directions = [1]")),
    case(real(3), real(4, 3), outputs=2, graph=_scan(", scan_input_directions = [1], scan_output_directions = [1]")),
    case(real(3), real(3, 4), outputs=2, graph=_scan(", scan_input_axes = [1]")),
    case(real(3), real(4, 3), outputs=2, graph=_scan(", scan_output_axes = [1]")),
    case(real(3), real(4, 3), real(3), outputs=2, graph=_scan(body=_READS)),
    case(real(2, 3), real(4, 2, 3), real(2, 3), outputs=2, graph=_scan(body=_READS, sizes="2, 3")),
    case(real(3), real(3), real(4, 3), outputs=3, graph=_TWO_STATES),
    case(real(2, 3), real(4, 2, 3), outputs=2, graph=_scan(body="y = Mul(s, x) t = Sub(s, y)", sizes="2, 3")),
)
FURTHER: dict[str, Sequence[Case]] = {  # operators without rules, and rules without cases
    **dict.fromkeys(("And", "Or", "Xor"), _LOGIC),
    **dict.fromkeys(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), _COMPARED),
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor"), _BITS),
    **dict.fromkeys(("ArgMax", "ArgMin"), _BEST),
    **dict.fromkeys(("Floor", "Ceil", "Sign"), _PLAIN),
    "Identity": (case(real(2), real(2), outputs=3, graph="y0 = Add(x0, x1) y1 = Identity(x1) y2 = Identity(x1)"),
                 *_PLAIN),
    "Round": (case([0.5, 1.5, -0.5, 2.4, -2.6]),),
    "Not": (case(boolean(2, 3)),),
    "BitwiseNot": (case(integers(1, 90, 2, 3)),),
    "BitShift": (case(integers(1, 90, 4), [1, 2, 3, 4], direction="RIGHT"),
                 case(integers(1, 90, 4), [1, 2, 3, 4], direction="LEFT")),
    "IsNaN": (case([1.0, float("nan")]),),
    "IsInf": (case([1.0, float("inf"), -float("inf")]), case([1.0, -float("inf")], detect_negative=0)),
    "NonZero": (case(integers(0, 2, 2, 3)), case(boolean(2, 3))),
    "Shape": (case(real(2, 3)), case(real(2, 3, 4), start=1), case(real(2, 3, 4), start=-2, end=3), case(real())),
    "Size": (case(real(2, 3)), case(real())),
    "ConstantOfShape": (case([2, 3]), case([2, 3], value=numpy_helper.from_array(np.array([7.0], np.float32))),
                        case([2], value=numpy_helper.from_array(np.array([7], np.int64))),
                        case([2], value=numpy_helper.from_array(np.array([True])))),
    "EyeLike": (case(real(3, 3)), case(real(2, 3), k=1)),
    "Hardmax": (case(real(2, 3), axis=1),),
    "QuantizeLinear": (case(real(2, 3), 0.1, np.uint8(3)),),
    "Range": (case(0.0, 2.0, 0.5), case(0, 5, 2)),
    "RandomNormal": (case(shape=[2, 3]),),
    "RandomUniform": (case(shape=[2, 3]),),
    "RandomNormalLike": (case(real(2, 3)),),
    "RandomUniformLike": (case(real(2, 3)),),
    "Bernoulli": (case(positive(2, 3)),),
    "Scan": _SCANS,
    "Conv": (*(case(real(2, c, 7, 7), real(f, c, 3, 3)) for c, f in ((3, 4), (6, 5), (6, 4), (9, 8), (12, 8))),
             case(real(2, 4, 5, 5), real(4, 1, 3, 3), group=4)),
    "ConvTranspose": (case(real(2, 4, 5, 5), real(4, 2, 3, 3)), case(real(2, 4, 5, 5), real(4, 1, 3, 3), group=4)),
    "Squeeze": (case(real(2, 1, 3, 4), [1]), case(real(1, 3, 2), [0])),
    "Cast": (case(real(2, 3), to=6), case(integers(0, 3, 2, 3), to=1)),
    "CastLike": (case(real(2, 3), integers(0, 3, 1)), case(integers(0, 3, 2, 3), real(1)), case(1.5, real(2, 3))),
    "MatMulInteger": (case(_BYTES, _BYTES.T), case(_BYTES, _BYTES.T.astype(np.int8), np.uint8(7), np.int8(3))),
    "ConvInteger": (case(_BYTES.reshape(1, 1, 3, 4), _BYTES[:2, :2].reshape(1, 1, 2, 2)),
                    case(_BYTES.reshape(1, 1, 3, 4), _BYTES[:2].reshape(1, 1, 2, 4), np.uint8(7), pads=[1, 1, 1, 1])),
    "DynamicQuantizeLinear": (case(real(2, 3), outputs=3),),
    "SequenceLength": (case(real(2, 3), real(3), graph="s = SequenceConstruct(x0, x1) y0 = SequenceLength(s)"),),
    "OptionalHasElement": (case(real(2, 3)),),
    "CenterCropPad": (case(real(4, 5), [2, 7]), case(real(4, 5), [3], axes=[1])),
    "HannWindow": (case(8),),
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One model for a runtime.

    Attributes:
        operator: whose facts count.
        facts: of the node; with it, what must come out.
        magnitude: the numbers reach beyond that power of two; 0 for small ones.
    """

    operator: str
    facts: Facts
    model: onnx.ModelProto
    feeds: dict[str, Array]
    expected: dict[str, Array]
    label: str
    magnitude: int = 0


@dataclass(frozen=True)
class Amount:
    """How many variants of an operator are tried; runtimes that compile for long get few.

    Attributes:
        cases: with all sizes known.
        open: of those, how many with sizes left open: each in turn, and all.
        fed: how many with literals fed, and how many with literals that are computed from constants.
        constant: how many with all inputs but the first constant.
        types: that are tried.
        magnitudes: are large integers tried?
    """

    cases: int = 12
    open: int = 4
    fed: int = 3
    constant: int = 2
    types: Sequence[str] = TYPES
    magnitudes: bool = True


MANY, FEW = Amount(), Amount(4, 1, 1, 1, FEW_TYPES, False)


def trials(amount: Amount, operators: Sequence[str] = (), judge: str = "onnxruntime") -> Iterator[Trial]:
    """All models to try but for their types, operator by operator; what nobody here runs is left out.

    Args:
        judge: what says what is right: ``onnxruntime``, or ``oracle`` where onnxruntime itself is tried.
    """
    for op_type, every in _cases(operators):
        for made in _of_operator(op_type, every, amount):
            if (finished := _finished(op_type, *made, judge)) is not None:
                yield finished


def typed_trials(amount: Amount, tried: Iterable[tuple[Trial, bool]], judge: str = "onnxruntime") -> Iterator[Trial]:
    """The first model of each operator that was right with other types, best one of two inputs; any if none was.

    All others that were right are tried in other floats.
    """
    tried = list(tried)
    plain: dict[str, tuple[tuple[bool, bool], Trial]] = {}
    for trial, right in tried:
        kinds = [n.op_type for n in trial.model.graph.node]
        if trial.label.isdigit() and kinds in ([trial.operator], ["Shape", "Cast"]):
            worth = right, sum(map(bool, trial.model.graph.node[0].input)) > 1
            if trial.operator not in plain or worth > plain[trial.operator][0]:
                plain[trial.operator] = worth, trial
    for op_type, (_, trial) in plain.items():
        for made in _typed(op_type, trial.model, trial.feeds, amount):
            if (finished := _finished(op_type, *made, judge)) is not None:
                yield finished
    for trial in [t for t, right in tried if right and t.label.isdigit() and t is not plain.get(t.operator, (0, t))[1]]:
        for made in _narrowed(trial, amount):
            if (finished := _finished(trial.operator, *made, judge)) is not None:
                yield finished


def _narrowed(trial: Trial, amount: Amount) -> Iterator[Made]:
    """A model that is right in float32 in other floats: kernels may take a type only with some attributes or inputs."""
    known = signature(trial.operator, OPSET)
    node = next(n for n in trial.model.graph.node if n.op_type == trial.operator)
    assert known is not None
    variables = list(dict.fromkeys(v for i in range(len(node.input)) if (v := known.formal(i, False).variable)))
    for name in [t for t in amount.types if t in ("float16", "float64")]:
        if (made := _all_retyped(trial.model, trial.feeds, node, known, variables, name)) is not None:
            yield *made, f"{trial.label} {name}", 0


def _cases(operators: Sequence[str]) -> Iterator[tuple[str, Sequence[Case]]]:
    of = {op_type: [*rule.cases] for (domain, op_type), rule in RULES.items() if not domain}
    for op_type, more in FURTHER.items():
        of[op_type] = [*more, *of.get(op_type, ())]
    for op_type in sorted(of):
        if (operators and op_type not in operators) or signature(op_type, OPSET) is None:
            continue
        yield op_type, of[op_type]


Made = tuple[onnx.ModelProto, dict[str, Array], str, int]


def _of_operator(op_type: str, every: Sequence[Case], amount: Amount) -> Iterator[Made]:
    rule = RULES.get(("", op_type)) or Rule(op_type, lambda: (), False, (), (), "further")
    chosen = _telling(op_type, [(c, m) for c in every if (m := _made(rule, c)) is not None], amount.cases)
    for i, (_, (model, feeds)) in enumerate(chosen):
        yield model, feeds, f"{i}", 0
    for i, (c, (model, feeds)) in enumerate(chosen[: amount.open]):
        yield from _open(model, feeds, f"{i} open")
        if i == 0 and _has_literals(c) and (made := _made(rule, c, fed=True)) is not None:
            yield from _open(*made, f"{i} fed, open")
    usable = [c for c, _ in chosen if _has_literals(c)]
    for i, c in enumerate(usable[: amount.fed]):
        if (made := _made(rule, c, fed=True)) is not None:
            yield *made, f"{i} fed", 0
        if op_type not in ("Add", "Identity") and (made := _made(rule, c)) is not None:
            yield *_with_derived(*made), f"{i} derived", 0
    for i, (_, (model, feeds)) in enumerate(chosen[: amount.constant]):
        if len(feeds) > 1:
            yield *_with_constants(model, feeds), f"{i} constant", 0


def _open(model: onnx.ModelProto, feeds: dict[str, Array], label: str) -> Iterator[Made]:
    return ((opened, feeds, f"{label} {place}", 0) for opened, place in left_open(model, feeds))


def _has_literals(c: Case) -> bool:
    return not c.constant_literals and any(x is not None and not hasattr(x, "kind") for x in c.inputs)


def _made(rule: Rule, c: Case, fed: bool = False) -> tuple[onnx.ModelProto, dict[str, Array]] | None:
    if c.onnxruntime or (fed and c.constant_literals):
        return None
    with contextlib.suppress(Exception):  # the oracle does not run it, or the case is no model
        made = cases.trial(rule, c, dtype=np.float32, fed=fed)
        return made.model, made.feeds
    return None


def _telling(op_type: str, every: Sequence[tuple[Case, Any]], most: int) -> list[tuple[Case, Any]]:
    """Those that show a fact which fewer than two before them have shown."""
    seen: dict[str, int] = {}
    chosen = []
    for c, made in every:
        facts = facts_in(made[0], op_type)
        if facts and any(seen.get(f, 0) < 2 for f in facts) and len(chosen) < most:
            chosen.append((c, made))
            for f in facts:
                seen[f] = seen.get(f, 0) + 1
    return chosen


def facts_in(model: onnx.ModelProto, op_type: str) -> Facts:
    """The facts of the node of that operator in ``model``."""
    work = ir.from_proto(model)
    derive_facts(work)
    return next((facts_of(n) for n in nodes_of(work) if n.op_type == op_type), frozenset())


def _with_constants(model: onnx.ModelProto, feeds: dict[str, Array]) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """All inputs but the first become initializers."""
    model = _copy(model)
    first, *rest = list(feeds)
    kept = [x for x in model.graph.input if x.name == first]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(feeds[name], name) for name in rest)
    return model, {first: feeds[first]}


def _with_derived(model: onnx.ModelProto, feeds: dict[str, Array]) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """All initializers become the result of a node that reads initializers."""
    model = _copy(model)
    nodes = []
    for tensor in list(model.graph.initializer):
        name, tensor.name = tensor.name, f"{tensor.name}.before"
        none = numpy_helper.from_array(np.zeros((), numpy_helper.to_array(tensor).dtype), f"{name}.none")
        if none.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64):
            model.graph.initializer.append(none)
            nodes.append(helper.make_node("Add", [tensor.name, none.name], [name]))
        else:
            nodes.append(helper.make_node("Identity", [tensor.name], [name]))
    nodes += model.graph.node
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model, feeds


# --- types ----------------------------------------------------------------------------------------------------


def _typed(op_type: str, model: onnx.ModelProto, feeds: dict[str, Array], amount: Amount) -> Iterator[Made]:
    known = signature(op_type, OPSET)
    assert known is not None
    node = next(n for n in model.graph.node if n.op_type == op_type)
    variables = list(dict.fromkeys(v for i in range(len(node.input)) if (v := known.formal(i, False).variable)))
    if len(variables) > 1:  # those of one type, together
        for name in amount.types:
            if (made := _all_retyped(model, feeds, node, known, variables, name)) is not None:
                yield *made, f"all {name}", 0
    for variable in variables:
        allowed = next(known.formal(i, False).allowed for i in range(len(node.input))
                       if known.formal(i, False).variable == variable)  # fmt: skip
        for name in amount.types:
            if f"tensor({_in_schemas(name)})" not in allowed:
                continue
            data = variable == variables[0] and op_type not in _COUNTING  # others are positions, sizes and lengths
            for magnitude in _magnitudes(name) if amount.magnitudes and data else (0,):
                if (made := _retyped(model, feeds, node, known, variable, name, magnitude)) is not None:
                    yield *made, f"{variable} {name}{f' 2^{magnitude}' if magnitude else ''}", magnitude
    if op_type == "Cast":
        for name in amount.types:
            if (made := _cast_to(model, feeds, name)) is not None:
                yield *made, f"to {name}", 0


def _all_retyped(
    model: onnx.ModelProto, feeds: dict[str, Array], node: onnx.NodeProto, known: Signature, variables: Sequence[str],
    name: str,
) -> tuple[onnx.ModelProto, dict[str, Array]] | None:  # fmt: skip
    """The model with all type variables that are float32 of another type; None if that is none."""
    changed = None
    for variable in variables:
        places = [i for i, n in enumerate(node.input) if n and known.formal(i, False).variable == variable]
        of = next((feeds[node.input[i]] for i in places if node.input[i] in feeds), None)
        if (
            of is None
            or of.dtype != np.float32
            or f"tensor({_in_schemas(name)})" not in known.formal(places[0], False).allowed
        ):
            continue
        changed = _retyped(*(changed or (model, feeds)), node, known, variable, name, 0) or changed
    return changed


def _in_schemas(name: str) -> str:
    return {"float32": "float", "float64": "double"}.get(name, name)


def _magnitudes(name: str) -> tuple[int, ...]:
    return {"int32": (0, 24), "uint32": (0, 24, 31), "int64": (0, 24, 31), "uint64": (0, 31)}.get(name, (0,))


def _retyped(
    model: onnx.ModelProto, feeds: dict[str, Array], node: onnx.NodeProto, known: Signature, variable: str, name: str,
    magnitude: int,
) -> tuple[onnx.ModelProto, dict[str, Array]] | None:  # fmt: skip
    """The model with all inputs of one type variable of another type; None if they are of it already."""
    model, feeds = _copy(model), dict(feeds)
    dtype = _dtype(name)
    names = [n for i, n in enumerate(node.input) if n and known.formal(i, False).variable == variable]
    rng = np.random.default_rng(len(names))
    same = True
    for n in dict.fromkeys(names):
        tensor = next((t for t in model.graph.initializer if t.name == n), None)
        old = feeds[n] if n in feeds else None if tensor is None else numpy_helper.to_array(tensor)
        if old is None:
            return None
        counts = node.op_type == "BitShift" and n == node.input[1]  # positions to shift by
        new = _numbers(rng, old, dtype, 0 if counts else magnitude)
        same &= new.dtype == old.dtype and not magnitude
        if n in feeds:
            feeds[n] = new
            info = next(x for x in model.graph.input if x.name == n)
            info.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(new.dtype)
        elif tensor is not None:
            tensor.CopyFrom(numpy_helper.from_array(new, n))
    if same:
        return None
    for y in model.graph.output:
        y.ClearField("type")
    return model, feeds


def _numbers(rng: np.random.Generator, old: Array, dtype: np.dtype[Any], magnitude: int) -> Array:
    if dtype.kind == "b":
        return rng.integers(0, 2, old.shape).astype(bool)
    if dtype.kind in "iu" and magnitude:
        return (rng.integers(1, 2**magnitude // 2, old.shape) * 2 + 2**magnitude + 1).astype(dtype)
    if dtype.kind in "iu" and old.dtype.kind == "f":
        return rng.integers(1, 5, old.shape).astype(dtype)
    return old.astype(dtype)


def _cast_to(model: onnx.ModelProto, feeds: dict[str, Array], name: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
    model = _copy(model)
    del model.graph.node[0].attribute[:]
    to = helper.np_dtype_to_tensor_dtype(_dtype(name))
    model.graph.node[0].attribute.append(helper.make_attribute("to", to))
    for y in model.graph.output:
        y.ClearField("type")
    return model, {k: np.abs(v) * 3 for k, v in feeds.items()}


@functools.cache
def _dtype(name: str) -> np.dtype[Any]:
    return helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, {"float32": "FLOAT", "float64": "DOUBLE"}.get(
        name, name.upper())))  # fmt: skip


# --- what must come out -----------------------------------------------------------------------------------------


def _finished(
    op_type: str, model: onnx.ModelProto, feeds: dict[str, Array], label: str, magnitude: int, judge: str
) -> Trial | None:
    """With what must come out, and outputs declared; None if nobody knows."""
    model = _copy(model)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", OPSET))
    model.ir_version = IR_VERSION
    open_ = any(d.dim_param for x in model.graph.input for d in x.type.tensor_type.shape.dim)
    if [n.op_type for n in model.graph.node] == ["Shape"]:  # some runtimes have shapes that are no tensors
        _then_cast(model)
    if not _declared(model):
        return None
    feeds = _through_casts(model, feeds)
    expected = _judged(model, feeds, judge)
    if expected is None or any(not isinstance(v, np.ndarray) for v in expected.values()):
        return None
    if not open_:
        for y in model.graph.output:
            y.CopyFrom(_described(y.name, expected[y.name]))
    facts = facts_in(model, op_type)
    return Trial(op_type, facts, model, feeds, expected, label, magnitude) if facts else None


def _declared(model: onnx.ModelProto) -> bool:
    """Give outputs their types, in place."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    except Exception:
        return False
    for y, known in zip(model.graph.output, inferred.graph.output, strict=True):
        y.CopyFrom(known)
    return all(y.type.tensor_type.elem_type for y in model.graph.output)


def _through_casts(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    """Inputs and outputs that are bfloat16, which NumPy has not, become float32, in place."""
    feeds = dict(feeds)
    nodes = list(model.graph.node)
    low, float_ = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    for x in model.graph.input:
        if x.type.tensor_type.elem_type == low:
            feeds[x.name] = feeds[x.name].astype(np.float32)
            nodes.insert(0, helper.make_node("Cast", [x.name], [f"{x.name}.low"], to=low))
            for node in nodes[1:]:
                for i, name in enumerate(node.input):
                    if name == x.name:
                        node.input[i] = f"{x.name}.low"
            x.type.tensor_type.elem_type = float_
    for y in model.graph.output:
        if y.type.tensor_type.elem_type == low:
            for node in nodes:
                for i, name in enumerate(node.output):
                    if name == y.name:
                        node.output[i] = f"{y.name}.low"
            nodes.append(helper.make_node("Cast", [f"{y.name}.low"], [y.name], to=float_))
            y.type.tensor_type.elem_type = float_
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return feeds


def _then_cast(model: onnx.ModelProto) -> None:
    (node,) = model.graph.node
    name, node.output[0] = node.output[0], "computed"
    model.graph.node.append(helper.make_node("Cast", ["computed"], [name], to=onnx.TensorProto.INT32))
    model.graph.output[0].ClearField("type")


def _described(name: str, value: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def _judged(model: onnx.ModelProto, feeds: dict[str, Array], judge: str) -> dict[str, Array] | None:
    ways = (_by_oracle, _by_onnxruntime) if judge == "oracle" else (_by_onnxruntime, _by_oracle)
    for way in ways:
        with contextlib.suppress(Exception):
            return way(model, feeds)
    return None


def _by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def _by_oracle(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    return Oracle(model)(feeds)


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
