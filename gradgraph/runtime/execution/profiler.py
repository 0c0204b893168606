"""Profiles of a training step: onnxruntime's node times, assigned to the nodes and layers of the user's model.

The name of a node in the lowered step begins with the part of the step (``grad/``, ``loss/``, ``update/``), followed by
the model node that it was derived from. Optimizer nodes are assigned to the layer of the weight that they update.
"""

from __future__ import annotations

import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import onnx

from gradgraph.errors import shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.runtime.saved.printed import text_table
from gradgraph.step.origins import FORWARD, LOSS, ROLES, Origins
from gradgraph.step.step import Step

if TYPE_CHECKING:
    from gradgraph.data.arrays.batch import Feed
    from gradgraph.runtime.execution.part import Part
    from gradgraph.runtime.execution.step_session import StepSession

WARM_UP = 2  # untimed steps
PLACES = (*ROLES, "other")
_KERNEL = "_kernel_time"


@dataclass(frozen=True)
class TimedNode:
    """A node of the executed step with its time.

    Attributes:
        node: the node of the user's model that it was derived from; empty for nodes of the loss and the optimizer.
        layer: the module of ``node``, as in ``Step.summary``; for a node of the optimizer, the module of the weight.
        place: ``"forward"``, ``"loss"``, ``"backward"``, ``"update"``, or ``"other"`` (such as layout conversions that
            onnxruntime inserts).
        op_type: the operator that ran.
        name: the name of the node in the lowered step.
        seconds: median time in one step, without the nodes in its subgraphs.
    """

    node: str
    layer: str
    place: str
    op_type: str
    name: str
    seconds: float


@dataclass(frozen=True)
class Profile:
    """The times of a step's nodes, as measured by ``Trainer.profile``; printed as tables.

    Attributes:
        nodes: the nodes with their times, slowest first.
        steps: the number of timed steps.
        seconds: median time of a whole step.
    """

    nodes: tuple[TimedNode, ...]
    steps: int
    seconds: float

    def layers(self) -> dict[str, dict[str, float]]:
        """Return seconds per step by layer and place (such as "forward"), with the slowest layer first."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PLACES, 0.0))
        for n in self.nodes:
            found[n.layer][n.place] += n.seconds
        return dict(sorted(found.items(), key=lambda row: -sum(row[1].values())))

    def operators(self) -> dict[str, float]:
        """Return the seconds per step of each operator type, slowest first."""
        found: dict[str, float] = defaultdict(float)
        for n in self.nodes:
            found[n.op_type] += n.seconds
        return dict(sorted(found.items(), key=lambda row: -row[1]))

    def places(self) -> dict[str, float]:
        """Return seconds per step by place: "forward", "loss", "backward", "update" and "other"."""
        return {place: sum(n.seconds for n in self.nodes if n.place == place) for place in PLACES}

    def __str__(self) -> str:
        return self.table()

    def table(self, most: int = 10) -> str:
        """Return three tables as text: the slowest nodes, layers and operators, at most ``most`` rows each."""
        parts = ", ".join(f"{place} {_ms(s)}" for place, s in self.places().items() if s)
        lines = [f"a step takes {_ms(self.seconds)} (median of {self.steps}); its nodes: {parts}"]
        slow = [((n.op_type, n.place, n.node or n.layer or "-"), n.seconds) for n in self.nodes]
        layers = [((k or "-", *(_ms(v[p]) for p in PLACES)), sum(v.values())) for k, v in self.layers().items()]
        kinds = [((k,), s) for k, s in self.operators().items()]
        lines += self._ranked(("operator", "place", "node of the model"), slow[:most])
        lines += self._ranked(("layer", *PLACES), layers[:most])
        lines += self._ranked(("operator",), kinds[:most])
        return "\n".join(lines)

    def _ranked(self, header: Sequence[str], rows: Sequence[tuple[Sequence[str], float]]) -> list[str]:
        whole = sum(n.seconds for n in self.nodes) or 1.0
        cells = [(*map(shown, words), _ms(s), f"{s / whole:.1%}") for words, s in rows]
        texts = [i for i, name in enumerate(header) if name not in PLACES]
        return ["", *text_table([(*header, "time", "share"), *cells], texts)]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def as_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        nodes = [{"node": n.node, "layer": n.layer, "place": n.place, "operator": n.op_type, "seconds": n.seconds}
                 for n in self.nodes]  # fmt: skip
        return {"seconds": self.seconds, "steps": self.steps, "places": self.places(), "layers": self.layers(),
                "operators": self.operators(), "nodes": nodes}  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.{3 if seconds < 1e-3 else 2 if seconds < 1e-2 else 1}f} ms" if seconds else "-"


def profiled(
    session: StepSession, feeds: Mapping[str, Feed], hyperparameters: Mapping[str, float], steps: int, part: Part
) -> Profile:
    """Profile steps on a checked batch; see ``Trainer.profile``. The state is updated."""
    seconds = []
    for _ in range(WARM_UP + steps):  # timed without onnxruntime's profiler, which slows a step
        begin = time.perf_counter()
        session.train(feeds, hyperparameters, part)
        seconds.append(time.perf_counter() - begin)
    with tempfile.TemporaryDirectory() as folder:
        bound = session.alone(part, part.sizes(feeds), Path(folder) / "profile")
        fed = feeds if session.state.on_cpu else {**feeds, **part.rates.constants}
        for _ in range(WARM_UP + steps):
            bound.run(fed)
        written = Path(bound.session.end_profiling())
        return profile_of(session.definition, part.model, written, seconds[WARM_UP:])


# --- reading -----------------------------------------------------------------------------------------------


def profile_of(step: Step, train: onnx.ModelProto, path: Path, seconds: Sequence[float]) -> Profile:
    """Return the profile of a step from the file ``path`` that onnxruntime wrote.

    The file covers ``WARM_UP`` steps followed by timed steps, whose times are ``seconds``.
    """
    events = json_of(path.read_bytes())
    ends = sorted(e["ts"] + e["dur"] for e in events if e["cat"] == "Session" and e["name"] == "model_run")
    kernels = [e for e in events if e["cat"] == "Node" and e["name"].endswith(_KERNEL)]
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(seconds))
    for event, own in _own_times(kernels):
        which = bisect_left(ends, event["ts"]) - WARM_UP
        if 0 <= which < len(seconds):
            times[event["name"].removesuffix(_KERNEL), event["args"]["op_name"]][which] += own / 1e6
    origins, nodes = Origins.of_step(step.manifest, step.eval, train), []
    for (name, op_type), each in times.items():
        origin = origins(name)
        place = "other" if origin.role == FORWARD and not origin.node else origin.role
        node = "" if origin.node.startswith(f"{LOSS}/") else origin.node  # nodes of the loss are not in the model
        nodes.append(TimedNode(node, origin.module, place, op_type, name, median(each)))
    return Profile(tuple(sorted(nodes, key=lambda n: -n.seconds)), len(seconds), median(seconds))


def _own_times(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield each event with its microseconds, excluding nested events (nodes in loop bodies)."""
    open_: list[tuple[Mapping[str, Any], float, list[float]]] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_ and open_[-1][1] <= event["ts"]:
            done, _, inner = open_.pop()
            yield done, max(done["dur"] - sum(inner), 0)
        if open_:
            open_[-1][2].append(event["dur"])
        open_.append((event, event["ts"] + event["dur"], []))
    for done, _, inner in open_:
        yield done, max(done["dur"] - sum(inner), 0)
