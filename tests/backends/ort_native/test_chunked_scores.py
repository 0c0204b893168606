"""Scores over many classes are computed some rows at a time, to the same losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import gradgraph as gg
from gradgraph.autodiff.after import write_orders
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import ORT_NATIVE, chunked_scores
from gradgraph.rules.named_operators import DOMAIN
from tests.kit.running import run

BATCH, TOKENS, WORDS = 2, 11, 13
PIECES = 4  # of 22 rows: 6, 6, 5 and 5


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_scores, "PIECE", 6 * WORDS)
    monkeypatch.setattr(chunked_scores, "LEAST_ROWS", 1)


def network(
    flat: bool, capped: bool, stored: bool = True, words: int = WORDS, deep: bool = False, axes: int = 3
) -> onnx.ModelProto:
    """Layers "w" and a head over words; scores of [batch, tokens, words], or ``flat`` of [batch · tokens, words].

    A ``deep`` bias has three axes. The input has three, or two.
    """
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(5, 16)), "scales": np.full((words, 1), 0.1), "bias": rng.normal(size=words)}
    weights["bias"] = weights["bias"].reshape((1, 1, words) if deep else words)
    numbers = rng.integers(-8, 8, (words, 16))
    head = helper.make_node("DequantizeLinear", ["numbers", "scales"], ["head"], axis=1, block_size=16)
    kept = [helper.make_tensor("numbers", TensorProto.INT4, (words, 16), numbers.reshape(-1))]
    if not stored:
        kept, head = [], helper.make_node("Identity", ["numbers"], ["head"])
        weights["numbers"] = numbers * 0.1
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        head,
        helper.make_node("Transpose", ["head"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["h", "turned"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["scores"]),
        helper.make_node("Tanh" if capped else "Identity", ["scores"], ["capped"]),
        helper.make_node("Reshape", ["capped", "sizes"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    sizes = [-1, words] if flat else [-1, TOKENS, words]
    shape = ["rows", words] if flat else ["batch", TOKENS, words]
    kept += [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    kept.append(numpy_helper.from_array(np.array(sizes, np.int64), "sizes"))
    given = ["rows", 5] if axes == 2 else ["batch", TOKENS, 5]
    graph = helper.make_graph(nodes, "g", [value("x", TensorProto.FLOAT, given)],
                              [value("y", TensorProto.FLOAT, shape)], kept)  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def data(flat: bool, axes: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    target = rng.integers(0, WORDS, (BATCH, TOKENS))
    target[1, 7:] = -100
    x = rng.normal(size=(BATCH, TOKENS, 5)).astype(np.float32)
    return {"x": x.reshape(-1, 5) if axes == 2 else x, "target": target.reshape(-1) if flat else target}


PLAIN = {"flat": False, "capped": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "of tokens": (PLAIN, {}, True),
    "of rows": ({"flat": True, "capped": False}, {}, True),
    "a cap": ({"flat": False, "capped": True}, {}, True),
    "weights of classes": (PLAIN, {"weight": np.arange(1.0, WORDS + 1)}, True),
    "a head of floats": ({**PLAIN, "stored": False}, {}, False),  # each product would keep a copy
    "smoothed": (PLAIN, {"label_smoothing": 0.1}, False),  # its gradient is written over all rows
    "a bias of three axes": ({**PLAIN, "deep": True}, {}, True),
    # the gradient of the bias is a sum of rows, and has as many numbers as there are rows
    "as many rows as words": ({"flat": True, "capped": False, "words": BATCH * TOKENS, "axes": 2}, {}, False),
    "z loss": (PLAIN, {"z_loss": 1e-2}, False),  # its gradient reads what a row gave
}


@pytest.mark.sweep(0.4)
@pytest.mark.usefixtures("by_vectors")
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options, taken = CASES[name]
    loss = gg.losses.cross_entropy(axis=-1, **options)
    weights = ["w", "bias"] if "words" in model else ["w"]
    step = gg.build(network(**model), loss, gg.optim.sgd(0.1), train=weights, metrics="accuracy")
    lowered = for_machine(step.train, ORT_NATIVE, {"batch": BATCH, "rows": BATCH * TOKENS})
    assert sum(node.op_type == "LogSoftmax" for node in lowered.graph.node) == (PIECES if taken else 1)
    found = []
    for piece in (chunked_scores.PIECE, 1 << 23):
        monkeypatch.setattr(chunked_scores, "PIECE", piece)
        trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(native_kernels=True))
        results = [trainer.step(data(model["flat"], model.get("axes", 3))) for _ in range(3)]
        found.append(([float(r["loss"]) for r in results], trainer.state_dict()))
    (losses, state), (whole_losses, whole) = found
    np.testing.assert_allclose(losses, whole_losses, rtol=1e-6)
    for weight in weights:
        np.testing.assert_allclose(state[weight], whole[weight], rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0]


P = "p = LogSoftmax (x)"
SUM = "s = ReduceSum <keepdims = 0> (p, last)"
BODY = "{ n = Neg (p) m = ReduceMax <keepdims = 0> (n, last) t = Exp (m) }"
# the input, nodes, what they give, and whether they are computed for some rows at a time: of six, with six classes
GRAPHS: dict[str, tuple[str, str, str, bool]] = {
    "a sum of classes": ("float[6, 6] x", f"{P} {SUM}", "float[6] y", True),
    "a sum of rows": ("float[6, 6] x", f"{P} s = ReduceSum <keepdims = 0> (p, first)", "float[6] y", False),
    "the largest class": ("float[6, 6] x", f"{P} s = ArgMax <axis = -1, keepdims = 0> (p)", "int64[6] y", True),
    "the largest row": ("float[6, 6] x", f"{P} s = ArgMax <axis = 0, keepdims = 0> (p)", "int64[6] y", False),
    "shares of rows": ("float[6, 6] x", f"p = LogSoftmax <axis = 0> (x) {SUM}", "float[6] y", False),
    "the gradient of shares of rows": (
        "float[6, 6] x",
        f"{P} g = {DOMAIN}.LogSoftmaxGrad <axis = 0> (x, p) s = ReduceSum <keepdims = 0> (g, last)",
        "float[6] y",
        False,
    ),
    "one class of each row": (
        "float[6, 6] x, int64[6, 1] i", f"{P} s = GatherElements <axis = 1> (p, i)", "float[6, 1] y", True),
    "one row of each class": (
        "float[6, 6] x, int64[6, 1] i", f"{P} s = GatherElements <axis = 0> (p, i)", "float[6, 1] y", False),
    "a factor of each row": (
        "float[6, 6] x, float[6, 1] r", f"{P} q = Mul (r, p) s = ReduceMax <keepdims = 0> (q, last)", "float[6] y",
        True),
    "a factor of each class": (
        "float[6, 6] x, float[6] r", f"{P} q = Mul (r, p) s = ReduceMax <keepdims = 0> (q, last)", "float[6] y", True),
    "rows of three axes": (
        "float[2, 3, 6] x",
        f"{P} m = ReduceMean (p, last) q = Div (p, m) s = ReduceLogSumExp <keepdims = 0> (q, third)",
        "float[2, 3] y",
        True,
    ),
    "rows that meet all rows": (
        "float[1, 6, 6] x, float[6, 1, 6] r", f"{P} q = Mul (p, r) s = ReduceSum <keepdims = 0> (q, last)",
        "float[6, 6] y", False),
    "a result": ("float[6, 6] x", f"{P} {SUM}", "float[6] y, float[6, 6] p", False),
    "read in a body": (
        "float[6, 6] x, bool c",
        f"{P} {SUM} z = If (c) <then_branch = yes () => (float[6] t) {BODY},"
        f" else_branch = no () => (float[6] t) {BODY}>",
        "float[6] y, float[6] z",
        False,
    ),
    "a mean over all rows": (
        "float[6, 6] x",
        f"{P} o = ReduceSum <keepdims = 0> (p, last) m = ReduceMean <keepdims = 0> (o, first)"
        " q = Mul (p, m) s = ReduceSum <keepdims = 0> (q, last)",
        "float[6] y",
        False,
    ),
    "three results": (
        "float[6, 6] x",
        f"{P} a = ReduceMax <keepdims = 0> (p, last) q = Neg (p) b = ReduceSum <keepdims = 0> (q, last) "
        "c = ArgMax <axis = 1> (p) d = Exp (a) e = Exp (b) s = Identity (c)",
        "float[6] d, float[6] e, int64[6, 1] y",
        True,
    ),
    "one piece": ("float[2, 6] x", f"{P} {SUM}", "float[2] y", False),
    "no classes": ("float[6, 0] x", f"{P} {SUM}", "float[6] y", False),
}  # fmt: skip


def graph_of(name: str, monkeypatch: pytest.MonkeyPatch) -> onnx.ModelProto:
    """The graph of a name; a piece has two rows."""
    monkeypatch.setattr(chunked_scores, "PIECE", 12)
    given, nodes, results, _ = GRAPHS[name]
    known = "int64[1] last = {-1}, int64[1] first = {0}, int64[1] third = {2}, float[6, 6] g"
    head = f'<ir_version: 10, opset_import: ["" : 21, "{DOMAIN}" : 1]>'
    text = f"{head} g ({given}) => ({results}) <{known}> {{ {nodes} y = Identity (s) }}"
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))


@pytest.mark.parametrize("name", GRAPHS)
def test_rows_are_parted_where_none_reads_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = graph_of(name, monkeypatch)
    work = onnx_ir.from_proto(plain)
    chunked_scores.compute_scores_in_chunks(work)
    if not GRAPHS[name][3]:
        assert [node.op_type for node in work.graph] == [node.op_type for node in plain.graph.node]
        return
    parts = [node for node in work.graph if node.op_type == "LogSoftmax"]
    assert len(parts) == 3
    for before, part in pairwise(parts):
        assert before in list(before_it(part))  # so their scores never stand at once
    write_orders(work)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=tuple(d.dim_value for d in plain.graph.input[0].type.tensor_type.shape.dim))}
    feeds |= {"i": rng.integers(0, 6, (6, 1)), "r": rng.normal(size=(6, 1) if "[6, 1] r" in GRAPHS[name][0] else 6)}
    given = {i.name: feeds[i.name] if i.name == "i" else feeds[i.name].astype(np.float32) for i in plain.graph.input}
    for model in (plain, parted := onnx_ir.to_proto(work)):
        kept = [known for known in model.opset_import if not known.domain]
        del model.opset_import[:]
        model.opset_import.extend(kept)
    for y, value in run(plain, given).items():
        np.testing.assert_allclose(run(parted, given)[y], value, rtol=1e-6)


def before_it(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """The nodes that must run before ``node``."""
    for x in node.inputs:
        if x is not None and (producer := x.producer()) is not None:
            yield producer
            yield from before_it(producer)


def test_pieces_have_as_many_rows_or_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunked_scores._Region(22, WORDS).lengths == [6, 6, 5, 5]
    monkeypatch.setattr(chunked_scores, "LEAST_ROWS", 8)
    assert chunked_scores._Region(22, WORDS).lengths == [8, 7, 7]


def test_pieces_end_with_what_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the gradient: the next piece begins once that is there, and the scores are gone."""
    graph = onnx_ir.from_proto(graph_of("three results", monkeypatch)).graph
    region = chunked_scores._Region.around(graph[0])
    assert region is not None and [y.name for y in region.results()] == ["a", "b", "c"]
