"""Check that every node has valid inputs, so that errors are reported here in one sentence, and not later by a runtime.

Only models that no runtime would accept are rejected: known types that violate ONNX's schema of the model's opset, and
numeric sizes that do not match (``input_sizes``). Tensors of unknown type, symbolic dimensions, and operators of other
domains are accepted. The numbers of weights are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from gradgraph.errors import Finding, shown
from gradgraph.graph.checks import beyond_limits, describe, has_bodies, malformed_nodes, refuse_any, subgraphs
from gradgraph.graph.schemas import Formal, Signature, signature
from gradgraph.graph.shapes import OPSET, objects, recorded_shape
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.sizes.infer import derived_shapes
from gradgraph.passes.normal.validating.input_sizes import EXPORT, complaint

_WRAPPERS: dict[type, tuple[str, ...]] = {
    ir.SequenceType: ("seq", "a sequence of"),
    ir.OptionalType: ("optional", "an optional"),
}
_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}


def check_inlined(model: ir.Model) -> None:
    """Raise ModelError unless nodes are well-formed calls of their operators, with the attributes of inlined calls."""
    refuse_any(malformed_nodes(model))


def check_inputs(model: ir.Model) -> None:
    """Raise ModelError unless graph inputs have element types, and initializers among them the type of their data."""
    refuse_any(_input_findings(model.graph))


def check_consistent(model: ir.Model) -> None:
    """Raise ModelError unless the nodes of ``model``, whose types and shapes have been inferred, can be computed.

    1. The operator must support the element types, and they must be equal where the schema requires it.
    2. Both branches of an If must have equal output types, and the output of a Cast the type that it casts to.
    3. Sizes must match (``input_sizes.py``).
    """
    refuse_any(itertools.chain(_type_findings(model), _size_findings(model)))


def check_sizes(model: ir.Model) -> None:
    """Raise ModelError unless sizes match, including the sizes of nodes added since ``check_consistent``."""
    refuse_any(_size_findings(model))


def _type_findings(model: ir.Model) -> Iterator[Finding]:
    fine: set[tuple[object, ...]] = set()
    for node, opset in _standard_nodes(model):
        reads, writes = [None if v is None else v.type for v in node.inputs], [v.type for v in node.outputs]
        types = (node.op_type, opset, *map(_type_key, reads), "->", *map(_type_key, writes))
        if types not in fine:
            schema = signature(node.op_type, opset)
            found = [] if schema is None else [*_typed_wrongly(node, schema)]
            yield from found
            if not found:
                fine.add(types)
        if node.op_type == "If":
            yield from _branches_differ(node)
        elif node.op_type == "Cast":
            yield from _cast_differs(node)


def _standard_nodes(model: ir.Model) -> Iterator[tuple[ir.Node, int]]:
    """Return an iterator over the nodes of ONNX's own domain, each with its opset."""
    opset = model.opset_imports.get("", OPSET)
    return ((node, node.version or opset) for node in nodes_of(model) if node.domain == "")


def _type_key(kind: ir.TypeProtocol | None) -> object:
    """Return a key that is equal for equal types: for tensors the element type, as text is slower to compare."""
    return kind.dtype if isinstance(kind, ir.TensorType) else kind and _text_in_schemas(kind)


# --- types in words ---------------------------------------------------------------------------------------


def _text_in_schemas(kind: ir.TypeProtocol) -> str:
    """Return the type as schemas write it, such as ``seq(tensor(float))``."""
    if isinstance(kind, ir.TensorType):
        return f"tensor({kind.dtype.name.lower()})"
    wrapper = _WRAPPERS.get(type(kind), ("sparse_tensor",))[0]
    return f"{wrapper}({_text_in_schemas(_element(kind))})"


def _type_words(kind: ir.TypeProtocol) -> str:
    if isinstance(kind, ir.TensorType):
        return _NAMES.get(kind.dtype.name, kind.dtype.name.lower())
    wrapper = _WRAPPERS.get(type(kind), ("a sparse",))[-1]
    return f"{wrapper} {_type_words(_element(kind))}"


def _element(kind: ir.TypeProtocol) -> ir.TypeProtocol:
    held = kind.elem_type
    return held if not isinstance(held, ir.DataType) else ir.TensorType(held)


def _listed(allowed: Iterable[str]) -> str:
    short = {text.removeprefix("tensor(").removesuffix(")") for text in allowed}
    return ", ".join(sorted(_NAMES.get(text.upper(), text) for text in short))


# --- one node ---------------------------------------------------------------------------------------------


def _typed_wrongly(node: ir.Node, schema: Signature) -> Iterator[Finding]:
    """Yield a finding about the first input or output of ``node`` whose type does not match ``schema``."""
    bound: dict[str, tuple[ir.Value, ir.TypeProtocol]] = {}
    latest = signature(node.op_type, onnx.defs.onnx_opset_version()) or schema
    ends = [(i, False, v) for i, v in enumerate(node.inputs)] + [(i, True, v) for i, v in enumerate(node.outputs)]
    for i, of_output, value in ends:
        if value is None or value.type is None:
            continue
        formal = schema.formal(i, of_output)
        if _text_in_schemas(value.type) not in formal.allowed | latest.formal(i, of_output).allowed:
            yield _of_another_type(node, value, value.type, formal, of_output)
            return
        if formal.variable is not None:
            first, kind = bound.setdefault(formal.variable, (value, value.type))
            if _type_key(kind) != _type_key(value.type):
                yield _mixture(node, first, kind, value, value.type, of_output)
                return


def _of_another_type(node: ir.Node, value: ir.Value, kind: ir.TypeProtocol, formal: Formal, of_output: bool) -> Finding:
    does, remedy = ("outputs", "correct its declared type") if of_output else ("reads", "put a Cast before it")
    words = f"{does} '{shown(value.name)}' of type {_type_words(kind)} as its {formal.name}, which must be one of "
    return Finding(describe(node), words + _listed(formal.allowed), "", remedy)


def _mixture(
    node: ir.Node, first: ir.Value, kind: ir.TypeProtocol, value: ir.Value, other: ir.TypeProtocol, of_output: bool
) -> Finding:
    if of_output:
        return Finding(
            describe(node),
            f"outputs '{shown(value.name)}', declared as {_type_words(other)}, but '{shown(first.name)}' has type "
            f"{_type_words(kind)}",
            "",
            "correct the declared type, or put a Cast between them",
        )
    return Finding(
        describe(node),
        f"reads '{shown(first.name)}' of type {_type_words(kind)} and '{shown(value.name)}' of type "
        f"{_type_words(other)}, which must have the same type",
        "",
        "put a Cast before one of them",
    )


def _cast_differs(node: ir.Node) -> Iterator[Finding]:
    to, kind = ir.TensorType(ir.DataType(node.attributes["to"].as_int())), node.outputs[0].type
    if kind is not None and _type_key(kind) != _type_key(to):
        yield Finding(
            describe(node),
            f"casts to {_type_words(to)}",
            f"its output '{shown(node.outputs[0].name)}' is declared as {_type_words(kind)}",
            "correct one of the two",
        )


def _branches_differ(node: ir.Node) -> Iterator[Finding]:
    then, other = (node.attributes[name].as_graph().outputs for name in ("then_branch", "else_branch"))
    for a, b in zip(then, other, strict=False):
        if a.type is not None and b.type is not None and _type_key(a.type) != _type_key(b.type):
            yield Finding(
                describe(node),
                f"outputs '{shown(a.name)}' of type {_type_words(a.type)} in one branch and '{shown(b.name)}' of type "
                f"{_type_words(b.type)} in the other",
                "",
                "put a Cast at the end of one of them",
            )


def _input_findings(graph: ir.Graph) -> Iterator[Finding]:
    for value in graph.inputs:
        name, tensor = value.name, value.const_value
        if value.type is None or value.dtype == ir.DataType.UNDEFINED:
            yield Finding(f"input '{shown(name)}'", "has no element type", "a graph input must have one", "declare it")
        elif isinstance(value.type, ir.TensorType) and tensor is not None and tensor.dtype != value.dtype:
            yield Finding(
                f"initializer '{shown(name)}'",
                f"contains {_type_words(ir.TensorType(tensor.dtype))}",
                f"is declared as {_type_words(value.type)}",
                "correct the declared type, or convert its data",
            )


# --- sizes ------------------------------------------------------------------------------------------------


def _size_findings(model: ir.Model) -> Iterator[Finding]:
    """Yield findings about sizes that are wrong even without the declared sizes of intermediate values.

    Exporters and tools may declare wrong sizes of these values, and onnxruntime only warns about them. A finding in a
    branch of an If is reported only if ONNX shape inference also rejects the node, because then no runtime loads the
    model; otherwise such sizes may never reach the branch.
    """
    opset = model.opset_imports.get("", OPSET)
    suspects = []
    for node, in_branch in _with_branches(model):
        if words := next((w for v in node.outputs if v.shape is not None and (w := beyond_limits(v.shape))), None):
            yield Finding(describe(node), f"outputs '{shown(node.outputs[0].name)}' with {words}", "", EXPORT)
        elif node.domain == "" and complaint(node, [*map(recorded_shape, node.inputs)], node.version or opset):
            suspects.append((node, in_branch))
    if not suspects:
        return
    derived = derived_shapes(model)
    for node, in_branch in suspects:
        given = [None if v is None or not v.name else derived.get(v.name) for v in node.inputs]
        words = complaint(node, given, node.version or opset)
        if words and (not in_branch or objects(node, given, node.version or opset)):
            yield Finding(describe(node), words, "", EXPORT)


def _with_branches(model: ir.Model) -> Iterator[tuple[ir.Node, bool]]:
    stack = [(model.graph, False)]
    while stack:
        graph, in_branch = stack.pop()
        for node in graph:
            yield node, in_branch
            if has_bodies(node):
                stack.extend((body, in_branch or node.op_type == "If") for body in subgraphs(node))
