"""The rule kit: it tests each case of a gradient rule in six ways, and each point against its expected gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.machine import custom_ops
from gradgraph.rules.registry import Case, Rule
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle


@dataclass(frozen=True)
class Way:
    """One way to test a case.

    Attributes:
        disagreements: runs the test and returns one sentence per problem.
        reason_to_skip: returns why a case cannot be tested in this way, or "".
    """

    disagreements: Callable[[Rule, Case], list[str]]
    reason_to_skip: Callable[[Case], str]


def problems(rule: Rule, session_options: ort.SessionOptions | None = None) -> list[str]:
    """Return the problems of ``rule``, one sentence each; an empty list means that every case and point is right.

    Args:
        rule: the rule and its cases.
        session_options: options for sessions of onnxruntime, in which the operator's custom-op library is registered.
            Without them, and without a globally registered library, an operator outside ONNX's own domain is not run in
            onnxruntime.
    """
    ways = {name: way.disagreements for name, way in WAYS.items()}
    ways["onnxruntime"] = lambda r, c: in_onnxruntime(r, c, session_options)
    if rule.domain and session_options is None and not custom_ops.KNOWN:
        del ways["onnxruntime"]
    found = [] if rule.cases else [f"{rule.op_type} has no cases"]
    for i, case in enumerate(rule.cases):
        for name, run in ways.items():
            wrong = [] if WAYS[name].reason_to_skip(case) else _tried(run, rule, case)
            found += [f"{rule.op_type}, case {i}, {name}: {sentence}" for sentence in wrong]
    for i, p in enumerate(rule.points):
        found += [f"{rule.op_type}, point {i}: {sentence}" for sentence in _tried(cases.check_point, rule, p)]
    return found


def _tried(run: Callable[[Rule, Any], list[str]], rule: Rule, trial: Any) -> list[str]:
    try:
        return run(rule, trial)
    except Exception as error:  # a wrong rule may cause any exception, in any library; each is a problem to report
        return [f"{type(error).__name__}: {error}"]


# --- against central differences, in float64 -----------------------------------------------------------


def first_order(rule: Rule, case: Case, unknown: cases.Unknown = False, fed: bool = False) -> list[str]:
    """Return disagreements with central differences; shapes are known or ``unknown``, literals constant or ``fed``."""
    return _differences(cases.trial(rule, case, unknown=unknown, fed=fed))


def some_sizes_open(rule: Rule, case: Case) -> list[str]:
    """Return disagreements with only even axes unknown, then only odd ones, so that known axes differ by operand."""
    return [*first_order(rule, case, unknown="even"), *first_order(rule, case, unknown="odd")]


def second_order(rule: Rule, case: Case) -> list[str]:
    """Return disagreements of the gradient's gradient with central differences."""
    return _differences(cases.second_order(cases.trial(rule, case)))


def _differences(trial: cases.Trial) -> list[str]:
    return [
        f"along a random direction of {f.name} the gradient is {f.analytic:.9g}, but central differences "
        f"are {f.numeric:.9g}"
        for f in cases.check_first_order(trial)
        if not f.error < cases.TOLERANCE
    ]


# --- against the oracle, in float32 --------------------------------------------------------------------


def in_onnxruntime(rule: Rule, case: Case, options: ort.SessionOptions | None = None) -> list[str]:
    """Return disagreements of the gradient in onnxruntime (float32, unknown shapes) with the float64 oracle."""
    trial, exact = (
        cases.trial(rule, case, unknown=not case.known_shapes, dtype=dtype) for dtype in (np.float32, np.float64)
    )
    wide = {k: np.asarray(v, np.float64) if v.dtype == np.float32 else v for k, v in trial.feeds.items()}
    exact = replace(exact, feeds=wide)
    expected = cases.run_gradient(exact, lambda m, feeds: list(Oracle(m)(feeds).values()))
    got = cases.run_gradient(trial, lambda m, feeds: _session(m, options).run(None, feeds))
    rows = zip(trial.wrt, expected, got, strict=True)
    return [f"the gradient of {name} is {g}; expected {e}" for name, e, g in rows if not _close(g, e)]


def _close(got: np.ndarray, expected: np.ndarray) -> bool:
    same = got.dtype == np.float32 and got.shape == expected.shape
    return same and np.allclose(got, expected, rtol=2e-4, atol=2e-5, equal_nan=True)


def _session(model: onnx.ModelProto, given: ort.SessionOptions | None) -> ort.InferenceSession:
    options = given
    if options is None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        custom_ops.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


WAYS: Mapping[str, Way] = {
    "first order": Way(first_order, lambda case: ""),
    "shapes unknown": Way(lambda r, c: first_order(r, c, unknown=True), lambda case: case.known_shapes),
    "some sizes open": Way(some_sizes_open, lambda case: case.known_shapes),
    "literals fed": Way(
        lambda r, c: first_order(r, c, unknown=True, fed=True), lambda case: case.constant_literals or case.known_shapes
    ),
    "second order": Way(second_order, lambda case: case.first_order_only),
    "onnxruntime": Way(in_onnxruntime, lambda case: case.onnxruntime),
}
