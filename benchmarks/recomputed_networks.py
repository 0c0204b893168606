"""The networks of ``recomputed.py``, with their sizes and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, ROWS = 16, 256, 8, 128, 1000, 8
IMAGES = 8


def transformer(layers: int = LAYERS) -> Any:
    """A GPT of pre-norm layers."""
    from gradgraph.frontend import Input, export, nn
    from gradgraph.frontend import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            rows, length, _ = x.shape
            parts = self.qkv(self.ln_1(x)).reshape(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.proj(y.permute(0, 2, 1, 3).reshape(rows, length, WIDTH))
            return x + self.down(F.gelu(self.up(self.ln_2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks, self.ln = nn.Sequential(*(Block() for _ in range(layers))), nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
            return self.head(self.ln(self.blocks(x))).reshape(-1, VOCABULARY)

    return export(Gpt(), {"ids": Input(("batch", LENGTH), "int64")})


def resnet50() -> Any:
    from benchmarks.build_time import resnet50

    return resnet50()


def _tokens() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"ids": rng.integers(0, VOCABULARY, (ROWS, LENGTH)), "target": rng.integers(0, VOCABULARY, ROWS * LENGTH)}


def _images() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((IMAGES, 3, 224, 224)).astype(np.float32)
    return {"x": x, "target": rng.integers(0, 1000, IMAGES)}


NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, np.ndarray]]]] = {
    "transformer": (transformer, _tokens),
    "resnet50": (resnet50, _images),
}
