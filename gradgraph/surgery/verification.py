"""Verification of a model with symbolic axes: the model is run at its old sizes, and at larger ones."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.errors import ModelError, shown
from gradgraph.files.models import save_model
from gradgraph.runtime.execution.session import RuntimeOptions, explanation, results
from gradgraph.verify.feeds import Feeds, candidates

MORE = 1  # rows added for the test: a divisor is unlikely to divide it by chance
TOLERANCE = 1e-4  # relative to the largest element of an output: the order of sums may depend on sizes


def check_opened(
    fixed: ir.Model, work: ir.Model, axes: Mapping[str, Mapping[int, str]], stood_for: Mapping[str, int | str | None]
) -> None:
    """Raise ModelError unless ``work`` has the outputs of ``fixed`` at the original sizes, and runs at larger sizes.

    If the first axis of all inputs has the same symbolic name (the batch), every output must grow with it and begin
    with the rows of ``fixed``; the first axis of the outputs is then declared symbolic. For other symbolic axes, the
    model only has to run.

    Args:
        fixed: the original model.
        work: the model with symbolic axes.
        axes: the names of symbolic axes, by input and index.
        stood_for: the original size of each symbolic axis, by its name.
    """
    feeds = next(iter(candidates(fixed.graph, np.random.default_rng(0))))
    before = run_model(fixed, feeds, "as it was")
    now = run_model(work, feeds, "at its old sizes")
    for name, old in before.items():
        _compare(name, old, now[name], "at its old sizes")
    names = [{a % max(len(x.shape), 1): s for a, s in axes.get(n, {}).items()} for n, x in feeds.items()]
    batches = {of_one.get(0) for of_one in names}
    for symbol in stood_for:
        chosen = [{a for a, s in of_one.items() if s == symbol} for of_one in names]
        larger = {n: _grown(x, axes) for (n, x), axes in zip(feeds.items(), chosen, strict=True)}
        found = run_model(work, larger, f"with more of '{symbol}'")
        if batches == {symbol}:
            _compare_rows(work, before, found, symbol, len(next(iter(feeds.values()))))


def _compare_rows(work: ir.Model, before: Feeds, found: Feeds, symbol: str, batch: int) -> None:
    """Raise ModelError unless each output grows with the batch and begins with the rows for the smaller batch."""
    for name, y in found.items():
        old = before[name]
        if old.ndim == 0 or len(y) * batch != len(old) * (batch + MORE):
            raise ModelError(
                f"the output '{shown(name)}' does not grow with '{shown(symbol)}': the model mixes samples or depends "
                "on the old size of the axis; export it with a dynamic axis"
            )
        _compare(name, old, y[: len(old)], f"with more of '{symbol}'")
        output = next(v for v in work.graph.outputs if v.name == name)
        output.shape = ir.Shape([symbol if len(old) == batch else None, *old.shape[1:]])


def _grown(array: np.ndarray, axes: set[int]) -> np.ndarray:
    """Return a copy of ``array`` that is longer along each of ``axes``: its first ``MORE`` slices are appended.

    Appended floats are multiplied by −2, so that means over the axis change.
    """
    for axis in axes:
        more = np.take(array, range(MORE), axis)
        array = np.concatenate([array, more if array.dtype.kind in "iub" else (-2 * more).astype(array.dtype)], axis)
    return array


def run_model(model: ir.Model, feeds: Feeds, when: str) -> Feeds:
    """Run ``model`` once; see :func:`run_on`."""
    return run_on(model, [feeds], when)[0]


def run_on(model: ir.Model, several: Sequence[Feeds], when: str) -> list[Feeds]:
    """Run ``model`` in onnxruntime, from a file because of protobuf's size limit; return its outputs for each feeds.

    Raises:
        ModelError: onnxruntime rejects the model, or fails; ``when`` completes the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save_model(model, path)
        try:
            session = ort.InferenceSession(path, RuntimeOptions().session_options(), providers=["CPUExecutionProvider"])
            return [results(session, [y.name for y in session.get_outputs()], feeds) for feeds in several]
        except Exception as error:  # onnxruntime raises a dozen classes, none of them public
            raise ModelError(f"the model does not run {when}: {shown(explanation(error, 'it'))}") from None


def _compare(name: str, before: np.ndarray, after: np.ndarray, when: str) -> None:
    near = TOLERANCE * (np.abs(before).max(initial=1.0) if before.dtype.kind == "f" else 1.0)
    if before.shape != after.shape or not np.allclose(before, after, rtol=0, atol=near, equal_nan=True):
        raise ModelError(
            f"with symbolic axes, {when}, the output '{shown(name)}' is different: the model depends on the old size "
            "of an axis; export it with a dynamic axis"
        )
