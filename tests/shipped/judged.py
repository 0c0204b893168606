"""What became of each file: run in a process of its own, kept in ``judged.json``, read by the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.runtimes.waiting import lines_of

TESTS = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "judged.json"
STAGE_S = 240.0  # the longest that one stage may take
SLOPE = 0.1  # by which float32 slopes of a whole network may be off
SIGNALS = {-4: "SIGILL", -6: "SIGABRT", -8: "SIGFPE", -9: "SIGKILL", -11: "SIGSEGV"}
Judged = dict[str, Any]


def judged(path: Path, data: Mapping[str, Any], limit_s: float, stages: Sequence[str] = ()) -> Judged:
    """What each stage, or each of ``stages``, found by its name; after a crash or when time is over, how it ended."""
    here = {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.shipped.one_file", path.name, json.dumps(data), *stages]
    found: Judged = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=path.parent, env={**os.environ, **here}, text=True, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            for line in lines_of(process, limit_s):
                said = json.loads(line)
                found[said.pop("stage")] = said
            if process.returncode:
                found["ended"] = {"failed": _end(process.returncode, errors)}
        except TimeoutError as late:
            found["ended"] = {"late": str(late)}
    return found


def _end(code: int, errors: Any) -> str:
    errors.seek(0)
    last = (errors.read().strip().splitlines() or [""])[-1]
    return f"the process ended by {SIGNALS[code]}" if code in SIGNALS else f"exit code {code}: {last}"


def verdict(found: Mapping[str, Any]) -> str:
    """One word: ``trains``, ``WRONG``, ``refused``, ``failed``, ``not in time`` or ``does not learn``."""
    trained, checked, sloped = (found.get(name, {}) for name in ("trained", "checked", "sloped"))
    steep = checked.get("precision") == "float32" and "error" in sloped  # for steps that float32 can tell apart
    if (
        (checked.get("wrong") and not steep)
        or sloped.get("error", 0) > SLOPE
        or found.get("explained", {}).get("wrong")
    ):
        return "WRONG"
    if any("failed" in stage for stage in found.values()):
        return "failed"
    if "refused" in trained:
        return "refused"
    if "trained" not in found:
        return "not in time"
    return "trains" if "last" in trained and trained["last"] < trained["first"] else "does not learn"


def reason(found: Mapping[str, Any]) -> str:
    """The sentences that go with a verdict, each once; empty where there are none."""
    said = [*found.get("checked", {}).get("wrong", []), *found.get("explained", {}).get("wrong", [])]
    others = [stage for name, stage in found.items() if name != "explained" or "failed" in stage]
    said += [stage[key] for stage in others for key in ("refused", "failed", "late") if key in stage]
    return "; ".join(dict.fromkeys(said))


def kept() -> dict[str, Judged]:
    return json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}


def keep(found: Mapping[str, Judged]) -> None:
    KEPT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
