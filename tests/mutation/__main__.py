"""``python -m tests.mutation --count 100000 --seed 1 --keep findings``: a long run; ``--only NUMBER`` repeats one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.mutation.campaign import campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=2_000, help="how many mutants")
    parser.add_argument("--start", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the one mutant of this number")
    parser.add_argument("--keep", type=Path, default=Path("findings"), help="where findings and their files go")
    given = parser.parse_args()
    numbers = range(given.start, given.start + given.count) if given.only is None else [given.only]
    report = campaign(given.seed, numbers, given.keep, tell=print)
    print(report.summary())
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
