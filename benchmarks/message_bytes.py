"""Bytes of a federated round: all weights in float32, or adapters alone, of a Llama in 4 bits (``large_models.py``).

    python -m benchmarks.message_bytes [--gigabytes 0.92] [--rank 8]

What travels is what the step's manifest names as parameters and statistics (``examples/federated/step_folder.py``).
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import onnx

import gradgraph as gg
from benchmarks.large_models import language_model

TARGETS = {"q": "layers.*.q*", "every product": "layers.*"}
TRAVELS = ("parameter", "statistic")


def travelling(step: gg.Step) -> int:
    """Bytes that go to a client, and come back."""
    state = [s for s in step.manifest.state if s.kind in TRAVELS]
    return sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in state)


def stored_numbers(path: Path) -> int:
    """Weights of a model: two in each byte of 4-bit products."""
    weights = onnx.load(path, load_external_data=False).graph.initializer
    twice = {name for node in onnx.load(path, load_external_data=False).graph.node
             if node.op_type == "MatMulNBits" for name in node.input[1:2]}  # fmt: skip
    return sum(math.prod(t.dims) * (2 if t.name in twice else 1) for t in weights if t.data_type in (1, 2))


def table(path: Path, rank: int) -> str:
    numbers = stored_numbers(path)
    lines = ["| what travels | numbers | bytes to a client, and back | of all weights |", "|---|---|---|---|",
             f"| all weights in float32 | {numbers:,} | {4 * numbers:,} | 1 |"]  # fmt: skip
    for name, target in TARGETS.items():
        adapted = gg.lora(path, target=target, rank=rank, out=path.with_name(f"adapted-{len(name)}.onnx"))
        sent = travelling(gg.build(adapted, "cross_entropy", gg.optim.adamw(1e-3)))
        lines.append(f"| LoRA of rank {rank}, {name} | {sent // 4:,} | {sent:,} | 1 / {4 * numbers / sent:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.92)
    parser.add_argument("--rank", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        language_model(path, given.gigabytes)
        print(table(path, given.rank))


if __name__ == "__main__":
    main()
