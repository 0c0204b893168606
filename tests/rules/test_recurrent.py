"""RNN, GRU and LSTM: the oracle's kernels against onnxruntime, outputs left out, padding, errors, no unrolling."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.verify.reference import Oracle, in_float64

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STATES = {"RNN": ["h"], "GRU": ["h"], "LSTM": ["h", "c"]}
OWN: dict[str, list[dict[str, Any]]] = {
    "RNN": [{}],
    "GRU": [{}, {"linear_before_reset": 1}],
    "LSTM": [{}, {"input_forget": 1}],
}
FORMS = [(op_type, own) for op_type, options in OWN.items() for own in options]
DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
HIDDEN, FEATURES = 5, 3
Arrays = dict[str, np.ndarray]


def layer(
    op_type: str, steps: int | str = 4, batch: int | str = 4, outputs: str = "all", absent: str = "", **attrs: Any
) -> onnx.ModelProto:
    """A model of one node; ``outputs`` names one ("Y", "Y_h") or all of them, ``absent`` inputs are left out."""
    directions, rows = DIRECTIONS[attrs.get("direction", "forward")], GATES[op_type] * HIDDEN
    sizes = {"X": [steps, batch, FEATURES], "W": [directions, rows, FEATURES], "R": [directions, rows, HIDDEN]}
    sizes |= {"B": [directions, 2 * rows], "lens": [batch]}
    sizes |= {s: [directions, batch, HIDDEN] for s in STATES[op_type]}
    sizes |= {"P": [directions, 3 * HIDDEN]} if op_type == "LSTM" else {}
    names = ["" if name in absent.split() else name for name in sizes]
    results = ["Y", *(f"Y_{s}" for s in STATES[op_type])]
    shown = results if outputs == "all" else [outputs]
    ys = [y if y in shown else "" for y in results]
    node = onnx.helper.make_node(op_type, names, ys, name="layer", hidden_size=HIDDEN, **attrs)
    inputs = [
        onnx.helper.make_tensor_value_info(
            n, onnx.TensorProto.INT32 if n == "lens" else onnx.TensorProto.FLOAT, sizes[n]
        )
        for n in names
        if n
    ]
    values = [onnx.helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, None) for y in shown]
    graph = onnx.helper.make_graph([node], "g", inputs, values)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def numbers(model: onnx.ModelProto, lens: list[int] | None = None, steps: int = 4) -> Arrays:
    rng = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value or steps for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.uniform(-1, 1, shape).astype(np.float32)
    return feeds if lens is None else {**feeds, "lens": np.array(lens, np.int32)}


def in_onnxruntime(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def in_oracle(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    return Oracle(in_float64(model))({k: v if k == "lens" else v.astype(np.float64) for k, v in feeds.items()})


def agree(got: Arrays, expected: Arrays) -> None:
    assert set(got) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


# --- the oracle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op_type", "own"), FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_oracle_computes_what_onnxruntime_computes(op_type: str, own: dict[str, Any], direction: str) -> None:
    for clip, lens, absent in product(({}, {"clip": 0.3}), ([4, 4, 4, 4], [4, 2, 0, 1]), ("", "P", "B h c")):
        model = layer(op_type, absent=absent, direction=direction, **own, **clip)
        feeds = numbers(model, lens)
        agree(in_onnxruntime(model, feeds), in_oracle(model, feeds))


@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.parametrize("alphas", [True, False])
def test_the_oracle_knows_every_activation(op_type: str, alphas: bool) -> None:
    names = ["Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Elu", "Softsign", "Softplus"]
    names += ["Affine", "ThresholdedRelu", "ScaledTanh"] if alphas else []
    options = {"activation_alpha": [0.7, 0.3, 0.2], "activation_beta": [0.4, 0.2, 0.1]} if alphas else {}
    count = {"RNN": 1, "GRU": 2, "LSTM": 3}[op_type]
    for i in range(len(names)):
        chosen = [names[(i + k) % len(names)] for k in range(count)]
        # two steps: with gates that have no bound the numbers explode
        model = layer(op_type, 2, absent="lens", activations=chosen, **options)
        feeds = numbers(model)
        agree(in_onnxruntime(model, feeds), in_oracle(model, feeds))


@pytest.mark.parametrize("inner", [False, True])
def test_an_output_left_out_is_no_input_left_out(inner: bool) -> None:
    """In onnx's ReferenceEvaluator both have the name ""; the lower bound would be what nobody asked for."""
    body = """ignored = Sin(x)
        , last = RNN <hidden_size = 1> (x, w, r)
        y = Clip(last, , high)
    """
    text = f"branch () => (float[1, 1, 1] y) {{ {body} }}"
    written = (
        f"y0 = If (yes) <then_branch = {text}, else_branch = {text.replace('branch', 'other')}>" if inner else body
    )
    name = "y0" if inner else "y"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[2, 1, 1] x, bool yes) => (float[1, 1, 1] {name})
        <float[1, 1, 1] w = {{1.0}}, float[1, 1, 1] r = {{1.0}}, float high = {{0.5}}> {{ {written} }}"""
    )
    feeds = {"x": np.full((2, 1, 1), -1, np.float32), "yes": np.array(True)}
    agree(Oracle(model)(feeds), in_onnxruntime(model, feeds))


# --- the rules ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(0.5)
@pytest.mark.parametrize(("op_type", "own"), FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_outputs_that_the_model_leaves_out(op_type: str, own: dict[str, Any], direction: str) -> None:
    """The gradient of the last state needs Y, which the node does not give."""
    lens, wrt = [4, 2, 0, 1], ["X", "R", "h"]
    few, whole = (layer(op_type, outputs=o, direction=direction, **own) for o in ("Y_h", "all"))
    feeds = numbers(few, lens)
    cotangent = np.random.default_rng(1).uniform(-1, 1, feeds["h"].shape).astype(np.float32)
    feeds["Y_h.cotangent"] = cotangent
    got = in_onnxruntime(gg.vjp(few, outputs=["Y_h"], wrt=wrt), feeds)
    expected = in_oracle(gg.vjp(whole, outputs=["Y_h"], wrt=wrt), feeds)
    agree(got, {name: expected[name] for name in got})
    assert not got["h.grad"][:, 2].any()  # zeros are the last state of a sequence without steps


@pytest.mark.parametrize(("op_type", "own"), FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padding_has_no_say(op_type: str, own: dict[str, Any], direction: str) -> None:
    lens = [4, 2, 0, 1]
    padding = np.arange(4)[:, None] >= np.array(lens)
    model = layer(op_type, outputs="Y", direction=direction, **own)
    wrt = [i.name for i in model.graph.input if i.name != "lens"]
    feeds = numbers(model, lens)
    feeds["Y.cotangent"] = np.ones((4, DIRECTIONS[direction], 4, HIDDEN), np.float32)
    gradient = gg.vjp(model, outputs=["Y"], wrt=wrt)
    clean = in_oracle(gradient, feeds)
    feeds["X"][padding] = np.nan
    feeds["Y.cotangent"].swapaxes(1, 2)[padding] = 1e9
    agree(in_oracle(gradient, feeds), clean)
    assert not clean["X.grad"][padding].any()
    assert clean["X.grad"][~padding].all()


@pytest.mark.parametrize(("op_type", "own"), FORMS)
def test_one_model_for_every_length(op_type: str, own: dict[str, Any]) -> None:
    """Nothing is unrolled: the gradient has as many nodes for 1000 steps as for 20, and one for any number."""
    models = [
        layer(op_type, steps, absent="lens", outputs="Y", direction="reverse", **own) for steps in (20, 1000, "T")
    ]
    short, long, open_ended = (gg.vjp(m, outputs=["Y"], wrt=["X", "W", "R"]) for m in models)
    assert len(short.graph.node) == len(long.graph.node) < 80
    for steps in (1, 7, 60):
        fixed = gg.vjp(
            layer(op_type, steps, absent="lens", outputs="Y", direction="reverse", **own),
            outputs=["Y"],
            wrt=["X", "W", "R"],
        )
        feeds = numbers(models[2], steps=steps)
        feeds["Y.cotangent"] = np.ones((steps, 1, 4, HIDDEN), np.float32)
        agree(in_onnxruntime(open_ended, feeds), in_oracle(fixed, feeds))


@pytest.mark.parametrize(("op_type", "own"), FORMS)
def test_inputs_of_unknown_rank(op_type: str, own: dict[str, Any]) -> None:
    model = layer(op_type, outputs="Y", direction="bidirectional", **own)
    feeds = numbers(model, [4, 2, 0, 1])
    feeds["Y.cotangent"] = np.ones((4, 2, 4, HIDDEN), np.float32)
    wrt = [i.name for i in model.graph.input if i.name != "lens"]
    expected = in_oracle(gg.vjp(model, outputs=["Y"], wrt=wrt), feeds)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    agree(in_onnxruntime(gg.vjp(model, outputs=["Y"], wrt=wrt), feeds), expected)


@pytest.mark.sweep(0.8)
@pytest.mark.parametrize(("op_type", "own"), FORMS)
def test_second_derivatives_run_in_onnxruntime(op_type: str, own: dict[str, Any]) -> None:
    """At a length and batch that the model leaves open."""
    model = layer(op_type, "T", "N", direction="reverse", **own)
    gradient = gg.vjp(model, outputs=["Y"], wrt=["X", "R", "h"])
    twice = gg.vjp(gradient, outputs=["X.grad", "R.grad"], wrt=["X", "W", "h", "Y.cotangent"])
    sizes = {"T": 5, "N": 3}
    rng = np.random.default_rng(0)
    feeds = {}
    for value in twice.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.uniform(-1, 1, shape).astype(np.float32)
    feeds["lens"] = np.array([5, 0, 3], np.int32)
    agree(in_onnxruntime(twice, feeds), in_oracle(twice, feeds))


def test_activations_in_any_case() -> None:
    """The RNN of onnxruntime takes those of the specification only."""
    plain, shouting = (layer("RNN", activations=[name], activation_alpha=[0.5]) for name in ("Elu", "ELU"))
    models = [gg.vjp(m, outputs=["Y"], wrt=["X"]) for m in (plain, shouting)]
    feeds = {**numbers(plain, [4, 2, 0, 1]), "Y.cotangent": np.ones((4, 1, 4, HIDDEN), np.float32)}
    agree(*(in_onnxruntime(m, feeds) for m in models))


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"activations": ["Sine"]}, "activation 'Sine', which ONNX does not define; use one of tanh"),
        ({"activations": ["ScaledTanh"]}, "different defaults; set activation_alpha and activation_beta"),
        ({"activations": ["ThresholdedRelu"]}, "omits parameters of the activation ThresholdedRelu"),
        ({"activations": ["Affine"], "activation_alpha": [2.0]}, "omits parameters of the activation Affine"),
    ],
)
def test_activations_that_runtimes_disagree_on(attrs: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        gg.vjp(layer("RNN", **attrs), outputs=["Y"], wrt=["X"])
    assert "node 'layer' (RNN)" in str(error.value)
