"""Bytes sent by each rank, final loss and accuracy on the digits, for each gradient compression.

    python -m benchmarks.compression [NAME ...] [--ranks 2] [--epochs 12]

Requires the extras ``mpi`` and ``sklearn``. Prints the table and writes it to docs/how-to/many-machines.md. Bytes are
per step, for messages in a ring. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gradgraph as gg
from benchmarks.rank_jobs import told_by_ranks
from gradgraph.frontend import nn

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "many-machines.md"
NAMES = ["none", "float16", "bfloat16", "top_k(ratio=0.1)", "top_k(ratio=0.01)", "top_k(ratio=0.01, feedback=False)",
         "power_sgd(rank=4)", "power_sgd(rank=2)", "local_sgd(every=8)", "diloco(every=8)"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        work(given.names, given.epochs)
        return
    words = ("--job", "--epochs", str(given.epochs), *given.names)
    found: dict[str, dict[str, float]] = told_by_ranks(given.ranks, "benchmarks.compression", *words)
    rows = ["| compression | bytes per step and rank | loss | accuracy, held out |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {row['bytes']:,.0f} | {row['loss']:.4f} | {row['accuracy']:.4f} |"
             for name, row in found.items()]  # fmt: skip
    table = "\n".join(rows)
    print(table)
    marks = re.compile(r"(<!-- compression -->\n).*?(\n<!-- end -->)", re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(marks.sub(lambda m: m[1] + table + m[2], page), encoding="utf-8")


def work(names: Sequence[str], epochs: int) -> None:
    """Train on the digits with each compression, in one of the ranks; the first rank prints the results as JSON."""
    from sklearn.datasets import load_digits

    found, data = dict[str, dict[str, float]](), load_digits()
    x, target = (data.data / 16).astype(np.float32), data.target
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    step = gg.build(gg.frontend.export(net, {"x": ("batch", 64)}), "cross_entropy", "sgd(lr=0.2)", metrics=["accuracy"])
    for name in names:
        parallel = gg.DataParallel(compress=None if name == "none" else name, check_every=50)
        trainer = gg.Trainer(step, device="cpu", options=gg.RuntimeOptions(threads=1), parallel=parallel)
        history = trainer.fit({"x": x[:1500], "target": target[:1500]}, epochs, 64, progress=False)
        result = trainer.evaluate({"x": x[1500:], "target": target[1500:]})
        team: Any = trainer._session.team
        found[name] = {"bytes": team.sent / trainer.progress.steps, "loss": history["loss"][-1],
                       "accuracy": float(result["accuracy"])}  # fmt: skip
    if parallel.is_first:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
