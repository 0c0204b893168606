"""Beside Hugging Face's PEFT: from the same numbers, on the same data, losses are the same; files go both ways.

PEFT is in no extra, as it is large: ``make language-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from surgery.test_adapters import IMAGES, made, node

import gradgraph as gg
from gradgraph import surgery

peft = pytest.importorskip("peft", reason="PEFT is in no extra; `make language-models` runs these tests with it")
torch = pytest.importorskip("torch", reason="PEFT adapts modules of PyTorch")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, RATE = 12, 0.02


class Dense(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.first(x)))

    nodes = (node("Gemm", ["x", "first.weight", "first.bias"], ["h"], transB=1), node("Relu", ["h"], ["r"]),
             node("Gemm", ["r", "last.weight", "last.bias"], ["y"], transB=1))  # fmt: skip
    shape: tuple[Any, ...] = ("rows", 8)
    targets = ("first", "last")


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(4 * 36, 5)

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.conv(x)).flatten(1))

    nodes = (node("Conv", ["x", "conv.weight", "conv.bias"], ["h"], pads=[1] * 4), node("Relu", ["h"], ["r"]),
             node("Flatten", ["r"], ["f"]),
             node("Gemm", ["f", "last.weight", "last.bias"], ["y"], transB=1))  # fmt: skip
    shape = tuple(IMAGES)
    targets = ("conv", "last")


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = torch.nn.Embedding(7, 8), torch.nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.last(self.words(x))

    nodes = (node("Gather", ["words.weight", "x"], ["h"]),
             node("Gemm", ["h", "last.weight", "last.bias"], ["y"], transB=1))  # fmt: skip
    shape = ("rows",)
    targets = ("words", "last")


LORA = {"r": 4, "lora_alpha": 6}
CASES: dict[str, tuple[type, Any]] = {
    "lora": (Dense, lambda m: peft.LoraConfig(**LORA, target_modules=m)),
    "rslora": (Dense, lambda m: peft.LoraConfig(**LORA, use_rslora=True, target_modules=m)),
    "dora": (Dense, lambda m: peft.LoraConfig(**LORA, use_dora=True, target_modules=m)),
    "ia3": (Dense, lambda m: peft.IA3Config(target_modules=m, feedforward_modules=[])),
    "ia3 with a feed-forward layer": (Dense, lambda m: peft.IA3Config(target_modules=m, feedforward_modules=["last"])),
    "lora with ranks of their own": (
        Dense, lambda m: peft.LoraConfig(**LORA, target_modules=m, rank_pattern={"last": 2}, alpha_pattern={"last": 3}),
    ),
    "lora of a Conv": (Images, lambda m: peft.LoraConfig(**LORA, target_modules=m)),
    "dora of a Conv": (Images, lambda m: peft.LoraConfig(**LORA, use_dora=True, target_modules=m)),
    "ia3 of a Conv": (Images, lambda m: peft.IA3Config(target_modules=m, feedforward_modules=[])),
    "lora of an embedding": (Words, lambda m: peft.LoraConfig(**LORA, target_modules=m)),
}  # fmt: skip


def as_onnx(network: Any) -> onnx.ModelProto:
    numbers = {n: p.detach().numpy() for n, p in network.named_parameters()}
    kind = onnx.TensorProto.INT64 if isinstance(network, Words) else onnx.TensorProto.FLOAT
    return made(list(network.nodes), numbers, list(network.shape), kind)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_same_and_files_are_read(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    kind, config = CASES[name]
    network = kind()
    base = as_onnx(network)
    rows = [8, *kind.shape[1:]]
    x = rng.integers(0, 7, 8) if kind is Words else rng.normal(size=rows).astype(np.float32)
    target = rng.normal(size=(8, 5)).astype(np.float32)
    theirs = peft.get_peft_model(copy.deepcopy(network), config(list(kind.targets)))
    theirs.save_pretrained(tmp_path / "begun")
    model = surgery.load_adapter(base, tmp_path / "begun")
    step = gg.build(model, "mse", gg.optim.adam(RATE))
    trainer = gg.Trainer(step, device="cpu")
    optimizer = torch.optim.Adam([p for p in theirs.parameters() if p.requires_grad], RATE)
    assert sum(p.numel() for p in theirs.parameters() if p.requires_grad) == sum(
        int(np.prod(s.shape)) for s in step.manifest.state if s.kind == "parameter"
    )
    losses: list[tuple[float, float]] = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(theirs(torch.tensor(x)), torch.tensor(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((float(loss), float(trainer.step({"x": x, "target": target})["loss"])))
    own, other = np.array(losses)[:, 1], np.array(losses)[:, 0]
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    assert own[-1] < 0.95 * own[0]
    surgery.save_adapter(model, tmp_path / "trained", trainer.state_dict())
    read = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path / "trained").eval()
    np.testing.assert_allclose(read(torch.tensor(x)).detach().numpy(), trainer.predict(x), rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    merged = surgery.merge_adapters(surgery.load_adapter(base, tmp_path / "theirs"))
    found = gg.Trainer(gg.build(merged, "mse"), device="cpu").predict(x)
    np.testing.assert_allclose(found, theirs.eval()(torch.tensor(x)).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_conv_in_groups_is_read_by_peft(tmp_path: Path) -> None:
    """PEFT's first factor has no groups: ours is stored with zeros where a group does not look."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2, bias=False))
    base = made([node("Conv", ["x", "0.weight"], ["y"], group=2)], {"0.weight": network[0].weight.detach().numpy()},
                ["rows", 4, 6, 6], y=["rows", 6, 4, 4])  # fmt: skip
    model = gg.lora(base, "0", rank=4, alpha=6)
    rng = np.random.default_rng(0)
    numbers = {
        t.name: rng.normal(size=list(t.dims)).astype(np.float32) for t in model.graph.initializer if "lora" in t.name
    }
    surgery.save_adapter(model, tmp_path, numbers)
    x = rng.normal(size=(2, 4, 6, 6)).astype(np.float32)
    read = peft.PeftModel.from_pretrained(network, tmp_path).eval()
    filled = surgery.load_weights(model, numbers, strict=False)
    found = gg.Trainer(gg.build(filled, "mse"), device="cpu").predict(x)
    np.testing.assert_allclose(found, read(torch.tensor(x)).detach().numpy(), rtol=1e-4, atol=1e-4)
    again = surgery.load_adapter(base, tmp_path)
    np.testing.assert_array_equal(
        *({t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer}["0.lora_A"] for m in (filled, again))
    )
