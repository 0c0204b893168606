"""LoRA on a language model of a billion weights: 4 bits in gradgraph, float32 in PyTorch with PEFT.

    python -m benchmarks.four_bits [--gigabytes 0.92] [--peers gradgraph,peft] [--threads 1] [--folder DIR]

The model has the shapes of Llama (``large_models.py``); adapters of rank 8 stand at one product of each layer. Each
peer is a process of its own. Columns: the peak of its resident memory, imports and mapped files included; processor
time of a step, the median of some after the first; losses. The weights of the two differ, so do the losses.
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
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.large_models import HEAD, LENGTH, WORDS, language_model

RANK, ALPHA, RATE, LAYERS = 8, 16, 1e-3, 16
Step = Callable[[dict[str, np.ndarray]], float]


def with_gradgraph(path: Path, threads: int, options: dict[str, Any]) -> Step:
    import gradgraph as gg

    adapted = gg.lora(path, target="layers.*.q*", rank=RANK, alpha=ALPHA, out=path.with_name("adapted.onnx"))
    step = gg.build(adapted, "cross_entropy", gg.optim.adamw(RATE))
    trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(threads=threads, **options))
    return lambda batch: float(trainer.step(batch)["loss"])


def with_peft(path: Path, threads: int, options: dict[str, Any]) -> Step:
    from benchmarks import torchvision_operators

    torchvision_operators.declare()
    import onnx
    import peft
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    stored = onnx.load(path, load_external_data=False).graph.initializer
    width = next(t.dims[1] for t in stored if t.name == "tokens.weight")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
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
            self.tokens, self.norm = nn.Embedding(WORDS, width), nn.RMSNorm(width, 1e-5)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.head = nn.Linear(width, WORDS, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x)).flatten(0, 1)

    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q"], lora_dropout=0.0)
    model = peft.get_peft_model(Model(), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], RATE)

    def step(batch: dict[str, np.ndarray]) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.from_numpy(batch["ids"])), torch.from_numpy(batch["target"]))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


PEERS = {"gradgraph": with_gradgraph, "peft": with_peft}


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e9


def measure(peer: str, path: Path, threads: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    batch = {"ids": rng.integers(0, WORDS, (1, LENGTH)), "target": rng.integers(0, WORDS, LENGTH)}
    step = PEERS[peer](path, threads, options)
    losses, seconds = [step(batch)], []
    for _ in range(steps):
        begin = time.process_time()
        losses.append(step(batch))
        seconds.append(time.process_time() - begin)
    parts = {"private": _status("RssAnon"), "mapped": _status("RssFile")}
    return {"peak": _status("VmHWM"), "seconds": statistics.median(seconds), "losses": losses, **parts}


def _line(peer: str, row: dict[str, Any]) -> str:
    losses = " ".join(f"{loss:.4f}" for loss in row["losses"])
    memory = f"peak {row['peak']:.2f} GB (at the end {row['private']:.2f} private, {row['mapped']:.2f} mapped)"
    return f"{peer:10} {memory}  {row['seconds']:.2f} s  losses {losses}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.92)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where the model is written and kept, so that a second run is sooner"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="of gradgraph's RuntimeOptions, as JSON")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        print(json.dumps(measure(given.peer, given.folder / "model.onnx", given.threads, given.steps, given.options)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        if not (folder / "model.onnx").exists():
            language_model(folder / "model.onnx", given.gigabytes, LAYERS)
        print(f"the model: {sum(f.stat().st_size for f in folder.glob('model.onnx*')) / 1e9:.2f} GB")
        fixed = ["--folder", str(folder), "--threads", str(given.threads), "--steps", str(given.steps)]
        for peer in given.peers.split(","):
            worker = [sys.executable, "-m", "benchmarks.four_bits", "--peer", peer, *fixed]
            worker += ["--options", json.dumps(given.options)]
            found = subprocess.run(worker, stdout=subprocess.PIPE, text=True, check=True).stdout
            print(_line(peer, json.loads(found.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
