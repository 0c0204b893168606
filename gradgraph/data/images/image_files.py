"""Decoding of image files to upright 8-bit images, and of mask files to class indices.

All other code decodes images through this module.
"""

from __future__ import annotations

import io
import os
import threading
from typing import Any

import numpy as np

from gradgraph.data.labelled_files import FileKind
from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.regular import open_regular, readable

IMAGES = FileKind("image", (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"))
MASKS = FileKind("mask", (".png",))
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # Pillow reads more formats, which adds attack surface
MOST_PIXELS = 64_000_000
LARGE_PIXELS = 8_000_000  # larger images are decoded one at a time
BYTES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")  # Pillow's modes of at most 8 bits
NUMBERS = ("P", "L", "1", "I", "I;16", "I;16B", "I;16L")
ORIENTATION = 0x0112  # the EXIF tag of the orientation
PHOTOMETRIC, WHITE_IS_ZERO = 0x0106, 0  # the TIFF tag that determines whether 0 is white or black
FAINTEST = 1 / 16  # if all levels are below this fraction of white, the image has fewer bits than its file
UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # from EXIF orientations to Pillow's transpositions
_large = threading.Lock()


def opened(content: Any, name: str, stated: tuple[int, int] | None = None) -> Any:
    """Decode an image: upright, with 8 bits per channel.

    1. The image is rotated and mirrored according to its EXIF orientation, unless its annotations state its unrotated
       size.
    2. 16-bit levels are scaled from 0–65535 to 0–255, and floating-point grey levels from 0–1. Levels of an unknown
       range are rejected, including 12-bit levels in a 16-bit file, and a TIFF with more than 8 bits in which 0 is
       white.
    3. A file with several pages or frames is rejected.

    Args:
        content: an open file, or its bytes.
        name: name of the file, for messages.
        stated: width and height according to its annotations, if any.

    Raises:
        DataError: if the image cannot be read, is too large, has several pages, has a size other than ``stated``,
            or has levels of an unknown range; or if Pillow is not installed.
    """
    image = _decoded(content, name, stated)
    return image if image.mode in BYTES else _in_bytes(image, name)


def picture_at(path: str | os.PathLike[str], stated: tuple[int, int] | None = None) -> Any:
    """Decode an image file; ``stated`` and errors as for :func:`opened`."""
    return _at(path, lambda file: opened(file, str(path), stated))


def numbers_at(path: str | os.PathLike[str]) -> Any:
    """Decode a mask file to an upright image of 32-bit integers: palette indices or grey levels.

    Raises:
        DataError: if the file cannot be read, or is a colour image.
    """
    mask, bits = _at(path, lambda file: (_decoded(file, str(path)), _grey_bits(file)))
    if mask.mode not in NUMBERS:
        raise DataError(
            f"the mask '{shown(path)}' is a colour image ({mask.mode}), but should contain class numbers; save it with "
            "a palette, or with a single channel"
        )
    from PIL import Image

    levels = np.asarray(mask).astype(np.int32)
    return Image.fromarray(levels // (255 // (2**bits - 1)) if bits in (2, 4) else levels)


def _grey_bits(file: Any) -> int:
    """Return the bits per pixel of a grey PNG, whose 2- and 4-bit levels Pillow scales up to 255; 0 for other files."""
    file.seek(0)
    head = file.read(26)
    return int(head[24]) if head.startswith(b"\x89PNG") and head[25] == 0 else 0


def _at(path: str | os.PathLike[str], read: Any) -> Any:
    with readable(path), open_regular(path) as file:
        return read(file)


def _decoded(content: Any, name: str, stated: tuple[int, int] | None = None) -> Any:
    """Return an upright Pillow image with its original pixel levels; arguments and errors as for :func:`opened`."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "images require Pillow, which is not installed",
            remedy="pip install pillow, or pass arrays",
            shell="pip install pillow, or pass arrays",
        ) from None
    try:
        image = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS)
        pixels = image.width * image.height
        several, is_inverted = _is_one_of_several(image), _is_inverted(image)
        is_deep = any(";16" in str(tile[3]) for tile in image.tile)
        if pixels <= MOST_PIXELS:
            if pixels < LARGE_PIXELS:
                image.load()
            else:
                with _large:
                    image.load()
    except Exception as error:  # decoders raise exceptions of many classes
        first = str(error).split("\n", 1)[0] or type(error).__name__
        raise DataError(f"'{shown(name)}' is not a readable image ({shown(first)}); replace or remove it") from None
    if pixels > MOST_PIXELS:
        raise DataError(
            f"'{shown(name)}' has {image.width} × {image.height} pixels, more than {MOST_PIXELS:,}; scale it down"
        )
    if several:
        raise DataError(f"'{shown(name)}' has several pages or frames; save each as a separate file")
    if is_inverted:
        raise DataError(
            f"'{shown(name)}' is a TIFF of more than 8 bits in which 0 is white (WhiteIsZero); save it with 0 as black"
        )
    if is_deep and image.mode in BYTES:  # Pillow has kept only the upper 8 bits
        _check_bright(256 * int(np.asarray(image.convert("RGB")).max(initial=0)), 65535, name)
    if (turn := UPRIGHT.get(_orientation(image))) is not None:
        upright = image.transpose(Image.Transpose(turn))
        if stated is None or image.size != stated or upright.size == stated:
            upright.format, image = image.format, upright
    if stated is not None and image.size != stated:
        raise DataError(
            f"'{shown(name)}' has {image.width} × {image.height} pixels, but its annotations state {stated[0]} × "
            f"{stated[1]}, so boxes would be misplaced; provide the image that was annotated"
        )
    return image


def _orientation(image: Any) -> Any:
    """Return the EXIF orientation of an image; 1 if it is missing or damaged."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # parsing damaged data raises exceptions of many classes
        return 1


def _is_one_of_several(image: Any) -> bool:
    """Whether an image file has several frames or pages.

    Additional images in a JPEG (MPO, from phones) and thumbnails in a TIFF do not count.
    """
    if image.format != "TIFF":
        return image.format in ("PNG", "WEBP") and getattr(image, "n_frames", 1) > 1
    size = image.size
    try:
        image.seek(1)
    except EOFError:
        return False
    is_page = bool(image.size == size)  # otherwise it is a thumbnail of the first image
    image.seek(0)
    return is_page


def _is_inverted(image: Any) -> bool:
    """Whether 0 is white in a TIFF of more than 8 bits, which Pillow would read as black."""
    return image.format == "TIFF" and image.mode not in BYTES and image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO


def _check_bright(largest: float, white: float, name: str) -> None:
    """Raise DataError if the largest level of a 16-bit image is so low that its levels are probably 12-bit."""
    if 0 < largest < white * FAINTEST:
        raise DataError(
            f"'{shown(name)}' has 16-bit levels up to {largest:g} only, where {white:g} is white, so it would be "
            "almost black; scale its levels (12-bit levels by 16) and save it again, or pass arrays"
        )


def _in_bytes(image: Any, name: str) -> Any:
    """Convert a grey image of more than 8 bits to 8 bits; raise DataError if its white level is unknown."""
    from PIL import Image

    levels = np.asarray(image)
    # Pillow reads 16-bit PNG and PPM as 32-bit integers
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        white = 65535.0
        _check_bright(levels.max(initial=0), white, name)
    elif image.mode == "F" and (levels >= 0).all() and (levels <= 1).all():
        white = 1.0
    else:
        between = f"levels from {levels.min():g} to {levels.max():g}" if image.mode in ("I", "F") else "channels"
        raise DataError(
            f"'{shown(name)}' has {between} in Pillow's mode {image.mode}, whose range is unknown; save it as 8- or "
            "16-bit grey or RGB, or pass arrays"
        )
    return Image.fromarray(np.rint(levels * (255.0 / white)).astype(np.uint8))
