"""GatherBlockQuantized of com.microsoft: a frozen table keeps its operator, one whose scales are trained does not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, op_types, real, run
from tests.passes.normal.test_contrib import MICROSOFT, packed

ROWS, COLUMNS, BLOCK = 5, 32, 16
BLOCKS = COLUMNS // BLOCK
IDS = {"a matrix": np.array([[0, 4, -1], [2, 2, -5]]), "a scalar": np.array(3), "out of range": np.array([1, 5, -6])}


def table(kind, points):
    """Initializers of a table, in bytes or in integers of four bits, and the number of bits."""
    bits = 4 if "int4" in kind else int(kind)
    rng = np.random.default_rng(0)
    numbers, zeros = rng.integers(0, 2**bits, (ROWS, COLUMNS)), rng.integers(0, 2**bits, (ROWS, BLOCKS))
    if "int4" in kind:
        low = 8 if kind == "int4" else 0
        dtype = TensorProto.INT4 if low else TensorProto.UINT4
        tensors = [
            helper.make_tensor(n, dtype, x.shape, (x - low).reshape(-1)) for n, x in (("q", numbers), ("z", zeros))
        ]
    else:
        tensors = [onnx.numpy_helper.from_array(packed(x, bits), n) for n, x in (("q", numbers), ("z", zeros))]
    return tensors[: 2 if points else 1], bits


def gathering(kind, points, ids, scales=None, fed=True, **attrs):
    tensors, bits = table(kind, points)
    names = ["q", "i", "s", *["z"] * points]
    attrs = {"block_size": BLOCK, "bits": bits, "quantize_axis": -1, **attrs}
    node = helper.make_node("GatherBlockQuantized", names, ["y"], "fused", domain="com.microsoft", **attrs)
    scales = real(ROWS, BLOCKS, seed=1) if scales is None else scales
    given = {"i": ids} | ({"s": scales} if fed else {})
    model = model_of([node], given, weights={} if fed else {"s": scales}, domains=MICROSOFT)
    model.graph.initializer.extend(tensors)
    return model, given


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("kind", ["2", "4", "8", "int4", "uint4"])
def test_a_table_whose_scales_are_trained(kind, points, ids):
    model, given = gathering(kind, points, IDS[ids])
    found = normal_form(model)
    assert {o.domain for o in found.opset_import} == {""}
    assert_same(run(model, given), run(found, given))
    assert wrong_gradients(model, found, given, ["s"]) == []


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns, block", [(48, 32), (40, 16), (16, 32)])
def test_the_last_block_of_a_row_may_be_incomplete(columns, block, bits):
    numbers = np.random.default_rng(0).integers(0, 2**bits, (ROWS, columns))
    given = {"i": IDS["a matrix"], "s": real(ROWS, -(-columns // block), seed=1)}
    attrs = {"block_size": block, "bits": bits, "quantize_axis": 1}
    node = helper.make_node("GatherBlockQuantized", ["q", "i", "s"], ["y"], domain="com.microsoft", **attrs)
    model = model_of([node], given, weights={"q": packed(numbers, bits)}, domains=MICROSOFT)
    found = normal_form(model)
    assert_same(run(model, given), run(found, given))
    assert wrong_gradients(model, found, given, ["s"]) == []


@pytest.mark.parametrize("asked", [False, True])
def test_a_frozen_table_keeps_its_operator(asked):
    """Its indices have no gradient. If its scales are asked for, only the gathered rows are dequantized."""
    model, given = gathering("4", True, IDS["a matrix"], fed=False)
    model.graph.node.append(helper.make_node("MatMul", ["y", "w"], ["logits"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(real(COLUMNS, 3, seed=2), "w"))
    model.graph.output[0].name = "logits"
    gradient = gg.vjp(model, wrt=["w", "s"] if asked else ["w"])
    assert ("GatherBlockQuantized" in op_types(gradient)) != asked
    assert_same(run(model, given), run(gradient, given | {"logits.cotangent": np.ones((2, 3, 3), np.float32)})[:1])


def test_the_default_targets_leave_a_table_frozen():
    model, _ = gathering("4", False, IDS["a matrix"], fed=False)
    assert op_types(normal_form(model)) == ["GatherBlockQuantized"]


def test_other_axes_are_refused():
    model, _ = gathering("4", False, IDS["a matrix"])
    model.graph.node[0].attribute[2].i = 0
    assert model.graph.node[0].attribute[2].name == "quantize_axis"
    with pytest.raises(ModelError, match=r"'fused'.*blocks along another axis"):
        normal_form(model)


def test_an_empty_word_has_the_embedding_zero():
    """The kernel of onnxruntime does not write it."""
    given = {"words": np.array([[1, 2, 0], [0, 2, 1]], np.int32), "c": real(3, 2), "w": real(4, 1, 2, 2, seed=1)}
    node = helper.make_node("WordConvEmbedding", ["words", "w", "b", "c"], ["y"], domain="com.microsoft")
    model = model_of([node], given | {"b": real(4, seed=2)}, domains=MICROSOFT)
    found, wanted = (run(m, given | {"b": real(4, seed=2)})[0] for m in (normal_form(model), model))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert not found[1].any()
