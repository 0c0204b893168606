"""Verification that a mask hides padding at the start of rows, in models that count positions themselves.

Positions may be counted in many ways: rows of a table by a Range or a Slice, sines of a count, a recurrence or a causal
convolution. Only some of them start behind the padding. So the model is run on the same tokens, padded on the right and
on the left.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, DataError, ModelError, shown
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal import normalise
from gradgraph.surgery.verification import run_on
from gradgraph.verify.feeds import Feeds, candidates

_LENGTH = 7  # tokens per row, if the model does not fix it: more than one on either side of half
_TOLERANCE = 1e-3  # relative to the largest output: integers computed from ranges of data differ a little
_REMEDY = "pad rows at their ends, and do not keep the mask"


def check_hidden_on_the_left(work: ir.Model, tokens: ir.Value, mask: ir.Value) -> None:
    """Raise BuildError unless the visible tokens of a row have the same outputs with padding on either side.

    Args:
        work: a model with the inputs ``tokens`` [batch, length] (or their embeddings) and ``mask`` [batch, length].
    """
    feeds = _feeds(work, tokens)
    length = feeds[tokens.name or ""].shape[1]
    seen = (length + 1) // 2
    along = _along_rows(work, tokens, mask)
    rows = feeds[mask.name or ""].shape[0], 1
    feeds[mask.name or ""] = np.tile(np.arange(length) < seen, rows).astype(feeds[mask.name or ""].dtype)
    moved = {name: np.roll(x, length - seen, 1) if name in along else x for name, x in feeds.items()}
    try:
        right, left = run_on(normalise(work), (feeds, moved), "with a mask")  # as training runs it
    except ModelError as error:
        raise BuildError(
            f"the model counts positions itself, and what its mask hides cannot be verified ({error.problem}); "
            f"{_REMEDY}"
        ) from None
    for name, y in right.items():
        per_token = y.ndim > 1 and y.shape[1] == length
        one, other = (y[:, :seen], left[name][:, -seen:]) if per_token else (y, left[name])
        near = _TOLERANCE * np.abs(one).max(initial=0.0)
        if not np.allclose(one, other, rtol=0, atol=near):
            raise BuildError(
                f"the model counts positions itself, and does not start behind padding: the output '{shown(name)}' of "
                f"a row that is padded on the left differs from the same row padded on the right; {_REMEDY}"
            )


def _feeds(work: ir.Model, tokens: ir.Value) -> Feeds:
    """Return random inputs with rows of several tokens."""
    try:
        found = candidates(work.graph, np.random.default_rng(0))
        first = next(found)
        return next((feeds for feeds in found if feeds[tokens.name or ""].shape[1] >= _LENGTH), first)
    except DataError as error:
        raise BuildError(f"what the model's mask hides cannot be verified ({error.problem}); {_REMEDY}") from None


def _along_rows(work: ir.Model, tokens: ir.Value, mask: ir.Value) -> set[str]:
    """Return the names of the inputs with an element per token: tokens, mask, and others of the same length."""
    length = (shape_of(tokens) or (None, None))[1]
    shapes = {v.name: shape_of(v) or () for v in work.graph.inputs}
    same = {name for name, shape in shapes.items() if len(shape) > 1 and shape[1] == length}
    return {name for name in same if name} | {tokens.name or "", mask.name or ""}
