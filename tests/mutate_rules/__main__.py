"""``python -m tests.mutate_rules``: all mutants of all rules, or of some, and a line for each that survives."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.registry import Rule
from tests.mutate_rules.changes import MODULES, Mutant, mutants_of
from tests.mutate_rules.equivalent import excuse
from tests.mutate_rules.noticed import caught
from tests.mutate_rules.reached import chosen, functions, reach, trials_of

TRIED = 100  # cases or points a mutant is tried on
FEW = 8  # if nothing should notice it

SURVIVES, UNREACHED, EQUAL = "survives", "run by no case", "equivalent"


@dataclass
class Score:
    """What became of each mutant: the way that caught it, or one of the three words above."""

    outcomes: list[tuple[Mutant, str]]

    @property
    def left(self) -> list[Mutant]:
        return [m for m, way in self.outcomes if way in (SURVIVES, UNREACHED)]

    def row(self, name: str) -> str:
        ways = Counter(way for _, way in self.outcomes)
        equal, left = ways.pop(EQUAL, 0), ways.pop(SURVIVES, 0) + ways.pop(UNREACHED, 0)
        hit = ways.total()
        share = 100 * hit / max(hit + left, 1)
        by = ", ".join(f"{w} {n}" for w, n in ways.most_common())
        return f"{name}: {hit} of {hit + left} caught ({share:.1f} %); equivalent: {equal}; by {by}"

    def __str__(self) -> str:
        modules = sorted({m.module for m, _ in self.outcomes})
        rows = [Score([(m, w) for m, w in self.outcomes if m.module == name]).row(name) for name in modules]
        return "\n".join([*rows, self.row("all")] if len(rows) > 1 else rows)


def try_all(mutants: Sequence[Mutant], rules: Sequence[Rule], seed: int = 0) -> Score:
    draw = random.Random(seed)
    found = functions()
    reached = reach(rules)
    score = Score([])
    for mutant in mutants:
        function = found.get((mutant.module, mutant.function))
        reaching = [] if function is None else trials_of(mutant, function.__code__, reached)
        trials = chosen(reaching, FEW if excuse(mutant) else TRIED, draw)
        way = caught(mutant, function, trials) or SURVIVES if trials and function is not None else UNREACHED
        if way in (SURVIVES, UNREACHED) and excuse(mutant):
            way = EQUAL
        score.outcomes.append((mutant, way))
        if way in (SURVIVES, UNREACHED):
            print(f"{way}: {mutant} (line {mutant.span[0]})", flush=True)
    return score


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate_rules", description=__doc__)
    parser.add_argument("families", nargs="*", help="modules of gradgraph/rules; all by default")
    parser.add_argument("--sample", type=int, help="that many mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--own", action="store_true", help="try cases of these families' own rules only: a quick start")
    options = parser.parse_args()
    started = time.monotonic()
    families = options.families or sorted(MODULES)
    mutants = [m for family in families for m in mutants_of(family)]
    if options.sample:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    rules = [r for r in rules_with_cases() if r.family in families or not options.own]
    score = try_all(mutants, rules, options.seed)
    print(f"{score} ({time.monotonic() - started:.0f} s)")
    sys.exit(bool(score.left))


if __name__ == "__main__":
    main()
