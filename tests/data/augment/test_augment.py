"""Augmentations of images: each against its formula on drawn numbers, and all of the table in runs that are resumed."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.data.augment.augmentation import AUGMENTATIONS, Augmentations
from gradgraph.data.augment.geometry import inverse_matrix
from gradgraph.data.augment.policies import CHANGES
from gradgraph.frontend import nn
from tests.kit.command_line import Cli, Ran

Image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")


class Drawn:
    """A generator whose numbers are written down, by the method that gives them."""

    def __init__(self, **numbers: Sequence[Any]) -> None:
        self._numbers = {name: list(given) for name, given in numbers.items()}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._numbers[name].pop(0)


def picture(height: int = 20, width: int = 24, channels: int = 3, seed: int = 0) -> Any:
    made = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(made[:, :, 0] if channels == 1 else made)


def changed(one: gg.augment.Augmentation, image: Any, rng: Any, size: tuple[int, int] = (8, 10)) -> np.ndarray:
    resize = lambda im: im.resize((size[1], size[0]))  # noqa: E731
    return np.asarray(Augmentations([one]).of_image(image, rng, size, resize))


# --- formulas -----------------------------------------------------------------------------------------------------


def test_flips_mirror() -> None:
    image, whole = picture(8, 10), (8, 10)
    pixels = np.asarray(image)
    for make, mirrored in ((gg.augment.flip, pixels[:, ::-1]), (gg.augment.vertical_flip, pixels[::-1])):
        np.testing.assert_array_equal(changed(make(0.4), image, Drawn(random=[0.39]), whole), mirrored)
        np.testing.assert_array_equal(changed(make(0.4), image, Drawn(random=[0.41]), whole), pixels)


def test_a_part_is_cut_out_as_torchvision_does() -> None:
    """Half of 20 × 24 at a ratio of 1 is 15 or 16 pixels wide: √240; then one that does not fit is drawn again."""
    image = picture()
    half = Drawn(uniform=[0.5, 0.0], integers=[3, 4])
    expected = np.asarray(image.crop((3, 4, 3 + 15, 4 + 15)).resize((10, 8), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(changed(gg.augment.random_resized_crop(), image, half), expected)
    again = Drawn(uniform=[1.0, math.log(3), 0.25, math.log(1.2)], integers=[0, 1])
    width, height = round(math.sqrt(120 * 1.2)), round(math.sqrt(120 / 1.2))
    expected = np.asarray(image.crop((0, 1, width, 1 + height)).resize((10, 8), Image.Resampling.BICUBIC))
    made = changed(gg.augment.random_resized_crop(ratio=(1, 3), interpolation="bicubic"), image, again)
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize(("height", "width"), [(4, 60), (60, 4)])
def test_where_no_part_fits_the_middle_is_taken(height: int, width: int) -> None:
    never = Drawn(uniform=[1.0, 0.0] * 10)
    crop = gg.augment.random_resized_crop(scale=(1, 1), ratio=(3 / 4, 4 / 3))
    image = picture(height, width)
    across, down = (round(4 * 4 / 3), 4) if width > height else (4, round(4 / (3 / 4)))
    left, top = (width - across) // 2, (height - down) // 2
    part = image.crop((left, top, left + across, top + down)).resize((10, 8), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(changed(crop, image, never), np.asarray(part))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_a_padded_image_is_cut(mode: str) -> None:
    image = picture(8, 10)
    wide = np.pad(
        np.asarray(image), [(3, 3), (3, 3), (0, 0)], mode, **({"constant_values": 7} if mode[0] == "c" else {})
    )
    made = changed(gg.augment.random_crop(3, 7, mode), image, Drawn(integers=[5, 1]))
    np.testing.assert_array_equal(made, wide[5:13, 1:11])


@pytest.mark.parametrize("angle", [0.0, 30.0, -75.0])
@pytest.mark.parametrize("shear", [(0.0, 0.0), (20.0, 0.0), (10.0, -15.0)])
def test_the_affine_map_is_the_inverse_of_its_parts(angle: float, shear: tuple[float, float]) -> None:
    """Move · to the middle · turn · shear y · shear x · scale · back, by the documentation of torchvision."""
    (x, y), (right, down), factor = (7.0, 5.5), (3.0, -2.0), 1.3
    turn, along_x, along_y = (math.radians(v) for v in (angle, *shear))
    to = lambda a, b: np.array([[1, 0, a], [0, 1, b], [0, 0, 1]], float)  # noqa: E731
    turned = [[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0], [0, 0, 1]]
    slanted_y = [[1, 0, 0], [-math.tan(along_y), 1, 0], [0, 0, 1]]
    slanted_x = [[1, -math.tan(along_x), 0], [0, 1, 0], [0, 0, 1]]
    scaled = np.diag([factor, factor, 1])
    parts = [to(right, down), to(x, y), np.array(turned), np.array(slanted_y), np.array(slanted_x), scaled, to(-x, -y)]
    expected = np.linalg.inv(np.linalg.multi_dot(parts))
    found = inverse_matrix((x, y), angle, (right, down), factor, shear)
    np.testing.assert_allclose(np.array(found).reshape(2, 3), expected[:2], atol=1e-12)


def test_a_move_by_whole_pixels_moves_them() -> None:
    image = picture(8, 10)
    made = changed(gg.augment.affine(translate=(0.3, 0.25)), image, Drawn(uniform=[0.0, 3.0, -2.0]))
    expected = np.zeros((8, 10, 3), np.uint8)
    expected[:6, 3:] = np.asarray(image)[2:, :7]
    np.testing.assert_array_equal(made, expected)
    quarter = changed(gg.augment.rotation(90), picture(8, 8), Drawn(uniform=[90.0]), (8, 8))
    np.testing.assert_array_equal(quarter, np.rot90(np.asarray(picture(8, 8))))


def _grey(pixels: np.ndarray) -> np.ndarray:
    return pixels @ np.array([0.2989, 0.587, 0.114])


FORMULAS = {  # torchvision.transforms.functional, of tensors
    "brightness": lambda pixels, factor: pixels * factor,
    "contrast": lambda pixels, factor: pixels * factor + (1 - factor) * np.floor(_grey(pixels)).mean(),
    "saturation": lambda pixels, factor: pixels * factor + (1 - factor) * _grey(pixels)[:, :, None],
}


@pytest.mark.parametrize("what", FORMULAS)
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7])
def test_colours_are_blended_as_torchvision_does(what: str, factor: float) -> None:
    image = picture(8, 10)
    made = changed(gg.augment.color_jitter(**{what: 0.8}), image, Drawn(permutation=[[0]], uniform=[factor]))
    expected = np.clip(FORMULAS[what](np.asarray(image).astype(float), factor), 0, 255)
    np.testing.assert_allclose(made, expected, atol=1.5)


def test_hues_are_turned() -> None:
    """Red, green and blue follow each other at thirds of the circle."""
    colours = np.eye(3, dtype=np.uint8)[None] * 255
    for turn, places in ((1 / 3, 1), (-1 / 3, -1)):
        drawn = Drawn(permutation=[[0]], uniform=[turn])
        made = changed(gg.augment.color_jitter(hue=0.5), Image.fromarray(colours), drawn, (1, 3))
        np.testing.assert_allclose(made, np.roll(colours, places, 2), atol=6)


@pytest.mark.parametrize("value", [0.0, 1.5, "random"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_a_rectangle_is_erased(value: Any, dtype: Any) -> None:
    """A quarter of 8 × 10 at a ratio of 1 has √20 pixels on each side: 4."""
    array = np.full((8, 10, 3), 9, dtype)
    noise = np.arange(48).reshape(4, 4, 3)
    drawn = Drawn(random=[0.2], uniform=[0.25, 0.0], integers=[2, 5, noise], standard_normal=[noise])
    Augmentations(gg.augment.random_erasing(value=value)).of_array(array, drawn)
    expected = np.full((8, 10, 3), 9, dtype)
    expected[2:6, 5:9] = noise if value == "random" else value
    np.testing.assert_array_equal(array, expected)


def test_rand_augment_is_as_strong_as_that_of_torchvision() -> None:
    """``RandAugment._augmentation_space`` for an image of 331 × 662 pixels, all of its 31 magnitudes."""
    bins, (width, height) = 31, (331, 662)
    space = {
        "Identity": np.zeros(bins), "AutoContrast": np.zeros(bins), "Equalize": np.zeros(bins),
        "ShearX": np.linspace(0.0, 0.3, bins), "ShearY": np.linspace(0.0, 0.3, bins),
        "TranslateX": np.linspace(0.0, 150.0, bins), "TranslateY": np.linspace(0.0, 300.0, bins),
        "Rotate": np.linspace(0.0, 30.0, bins),
        **{name: np.linspace(0.0, 0.9, bins) for name in ("Brightness", "Color", "Contrast", "Sharpness")},
        "Posterize": 8 - np.round(np.arange(bins) / ((bins - 1) / 4)),
        "Solarize": np.linspace(255.0, 0.0, bins),
    }  # fmt: skip
    assert space.keys() == CHANGES.keys()
    signed = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness"}
    for name, (amount, is_signed, _) in CHANGES.items():
        found = [amount(m / (bins - 1), (width, height)) for m in range(bins)]
        np.testing.assert_allclose(found, space[name], atol=1e-9, err_msg=name)
        assert is_signed is (name in signed)


def _moved(pixels: np.ndarray, place: Callable[[int, int], tuple[float, float]]) -> np.ndarray:
    """Each pixel (x, y) from the nearest to a place, whose numbers are those of the middles of pixels."""
    made = np.zeros_like(pixels)
    for y, x in np.ndindex(pixels.shape[:2]):
        at_x, at_y = (math.floor(v) for v in place(x + 0.5, y + 0.5))
        if 0 <= at_y < pixels.shape[0] and 0 <= at_x < pixels.shape[1]:
            made[y, x] = pixels[at_y, at_x]
    return made


CHANGED = {  # (change, how much): what it makes of pixels
    ("Identity", 0.0): lambda p: p,
    ("ShearX", 0.26): lambda p: _moved(p, lambda x, y: (x + 0.26 * y, y)),
    ("ShearY", -0.26): lambda p: _moved(p, lambda x, y: (x, y - 0.26 * x)),
    ("TranslateX", 3.0): lambda p: _moved(p, lambda x, y: (x - 3, y)),
    ("TranslateY", -2.0): lambda p: _moved(p, lambda x, y: (x, y + 2)),
    ("Rotate", 180.0): lambda p: p[::-1, ::-1],
    ("Posterize", 3.0): lambda p: p & 0b11100000,
    ("Solarize", 100.0): lambda p: np.where(p < 100, p, 255 - p),
    ("Brightness", -0.5): lambda p: p * 0.5,
    ("AutoContrast", 0.0): lambda p: (p - p.min((0, 1))) * (255.0 / (p.max((0, 1)) - p.min((0, 1)))),
}


@pytest.mark.parametrize(("change", "much"), CHANGED)
def test_changes_of_rand_augment_are_their_formulas(change: str, much: float) -> None:
    image = Image.fromarray(np.asarray(picture(8, 8)) // 2 + 30)
    made = np.asarray(CHANGES[change][2](image, much, "nearest", 0.0))
    expected = CHANGED[change, much](np.asarray(image))
    np.testing.assert_allclose(made.astype(float), expected, atol=1.01)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.uint8])
@pytest.mark.parametrize("shape", [(3, 2, 6, 8), (3, 6, 8, 2)])
def test_batches_are_mixed_with_the_image_before(dtype: Any, shape: tuple[int, ...]) -> None:
    axes = (2, 3) if shape[1] == 2 else (1, 2)
    images = (np.random.default_rng(0).random(shape) * 200).astype(dtype)
    shares = np.eye(3, dtype=np.float32)
    before, drawn = images[[2, 0, 1]].astype(float), Drawn(integers=[0], random=[0.0], beta=[0.75])
    made, mixed = Augmentations("mixup(alpha=0.3)").of_batch(images, shares, axes, drawn)
    exact = 0.75 * images.astype(float) + 0.25 * before
    np.testing.assert_allclose(
        made.astype(float), exact, atol={"uint8": 0.5, "float16": 0.1}.get(made.dtype.name, 1e-4)
    )
    np.testing.assert_allclose(mixed, 0.75 * shares + 0.25 * shares[[2, 0, 1]])
    assert made.dtype == images.dtype and mixed.dtype == shares.dtype

    # half a side of a quarter of the area is 1/4: of 6 rows 1, of 8 columns 2; at row 0 half of them is cut off
    drawn = Drawn(integers=[0, 0, 5], random=[0.0], beta=[0.75])
    made, mixed = Augmentations("cutmix").of_batch(images, shares, axes, drawn)
    expected = images.copy()
    there = (
        (slice(None), slice(None), slice(0, 1), slice(3, 7))
        if axes == (2, 3)
        else (slice(None), slice(0, 1), slice(3, 7))
    )
    expected[there] = images[[2, 0, 1]][there]
    np.testing.assert_array_equal(made, expected)
    np.testing.assert_allclose(mixed, (1 - 4 / 48) * shares + 4 / 48 * shares[[2, 0, 1]], rtol=1e-6)


# --- all of the table ---------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "rotation": {"degrees": 30},
    "affine": {"degrees": 20, "scale": (0.8, 1.2), "shear": 10, "translate": (0.1, 0.1)},
    "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
}


def made(name: str) -> gg.augment.Augmentation:
    return AUGMENTATIONS.by_name(name, **ARGUMENTS.get(name, {}))


IMAGES = [n for n in AUGMENTATIONS if made(n).stage != "sound"]


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", [n for n in AUGMENTATIONS if made(n).stage in ("stored", "sized")])
def test_size_and_channels_stay(name: str, channels: int) -> None:
    image, before = picture(30, 21, channels), []
    for seed in range(20):
        pixels = changed(made(name), image, np.random.default_rng(seed))
        assert pixels.shape == (8, 10) if channels == 1 else (8, 10, channels)
        before.append(pixels)
    assert any(not np.array_equal(before[0], other) for other in before[1:]), "nothing is drawn"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i, name in enumerate(["ant/a", "ant/b", "ant/c", "bee/a", "bee/b", "bee/c", "bee/d"]):
        path = tmp_path / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(14 + i, 16, seed=i).save(path)
    return tmp_path / "photos"


@pytest.fixture
def tar(photos: Path, tmp_path: Path) -> Path:
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for i, file in enumerate(sorted(photos.glob("*/*.png"))):
            for end, content in (("png", file.read_bytes()), ("cls", file.parent.name.encode())):
                member = tarfile.TarInfo(f"{i:03}.{end}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return tmp_path / "photos.tar"


def model(classes: int = 2) -> onnx.ModelProto:
    gg.frontend.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, classes))
    return gg.frontend.export(head, {"x": ("N", 3, 12, 12)})


def soft_step() -> gg.Step:
    return gg.build(model(), loss="soft_cross_entropy", optimizer=gg.optim.sgd(0.1), metrics="accuracy")


def trained(data: Any, **limits: Any) -> gg.Trainer:
    trainer = gg.Trainer(soft_step(), device="cpu", seed=3)
    trainer.fit(data, 2, 3, progress=False, **limits)
    return trainer


def assert_same(one: gg.Trainer, other: gg.Trainer) -> None:
    mine, others = one.state_dict(), other.state_dict()
    for name, value in mine.items():
        np.testing.assert_array_equal(others[name], value, err_msg=name)


@pytest.mark.sweep(0.02)
@pytest.mark.parametrize("source", ["folder", "shards"])
@pytest.mark.parametrize("name", [*IMAGES, "all"])
def test_a_resumed_run_draws_the_same(name: str, source: str, photos: Path, tar: Path, tmp_path: Path) -> None:
    """Whatever the number of threads, and where in an epoch it was stopped."""
    given = [made(n) for n in IMAGES if n != "random_resized_crop"] if name == "all" else made(name)
    read = (lambda threads: gg.image_folder(photos, augment=given, threads=threads)) if source == "folder" else (
        lambda threads: gg.shards(tar, augment=given, threads=threads))  # fmt: skip
    whole = trained(read(1))
    trained(read(4), max_steps=4, checkpoint=tmp_path / "run.ckpt")
    again = gg.Trainer.resume(soft_step(), tmp_path / "run.ckpt", device="cpu")
    again.fit(read(2), 2, 3, progress=False)
    assert_same(whole, again)
    plain = trained(gg.image_folder(photos) if source == "folder" else gg.shards(tar))
    assert any(not np.array_equal(v, plain.state_dict()[n]) for n, v in whole.state_dict().items()), "nothing changed"


@pytest.mark.sweep(0)
def test_only_training_is_augmented(photos: Path) -> None:
    given = [made(n) for n in IMAGES]
    given.insert(0, given.pop([one.call.split("(")[0] for one in given].index("random_resized_crop")))
    noisy, plain = gg.image_folder(photos, augment=given), gg.image_folder(photos)
    trainer = gg.Trainer(soft_step(), device="cpu")
    first = trainer.fit(noisy, 2, 3, validation=noisy, progress=False)
    other = gg.Trainer(soft_step(), device="cpu")
    second = other.fit(noisy, 2, 3, validation=plain, progress=False)
    assert first["val_loss"] == second["val_loss"]
    for data in (noisy, trainer.prepare(noisy, 3)):
        assert trainer.evaluate(data) == pytest.approx(trainer.evaluate(plain), rel=1e-6)
        np.testing.assert_allclose(trainer.predict(data), trainer.predict(plain), rtol=1e-6)
    assert [one.value for one in trainer.worst(noisy, 7)] == [one.value for one in trainer.worst(plain, 7)]


@pytest.mark.sweep(0)
def test_shares_of_classes_are_their_numbers(photos: Path) -> None:
    """A target that is a share for each class gives the loss and the accuracy of class numbers."""
    soft = gg.Trainer(soft_step(), device="cpu")
    hard = gg.Trainer(gg.build(model(), loss="cross_entropy", metrics="accuracy"), device="cpu")
    a, b = soft.evaluate(photos), hard.evaluate(photos)
    assert a == pytest.approx(b, rel=1e-6)
    table = gg.Trainer(gg.build(model(), loss="soft_cross_entropy", metrics="confusion_matrix"), device="cpu")
    table.fit(photos, 1, 3, progress=False)
    assert table.per_class(photos).names == ("ant", "bee") and table.per_class(photos).samples.tolist() == [3, 4]
    soft.fit(photos, 1, 3, progress=False)
    assert {(w.label, Path(w.file).parent.name) for w in soft.worst(photos, 7)} == {("ant", "ant"), ("bee", "bee")}


def test_one_number_for_two_classes(photos: Path) -> None:
    step = gg.build(model(1), loss="bce_with_logits", optimizer=gg.optim.sgd(0.1))
    images = gg.image_folder(photos, augment="mixup")
    trainer = gg.Trainer(step, device="cpu")
    trainer.fit(images, 1, 3, progress=False)
    arrays = {"x": np.stack([gg.image_folder(photos, (12, 12))[i][0] for i in range(7)]),
              "target": images.labels[:, None].astype(np.float32)}  # fmt: skip
    assert trainer.evaluate(images)["loss"] == pytest.approx(trainer.evaluate(arrays)["loss"], rel=1e-6)


# --- what does not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("flipp", "there is no augmentation 'flipp'; did you mean 'flip'"),
        ("RandomHorizontalFlip", "did you mean 'flip'"),
        ("flip(q=1)", "flip has no argument 'q'"),
        ("flip(2)", "p is 2; it should be a number from 0 to 1"),
        ("mixup(alpha=0)", "alpha is 0; it should be a number above zero"),
        ("color_jitter(hue=0.7)", "hue is 0.7"),
        ("random_resized_crop(scale=[1,0.5])", "two numbers above zero, the smaller one first"),
        ("random_resized_crop(interpolation='cubic')", "one of nearest, lanczos"),
        ("rand_augment(magnitude=31)", "a whole number below num_magnitude_bins"),
        (["flip", "random_resized_crop"], "has resized them; list it first"),
        (["random_resized_crop", "random_resized_crop"], "keep one random_resized_crop"),
        ("rotation", "the augmentation rotation needs 'degrees'; write rotation(degrees=…)"),
        (gg.augment.flip, "pass a name, or the result of a call such as gradgraph.augment"),
        (7, "augment is 7; it should be an augmentation"),
    ],
)
def test_what_cannot_be_meant_is_said(given: Any, says: str, photos: Path) -> None:
    with pytest.raises(gg.GradgraphError) as raised:
        trained(gg.image_folder(photos, augment=given))
    assert says in str(raised.value)


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_classes_that_are_numbers_cannot_be_mixed(source: str, photos: Path, tar: Path) -> None:
    """The error comes before the first step, and before anything is written."""
    trainer = gg.Trainer(gg.build(model(), loss="cross_entropy"), device="cpu")
    data = gg.image_folder(photos, augment="mixup") if source == "folder" else gg.shards(tar, augment="mixup")
    with pytest.raises(gg.errors.DataError, match=r"mixup\(\) mixes classes, .*loss='soft_cross_entropy'"):
        trainer.prepare(data)


# --- shell, recipe and Python are one list --------------------------------------------------------------------------


@pytest.fixture
def cli(photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(photos.parent)
    onnx.save(model(), "model.onnx")

    def call(*words: str) -> Ran:
        capsys.readouterr()
        code = run(words)
        return Ran(code, *capsys.readouterr())

    return call


@pytest.mark.sweep(0)
def test_from_the_shell_a_recipe_and_python(cli: Cli, photos: Path) -> None:
    words = ["--loss", "soft_cross_entropy", "--optimizer", "sgd", "--lr", "0.1", "--epochs", "2", "--batch-size", "3"]
    given = ["random_resized_crop(scale=[0.5,1])", "flip", "mixup(alpha=0.2)"]
    shell = [word for one in given for word in ("--augment", one)]
    ran = cli("train", "model.onnx", "--data", "photos", *words, *shell, "--export", "a.onnx")
    assert ran.code == 0, ran.err
    printed = cli("train", "model.onnx", "--data", "photos", *words, *shell, "--print-config").out
    Path("recipe.toml").write_text(printed)
    ran = cli("train", "recipe.toml", "--export", "b.onnx")
    assert ran.code == 0, ran.err
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
    chosen = [gg.augment.random_resized_crop(scale=(0.5, 1)), gg.augment.flip(), gg.augment.mixup(0.2)]
    trainer = gg.Trainer(gg.build("model.onnx", "soft_cross_entropy", gg.optim.sgd(0.1)), device="cpu")
    trainer.fit(gg.image_folder("photos", augment=chosen), 2, 3, progress=False)
    exported = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("a.onnx").graph.initializer}
    for name, value in trainer.parameters.items():
        np.testing.assert_array_equal(exported[name], value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--augment", "flipp"], "did you mean 'flip'"),
        (["--augment", "mixup"], "add --loss soft_cross_entropy"),
        (["--data", "model.onnx", "--augment", "flip"], "--augment applies to images"),
    ],
)
def test_a_slip_in_the_shell(cli: Cli, words: list[str], says: str) -> None:
    ran = cli("train", "model.onnx", "--data", "photos", *words)
    assert ran.code == 1 and says in ran.err, ran.err
