"""A transformer whose file has no Dropout is told of where it is trained throughout, and no other model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.frontend import export, nn


class Attending(nn.Module):
    """An attention and a norm, with Dropout between them or none."""

    def __init__(self, dropout: float, norm: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.norm, self.head = norm(8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.norm(x + self.drop(y)).mean(1))


def model(producer: str = "pytorch", dropout: float = 0.0, norm: Any = nn.LayerNorm) -> onnx.ModelProto:
    made = export(Attending(dropout, norm), {"x": ("batch", 5, 8)})
    made.producer_name = producer
    return made


def without_attention() -> onnx.ModelProto:
    made = export(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)), {"x": ("batch", 8)})
    made.producer_name = "pytorch"
    return made


def notes(built: Any, **options: Any) -> list[str]:
    return [str(f) for f in gg.build(built, **options).findings if "no Dropout" in str(f)]


@pytest.mark.parametrize("producer", ["pytorch", "tf2onnx", "keras"])
def test_it_is_said_of_a_transformer_from_elsewhere(producer: str) -> None:
    assert notes(model(producer)) == [
        "the model has 1 attention layer, but no Dropout, and an export in evaluation mode removes Dropout; "
        "if the network had Dropout, export it in training mode, or with gradgraph.frontend.from_torch"
    ]


def test_it_is_not_said_of_others() -> None:
    assert not notes(model(dropout=0.1)), "it has Dropout"
    assert not notes(model("gradgraph")), "Dropout stays where files are written here"
    assert not notes(model("")), "nobody knows who wrote it"
    assert not notes(model(norm=nn.RMSNorm)), "as language models have it, which drop nothing"
    assert not notes(without_attention())
    assert not notes(model(), train="head.weight"), "what is frozen needs none"
    assert not notes(gg.lora(model(), "head", rank=2)), "adapters have a Dropout of their own"


@pytest.mark.filterwarnings("ignore")
def test_exports_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Layer(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in range(3))
            self.drop, self.norm = torch.nn.Dropout(0.1), torch.nn.LayerNorm(8)

        def forward(self, x: Any) -> Any:
            weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1)
            return self.norm(x + self.drop(weights @ self.v(x)))

    layer = Layer()
    for kept in (False, True):
        path = tmp_path / "m.onnx"
        layer.train(kept)
        mode = torch.onnx.TrainingMode.TRAINING if kept else torch.onnx.TrainingMode.EVAL
        torch.onnx.export(layer, (torch.zeros(2, 5, 8),), str(path), dynamo=False, training=mode)
        assert bool(notes(str(path), loss="mse")) != kept


def test_the_shell_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    assert run(["build", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "step")]) == 0
    assert capsys.readouterr().err.count("no Dropout") == 1
    assert run(["inspect", str(tmp_path / "m.onnx"), "--json"]) == 0
    assert "no Dropout" in json.dumps(json.loads(capsys.readouterr().out)["findings"])
