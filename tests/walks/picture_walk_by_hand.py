"""The same in torch alone: the dataset, the augmentations, the loop, the CSV and the page are the user's."""

import base64
import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SIZE, PADDING, DEGREES, ALPHA = 16, 2, 10.0, 0.2


class Pictures(torch.utils.data.Dataset):
    def __init__(self, folder: Path, augmented: bool) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [file for name in self.classes for file in sorted((folder / name).glob("*.png"))]
        self.labels = [self.classes.index(file.parent.name) for file in self.files]
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.files[i]).convert("L").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if self.augmented:
            padded = Image.new("L", (SIZE + 2 * PADDING,) * 2)
            padded.paste(image, (PADDING, PADDING))
            top, left = torch.randint(2 * PADDING + 1, (2,)).tolist()
            image = padded.crop((left, top, left + SIZE, top + SIZE))
            image = image.rotate(float(torch.empty(1).uniform_(-DEGREES, DEGREES)))
        return torch.from_numpy(np.asarray(image, np.float32)[None] / 255), self.labels[i]


def mixed(x: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    part = float(torch.distributions.Beta(ALPHA, ALPHA).sample())
    return part * x + (1 - part) * x.roll(1, 0), part * shares + (1 - part) * shares.roll(1, 0)


def accuracy(backbone: torch.nn.Sequential, data: Path, epochs: int) -> float:
    train, held_out = Pictures(data / "train", True), Pictures(data / "held_out", False)
    classes = len(train.classes)
    model = torch.nn.Sequential(*list(backbone)[:-1], torch.nn.Linear(backbone[-1].in_features, classes))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    loader = torch.utils.data.DataLoader(train, batch_size=32, shuffle=True)
    model.train()
    for _ in range(epochs):
        for x, labels in loader:
            x, shares = mixed(x, torch.nn.functional.one_hot(labels, classes).float())
            loss = torch.nn.functional.cross_entropy(model(x), shares)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for x, _ in torch.utils.data.DataLoader(held_out, batch_size=32):
            found.append(model(x).softmax(1))
    shares = torch.cat(found)
    write_csv(data / "by_hand.csv", held_out, shares)
    write_page(data / "by_hand.html", held_out, shares)
    return float((shares.argmax(1) == torch.tensor(held_out.labels)).float().mean())


def write_csv(path: Path, pictures: Pictures, shares: torch.Tensor) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["class", *(f"probability[{name}]" for name in pictures.classes), "file"])
        for row, name in zip(shares, pictures.files, strict=True):
            writer.writerow([pictures.classes[int(row.argmax())], *row.tolist(), name])


def write_page(path: Path, pictures: Pictures, shares: torch.Tensor) -> None:
    labels = torch.tensor(pictures.labels)
    losses = -shares[torch.arange(len(labels)), labels].log()
    matrix = np.zeros((len(pictures.classes),) * 2, int)
    np.add.at(matrix, (labels.numpy(), shares.argmax(1).numpy()), 1)
    rows = "".join(f"<tr><th>{name}</th>{''.join(f'<td>{n}</td>' for n in row)}</tr>"
                   for name, row in zip(pictures.classes, matrix, strict=True))  # fmt: skip
    worst = "".join(figure(pictures, shares, int(i)) for i in losses.argsort(descending=True)[:24])
    path.write_text(f"<table>{rows}</table>{worst}")


def figure(pictures: Pictures, shares: torch.Tensor, i: int) -> str:
    content: Any = io.BytesIO()
    Image.open(pictures.files[i]).save(content, "PNG")
    called = pictures.classes[int(shares[i].argmax())]
    source = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    return f'<figure><img src="{source}">{pictures.classes[pictures.labels[i]]} → {called}</figure>'
