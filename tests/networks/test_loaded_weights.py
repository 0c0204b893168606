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
    found = surgery.load_weights(tmp_path / "model.onnx", tmp_path / "new.safetensors", epsilon=EPSILON)
    with torch.no_grad():
        wanted, before = new(x).numpy(), old(x).numpy()
    session = ort.InferenceSession(found.SerializeToString(), providers=["CPUExecutionProvider"])
    (given,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.abs(before - wanted).max() > 0.1 * np.abs(wanted).max()
    np.testing.assert_allclose(given, wanted, atol=3e-6 * max(1.0, float(np.abs(wanted).max())))


def test_an_epsilon_that_is_in_neither_file_is_asked_for(tmp_path: Path) -> None:
    file = by_torchscript(network("resnet", 0), {"x": IMAGES}, ["y"], tmp_path)
    values = {name: tensor.numpy() for name, tensor in network("resnet", 1).state_dict().items()}
    with pytest.raises(DataError, match=r"its epsilon is in neither file; pass epsilon=1e-5"):
        surgery.load_weights(file, values)
