"""Rows as texts, tagged words, sounds, class maps and boxes: the forms of data beside tables and folders of pictures.

``rows`` have features ``x`` [n, 3], a label each (``labels``), and the text of each label (``texts``).
"""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import gradgraph as gg
from gradgraph.frontend import Input, nn
from tests.data_walks.random_walk import Array, Walk
from tests.kit import tiny_bert

Source = Callable[[Any, Walk, str], Any]
SIDE, TOKENS, FIRST_WORD, WORDS = 16, 8, 9, [*tiny_bert.GOOD, *tiny_bert.BAD]  # CLS, three words, SEP, padding
RATE = 8000


# --- texts --------------------------------------------------------------------------------------------------------


def _words(rows: Any) -> list[list[str]]:
    return [[WORDS[i] for i in row] for row in np.clip(rows.x * 2 + 4, 0, 7).astype(int)]


def tokens(rows: Any) -> dict[str, Array]:
    """The tokens of the words of each row."""
    made = np.zeros((len(rows.x), TOKENS), np.int64)
    made[:, :5] = [[2, *(FIRST_WORD + WORDS.index(word) for word in words), 3] for words in _words(rows)]
    return {"input_ids": made}


def _tokenizer(walk: Walk) -> Path:
    path = walk.folder / "tokenizer.json"
    return path if path.exists() else tiny_bert.tokenizer(path)


def _saved(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    return path


def _text_table(form: str) -> Source:
    def made(rows: Any, walk: Walk, name: str) -> Any:
        columns: dict[str, list[Any]] = {"text": [" ".join(words) for words in _words(rows)], "target": rows.labels}
        frame = pd.DataFrame(columns)
        if form == "numbered":  # and the names of these numbers are said
            names = walk.some(sorted(set(rows.texts)), len(set(rows.texts)))
            frame["target"] = [names.index(text) for text in rows.texts]
            return gg.text.table(frame, _tokenizer(walk), text="text", label="target", classes=names)
        source: Any = columns if form == "dict" else frame
        source = _saved(frame, walk.folder / f"{name} texts{form}") if form.startswith(".") else source
        return gg.text.table(source, _tokenizer(walk), text="text", label="target")

    return made


TEXTS: dict[str, Source] = {
    f"texts {form}": _text_table(form) for form in ("frame", "dict", "numbered", ".csv", ".tsv", ".jsonl", ".parquet")
}


def _tags(form: str) -> Source:
    def made(rows: Any, walk: Walk, name: str) -> Any:
        columns = {"words": _words(rows), "tags": [[label] * 3 for label in rows.labels]}
        if form == ".conll":
            path = walk.folder / f"{name}.conll"
            blocks = ["".join(f"{word}\t{tag}\n" for word in words)
                      for words, tag in zip(columns["words"], rows.texts, strict=True)]  # fmt: skip
            path.write_text("\n".join(blocks), "utf-8")
            return gg.text.table(path, _tokenizer(walk))
        frame = pd.DataFrame(columns)
        source: Any = columns if form == "dict" else _saved(frame, walk.folder / f"{name} tags{form}")
        return gg.text.table(source, _tokenizer(walk), words="words", label="tags")

    return made


TAGS: dict[str, Source] = {f"tags {form}": _tags(form) for form in ("dict", ".conll", ".jsonl", ".parquet")}


# --- sounds -------------------------------------------------------------------------------------------------------


def samples(rows: Any) -> dict[str, Array]:
    """The samples of each row."""
    return {"x": np.clip(np.round(rows.x * 5000), -32768, 32767).astype(np.float32) / 32768}


def _waves(rows: Any, folder: Path) -> list[Path]:
    files, pcm = [], np.round(samples(rows)["x"] * 32768).astype("<i2")
    folder.mkdir(parents=True, exist_ok=True)
    for i, row in enumerate(pcm):
        files.append(folder / f"{i}.wav")
        with wave.open(str(files[-1]), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(row.tobytes())
    return files


def _sound_folder(rows: Any, walk: Walk, name: str) -> Any:
    files = _waves(rows, walk.folder / f"{name}.waves")
    for file, text in zip(files, rows.texts, strict=True):
        (walk.folder / f"{name} sounds" / text).mkdir(parents=True, exist_ok=True)
        file.rename(walk.folder / f"{name} sounds" / text / file.name)
    return gg.sound.folder(walk.folder / f"{name} sounds")


def _sound_table(suffix: str) -> Source:
    def made(rows: Any, walk: Walk, name: str) -> Any:
        files = [str(file) for file in _waves(rows, walk.folder / f"{name}{suffix}.waves")]
        frame = pd.DataFrame({"path": files, "label": rows.labels})
        return gg.sound.table(_saved(frame, walk.folder / f"{name} sounds{suffix}") if suffix else frame)

    return made


SOUNDS: dict[str, Source] = {
    "sounds in folders": _sound_folder,
    **{f"sounds in a table {suffix}": _sound_table(suffix) for suffix in ("", ".csv", ".jsonl", ".parquet")},
}


# --- objects ------------------------------------------------------------------------------------------------------


def pictures(rows: Any) -> dict[str, Array]:
    """A picture for each row, whose channels are its features."""
    levels = np.clip(np.round((rows.x + 3) * 40), 0, 255).astype(np.float32) / 255
    return {"x": np.broadcast_to(levels[:, :, None, None], (len(levels), 3, SIDE, SIDE)).copy()}


def _png(rows: Any, folder: Path) -> list[Path]:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{i:03}.png" for i in range(len(rows.x))]
    for file, levels in zip(files, np.round(pictures(rows)["x"] * 255).astype(np.uint8), strict=True):
        Image.fromarray(np.moveaxis(levels, 0, -1).copy()).save(file)
    return files


def _coco(rows: Any, walk: Walk, name: str) -> Any:
    """The object of each row is the left half of its picture; ids are random, so categories have any order."""
    folder = walk.folder / f"{name} coco"
    files = _png(rows, folder / "images")
    names = walk.some(sorted(set(rows.texts)), len(set(rows.texts)))
    ids = dict(zip(names, (int(n) for n in walk.rng.permutation(90)[: len(names)]), strict=True))
    half, data = SIDE // 2, dict[str, Any](categories=[{"id": ids[n], "name": n} for n in walk.some(names, len(names))])
    data["images"] = [{"id": i, "file_name": file.name, "width": SIDE, "height": SIDE} for i, file in enumerate(files)]
    outline = [[0, 0, half, 0, half, SIDE, 0, SIDE]]
    data["annotations"] = [
        {"id": i, "image_id": i, "category_id": ids[text], "iscrowd": 0, "area": half * SIDE,
         "bbox": [0, 0, half, SIDE], "segmentation": outline} for i, text in enumerate(rows.texts)
    ]  # fmt: skip
    (folder / "annotations.json").write_text(json.dumps(data), "utf-8")
    return gg.vision.coco(folder)


def _yolo(rows: Any, walk: Walk, name: str) -> Any:
    folder = walk.folder / f"{name} yolo"
    (folder / "labels").mkdir(parents=True)
    names = walk.some(sorted(set(rows.texts)), len(set(rows.texts)))
    for file, text in zip(_png(rows, folder / "images"), rows.texts, strict=True):
        (folder / "labels" / f"{file.stem}.txt").write_text(f"{names.index(text)} 0 0 0.5 0 0.5 1 0 1\n")
    if walk.rng.random() < 0.5:
        (folder / "classes.txt").write_text("\n".join(names), "utf-8")
    else:
        (folder / "data.yaml").write_text(f"train: images\nnames: {json.dumps(names, ensure_ascii=False)}\n", "utf-8")
    return gg.vision.yolo(folder)


def _masks(rows: Any, walk: Walk, name: str) -> Any:
    from PIL import Image

    folder, every = walk.folder / f"{name} masks", ["background", *sorted(set(rows.texts))]
    names = walk.some(every, len(every))
    (folder / "masks").mkdir(parents=True)
    for file, text in zip(_png(rows, folder / "images"), rows.texts, strict=True):
        mask = np.full((SIDE, SIDE), names.index("background"), np.uint8)
        mask[:, : SIDE // 2] = names.index(text)
        Image.fromarray(mask).save(folder / "masks" / file.name)
    return gg.vision.masks(folder, classes=names)


OBJECTS: dict[str, Source] = {"COCO": _coco, "YOLO": _yolo}
MAPS: dict[str, Source] = {**OBJECTS, "masks": _masks}
BOX = np.array([0.25, 0.5, 0.5, 1], np.float32)  # of each object: centre, width and height in shares


# --- models -------------------------------------------------------------------------------------------------------


class _Bag(nn.Module):
    def __init__(self, classes: int, of_words: bool) -> None:
        super().__init__()
        self.words, self.head, self.of_words = nn.Embedding(64, 4), nn.Linear(4, classes), of_words

    def forward(self, ids: Any) -> Any:
        found = self.words(ids)
        return self.head(found if self.of_words else found.mean(dim=1))


class _Detector(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, classes + 5, 8, stride=8)

    def forward(self, x: Any) -> Any:
        from gradgraph.frontend import functional as F

        made = self.head(x).flatten(2).transpose(1, 2)
        logits, sides, centre = F.split(made, [made.shape[2] - 5, 4, 1], 2)
        return logits, F.exp(sides), centre


def model_of(kind: str, classes: int) -> tuple[Any, Any]:
    """A model of a kind of data, and its loss."""
    gg.frontend.manual_seed(0)
    if kind in ("texts", "tags"):
        ids = {"input_ids": Input(("n", TOKENS), "int64")}
        of_words = kind == "tags"
        return gg.frontend.export(_Bag(classes, of_words), ids), gg.losses.cross_entropy(axis=-1 if of_words else 1)
    if kind == "sounds":
        return gg.frontend.export(nn.Linear(3, classes), {"x": ("n", 3)}), "cross_entropy"
    image = {"x": ("n", 3, SIDE, SIDE)}
    if kind == "maps":
        return gg.frontend.export(nn.Conv2d(3, classes + 1, 1), image), "cross_entropy"
    outputs = ["logits", "distances", "centerness"]
    loss = gg.losses.fcos(image_size=(SIDE, SIDE), strides=(8,))
    return gg.frontend.export(_Detector(classes), image, outputs=outputs), loss
