"""``gg.explain``: a model that explains the predictions of another."""

from __future__ import annotations

import os
from typing import Any

import onnx_ir as ir

from gradgraph.arguments import ABOVE_ZERO, NAMES, TEXT
from gradgraph.autodiff.select import Names
from gradgraph.backends import named
from gradgraph.backends.engine import unrolls
from gradgraph.explaining import attacks
from gradgraph.explaining.along import UNROLL
from gradgraph.explaining.methods import METHODS
from gradgraph.explaining.subject import Subject, Target
from gradgraph.files.models import Source
from gradgraph.transforms import Append, transform

assert attacks  # importing them fills the table


@transform(method=TEXT, inputs=NAMES.or_none(), chunk=ABOVE_ZERO, unroll=UNROLL)
def explain(
    model: Source,
    method: str = "integrated-gradients",
    *,
    target: Target = None,
    inputs: Names = None,
    output: str | None = None,
    chunk: int = 1,
    unroll: bool | None = None,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Append:
    """Return a model that explains the predictions of ``model``: how much each element of an input contributes.

    The result is an ordinary model, which runs wherever ``model`` runs::

        why = gg.explain("classifier.onnx", "integrated-gradients", target="predicted", n=32)

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        method: the name of a method, such as ``"grad-cam"``; the how-to guide "Explanations" lists them.
        target: the class to explain, for an output [batch, classes]: an index, ``"predicted"``, or None for a new input
            ``"target"`` [batch] of int64. For outputs with more axes, a tuple with an index for each axis after the
            first, or None to add up an axis. An output of one number for each sample has no target.
        inputs: names and globs of the inputs to attribute to; by default all floating-point ones with a row for each
            sample, and inputs of token indices. Attributions of tokens are those of their embeddings, the rows of the
            table that a Gather reads; add up the last axis for one number per token.
        output: the output to explain, or an inner value such as the logits; by default the first that depends on an
            input.
        chunk: for methods that average over points, as for ``along``.
        unroll: as for ``along``; for methods with a loop.
        options: options of the method.

    Returns:
        The same kind of model as ``model``, with the output ``output``, then ``"<input>.attribution"`` for each input
        (or the next free name, as for ``value_and_grad``), and for each table that embeds tokens.
        Methods along a line from a baseline also return ``"completeness.error"`` [batch]: the sum of the attributions
        minus the change of the score. Attacks return ``"<input>.adversarial"`` and ``"<output>.adversarial"``.

    Raises:
        BuildError: if there is no such method, option, class or layer, or a baseline has another shape.
        UnknownNameError, DifferentiationError, UnsupportedOperatorError: as for ``value_and_grad``.
    """
    chosen = METHODS.named(method)
    chosen.check(options, chunk)
    unrolled = unrolls(named(backend), unroll)

    def append(work: ir.Model, named_operators: bool) -> ir.Model:
        subject = Subject(work, output, inputs, target, smooth=chosen.smooth, chunk=chunk, unroll=unrolled,
                          named_operators=named_operators)  # fmt: skip
        found = chosen.write(subject, **options)
        results = [subject.net.named(subject.first[subject.output], subject.output.name or "")]
        return subject.net.finish([*results, *(subject.net.named(y, name) for name, y in found)])

    return append
