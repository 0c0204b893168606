"""Convolution on onnxruntime's CPU provider: the order in which its forms are tried.

|    | many windows in an image               | few                 | 1x1, many pixels   | depthwise |
|----|----------------------------------------|---------------------|--------------------|-----------|
| y  | blocked, in tiles if channels are many | images innermost    | product per image  | blocked   |
| dx | the same; with a stride, by phases     | images innermost    | product per image  | blocked   |
| dw | rows in blocks, or a Scan over images  | images innermost    | product per image  | blocked   |

Maps of few windows are also tiled where whole tiles save enough (4 and 7 pixels high). Sequences (images of height 1)
are blocked, too; their dw is computed tap by tap (``conv_taps``) or in a Scan. Layers with 1x1 kernels are blocked
next to blocked nodes (``blocked/blocked_forms``).

The docstring of each form says where it is worth using. Times were measured with onnxruntime 1.31 on two AVX512 cores,
relative to PyTorch 2.13, float32, 8 to 64 images. Numbers of windows count one image, and numbers of channels count x,
unless stated otherwise.
"""

from gradgraph.backends.ort_cpu.conv import (
    conv_blocks,
    conv_images,
    conv_patches,
    conv_pointwise,
    conv_rows,
    conv_scan,
    conv_taps,
    conv_winograd,
)
from gradgraph.backends.ort_cpu.cpu_table import FORMS

FORMS.ask_in_order(
    "Conv",
    conv_pointwise.per_image,
    conv_winograd.blocked_tiles,
    conv_images.images_innermost,
    conv_blocks.blocked,
)
FORMS.ask_in_order(
    "ConvGradInput",
    conv_pointwise.per_image_dx,
    conv_winograd.blocked_tiles_dx,
    conv_images.images_innermost_dx,
    conv_blocks.blocked_dx,
    conv_patches.blocked_patches_dx,
    conv_blocks.blocked_spread_dx,
    conv_blocks.blocked_phases_dx,
)
FORMS.ask_in_order(
    "ConvGradWeight",
    conv_blocks.blocked_dw,
    conv_patches.blocked_patches_dw,
    conv_pointwise.per_image_dw,
    conv_pointwise.read_pixels_dw,
    conv_taps.each_tap_dw,
    conv_rows.rows_dw,
    conv_images.images_innermost_dw,
    conv_scan.scan_both_sides_dw,
    conv_scan.scan_channels_innermost_dw,
    conv_scan.scan_columns_dw,
)
