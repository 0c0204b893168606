"""Every reader decodes a picture alike: upright by EXIF, 8 bits of 16 or of floats, as Pillow says."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.data.images.image_files import numbers_at, opened, picture_at
from gradgraph.errors import DataError
from gradgraph.frontend import nn

pytest.importorskip("PIL", reason="pictures are read by Pillow")
from PIL import Image

ORIENTATIONS = range(1, 9)
# what a viewer does to the stored picture, undone: of each orientation the transposition that stores an upright picture
STORED = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90",
          7: "TRANSVERSE", 8: "ROTATE_270"}  # fmt: skip
BOX = (2, 3, 12, 10)  # left, top, right, bottom


def stored(upright: Any, orientation: int, path: Path) -> Path:
    """Save a picture as a camera does that was held in this orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    turn = STORED.get(orientation)
    (upright if turn is None else upright.transpose(Image.Transpose[turn])).save(path, exif=exif)
    return path


def mask_of(size: tuple[int, int]) -> np.ndarray:
    made = np.zeros(size[::-1], np.uint8)
    made[BOX[1] : BOX[3], BOX[0] : BOX[2]] = 1
    return made


# --- one rule for EXIF ---------------------------------------------------------------------------------------------


def _folder(at: Path) -> np.ndarray:
    return gg.image_folder(at / "images")[0][0]


def _table(at: Path) -> np.ndarray:
    (at / "t.csv").write_text("path,label\nimages/a.png,1\n")
    return gg.image_table(at / "t.csv")[0][0]


def _shards(at: Path) -> np.ndarray:
    with tarfile.open(at / "s.tar", "w") as tar:
        tar.add(at / "images" / "a.png", "0.png")
    return next(array for array in gg.shards(at / "s.tar")[0].values() if np.ndim(array) == 3)


def _masks(at: Path) -> np.ndarray:
    image, mask = gg.vision.masks(at)[0]
    np.testing.assert_array_equal(mask, mask_of(mask.shape[::-1]))
    return image


def _coco(at: Path) -> np.ndarray:
    return gg.vision.coco(at / "annotations.json")[0]["image"]


def _yolo(at: Path) -> np.ndarray:
    return gg.vision.yolo(at)[0]["image"]


READERS: dict[str, Callable[[Path], np.ndarray]] = {
    "folder": _folder, "table": _table, "shards": _shards, "masks": _masks, "coco": _coco, "yolo": _yolo,
}  # fmt: skip


def annotated(at: Path, size: tuple[int, int], orientation: int, of_mask: int = 1) -> np.ndarray:
    """The same red box in all layouts, and the upright picture."""
    for name in ("images", "masks", "labels"):
        (at / name).mkdir()
    array = np.random.default_rng(0).integers(0, 90, (size[1], size[0], 3)).astype(np.uint8)
    array[mask_of(size) > 0] = (250, 0, 0)
    stored(Image.fromarray(array), orientation, at / "images" / "a.png")
    stored(Image.fromarray(mask_of(size)), of_mask, at / "masks" / "a.png")
    left, top, right, bottom = BOX
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [left, top, right - left, bottom - top]}
    (at / "annotations.json").write_text(json.dumps({
        "images": [{"id": 1, "file_name": "a.png", "width": size[0], "height": size[1]}],
        "annotations": [box], "categories": [{"id": 1, "name": "red"}],
    }))  # fmt: skip
    (at / "classes.txt").write_text("red")
    w, h = size
    shares = [(left + right) / 2 / w, (top + bottom) / 2 / h, (right - left) / w, (bottom - top) / h]
    (at / "labels" / "a.txt").write_text(" ".join(map(str, [0, *shares])))
    return array.transpose(2, 0, 1).astype(np.float32) / 255


@pytest.mark.sweep(0.43)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("size", [(16, 16), (20, 14)])
def test_every_reader_turns_a_picture_upright(
    reader: str, orientation: int, size: tuple[int, int], tmp_path: Path
) -> None:
    if reader == "table":
        pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    upright = annotated(tmp_path, size, orientation)
    np.testing.assert_array_equal(READERS[reader](tmp_path), upright)


@pytest.mark.parametrize("of_mask", ORIENTATIONS)
def test_a_mask_is_turned_by_its_own_orientation(of_mask: int, tmp_path: Path) -> None:
    upright = annotated(tmp_path, (20, 14), 6, of_mask=of_mask)
    np.testing.assert_array_equal(_masks(tmp_path), upright)


def test_a_model_sees_the_upright_picture_when_it_predicts(tmp_path: Path) -> None:
    upright = annotated(tmp_path, (20, 14), 6)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 14 * 20, 2))
    trainer = gg.Trainer(gg.build(gg.frontend.export(layers, {"x": ("batch", 3, 14, 20)})))
    np.testing.assert_array_equal(trainer.predict(tmp_path / "images"), trainer.predict(upright[None]))


def test_a_damaged_orientation_is_none(tmp_path: Path) -> None:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    image.save(tmp_path / "a.png", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\x7f")
    np.testing.assert_array_equal(np.asarray(picture_at(tmp_path / "a.png")), np.asarray(image))


# --- levels ------------------------------------------------------------------------------------------------------


def drawn(mode: str, rng: np.random.Generator) -> Any:
    if mode in ("I;16", "I"):
        return Image.fromarray(rng.integers(0, 1 << 16, (7, 5)).astype(np.uint16 if mode == "I;16" else np.int32))
    if mode == "F":
        return Image.fromarray(rng.random((7, 5)).astype(np.float32))
    return Image.fromarray(rng.integers(0, 256, (7, 5, 3)).astype(np.uint8)).convert(mode)


KINDS = {"PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "JPEG": ("L", "RGB", "CMYK"),
         "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"), "PPM": ("1", "L", "RGB", "I;16", "I"),
         "BMP": ("1", "L", "P", "RGB"), "WEBP": ("RGB", "RGBA")}  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in KINDS.items() for mode in modes])
def test_levels_are_those_of_pillow_or_scaled(kind: str, mode: str) -> None:
    made = io.BytesIO()
    drawn(mode, np.random.default_rng(3)).save(made, kind)
    found, plain = opened(made.getvalue(), "a"), Image.open(made)
    white = {"I": 65535, "F": 1}.get(plain.mode[:1])
    if white is not None:
        plain = Image.fromarray(np.rint(np.asarray(plain).astype(np.float64) * 255 / white).astype(np.uint8))
    for to in ("L", "RGB", "RGBA"):
        np.testing.assert_array_equal(np.asarray(found.convert(to)), np.asarray(plain.convert(to)))


@pytest.mark.parametrize("levels", [[0, 200], [-0.1, 1], [0.5, float("nan")], [0, float("inf")]])
def test_floats_beyond_one_are_refused(levels: list[float], tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    Image.fromarray(np.array([levels] * 2, np.float32)).save(tmp_path / "f" / "a.tif")
    with pytest.raises(
        DataError, match=r"has levels from .* whose range is unknown; save it as 8- or 16-bit grey or RGB"
    ):
        gg.image_folder(tmp_path)[0]


def test_channels_that_pillow_cannot_convert_are_refused(tmp_path: Path) -> None:
    Image.frombytes("LAB", (2, 2), bytes(12)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="has channels in Pillow's mode LAB, whose range is unknown"):
        gg.image_folder(tmp_path)[0]


def png_of_16_bits(levels: np.ndarray) -> bytes:
    """A PNG of levels [height, width, channels], which Pillow writes for one channel alone."""
    height, width, channels = levels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts
    )


def tiff_of(levels: np.ndarray, photometric: int, bits: int) -> bytes:
    """A TIFF of grey levels, whose white is the largest number where ``photometric`` is 1, and 0 where it is 0."""
    (height, width), content = levels.shape, levels.tobytes()
    kinds = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height}
    kinds |= {279: len(content), 339: 3 if levels.dtype.kind == "f" else 1}
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in kinds.items())
    return struct.pack("<2sHI", b"II", 42, 8 + len(content)) + content + struct.pack("<H", len(kinds)) + tags + bytes(4)


SENSOR = np.array([[0, 100, 4095, 1000], [5, 70, 2000, 3000]], np.uint16)
TWELVE_BITS = {"grey": png_of_16_bits(SENSOR[:, :, None]), "TIFF": tiff_of(SENSOR, 1, 16),
               "colours": png_of_16_bits(np.repeat(SENSOR[:, :, None], 3, 2))}  # fmt: skip


@pytest.mark.parametrize("name", TWELVE_BITS)
def test_twelve_bits_in_sixteen_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"'a' has 16-bit levels up to \d+ only, where 65535 is white"):
        opened(TWELVE_BITS[name], "a")


@pytest.mark.parametrize("channels", [1, 3])
def test_black_and_bright_levels_of_sixteen_bits_are_read(channels: int) -> None:
    for levels in (np.zeros((2, 4, channels), np.uint16), np.repeat(16 * SENSOR[:, :, None], channels, 2)):
        found = np.asarray(opened(png_of_16_bits(levels), "a"), int).reshape(levels.shape)
        np.testing.assert_allclose(found, levels / 257, atol=1)


def test_a_white_of_zero_is_read_in_8_bits_and_refused_beyond() -> None:
    numbers = np.array([[0, 10], [200, 255]], np.uint8)
    np.testing.assert_array_equal(np.asarray(opened(tiff_of(numbers, 0, 8), "a")), 255 - numbers)
    for levels in (numbers.astype(np.uint16) * 257, numbers.astype(np.float32) / 255):
        bits = 8 * levels.itemsize
        np.testing.assert_array_equal(np.asarray(opened(tiff_of(levels, 1, bits), "a")), numbers)
        with pytest.raises(DataError, match=r"a TIFF of more than 8 bits in which 0 is white"):
            opened(tiff_of(levels, 0, bits), "a")


# --- several in one file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["TIFF", "WEBP", "PNG", "MPO"])
def test_a_file_of_several_pictures_is_refused(kind: str) -> None:
    pages = [Image.fromarray(np.full((6, 4, 3), level, np.uint8)) for level in (50, 100, 150)]
    made = io.BytesIO()
    pages[0].save(made, kind, save_all=True, append_images=pages[1:])
    if kind == "MPO":  # of a phone, whose others are depth or brightness
        assert np.asarray(opened(made.getvalue(), "a")).shape == (6, 4, 3)
        return
    with pytest.raises(DataError, match="'a' has several pages or frames"):
        opened(made.getvalue(), "a")


def test_smaller_versions_in_a_file_are_passed_over() -> None:
    made, picture = io.BytesIO(), drawn("RGB", np.random.default_rng(0))
    picture.save(made, "TIFF", save_all=True, append_images=[picture.resize((2, 3))])
    np.testing.assert_array_equal(np.asarray(opened(made.getvalue(), "a")), np.asarray(picture))


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16"])
def test_masks_keep_their_numbers(mode: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    numbers = rng.integers(0, {"1": 2, "I;16": 1000}.get(mode, 256), (6, 9))
    if mode == "P":
        image = _paletted(numbers)
    else:
        image = Image.fromarray(numbers.astype({"1": bool, "I;16": np.uint16}.get(mode, np.uint8)))
    assert image.mode == mode
    for orientation in ORIENTATIONS:
        path = stored(image, orientation, tmp_path / "m.png")
        np.testing.assert_array_equal(np.asarray(numbers_at(path)), numbers)


def _paletted(numbers: np.ndarray) -> Any:
    image = Image.fromarray(numbers.astype(np.uint8))
    image.putpalette(np.random.default_rng(5).integers(0, 256, 768).astype(np.uint8).tobytes())
    return image


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("colour", [0, 3], ids=["grey", "palette"])
def test_masks_of_few_bits_have_the_numbers_of_their_file(bits: int, colour: int, tmp_path: Path) -> None:
    """Pillow scales grey levels of 2 and 4 bits up to 255."""
    numbers = np.random.default_rng(bits).integers(0, 2**bits, (5, 16), np.uint8)
    packed = np.packbits(np.unpackbits(numbers[..., None], axis=-1)[..., -bits:].reshape(5, -1), axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 5, bits, colour, 0, 0, 0))
    palette = chunk(b"PLTE", bytes(i % 256 for i in range(3 * 2**bits))) if colour else b""
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in packed)))
    path = tmp_path / "mask.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + palette + pixels + chunk(b"IEND", b""))
    np.testing.assert_array_equal(np.asarray(numbers_at(path)), numbers)
