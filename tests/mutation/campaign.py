"""Many mutants, read by one worker after the other: a worker that ends is a finding, and the next one goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOOD = frozenset({"fine", "refused"})


@dataclass
class Report:
    """What became of each kind of file, and every mutant that was neither read nor refused."""

    seed: int
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    slowest: float = 0.0
    seconds: float = 0.0

    def add(self, result: dict[str, Any]) -> None:
        self.outcomes[result["kind"], result["outcome"]] += 1
        self.slowest = max(self.slowest, result.get("seconds", 0.0))
        if result["outcome"] not in GOOD:
            self.findings.append(result)

    def summary(self) -> str:
        rows = [f"{kind}: {outcome} {count}" for (kind, outcome), count in sorted(self.outcomes.items())]
        total = sum(self.outcomes.values())
        end = f"{total} mutants of seed {self.seed} in {self.seconds:.0f} s, the slowest took {self.slowest:.2f} s"
        return "\n".join([*rows, f"{end}; {len(self.findings)} findings"])


def campaign(
    seed: int, numbers: Iterable[int], keep: Path | None = None, tell: Callable[[str], object] = lambda line: None
) -> Report:
    """Read the mutants of these ``numbers``; what is found is told at once, and kept in the folder ``keep``."""
    report, start = Report(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        crew = Crew(Path(scratch), seed)
        for number in numbers:
            result = crew.ask(number)
            report.add(result)
            if result["outcome"] not in GOOD:
                tell(json.dumps(result, ensure_ascii=True))
                _keep(result, seed, keep, crew.folder)
        crew.dismiss()
    report.seconds = time.monotonic() - start
    return report


class Crew:
    """The worker at hand; it reads the mutant of a number, or the model at a path."""

    def __init__(self, scratch: Path, seed: int) -> None:
        self.scratch, self.seed, self.count = scratch, seed, 0
        self._hire()

    def _hire(self) -> None:
        self.count += 1
        self.folder = self.scratch / str(self.count)
        self.folder.mkdir()
        self._log = (self.scratch / f"{self.count}.log").open("w+")
        command = [sys.executable, str(Path(__file__).with_name("mutant_worker.py")), str(self.folder), str(self.seed)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=self.folder
        )

    def ask(self, number: int | str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
            result: dict[str, Any] = json.loads(answer)
            return result
        code = self._process.wait()
        self._log.seek(0)
        _, _, frames = self._log.read().rpartition("(most recent call first)")
        words = " | ".join(frames[:3000].split("\n")[:14])
        self._close()
        self._hire()
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        outcome = "hang" if code == -signal.SIGPROF else "signal" if code < 0 else "ended"
        return {"number": number, "kind": "?", "outcome": outcome, "words": f"{name}: {words}"}

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def dismiss(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._close()


def _keep(result: dict[str, Any], seed: int, keep: Path | None, folder: Path) -> None:
    """The mutant's file and what was said, as ``seed-number-…``."""
    if keep is None:
        return
    from tests.mutation.mutants import mutant

    keep.mkdir(exist_ok=True)
    stem = f"{seed}-{result['number']}"
    found = mutant(seed, result["number"], folder)
    (keep / f"{stem}-{Path(found.name).name}").write_bytes(found.content)
    (keep / f"{stem}.json").write_text(json.dumps(result, indent=1))
