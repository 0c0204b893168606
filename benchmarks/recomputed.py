"""Memory and time of a step whose forward pass is partly computed again, as it is saved and in a Trainer.

    python -m benchmarks.recomputed [transformer] [resnet50] [--steps 3] [--json FILE]
    python -m benchmarks.recomputed --layers 6 12 24 48       # what building a transformer's step takes

Each row is measured in a process of its own, on one thread: resident memory at its peak above that before the first
step, and processor time of a step (which busy neighbours disturb least). "onnxruntime" is the step folder alone in a
session with onnxruntime's own options, whose memory pattern takes part of the memory from the second step on; PyTorch
runs eager, and with ``torch.utils.checkpoint`` around each layer or block.
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

from benchmarks.recomputed_networks import NETWORKS, transformer

RATE = 0.01
WAYS = ("onnxruntime", "trainer", "torch")


def write(model: Any, folder: Path, recompute: Any) -> None:
    """The step folder."""
    import gradgraph as gg

    rate = gg.optim.constant(RATE)
    gg.build(model, "cross_entropy", gg.optim.sgd(rate), recompute=recompute).save(folder)


# --- one way to train, in a process of its own ----------------------------------------------------------------------


def _stock(folder: Path, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    init = ort.InferenceSession(folder / "init.onnx", options)
    names = [o.name for o in init.get_outputs()]
    state = dict(zip(names, init.run_with_ort_values(names, {}), strict=True))
    fed = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in batch.items()}
    session = ort.InferenceSession(folder / "train.onnx", options)
    manifest = json.loads((folder / "manifest.json").read_text())
    names = [o.name for o in session.get_outputs()]

    def step() -> float:
        results = dict(zip(names, session.run_with_ort_values(names, fed | state), strict=True))
        state.update({s["name"]: results[s["next"]] for s in manifest["state"]})
        return float(results["loss"].numpy())

    return step


def _trainer(folder: Path, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    import gradgraph as gg

    trainer = gg.Trainer(str(folder), device="cpu", options=gg.RuntimeOptions(threads=1))
    trainer.expect({name: array.shape for name, array in batch.items()})
    return lambda: float(trainer.step(batch)["loss"])


def _torch(network: str, batch: dict[str, np.ndarray], checkpointed: bool) -> Callable[[], float]:
    import torch

    from benchmarks.recomputed_torch import NETWORKS as IN_TORCH

    torch.set_num_threads(1)
    model = IN_TORCH[network](checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    *inputs, target = (torch.from_numpy(a) for a in batch.values())

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(*inputs), target)
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def measure(network: str, way: str, recomputed: bool, folder: Path, steps: int) -> dict[str, Any]:
    """The peak of the first step and of all, in bytes, and seconds of processor time of a step."""
    batch = NETWORKS[network][1]()
    if way == "torch":
        step = _torch(network, batch, recomputed)
    else:
        step = (_stock if way == "onnxruntime" else _trainer)(folder, batch)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    losses, times, first = [step()], [], _status("VmHWM") - before
    for _ in range(steps):
        begin = time.process_time()
        losses.append(step())
        times.append(time.process_time() - begin)
    return {"first": first, "peak": _status("VmHWM") - before, "seconds": statistics.median(times), "losses": losses}


def built(layers: int, recompute: str | None) -> dict[str, Any]:
    """Nodes of a transformer, seconds of processor time and bytes that building its step takes."""
    import gradgraph as gg

    gg.build(transformer(1))  # loads what is needed
    model = transformer(layers)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.process_time()
    step = gg.build(model, recompute=recompute)
    taken = time.process_time() - begin
    nodes = (len(model.graph.node), len(step.train.graph.node))
    return {"nodes": nodes, "seconds": taken, "bytes": _status("VmHWM") - before, "model": model.ByteSize()}


def print_builds(layers: list[int]) -> None:
    for count in layers:
        for recompute in ("", "sqrt"):
            worker = [sys.executable, "-m", "benchmarks.recomputed", "--built", str(count), recompute]
            found = json.loads(subprocess.run(worker, capture_output=True, text=True, check=True).stdout)
            nodes, written = found["nodes"]
            sizes = f"{found['bytes'] / 1e6:6.0f} MB for a model of {found['model'] / 1e6:.0f} MB"
            print(
                f"{count:3} layers {recompute:5} {nodes:5,} to {written:5,} nodes {found['seconds']:6.2f} s {sizes}",
                flush=True,
            )


def rows(network: str, steps: int) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as parent:
        folders = {recomputed: Path(parent) / f"step{int(recomputed)}" for recomputed in (False, True)}
        model = NETWORKS[network][0]()
        for recomputed, folder in folders.items():
            write(model, folder, "sqrt" if recomputed else None)
        for way in WAYS:
            for recomputed, folder in folders.items():
                arguments = [network, way, str(int(recomputed)), str(folder), str(steps)]
                worker = [sys.executable, "-m", "benchmarks.recomputed", "--worker", *arguments]
                run = subprocess.run(worker, capture_output=True, text=True, check=True)
                found.append({"network": network, "way": way, "recomputed": recomputed} | json.loads(run.stdout))
                print(_line(found[-1]), flush=True)
    return found


def _line(row: dict[str, Any]) -> str:
    what = (
        {"torch": "torch.utils.checkpoint"}.get(row["way"], 'recompute="sqrt"') if row["recomputed"] else "all is kept"
    )
    sizes = f"{row['first'] / 1e6:8,.0f} MB first {row['peak'] / 1e6:8,.0f} MB peak"
    return (
        f"{row['network']:12} {row['way']:12} {what:24} {sizes} {row['seconds']:8.2f} s  loss {row['losses'][-1]:.6f}"
    )


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        network, way, recomputed, folder, steps = sys.argv[2:]
        print(json.dumps(measure(network, way, recomputed == "1", Path(folder), int(steps))))
        return
    if sys.argv[1:2] == ["--built"]:
        print(json.dumps(built(int(sys.argv[2]), sys.argv[3] or None)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="network")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", help="build transformers of so many layers, and train none")
    given = parser.parse_args()
    if given.layers:
        print_builds(given.layers)
        return
    found = [row for network in given.networks for row in rows(network, given.steps)]
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
