"""Mixed precision: what is computed in which type, and what stays float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto

import gradgraph as gg
from gradgraph import optim
from gradgraph.backends import BACKENDS, step_backends
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu.float16_rounding import round_in_between
from gradgraph.backends.ort_cuda.cuda_kernels import obstacles_to_capture
from gradgraph.errors import ArgumentError, BuildError, ModelError, UnknownNameError
from gradgraph.files.models import to_proto
from gradgraph.graph.schemas import signature
from gradgraph.graph.shapes import OPSET
from gradgraph.passes.autocast import FOLLOWS, METADATA_KEY, MOVES, PRECISIONS, PRODUCTS, Precision
from gradgraph.passes.mixed_precision import compute_low
from gradgraph.passes.normal import normalise
from gradgraph.rules.registry import RULES, Case, Rule
from gradgraph.runtime.execution.opener import lacks, on_the_cpu
from gradgraph.runtime.execution.session import CUDA
from gradgraph.step.manifest import Manifest
from gradgraph.verify import cases
from tests.kit.optim_cases import BATCHES, X, Y, network
from tests.kit.running import Loop, run
from tests.kit.small_models import parsed

LOW = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def trainer_of(step: gg.Step) -> gg.Trainer:
    return gg.Trainer(step, device="cpu")


def types_of(model: onnx.ModelProto) -> dict[str, set[int]]:
    """Of each operator, the floating types of its first outputs."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    types = {v.name: v.type.tensor_type.elem_type for v in (*inferred.graph.value_info, *inferred.graph.output)}
    found: dict[str, set[int]] = {}
    for node in model.graph.node:
        found.setdefault(node.op_type, set()).add(types[node.output[0]])
    return found


# --- what is computed in what ---------------------------------------------------------------------------------


def test_the_table_lists_operators_that_take_float16() -> None:
    assert not (PRODUCTS & MOVES or PRODUCTS & FOLLOWS or MOVES & FOLLOWS)
    for op_type in PRODUCTS | MOVES | FOLLOWS:
        known = signature(op_type, OPSET)
        assert known is not None
        result = known.formal(0, of_output=True)
        assert "tensor(float16)" in result.allowed, op_type
        assert result.variable == known.formal(0, of_output=False).variable or op_type == "Where", op_type


def everything() -> onnx.ModelProto:
    """A convolution, a norm, activations, an attention-like softmax, a mask that float16 cannot hold, residuals."""
    rng = np.random.default_rng(0)
    return parsed(
        """(float[n, 1, 6, 6] image) => (float[n, 3] logits, float[n, 36] hidden) <
            float low = {-1e9}, float half = {0.5}, int64[2] rows = {-1, 36}, int64[1] one = {1}> {
            c = Conv<pads = [1, 1, 1, 1]>(image, filter, fb)
            a = Relu(c)
            p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)
            hidden = Reshape(p, rows)
            m = MatMul(hidden, w)
            mb = Add(m, wb)
            h = Mul(mb, half)
            s = Softmax(h)
            r = Add(s, h)
            masked = Add(r, low)
            e = LayerNormalization(r, scale)
            logits = Gemm(e, v, vb)
        }""",
        filter=rng.normal(size=(4, 1, 3, 3)) / 3,
        fb=rng.normal(size=4),
        w=rng.normal(size=(36, 8)) / 6,
        wb=rng.normal(size=8),
        scale=np.ones(8),
        v=rng.normal(size=(8, 3)),
        vb=np.zeros(3),
    )


IMAGES = {"image": np.random.default_rng(1).normal(size=(12, 1, 6, 6)).astype(np.float32), "target": np.arange(12) % 3}


def test_each_operator_is_computed_in_what_the_table_says() -> None:
    step = gg.build(everything(), output="logits", precision="float16")
    found = types_of(step.eval)
    low, wide = {TensorProto.FLOAT16}, {TensorProto.FLOAT}
    for op_type in ("Conv", "Relu", "MaxPool", "Reshape", "MatMul", "Gemm"):
        assert found[op_type] == low, op_type
    for op_type in ("Softmax", "LayerNormalization", "LogSoftmax"):
        assert found[op_type] == wide, op_type
    assert found["Add"] == low | wide  # the bias of the product; what adds a float32 softmax
    assert sum(n.op_type == "Cast" and n.input[0] == "w" for n in step.train.graph.node) == 1  # one for both passes
    onnx.checker.check_model(step.train, full_check=True)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_names_and_types_of_the_user_stay(precision: str) -> None:
    plain, mixed = (gg.build(everything(), output="logits", precision=p) for p in ("float32", precision))
    for name in ("inputs", "targets", "outputs", "trainable", "metrics", "hyperparameters"):
        assert getattr(mixed.manifest, name) == getattr(plain.manifest, name)
    shown = {(s.name, s.dtype, s.kind) for s in plain.manifest.state}
    more = {(s.name, s.dtype, s.kind) for s in mixed.manifest.state} - shown
    assert {name for name, _, _ in more} == (
        {"loss_scale", "loss_scale_good_steps", "skipped_steps"} if precision == "float16" else set()
    )
    for model in (mixed.train, mixed.eval):
        onnx.checker.check_model(model, full_check=True)
        for value in (*model.graph.input, *model.graph.output):
            assert value.type.tensor_type.elem_type not in LOW.values()


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_loss_reads_inner_values_in_float32(precision: str) -> None:
    seen = []

    def loss(out: Any, batch: Any) -> Any:
        seen.extend((name, out[name].dtype) for name in ("hidden", "mb", "h", "w"))
        return (out["mb"] ** 2).mean() + out["hidden"].mean()

    step = gg.build(everything(), loss, precision=precision)
    assert {dtype for _, dtype in seen} == {ir.DataType.FLOAT}
    assert np.isfinite(trainer_of(step).step({"image": IMAGES["image"]})["loss"])
    inner = gg.build(everything(), "mse", output="mb", precision=precision)
    assert np.isfinite(
        trainer_of(inner).step({"image": IMAGES["image"], "target": np.zeros((12, 8), np.float32)})["loss"]
    )


def test_bfloat16_is_what_rounding_to_it_gives() -> None:
    """To the bit: numbers are rounded before and after a product, and added up in float32."""
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=size).astype(np.float32) for size in ((4, 8), (8, 5), (5,)))
    model = parsed("(float[n, 8] x) => (float[n, 5] y) { m = MatMul(x, w)  y = Add(m, b) }", w=w, b=b)
    found = trainer_of(gg.build(model, "mse", precision="bfloat16")).predict({"x": x})

    def rounded(a: np.ndarray) -> np.ndarray:
        return a.astype(ml_dtypes.bfloat16).astype(np.float32)

    assert np.array_equal(found, rounded(rounded(rounded(x) @ rounded(w)) + rounded(b)))


def test_float16_is_rounded_on_the_cpu_as_where_it_is_real() -> None:
    """Onnxruntime's CPU provider would leave roundings out, and an overflow would not be one."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((4, 8), (8, 5)))
    model = parsed("(float[n, 8] x) => (float[n, 5] y) { y = MatMul(x, w) }", w=w)
    trainer = trainer_of(gg.build(model, "mse", precision="float16"))
    halves = x.astype(np.float16).astype(np.float32) @ w.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(trainer.predict({"x": x}), halves.astype(np.float16).astype(np.float32))
    assert np.isinf(trainer.predict({"x": np.float32(1e5) * x})).any()


NETWORKS: dict[str, onnx.ModelProto] = {
    "recurrent": parsed(
        "(float[5, n, 3] x) => (float[n, 4] y) <int64[1] front = {0}> {"
        " all, last, cell = LSTM<hidden_size = 4>(x, w, r, b)  y = Squeeze(last, front) }",
        w=np.random.default_rng(0).normal(size=(1, 16, 3)) / 2,
        r=np.random.default_rng(1).normal(size=(1, 16, 4)) / 2,
        b=np.zeros((1, 32)),
    ),
    "upwards": parsed(
        "(float[n, 2, 4, 4] x) => (float[n, 2, 9, 9] y) { u = ConvTranspose<strides = [2, 2]>(x, w)  y = Tanh(u) }",
        w=np.random.default_rng(0).normal(size=(2, 2, 3, 3)) / 2,
    ),
    "summed": parsed(
        '(float[n, 3, 4] x) => (float[n, 3] y) { y = Einsum<equation = "bij,kj->bi">(x, w) }',
        w=np.random.default_rng(0).normal(size=(5, 4)) / 2,
    ),
    "branching": parsed(
        "(float[n, 4] x, bool c) => (float[n, 3] y) { h = MatMul(x, w)"
        " k = If(c) <then_branch = a () => (float[n, 3] t) { t = Tanh(h) },"
        " else_branch = b () => (float[n, 3] e) { e = Neg(h) }>  y = Sigmoid(k) }",
        w=np.random.default_rng(0).normal(size=(4, 3)),
    ),
    "looping": parsed(
        "(float[n, 4] x) => (float[n, 4] y) <int64 three = {3}, bool yes = {1}> { h = MatMul(x, w)"
        " y = Loop(three, yes, h) <body = b (int64 i, bool go, float[n, 4] s) => (bool on, float[n, 4] t) {"
        " on = Identity(go)  p = MatMul(s, w)  t = Tanh(p) }> }",
        w=np.random.default_rng(0).normal(size=(4, 4)) / 2,
    ),
}


@pytest.mark.sweep(0.21)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_float32_to_rounding(name: str, precision: str) -> None:
    model, rng = NETWORKS[name], np.random.default_rng(0)
    sizes = {i.name: [d.dim_value or 6 for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    feeds: dict[str, Any] = {n: rng.normal(size=s).astype(np.float32) for n, s in sizes.items() if n != "c"}
    feeds |= {"c": np.array(True)} if "c" in sizes else {}
    feeds["target"] = rng.normal(size=run(model, feeds)["y"].shape).astype(np.float32)
    moved = []
    for p in ("float32", precision):
        chosen = gg.Precision(p, init_scale=256.0)  # of 2^16, gradients of 1 overflow
        trainer = trainer_of(gg.build(model, "mse", optim.sgd(1.0), precision=chosen))
        before = trainer.parameters
        trainer.step(feeds)
        moved.append({n: w - before[n] for n, w in trainer.parameters.items()})
        assert np.isfinite(trainer.evaluate([feeds])["loss"])
    for n, expected in moved[0].items():
        size = np.abs(expected).max()
        np.testing.assert_allclose(moved[1][n], expected, atol=size * {"float16": 0.01, "bfloat16": 0.06}[precision])


LISTED = [
    pytest.param(r, c, id=f"{r.op_type}-{i}")
    for r in RULES.values()
    for i, c in enumerate(r.cases)
    if not r.domain and r.op_type in PRODUCTS | MOVES | FOLLOWS and not c.onnxruntime
]


@pytest.mark.sweep(0.013)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize(("rule", "case"), LISTED)
def test_gradients_of_each_listed_operator(rule: Rule, case: Case, precision: str) -> None:
    """As stock onnxruntime runs them, and as a Trainer does on the CPU; against float32."""
    trial = cases.trial(rule, case, dtype=np.float32)
    try:
        results = run(trial.model, trial.feeds)
    except Exception as error:  # onnxruntime's own classes, which it does not export
        pytest.skip(f"onnxruntime does not run the operator forwards: {str(error)[:60]}")
    rng = np.random.default_rng(0)
    drawn = {f"{y}.cotangent": np.asarray(rng.uniform(-1, 1, results[y].shape), np.float32) for y in trial.read}
    low = normalise(trial.model)
    assert compute_low(low, Precision(precision, lower=rule.op_type))
    gradients = [gg.vjp(m, outputs=trial.read, wrt=trial.wrt, allow_unused=True) for m in (trial.model, to_proto(low))]
    rounded = ir.from_proto(gradients[1])
    rounded.metadata_props[METADATA_KEY] = precision
    assert precision == "float16" or not round_in_between(rounded)
    round_in_between(rounded)
    expected, tolerance = run(gradients[0], {**trial.feeds, **drawn}), {"float16": 1e-2, "bfloat16": 6e-2}[precision]
    for model in (gradients[1], to_proto(rounded)):
        onnx.checker.check_model(model, full_check=True)
        found = run(model, {**trial.feeds, **drawn})
        for x in trial.wrt:
            wanted, got = expected[f"{x}.grad"], found[f"{x}.grad"]
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, wanted, tolerance, tolerance * max(1.0, np.abs(wanted).max(initial=0)))


def test_overrides_by_operator_and_by_node() -> None:
    kept = gg.build(everything(), output="logits", precision=gg.Precision("float16", float32=["Conv", "Re*"]))
    found = types_of(kept.eval)
    assert found["Conv"] == found["Relu"] == found["MaxPool"] == {TensorProto.FLOAT}
    assert found["MatMul"] == {TensorProto.FLOAT16}
    lowered = gg.build(everything(), output="logits", precision=gg.Precision("float16", lower="Softmax"))
    assert types_of(lowered.eval)["Softmax"] == {TensorProto.FLOAT16}
    names = [n.name for n in normalise(everything()).graph if n.op_type == "MatMul"]
    by_name = gg.build(everything(), output="logits", precision=gg.Precision("float16", float32=names))
    assert types_of(by_name.eval)["MatMul"] == {TensorProto.FLOAT}


def test_what_makes_no_sense_is_refused() -> None:
    for given, meant in (("fp16", "float16"), ("16-mixed", "float16"), ("bf16", "bfloat16"), ("floot16", "float16")):
        with pytest.raises(BuildError, match=f"no precision '{given}'; did you mean '{meant}'"):
            gg.build(network(), "mse", precision=given)
    with pytest.raises(ArgumentError, match="precision is 16"):
        gg.build(network(), "mse", precision=16)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match=r"'head', .* is neither a node nor an operator"):
        gg.build(network(), "mse", precision=gg.Precision("float16", float32="head"))
    with pytest.raises(BuildError, match=r"ArgMax.* cannot be computed in float16"):
        text = "(float[n, 4] x) => (float[n, 4] y, int64[n, 1] i) { y = MatMul(x, w)  i = ArgMax<axis = 1>(y) }"
        model = parsed(text, w=np.eye(4))
        gg.build(model, "mse", precision=gg.Precision("float16", lower="ArgMax"))
    with pytest.raises(BuildError, match="the precision float16 has no effect"):
        gg.build(parsed("(float[4] x) => (float[4] y) { y = Mul(x, w) }", w=np.ones(4)), "mse", precision="float16")
    for wrong in ({"init_scale": 0.0}, {"growth_factor": float("nan")}, {"growth_interval": 0.5}):
        with pytest.raises(ArgumentError):
            gg.Precision("float16", **wrong)  # type: ignore[arg-type]
    for wrong in ({"growth_factor": 0.5}, {"backoff_factor": 2.0}, {"growth_interval": 0}):
        with pytest.raises(BuildError, match="growth_factor must be at least 1"):
            gg.Precision("float16", **wrong)  # type: ignore[arg-type]


# --- providers ------------------------------------------------------------------------------------------------


def test_what_a_provider_lacks_is_said_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    for precision in ("float32", "float16", "bfloat16"):
        caplog.clear()
        step = gg.build(network(), "mse", precision=precision)
        caplog.clear()
        trainer = trainer_of(step)
        assert not caplog.records
        trainer.step(BATCHES[0])
        said = [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert len(said) == (precision != "float32")
        assert all("computes in float32 and rounds" in s and precision in s for s in said)
    assert (
        lacks("float16", CUDA) == "" and "CUDA" in lacks("bfloat16", CUDA) and "does not know" in lacks("float16", None)
    )


def test_cuda_has_a_kernel_for_each_node_and_can_capture_the_step() -> None:
    """By its table, which is compared with the real kernels elsewhere."""
    for precision in ("float16", "bfloat16"):
        step = gg.build(everything(), output="logits", precision=precision)
        model = for_machine(step.train, BACKENDS["ort-cuda"], {"n": 12})
        assert on_the_cpu(model) == ""
        assert not obstacles_to_capture(ir.from_proto(model))
    text = "(float[n, 4] x) => (float[n, 4] y) { h = MatMul(x, w)  y = Mish(h) }"
    stray = gg.build(parsed(text, w=np.eye(4)), "mse", precision="float16")
    lacking = on_the_cpu(for_machine(stray.train, BACKENDS["ort-cuda"], {"n": 12}))
    assert "'Mish'" in lacking


# --- around a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_evaluation_is_in_the_precision_of_training(precision: str) -> None:
    trainer = trainer_of(gg.build(everything(), output="logits", precision=precision))
    loss = trainer.evaluate(IMAGES)["loss"]
    assert float(trainer.step(IMAGES)["loss"]) == pytest.approx(loss, rel=1e-6)


@pytest.mark.sweep(0.05)
@pytest.mark.parametrize(("precision", "accumulate"), [("float16", None), ("float16", 2), ("bfloat16", None)])
def test_a_resumed_run_is_the_same_to_the_bit(precision: str, accumulate: int | None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init_scale": 2.0**22, "growth_interval": 2} if precision == "float16" else {}
    step = gg.build(network(), "mse", optim.adamw(optim.cosine(0.05, 100)), ema=0.9, accumulate=accumulate is not None,
                    precision=gg.Precision(precision, **settings))  # fmt: skip
    step.save(tmp_path / "step")
    data = {"x": X[:6].reshape(-1, 4), "target": Y[:6].reshape(-1, 3)}
    fit: dict[str, Any] = {"epochs": 3, "batch_size": 16, "progress": False, "accumulate": accumulate}
    straight, half = trainer_of(step), trainer_of(step)
    history = straight.fit(data, **fit)
    half.fit(data, **fit, max_steps=7, checkpoint=tmp_path / "run.ckpt")
    resumed = gg.Trainer.resume(tmp_path / "step", tmp_path / "run.ckpt", device="cpu")
    assert resumed.fit(data, **fit) == history
    expected = straight.state_dict()
    assert all(np.array_equal(value, expected[n]) for n, value in resumed.state_dict().items())
    if precision == "float16":
        assert history["skipped_steps"][-1] > 1 and len(set(history["loss_scale"])) > 1


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [everything, *(lambda m=m: m for m in NETWORKS.values())])
def test_an_exported_model_is_float32(make: Any, precision: str) -> None:
    own = {"output": "logits"} if make is everything else {"loss": "mse"}
    plain, mixed = (trainer_of(gg.build(make(), precision=p, **own)) for p in ("float32", precision))
    expected, found, low = plain.export(), mixed.export(), mixed.export(mixed=True)
    assert [(n.op_type, n.name, n.input, n.output, n.attribute) for n in found.graph.node] == [
        (n.op_type, n.name, n.input, n.output, n.attribute) for n in expected.graph.node
    ]
    assert sorted(t.SerializeToString() for t in found.graph.initializer) == sorted(
        t.SerializeToString() for t in expected.graph.initializer
    )
    assert not [p for p in found.metadata_props if p.key == METADATA_KEY]
    for model in (found, low):
        onnx.checker.check_model(model, full_check=True)
    if make is everything:
        stored = {t.name: t.data_type for t in low.graph.initializer}
        assert stored["w"] == stored["filter"] == LOW[precision] and stored["scale"] == TensorProto.FLOAT
        feeds = {"image": IMAGES["image"]}
        np.testing.assert_allclose(run(low, feeds)["logits"], run(found, feeds)["logits"], atol=0.05)
    with pytest.raises(BuildError, match="mixed exports need a step in mixed precision"):
        plain.export(mixed=True)


@pytest.mark.parametrize("backend", step_backends())
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_step_for_each_backend_trains(backend: str, precision: str) -> None:
    options = {"optimizer": optim.sgd(0.1), "precision": precision, "backend": backend}
    try:
        step = gg.build(everything(), output="logits", **options)
    except BuildError as error:  # of a runtime that, by its table, does not take open sizes or the type
        assert BACKENDS[backend].table is not None and error.findings
        return
    if backend in ("ort-cuda", "coreml"):
        return  # there is none here; it is written
    train = Loop(step)
    losses = [float(train(IMAGES)["loss"]) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert np.isfinite(train.evaluate(IMAGES)["loss"])


def test_groups_and_clipping_look_through_the_casts() -> None:
    plain, mixed = (
        gg.build(
            network(),
            "mse",
            optim.chain(optim.clip_by_unit_norm(0.01), optim.adamw(0.05, no_decay="norm_and_bias", layer_decay=0.5)),
            precision=p,
        )
        for p in ("float32", "bfloat16")
    )
    states = []
    for step in (plain, mixed):
        trainer = trainer_of(step)
        for batch in BATCHES[:5]:
            trainer.step(batch)
        states.append(trainer.parameters)
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, atol=0.05)


def test_a_manifest_says_nothing_of_a_precision_that_there_is_not() -> None:
    assert "precision" not in json.loads(gg.build(network(), "mse", "adamw").manifest.to_json())
    given = gg.Precision("float16", float32="Conv*", growth_interval=10)
    text = gg.build(network(), "mse", "adamw", precision=gg.Precision("float16", growth_interval=10)).manifest.to_json()
    found = Manifest.from_json(text).precision
    assert found["name"] == "float16" and found["arguments"] == {"growth_interval": 10}
    assert given.arguments == {"float32": ["Conv*"], "growth_interval": 10}
    for lie in ({"name": 3, "arguments": {}}, {"name": "x", "arguments": {}, "state": {"loss_scale": "none"}}, [1]):
        with pytest.raises(ModelError, match="damaged"):
            Manifest.from_json(json.dumps({**json.loads(text), "precision": lie}))
    assert tuple(PRECISIONS) == ("float32", "float16", "bfloat16")
