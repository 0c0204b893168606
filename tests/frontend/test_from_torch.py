"""PyTorch modules come through with their names, statistics and dropout, and with the same numbers."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.frontend import from_torch
from tests.kit.frontend_parity import drawn, run_model

torch = pytest.importorskip("torch", reason="exports PyTorch modules")
pytest.importorskip("onnxscript", reason="PyTorch's exporter needs onnxscript")
pytestmark = pytest.mark.torch


class ConvNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.drop = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(4 * 36, 5)
        self.register_buffer("shift", torch.linspace(-1, 1, 4).reshape(4, 1, 1))

    def forward(self, image):
        x = self.body(image) + self.shift
        return torch.nn.functional.dropout(self.head(self.drop(x.flatten(1))), 0.1, self.training)


def conv_net():
    torch.manual_seed(0)
    net = ConvNet()
    net(torch.randn(8, 3, 6, 6))  # statistics that are not 0 and 1
    return net


@pytest.fixture(scope="module")
def exported():
    net = conv_net()
    model = from_torch(net, torch.randn(2, 3, 6, 6))
    onnx.checker.check_model(model, full_check=True)
    return net, model


def test_convolutional_network_at_other_batch_sizes(exported):
    net, model = exported
    assert net.training, "the module is left as it was"
    net.eval()
    for batch in (1, 5):
        x = drawn((batch, 3, 6, 6))
        found = run_model(model, {"image": x})
        np.testing.assert_allclose(found["output"], net(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-5)
    net.train()


def test_names_and_values_are_kept(exported):
    net, model = exported
    held = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    state = {k: v.numpy() for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert set(state) <= set(held)
    for name, value in state.items():
        np.testing.assert_array_equal(held[name], value)


def test_batch_normalization_is_one_node_with_its_statistics(exported):
    nodes = [n for n in exported[1].graph.node if n.op_type == "BatchNormalization"]
    assert [list(n.input)[1:] for n in nodes] == [
        ["body.1.weight", "body.1.bias", "body.1.running_mean", "body.1.running_var"]
    ]


def test_dropout_is_kept_in_inference_form(exported):
    nodes = [n for n in exported[1].graph.node if n.op_type == "Dropout"]
    assert len(nodes) == 2
    assert all(len(n.input) == 2 for n in nodes)


def test_buffers_are_marked(exported):
    roles = {i.name: {p.key: p.value for p in i.metadata_props} for i in exported[1].graph.initializer}
    assert roles["shift"] == roles["body.1.running_mean"] == {"gradgraph.role": "buffer"}
    assert roles["head.weight"] == {}


@pytest.mark.parametrize(
    ("frozen", "train", "trained"),
    [
        (("body",), "*", {"head.weight", "head.bias"}),
        (("body",), ["*", "body.0.weight"], {"body.0.weight", "head.weight", "head.bias"}),
        ((), "*", {"body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"}),
        # where no parameter needs a gradient, nobody has chosen
        (("body", "head"), "head.*", {"head.weight", "head.bias"}),
    ],
)
def test_frozen_parameters_stay_frozen(frozen, train, trained):
    net = conv_net()
    for part in frozen:
        getattr(net, part).requires_grad_(False)
    model = from_torch(net, torch.randn(2, 3, 6, 6))
    step = gg.build(model, "cross_entropy", "sgd", train=train)
    assert set(step.manifest.trainable) == trained


def test_transformer_with_two_dynamic_axes():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    net = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    dynamic = {"tokens": {0: "batch", 1: "time"}}
    model = from_torch(net, (torch.randn(2, 5, 8),), ["tokens"], ["features"], dynamic)
    onnx.checker.check_model(model, full_check=True)
    assert set(net.state_dict()) <= {i.name for i in model.graph.initializer}
    assert [n.op_type for n in model.graph.node].count("Dropout") == 2 * 3  # the one inside attention is left out
    net.eval()
    for batch, length in ((1, 4), (3, 7)):
        x = drawn((batch, length, 8))
        found = run_model(model, {"tokens": x})["features"]
        np.testing.assert_allclose(found, net(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_convolution_in_three_dimensions_without_bias():
    """PyTorch 2.13 writes a bias of two dimensions, which onnxruntime refuses."""
    module, x = torch.nn.Conv3d(2, 4, 3, bias=False), torch.randn(2, 2, 5, 5, 5)
    model = from_torch(module, x)
    onnx.checker.check_model(model, full_check=True)
    assert [len(n.input) for n in model.graph.node if n.op_type == "Conv"] == [2]
    np.testing.assert_allclose(
        run_model(model, {"input": x.numpy()})["output"], module(x).detach(), rtol=1e-4, atol=1e-5
    )


def test_fixed_sizes_and_several_outputs():
    class Two(torch.nn.Module):
        def forward(self, a, b):
            return a + b, a * b

    model = from_torch(Two(), (torch.ones(1, 3), torch.ones(1, 3)), dynamic={})
    found = run_model(model, {"a": np.full((1, 3), 2, np.float32), "b": np.full((1, 3), 5, np.float32)})
    assert {k: v[0, 0] for k, v in found.items()} == {"output_0": 7, "output_1": 10}


class Unexportable(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


BAD = {
    "example of one sample": (lambda: from_torch(torch.nn.Linear(3, 2), torch.ones(1, 3)), "at least 2 there"),
    "unknown dynamic name": (
        lambda: from_torch(torch.nn.ReLU(), torch.ones(2, 3), dynamic={"x": {0: "n"}}),
        "not an input",
    ),
    "names": (lambda: from_torch(torch.nn.ReLU(), torch.ones(2, 3), ["a", "b"]), "one name for each"),
    "arguments": (lambda: from_torch(torch.nn.ReLU(), (torch.ones(2), torch.ones(2))), "do not fit ReLU.forward"),
    "outputs": (lambda: from_torch(torch.nn.ReLU(), torch.ones(2, 3), None, ["a", "b"]), "returns 1 tensor,"),
    "data-dependent": (lambda: from_torch(Unexportable(), torch.ones(2, 3)), "could not export Unexportable"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_one_sentence(name):
    call, words = BAD[name]
    with pytest.raises(ModelError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_flags_are_restored_after_a_failure():
    net = torch.nn.Sequential(Unexportable(), torch.nn.Dropout())
    net[1].eval()
    original = torch.nn.functional.dropout
    with pytest.raises(ModelError):
        from_torch(net, torch.ones(2, 3))
    assert (net.training, net[0].training, net[1].training) == (True, True, False)
    assert torch.nn.functional.dropout is original
