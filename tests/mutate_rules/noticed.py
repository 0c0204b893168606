"""Whether a case or a point notices a mutant, which is tried in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FunctionType

from gradgraph.rules.composites.table import COMPOSITES
from gradgraph.rules.registry import Point, Rule
from gradgraph.verify import cases
from gradgraph.verify.kit import WAYS
from tests.kit import near_misses
from tests.kit.float16_forms import disagreements as in_float16
from tests.kit.float16_forms import reason_to_skip as not_in_float16
from tests.mutate_rules.changes import Mutant
from tests.mutate_rules.reached import Trial

SECONDS = 30  # of a processor, after which a case does not end
WAITED = 20 * SECONDS  # of the clock: it waits for something that never comes


def noticed(rule: Rule, trial: Trial) -> str:
    """How a case or a point notices that something is wrong; "" if it does not."""
    if isinstance(trial, Point):
        return "point" if _disagrees(lambda: cases.check_point(rule, trial)) else ""
    for name, way in WAYS.items():
        if not way.reason_to_skip(trial) and _disagrees(lambda way=way: way.disagreements(rule, trial)):  # type: ignore[misc]
            return name
    if rule.op_type in COMPOSITES:
        if _disagrees(lambda: [rule.op_type] * near_misses.is_missed(rule, trial)):
            return "not found"
        if _disagrees(lambda: near_misses.disagreements(rule, trial)):
            return "near miss"
    return "float16" if not not_in_float16(rule, trial) and _disagrees(lambda: in_float16(rule, trial)) else ""


def _in_time(rule: Rule, trial: Trial) -> str:
    """``noticed``, or the end of this process."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # a busy machine makes no mutant look endless
    signal.alarm(WAITED)
    return noticed(rule, trial)


def _disagrees(run: Callable[[], list[str]]) -> bool:
    try:
        return bool(run())
    except Exception:  # whatever a wrong rule provokes, in whichever library
        return True


def caught(mutant: Mutant, function: FunctionType, trials: Sequence[tuple[Rule, Trial]]) -> str:
    """Which way catches a mutant, in a process of its own; "" if none does."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        function.__code__ = mutant.code
        way = next((w for w in (_in_time(*t) for t in trials) if w), "")
        os.write(writer, way.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        way = pipe.read()
    _, status = os.waitpid(child, 0)
    return "end of process" if status else way
