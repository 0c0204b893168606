"""Seconds and memory of each stage of fine-tuning a large model: build, save, train, evaluate, predict, export.

    python -m benchmarks.large_memory [--gigabytes 2.4] [--inside] [--share-weights] [--stages build] [--folder DIR]

It writes a model of that size (``large_models.py``) with external data, or with weights inside the .onnx, and freezes
all but the head. Each stage, and then other commands, run in a process of their own. Columns: seconds without imports;
peak memory beyond the imports, "private" (no file backs it), "mapped" (pages of mapped files, which the system can
reclaim) and both; and both over the size of the weights. Requires six times the size on disk (``--folder``, by default
a temporary one).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.large_models import MODELS

BATCH, STEPS = 8, 5
READY = "ready"


def build(folder: Path) -> Any:
    import gradgraph as gg

    return gg.build(folder / "model.onnx", "cross_entropy", "adamw", train="head.*")


def batch(folder: Path) -> Any:
    import numpy as np

    from gradgraph.files.models import load_model

    shape = load_model(folder / "model.onnx").graph.inputs[0].shape  # does not read the weights
    dims = [dim if isinstance(dim, int) else BATCH for dim in (shape or ())]
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal(dims, np.float32), "target": rng.integers(0, 10, BATCH)}


def trainer(folder: Path) -> Any:
    import gradgraph as gg

    return gg.Trainer(folder / "step", device="cpu")


def save(folder: Path, share: bool) -> dict[str, Any]:
    step = build(folder)
    start = time.perf_counter()
    step.save(folder / "step", force=True, **({"share_weights": True} if share else {}))
    return {"seconds": time.perf_counter() - start}


def train(folder: Path) -> dict[str, Any]:
    fed, opened = batch(folder), trainer(folder)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = opened.step(fed)["loss"]
        times.append(time.perf_counter() - start)
    return {"note": f"{min(times[1:]):.3f} s a step, the first {times[0]:.1f} s; loss {float(loss):.6f}"}


def train_adapters(model: Path, out: Path) -> None:
    """Train on batches of two sizes, and evaluate in between; the backward pass reads the frozen weights, too."""
    import gradgraph as gg

    opened = gg.Trainer(gg.build(out / "lora.onnx", "cross_entropy", "adamw"), device="cpu")
    fed = batch(model.parent)
    for rows in (BATCH, BATCH, BATCH // 2):
        opened.step({name: array[:rows] for name, array in fed.items()})
        opened.evaluate(fed)


def evaluate(folder: Path) -> dict[str, Any]:
    return {"note": f"loss {trainer(folder).evaluate(batch(folder))['loss']:.6f}"}


def predict(folder: Path) -> dict[str, Any]:
    found = trainer(folder).predict(batch(folder)["x"])
    return {"note": f"mean {abs(found['logits']).mean():.6f}"}


def export(folder: Path) -> None:
    trainer(folder).export_file(folder / "export" / "trained.onnx")


def save_all(folder: Path, _: bool) -> None:
    """Save a step that trains all weights, which are stored as state as often as the optimizer requires."""
    import gradgraph as gg

    gg.build(folder / "model.onnx", "cross_entropy", gg.optim.sgd(1e-3)).save(folder / "all", force=True)


def checkpoint_all(folder: Path, _: bool) -> None:
    import gradgraph as gg

    gg.Trainer(folder / "all", device="cpu").save(folder / "export" / "all.ckpt")


def export_all(folder: Path, _: bool) -> None:
    import gradgraph as gg

    gg.Trainer(folder / "all", device="cpu").export_file(folder / "export" / "all.onnx")


def resume_all(folder: Path, _: bool) -> None:
    """Resume from the checkpoint that the stage ``save run`` wrote."""
    import gradgraph as gg

    gg.Trainer.resume(folder / "all", folder / "export" / "all.ckpt", device="cpu")


def merge(model: Path, out: Path) -> None:
    import gradgraph as gg

    gg.surgery.merge_adapters(out / "lora.onnx", out=out / "merged.onnx")


def shell(*words: object) -> None:
    """Run a command of gradgraph in this process, without its output."""
    from gradgraph.cli.app import cli

    with contextlib.redirect_stdout(io.StringIO()):
        cli([str(word) for word in words], standalone_mode=False)


def vjp(model: Path, out: Path) -> None:
    import gradgraph as gg

    gg.vjp(model, wrt="head.*", out=out / "vjp.onnx")


def predict_model(model: Path, out: Path) -> None:
    import numpy as np

    np.savez(out / "x.npz", x=batch(model.parent)["x"])
    shell("predict", model, "--data", out / "x.npz", "-o", out / "y.npz")


def rows(out: Path) -> Path:
    """Write a batch to a file for the commands, and return its path."""
    path = out / "rows.npz"
    np = importlib.import_module("numpy")
    np.savez(path, **batch(out.parent))
    return path


def of_step(command: str, *options: object) -> Callable[[Path, Path], Any]:
    """Return a stage that runs ``command`` on the saved step folder."""
    return lambda model, out: shell(command, model.parent / "step", "--data", rows(out), *options)


# stages with the arguments (model, output folder)
OTHERS: dict[str, Callable[[Path, Path], Any]] = {
    "vjp": vjp,
    "grad": lambda model, out: shell("grad", model, "--wrt", "head.*", "--output", "total", "-o", out / "grad.onnx"),
    "check": lambda model, _: shell("check", model, "--wrt", "head.bias"),
    "inspect": lambda model, _: shell("inspect", model),
    "new head": lambda model, out: shell("surgery", model, "--new-head", 7, "-o", out / "head.onnx"),
    "lora": lambda model, out: shell("surgery", model, "--lora", "*.q.*", "-o", out / "lora.onnx"),
    "train lora": train_adapters,
    "merge": merge,
    "predict .onnx": predict_model,
    "cli build": lambda model, out: shell("build", model, "--train", "head.*", "-o", out / "built", "--force"),
    "cli train": lambda model, out: shell(
        "train", model.parent / "step", "--data", rows(out), "--epochs", 1, "--export", out / "by-shell.onnx"
    ),
    "cli run": lambda model, out: shell(
        "train", model.parent / "step", "--data", rows(out), "--validation", rows(out), "--run", out / "run", "--force"
    ),
    "cli evaluate": of_step("evaluate", "--untrained"),
    "cli predict": lambda model, out: shell(
        "predict", model.parent / "step", "--untrained", "--data", rows(out), "-o", out / "y.npz"
    ),
    "cli export": lambda model, out: shell("export", model.parent / "step", "-o", out / "exported.onnx"),
    "cli small": lambda model, out: shell(
        "export", model.parent / "step", "--size", "batch=2", "--store", "float16", "-o", out / "small.onnx"
    ),
    "cli int8": lambda model, out: shell(
        "export", model.parent / "step", "--quantize", "int8", "-o", out / "int8.onnx"
    ),
    "cli int8 data": lambda model, out: shell(
        "export", model.parent / "step", "--quantize", "int8", "--calibration", rows(out), "-o", out / "int8-data.onnx"
    ),
    "cli calibrate": lambda model, out: shell(
        "export", model.parent / "step", "--calibrate", rows(out), "-o", out / "calibrated.onnx"
    ),
    "cli ort": lambda model, out: shell("export", model.parent / "step", "-o", out / "model.ort"),
    "cli ort step": lambda model, out: shell("export", model.parent / "step", "--ort", "--force", "-o", out / "ort"),
    "cli config": lambda model, out: shell("export", model.parent / "step", "-o", out / "needed.config"),
    "cli flat": lambda model, out: shell("export", model.parent / "all", "-o", out / "flat.bin"),
    "cli merge": lambda model, out: shell("surgery", out / "lora.onnx", "--merge", "-o", out / "whole.onnx"),
}
STAGES: dict[str, Callable[..., Any]] = {
    "build": lambda folder, _: build(folder) and {},
    "save": save,
    "train": lambda folder, _: train(folder),
    "evaluate": lambda folder, _: evaluate(folder),
    "predict": lambda folder, _: predict(folder),
    "export": lambda folder, _: export(folder),
    "save all": save_all,
    "save run": checkpoint_all,
    "resume": resume_all,
    "export all": export_all,
    **{
        name: lambda folder, _, function=function: function(folder / "model.onnx", folder / "export")
        for name, function in OTHERS.items()
    },
}


def run_stage(name: str, folder: Path, share: bool) -> None:
    """Run a stage in this process: print ``READY`` after the imports, wait for a line, print results as JSON."""
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401

    import gradgraph  # noqa: F401

    print(READY, flush=True)
    sys.stdin.readline()
    start, processor = time.perf_counter(), time.process_time()
    found = STAGES[name](folder, share) or {}
    processor = time.process_time() - processor
    print(json.dumps({"seconds": time.perf_counter() - start, "processor": processor, **found}))


def memory_of_tree(process: int) -> tuple[int, int]:
    """Return the total of ``memory_of`` over ``process`` and its descendants."""
    own = memory_of(process)
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with contextlib.suppress(OSError, KeyError, ValueError):  # it has just ended
            own = tuple(map(sum, zip(own, memory_of_tree(int(child)), strict=True)))
    return own


def memory_of(process: int) -> tuple[int, int]:
    """Return the current private bytes (not backed by a file) and mapped bytes of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    kib = {name: int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem", "RssFile")}
    return 1024 * (kib["RssAnon"] + kib["RssShmem"]), 1024 * kib["RssFile"]


def watched(name: str, folder: Path, share: bool) -> dict[str, Any]:
    """Run a stage in a process of its own; return its results, and its memory peaks beyond the imports."""
    command = [sys.executable, "-m", "benchmarks.large_memory", "--stage", name, "--folder", str(folder)]
    command += ["--share-weights"] if share else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline().strip() != READY:
            raise SystemExit(f"the stage {name} did not start")
        base = memory_of(process.pid)
        peaks = [0, 0, 0]
        process.stdin.write("\n")
        process.stdin.flush()
        while process.poll() is None:
            try:
                private, mapped = (now - was for now, was in zip(memory_of_tree(process.pid), base, strict=True))
            except (OSError, KeyError, ValueError):  # it has just ended
                break
            peaks = [max(p, n) for p, n in zip(peaks, (private, mapped, private + mapped), strict=True)]
            time.sleep(0.005)
        text = process.stdout.read()
    if process.returncode:
        return {"error": f"failed with exit code {process.returncode}"}
    return {**json.loads(text.splitlines()[-1]), "peaks": peaks}


def write_model(path: Path, kind: str, gigabytes: float, inside: bool) -> None:
    from gradgraph.files.models import load_model
    from gradgraph.files.streamed import model_pieces

    MODELS[kind](path, gigabytes)
    if inside:
        with path.with_suffix(".whole").open("wb") as file:
            file.writelines(model_pieces(load_model(path)))
        path.with_suffix(".whole").replace(path)
        path.with_name(f"{path.name}.data").unlink()


def report(folder: Path, stages: list[str], share: bool) -> None:
    weights = sum(p.stat().st_size for p in folder.glob("model.onnx*"))
    print(f"weights: {weights / 1e9:.2f} GB; batch {BATCH}")
    print(f"{'stage':10}{'seconds':>9}{'private GB':>12}{'mapped GB':>11}{'both GB':>9}{'/ weights':>11}")
    for name in stages:
        found = watched(name, folder, share)
        if "error" in found:
            print(f"{name:10}{found['error']}", flush=True)
            continue
        private, mapped, both = found["peaks"]
        sizes = f"{private / 1e9:12.2f}{mapped / 1e9:11.2f}{both / 1e9:9.2f}{both / weights:11.2f}"
        print(f"{name:10}{found['seconds']:9.1f}{sizes}  {found.get('note', '')}", flush=True)
    files = sorted(p for f in ("step", "export") for p in (folder / f).glob("*"))
    print("files: " + ", ".join(f"{p.parent.name}/{p.name} {p.stat().st_size / 1e6:,.1f} MB" for p in files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.4)
    parser.add_argument("--kind", choices=MODELS, default="backbone")
    parser.add_argument("--inside", action="store_true", help="weights inside the .onnx, up to 2 GB")
    parser.add_argument("--share-weights", action="store_true", help="let the step folder refer to the model's file")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--folder", type=Path, help="where files are written and kept, so that a second run is sooner")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        run_stage(arguments.stage, arguments.folder, arguments.share_weights)
        return
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="gradgraph-large-"))
    (folder / "export").mkdir(parents=True, exist_ok=True)
    try:
        if not (folder / "model.onnx").exists():
            write_model(folder / "model.onnx", arguments.kind, arguments.gigabytes, arguments.inside)
        report(folder, arguments.stages.split(","), arguments.share_weights)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
