"""Models written at opset 17 and 18: the same numbers in onnxruntime, or a refusal that names the operator."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.errors import BuildError
from gradgraph.passes.normal.opsets.older import IR_VERSIONS, write_at
from gradgraph.rules.registry import RULES, Case, Rule
from gradgraph.verify import cases
from tests.kit.running import Loop, run
from tests.runtimes.four_networks import NETWORKS

CASES = [
    pytest.param(rule, case, id=f"{rule.op_type}-{i}")
    for (domain, _), rule in RULES.items()
    for i, case in enumerate(rule.cases)
    if not domain and not case.onnxruntime
]
# Forward models that onnxruntime refuses at opset 21, too: LSTM's layout 1, GRU's sizes, and BatchNormalization in
# training mode with one output.
REFUSED_BY_ONNXRUNTIME = re.compile(r"layout_ == 0|hidden_size|number of op outputs should be 3 when Training_mode")
NEEDS_MORE = re.compile(r"needs opset 1[89]|needs opset 20|only opset (18|19|20)|at opset 1[78]|which only opset")


@pytest.mark.sweep(0.013)
@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize(("rule", "case"), CASES)
def test_gradients_of_rule_cases(rule: Rule, case: Case, opset: int) -> None:
    trial = cases.trial(rule, case, dtype=np.float32)
    try:
        older = gg.vjp(trial.model, outputs=trial.read, wrt=trial.wrt, allow_unused=True, opset=opset)
    except BuildError as error:
        assert error.findings
        assert all(NEEDS_MORE.search(str(f)) for f in error.findings), error
        return
    newer = gg.vjp(trial.model, outputs=trial.read, wrt=trial.wrt, allow_unused=True)
    assert (older.opset_import[0].version, older.ir_version) == (opset, IR_VERSIONS[opset])
    rng = np.random.default_rng(0)
    try:
        ys = run(trial.model, trial.feeds)
        cotangents = {f"{y}.cotangent": rng.uniform(-1, 1, ys[y].shape).astype(ys[y].dtype) for y in trial.read}
        expected = run(newer, trial.feeds | cotangents)
    except Fail as error:
        assert REFUSED_BY_ONNXRUNTIME.search(str(error))
        return
    found = run(older, trial.feeds | cotangents)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(0.018)
@pytest.mark.parametrize("opset", [17, 18, 20])
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_train_alike(network: str, opset: int) -> None:
    net = NETWORKS[network]
    batches = net.batches(fixed=False)[:3]
    loop = Loop(net.step("auto", fixed=False))
    expected = [float(loop(b)["loss"]) for b in batches]
    options = {"seed": 7, "opset": opset}
    step = gg.build(net.model(False), "cross_entropy", net.optimizer(), **options)
    assert step.manifest.opset == opset
    for model in (step.train, step.init, step.eval):
        onnx.checker.check_model(model, full_check=True)
        assert {o.domain: o.version for o in model.opset_import}[""] == opset
        assert model.ir_version == IR_VERSIONS[opset]
    loop, trainer = Loop(step), gg.Trainer(step, device="cpu")
    np.testing.assert_allclose([float(loop(b)["loss"]) for b in batches], expected, atol=1e-6)
    np.testing.assert_allclose([float(trainer.step(b)["loss"]) for b in batches], expected, atol=1e-6)
    exported = trainer.export()
    assert exported is not None
    onnx.checker.check_model(exported, full_check=True)
    (name,) = [x.name for x in exported.graph.input]
    np.testing.assert_allclose(
        next(iter(run(exported, {name: batches[0][name]}).values())), trainer.predict(batches[0][name]), atol=1e-5
    )


REFUSED = {
    "y = BitwiseXor(k, k)": "(BitwiseXor) needs opset 18, but the file is written at 17",
    "y = ReduceMean(x, k)": "has computed axes, which only opset 18 can express",
    "a = Constant <value_ints = [1]> () y = ReduceMax <noop_with_empty_axes = 1> (x)": "reduces over no axis",
    'y = Pad <mode = "wrap"> (x, k)': "has mode=wrap, which only opset 19 can express",
    'y = ScatterElements <reduction = "max"> (x, i, x)': "has reduction=max",
    "y = AveragePool <kernel_shape = [2], dilations = [2]> (z)": "has dilations, which AveragePool does not have",
}


@pytest.mark.parametrize(("text", "says"), REFUSED.items())
def test_what_needs_a_newer_opset_is_refused_by_name(text: str, says: str) -> None:
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[2, 2] x, int64[2] k, int64[2, 2] i, float[1, 2, 8] z)'
    model = ir.from_proto(onnx.parser.parse_model(f"{head} => (y) {{ {text} }}"))
    with pytest.raises(BuildError, match=re.escape(says)):
        write_at(model, 17)


@pytest.mark.parametrize("opset", [16, 22, 0])
def test_opsets_that_are_not_written(opset: int) -> None:
    with pytest.raises(BuildError, match=f"the opset must be from 17 to 21, not {opset}"):
        gg.jvp(NETWORKS["MLP"].model(True), opset=opset)
