"""Losses on outputs that are probabilities: every loss of logits reads what lies before them, or says why it does not.

The plain reference is the same network without the Softmax or Sigmoid at its end.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.parser import parse_model

import gradgraph as gg
from gradgraph.losses import LOSSES

ENDS = {
    "Softmax": "p = Softmax <axis = 1> (z)",
    "Sigmoid": "p = Sigmoid (z)",
    "Softmax, passed on": "s = Softmax <axis = -1> (z)\n i = Identity (s)\n p = Cast <to = 1> (i)",
    "Softmax, cut": "s = Softmax <axis = 1> (z)\n p = Clip (s, least, most)",
    "Softmax, turned": "s = Softmax <axis = 1> (z)\n t = Reshape (s, turned)\n p = Transpose <perm = [1, 0]> (t)",
    "Sigmoid, reshaped": "s = Sigmoid (z)\n p = Reshape (s, shape)",
    "Sigmoid of two classes": "s = Sigmoid (z)\n n = Sub (most, s)\n p = Concat <axis = 1> (n, s)",
}
WRITTEN_OUT = {
    "Softmax by a quotient": "e = Exp (z)\n t = ReduceSum (e, last)\n p = Div (e, t)",
    "Softmax less its greatest": "g = ReduceMax (z, last)\n d = Sub (z, g)\n e = Exp (d)\n t = ReduceSum (e, last)\n"
    "p = Div (e, t)",
    "Softmax by a reciprocal": "e = Exp (z)\n t = ReduceSum (e, last)\n i = Reciprocal (t)\n p = Mul (i, e)",
    "Softmax with its axis back": "e = Exp (z)\n t = ReduceSum <keepdims = 0> (e, last)\n u = Unsqueeze (t, last)\n"
    "p = Div (e, u)",
    "Softmax of logarithms": "l = LogSoftmax <axis = 1> (z)\n p = Exp (l)",
    "Softmax by ReduceLogSumExp": "t = ReduceLogSumExp (z, last)\n l = Sub (z, t)\n p = Exp (l)",
    "Softmax written out, passed on": "e = Exp (z)\n t = ReduceSum (e, last)\n q = Div (e, t)\n p = Identity (q)",
    "Sigmoid by a quotient": "n = Neg (z)\n e = Exp (n)\n a = Add (e, most)\n p = Div (most, a)",
    "Sigmoid by a reciprocal": "n = Mul (z, minus)\n e = Exp (n)\n a = Add (most, e)\n p = Reciprocal (a)",
    "Sigmoid of odds": "e = Exp (z)\n a = Add (most, e)\n p = Div (e, a)",
    "Sigmoid by Tanh": "h = Mul (z, half)\n t = Tanh (h)\n a = Add (t, most)\n p = Mul (a, half)",
    "Sigmoid by Tanh of halves": "h = Div (z, two)\n t = Tanh (h)\n a = Mul (t, half)\n p = Add (half, a)",
    "Sigmoid by Softplus": "n = Neg (z)\n s = Softplus (n)\n m = Neg (s)\n p = Exp (m)",
    "Sigmoid by halves": "n = Neg (z)\n e = Exp (n)\n a = Add (e, most)\n q = Div (most, a)\n f = Exp (z)\n"
    "b = Add (f, most)\n r = Div (f, b)\n c = GreaterOrEqual (z, least)\n p = Where (c, q, r)",
}
NEGATED = {  # Sigmoids of −z
    "Sigmoid by a quotient, of −z": "e = Exp (z)\n a = Add (e, most)\n p = Div (most, a)",
    "Sigmoid by a reciprocal, of −z": "e = Exp (z)\n a = Add (most, e)\n p = Reciprocal (a)",
    "Sigmoid by Softplus, of −z": "s = Softplus (z)\n m = Neg (s)\n p = Exp (m)",
    "Sigmoid by halves, of −z": "e = Exp (z)\n a = Add (e, most)\n q = Div (most, a)\n b = Add (most, e)\n"
    "r = Reciprocal (b)\n c = GreaterOrEqual (z, least)\n p = Where (c, q, r)",
}
ENDS |= WRITTEN_OUT | {
    "Softmax written out, cut": "e = Exp (z)\n t = ReduceSum (e, last)\n q = Div (e, t)\n p = Clip (q, least, most)",
    "Sigmoid written out, reshaped": "n = Neg (z)\n e = Exp (n)\n a = Add (e, most)\n q = Div (most, a)\n"
    "p = Reshape (q, shape)",
    "Sigmoid, there and back": "s = Sigmoid (z)\n u = Unsqueeze (s, last)\n t = Transpose <perm = [2, 1, 0]> (u)\n"
    "b = Transpose <perm = [2, 1, 0]> (t)\n i = Identity (b)\n p = Squeeze (i, last)",
    "Softmax, flattened": "s = Softmax <axis = 1> (z)\n p = Flatten (s)",
    "Softmax, squeezed": "u = Unsqueeze (z, last)\n s = Softmax <axis = 2> (u)\n p = Squeeze (s, last)",
}
MOVED = {"Sigmoid, reshaped", "Sigmoid written out, reshaped", "Sigmoid, there and back"}
# what looks like one of them
OTHER_ENDS = {
    "halves of two signs": "e = Exp (z)\n a = Add (e, most)\n q = Div (most, a)\n r = Div (e, a)\n"
    "c = GreaterOrEqual (z, least)\n p = Where (c, q, r)",
    "over the other axis than the sum": "e = Exp (z)\n t = ReduceSum (e, first)\n q = Mul (e, half)\n p = Div (q, t)",
    "of another base": "e = Exp (z)\n f = Exp (e)\n t = ReduceSum (f, last)\n p = Div (e, t)",
    "over both axes": "e = Exp (z)\n t = ReduceSum (e)\n p = Div (e, t)",
    "two in place of one": "n = Neg (z)\n e = Exp (n)\n a = Add (e, two)\n p = Div (most, a)",
    "odds of another": "e = Exp (z)\n m = Mul (z, half)\n f = Exp (m)\n a = Add (f, most)\n p = Div (e, a)",
    "Tanh of the whole": "t = Tanh (z)\n a = Add (t, most)\n p = Mul (a, half)",
    "a shift by another axis": "g = ReduceMax (z, first)\n l = Sub (z, g)\n p = Exp (l)",
}
LOGITS = {name for name, make in LOSSES.items() if make().activation and len(make().reads) == 1}
OF_DETECTORS = {"detr", "retinanet", "ssd", "fcos", "iou", "giou", "diou", "ciou"}  # of boxes, and several outputs
OF_PAIRS = {"dpo", "ipo", "orpo", "simpo", "kto"}  # of log-probabilities of two answers
OF_LOGS = {"kl_div", "nll"}
OF_VALUES = {  # that may well be probabilities
    "bce", "gaussian_nll", "hinge", "hinge_embedding", "huber", "l1", "log_cosh", "mse", "multi_margin",
    "multilabel_margin", "poisson_nll", "smooth_l1", "soft_margin",
    "clip", "cosine_embedding", "info_nce", "triplet",
}  # fmt: skip
ROWS, RNG = 5, np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)


def network(end: str = "p = Identity (z)", wide: bool = False) -> onnx.ModelProto:
    classes = 6 if wide else 3
    model = parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, {classes}] p)
    <float[4, 3] w, float least = {{0.0}}, float most = {{1.0}}, float half = {{0.5}}, float two = {{2.0}},
     float minus = {{-1.0}}, int64[1] last = {{1}}, int64[1] first = {{0}},
     int64[2] shape = {{-1, 3}}, int64[2] turned = {{3, -1}}> {{
        z = MatMul (x, w)
        {end}
    }}""")
    w = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return model


def batch(step: gg.Step) -> dict[str, Any]:
    (target,) = step.manifest.targets
    whole = target.dtype == "int64"
    values = np.arange(ROWS) % 3 if whole else RNG.integers(0, 2, (ROWS, 3)).astype(np.float32)
    return {"x": X, target.name: values}


def words(step: gg.Step) -> str:
    return "\n".join(str(f) for f in step.findings if f.subject == "output 'p'")


def test_every_loss_is_of_logits_of_logarithms_or_of_values() -> None:
    assert {name for name, make in LOSSES.items() if make().of_logs} == OF_LOGS
    assert {*LOGITS} | OF_LOGS | OF_VALUES | OF_DETECTORS | OF_PAIRS == {*LOSSES.keys()}


@pytest.mark.sweep(0.011)
@pytest.mark.parametrize(
    ("loss", "end"),
    [(loss, end) for loss in sorted(LOGITS - {"ctc"}) for end in ENDS
     if end not in WRITTEN_OUT or loss in ("cross_entropy", "bce_with_logits")],
)  # fmt: skip
def test_a_loss_of_logits_reads_logits_or_says_that_it_does_not(loss: str, end: str) -> None:
    model = network(ENDS[end], wide=end == "Sigmoid of two classes")
    kind, own = end[:7], LOSSES[loss]().activation
    step = gg.build(model, loss)
    assert f"ends in a {kind}" in words(step)
    assert [o for o in step.eval.graph.output if o.name == "z"] == []
    assert words(gg.build(model, loss, output="p")), "also where it is named"
    read = "reads the logits that it is computed from, 'z'" in words(step)
    assert read == (kind == own and end in ("Softmax", "Sigmoid", "Softmax, passed on", *WRITTEN_OUT, *MOVED))
    assert ("reshaped in the same way" in words(step)) == (read and end in MOVED)
    if not read:
        return
    given = batch(step)
    trainer, plain = gg.Trainer(step, device="cpu"), gg.Trainer(gg.build(network(), loss), device="cpu")
    for _ in range(3):
        found, wanted = trainer.step(given), plain.step(given)
        np.testing.assert_allclose([found[n] for n in wanted], [wanted[n] for n in wanted], rtol=1e-6)
    wanted_scores = plain.evaluate(given)
    assert trainer.evaluate(given) == pytest.approx(wanted_scores, rel=1e-6)
    logits = plain.predict(X)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) if own == "Softmax" else 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(trainer.predict(X), p, rtol=1e-5)
    assert [o.name for o in trainer.export().graph.output] == ["p"]


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("loss", ["bce_with_logits", "sigmoid_focal"])
@pytest.mark.parametrize("end", NEGATED)
def test_the_negative_of_what_a_sigmoid_is_written_out_of_is_read(end: str, loss: str) -> None:
    step, plain = gg.build(network(NEGATED[end]), loss), gg.build(network("p = Neg (z)"), loss)
    assert "reads the logits that it is computed from, the negative of 'z'" in words(step)
    assert "ends in a Sigmoid" in words(gg.build(network(NEGATED[end]), loss, output="p"))
    given, trainers = batch(step), [gg.Trainer(s, device="cpu") for s in (step, plain)]
    for _ in range(3):
        found, wanted = (t.step(given) for t in trainers)
        np.testing.assert_allclose([found[n] for n in wanted], [wanted[n] for n in wanted], rtol=1e-6)
    assert trainers[0].evaluate(given) == pytest.approx(trainers[1].evaluate(given), rel=1e-6)
    np.testing.assert_allclose(trainers[0].predict(X), 1 / (1 + np.exp(-trainers[1].predict(X))), rtol=1e-5)
    assert [o.name for o in trainers[0].export().graph.output] == ["p"]


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("loss", sorted(LOGITS | OF_LOGS | OF_VALUES))
def test_other_outputs_are_nothing_to_speak_of(loss: str) -> None:
    """Logits, log-probabilities and probabilities inside of the network."""
    if len(LOSSES[loss]().reads) > 1 or loss == "ctc":
        return
    for end in ("p = Identity (z)", "p = LogSoftmax <axis = 1> (z)", "s = Softmax <axis = 1> (z)\n p = MatMul (s, c)"):
        model = network(end)
        if "c)" in end:
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "c"))
        assert not words(gg.build(model, loss))
    if loss in OF_VALUES:
        assert not words(gg.build(network(ENDS["Sigmoid"]), loss))
    if loss in OF_LOGS:
        assert "contains probabilities" in words(gg.build(network(ENDS["Softmax"]), loss))


@pytest.mark.parametrize("end", OTHER_ENDS)
@pytest.mark.parametrize("loss", ["cross_entropy", "bce_with_logits"])
def test_what_only_looks_like_probabilities_is_read_as_it_is(loss: str, end: str) -> None:
    assert not words(gg.build(network(OTHER_ENDS[end]), loss))


@pytest.mark.sweep(0.36)
@pytest.mark.parametrize("end", WRITTEN_OUT)
def test_what_is_written_out_gives_what_one_operator_gives(end: str) -> None:
    """So that the forms here are forms of it."""
    found, wanted = (
        gg.Trainer(gg.build(network(e), "mse"), device="cpu").predict(X) for e in (WRITTEN_OUT[end], ENDS[end[:7]])
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_several_losses_and_named_logits() -> None:
    model = network(ENDS["Softmax"])
    step = gg.build(model, {"p": "cross_entropy"})
    assert "name the logits that it is computed from, 'z'" in words(step)
    assert not words(gg.build(model, "cross_entropy", output="z"))


def test_a_softmax_over_another_axis_stays() -> None:
    model = network("r = Reshape (z, cut)\n a = Concat <axis = 1> (r, r)\n p = Softmax <axis = 2> (a)")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 1, 3]), "cut"))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    for size in ("batch", 2, 3):
        dim = model.graph.output[0].type.tensor_type.shape.dim.add()
        setattr(dim, "dim_param" if isinstance(size, str) else "dim_value", size)
    assert "reads the logits" not in words(gg.build(model, "cross_entropy"))
    assert "reads the logits" in words(gg.build(model, gg.losses.cross_entropy(axis=2)))


OPTIONS: list[dict[str, Any]] = [
    {"precision": "bfloat16"},
    {"accumulate": True},
    {"recompute": "sqrt"},
    {"sample_weight": True},
    {"mask": True},
    {"metrics": ["f1", "accuracy"]},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_with_other_options(options: dict[str, Any]) -> None:
    steps = [gg.build(network(end), "cross_entropy", **options) for end in (ENDS["Softmax"], "p = Identity (z)")]
    given = {"x": X, "target": np.arange(ROWS) % 3}
    if "sample_weight" in options:
        given["sample_weight"] = np.linspace(0, 1, ROWS, dtype=np.float32)
    if "mask" in options:
        given["mask"] = np.arange(ROWS) < 4
    found, wanted = (gg.Trainer(step, device="cpu").evaluate(given) for step in steps)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3)


def test_check_says_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from gradgraph.cli.app import run

    onnx.save(network(ENDS["Softmax"]), tmp_path / "m.onnx")
    assert run(["check", str(tmp_path / "m.onnx")]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "output 'p' ends in a Softmax" in told and "use the logits 'z'" in told
    assert run(["check", str(tmp_path / "m.onnx"), "--json"]) == 0
    assert "ends in a Softmax" in json.dumps(json.loads(capsys.readouterr().out)["findings"])


NO_OPS = {
    "Identity": onnx.helper.make_node("Identity", ["a"], ["logits"]),
    "Cast": onnx.helper.make_node("Cast", ["a"], ["logits"], to=onnx.TensorProto.FLOAT),
    "Mul": onnx.helper.make_node("Mul", ["a", "one"], ["logits"]),
    "Dropout": onnx.helper.make_node("Dropout", ["a"], ["logits"]),
}


@pytest.mark.parametrize("no_op", NO_OPS)
@pytest.mark.parametrize("several", [False, True], ids=["output=", "a dict"])
def test_logits_that_are_named_may_change_nothing(no_op: str, several: bool) -> None:
    """A simpler model would not have them, and the advice is to name them."""
    weights = {"w": np.ones((3, 2), np.float32), "one": np.ones((), np.float32)}
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["a"]), NO_OPS[no_op],
             onnx.helper.make_node("Softmax", ["logits"], ["y"], axis=-1)]  # fmt: skip
    graph = onnx.helper.make_graph(
        nodes, "g", [onnx.helper.make_tensor_value_info("x", 1, ["n", 3])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n", 2])],
        [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    loss, more = ({"logits": "cross_entropy"}, {}) if several else ("cross_entropy", {"output": "logits"})
    step = gg.build(model, loss, gg.optim.sgd(0.1), train="w", **more)
    assert {"loss", "y"} <= {v.name for v in step.eval.graph.output}
