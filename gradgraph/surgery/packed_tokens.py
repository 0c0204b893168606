"""Models whose texts are packed: the tokens of all texts one after another, and keys and values in pages.

onnxruntime-genai's model builder writes them with ``use_paged_attention``, for engines that batch texts of several
lengths. In training, rows [batch, length] are texts of equal length, each with one page and without earlier tokens.
The inputs of packed texts are recognised by the operators that read them, not by their names.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, names_of, nodes_of

_INT32, _INT64 = ir.DataType.INT32, ir.DataType.INT64
_ENDS, _PAST, _TABLE, _BOUNDS, _CACHE, _SLOTS = "ends", "past", "table", "bounds", "cache", "slots"
# what operators of com.microsoft read at which input
_ROLES = {
    ("PagedAttention", 3): _CACHE,
    ("PagedAttention", 4): _CACHE,
    ("PagedAttention", 5): _ENDS,
    ("PagedAttention", 6): _PAST,
    ("PagedAttention", 7): _TABLE,
    ("PagedAttention", 10): _SLOTS,
    ("PagedAttention", 16): _BOUNDS,
    ("VarlenCausalConvWithState", 2): _ENDS,
    ("GatedDeltaNet", 3): _ENDS,
}
# ranks of the first input of operators of com.microsoft for rows
_RANKS = {"CausalConvWithState": (3,), "RotaryEmbedding": (3, 4)}


def has_packed_tokens(model: ir.Model) -> bool:
    """Whether a model takes the tokens of several texts one after another, and their lengths."""
    return _ENDS in _roles(model).values()


def unpack(work: ir.Model) -> None:
    """Change a model of packed tokens to one of rows: [tokens] to [batch, length]; others stay. In place.

    Outputs of a row for each token become [batch, length, …].

    Raises:
        BuildError: the number of tokens is not the named size of an input, or another node reads an input of packed
            texts, such as the number of pages; or a node for rows reads packed tokens, which no runtime runs.
    """
    if not has_packed_tokens(work):
        return
    roles = _roles(work)
    _check_readers(roles)
    _check_ranks(work)
    tokens = _tokens(work, roles)
    further = (shape_of(tokens) or ())[1:]
    rows = ir.Value(name=tokens.name, type=tokens.type, shape=ir.Shape(["batch", "length", *further]))
    editor = Editor(work, Builder(taken=names_of(work)))
    op = editor.op
    batch, length = op.dim(op.wrap(rows), 0), op.dim(op.wrap(rows), 1)
    others, size = {tokens, *roles}, _size_of(tokens)
    positions = [v for v in work.graph.inputs if v not in others and _has_each_token(v, size)]
    new: dict[ir.Value, Var] = {
        tokens: op.Reshape(op.wrap(rows), [-1, *(n for n in further if isinstance(n, int))]),
        **{value: _fed(op, value, role, batch, length) for value, role in roles.items() if role != _SLOTS},
        **{value: _position(op, value, batch, length) for value in positions},
        **{value: op.arange(batch * length) for value in _selections(work, {*others, *positions})},
    }
    editor.place(editor.root[0])
    for old, value in new.items():
        old.replace_all_uses_with(value.value)
    for slots in (value for value, role in roles.items() if role == _SLOTS):
        for node, place in list(slots.uses()):  # the pages contain them, too
            node.replace_input_with(place, None)
    work.graph.inputs[:] = [rows, *(v for v in work.graph.inputs if v not in new and v not in roles)]
    _outputs_in_rows(work, batch, length)


def _roles(work: ir.Model) -> dict[ir.Value, str]:
    """Return the role of each input that describes packed texts or holds their keys and values."""
    read = ((v, _ROLES.get((node.op_type, i))) for node in nodes_of(work) if node.domain == "com.microsoft"
            for i, v in enumerate(node.inputs) if v is not None and v.is_graph_input())  # fmt: skip
    return {value: role for value, role in read if role is not None}


def _check_readers(roles: dict[ir.Value, str]) -> None:
    for value in roles:
        for node, place in value.uses():
            if (node.op_type, place) not in _ROLES:
                raise BuildError(
                    f"the input '{shown(value.name)}' describes packed texts, but a {node.op_type} reads it, too; "
                    "export the model without use_paged_attention"
                )


def _check_ranks(work: ir.Model) -> None:
    """Raise BuildError if a node for rows [batch, length, …] reads packed tokens [tokens, …].

    onnxruntime-genai's builder writes such files for families whose layers it has for rows only (LFM2, HunYuan).
    """
    for node in nodes_of(work):
        shape = shape_of(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
        ranks = _ranks(node)
        if ranks and shape is not None and len(shape) not in ranks:
            raise BuildError(
                f"the file is invalid: '{shown(node.name)}', a {node.op_type} of rows [batch, length, …], reads packed "
                f"tokens {shown(list(shape))}, which no runtime supports; onnxruntime-genai's builder does not support "
                "use_paged_attention for this family, so export the model without it"
            )


def _ranks(node: ir.Node) -> tuple[int, ...]:
    """Return the possible ranks of the first input of a node that depends on them; empty for other nodes."""
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm", ())
        return (len(perm),) if perm else ()
    return _RANKS.get(node.op_type, ()) if node.domain == "com.microsoft" else ()


def _tokens(work: ir.Model, roles: dict[ir.Value, str]) -> ir.Value:
    """Return the input of token numbers [tokens], or of their embeddings [tokens, hidden]."""
    others = [v for v in work.graph.inputs if not v.is_initializer() and v not in roles]
    numbers = [v for v in others if len(shape_of(v) or ()) == 1 and any(_embeds(node) for node, _ in v.uses())]
    embedded = [v for v in others if v.dtype and v.dtype.is_floating_point() and len(shape_of(v) or ()) == 2]
    found = next(iter([*numbers, *embedded]), None)
    if found is None or not isinstance(_size_of(found), str):
        raise BuildError(
            "the tokens of its texts are packed, but no input has a named number of tokens; export the model without "
            "use_paged_attention"
        )
    return found


def _embeds(node: ir.Node) -> bool:
    return node.op_type in ("Gather", "GatherBlockQuantized")


def _size_of(tokens: ir.Value) -> int | str | None:
    return (shape_of(tokens) or (None,))[0]


def _has_each_token(value: ir.Value, size: int | str | None) -> bool:
    """Whether an input has an integer for each of ``size`` tokens: [tokens] or [axes, tokens]."""
    shape = shape_of(value)
    return value.dtype in (_INT32, _INT64) and shape is not None and 1 <= len(shape) <= 2 and shape[-1] == size


def _selections(work: ir.Model, others: set[ir.Value]) -> Iterator[ir.Value]:
    """Yield inputs that select rows of computed values, such as the tokens that need logits."""
    for node in nodes_of(work):
        data, which = (*node.inputs, None, None)[:2]
        if node.op_type != "Gather" or node.domain or data is None or which is None or which in others:
            continue
        is_vector = which.is_graph_input() and not which.is_initializer() and len(shape_of(which) or ()) == 1
        if is_vector and data.producer() is not None and node.attributes.get_int("axis", 0) == 0:
            yield which


def _fed(op: Builder, value: ir.Value, role: str, batch: Var, length: Var) -> Var:
    """Return what an input of packed texts contains for ``batch`` texts of ``length`` tokens."""
    if role == _ENDS:
        found = op.arange(batch + 1) * length
    elif role == _TABLE:  # one page for each text
        found = op.Unsqueeze(op.arange(batch), [1])
    elif role == _BOUNDS:  # unknown
        (count,) = shape_of(value) or (None,)
        found = op.const(np.zeros(count if isinstance(count, int) else 3, np.int64))
    elif role == _PAST:
        found = op.Expand(op.const(0), batch)
    else:
        sizes = (shape_of(value) or ())[2:]
        if len(sizes) != 2 or not all(isinstance(size, int) for size in sizes):
            raise BuildError(f"the input '{shown(value.name)}' has pages of an unknown number of heads or head size")
        zero = ir.tensor(np.zeros(1, (value.dtype or ir.DataType.FLOAT).numpy()))
        return op.ConstantOfShape(op.Concat(batch, length, list(sizes), axis=0), value=zero)
    return op.cast(found, value.dtype or _INT32)


def _position(op: Builder, value: ir.Value, batch: Var, length: Var) -> Var:
    """Return the index of each token in its row, for all axes of positions [axes, tokens]."""
    each = op.Reshape(op.Expand(op.arange(length), op.Concat(batch, length, axis=0)), [-1])
    axes = list(shape_of(value) or ())[:-1]
    each = op.Expand(each, op.Concat(axes, batch * length, axis=0)) if axes else each
    return op.cast(each, value.dtype or _INT64)


def _outputs_in_rows(work: ir.Model, batch: Var, length: Var) -> None:
    """Reshape outputs of a row for each (selected) token to [batch, length, …]; remove those of pages."""
    op = Builder(taken=names_of(work))
    kinds = {kind for kind, _ in _ROLES}
    states = {v: node.op_type for node in nodes_of(work) if node.op_type in kinds for v in node.outputs[1:]}
    outputs = work.graph.outputs
    outputs[:] = [value for value in outputs if states.get(value) != "PagedAttention"]
    for i, value in ((i, value) for i, value in enumerate(outputs) if value not in states):
        own, name = op.wrap(value), value.name or ""
        new = op.Reshape(own, op.Concat(batch, length, op.Slice(op.shape(own), [1], [2**62], [0]), axis=0)).value
        new.type, new.shape = value.type, ir.Shape(["batch", "length", *(shape_of(value) or (None, None))[1:]])
        value.name, new.name = op.fresh(f"{name}.packed"), name
        outputs[i] = new
    op.finish(work.graph)
