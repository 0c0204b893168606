"""Samples in tar files as training data."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.data.shards.tar_members import BLOCK, members
from gradgraph.data.shuffling import displaced
from gradgraph.errors import DataError
from gradgraph.frontend import nn
from tests.kit.command_line import arrays
from tests.kit.npz import npz

gg.frontend.manual_seed(0)
STEP = gg.build(gg.frontend.export(nn.Linear(4, 3), {"x": ("N", 4)}), loss="cross_entropy")
DATA = arrays(50)  # x: [50, 4], target: [50]
X, TARGET = (next(s for s in group) for group in (STEP.manifest.inputs, STEP.manifest.targets))


def npy(array: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes], form: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def sample(i: int) -> dict[str, bytes]:
    return {f"{i:06}.npy": npy(DATA["x"][i]), f"{i:06}.cls": b"%d\n" % DATA["target"][i]}


def written(folder: Path, counts: tuple[int, ...] = (20, 3, 27), **options: Any) -> list[Path]:
    first, paths = 0, []
    for number, count in enumerate(counts):
        files = {name: content for i in range(first, first + count) for name, content in sample(i).items()}
        paths.append(write_tar(folder / f"train-{number:03}.tar", files, **options))
        first += count
    return paths


def trainer(seed: int = 1) -> gg.Trainer:
    return gg.Trainer(STEP, device="cpu", seed=seed)


SPECS = {X.name: X, TARGET.name: TARGET}


def loaded(data: Any, indices: Any, specs: Mapping[str, TensorSpec] = SPECS) -> dict[str, np.ndarray]:
    (batch,) = data.load(iter([indices]), specs, (0, 0))
    return dict(batch)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_that_were_written(tmp_path: Path, form: int) -> None:
    paths = written(tmp_path, form=form)
    for given in (paths, tmp_path, tmp_path / "train-*.tar", str(tmp_path / "train-{000..002}.tar")):
        data = gg.shards(given)
        assert len(data) == 50
        found = loaded(data, range(50))
        np.testing.assert_array_equal(found["x"], DATA["x"])
        np.testing.assert_array_equal(found["target"], DATA["target"])


def test_it_trains_evaluates_and_predicts(tmp_path: Path) -> None:
    written(tmp_path)
    first, second = trainer(), trainer()
    shuffled: Any = {"shuffle": False, "progress": False}
    assert dict(first.fit(tmp_path, 2, 8, validation=str(tmp_path), **shuffled)) == dict(
        second.fit(DATA, 2, 8, validation=DATA, **shuffled)
    )
    assert first.evaluate(gg.shards(tmp_path)) == second.evaluate(DATA)
    np.testing.assert_array_equal(first.predict(tmp_path, 8), second.predict(DATA["x"], 8))


@pytest.mark.parametrize("steps", [3, 9])
def test_a_resumed_run_goes_on_at_the_same_sample(tmp_path: Path, steps: int) -> None:
    data = gg.shards(written(tmp_path), buffer=10)
    whole, part = trainer(), trainer()
    whole.fit(data, 3, 8, progress=False)
    part.fit(data, 3, 8, max_steps=steps, checkpoint=tmp_path / "run.ckpt", progress=False)
    again = gg.Trainer.resume(STEP, tmp_path / "run.ckpt", device="cpu")
    again.fit(gg.shards(tmp_path, buffer=10), 3, 8, progress=False)
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], value, err_msg=name)


def test_a_shuffled_epoch_stays_near_its_shard(tmp_path: Path) -> None:
    data = gg.shards(written(tmp_path, (25, 25)), buffer=5)
    orders = [data.order(1, epoch, 2) for epoch in range(8)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 8
    assert {bool(order[:10].mean() > 25) for order in orders} == {True, False}  # either shard comes first
    moved = displaced(3, 0, 1000, 20) - np.arange(1000)
    assert 10 < np.abs(moved).max() <= 20


# --- what is what ---------------------------------------------------------------------------------------------


def spec(name: str, *shape: Any, target: bool = False, dtype: str = "float32") -> TensorSpec:
    return TargetSpec(name, dtype, shape) if target else TensorSpec(name, dtype, shape)


JSON = json.dumps({"label": 2, "box": [1, 2.5, 3], "name": "a cat"}).encode()


@pytest.mark.parametrize(
    ("files", "names", "specs", "expected"),
    [
        ({"left.npy": npy([1.0]), "right.npy": npy([2.0])}, {},
         [spec("left", "n", 1), spec("right", "n", 1)], {"left": [[1.0]], "right": [[2.0]]}),
        ({"npy": npy([1.0]), "json": JSON}, {"target": "json.label"},
         [spec("x", "n", 1), spec("target", "n", target=True)], {"x": [[1.0]], "target": [2]}),
        ({"npy": npy([1.0]), "json": JSON}, None,
         [spec("x", "n", 1), spec("label", "n", target=True), spec("box", "n", 3, target=True)],
         {"x": [[1.0]], "label": [2], "box": [[1.0, 2.5, 3.0]]}),
        ({"a.npy": npy([1.0]), "json": b"[3, 4]", "txt": b"further"}, {"x": "json"},
         [spec("x", "n", 2)], {"x": [[3, 4]]}),
    ],
)  # fmt: skip
def test_members_and_names(tmp_path: Path, files: Any, names: Any, specs: Any, expected: Any) -> None:
    tar = write_tar(tmp_path / "a.tar", {f"some.folder/0000.{end}": content for end, content in files.items()})
    found = loaded(gg.shards(tar, names), [0], {s.name: s for s in specs})
    assert {name: array.tolist() for name, array in found.items()} == expected


def test_images_and_augmentation(tmp_path: Path) -> None:
    image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    content = io.BytesIO()
    image.fromarray(pixels).save(content, "PNG")
    tar = write_tar(tmp_path / "a.tar", {"0.png": content.getvalue(), "0.cls": b"1"})
    specs = {"x": spec("x", "n", 3, 4, 5), "target": spec("target", "n", target=True)}
    found = loaded(gg.shards(tar, mean=(0.5, 0.5, 0.5)), [0], specs)["x"][0]
    resized = np.asarray(image.fromarray(pixels).resize((5, 4), image.Resampling.BILINEAR), np.float32)
    np.testing.assert_array_equal(found, (resized / np.float32(255) - np.float32(0.5)).transpose(2, 0, 1))
    flipped = loaded(gg.shards(tar, augment=lambda array, rng: array[::-1]), [0], specs)["x"][0]
    plain = loaded(gg.shards(tar), [0], specs)["x"][0]
    np.testing.assert_allclose(flipped, plain[:, ::-1], atol=1 / 255)


# --- hostile and broken files -----------------------------------------------------------------------------------


def with_link(path: Path, kind: bytes) -> None:
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("000000.npy")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)


def rewritten(path: Path, change: Any) -> None:
    """A shard with a header that ``change`` has made worse, with a checksum that fits."""
    content = bytearray(write_tar(path, sample(0)).read_bytes())
    change(content)
    content[148:156] = b"%06o\0 " % (sum(content[:148]) + 256 + sum(content[156:BLOCK]))
    path.write_bytes(content)


def sized(size: bytes) -> Any:
    def change(content: bytearray) -> None:
        content[124 : 124 + len(size)] = size

    return change


HOSTILE = {
    "a link": (lambda p: with_link(p, tarfile.SYMTYPE), "is a link or a device"),
    "a hard link": (lambda p: with_link(p, tarfile.LNKTYPE), "is a link or a device"),
    "a device": (lambda p: with_link(p, tarfile.CHRTYPE), "is a link or a device"),
    "a sparse file": (lambda p: rewritten(p, lambda c: c.__setitem__(156, ord("S"))), "is a link"),
    "cut": (lambda p: p.write_bytes(write_tar(p, sample(0)).read_bytes()[:600]), "ends within a member"),
    "cut between members": (lambda p: p.write_bytes(write_tar(p, sample(0)).read_bytes()[:1024]), "its end is missing"),
    "two in one": (lambda p: p.write_bytes(2 * write_tar(p, sample(0)).read_bytes()), "there are data after its end"),
    "a size beyond the end": (lambda p: rewritten(p, sized(b"77777777777")), "ends within a member"),
    "a huge size": (lambda p: rewritten(p, sized(b"\x80" + b"\xff" * 11)), "ends within a member"),
    "a negative size": (lambda p: rewritten(p, sized(b"\xff" * 12)), "a size is not a number"),
    "a wrong checksum": (lambda p: p.write_bytes(b"x" * 1024), "a header is missing or damaged"),
    "compressed": (lambda p: p.write_bytes(b"\x1f\x8b\x08" + bytes(1000)), "is compressed"),
    "a huge name": (lambda p: write_tar(p, {"a" * 100_000 + ".npy": b""}, tarfile.GNU_FORMAT), "a header has 100"),
    "empty": (lambda p: p.write_bytes(b""), "its end is missing"),
    "text": (lambda p: p.write_text("hello"), "its end is missing"),
    "twice": (lambda p: write_tar_twice(p), "contains '0.npy' twice"),
    "a pickle": (lambda p: write_tar(p, {"0.npy": npy(np.array([{}]))}), "pickled objects, which are never loaded"),
    "a lying array": (lambda p: write_tar(p, {"0.npy": npy(np.zeros(9))[:-8]}), "its size does not match its header"),
    "no array": (lambda p: write_tar(p, {"0.npy": b"hello"}), "cannot be read"),
    "deep JSON": (lambda p: write_tar(p, {"0.x.json": b"[" * 100_000}), "cannot be read"),
    "text in JSON": (lambda p: write_tar(p, {"0.x.json": b'"cat"'}), "it is not a number"),
    "ragged JSON": (lambda p: write_tar(p, {"0.x.json": b"[[1], [1, 2]]"}), "cannot be read"),
    "large JSON": (lambda p: write_tar(p, {"0.x.json": b" " * (1 << 25)}), "too many for a .json"),
    "a pickled kind": (lambda p: write_tar(p, {"0.x.pyd": b""}), "has an unsupported type"),
    "a gap": (lambda p: write_tar(p, {"0.npy": npy([1.0, 2.0]), "1.txt": b""}),
              "the sample of '1.txt' in .* has no member"),
}  # fmt: skip


def write_tar_twice(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("0.npy"))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_shard_is_a_sentence(tmp_path: Path, kind: str) -> None:
    make, says = HOSTILE[kind]
    make(tmp_path / "a.tar")
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=says):
            loaded(gg.shards(tmp_path / "a.tar"), [0], {"x": spec("x", "n", 2)})
        assert tracemalloc.get_traced_memory()[1] < 4 * (tmp_path / "a.tar").stat().st_size + 10_000_000
    finally:
        tracemalloc.stop()


def test_names_lead_nowhere(tmp_path: Path) -> None:
    """A name is what the members of a sample have in common, whatever it looks like; nothing is written."""
    names = ("../../etc/0.npy", "/etc/0.npy", "C:\\0.npy", "\x1b[31m0.npy", "a/__x/../0.npy")
    tar = write_tar(tmp_path / "a.tar", {name: npy([1.0, 2.0]) for name in names})
    assert loaded(gg.shards(tar), range(5), {"x": spec("x", "n", 2)})["x"].shape == (5, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_a_shard_that_is_changed_meanwhile_is_said(tmp_path: Path) -> None:
    (path,) = written(tmp_path, (5,))
    data = gg.shards(path)
    path.write_bytes(path.read_bytes() + bytes(512))
    with pytest.raises(DataError, match="was changed while being read"):
        loaded(data, [0])


def test_members_that_are_no_part_of_a_sample_are_passed_over(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"README": b"text", ".hidden": b"", "__meta__.json": b"{}", **sample(0)})
    assert len(gg.shards(tar)) == 1
    assert [m.name for m in members(tar)][:2] == ["README", ".hidden"]


def test_long_names_in_every_form(tmp_path: Path) -> None:
    name = "é" * 80 + "/" + "b" * 120 + ".npy"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        (member,) = members(write_tar(tmp_path / "a.tar", {name: b"content"}, form))
        assert member.name == name and member.size == 7


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: gg.shards(p / "nothing.tar"), "is not a tar file, or a folder"),
        (lambda p: gg.shards([]), "there are no shards"),
        (lambda p: gg.shards(p / "a-{000000..999999}.tar"), "more than 100,000 files"),
        (
            lambda p: gg.shards(p, {"x": "jpg"}).load(iter([[0]]), SPECS, ()).__next__(),
            "no member of the shards has the extension",
        ),
        (lambda p: gg.shards(p, buffer=0), "whole number above zero"),
        (
            lambda p: trainer().fit(gg.shards(p, {"target": "npy"}), progress=False),
            "is clearly the input or target 'x'",
        ),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, make: Any, says: str) -> None:
    written(tmp_path, (3,))
    with pytest.raises(gg.GradgraphError, match=says):
        make(tmp_path)


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    STEP.save("step")
    words = ["--data", "train-{000..002}.tar", "--batch-size", "8"]
    assert (
        run(["train", "step", *words, "--epochs", "1", "--checkpoint", "run.ckpt", "--validation", "train-001.tar"])
        == 0
    )
    assert run(["predict", "step", "--checkpoint", "run.ckpt", *words]) == 0
    expected = gg.Trainer.resume(STEP, "run.ckpt", device="cpu").predict(DATA["x"], 8)
    (found,) = npz("predictions.npz").values()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_any_change_of_bytes_is_an_error_or_nothing(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", {**sample(0), **sample(1)}, tarfile.PAX_FORMAT).read_bytes()
    random, specs = np.random.default_rng(0), {"x": spec("x", "n", 4), "target": spec("target", "n", target=True)}
    for _ in range(300):
        content = bytearray(whole)
        for place in random.integers(0, 3 * BLOCK, random.integers(1, 4)):
            content[place] = random.integers(0, 256)
        (tmp_path / "a.tar").write_bytes(content[: random.integers(1, len(content) + 1)])
        with contextlib.suppress(DataError):
            loaded(gg.shards(tmp_path / "a.tar"), [0, 0], specs)


@pytest.mark.parametrize("label", ["cls", "json.kind"])
def test_classes_with_names_are_matched(tmp_path: Path, label: str) -> None:
    """Later shards with fewer classes, or others, give the same numbers, or are refused."""
    animals = ["cow", "ant", "bee"]

    def shard(name: str, classes: list[str]) -> Path:
        text = {"cls": lambda one: one.encode(), "json.kind": lambda one: json.dumps({"kind": one}).encode()}[label]
        files = [(f"{i:03}.{end}", content) for i, one in enumerate(classes)
                 for end, content in (("npy", npy(DATA["x"][i])), (label.split(".")[0], text(one)))]  # fmt: skip
        return write_tar(tmp_path / f"{name}.tar", dict(files))

    names = {"target": label}
    first = trainer()
    first.fit(gg.shards(shard("all", [animals[i % 3] for i in range(12)]), names), 1, 4, progress=False)
    assert first.names.classes["target"] == ("ant", "bee", "cow")
    some = gg.shards(shard("some", ["cow", "bee", "cow"]), names)
    expected = first.evaluate({"x": DATA["x"][:3], "target": np.array([2, 1, 2])})
    assert first.evaluate(some) == expected
    with pytest.raises(DataError, match="the new class 'dog'"):
        first.evaluate(gg.shards(shard("new", ["cow", "dog"]), names))


@pytest.mark.parametrize("label", ["cls", "json.kind"])
def test_whole_numbers_that_no_class_can_have_are_names(tmp_path: Path, label: str) -> None:
    """As in tables: of three classes, 1 to 3 are names, also in later shards that lack one; 0 to 2 are numbers."""

    def shard(name: str, labels: list[int]) -> Any:
        end = label.split(".")[0]
        files = {f"{i:03}.npy": npy(DATA["x"][i]) for i in range(len(labels))}
        files |= {f"{i:03}.{end}": json.dumps(one if end == "cls" else {"kind": one}).encode()
                  for i, one in enumerate(labels)}  # fmt: skip
        files = dict(sorted(files.items()))
        return gg.shards(write_tar(tmp_path / f"{name}.tar", files), {"target": label})

    stars, numbered = trainer(), trainer()
    stars.fit(shard("stars", [1, 3, 2, 1]), 1, 4, progress=False)
    assert stars.names.classes["target"] == ("1", "2", "3")
    expected = stars.evaluate({"x": DATA["x"][:2], "target": np.array([2, 1])})
    assert stars.evaluate(shard("some", [2, 1])) == expected
    numbered.fit(shard("numbers", [0, 2, 1, 0]), 1, 4, progress=False)
    assert not numbered.names.classes
