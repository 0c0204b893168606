"""Every layer computes what PyTorch's layer of the same name and arguments does, with PyTorch's own state_dict."""

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.frontend import Input, export, nn
from tests.kit.frontend_parity import declared_shapes_hold, drawn, model_of, run_model

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

# layer, input shape (axis 0 is dynamic), kind of numbers
PLAIN = [
    ("Identity()", (2, 3), "real"),
    ("Linear(4, 3)", (2, 4), "real"),
    ("Linear(4, 3, bias=False)", (2, 5, 4), "real"),
    ("Linear(4, 3)", (2, 5, 6, 4), "real"),
    ("Conv1d(4, 6, 3, stride=2, padding=1)", (2, 4, 9), "real"),
    ("Conv1d(4, 6, 4, padding='same', dilation=2)", (2, 4, 9), "real"),
    ("Conv2d(3, 4, 3)", (2, 3, 8, 7), "real"),
    ("Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)", (2, 4, 8, 9), "real"),
    ("Conv2d(4, 4, 3, padding='same', groups=4, bias=False)", (2, 4, 6, 5), "real"),
    ("Conv2d(3, 4, 3, padding='valid')", (2, 3, 8, 7), "real"),
    ("Conv2d(3, 4, 3, padding=1, padding_mode='reflect')", (2, 3, 6, 7), "real"),
    ("Conv2d(3, 4, (3, 4), padding='same', padding_mode='circular')", (2, 3, 6, 7), "real"),
    ("Conv2d(3, 4, 3, padding=(2, 1), padding_mode='replicate')", (2, 3, 6, 7), "real"),
    ("Conv3d(2, 3, 3, stride=2, padding=1)", (2, 2, 6, 5, 7), "real"),
    ("ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1)", (2, 4, 5), "real"),
    ("ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)", (2, 4, 5, 4), "real"),
    ("ConvTranspose2d(4, 6, (2, 3), bias=False, dilation=2)", (2, 4, 5, 4), "real"),
    ("ConvTranspose3d(2, 3, 2, stride=2)", (2, 2, 3, 4, 3), "real"),
    ("MaxPool1d(3, 2, 1)", (2, 3, 9), "real"),
    ("MaxPool2d(2)", (2, 3, 8, 7), "real"),
    ("MaxPool2d((3, 2), stride=2, padding=1, ceil_mode=True)", (2, 3, 8, 7), "real"),
    ("MaxPool2d(3, stride=3, padding=1, ceil_mode=True)", (2, 3, 7, 7), "real"),
    ("MaxPool2d(2, stride=1, dilation=2)", (2, 3, 8, 7), "real"),
    ("MaxPool3d(2, padding=1)", (2, 2, 5, 4, 6), "real"),
    ("AvgPool1d(3, stride=2)", (2, 3, 9), "real"),
    ("AvgPool2d(3, stride=2, padding=1)", (2, 3, 8, 7), "real"),
    ("AvgPool2d(3, stride=2, padding=1, count_include_pad=False)", (2, 3, 8, 7), "real"),
    ("AvgPool2d(3, stride=2, ceil_mode=True)", (2, 3, 8, 8), "real"),
    ("AvgPool2d(3, stride=2, padding=1, ceil_mode=True)", (2, 3, 8, 8), "real"),
    ("AvgPool3d(2)", (2, 2, 5, 4, 6), "real"),
    ("AdaptiveAvgPool1d(3)", (2, 3, 9), "real"),
    ("AdaptiveAvgPool2d(1)", (2, 3, 8, 7), "real"),
    ("AdaptiveAvgPool2d((4, 7))", (2, 3, 8, 7), "real"),
    ("AdaptiveAvgPool2d((3, 5))", (2, 3, 8, 7), "real"),
    ("AdaptiveAvgPool2d((None, 1))", (2, 3, 8, 7), "real"),
    ("AdaptiveAvgPool2d(9)", (2, 3, 8, 7), "real"),
    ("AdaptiveAvgPool3d(2)", (2, 2, 5, 4, 6), "real"),
    ("AdaptiveMaxPool1d(4)", (2, 3, 9), "real"),
    ("AdaptiveMaxPool2d((3, 5))", (2, 3, 8, 7), "real"),
    ("AdaptiveMaxPool2d(1)", (2, 3, 8, 7), "real"),
    ("AdaptiveMaxPool3d((5, 2, 1))", (2, 2, 5, 4, 6), "real"),
    ("BatchNorm1d(3)", (2, 3), "real"),
    ("BatchNorm1d(3, eps=1e-3)", (2, 3, 5), "real"),
    ("BatchNorm2d(3, affine=False)", (2, 3, 4, 5), "real"),
    ("BatchNorm2d(3, track_running_stats=False)", (2, 3, 4, 5), "real"),
    ("BatchNorm3d(3, momentum=0.3)", (2, 3, 4, 2, 3), "real"),
    ("LayerNorm(5)", (2, 3, 5), "real"),
    ("LayerNorm((3, 5), eps=1e-3)", (2, 4, 3, 5), "real"),
    ("LayerNorm(5, elementwise_affine=False)", (2, 5), "real"),
    ("LayerNorm(5, bias=False)", (2, 5), "real"),
    ("RMSNorm(5)", (2, 3, 5), "real"),
    ("RMSNorm((3, 5), eps=1e-2)", (2, 3, 5), "real"),
    ("RMSNorm(5, elementwise_affine=False)", (2, 3, 5), "real"),
    ("GroupNorm(2, 6)", (2, 6, 4, 3), "real"),
    ("GroupNorm(3, 6, affine=False)", (2, 6, 5), "real"),
    ("InstanceNorm1d(3)", (2, 3, 7), "real"),
    ("InstanceNorm2d(3, affine=True)", (2, 3, 4, 5), "real"),
    ("InstanceNorm3d(3, eps=1e-3)", (2, 3, 4, 2, 3), "real"),
    ("LocalResponseNorm(3, alpha=0.1)", (2, 6, 4, 5), "real"),
    ("Dropout(0.3)", (2, 5), "real"),
    ("Embedding(7, 4)", (2, 5), 7),
    ("Embedding(7, 4, padding_idx=2)", (2, 5), 7),
    ("Embedding(7, 4, padding_idx=-1)", (3,), 7),
    ("Flatten()", (2, 3, 4, 5), "real"),
    ("Flatten(2, 3)", (2, 3, 4, 5), "real"),
    ("Flatten(0, 1)", (2, 3, 4), "real"),
    ("Unflatten(1, (2, 3))", (2, 6, 4), "real"),
    ("Upsample(scale_factor=2)", (2, 3, 4, 5), "real"),
    ("Upsample(size=(6, 9), mode='nearest')", (2, 3, 4, 5), "real"),
    ("Upsample(scale_factor=2, mode='bilinear')", (2, 3, 4, 5), "real"),
    ("Upsample(size=(7, 3), mode='bilinear', align_corners=True)", (2, 3, 4, 5), "real"),
    ("Upsample(scale_factor=(1.5, 2.0), mode='bilinear', align_corners=False)", (2, 3, 4, 6), "real"),
    ("Upsample(size=11, mode='linear')", (2, 3, 5), "real"),
    ("Upsample(scale_factor=2, mode='trilinear')", (2, 3, 4, 3, 2), "real"),
    ("Upsample(scale_factor=2, mode='bicubic')", (2, 3, 4, 5), "real"),
    ("Upsample(scale_factor=3, mode='nearest')", (2, 3, 5), "real"),
    ("PixelShuffle(2)", (2, 8, 3, 4), "real"),
    ("PixelUnshuffle(2)", (2, 3, 6, 4), "real"),
    ("ZeroPad2d((1, 2, 0, 3))", (2, 3, 4, 5), "real"),
    ("ZeroPad2d((-1, 2, 0, -1))", (2, 3, 4, 5), "real"),
    ("ReflectionPad2d(2)", (2, 3, 4, 5), "real"),
    ("ReplicationPad2d((1, 0, 2, 3))", (2, 3, 4, 5), "real"),
    ("ConstantPad2d(1, 3.5)", (2, 3, 4, 5), "real"),
    ("ReLU()", (2, 9), "real"),
    ("ReLU6()", (2, 9), "real"),
    ("LeakyReLU(0.2)", (2, 9), "real"),
    ("PReLU()", (2, 9), "real"),
    ("PReLU(3)", (2, 3, 4, 5), "real"),
    ("PReLU(9)", (2, 9), "real"),
    ("ELU(0.5)", (2, 9), "real"),
    ("CELU(1.5)", (2, 9), "real"),
    ("SELU()", (2, 9), "real"),
    ("GELU()", (2, 9), "real"),
    ("GELU('tanh')", (2, 9), "real"),
    ("SiLU()", (2, 9), "real"),
    ("Mish()", (2, 9), "real"),
    ("Hardswish()", (2, 9), "real"),
    ("Hardsigmoid()", (2, 9), "real"),
    ("Hardtanh(-0.5, 0.7)", (2, 9), "real"),
    ("Sigmoid()", (2, 9), "real"),
    ("LogSigmoid()", (2, 9), "real"),
    ("Tanh()", (2, 9), "real"),
    ("Tanhshrink()", (2, 9), "real"),
    ("Softsign()", (2, 9), "real"),
    ("Softplus()", (2, 9), "real"),
    ("Softplus(2.0, 3.0)", (2, 9), "real"),
    ("Softshrink(0.3)", (2, 9), "real"),
    ("Hardshrink(0.3)", (2, 9), "real"),
    ("Threshold(0.1, 20.0)", (2, 9), "real"),
    ("GLU(1)", (2, 8, 3), "real"),
    ("Softmax(1)", (2, 4, 5), "real"),
    ("LogSoftmax(-1)", (2, 4, 5), "real"),
    ("Softmin(0)", (2, 4), "real"),
    ("Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))", (2, 4), "real"),
]


def twins(text, seed=0):
    """The PyTorch layer with random parameters and statistics, and ours with its state."""
    torch.manual_seed(seed)
    theirs = eval(f"nn.{text}", {"nn": torch.nn}).eval()
    for name, tensor in theirs.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.rand_like(tensor)
            tensor.copy_(noise + 0.5 if name.endswith(("var", "norm.weight")) else tensor + 0.3 * (noise - 0.5))
    ours = eval(f"nn.{text}", {"nn": nn})
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def assert_close(found, expected, rtol=1e-5, atol=1e-5):
    expected = expected.detach().numpy()
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("text", "shape", "kind"), PLAIN, ids=[f"{t}-{len(s)}d" for t, s, _ in PLAIN])
def test_layer(text, shape, kind):
    ours, theirs = twins(text)
    model = model_of(ours, {"x": drawn(shape, kind=kind)})
    for batch in (shape[0], shape[0] + 3):
        x = drawn((batch, *shape[1:]), kind=kind)
        (y,) = run_model(model, {"x": x}).values()
        assert_close(y, theirs(torch.from_numpy(x)))
    declared_shapes_hold(model, {"x": x})
    assert {i.name for i in model.graph.initializer} <= set(theirs.state_dict())


@pytest.mark.parametrize("text", ["Bilinear(3, 4, 5)", "Bilinear(3, 4, 5, bias=False)"])
def test_a_layer_of_two_inputs(text):
    ours, theirs = twins(text)
    feeds = {"x": drawn((2, 3), kind="real"), "z": drawn((2, 4), kind="real")}
    (y,) = run_model(model_of(ours, feeds), feeds).values()
    assert_close(y, theirs(*map(torch.from_numpy, feeds.values())))


SPATIAL = [
    t
    for t in PLAIN
    if t[0].split("(")[0] in {"Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d", "MaxPool2d", "AvgPool2d"}
]
SPATIAL = [t for t in SPATIAL if "ceil_mode" not in t[0]]  # refused on dynamic sizes, see test_frontend_errors
SPATIAL += [
    t for t in PLAIN if t[0].startswith(("Upsample(scale", "Zero", "Pixel", "GroupNorm", "InstanceNorm", "Flatten()"))
]


@pytest.mark.parametrize(("text", "shape", "kind"), SPATIAL, ids=[f"{t}-{len(s)}d" for t, s, _ in SPATIAL])
def test_layer_on_dynamic_space(text, shape, kind):
    ours, theirs = twins(text)
    model = model_of(ours, {"x": drawn(shape)}, dynamic=(0, *range(2, len(shape))))
    for grown in (shape, (*shape[:2], *(n + 2 for n in shape[2:]))):
        x = drawn(grown)
        (y,) = run_model(model, {"x": x}).values()
        assert_close(y, theirs(torch.from_numpy(x)))
        declared_shapes_hold(model, {"x": x})


RECURRENT = [
    "RNN(4, 5)",
    "RNN(4, 5, nonlinearity='relu', bias=False)",
    "RNN(4, 5, num_layers=2, bidirectional=True, batch_first=True)",
    "LSTM(4, 5)",
    "LSTM(4, 5, num_layers=2, bidirectional=True)",
    "LSTM(4, 5, bias=False, batch_first=True, dropout=0.2, num_layers=2)",
    "GRU(4, 5)",
    "GRU(4, 5, num_layers=2, bidirectional=True, batch_first=True)",
    "GRU(4, 5, bias=False)",
]


@pytest.mark.parametrize("given", [False, True], ids=["zero-state", "given-state"])
@pytest.mark.parametrize("text", RECURRENT)
def test_recurrent(text, given):
    ours, theirs = twins(text)
    states = (1 + text.startswith("LSTM")) * given
    count = theirs.num_layers * (2 if theirs.bidirectional else 1)

    def forward(x, *state):
        return ours(x, tuple(state) if len(state) > 1 else state[0] if state else None)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = ours

        def forward(self, x, *state):
            return forward(x, *state)

    def arrays(batch, length):
        x = drawn((batch, length, 4) if theirs.batch_first else (length, batch, 4))
        return {"seq": x} | {f"s{i}": drawn((count, batch, 5), seed=i) for i in range(states)}

    first = ("batch", "time", 4) if theirs.batch_first else ("time", "batch", 4)
    model = export(Net(), {"seq": first} | {f"s{i}": (count, "batch", 5) for i in range(states)})
    for batch, length in ((2, 3), (4, 6)):
        feeds = arrays(batch, length)
        found = list(run_model(model, feeds).values())
        given_state = [torch.from_numpy(feeds[f"s{i}"]) for i in range(states)]
        state = None if not states else tuple(given_state) if states > 1 else given_state[0]
        y, last = theirs(torch.from_numpy(feeds["seq"]), state)
        for a, b in zip(found, [y, *(last if isinstance(last, tuple) else (last,))], strict=True):
            assert_close(a, b)
        declared_shapes_hold(model, feeds)


def test_recurrent_without_batch():
    ours, theirs = twins("LSTM(4, 5, bidirectional=True)")
    x = drawn((6, 4))
    found = list(run_model(model_of(ours, {"x": x}), {"x": x}).values())
    y, (h, c) = theirs(torch.from_numpy(x))
    for a, b in zip(found, (y, h, c), strict=True):
        assert_close(a, b)


LENGTHS = [3, 1, 6, 4]


@pytest.mark.parametrize("text", [t for t in RECURRENT if "dropout" not in t])
def test_lengths_are_those_of_a_packed_sequence(text):
    """Outputs, last states and all gradients, of padding as of no padding."""
    ours, theirs = twins(text)
    x = drawn((4, 6, 4) if theirs.batch_first else (6, 4, 4))
    outputs = ["y", "h", "c"][: 3 if text.startswith("LSTM") else 2]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = ours

        def forward(self, seq, lengths):
            y, last = self.rnn(seq, lengths=lengths)
            return dict(zip(outputs, (y, *(last if isinstance(last, tuple) else (last,))), strict=True))

    first = ("batch", "time", 4) if theirs.batch_first else ("time", "batch", 4)
    model = export(Net(), {"seq": first, "lengths": Input(("batch",), "int64")})
    feeds = {"seq": x, "lengths": np.array(LENGTHS)}
    found = run_model(model, feeds)

    given = torch.from_numpy(x).requires_grad_()
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        given, torch.tensor(LENGTHS), batch_first=theirs.batch_first, enforce_sorted=False
    )
    y, last = theirs(packed)
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=theirs.batch_first)
    expected = dict(zip(outputs, (y, *(last if isinstance(last, tuple) else (last,))), strict=True))
    for name in outputs:
        assert_close(found[name], expected[name])

    weights = dict(theirs.named_parameters())
    cotangents = {f"{name}.cotangent": drawn(expected[name].shape, seed=i) for i, name in enumerate(outputs)}
    sum((torch.from_numpy(cotangents[f"{n}.cotangent"]) * expected[n]).sum() for n in outputs).backward()
    gradient = gg.vjp(model, outputs=outputs, wrt=["seq", *(f"rnn.{name}" for name in weights)])
    slopes = run_model(gradient, feeds | cotangents)
    assert_close(slopes["seq.grad"], given.grad)
    for name, weight in weights.items():
        assert_close(slopes[f"rnn.{name}.grad"], weight.grad)


def test_the_length_of_one_sequence():
    ours, theirs = twins("GRU(4, 5)")
    x = drawn((6, 4))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = ours

        def forward(self, x, length):
            return self.rnn(x, lengths=length)

    model = export(Net(), {"x": (6, 4), "length": Input((), "int64")})
    y, last = run_model(model, {"x": x, "length": np.array(4)}).values()
    expected, state = theirs(torch.from_numpy(x[:4]))
    assert_close(y[:4], expected)
    assert not y[4:].any()
    assert_close(last, state)
