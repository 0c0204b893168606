"""LoRA on a language model in 4 bits, in a tab of headless Chromium or in Node.js: memory and processor time.

    python -m benchmarks.in_a_tab [--gigabytes 0.117] [--layers 16] [--words 32000] [--length 128] [--node]

The model has the shapes of Llama (``large_models.py``); 0.45 GB are 501 million weights. A batch is one row of
``--length`` tokens; adapters of rank 8 stand at one product of each layer. WebAssembly never gives memory back, so that
what it has at the end is its peak; of Node.js, the peak of the process is told. Losses stand beside those of the same
step in Python, unless ``--alone`` leaves these out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import gradgraph as gg
from benchmarks.large_models import LENGTH, WORDS, language_model

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "examples" / "web" / "page" / "node_modules"
ONNXRUNTIME_NODE = ROOT / "examples" / "node" / "node_modules" / "onnxruntime-node" / "dist" / "index.js"


def make(folder: Path, given: argparse.Namespace) -> Path:
    """The folder of the step, with a batch."""
    model = folder / "model.onnx"
    language_model(model, given.gigabytes, given.layers, given.words, given.length)
    adapted = gg.lora(model, target="layers.*.q*", rank=8, alpha=16, out=folder / "adapted.onnx")
    gg.build(adapted, "cross_entropy", gg.optim.adamw(1e-3), backend="web", seed=0).save(folder / "step")
    job = {name: {"dims": array.shape, "data": array.ravel().tolist()} for name, array in batch_of(given).items()}
    (folder / "step" / "batch.json").write_text(json.dumps(job))
    return folder / "step"


def batch_of(given: argparse.Namespace) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids, target = rng.integers(0, given.words, (1, given.length)), rng.integers(0, given.words, given.length)
    return {"ids": ids, "target": target}


def in_python(step: Path, batch: dict[str, np.ndarray], steps: int) -> list[float]:
    trainer = gg.Trainer(step, device="cpu")
    return [float(trainer.step(batch)["loss"]) for _ in range(steps)]


def trained(step: Path, given: argparse.Namespace) -> dict[str, list[float]]:
    """Losses, seconds of processor time, and bytes once it has trained and written; or the end, with what was said."""
    script, packages = ("in_node.mjs", ONNXRUNTIME_NODE) if given.node else ("in_a_tab.mjs", PACKAGES)
    command = ["node", str(Path(__file__).with_name(script)), str(step), str(packages)]
    done = subprocess.run([*command, str(given.threads), str(given.steps)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def told(found: dict[str, list[float]], places: tuple[str, ...]) -> None:
    for what in ("trained", "written"):
        sizes = (f"{place} {size / 1e9:.2f} GB" for place, size in zip(places, found[what], strict=True))
        print(f"once it has {what}: {', '.join(sizes)}")
    first, *later = found["seconds"]
    print(f"processor time: first step {first:.1f} s, then {sorted(later)[len(later) // 2]:.1f} s each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.117)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--node", action="store_true", help="in Node.js, by onnxruntime-node")
    parser.add_argument("--alone", action="store_true", help="without Python's losses")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        step = make(Path(temporary), given)
        print(f"files {sum(path.stat().st_size for path in step.iterdir()) / 1e9:.2f} GB", flush=True)
        found = trained(step, given)
        told(found, ("the process",) if given.node else ("WebAssembly", "the page"))
        print("losses", *(f"{loss:.5f}" for loss in found["losses"]))
        if not given.alone:
            print("in Python", *(f"{loss:.5f}" for loss in in_python(step, batch_of(given), given.steps)))


if __name__ == "__main__":
    main()
