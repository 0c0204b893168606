"""Every native form gives what the portable one gives; every rule survives lowering with them."""

from __future__ import annotations

import numpy as np
import pytest

import gradgraph.rules.families  # noqa: F401  (fills the registry)
from gradgraph.backends.engine import lower
from gradgraph.backends.forms import Form
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native import library as native
from gradgraph.files.models import to_proto
from gradgraph.rules.named_operators import OPERATORS
from gradgraph.rules.registry import RULES, Case, Rule, case, real
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from tests.kit.form_kit import gradient_of, one_call, problems_of_form, problems_of_rule

FORMS = [pytest.param(f, id=f"{f.op_type}-{f.name}") for f in ORT_NATIVE.lowering.forms]
NATIVE = {f.op_type for f in ORT_NATIVE.lowering.forms}
# operators in whose gradients kernels are written for the small tensors of cases
WITH_KERNELS = {"BatchNormalization", "Clip", "Conv", "Gelu", "HardSwish", "LayerNormalization", "MaxPool", "Relu"}
WITH_KERNELS |= {"Softmax"}
CASES = {
    kernels: [
        pytest.param(r, c, id=f"{r.op_type}-{i}")
        for r in RULES.values()
        for i, c in enumerate(r.cases)
        if not c.onnxruntime and (r.domain == "" and r.op_type in WITH_KERNELS) == kernels
    ]
    for kernels in (True, False)
}

pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.sweep(0.27)
@pytest.mark.parametrize("form", FORMS)
def test_a_native_form_equals_the_portable_one(form: Form) -> None:
    assert problems_of_form(ORT_NATIVE, form) == []


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize(("rule", "case"), CASES[True])
def test_a_rule_with_native_forms_equals_the_portable_one(rule: Rule, case: Case) -> None:
    assert problems_of_rule(rule, case, ORT_NATIVE) == []
    assert problems_of_rule(rule, case, ORT_NATIVE, unknown=True) == []
    assert problems_of_rule(rule, case, ORT_NATIVE, dtype=np.float64) == []


@pytest.mark.one_level
@pytest.mark.sweep(0.038)
@pytest.mark.parametrize(("rule", "case"), CASES[False])
def test_other_rules_hold_no_kernel(rule: Rule, case: Case) -> None:
    """So they are computed as without native kernels, which `tests/backends/test_forms.py` tries in four ways."""
    lowered = lower(gradient_of(rule, case)[1], ORT_NATIVE)
    assert native.DOMAIN not in lowered.opset_imports


@pytest.mark.parametrize("name", sorted(NATIVE & set(OPERATORS)))
def test_native_forms_come_first(name: str) -> None:
    own = next(f.cases for f in ORT_NATIVE.lowering.forms if f.op_type == name)
    model, _ = one_call("gradgraph", name, (*OPERATORS[name].cases, *own)[0], unknown=True)
    (call,) = [node for node in model.graph if node.op_type == name]
    native = ORT_NATIVE.lowering.forms.of(call)
    assert native and ORT_NATIVE.forms_of(call) == [*native, *ORT_CPU.forms_of(call)]


def adam(*sizes: int) -> dict[str, np.ndarray]:
    """Inputs of an AdamUpdate; p, g, m and v of those sizes."""
    rng = np.random.default_rng(0)
    feeds = {f"x{i}": rng.uniform(0.1, 1.0, n).astype(np.float32) for i, n in enumerate(sizes)}
    return feeds | {"x4": np.array(-0.1, np.float32), "x5": np.array(1e-8, np.float32)}


def run_adam(feeds: dict[str, np.ndarray], threads: int = 2) -> list[np.ndarray]:
    inputs = case(real(4), real(4), real(4), real(4), real(), real(), takes=[0.1, 0.001])
    model, _ = one_call("gradgraph", "AdamUpdate", inputs, unknown=True)
    proto = to_proto(lower(model, ORT_NATIVE))
    assert [n.domain for n in proto.graph.node] == [native.DOMAIN]
    options = RuntimeOptions(native_kernels=True, threads=threads)
    return create_session(proto, Placement(("CPUExecutionProvider",)), options).run(None, feeds)


@pytest.mark.parametrize("size", [0, 1, 3, 16_384, 16_385, 100_003])
def test_pieces_of_work_are_all_done_once(size: int) -> None:
    feeds = adam(size, size, size, size)
    p, g, m, v = (feeds[f"x{i}"].astype(np.float64) for i in range(4))
    m, v = m + 0.1 * (g - m), v + 0.001 * (g * g - v)
    wanted = [p - 0.1 * m / (np.sqrt(v) + 1e-8), m, v]
    one, two = run_adam(feeds, threads=1), run_adam(feeds, threads=2)
    for a, b, c in zip(wanted, one, two, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(b, c)


def test_a_kernel_refuses_tensors_that_do_not_fit() -> None:
    with pytest.raises(Exception, match="AdamUpdate: its tensors differ in size"):
        run_adam(adam(7, 7, 6, 7))
    with pytest.raises(Exception, match="AdamUpdate: input 4 should have one element"):
        run_adam(adam(7, 7, 7, 7) | {"x4": np.ones(2, np.float32)})
