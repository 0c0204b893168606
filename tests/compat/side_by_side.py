"""The drop-in beside onnxruntime-training itself, which runs in an environment of its own.

``make onnxruntime-training`` installs it (it has wheels for Python 3.8 to 3.12); then::

    python -m tests.compat.side_by_side             compare all flows, and let each read the other's files
    python -m tests.compat.side_by_side --record    write tests/compat/recorded.zip anew, which the tests compare with
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gradgraph.compat.onnxruntime_training.saved.checkpoint_file import read_checkpoint, write_checkpoint
from tests.compat import offline_flows

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.zip"
PYTHON = HERE.parents[1] / ".venv-runtimes" / "onnxruntime-training" / "bin" / "python"
OLD, OURS = "onnxruntime.training", "gradgraph.compat.onnxruntime_training"
LOSSES, OTHERS = 1e-5, 1e-4  # how far apart numbers may be

Seen = Mapping[str, np.ndarray]


def run_old(folder: Path, *flows: str) -> dict[str, np.ndarray]:
    """What onnxruntime-training sees."""
    command = [str(PYTHON), str(HERE / "offline_flows.py"), OLD, str(folder), *flows]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"onnxruntime-training failed:\n{done.stderr[-2000:]}")
    return seen_in(folder)


def seen_in(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "seen.npz", allow_pickle=False) as file:
        return dict(file)


def differences(old: Seen, ours: Seen) -> dict[str, str]:
    """What differs by more than rounding, in words."""
    found = dict.fromkeys(old.keys() ^ ours.keys(), "is seen by one only")
    for name in old.keys() & ours.keys():
        a, b = np.asarray(old[name]), np.asarray(ours[name])
        if a.shape != b.shape:
            found[name] = f"has the shape {a.shape}, and {b.shape} here"
        elif a.dtype.kind in "US":
            if not np.array_equal(a, b):
                found[name] = f"is {a}, and {b} here"
        else:
            most = LOSSES if name.endswith("losses") else OTHERS
            away = float(np.max(np.abs(a.astype(np.float64) - b), initial=0.0))
            if not away <= most:
                found[name] = f"is {away:.1e} away"
    return found


def compare(folder: Path) -> dict[str, str]:
    """Differences of all flows, and of runs that onnxruntime-training resumes from checkpoints of ours."""
    old, ours = folder / "old", folder / "ours"
    old.mkdir()
    ours.mkdir()
    before = run_old(old)
    found = differences(before, offline_flows.run(OURS, ours))
    resumed = {name: value for name, value in before.items() if name.startswith("resumed/")}
    for limit in (1 << 40, 0):  # bytes of tensors inside the file: all, or none
        saved = read_checkpoint(ours / "offline_example" / "moments")
        write_checkpoint(saved, old / "offline_example" / "moments", limit)
        crossed = differences(resumed, run_old(old, "resumed"))
        found |= {f"{name}, resumed from our checkpoint,": words for name, words in crossed.items()}
    return found


def record() -> None:
    """Run the flows with onnxruntime-training; keep what was seen and all artifacts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_old(folder)
        with zipfile.ZipFile(RECORDED, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                when = zipfile.ZipInfo(path.relative_to(folder).as_posix())  # no date: the same bytes again
                archive.writestr(when, path.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
        print(f"written: {RECORDED}")
    else:
        with tempfile.TemporaryDirectory() as name:
            found = compare(Path(name))
        for what, words in found.items():
            print(what, words)
        print("different" if found else f"{len(offline_flows.FLOWS)} flows agree")
        sys.exit(bool(found))
