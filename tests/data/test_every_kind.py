"""Every kind of data keeps the same promises to a step; a new kind is one more row of KINDS."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.chat import ChatBatches, Tokens
from gradgraph.chat.preferences import Pair, PairBatches
from gradgraph.data.arrays.batch import BatchChecker
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.data.sources.sources import Order, Source, as_source
from gradgraph.errors import DataError, UnmatchedError
from gradgraph.frontend import export, manual_seed, nn
from tests.kit import tiny_bert, wav_writing

CLASSES = ("ant", "bee", "cat")
LABELS = ["cat", "ant", "bee", "cat", "ant", "cat", "bee"]
X, CLASS = TensorSpec("x", "float32", ("n", 4)), TargetSpec("target", "int64", ("n",), classes=3, ignore_index=-100)
IMAGE, SOUND = TensorSpec("x", "float32", ("n", 3, 4, 4)), TensorSpec("x", "float32", ("n", 8))
TOKENS = [TensorSpec(name, "int64", ("n", "t")) for name in tiny_bert.NAMES]
OBJECTS = [
    TargetSpec("target", "int64", ("n", "objects"), classes=3, ignore_index=-1, padded=True),
    TargetSpec("boxes", "float32", ("n", "objects", 4)),
]
Labels = Sequence[str]


def x_of(labels: Labels) -> np.ndarray:
    """Rows that tell samples and classes apart."""
    return np.array([[i, ord(label[0]), 0.5, -i] for i, label in enumerate(labels)], np.float32).reshape(-1, 4)


def columns(labels: Labels) -> dict[str, Any]:
    names = [f"feature{i}" for i in range(4)]
    return {**dict(zip(names, x_of(labels).T, strict=True)), "target": list(labels)}


def classes_of(labels: Labels) -> list[str]:
    """All classes, or those that occur if one of them is new."""
    return sorted({*labels}) if {*labels} - {*CLASSES} else list(CLASSES)


class Map:
    """A dataset in the way of PyTorch: class numbers, and the names of the classes."""

    def __init__(self, labels: Labels) -> None:
        self.classes = classes_of(labels)
        self.x, self.labels = x_of(labels), [self.classes.index(label) for label in labels]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "target": self.labels[i], "id": f"sample {i}"}


class Lists(Map):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i][: 2 + i % 3].tolist(), "target": self.labels[i]}


def frame(labels: Labels) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns(labels))


def saved(folder: Path, labels: Labels) -> Path:
    frame(labels).to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


def arrays_in(folder: Path, labels: Labels) -> Path:
    for name, array in (("x", x_of(labels)), ("target", np.array(labels, "U3"))):
        np.save(folder / f"{name}.npy", array)
    return folder


def picture(i: int, side: int = 6) -> Any:
    image = pytest.importorskip("PIL.Image")
    return image.fromarray(np.random.default_rng(i).integers(0, 256, (side, side, 3), dtype=np.uint8))


def draw(path: Path, i: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(i).save(path)


def ring(path: Path, i: int) -> None:
    wav_writing.write_wav(path, np.linspace(-0.5, (i + 1) / 20, 6 + i))


def in_folders(write: Callable[[Path, int], None], suffix: str) -> Callable[[Path, Labels], Path]:
    def make(folder: Path, labels: Labels) -> Path:
        for i, label in enumerate(labels):
            write(folder / label / f"{i}{suffix}", i)
        return folder

    return make


def in_table(write: Callable[[Path, int], None], suffix: str) -> Callable[[Path, Labels], Path]:
    def make(folder: Path, labels: Labels) -> Path:
        for i in range(len(labels)):
            write(folder / f"{i}{suffix}", i)
        rows = "".join(f"{i}{suffix},{label}\n" for i, label in enumerate(labels))
        (folder / "t.csv").write_text(f"path,label\n{rows}")
        pytest.importorskip("pandas")
        return folder / "t.csv"

    return make


def listing(table: Path) -> Any:
    """A data frame of absolute paths, whose kind its first row tells."""
    read = pytest.importorskip("pandas").read_csv(table)
    return read.assign(path=[str(table.parent / name) for name in read.path])


def flipped(folder: Path, labels: Labels) -> Any:
    return gg.image_folder(in_folders(draw, ".png")(folder, labels), augment="flip")


def tar(folder: Path, labels: Labels) -> Path:
    with tarfile.open(folder / "a.tar", "w") as written:
        for i, label in enumerate(labels):
            content = io.BytesIO()
            picture(i).save(content, "PNG")
            for name, part in ((f"{i}.png", content.getvalue()), (f"{i}.cls", label.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(part)
                written.addfile(info, io.BytesIO(part))
    return folder


def tokenizer(folder: Path) -> Path:
    pytest.importorskip("tokenizers")
    return tiny_bert.tokenizer(folder / "tokenizer.json")


def texts(folder: Path, labels: Labels) -> Any:
    table = {"text": [" ".join(["fox", "owl", "kind"][: 1 + i % 3]) for i in range(len(labels))], "target": [*labels]}
    return gg.text.table(table, tokenizer(folder))


def words(folder: Path, labels: Labels) -> Any:
    (folder / "a.conll").write_text("\n".join(f"fox {label}\nowl {label}\n" for label in labels))
    return gg.text.table(folder / "a.conll", tokenizer(folder))


def coco(folder: Path, labels: Labels) -> Any:
    names = classes_of(labels)
    for i in range(len(labels)):
        draw(folder / f"{i}.png", i)
    (folder / "annotations.json").write_text(json.dumps({
        "categories": [{"id": i, "name": name} for i, name in enumerate(names)],
        "images": [{"id": i, "file_name": f"{i}.png"} for i in range(len(labels))],
        "annotations": [{"id": 9 * i + k, "image_id": i, "category_id": names.index(label), "bbox": [k, 1, 2, 2]}
                        for i, label in enumerate(labels) for k in range(1 + i % 2)],
    }))  # fmt: skip
    return folder


def yolo(folder: Path, labels: Labels) -> Any:
    names = classes_of(labels)
    (folder / "labels").mkdir()
    (folder / "images").mkdir()
    (folder / "classes.txt").write_text("\n".join(names))
    for i, label in enumerate(labels):
        draw(folder / "images" / f"{i}.png", i)
        (folder / "labels" / f"{i}.txt").write_text(f"{names.index(label)} 0.5 0.5 0.25 0.5\n" * (1 + i % 2))
    return folder


def masks(folder: Path, labels: Labels) -> Any:
    names = classes_of(labels)
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    (folder / "classes.txt").write_text("\n".join(names))
    for i, label in enumerate(labels):
        draw(folder / "images" / f"{i}.png", i)
        whole = np.full((6, 6), names.index(label), np.uint8)
        pytest.importorskip("PIL.Image").fromarray(whole).save(folder / "masks" / f"{i}.png")
    return folder


def tokens(i: int) -> Tokens:
    return Tokens(np.arange(2, 4 + i % 3), np.array([False] + [True] * (1 + i % 3)))


def pairs(labels: Labels) -> PairBatches:
    return PairBatches([Pair(tokens(i), tokens(i + 1)) for i in range(len(labels))])


def sparse(labels: Labels) -> Any:
    matrices = pytest.importorskip("scipy.sparse")
    from gradgraph.sklearn.sparse_rows import SparseRows

    numbers = np.array([CLASSES.index(label) for label in labels], np.int64)
    return SparseRows({"x": matrices.csr_matrix(x_of(labels)), "target": numbers})


def batches(labels: Labels) -> list[dict[str, Any]]:
    data = Map(labels)
    numbers = np.array(data.labels)
    return [{"x": data.x[i : i + 3], "target": numbers[i : i + 3]} for i in range(0, len(labels), 3)]


@dataclass(frozen=True)
class Kind:
    """A kind of data.

    Attributes:
        make: writes samples with these labels in a folder, and returns what users pass.
        specs: the inputs and targets of a step that reads them.
        named: whether the data name their classes.
        streamed: whether the user forms the batches.
    """

    make: Callable[[Path, Labels], Any]
    specs: Sequence[TensorSpec] = (X, CLASS)
    named: bool = True
    streamed: bool = False


PICTURES = (IMAGE, CLASS)
RAGGED = (TensorSpec("x", "float32", ("n", "t")), CLASS)
CHAT = [TensorSpec("input_ids", "int64", ("n", "t")), TargetSpec("labels", "int64", ("n", "t"), ignore_index=-100)]
PAIRS = [TensorSpec(name, "int64", ("n", 2, "t")) for name in ("input_ids", "labels")]
KINDS = {
    "arrays": Kind(lambda folder, labels: {"x": x_of(labels), "target": np.array(labels, "U3")}),
    "lists": Kind(lambda folder, labels: {"x": x_of(labels), "target": list(labels)}),
    "a tuple": Kind(lambda folder, labels: (x_of(labels), np.array(labels, "U3"))),
    "arrays in a folder": Kind(arrays_in),
    "a data frame": Kind(lambda folder, labels: frame(labels)),
    "a table": Kind(saved),
    "a dataset": Kind(lambda folder, labels: Map(labels)),
    "padded": Kind(lambda folder, labels: gg.Padded(Lists(labels), {"x": 0}), RAGGED),
    "images in folders": Kind(in_folders(draw, ".png"), PICTURES),
    "augmented images": Kind(flipped, PICTURES),
    "images in a table": Kind(in_table(draw, ".png"), PICTURES),
    "sounds in folders": Kind(in_folders(ring, ".wav"), (SOUND, CLASS)),
    "sounds in a table": Kind(in_table(ring, ".wav"), (SOUND, CLASS)),
    "sounds in a data frame": Kind(lambda f, labels: listing(in_table(ring, ".wav")(f, labels)), (SOUND, CLASS)),
    "shards": Kind(tar, PICTURES),
    "texts": Kind(texts, [*TOKENS, CLASS]),
    "words": Kind(words, [*TOKENS, TargetSpec("target", "int64", ("n", "t"), classes=3, ignore_index=-100)]),
    "coco": Kind(coco, [IMAGE, *OBJECTS]),
    "yolo": Kind(yolo, [IMAGE, *OBJECTS]),
    "masks": Kind(masks, [IMAGE, TargetSpec("target", "int64", ("n", 4, 4), classes=3, ignore_index=-100)]),
    "sparse rows": Kind(lambda folder, labels: sparse(labels), named=False),
    "chats": Kind(lambda folder, labels: ChatBatches([tokens(i) for i in range(len(labels))], 8), CHAT, named=False),
    "pairs": Kind(lambda folder, labels: pairs(labels), PAIRS, named=False),
    "batches": Kind(lambda folder, labels: batches(labels), named=False, streamed=True),
    "a function": Kind(lambda folder, labels: lambda: iter(batches(labels)), named=False, streamed=True),
}  # fmt: skip
INDEXED = [name for name, kind in KINDS.items() if not kind.streamed]
NAMED = [name for name, kind in KINDS.items() if kind.named]


def opened(name: str, folder: Path, labels: Labels = LABELS, known: DataNames = NO_NAMES, **order: Any) -> Source:
    kind = KINDS[name]
    folder.mkdir(parents=True, exist_ok=True)
    checker = BatchChecker(kind.specs, known=lambda: known)
    return as_source(kind.make(folder, labels), checker, Order(**{"batch_size": 3, **order}), known)


def read(name: str, source: Source, epoch: int = 0, start: int = 0) -> list[dict[str, np.ndarray]]:
    """Batches as a step gets them."""
    checker = BatchChecker(KINDS[name].specs, known=lambda: source.names)
    return [{n: np.array(a) for n, a in checker(b).items()} for b in source.batches(epoch, start)]


def assert_row(batch: dict[str, np.ndarray], row: int, single: dict[str, np.ndarray]) -> None:
    """A row of a batch is the sample alone, filled up to the size of the batch with one value."""
    for name, array in single.items():
        within = tuple(map(slice, array[0].shape))
        rest = np.ones(batch[name][row].shape, bool)
        rest[within] = False
        np.testing.assert_array_equal(batch[name][row][within], array[0], err_msg=name)
        assert len(np.unique(batch[name][row][rest])) <= 1


def keys(found: Sequence[dict[str, np.ndarray]]) -> list[tuple[bytes, ...]]:
    return [tuple(batch[name].tobytes() for name in sorted(batch)) for batch in found]


@pytest.mark.parametrize("name", KINDS)
def test_an_epoch_has_every_sample_once(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    found = read(name, source)
    assert [{*batch} for batch in found] == [{spec.name for spec in KINDS[name].specs}] * 3
    assert [len(next(iter(batch.values()))) for batch in found] == [3, 3, 1]
    assert source.rows == (None if KINDS[name].streamed else 7)
    assert source.batches_per_epoch in (None, 3)
    if not KINDS[name].streamed:
        cut = opened(name, tmp_path / "cut", drop_last=True)
        np.testing.assert_equal(read(name, cut), found[:2])


@pytest.mark.parametrize("name", INDEXED)
def test_batches_are_single_samples_stacked(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path, augments=False)
    found = read(name, source)
    singles = read(name, opened(name, tmp_path / "singles", batch_size=1, augments=False))
    for i, single in enumerate(singles):
        assert_row(found[i // 3], i % 3, single)
    for rows, batch in zip(([4, 1], [6]), source.at([[4, 1], [6]]), strict=True):
        for row, i in enumerate(rows):
            assert_row({n: np.array(batch[n]) for n in found[0]}, row, singles[i])


@pytest.mark.parametrize("name", INDEXED)
def test_a_shuffled_epoch_has_the_same_samples_in_an_order_of_its_own(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path, batch_size=1, shuffle=True, augments=False)
    in_order = keys(read(name, opened(name, tmp_path / "in order", batch_size=1, augments=False)))
    first, second, again = (keys(read(name, source, epoch)) for epoch in (0, 1, 0))
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert first == again != second


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_goes_on_in_an_epoch_reads_its_rest(name: str, shuffle: bool, tmp_path: Path) -> None:
    whole = read(name, opened(name, tmp_path, shuffle=shuffle), 1)
    for start in (1, 2):
        again = opened(name, tmp_path / f"{start}", shuffle=shuffle)
        np.testing.assert_equal(read(name, again, 1, start), whole[start:])


@pytest.fixture(scope="module")
def step() -> gg.Step:
    manual_seed(0)
    return gg.build(export(nn.Linear(4, 3), {"x": ("n", 4)}), "cross_entropy", gg.optim.adamw(1e-2))


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.specs == (X, CLASS)])
def test_a_resumed_run_ends_as_one_without_a_break(name: str, step: gg.Step, tmp_path: Path) -> None:
    data, options = KINDS[name].make(tmp_path, LABELS), {"epochs": 3, "batch_size": 3, "progress": False}
    whole, part = (gg.Trainer(step, device="cpu", seed=1) for _ in range(2))
    whole.fit(data, **options)
    part.fit(data, **options, max_steps=5, checkpoint=tmp_path / "run.ckpt")
    again = gg.Trainer.resume(step, tmp_path / "run.ckpt", device="cpu")
    again.fit(data, **options)
    np.testing.assert_equal(again.state_dict(), whole.state_dict())


@pytest.mark.parametrize("name", NAMED)
def test_classes_keep_the_numbers_of_training(name: str, tmp_path: Path) -> None:
    known = opened(name, tmp_path).names
    assert known.classes == {"target": CLASSES}
    evaluated = read(name, opened(name, tmp_path / "one", ["cat", "cat"], known))
    targets = np.concatenate([batch["target"].ravel() for batch in evaluated])
    assert {*targets.tolist()} - {-1, -100} == {2}
    with pytest.raises(UnmatchedError, match="new class 'dog'"):
        opened(name, tmp_path / "new", ["dog", "cat"], known)


@pytest.mark.parametrize("name", KINDS)
def test_empty_data_are_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"empty|contains? no|has no|no image") as caught:
        list(opened(name, tmp_path, []).batches(0))
    assert "\n" not in str(caught.value)
