"""The rule kit: every case of a rule in five ways, and its exact points; wrong rules are named, not raised.

The ways: central differences in float64 with shapes known, with shapes unknown, and with literals fed at run time;
the same at second order; and onnxruntime in float32 against the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.registry import Case, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle, in_float64

Way = Callable[[Rule, Case], list[str]]


def problems(rule: Rule, session_options: ort.SessionOptions | None = None) -> list[str]:
    """What is wrong with ``rule``, one sentence each; an empty list means that every case and point is right.

    Args:
        rule: the rule and its cases.
        session_options: how onnxruntime is to run the rule's operator (with its custom-op library registered);
            operators outside ONNX's own domain are not run there without it.
    """
    found = []
    for i, case in enumerate(rule.cases):
        for name, way in WAYS.items():
            found += [f"{rule.op_type}, case {i}, {name}: {problem}" for problem in _tried(way, rule, case)]
        if not rule.domain or session_options is not None:
            wrong = _tried(lambda r, c: onnxruntime_differs(r, c, session_options), rule, case)
            found += [f"{rule.op_type}, case {i}, in onnxruntime: {problem}" for problem in wrong]
    for i, p in enumerate(rule.points):
        wrong = _tried(lambda r, _, p=p: cases.check_point(r, p), rule, Case(p.inputs, p.attrs))  # type: ignore[misc]
        found += [f"{rule.op_type}, point {i}: {problem}" for problem in wrong]
    return found or ([] if rule.cases else [f"{rule.op_type} has no cases"])


def _tried(way: Way, rule: Rule, case: Case) -> list[str]:
    try:
        return way(rule, case)
    except Exception as error:  # whatever a wrong rule provokes, in whichever library, is a finding
        return [f"{type(error).__name__}: {error}"]


# --- the ways: what disagrees, or nothing ------------------------------------------------------------


def _first_order_differs(rule: Rule, case: Case, unknown: bool = False, fed: bool = False) -> list[str]:
    return _wrong(cases.trial(rule, case, unknown=unknown, fed=fed))


def _unknown_shapes_differ(rule: Rule, case: Case) -> list[str]:
    return [] if case.known_shapes else _first_order_differs(rule, case, unknown=True)


def _fed_literals_differ(rule: Rule, case: Case) -> list[str]:
    return (
        [] if case.known_shapes or case.constant_literals else _first_order_differs(rule, case, unknown=True, fed=True)
    )


def _second_order_differs(rule: Rule, case: Case) -> list[str]:
    return [] if case.first_order_only else _wrong(cases.second_order(cases.trial(rule, case)))


def onnxruntime_differs(rule: Rule, case: Case, options: ort.SessionOptions | None = None) -> list[str]:
    """Where the gradient in float32 differs from the oracle's, beyond rounding."""
    if case.onnxruntime:
        return []
    trial = cases.trial(rule, case, unknown=not case.known_shapes, dtype=np.float32)
    expected = cases.run_gradient(trial, lambda m, feeds: list(Oracle(in_float64(m))(_wide(feeds)).values()))
    got = cases.run_gradient(trial, lambda m, feeds: _in_onnxruntime(m, feeds, options))
    rows = zip(trial.wrt, expected, got, strict=True)
    return [f"the gradient of {name} is {g}, not {e}" for name, e, g in rows if not _close(g, e)]


WAYS: Mapping[str, Way] = {
    "first order": _first_order_differs,
    "shapes unknown": _unknown_shapes_differ,
    "literals fed at run time": _fed_literals_differ,
    "second order": _second_order_differs,
}


def _wrong(trial: cases.Trial) -> list[str]:
    findings = cases.check_first_order(trial)
    return [
        f"along a random direction of {f.name} the gradient gives {f.analytic:.9g}, central differences {f.numeric:.9g}"
        for f in findings
        if not f.error < cases.TOLERANCE
    ]


def _close(got: np.ndarray, expected: np.ndarray) -> bool:
    same = got.dtype == np.float32 and got.shape == expected.shape
    return same and np.allclose(got, expected, rtol=2e-4, atol=2e-5, equal_nan=True)


def _wide(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: np.asarray(v, np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()}


def _in_onnxruntime(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], options: ort.SessionOptions | None
) -> list[Any]:
    if options is None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))
