"""State dicts of PyTorch go into files that its exporters wrote with other weights: predictions are PyTorch's.

BatchNormalizations are merged into convolutions and linear layers there, and matrices are transposed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gradgraph import surgery
from gradgraph.errors import ArgumentError, DataError

torch = pytest.importorskip("torch", reason="exports from PyTorch")
safetensors: Any = pytest.importorskip("safetensors.torch", reason="saves tensors of PyTorch")

from tests.networks.exporters import by_dynamo, by_torchscript  # noqa: E402 (imports torch)
from tests.networks.small_vision import NETWORKS  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EPSILON = 1e-5
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Speech(torch.nn.Module):
    """Recurrent layers in both directions, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv1d(6, 8, 3, padding=1), torch.nn.BatchNorm1d(8)
        self.lstm = torch.nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.head = torch.nn.GRU(16, 5, batch_first=True), torch.nn.Linear(5, 5)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.conv(x))).transpose(1, 2)
        return self.head(self.gru(self.lstm(x)[0])[0])


class Attention(torch.nn.Module):
    """torch.nn's encoder layer, which packs queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.zeros(1, 1, 16))
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, norm_first=i == 1) for i in range(2)
        )
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16, bias=False)

    def forward(self, x: Any) -> Any:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


class Autoencoder(torch.nn.Module):
    """Convolutions down and up, the latter in groups, with skip connections, and a classifier with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = torch.nn.Conv2d(3, 8, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(8)
        self.up = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.ConvTranspose2d(8, 8, 2, 2, bias=bias, groups=groups),
                                torch.nn.BatchNorm2d(8), torch.nn.ReLU())
            for bias, groups in ((False, 1), (True, 2), (False, 8))
        )  # fmt: skip
        self.deconv2, self.norm2 = torch.nn.ConvTranspose2d(8, 4, 3, groups=2), torch.nn.BatchNorm2d(4, affine=False)
        self.fc1, self.fc1_norm = torch.nn.Linear(4, 6, bias=False), torch.nn.BatchNorm1d(6)
        self.classifier = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU())

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.bn1(self.conv1(x)))
        for up in self.up:
            x = up(x)
        x = self.norm2(self.deconv2(x)).mean((2, 3))
        return self.classifier(torch.relu(self.fc1_norm(self.fc1(x))))


OTHERS: dict[str, tuple[Any, Any]] = {
    "autoencoder": (Autoencoder, torch.randn(2, 3, 32, 32)),
    "speech": (Speech, torch.randn(2, 6, 9)),
    "attention": (Attention, torch.randn(2, 7, 16)),
}


def network(name: str, seed: int) -> Any:
    """With random weights and statistics, all of them."""
    torch.manual_seed(seed)
    made = (OTHERS[name][0] if name in OTHERS else NETWORKS[name])().eval()
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    for key, buffer in made.named_buffers():
        if key.endswith("running_mean"):
            buffer.data = 0.1 * torch.randn_like(buffer)
        if key.endswith("running_var"):
            buffer.data = 0.5 + torch.rand_like(buffer)
    return made


EXPORTERS = {"torchscript": by_torchscript, "dynamo": by_dynamo}


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", [*NETWORKS, *OTHERS])
def test_predictions_are_those_of_pytorch(name: str, exporter: str, tmp_path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    old, new = network(name, 0), network(name, 1)
    x = OTHERS[name][1] if name in OTHERS else IMAGES
    EXPORTERS[exporter](old, {"x": x}, ["y"], tmp_path)
    safetensors.save_file({k: v.contiguous() for k, v in new.state_dict().items()}, tmp_path / "new.safetensors")
    before = {k: v.numpy() for k, v in old.state_dict().items()}
    found = surgery.load_weights(
        tmp_path / "model.onnx", tmp_path / "new.safetensors", epsilon=EPSILON, exported_from=before
    )
    with torch.no_grad():
        wanted, was = new(x).numpy(), old(x).numpy()
    session = ort.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    (given,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.abs(was - wanted).max() > 0.1 * np.abs(wanted).max()
    np.testing.assert_allclose(given, wanted, atol=3e-6 * max(1.0, float(np.abs(wanted).max())))


def test_an_epsilon_that_is_in_neither_file_is_asked_for(tmp_path: Path) -> None:
    file = by_torchscript(network("resnet", 0), {"x": IMAGES}, ["y"], tmp_path)
    values = {name: tensor.numpy() for name, tensor in network("resnet", 1).state_dict().items()}
    with pytest.raises(DataError, match=r"its epsilon is in neither file; pass epsilon=1e-5"):
        surgery.load_weights(file, values)


# --- constants that the exporter computed from weights ------------------------------------------------------------


class Product(torch.nn.Module):
    """A product with a function of a module's weight; a sum, if the function's result is not a matrix."""

    def __init__(self, function: Any, sizes: tuple[int, ...] = (6, 8)) -> None:
        super().__init__()
        self.weight, self.function = torch.nn.Parameter(torch.randn(*sizes)), function

    def forward(self, x: Any) -> Any:
        found = self.function(self.weight)
        return x @ found.t() if found.ndim == 2 else x + found


class Scale(Product):
    """A normalisation that multiplies by a function of its weight."""

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.function(self.weight)


class Kernel(Product):
    def forward(self, x: Any) -> Any:
        return torch.nn.functional.conv1d(x, self.function(self.weight))


class Table(Product):
    """An embedding and a last layer that is tied to a function of it."""

    def forward(self, x: Any) -> Any:
        rows = torch.nn.functional.embedding((x[..., 0] > 0).long(), self.weight)
        return rows @ self.function(self.weight).t()


class Decay(torch.nn.Module):
    """A state-space model's factor, a function of its logarithm."""

    def __init__(self, function: Any, sizes: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.A_log, self.function = torch.nn.Parameter(torch.randn(*sizes)), function

    def forward(self, x: Any) -> Any:
        return (x[..., None] * self.function(self.A_log)).sum(-1)


class Added(torch.nn.Module):
    """An addition that multiplies the weight."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(*sizes))

    def forward(self, x: Any) -> Any:
        return torch.add(x, self.weight, alpha=0.97)


class Keys(Added):
    """Learned keys, which an attention scales."""

    def forward(self, x: Any) -> Any:
        y = x[:, None]
        return torch.nn.functional.scaled_dot_product_attention(y, self.weight, y[:, :, :4])[:, 0]


class Block(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Convolutions(torch.nn.Module):
    """Two convolutions whose norms have the numbers of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv1d(5, 5, 3), torch.nn.Conv1d(5, 5, 3)
        self.bn1, self.bn2 = torch.nn.BatchNorm1d(5), torch.nn.BatchNorm1d(5)

    def forward(self, x: Any) -> Any:
        return self.bn1(self.conv2(torch.relu(self.bn2(self.conv1(x)))))


class ScaledConvolution(torch.nn.Module):
    """A function of a kernel, under a BatchNormalization that exporters merge into it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = torch.nn.Conv1d(5, 5, 3), torch.nn.BatchNorm1d(5)

    def forward(self, x: Any) -> Any:
        return self.bn(torch.nn.functional.conv1d(x, 0.97 * self.conv.weight, self.conv.bias))


class ScaledBias(ScaledConvolution):
    """A function of the bias of a convolution under a norm."""

    def forward(self, x: Any) -> Any:
        return self.bn(torch.nn.functional.conv1d(x, self.conv.weight, 0.5 * self.conv.bias))


class TransposedConvolution(ScaledConvolution):
    """A kernel that a transposed convolution reads with its channels exchanged, under a norm."""

    def forward(self, x: Any) -> Any:
        return self.bn(torch.nn.functional.conv_transpose1d(x, self.conv.weight.transpose(0, 1), self.conv.bias))


class ScaledSum(torch.nn.Module):
    """A linear layer under a norm, whose bias has a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(*sizes)) for sizes in ((8, 6), (6,)))
        self.bn = torch.nn.BatchNorm1d(6)

    def forward(self, x: Any) -> Any:
        return self.bn(torch.addmm(self.bias, x.mean(1), self.weight, beta=0.5))


FUNCTIONS: dict[str, Any] = {
    "half": lambda w: 0.5 * w,
    "nearly": lambda w: 0.999 * w,
    "more": lambda w: 1.0001 * w,
    "negative": lambda w: -w,
    "square": lambda w: w * w,
    "absolute": torch.abs,
    "bounded": lambda w: w.clamp(-2, 2),
    "one more": lambda w: 1 + w,
    "centred": lambda w: w - w.mean(-1, keepdim=True),
    "softmax": lambda w: w.softmax(-1),
    "twice transposed": lambda w: (0.98 * w.t()).t(),
    "of unit length": lambda w: w / w.norm(dim=-1, keepdim=True),
    "permuted": lambda w: w[list(range(len(w)))[::-1]],
}
COMPUTED: dict[str, Any] = {
    **{name: (lambda f=f: Product(f)) for name, f in FUNCTIONS.items()},
    **{f"norm {name}": (lambda f=FUNCTIONS[name]: Scale(f, (8,))) for name in ("nearly", "one more", "square")},
    **{f"kernel {name}": (lambda f=FUNCTIONS[name]: Kernel(f, (5, 5, 3))) for name in ("nearly", "centred")},
    **{f"tied {name}": (lambda f=FUNCTIONS[name]: Table(f, (6, 8))) for name in ("half", "nearly")},
    "transposed": lambda: Product(lambda w: w.t(), (8, 8)),
    "positions": lambda: Product(lambda w: 0.99 * w, (1, 5, 8)),
    "parts of an operator": lambda: Added((8,)),
    "keys": lambda: Keys((1, 1, 4, 8)),
    "norms": Convolutions,
    "kernel under a norm": ScaledConvolution,
    "bias under a norm": ScaledBias,
    "transposed kernel under a norm": TransposedConvolution,
    "sum under a norm": ScaledSum,
    "decay doubled": lambda: Decay(lambda a: -torch.exp(a) * 2, (8, 1)),
    "decay of a negative": lambda: Decay(lambda a: torch.exp(-a), (8, 1)),
    "decay transposed": lambda: Decay(lambda a: -torch.exp(a).t(), (8, 8)),
    "decay": lambda: Decay(lambda a: -torch.exp(a), (8, 1)),
}


class Positions(torch.nn.Module):
    """A table whose first rows are read by another module, as in Whisper's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(5, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.linear(x) + self.table.weight[None, :5]


class Twice(torch.nn.Module):
    """A layer and a norm that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(torch.relu(self.norm(self.linear(x)))))


AS_IT_IS = {"linear": lambda: torch.nn.Linear(8, 6), "called twice": Twice, "of another module": Positions}


def drawn(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    made = Block((COMPUTED | AS_IT_IS)[name]()).eval()
    for key, value in made.state_dict().items():
        if key.endswith(("running_var", "bn1.weight", "bn2.weight")):
            value += 2 * torch.rand_like(value)
    return made


def arrays(network: Any) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


def moved(name: str, share: float) -> tuple[Any, dict[str, Any]]:
    """A network whose weights are moved by a share of the way to others, and its weights."""
    one, other = arrays(drawn(name, 0)), arrays(drawn(name, 1))
    found = {n: a + share * (other[n] - a) if a.dtype.kind == "f" else a for n, a in one.items()}
    network = drawn(name, 0)
    network.load_state_dict({n: torch.from_numpy(np.asarray(a)) for n, a in found.items()})
    return network, found


def loads(file: Any, weights: Any, network: Any, **options: Any) -> bool:
    """Whether weights are loaded; they then give PyTorch's predictions, and are refused otherwise."""
    try:
        found = surgery.load_weights(file, weights, epsilon=EPSILON, **options)
    except DataError:
        return False
    except ArgumentError as error:  # all names are the model's own
        assert "does not apply" in str(error)
        return loads(file, weights, network) if options else surgery.load_weights(file, weights) is not None
    with torch.no_grad():
        wanted = network(INPUT).numpy()
    proto = found if isinstance(found, onnx.ModelProto) else onnx.load(found)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (given,) = session.run(None, {session.get_inputs()[0].name: INPUT.numpy()})
    np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=2e-6)
    return True


INPUT = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
ROUTES = {"as exported": lambda file: file, "named": surgery.name_weights}


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_constants_are_never_replaced(name: str, exporter: str, tmp_path: Path) -> None:
    """However similar the weights are, with or without those of the export, and whatever names gradgraph gives."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    old = drawn(name, 0)
    file = EXPORTERS[exporter](old, {"x": INPUT}, ["y"], tmp_path)
    for share in (1.0, 1e-3):
        new, weights = moved(name, share)
        for route in ROUTES.values():
            for options in ({}, {"exported_from": arrays(old)}):
                loads(route(file), weights, new, **options)


HIDING: dict[str, Any] = {
    "zeros": np.zeros,
    "ones": np.ones,
    "identity": lambda sizes: np.eye(*(1, *sizes)[-2:]).reshape(sizes[-2:]),
}


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", ["half", "square", "permuted", "transposed", "norm square", "positions", "decay"])
@pytest.mark.parametrize("hiding", HIDING)
def test_weights_that_hide_a_function_are_no_evidence(hiding: str, name: str, exporter: str, tmp_path: Path) -> None:
    """Half of zeros is zeros, the square of ones is ones, and so is the transpose."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    old, (new, weights) = drawn(name, 0), moved(name, 1.0)
    for parameter in old.parameters():
        array = np.broadcast_to(HIDING[hiding](parameter.shape), parameter.shape)
        parameter.data = torch.tensor(array.copy(), dtype=torch.float32)
    file = EXPORTERS[exporter](old, {"x": INPUT}, ["y"], tmp_path)
    for route in ROUTES.values():
        loads(route(file), weights, new, exported_from=arrays(old))


def test_the_decay_of_a_state_is_computed_as_recorded(tmp_path: Path) -> None:
    new, weights = moved("decay", 1.0)
    assert loads(EXPORTERS["dynamo"](drawn("decay", 0), {"x": INPUT}, ["y"], tmp_path), weights, new)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("share", [1e-3, 1.0])
@pytest.mark.parametrize("name", AS_IT_IS)
def test_a_weight_without_a_name_is_replaced_on_evidence(name: str, share: float, route: str, tmp_path: Path) -> None:
    """If the weights of the export are those of the model; modules may be called several times."""
    old, (new, weights) = drawn(name, 0), moved(name, share)
    file = ROUTES[route](by_torchscript(old, {"x": INPUT}, ["y"], tmp_path))
    with pytest.raises(DataError, match=r"may have computed weights|1 weight of the model has no tensor"):
        surgery.load_weights(file, weights)
    with pytest.raises(DataError, match=r"other weights were exported|1 weight of the model has no tensor"):
        surgery.load_weights(file, weights, exported_from=weights)
    assert loads(file, weights, new, exported_from=arrays(old))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["linear", "nearly", "half"])
def test_quantised_constants_are_those_of_the_export(name: str, bits: int, tmp_path: Path) -> None:
    """Each is the integer nearest to the number that the exporter had; a multiple has others."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    torch.manual_seed(0)
    old = Block(torch.nn.Linear(64, 32) if name == "linear" else Product(FUNCTIONS[name], (32, 64))).eval()
    file = by_torchscript(old, {"x": torch.randn(2, 5, 64)}, ["y"], tmp_path)
    quantiser = MatMulNBitsQuantizer(onnx.load(file), bits=bits, block_size=32, is_symmetric=name != "half")
    quantiser.process()
    model = quantiser.model.model
    after = {n: a + np.float32(0.3) for n, a in arrays(old).items()}
    with pytest.raises(DataError, match="may have computed weights"):
        surgery.load_weights(model, after)
    if name != "linear":
        with pytest.raises(DataError, match="so the exporter computed it"):
            surgery.load_weights(model, after, exported_from=arrays(old))
        return
    errors: dict[str, float] = {}
    surgery.load_weights(model, after, exported_from=arrays(old), errors=errors)
    assert set(errors) == {"inner"}
    assert errors["inner"] < (0.1 if bits == 4 else 0.01)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_new_weights_are_quantised_as_by_onnxruntime(bits: int, is_symmetric: bool, size: float) -> None:
    """Integers and scales do not depend on those of the old weights."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    rng = np.random.default_rng(0)
    old, new = (rng.normal(size=(64, 48)).astype(np.float32) for _ in range(2))
    new *= np.float32(size)
    for weight in (old, new):
        weight[:, 3] = 0

    def quantised(weight: Any) -> onnx.ModelProto:
        model = onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["" : 21]> g (float[2, 64] x) => (float[2, 48] y) { y = MatMul(x, w) }"""
        )
        model.graph.node[0].name, model.graph.node[0].input[1] = "/fc/MatMul", "fc.MatMul.weight"
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "fc.MatMul.weight"))
        quantiser = MatMulNBitsQuantizer(model, bits=bits, block_size=32, is_symmetric=is_symmetric)
        quantiser.process()
        return quantiser.model.model

    found = surgery.load_weights(quantised(old), {"fc.weight": np.ascontiguousarray(new.T)})
    for one, other in zip(found.graph.initializer, quantised(new).graph.initializer, strict=True):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(one), onnx.numpy_helper.to_array(other), one.name)


def test_names_of_untied_copies_are_no_evidence(tmp_path: Path) -> None:
    """Two norms that multiply by 1 + weight begin as one tensor of ones."""

    class Norms(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (Scale(lambda w: 1 + w, (8,)) for _ in range(2))
            for norm in (self.first, self.second):
                torch.nn.init.zeros_(norm.weight)

        def forward(self, x: Any) -> Any:
            return self.second(torch.relu(self.first(x)))

    file = by_torchscript(Norms(), {"x": INPUT}, ["y"], tmp_path)
    after = {name: np.full(8, 0.1, np.float32) for name in ("first.weight", "second.weight")}
    for model in (file, surgery.name_weights(file), surgery.untie_weights(file)):
        with pytest.raises(DataError, match=r"may have computed weights|seem to be 1"):
            surgery.load_weights(model, after)


class Fresh(torch.nn.Module):
    """As before the first step of training: equal biases and norms, which exporters store once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(3))
        self.head = torch.nn.Linear(8, 3)  # of a matrix, a Gemm, whose bias of zeros torch.onnx.export removes
        for layer in (*self.layers, self.head):
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x: Any) -> Any:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(torch.tanh(layer(x)))
        return self.head(x[:, 0])


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_weights_that_the_exporter_merged_get_their_own_numbers(exporter: str, tmp_path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.manual_seed(0)
    old, new, x = Fresh().eval(), Fresh().eval(), torch.randn(2, 5, 8)
    for parameter in new.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    EXPORTERS[exporter](old, {"x": x}, ["y"], tmp_path)
    states = [{k: v.numpy() for k, v in network.state_dict().items()} for network in (old, new)]
    found = surgery.load_weights(tmp_path / "model.onnx", states[1], exported_from=states[0])
    session = ort.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], new(x).numpy(), atol=1e-5)
