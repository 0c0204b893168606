"""Everything that is wrong with a model is found in one run, with node, expectation and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gradgraph.errors import Finding
from gradgraph.verify.diagnose import diagnose
from tests.kit.command_line import Cli

FLOAT = TensorProto.FLOAT


def node(op_type: str, inputs: str, outputs: str, name: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), outputs.split(), name, **attributes)


def model(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """Reads x and the weights w and v; the model's output is what the last node gives."""
    x = helper.make_tensor_value_info("x", FLOAT, ["N", 4])
    y = helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, None)
    arrays = {"w": np.ones((4, 3), np.float32), "v": np.ones((5, 2), np.float32), "d": np.ones(3)}
    weights = [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(list(nodes), "g", [x], [y], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


ALL_WRONG = model(
    node("MatMul", "x w", "a", "fine"),
    node("Relu", "a a", "b", "arity"),
    node("Softmax", "b", "c", "attribute", axs=1),
    node("Gelu", "c", "e", "opset"),
    node("MatMul", "a v", "f", "sizes"),
    node("Add", "a d", "g", "types"),
    helper.make_node("Magic", ["a"], ["h"], "magic", domain="own"),
    helper.make_node("Trick", ["h"], ["i"], "trick", domain="own"),
    node("Sum", "a e g i", "y", "last"),
)
WORDS = {
    "arity": "has 2 inputs, and at opset 17 this operator takes 1",
    "attribute": "has the attribute 'axs'",
    "opset": "calls an operator that opset 17 does not have, and ONNX has it since opset 20",
    "sizes": "whose inner sizes are 3 and 5",
    "types": "of type float64, which must have the same type; put a Cast",
    "magic": 'has no gradient rule, and is between .* register one with gradgraph.extend.vjp("Magic", domain="own")',
    "trick": "has no gradient rule",
}


def of_node(findings: list[Finding]) -> dict[str, Finding]:
    return {f.subject.split("'")[1]: f for f in findings}


def test_all_kinds_are_found_in_one_run() -> None:
    findings = diagnose(ALL_WRONG)
    assert sorted(of_node(findings)) == sorted(WORDS)
    assert len(findings) == len(WORDS)
    for name, finding in of_node(findings).items():
        plain = str(finding)
        for part in WORDS[name].split(" .* "):
            assert part in plain
        assert finding.remedy
        assert finding.severity == "error"


def test_a_model_that_is_right_has_none() -> None:
    assert diagnose(model(node("MatMul", "x w", "a", "m"), node("Relu", "a", "y", "r"))) == []


def test_a_model_with_damaged_tensors_is_told_with_its_nodes() -> None:
    broken = model(node("Relu", "x x", "y", "r"))
    broken.graph.initializer[0].raw_data += b"1"
    broken.graph.initializer[1].float_data.append(1.0)
    assert [f.subject.split("'")[1] for f in diagnose(broken)] == ["w", "v", "r"]


@pytest.mark.parametrize("as_json", [False, True])
def test_check_lists_them(as_json: bool, cli: Cli, tmp_path: Path) -> None:
    onnx.save(ALL_WRONG, tmp_path / "m.onnx")
    ran = cli("check", str(tmp_path / "m.onnx"), *(["--json"] if as_json else []))
    assert ran.code == 1
    assert f"{len(WORDS)} problems prevent computing the gradients" in ran.err
    assert all(f"node '{name}'" in ran.err for name in WORDS)
    if as_json:
        found = json.loads(ran.out)["findings"]
        assert sorted(f["subject"].split("'")[1] for f in found) == sorted(WORDS)
        assert all(set(f) == {"subject", "what", "expected", "remedy", "severity"} for f in found)


def test_nodes_without_names_go_by_their_outputs() -> None:
    nodes = [
        node("MatMul", "x v", "a", ""),  # 4 against 5
        node("Relu", "x", "b", ""),
        node("Relu", "b", "b2", "Relu"),
        node("Add", "b2 d", "c", ""),  # float32 and float64
        helper.make_node("Magic", ["b2"], ["e"], domain="own"),
        node("Sum", "a c e", "y", "last"),
    ]
    found = {f.subject for f in diagnose(model(*nodes))}
    assert found == {
        "the node that computes 'a' (MatMul)",
        "the node that computes 'c' (Add)",
        "the node that computes 'e' (own.Magic)",
    }
    twice = model(helper.make_node("Relu", ["x", "x"], ["y"]))
    assert [f.subject for f in diagnose(twice)] == ["the node that computes 'y' (Relu)"]
