"""Every optimizer on small networks of different layers, as C and in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

import gradgraph as gg
from gradgraph.frontend import export, manual_seed, nn
from tests.kit.compiled_c import NEEDS_COMPILER, Program
from tests.kit.optim_cases import OPTIMIZERS
from tests.kit.trained_c import train_beside

BATCH, OUTPUTS = 4, 3
SEQUENCE, IMAGE = (BATCH, 3, 6), (BATCH, 2, 6, 6)


class Last(nn.Module):
    """A recurrent layer's output at the last position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0][:, -1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x, x, x)[0]


# layers without exact zeros in activations: optimizers that divide by the size of a gradient amplify the rounding of
# gradients that are zero
LAYERS: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)], (BATCH, 6)),
    "convolution": (lambda: [nn.Conv2d(2, 3, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(),
                             nn.Linear(27, OUTPUTS)], IMAGE),
    "depthwise": (lambda: [nn.Conv2d(2, 4, 3, 2, 1, groups=2), nn.Softplus(), nn.Flatten(),
                           nn.Linear(36, OUTPUTS)], IMAGE),
    "normalization": (lambda: [nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, OUTPUTS)], (BATCH, 6)),
    "lstm": (lambda: [Last(nn.LSTM(6, 4, batch_first=True)), nn.Linear(4, OUTPUTS)], SEQUENCE),
    "gru": (lambda: [Last(nn.GRU(6, 4, batch_first=True)), nn.Linear(4, OUTPUTS)], SEQUENCE),
    "attention": (lambda: [Attention(), nn.Flatten(), nn.Linear(18, OUTPUTS)], SEQUENCE),
}  # fmt: skip


def network(layers: str) -> onnx.ModelProto:
    manual_seed(0)
    made, shape = LAYERS[layers]
    return export(nn.Sequential(*made()), {"x": shape}, outputs=["y"])


@NEEDS_COMPILER
@pytest.mark.sweep(0.02)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c_updates_weights_as_onnxruntime_does(optimizer: str, layers: str, tmp_path: Path) -> None:
    case = OPTIMIZERS[optimizer]
    model = network(layers)
    arguments = dict(case.arguments)
    if case.only_matrices:
        others = [t.name for t in model.graph.initializer if len(t.dims) != 2]
        arguments["groups"] = {name: gg.optim.adamw(1e-3) for name in others}
    step = gg.build(model, "mse", gg.optim.by_name(case.recipe, **arguments))
    gg.export.c(step, tmp_path / "c")
    assert train_beside(step, Program(tmp_path / "c"), 20) < 1e-5
