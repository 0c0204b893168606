"""Rewrite floating-point operators of ai.onnx.ml with standard ones: linear models, SVMs, preprocessing.

The coefficients and intercepts of linear models, which are attributes, become trainable weights,
``<node>.coefficients`` and ``<node>.intercepts``; other attributes become constants. Standard operators compute the
scores of a classifier. Its labels are still computed by a copy of the node. The copy for a linear model reads the
scores, so that labels follow the trained weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.shapes import record_shape
from gradgraph.passes.normal.dialects.contrib import fused, reads_output, refuse

DOMAIN = "ai.onnx.ml"
_FLOAT = ir.DataType.FLOAT

Floats = Sequence[float]


def _array(numbers: Floats, *shape: int) -> np.ndarray:
    return np.array(numbers, np.float32).reshape(shape or -1)


# --- features ------------------------------------------------------------------------------------------------


@fused("Scaler", domain=DOMAIN)
def scaler(op: Builder, node: ir.Node, x: Var, *, offset: Floats = (0.0,), scale: Floats = (1.0,)) -> Any:
    return (op.cast(x, _FLOAT) - _array(offset)) * _array(scale)


@fused("Normalizer", domain=DOMAIN)
def normalizer(op: Builder, node: ir.Node, x: Var, *, norm: str = "MAX") -> Any:
    """Divide each row by its largest entry (not magnitude), L1 norm or L2 norm; rows with a norm of 0 are unchanged."""
    x = op.cast(x, _FLOAT)
    reduce = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}[norm]
    size = reduce(x, [-1], keepdims=1)
    return x / op.Where(op.Equal(size, 0.0), 1.0, size)


@fused("Imputer", domain=DOMAIN)
def imputer(
    op: Builder,
    node: ir.Node,
    x: Var,
    *,
    imputed_value_floats: Floats = (),
    replaced_value_float: float = 0.0,
    **_: Any,
) -> Any:
    if not x.is_float:
        return None
    missing = op.IsNaN(x) if np.isnan(replaced_value_float) else op.Equal(x, replaced_value_float)
    return op.Where(missing, op.const(_array(imputed_value_floats), x.dtype), x)


@fused("FeatureVectorizer", domain=DOMAIN)
def feature_vectorizer(op: Builder, node: ir.Node, *features: Var, inputdimensions: Sequence[int]) -> Any:
    """Concatenate the first ``inputdimensions[i]`` columns of each matrix; narrower matrices are padded with zeros."""
    if any(x.rank != 2 for x in features):
        raise refuse(node, "has features that are not matrices")
    columns = [_columns(op, x, size) for x, size in zip(features, inputdimensions, strict=True)]
    return columns[0] if len(columns) == 1 else op.Concat(*columns, axis=1)


def _columns(op: Builder, x: Var, size: int) -> Var:
    x = op.cast(x, _FLOAT)
    if x.dim(1) == size:
        return x
    return op.Pad(x, op.Concat([0, 0, 0], op.Sub([size], op.dim(x, 1)), axis=0))  # negative padding: drop columns


@fused("ArrayFeatureExtractor", domain=DOMAIN)
def array_feature_extractor(op: Builder, node: ir.Node, x: Var, indices: Var) -> Any:
    chosen = op.Gather(x, op.Reshape(indices, [-1]), axis=-1)
    return op.Unsqueeze(chosen, [0]) if x.rank == 1 else chosen


# --- models ----------------------------------------------------------------------------------------------------


@fused("LinearRegressor", domain=DOMAIN)
def linear_regressor(
    op: Builder,
    node: ir.Node,
    x: Var,
    *,
    coefficients: Floats,
    intercepts: Floats = (),
    targets: int = 1,
    post_transform: str = "NONE",
) -> Any:
    y = _affine(op, node, x, _array(coefficients, targets, -1), intercepts)
    return _transformed(op, node, y, post_transform)


@fused("LinearClassifier", domain=DOMAIN)
def linear_classifier(
    op: Builder,
    node: ir.Node,
    x: Var,
    *,
    coefficients: Floats,
    intercepts: Floats = (),
    post_transform: str = "NONE",
    multi_class: int = 0,
    classlabels_ints: Sequence[int] = (),
    classlabels_strings: Sequence[str] = (),
) -> Any:
    """Compute the scores, and the labels from them.

    With two labels and one row of coefficients, the model computes a single score s, and returns the scores 1 − s and
    s; for LOGISTIC, the logistics of −s and s.
    """
    if not reads_output(node, 1):
        return None
    count = max(len(intercepts), 1)
    scores = _affine(op, node, x, _array(coefficients, count, -1), intercepts)
    chosen = _labels(op, node, scores, _identity(count)) if reads_output(node, 0) else None
    labels = max(len(classlabels_ints), len(classlabels_strings))
    if count == 1 and labels == 2:
        pair = (op.Neg(scores) if post_transform == "LOGISTIC" else 1.0 - scores, scores)
        scores = op.Concat(*pair, axis=1)
        post_transform = post_transform if post_transform in ("LOGISTIC", "PROBIT") else "NONE"
    return chosen, _transformed(op, node, scores, post_transform)


def _affine(op: Builder, node: ir.Node, x: Var, rows: np.ndarray, intercepts: Floats) -> Var:
    name = node.name or node.op_type
    y = op.cast(x, _FLOAT) @ op.weight(f"{name}.coefficients", rows.T.copy())
    return y + op.weight(f"{name}.intercepts", _array(intercepts)) if intercepts else y


def _identity(size: int) -> dict[str, ir.Attr]:
    rows = np.eye(size).ravel().tolist()
    values = {"coefficients": rows, "intercepts": [0.0] * size}
    return {name: ir.AttrFloat32s(name, numbers) for name, numbers in values.items()}


def _labels(op: Builder, node: ir.Node, x: Var, changed: Mapping[str, Any] = MappingProxyType({})) -> Var:
    """Compute the labels by a copy of the node with the attributes ``changed``; nothing reads the copy's scores."""
    attrs: dict[str, Any] = {**node.attributes, **changed}
    labels = all_of(op.emit(node.op_type, x, domain=DOMAIN, outputs=2, **attrs))[0]
    kind = ir.DataType.STRING if "classlabels_strings" in node.attributes else ir.DataType.INT64
    labels.value.type = ir.TensorType(kind)
    record_shape(labels.value, None if x.shape is None else x.shape[:1])
    return labels


def _transformed(op: Builder, node: ir.Node, scores: Var, how: str) -> Any:
    """Apply the ``post_transform`` ``how`` to ``scores``; SOFTMAX_ZERO is a softmax that excludes scores of 0."""
    if how == "LOGISTIC":
        return op.Sigmoid(scores)
    if how == "SOFTMAX":
        return op.Softmax(scores, axis=-1)
    if how == "SOFTMAX_ZERO":
        counts = op.Abs(scores) > 1e-7
        raised = op.Exp(scores - op.ReduceMax(scores, [-1], keepdims=1))
        terms = op.Where(counts, raised, 0.0)
        total = op.ReduceSum(terms, [-1], keepdims=1)
        return terms / op.Where(op.Equal(total, 0.0), 1.0, total)
    if how != "NONE":
        raise refuse(node, f"has the post_transform '{how}'")
    return scores


# --- support vector machines --------------------------------------------------------------------------------------


@fused("SVMRegressor", domain=DOMAIN)
def svm_regressor(
    op: Builder,
    node: ir.Node,
    x: Var,
    *,
    coefficients: Floats,
    rho: Floats,
    support_vectors: Floats = (),
    kernel_type: str = "LINEAR",
    kernel_params: Floats = (),
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
) -> Any:
    if n_supports:
        kernel = _kernel(op, node, x, _array(support_vectors, n_supports, -1), kernel_type, kernel_params)
        y = kernel @ _array(coefficients, -1, 1) + rho[0]
    else:
        y = op.cast(x, _FLOAT) @ _array(coefficients, -1, 1) + rho[0]
    if one_class:
        return op.Where(y > 0.0, 1.0, op.const(-1.0, _FLOAT))
    return _transformed(op, node, y, post_transform)


@fused("SVMClassifier", domain=DOMAIN)
def svm_classifier(
    op: Builder,
    node: ir.Node,
    x: Var,
    *,
    coefficients: Floats,
    rho: Floats,
    vectors_per_class: Sequence[int] = (),
    support_vectors: Floats = (),
    kernel_type: str = "LINEAR",
    kernel_params: Floats = (),
    prob_a: Floats = (),
    prob_b: Floats = (),
    post_transform: str = "NONE",
    classlabels_ints: Sequence[int] = (),
    classlabels_strings: Sequence[str] = (),
) -> Any:
    """Compute the decision value of every pair of classes, and the labels.

    For two classes the scores are −s and s, for the only decision value s; for SOFTMAX onnxruntime returns 1 − s and s
    instead of a softmax.
    """
    if not reads_output(node, 1):
        return None
    if prob_a or prob_b or not vectors_per_class:
        raise refuse(node, "couples probabilities iteratively" if vectors_per_class else "has no support vectors")
    vectors = _array(support_vectors, sum(vectors_per_class), -1)
    kernel = _kernel(op, node, x, vectors, kernel_type, kernel_params)
    scores = kernel @ _pair_weights(coefficients, vectors_per_class) + _array(rho)
    if len(vectors_per_class) == 2:
        softmax = post_transform.startswith("SOFTMAX")
        scores = op.Concat(1.0 - scores if softmax else op.Neg(scores), scores, axis=1)
        post_transform = "NONE" if softmax else post_transform
    chosen = _labels(op, node, x) if reads_output(node, 0) else None
    return chosen, _transformed(op, node, scores, post_transform)


def _kernel(op: Builder, node: ir.Node, x: Var, vectors: np.ndarray, kind: str, params: Floats) -> Var:
    """Compute the kernel of every row of x with every support vector: [rows, vectors]."""
    gamma, shift, degree = params or (0.0, 0.0, 0.0)
    product = op.cast(x, _FLOAT) @ vectors.T.copy()
    if kind == "LINEAR":
        return product
    if kind == "POLY":
        return op.Pow(product * gamma + shift, float(int(degree)))
    if kind == "SIGMOID":
        return op.Tanh(product * gamma + shift)
    if kind != "RBF":
        raise refuse(node, f"has the kernel '{kind}'")
    gaps = op.Unsqueeze(op.cast(x, _FLOAT), [1]) - vectors  # |x|² + |v|² - 2xv would cancel where x is near v
    return op.Exp(op.ReduceSumSquare(gaps, [2], keepdims=0) * -gamma)


def _pair_weights(coefficients: Floats, counts: Sequence[int]) -> np.ndarray:
    """Return the weights [vectors, pairs] of support vectors in the decision value of each pair of classes.

    For a pair (i, j) with i < j, vectors of class i use row j − 1 of the coefficients, and vectors of class j use row
    i.
    """
    rows = _array(coefficients, len(counts) - 1, sum(counts))
    ends = np.cumsum([0, *counts])
    pairs = list(itertools.combinations(range(len(counts)), 2))
    weights = np.zeros((sum(counts), len(pairs)), np.float32)
    for column, (i, j) in enumerate(pairs):
        for own, row in ((i, j - 1), (j, i)):
            weights[ends[own] : ends[own + 1], column] = rows[row, ends[own] : ends[own + 1]]
    return weights
