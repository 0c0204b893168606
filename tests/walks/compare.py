"""Our walks of tables and of texts, those by hand, and those with Keras and Hugging Face's Trainer, over many seeds.

``python -m tests.walks.compare tables --seeds 3`` or ``texts --seeds 40``: the mean of each, and how far ours is ahead
with an interval of 95 %. Each rival has an environment of its own, made once under ``.venv-bench``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.environments import environment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
NEEDS = {
    "keras": ["keras", "tensorflow-cpu", "pandas"],
    "transformers": ["transformers", "accelerate", "datasets", "torch"],
}
OURS, EPOCHS = "gradgraph", 3
Row = dict[str, float]


def tables(seeds: range) -> Iterator[tuple[str, Row]]:
    """R² or the share that is right, over the folds of each seed."""
    import pandas as pd
    import test_tables_walk as walk

    for made in (walk._diabetes, walk._wine):
        for seed in seeds:
            for train, new in walk._folds(made(), seed):
                train.to_csv("train.csv", index=False)
                new.drop(columns="target").to_csv("new.csv", index=False)
                for line in walk._lines("tables_walk.sh"):
                    _ours(f"{line} --quiet")
                runpy.run_path(str(HERE / "tables_walk_by_hand.py"))
                _rival("keras", "tables_walk_with_keras.py")
                scores = {}
                for name, path in ((OURS, "predictions"), ("by hand", "by_hand"), ("keras", "with_keras")):
                    found = pd.read_csv(f"{path}.csv")
                    scores[name] = walk._score(new.target, found["class" if "class" in found else "target"])
                shutil.rmtree("runs")
                yield made.__name__.strip("_"), scores


def texts(seeds: range) -> Iterator[tuple[str, Row]]:
    """Accuracy: each seed is one network, and one order of the samples."""
    import text_network
    import text_walk
    import text_walk_by_hand

    for seed in seeds:
        text_network.write(Path(), seed)
        train, evaluate, _ = text_walk.COMMANDS.format(epochs=EPOCHS).strip().splitlines()
        shutil.rmtree("run", ignore_errors=True)
        _ours(f"{train} --seed {seed} --quiet")
        ours = json.loads(_ours(evaluate))["scores"]["accuracy"]
        by_hand = text_walk_by_hand.accuracy(Path(), EPOCHS, seed)
        theirs = _rival("transformers", "text_walk_with_transformers.py", ".", str(EPOCHS), str(seed))
        yield "texts", {OURS: ours, "by hand": by_hand, "transformers": float(theirs.split()[-1])}


WALKS: dict[str, Callable[[range], Iterator[tuple[str, Row]]]] = {"tables": tables, "texts": texts}


def _ours(line: str) -> str:
    from gradgraph.cli.app import run

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run(shlex.split(line)[1:]) == 0
    return printed.getvalue()


def _rival(name: str, script: str, *arguments: str) -> str:
    command = [environment(name, NEEDS[name]), str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def _summary(rows: list[Row]) -> Iterator[str]:
    for name in rows[0]:
        yield f"{name:>14} {100 * statistics.mean(row[name] for row in rows):6.1f}"
        ahead = [100 * (row[OURS] - row[name]) for row in rows]
        if name != OURS and len(rows) > 1:
            half = 2 * statistics.stdev(ahead) / len(rows) ** 0.5
            yield f"{'':>14} ours is ahead by {statistics.mean(ahead):.1f} ± {half:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walk", choices=WALKS)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for data, row in WALKS[given.walk](range(given.seeds)):
            rows.setdefault(data, []).append(row)
            print(data, len(rows[data]), row, file=sys.stderr, flush=True)
    for data, found in rows.items():
        print(f"{data}, {len(found)} runs", *_summary(found), sep="\n")


if __name__ == "__main__":
    main()
