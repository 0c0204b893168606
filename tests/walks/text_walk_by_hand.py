"""The same by hand: torch's optimizer, and loops, padding, classes and a CSV of predictions as one writes them."""

from __future__ import annotations

import csv
from pathlib import Path

import text_network
import torch
from tokenizers import Tokenizer
from torch import nn


def rows_of(path: Path) -> tuple[list[str], list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["about"] for row in rows]


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [one.ids for one in tokenizer.encode_batch(texts)]


def padded(ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    return tokens, mask


def train(model: nn.Module, ids: list[list[int]], labels: torch.Tensor, epochs: int, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(ids), generator=generator).tolist()
        for first in range(0, len(order), 32):
            rows = order[first : first + 32]
            tokens, mask = padded([ids[i] for i in rows])
            loss = nn.functional.cross_entropy(model(tokens, mask), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def predicted(model: nn.Module, ids: list[list[int]]) -> torch.Tensor:
    model.eval()
    found = []
    with torch.no_grad():
        for first in range(0, len(ids), 32):
            found.append(model(*padded(ids[first : first + 32])).softmax(dim=1))
    return torch.cat(found)


def accuracy(folder: Path, epochs: int, seed: int = 0) -> float:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(text_network.LONGEST)
    texts, about = rows_of(folder / "train.csv")
    classes = sorted(set(about))
    labels = torch.tensor([classes.index(one) for one in about])
    model = text_network.classifier(seed)
    train(model, encoded(tokenizer, texts), labels, epochs, seed)
    texts, about = rows_of(folder / "test.csv")
    shares = predicted(model, encoded(tokenizer, texts))
    found = [classes[i] for i in shares.argmax(dim=1).tolist()]
    with (folder / "by_hand.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["class", *classes])
        writer.writerows([name, *row.tolist()] for name, row in zip(found, shares, strict=True))
    return sum(a == b for a, b in zip(found, about, strict=True)) / len(about)
