"""Image preprocessing of a model, read from configuration files of Hugging Face and timm next to it, or its metadata.

``preprocessor_config.json`` configures an image processor of ``transformers``; ``config.json`` is read if it has a
``pretrained_cfg`` of timm. A setting that :class:`gradgraph.image_folder` does not support is never approximated: a
warning names it, and the file is ignored.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from gradgraph.data.augment.augmentation import INTERPOLATIONS
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import ArgumentError, shown
from gradgraph.files.untrusted.contained_paths import bytes_inside
from gradgraph.files.untrusted.documents import Fields, json_of
from gradgraph.files.untrusted.regular import UnreadableError

log = logging.getLogger("gradgraph")

LARGEST = 1 << 20  # bytes
FILES = ("preprocessor_config.json", "config.json")
BYTE = 255.0
# prefixes of image processor types for which a single number as size means the shorter side, or both sides
_OF_SHORTER = ("Bit", "CLIP", "ConvNext", "Levit", "MobileNetV1", "MobileNetV2", "MobileViT", "PoolFormer")
_OF_BOTH = ("Beit", "DeiT", "Segformer", "Swin", "ViT")
_CHANNELS = (1, 3, 4)


def learn_preprocessing(model: ir.Model, source: Any) -> str:
    """Write the image preprocessing of a model into its metadata, unless it has one; return a line for the log.

    If ``source`` is the model's path, configuration files next to it are read. The line is "" if nothing was found.
    """
    names = DataNames.read_from(model.metadata_props)
    inputs = [v for v in model.graph.inputs if v.shape is not None and len(v.shape) == 4 and not v.is_initializer()]
    if names.images or len(inputs) != 1:
        return ""
    for where, content in _documents(model, source):
        try:
            found = _read(json_of(content))
            if found is None:
                continue
            given = _fitting(found, inputs[0])
            learnt = DataNames(images={inputs[0].name or "": given}) if given else DataNames()
        except (UnreadableError, ArgumentError) as error:
            message = ("the image preprocessing in %s is not supported (%s); pass the options of image_folder, or "
                       "--image, instead")  # fmt: skip
            log.warning(message, where, error)
            return ""
        model.metadata_props.update(names.updated(learnt).as_metadata())
        words = ", ".join(f"{key} {shown(_in_words(value))}" for key, value in given.items())
        return f"images of '{shown(inputs[0].name)}' are read as described in {where}: {words}" if given else ""
    return ""


def _documents(model: ir.Model, source: Any) -> Iterator[tuple[str, str | bytes]]:
    """Yield the name and content of each document that may describe image preprocessing."""
    for key, value in model.metadata_props.items():
        if key.removesuffix(".json") in ("preprocessor_config", "pretrained_cfg", "timm_config"):
            yield f"the metadata '{shown(key)}'", value
    if not isinstance(source, str | os.PathLike):
        return
    folder = Path(source).absolute().parent
    for place in (folder, folder.parent) if folder.name == "onnx" else (folder,):  # as in repositories of the hub
        for name in FILES:
            try:
                content = bytes_inside(place, name, LARGEST)
            except UnreadableError as error:
                log.warning("'%s' cannot be read (%s)", shown(place / name), error)
                continue
            if content is not None:
                yield f"'{shown(place / name)}'", content


def _read(document: Any) -> dict[str, Any] | None:
    """Return the arguments of ``image_folder`` for a document, or None if it does not describe images.

    Raises UnreadableError if the document is damaged, or a setting is not supported.
    """
    fields = Fields(document, "it")
    if fields.value("pretrained_cfg") is not None:
        return _of_timm(fields.table("pretrained_cfg"))
    if fields.value("input_size") is not None and fields.value("mean") is not None:
        return _of_timm(fields)
    known = ("image_mean", "do_resize", "do_rescale", "image_processor_type", "do_normalize")
    return _of_processor(fields) if any(fields.value(key) is not None for key in known) else None


def _of_timm(fields: Fields) -> dict[str, Any]:
    """Return the arguments of ``image_folder`` for a ``pretrained_cfg``, as timm reads it for evaluation."""
    _, height, width = _numbers(fields, "input_size", 3)
    size = (int(height), int(width))
    share, mode = fields.number("crop_pct", 0.875), fields.text("crop_mode", "center")
    if not 0 < share <= 1:
        raise UnreadableError(f"its crop_pct is {share:g}")
    given: dict[str, Any] = {"size": size, "resample": _filter(fields.text("interpolation", "bilinear"))}
    if mode == "center" and size[0] == size[1]:
        given["shorter"] = math.floor(size[0] / share)
    elif not (mode == "squash" and share == 1):
        raise UnreadableError(f"it crops by crop_mode '{shown(mode)}' with crop_pct {share:g} to {list(size)}")
    return given | {"mean": _numbers(fields, "mean"), "std": _numbers(fields, "std")}


def _of_processor(fields: Fields) -> dict[str, Any]:
    """Return the arguments of ``image_folder`` for the configuration of an image processor of ``transformers``."""
    mobile = fields.text("image_processor_type", fields.text("feature_extractor_type", "")).startswith("MobileViT")
    flips = fields.flag("do_flip_channel_order", False)
    if flips and not mobile:  # others do not define its order relative to the mean
        raise UnreadableError("it asks for do_flip_channel_order, which is not supported")
    for key in ("do_pad", "rescale_offset", "offset", "do_thumbnail", "do_align_long_axis"):
        if fields.value(key) is True:
            raise UnreadableError(f"it asks for {key}, which is not supported")
    given: dict[str, Any] = {}
    if fields.flag("do_resize", True) and fields.value("size") is not None:
        given = _size(fields) | {"resample": _filter(fields.value("resample"))}
    elif fields.flag("do_center_crop", False):
        raise UnreadableError("it crops images without resizing them, which is not supported")
    factor = fields.number("rescale_factor", 1 / BYTE) if fields.flag("do_rescale", True) else 1.0
    if factor <= 0:
        raise UnreadableError(f"its rescale_factor is {factor:g}")
    mean, std = None, None
    if fields.flag("do_normalize", fields.value("image_mean") is not None and not mobile):
        mean, std = _numbers(fields, "image_mean"), _numbers(fields, "image_std")
    scale = None if math.isclose(factor * BYTE, 1.0, rel_tol=1e-6) else factor
    read = {"mean": mean, "std": std, "scale": scale, "order": "BGR" if flips else None}
    return given | {key: value for key, value in read.items() if value is not None}


def _size(fields: Fields) -> dict[str, Any]:
    """Return the arguments of ``image_folder`` for the size, and for the shorter side before a center crop."""
    kind = fields.text("image_processor_type", fields.text("feature_extractor_type", "without a type"))
    size, crop = fields.value("size"), fields.value("crop_size")
    crops = fields.flag("do_center_crop", False)
    cut: tuple[int, int] | None = None
    if crops and crop is not None:
        cut = _pair(crop if isinstance(crop, Mapping) else {"height": crop, "width": crop}, "crop_size")
    if type(size) is int:
        if kind.startswith(_OF_SHORTER):
            size = {"shortest_edge": size}
        elif kind.startswith(_OF_BOTH):
            size = {"height": size, "width": size}
        else:
            raise UnreadableError(
                f"for its image processor ({shown(kind)}), the size {size} may be that of the shorter side or of both"
            )
    if not isinstance(size, Mapping):
        raise UnreadableError("its size is neither an integer nor an object")
    if kind.startswith("ConvNext") and "shortest_edge" in size and not crops:
        return _of_convnext(size["shortest_edge"], fields)
    if set(size) == {"shortest_edge"}:
        if cut is None:
            raise UnreadableError("it resizes the shorter side without cropping, so images have different sizes")
        return {"size": cut, "shorter": _side(size["shortest_edge"], "shortest_edge"), "crop": "floor"}
    both = _pair(size, "size")
    if cut is not None and cut != both:
        raise UnreadableError(f"it stretches images to {list(both)} and crops {list(cut)}, which is not supported")
    return {"size": both}


def _of_convnext(side: Any, fields: Fields) -> dict[str, Any]:
    side = _side(side, "shortest_edge")
    if side >= 384:  # if its processor does not crop
        return {"size": (side, side)}
    return {"size": (side, side), "shorter": int(side / fields.number("crop_pct", 224 / 256)), "crop": "floor"}


def _pair(table: Mapping[str, Any], what: str) -> tuple[int, int]:
    if set(table) != {"height", "width"}:
        raise UnreadableError(f"its {what} has {', '.join(map(shown, sorted(table)))}, which is not supported")
    return _side(table["height"], what), _side(table["width"], what)


def _side(value: Any, what: str) -> int:
    if type(value) is not int or not 0 < value < 1 << 15:
        raise UnreadableError(f"its {what} is not a whole number of pixels from 1 to 32,767")
    return value


def _numbers(fields: Fields, key: str, count: int | None = None) -> tuple[float, ...]:
    value = fields.value(key)
    fits = isinstance(value, list) and all(type(n) in (int, float) and math.isfinite(n) for n in value)
    if not fits or len(value) not in (_CHANNELS if count is None else (count,)):
        raise UnreadableError(f"its {key} is not a list of numbers")
    return tuple(map(float, value))


def _filter(given: Any) -> str:
    """Return the interpolation filter for its name, as in timm, or its number, as in Pillow."""
    names: dict[Any, str] = {number: name for name, number in INTERPOLATIONS.items()} | {None: "bilinear"}
    name = given if isinstance(given, str) else names.get(given if type(given) is int else None)
    if name not in INTERPOLATIONS:
        raise UnreadableError(f"its interpolation filter {shown(given)} is unknown")
    return str(name)


def _fitting(found: dict[str, Any], value: ir.Value) -> dict[str, Any]:
    """Return the arguments that apply to an input: without mean, std and scale if it reads bytes.

    Raises UnreadableError if the model reads images of a different size.
    """
    assert value.shape is not None
    dims = [dim if isinstance(dim, int) else None for dim in value.shape]
    height, width = dims[2:] if dims[1] in _CHANNELS or dims[3] not in _CHANNELS else dims[1:3]
    size = found.get("size")
    if size is not None and (height not in (None, size[0]) or width not in (None, size[1])):
        raise UnreadableError(f"its size is {list(size)}, but the model reads {[height, width]}")
    takes_bytes = value.dtype == ir.DataType.UINT8
    return {k: v for k, v in found.items() if not (takes_bytes and k in ("mean", "std", "scale"))}


def _in_words(value: Any) -> str:
    return str([round(v, 6) for v in value]) if isinstance(value, tuple) else str(value)
