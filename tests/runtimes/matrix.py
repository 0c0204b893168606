"""What became of each network in each runtime: measured, kept in ``matrix.json``, shown on the page of runtimes."""

from __future__ import annotations

import functools
import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gradgraph.errors import GradgraphError
from tests.runtimes.four_networks import BATCH, NETWORKS, STEPS
from tests.runtimes.runtimes import LONGEST_S, RUNTIMES, RefusedError, cases_of, losses_in
from tests.runtimes.trained_options import CASES

KEPT = Path(__file__).parent / "matrix.json"
ATOL = 1e-4
Key = tuple[str, str, str]  # runtime, network, sizes


@dataclass(frozen=True)
class Cell:
    """One network in one runtime.

    Attributes:
        kind: ``right``, ``wrong``, ``refused at build`` or ``refused`` (by the runtime).
        said: the largest difference of a loss, or the reason.
        version: of the runtime.
    """

    kind: str
    said: str
    version: str


@functools.cache
def expected(network: str, sizes: str) -> list[float]:
    """The losses that onnxruntime has."""
    fixed = sizes == "fixed"
    return losses_in("onnxruntime", NETWORKS[network].step("auto", fixed), NETWORKS[network].batches(fixed))


def measured(runtime: str, network: str, sizes: str) -> Cell:
    """Build, train for twenty steps, compare."""
    fixed, version = sizes == "fixed", version_of(runtime)
    try:
        step = NETWORKS[network].step(RUNTIMES[runtime].backend, fixed)
    except GradgraphError as error:
        return Cell("refused at build", str(error), version)
    try:
        found = losses_in(runtime, step, NETWORKS[network].batches(fixed))
    except RefusedError as error:
        return Cell("refused", str(error), version)
    off = float(np.max(np.abs(np.subtract(found, expected(network, sizes)))))
    right = len(found) == STEPS and math.isfinite(off) and off < ATOL
    return Cell("right" if right else "wrong", f"{off:.0e}" if off else "0", version)


@functools.cache
def version_of(runtime: str) -> str:
    """As the package of the runtime says."""
    here = RUNTIMES[runtime]
    if not here.package:
        return here.version()
    command = [str(here.python), "-c", f"import importlib.metadata as m; print(m.version('{here.package}'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def read() -> dict[Key, Cell]:
    """What was measured before."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else []
    return {tuple(row["case"]): Cell(row["kind"], row["said"], row["version"]) for row in kept}  # type: ignore[misc]


def written(cells: Mapping[Key, Cell]) -> None:
    """Keep the cells of cases that there are."""
    known = {(name, *case) for name in RUNTIMES for case in cases_of(name)}
    rows = [{"case": list(key), **asdict(cells[key])} for key in sorted(cells) if key in known]
    KEPT.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


# --- the page -------------------------------------------------------------------------------------------------

HEAD = f"""# Supported runtimes

Four small networks are built for each runtime's backend, trained there for {STEPS} steps by running `train.onnx` and
feeding state back, and compared with onnxruntime's CPU provider. A number is the largest difference of a loss; below
{ATOL:g} is correct. *Open* sizes are tested with batches of two sizes, *fixed* ones with batches of {BATCH}, for at
most {LONGEST_S} seconds. onnxruntime-web's older WebGPU provider (JSEP) trains some networks wrong; `gradgraph.js`
rejects it.

"""
FOOT = """
## Options

A small network of fixed sizes is also built, trained and evaluated in ReferenceEvaluator, OpenVINO, tract and IREE with
these options (`tests/runtimes/test_trained_options.py`):

{options}

Losses equal those of onnxruntime, except that tract does not support `accumulate`, `pruning` and `float16`, and
OpenVINO and IREE do not support `pruning`. If only `eval.onnx` is unsupported (random numbers at evaluation, in tract),
the build warns: train there, and evaluate elsewhere.

## Commands

`make runtimes` installs OpenVINO and tract; `make all-runtimes` IREE, TVM and tinygrad (which needs clang); `make node`
and `make browser` the JavaScript ones. `python -m tests.runtimes --write` runs all that are installed and writes this
page. Every change is tested in ReferenceEvaluator, OpenVINO, tract and JavaScript.

| runtime | build | test |
|---|---|---|
"""
KINDS = {
    "right": "",
    "refused at build": "unsupported at build",
    "refused": "unsupported at run time",
    "wrong": "**wrong**",
}


def page(cells: Mapping[Key, Cell]) -> str:
    """docs/reference/runtimes.md."""
    lines = [
        HEAD,
        f"| runtime | backend | sizes | {' | '.join(NETWORKS)} |\n",
        "|---|---|---|" + "---|" * len(NETWORKS),
    ]
    notes: list[str] = []
    for name, runtime in RUNTIMES.items():
        for sizes in runtime.sizes:
            row = [cells.get((name, network, sizes)) for network in NETWORKS]
            version = next((c.version for c in row if c is not None), "")
            shown = " | ".join(_shown(cell, notes) for cell in row)
            lines.append(f"\n| {runtime.title} {version} | `{runtime.backend}` | {sizes} | {shown} |")
    lines.append("\n\n" + "".join(f"{i}. {note}\n" for i, note in enumerate(notes, 1)))
    commands = (
        f"| {r.title} | `--backend {r.backend}` | `python -m tests.runtimes {n}` |\n" for n, r in RUNTIMES.items()
    )
    about = "".join(f"- {name}: {network.about}\n" for name, network in NETWORKS.items())
    return "".join([*lines, "\nThe networks:\n\n", about, FOOT.replace("{options}", _options()), *commands])


def _options() -> str:
    """The cases of the second axis, one a line."""
    return "\n".join(f"- {name}" for name in CASES)


def _shown(cell: Cell | None, notes: list[str]) -> str:
    if cell is None:
        return "not tested"
    if cell.kind in ("right", "wrong"):
        return f"{KINDS[cell.kind]} {cell.said}".strip()
    reason = cell.said.replace("|", "\\|").replace("<", "&lt;")
    if reason not in notes:
        notes.append(reason)
    return f"{KINDS[cell.kind]} ({notes.index(reason) + 1})"
