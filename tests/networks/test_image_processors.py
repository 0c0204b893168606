"""Pictures are read as transformers' image processors and torchvision's transforms read them, on random pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.data.images.image_form import ImageForm
from gradgraph.data.record.image_preprocessing import _read
from gradgraph.data.record.specs import TensorSpec

Image: Any = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")
torch = pytest.importorskip("torch", reason="transforms are those of PyTorch")
transformers = pytest.importorskip("transformers", reason="in no extra; `make shipped-models` runs these tests with it")

from benchmarks import torchvision_operators  # noqa: E402

torchvision_operators.declare()  # its wheels have operators for one build of PyTorch; transforms need none
torchvision = pytest.importorskip("torchvision", reason="in no extra; `make shipped-models` runs these tests with it")

PROCESSORS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
    "BitImageProcessor": {"size": {"shortest_edge": 29}, "crop_size": {"height": 24, "width": 24}},
    "MobileNetV2ImageProcessor": {"size": {"shortest_edge": 17}, "crop_size": {"height": 24, "width": 24}},
    "ViTImageProcessor": {"size": {"height": 24, "width": 24}, "rescale_factor": 1 / 127.5},
    "ConvNextImageProcessor": {"size": {"shortest_edge": 24}, "crop_pct": 0.875},
    "MobileViTImageProcessor": {"size": {"shortest_edge": 26}, "crop_size": {"height": 24, "width": 24}},
}
SPEC = TensorSpec("x", "float32", ("n", 3, 24, 24))


def photograph(rng: np.random.Generator) -> Any:
    """A random picture without sharp edges, on which filters agree to a level."""
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    width, height = rng.integers(12, 90, 2)
    return small.resize((int(width), int(height)), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_of_transformers(name: str) -> None:
    if name == "MobileNetV2ImageProcessor" and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("versions before 5 put the odd row of padding in front, version 5 behind, as torchvision")
    processor = getattr(transformers, name)(**PROCESSORS[name])
    document = json.loads(processor.to_json_string())
    read = _read({**document, "image_processor_type": name})
    assert read is not None
    form, rng = ImageForm(**read).of(SPEC), np.random.default_rng(1)
    level = (form.scale or 1 / 255) / min(form.std or (1.0,))
    for _ in range(25):
        image = photograph(rng)
        expected = np.asarray(processor(images=image, return_tensors="np")["pixel_values"][0])
        found = form(image)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= 3 * level + 1e-5


@pytest.mark.parametrize("shorter", [None, 13, 24, 29, 40])
@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "nearest"])
def test_transforms_of_torchvision(shorter: int | None, resample: str, tmp_path: Path) -> None:
    """To the bit."""
    from torchvision.transforms import v2

    how = v2.InterpolationMode(resample)
    sized = [v2.Resize((24, 20), how)] if shorter is None else [v2.Resize(shorter, how), v2.CenterCrop((24, 20))]
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    plainly = v2.Compose([*sized, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    rng = np.random.default_rng(2)
    for i in range(10):
        photograph(rng).save(tmp_path / f"{i}.png")
    found = gg.image_folder(tmp_path, (24, 20), mean=mean, std=std, shorter=shorter, resample=resample)
    for i, file in enumerate(found.files):
        np.testing.assert_allclose(found[i][0], plainly(Image.open(file)).numpy(), rtol=0, atol=1e-6)
