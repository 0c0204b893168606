"""Models that show a fault become small ones that still show it, and say nothing of where they come from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.reduction.faults import LOOKS
from gradgraph.reduction.kinds import FAULTS
from gradgraph.rules.registry import RULES, Rule
from tests.kit.operator_graphs import drawn
from tests.kit.small_models import op_types, parsed, real

SECRET = "patient"  # stands in every name and text of the models below


def network(middle: str, sizes: str = "batch, 24") -> onnx.ModelProto:
    """Two layers, with some nodes between them, of which a fault shows in one."""
    model = parsed(
        f"""(float[{sizes}] patient_x) => (float[batch, 6] patient_y, float[batch, 12] patient_z) {{
            patient_a = MatMul(patient_x, patient_w1)
            patient_b = Relu(patient_a)
            {middle}
            patient_d = Sigmoid(patient_c)
            patient_z = Mul(patient_d, patient_b)
            patient_s = Shape(patient_z)
            patient_r = Reshape(patient_z, patient_s)
            patient_y = Gemm(patient_r, patient_w2)
        }}""",
        patient_w1=real(24, 12),
        patient_w2=real(12, 6, seed=1),
    )
    model.doc_string = model.graph.doc_string = "of a patient"
    model.metadata_props.add(key="patient", value="patient")
    for number, node in enumerate(model.graph.node):
        node.name, node.doc_string = f"patient/{number}", "of a patient"
    model.opset_import.append(helper.make_opsetid("com.acme", 1))
    return model


def wrong(op_type: str, patch: pytest.MonkeyPatch) -> Callable[[onnx.ModelProto], bool]:
    """Make a rule wrong by one in a hundred, and return the judge that says whether it shows."""
    right = RULES["", op_type]

    def emit(*args: object, **kwargs: object) -> object:
        found = right.emit(*args, **kwargs)
        if not isinstance(found, tuple | list):
            return found * 1.01
        place = next(i for i, each in enumerate(found) if each is not None)
        return [each * 1.01 if i == place else each for i, each in enumerate(found)]

    patch.setitem(RULES, ("", op_type), Rule(**{**vars(right), "emit": emit}))

    def shows(model: onnx.ModelProto) -> bool:
        try:
            return not gg.check_gradients(model).ok
        except Exception:  # a wrong emit may not fit its operator
            return False

    return shows


def test_each_kind_of_fault_has_its_look() -> None:
    assert [*LOOKS] == [*FAULTS]


FAULTY = {
    "an operator without a rule": (network("patient_c = com.acme.Mystery(patient_b)"), "build", {"Mystery"}),
    "a kernel that is not there": (
        network(
            """patient_e = Cast<to=11>(patient_b)
            patient_f = Celu(patient_e)
            patient_c = Cast<to=1>(patient_f)"""
        ),
        "run",
        {"Celu"},
    ),
}


@pytest.mark.sweep(0)
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_found_and_kept(name: str) -> None:
    model, kind, operators = FAULTY[name]
    found = gg.reduce(model)
    assert found.fault == kind
    assert operators <= {*found.operators}
    assert found.nodes <= len(operators) + 1 < found.nodes_before
    assert gg.reduce(found.model).seen == found.seen
    assert SECRET.encode() not in found.model.SerializeToString()
    assert found.model.ByteSize() < model.ByteSize() / 4


@pytest.mark.sweep(0)
def test_a_process_that_ends_is_a_fault() -> None:
    """An LSTM of onnxruntime ends the process on a batch of size 0."""
    model = parsed(
        """(float[3, 0, 4] patient_x) => (float[3, 0, 5] patient_y) {
            patient_a = Tanh(patient_x)
            patient_b, patient_h = LSTM<hidden_size=5>(patient_a, patient_w, patient_r)
            patient_c = Squeeze(patient_b, patient_axes)
            patient_y = Relu(patient_c)
        }""",
        patient_w=real(1, 20, 4),
        patient_r=real(1, 20, 5),
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "patient_axes"))
    found = gg.reduce(model, fault="run")
    assert found.seen.startswith("the process ends: ")
    assert found.operators == {"LSTM": 1}


@pytest.mark.sweep(0)  # it waits two seconds for each candidate
def test_a_model_that_takes_for_ever_is_a_fault() -> None:
    body = onnx.parser.parse_graph(
        "b (int64 i, bool c, float[n] s) => (bool d, float[n] t) { d = Identity(c) t = Cos(s) }"
    )
    model = parsed("(float[2] x) => (float[2] y) { y = Sin(x) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(10**12), "k"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "c"))
    model.graph.node[0].input[0] = "l"
    model.graph.node.insert(0, helper.make_node("Loop", ["k", "c", "x"], ["l"], body=body))
    found = gg.reduce(model, fault="run", seconds=2)
    assert found.seen == "it takes more than 2 s"
    assert found.operators["Loop"] == 1


@pytest.mark.sweep(0.06)
@pytest.mark.parametrize("op_type", ["Relu", "Sigmoid", "Gemm", "MatMul", "Mul"])
def test_a_wrong_rule_is_left_alone(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gg.reduce(network("patient_c = Neg(patient_b)"), shows=wrong(op_type, monkeypatch))
    assert found.operators == {op_type: 1}
    assert found.not_anonymous == ()
    assert SECRET.encode() not in found.model.SerializeToString()


@pytest.mark.sweep(0)
@pytest.mark.parametrize("seed", [1])  # of the first dozen, most show no rule or take long
def test_wrong_rules_in_random_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = drawn(seed, np.float32)
    model = graph.model()
    for op_type in dict.fromkeys(graph.operators):
        with monkeypatch.context() as patch:
            shows = wrong(op_type, patch)
            if ("", op_type) in RULES and op_type in op_types(model) and shows(model):
                found = gg.reduce(model, shows=shows)
                assert shows(found.model)
                assert found.nodes <= 3, found.operators
                break
    else:
        pytest.fail("none of its rules shows")


def test_weights_that_the_fault_needs_are_named() -> None:
    model = network("patient_c = Neg(patient_b)")

    def shows(candidate: onnx.ModelProto) -> bool:
        tensors = [onnx.numpy_helper.to_array(t) for t in candidate.graph.initializer]
        return any(np.array_equal(t, real(24, 12)) for t in tensors)

    found = gg.reduce(model, shows=shows)
    assert len(found.not_anonymous) == 1
    assert shows(found.model)


@pytest.mark.sweep(0)
def test_names_stay_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shows = wrong("Sigmoid", monkeypatch)
    found = gg.reduce(network("patient_c = Neg(patient_b)"), shows=shows, anonymous=False)
    assert [n.name for n in found.model.graph.node] == ["patient/3"]


@pytest.mark.sweep(0)
def test_branches_and_functions_go() -> None:
    branch = onnx.parser.parse_graph("b () => (float[n] c) { p = Neg(a) c = com.acme.Mystery(p) }")
    other = onnx.parser.parse_graph("b () => (float[n] c) { c = Abs(a) }")
    model = parsed("(float[5] x, bool q) => (float[5] y) { a = Exp(x) y = Tanh(a) }")
    model.graph.node.insert(1, helper.make_node("If", ["q"], ["m"], then_branch=branch, else_branch=other))
    model.graph.node[2].input[0] = "m"
    model.opset_import.append(helper.make_opsetid("com.acme", 1))
    found = gg.reduce(model)
    assert "If" not in found.operators
    assert found.operators["Mystery"] == 1


@pytest.mark.sweep(0)
def test_a_command_judges(tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("import sys; sys.exit(b'Sigmoid' not in open(sys.argv[1], 'rb').read())")
    found = gg.reduce(network("patient_c = Neg(patient_b)"), test=[sys.executable, str(judge), "{}"])
    assert found.operators == {"Sigmoid": 1}


SOUND = network("patient_c = Neg(patient_b)")


@pytest.mark.sweep(0)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "none of the known faults"),
        ({"fault": "build"}, "no fault of the kind 'build'"),
        ({"fault": "gradeint"}, "did you mean 'gradient'"),
        ({"shows": lambda model: False}, "does not report"),
        ({"test": ["true"]}, "no {}"),
        ({"test": ["no-such-program", "{}"]}, "does not start"),
        ({"test": ["true", "{}"], "shows": lambda model: True}, "not both"),
    ],
)
def test_what_cannot_be_reduced_is_one_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        gg.reduce(SOUND, **arguments)


@pytest.mark.sweep(0)
def test_the_model_is_written(tmp_path: Path) -> None:
    found = gg.reduce(FAULTY["an operator without a rule"][0], out=tmp_path / "small.onnx")
    written = onnx.load(tmp_path / "small.onnx")
    assert onnx.printer.to_text(written) == onnx.printer.to_text(found.model)
