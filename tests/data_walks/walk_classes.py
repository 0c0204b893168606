"""Walks with one set of rows in every form: later rows give the numbers of the classes of training, or are refused."""

from __future__ import annotations

import functools
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

import gradgraph as gg
from gradgraph.errors import UnmatchedError
from gradgraph.frontend import nn
from tests.data_walks import label_sources
from tests.data_walks.label_sources import Source, pictures, samples, tokens
from tests.data_walks.random_walk import Array, Walk

SIDE = 6
POOLS: dict[str, tuple[Any, ...]] = {
    "words": ("cat", "dog", "a,b", "Zürich", "no", "emu"),
    "stars": (1, 2, 3, 4, 5, 7),
    "codes": ("01", "1", "02", "007", "3"),
    "mixed": ("1", "2", "x", "10", "-"),
    "truth": (False, True),
}


class Rows:
    """Some rows: features, and the label of each as somebody wrote it."""

    def __init__(self, x: Array, labels: list[Any]) -> None:
        self.x, self.labels = x, labels

    @property
    def texts(self) -> list[str]:
        return [str(label) for label in self.labels]

    def frame(self) -> pd.DataFrame:
        made = pd.DataFrame({name: self.x[:, i] for i, name in enumerate("abc")})
        return made.assign(target=self.labels)

    def pictures(self, folder: Path) -> list[Path]:
        """A picture for each row, whose channels are the features."""
        from PIL import Image

        files = []
        for i, row in enumerate(self.x):
            path = folder / f"{i}.png"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.broadcast_to(_bytes(row), (SIDE, SIDE, 3)).copy()).save(path)
            files.append(path)
        return files


def _bytes(row: Array) -> Array:
    return np.clip(np.round((row + 3) * 40), 0, 255).astype(np.uint8)


# --- tables -------------------------------------------------------------------------------------------------------


def _file(suffix: str) -> Source:
    def write(rows: Rows, walk: Walk, name: str) -> Path:
        path, frame = walk.folder / f"{name}{suffix}", rows.frame()
        if suffix in (".csv", ".tsv"):
            frame.to_csv(path, index=False, sep="," if suffix == ".csv" else "\t")
        elif suffix == ".jsonl":
            frame.to_json(path, orient="records", lines=True, double_precision=15)
        else:
            frame.to_parquet(path)
        return path

    return write


def _arrow(rows: Rows, walk: Walk, name: str) -> Any:
    import pyarrow as pa

    table = pa.table({key: rows.frame()[key].to_numpy() for key in "abc"})
    return table.append_column("target", pa.array(rows.labels).dictionary_encode())


def _batches(rows: Rows, walk: Walk, name: str) -> Any:
    def each() -> Iterator[dict[str, Any]]:
        for i in range(0, len(rows.labels), 4):
            yield {"x": rows.x[i : i + 4], "target": rows.labels[i : i + 4]}

    return each


class _Dataset:
    """A dataset that has names for its numbers, in an order of its own."""

    def __init__(self, rows: Rows, walk: Walk) -> None:
        names = walk.some(sorted(set(rows.texts)), len(set(rows.texts)))
        self.rows = [{"x": x, "target": names.index(text)} for x, text in zip(rows.x, rows.texts, strict=True)]
        self.features = {"target": SimpleNamespace(names=names)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]


def _shards(rows: Rows, walk: Walk, name: str) -> Any:
    path = walk.folder / f"{name}.tar"
    with tarfile.open(path, "w") as tar:
        for i, (x, text) in enumerate(zip(rows.x, rows.texts, strict=True)):
            content = io.BytesIO()
            np.save(content, x)
            for end, data in (("npy", content.getvalue()), ("cls", text.encode())):
                member = tarfile.TarInfo(f"{i:06}.{end}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return gg.shards(path)


TABLES: dict[str, Source] = {
    "frame": lambda rows, walk, name: rows.frame(),
    "categories": lambda rows, walk, name: rows.frame().astype({"target": "category"}),
    **{suffix: _file(suffix) for suffix in (".csv", ".tsv", ".jsonl", ".parquet")},
    "Arrow": _arrow,
    "dict": lambda rows, walk, name: {"x": rows.x, "target": np.array(rows.labels)},
    "lists": lambda rows, walk, name: {"x": rows.x, "target": list(rows.labels)},
    "objects": lambda rows, walk, name: (rows.x, np.array(rows.labels, object)),
    "batches": _batches,
    "dataset": lambda rows, walk, name: _Dataset(rows, walk),
    "shards": _shards,
}


# --- pictures -----------------------------------------------------------------------------------------------------


def _folder(rows: Rows, walk: Walk, name: str) -> Any:
    files = rows.pictures(walk.folder / f"{name}.pictures")
    for file, text in zip(files, rows.texts, strict=True):
        (walk.folder / name / text).mkdir(parents=True, exist_ok=True)
        file.rename(walk.folder / name / text / file.name)
    return walk.folder / name


def _table(suffix: str) -> Source:
    def write(rows: Rows, walk: Walk, name: str) -> Any:
        files = [str(file) for file in rows.pictures(walk.folder / f"{name}{suffix[1:]}")]
        frame = pd.DataFrame({"path": files, "label": rows.labels})
        if not suffix:
            return gg.image_table(frame)
        path = walk.folder / f"{name}.table{suffix}"
        frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path)
        return gg.image_table(path)

    return write


def _arrays(rows: Rows, walk: Walk, name: str) -> Any:
    pixels = np.stack([_bytes(row) for row in rows.x]).astype(np.float32) / 255
    return {"x": np.broadcast_to(pixels[:, :, None, None], (len(pixels), 3, SIDE, SIDE)).copy(),
            "target": np.array(rows.labels)}  # fmt: skip


PICTURES: dict[str, Source] = {
    "folder": _folder,
    "image table": _table(""),
    "image table .csv": _table(".csv"),
    "image table .parquet": _table(".parquet"),
    "arrays": _arrays,
}


HAVE_INDICES = ("batches", "dataset", "texts numbered")  # whose whole numbers are indices, as long as nothing is known

# --- the walk -----------------------------------------------------------------------------------------------------


SETS: dict[str, dict[str, Source]] = {
    "tables": TABLES,
    "pictures": PICTURES,
    "texts": label_sources.TEXTS,
    "tags": label_sources.TAGS,
    "sounds": label_sources.SOUNDS,
    "maps": label_sources.MAPS,
    "objects": label_sources.OBJECTS,
}


@functools.cache
def _step(classes: int, kind: str) -> gg.Step:
    if kind in ("tables", "pictures"):
        gg.frontend.manual_seed(0)
        layers = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if kind == "pictures" else []
        shape = ("n", 3, SIDE, SIDE) if kind == "pictures" else ("n", 3)
        model: Any = gg.frontend.export(nn.Sequential(*layers, nn.Linear(3, classes)), {"x": shape})
        loss: Any = "cross_entropy"
    else:
        model, loss = label_sources.model_of(kind, classes)
    return gg.build(model, loss, gg.optim.adamw(0.1))


def _inputs(kind: str, rows: Rows, walk: Walk) -> dict[str, Array]:
    """What the model gets of each row, as arrays."""
    if kind == "tables":
        return {"x": rows.x}
    if kind == "pictures":
        return {"x": _arrays(rows, walk, "")["x"]}
    return {"texts": tokens, "tags": tokens, "sounds": samples, "maps": pictures, "objects": pictures}[kind](rows)


def _targets(kind: str, numbers: Array, of_background: int) -> dict[str, Array]:
    """What the model is compared with, where that is more than a number for each row."""
    if kind == "tags":  # of the first token, three words, the last one, and padding
        target = np.full((len(numbers), label_sources.TOKENS), -100)
        target[:, 1:4] = numbers[:, None]
        return {"target": target}
    if kind == "maps":
        target = np.full((len(numbers), label_sources.SIDE, label_sources.SIDE), of_background)
        target[:, :, : label_sources.SIDE // 2] = numbers[:, None, None]
        return {"target": target}
    return {"target": numbers[:, None], "target_boxes": np.tile(label_sources.BOX, (len(numbers), 1, 1))}


def _rows(walk: Walk, pool: list[Any], count: int) -> Rows:
    labels = [pool[i] for i in walk.rng.integers(0, len(pool), count)]
    labels[: len(pool)] = pool
    return Rows(walk.rng.normal(size=(count, 3)).astype(np.float32), labels)


def walk_classes(walk: Walk) -> None:
    """Train on rows in one form, and evaluate others in each: labels have the numbers that are found by hand."""
    of = walk.choose("classes", list(POOLS))
    pool = walk.some(POOLS[of], min(len(POOLS[of]), int(walk.rng.integers(2, 5))))
    kind = walk.choose("data", list(SETS))
    sources = SETS[kind]
    trainer = gg.Trainer(_step(len(pool), kind), device="cpu", seed=walk.seed)
    learns = [name for name in sources if of in ("words", "truth") or name not in HAVE_INDICES]
    first = walk.choose("trained on", learns)
    trainer.fit(sources[first](_rows(walk, pool, 20), walk, "train"), epochs=1, progress=False)
    names = trainer.names.classes["target"]
    walk.chosen.append(f"{names}")
    _check(walk, trainer, kind, names, _rows(walk, walk.some(pool, len(pool)), 14), "all")
    _check(walk, trainer, kind, names, _rows(walk, walk.some(pool, len(pool) - 1), 9), "fewer")
    new: dict[str, Any] = {"words": "yak", "stars": 99, "codes": "0001", "mixed": "yak", "truth": "maybe"}
    more = _rows(walk, [*pool[:2], new[of]], 9)
    more.labels = more.texts if of == "truth" else more.labels
    for name in walk.some(list(sources), min(4, len(sources))):
        walk.refused(f"a new class is refused in {name}", lambda name=name: trainer.evaluate(
            sources[name](more, walk, f"more of {name}")), str(new[of]))  # fmt: skip


def _check(walk: Walk, trainer: gg.Trainer, kind: str, names: Any, rows: Rows, which: str) -> None:
    """Confusions or losses of rows in each form are those found by hand, or all that differ are refused by name."""
    inputs = _inputs(kind, rows, walk)
    at = {name.casefold() if name.casefold() in ("true", "false") else name: i for i, name in enumerate(names)}
    texts = [text.casefold() if text.casefold() in ("true", "false") else text for text in rows.texts]
    numbers = np.array([at.get(text, -1) for text in texts])
    if counts := kind not in ("tags", "maps", "objects"):
        wanted = np.zeros((len(names), len(names)), np.int64)
        np.add.at(wanted, (numbers, np.asarray(trainer.predict(inputs)).argmax(1)), 1)
    else:
        loss = trainer.evaluate({**inputs, **_targets(kind, numbers, at.get("background", -1))})["loss"]
    for name, source in SETS[kind].items():
        data = source(rows, walk, f"{which} of {name}")
        try:
            if counts:
                found = trainer.confusions(data).table.matrix
                walk.same(f"{which} in {name}: confusions", found.tolist(), wanted.tolist())
            else:
                walk.close(f"{which} in {name}: the loss", trainer.evaluate(data)["loss"], loss)
        except UnmatchedError as error:
            walk.law(f"{which} in {name}: labels that are known are taken", False, error)
