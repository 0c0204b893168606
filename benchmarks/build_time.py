"""Times what happens before the first step: building the step (or the gradient) and opening its session.

    python benchmarks/build_time.py [graph ...] [--rounds 3]

Every row is measured in a process of its own, after one small build has loaded everything. Prints medians in seconds,
and nodes: of the model that goes in, written for the step, and left after clean-up. The session is onnxruntime's own,
of the step as it is saved; that of the longest chain is left out, as onnxruntime takes time quadratic in its length.
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
    "gpt2": ("GPT-2, 12 layers, AdamW", gpt2, build),
    "chain-2500": ("chain of 2,500, gradient", chain(2_500), gradient),
    "chain-10000": ("chain of 10,000, gradient", chain(10_000), gradient),
}
UNOPENED = ("chain-10000",)
COMMANDS = {"import gradgraph": ["-c", "import gradgraph"], "gradgraph --help": ["-m", "gradgraph.cli", "--help"]}


def seconds(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function(*arguments, **options)
    return time.perf_counter() - start, result


def session(model: Any) -> Any:
    import onnxruntime as ort

    from gradgraph.runtime.execution.session import CPU, RuntimeOptions

    options = RuntimeOptions(threads=THREADS).session_options()
    return ort.InferenceSession(model.SerializeToString(), options, providers=[CPU])


def measure(name: str, rounds: int) -> list[str]:
    """One row: nodes of the model, written and left, median seconds of building and of opening."""
    from gradgraph.step import WRITTEN_KEY

    _, make, write = GRAPHS[name]
    build(mlp())
    model = make()
    built, opened = [], []
    for _ in range(rounds):
        taken, result = seconds(write, model)
        built.append(taken)
        if name not in UNOPENED:
            opened.append(seconds(session, result)[0])
    written = next((f"{int(p.value):,}" for p in result.metadata_props if p.key == WRITTEN_KEY), "")
    times = [f"{statistics.median(t):.2f}" if t else "" for t in (built, opened)]
    return [f"{len(model.graph.node):,}", written, f"{len(result.graph.node):,}", *times]


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
    print(f"{'':28}{'model':>9}{'written':>9}{'left':>9}{'build s':>9}{'session s':>11}")
    for name in arguments.graphs or GRAPHS:
        command = [sys.executable, __file__, "--measure", name, "--rounds", str(arguments.rounds)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{GRAPHS[name][0]:28}{row[0]:>9}{row[1]:>9}{row[2]:>9}{row[3]:>9}{row[4]:>11}", flush=True)
    for title, words in {} if arguments.graphs else COMMANDS.items():
        taken = [
            seconds(subprocess.run, [sys.executable, *words], check=True, capture_output=True)[0]
            for _ in range(arguments.rounds + 2)
        ]
        print(f"{title:28}{'':27}{statistics.median(taken):9.2f}", flush=True)


if __name__ == "__main__":
    main()
