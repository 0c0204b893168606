"""The case of every rule as a whole model, whose output is what the operator gives: each transform takes it.

Transforms rename outputs, replace their nodes, and read their shapes; what lies behind an operator usually hides that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.errors import DifferentiationError, ModelError
from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.registry import Case, Draw, Rule
from gradgraph.verify import cases

RULES = [r for r in rules_with_cases() if not r.domain]
CASES = [pytest.param(r, c, id=f"{r.op_type}-{i}") for r in RULES for i, c in enumerate(r.cases)]
ORDINARY = [
    p for p in CASES if "a loop of no steps" not in p.values[1].first_order_only and not p.values[1].onnxruntime
]
Arrays = dict[str, np.ndarray]


def opened(model: onnx.ModelProto) -> Callable[[Arrays], Arrays] | None:
    """What runs ``model``; None where this runtime has no kernel for it."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # of many kinds
        return None
    names = [o.name for o in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(None, feeds), strict=True))


def results(model: Any, feeds: Arrays) -> Arrays:
    own = [o for o in model.graph.output if "." not in o.name]  # of the model itself; derivatives have a suffix
    if all(o.type.tensor_type.HasField("shape") for o in own):  # the checker rejects outputs of unknown rank
        onnx.checker.check_model(model)
    run = opened(model)
    assert run is not None, "the model opens, and what a transform made of it does not"
    return run(feeds)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    scale = np.abs(expected, where=np.isfinite(expected), out=np.zeros(expected.shape)).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * scale)


def trial(rule: Rule, case: Case) -> tuple[cases.Trial, Arrays]:
    """The trial in float32, and its outputs."""
    t = cases.trial(rule, case, unknown=not case.known_shapes, dtype=np.float32)
    run = opened(t.model)
    if run is None:
        pytest.skip("onnxruntime has no kernel")
    return t, run(t.feeds)


@pytest.mark.sweep(0.006)
@pytest.mark.parametrize(("rule", "case"), ORDINARY)
def test_products_and_jacobians_agree(rule: Rule, case: Case) -> None:
    t, ys = trial(rule, case)
    y, rng = t.read[0], np.random.default_rng(0)
    if ys[y].size == 0 or any(t.feeds[x].size == 0 for x in t.wrt):
        if y not in {o.name for o in t.model.graph.output if o.type.tensor_type.HasField("shape")}:
            pytest.skip("onnxruntime runs no Scan over nothing, which only sizes that are known tell")
        t, ys = trial(rule, dataclasses.replace(case, known_shapes="empty"))
    same: dict[str, Any] = {"wrt": t.wrt, "allow_unused": True}
    forward, reverse = (
        results(gg.jacobian(t.model, output=y, mode=mode, **same), t.feeds) for mode in ("forward", "reverse")
    )
    u = rng.uniform(-1, 1, ys[y].shape).astype(ys[y].dtype)
    pulled = results(gg.vjp(t.model, outputs=y, **same), {**t.feeds, f"{y}.cotangent": u})
    tangents = {f"{x}.tangent": rng.uniform(-1, 1, t.feeds[x].shape).astype(t.feeds[x].dtype) for x in t.wrt}
    pushed = results(gg.jvp(t.model, outputs=y, **same), {**t.feeds, **tangents})
    total = np.zeros(ys[y].shape)
    for x in t.wrt:
        matrix, at = forward[f"{x}.jacobian"], t.feeds[x]
        assert matrix.shape == (*ys[y].shape, *at.shape)
        assert matrix.dtype == reverse[f"{x}.jacobian"].dtype == pulled[f"{x}.grad"].dtype == at.dtype
        close(matrix, reverse[f"{x}.jacobian"])
        close(pulled[f"{x}.grad"], np.tensordot(u, matrix, u.ndim))
        total += np.tensordot(matrix, tangents[f"{x}.tangent"], at.ndim)
    close(pushed[f"{y}.tangent"], total)
    for found in (forward, reverse, pulled, pushed):
        close(found[y], ys[y])


def of_one_element(rule: Rule, case: Case) -> tuple[cases.Trial, Arrays]:
    """The trial with one element in each input that is drawn, if it then has one in its output."""
    small = [dataclasses.replace(d, shape=(1,) * len(d.shape)) if isinstance(d, Draw) else d for d in case.inputs]
    try:
        t, ys = trial(rule, dataclasses.replace(case, inputs=tuple(small), known_shapes="one element"))
    except Exception as error:
        pytest.skip(f"not of one element: {error}")
    if ys[t.read[0]].size != 1:
        pytest.skip("the output has more elements")
    return t, ys


@pytest.mark.sweep(0.034)
@pytest.mark.parametrize(("rule", "case"), ORDINARY)
def test_second_derivatives_of_a_scalar(rule: Rule, case: Case) -> None:
    t, ys = of_one_element(rule, case)
    y = t.read[0]
    same: dict[str, Any] = {"output": y, "wrt": t.wrt, "allow_unused": True}
    try:
        first = results(gg.value_and_grad(t.model, **same), t.feeds)
    except ModelError as error:
        assert "has a window of" in str(error)  # larger than one element, which onnxruntime accepts
        pytest.skip(str(error))
    close(first[y], ys[y])
    matrix = results(gg.hessian(t.model, **same), t.feeds)
    ones = {f"{x}.tangent": np.ones_like(t.feeds[x]) for x in t.wrt}
    product = results(gg.hvp(t.model, **same), {**t.feeds, **ones})
    for a in t.wrt:
        assert first[f"{a}.grad"].shape == t.feeds[a].shape
        blocks = [matrix[f"{a}.hessian" if a == b else f"{a}.{b}.hessian"] for b in t.wrt]
        close(product[f"{a}.hvp"], sum(block.sum(axis=tuple(range(t.feeds[a].ndim, block.ndim))) for block in blocks))


def with_open_batch(t: cases.Trial) -> onnx.ModelProto:
    model = onnx.ModelProto.FromString(t.model.SerializeToString())
    for value in model.graph.input:
        if value.name in t.wrt and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].Clear()
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


@pytest.mark.sweep(0.045)
@pytest.mark.parametrize(("rule", "case"), ORDINARY)
def test_each_sample_by_itself(rule: Rule, case: Case) -> None:
    """Refused in one sentence where samples mix; else the diagonal of the whole Jacobian."""
    t = cases.trial(rule, case, dtype=np.float32)
    run, y = opened(t.model), t.read[0]
    rows = {t.feeds[x].shape[:1] for x in t.wrt}
    if run is None or len(rows) != 1 or rows <= {(), (0,)}:
        pytest.skip("no kernel, or no batch")
    model, ys = with_open_batch(t), run(t.feeds)
    if not all(value.size for value in (ys[y], *(t.feeds[x] for x in t.wrt))):
        pytest.skip("onnxruntime runs no Scan over nothing")
    same: dict[str, Any] = {"output": y, "wrt": t.wrt, "allow_unused": True}
    try:
        own = results(gg.jacobian(model, per_sample=True, **same), t.feeds)
    except DifferentiationError:
        return
    whole = results(gg.jacobian(model, **same), t.feeds)
    n = np.arange(len(ys[y]))
    for x in t.wrt:
        matrix = np.moveaxis(whole[f"{x}.jacobian"], ys[y].ndim, 1)[n, n]
        close(own[f"{x}.jacobian"], matrix)
