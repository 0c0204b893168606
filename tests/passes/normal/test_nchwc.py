"""CNNs that onnxruntime saved at level "all", in the blocked layout of this machine: they are those of the original."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import ModelError
from gradgraph.passes.normal.dialects import nchwc, nchwc_machine
from gradgraph.passes.normal.dialects.nchwc import BLOCKED
from gradgraph.passes.normal.normal_form import normalise
from tests.kit.small_models import assert_same, model_of, normal_form, op_types, real, run


def _block_size():
    try:
        return nchwc_machine.block_size()
    except ModelError:
        return 0


B = _block_size()
pytestmark = pytest.mark.skipif(not B, reason="onnxruntime has no blocked layout on this machine")


def saved_at_level_all(model, folder):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(folder / "saved.onnx")
    options.log_severity_level = 4  # it warns that the file suits this machine
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "saved.onnx")


class Net:
    """A model under construction: methods append a node and give the name of its output."""

    def __init__(self):
        self.nodes, self.weights = [], {}

    def node(self, op, *inputs, **attrs):
        name = f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attrs))
        return name

    def weight(self, array):
        name = f"weight{len(self.weights)}"
        self.weights[name] = np.asarray(array, np.float32)
        return name

    def random(self, *shape, scale=1.0):
        return self.weight(real(*shape, seed=len(self.weights)) * scale)

    def conv(self, x, i, o, k=1, bias=True, group=1, **attrs):
        w = self.random(o, i // group, k, k, scale=(i // group * k * k) ** -0.5)
        return self.node("Conv", x, w, *([self.random(o)] if bias else []), group=group, **attrs)

    def norm(self, x, c):
        statistics = [self.random(c), self.random(c), self.random(c), self.weight(0.5 + real(c) ** 2)]
        return self.node("BatchNormalization", x, *statistics)

    def relu(self, x):
        return self.node("Relu", x)


def plain(net):
    """Convolution, normalization, activation; the first convolution reads three channels as they come."""
    h = net.relu(net.norm(net.conv("x", 3, 32, 3, bias=False, pads=[1] * 4), 32))
    h = net.node("LeakyRelu", net.conv(h, 32, 16, 3, strides=[2, 2]), alpha=0.2)
    return net.node("Sigmoid", net.conv(h, 16, 48, dilations=[1, 1]))


def mobile(net):
    """Of MobileNet: depthwise between pointwise, cut off at 6."""
    bounds = [net.weight(0.0), net.weight(6.0)]
    h = net.node("Clip", net.conv("x", 3, 32, 3, strides=[2, 2], pads=[0, 0, 1, 1]), *bounds)
    narrow = net.conv(h, 32, 16)
    h = net.node("Clip", net.conv(narrow, 16, 64), *bounds)
    h = net.node("Clip", net.norm(net.conv(h, 64, 64, 3, group=64, bias=False, pads=[1] * 4), 64), *bounds)
    return net.node("Add", net.conv(h, 64, 16), narrow)


def residual(net):
    """Of ResNet: a pool, two convolutions and a way round them, with and without a convolution of its own."""
    h = net.relu(net.conv("x", 3, 32, 3, pads=[1] * 4))
    h = net.node("MaxPool", h, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for i, o, stride in ((32, 32, 1), (32, 64, 2)):
        around = h if i == o else net.conv(h, i, o, strides=[stride] * 2)
        g = net.relu(net.conv(h, i, o, 3, pads=[1] * 4, strides=[stride] * 2))
        h = net.relu(net.node("Add", net.conv(g, o, o, 3, pads=[1] * 4), around))
    return net.node("Flatten", net.node("GlobalAveragePool", h))


def squeezing(net):
    """Of SqueezeNet: two widths of kernel side by side, twice; the second are read by another concatenation."""
    h = net.relu(net.conv("x", 3, 16, 3))
    for squeezed in (16, 48):
        h = net.relu(net.conv(h, 16 if squeezed == 16 else 64, squeezed))
        sides = [net.relu(net.conv(h, squeezed, 32)), net.relu(net.conv(h, squeezed, 32, 3, pads=[1] * 4))]
        h = net.node("Concat", *sides, axis=1)
    h = net.node("Concat", h, sides[0], axis=1)
    return net.node("GlobalMaxPool", net.conv(h, 96, 16))


def uneven(net):
    """Numbers of channels that no block divides: between convolutions, at their ends, and in a sum."""
    h = net.relu(net.conv("x", 3, 20, 3, pads=[1] * 4))
    h = net.node("Add", net.node("Sigmoid", net.conv(h, 20, 20, 3, pads=[1] * 4)), h)
    h = net.node("MaxPool", h, kernel_shape=[2, 2], strides=[2, 2])
    h = net.node("Tanh", net.conv(h, 20, 36))
    return net.conv(net.conv(h, 36, 44), 44, 10)


def grey(net):
    return net.relu(net.conv(net.node("ReduceMean", "x", axes=[1], keepdims=1), 1, 16, 5))


def grouped(net):
    h = net.relu(net.conv("x", 3, 64, 3))
    return net.conv(net.relu(net.conv(h, 64, 32, 3, group=2)), 32, 96, 1, group=2)


def pooled(net):
    h = net.relu(net.conv("x", 3, 16, 3))
    counted = net.node("AveragePool", h, kernel_shape=[3, 2], pads=[1, 1, 0, 1], count_include_pad=1)
    h = net.node("AveragePool", counted, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    return net.node("MaxPool", net.conv(h, 16, 16), kernel_shape=[2, 2], dilations=[2, 2], auto_pad="VALID")


def enlarged(net):
    """Nearest neighbours, and straight lines between them in two conventions."""
    h, factors = net.relu(net.conv("x", 3, 16, 3)), net.weight([1, 1, 2, 3])
    ways = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    h = net.conv(net.node("Resize", h, "", factors, **ways), 16, 16, 3)
    for convention in ("asymmetric", "align_corners", "half_pixel"):
        h = net.node("Resize", h, "", factors, mode="linear", coordinate_transformation_mode=convention)
        h = net.conv(h, 16, 16, 3, strides=[2, 3])
    return h


def normed_behind(net):
    """Normalization and a factor behind a sum, which become depthwise convolutions, and a node of no other kind."""
    h = net.relu(net.conv("x", 3, 20))
    h = net.norm(net.node("Add", net.conv(h, 20, 20), h), 20)
    h = net.node("Mul", net.relu(h), net.random(20, 1, 1))
    h = net.node("Add", h, net.conv(h, 20, 20))
    return net.node("Mul", net.node("Tanh", h), net.conv(h, 20, 20))


def gated(net):
    """Of squeeze-and-excitation: a factor for each channel."""
    h = net.relu(net.conv("x", 3, 32, 3))
    gate = net.relu(net.conv(net.node("GlobalAveragePool", h), 32, 16))
    return net.conv(net.node("Mul", h, net.node("Sigmoid", net.conv(gate, 16, 32))), 32, 16)


def mobile_v3(net):
    """Of MobileNetV3: HardSwish, behind convolutions, depthwise ones and a sum, and a gate for each channel."""
    h = net.node("HardSwish", net.conv("x", 3, 16, 3, strides=[2, 2], pads=[1] * 4))
    g = net.node("HardSwish", net.conv(h, 16, 48))
    g = net.node("HardSwish", net.conv(g, 48, 48, 3, group=48, pads=[1] * 4))
    gate = net.relu(net.conv(net.node("GlobalAveragePool", g), 48, 16))
    g = net.node("Mul", g, net.node("HardSigmoid", net.conv(gate, 16, 48), alpha=0.25))
    return net.conv(net.node("HardSwish", net.node("Add", net.conv(g, 48, 16), h)), 16, 20)


def channels_last(net):
    """Axes in the other order, read and written."""
    h = net.relu(net.conv("x", 3, 32, 3))
    h = net.node("Transpose", net.conv(h, 32, 20), perm=[0, 2, 3, 1])
    h = net.node("Transpose", net.node("Softmax", h, axis=-1), perm=[0, 3, 1, 2])
    return net.node("Transpose", net.conv(h, 20, 16), perm=[0, 2, 3, 1])


def unproven(net):
    """A sum of what nobody knows to be of one size before the model runs, if sizes are open."""
    h = net.relu(net.conv("x", 3, 20, 3))
    total = net.node("Add", net.conv(h, 20, 32, 3), net.conv(h, 20, 32, 5, pads=[1] * 4))
    return net.conv(net.node("Tanh", total), 32, 16)


NETS = [plain, mobile, residual, squeezing, uneven, grey, grouped, pooled, enlarged, normed_behind, gated]
NETS += [channels_last, unproven, mobile_v3]


def original(build, dims):
    net = Net()
    y = build(net)
    return model_of(net.nodes, {"x": (np.float32, dims)}, [y], 17, net.weights)


def gradients(model, feeds, names):
    """Of all outputs, weighed with fixed numbers, by name."""
    output = model.graph.output[0].name
    seed = {f"{output}.cotangent": real(*run(model, feeds)[0].shape, seed=7)}
    results = run(gg.vjp(model, outputs=output, wrt=names), feeds | seed)
    return dict(zip(names, results[-len(names) :], strict=True))


def same_weights(model, found):
    """Pairs of names of equal weights (layers that were fused into others have other ones)."""
    mine = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    theirs = {t.name: onnx.numpy_helper.to_array(t) for t in found.graph.initializer}
    return {a: b for a, x in mine.items() for b, y in theirs.items() if x.size > 4 and np.array_equal(x, y)}


@pytest.mark.sweep(0.06)
@pytest.mark.parametrize("dims", [[2, 3, 12, 14], ["batch", 3, "height", "width"]], ids=["static", "dynamic"])
@pytest.mark.parametrize("build", NETS)
def test_a_network_saved_in_blocks(build, dims, tmp_path):
    model = original(build, dims)
    saved = saved_at_level_all(model, tmp_path)
    assert any(n.domain == BLOCKED and n.op_type == "Conv" for n in saved.graph.node)
    found = normal_form(saved)
    assert {o.domain for o in found.opset_import} == {""}
    feeds = {"x": real(2, 3, 12, 14)}
    assert_same(run(model, feeds), run(found, feeds), atol=1e-5, rtol=1e-4)
    pairs = {"x": "x"} | same_weights(model, found)
    assert len(pairs) > (1 if build in (plain, mobile) else 2)
    before, after = gradients(model, feeds, [*pairs]), gradients(saved, feeds, [*pairs.values()])
    for mine, theirs in pairs.items():
        assert_same([before[mine]], [after[theirs]], atol=2e-5, rtol=1e-3)


def blocked(nodes, weights=None, dims=(2, 2 * B, 6, 8), outputs=("y",)):
    """A model of nodes in blocked layout: (operator, inputs, output, attributes)."""
    made = [helper.make_node(op, x.split(), [y], y, domain=BLOCKED, **attrs) for op, x, y, attrs in nodes]
    return model_of(made, {"x": (np.float32, dims)}, outputs, 17, weights, domains={BLOCKED: 1})


def test_axes_in_the_other_order_are_turned():
    attrs = {"kernel_shape": [3, 1], "strides": [2, 1]}
    nodes = [("ReorderInput", "x", "h", {"channels_last": 1}), ("MaxPool", "h", "m", attrs)]
    model = blocked(
        [*nodes, ("ReorderOutput", "m", "y", {"channels": 2 * B, "channels_last": 1})], dims=[2, 7, 5, 2 * B]
    )
    feeds = {"x": real(2, 7, 5, 2 * B)}
    assert op_types(normal_form(model)) == ["Transpose", "MaxPool", "Transpose"]
    assert_same(run(model, feeds), run(normal_form(model), feeds))


IN, OUT = ("ReorderInput", "x", "h", {}), ("ReorderOutput", "g", "y", {"channels": 2 * B})
SQUARE = {"w": real(2 * B, 2 * B, 1, 1), "v": real(B, B, 1, 1), "odd": real(B + 1, 2 * B, 1, 1), "b": real(2 * B)}
REFUSED = {
    "not known": ([IN, ("Mystery", "h", "g", {}), OUT], "'g'.*operator on blocked channels"),
    "not blocked": (
        [("MaxPool", "x", "g", {"kernel_shape": [1, 1]}), OUT],
        "'g'.*reads a tensor that is not blocked",
    ),
    "sum not blocked": ([IN, ("Conv", "h w b x", "g", {}), OUT], "'g'.*adds a tensor that is not blocked"),
    "open weight": ([IN, ("Conv", "h h", "g", {}), OUT], "'g'.*a weight that is not constant"),
    "rest of a block": ([IN, ("Conv", "h odd", "g", {}), OUT], "'g'.*not made for the blocks of"),
    "plain input": ([("Conv", "x w", "g", {}), OUT], "'g'.*not made for the blocks of"),
    "other channels": ([IN, ("Conv", "h v", "g", {}), OUT], "do not match its neighbours"),
    "two layouts": (
        [IN, ("Conv", "h w", "k", {}), ("Conv", "k w w", "g", {}), OUT],
        "'g'.*a weight that is not constant, or is read in two layouts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    nodes, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        normalise(ir.from_proto(blocked(nodes, SQUARE)))


def test_an_operator_that_would_see_the_blocks_is_refused():
    model = blocked([IN, ("ReorderOutput", "g", "y", {"channels": 2 * B})])
    model.graph.node.insert(1, helper.make_node("Softmax", ["h"], ["g"], "softmax", axis=1))
    with pytest.raises(ModelError, match=r"'softmax' .* reads blocked channels in an unsupported way"):
        normalise(ir.from_proto(model))


@pytest.fixture
def saved(tmp_path):
    return saved_at_level_all(original(uneven, ["batch", 3, 12, 14]), tmp_path)


def test_blocks_of_another_machine_are_refused(saved, monkeypatch):
    monkeypatch.setattr("gradgraph.passes.normal.dialects.nchwc_machine.block_size", lambda: 4 * B)
    with pytest.raises(ModelError, match=rf"not made for the blocks of {4 * B} channels"):
        normalise(ir.from_proto(saved))


def test_a_machine_without_blocks_cannot_tell_their_size(saved, monkeypatch):
    monkeypatch.setattr(nchwc_machine, "nchwc_block", lambda: 0)
    with pytest.raises(ModelError, match="the block size is unknown; save the model at onnxruntime's level 'extended'"):
        normalise(ir.from_proto(saved))


def test_other_numbers_than_onnxruntime_has_are_noticed(saved, monkeypatch):
    def mixed_up(data, block, inputs_blocked):
        return plain_order(data, block, inputs_blocked)[:, :, ::-1]

    plain_order = nchwc._reordered
    monkeypatch.setattr(nchwc, "_reordered", mixed_up)
    with pytest.raises(ModelError, match="has other values after blocked channels are converted"):
        normalise(ir.from_proto(saved))


def test_a_model_that_needs_data_of_its_own_is_not_compared(tmp_path, caplog):
    net = Net()
    h = net.conv(net.relu(net.conv("x", 3, 16, 3)), 16, 16)
    net.weights["rows"] = np.array([0, 16 * 61], np.int64)  # of images of 63 by 3 pixels, which nobody would guess
    y = net.node("Reshape", h, "rows")
    model = model_of(net.nodes, {"x": (np.float32, ["n", 3, "h", "w"])}, [y], 17, net.weights)
    saved = saved_at_level_all(model, tmp_path)
    with caplog.at_level("INFO", "gradgraph"):
        found = normal_form(saved)
    assert "not compared" in caplog.text
    feeds = {"x": real(2, 3, 63, 3)}
    assert_same(run(model, feeds), run(found, feeds), atol=1e-5)


def test_weights_that_lie_in_another_order_are_told(tmp_path, caplog):
    """Their numbers in the file are not those that a gradient here belongs to; unchanged ones are not named."""
    saved = saved_at_level_all(original(uneven, [2, 3, 12, 14]), tmp_path)
    gradient = gg.vjp(saved, wrt=["reorder"])
    (told,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "'reorder', " in told and f"blocks of {B} channels" in told and "ONNX's own layout" in told
    assert [d.dim_value for d in gradient.graph.output[-1].type.tensor_type.shape.dim] == [20, 3, 3, 3]


def test_surgery_takes_layers_and_weights_of_a_saved_model_in_the_layout_of_the_original(tmp_path):
    model, feeds = original(residual, ["n", 3, "h", "w"]), {"x": real(2, 3, 12, 14)}
    saved = saved_at_level_all(model, tmp_path)
    adapted = surgery.lora(saved, "*", rank=2)
    onnx.checker.check_model(adapted, full_check=True)
    assert_same(run(model, feeds), run(adapted, feeds), atol=1e-5, rtol=1e-4)
    assert {b for a, b in same_weights(model, adapted).items()} >= {
        t.name for t in normal_form(saved).graph.initializer if len(t.dims) == 4
    }
    other = surgery.reset_weights(saved, "*")
    again = surgery.load_weights(other, tmp_path / "saved.onnx")
    assert_same(run(model, feeds), run(again, feeds), atol=1e-5, rtol=1e-4)
    trainer = gg.Trainer(gg.build(other, "mse", "sgd"))
    trainer.load_state_dict(tmp_path / "saved.onnx", strict=False)
    assert_same(run(model, feeds), run(trainer.export(), feeds), atol=1e-5, rtol=1e-4)


def test_a_saved_model_is_trained(saved):
    step = gg.build(saved, loss="mse", optimizer=gg.optim.sgd(0.05))
    trainer = gg.Trainer(step)
    batch = {"x": real(4, 3, 12, 14), "target": real(4, 10, 6, 7, seed=1)}
    losses = [trainer.step(batch)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
