"""A gradient graph that receives sums of all ranks while it runs, with one session per part between two messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array, Feed
from gradgraph.graph.lifetimes import VIEWS
from gradgraph.parallel.joint_norms import RANKS, Message
from gradgraph.parallel.update_parts import reads_of
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.runtime.execution.regions import region_of_several
from gradgraph.runtime.execution.session import create_session
from gradgraph.runtime.execution.state import State, aligned_empty
from gradgraph.runtime.execution.walk import most_alive

if TYPE_CHECKING:
    from gradgraph.runtime.execution.step_session import StepSession

Told = Callable[[Sequence[tuple[Message, Array, Array]]], None]  # sends the second item of each, receives the third


@dataclass
class Segment:
    """The nodes of a gradient graph that run between two messages.

    Attributes:
        nodes: the nodes, in order.
        told: the messages after the nodes, each with the names of the value to send and the value to receive.
        reads: names of values from earlier segments.
        gives: names of values that later segments read.
        forgets: names of values that no later segment reads.
    """

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    told: list[tuple[Message, str, str]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    gives: list[str] = field(default_factory=list)
    forgets: list[str] = field(default_factory=list)


def cut(model: onnx.ModelProto, messages: Iterable[Message], ahead: str = "") -> list[Segment]:
    """Cut a lowered gradient graph at the nodes that exchange ``messages``, into as few segments as possible.

    Outputs of the graph are computed in the first possible segment, and all other values in the first segment with a
    reader. So activations that are only transformed for the backward pass are not stored during the forward pass. The
    value ``ahead`` is computed before the first message of the backward pass.
    """
    by_name, nodes = {m.name: m for m in messages}, model.graph.node
    made = dict[str, int]()  # the first segment that can compute a value
    for node in nodes:
        at = max((made.get(x, 0) for x in reads_of(node)), default=0)
        if node.domain == RANKS:
            at = 1 + (max(at, made.get(ahead, 0)) if by_name[node.name].is_gradient else at)
        made |= dict.fromkeys(node.output, at)
    segments = [Segment() for _ in range(max(made.values()) + 1)]
    readers: dict[str, set[int]] = {o.name: {made.get(o.name, 0)} for o in model.graph.output}
    for node in reversed(nodes):
        if node.domain == RANKS:
            places = {made[node.output[0]] - 1}
            segments[min(places)].told.append((by_name[node.name], node.input[0], node.output[0]))
        else:
            places = set().union(*(readers.get(y, ()) for y in node.output)) or {made[node.output[0]]}
            places = places if node.op_type in VIEWS else {min(places)}  # views are recomputed, not kept
            for place in places:
                segments[place].nodes.append(node)
        for x in reads_of(node):
            readers.setdefault(x, set()).update(places)
    for segment in segments:
        segment.nodes.reverse()
        segment.told.reverse()
    _cross(segments)
    return segments


def _cross(segments: Sequence[Segment]) -> None:
    maker, last = dict[str, Segment](), dict[str, Segment]()
    for segment in segments:
        made = {y for node in segment.nodes for y in node.output if y}
        read = dict.fromkeys(x for node in segment.nodes for x in reads_of(node))
        segment.reads = [x for x in read if x in maker and x not in made]
        for x in segment.reads:
            if x not in last:
                maker[x].gives.append(x)
            last[x] = segment
        maker = dict.fromkeys(made, segment) | maker
    for x, segment in last.items():
        segment.forgets.append(x)


class SegmentedGradient:
    """The session of a gradient graph that receives sums of all ranks while it runs.

    Args:
        messages, ahead: as for :func:`cut`.
        ports: inputs and outputs other than the batch.
        tell: exchanges the sums of norms between all ranks.
        packs: whether sessions may keep a copy of frozen weights.

    Attributes:
        numbers, measures, sums, gathers, inputs: as in a ``BoundSession``.
        sessions: the sessions of the segments.
    """

    def __init__(
        self,
        step: StepSession,
        model: onnx.ModelProto,
        messages: Iterable[Message],
        ahead: str,
        ports: Ports,
        tell: Told,
        packs: bool = True,
    ) -> None:
        segments = cut(model, messages, ahead)
        places = [(m, own, told) for segment in segments for m, own, told in segment.told]
        own = {name: aligned_empty((m.size,), m.dtype) for m, name, _ in places}
        told = {name: aligned_empty((m.size,), m.dtype) for m, _, name in places}
        ports = replace(
            ports,
            constants={**ports.constants, **{n: to_ortvalue(a) for n, a in told.items()}},
            memory={**ports.memory, **{n: to_ortvalue(a) for n, a in own.items()}},
        )
        self._tell = tell
        self._told: list[list[tuple[Message, Array, Array]]] = []
        self.sessions: list[_SegmentSession] = []
        options = replace(step.options, spinning=False)  # threads of idle sessions would compete with the running one
        known = {v.name: v for v in (*model.graph.value_info, *model.graph.output, *model.graph.input)}
        with region_of_several(most_alive(model)) as memory:
            for segment in segments:
                part = _model_of(model, segment, known)
                session = create_session(part, step.placement, options, step.opener.weights, packs=packs, memory=memory)
                self.sessions.append(_SegmentSession(session, step.state, _of(ports, part), segment))
                self._told.append([(m, own[x], told[y]) for m, x, y in segment.told])
        self.numbers: dict[str, float] = {}
        self.measures = list(ports.measures)
        made = {name: array for session in self.sessions for name, array in session.sums.items()}
        self.sums = {m.name: made[m.name] for m in ports.measures}
        self.gathers: Mapping[str, tuple[int, ...]] = {}
        self.inputs = {name for session in self.sessions for name in session.inputs}

    def run(self, feeds: Mapping[str, Feed], options: ort.RunOptions | None = None) -> None:
        """Run once, together with all ranks.

        Raises:
            ModelError, TerminatedError: as for ``BoundSession.run``.
        """
        values = dict[str, ort.OrtValue]()
        for session, told in zip(self.sessions, self._told, strict=True):
            session.run_between(feeds, values, options)
            if told:
                self._tell(told)
            self.numbers |= session.numbers

    def release(self) -> None:
        """Release the inputs of the last batch."""
        for session in self.sessions:
            session.release()


class _SegmentSession(BoundSession):
    """The session of one segment; onnxruntime allocates the values that pass between segments."""

    def __init__(self, session: ort.InferenceSession, state: State, ports: Ports, segment: Segment) -> None:
        super().__init__(session, state, ports)
        fixed = {o.name for o in session.get_outputs()} & {*ports.results.values(), *ports.memory, *self._buffers}
        self._fixed = [x for x in segment.gives if x in fixed]
        self._segment, self._gives = segment, [x for x in segment.gives if x not in fixed]
        self._values: dict[str, ort.OrtValue] = {}

    def run_between(
        self, feeds: Mapping[str, Feed], values: dict[str, ort.OrtValue], options: ort.RunOptions | None
    ) -> None:
        """Run on ``values`` of earlier segments; add this segment's values, and remove values no longer read."""
        self._values = values
        self.run({name: feed for name, feed in feeds.items() if name in self.inputs}, options)
        binding = self.current_side().binding
        values.update(zip(self._gives, binding.get_outputs()[-len(self._gives) :], strict=False))
        values |= {x: self._further[x] if x in self._further else to_ortvalue(self._buffers[x]) for x in self._fixed}
        for name in self._segment.reads:  # a bound value would stay alive
            binding.bind_ortvalue_input(name, _NOTHING)
        for name in self._gives:
            binding.bind_ortvalue_output(name, _NOTHING)
        for name in self._segment.forgets:
            del values[name]

    def feed(self, feeds: Mapping[str, Feed]) -> ort.IOBinding:
        binding = super().feed(feeds)
        for name in self._segment.reads:
            binding.bind_ortvalue_input(name, self._values[name])
        for name in self._gives:
            binding.bind_output(name, "cpu")
        return binding


_NOTHING = to_ortvalue(np.zeros(1, np.float32))


def _of(ports: Ports, part: onnx.ModelProto) -> Ports:
    """Return ``ports`` without the outputs that ``part``, the model of a segment, lacks."""
    outputs = {o.name for o in part.graph.output}
    return Ports(
        {n: o for n, o in ports.results.items() if o in outputs},
        constants=ports.constants,
        measures=[m for m in ports.measures if m.sums in outputs],
        memory={n: v for n, v in ports.memory.items() if n in outputs},
    )


def _model_of(model: onnx.ModelProto, segment: Segment, known: Mapping[str, onnx.ValueInfoProto]) -> onnx.ModelProto:
    graph = model.graph
    made = {y for node in segment.nodes for y in node.output}
    read = {x for node in segment.nodes for x in reads_of(node)}
    results = [o.name for o in graph.output if o.name in made]
    given = dict.fromkeys([*results, *segment.gives, *(own for _, own, _ in segment.told if own in made)])
    stored = {v.name for v in (*graph.input, *graph.initializer)}
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    part.metadata_props.extend(model.metadata_props)
    part.graph.CopyFrom(
        onnx.helper.make_graph(
            segment.nodes, graph.name,
            [*(v for v in graph.input if v.name in read), *(known[x] for x in read if x not in made | stored)],
            [known[x] for x in given],
            [t for t in graph.initializer if t.name in read],
        )
    )  # fmt: skip
    return part
