"""The norm of each sample's gradient, a score for out-of-distribution detection, as an ONNX model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from gradgraph.arguments import FLAG, Kind, number
from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.per_sample import append_per_sample
from gradgraph.autodiff.select import Names
from gradgraph.errors import BuildError, shown
from gradgraph.explaining.last_layer import last_layer
from gradgraph.files.models import Source
from gradgraph.graph.builder import Builder, Var
from gradgraph.transforms import Append, transform

_NORM = Kind("1 or 2", lambda value: type(value) is int and value in (1, 2))


@transform(p=_NORM, temperature=number(0, above=True), independent=FLAG)
def gradient_norm(
    model: Source,
    *,
    output: str | None = None,
    wrt: Names = None,
    p: int = 1,
    temperature: float = 1.0,
    independent: bool = False,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that computes GradNorm for each sample: a score that is lower for out-of-distribution data.

    The score is the norm of the gradient of KL(uniform ‖ Softmax(logits / temperature)) with respect to weights (Huang
    et al. 2021, arXiv:2110.00218). Choose a threshold on held-out data.

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        output: the output, computed by the last linear layer, or by a Softmax or LogSoftmax of it; by default the first
            that depends on an input.
        wrt: names and globs of the weights; by default the weight of the last linear layer, as in the paper.
        p: 1 or 2, for the L1 or the L2 norm over all of ``wrt``.
        temperature: the divisor of the logits.
        independent: as for ``per_sample_gradients``.

    Returns:
        The same kind of model as ``model``, with the outputs ``"<output>"`` [batch, classes] and
        ``"<output>.gradient_norm"`` [batch].

    Raises:
        BuildError, ModelError: if the output is not computed by a linear layer, or is binary.
        DifferentiationError: as for ``per_sample_gradients``.
    """

    def append(work: ir.Model, named_operators: bool) -> ir.Model:
        layer = last_layer(work.graph, output)
        y, name = layer.output, layer.output.name or ""
        if layer.is_binary:
            raise BuildError(f"gradient_norm needs an output of several classes with a Softmax, but '{shown(name)}' is "
                             "binary")  # fmt: skip
        op = builder_for(work, named_operators)
        scores = op.LogSoftmax(op.wrap(layer.logits) / temperature, axis=1)
        loss = op.ReduceMean(-scores, [1], keepdims=0)  # the divergence without a constant
        op.finish(work.graph)
        work.graph.outputs.append(loss.value)

        def results(op: Builder, gradients: Sequence[Var]) -> Mapping[str, Var]:
            flat = op.Concat(*(op.Reshape(g, [-1]) for g in gradients), axis=0)
            norm = op.ReduceL1(flat, [0], keepdims=0) if p == 1 else op.ReduceL2(flat, [0], keepdims=0)
            y.name = op.fresh(f"{name}.row")
            op.release(name)
            return {name: op.Squeeze(op.wrap(y), [0]), f"{name}.gradient_norm": norm}

        weights = layer.weight.name if wrt is None else wrt
        return append_per_sample(work, loss.value.name, weights, independent=independent,
                                 named_operators=named_operators, results=results)  # fmt: skip

    return append
