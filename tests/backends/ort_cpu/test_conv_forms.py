"""Forms of convolutions: which one is taken where, and the branches of forms that only large layers reach."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_cpu.conv import conv_blocks, conv_images, conv_scan, conv_winograd
from gradgraph.backends.ort_cpu.conv.layer import layer
from gradgraph.graph.builder import Builder, Var
from gradgraph.machine.hardware import nchwc_block
from gradgraph.rules.named_operators import DOMAIN, OPERATORS
from tests.kit.form_kit import problems_of_form

nn = gg.frontend.nn
FORMS = {f.name: f for f in ORT_CPU.lowering.forms}
needs_blocks = pytest.mark.skipif(
    nchwc_block() != 16, reason="the table below is that of a processor with blocks of 16"
)


def tensor(*dims: int | str) -> Var:
    return Builder().wrap(ir.Value(name="t", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims)))


def call(op_type: str, images: int, m: int, c: int, size: int, k: int, s: int = 1, group: int = 1) -> Call:
    """Of a Conv with "same" padding, or of one of its gradients."""
    attrs = {"strides": [s, s], "pads": [(k - 1) // 2] * 4, "group": group}
    x, w = tensor(images, c, size, size), tensor(m, c // group, k, k)
    y = tensor(images, m, -(-size // s), -(-size // s))
    inputs = {"Conv": (x, w), "ConvGradInput": (y, w, x), "ConvGradWeight": (x, y, w)}[op_type]
    return Call(ir.Node(DOMAIN if op_type in OPERATORS else "", op_type, []), inputs, attrs)


def chosen(which: Call) -> str:
    """The first form that is worth it and can serve."""
    for f in FORMS.values():
        if (f.domain, f.op_type) == (which.node.domain, which.node.op_type) and f.when(which):
            op = Builder()
            if f.write(op, *which.inputs, **which.attrs) is not None:
                return f.name
    return "portable"


TABLE: list[tuple[str, dict[str, int], tuple[str, str, str]]] = [
    (
        "stem",
        {"images": 32, "m": 64, "c": 3, "size": 64, "k": 7, "s": 2},
        ("blocked", "portable", "images_innermost_dw"),
    ),
    (
        "small stem",
        {"images": 32, "m": 32, "c": 3, "size": 96, "k": 3, "s": 2},
        ("blocked", "portable", "images_innermost_dw"),
    ),
    (
        "wide",
        {"images": 32, "m": 64, "c": 64, "size": 56, "k": 3},
        ("blocked", "blocked_dx", "scan_both_sides_dw"),
    ),
    (
        "wide, more channels of y",
        {"images": 32, "m": 128, "c": 64, "size": 56, "k": 3},
        ("blocked", "blocked_dx", "scan_channels_innermost_dw"),
    ),
    ("widest", {"images": 8, "m": 32, "c": 32, "size": 128, "k": 3}, ("blocked", "blocked_dx", "rows_dw")),
    (
        "widest, 120 px",
        {"images": 8, "m": 32, "c": 32, "size": 120, "k": 3},
        ("blocked", "blocked_dx", "scan_both_sides_dw"),
    ),
    (
        "wide and deep",
        {"images": 8, "m": 64, "c": 128, "size": 56, "k": 3},
        ("blocked", "blocked_dx", "scan_both_sides_dw"),
    ),
    ("32 px", {"images": 8, "m": 64, "c": 128, "size": 32, "k": 3}, ("blocked_tiles", "blocked_tiles_dx", "rows_dw")),
    (
        "32 px, few channels",
        {"images": 32, "m": 32, "c": 32, "size": 32, "k": 3},
        ("blocked", "blocked_dx", "images_innermost_dw"),
    ),
    (
        "8 px",
        {"images": 32, "m": 128, "c": 128, "size": 8, "k": 3},
        ("blocked_tiles", "blocked_tiles_dx", "images_innermost_dw"),
    ),
    *(
        (
            f"{size} px",
            {"images": 32, "m": 256, "c": 256, "size": size, "k": 3},
            (f"{y}", f"{y}_dx", "images_innermost_dw"),
        )
        for size, y in ((7, "blocked_tiles"), (6, "images_innermost"), (5, "images_innermost"), (4, "blocked_tiles"))
    ),
    (
        "2 px",
        {"images": 32, "m": 512, "c": 512, "size": 2, "k": 3},
        ("images_innermost", "images_innermost_dx", "images_innermost_dw"),
    ),
    ("one image", {"images": 1, "m": 64, "c": 64, "size": 16, "k": 3}, ("blocked", "blocked_dx", "portable")),
    (
        "patches",
        {"images": 32, "m": 128, "c": 64, "size": 32, "k": 2, "s": 2},
        ("blocked", "blocked_patches_dx", "blocked_patches_dw"),
    ),
    (
        "strided",
        {"images": 32, "m": 128, "c": 64, "size": 32, "k": 3, "s": 2},
        ("blocked", "blocked_phases_dx", "images_innermost_dw"),
    ),
    (
        "1x1, strided",
        {"images": 16, "m": 64, "c": 32, "size": 28, "k": 1, "s": 2},
        ("blocked", "portable", "read_pixels_dw"),
    ),
    ("1x1", {"images": 32, "m": 96, "c": 24, "size": 24, "k": 1}, ("per_image", "per_image_dx", "per_image_dw")),
    (
        "1x1, deep",
        {"images": 16, "m": 1024, "c": 256, "size": 14, "k": 1},
        ("per_image", "per_image_dx", "per_image_dw"),
    ),
    (
        "1x1, deep, 7 px",
        {"images": 16, "m": 2048, "c": 512, "size": 7, "k": 1},
        ("blocked", "blocked_dx", "images_innermost_dw"),
    ),
    (
        "depthwise",
        {"images": 4, "m": 96, "c": 96, "size": 24, "k": 3, "group": 96},
        ("blocked", "blocked_dx", "blocked_dw"),
    ),
    (
        "depthwise, fewer windows than taps",
        {"images": 16, "m": 96, "c": 96, "size": 3, "k": 5, "group": 96},
        ("blocked", "blocked_dx", "blocked_dw"),
    ),
    (
        "depthwise, a block that is not full",
        {"images": 16, "m": 30, "c": 30, "size": 14, "k": 3, "group": 30},
        ("blocked", "blocked_dx", "blocked_dw"),
    ),
    (
        "depthwise, few channels",
        {"images": 16, "m": 3, "c": 3, "size": 28, "k": 3, "group": 3},
        ("portable", "portable", "blocked_dw"),
    ),
    *(
        (
            f"depthwise, strided, {k}x{k}",
            {"images": 16, "m": 96, "c": 96, "size": 12, "k": k, "s": 2, "group": 96},
            ("blocked", dx, "blocked_dw"),
        )
        for k, dx in ((3, "blocked_spread_dx"), (5, "blocked_phases_dx"))
    ),
    ("one image", {"images": 1, "m": 20, "c": 20, "size": 4, "k": 3}, ("portable",) * 3),
]


@needs_blocks
@pytest.mark.parametrize(("sizes", "names"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_the_table_of_the_module(sizes: dict[str, int], names: tuple[str, str, str]) -> None:
    for op_type, name in zip(("Conv", "ConvGradInput", "ConvGradWeight"), names, strict=True):
        assert chosen(call(op_type, **sizes)) == name, op_type


def test_sizes_that_are_unknown_or_zero_are_left_to_the_portable_form() -> None:
    w = tensor(16, 16, 3, 3)
    for x in (tensor("N", 16, 8, 8), tensor(0, 16, 8, 8), tensor(4, 16, "H", 8), tensor(4, 16, 2, 2)):
        assert chosen(Call(ir.Node("", "Conv", []), (x, w), {})) == "portable"


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize(
    ("module", "name", "value", "form"),
    [
        (conv_images, "MOST_COLUMN_BYTES", 1, "images_innermost_dw"),  # a channel at a time
        (conv_images, "LEAST_CHANNELS_UNTURNED", 1, "images_innermost_dw"),  # not transposed
        (conv_images, "MOST_SUMS", 1 << 10, "images_innermost_dx"),  # S too large for some
        (conv_scan, "MOST_COPIED_BYTES", 1 << 9, "scan_both_sides_dw"),  # in bands of rows
        (conv_blocks, "LEAST_PADDING_WRITTEN", 1, "blocked"),  # written out
        (conv_blocks, "LEAST_PADDING_WRITTEN", 1, "blocked_dx"),
        (conv_blocks, "LEAST_PADDING_WRITTEN", 1, "blocked_dw"),
        (conv_blocks, "LEAST_WIDTH_PADDED_FOR_DW", 1, "blocked_dw"),
        (conv_blocks, "WIDTHS_PADDED_DEPTHWISE", range(1), "blocked"),  # in the windows of the kernel
    ],
)
def test_branches_that_only_large_layers_take(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: int, form: str
) -> None:
    monkeypatch.setattr(module, name, value)
    assert problems_of_form(ORT_CPU, FORMS[form]) == []


@pytest.mark.parametrize("name", [n for n, f in FORMS.items() if f.op_type == "ConvGradWeight" and "scan" in n])
def test_the_sum_of_a_scan_over_images_has_an_element_type(name: str) -> None:
    """onnx-ir warns of shapes without one, and leaves them out."""
    which, op = call("ConvGradWeight", images=2, m=32, c=32, size=20, k=3), Builder()
    dw = FORMS[name].write(op, *which.inputs, **which.attrs)
    assert dw is not None
    values = [dw.value]
    for value in values:
        producer = value.producer()
        values += [v for v in producer.inputs if v is not None] if producer is not None else []
        assert op.wrap(value).shape is None or value.type is not None, value.name


def test_without_blocks_on_the_machine_nothing_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_blocks, "nchwc_block", lambda: 0)
    sizes = {"images": 32, "m": 64, "c": 64, "size": 56, "k": 3}
    assert [chosen(call(o, **sizes)) for o in ("Conv", "ConvGradInput")] == ["portable", "portable"]


@pytest.mark.parametrize("taps", [3, 4, 5])
def test_tiles_are_what_windows_sum_up_and_round_little_more(taps: int) -> None:
    """Where either adds one number after the other: how the products of a processor round is not asked."""
    rows, rng = 7 - taps, np.random.default_rng(taps)
    x, w = rng.standard_normal((100, 128, 6)), rng.standard_normal((128, 32, taps))
    tiles = conv_winograd.products(taps)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
        for k in range(a.shape[-1]):
            found += a[..., k : k + 1] * b[..., k : k + 1, :]
        return found

    def direct(dtype: type) -> np.ndarray:
        reads = [x[:, :, i : i + taps].reshape(100, -1) for i in range(rows)]
        return np.stack([product(read.astype(dtype), by_tap(w).astype(dtype)) for read in reads])

    def by_tap(w: np.ndarray) -> np.ndarray:
        return w.transpose(0, 2, 1).reshape(-1, 32)

    def at_points(dtype: type) -> np.ndarray:
        a, b, g = (v.astype(dtype) for v in tiles)
        read, weights = np.einsum("il,tcl->itc", b, x.astype(dtype)), np.einsum("is,cms->icm", g, w.astype(dtype))
        return np.einsum("ir,itm->rtm", a, product(read, weights))

    exact = direct(np.float64)
    np.testing.assert_allclose(at_points(np.float64), exact, atol=1e-12)
    errors = [np.sqrt(np.mean((found - exact) ** 2)) for found in (direct(np.float32), at_points(np.float32))]
    assert errors[1] < 2 * errors[0]


def test_reads_are_where_taps_of_windows_lie() -> None:
    attrs = {"strides": [2, 1], "pads": [1, 0, 0, 2], "dilations": [1, 2]}
    it = layer(tensor(1, 1, 4, 5), tensor(1, 1, 3, 2), None, attrs)
    assert it is not None and it.count == (2, 5)
    expected = np.full((3, 2, *it.count), 4 * 5)
    for t, u, i, j in itertools.product(range(3), range(2), *map(range, it.count)):
        row, column = i * 2 + t - 1, j + u * 2
        if 0 <= row < 4 and column < 5:
            expected[t, u, i, j] = row * 5 + column
    assert it.reads().tolist() == expected.reshape(6, 10).tolist()


@pytest.mark.parametrize("channels", [3, 64])
def test_what_a_loop_over_images_gives_has_a_type(channels: int, caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(nn.Conv2d(channels, 64, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    step = gg.build(gg.frontend.export(network, {"x": ("batch", channels, 56, 56)}), optimizer="sgd")
    lowered = for_machine(step.train, ORT_CPU, {"batch": 2})
    assert any(n.op_type == "Scan" for n in lowered.graph.node)
    assert not caplog.records  # onnx-ir warns of shapes without a type
