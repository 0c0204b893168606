"""The kernel Permute moves what NumPy moves, and replaces only Transposes that onnxruntime would execute."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import ORT_NATIVE, library, native_transposes
from gradgraph.backends.ort_native.strided import Strided
from tests.kit.native_node import run

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(autouse=True)
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, and without AVX2, onnxruntime transposes."""
    monkeypatch.setattr(library.Library, "has_tiles", False)
    monkeypatch.setattr(native_transposes, "pays_here", lambda family: True)


SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 33)
LARGEST = 60_000  # elements


def case(seed: int) -> tuple[list[int], list[int]]:
    """Return a random shape with up to eight axes, or with one or two long ones, and the order of its axes."""
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 9))
    shape = [int(size) for size in rng.choice(SIZES, rank, p=[0.02, *[0.098] * 10])]
    if seed % 4 == 0:
        shape = [1] * rank
        shape[rng.integers(rank)], shape[rng.integers(rank)] = (int(size) for size in rng.integers(1, 3000, 2))
    while math.prod(shape) > LARGEST:
        shape[int(np.argmax(shape))] //= 2
    return shape, [int(axis) for axis in rng.permutation(rank)]


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("seed", range(120))
def test_it_moves_what_numpy_moves(seed: int) -> None:
    shape, perm = case(seed)
    x = np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32).view(np.float32)  # NaN of all kinds among them
    (found,) = run("Permute", f"perm = {perm}", 1, x, threads=1 + seed % 3)
    assert found.shape == x.transpose(perm).shape
    np.testing.assert_array_equal(found.view(np.uint32), x.transpose(perm).view(np.uint32))


@pytest.mark.parametrize("perm", [[0], [0, 0], [0, 2], [-1, 0], [0, 1, 2]], ids=str)
def test_an_order_that_does_not_fit_is_an_error(perm: list[int]) -> None:
    with pytest.raises(Exception, match="Permute: its perm does not fit"):
        run("Permute", f"perm = {perm}", 1, np.zeros((3, 4), np.float32))


def transposes(body: str, sizes: str = "float[8, 32, 64] x") -> list[str]:
    """Return the operators of the Transposes of a model, with native kernels."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> g ({sizes}) => (y) '
        f"<float[64, 128] w> {{ {body} }}"
    )
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    model.graph.initializer.append(numpy_helper.from_array(np.ones((64, 128), np.float32), "w"))
    lowered = for_machine(model, ORT_NATIVE, {})
    return [node.op_type for node in lowered.graph.node if node.op_type in ("Transpose", "Permute")]


T = "t = Transpose <perm = [0, 2, 1]>"
FLAT = "s = Constant <value_ints = [8, 2048]> () y = Reshape (t, s)"
SPLIT = "s = Constant <value_ints = [2, 4, 64, 32]> () z = Reshape (t, s)"


def test_it_replaces_transposes_whose_result_is_reshaped() -> None:
    assert transposes(f"{T} (x) {FLAT}") == ["Permute"]
    assert transposes(f"t = Transpose (x) {FLAT}", "float[16, 16, 64] x") == ["Permute"]  # its axes in reverse
    rows = "s = Constant <value_ints = [512, 32]> () r = Reshape (t, s) y = MatMul (r, q)"  # no view of x
    assert transposes(f"{T} (x) {rows}", "float[8, 32, 64] x, float[32, 5] q") == ["Permute"]


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        (f"{T} (x) y = MatMul (t, x)", "float[8, 32, 64] x"),
        (f"{T} (x) y = com.microsoft.FusedMatMul (t, x)", "float[8, 32, 64] x"),
        (f"{T} (x) {SPLIT} r = Tanh (z) y = MatMul (z, r)", "float[8, 32, 64] x"),
        (f"{T} (x) {SPLIT} y = Transpose <perm = [0, 1, 3, 2]> (z)", "float[8, 32, 64] x"),
        (f"{T} (x) y = Tanh (t)", "float[8, 32, 64] x"),
        (f"{T} (x) {FLAT.replace('y =', 'z =')} y = Tanh (t)", "float[8, 32, 64] x"),
        (f"a = Transpose <perm = [0, 2, 1]> (x) b = Softmax <axis = 1> (a) {T} (b) {FLAT}", "float[8, 32, 64] x"),
        (f"t = Transpose (w) {FLAT.replace('[8, 2048]', '[8, 1024]')}", "float[8, 32, 64] x"),
        (f"r = Tanh (w) t = Transpose (r) {FLAT.replace('[8, 2048]', '[8, 1024]')}", "float[8, 32, 64] x"),
        (f"p = MaxPool <kernel_shape = [1, 1]> (x) t = Transpose <perm = [0, 2, 3, 1]> (p) {FLAT}",
         "float[8, 32, 8, 8] x"),
        (f"{T} (x) {FLAT}", "float[8, 32, n] x"),
        (f"{T} (x) {FLAT}", "float16[8, 32, 64] x"),
        (f"{T} (x) {FLAT.replace('2048', '8')}", "float[8, 2, 4] x"),
        (f"{T} (x) {FLAT.replace('2048', '30000')}", "float[8, 2000, 15] x"),
    ],
    ids=["product", "fused product", "product behind a Reshape", "Transpose behind a Reshape", "elementwise",
         "two readers", "Transpose before", "weight", "constant", "pool", "open size", "float16", "small",
         "short runs"],
)  # fmt: skip
def test_it_leaves_others_to_onnxruntime(body: str, sizes: str) -> None:
    assert "Permute" not in transposes(body, sizes)


def test_it_is_used_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.Library, "has_tiles", True)
    assert transposes(f"{T} (x) {FLAT}") == ["Transpose"]
    monkeypatch.setattr(library.Library, "has_tiles", False)
    monkeypatch.setattr(native_transposes, "pays_here", lambda family: False)
    assert transposes(f"{T} (x) {FLAT}") == ["Transpose"]


def test_a_step_with_it_computes_the_same() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[8, 32, 64] x) => (float[8, 3] y) '
        "<int64[2] s = {8, 2048}> "
        "{ h = Mul (x, w) t = Transpose <perm = [0, 2, 1]> (h) r = Reshape (t, s) q = Tanh (r) y = MatMul (q, v) }"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w": [64], "v": [2048, 3]}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    data = {"x": rng.normal(size=(8, 32, 64)).astype(np.float32), "target": np.zeros((8, 3), np.float32)}
    step = gg.build(model, "mse", gg.optim.sgd(1e-4))
    lowered = for_machine(step.train, ORT_NATIVE, {})
    assert "Permute" in [node.op_type for node in lowered.graph.node]
    trainers = [gg.Trainer(step, options=gg.RuntimeOptions(native_kernels=native)) for native in (True, False)]
    losses = [[float(trainer.step(data)["loss"]) for _ in range(3)] for trainer in trainers]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for name, value in trainers[0].state_dict().items():
        np.testing.assert_allclose(value, trainers[1].state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(32, 36_864), (64, 128, 32, 256), (2048, 32)], ids=str)
def test_large_and_aligned_matrices_stay_with_onnxruntime_without_avx512(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Strided.whole(shape).transposed([1, 0, *range(2, len(shape))])
    for levels, expected in ((("avx2",), False), (("avx2", "avx512"), True)):
        monkeypatch.setattr(native_transposes, "levels_in_use", lambda found=levels: found)
        assert native_transposes.is_faster(view) == expected
        assert native_transposes.is_faster(Strided.whole((80, 240)).transposed([1, 0]))
