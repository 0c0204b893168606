"""Conversion of a language model for preference training: pairs of answers in, their log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, PATH, TEXT, WHOLE, Kind, checked
from gradgraph.errors import BuildError, DataError, shown
from gradgraph.files.models import Source, load_model
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import names_of
from gradgraph.passes.normal.opsets.opset import convert_below
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of
from gradgraph.surgery.language_models import IGNORED, is_whole
from gradgraph.surgery.operation import Array, Path, Result, array_named, closed, opened

if TYPE_CHECKING:
    from gradgraph.runtime.trainer import Trainer

LABELS, LOG_PROBABILITY, TOKENS, NEXT_TOKEN = "labels", "log_probability", "tokens", "next_token"
_SINCE = 13  # the opset of the operators below, as written here


@checked(next_token=FLAG, out=PATH.or_none())
def pair_model(model: Source, *, next_token: bool = False, out: Path | None = None) -> Result:
    """Convert a language model for preference losses: it returns the log-probabilities of pairs of answers.

    The inputs ``[batch, length]`` (token ids, and a mask if it is kept) become ``[pairs, 2, length]``, and a new input
    ``labels`` of that shape contains the next tokens, and −100 for ignored positions (:func:`answer_pairs`). The
    outputs are the inputs of preference losses: ``log_probability`` ``[pairs, 2]``, the log-probability of all labels
    of an answer in nats, and ``tokens`` ``[pairs, 2]``, the number of labels. Logits are no longer an output. Weights
    and adapters keep their names.

    Args:
        model: the result of :func:`language_model`; it is not changed.
        next_token: add the output ``next_token`` ``[pairs, 2]`` (int64), the most likely token after the last one of
            each row, for generating texts during training.
        out: write the result to this path.

    Raises:
        BuildError: the model does not map tokens ``[batch, length]`` to logits ``[batch, length, vocabulary]``.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    graph = work.graph
    given = [v for v in graph.inputs if not v.is_initializer()]
    floats = (v for v in graph.outputs if v.dtype and v.dtype.is_floating_point())
    scores = next((v for v in floats if len(shape_of(v) or ()) == 3), None)
    if scores is None or not given or not all(map(is_whole, given)):
        told = ", ".join(f"'{shown(v.name)}' {_told(v)}" for v in (*given, *graph.outputs))
        raise BuildError(
            "preference training needs a model from tokens [batch, length] to logits [batch, length, vocabulary], "
            f"but this one has {told}; convert it with language_model first"
        )
    convert_below(work, _SINCE)
    op = Builder(taken=names_of(work))
    for name in (LABELS, LOG_PROBABILITY, TOKENS, NEXT_TOKEN):
        op.reserve(name)
    sizes = tuple(shape_of(given[0]) or ())
    read = {value.name or "": _by_pairs(op, graph, value, sizes) for value in given}
    labels = ir.Value(name=LABELS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(sizes))
    read[LABELS] = _by_pairs(op, graph, labels, sizes)
    op.finish(graph, before=graph[0])
    graph.outputs[:] = []
    probable, tokens = _of_answers(op, op.wrap(scores), read[LABELS])
    results: dict[str, Var] = {LOG_PROBABILITY: probable, TOKENS: tokens}
    if next_token:
        results[NEXT_TOKEN] = _behind(op, op.wrap(scores))
    for name, result in results.items():
        result.value.name, result.value.shape = name, ir.Shape(["pairs", 2])
        graph.outputs.append(result.value)
    op.finish(graph)
    return closed(work, model, out)


def _by_pairs(op: Builder, graph: ir.Graph, rows: ir.Value, sizes: tuple[Any, ...]) -> Var:
    """Replace the input ``rows`` ``[batch, length]`` with one of ``[pairs, 2, length]``; return it reshaped to rows."""
    pairs = ir.Value(name=rows.name, type=rows.type, shape=ir.Shape(["pairs", 2, sizes[1]]))
    x = op.wrap(pairs)
    made = op.Reshape(x, op.Concat([-1], op.Slice(op.shape(x), [2], [3], [0]), axis=0))
    made.value.shape = ir.Shape(sizes)
    if rows in graph.inputs:
        rows.name = None
        rows.replace_all_uses_with(made.value)
        graph.inputs[graph.inputs.index(rows)] = pairs
    else:
        graph.inputs.append(pairs)
    return made


def _of_answers(op: Builder, scores: Var, labels: Var) -> tuple[Var, Var]:
    """Return the log-probability of all labels of each answer, and the number of labels; ``[pairs, 2]`` each.

    Ignored labels are not counted. ``scores`` are logits [rows, length, vocabulary]. The formula is a cross entropy, so
    that the gradient of all log-probabilities is never materialised.
    """
    counts = op.Not(op.Equal(labels, IGNORED))
    log_p = op.LogSoftmax(scores, axis=-1)
    picked = op.Squeeze(op.GatherElements(log_p, op.Unsqueeze(op.Where(counts, labels, 0), [2]), axis=2), [2])
    # not times 0: the substitute token of an ignored label may be at −∞
    sums = (op.Where(counts, picked, 0.0), op.cast(counts, scores.dtype))
    total, number = (op.Reshape(op.ReduceSum(x, [1], keepdims=0), [-1, 2]) for x in sums)
    return total, number


def _behind(op: Builder, scores: Var) -> Var:
    """Return the most likely token to follow each row, ``[pairs, 2]``.

    The argmax is taken at all positions before the last is selected, so that the logits need not be materialised.
    """
    likeliest = op.ArgMax(scores, axis=2, keepdims=0)
    return op.Reshape(op.Gather(likeliest, -1, axis=1), [-1, 2])


def _told(value: ir.Value) -> str:
    shape = shape_of(value)
    return "of unknown shape" if shape is None else f"[{', '.join(map(str, shape))}]"


# --- data --------------------------------------------------------------------------------------------------------

_TEXTS = Kind("a sequence of sequences of token numbers", lambda value: isinstance(value, Sequence | np.ndarray))


@checked(prompts=_TEXTS, first=_TEXTS, second=_TEXTS, length=WHOLE.or_none(), pad=WHOLE, name=TEXT)
def answer_pairs(
    prompts: Sequence[Sequence[int]],
    first: Sequence[Sequence[int]],
    second: Sequence[Sequence[int]],
    length: int | None = None,
    *,
    pad: int = 0,
    name: str = "input_ids",
) -> dict[str, Array]:
    """Return two answers per prompt as data for :func:`pair_model`; only the answers' tokens are labels.

    Args:
        prompts: the token ids of each prompt, at least one each.
        first, second: the token ids of the chosen and of the rejected answers, each including its end token.
        length: number of tokens per row; by default that of the longest prompt with its answer.
        pad: the padding token; its label is −100, which is ignored.
        name: name of the model's input.

    Returns:
        ``{name: [pairs, 2, length], "labels": [pairs, 2, length]}``, both int64.

    Raises:
        DataError: the numbers of prompts and answers differ, a prompt or answer is empty, or a row is longer than
            ``length``.
    """
    if not len(prompts) == len(first) == len(second) or not len(prompts):
        raise DataError(
            f"there are {len(prompts)} prompts, {len(first)} first answers and {len(second)} second ones; pass "
            "equally many of each, at least one"
        )
    rows = [(prompt, answer) for pair in zip(prompts, first, second, strict=True) for prompt, answer in
            ((pair[0], pair[1]), (pair[0], pair[2]))]  # fmt: skip
    for at, (prompt, answer) in enumerate(rows):
        if not len(prompt) or not len(answer):
            what = "answer" if len(prompt) else "prompt"
            raise DataError(f"the {what} at index {at // 2} has no tokens; add at least one, or drop the pair")
    longest = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    size = longest if length is None else length
    if longest > size:
        raise DataError(
            f"a prompt with its answer has {longest} tokens, but length is {size}; use a larger length, or truncate "
            "or drop longer ones"
        )
    tokens, labels = np.full((len(rows), size), pad, np.int64), np.full((len(rows), size), IGNORED, np.int64)
    for i, (prompt, answer) in enumerate(rows):
        whole = np.asarray([*prompt, *answer], np.int64)
        tokens[i, : len(whole) - 1] = whole[:-1]
        labels[i, len(prompt) - 1 : len(whole) - 1] = answer
    return {name: tokens.reshape(-1, 2, size), LABELS: labels.reshape(-1, 2, size)}


# --- the reference -----------------------------------------------------------------------------------------------


def reference(model: Source, trainer: Trainer, data: Any, batch_size: int | None = None) -> Array:
    """Return the log-probabilities ``[pairs, 2]`` of answers by the reference model, without the trained adapters.

    They are computed in the trainer's own session with neutral adapters (for LoRA a second factor of zeros), so there
    is no second copy of the weights and no difference in rounding. The trainer's state does not change.

    Args:
        model: the model with adapters that was converted by :func:`pair_model` and is trained. Without adapters, the
            trainer's weights are the reference; then the trainer must not have run any steps.
        trainer: the trainer of a step built from a result of :func:`pair_model`.
        data: any data that ``trainer.predict`` accepts, such as the result of :func:`answer_pairs`.
        batch_size: samples per run.

    Raises:
        BuildError: the trainer has already changed weights of the model itself, or its adapters cannot be neutral.
        DataError: the data do not fit.
    """
    resting = adapters_at_rest(model)
    others = sorted(set(trainer.manifest.trainable) - set(resting))
    if others and trainer.progress.steps:
        raise BuildError(
            f"the trainer has changed '{shown(others[0])}', which is not part of an adapter, "
            f"in {trainer.progress.steps} steps, so the reference model is gone; compute the reference before the "
            "first step"
        )
    before = trainer.state_dict() if resting else {}
    try:
        if resting:
            trainer.load_state_dict(resting, strict=False)
        found = trainer.predict(data, batch_size, averaged=not resting)
    finally:
        if resting:
            trainer.load_state_dict(before)
    return np.asarray(found[LOG_PROBABILITY])


def adapters_at_rest(model: Source) -> Mapping[str, Array]:
    """Return neutral values for the trained weights of a model's adapters.

    Raises:
        BuildError: an adapter is of a kind without neutral values (prefix).
    """
    work, found = load_model(model), dict[str, Array]()
    for adapter in adapters_of(work):
        if not adapter.trained:
            continue
        arrays = [array_named(work, weight) for weight in adapter.weights]
        numbers = KINDS[adapter.kind].rest(work, adapter, arrays)
        if any(a.shape != b.shape for a, b in zip(arrays, numbers, strict=True)):
            raise BuildError(
                f"adapters of kind {adapter.kind} cannot be neutral, so the trainer cannot compute the reference; use "
                "another kind, or compute the reference with the model without adapters"
            )
        found |= dict(zip(adapter.weights, numbers, strict=True))
    return found
