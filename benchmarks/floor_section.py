"""The section of ``performance.md`` on floors: the least possible time of a step, and the causes of longer times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from benchmarks import printed_table
from benchmarks.printed_table import grid
from benchmarks.profiling import class_of_part
from benchmarks.results import Result
from benchmarks.roster import NATIVE, OURS

LIMIT = 1.25  # times over the floor beyond this are explained
CAUSES = 2
ALLOWED = ("products", "attention", "convolutions")  # operator classes with a part in the floor
# attention consists of products or of a single kernel
CAUSE_OF = dict.fromkeys(ALLOWED[:2], "products and attention")
COLUMNS = {"floor: products": ALLOWED[:2], "floor: convolutions": ALLOWED[2:], "floor: memory": ("memory",)}
CLOCKS = {"wall": "", "processor": ", one thread, processor time"}

TEXT = """## What the processor could do

A step's floor is the least time it needs: each of its matrix products and convolutions, run alone after a warm-up in
onnxruntime's fastest form, plus one pass over the memory of the update and of each group of operators between two
products. Floor and step are measured alternately. Bars show step time divided by the floor, by operator class
(`python -m benchmarks.floors --save`; figures in [floors.json](floors.json)). Native kernels can be below the floor,
since they compute products differently. Rows of one thread are processor time, which other processes affect less
(`--threads 1 --processor-time`).

![Time of a training step over its floor](floors.svg)
"""


ABOVE = f"""Above {LIMIT} times their floor: the two operator classes with the most time beyond the floor. In
parentheses: the largest operators of the class, if they are among the five largest of the step."""


def floor_section(results: Sequence[Result], profiled: Sequence[Result] = ()) -> list[str]:
    """Return the parts of the section; empty if no floor was measured.

    ``profiled`` are results with the largest operators of steps without native kernels.
    """
    rows = [_row(r, peer) for r in results for peer in (OURS, NATIVE) if over_floor(r, peer) is not None]
    head = ["", "ms", "floor", *COLUMNS, "time / floor"]
    largest = {r.key: r.rows.get(OURS, {}).get("kernels", ()) for r in profiled}
    why = [
        f"- {_title(r)}, {peer}: {found}"
        for r in results
        for peer in (OURS, NATIVE)
        if (found := causes(r, peer, largest.get(r.key, ()) if peer == OURS else ()))
    ]
    above = f"{ABOVE}\n\n" + "\n".join(why) + "\n"
    return [TEXT, grid(head, rows), *([above] if why else [])] if rows else []


def over_floor(r: Result, peer: str) -> float | None:
    """Return the step time of ``peer`` over the measured floor, or None."""
    step, floor = r.step(peer), r.step("floor")
    return None if step is None or floor is None else step / floor


def _title(r: Result) -> str:
    return r.title + CLOCKS[r.setup.get("clock", "wall")]


def _row(r: Result, peer: str) -> list[str]:
    parts = r.rows["floor"].get("parts", {})
    seconds = [sum(parts.get(kind, 0.0) for kind in kinds) for kinds in COLUMNS.values()]
    of_floor = [printed_table.number(s * 1e3) for s in seconds]
    times = [printed_table.milliseconds(r, name) for name in (peer, "floor")]
    return [f"{_title(r)}, {peer}", *times, *of_floor, printed_table.number(over_floor(r, peer))]


def class_shares(r: Result, peer: str) -> str:
    """Return the shares of the time of ``peer`` by operator class as text, the largest first."""
    shares = sorted(r.rows[peer].get("classes", {}).items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)


def causes(r: Result, peer: str, operators: Iterable[tuple[str, float]] = ()) -> str:
    """Return the operator classes with the most time beyond the floor as text; "" up to ``LIMIT`` times it.

    ``operators`` are the largest operators of the step, such as "Transpose in grad", with their shares of its time.
    """
    over = over_floor(r, peer)
    if over is None or over <= LIMIT:
        return ""
    step, parts = r.rows[peer]["step"], r.rows["floor"].get("parts", {})
    beyond: dict[str, float] = defaultdict(float)
    for name, share in r.rows[peer].get("classes", {}).items():
        beyond[CAUSE_OF.get(name, name)] += share * step
    for kind in ALLOWED:
        beyond[CAUSE_OF.get(kind, kind)] -= parts.get(kind, 0.0)
    largest = sorted(beyond.items(), key=lambda pair: -pair[1])[:CAUSES]
    of: dict[str, list[str]] = defaultdict(list)
    for name, share in operators:
        of[CAUSE_OF.get(kind := class_of_part(*name.split(" in ")), kind)].append(f"{name} {100 * share:.0f} %")
    parts = {name: f" ({', '.join(of[name][:CAUSES])})" if of[name] else "" for name, _ in largest}
    named = [f"{name} +{1e3 * s:.1f} ms{parts[name]}" for name, s in largest]
    return f"{over:.2f} times its floor; " + ", ".join(named)
