"""Check: does every node get what its operator takes? Said here, in one sentence, instead of by a runtime later.

Only what no runtime would accept is refused: what ONNX's schema of that very opset version forbids, of types that are
known, and sizes that are numbers (``sizes.py``). Tensors of unknown type, dimensions with a name, operators of other
domains, and the bodies of If, Loop and Scan as far as sizes go, pass. No weight is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from gradgraph.checks import describe
from gradgraph.errors import ModelError, shown, suggestion
from gradgraph.normal.edit import nodes_of
from gradgraph.normal.infer import derived_shapes
from gradgraph.normal.sizes import complaint, has_rule
from gradgraph.shapes import OPSET, Shape, as_dims

_SINGLE = onnx.defs.OpSchema.FormalParameterOption.Single
_VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
_WRAPPERS: dict[type, tuple[str, ...]] = {
    ir.SequenceType: ("seq", "a sequence of"),
    ir.OptionalType: ("optional", "an optional"),
}
_TYPES = frozenset(int(kind) for kind in ir.DataType if kind != ir.DataType.UNDEFINED)
_NAMES_A_TYPE = frozenset({"to", "softmax_precision"})
_COUNTS_HEADS = frozenset({"num_heads", "q_num_heads", "kv_num_heads"})
_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}


def check_forms(model: ir.Model) -> None:
    """Raise ModelError unless the nodes of ``model`` look like calls of their operators, whatever they read.

    As many inputs as the operator has, the required ones among them; attributes that it has, of the right type, and all
    that it requires; an initializer of the type that its graph input declares.
    """
    _check_defaults(model.graph)
    fine: set[tuple[object, ...]] = set()
    for node, opset in _standard_nodes(model):
        attributes = node.attributes
        absent = tuple([value is None for value in node.inputs])
        given = tuple([(name, attr.type) for name, attr in attributes.items()]) if attributes else ()
        form = (node.op_type, opset, len(node.outputs), absent, given)
        if form not in fine:  # most nodes look like one before
            if (signature := _signature(node.op_type, opset)) is not None:
                _check_arity(node, signature, opset)
                _check_attributes(node, signature, opset)
            fine.add(form)
        if attributes:
            _check_values(node)


def check_consistent(model: ir.Model) -> None:
    """Raise ModelError unless the nodes of ``model``, whose types and shapes have been inferred, can be computed.

    1. element types that the operator takes, and one type where its inputs and outputs must agree;
    2. outputs of both branches of an If of one type; a Cast that gives what is declared;
    3. sizes that fit (``sizes.py``), in the main graph.
    """
    fine: set[tuple[object, ...]] = set()
    for node, opset in _standard_nodes(model):
        reads, writes = [None if v is None else v.type for v in node.inputs], [v.type for v in node.outputs]
        types = (node.op_type, opset, *map(_kind, reads), "->", *map(_kind, writes))
        if types not in fine:
            if (signature := _signature(node.op_type, opset)) is not None:
                _check_types(node, signature)
            fine.add(types)
        if node.op_type == "If":
            _check_branches(node)
        elif node.op_type == "Cast":
            _check_cast(node)
    _check_sizes(model)


def _standard_nodes(model: ir.Model) -> Iterator[tuple[ir.Node, int]]:
    """Nodes of ONNX's own operators, with the opset that each is of."""
    opset = model.opset_imports.get("", OPSET)
    return ((node, node.version or opset) for node in nodes_of(model) if node.domain == "")


def _kind(kind: ir.TypeProtocol | None) -> object:
    """What tells it from others, and costs little."""
    return kind.dtype if isinstance(kind, ir.TensorType) else kind and _text(kind)


# --- what schemas say -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Formal:
    """A formal input or output: the type variable, if it has one, and the types that are allowed."""

    name: str
    required: bool
    variable: str | None
    allowed: frozenset[str]


@dataclass(frozen=True)
class _Signature:
    inputs: tuple[_Formal, ...]
    outputs: tuple[_Formal, ...]
    least: int
    most: int
    most_outputs: int
    attributes: dict[str, tuple[ir.AttributeType, bool]]  # its type, and whether it is required

    def formal(self, i: int, of_output: bool) -> _Formal:
        formals = self.outputs if of_output else self.inputs
        return formals[min(i, len(formals) - 1)]


@functools.cache
def _signature(op_type: str, opset: int) -> _Signature | None:
    """None if there is no such operator, or none any more."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    if schema.deprecated:
        return None
    types = {c.type_param_str: _widened(c.allowed_type_strs) for c in schema.type_constraints}

    def formal(given: onnx.defs.OpSchema.FormalParameter) -> _Formal:
        alike = given.type_str in types and (given.option != _VARIADIC or given.is_homogeneous)
        return _Formal(
            given.name,
            given.option == _SINGLE,
            given.type_str if alike else None,
            types.get(given.type_str) or _widened([given.type_str]),
        )

    return _Signature(
        tuple(map(formal, schema.inputs)),
        tuple(map(formal, schema.outputs)),
        schema.min_input,
        schema.max_input,
        schema.max_output,
        {name: (ir.AttributeType(a.type.value), a.required) for name, a in schema.attributes.items()},
    )


def _widened(allowed: Iterable[str]) -> frozenset[str]:
    """With float64 wherever float32 is: models are written in it for evaluators that are not bound to kernels."""
    return frozenset(allowed) | {text.replace("(float)", "(double)") for text in allowed}


def _text(kind: ir.TypeProtocol) -> str:
    """``kind`` as schemas write it: ``seq(tensor(float))``."""
    if isinstance(kind, ir.TensorType):
        return f"tensor({kind.dtype.name.lower()})"
    wrapper = _WRAPPERS.get(type(kind), ("sparse_tensor",))[0]
    return f"{wrapper}({_text(_element(kind))})"


def _words(kind: ir.TypeProtocol) -> str:
    if isinstance(kind, ir.TensorType):
        return _NAMES.get(kind.dtype.name, kind.dtype.name.lower())
    wrapper = _WRAPPERS.get(type(kind), ("a sparse",))[-1]
    return f"{wrapper} {_words(_element(kind))}"


def _element(kind: ir.TypeProtocol) -> ir.TypeProtocol:
    held = kind.elem_type
    return held if not isinstance(held, ir.DataType) else ir.TensorType(held)


def _listed(allowed: Iterable[str]) -> str:
    short = {text.removeprefix("tensor(").removesuffix(")") for text in allowed}
    return ", ".join(sorted(_NAMES.get(text.upper(), text) for text in short))


# --- one node ---------------------------------------------------------------------------------------------


def _check_arity(node: ir.Node, signature: _Signature, opset: int) -> None:
    count = len(node.inputs)
    least, most = signature.least, signature.most
    if not least <= count <= most:
        takes = f"{least}" if least == most else f"at least {least}" if most > 10**6 else f"{least} to {most}"
        raise ModelError(
            f"{describe(node)} has {count} inputs, and at opset {opset} this operator takes {takes}; "
            "export the model again"
        )
    if len(node.outputs) > signature.most_outputs:
        raise ModelError(
            f"{describe(node)} has {len(node.outputs)} outputs, and at opset {opset} this operator has "
            f"{signature.most_outputs}; export the model again"
        )
    for i, value in enumerate(node.inputs):
        formal = signature.formal(i, False)
        if value is None and formal.required:
            raise ModelError(
                f"{describe(node)} lacks its input {formal.name}, which this operator needs; export the model again"
            )


def _check_attributes(node: ir.Node, signature: _Signature, opset: int) -> None:
    for name, attr in node.attributes.items():
        expected = signature.attributes.get(name)
        if expected is None and not name.startswith("__"):
            raise ModelError(
                f"{describe(node)} has the attribute '{shown(name)}', which this operator does not have at opset "
                f"{opset}{suggestion(name, signature.attributes)}"
            )
        if expected is not None and attr.type != expected[0]:
            raise ModelError(
                f"the attribute '{name}' of {describe(node)} is {_attribute(attr.type)}, and must be "
                f"{_attribute(expected[0])}; export the model again"
            )
    if node.op_type == "Constant" and len(node.attributes) != 1:
        raise ModelError(f"{describe(node)} has {len(node.attributes)} attributes, and takes its value from one")
    for name, (_, required) in signature.attributes.items():
        if required and name not in node.attributes:
            raise ModelError(f"{describe(node)} lacks the attribute '{name}', which this operator needs; give it one")


def _attribute(kind: ir.AttributeType) -> str:
    name = kind.name.lower()
    return f"a list of {name}" if name.endswith("s") else f"{'an' if name == 'int' else 'a'} {name}"


def _check_values(node: ir.Node) -> None:
    """Of attributes by which passes count or choose before anything is inferred."""
    for name in _NAMES_A_TYPE.intersection(node.attributes):
        if (kind := node.attributes[name].as_int()) not in _TYPES:
            raise ModelError(
                f"the attribute '{name}' of {describe(node)} is element type {kind}, which ONNX does not define; "
                "correct it"
            )
    for name in _COUNTS_HEADS.intersection(node.attributes):
        if (count := node.attributes[name].as_int()) < 0:
            raise ModelError(f"the attribute '{name}' of {describe(node)} is {count}; give it a positive number")


def _check_types(node: ir.Node, signature: _Signature) -> None:
    bound: dict[str, tuple[ir.Value, ir.TypeProtocol]] = {}
    latest = _signature(node.op_type, onnx.defs.onnx_opset_version()) or signature
    for i, of_output, value in _ends(node):
        if value.type is None:
            continue
        formal = signature.formal(i, of_output)
        if _text(value.type) not in formal.allowed | latest.formal(i, of_output).allowed:
            _refuse_type(node, value, value.type, formal, of_output)
        if formal.variable is not None:
            first, kind = bound.setdefault(formal.variable, (value, value.type))
            if _kind(kind) != _kind(value.type):
                _refuse_mixture(node, first, kind, value, value.type, of_output)


def _ends(node: ir.Node) -> Iterator[tuple[int, bool, ir.Value]]:
    yield from ((i, False, value) for i, value in enumerate(node.inputs) if value is not None)
    yield from ((i, True, value) for i, value in enumerate(node.outputs))


def _refuse_type(node: ir.Node, value: ir.Value, kind: ir.TypeProtocol, formal: _Formal, of_output: bool) -> None:
    does, remedy = ("gives", "correct its declared type") if of_output else ("reads", "put a Cast before it")
    raise ModelError(
        f"{describe(node)} {does} '{shown(value.name)}' of type {_words(kind)} as its {formal.name}, which must be one "
        f"of {_listed(formal.allowed)}; {remedy}"
    )


def _refuse_mixture(
    node: ir.Node, first: ir.Value, kind: ir.TypeProtocol, value: ir.Value, other: ir.TypeProtocol, of_output: bool
) -> None:
    if of_output:
        raise ModelError(
            f"{describe(node)} gives '{shown(value.name)}', declared as {_words(other)}, from '{shown(first.name)}' of "
            f"type {_words(kind)}, and both must have one type; correct what is declared, or put a Cast between them"
        )
    raise ModelError(
        f"{describe(node)} reads '{shown(first.name)}' of type {_words(kind)} and '{shown(value.name)}' of type "
        f"{_words(other)}, which must have one type; put a Cast before one of them"
    )


def _check_cast(node: ir.Node) -> None:
    to, kind = ir.TensorType(ir.DataType(node.attributes["to"].as_int())), node.outputs[0].type
    if kind is not None and _kind(kind) != _kind(to):
        raise ModelError(
            f"{describe(node)} casts to {_words(to)}, and its output '{shown(node.outputs[0].name)}' is declared as "
            f"{_words(kind)}; correct either"
        )


def _check_branches(node: ir.Node) -> None:
    then, other = (node.attributes[name].as_graph().outputs for name in ("then_branch", "else_branch"))
    if not len(node.outputs) <= len(then) == len(other):  # outputs that nobody reads may have gone
        raise ModelError(
            f"{describe(node)} has {len(node.outputs)} outputs, its then_branch {len(then)} and its else_branch "
            f"{len(other)}; these must be equal; export the model again"
        )
    for a, b in zip(then, other, strict=True):
        if a.type is not None and b.type is not None and _kind(a.type) != _kind(b.type):
            raise ModelError(
                f"{describe(node)} gives '{shown(a.name)}' of type {_words(a.type)} in one branch and "
                f"'{shown(b.name)}' of type {_words(b.type)} in the other; put a Cast at the end of one of them"
            )


def _check_defaults(graph: ir.Graph) -> None:
    for value in graph.inputs:
        name, tensor = value.name, value.const_value
        if isinstance(value.type, ir.TensorType) and tensor is not None and tensor.dtype != value.dtype:
            raise ModelError(
                f"initializer '{shown(name)}' holds {_words(ir.TensorType(tensor.dtype))}, and is declared as "
                f"{_words(value.type)}; correct what is declared, or convert its data"
            )


# --- sizes ------------------------------------------------------------------------------------------------


def _check_sizes(model: ir.Model) -> None:
    """What a rule complains about counts if it does so without what the model declares of its intermediate values.

    Exporters and tools leave wrong sizes there, and onnxruntime only warns of them.
    """
    opset = model.opset_imports.get("", OPSET)
    ruled = (node for node in model.graph if node.domain == "" and has_rule(node.op_type))
    suspects = [node for node in ruled if complaint(node, _recorded(node), node.version or opset)]
    if not suspects:
        return
    derived = derived_shapes(model)
    for node in suspects:
        given = [None if v is None or not v.name else derived.get(v.name) for v in node.inputs]
        if words := complaint(node, given, node.version or opset):
            raise ModelError(f"{describe(node)} {words}")


def _recorded(node: ir.Node) -> list[Shape | None]:
    return [None if v is None or v.shape is None else as_dims(v.shape) for v in node.inputs]
