"""Checks of a model for each kind of fault, which return the symptom, or None if the model does not have the fault.

Symptoms contain no names or numbers of the model, so that a model and a smaller one can be compared by symptom.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from gradgraph.errors import GradgraphError
from gradgraph.files.models import load_model
from gradgraph.passes.normal.sizes.infer import infer_shapes
from gradgraph.transforms import vjp
from gradgraph.verify.check_gradients import check_gradients, rounding
from gradgraph.verify.feeds import candidates
from gradgraph.verify.reference import Oracle, in_float64

Fault = Callable[[onnx.ModelProto], str | None]

_MOST_WORDS = 12  # words of an error message that are part of a symptom
_ROUNDED = 1e4  # a result may differ from the reference by this many rounding errors of its largest entry
_WIDEST = 0.1  # and by at most this much relative to its largest entry, for every element type


def of_build(model: onnx.ModelProto) -> str | None:
    """Return the symptom of the error that building the model's gradients raises, or None if it raises no error."""
    try:
        vjp(model)
    except Exception as error:  # of any class: a bug may raise anything
        return said(error, model)
    return None


def of_gradient(model: onnx.ModelProto) -> str | None:
    """Return a symptom if a gradient differs from central differences (``gradgraph check``), else None."""
    try:
        report = check_gradients(model)
    except GradgraphError:
        return None
    return None if report.ok else "a gradient is wrong"


def of_gradient_run(model: onnx.ModelProto) -> str | None:
    """Return a symptom like :func:`of_run` for the model that ``gradgraph grad --vjp`` writes; None if there is no
    fault.
    """
    try:
        gradient = vjp(model)
    except Exception:  # this is the fault "build", not this one
        return None
    assert isinstance(gradient, onnx.ModelProto)
    return of_run(gradient)


def said(error: Exception, model: onnx.ModelProto) -> str:
    """Return the class and the first words of an error, without quoted text, names in the model or numbers."""
    names = {n for node in model.graph.node for n in (node.name, *node.input, *node.output)}
    text = re.sub(r"'[^']*'|\"[^\"]*\"", " ", str(error))
    words = (w.strip(".,:;()[]") for w in text.split())
    kept = [w for w in words if w not in names and re.fullmatch(r"[A-Za-z_][A-Za-z_-]*", w)]
    return " ".join([f"{type(error).__name__}:", *kept[:_MOST_WORDS]])


def of_run(model: onnx.ModelProto) -> str | None:
    """Return a symptom if the model fails in onnxruntime or differs from the reference implementation, else None."""
    fed = _feeds_and_reference(model)
    if fed is None:
        return None
    feeds, wanted = fed
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        got = session.run(list(wanted), feeds)
    except Exception as error:  # onnxruntime's own classes, which it does not export
        return said(error, model)
    pairs = zip(got, wanted.values(), strict=True)
    return "onnxruntime's results differ" if any(_differ(a, b) for a, b in pairs) else None


LOOKS: dict[str, Fault] = {
    "build": of_build,
    "run": of_run,
    "gradient-run": of_gradient_run,
    "gradient": of_gradient,
}  # one per entry of ``gradgraph.reduction.kinds.FAULTS``


def _feeds_and_reference(model: onnx.ModelProto) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return inputs for which the reference implementation is finite, and its results in float64.

    None if no such inputs were found.
    """
    work = load_model(model)
    infer_shapes(work)
    double = Oracle(in_float64(model))
    for feeds in candidates(work.graph, np.random.default_rng(0)):
        wide = {n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in feeds.items()}
        try:
            results = double(wide)
        except Exception:  # other sizes may work
            continue
        arrays = {n: y for n, y in results.items() if isinstance(y, np.ndarray)}
        if arrays and all(np.isfinite(y).all() for y in arrays.values() if y.dtype.kind == "f"):
            return feeds, arrays
    return None


def _differ(got: Any, wanted: Any) -> bool:
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape:
        return True
    if got.dtype.kind != "f":
        return bool((got != wanted).any())
    largest = float(np.abs(wanted).max(initial=0))
    margin = min(_WIDEST, _ROUNDED * rounding(got.dtype)) * max(1.0, largest)
    return not bool((np.abs(got.astype(np.float64) - wanted) <= margin).all())
