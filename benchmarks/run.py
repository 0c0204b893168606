"""Times whole training steps (forward, backward, update) of gradgraph and other libraries, in turns.

    python -m benchmarks.run                                        everything: with SGD, some also with AdamW
    python -m benchmarks.run resnet18 gpt --peers gradgraph,torch   some
    python -m benchmarks.run gpt --profile                          gradgraph's step time by operator
    python -m benchmarks.run --sizes real                           networks of real sizes, with AdamW

All libraries start from equal weights and batches, with equal numbers of threads; libraries whose losses differ are not
timed. Prints medians; only ratios within one run are meaningful. ``x torch`` is gradgraph's time over the faster of
PyTorch eager and compiled, ``x floor`` over the floor; memory is the peak while training, without the libraries.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import printed_table, step_time_chart
from benchmarks.environments import InstallError, interpreter
from benchmarks.measure import LOAD_LIMIT, Plan, Row, measure
from benchmarks.page import page, sections
from benchmarks.peer_processes import ROOT, Process
from benchmarks.profiling import Summary
from benchmarks.results import DOCS, FLOORS, RESULTS, Result, load, machine, save
from benchmarks.roster import LESS_EXACT, OURS, PEERS, REAL_PEERS, Entry
from benchmarks.workloads import ALL, ALSO_ADAMW, LEARNING_RATES, REAL, SIZES, WORKLOADS

QUICK = Plan(rounds=3, turn=0.05)
KNOWN = {**PEERS, **REAL_PEERS, **LESS_EXACT}
LARGEST = 5  # number of kernels on the page


def main() -> None:
    arguments = parsed()
    if arguments.profile:
        for name, chosen in runs(arguments):
            for peer in [p for p in arguments.peers if p.startswith(OURS)] or [OURS]:
                title = f"{ALL[name].title}, {chosen.optimizer}, {peer}"
                print(title, profile(prepared(name, chosen), peer), sep=": ")
        return
    pythons, refused = prepared_environments(arguments.peers)
    print(printed_table.header(arguments.peers))
    for name, chosen in runs(arguments):
        result = measured(name, chosen, KNOWN, pythons)
        result.rows.update(refused)
        print(printed_table.lines(result, arguments.peers), flush=True)
        if arguments.save:
            result.rows[OURS].update(largest_kernels(prepared(name, chosen)))
            write_documents(save(RESULTS, [result]))


def runs(arguments: argparse.Namespace) -> list[tuple[str, argparse.Namespace]]:
    """Return each workload with its settings, including the optimizer.

    By default, real sizes use AdamW, and others SGD; some of these are also timed with AdamW.
    """
    names: list[str] = arguments.workloads
    pairs = [(name, arguments.optimizer or ("adamw" if name in REAL else "sgd")) for name in names]
    if arguments.optimizer is None:
        pairs += [(name, "adamw") for name in names if name in ALSO_ADAMW]
    return [(name, argparse.Namespace(**{**vars(arguments), "optimizer": optimizer})) for name, optimizer in pairs]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"all of --sizes by default: {', '.join(WORKLOADS | REAL)}")
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument(
        "--peers",
        help=f"by default {', '.join(PEERS)}, for real sizes {', '.join(REAL_PEERS)}; "
        f"only if named: {', '.join(LESS_EXACT)}",
    )
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="turns of each peer")
    parser.add_argument("--quick", action="store_true", help="few and short turns, to see that everything runs")
    parser.add_argument(
        "--optimizer",
        choices=LEARNING_RATES,
        help=f"by default sgd, and for {', '.join(ALSO_ADAMW)} adamw as well; for real sizes adamw",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dynamic", action="store_true", help="gradgraph gets a model with an open batch size")
    parser.add_argument("--save", action="store_true", help="put the results into performance.{json,md,svg}")
    parser.add_argument("--profile", action="store_true", help="of gradgraph's steps, by operator; nothing else is run")
    parser.set_defaults(device="cpu", tf32=False, clock="wall")
    arguments = parser.parse_args()
    arguments.workloads = arguments.workloads or list(SIZES[arguments.sizes])
    real = set(arguments.workloads) <= set(REAL)
    arguments.peers = arguments.peers.split(",") if arguments.peers else list(REAL_PEERS if real else PEERS)
    arguments.plan = QUICK if arguments.quick else Plan(arguments.rounds)
    for given, known in ((arguments.workloads, WORKLOADS | REAL), (arguments.peers, KNOWN)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(known)}")
    if arguments.save and OURS not in arguments.peers:
        parser.error(f"--save needs {OURS} among the peers")
    return arguments


def prepared_environments(peers: list[str]) -> tuple[dict[str, str], dict[str, Row]]:
    """Return the interpreters of the libraries, and rows for libraries that cannot be installed."""
    pythons, refused = {}, {}
    for name in peers:
        try:
            pythons[name] = interpreter(name)
        except InstallError as problem:
            refused[name] = {"cannot": f"not installed: {problem}"}
    return pythons, refused


def prepared(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Export the workload, unless it is up to date; return the job for the workers."""
    folder = Path("build") / "benchmarks" / (f"{name}-dynamic" if arguments.dynamic else name)
    command = [sys.executable, "-m", "benchmarks.prepare", name, str(folder)]
    subprocess.run(command + ["--dynamic"] * arguments.dynamic, cwd=ROOT, check=True)
    fields = {field: getattr(arguments, field) for field in ("optimizer", "threads", "device", "tf32")}
    return {"workload": name, "folder": str(folder), **fields}


def measured(
    name: str, arguments: argparse.Namespace, roster: Mapping[str, Entry], pythons: Mapping[str, str]
) -> Result:
    """Return the result of one workload for the libraries in ``pythons``."""
    job = prepared(name, arguments)
    rows = measure(job, roster, pythons, arguments.plan)
    facts = json.loads((ROOT / job["folder"] / "facts.json").read_text())
    return Result(name, setup(arguments), facts, rows)


def setup(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings to store with a result."""
    chosen = {field: getattr(arguments, field) for field in ("device", "threads", "optimizer", "dynamic")}
    how = {"date": datetime.date.today().isoformat(), "machine": machine(), "rounds": arguments.plan.rounds}
    return {**how, **chosen, **({"clock": arguments.clock} if arguments.clock != "wall" else {})}


def profile(job: dict[str, Any], peer: str = OURS, steps: int = 5) -> Summary | str:
    """Return the time of gradgraph's step by operator, or why there is no step."""
    process = Process(KNOWN[peer], threads=job["threads"])
    try:
        loaded = process.ask("load", LOAD_LIMIT, **job, mode=KNOWN[peer].mode)
        found = loaded if "cannot" in loaded else process.ask("profile", LOAD_LIMIT, steps=steps)
    finally:
        process.end()
    return str(found["cannot"]) if "cannot" in found else Summary(**found)


def largest_kernels(job: dict[str, Any]) -> dict[str, Any]:
    """Return the kernels that take most of a step's time, with their shares."""
    found = profile(job)
    if isinstance(found, str):
        return {}
    return {"kernels": [(name, seconds / found.total) for name, seconds in found.parts["operator in scope"][:LARGEST]]}


def write_documents(results: list[Result]) -> None:
    from benchmarks.chart import draw, draw_floors  # matplotlib is slow to import

    floors, newest = load(FLOORS), next(iter(sections(results)), [])
    (DOCS / "performance.md").write_text(page(results, floors))
    draw(newest, DOCS / "performance.svg")
    step_time_chart.draw(newest, DOCS / "step-time.svg")
    if floors:
        draw_floors(floors, DOCS / "floors.svg")


if __name__ == "__main__":
    main()
