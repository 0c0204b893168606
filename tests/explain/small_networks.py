"""Ten small networks in PyTorch, one of each kind, with their ONNX files.

No MaxPool reads a ReLU directly: there, captum 0.9 takes the plain gradient, and its DeepLIFT is not complete.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F


class Perceptron(nn.Module):
    shape, layer = (6,), "hidden"

    def __init__(self) -> None:
        super().__init__()
        self.one, self.relu, self.hidden = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)
        self.tanh, self.head = nn.Tanh(), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.tanh(self.hidden(self.relu(self.one(x)))))


class Convolutional(nn.Module):
    shape, layer = (2, 8, 8), "second"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2)
        self.second, self.relu2, self.head = nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Linear(96, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.relu2(self.second(self.pool(self.first(x)))).flatten(1))


class Residual(nn.Module):
    shape, layer = (2, 8, 8), "last"

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.ReLU()
        self.norm, self.one, self.relu1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.two, self.last, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        x = self.relu(self.norm(self.stem(x)))
        x = self.last(x + self.two(self.relu1(self.one(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Depthwise(nn.Module):
    shape, layer = (2, 8, 8), "point"

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.relu, self.deep = nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.relu2, self.squeeze, self.gate = nn.ReLU(), nn.Linear(6, 6), nn.Sigmoid()
        self.point, self.head = nn.Conv2d(6, 4, 1, stride=2), nn.Linear(64, 4)

    def forward(self, x: Any) -> Any:
        x = self.relu2(self.deep(self.relu(self.wide(x))))
        x = x * self.gate(self.squeeze(x.mean((2, 3))))[:, :, None, None]
        return self.head(self.point(x).flatten(1))


class Transformer(nn.Module):
    shape, layer = (5, 8), "wide"

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.wide, self.relu, self.narrow, self.head = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4)

    def attention(self, x: Any) -> tuple[Any, Any]:
        q, k, v = self.qkv(self.norm(x)).reshape(x.shape[0], 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        shares = F.softmax(q @ k.transpose(-1, -2) / 2, -1)
        return shares, x + self.out((shares @ v).transpose(1, 2).reshape(x.shape[0], 5, 8))

    def forward(self, x: Any) -> Any:
        x = self.attention(x)[1]
        return self.head((x + self.narrow(self.relu(self.wide(x)))).mean(1))


class Recurrent(nn.Module):
    shape, layer = (5, 3), "hidden"

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden, self.relu = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 6), nn.ReLU()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.relu(self.hidden(self.cell(x)[0][:, -1])))


class Normalised(nn.Module):
    shape, layer = (6,), "norm"

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.relu = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()
        self.head, self.act = nn.Linear(8, 4), nn.ELU()

    def forward(self, x: Any) -> Any:
        return self.head(self.act(self.relu(self.norm(self.one(x))) - 0.5))


class Tokens(nn.Module):
    shape, layer = (6, 5), "conv"

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.relu = nn.Embedding(11, 5), nn.Conv1d(5, 6, 3, padding=1), nn.ReLU()
        self.head = nn.Linear(6, 4)

    def tail(self, rows: Any) -> Any:
        return self.head(self.relu(self.conv(rows.transpose(1, 2))).mean(2))

    def forward(self, ids: Any) -> Any:
        return self.tail(self.table(ids))


class Waves(nn.Module):
    shape, layer = (2, 12), "two"

    def __init__(self) -> None:
        super().__init__()
        self.one, self.pool, self.two = nn.Conv1d(2, 4, 3, padding=1), nn.MaxPool1d(2), nn.Conv1d(4, 6, 3)
        self.relu, self.hidden, self.softplus, self.head = nn.ReLU(), nn.Linear(24, 6), nn.Softplus(), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.softplus(self.hidden(self.relu(self.two(self.pool(self.one(x)))).flatten(1))))


class UNet(nn.Module):
    shape, layer = (2, 8, 8), "low"

    def __init__(self) -> None:
        super().__init__()
        self.down, self.relu, self.low = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1)
        self.relu2, self.up, self.relu3 = nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, 2), nn.ReLU()
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Any) -> Any:
        skip = self.relu(self.down(x))
        return self.head(torch.cat([skip, self.relu3(self.up(self.relu2(self.low(skip))))], 1))


NETWORKS = [Perceptron, Convolutional, Residual, Depthwise, Transformer, Recurrent, Normalised, Tokens, Waves, UNet]


def made(kind: type[nn.Module], batch: int = 3) -> tuple[nn.Module, onnx.ModelProto, np.ndarray, torch.Tensor]:
    """Return a network, its file (input "x", output "y"), the data to feed, and the tensor to attribute to."""
    torch.manual_seed(NETWORKS.index(kind))
    net = kind()
    for part in net.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(part.running_mean, std=0.3)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
    net = net.eval()
    data = torch.randint(0, 11, (batch, 6)) if kind is Tokens else torch.randn(batch, *kind.shape)  # type: ignore[attr-defined]
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (data,), file, input_names=["x"], output_names=["y"], dynamo=False, opset_version=17,
                          dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}})  # fmt: skip
    rows = net.table(data).detach() if isinstance(net, Tokens) else data
    return net, onnx.load_from_string(file.getvalue()), data.numpy(), rows
