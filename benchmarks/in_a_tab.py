"""LoRA on a language model in 4 bits, in a tab of headless Chromium: memory and processor time, in WebAssembly.

    python -m benchmarks.in_a_tab [--gigabytes 0.117] [--threads 1] [--steps 3]

The model has the shapes of Llama (``large_models.py``), and a row has 128 tokens; adapters of rank 8 stand at one
product of each layer. WebAssembly never gives memory back, so that what it has at the end is its peak. Losses stand
beside those of the same step in Python.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import gradgraph as gg
from benchmarks.large_models import LENGTH, WORDS, language_model

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "examples" / "web" / "page" / "node_modules"


def make(folder: Path, gigabytes: float) -> Path:
    """The folder of the step."""
    model = folder / "model.onnx"
    language_model(model, gigabytes)
    adapted = gg.lora(model, target="layers.*.q*", rank=8, alpha=16, out=folder / "adapted.onnx")
    gg.build(adapted, "cross_entropy", gg.optim.adamw(1e-3), backend="web", seed=0).save(folder / "step")
    return folder / "step"


def in_python(step: Path, batch: dict[str, np.ndarray], steps: int) -> list[float]:
    trainer = gg.Trainer(step, device="cpu")
    return [float(trainer.step(batch)["loss"]) for _ in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.117)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    batch = {"ids": rng.integers(0, WORDS, (1, LENGTH)), "target": rng.integers(0, WORDS, LENGTH)}
    with tempfile.TemporaryDirectory() as temporary:
        step = make(Path(temporary), given.gigabytes)
        job = {name: {"dims": array.shape, "data": array.ravel().tolist()} for name, array in batch.items()}
        (step / "batch.json").write_text(json.dumps(job))
        script = Path(__file__).with_suffix(".mjs")
        command = ["node", str(script), str(step), str(PACKAGES), str(given.threads), str(given.steps)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        expected = in_python(step, batch, given.steps)
        files = sum(path.stat().st_size for path in step.iterdir()) / 1e9
    seconds = sorted(found["seconds"][1:])[(given.steps - 1) // 2]
    print(f"files {files:.2f} GB")
    for what in ("trained", "written"):
        wasm, page = (size / 1e9 for size in found[what])
        print(f"once it has {what}: WebAssembly {wasm:.2f} GB, the page {page:.2f} GB")
    print(f"processor time: first step {found['seconds'][0]:.1f} s, then {seconds:.1f} s each")
    print("losses", *(f"{loss:.5f}" for loss in found["losses"]), "in Python", *(f"{loss:.5f}" for loss in expected))


if __name__ == "__main__":
    main()
