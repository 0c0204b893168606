"""Times what happens before the first step: building the step (or the gradient) and opening its session.

    python benchmarks/build_time.py [graph ...] [--rounds 3]

Every row is measured in a process of its own, after one small build has loaded everything. Prints medians of seconds
of processor time (which busy neighbours disturb least), and nodes: of the model that goes in, written for the step, and
left after clean-up. "saved s" opens the step as it is saved in onnxruntime; that of the longest chain is left out, as
onnxruntime takes time quadratic in its length. The next columns are what a Trainer does before its first step: it
lowers the step for two images on this processor, and opens that. The last is their sum, in milliseconds for each node
of the model that goes in.
The last rows time whole processes: the import, and the command line's help.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

THREADS = 2


def mlp() -> Any:
    from gradgraph.frontend import export, nn

    network = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return export(network, {"x": ("batch", 784)})


def resnet50() -> Any:
    from gradgraph.frontend import export, nn

    class Bottleneck(nn.Module):
        def __init__(self, channels: int, width: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
            )
            shortcut = [nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)]
            self.shortcut = nn.Sequential(*(shortcut if channels != 4 * width or stride != 1 else []))

        def forward(self, x: Any) -> Any:
            return (self.body(x) + self.shortcut(x)).relu()

    layers: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if i == 0 and width > 64 else 1))
            channels = 4 * width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return export(network, {"x": ("batch", 3, 224, 224)})


def gpt2() -> Any:
    """GPT-2 small: 12 layers, 124 million parameters, the head tied to the embedding."""
    from gradgraph.frontend import Input, export, nn
    from gradgraph.frontend import functional as F

    width, heads, length, vocabulary = 768, 12, 1024, 50257

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, time_, _ = x.shape
            parts = self.qkv(self.ln_1(x)).reshape(batch, time_, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.proj(y.permute(0, 2, 1, 3).reshape(batch, time_, width))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class Gpt2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(12)))
            self.ln = nn.LayerNorm(width)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
            logits = self.ln(self.blocks(x)) @ self.tokens.weight.permute(1, 0)
            return logits.reshape(-1, vocabulary)

    return export(Gpt2(), {"ids": Input(("batch", "time"), "int64")})


def repvit() -> Any:
    """Depthwise convolutions with parallel branches, GELU and squeezed channels, as RepViT has them."""
    from gradgraph.frontend import export, nn
    from gradgraph.frontend import functional as F

    def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> Any:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs))

    class Squeeze(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            down, up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)
            self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), down, nn.ReLU(), up, nn.Sigmoid())

        def forward(self, x: Any) -> Any:
            return x * self.gate(x)

    class Branches(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.wide, self.point = conv(width, width, 3, groups=width), nn.Conv2d(width, width, 1, groups=width)
            self.norm = nn.BatchNorm2d(width)

        def forward(self, x: Any) -> Any:
            return self.norm(self.wide(x) + self.point(x) + x)

    class Block(nn.Module):
        def __init__(self, inputs: int, width: int, squeezes: bool) -> None:
            super().__init__()
            smaller = [conv(inputs, inputs, 3, 2, inputs), conv(inputs, width)]
            tokens = [Branches(inputs)] if inputs == width else smaller
            self.tokens = nn.Sequential(*tokens, *([Squeeze(width)] if squeezes else []))
            self.up, self.down = conv(width, 2 * width), conv(2 * width, width)

        def forward(self, x: Any) -> Any:
            x = self.tokens(x)
            return x + self.down(F.gelu(self.up(x)))

    layers = [conv(3, 24, 3, 2), nn.GELU(), conv(24, 48, 3, 2)]
    inputs = 48
    for width, blocks in ((48, 4), (96, 5), (192, 17), (384, 4)):
        for i in range(blocks):
            layers.append(Block(inputs, width, i % 2 == 1))
            inputs = width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 100))
    return export(network, {"x": ("batch", 3, 128, 128)})


def unetpp() -> Any:
    """U-Net++: every stage reads all earlier ones of its size, and the next smaller one."""
    from gradgraph.frontend import export, nn
    from gradgraph.frontend import functional as F

    widths = (16, 32, 64, 96, 128)
    depth = len(widths)

    def twice(inputs: int, width: int) -> Any:
        first = nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        return nn.Sequential(
            *first, nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for d, width in enumerate(widths):
                setattr(self, f"stage{d}_0", twice(widths[d - 1] if d else 3, width))
                for j in range(1, depth - d):
                    setattr(self, f"stage{d}_{j}", twice(width * j + widths[d + 1], width))
            self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(widths[0], 4, 1)
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)

        def forward(self, x: Any) -> Any:
            seen: dict[tuple[int, int], Any] = {}
            for j in range(depth):
                for d in range(depth - j):
                    below = (self.pool(seen[d - 1, 0]) if d else x) if j == 0 else self.up(seen[d + 1, j - 1])
                    read = F.cat([*(seen[d, k] for k in range(j)), below], 1) if j else below
                    seen[d, j] = getattr(self, f"stage{d}_{j}")(read)
            return self.head(seen[0, depth - 1])

    return export(Network(), {"x": ("batch", 3, 96, 96)})


def chain(length: int) -> Callable[[], Any]:
    """Sines of sines, with a scalar at the end."""

    def make() -> Any:
        from onnx import TensorProto, helper

        nodes = [helper.make_node("Sin", [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]
        nodes.append(helper.make_node("ReduceSum", [f"v{length}"], ["loss"], keepdims=0))
        x = helper.make_tensor_value_info("v0", TensorProto.FLOAT, [2])
        loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
        graph = helper.make_graph(nodes, "chain", [x], [loss])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    return make


def build(model: Any) -> Any:
    import gradgraph as gg

    return gg.build(model, "cross_entropy", "adamw").train


def gradient(model: Any) -> Any:
    import gradgraph as gg

    return gg.value_and_grad(model, wrt="v0")


GRAPHS: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {
    "mlp": ("MLP 784-512-512-10, AdamW", mlp, build),
    "resnet50": ("ResNet-50, AdamW", resnet50, build),
    "repvit": ("RepViT, AdamW", repvit, build),
    "unetpp": ("U-Net++, AdamW", unetpp, build),
    "gpt2": ("GPT-2, 12 layers, AdamW", gpt2, build),
    "chain-2500": ("chain of 2,500, gradient", chain(2_500), gradient),
    "chain-10000": ("chain of 10,000, gradient", chain(10_000), gradient),
}
UNOPENED = ("chain-10000",)
LOWERED = ("mlp", "resnet50", "repvit", "unetpp")
COMMANDS = {
    "import gradgraph": ["-c", "import gradgraph"],
    "gradgraph --help": ["-m", "gradgraph.cli", "--help"],
    "first build, of the MLP": ["-c", "from benchmarks.build_time import build, mlp; build(mlp())"],
}


def seconds(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    start = time.process_time()
    result = function(*arguments, **options)
    return time.process_time() - start, result


def whole(command: list[str]) -> float:
    """Seconds by the clock, of another process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def session(model: Any) -> Any:
    from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session

    return create_session(model, Placement.choose("cpu"), RuntimeOptions(threads=THREADS))


def lower(model: Any) -> Any:
    from gradgraph.backends import BACKENDS
    from gradgraph.backends.engine import for_machine
    from gradgraph.runtime.execution.node_order import in_good_order

    return in_good_order(for_machine(model, BACKENDS["ort-cpu"], {"batch": 2}), ["x", "target"], ())


def measure(name: str, rounds: int) -> list[str]:
    """One row: nodes, median seconds, and milliseconds for each node, in the order of the titles."""
    from gradgraph.step.step import WRITTEN_KEY

    _, make, write = GRAPHS[name]
    build(mlp())
    model = make()
    built, opened, lowered, last = [], [], [], []
    for _ in range(rounds):
        taken, result = seconds(write, model)
        built.append(taken)
        if name not in UNOPENED:
            opened.append(seconds(session, result)[0])
        if name in LOWERED:
            taken, machine = seconds(lower, result)
            lowered.append(taken)
            last.append(seconds(session, machine)[0])
    written = next((f"{int(p.value):,}" for p in result.metadata_props if p.key == WRITTEN_KEY), "")
    medians = [statistics.median(t) if t else None for t in (built, opened, lowered, last)]
    times = ["" if t is None else f"{t:.2f}" for t in medians]
    nodes = len(model.graph.node)
    each = f"{1e3 * (medians[2] + medians[3]) / nodes:.1f}" if medians[2] and medians[3] else ""
    return [f"{nodes:,}", written, f"{len(result.graph.node):,}", *times, each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", help=f"of {', '.join(GRAPHS)}; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.rounds)))
        return
    if unknown := set(arguments.graphs) - set(GRAPHS):
        parser.error(f"no graph {', '.join(sorted(unknown))}; there is {', '.join(GRAPHS)}")
    titles = ("model", "written", "left", "build s", "saved s", "lower s", "open s", "ms/node")
    print(f"{'':28}{''.join(f'{title:>9}' for title in titles)}")
    for name in arguments.graphs or GRAPHS:
        command = [sys.executable, __file__, "--measure", name, "--rounds", str(arguments.rounds)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{GRAPHS[name][0]:28}{''.join(f'{cell:>9}' for cell in row)}", flush=True)
    for title, words in {} if arguments.graphs else COMMANDS.items():
        taken = [whole([sys.executable, *words]) for _ in range(arguments.rounds + 2)]
        print(f"{title:28}{'':27}{statistics.median(taken):9.2f}", flush=True)


if __name__ == "__main__":
    main()
