"""State dicts of PyTorch go into files that its exporters wrote with other weights: predictions are PyTorch's.

BatchNormalizations are merged into convolutions there, and matrices are transposed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from gradgraph import surgery
from gradgraph.errors import DataError

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


OTHERS: dict[str, tuple[Any, Any]] = {
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
    """A product with a function of a module's weight."""

    def __init__(self, function: Any, sizes: tuple[int, ...] = (6, 8)) -> None:
        super().__init__()
        self.weight, self.function = torch.nn.Parameter(torch.randn(*sizes)), function

    def forward(self, x: Any) -> Any:
        found = self.function(self.weight)
        return x @ found.t() if found.ndim == 2 else x + found


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


COMPUTED: dict[str, Any] = {
    "multiple": lambda: Product(lambda w: 0.5 * w),
    "negative": lambda: Product(lambda w: -w),
    "softmax": lambda: Product(lambda w: w.softmax(-1)),
    "permuted": lambda: Product(lambda w: w[[5, 4, 3, 2, 1, 0]]),
    "transposed": lambda: Product(lambda w: w.t(), (8, 8)),
    "positions": lambda: Product(lambda w: 0.3 * w, (1, 5, 8)),
    "norms": Convolutions,
}


def drawn(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    made = Block(COMPUTED[name]() if name in COMPUTED else torch.nn.Linear(8, 6)).eval()
    for key, value in made.state_dict().items():
        if key.endswith(("running_var", "bn1.weight", "bn2.weight")):
            value += 2 * torch.rand_like(value)
    return made


def arrays(network: Any) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_constants_are_never_replaced(name: str, tmp_path: Path) -> None:
    """Neither by unlike weights, nor by similar ones, nor with the weights of the export."""
    old, new = drawn(name, 0), drawn(name, 1)
    file = by_torchscript(old, {"x": torch.randn(2, 5, 8)}, ["y"], tmp_path)
    before, after = arrays(old), arrays(new)
    similar = {n: a + (after[n] - a) / 20 if a.dtype.kind == "f" else a for n, a in before.items()}
    for weights in (after, similar):
        with pytest.raises(DataError, match=r"may have computed|do not match|does not fit|fits|is square"):
            surgery.load_weights(file, weights, epsilon=EPSILON)
    with pytest.raises(DataError, match=r"so the exporter computed it|do not match|does not fit|fits|is square"):
        surgery.load_weights(file, after, epsilon=EPSILON, exported_from=before)


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_a_weight_without_a_name_is_replaced_on_evidence(share: float, tmp_path: Path) -> None:
    """By similar weights, or if the weights of the export are those of the model."""
    old, new, x = drawn("linear", 0), drawn("linear", 1), torch.randn(2, 5, 8)
    file = by_torchscript(old, {"x": x}, ["y"], tmp_path)
    before = arrays(old)
    after = {name: array + share * (arrays(new)[name] - array) for name, array in before.items()}
    new.load_state_dict({name: torch.from_numpy(array) for name, array in after.items()})
    if share == 1.0:
        with pytest.raises(DataError, match="may have computed weights"):
            surgery.load_weights(file, after)
        with pytest.raises(DataError, match="other weights were exported"):
            surgery.load_weights(file, after, exported_from=after)
    found = surgery.load_weights(file, after, exported_from=before if share == 1.0 else None)
    session = ort.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], new(x).numpy(), atol=1e-6)
