"""Last-layer Laplace approximation: the variance of predictions, as an ONNX model.

Daxberger et al. 2021, "Laplace Redux", arXiv:2106.14806; Kristiadi et al. 2020, arXiv:2002.10118.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import ABOVE_ZERO, number, one_of
from gradgraph.autodiff.append import builder_for
from gradgraph.data.arrays.batch import Array, BatchChecker, on_host
from gradgraph.data.preprocess.frames import is_table
from gradgraph.data.sources.sources import Order, as_source, read_data
from gradgraph.errors import BuildError, DataError, shown
from gradgraph.explaining.last_layer import LastLayer, last_layer
from gradgraph.files.models import Source
from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.runtime.execution.joining import filled
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.transforms import Append, transform

LIKELIHOODS, STRUCTURES = ("classification", "regression"), ("full", "kron", "diag")
MOST = 8192  # parameters of a full Hessian, which takes 8 bytes × their square
_ABOVE = number(0, above=True)


@transform(likelihood=one_of(LIKELIHOODS), hessian_structure=one_of(STRUCTURES), prior_precision=_ABOVE,
           sigma_noise=_ABOVE, batch_size=ABOVE_ZERO)  # fmt: skip
def laplace(
    model: Source,
    data: Any,
    *,
    likelihood: str = "classification",
    output: str | None = None,
    hessian_structure: str = "full",
    prior_precision: float = 1.0,
    sigma_noise: float = 1.0,
    batch_size: int = 256,
    backend: str = "portable",
    opset: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Append:
    """Return a model that also computes how uncertain its predictions are, by a last-layer Laplace approximation.

    The weights of the last linear layer get a normal distribution around their trained values. Its precision is the
    generalised Gauss–Newton matrix of the loss, summed over the training data, plus ``prior_precision``. The function
    runs the model over the data once; labels are not needed. The result is an ordinary model::

        sure = gg.laplace("classifier.onnx", train, prior_precision=10.0)

    Args:
        model, backend, opset, out: as for ``value_and_grad``.
        data: the training data: an array, a dict of arrays by input, a path, or any other form that ``Trainer.fit``
            accepts. Labels in a dict or file are ignored.
        likelihood: ``"classification"``, or ``"regression"`` with noise of standard deviation ``sigma_noise``.
        output: the output, computed by the last linear layer, or by a Softmax, LogSoftmax or Sigmoid of it; by default
            the first that depends on an input. A Sigmoid, or a single logit, is a binary classification.
        hessian_structure: ``"full"``, ``"kron"`` (Kronecker-factored) or ``"diag"``. The bias is a further feature.
        prior_precision: the precision of the prior: the weight decay times the number of samples, if the loss is a
            mean.
        sigma_noise: the standard deviation of the noise; for regression only.
        batch_size: samples per run.

    Returns:
        The same kind of model as ``model``, with its outputs, then ``"<output>.variance"`` [batch, classes], the
        variance of each logit (of each number, without the noise, for regression), and for classification
        ``"<output>.probability"`` [batch, classes]: the probabilities by the probit approximation,
        Softmax(logit / √(1 + π/8 · variance)), or Sigmoid.

    Raises:
        BuildError, ModelError: if the output is not computed by a linear layer, or a full Hessian is too large.
        DataError: if the data do not match the model.
    """
    if likelihood == "classification" and sigma_noise != 1.0:
        raise BuildError("sigma_noise is the noise of a regression, and has no effect on a classification; remove it")
    noise = sigma_noise if likelihood == "regression" else None

    def append(work: ir.Model, named_operators: bool) -> ir.Model:
        layer = last_layer(work.graph, output)
        name = layer.output.name or ""
        if noise is not None and layer.output is not layer.logits:
            raise BuildError(f"the output '{shown(name)}' is a probability, not a number with noise; use "
                             "likelihood='classification'")  # fmt: skip
        curvature = _curvature(work, layer, data, noise, hessian_structure, batch_size)
        op = builder_for(work, named_operators)
        features, logits = op.wrap(layer.features), op.wrap(layer.logits)
        if layer.has_bias:
            ones = op.Expand(op.const(1.0, features.dtype), op.Concat(op.dims(features, 0, 1), op.const([1]), axis=0))
            features = op.Concat(features, ones, axis=1)
        variance = _VARIANCES[hessian_structure](op, features, curvature, prior_precision)
        found = {f"{name}.variance": variance}
        if noise is None:
            scaled = logits / op.Sqrt(variance * (math.pi / 8) + 1.0)
            found[f"{name}.probability"] = op.Sigmoid(scaled) if layer.is_binary else op.Softmax(scaled, axis=1)
        results = [op.Identity(y, name=name).value for name, y in found.items()]
        for y in results:
            y.type, y.shape = layer.logits.type, layer.logits.shape
        op.finish(work.graph)
        work.graph.outputs.extend(results)
        return clean_up(work)

    return append


# --- curvature ------------------------------------------------------------------------------------------------


def _curvature(
    work: ir.Model, layer: LastLayer, data: Any, noise: float | None, structure: str, size: int
) -> tuple[Array, ...]:
    """Return the Gauss–Newton matrix, summed over ``data``, for K classes and D features with the bias.

    It is [K, D, K, D] for the structure ``full``; [D, D] and [K, K], whose Kronecker product it is, for ``kron``; and
    its diagonal [D, K] for ``diag``.
    """
    total: list[Array] = []
    count = 0
    for features, logits in _features(work, layer, data, size):
        x, (d, p) = features, _output_hessians(logits, noise, layer.is_binary)
        if layer.has_bias:
            x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        if structure == "full":
            _check_size(x.shape[1] * logits.shape[1])
            same, each = np.eye(logits.shape[1]), range(logits.shape[1])
            rows = [[x.T @ ((d[:, k] * same[k, m] - p[:, k] * p[:, m])[:, None] * x) for m in each] for k in each]
            parts = [np.array(rows).transpose(0, 2, 1, 3)]
        elif structure == "kron":
            parts = [x.T @ x, np.diag(d.sum(0)) - p.T @ p]
        else:
            parts = [(x * x).T @ (d - p * p)]
        total = [a + b for a, b in zip(total, parts, strict=True)] if total else parts
        count += len(x)
    if not all(np.isfinite(a).all() for a in total):
        raise DataError("the model returns NaN or infinity for some of these data; check the data and the model")
    return (total[0] / count, total[1]) if structure == "kron" else tuple(total)


def _check_size(count: int) -> None:
    if count > MOST:
        raise BuildError(f"the last linear layer has {count:,} parameters, and a full Hessian may have at most "
                         f"{MOST:,}; use hessian_structure='kron' or 'diag'")  # fmt: skip


def _features(work: ir.Model, layer: LastLayer, data: Any, size: int) -> Iterator[tuple[Array, Array]]:
    """Yield the features [n, width] and the logits [n, classes] for each batch of ``data``, as float64."""
    outputs, names = list(work.graph.outputs), [layer.features.name or "", layer.logits.name or ""]
    work.graph.outputs[:] = [layer.features, layer.logits]
    run = Predictor(work, names, device="cpu")
    work.graph.outputs[:] = outputs
    read = read_data(data, run.names, run.specs)
    if isinstance(read, Mapping) and not is_table(read):
        read = {name: read[name] for name in run.specs if name in read}  # without targets
    checker, order = BatchChecker(run.specs.values()), Order(run.fixed_rows or size, fills=True, augments=False)
    for batch in as_source(read, checker, order, run.names).batches(0):
        given = {name: on_host(value) for name, value in dict(batch).items()}
        feeds, rows = filled({name: given[name] for name in run.specs}, run.fixed_rows or 0)
        found = run(feeds)
        features, logits = (found[name][:rows].astype(np.float64) for name in names)
        yield features, logits


def _output_hessians(logits: Array, noise: float | None, is_binary: bool) -> tuple[Array, Array]:
    """Return d and p, [n, K] each: diag(d) - p pᵀ is the second derivative of a sample's negative log-likelihood."""
    zeros = np.zeros_like(logits)
    if noise is not None:
        return zeros + 1 / noise**2, zeros
    if is_binary:
        p = 1 / (1 + np.exp(-np.clip(logits, -500, 500)))
        return p * (1 - p), zeros
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return p, p


# --- variances ------------------------------------------------------------------------------------------------


def _full(op: Builder, x: Var, curvature: tuple[Array, ...], prior: float) -> Var:
    """Return ``xᵀ C[k, k] x`` for the blocks of the covariance C on the diagonal, by a root of each block."""
    classes, width = curvature[0].shape[:2]
    matrix = curvature[0].reshape(classes * width, -1)
    blocks = np.linalg.inv(matrix + prior * np.eye(len(matrix))).reshape(classes, width, classes, width)
    values, vectors = np.linalg.eigh(np.einsum("kakb->kab", blocks))
    roots = vectors * np.sqrt(np.maximum(values, 0))[:, None, :]  # [K, D, D]
    products = op.MatMul(x, op.const(roots.transpose(1, 0, 2).reshape(width, -1), x.dtype))
    return op.ReduceSumSquare(op.Reshape(products, [-1, classes, width]), [2], keepdims=0)


def _kron(op: Builder, x: Var, curvature: tuple[Array, ...], prior: float) -> Var:
    (a, u), (b, v) = (np.linalg.eigh(factor) for factor in curvature)
    inverse = 1 / (np.maximum(a, 0)[:, None] * np.maximum(b, 0) + prior)  # [D, K]
    turned = op.MatMul(x, op.const(u, x.dtype))
    return op.MatMul(turned * turned, op.const(inverse @ (v * v).T, x.dtype))


def _diag(op: Builder, x: Var, curvature: tuple[Array, ...], prior: float) -> Var:
    return op.MatMul(x * x, op.const(1 / (curvature[0] + prior), x.dtype))


_VARIANCES = {"full": _full, "kron": _kron, "diag": _diag}
