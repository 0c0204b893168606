"""``docs/how-it-works/scaling.md`` and its drawing, from the figures of ``scaling.json``."""

from __future__ import annotations

import html
import math
from typing import Any

from benchmarks.scaling_model import (
    ACCELERATOR,
    ALL_REDUCES,
    LINKS,
    NETWORKS,
    REPEATS,
    SPEEDS,
    WIRES,
    Link,
    Message,
    Network,
    efficiency,
    fitted,
    predicted,
    seconds_of,
)

COUNTS = (2, 8, 64, 256, 1024)  # of ranks, in tables
DRAWN = tuple(2**i for i in range(1, 11))
COMPRESSED = "power_sgd(rank=4)"
LATENCIES = ", ".join(f"{link.latency * 1e6:.0f} µs at {name}" for name, link in LINKS.items())

INTRODUCTION = """# How far more ranks go

What [many processes](../how-to/many-machines.md) bring, computed: a model of the time of a step, fitted to 1, 2 and 4
ranks on one machine, and what it says of networks and numbers of ranks that we do not have. The command
`python -m benchmarks.scaling --save` writes this page, with its figures in [scaling.json](scaling.json); do not edit.

![Efficiency by number of ranks, for four networks and three links](scaling.svg)

## The model

A step takes computing, and then a message: the gradients of all ranks are added up (an all-reduce of `n` bytes among
`p` ranks). A message between two ranks takes a latency, and a time for each byte, in which adding up is counted:

| all-reduce | seconds | source |
|---|---|---|
| around a ring | 2 (p − 1) latency + 2 (p − 1)/p · n · per byte | Patarasuk and Yuan 2009 |
| recursive halving and doubling | 2 ⌈log₂ p⌉ latency + 2 (p − 1)/p · n · per byte | Rabenseifner, in Thakur et al. |
| up a tree and down again | 2 ⌈log₂ p⌉ (latency + n · per byte) | Thakur et al. 2005 |

A ring and halving send the fewest bytes that an all-reduce can; a tree and halving need the fewest rounds. The
soonest of them counts, as MPI chooses by size. *Efficiency* is computing over the whole step, where every rank keeps
its batch: with 64 ranks at 0.5, an epoch takes a 32nd of the time. Nothing is hidden behind computing, since
gradgraph sends when the gradients are complete.
"""

LIMITS = f"""
## What the tables leave out

Latencies are assumed ({LATENCIES}), links are full and nobody else's, no rank is slower than another, reading data
costs nothing, and the larger batch is as good a batch. Compression
costs computing, which is not counted, and changes what is learnt ([what it is](../how-to/many-machines.md)).
`power_sgd` sends
two factors of rank 4 for each matrix (Vogels et al. 2019); `top_k` a value and a place for one number in a hundred,
from each rank to all, so it is dearer the more ranks there are; `local_sgd` and `diloco` a dense message now and then.

So: over 1 Gbit/s, dense gradients of a whole network are for processors, and an accelerator waits. What helps, in
this order: adapters; more computing a message (`accumulate`, a larger batch); compression; a faster link.

## What we do not do

- **Tensor parallelism**, which divides a product among ranks: Megatron-LM, or vLLM and TensorRT-LLM for inference. A
  model that does not fit a device with its optimizer is first a case for [adapters on 4
  bits](../how-to/large-models.md), [recomputing](../how-to/memory.md) and 16-bit weights.
- **Pipeline parallelism**, which gives each rank some layers: DeepSpeed, or PyTorch's `torch.distributed.pipelining`.
- **Sharded weights** (ZeRO stage 3): PyTorch's FSDP2, or DeepSpeed.

Train there in PyTorch, and export to ONNX what has been trained.
"""


def page(told: dict[str, Any]) -> str:
    """The whole page."""
    parts = [INTRODUCTION, _fit_section(told), *(_speed_section(speed) for speed in SPEEDS), _wire_section(), LIMITS]
    return "\n".join(part.strip() + "\n" for part in parts)


def _fit_section(told: dict[str, Any]) -> str:
    cores = told["cores"]
    messages = [Message(**row) for row in told["messages"]]
    within = [m for m in messages if m.ranks <= cores] or messages
    link = fitted(within, ALL_REDUCES["halving"])
    before, after = told["load"]
    lines = [
        "## What was measured",
        "",
        f"One thread a rank, {cores} cores, load {before} before and {after} after (a load of 0 is a quiet machine). "
        f"The link is that between processes of one machine: fitted to all-reduces of up to {cores} ranks (the "
        f"quickest of {REPEATS}), a latency of {link.latency * 1e6:.0f} µs and {1e-9 / link.per_byte:.1f} GB/s. "
        "Four ranks share the cores, so their messages take longer. Where the load is above the cores, more ranks take "
        "a larger part of a busy machine, and the last column below flatters: repeat the command on a quiet one.",
        "",
        "| ranks | bytes | all-reduce, measured | model |",
        "|---|---|---|---|",
    ]
    for m in messages:
        told_by = _time(seconds_of(ALL_REDUCES["halving"](m.ranks, m.size), link))
        lines.append(f"| {m.ranks} | {m.size:,} | {_time(m.seconds)} | {told_by} |")
    lines += [
        "",
        "| network | ranks | step, measured | model | samples a second, over one rank's |",
        "|---|---|---|---|---|",
    ]
    for name, found in told["steps"].items():
        one = found["1"]
        for ranks in sorted(int(key) for key in found if key != "bytes"):
            step = found[str(ranks)]["step"]
            told_by = _time(predicted(one, ranks, cores, found["bytes"], link))
            lines.append(f"| {name} | {ranks} | {_time(step)} | {told_by} | {ranks * one['step'] / step:.2f} |")
    return "\n".join(lines)


def _speed_section(speed: str) -> str:
    how = {
        "this processor": "Steps of two cores (LoRA: of one), as [performance](performance.md) and "
        "[large models](../how-to/large-models.md) have them.",
        "50 TFLOP/s": f"The same batches on a rank that does {ACCELERATOR / 1e12:.0f} · 10¹² operations a second, as a "
        "graphics processor may.",
    }[speed]
    lines = [f"## Efficiency: {speed}", "", f"{how} Dense gradients in float32.", ""]
    lines += [f"| network | gradients | a step alone | link | {' | '.join(f'{count:,} ranks' for count in COUNTS)} |"]
    lines += ["|---|---|---|---|" + "---|" * len(COUNTS)]
    for net in NETWORKS:
        for name, link in LINKS.items():
            cells = " | ".join(_share(efficiency(net, count, link, speed=speed)) for count in COUNTS)
            head = f"{net.name}, {net.batch} | {_bytes(net.size)} | {_time(SPEEDS[speed](net))}"
            lines.append(f"| {head} | {name} | {cells} |")
    return "\n".join(lines)


def _wire_section() -> str:
    lines = [
        "## Compressed",
        "",
        "The accelerator again, with 64 ranks: bytes of a rank and a step, in the mean, and efficiency.",
        "",
        f"| network | wire | bytes of a step | {' | '.join(LINKS)} |",
        "|---|---|---|" + "---|" * len(LINKS),
    ]
    for net in NETWORKS:
        for wire in WIRES:
            cells = " | ".join(_share(efficiency(net, 64, link, wire)) for link in LINKS.values())
            lines.append(f"| {net.name} | {wire} | {_bytes(_sent(net, wire))} | {cells} |")
    return "\n".join(lines)


def _sent(net: Network, wire: str) -> float:
    """Bytes, from what a message between two ranks takes on a link that has no latency: each sends all of it once."""
    return WIRES[wire](net, 2, Link(0.0, 1.0))


def _share(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"


# --- the drawing ------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 400, 200, 60, 70, 90, 80
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1d2b38; }
.title { font-weight: 600; font-size: 14px; }
.axis { stroke: #9db1c4; fill: none; }
.grid { stroke: #dde5ec; fill: none; }
polyline { fill: none; stroke-width: 2; }
.l0 { stroke: #b3261e; } .l1 { stroke: #1f6fb2; } .l2 { stroke: #2e7d32; }
.thin { stroke-dasharray: 5 4; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .axis { stroke: #7f9cb8; } .grid { stroke: #2c3a47; }
  .l0 { stroke: #ff8a80; } .l1 { stroke: #7fbfff; } .l2 { stroke: #8ddb91; }
}
"""


def drawing() -> str:
    """Four panels, a line for each link; dashed: compressed."""
    width, height = 2 * WIDTH + GAP_X + LEFT + 30, 2 * HEIGHT + GAP_Y + TOP + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Efficiency by number of ranks, for four networks and three links</title>",
        f"<style>{STYLE}</style>",
        *_legend(),
    ]
    for i, net in enumerate(NETWORKS):
        parts += _panel(net, LEFT + (i % 2) * (WIDTH + GAP_X), TOP + (i // 2) * (HEIGHT + GAP_Y))
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts, x = [], LEFT
    for i, name in enumerate(LINKS):
        parts += [f'<polyline class="l{i}" points="{x},20 {x + 28},20"/>', f'<text x="{x + 34}" y="24">{name}</text>']
        x += 150
    parts += [f'<polyline class="l1 thin" points="{x},20 {x + 28},20"/>',
              f'<text x="{x + 34}" y="24">dashed: {COMPRESSED}; ranks of 50 TFLOP/s</text>']  # fmt: skip
    return parts


def _panel(net: Network, x: int, y: int) -> list[str]:
    parts = [f'<text class="title" x="{x}" y="{y - 10}">{html.escape(f"{net.name}, {net.batch}")}</text>']
    for share in (0.0, 0.5, 1.0):
        at = y + HEIGHT * (1 - share)
        parts += [f'<path class="grid" d="M{x} {at:.1f}H{x + WIDTH}"/>',
                  f'<text x="{x - 8}" y="{at + 4:.1f}" text-anchor="end">{share:g}</text>']  # fmt: skip
    for count in (2, 8, 32, 128, 1024):
        parts.append(f'<text x="{_across(count, x):.1f}" y="{y + HEIGHT + 18}" text-anchor="middle">{count}</text>')
    parts += [f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT + 36}" text-anchor="middle">ranks</text>',
              f'<text x="{x + 6}" y="{y + 14}">efficiency</text>' if net is NETWORKS[0] else "",
              f'<path class="axis" d="M{x} {y}V{y + HEIGHT}H{x + WIDTH}"/>']  # fmt: skip
    for i, link in enumerate(LINKS.values()):
        for wire, kind in (("dense", ""), (COMPRESSED, " thin")):
            points = " ".join(
                f"{_across(n, x):.1f},{y + HEIGHT * (1 - efficiency(net, n, link, wire)):.1f}" for n in DRAWN
            )
            parts.append(f'<polyline class="l{i}{kind}" points="{points}"/>')
    return parts


def _across(count: int, x: int) -> float:
    return x + WIDTH * (math.log2(count) - 1) / 9
