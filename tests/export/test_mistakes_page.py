"""What a classifier gets wrong: counts, samples and pictures, whatever the source of data, and on a page."""

from __future__ import annotations

import base64
import html
import io
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.images.image_form import picture_of
from gradgraph.export import save_mistakes
from gradgraph.frontend import nn

Image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")

SHADES = {"dark": 40, "grey": 120, "light": 220}
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Fifteen images of three shades; one dark image lies among the light ones."""
    for i in range(15):
        name, shade = list(SHADES.items())[i % 3]
        path = tmp_path / "photos" / name / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 30 if i == 14 else shade + i, np.uint8)).save(path)
    return tmp_path / "photos"


def model() -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))
    return gg.frontend.export(head, {"x": ("N", 3, 8, 8)})


def trained(photos: Path, loss: str = "cross_entropy") -> gg.Trainer:
    trainer = gg.Trainer(gg.build(model(), loss=loss, optimizer=gg.optim.adam(0.05)), device="cpu")
    trainer.fit(gg.image_folder(photos, mean=MEAN, std=STD), 60, 15, progress=False)
    return trainer


def tar_of(photos: Path) -> Path:
    with tarfile.open(photos.parent / "photos.tar", "w") as archive:
        for i, file in enumerate(sorted(photos.glob("*/*.png"))):
            for end, content in (("png", file.read_bytes()), ("cls", file.parent.name.encode())):
                member = tarfile.TarInfo(f"{i:03}.{end}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return photos.parent / "photos.tar"


def arrays_of(photos: Path) -> dict[str, Any]:
    folder = gg.image_folder(photos, (8, 8), mean=MEAN, std=STD)
    return {"x": np.stack([folder[i][0] for i in range(len(folder))]), "target": folder.labels}


SOURCES = {"folder": lambda photos: photos, "shards": tar_of, "arrays": arrays_of}


@pytest.mark.sweep(0.007)
@pytest.mark.parametrize("loss", ["cross_entropy", "soft_cross_entropy"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_sample_is_counted_once(source: str, loss: str, photos: Path) -> None:
    """Against the outputs of ``predict``, in plain NumPy."""
    trainer, data = trained(photos, loss), SOURCES[source](photos)
    if loss == "soft_cross_entropy" and source == "arrays":
        data = {**data, "target": np.eye(3, dtype=np.float32)[data["target"]]}
    found = trainer.confusions(data, 4)
    scores, labels = trainer.predict(photos), arrays_of(photos)["target"]
    called = scores.argmax(1)
    expected = np.zeros((3, 3), int)
    for label, one in zip(labels, called, strict=True):
        expected[label, one] += 1
    np.testing.assert_array_equal(found.table.matrix, expected)
    assert found.table.names == ("dark", "grey", "light")
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    losses = -np.log(shares[np.arange(15), labels])
    assert [one.index for one in found.worst] == np.argsort(-losses, kind="stable").tolist()
    np.testing.assert_allclose([one.loss for one in found.worst], np.sort(losses)[::-1], rtol=1e-3, atol=1e-5)
    first = found.worst[0]
    assert (first.index, first.label, first.called) == (14, "light", "dark")
    assert (found.pairs[0].label, found.pairs[0].called, found.pairs[0].count) == ("light", "dark", 1)
    assert found.pairs[0].samples[0].index == 14
    pixels = np.asarray(Image.open(io.BytesIO(first.picture)).convert("RGB"))
    np.testing.assert_allclose(pixels, 30, atol=1)
    worst = trainer.worst(data, 3)
    assert [one.picture for one in worst] == [one.picture for one in found.worst[:3]]
    assert worst._repr_html_().count("<img") == 3
    assert first.file == (str(photos / "light" / "14.png") if source == "folder" else "")
    assert "called 'dark', and is 'light': 1" in str(found)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_picture_of_an_array_is_the_image(dtype: Any, layout: str, channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, channels), dtype=np.uint8)
    mean, std = tuple(0.1 * i for i in range(channels)), tuple(0.3 + 0.1 * i for i in range(channels))
    array = pixels if dtype == np.uint8 else ((pixels / np.float32(255) - mean) / std).astype(np.float32)
    made = picture_of(
        array if layout == "NHWC" else array.transpose(2, 0, 1), {"layout": layout, "mean": mean, "std": std}
    )
    found = np.asarray(Image.open(io.BytesIO(made)))
    np.testing.assert_array_equal(found, pixels[:, :, 0] if channels == 1 else pixels)


def pictures_in(page: str) -> list[bytes]:
    return [base64.b64decode(found) for found in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]


@pytest.mark.sweep(0)
def test_the_page_shows_them_and_is_one_file(photos: Path, tmp_path: Path) -> None:
    names = {"dark": "<script>alert(1)</script>", "light": 'a "quoted" & long name'}
    for old, new in names.items():
        (photos / old).rename(photos / new.replace("/", "∕"))
    trainer = trained(photos)
    found = save_mistakes(trainer, photos, tmp_path / "mistakes.html", title="held <out>", scores={"loss": 0.25})
    page = (tmp_path / "mistakes.html").read_text("utf-8")
    assert "<script" not in page and html.escape('a "quoted" & long name') in page and "held &lt;out&gt;" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    shown = [one.picture for pair in found.pairs for one in pair.samples] + [one.picture for one in found.worst]
    assert pictures_in(page) == shown
    assert len(re.findall("<figure", page)) == len(shown) and "0.25" in page
    assert page.count('<th scope="row">') == 3


SEVERAL = np.array([[1, 0, 1], [0, 1, 0], [1, 0, 0]], np.float32)
TOKENS = np.array([[0, -100], [1, 2], [2, 0]])
NAMED = gg.DataNames(classes={"target": ["a", "b", "c"]})
NO_CLASSES: dict[str, tuple[str, str, np.ndarray, gg.DataNames | None]] = {
    "numbers": ("rows", "mse", SEVERAL, None),
    "several labels": ("rows", "bce_with_logits", SEVERAL, None),
    "several labels with names": ("rows", "bce_with_logits", SEVERAL, NAMED),
    "a row without a label": ("rows", "bce_with_logits", np.eye(3, dtype=np.float32) * [1, 0, 1], NAMED),
    "tokens": ("tokens", "cross_entropy", TOKENS, None),
    "tokens with names": ("tokens", "cross_entropy", TOKENS, NAMED),
}


@pytest.mark.parametrize("case", NO_CLASSES)
def test_what_is_no_classifier_is_told(case: str, tmp_path: Path) -> None:
    """And what the sentence says to do there works."""
    kind, loss, target, names = NO_CLASSES[case]
    gg.frontend.manual_seed(0)
    sizes = ("N", 2) if kind == "rows" else ("N", "L", 2)
    chosen: Any = gg.losses.cross_entropy(axis=-1) if kind == "tokens" else loss
    trainer = gg.Trainer(gg.build(gg.frontend.export(nn.Linear(2, 3), {"x": sizes}), chosen), device="cpu")
    if names is not None:
        trainer.names = names
    data = {"x": np.ones((3, 2) if kind == "rows" else (3, 2, 2), np.float32), "target": target.astype(
        np.int64 if kind == "tokens" else np.float32)}  # fmt: skip
    says = r"confusions need one class per sample, and 'target' is not a target of this kind; print the samples with "
    with pytest.raises(gg.errors.DataError, match=says + r"the largest losses: trainer\.worst"):
        save_mistakes(trainer, data, tmp_path / "mistakes.html")
    assert not (tmp_path / "mistakes.html").exists()
    assert len(trainer.worst(data, 2)) == 2


@pytest.mark.parametrize("width", [(), (1,)])
def test_yes_or_no_without_names(width: tuple[int, ...]) -> None:
    """One number a sample is of two classes, 0 and 1."""
    gg.frontend.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 1), *([] if width else [nn.Flatten(0)]))
    trainer = gg.Trainer(gg.build(gg.frontend.export(layers, {"x": ("N", 2)}), "bce_with_logits"), device="cpu")
    x = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    target = (np.arange(9) % 2).astype(np.float32)
    table = trainer.confusions({"x": x, "target": target.reshape(9, *width)}).table
    called = np.asarray(trainer.predict(x)).reshape(9) > 0
    assert table.names == ("0", "1")
    assert table.matrix.tolist() == [[np.sum((target == a) & (called == b)) for b in (0, 1)] for a in (0, 1)]


def test_from_the_shell(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A run has the page in its folder, and ``evaluate`` writes the same; ``predict`` names files, classes, shares."""
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "model.onnx")
    words = ["--epochs", "2", "--loss", "cross_entropy"]
    assert run(["train", "model.onnx", "--data", "photos", "--validation", "photos", "--run", "one", *words]) == 0
    page = Path("one/mistakes.html").read_text("utf-8")
    assert len(pictures_in(page)) >= 15 and "`mistakes.html`" in Path("one/README.md").read_text("utf-8")
    assert run(["evaluate", "one", "--data", "photos", "--page", "again.html"]) == 0
    assert pictures_in(Path("again.html").read_text("utf-8")) == pictures_in(page)
    assert run(["predict", "one/trained.onnx", "--data", "photos", "-o", "out.csv"]) == 0
    head, *lines = Path("out.csv").read_text("utf-8").splitlines()
    assert head.split(",")[3:] == ["class", "probability[dark]", "probability[grey]", "probability[light]", "file"]
    assert len(lines) == 15 and lines[0].endswith(str(Path("photos/dark/00.png")))
    shares = [float(cell) for cell in lines[0].split(",")[4:7]]
    assert lines[0].split(",")[3] == ["dark", "grey", "light"][int(np.argmax(shares))] and abs(sum(shares) - 1) < 1e-5
