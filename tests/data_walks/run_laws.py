"""Laws of what one does with a run beside training it: looking for a rate, and comparing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradgraph as gg
from tests.data_walks.random_walk import Walk


def check_rates(walk: Walk, trainer: gg.Trainer, data: Any, batch: int) -> None:
    """Looking for a rate leaves all as it was, and finds one within its range, the same one each time."""
    begun, accumulate = trainer.state_dict(), 2 if "accumulate" in walk.chosen else None
    first, again = (
        trainer.find_lr(data, batch, steps=6, start=1e-5, end=1e-2, accumulate=accumulate) for _ in range(2)
    )
    walk.same("find_lr leaves the state as it was", trainer.state_dict(), begun)
    walk.same("find_lr finds the same again", again.tried, first.tried)
    rates = [rate for rate, _ in first.tried]  # none where the loss falls nowhere
    walk.law(
        "find_lr tries rates of its range", rates == sorted(rates) and all(1e-5 <= r <= 1e-2 for r in rates), rates
    )
    suggested = first.suggestion is None or 1e-5 <= first.suggestion <= 1e-2  # None where no rate is better than none
    walk.law("its suggestion is within them", suggested, first.suggestion)


def check_runs(walk: Walk, trainer: gg.Trainer) -> None:
    """The table of the runs in the folder of a walk says what the history of each says."""
    walk.shell("runs", walk.folder, "--html", walk.folder / "runs.html", "--quiet")
    walk.law("the page of runs is there", "run" in (walk.folder / "runs.html").read_text("utf-8"))
    found = {Path(one["run"]).name: one for one in walk.json("runs", walk.folder)["runs"]}
    folders = {path.parent.name for path in walk.folder.glob("*/history.csv")}
    walk.law("each run is listed, once", found.keys() == folders and "run" in folders, (found.keys(), folders))
    walk.law("its loss is one of its history", found["run"]["loss"] in list(trainer.history["loss"]), found["run"])
    if "again" in found:
        for figure in found["run"].keys() - {"run", "seconds", "options"}:
            if "second" not in figure and "time" not in figure:
                walk.same(
                    f"a run that is resumed has the {figure} of one", found["again"][figure], found["run"][figure]
                )
