"""Every operator of onnxruntime's own domains is in the table of operators: a rule, a rewrite, or a reason."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph.errors import UnsupportedOperatorError
from gradgraph.passes.normal.dialects import contrib
from gradgraph.rules import registry
from gradgraph.verify.operator_status import operators, status
from tests.kit.small_models import assert_same, model_of, real, run

DOMAINS = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")
MICROSOFT = {"com.microsoft": 1}


def schemas():
    return sorted({(s.domain, s.name) for s in ort_state.get_all_operator_schema() if s.domain in DOMAINS})


def test_every_contrib_operator_has_a_state():
    found = schemas()
    assert len(found) > 150  # the installed onnxruntime lists its schemas
    assert [key for key in found if status(key) == "none"] == []


PARTLY = {("com.microsoft", "Inverse")}  # small matrices have a form, others are refused


def test_no_contrib_operator_has_two_states():
    tables = [set(contrib.forms()), set(registry.RULES), set(registry.NO_GRADIENT), set(registry.REFUSED)]
    pairs = [a & b for i, a in enumerate(tables) for b in tables[i + 1 :]]
    assert {key for pair in pairs for key in pair if key[0] in DOMAINS} == PARTLY


def test_operators_with_integer_outputs_only_have_no_gradient():
    """Their outputs stop gradients anyway, so they are not refused."""
    floats = {"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"}
    integral = set()
    for schema in ort_state.get_all_operator_schema():
        types = {t.type_param_str: set(t.allowed_type_strs) for t in schema.type_constraints}
        if not any(types.get(o.typeStr, {o.typeStr}) & floats for o in schema.outputs):
            integral.add((schema.domain, schema.name))
    assert not integral & {key for key in registry.REFUSED if key[0] == "com.microsoft"}


def test_reasons_and_remedies_are_listed():
    rows = {r["operator"]: r for r in operators()}
    row = rows["com.microsoft.BeamSearch"]
    assert (row["status"], row["differentiable"]) == ("refused", False)
    assert row["remark"] == "it generates token sequences in a loop of its own"
    for refusal in registry.REFUSED.values():
        assert refusal.reason.split()[0] in ("it", "its", "only") and refusal.remedy
        assert not refusal.reason.endswith(".") and not refusal.remedy.endswith(".")


def test_operators_that_only_gpu_kernels_compute_have_no_cpu_kernel():
    cpu = {(k.domain, k.op_name) for k in ort_state.get_all_opkernel_def() if k.provider == "CPUExecutionProvider"}
    told = {key for key, refusal in registry.REFUSED.items() if "GPU kernels" in refusal.reason}
    assert ("com.microsoft", "SparsePagedAttention") in told and ("com.microsoft", "WordConvEmbedding") in cpu
    assert not told & cpu


BYTES = np.random.default_rng(0).integers(0, 255, (4, 5)).astype(np.uint8)
STORED = {"B": BYTES, "scale": np.array(0.1, np.float32), "zero": np.array(128, np.uint8), "w": real(5, 2)}


def after_integers(rows=3):
    """A product with 8-bit weights, and a float layer after it."""
    nodes = [
        helper.make_node("DynamicQuantizeMatMul", ["x", "B", "scale", "zero"], ["h"], "first", domain="com.microsoft"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    return model_of(nodes, {"x": (np.float32, [rows, 4])}, weights=STORED, domains=MICROSOFT)


def test_a_refused_operator_on_the_path_is_named_with_a_remedy():
    message = (
        r"com\.microsoft\.DynamicQuantizeMatMul \(node 'first'\), as it rounds its input to 8-bit integers, and "
        r"rounding has no derivative; use the float model, gradgraph\.qat, or freeze the weights before it$"
    )
    with pytest.raises(UnsupportedOperatorError, match=message) as caught:
        gg.vjp(after_integers(), wrt=["x"])
    assert "as it rounds" in str(caught.value.findings[0])


@pytest.mark.parametrize("rows", [3, "rows", None], ids=str)
def test_a_refused_operator_off_the_path_runs(rows):
    model = after_integers(rows)
    x = {"x": real(3, 4)}
    (y,) = run(model, x)
    gradient = gg.vjp(model, wrt=["w"])
    dy = real(3, 2, seed=1)
    assert_same([y], run(gradient, x | {"y.cotangent": dy})[:1])
    hidden = np.maximum(run(first_of(model), x)[0], 0)
    assert_same([hidden.T @ dy], run(gradient, x | {"y.cotangent": dy})[1:], atol=1e-5)
    step = gg.build(model, loss="mse", optimizer=gg.optim.sgd(0.1), train="w")
    assert np.isfinite(gg.Trainer(step).step(x | {"target": y + 1})["loss"])


HALF = {"scale": np.array(0.01, np.float32), "middle": np.array(128, np.uint8)}
FROZEN = {
    "QAttention": (
        ["x", "B", "b", "scale", "scale", "", "middle", "middle"],
        {"num_heads": 2},
        BYTES[:, :3].repeat(4, 1),
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    ),
    "DynamicQuantizeLSTM": (
        ["x", "B", "R", "", "", "", "", "", "scales", "middles", "scales", "middles"],
        {"hidden_size": 3},
        BYTES[None, :, :3].repeat(4, 2),
        real(5, 2, 4),
    ),
    "MaxpoolWithMask": (["x", "mask"], {"kernel_shape": [2]}, BYTES, real(2, 1, 5)),
}


@pytest.mark.parametrize("op", FROZEN)
def test_types_and_shapes_behind_a_kept_operator_are_inferred(op):
    """ONNX's inference does not know them; the layer after it is trained."""
    names, attrs, stored, x = FROZEN[op]
    weights = HALF | {"B": stored, "b": real(12), "R": BYTES[None, :3, :3].repeat(4, 2)}
    weights |= {"scales": HALF["scale"].reshape(1), "middles": HALF["middle"].reshape(1)}
    weights |= {"mask": np.ones((2, 1, 5), np.int32), "w": real(4 if op != "DynamicQuantizeLSTM" else 3, 2)}
    nodes = [
        helper.make_node(op, names, ["h"], "first", domain="com.microsoft", **attrs),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    used = {n: weights[n] for n in [*names, "w"] if n in weights}
    model = model_of(nodes, {"x": (x.dtype, ["n", *x.shape[1:]])}, weights=used, domains=MICROSOFT)
    (y,) = run(model, {"x": x})
    gradient = gg.vjp(model, wrt=["w"])
    assert isinstance(gradient, onnx.ModelProto)
    found = run(gradient, {"x": x, "y.cotangent": np.ones_like(y)})
    hidden = run(model_of(nodes[:1], {"x": x}, ["h"], weights=used, domains=MICROSOFT), {"x": x})[0]
    over_rows = hidden.reshape(-1, hidden.shape[-1]).sum(0)
    assert_same([y, np.stack([over_rows, over_rows], 1)], found, atol=1e-4)


def first_of(model):
    """The first layer alone."""
    return model_of([model.graph.node[0]], {"x": real(3, 4)}, ["h"], weights=STORED, domains=MICROSOFT)


def test_a_registered_rule_replaces_a_refusal():
    key = ("com.microsoft", "GemmFloat8")
    kept = registry.REFUSED[key]
    try:
        registry.vjp("GemmFloat8", domain="com.microsoft")(lambda op, dy, y, a, b: (None, None))
        assert status(key) == "rule"
    finally:
        del registry.RULES[key]
        registry.REFUSED[key] = kept
