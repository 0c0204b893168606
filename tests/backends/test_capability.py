"""Tables of what runtimes can do: how they are read, what they say of a node, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.backends import BACKENDS, capability, checked_backends
from gradgraph.backends.capability import KINDS, TABLES, Row, Table, Verdict
from gradgraph.backends.engine import check_against_table
from gradgraph.backends.facts import facts_of
from gradgraph.errors import BuildError
from gradgraph.frontend import nn
from gradgraph.graph.schemas import known_since
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.passes.normal.sizes.infer import infer_shapes
from tests.kit.convolutions import convolutions

INPUTS = (
    "float[2, 3] x, int64[2] i, float[n, 3] z, float[1, n, 4] c, float[1, 2, n] h, float[1, 6, 4] v, float[8, 6, 2] f"
)


def node_of(text: str, inputs: str = INPUTS) -> ir.Node:
    head = f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]> g ({inputs}) => (y)'
    model = ir.from_proto(onnx.parser.parse_model(f"{head} {{ {text} }}"))
    infer_shapes(model)
    return model.graph.node(-1)


@pytest.mark.parametrize(
    ("text", "holds", "not_"),
    [
        ("y = Relu(x)", {"T float32", "rank 2", "input 0 computed"}, {"open", "input 1"}),
        ("y = Relu(z)", {"open", "input 0 open"}, {"rank unknown", "open inside", "channels open"}),
        ("y = GlobalMaxPool(c)", {"channels open", "input 0 open inside"}, {"space open"}),
        ("y = GlobalMaxPool(h)", {"space open", "open inside"}, {"channels open"}),
        ("y = RNN <activations=[\"Tanh\"], hidden_size=2> (c, c, c)", {"hidden_size set"}, {"activations set"}),
        ("y = RNN <activations=[\"Relu\"]> (c, c, c)", {"activations set"}, {"hidden_size set"}),
        ("y = Add(x, z)", {"broadcasts"}, {"output 1"}),
        ("y = Cast <to=7> (x)", {"T1 float32", "T2 int64"}, {"to=7"}),
        ("y = Reshape(x, i)", {"input 1 computed", "allowzero=0"}, {"input 1 negative"}),
        ("s = Constant <value_ints=[-1, 0]> () y = Reshape(x, s)", {"input 1 negative", "input 1 zero"},
         {"input 1 computed"}),
        ("y = Transpose <perm=[1, 0]> (x)", {"perm uneven", "perm set"}, {"perm negative"}),
        ("y = MaxPool <kernel_shape=[3]> (c)", {"kernel_shape not 1"}, {"kernel_shape uneven"}),
        ("y = Conv(v, f)", {"channels in threes", "filters in fours"}, set()),
        ("y = Conv(c, c)", set(), {"channels in threes", "filters in fours"}),
        ("y = LeakyRelu <alpha=0.5> (x)", {"alpha set"}, set()),
        ("y = LeakyRelu <alpha=0.01> (x)", set(), {"alpha set"}),
        ("y = LpNormalization <p=2> (x)", {"p=2", "p even"}, {"p set"}),
    ],
)  # fmt: skip
def test_facts(text: str, holds: set[str], not_: set[str]) -> None:
    facts = facts_of(node_of(text))
    assert holds <= facts
    assert not facts & not_


def test_facts_of_bodies_and_outputs() -> None:
    scan = """y, t = Scan <num_scan_inputs=1, body = b (float s, float[3] e) => (float s2, float[3] o) {
        s2 = Identity(s) o = Mul(e, w) }> (k, x)"""
    assert "captures" in facts_of(node_of(scan, "float k, float[2, 3] x, float[3] w"))
    pool = "y, p = MaxPool <kernel_shape=[2]> (x) q = Identity(p)"
    graph = node_of(pool, "float[1, 1, 4] x").graph
    assert graph is not None
    assert "output 1" in facts_of(graph.node(0))


TOY = Table(
    "Toy", "1.0", "a test", tested=True, complete=False, falls_back=False, functions=False, opsets=(13, 21),
    ir_versions=(3, 10),
    rows={
        "Relu": Row.read({"T": "float32 float16"}),
        "Add": Row.read({"T": "float32", "wrong": ["T uint32"], "refused": ["broadcasts & !open", "T bool: so"]}),
        "Loop": Row.read({"refused": ["*"]}),
        "LRN": Row.read({"T": "float32", "fatal": ["size even: it ends"]}),
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "inputs", "verdict"),
    [
        ("y = Relu(x)", "float[2] x", Verdict("right")),
        ("y = Relu(x)", "double[2] x", Verdict("untried", "Relu of float64 was not tested in it")),
        ("y = Exp(x)", "float[2] x", Verdict("untried", "Exp was not tested in it")),
        ("y = Add(x, x)", "uint32[2] x", Verdict("wrong", "it computes Add with uint32 wrong")),
        ("y = Add(x, z)", "float[2] x, float z",
         Verdict("refused", "it does not support Add with inputs of different shapes and not open sizes")),
        ("y = Add(x, z)", "float[n] x, float z", Verdict("right")),
        ("y = Add(x, x)", "bool[2] x", Verdict("refused", "so")),
        ("y = LRN <size=2> (x)", "float[1, 4, 4] x", Verdict("refused", "it ends")),
        ("y = LRN <size=3> (x)", "float[1, 4, 4] x", Verdict("right")),
        ("y = toy.Add(x, x)", "float[2] x", Verdict("refused", "it has no operator Add of the domain toy")),
    ],
)  # fmt: skip
def test_verdicts(text: str, inputs: str, verdict: Verdict) -> None:
    assert TOY.verdict(node_of(text, inputs)) == verdict


@pytest.mark.parametrize("name", sorted(p.stem for p in TABLES.glob("*.toml")))
def test_every_table_is_of_a_backend_and_of_operators_that_there_are(name: str) -> None:
    assert name in BACKENDS
    assert name in checked_backends()
    table = BACKENDS[name].table
    assert table is not None
    operators = {op for op in table.rows if "." not in op}
    assert operators <= set(known_since())
    assert table.version or not table.tested
    assert len(table.source.split()) > 4


def test_what_cannot_be_right_is_refused_at_build(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = capability.Table(**{**vars(TOY), "rows": {"Conv": Row.read({"wrong": ["*"]})}})
    monkeypatch.setattr("gradgraph.backends.capability.table_of", lambda name: toy if name == "openvino" else None)
    with pytest.raises(BuildError, match=r"\(Conv\) cannot run in Toy 1.0: it computes the operator Conv wrong \(and"):
        gg.build(convolutions("batch"), "mse", gg.optim.sgd(0.1), backend="openvino")
    gg.build(convolutions("batch"), "mse", gg.optim.sgd(0.1), backend="auto")


def test_what_is_fatal_is_refused_where_all_else_falls_back() -> None:
    table = Table(**{**vars(TOY), "falls_back": True})
    assert table.verdict(node_of("y = LRN <size=2> (x)", "float[1, 4, 4] x")).kind == "refused"
    assert table.verdict(node_of("y = Add(x, x)", "bool[2] x")).kind == "falls back"


def test_what_init_onnx_cannot_be_is_refused_at_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes are held against the table, too, and not those of train.onnx and eval.onnx alone."""
    rows = {"ConstantOfShape": Row.read({"refused": ["*"]})}
    toy = capability.Table(**{**vars(TOY), "rows": rows})
    monkeypatch.setattr("gradgraph.backends.capability.table_of", lambda name: toy)
    with pytest.raises(BuildError, match=r"'init/ConstantOfShape' .* it does not support the operator ConstantOfShape"):
        gg.build(convolutions("batch"), "mse", gg.optim.adam(0.1), backend="openvino")


def test_untried_nodes_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("gradgraph.backends.capability.table_of", lambda name: TOY)
    model = ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Exp(x) }'
        )
    )
    check_against_table(BACKENDS["openvino"], model)
    assert caplog.messages == ["1 of 1 nodes are untested in Toy 1.0: 1 Exp"]


# --- gradgraph.check_backend -------------------------------------------------------------------------------


def test_check_backend_of_models_and_steps(tmp_path: Path) -> None:
    model = convolutions("batch")
    assert gg.check_backend(model, "coreml").ok
    step = gg.build(model, "mse", gg.optim.sgd(0.1))
    step.save(tmp_path / "step")
    report = gg.check_backend(step, "coreml")
    assert gg.check_backend(tmp_path / "step", "coreml") == report
    assert report.ok
    assert not report.tested
    assert {f.file for f in report.findings} == {"train.onnx"}
    assert set(report.counts) == {"falls back"}
    assert "train.onnx: node 'update/Neg' (Neg): falls back, it has no operator Neg" in map(str, report.findings)


def test_what_concerns_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradgraph.backends.capability.table_of", lambda name: TOY)
    step = gg.build(convolutions("batch"), "mse", gg.optim.sgd(0.1))
    said = [f.reason for f in gg.check_backend(step.train, "openvino").findings if f.node == "the model"]
    assert said == [f"it calls {len(step.train.functions)} functions, which Toy 1.0 does not support"]
    old = onnx.parser.parse_model(
        '<ir_version: 14, opset_import: ["": 11]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    report = gg.check_backend(old, "openvino")
    assert [f.reason for f in report.findings] == [
        "it has opset 11, but Toy 1.0 supports 13 to 21",
        "it has IR version 14, but Toy 1.0 supports 3 to 10",
    ]
    assert report.notes == ("opset 11 was converted to 21",)
    assert not report.ok


def test_a_backend_without_a_table_is_refused() -> None:
    with pytest.raises(BuildError, match="the backend 'auto' has no table of supported operators; use coreml"):
        gg.check_backend(convolutions("batch"), "auto")


def test_kinds_go_from_good_to_bad() -> None:
    assert [Verdict(kind).fails for kind in KINDS] == [False, False, False, True, True]
    assert np.argmax([k == "right" for k in KINDS]) == 0


@pytest.mark.parametrize("backend", ["openvino", "tract"])
def test_a_network_with_an_open_batch_is_no_reason_to_refuse(backend: str) -> None:
    """A convolution takes any number of images; what OpenVINO and tract lack are open sizes of its weight."""
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    report = gg.check_backend(frontend.export(nn.Sequential(*layers), {"x": ("batch", 1, 8, 8)}), backend)
    assert report.ok, [str(f) for f in report.findings]


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_iree_takes_neither_the_largest_nor_the_smallest_of_scattered_elements(reduction: str) -> None:
    node = f'y = ScatterElements<reduction="{reduction}">(x, i, u)'
    inputs = "(float[2,3] x, int64[1,3] i, float[1,3] u)"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g {inputs} => (float[2,3] y) {{ {node} }}'
    )
    assert gg.check_backend(model, "iree").ok is (reduction in ("none", "add", "mul"))
