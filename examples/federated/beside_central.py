"""Clients train one model on data that they keep, beside training in one place; ``make federated`` runs it.

    python examples/federated/beside_central.py [--task digits] [--rounds 10] [--alpha 0.3] …

Writes the folder of the run, a table, and a picture. Options that are not named here go to simulate.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import pictures  # noqa: E402
from tasks import TASKS, Task  # noqa: E402

import gradgraph as gg  # noqa: E402

PYTHON = ROOT / ".venv-runtimes" / "federated" / "bin" / "python"
NODE = ROOT / "examples" / "node" / "node_modules"


def central(task: Task, rounds: int, epochs: int, batch_size: int) -> list[dict[str, float]]:
    """The same step on the data of all clients together, as many epochs as they have in their rounds."""
    trainer = gg.Trainer(task.step, device="cpu", options=gg.RuntimeOptions(threads=1))
    found = [trainer.evaluate(task.held_out)]
    for _ in range(rounds):
        trainer.fit(task.together(), epochs=epochs, batch_size=batch_size, progress=False)
        found.append(trainer.evaluate(task.held_out))
    return found


def federated(folder: Path, options: list[str]) -> dict[str, Any]:
    """What rounds.json says of a run of simulate.py, in the environment of Flower."""
    command = [str(PYTHON), str(Path(__file__).with_name("simulate.py")), str(folder), *options]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    told: dict[str, Any] = json.loads((folder / "rounds.json").read_text("utf-8"))
    return told


def table(column: str, told: dict[str, Any], alone: list[dict[str, float]]) -> str:
    lines = [f"| round | federated {column} | central {column} |", "|---|---|---|"]
    for row, one in zip(told["rounds"], alone, strict=True):
        lines.append(f"| {row['round']:.0f} | {row[column]:.4f} | {one[column]:.4f} |")
    return "\n".join(lines)


def draw(path: Path, column: str, task: Task, told: dict[str, Any], alone: list[dict[str, float]]) -> None:
    """What each client has, and how both trainings went."""
    with pictures.panels(str(path), columns=2, height=3.0) as (left, right):
        classes = int(max(client["target"].max() for client in task.clients)) + 1
        counts = np.array([np.bincount(c["target"][c["target"] >= 0].ravel(), minlength=classes) for c in task.clients])
        ends = counts.cumsum(1)
        for number in range(classes):
            left.barh(range(len(counts)), counts[:, number], left=ends[:, number] - counts[:, number])
        left.set_yticks(range(len(counts)), [f"client {i}" for i in range(len(counts))])
        left.set_xlabel("samples, a colour for each class")
        rounds = [row["round"] for row in told["rounds"]]
        right.plot(rounds, [row[column] for row in alone], label="all data in one place", color="tab:grey")
        label = f"{told['plan']['strategy']}, {len(counts)} clients"
        right.plot(rounds, [row[column] for row in told["rounds"]], label=label, color="tab:red")
        right.set_xlabel("round")
        right.set_ylabel(f"{column} on held-out data")
        right.legend(frameon=False)


def parsed() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1, help="of a client in a round")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--alpha", type=float, default=0.3, help="of the Dirichlet split: the less, the more uneven")
    parser.add_argument("--norm", choices=["group", "batch"], default="group")
    parser.add_argument("--node-clients", type=int, help="so many train in Node.js; 1 where it is installed")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "federated")
    given, rest = parser.parse_known_args()
    if given.node_clients is None:
        given.node_clients = int(shutil.which("node") is not None and NODE.is_dir() and "--secure" not in rest)
    if given.alpha <= 0:
        parser.error("alpha is above 0; give such a number")
    return given, rest


def main() -> None:
    given, rest = parsed()
    if not PYTHON.is_file():
        sys.exit("error: Flower is not installed; run make federated, which makes its environment")
    task = TASKS[given.task](given.clients, given.alpha, given.norm)
    task.save(given.folder)
    named = {name: getattr(given, name) for name in ("rounds", "clients", "epochs", "batch_size", "node_clients")}
    told = federated(given.folder, [*(f"--{n.replace('_', '-')}={v}" for n, v in named.items()), *rest])
    alone = central(task, given.rounds, given.epochs, given.batch_size)
    column = "accuracy" if "accuracy" in told["rounds"][0] else "loss"
    print(table(column, told, alone))
    print(f"{given.node_clients} of {given.clients} clients trained in Node.js; {told['bytes']:,} bytes of weights go "
          "to a client and come back each round")  # fmt: skip
    if told["epsilon"] is not None:
        print(
            f"differential privacy of whole clients: epsilon {told['epsilon']:.4g} at delta {told['plan']['delta']:g}"
        )
    draw(given.folder / "federated.svg", column, task, told, alone)
    print(f"the picture: {given.folder / 'federated.svg'}")


if __name__ == "__main__":
    main()
