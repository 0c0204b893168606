"""Conversion of a language model for generation to a model for training: tokens in, next-token logits out.

Models written by onnxruntime-genai's model builder and optimum have inputs for token-by-token generation: cached keys
and values, a mask, positions. In training a whole text is fed at once, without a cache. So:

0. If a file has two decoders, the one without a cache is used (:func:`fix_inputs`). Packed texts become rows
   (``packed_tokens``).
1. Inputs with states (``model_states``) are removed: an attention or a Concat that reads cached keys or values is
   rewritten without them. Other states, of convolutions and recurrences, become zeros, as at the start of a text.
2. The mask becomes ones, and positions are counted from 0. Rows are padded at their ends: causal attention hides the
   padding from other tokens, and the loss ignores it (:func:`next_tokens`).
3. A mask that is kept as an input hides tokens at any position: it becomes an attention bias of GroupQueryAttention,
   which by itself reads only the number of tokens from a mask, and positions count the visible tokens. Several texts
   in one row are separated by such a bias, too.
4. Outputs of the updated cache are removed, and hidden states if there are logits.
5. float16 and bfloat16 are computed as float32 (:func:`in_float32`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, NAMES, PATH, Kind, as_names, checked, matching
from gradgraph.errors import BuildError, DataError, UnknownNameError, listed, shown
from gradgraph.files.models import Source
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, names_of, nodes_of
from gradgraph.surgery.fixed_inputs import fix_input
from gradgraph.surgery.floats import compute_in_float32
from gradgraph.surgery.left_padding import check_hidden_on_the_left
from gradgraph.surgery.model_states import State, has_fixed_states, is_optional_state, states_of
from gradgraph.surgery.operation import Path, Result, closed, learn_sizes, opened
from gradgraph.surgery.packed_tokens import unpack
from gradgraph.surgery.position_tables import count_seen

IGNORED = -100  # the label that losses ignore
MASK, POSITIONS, SEGMENTS = "attention_mask", "position_ids", "segments"
USE_CACHE = "use_cache_branch"  # of optimum's merged decoders: with a cache, or without
# names of states, for inputs and outputs that the graph does not connect
_PAST, _PRESENT = ("*past*", "*cache_k*", "*cache_v*"), ("*present*", "*past*", "*cache_k*", "*cache_v*")
_LAST_PLACES, _BIAS = 5, 10  # inputs of GroupQueryAttention
# parts of a model that an attention bias of GroupQueryAttention does not separate: other attentions, convolutions and
# recurrences along a row, and a choice by its length
_IN_ORDER = frozenset({"Conv", "If", "Loop", "Scan"})  # besides operators with a state of fixed size
_APART = _IN_ORDER | {
    "MultiHeadAttention",
    "Attention",
    "PackedAttention",
    "PagedAttention",
    "Softmax",
    "SparseAttention",
}
KEPT_APART = "several texts in one row are separated by the attention bias of GroupQueryAttention"
_HIDDEN = -1e30  # finite, so that the unused softmax of a row of only padding is not NaN


@checked(keep=NAMES, packed=FLAG, outputs=NAMES.or_none(), out=PATH.or_none())
def language_model(
    model: Source,
    *,
    keep: str | Sequence[str] = (),
    packed: bool = False,
    outputs: str | Sequence[str] | None = None,
    out: Path | None = None,
) -> Result:
    """Convert a generative model to a model from tokens [batch, length] to logits [batch, length, vocabulary].

    The result computes in float32. Weights, their names and adapters stay: add adapters to the generative model, train
    the result of this function, and merge the trained adapters into the generative model.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        keep: inputs, by name or glob, that stay inputs, such as ``"attention_mask"`` for rows that are padded anywhere.
        packed: allow several texts per row: a new input ``segments``, int64 [batch, length], contains the number of
            each token's text, and no token attends to another text. ``position_ids``, if the model has them, stay an
            input, since they restart with each text.
        outputs: outputs of the result; by default all except those of the updated cache, and except hidden states if
            there are logits.
        out: write the result to this path.

    Raises:
        BuildError: the model has no tokens, and no cache, mask or positions to remove; the mask has more axes than
            [batch, length]; a state is not a floating-point
            tensor of known sizes, or its meaning is unknown; with ``packed`` the model has attention other than
            GroupQueryAttention; or with a mask that is kept, it counts positions (or mixes tokens) itself, from padding
            on. A model without ``position_ids`` is run on a few random tokens to find out.
        UnknownNameError: the model has no input or output of one of the names.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    unpack(work)
    graph = work.graph
    states = model_states(work)
    if any(v.name == USE_CACHE for v in graph.inputs):
        fix_input(work, USE_CACHE, False)
    if any(v.shape is None for node in graph for v in node.outputs if v.name):  # such as after forget_sizes
        learn_sizes(work)
    every = len(graph.outputs)
    _choose_outputs(graph, states, outputs)
    kept = set(_matched(as_names(keep), graph.inputs, "input"))
    _check_rows(work, kept, packed)
    kept |= {POSITIONS} if packed else set()
    given = {v.name or "": v for v in graph.inputs if not v.is_initializer() and v.name not in kept}
    past = [state for state in states if given.pop(state.past.name or "", None) is not None]
    unknown = [given.pop(name) for name in _like(_PAST, list(given))]
    tokens = _tokens_of(list(given.values()))
    counted = [v for name, v in given.items() if name in _COUNTED and v is not tokens]
    changes = past or unknown or counted or kept or len(graph.outputs) < every
    if tokens is None or not (changes or is_whole(tokens)):
        raise BuildError(
            "the model has neither tokens nor inputs for a cache, a mask or positions; it can be trained as it is",
            remedy="gg.surgery.cut(model, outputs=...) selects its outputs",
            shell="gradgraph surgery MODEL --output NAME selects its outputs",
        )
    _check(past, unknown)
    mask = next((v for v in graph.inputs if v.name == MASK and v.name in kept), None)
    counts_itself = not any(v.name == POSITIONS and len(shape_of(v) or ()) == 2 for v in counted)
    editor = Editor(work, Builder(taken=names_of(work)))
    _fill_in(work, editor, tokens, counted, past, mask)
    work.graph.inputs[:] = [v for v in work.graph.inputs if v not in unknown]  # these have no readers
    compute_in_float32(work)
    if packed:
        _hide_others(work, editor, tokens)
    elif mask is not None:
        _hide_padding(work, editor, tokens, mask)
        if counts_itself or any(node.op_type in _IN_ORDER or has_fixed_states(node) for node in nodes_of(work)):
            check_hidden_on_the_left(work, tokens, mask)
    return closed(work, model, out)


def is_whole(value: ir.Value) -> bool:
    """Whether a value is a matrix of integers, such as tokens or their mask."""
    return value.dtype in (ir.DataType.INT64, ir.DataType.INT32) and len(shape_of(value) or ()) == 2


def _matched(names: list[str], values: Sequence[ir.Value], what: str) -> list[str]:
    known = [v.name for v in values if v.name]
    for name in names:
        if not matching(name, known):
            raise UnknownNameError(f"the model has no {what} '{shown(name)}'; choose from {listed(known)}")
    return _like(names, known)


def _like(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    found = {name for pattern in patterns for name in matching(pattern, names)}
    return [name for name in names if name in found]


def score_outputs(model: ir.Model) -> list[ir.Value]:
    """Return the outputs that are neither an updated state nor, if there are logits, hidden states."""
    return _scores_of(model.graph, model_states(model))


def _scores_of(graph: ir.Graph, states: Sequence[State]) -> list[ir.Value]:
    names = [v.name for v in graph.outputs if v.name]
    going_on = {*_like(_PRESENT, names), *(state.present.name for state in states if state.present is not None)}
    chosen = [n for n in names if n not in going_on] or names
    if "logits" in chosen:
        chosen = [n for n in chosen if not n.startswith("hidden_states")]
    return [v for v in graph.outputs if v.name in chosen]


def model_states(model: ir.Model) -> list[State]:
    """Return the states of a generative model."""
    return states_of(model, {*_COUNTED, USE_CACHE})


def _choose_outputs(graph: ir.Graph, states: Sequence[State], asked: str | Sequence[str] | None) -> None:
    names = [v.name for v in graph.outputs if v.name]
    scores = {v.name for v in _scores_of(graph, states) if v.name}
    chosen = scores if asked is None else set(_matched(as_names(asked), graph.outputs, "output"))
    going_on = {*_like(_PRESENT, names), *(state.present.name for state in states if state.present is not None)}
    if chosen <= going_on:
        raise BuildError(
            f"the outputs {listed(sorted(chosen))} are only the key-value cache; choose an output with the logits"
        )
    graph.outputs[:] = [v for v in graph.outputs if v.name in chosen]


def _tokens_of(given: Sequence[ir.Value]) -> ir.Value | None:
    """Return the input of tokens or token embeddings: ``…input_ids``, else the first candidate, or None if none."""
    whole = [v for v in given if is_whole(v) and v.name not in _COUNTED]
    named = [v for v in whole if (v.name or "").endswith("input_ids")]  # T5's decoder has its encoder's mask first
    floating = [v for v in given if v.dtype and v.dtype.is_floating_point()]
    return next(iter([*named, *whole, *floating]), None)


def fixed_length(model: ir.Model) -> int | None:
    """Return the number of tokens of each text if the exporter has fixed it; None otherwise, or if there is a cache."""
    tokens = _tokens_of([v for v in model.graph.inputs if not v.is_initializer()])
    sizes = None if tokens is None or model_states(model) else shape_of(tokens)
    if tokens is None or sizes is None or not (is_whole(tokens) or len(sizes) == 3):  # tokens, or an embedding of each
        return None
    return sizes[1] if isinstance(sizes[1], int) else None


def _check(past: Sequence[State], unknown: Sequence[ir.Value]) -> None:
    """Raise BuildError for states whose initial value is unknown."""
    for value in (v for v in unknown if v.uses()):
        if "encoder" in (value.name or ""):
            raise BuildError(
                f"the cache '{shown(value.name)}' is computed from the encoder's states; use the decoder without a "
                "cache (decoder_model.onnx), or the merged one"
            )
        raise BuildError(
            f"the input '{shown(value.name)}' is a state of unknown meaning: neither keys or values, nor a state that "
            "an output continues by shifting, decaying or adding to it; use the model without a cache"
        )
    for state in past:
        value = state.past
        if not (value.dtype and value.dtype.is_floating_point()):
            raise BuildError(
                f"the input '{shown(value.name)}' is a state of {value.dtype or 'unknown type'}, but only "
                "floating-point states are known to start at zero; use the model without a cache"
            )
        if state.is_buffer and state.axis is None:
            raise BuildError(
                f"the input '{shown(value.name)}' is a key-value buffer of fixed length; use the model without a "
                "cache, or one whose cache grows"
            )


# --- replacements of inputs ----------------------------------------------------------------------------------------


def _replace(editor: Editor, old: ir.Value, new: Var) -> None:
    """Replace all uses of ``old`` with ``new``, whose nodes are inserted at the start of the graph."""
    editor.place(editor.root[0])
    old.replace_all_uses_with(new.value)


def _fill_in(
    work: ir.Model,
    editor: Editor,
    tokens: ir.Value,
    counted: Sequence[ir.Value],
    past: Sequence[State],
    mask: ir.Value | None,
) -> None:
    """Compute the inputs ``counted`` (masks and positions) from ``tokens``, and empty the states ``past``, in place."""
    for value in counted:
        _COUNTED[value.name or ""](editor, value, tokens, mask)
    sizes = {size for node in nodes_of(work) if (size := _size_of_heads(node))}
    usual = sizes.pop() if len(sizes) == 1 else None
    for state in past:
        _empty(editor, state, tokens, usual)
    gone = {*(state.past for state in past), *counted}
    work.graph.inputs[:] = [v for v in work.graph.inputs if v not in gone]


def _sizes(op: Builder, tokens: Var) -> Var:
    """Return [batch, length] of tokens, or of their embeddings."""
    return op.Slice(op.shape(tokens), [0], [2], [0])


def _ones(editor: Editor, mask: ir.Value, tokens: ir.Value, kept: ir.Value | None) -> None:
    op = editor.op
    if len(axes := shape_of(mask) or ()) > 2:
        raise BuildError(
            f"the input '{shown(mask.name)}' has {len(axes)} axes, so it says which tokens each token attends to, and "
            "cannot be replaced with ones; export the model with a mask of padding, [batch, length]"
        )
    one = op.const(1, mask.dtype or ir.DataType.INT64)
    _replace(editor, mask, op.Expand(one, _sizes(op, Var(op, tokens))))


def _seen(op: Builder, mask: ir.Value) -> Var:
    """Return the index of each token among the visible tokens of its row, int64 [batch, length]."""
    return op.Max(op.CumSum(op.cast(op.wrap(mask), ir.DataType.INT64), op.const(1)) - 1, 0)


def _counted(editor: Editor, positions: ir.Value, tokens: ir.Value, mask: ir.Value | None) -> None:
    """Replace the input ``positions`` with the index of each token in its row or, with a mask, among visible tokens.

    Positions [axes, batch, length] of time, height and width (MRoPE) are equal for texts.
    """
    op = editor.op
    shape = shape_of(positions) or ()
    if mask is not None and len(shape) >= 2:
        count = _seen(op, mask)
    else:
        count = op.Range(0, op.Squeeze(op.Slice(_sizes(op, Var(op, tokens)), [1], [2], [0]), [0]), 1)
        count = op.Expand(count, _sizes(op, Var(op, tokens))) if len(shape) >= 2 else count
    if len(shape) == 3:
        axes = _known(positions, 0)
        if axes is None:
            raise BuildError(
                f"the input '{shown(positions.name)}' has positions of an unknown number of axes; export the model "
                "with a fixed size of its first axis"
            )
        count = op.Expand(op.Unsqueeze(count, [0]), op.Concat([axes], _sizes(op, Var(op, tokens)), axis=0))
    _replace(editor, positions, op.cast(count, positions.dtype or ir.DataType.INT64))


def _hide_others(work: ir.Model, editor: Editor, tokens: ir.Value) -> None:
    """Restrict attention to tokens of the same text, by a new input ``segments`` with each token's text number."""
    op = editor.op
    name, shape = SEGMENTS, ir.Shape(list(shape_of(tokens) or (None, None))[:2])
    segments = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.INT64))
    work.graph.inputs.append(segments)
    own = op.wrap(segments)
    editor.place(editor.root[0])
    _hide(work, editor, op.Equal(op.Unsqueeze(own, [1, 3]), op.Unsqueeze(own, [1, 2])), tokens)


def _hide_padding(work: ir.Model, editor: Editor, tokens: ir.Value, mask: ir.Value) -> None:
    """Restrict attention to the tokens that the input ``mask`` marks as visible."""
    op = editor.op
    count_seen(work, editor, (tokens, mask), _seen(op, mask))
    _hide(work, editor, op.Unsqueeze(op.cast(op.wrap(mask), ir.DataType.BOOL), [1, 2]), tokens)


def _hide(work: ir.Model, editor: Editor, seen: Var, tokens: ir.Value) -> None:
    """Add an attention bias to each GroupQueryAttention, to hide all keys that are not ``seen``.

    ``seen`` is bool [batch, 1, queries or 1, keys]. The operator itself would read only the number of keys from a mask.
    Its rotary positions need no change, since only distances between positions matter.
    """
    nodes = _attentions(work)
    if not nodes:
        return
    op = editor.op
    sizes = _sizes(op, Var(op, tokens))
    batch, length = op.Slice(sizes, [0], [1], [0]), op.Slice(sizes, [1], [2], [0])
    bias = op.Where(seen, op.const(0.0, ir.DataType.FLOAT), op.const(_HIDDEN, ir.DataType.FLOAT))
    bias = op.Expand(bias, op.Concat(batch, [1], length, length, axis=0))
    last = op.Expand(op.cast(length - 1, ir.DataType.INT32), batch)
    editor.place(editor.root[0])
    for node in nodes:
        node.resize_inputs(max(len(node.inputs), _BIAS + 1))
        own = op.wrap(node.inputs[_BIAS])
        total = bias if own is None else own + bias
        editor.place(node)
        node.replace_input_with(_LAST_PLACES, last.value)
        node.replace_input_with(_BIAS, total.value)


def _attentions(work: ir.Model) -> list[ir.Node]:
    return [n for n in nodes_of(work) if n.op_type == "GroupQueryAttention" and n.domain == "com.microsoft"]


def _check_rows(work: ir.Model, kept: Collection[str], packed: bool) -> None:
    """Raise BuildError if rows of several texts, or padding that a mask marks, would change the results."""
    if packed and MASK in kept:
        raise BuildError("packed rows use segments instead of a mask; omit packed, or do not keep the mask")
    why = mixing(work) if packed else None
    if why is not None:
        raise BuildError(f"{KEPT_APART}, but the model {why}; train with one text per row")
    fixed = sorted({n.op_type for n in nodes_of(work) if n.domain and has_fixed_states(n)}) if MASK in kept else []
    if fixed:
        raise BuildError(
            f"the model has {listed(fixed)}, which would read padding that '{MASK}' marks; pad rows at their ends, "
            "without keeping the mask"
        )


def mixing(model: ir.Model) -> str | None:
    """Return why tokens would attend to other texts of a packed row, or None if they would not.

    The reason completes a sentence that begins with "the model".
    """
    others = {n.op_type for n in nodes_of(model) if n.op_type in _APART or has_fixed_states(n)}
    if others:
        return f"has {listed(sorted(others))}"
    carried = next((s.past.name for s in model_states(model) if s.axis is None and not s.is_buffer), None)
    if carried is not None:
        return f"carries the state '{shown(carried)}'"
    return None if _attentions(model) else "has none"


_COUNTED = {MASK: _ones, POSITIONS: _counted, "cache_position": _counted}


def _empty(editor: Editor, state: State, tokens: ir.Value, usual: int | None) -> None:
    """Remove a state from the nodes that read it, or replace it with an empty tensor or zeros.

    ``usual`` is the head size that all attentions declare, used if it is unknown.
    """
    past, size = state.past, usual
    for use in list(past.uses()):
        node, place = use
        if is_optional_state(node, place):
            size = _size_of_heads(node) or size
            node.replace_input_with(place, None)
        elif state.axis is not None and _appends(node, state):
            other = node.inputs[1 - place]
            assert other is not None
            size = _known(other, 3) or size
            _instead_of(node.outputs[0], other)
    if not past.uses():
        return
    op = editor.op
    batch = op.Slice(op.shape(Var(op, tokens)), [0], [1], [0])
    sizes, at = _initial_sizes(state, size), batch_axis(past, tokens)
    if any(size is None for i, size in enumerate(sizes) if i != at):
        raise BuildError(
            f"the sizes of the past '{shown(past.name)}' are unknown; export the model with fixed sizes of its states"
        )
    shape = op.Concat(*(batch if i == at else [s] for i, s in enumerate(sizes)), axis=0)
    zero = ir.tensor(np.zeros(1, (past.dtype or ir.DataType.FLOAT).numpy()))
    _replace(editor, past, op.ConstantOfShape(shape, value=zero))


def _appends(node: ir.Node, state: State) -> bool:
    """Whether ``node`` is a Concat of the past and what is appended to it."""
    if node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return False
    axis = node.attributes.get_int("axis", 0)
    return axis == state.axis or axis + len(shape_of(state.past) or ()) == state.axis


def _initial_sizes(state: State, head_size: int | None) -> list[int | None]:
    """Return the sizes of a state before the first token; None for unknown sizes and open batch sizes."""
    rank = len(shape_of(state.past) or ())
    sizes = [_known(state.past, i) for i in range(rank)]
    if state.axis is not None and sizes[state.axis] is None:
        sizes[state.axis] = 0
        sizes[-1] = sizes[-1] if sizes[-1] is not None else head_size
    return sizes


def batch_axis(past: ir.Value, tokens: ir.Value) -> int:
    """Return the axis of ``past`` whose symbolic size is the batch size of ``tokens``, otherwise 0."""
    batch = (shape_of(tokens) or (None,))[0]
    shape = list(shape_of(past) or ())
    return shape.index(batch) if isinstance(batch, str) and batch in shape else 0


def _size_of_heads(node: ir.Node) -> int | None:
    """Return the head size of the values of a MultiHeadAttention; None for other nodes, or if it is unknown."""
    values = node.inputs[2] if node.op_type == "MultiHeadAttention" else None
    width = None if values is None else _known(values, 2)
    return None if width is None else width // node.attributes["num_heads"].as_int()


def _known(value: ir.Value, axis: int) -> int | None:
    shape = shape_of(value)
    size = None if shape is None or len(shape) <= axis else shape[axis]
    return size if isinstance(size, int) else None


def _instead_of(joined: ir.Value, new: ir.Value) -> None:
    if joined.is_graph_output():  # an output that the user asked for
        raise BuildError(
            f"the output '{shown(joined.name)}' continues the cache, which a model for training does not have; choose "
            "other outputs"
        )
    joined.replace_all_uses_with(new)


# --- data --------------------------------------------------------------------------------------------------------

_TEXTS = Kind("a sequence of sequences of token numbers", lambda value: isinstance(value, Sequence | np.ndarray))


@checked(texts=_TEXTS)
def next_tokens(
    texts: Sequence[Sequence[int]] | np.ndarray, length: int | None = None, *, pad: int = 0, name: str = "input_ids"
) -> dict[str, np.ndarray]:
    """Return texts as training data for next-token prediction.

    Args:
        texts: the token ids of each text, at least two each; of any lengths.
        length: number of tokens per row; a longer text is split into several rows. By default the length of the longest
            text.
        pad: the padding token; its label is −100, which losses ignore.
        name: name of the model's input.

    Returns:
        ``{name: [rows, length], "target": [rows, length]}``, int64; ``target`` contains the next token of each token.

    Raises:
        DataError: a text has fewer than two tokens.
    """
    whole = [np.asarray(text, np.int64) for text in texts]
    if not whole or any(text.ndim != 1 or len(text) < 2 for text in whole):
        raise DataError("each text must have at least two token ids, as each token predicts the next one")
    size = max(map(len, whole)) - 1 if length is None else length
    rows = [text[at : at + size + 1] for text in whole for at in range(0, len(text) - 1, size)]
    tokens = np.full((len(rows), size), pad, np.int64)
    target = np.full((len(rows), size), IGNORED, np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row) - 1], target[i, : len(row) - 1] = row[:-1], row[1:]
    return {name: tokens, "target": target}
