"""LoRA on a language model: 4 bits in gradgraph, float32 and bfloat16 in PyTorch, with adapters as PEFT writes them.

    python -m benchmarks.four_bits [--gigabytes 0.32] [--length 128] [--peers gradgraph,stock,torch,bf16]

The model has the shapes of Llama (``large_models.py``); adapters of rank 8 stand at one product of each layer. Each
peer is a process of its own; ``stock`` is gradgraph without native kernels. Columns: the peak of memory that no file
backs and of all memory, sampled every 5 ms, imports included; processor time of the first step, with what opens it,
and of a later one, the median; losses. The weights of gradgraph and PyTorch differ, so do the losses. 0.32 GB are 334
million weights, 0.92 GB 1.17 billion; ``--gigabytes 2.2 --layers 28`` makes 3.1 billion.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.large_memory import memory_of
from benchmarks.large_models import HEAD, LENGTH, WORDS, language_model, words_and_length

RANK, ALPHA, RATE, LAYERS = 8, 16, 1e-3, 16
Step = Callable[[dict[str, np.ndarray]], float]


def with_gradgraph(path: Path, given: argparse.Namespace, **options: Any) -> Step:
    import gradgraph as gg

    adapted = gg.lora(path, target="layers.*.q*", rank=RANK, alpha=ALPHA, out=path.with_name("adapted.onnx"))
    step = gg.build(adapted, "cross_entropy", gg.optim.adamw(RATE), recompute=given.recompute)
    options = {"threads": given.threads, **options, **given.options}
    trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(**options))
    return lambda batch: float(trainer.step(batch)["loss"])


def with_torch(path: Path, given: argparse.Namespace, dtype: str = "float32") -> Step:
    import onnx
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(given.threads)
    stored = onnx.load(path, load_external_data=False).graph.initializer
    words, width = next(t.dims for t in stored if t.name == "tokens.weight")

    class Adapted(nn.Linear):
        """As PEFT has it: a frozen product, and one of two small factors beside it."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs, bias=False)
            self.a, self.b = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.b(self.a(x.to(self.a.weight.dtype))).to(x.dtype) * (ALPHA / RANK)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
            self.q = Adapted(width, width)
            self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, length, _ = x.shape
            h = self.norm_1(x)
            q, k, v = (p(h).view(rows, length, -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
            h = self.norm_2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.norm = nn.Embedding(words, width), nn.RMSNorm(width, 1e-5)
            self.layers = nn.ModuleList(Layer() for _ in range(given.layers))
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x)).flatten(0, 1)

    torch.set_default_dtype(getattr(torch, dtype))
    model = Model().requires_grad_(False)
    trained = [p.requires_grad_() for n, p in model.named_parameters() if n.endswith((".a.weight", ".b.weight"))]
    for p in trained:
        p.data = p.data.float()
    optimizer = torch.optim.AdamW(trained, RATE)

    def step(batch: dict[str, np.ndarray]) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.from_numpy(batch["ids"])).float(), torch.from_numpy(batch["target"]))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


PEERS: dict[str, Callable[[Path, argparse.Namespace], Step]] = {
    "gradgraph": with_gradgraph,
    "stock": partial(with_gradgraph, native_kernels=False),
    "torch": with_torch,
    "bf16": partial(with_torch, dtype="bfloat16"),
}


def measure(given: argparse.Namespace, path: Path) -> dict[str, Any]:
    words, length = words_and_length(path)
    rng = np.random.default_rng(0)
    batch = {"ids": rng.integers(0, words, (1, length)), "target": rng.integers(0, words, length)}
    begin = time.process_time()
    step = PEERS[given.peer](path, given)
    opened, losses, seconds = time.process_time() - begin, [], []
    for _ in range(given.steps + 1):
        begin = time.process_time()
        losses.append(step(batch))
        seconds.append(time.process_time() - begin)
    return {"opened": opened, "first": seconds[0], "seconds": statistics.median(seconds[1:]), "losses": losses}


def watched(command: list[str]) -> dict[str, Any]:
    """What a process says, and its peaks of memory that no file backs and of all memory, in GB."""
    peaks = [0, 0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.poll() is None:
            private, mapped = memory_of(process.pid)
            peaks = [max(p, n) for p, n in zip(peaks, (private, private + mapped), strict=True)]
            time.sleep(0.005)
        text = process.stdout.read()
    if process.returncode:
        raise SystemExit(process.returncode)
    return {**json.loads(text.splitlines()[-1]), "private": peaks[0] / 1e9, "peak": peaks[1] / 1e9}


def _line(peer: str, row: dict[str, Any]) -> str:
    losses = " ".join(f"{loss:.4f}" for loss in row["losses"])
    memory = f"peak {row['private']:.2f} GB, with mapped files {row['peak']:.2f} GB"
    times = f"made in {row['opened']:.1f} s, first step {row['first']:.1f} s, then {row['seconds']:.2f} s"
    return f"{peer:10} {memory}; {times}; losses {losses}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.32)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a batch")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where the model is written and kept, so that a second run is sooner"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="of gradgraph's RuntimeOptions, as JSON")
    parser.add_argument("--recompute", help="of gg.build")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        print(json.dumps(measure(given, given.folder / "model.onnx")))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        if not (folder / "model.onnx").exists():
            language_model(folder / "model.onnx", given.gigabytes, given.layers, given.words, given.length)
        print(f"the model: {sum(f.stat().st_size for f in folder.glob('model.onnx*')) / 1e9:.2f} GB")
        again = [sys.executable, "-m", "benchmarks.four_bits", *sys.argv[1:], "--folder", str(folder)]
        for peer in given.peers.split(","):
            print(_line(peer, watched([*again, "--peer", peer])), flush=True)


if __name__ == "__main__":
    main()
