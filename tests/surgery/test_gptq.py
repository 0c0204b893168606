"""Requantised weights keep small updates: GPTQ against its paper, in every form of storage, and on calibration data."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph import surgery
from gradgraph.files.models import load_model
from gradgraph.surgery import gptq
from gradgraph.surgery.gptq import Gptq, grams
from gradgraph.surgery.layer_inputs import LayerInputs
from gradgraph.surgery.merged import kept_share, merge_to_folder
from tests.kit import small_models
from tests.surgery.test_adapters import made, node, packed

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
INPUTS, OUTPUTS = 192, 12


def by_paper(weight: Array, scales: Array, points: Array, limits: tuple[int, int], gram: Array) -> tuple[Array, Array]:
    """Algorithm 1 of Frantar et al. (2022), column by column in float64; returns the integers and the Hessian.

    Columns with large diagonals are first, as with ``act_order`` and ``static_groups`` of AutoGPTQ.
    """
    hessian = gram + 0.01 * np.mean(np.diag(gram)) * np.eye(len(gram))
    order = np.argsort(-np.diag(hessian), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(hessian[order][:, order])).T
    left, found = weight[:, order].astype(np.float64), np.zeros(weight.shape, int)
    scales, points = scales[:, order].astype(np.float64), points[:, order]
    for j in range(weight.shape[1]):
        found[:, j] = np.clip(np.rint(left[:, j] / scales[:, j] + points[:, j]), *limits)
        error = (left[:, j] - (found[:, j] - points[:, j]) * scales[:, j]) / upper[j, j]
        left[:, j:] -= np.outer(error, upper[j, j:])
    integers = np.empty_like(found)
    integers[:, order] = found
    return integers, hessian


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(
    ("bits", "block", "symmetric"), [(4, 16, True), (4, 128, False), (8, 32, False), (2, 64, True)]
)
def test_it_rounds_as_the_paper_does(bits: int, block: int, symmetric: bool, calibrated: bool) -> None:
    rng, limits = np.random.default_rng(bits), (0, 2**bits - 1)
    blocks = -(-INPUTS // block)
    scales = (rng.uniform(0.5, 1.5, (OUTPUTS, blocks)) * 4 / 2**bits).astype(np.float32).repeat(block, 1)[:, :INPUTS]
    middle = (
        rng.integers(2**bits, size=(OUTPUTS, blocks)) if not symmetric else np.full((OUTPUTS, blocks), 2 ** (bits - 1))
    )
    points = middle.repeat(block, 1)[:, :INPUTS].astype(np.float32)
    weight = rng.normal(size=(OUTPUTS, INPUTS)).astype(np.float32)  # some numbers exceed the range
    update = rng.normal(size=(OUTPUTS, 3)) @ rng.normal(size=(3, INPUTS)) / 50
    x = rng.normal(size=(100, 40)) @ rng.normal(size=(40, INPUTS)) * rng.exponential(size=INPUTS)
    given = x if calibrated else update
    wanted, hessian = by_paper(weight, scales, points, limits, given.T @ given)
    rounding = Gptq(update, grams(x[70:], grams(x[:70])) if calibrated else None)
    halves = [rounding.rounded(weight[rows], limits, scales[rows], points[rows]) for rows in (slice(5), slice(5, None))]
    np.testing.assert_array_equal(np.concatenate(halves), wanted)
    error = (wanted - points) * scales - weight
    wasted, effect = (np.sum((change @ hessian) * change) for change in (error, update))
    assert rounding.lost == pytest.approx(wasted / effect, rel=1e-4)


def test_wide_weights_are_compensated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "WIDEST", 80)
    rng = np.random.default_rng(0)
    weight, update = rng.normal(size=(2, OUTPUTS, INPUTS)).astype(np.float32)
    x, scales, points = rng.normal(size=(50, INPUTS)), np.full_like(weight, 0.5), np.full_like(weight, 8)
    found = Gptq(update, grams(x)).rounded(weight, (0, 15), scales, points)
    for at in (slice(0, 80), slice(80, 160), slice(160, None)):
        wanted, _ = by_paper(weight[:, at], scales[:, at], points[:, at], (0, 15), x[:, at].T @ x[:, at])
        np.testing.assert_array_equal(found[:, at], wanted)


# --- merged ---------------------------------------------------------------------------------------------------------


def n_bits(bits: int, block: int, has_points: bool, inputs: int = INPUTS) -> onnx.ModelProto:
    blocks = -(-inputs // block)
    numbers = RNG.integers(0, 2**bits, (OUTPUTS, blocks, block))
    numbers[..., 0] = 0  # the end of the range
    stored = {
        "w.weight": packed(numbers, bits),
        "s": RNG.uniform(0.5, 1.5, OUTPUTS * blocks).astype(np.float32) / 2**bits,
    }
    if has_points:
        stored["z"] = packed(RNG.integers(2, 2**bits - 2, (OUTPUTS, blocks)), bits).reshape(-1)
    sizes = {"K": inputs, "N": OUTPUTS, "bits": bits, "block_size": block}
    return made([node("MatMulNBits", ["x", *stored], ["y"], domain="com.microsoft", **sizes)], stored, ["rows", inputs])


def dequantised(
    dtype: str, shape: tuple[int, ...], nodes: list[Any], has_points: bool = True, **options: int
) -> onnx.ModelProto:
    kind = {"uint4": ir.DataType.UINT4, "int4": ir.DataType.INT4, "int8": ir.DataType.INT8}[dtype].numpy()
    low, high = {"uint4": (0, 16), "int4": (-8, 8), "int8": (-128, 128)}[dtype]
    sizes = list(shape)
    if "block_size" in options:
        sizes[options["axis"]] //= options["block_size"]
    elif options:
        sizes = [shape[options["axis"]]]
    else:
        sizes = []
    stored = {
        "w.weight": RNG.integers(low, high, shape).astype(kind),
        "s": (RNG.uniform(0.5, 1.5, sizes) / high).astype(np.float32),
    }
    if has_points:
        stored["z"] = RNG.integers(low + 2, high - 2, sizes).astype(kind)
    return made([node("DequantizeLinear", [*stored], ["f"], **options), *nodes], stored, ["rows", INPUTS])


PRODUCT = [node("MatMul", ["x", "f"], ["y"])]
TURNED = [node("Transpose", ["f"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])]
GEMM = [node("Gemm", ["x", "f"], ["y"], transB=1)]
STORED = {
    **{f"MatMulNBits, {bits} bits, blocks of {block}{', zero points' * points}": (n_bits, bits, block, points)
       for bits, block, points in ((4, 16, True), (4, 32, False), (4, 128, True), (8, 64, True), (8, 128, False))},
    "int4 in blocks": (dequantised, "int4", (INPUTS, OUTPUTS), PRODUCT, False),
    "uint4 in blocks, turned": (dequantised, "uint4", (OUTPUTS, INPUTS), TURNED),
    "int4 of channels": (dequantised, "int4", (OUTPUTS, INPUTS), GEMM),
    "int8 of channels": (dequantised, "int8", (INPUTS, OUTPUTS), PRODUCT),
    "int8, one scale": (dequantised, "int8", (INPUTS, OUTPUTS), PRODUCT, False),
}  # fmt: skip
OPTIONS: dict[str, dict[str, int]] = {
    "int4 in blocks": {"axis": 0, "block_size": 32}, "uint4 in blocks, turned": {"axis": 1, "block_size": 64},
    "int4 of channels": {"axis": 0}, "int8 of channels": {"axis": 1},
}  # fmt: skip


def run(model: onnx.ModelProto, x: Array) -> Array:
    (y,) = small_models.run(model, {"x": x})
    return y


def weight_of(model: onnx.ModelProto, inputs: int = INPUTS) -> Array:
    """The weight (inputs, outputs) as onnxruntime reads it."""
    return run(model, np.eye(inputs, dtype=np.float32))


def trained(model: onnx.ModelProto, steps: float) -> dict[str, Array]:
    """Factors of an adapter of which each update is about this part of the distance of two integers."""
    rng, found = np.random.default_rng(1), {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    step = float(np.mean(found["s"]))
    return {
        name: (rng.normal(size=a.shape) * (1 if "lora_A" in name else steps * step / 2)).astype(np.float32)
        for name, a in found.items() if "lora_" in name
    }  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_updates_below_half_a_step_are_kept(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function, *arguments = STORED[name]
    base = function(*arguments, **OPTIONS.get(name, {}))
    adapted = gg.lora(base, "w", rank=2, alpha=2)
    numbers = trained(adapted, 0.1)
    before, exact = weight_of(base), weight_of(surgery.merge_adapters(adapted, numbers))
    errors: dict[str, float] = {}
    merged = surgery.merge_adapters(adapted, numbers, requantise=True, errors=errors)
    sizes = {t.name: (t.data_type, list(t.dims)) for t in base.graph.initializer}
    assert {t.name: (t.data_type, list(t.dims)) for t in merged.graph.initializer} == sizes
    found = weight_of(merged)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) == pytest.approx(errors["w"], rel=1e-3)
    assert lost(before.T, exact.T, found.T) < 0.3
    assert not caplog.messages, "rounding to the nearest would undo it"


def test_inputs_that_do_not_fill_the_last_block() -> None:
    base = n_bits(4, 32, True, inputs=150)
    adapted = gg.lora(base, "w", rank=2, alpha=2)
    numbers = trained(adapted, 0.1)
    exact = weight_of(surgery.merge_adapters(adapted, numbers), 150)
    found = weight_of(surgery.merge_adapters(adapted, numbers, requantise=True), 150)
    assert lost(weight_of(base, 150).T, exact.T, found.T) < 0.3


def lost(before: Array, exact: Array, found: Array) -> float:
    """The share of an update (outputs first) that is lost of what it reads itself."""
    update = exact - before
    return float(np.linalg.norm((found - exact) @ update.T) / np.linalg.norm(update @ update.T))


def experts(inputs_first: bool) -> onnx.ModelProto:
    """Matrices of two experts, which one MatMul multiplies: int4 in blocks along the inputs."""
    shape, axis = ((2, INPUTS, OUTPUTS), 1) if inputs_first else ((2, OUTPUTS, INPUTS), 2)
    scales = RNG.uniform(0.5, 1.5, [n // 32 if i == axis else n for i, n in enumerate(shape)]) / 8
    stored = {"w.weight": RNG.integers(-8, 8, shape).astype(ir.DataType.INT4.numpy()), "s": scales.astype(np.float32)}
    nodes = [node("DequantizeLinear", [*stored], ["f"], axis=axis, block_size=32),
             node("MatMul", ["x", "f"] if inputs_first else ["f", "x"], ["y"])]  # fmt: skip
    return made(nodes, stored, [INPUTS, INPUTS])


@pytest.mark.parametrize("inputs_first", [True, False])
def test_experts_keep_their_updates(inputs_first: bool) -> None:
    base = experts(inputs_first)
    adapted = gg.lora(base, "*", rank=2, alpha=2, kind="lora_experts")
    numbers = trained(adapted, 0.1)
    models = base, surgery.merge_adapters(adapted, numbers), surgery.merge_adapters(adapted, numbers, requantise=True)
    weights = [weight_of(model) for model in models]
    for expert in zip(*weights, strict=True):
        assert lost(*(each.T if inputs_first else each for each in expert)) < 0.3


# --- on calibration data --------------------------------------------------------------------------------------------


def two_layers() -> onnx.ModelProto:
    """Two layers with the same input, and one that reads the first one's result."""
    stored, nodes = dict[str, Array](), []
    for name, read, sizes in (("a", "x", (64, 48)), ("b", "x", (64, 48)), ("c", "r", (48, 24))):
        inputs, outputs = sizes
        stored[f"{name}.weight"] = packed(RNG.integers(0, 16, (outputs, inputs // 16, 16)), 4)
        stored[f"{name}.s"] = (RNG.uniform(0.5, 1.5, outputs * inputs // 16) / 16).astype(np.float32)
        if name == "c":
            nodes.append(node("Tanh", ["y_a"], ["t"]))
            nodes.append(node("Add", ["t", "y_b"], ["r"]))
        nodes.append(node("MatMulNBits", [read, f"{name}.weight", f"{name}.s"], [f"y_{name}" if name != "c" else "y"],
                          domain="com.microsoft", K=inputs, N=outputs, bits=4, block_size=16))  # fmt: skip
    return made(nodes, stored, ["rows", "tokens", 64])


@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_the_inputs_of_layers_are_those_of_the_trained_model(kind: str, memory: int) -> None:
    model = gg.lora(two_layers(), "*", kind=kind, **({"rank": 2} if kind == "lora" else {}))
    rng = np.random.default_rng(0)
    model = surgery.load_weights(model, {t.name: rng.normal(size=t.dims).astype(np.float32)
                                         for t in model.graph.initializer if kind in t.name}, strict=False)  # fmt: skip
    x, lengths, runs = rng.normal(size=(3, 5, 64)).astype(np.float32), np.array([5, 2, 4]), list[None]()

    def batches(specs: Any) -> Any:
        runs.append(None)
        for rows in (slice(2), slice(2, None)):
            yield {"x": x[rows]}, np.arange(5) < lengths[rows, None]

    read = LayerInputs(load_model(model), batches, memory)
    probed = onnx.ModelProto.FromString(model.SerializeToString())
    probed.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("r", 1, None))
    mask = np.arange(5) < lengths[:, None]
    for module, value in (("c", run(probed, x)), ("b", x), ("a", x)):
        (found,) = read(module) or []
        np.testing.assert_allclose(found, value[mask].T @ value[mask], rtol=1e-4, atol=1e-4)
    assert read("other") is None and len(runs) == (2 if memory == 0 else 1)


def test_calibration_keeps_more_of_what_the_data_read(tmp_path: Any) -> None:
    base = n_bits(4, 32, False)
    adapted = gg.lora(base, "w", rank=2, alpha=2)
    numbers, rng = trained(adapted, 0.2), np.random.default_rng(2)
    x = (rng.normal(size=(300, 24)) @ rng.normal(size=(24, INPUTS))).astype(np.float32)
    exact, kept = run(surgery.merge_adapters(adapted, numbers), x), []
    for inputs in (None, lambda module: grams(x)):
        merged, roundings = merge_to_folder(load_model(adapted), numbers, tmp_path, requantise=True, inputs=inputs)
        error = run(ir.to_proto(merged), x) - exact
        kept.append((np.linalg.norm(error), kept_share(roundings.values())))
    (free, _), (calibrated, share) = kept
    assert calibrated < 0.3 * free
    effect = np.linalg.norm(exact - run(base, x))
    assert share == pytest.approx(1 - (calibrated / effect) ** 2, abs=0.05)
