"""Nodes as patterns look at them."""

import onnx.parser
import onnx_ir as ir
import pytest

from gradgraph.graph.builder import Builder
from gradgraph.graph.nodes import input_at, inputs_of, is_standard, made_by, read_once, source_of
from gradgraph.passes.normal.edit import Editor, calls_of

TEXT = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
g (float[2, 3] x, float[3] low) => (float[3, 2] y, float[2, 3] z) {
  a = Neg(x)
  b = Clip(a, , low)
  y = Transpose(b)
  z = own.Neg(x)
}"""


@pytest.fixture
def model() -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(TEXT))


def test_operators_of_other_domains_are_others(model: ir.Model) -> None:
    neg, *_, own = model.graph
    assert is_standard(neg, "Abs", "Neg") and not is_standard(neg, "Abs") and not is_standard(own, "Neg")
    assert calls_of(model, "Neg", "Clip") == [*model.graph][:2]


def test_inputs_that_are_left_out_are_none(model: ir.Model) -> None:
    clip = model.graph[1]
    assert input_at(clip, 1) is None and input_at(clip, 7) is None and input_at(clip, 2) is clip.inputs[2]
    assert inputs_of(clip) == [clip.inputs[0], clip.inputs[2]]


def test_the_node_before_a_value_is_asked_by_its_operator(model: ir.Model) -> None:
    _, clip, turn, own = model.graph
    assert made_by(turn.inputs[0], "Neg", "Clip") is clip and made_by(turn.inputs[0], "Neg") is None
    assert made_by(own.outputs[0], "Neg") is None and made_by(model.graph.inputs[0], "Neg") is None
    assert source_of(clip.inputs[0], "Neg") is model.graph.inputs[0] and source_of(None, "Neg") is None


def test_one_reader_is_told_from_several(model: ir.Model) -> None:
    neg, clip, turn, _ = model.graph
    assert read_once(neg.outputs[0], clip) and not read_once(turn.outputs[0], turn)
    turn.replace_input_with(0, neg.outputs[0])
    assert not read_once(neg.outputs[0], clip)


def test_sizes_are_known_before_the_model_runs_or_computed(model: ir.Model) -> None:
    op = Builder()
    x, unknown = (
        op.wrap(model.graph.inputs[0]),
        op.wrap(ir.Value(name="unknown", type=ir.TensorType(ir.DataType.FLOAT))),
    )
    assert (x.dim(0), x.dim(-1), unknown.dim(0)) == (2, 3, None)
    assert op.dims(x, 1).const is not None and op.dims(unknown, 1).const is None
    assert op.wrap(None) is None


def test_a_form_that_does_not_fit_is_refused(model: ir.Model) -> None:
    neg, *_ = model.graph
    editor = Editor(model)
    with pytest.raises(Exception, match=r"'a' \(Neg\) is odd: .*; export the model again"):
        editor.write_form(neg, lambda op, node: None, "is odd")
    assert editor.write_form(neg, lambda op, node, x: None, "") == []
    (new,) = editor.write_form(neg, lambda op, node, x: op.Abs(x), "")
    assert model.graph[0] is new and new.op_type == "Abs"
