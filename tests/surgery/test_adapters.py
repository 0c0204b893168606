"""Low-rank adapters beside every kind of layer: the formula, what is trained, merging."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import ArgumentError, BuildError, UnknownNameError

RNG = np.random.default_rng(0)
Array = np.ndarray


def made(nodes: list[onnx.NodeProto], weights: dict[str, Array], x: list[object], kind: int = TensorProto.FLOAT,
         y: list[object] | None = None) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y or ["rows", 5])],
        [v if isinstance(v, onnx.TensorProto) else numpy_helper.from_array(v, k) for k, v in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def floats(*sizes: int) -> Array:
    return RNG.normal(size=sizes).astype(np.float32)


def int4(array: Array) -> onnx.TensorProto:
    return ir.to_proto(ir.tensor(array, dtype=ir.DataType.INT4, name="w.weight"))


node = helper.make_node
DQ = node("DequantizeLinear", ["w.weight", "s", "z"], ["f"], axis=1)
BLOCKS = node("DequantizeLinear", ["w.weight", "s"], ["f"], axis=0, block_size=16)
NBITS = {"K": 32, "N": 5, "bits": 4, "block_size": 16}
PACKED = RNG.integers(0, 256, (5, 2, 8), dtype=np.uint8)
QUANTISED = {"w.weight": RNG.integers(-128, 128, (32, 5), dtype=np.int8), "s": np.abs(floats(5)) / 50,
             "z": RNG.integers(-9, 9, 5, dtype=np.int8)}  # fmt: skip
IMAGES, IDS = ["rows", 3, 6, 6], ["rows"]
# the kinds of layers: nodes, weights, input; all of them are called w
LAYERS: dict[str, onnx.ModelProto] = {
    "MatMul": made([node("MatMul", ["x", "w.weight"], ["y"])], {"w.weight": floats(32, 5)}, ["rows", 32]),
    "MatMul, bias behind": made(
        [node("MatMul", ["x", "w.weight"], ["p"]), node("Add", ["b", "p"], ["y"])],
        {"w.weight": floats(32, 5), "b": floats(5)}, ["rows", 32],
    ),
    "MatMul, turned": made(
        [node("Transpose", ["w.weight"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])],
        {"w.weight": floats(5, 32)}, ["rows", 32],
    ),
    "Gemm": made(
        [node("Gemm", ["x", "w.weight", "b"], ["y"])], {"w.weight": floats(32, 5), "b": floats(5)}, ["rows", 32]
    ),
    "Gemm of PyTorch": made(
        [node("Gemm", ["x", "w.weight", "b"], ["y"], transB=1)],
        {"w.weight": floats(5, 32), "b": floats(5)}, ["rows", 32],
    ),
    "Conv": made(
        [node("Conv", ["x", "w.weight", "b"], ["y"], pads=[1, 1, 1, 1], strides=[2, 2], dilations=[1, 1])],
        {"w.weight": floats(5, 3, 3, 3), "b": floats(5)}, IMAGES, y=["rows", 5, 3, 3],
    ),
    "Conv in groups": made(
        [node("Conv", ["x", "w.weight"], ["y"], group=2, pads=[1, 1, 1, 1], strides=[2, 2])],
        {"w.weight": floats(6, 2, 3, 3)}, ["rows", 4, 6, 6], y=["rows", 6, 3, 3],
    ),
    "embedding": made([node("Gather", ["w.weight", "x"], ["y"])], {"w.weight": floats(7, 5)}, IDS, TensorProto.INT64),
    "int8 by channel": made([DQ, node("MatMul", ["x", "f"], ["y"])], QUANTISED, ["rows", 32]),
    "int4 in blocks": made(
        [BLOCKS, node("MatMul", ["x", "f"], ["y"])],
        {"w.weight": int4(RNG.integers(-8, 8, (32, 5), dtype=np.int8)), "s": np.abs(floats(2, 5)) / 5}, ["rows", 32],
    ),
    "MatMulNBits": made(
        [node("MatMulNBits", ["x", "w.weight", "s", "z"], ["y"], domain="com.microsoft", **NBITS)],
        {"w.weight": PACKED, "s": np.abs(floats(10)) / 5, "z": RNG.integers(0, 256, 5, dtype=np.uint8)}, ["rows", 32],
    ),
}  # fmt: skip


def feed(model: onnx.ModelProto, rows: int = 4) -> Array:
    given = model.graph.input[0].type.tensor_type
    sizes = [rows, *(d.dim_value for d in given.shape.dim[1:])]
    return RNG.integers(0, 7, sizes) if given.elem_type == TensorProto.INT64 else floats(*sizes)


def run(model: onnx.ModelProto, x: Array) -> Array:
    """As it is written: onnxruntime's optimizer would let a product with a quantised weight round its data, too."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (y,) = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, {model.graph.input[0].name: x}
    )
    return y


def weights(model: onnx.ModelProto) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type != TensorProto.INT4}


def trained(model: onnx.ModelProto) -> dict[str, Array]:
    """Other numbers for the adapters, as a run would leave them."""
    parts = ("lora", "ia3", "prefix")
    return {n: floats(*w.shape) / 3 for n, w in weights(model).items() if any(part in n for part in parts)}


@pytest.mark.sweep(0.31)
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "ia3"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_what_it_did_until_it_is_trained_and_merges_then(name: str, kind: str) -> None:
    base, x = LAYERS[name], feed(LAYERS[name])
    if kind == "dora" and name in ("embedding", "Conv in groups"):
        with pytest.raises(BuildError, match="which DoRA does not support"):
            gg.lora(base, "w", kind=kind)
        return
    model = gg.lora(base, "w", rank=3, kind=kind)
    assert isinstance(model, onnx.ModelProto)
    np.testing.assert_allclose(run(model, x), run(base, x), rtol=1e-5, atol=1e-5)
    numbers = trained(model)
    assert len(numbers) == {"ia3": 1, "dora": 3}.get(kind, 2)
    after = surgery.load_weights(model, numbers, strict=False)
    merged = surgery.merge_adapters(model, numbers)
    assert np.abs(run(after, x) - run(base, x)).max() > 0.05
    np.testing.assert_allclose(run(merged, x), run(after, x), rtol=1e-4, atol=1e-4)
    assert not any("lora" in n or "ia3" in n for n in weights(merged))
    assert not merged.metadata_props
    onnx.checker.check_model(merged, full_check=name != "MatMulNBits")


@pytest.mark.parametrize(("kind", "scale"), [("lora", 12 / 3), ("rslora", 12 / np.sqrt(3))])
def test_the_formula(kind: str, scale: float) -> None:
    model, x = gg.lora(LAYERS["MatMul"], "w", rank=3, alpha=12, kind=kind), feed(LAYERS["MatMul"])
    numbers = trained(model)
    a, b = numbers["w.lora_A"], numbers["w.lora_B"]
    w = weights(model)["w.weight"]
    found = run(surgery.load_weights(model, numbers, strict=False), x)
    np.testing.assert_allclose(found, x @ w + scale * (x @ a) @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("name", LAYERS)
def test_the_adapters_are_trained_and_nothing_else(name: str, tmp_path: Path) -> None:
    base = LAYERS[name]
    gg.lora(base, "*", rank=2, dropout=0 if name == "embedding" else 0.1, out=tmp_path / "lora.onnx")
    step = gg.build(tmp_path / "lora.onnx", "mse", gg.optim.adam(0.05))
    assert set(step.manifest.trainable) == {"w.lora_A", "w.lora_B"}
    assert {s.name.split(".adam")[0] for s in step.manifest.state if s.kind == "parameter"} == {"w.lora_A", "w.lora_B"}
    trainer, x = gg.Trainer(step, device="cpu"), feed(base, 8)
    made = onnx.load(tmp_path / "lora.onnx")
    target = run(surgery.load_weights(made, trained(made), strict=False), x)
    history = trainer.fit({"x": x, "target": target}, epochs=60, batch_size=8, progress=False)
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    trainer.export(tmp_path / "trained.onnx")
    for given in (trainer.state_dict(), tmp_path / "trained.onnx"):
        merged = surgery.merge_adapters(tmp_path / "lora.onnx", given)
        # onnxruntime's optimizer rounds the data of a product with a quantised weight to 8 bits
        tolerance = 0.1 if name.startswith("int") else 1e-3
        np.testing.assert_allclose(run(merged, x), trainer.predict(x), rtol=tolerance, atol=tolerance)


def test_all_is_trained_where_it_is_asked_for() -> None:
    step = gg.build(gg.lora(LAYERS["Gemm"], "w"), "mse", train=["w.*", "b"])
    assert set(step.manifest.trainable) == {"w.weight", "w.lora_A", "w.lora_B", "b"}


def test_layers_are_found_by_weight_module_and_node() -> None:
    network = gg.frontend.nn.Sequential(*(gg.frontend.nn.Linear(4, 4) for _ in range(3)))
    model = gg.frontend.export(network, {"x": ("rows", 4)})
    for target, count in (("*", 3), ("1", 1), ("1.weight", 1), (["0*", "2"], 2), (model.graph.node[-1].name, 1)):
        found = [n for n in weights(gg.lora(model, target)) if n.endswith("lora_A")]
        assert len(found) == count, target


def test_a_half_model_gets_half_adapters() -> None:
    half = made([node("MatMul", ["x", "w.weight"], ["y"])], {"w.weight": floats(4, 5).astype(np.float16)}, ["rows", 4],
                TensorProto.FLOAT16)  # fmt: skip
    half.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    assert {w.dtype for w in weights(gg.lora(half, "w")).values()} == {np.dtype(np.float16)}


def test_a_weight_that_others_read_stays_for_them() -> None:
    tied = made(
        [node("Gather", ["w.weight", "x"], ["e"]), node("Transpose", ["w.weight"], ["t"], perm=[1, 0]),
         node("MatMul", ["e", "t"], ["y"], name="head")],
        {"w.weight": floats(5, 4)}, IDS, TensorProto.INT64,
    )  # fmt: skip
    model, x = gg.lora(tied, "head", rank=2), feed(tied) % 5
    numbers = trained(model)
    after = surgery.load_weights(model, numbers, strict=False)
    np.testing.assert_allclose(run(surgery.merge_adapters(after), x), run(after, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: gg.lora(LAYERS["MatMul"], "attention"), UnknownNameError, "no layer that can have an adapter matches"),
        (lambda: gg.lora(LAYERS["MatMul"], "w", rank=0), ArgumentError, "whole number above zero"),
        (lambda: gg.lora(LAYERS["MatMul"], "w", dropout=1), ArgumentError, "from 0 to below 1"),
        (lambda: gg.lora(LAYERS["MatMul"], "w", kind="dora2"), BuildError, "did you mean 'dora'"),
        (lambda: gg.lora(gg.lora(LAYERS["MatMul"], "w"), "w"), BuildError, "already has adapters"),
        (lambda: surgery.merge_adapters(LAYERS["MatMul"]), BuildError, "no adapters to merge"),
        (
            lambda: gg.lora(LAYERS["Conv in groups"], "w", kind="dora"),
            BuildError,
            "is a Conv with groups, which DoRA does not support",
        ),
        (
            lambda: gg.lora(
                made([node("Gemm", ["x", "w.weight"], ["y"], alpha=2.0)], {"w.weight": floats(4, 5)}, ["rows", 4]), "w"
            ),
            UnknownNameError,
            "a Gemm that scales its product",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(call: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        call()  # type: ignore[operator]
    assert says in str(raised.value)


# --- merged, and stored as before -------------------------------------------------------------------------------

UINT8 = {"w.weight": RNG.integers(0, 256, (32, 5), dtype=np.uint8), "s": np.abs(floats(5)) / 50,
         "z": RNG.integers(90, 160, 5, dtype=np.uint8)}  # fmt: skip
WHOLE = {"w.weight": RNG.integers(-128, 128, (32, 5), dtype=np.int8), "s": np.array(0.01, np.float32)}
QUANTISED_LAYERS: dict[str, tuple[onnx.ModelProto, float]] = {  # and how far a merged weight may be off
    "int8 by channel": (LAYERS["int8 by channel"], 0.01),
    "int4 in blocks": (LAYERS["int4 in blocks"], 0.12),
    "MatMulNBits": (LAYERS["MatMulNBits"], 0.12),
    "uint8 by channel": (made([DQ, node("MatMul", ["x", "f"], ["y"])], UINT8, ["rows", 32]), 0.01),
    "int8, one scale": (
        made([node("DequantizeLinear", ["w.weight", "s"], ["f"]), node("MatMul", ["x", "f"], ["y"])], WHOLE,
             ["rows", 32]), 0.02,
    ),
    "int8 by channel, turned": (
        made([node("DequantizeLinear", ["w.weight", "s"], ["f"], axis=0), node("Transpose", ["f"], ["t"], perm=[1, 0]),
              node("MatMul", ["x", "t"], ["y"])],
             {"w.weight": RNG.integers(-128, 128, (5, 32), dtype=np.int8), "s": np.abs(floats(5)) / 50}, ["rows", 32]),
        0.01,
    ),
    "MatMulNBits, symmetric": (
        made([node("MatMulNBits", ["x", "w.weight", "s"], ["y"], domain="com.microsoft", **NBITS)],
             {"w.weight": PACKED, "s": np.abs(floats(10)) / 5}, ["rows", 32]), 0.12,
    ),
    "MatMulNBits of 8 bits": (
        made([node("MatMulNBits", ["x", "w.weight", "s"], ["y"], domain="com.microsoft", **{**NBITS, "bits": 8})],
             {"w.weight": RNG.integers(0, 256, (5, 2, 16), dtype=np.uint8), "s": np.abs(floats(10)) / 50},
             ["rows", 32]), 0.01,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED_LAYERS)
def test_a_merged_weight_is_stored_as_it_was(name: str) -> None:
    base, tolerance = QUANTISED_LAYERS[name]
    model, x = gg.lora(base, "w", rank=2), feed(base, 16)
    numbers = trained(model)
    errors: dict[str, float] = {}
    merged = surgery.merge_adapters(model, numbers, requantise=True, errors=errors)
    kinds = {t.name: (t.data_type, list(t.dims)) for t in base.graph.initializer}
    assert {t.name: (t.data_type, list(t.dims)) for t in merged.graph.initializer} == kinds
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in base.graph.node]
    assert 0 < errors["w"] < tolerance
    exact = run(surgery.merge_adapters(model, numbers), x)
    assert np.linalg.norm(run(merged, x) - exact) < 1.5 * tolerance * np.linalg.norm(exact)


@pytest.mark.parametrize("name", QUANTISED_LAYERS)
def test_a_warning_counts_updates_that_rounding_undoes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    base = QUANTISED_LAYERS[name][0]
    model = gg.lora(base, "w", rank=2)
    numbers = trained(model)
    for size, drowns in ((1e-3, True), (4.0, False)):
        caplog.clear()
        merged = {name: (size if "lora" in name else 1) * array for name, array in numbers.items()}
        surgery.merge_adapters(model, merged)
        assert not caplog.messages
        surgery.merge_adapters(model, merged, requantise=True)
        assert ["undoes the adapter's update in 1 of 1" in m for m in caplog.messages] == [True] * drowns


def test_a_weight_on_its_own_grid_comes_back_to_the_last_bit() -> None:
    """Numbers that reach the end of their range have the same scales, and nothing is rounded."""
    base = QUANTISED_LAYERS["MatMulNBits, symmetric"][0]
    held = numpy_helper.to_array(base.graph.initializer[0]).copy()
    held[..., 0] &= 0xF0  # the lowest number, -8, is in each block
    onnx_base = onnx.ModelProto.FromString(base.SerializeToString())
    onnx_base.graph.initializer[0].CopyFrom(numpy_helper.from_array(held, "w.weight"))
    merged = surgery.merge_adapters(gg.lora(onnx_base, "w"), requantise=True)
    assert {n: a.tobytes() for n, a in weights(merged).items()} == {
        n: a.tobytes() for n, a in weights(onnx_base).items()
    }


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "ia3"])
@pytest.mark.parametrize("name", QUANTISED_LAYERS)
def test_an_adapter_that_changes_nothing_leaves_integers_to_the_last_bit(name: str, kind: str) -> None:
    base = QUANTISED_LAYERS[name][0]
    errors: dict[str, float] = {}
    merged = surgery.merge_adapters(gg.lora(base, "w", kind=kind), requantise=True, errors=errors)
    assert {n: a.tobytes() for n, a in weights(merged).items()} == {n: a.tobytes() for n, a in weights(base).items()}
    assert max(errors.values()) < 1e-6


@pytest.mark.parametrize("name", [name for name in QUANTISED_LAYERS if name != "int8, one scale"])
def test_channels_that_do_not_change_keep_their_integers(name: str) -> None:
    base = QUANTISED_LAYERS[name][0]
    model, x = gg.lora(base, "w", rank=2), feed(base, 16)
    changed = trained(model)
    for n, a in changed.items():
        if "lora_B" in n:
            a[:, 1:] = 0.0
    merged = surgery.merge_adapters(model, changed, requantise=True)
    differ = np.abs(run(merged, x) - run(base, x)).max(0) > 0
    assert differ.tolist() == [True, False, False, False, False]


# --- merged into zero points ------------------------------------------------------------------------------------


Blocks = tuple[Array, Array, Array]  # numbers (outputs, blocks, size), scales and zero points (outputs, blocks)


def in_blocks(inputs: int, outputs: int, size: int, bits: int, points: str, kind: type) -> tuple[Blocks, list[Array]]:
    """A weight of which a block has the scale 0, and its tensors as a MatMulNBits has them; packed bit by bit."""
    blocks = -(-inputs // size)
    numbers = RNG.integers(0, 2**bits, (outputs, blocks, size))
    scales = (np.abs(floats(outputs, blocks)) / 2**bits + 1e-3).astype(kind)
    scales[0, 0] = 0
    zeros = np.full((outputs, blocks), 2.0 ** (bits - 1))
    stored = [packed(numbers, bits), scales]
    if points == "packed":
        zeros = RNG.integers(0, 2**bits, (outputs, blocks))
        stored.append(packed(zeros, bits))
    elif points == "float":
        zeros = (zeros + floats(outputs, blocks)).astype(kind)
        stored.append(zeros)
    return (numbers, scales, zeros), stored


def packed(numbers: Array, bits: int) -> Array:
    """Whole numbers in bytes along the last axis, the lowest bits first."""
    each = (numbers[..., None] >> np.arange(bits) & 1).reshape(*numbers.shape[:-1], -1)
    return np.packbits(each.astype(np.uint8), axis=-1, bitorder="little")


def product_of(weight: Blocks, a: Array, b: Array, x: Array) -> Array:
    """``x·W + (the sums of x in blocks)·A·B`` in float64; A counts as often as it says."""
    numbers, scales, zeros = (part.astype(np.float64) for part in weight)
    _, blocks, size = numbers.shape
    x = np.pad(x.astype(np.float64), ((0, 0), (0, blocks * size - x.shape[1]))).reshape(len(x), blocks, size)
    dequantised = (numbers - zeros[..., None]) * scales[..., None]
    return np.einsum("rbs,obs->ro", x, dequantised) + x.sum(2) @ a @ b


BLOCKS_OF_WEIGHTS = list(
    itertools.product((2, 4), (16, 32, 64, 128), ("none", "packed", "float"), (np.float32, np.float16), (0, 4))
)  # bits, size of a block, zero points, type, accuracy level


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize(("bits", "size", "points", "kind", "level"), random.Random(0).sample(BLOCKS_OF_WEIGHTS, 24))
def test_adapters_of_blocks_are_their_formula_and_merge_without_loss(
    bits: int, size: int, points: str, kind: type, level: int, tmp_path: Path
) -> None:
    """Two layers, with ranks and scales that are drawn, against NumPy: beside, merged, and from a folder."""
    near, rank, alpha = (1e-5 if kind is np.float32 else 1e-2), int(RNG.integers(1, 9)), float(RNG.uniform(0.5, 16))
    sizes = [size * 5 // 2, size, 5]
    layers = [in_blocks(i, o, size, bits, points, kind) for i, o in itertools.pairwise(sizes)]
    stored = {f"{n}.{part}": t for n, (_, ts) in zip("vw", layers, strict=True)
              for part, t in zip(("weight", "s", "z"), ts, strict=False)}  # fmt: skip
    base = made(
        [node("MatMulNBits", [read, *(n for n in stored if n[0] == name)], [given], domain="com.microsoft", K=inputs,
              N=outputs, bits=bits, block_size=size, accuracy_level=level)
         for name, read, given, (inputs, outputs) in zip("vw", "xh", "hy", itertools.pairwise(sizes), strict=True)],
        stored, ["rows", sizes[0]], helper.np_dtype_to_tensor_dtype(np.dtype(kind)),
    )  # fmt: skip
    base.graph.output[0].type.tensor_type.elem_type = base.graph.input[0].type.tensor_type.elem_type
    model, x = gg.lora(base, "*", rank=rank, alpha=alpha, kind="qalora"), floats(3, sizes[0]).astype(kind)
    numbers = {n: t.astype(kind) for n, t in trained(model).items()}
    assert {n: t.shape for n, t in numbers.items()} == {
        "v.lora_A": (3, rank), "v.lora_B": (rank, size), "w.lora_A": (1, rank), "w.lora_B": (rank, 5)
    }  # fmt: skip
    wanted = x
    for name, (weight, _) in zip("vw", layers, strict=True):
        a, b = (numbers[f"{name}.lora_{part}"].astype(np.float64) for part in "AB")
        wanted = product_of(weight, alpha / rank * a, b, wanted)
    most, errors = np.abs(wanted).max(), dict[str, float]()
    if level == 0:  # the other rounds inputs of products whose zero points are whole numbers
        beside = run(surgery.load_weights(model, numbers, strict=False), x)
        np.testing.assert_allclose(beside / most, wanted / most, atol=near)
    surgery.save_adapter(model, tmp_path, numbers)
    for merged in (surgery.merge_adapters(model, numbers, errors=errors),
                   surgery.merge_adapters(surgery.load_adapter(base, tmp_path), requantise=True)):  # fmt: skip
        np.testing.assert_allclose(run(merged, x) / most, wanted / most, atol=near)
        assert [n.op_type for n in merged.graph.node] == ["MatMulNBits"] * 2
        assert all(weights(merged)[n].shape == t.shape for n, t in stored.items() if not n.endswith("z"))
    assert max(errors.values()) < near


@pytest.mark.parametrize("kind", ["lora", "qalora"])
def test_adapters_of_one_layer_merge_together(kind: str) -> None:
    """Of blocks alone it keeps its bits; with another kind it is as with that kind."""
    base = LAYERS["MatMulNBits"]
    both = gg.lora(gg.lora(base, "w", name="fr", kind="qalora"), "w", name="de", kind=kind)
    numbers, x = trained(both), feed(base)
    both = surgery.use_adapters(surgery.load_weights(both, numbers, strict=False), {"fr": 0.5, "de": 1})
    merged = surgery.merge_adapters(both)
    np.testing.assert_allclose(run(merged, x), run(both, x), rtol=1e-4, atol=1e-4)
    assert [n.op_type for n in merged.graph.node] == [{"lora": "MatMul", "qalora": "MatMulNBits"}[kind]]


def test_an_adapter_of_blocks_trains_as_its_formula_does() -> None:
    """Losses of plain gradient descent, against NumPy."""
    base, rate, losses = LAYERS["MatMulNBits"], 0.003, []
    x, target = floats(8, 32), floats(8, 5)
    model = gg.lora(base, "w", rank=2, alpha=2, kind="qalora")
    begun = weights(model)
    trainer = gg.Trainer(gg.build(model, "mse", gg.optim.sgd(rate)), device="cpu")
    found = [float(trainer.step({"x": x, "target": target})["loss"]) for _ in range(6)]
    a, b = (begun[f"w.lora_{part}"].astype(np.float64) for part in "AB")
    plain, sums = run(base, x).astype(np.float64), x.astype(np.float64).reshape(8, 2, 16).sum(2)
    for _ in range(6):
        error = plain + sums @ a @ b - target
        losses.append((error**2).mean())
        dy = 2 * error / error.size
        a, b = a - rate * sums.T @ dy @ b.T, b - rate * (sums @ a).T @ dy
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert losses[-1] < 0.99 * losses[0]


IN_BFLOAT16 = made(
    [node("MatMulNBits", ["x", "w.weight", "s"], ["y"], domain="com.microsoft", **NBITS)],
    {"w.weight": PACKED, "s": helper.make_tensor("s", TensorProto.BFLOAT16, [10], floats(10))}, ["rows", 32],
    TensorProto.BFLOAT16,
)  # fmt: skip
IN_BFLOAT16.graph.output[0].type.tensor_type.elem_type = TensorProto.BFLOAT16


@pytest.mark.parametrize(
    ("name", "says"),
    [("int4 in blocks", "DequantizeLinear, whose zero points are whole numbers"), ("MatMul", "is not quantised"),
     ("embedding", "is not quantised"), ("MatMulNBits of 8 bits", "zero points for 2 and 4 bits only"),
     ("bfloat16", "whose 8 bits")],
)  # fmt: skip
def test_what_has_no_float_zero_points_is_refused(name: str, says: str) -> None:
    models = LAYERS | {"MatMulNBits of 8 bits": QUANTISED_LAYERS["MatMulNBits of 8 bits"][0], "bfloat16": IN_BFLOAT16}
    with pytest.raises(BuildError, match=rf"{says}.*use kind lora, .*exclude this layer"):
        gg.lora(models[name], "w", kind="qalora")


@pytest.mark.parametrize("what", ["scales", "groups"])
def test_a_weight_that_cannot_be_read_is_refused(what: str) -> None:
    inputs = ["x", "w.weight", "d" if what == "scales" else "s", "z", *(["g"] if what == "groups" else [])]
    stored = {**weights(LAYERS["MatMulNBits"]), "g": np.zeros(32, np.int32)}
    nodes = [node("Add", ["s", "s"], ["d"]), node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **NBITS)]
    with pytest.raises(
        BuildError, match=r"'y' has computed scales or reordered groups, .*; keep an adapter of kind lora"
    ):
        gg.lora(made(nodes, stored, ["rows", 32]), "w", kind="qalora")


def test_peft_has_no_files_of_blocks(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="PEFT has no file format for adapters of kind qalora"):
        surgery.save_adapter(gg.lora(LAYERS["MatMulNBits"], "w", kind="qalora"), tmp_path, family="llama")
