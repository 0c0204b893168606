"""The networks of ``recomputed_networks.py`` in PyTorch, also with ``torch.utils.checkpoint`` around layers, blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.networks import Bottleneck, conv_bn
from benchmarks.recomputed_networks import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH


class Checked(nn.Module):
    """Modules one after the other, each computed again in the backward pass if that is wanted."""

    def __init__(self, modules: list[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.parts, self.checkpointed = nn.ModuleList(modules), checkpointed

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.ln_1(x)).reshape(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.permute(0, 2, 1, 3).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = Checked([Layer() for _ in range(LAYERS)], checkpointed)
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.ln(self.blocks(x))).reshape(-1, VOCABULARY)


def resnet50(checkpointed: bool) -> nn.Module:
    stem = nn.Sequential(*conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    parts: list[nn.Module] = [stem]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            parts.append(Bottleneck(channels, width, 2 if i == 0 and width > 64 else 1))
            channels = 4 * width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return nn.Sequential(Checked(parts, checkpointed), head)


NETWORKS: dict[str, Callable[[bool], nn.Module]] = {"transformer": Gpt, "resnet50": resnet50}
