"""Measurement of one workload: load all libraries, compare their losses, and time them in turns."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cores import Cores
from benchmarks.peer_processes import Process
from benchmarks.roster import OURS, TORCH, YARDSTICKS, Entry

Row = dict[str, Any]  # of one library: {"step": seconds, …} or {"cannot": reason}

LOSSES = 3
# the largest difference of losses, relative to their change since the first, for which `Entry.first_loss` applies.
# float32 gradients of MobileNetV2 differ from float64 ones by 0.5 to 1 %, both in PyTorch and here. After two updates
# PyTorch's own losses (with oneDNN, without, channels last) differ from those in float64 by 2, 6 and 9 % of the change
CHANGE = 0.2
LOAD_LIMIT, STEP_LIMIT = 240.0, 120.0  # seconds
TRIES = 4  # of a turn at whose end the cores are apart


@dataclass(frozen=True)
class Plan:
    """The duration of a measurement.

    Attributes:
        rounds: turns of each library.
        turn: seconds of a turn, which has at least one step.
        most: seconds after which a library has no further turns.
    """

    rounds: int = 12
    turn: float = 0.25
    most: float = 15


def measure(
    job: Mapping[str, Any], roster: Mapping[str, Entry], pythons: Mapping[str, str], plan: Plan
) -> dict[str, Row]:
    """Return a row of results for each library and yardstick.

    Args:
        job: fields of ``Job`` except ``mode``.
        roster: the libraries by name.
        pythons: the interpreters of the libraries to measure, by name.
    """
    rows: dict[str, Row] = {}
    running: dict[str, Process] = {}
    try:
        for name in pythons:
            running[name] = Process(roster[name], pythons[name], job["threads"])
            rows[name] = _started(running[name], {**job, "mode": roster[name].mode})
        _compare(rows, roster)
        for name in YARDSTICKS[job["device"]]:
            running[name] = Process(YARDSTICKS[job["device"]][name], threads=job["threads"])
            rows[name] = _started(running[name], job)
        with tempfile.TemporaryDirectory() as folder:
            cores = Cores.compiled(Path(folder))
            _take_turns({n: p for n, p in running.items() if "cannot" not in rows[n]}, rows, plan, cores)
        if "step" in rows.get("floor", {}):
            rows["floor"]["parts"] = running["floor"].ask("profile", STEP_LIMIT, steps=plan.rounds)
        return rows
    finally:
        for process in running.values():
            process.end()


def _started(process: Process, job: Mapping[str, Any]) -> Row:
    """Load the job and run the first steps; return their results."""
    loaded = process.ask("load", LOAD_LIMIT, **job)
    if "cannot" in loaded:
        return loaded
    losses = process.ask("losses", LOAD_LIMIT, steps=LOSSES)
    return losses if "cannot" in losses else {**loaded, **losses}


def _compare(rows: dict[str, Row], roster: Mapping[str, Entry]) -> None:
    """Replace the row of each library whose losses differ from PyTorch's (or else gradgraph's) by the reason."""
    reference = next((n for n in (*TORCH, OURS) if "losses" in rows.get(n, {})), None)
    if reference is None:
        return
    wanted = rows[reference]["losses"]
    for name, row in rows.items():
        step = disagreement(row["losses"], wanted, roster[name].first_loss) if "losses" in row else None
        if step is not None:
            reason = f"the loss of step {step + 1} is {row['losses'][step]:.6g}, {reference} has {wanted[step]:.6g}"
            rows[name] = {"cannot": reason}


def disagreement(losses: list[float], wanted: list[float], first_loss: float = Entry.first_loss) -> int | None:
    """Return the index of the first step whose losses differ too much, or None; NaN differs from everything."""
    if not abs(losses[0] - wanted[0]) <= first_loss * abs(wanted[0]):
        return 0
    changes = ((a - losses[0], b - wanted[0]) for a, b in zip(losses, wanted, strict=True))
    return next((i for i, (a, b) in enumerate(changes) if not abs(a - b) <= CHANGE * abs(b)), None)


def _take_turns(running: Mapping[str, Process], rows: dict[str, Row], plan: Plan, cores: Cores) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in running}
    steps = dict.fromkeys(running, 1)
    for turn in range(plan.rounds + 1):
        for name, process in running.items():
            if "cannot" in rows[name] or sum(seconds[name]) > plan.most:
                continue
            reply = _turn(process, steps[name], plan, cores)
            if "cannot" in reply:
                rows[name] = reply
            elif turn == 0:  # determines the number of steps per turn
                steps[name] = max(1, round(plan.turn / reply["seconds"][0]))
            else:
                seconds[name] += reply["seconds"]
    for name, process in running.items():
        if "cannot" not in rows[name]:
            rows[name] |= summary(seconds[name]) | process.ask("memory", STEP_LIMIT)


def _turn(process: Process, steps: int, plan: Plan, cores: Cores) -> Row:
    """Return the seconds of steps during which the cores shared a cache, if they ever do."""
    for _ in range(TRIES):
        cores.wait()
        reply = process.ask("time", STEP_LIMIT + 2 * plan.turn, steps=steps)
        if "cannot" in reply or not cores.waits or cores.are_near():
            break
    return reply


def summary(seconds: list[float]) -> Row:
    low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return {"step": middle, "quartiles": [low, high], "steps": len(seconds)}
