"""Step times of each workload relative to its floor, the least possible time on this processor.

    python -m benchmarks.floors                     the small networks, in some minutes
    python -m benchmarks.floors --sizes real        networks of real sizes
    python -m benchmarks.floors gpt --save          and update performance.md and its charts

The floor (``benchmarks/unavoidable.py``) is the time of the step's products and convolutions alone, each in
onnxruntime's best form, and of a pass over the memory that it must touch, measured in turns with the steps. Shares of a
step by operator class are read from onnxruntime's profile.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.floor_section import causes, class_shares
from benchmarks.job import CLOCK
from benchmarks.measure import Plan
from benchmarks.results import FLOORS, RESULTS, Result, load, save
from benchmarks.roster import NATIVE, OURS, PEERS
from benchmarks.run import measured, prepared, profile, runs, write_documents
from benchmarks.workloads import REAL, SIZES, WORKLOADS

TIMED = (OURS, NATIVE)
TITLE = 44


def main() -> None:
    arguments = parsed()
    os.environ[CLOCK] = arguments.clock
    peers = [*TIMED, *(["torch"] if arguments.torch else [])]
    print(f"{'ms a step, and over the floor':{TITLE}}{'floor':>9}" + "".join(f"{p:>18}" for p in TIMED) + "  shares")
    for name, chosen in runs(arguments):
        result = measured(name, chosen, PEERS, dict.fromkeys(peers, sys.executable))
        for peer in TIMED:
            if result.step(peer) is not None:
                result.rows[peer]["classes"] = classes(prepared(name, chosen), peer)
        print(line(result), flush=True)
        if arguments.save:
            save(FLOORS, [result])
            write_documents(load(RESULTS))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"all of --sizes by default: {', '.join(WORKLOADS | REAL)}")
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="time of one thread that others do not change")
    parser.add_argument("--torch", action="store_true", help="PyTorch eager as well")
    parser.add_argument("--save", action="store_true", help="put the results into floors.json, performance.{md,svg}")
    parser.set_defaults(device="cpu", tf32=False, dynamic=False, optimizer=None)
    arguments = parser.parse_args()
    arguments.workloads = arguments.workloads or list(SIZES[arguments.sizes])
    if unknown := sorted(set(arguments.workloads) - set(WORKLOADS | REAL)):
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(WORKLOADS | REAL)}")
    arguments.clock = "processor" if arguments.processor_time else "wall"
    if arguments.processor_time and arguments.threads != 1:
        parser.error("--processor-time needs --threads 1, as threads that wait for others are at work, too")
    arguments.plan = Plan(arguments.rounds)
    return arguments


def classes(job: dict[str, object], peer: str) -> dict[str, float]:
    """Return the share of each operator class in the kernels' time."""
    found = profile(job, peer)
    return {} if isinstance(found, str) else {name: spent / found.total for name, spent in found.parts["class"]}


def line(result: Result) -> str:
    """Return the printed row of a result, followed by shares and causes."""
    floor = result.step("floor")
    if floor is None:
        return f"{result.title:{TITLE}} cannot: {result.rows['floor'].get('cannot')}"
    steps = [(s, s / floor) if (s := result.step(peer)) is not None else None for peer in TIMED]
    cells = "".join(f"{f'{s[0] * 1e3:.2f} ({s[1]:.2f})' if s else '-':>18}" for s in steps)
    head = f"{result.title:{TITLE}}{floor * 1e3:>9.2f}{cells}"
    shares = [f"  {peer}: {class_shares(result, peer)}" for peer in TIMED if result.step(peer) is not None]
    return "\n".join([head, *shares, *(f"  {peer}: {why}" for peer in TIMED if (why := causes(result, peer)))])


if __name__ == "__main__":
    main()
