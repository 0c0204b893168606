"""Attributions as markup: heat maps over pictures, coloured tokens, bars of columns and curves of sounds.

The scale is symmetric around 0: orange speaks for the class, blue against it (colours that colour-blind people can
tell apart).
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from gradgraph.attributions.explained import Explained
from gradgraph.data.arrays.batch import Array
from gradgraph.data.images.image_form import pixels_of
from gradgraph.errors import cut
from gradgraph.export.pages import escaped

POSITIVE, NEGATIVE = (213, 94, 0), (0, 114, 178)  # vermilion and blue of M. Okabe and K. Ito
SIDE = 320  # the largest height and width of a picture on the page, in pixels
MOST_BARS = 12
LONGEST = 60  # characters of a column's value
PALE = 0.35  # contrast of the grey picture below a heat map: both colours differ clearly from all of its greys
CLIP = 99  # percentile of |attributions| at which the colours of pictures and sounds end
SOUND = (400, 60)  # width and height of a curve


def signed(value: float) -> str:
    """Return a number with its sign and three digits."""
    return f"{value:+.3g}".replace("-", "−")


def drawn(found: Explained, name: str, row: int) -> str:
    """Return the markup of the attributions to an input of a sample."""
    sums, units = found.sums[name][row], found.units[name]
    match units.shown:
        case "picture":
            return _picture(found.inputs[name][row], sums.reshape(units.size), found.names.images.get(name, {}))
        case "tokens":
            return _tokens(found.tokens[name][row], sums)
        case "sound":
            return _sound(found.inputs[name][row].reshape(-1), sums, found.names.sounds.get(name, {}).get("rate"))
        case _:
            return _bars(found.bars(name, row, MOST_BARS), len(sums))


def limit_of(values: Array, percentile: float = 100) -> float:
    """Return the end of the colour scale: a percentile of |values|, or their maximum if that is 0; at least 1e-30."""
    sizes = np.abs(values[np.isfinite(values)])
    found = float(np.percentile(sizes, percentile)) if sizes.size else 0.0
    return max(found or float(sizes.max(initial=0)), 1e-30)


def colour_of(share: float) -> tuple[tuple[int, int, int], float]:
    """Return the colour of a share of the scale, from −1 to 1, and its opacity, from 0 to 1."""
    return (POSITIVE if share >= 0 else NEGATIVE), min(abs(share), 1.0) if np.isfinite(share) else 0.0


# --- pictures -------------------------------------------------------------------------------------------------


def heat_map(pixels: Array, values: Array, limit: float) -> Array:
    """Return a grey picture with attributions in colour on it.

    Args:
        pixels: uint8 [height, width, 3].
        values: attributions [height, width].
        limit: the end of the colour scale.

    Returns:
        uint8 [height, width, 3].
    """
    grey = 255 - (255 - pixels.mean(axis=2, keepdims=True)) * PALE
    share = np.nan_to_num(np.clip(values / limit, -1, 1))[:, :, None]
    colour = np.where(share >= 0, np.array(POSITIVE), np.array(NEGATIVE))
    found: Array = np.rint(grey + (colour - grey) * np.abs(share)).astype(np.uint8)
    return found


def png_of(pixels: Array) -> bytes:
    """Return uint8 [height, width, 3] as a PNG."""
    height, width = pixels.shape[:2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    parts = {b"IHDR": struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(lines.tobytes(), 9),
             b"IEND": b""}  # fmt: skip
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _picture(array: Array, values: Array, known: Mapping[str, object]) -> str:
    pixels = pixels_of(array, known)
    pixels = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]
    step = -(-max(values.shape) // SIDE)
    pixels, values = _reduced(pixels, step).astype(np.uint8), _reduced(values[:, :, None], step)[:, :, 0]
    limit = limit_of(values, CLIP)
    images = ((pixels, "the picture"), (heat_map(pixels, values, limit), "attributions on the picture in grey"))
    both = "".join(f'<img src="data:image/png;base64,{base64.b64encode(png_of(p)).decode()}" alt="{alt}">'
                   for p, alt in images)  # fmt: skip
    return f'<div class="pictures">{both}</div>{colour_bar(limit, bool((np.abs(values) > limit).any()))}'


def _reduced(pixels: Array, step: int) -> Array:
    """Return the means of squares of ``step`` pixels; incomplete ones at the edges are dropped."""
    if step == 1:
        return pixels
    height, width = (n // step for n in pixels.shape[:2])
    blocks = pixels[: height * step, : width * step].reshape(height, step, width, step, -1)
    return np.asarray(blocks.mean(axis=(1, 3)))


def colour_bar(limit: float, clips: bool = False) -> str:
    """Return the colour bar from −``limit`` to ``limit``; ``clips`` if larger values have the colours of its ends."""
    ends = (f"≤ −{limit:.3g}", f"≥ {limit:.3g}") if clips else (f"−{limit:.3g}", f"{limit:.3g}")
    return f'<div class="scale"><span>{ends[0]}</span><span class="ramp"></span><span>{ends[1]}</span></div>'


# --- tokens, columns, sounds ------------------------------------------------------------------------------------


def _tokens(tokens: Sequence[str], values: Array) -> str:
    own = [(token, value) for token, value in zip(tokens, values.tolist(), strict=True) if token]
    limit = limit_of(np.array([value for _, value in own]))
    spans = "".join(
        f'<span class="{_sign(v)}" style="--share: {_share(v, limit):.3f}" title="{signed(v)}">{escaped(t)}</span> '
        for t, v in own
    )
    return f'<p class="tokens">{spans}</p>{colour_bar(limit)}'


def _share(value: float, limit: float) -> float:
    """Return |value| as a share of the scale, from 0 to 1; 0 for NaN."""
    return min(abs(value) / limit, 1.0) if value == value else 0.0


def _sign(value: float) -> str:
    return "plus" if value >= 0 else "minus"


def _bars(bars: Sequence[tuple[str, str, float]], count: int) -> str:
    limit = limit_of(np.array([value for _, _, value in bars]))
    rows = "".join(
        f'<span class="name">{escaped(name)}{f" = <b>{escaped(cut(value, LONGEST))}</b>" if value else ""}</span>'
        f'<span class="track"><span class="{_sign(v)}" style="--share: {_share(v, limit):.3f}"></span></span>'
        f'<span class="number">{signed(v)}</span>'
        for name, value, v in bars
    )
    rest = f'<p class="hint">{count - len(bars)} more with smaller attributions</p>' if count > len(bars) else ""
    return f'<div class="signed">{rows}</div>{rest}'


def _sound(samples: Array, values: Array, rate: int | None) -> str:
    width, height = SOUND
    places = np.arange(len(samples)) * width // len(samples)
    loudest = max(float(np.abs(samples).max(initial=0)), 1e-30)
    ends = [
        (samples[places == i].max(initial=-loudest), samples[places == i].min(initial=loudest)) for i in range(width)
    ]
    wave = [f"{i},{height / 2 * (1 - high / loudest):.1f}" for i, (high, _) in enumerate(ends) if high > -loudest]
    wave += [f"{i},{height / 2 * (1 - low / loudest) + 0.5:.1f}" for i, (_, low) in reversed([*enumerate(ends)])
             if low < loudest]  # fmt: skip
    limit = limit_of(values, CLIP)
    across = width / len(values)
    bars = "".join(
        f'<rect class="{_sign(v)}" x="{i * across:.2f}" width="{across:.2f}" '
        f'y="{height * (1.5 - max(v, 0) / 2):.1f}" height="{height * abs(v) / 2:.1f}"/>'
        for i, v in enumerate(np.nan_to_num(np.clip(values / limit, -1, 1)).tolist())
    )
    end = f"{len(samples) / rate:.3g} s" if rate else f"{len(samples):,} samples"
    return (
        f'<svg class="sound" viewBox="0 0 {width} {2 * height}" preserveAspectRatio="none" role="img" '
        f'aria-label="the sound, and the attributions to its sections below"><polygon points="{" ".join(wave)}"/>{bars}'
        f'</svg><div class="scale"><span>0</span><span class="gap"></span><span>{end}</span></div>{colour_bar(limit)}'
    )
