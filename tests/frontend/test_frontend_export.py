"""What is written into the file: names, shapes, forms, seeds; without PyTorch."""

import copy
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import gradgraph as gg
from gradgraph.frontend import Buffer, Input, Parameter, export, init, manual_seed, nn
from gradgraph.frontend import functional as F
from tests.kit.frontend_parity import declared_shapes_hold, drawn, model_of, run_model


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 16, 10)

    def forward(self, x):
        x = self.layer1(x)
        return self.head(self.drop(x.reshape(x.shape[0], -1)))


def parameters(model):
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


def operators(model):
    """The nodes without the numbers in formulas."""
    return [n for n in model.graph.node if n.op_type != "Constant"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# --- numbers, against numpy ----------------------------------------------------------------------

NUMPY = {
    "arithmetic": (lambda x: (x * 2 - 1) / (x**2 + 1), lambda x: (x * 2 - 1) / (x**2 + 1)),
    "softmax": (lambda x: x.softmax(-1), softmax),
    "reduction": (
        lambda x: x.sum((0, 2)) - x.mean() + x.amax(1).sum(),
        lambda x: x.sum((0, 2)) - x.mean() + x.max(1).sum(),
    ),
    "numpy words": (lambda x: x.mean(axis=(0, 2), keepdims=True), lambda x: x.mean(axis=(0, 2), keepdims=True)),
    "numpy transpose": (lambda x: x.transpose(2, 0, 1), lambda x: x.transpose(2, 0, 1)),
    "all dimensions reversed": (lambda x: x.transpose(), lambda x: x.transpose()),
    "open end that need not divide": (lambda x: x.reshape(-1, 2, 2), lambda x: x.reshape(-1, 2, 2)),
    "negative steps": (lambda x: x[::-1, :, ::-2], lambda x: x[::-1, :, ::-2]),
    "negative step with bounds": (lambda x: x[:, 2:0:-1, -1::-3], lambda x: x[:, 2:0:-1, -1::-3]),
    "new axes": (lambda x: x[None, ..., 1, None], lambda x: x[None, ..., 1, None]),
    "gather by list": (lambda x: x[:, [2, 0]], lambda x: x[:, [2, 0]]),
    "array operand": (lambda x: np.arange(4.0) - x, lambda x: np.arange(4.0) - x),
    "dynamic reshape": (lambda x: x.reshape(x.shape[0] * 3, -1), lambda x: x.reshape(x.shape[0] * 3, -1)),
    "size as a number": (lambda x: x * x.shape[0] / (x.shape[0] + 1), lambda x: x * x.shape[0] / (x.shape[0] + 1)),
    "division of a size": (
        lambda x: F.ones((x.shape[0] + 3) // 2, (x.shape[0] + 5) % 3 + 1),
        lambda x: np.ones(((x.shape[0] + 3) // 2, (x.shape[0] + 5) % 3 + 1)),
    ),
    "shifted halves": (lambda x: x[1:] - x[:-1], lambda x: x[1:] - x[:-1]),
    "cut beyond the end": (lambda x: F.cat([x[4:], x[:4]], 0), lambda x: np.concatenate([x[4:], x[:4]])),
    "positions": (lambda x: x[:, 0, 0] + F.arange(x.shape[0]), lambda x: x[:, 0, 0] + np.arange(x.shape[0])),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numbers(name):
    ours, theirs = NUMPY[name]
    model = model_of(ours, {"v": drawn((2, 3, 4))})
    for batch in (2, 3, 6):
        v = drawn((batch, 3, 4))
        (found,) = run_model(model, {"v": v}).values()
        np.testing.assert_allclose(found, theirs(v), rtol=1e-5, atol=1e-6)
        declared_shapes_hold(model, {"v": v})


def test_convolutional_network():
    net = ConvNet()
    model = export(net, {"x": ("batch", 1, 8, 8)})
    onnx.checker.check_model(model, full_check=True)
    x = drawn((3, 1, 8, 8))
    w, b = net.layer1[0].weight.data, net.layer1[0].bias.data
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    y = b[:, None, None] + sum(
        w[:, 0, i, j][:, None, None] * padded[:, :, i : i + 8, j : j + 8] for i in range(3) for j in range(3)
    )
    y = np.maximum(y / np.sqrt(1 + 1e-5), 0).reshape(3, 4, 4, 2, 4, 2).max((3, 5))
    expected = y.reshape(3, -1) @ net.head.weight.data.T + net.head.bias.data
    np.testing.assert_allclose(run_model(model, {"x": x})["output"], expected, rtol=1e-4, atol=1e-5)


# --- the file ------------------------------------------------------------------------------------


def test_the_file():
    model = export(ConvNet(), {"x": ("batch", 1, 8, 8)})
    assert set(parameters(model)) == {
        "layer1.0.weight",
        "layer1.0.bias",
        "layer1.1.weight",
        "layer1.1.bias",
        "layer1.1.running_mean",
        "layer1.1.running_var",
        "head.weight",
        "head.bias",
    }
    assert model.ir_version == 10
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 21)]
    assert model.graph.name == "ConvNet"
    names = [n.name for n in operators(model)]
    assert names[:4] == ["layer1.0/Conv", "layer1.1/BatchNormalization", "layer1.2/Relu", "layer1.3/MaxPool"]
    (y,) = model.graph.output
    assert [d.dim_param or d.dim_value for d in y.type.tensor_type.shape.dim] == ["batch", 10]


def test_inference_form_of_what_training_switches():
    model = export(ConvNet(), {"x": ("batch", 1, 8, 8)})
    nodes = {n.op_type: n for n in operators(model)}
    values = {n.output[0]: numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant"}
    normalization = {a.name: onnx.helper.get_attribute_value(a) for a in nodes["BatchNormalization"].attribute}
    assert normalization == {"epsilon": pytest.approx(1e-5), "momentum": pytest.approx(0.9), "training_mode": 0}
    _, ratio, training = nodes["Dropout"].input
    assert values[ratio] == pytest.approx(0.2)
    assert not values[training]


def test_batch_norm_reads_the_running_statistics_it_is_given_as_arrays():
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    mean, variance = np.float32([1, 2, 3]), np.float32([4, 9, 16])
    (y,) = run_model(model_of(lambda x: F.batch_norm(x, mean, variance, eps=0.0), {"x": x}), {"x": x}).values()
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance), rtol=1e-6)


def test_a_dynamic_batch_costs_no_shape_arithmetic():
    def attention_like(x):
        q = x.reshape(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        return q.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)

    model = export(attention_like, {"v": ("batch", "time", 8)})
    assert [n.op_type for n in operators(model)] == ["Reshape", "Transpose", "Transpose", "Reshape"]


def test_constants_and_buffers_do_not_look_like_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = Parameter([2.0, 3.0])
            self.register_buffer("shift", [1.0, 1.0], persistent=False)
            self.norm = nn.LayerNorm(2, elementwise_affine=False)

        def forward(self, x):
            return self.norm(x * self.scale + self.shift) * np.array([5.0, 6.0]) * 0.5

    net = Net()
    model = export(net, {"x": ("batch", 2)})
    assert set(parameters(model)) == {"scale", "shift"}
    roles = {i.name: [p.value for p in i.metadata_props] for i in model.graph.initializer}
    assert (roles["scale"], roles["shift"]) == (["parameter"], ["buffer"])
    assert set(net.state_dict()) == {"scale"}


def test_only_parameters_are_trained():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.temperature = Parameter([2.0, 3.0]), Parameter(1.5)
            self.shift, self.factor = Buffer([1.0, 1.0]), Buffer(2.0)
            self.norm = nn.BatchNorm1d(2, affine=False)

        def forward(self, x):
            y = self.norm(x * self.scale + self.shift) * np.array([5.0, 6.0])
            return (y * self.temperature * self.factor).sum()

    model = gg.value_and_grad(export(Net(), {"x": ("batch", 2)}))
    assert [y.name for y in model.graph.output] == ["output", "scale.grad", "temperature.grad"]


def test_shared_parameters_are_one_initializer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    net = Tied()
    assert [n for n, _ in net.named_parameters()] == ["embed.weight"]
    assert set(net.state_dict()) == {"embed.weight", "head.weight"}
    model = export(net, {"tokens": Input(("batch", "time"), "int64")})
    assert set(parameters(model)) == {"embed.weight"}
    table = net.embed.weight.data
    found = run_model(model, {"tokens": np.array([[1, 5]])})["output"]
    np.testing.assert_allclose(found, table[[[1, 5]]] @ table.T, rtol=1e-5)


def test_a_module_used_twice_keeps_one_set_of_parameters():
    layer = nn.Linear(3, 3)
    model = export(nn.Sequential(layer, layer), {"v": ("batch", 3)})
    assert set(parameters(model)) == {"0.weight", "0.bias"}
    assert [n.name for n in model.graph.node] == ["0/Gemm", "0/Gemm_1"]


def test_unused_parameters_and_nodes_are_left_out():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            self.unused(x).exp()
            return self.used(x)

    model = export(Net(), {"x": ("batch", 3)})
    assert set(parameters(model)) == {"used.weight", "used.bias"}
    assert [n.op_type for n in model.graph.node] == ["Gemm"]


def names_of(net, inputs=None, **options):
    return [y.name for y in export(net, inputs or {"v": ("batch", 3)}, **options).graph.output]


OUTPUTS = {
    "one": (lambda v: v + 1, {}, ["output"]),
    "tuple": (lambda v: (v + 1, v * 2), {}, ["output_0", "output_1"]),
    "nested": (lambda v: (v + 1, (v * 2, [v * 3])), {}, ["output_0", "output_1_0", "output_1_1_0"]),
    "dict": (lambda v: {"logits": v + 1, "features": v.exp()}, {}, ["logits", "features"]),
    "named": (lambda v: (v + 1, v * 2), {"outputs": ["a", "b"]}, ["a", "b"]),
    "none passed over": (lambda v: (v + 1, None), {}, ["output_0"]),
    "input": (lambda v: v, {}, ["output"]),
    "twice": (lambda v: [v + 1] * 2, {}, ["output_0", "output_1"]),
    "name of a node": (lambda v: {"Exp": v + 1, "y": v.exp().log()}, {}, ["Exp", "y"]),
    "size": (lambda v: v.shape[0], {}, ["output"]),
    "constant": (lambda v: F.zeros(3), {}, ["output"]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_names_of_outputs(name):
    net, options, expected = OUTPUTS[name]
    model = export(net, {"v": ("batch", 3)}, **options)
    onnx.checker.check_model(model, full_check=True)
    assert [y.name for y in model.graph.output] == expected
    assert list(run_model(model, {"v": drawn((2, 3))})) == expected


def test_inputs_are_passed_by_name_or_in_order():
    class Net(nn.Module):
        def forward(self, a, b=None):
            return a if b is None else a - b

    feeds = {"a": np.full((2,), 5, np.float32), "b": np.full((2,), 3, np.float32)}
    by_name = export(Net(), {"b": (2,), "a": (2,)})
    assert run_model(by_name, feeds)["output"][0] == 2
    in_order = export(Net(), {"p": (2,), "q": (2,)})
    assert run_model(in_order, {"p": feeds["b"], "q": feeds["a"]})["output"][0] == -2


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "bool"])
def test_types_of_inputs(dtype):
    model = export(lambda v: v.sum(1), {"v": Input(("batch", 3), dtype)})
    v = np.ones((2, 3), dtype)
    (found,) = run_model(model, {"v": v}).values()
    assert found.dtype == (np.dtype(dtype) if dtype.startswith("float") else np.int64)
    np.testing.assert_array_equal(found, 3)


def test_half_and_double_networks():
    for dtype in ("float16", "float64"):
        net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh()).to(dtype)
        model = export(net, {"v": Input(("batch", 3), dtype)})
        onnx.checker.check_model(model, full_check=True)
        assert {v.dtype.name for k, v in parameters(model).items()} == {dtype}
        assert run_model(model, {"v": np.ones((2, 3), dtype)})["output"].dtype == dtype


# --- modules -------------------------------------------------------------------------------------


def test_state_dict_round_trip():
    manual_seed(1)
    one, other = ConvNet(), ConvNet()
    before = one.state_dict()
    assert not np.array_equal(before["head.weight"], other.head.weight.data)
    other.load_state_dict(before | {"layer1.1.num_batches_tracked": np.array(3)})
    after = other.state_dict()
    assert list(after) == list(before)
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    after["head.bias"][:] = 7.0
    assert not (other.head.bias.data == 7.0).any(), "state_dict gives copies"


def test_load_state_dict_is_all_or_nothing():
    from gradgraph.errors import ModelError, UnknownNameError

    net = nn.Linear(2, 3)
    before = net.state_dict()
    good = {"weight": np.ones((3, 2)), "bias": np.ones(3)}
    with pytest.raises(UnknownNameError, match="lacks bias and has the unexpected scale"):
        net.load_state_dict({"weight": good["weight"], "scale": good["bias"]})
    with pytest.raises(ModelError, match=r"'bias' has shape \(2,\) in the state and \(3,\) in the module"):
        net.load_state_dict(good | {"bias": np.ones(2)})
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    net.load_state_dict({"weight": good["weight"], "scale": 0}, strict=False)
    assert (net.weight.data == 1).all()


def test_containers_and_walking():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
            self.heads = nn.ModuleDict({"a": nn.Linear(2, 1)})
            self.free = nn.ParameterList([Parameter(np.zeros(2))])
            self.seq = nn.Sequential({"first": nn.ReLU()})

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.seq(self.heads["a"](x + self.free[0]))

    net = Net()
    names = [n for n, _ in net.named_parameters()]
    assert names == [
        *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("weight", "bias")),
        "heads.a.weight",
        "heads.a.bias",
        "free.0",
    ]
    assert [n for n, _ in net.named_modules()][:3] == ["", "blocks", "blocks.0"]
    assert net.get_submodule("heads.a") is net.heads["a"]
    assert len(net.blocks) == 2
    assert "a" in net.heads
    assert net.eval().training is net.blocks[0].training is False
    assert set(parameters(export(net, {"x": ("batch", 2)}))) == set(names)
    assert "(blocks): ModuleList(" in repr(net)


@pytest.mark.parametrize("container", [nn.Sequential, lambda *modules: nn.ModuleList(modules)])
def test_numbered_containers(container):
    layers = [nn.Linear(2, 2), nn.ReLU(), nn.Tanh()]
    net = container(layers[0]).append(layers[1]).extend(layers[2:])
    assert list(net) == layers
    assert net[-1] is layers[2]
    assert type(net[1:]) is type(net)
    assert list(net[1:]) == layers[1:]


def test_attributes_change_kind():
    net = nn.Linear(2, 2)
    net.bias = None
    assert [n for n, _ in net.named_parameters()] == ["weight"]
    net.weight = nn.ReLU()
    assert list(net.state_dict()) == []
    net.register_buffer("count", np.zeros(2))
    net.count = np.ones(2)
    assert isinstance(net.count, Buffer)
    np.testing.assert_array_equal(net.state_dict()["count"], 1.0)
    del net.count
    assert not hasattr(net, "count")


def test_deep_copies_are_independent():
    net = ConvNet()
    twin = copy.deepcopy(net)
    twin.head.weight.data[...] = 0.0
    assert net.head.weight.data.any()


# --- initialisers --------------------------------------------------------------------------------


def test_the_seed_decides_all_numbers():
    def numbers(seed):
        manual_seed(seed)
        return np.concatenate([v.ravel() for v in ConvNet().state_dict().values()])

    np.testing.assert_array_equal(numbers(3), numbers(3))
    assert not np.array_equal(numbers(3), numbers(4))


# initialiser, shape, mean and standard deviation of the law, bound
LAWS = {
    "uniform": (lambda w: init.uniform_(w, -2.0, 1.0), (-0.5, 3 / 12**0.5, 2.0)),
    "normal": (lambda w: init.normal_(w, 1.0, 0.5), (1.0, 0.5, 5.0)),
    "trunc_normal": (lambda w: init.trunc_normal_(w, std=2.0), (0.0, 2 * 0.5396, 2.0)),
    "xavier_uniform": (init.xavier_uniform_, (0.0, (2 / 500) ** 0.5, (6 / 500) ** 0.5)),
    "xavier_normal": (lambda w: init.xavier_normal_(w, gain=2.0), (0.0, 2 * (2 / 500) ** 0.5, 1.0)),
    "kaiming_uniform": (lambda w: init.kaiming_uniform_(w, a=5**0.5), (0.0, 200**-0.5 / 3**0.5, 200**-0.5)),
    "kaiming_normal": (
        lambda w: init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
        (0.0, (2 / 300) ** 0.5, 1.0),
    ),
    "constant": (lambda w: init.constant_(w, 0.7), (0.7, 0.0, 0.7)),
    "ones": (init.ones_, (1.0, 0.0, 1.0)),
    "zeros": (init.zeros_, (0.0, 0.0, 0.0)),
}


@pytest.mark.parametrize("name", LAWS)
def test_laws(name):
    fill, (mean, std, bound) = LAWS[name]
    manual_seed(0)
    weight = fill(Parameter(np.zeros((300, 200))))
    assert weight.data.mean(dtype=np.float64) == pytest.approx(mean, abs=4 * std / 60000**0.5 + 1e-7)
    assert weight.data.std() == pytest.approx(std, rel=0.02, abs=1e-6)
    assert np.abs(weight.data).max() <= bound + 1e-6


def test_structured_initialisers():
    square = init.orthogonal_(np.empty((6, 2, 3)))
    np.testing.assert_allclose(square.reshape(6, 6) @ square.reshape(6, 6).T, np.eye(6), atol=1e-12)
    np.testing.assert_array_equal(init.eye_(np.empty((2, 3))), np.eye(2, 3))
    kernel = init.dirac_(np.empty((4, 2, 3)), groups=2)
    assert [tuple(p) for p in np.argwhere(kernel)] == [(0, 0, 1), (1, 1, 1), (2, 0, 1), (3, 1, 1)]


def test_default_initialisation_is_pytorch_s():
    layer = nn.Conv2d(8, 50, 5)
    bound = (8 * 25) ** -0.5
    assert np.abs(layer.weight.data).max() <= bound
    assert layer.weight.data.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert np.abs(layer.bias.data).max() <= bound
    assert nn.Embedding(500, 20, padding_idx=3).weight.data.std() == pytest.approx(1.0, rel=0.05)
    assert not nn.Embedding(5, 2, padding_idx=3).weight.data[3].any()


def test_importing_the_frontend_is_light():
    code = "import sys, gradgraph.frontend; sys.exit(bool({'torch', 'onnxscript', 'onnxruntime'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NUMBERS = {  # of an input of 2 × 4 × 8 × 8, or × n where that is said
    "input": (lambda n: lambda x: x, (2, 4, 8)),
    "sum": (lambda n: lambda x: x.sum(n(1)), 8),
    "max": (lambda n: lambda x: x.max(n(1))[0], 8),
    "min": (lambda n: lambda x: x.min(n(-1))[1], 8),
    "top": (lambda n: lambda x: x.topk(n(2))[0], 8),
    "split": (lambda n: lambda x: x.split(n(3), 1)[1], 8),
    "slice": (lambda n: lambda x: x[n(0) :, :, n(2) : n(7) : n(2)], 8),
    "slice of an open size": (lambda n: lambda x: x[..., n(1) :], "n"),
    "reshape": (lambda n: lambda x: x.reshape(n(2), n(-1)), 8),
    "conv": (lambda n: nn.Conv2d(n(4), n(6), n(3), n(2), padding=n(1)), 8),
    "pool": (lambda n: nn.MaxPool2d(n(2)), 8),
    "adaptive pool": (lambda n: nn.AdaptiveAvgPool2d(n(2)), 8),
    "pad": (lambda n: nn.ZeroPad2d(n(1)), 8),
    "layer norm": (lambda n: nn.LayerNorm(n(8)), 8),
    "rms norm": (lambda n: nn.RMSNorm(n(8)), 8),
    "upsample": (lambda n: nn.Upsample(scale_factor=n(2)), 8),
    "roll": (lambda n: lambda x: x.roll(n(1), n(2)), 8),
    "flip": (lambda n: lambda x: x.flip(n(3)), 8),
    "one size": (lambda n: lambda x: x.reshape(n(-1)), 8),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_numpy_s_integers_are_numbers(what):
    net, last = NUMBERS[what]

    def written(n):
        manual_seed(0)
        shape = tuple(map(n, last)) if isinstance(last, tuple) else (n(2), n(4), n(8), last)
        return export(net(n), {"x": shape}).SerializeToString(deterministic=True)

    assert written(np.int64) == written(int)
