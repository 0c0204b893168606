"""Memory of commands by model size: a table and a chart for docs/how-to/large-models.md.

    python -m benchmarks.size_curve [--save] [--sizes 0.1,0.5] [--places inside] [--folder DIR]

Requires five times the largest size on disk. With ``--folder``, measurements are stored there (curve.json), and a
second run continues from them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.large_memory import watched, write_model

SIZES = (0.01, 0.1, 0.5, 1.3, 2.4, 6, 10)
PLACES = ("beside", "inside")
MOST_INSIDE = 1.9  # GB, below protobuf's limit
# stages in order of their dependencies; 1 if the weights are state or operands
STAGES = {
    "build": 0, "save": 0, "train": 1, "export": 0, "save all": 0, "save run": 1, "resume": 1, "export all": 1,
    "lora": 0, "new head": 0, "merge": 0, "check": 0, "inspect": 0, "predict .onnx": 1, "cli build": 0, "cli train": 1,
    "cli evaluate": 0, "cli predict": 1, "cli export": 0, "cli small": 0, "cli merge": 0,
}  # fmt: skip
# files that later stages read, and the last of these stages; other files are removed after their stage
READ_LATER = {"step": "cli small", "all": "export all", "export/all.ckpt": "resume", "export/lora.onnx": "cli merge"}
FLOOR = 0.1  # GB for late imports, graphs and sessions, which even a model of 10 MB requires
PAGE = Path(__file__).parent.parent / "docs/how-to/large-models.md"
BEGIN, END = "<!-- curve: written by benchmarks/size_curve.py -->", "<!-- end of the curve -->"
Found = dict[tuple[float, str, str], dict[str, Any]]


def run(folder: Path | None, sizes: str | None, places: str | None, save: bool) -> None:
    kept = folder or Path(tempfile.mkdtemp(prefix="gradgraph-curve-"))
    found: Found = {}
    try:
        for size in map(float, sizes.split(",")) if sizes else SIZES:
            for place in places.split(",") if places else PLACES[: 2 if size < MOST_INSIDE else 1]:
                found |= {(size, place, name): row for name, row in _measured(kept / f"{size:g}-{place}", size, place)}
    finally:
        if folder is None:
            shutil.rmtree(kept)
    if save:
        write(found)


def _measured(folder: Path, size: float, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each stage with its figures; remove the model at the end."""
    (folder / "export").mkdir(parents=True, exist_ok=True)
    memory = folder / "curve.json"
    known = json.loads(memory.read_text()) if memory.exists() else {}
    if STAGES.keys() - known.keys() and not (folder / "model.onnx").exists():
        write_model(folder / "model.onnx", "backbone", size, place == "inside")
    for name in STAGES:
        if name not in known:
            weights = sum(p.stat().st_size for p in folder.glob("model.onnx*"))
            known[name] = {"weights": weights, **watched(name, folder, share=False)}
            memory.write_text(json.dumps(known, indent=1))
            print(f"{size:g} GB {place} {name}: {_cell(known[name])}", flush=True)
            _clear(folder, name)
        yield name, known[name]
    for path in folder.glob("model.onnx*"):
        path.unlink()


def _clear(folder: Path, stage: str) -> None:
    """Remove files that no stage after ``stage`` reads."""
    names = list(STAGES)
    needed = [folder / path for path, last in READ_LATER.items() if names.index(last) > names.index(stage)]
    for path in [folder / "step", folder / "all", *(folder / "export").glob("*")]:
        if any(path.name.startswith(kept.name) for kept in needed):  # including its external data
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _cell(row: dict[str, Any]) -> str:
    return row["error"] if "error" in row else f"{row['peaks'][2] / 1e9:.2f} GB, {row['processor']:.1f} s"


def write(found: Found) -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    draw(found, PAGE.with_suffix(".svg"))
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(found)}\n\n{END}{tail}", encoding="utf-8")


def table(found: Found) -> str:
    """Return the table: peak memory over the weights (separate / inside), processor time, and MB per second."""
    sizes = sorted({size for size, _, _ in found})
    titles = [f"{size:g} GB" for size in sizes]
    lines = [
        "| stage | counted | " + " | ".join(titles) + f" | {titles[0]}, {titles[-1]} | MB/s |",
        "|---|---:|" + "---:|" * (len(sizes) + 2),
    ]
    for name, state in STAGES.items():
        cells = [" / ".join(filter(None, (_ratio(found.get((s, place, name))) for place in PLACES))) for s in sizes]
        ends = [row for s in (sizes[0], sizes[-1]) if "processor" in (row := found.get((s, PLACES[0], name), {}))]
        speed = _speed(*ends) if len(ends) == 2 else " | "
        lines.append(f"| {name} | {state} | " + " | ".join(cells) + f" | {speed} |")
    return "\n".join(lines)


def _speed(small: dict[str, Any], large: dict[str, Any]) -> str:
    seconds, more = large["processor"] - small["processor"], large["weights"] - small["weights"]
    rate = f"{more / 1e6 / seconds:,.0f}" if seconds > 0 else ""
    return f"{small['processor']:.1f}, {large['processor']:.1f} s | {rate}"


def _ratio(row: dict[str, Any] | None) -> str:
    return "" if row is None or "peaks" not in row else f"{row['peaks'][2] / row['weights']:.2f}"


def draw(found: Found, path: Path) -> None:
    """Draw memory by size of the weights, a line per stage, coloured by the weights that count as state."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gradgraph"  # the same results give the same file
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    colours = {0: "#1f77b4", 1: "#d62728"}
    for axes, place in zip(panels, PLACES, strict=True):
        for name, state in STAGES.items():
            rows = [row for (_, where, stage), row in sorted(found.items()) if (where, stage) == (place, name)]
            points = [(row["weights"] / 1e9, row["peaks"][2] / 1e9) for row in rows if "peaks" in row]
            axes.plot(
                [x for x, _ in points], [y for _, y in points], "o-", color=colours[state], linewidth=0.8, markersize=3
            )
        sizes = sorted({row["weights"] / 1e9 for row in found.values()})
        for state, colour in colours.items():
            aims = [(state + 0.3) * size + FLOOR for size in sizes]
            axes.plot(sizes, aims, ":", color=colour, label=f"{state} + 0.3 weights + {1000 * FLOOR:.0f} MB")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"weights {place} the .onnx", loc="left", fontsize="medium")
        axes.set_xlabel("GB of weights")
        axes.grid(color="#dddddd")
    panels[0].set_ylabel("GB beyond the imports, at the peak")
    panels[1].legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the curve into docs/how-to/large-models.md")
    parser.add_argument("--sizes", help="gigabytes of the models, by commas")
    parser.add_argument("--places", help="where their weights lie: beside, inside or both, by a comma")
    parser.add_argument("--folder", type=Path, help="where files are kept")
    given = parser.parse_args()
    run(given.folder, given.sizes, given.places, given.save)


if __name__ == "__main__":
    main()
