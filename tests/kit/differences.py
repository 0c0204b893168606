"""Gradients of whole models against central differences in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

import gradgraph as gg
from gradgraph.verify.gradcheck import directional, inner
from gradgraph.verify.reference import Oracle, in_float64

Feeds = Mapping[str, np.ndarray]


def wrong_gradients(
    model: onnx.ModelProto, forward: onnx.ModelProto, feeds: Feeds, wrt: Sequence[str], tolerance: float = 1e-6
) -> list[str]:
    """Return one sentence for each wrong gradient of ``model`` with respect to the inputs ``wrt``.

    Args:
        model: the model to differentiate.
        forward: a model that computes the same, for evaluation in float64: the normal form, which other tests check.
        feeds: the point.
        wrt: floating inputs.
        tolerance: the largest accepted relative error.
    """
    rng = np.random.default_rng(0)
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}
    f = Oracle(in_float64(forward))
    read = {y: a for y, a in f(wide).items() if a.dtype.kind == "f"}
    cotangents = {y: rng.uniform(-1, 1, a.shape) for y, a in read.items()}
    gradient = gg.vjp(model, outputs=list(read), wrt=list(wrt), allow_unused=True)
    assert isinstance(gradient, onnx.ModelProto)
    results = Oracle(in_float64(gradient))({**wide, **{f"{y}.cotangent": c for y, c in cotangents.items()}})
    found = directional(
        lambda x: inner(list(cotangents.values()), [f(x)[y] for y in cotangents]),
        wide,
        {name: results[f"{name}.grad"] for name in wrt},
        rng,
    )
    assert all(np.isfinite(results[f"{name}.grad"]).all() for name in wrt)
    return [
        f"{f.name}: {f.analytic:.9g} instead of {f.numeric:.9g}"
        for f in found
        if not f.error < tolerance or f.analytic == 0 != f.numeric
    ]
