"""``python -m tests.data_walks --count 300 --seed 1``: so many walks of each kind; ``--only SEED`` repeats one."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

from tests.data_walks.random_walk import Walk
from tests.data_walks.walk_kinds import KINDS, walk_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.data_walks", description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--only", type=int, help="the one walk of this seed")
    parser.add_argument("--kind", choices=KINDS, action="append", help="by default all")
    given = parser.parse_args()
    logging.getLogger("gradgraph").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seeds = range(given.seed, given.seed + given.count) if given.only is None else [given.only]
    counts: Counter[tuple[str, str]] = Counter()
    for seed in seeds:
        for kind in given.kind or KINDS:
            with tempfile.TemporaryDirectory() as folder:
                walk = Walk(seed, Path(folder))
                try:
                    walk_of(kind)(walk)
                    broken = walk.broken
                except Exception as error:  # whatever happens is a finding, and names its seed
                    broken = [*walk.broken, f"{type(error).__name__}: {str(error)[:1500]}"]
                    if given.only is not None:
                        traceback.print_exc()
            counts[kind, "broken" if broken else "right"] += 1
            if broken or given.only is not None:
                print(f"{kind} {seed}: {' · '.join(walk.chosen)}", flush=True)
            for one in broken:
                print(f"    {kind} {seed}: {one}", flush=True)
    for (kind, verdict), count in sorted(counts.items()):
        print(f"{kind:10} {count:6} {verdict}")
    return 1 if any(verdict == "broken" for _, verdict in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
