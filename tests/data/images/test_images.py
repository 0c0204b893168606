"""Folders of images as training data."""

from __future__ import annotations

import io
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.images import image_files, image_form, labelled_images
from gradgraph.data.prefetch import PREFETCHED, prefetched_samples
from gradgraph.data.record.specs import TensorSpec
from gradgraph.errors import DataError
from gradgraph.frontend import nn
from tests.kit.command_line import Cli, Ran
from tests.kit.npz import npz

pytestmark = pytest.mark.any_kernels

Image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    made = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return made[:, :, 0] if channels == 1 else made


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes, images of several sizes, formats and modes, also in folders below, and other files."""
    folder = tmp_path / "photos"
    sizes = {"dog/b.png": (9, 12), "dog/a.PNG": (30, 8), "cat/sub/x.bmp": (12, 12), "cat/z.png": (7, 5),
             "emu/1.jpg": (16, 20), "emu/2.webp": (11, 13), "emu/3.ppm": (12, 12)}  # fmt: skip
    for i, (name, (height, width)) in enumerate(sizes.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(i, height, width)).save(path)
    Image.fromarray(picture(9, 12, 12, 1)).save(folder / "cat" / "grey.png")
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / "labels.csv").write_text("no class")
    return folder


def classifier(size: str | int = 12, classes: int = 3) -> gg.Step:
    gg.frontend.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Sequential(model, nn.Linear(4, classes))
    shape = ("N", 3, size, size if isinstance(size, int) else "width")
    exported = gg.frontend.export(head, {"x": shape})
    return gg.build(exported, loss="cross_entropy", optimizer=gg.optim.adam(0.01), metrics=["accuracy"])


def trainer(step: gg.Step | None = None, seed: int = 1) -> gg.Trainer:
    return gg.Trainer(step or classifier(), device="cpu", seed=seed)


def as_torchvision_does(path: Path, size: tuple[int, int], shorter: int | None = None) -> np.ndarray:
    """Resize (and CenterCrop), ToTensor and Normalize, as torchvision.transforms computes them with Pillow."""
    image = Image.open(path).convert("RGB")
    height, width = size
    if shorter is None:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    else:
        w, h = image.size
        new = (shorter, int(shorter * h / w)) if w <= h else (int(shorter * w / h), shorter)
        image = image.resize(new, Image.Resampling.BILINEAR)
        before = [max(0, big - side) // 2 for big, side in ((width, image.width), (height, image.height))]
        around = Image.new("RGB", (max(width, image.width), max(height, image.height)))
        around.paste(image, tuple(before))
        top, left = round((around.height - height) / 2.0), round((around.width - width) / 2.0)
        image = around.crop((left, top, left + width, top + height))
    x = np.asarray(image).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    mean, std = (np.array(v, np.float32)[:, None, None] for v in (MEAN, STD))
    return (x - mean) / std


def test_classes_and_images_are_found_as_torchvision_finds_them(photos: Path) -> None:
    found = gg.image_folder(photos)
    assert found.classes == ["cat", "dog", "emu"] and len(found) == 8
    names = [
        "cat/grey.png",
        "cat/sub/x.bmp",
        "cat/z.png",
        "dog/a.PNG",
        "dog/b.png",
        "emu/1.jpg",
        "emu/2.webp",
        "emu/3.ppm",
    ]
    assert [file.relative_to(photos).as_posix() for file in found.files] == names
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("shorter", [None, 5, 9, 14, 15])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_arrays_are_those_of_torchvision(photos: Path, shorter: int | None, layout: Any) -> None:
    found = gg.image_folder(photos, (10, 12), mean=MEAN, std=STD, shorter=shorter, layout=layout)
    for i, file in enumerate(found.files):
        array, label = found[i]
        expected = as_torchvision_does(file, (10, 12), shorter)
        np.testing.assert_array_equal(array if layout == "NCHW" else array.transpose(2, 0, 1), expected)
        assert label == found.labels[i]


@pytest.mark.parametrize("mean", [None, (103.939, 116.779, 123.68)])
def test_bytes_in_the_order_of_opencv(photos: Path, mean: Any, tmp_path: Path) -> None:
    """BGR from 0 to 255 less a mean, as Caffe's networks take it, in training, a table, an export, and a thumbnail."""
    form: dict[str, Any] = {"size": (12, 12), "order": "BGR", "scale": 1.0} | ({"mean": mean} if mean else {})
    found = gg.image_folder(photos, **form)
    plain = np.rint(255 * np.stack([gg.image_folder(photos, (12, 12))[i][0] for i in range(8)]))
    expected = plain[:, ::-1] - np.array(mean or (0, 0, 0)).reshape(3, 1, 1)
    np.testing.assert_allclose(np.stack([found[i][0] for i in range(8)]), expected, atol=1e-4)
    t = trainer()
    t.fit(found, epochs=1, batch_size=4, progress=False)
    assert t.names.images["x"]["order"] == "BGR" and t.names.images["x"]["scale"] == 1.0
    np.testing.assert_allclose(t.predict(photos), t.predict(expected.astype(np.float32)), rtol=1e-4, atol=1e-4)
    shown = np.asarray(Image.open(io.BytesIO(image_form.picture_of(found[0][0], form))).convert("RGB"))
    np.testing.assert_array_equal(shown, plain[0].transpose(1, 2, 0).astype(np.uint8))
    pytest.importorskip("pandas", reason="tables are an extra: onnx-gradgraph[tables]")
    (tmp_path / "t.csv").write_text("path\n" + "\n".join(map(str, found.files)))
    table = gg.image_table(tmp_path / "t.csv", **form)
    np.testing.assert_array_equal(table[3][0], found[3][0])


def test_grey_images_and_bytes_have_no_order_and_no_scale(photos: Path) -> None:
    grey = TensorSpec("x", "float32", ("n", 1, 12, 12))
    for spec, form, says in (
        (grey, {"order": "BGR"}, "order has no effect, since the images for 'x' have a single channel"),
        (
            TensorSpec("x", "uint8", ("n", 3, 12, 12)),
            {"scale": 2.0},
            "mean, std and scale have no effect, since the input 'x' is uint8",
        ),
    ):
        with pytest.raises(DataError, match=says):
            next(gg.image_folder(photos, **form).load(iter([[0]]), {"x": spec}, ()))


@pytest.mark.parametrize("shorter", [13, 14, 9])
def test_the_shorter_side_goes_with_the_size_of_the_model(photos: Path, shorter: int) -> None:
    spec = {"x": TensorSpec("x", "float32", ("n", 3, 12, 12))}
    (batch,) = gg.image_folder(photos, shorter=shorter).load(iter([range(8)]), spec, ())
    given = gg.image_folder(photos, (12, 12), shorter=shorter)
    np.testing.assert_array_equal(batch["x"], np.stack([given[i][0] for i in range(8)]))


@pytest.mark.parametrize(
    ("shape", "dtype", "made"),
    [
        (("n", 3, 6, 8), "float32", (8, 3, 6, 8)),
        (("n", 6, 8, 3), "float32", (8, 6, 8, 3)),
        (("n", 1, 6, 8), "float32", (8, 1, 6, 8)),
        (("n", 6, 8, 3), "uint8", (8, 6, 8, 3)),
    ],
)
def test_the_model_says_what_nobody_else_does(photos: Path, shape: tuple, dtype: str, made: tuple) -> None:
    found = gg.image_folder(photos)
    (batch,) = found.load(iter([range(8)]), {"x": TensorSpec("x", dtype, shape)}, ())
    assert batch["x"].shape == made and batch["x"].dtype == dtype
    assert (batch["x"].max() <= 1) is np.bool_(dtype == "float32")


def test_it_trains_evaluates_and_predicts(photos: Path) -> None:
    first, second = trainer(), trainer()
    found = gg.image_folder(photos)
    arrays = {"x": np.stack([as_plain(f) for f in found.files]), "target": found.labels}
    assert dict(first.fit(photos, 2, 3, validation=found, progress=False)) == dict(
        second.fit(arrays, 2, 3, validation=arrays, progress=False)
    )
    assert first.evaluate(str(photos), 4) == second.evaluate(arrays, 4)
    np.testing.assert_array_equal(first.predict(found, 3), second.predict(arrays["x"], 3))
    assert not [t for t in threading.enumerate() if t.name.startswith("gradgraph-data")]


def test_prepared_images_keep_their_batches(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them at once might not fit into memory."""
    sizes, loaded = [], labelled_images.prefetched_samples

    def counted(batches: Any, *arguments: Any) -> Any:
        for batch in loaded(batches, *arguments):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(labelled_images, "prefetched_samples", counted)
    runs = trainer()
    prepared = runs.prepare(photos, 3)
    for use in (runs.evaluate, runs.predict, partial(runs.find_lr, steps=10)):
        use(prepared)
        assert max(sizes) == 3
    np.testing.assert_array_equal(runs.predict(prepared), runs.predict(photos, 3))


def as_plain(path: Path) -> np.ndarray:
    image = Image.open(path).convert("RGB").resize((12, 12), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1).astype(np.float32) / np.float32(255)


def flipped_and_cropped(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    top, left = rng.integers(0, 3, 2)
    image = image[top : top + 5, left : left + 4]
    return image[:, ::-1] if rng.random() < 0.5 else image


def test_augmentation_resumes_to_the_bit(photos: Path, tmp_path: Path) -> None:
    step = classifier()
    data = gg.image_folder(photos, augment=flipped_and_cropped, threads=3)
    whole = trainer(step)
    whole.fit(data, 3, 3, progress=False)
    part = trainer(step)
    part.fit(data, 3, 3, max_steps=4, checkpoint=tmp_path / "run.ckpt", progress=False)
    again = gg.Trainer.resume(step, tmp_path / "run.ckpt", device="cpu")
    again.fit(data, 3, 3, progress=False)
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], value, err_msg=name)
    other = trainer(step, seed=2)
    other.fit(data, 3, 3, progress=False)
    assert any(not np.array_equal(v, other.state_dict()[n]) for n, v in whole.state_dict().items())


def test_an_epoch_has_random_numbers_of_its_own(photos: Path) -> None:
    data, specs = (
        gg.image_folder(photos, augment=flipped_and_cropped),
        {"x": TensorSpec("x", "float32", ("n", 3, 4, 4))},
    )
    first, second, again = (next(data.load(iter([[4]]), specs, (1, epoch)))["x"] for epoch in (0, 1, 0))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)


def huge(path: Path) -> None:
    Image.new("L", (9000, 8000)).save(path)


def cut(path: Path) -> None:
    Image.fromarray(picture(0, 40, 40)).save(path)
    path.write_bytes(path.read_bytes()[:200])


BROKEN = {
    "cut": (cut, "is not a readable image"),
    "text": (lambda path: path.write_text("no image"), "is not a readable image"),
    "empty": (lambda path: path.write_bytes(b""), "is not a readable image"),
    "huge": (huge, "has 9000 × 8000 pixels, more than 64,000,000; scale it down"),
}


@pytest.mark.sweep(0.38)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_is_named(photos: Path, kind: str) -> None:
    spoil, says = BROKEN[kind]
    spoil(photos / "dog" / "c.png")
    with pytest.raises(DataError, match=r"dog/c\.png' " + says):
        trainer().fit(photos, 1, 3, progress=False)
    assert not [t for t in threading.enumerate() if t.name.startswith("gradgraph-data")]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: gg.image_folder(p / "nothing"), "cannot be read"),
        (lambda p: gg.image_folder(p, size=(0, 3)), "it should be a height and a width above zero"),
        (lambda p: gg.image_folder(p, layout="CHW"), 'it should be "NCHW" or "NHWC"'),
        (lambda p: trainer(classifier("height")).fit(gg.image_folder(p, shorter=8), progress=False),
         "requires a crop size, but the size of 'x' is dynamic"),
        (lambda p: gg.image_folder(p, order="GBR"), 'it should be "RGB" or "BGR"'),
        (lambda p: gg.image_folder(p, scale=0), "it should be a number above zero"),
        (lambda p: trainer().fit(gg.image_folder(p, size=(8, 8)), progress=False), "do not match"),
        (lambda p: trainer().fit(gg.image_folder(p, mean=(0.5,)), progress=False), "mean has 1 number,"),
        (lambda p: trainer(classifier("height")).fit(p, progress=False), "resize all images, as image_folder"),
        (lambda p: trainer(classifier(classes=2)).fit(p, progress=False), "labels range from 0 to 1"),
        (lambda p: trainer().fit(p / "dog", progress=False), "has no subfolders of classes"),
        (lambda p: trainer().fit(gg.image_folder(p, augment=lambda image, rng: image / 255), progress=False),
         "augment returned float64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(photos: Path, make: Any, says: str) -> None:
    with pytest.raises(gg.GradgraphError, match=says):
        make(photos)


def test_an_empty_class_is_named(photos: Path) -> None:
    (photos / "fox").mkdir()
    with pytest.raises(DataError, match=r"the folders 'fox' of .* contain no images"):
        gg.image_folder(photos)


def test_without_pillow_the_package_is_named(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(DataError, match="pip install pillow"):
        trainer().fit(photos, progress=False)


def test_threads_are_no_more_than_some_batches_ahead() -> None:
    begun, lock = [], threading.Lock()

    def load(i: int) -> int:
        with lock:
            begun.append(i)
        return i

    loaded = prefetched_samples(iter([range(i, i + 5) for i in range(0, 100, 5)]), load, 4)
    for done, batch in enumerate(loaded, start=1):
        assert batch == [*range(5 * done - 5, 5 * done)]
        assert len(begun) <= 5 * (done + PREFETCHED)


def test_large_images_are_decoded_one_at_a_time(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "LARGE_PIXELS", 100)
    with image_files._large:
        loading = threading.Thread(target=lambda: gg.image_folder(photos)[3])
        loading.start()
        loading.join(0.1)
        assert loading.is_alive()
    loading.join(5)
    assert not loading.is_alive()


# --- the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def cli(photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(photos.parent)
    gg.frontend.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    onnx.save(gg.frontend.export(head, {"x": ("N", 3, 12, 12)}), "model.onnx")

    def call(*words: str) -> Ran:
        capsys.readouterr()
        code = run(words)
        return Ran(code, *capsys.readouterr())

    return call


def test_from_the_command_line(cli: Cli, photos: Path) -> None:
    words = ["--image", "mean=[0.5,0.5,0.5]", "--image", "std=[0.2,0.2,0.2]"]
    ran = cli("train", "model.onnx", "--data", "photos", "--validation", "photos", "--epochs", "2", "--batch-size", "3",
              *words, "--export", "trained.onnx", "--schedule", "cosine")  # fmt: skip
    assert ran.code == 0, ran.err
    ran = cli("predict", "trained.onnx", "--data", "photos", *words, "--batch-size", "3")
    assert ran.code == 0, ran.err
    data = gg.image_folder(photos, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    expected = gg.Trainer(gg.build("trained.onnx", loss="cross_entropy"), device="cpu").predict(data, 3)
    np.testing.assert_allclose(npz("predictions.npz")["output"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep(0)
def test_from_a_recipe(cli: Cli, photos: Path) -> None:
    text = '[model]\npath = "model.onnx"\n[data]\ntrain = "photos"\nbatch_size = 3\nimage = {mean = [0.5, 0.5, 0.5]}\n'
    Path("recipe.toml").write_text(text + "[output]\nexport = 'a.onnx'\n")
    assert cli("train", "recipe.toml").code == 0
    ran = cli("train", "recipe.toml", "--image", "std=[1,1,1]", "--print-config")
    image = "[data.image]\nmean = [0.5, 0.5, 0.5]\nstd = [1, 1, 1]\n"
    assert image in ran.out, ran.out + ran.err
    printed = cli("train", "recipe.toml", "--print-config").out
    Path("printed.toml").write_text(printed)
    assert cli("train", "printed.toml", "--force", "--export", "b.onnx").code == 0
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data", "photos", "--image", "sise=[8,8]"], "--image has no argument 'sise'; did you mean 'size'?"),
        (["--data", "photos", "--image", "size=8"], "it should be a height and a width above zero"),
        (["--data", "model.onnx", "--image", "size=[8,8]"], "contains no images"),
    ],
)
def test_a_slip_on_the_command_line(cli: Cli, words: list[str], says: str) -> None:
    ran = cli("train", "model.onnx", *words)
    assert ran.code == 1 and says in ran.err, ran.err
