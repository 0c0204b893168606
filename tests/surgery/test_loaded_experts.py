"""Weights of another training in the experts of a file: each stored number is that of the exporter."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import _pybind_state

from gradgraph import surgery
from gradgraph.errors import GradgraphError
from tests.surgery.test_adapters import node

EXPERTS, WIDTH, HIDDEN = 3, 32, 64
OURS, THEIRS = "model.layers.0.moe", "model.layers.0.mlp"
Tensors = dict[str, np.ndarray]


def drawn(seed: int) -> Tensors:
    """A mixture as in a folder of Qwen: outputs first, and all rows of the gate before those of the linear half."""
    rng = np.random.default_rng(seed)
    sizes = {"experts.gate_up_proj": (EXPERTS, 2 * HIDDEN, WIDTH), "experts.down_proj": (EXPERTS, WIDTH, HIDDEN),
             "experts.gate_up_proj_bias": (EXPERTS, 2 * HIDDEN), "experts.down_proj_bias": (EXPERTS, WIDTH),
             "gate.weight": (EXPERTS, WIDTH)}  # fmt: skip
    return {f"{THEIRS}.{name}": rng.normal(size=shape).astype(np.float32) for name, shape in sizes.items()}


def in_turns(halves: np.ndarray) -> np.ndarray:
    return np.stack(np.split(halves, 2, axis=1), 2).reshape(halves.shape)


def as_gpt_oss(given: Tensors) -> Tensors:
    """The same experts as gpt-oss stores them: inputs first, and rows in turns."""
    found = {name: in_turns(array) if ".gate_up_proj" in name else array for name, array in given.items()}
    return {n: a.swapaxes(1, 2) if a.ndim == 3 else a for n, a in found.items()}


def one_by_one(given: Tensors) -> Tensors:
    found = {name: array for name, array in given.items() if array.ndim == 2}
    for e in range(EXPERTS):
        gate, up = np.split(given[f"{THEIRS}.experts.gate_up_proj"][e], 2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": given[f"{THEIRS}.experts.down_proj"][e]}
        found |= {f"{THEIRS}.experts.{e}.{name}.weight": array for name, array in parts.items()}
    return found


WAYS = {"stacked": lambda given: given, "gpt-oss": as_gpt_oss, "one by one": one_by_one}


def quantised(weight: np.ndarray, bits: int, block: int, points: bool) -> list[np.ndarray]:
    """Integers, scales and zero points of [experts, outputs, inputs] by onnxruntime's quantiser of MatMulNBits."""
    found: list[list[np.ndarray]] = [[], [], []]
    for matrix in weight:
        (rows, columns), blocks = matrix.shape, matrix.shape[1] // block
        arrays = (np.zeros((rows, blocks, block * bits // 8), np.uint8), np.zeros(rows * blocks, np.float32),
                  np.zeros(rows * -(-blocks * bits // 8), np.uint8))  # fmt: skip
        quantise = getattr(_pybind_state, f"quantize_matmul_{bits}bits")
        quantise(arrays[0], np.ascontiguousarray(matrix.T), *arrays[1:], block, rows, columns, not points)
        shapes = ((rows, -1), (rows, blocks), (rows, -1))
        for each, array, shape in zip(found, arrays, shapes, strict=True):
            each.append(array.reshape(shape))
    return [np.stack(each) for each in found][: 3 if points else 2]


def by_rows(weight: np.ndarray, bits: int) -> list[np.ndarray]:
    """As the builder of onnxruntime-genai: positive scales, so that the largest positive numbers are clipped."""
    half = 2 ** (bits - 1)
    scales = np.abs(weight).max(-1) / np.float32(half)
    numbers = (np.clip(np.rint(weight / scales[..., None]), -half, half - 1) + half).astype(np.uint8)
    return [numbers if bits == 8 else numbers[..., ::2] + 16 * numbers[..., 1::2], scales]


FORMATS = {"float": (0, 0, False), "int4": (4, 32, False), "int8": (8, 32, False), "int4 of rows": (4, 0, False),
           "int8 of rows": (8, 0, False), "int4 with zero points": (4, 16, True),
           "int8 with zero points": (8, 32, True)}  # fmt: skip


def exported(form: str, given: Tensors, **attributes: Any) -> onnx.ModelProto:
    """A file as the builder of onnxruntime-genai writes it, in which rows of gate and linear half alternate."""
    (bits, block, has_points), stored, inputs, zeros = FORMATS[form], {}, [], []
    for name in ("gate_up_proj", "down_proj"):
        weight, bias = given[f"{THEIRS}.experts.{name}"], given[f"{THEIRS}.experts.{name}_bias"]
        if name == "gate_up_proj":
            weight, bias = in_turns(weight), in_turns(bias)
        if not bits:
            arrays = {"weight": weight}
        else:
            parts = quantised(weight, bits, block, has_points) if block else by_rows(weight, bits)
            arrays = dict(zip(("qweight", "scales", "zero_points"), parts, strict=False))
        stored |= {f"{OURS}.experts.{name}.{part}": array for part, array in (arrays | {"bias": bias}).items()}
        inputs += [f"{OURS}.experts.{name}.{part}" for part in arrays if part != "zero_points"]
        inputs += [f"{OURS}.experts.{name}.bias"]
        zeros += [f"{OURS}.experts.{name}.zero_points"]
    inputs += ["", "", "", *zeros] if has_points else []
    how = (
        {"expert_weight_bits": bits, "normalize_routing_weights": 1} | ({"block_size": block} if block else {})
        if bits
        else {}
    )
    router = f"{OURS}.router.MatMul.weight"
    nodes = [node("MatMul", ["x", router], ["s"]),
             node("QMoE" if bits else "MoE", ["x", "s", *inputs], ["y"], domain="com.microsoft", k=2, swiglu_fusion=1,
                  activation_type="swiglu", **how | attributes)]  # fmt: skip
    stored[router] = given[f"{THEIRS}.gate.weight"].T.copy()
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", WIDTH]) for n in ("x", "y")]
    initializers = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def arrays_of(model: onnx.ModelProto) -> Tensors:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMATS)
def test_the_file_is_that_of_the_exporter(form: str, way: str) -> None:
    attributes = {"activation_beta": float(way == "gpt-oss")}
    base, errors = exported(form, drawn(0), **attributes), dict[str, float]()
    found = surgery.load_weights(base, WAYS[way](drawn(1)), errors=errors)
    wanted, own = (arrays_of(model) for model in (exported(form, drawn(1), **attributes), found))
    assert list(own) == list(wanted)
    for name, array in wanted.items():
        if not name.endswith(("qweight", "scales", "zero_points")):
            np.testing.assert_array_equal(own[name], array, err_msg=name)
    for name, error in errors.items():
        (mine, scales), (theirs, theirs_scales) = (integers_of(form, arrays, name) for arrays in (own, wanted))
        np.testing.assert_allclose(scales, theirs_scales, rtol=1e-6)
        assert (mine == theirs).mean() > 0.999  # others are halfway between two integers
        full = drawn(1)[f"{THEIRS}.experts.{name.rpartition('.')[2]}"]
        full = in_turns(full) if "gate_up" in name else full
        norms = [float(np.linalg.norm(n * s - full) / np.linalg.norm(full))
                 for n, s in ((mine, scales), (theirs, theirs_scales))]  # fmt: skip
        assert abs(norms[0] - error) < 1e-6 and 0 < error < norms[1] * 1.01
    assert [*errors] == [f"{OURS}.experts.{name}" for name in ("gate_up_proj", "down_proj")] * (form != "float")


def integers_of(form: str, stored: Tensors, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Integers from their zero points on, and the scale of each."""
    (bits, _, has_points), scales = FORMATS[form], stored[f"{name}.scales"]
    numbers = unpacked(stored[f"{name}.qweight"], bits)
    scales = scales.reshape(*numbers.shape[:2], -1)
    points = np.full(scales.shape, 2 ** (bits - 1))
    if has_points:
        points = unpacked(stored[f"{name}.zero_points"], bits)[..., : scales.shape[2]]
    width = numbers.shape[2] // scales.shape[2]
    return numbers - points.repeat(width, 2), scales.repeat(width, 2)


def unpacked(array: np.ndarray, bits: int) -> np.ndarray:
    if bits == 4:
        array = np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:-1], -1)
    return array.astype(np.int64)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "float"])
def test_integers_that_do_not_change_stay(form: str) -> None:
    """The weights that a file stands for, loaded into it, are its own bytes."""
    base = exported(form, drawn(0))
    before = arrays_of(base)
    floats = arrays_of(surgery.merge_adapters(_rested(base)))
    given = {name: array for name, array in drawn(0).items() if array.ndim == 2}
    for name in ("gate_up_proj", "down_proj"):
        weight = next(array for key, array in floats.items() if name in key and array.ndim == 3)
        halves = np.concatenate([weight[:, ::2], weight[:, 1::2]], 1) if name == "gate_up_proj" else weight
        given[f"{THEIRS}.experts.{name}"] = halves
    after = arrays_of(surgery.load_weights(base, given))
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


def _rested(base: onnx.ModelProto) -> onnx.ModelProto:
    """The model with adapters that change nothing."""
    found = surgery.lora(base, "*experts*", kind="lora_experts", rank=1)
    assert isinstance(found, onnx.ModelProto)
    return found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": ({"expert_weight_bits": 3}, "'y' is a QMoE with experts of 3 bits; use experts of 2, 4 or 8 bits"),
    "another number of scales": ({"block_size": 16}, "belongs to a QMoE whose experts are not stored as plain"),
    "packed": ({"weights_prepacked": 1}, "belongs to a QMoE whose experts are not stored as plain integers"),
    "floats of 4 bits": ({"quant_type": "nvfp4"}, "belongs to a QMoE whose experts are not stored as plain integers"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_other_integers_are_refused(what: str) -> None:
    attributes, says = REFUSED[what]
    base = exported("int4", drawn(0), **attributes)
    with pytest.raises(GradgraphError, match=says):
        surgery.load_weights(base, drawn(1))
    with pytest.raises(GradgraphError, match=says):
        surgery.lora(base, "*experts*", kind="lora_experts")


@pytest.mark.parametrize("kind", ["gpt_oss", "openai_privacy_filter"])
def test_the_type_of_the_model_decides_the_order_of_rows(kind: str, tmp_path: Any) -> None:
    """Both have the same activation."""
    given = as_gpt_oss(drawn(1))
    if kind != "gpt_oss":
        rows = drawn(1)[f"{THEIRS}.experts.gate_up_proj"]
        given[f"{THEIRS}.experts.gate_up_proj"] = rows.swapaxes(1, 2)
        given[f"{THEIRS}.experts.gate_up_proj_bias"] = drawn(1)[f"{THEIRS}.experts.gate_up_proj_bias"]
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    safetensors.numpy.save_file({n: np.ascontiguousarray(a) for n, a in given.items()}, tmp_path / "model.safetensors")
    found = surgery.load_weights(exported("float", drawn(0), activation_beta=1.0), tmp_path)
    wanted = arrays_of(exported("float", drawn(1)))
    for name, array in arrays_of(found).items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
