"""Sentences that packages carry, a tokenizer, and an encoder like BERT in torch: where both walks of texts begin."""

from __future__ import annotations

import csv
import importlib
import inspect
import math
import zlib
from pathlib import Path

import torch
from torch import nn

MODULES = {
    "numbers": ["numpy", "numpy.linalg", "numpy.fft", "numpy.random", "numpy.ma", "numpy.polynomial.polynomial"],
    "learning": ["sklearn.metrics", "sklearn.preprocessing", "sklearn.datasets", "sklearn.model_selection",
                 "sklearn.linear_model", "sklearn.ensemble", "sklearn.cluster", "sklearn.decomposition"],
    "system": ["os", "os.path", "shutil", "subprocess", "socket", "asyncio", "email.message", "logging", "pathlib",
               "http.client", "threading", "zipfile", "tarfile", "argparse", "datetime", "tempfile", "inspect"],
}  # fmt: skip
WIDTH, LONGEST, WORDS = 48, 64, 1200


def sentences() -> list[tuple[str, str]]:
    """The first paragraph of what functions and classes of some modules say of themselves, and what they are about."""
    found: dict[str, str] = {}
    for kind, names in MODULES.items():
        for module in map(importlib.import_module, names):
            things = [thing for name, thing in sorted(vars(module).items()) if name[0] != "_" and callable(thing)]
            methods = [m for t in things if inspect.isclass(t) for n, m in sorted(vars(t).items()) if n[0] != "_"]
            for thing in (*things, *(method for method in methods if callable(method))):
                text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
                if len(text) > 20:
                    found.setdefault(text, kind)
    return sorted(found.items(), key=lambda pair: zlib.crc32(pair[0].encode()))


def write(folder: Path, seed: int = 0) -> None:
    """Write train.csv and test.csv, a tokenizer that was trained on the former, and the encoder as an ONNX file."""
    every = sentences()
    cut = len(every) * 4 // 5
    for name, rows in (("train.csv", every[:cut]), ("test.csv", every[cut:])):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "about"), *rows])
    tokenizer([text for text, _ in every[:cut]], folder / "tokenizer.json")
    ids = torch.ones((2, 8), dtype=torch.int64)
    axes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens", max=LONGEST)}
    torch.onnx.export(
        classifier(seed).eval(), (ids, ids.clone()), folder / "bert.onnx", dynamo=True, optimize=False, verbose=False,
        input_names=["input_ids", "attention_mask"], output_names=["logits"],
        dynamic_shapes={"input_ids": axes, "attention_mask": axes},
    )  # fmt: skip


def tokenizer(texts: list[str], path: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=WORDS, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(path))


def classifier(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Classifier()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norm, self.layers = nn.LayerNorm(WIDTH), nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, len(MODULES))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(input_ids) + self.places.weight[: input_ids.shape[1]])
        hidden = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e4
        for layer in self.layers:
            x = layer(x, hidden)
        there = attention_mask[:, :, None].to(x.dtype)
        return self.head((x * there).sum(dim=1) / there.sum(dim=1))


class Layer(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            f(x).reshape(rows, tokens, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        weights = (q @ k.transpose(2, 3) / math.sqrt(WIDTH // self.heads) + hidden).softmax(dim=-1)
        x = self.first(x + self.out((weights @ v).transpose(1, 2).reshape(rows, tokens, WIDTH)))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))
