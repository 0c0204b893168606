"""Search for the first node of a training step that produces NaN or infinity.

The step is run again with the counts of NaN and of infinite elements of each tensor. From a non-finite result, the
search follows non-finite inputs backwards to a node that computes NaN from inputs without NaN; if one of these inputs
is infinite, it continues to the node that produced the infinity. Intended infinities, such as in a mask, are not
reported, since no NaN results from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.data.arrays.batch import Array, Feed
from gradgraph.errors import shown
from gradgraph.files.protos import reads
from gradgraph.graph.scoped_names import operator_name
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.runtime.execution.session import create_session, explained

if TYPE_CHECKING:
    from gradgraph.runtime.execution.part import Part
    from gradgraph.runtime.execution.step_session import StepSession

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
STRING = onnx.TensorProto.STRING
PREFIX, KINDS = "nonfinite/", ("nan", "all")
MOST_INPUTS = 4


@dataclass(frozen=True)
class NonFinite:
    """The origin of a NaN or infinity, as found by ``Trainer.find_nonfinite``; ``str`` returns one sentence.

    Attributes:
        node, op_type: name and operator of the node; empty if the origin is an input of the step.
        output: the non-finite output of the node, or the name of the non-finite input or state tensor.
        place: the part of the step: ``"model"``, ``"loss"``, ``"gradient"``, ``"update"``, ``"batch"`` or ``"state"``.
        nan, inf: the numbers of NaN and of infinite elements.
        shape: shape of the output.
        inputs: a description of each input's values, by name.
        after: the node that computes NaN from this infinity, if any.
    """

    node: str
    op_type: str
    output: str
    place: str
    nan: int
    inf: int
    shape: tuple[int, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    after: NonFinite | None = None

    def __str__(self) -> str:
        size = int(np.prod(self.shape))
        holds = " and ".join(f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "infinite")) if n)
        holds = f"has {holds} of {size} elements"
        if not self.op_type:
            fed = "the batch" if self.place == "batch" else "the state (written by an earlier step)"
            return f"'{shown(self.output)}' of {fed} {holds}{self._after}"
        where = {"gradient": "the gradient of ", "loss": "the loss, ", "update": "the optimizer, "}.get(self.place, "")
        name = self.node  # for the gradient grad//layer1/Log/Div, the node of the model: /layer1/Log
        if self.place == "gradient":
            name = name.removeprefix("grad/").rpartition("/")[0] or name
        read = "; ".join(f"its input '{shown(name)}' {words}" for name, words in self.inputs.items())
        node = f"{where}node '{shown(name)}' ({self.op_type})"
        return f"{node}: its output '{shown(self.output)}' {holds}; {read}{self._after}"

    @property
    def _after(self) -> str:
        return f"; NaN results from it in {self.after}" if self.after is not None else ""


def first_nonfinite(
    session: StepSession, feeds: Mapping[str, Feed], hyperparameters: Mapping[str, float], part: Part
) -> NonFinite | None:
    """Return the node of the saved step that first produces NaN or infinity in the loss or the next state.

    None if both are finite for the checked batch ``feeds``. See ``Trainer.find_nonfinite``.
    """
    state, rates, ports = session.state, part.rates, part.ports
    state.check()
    before = dict(rates.given or {})
    rates.write(hyperparameters)
    try:
        batch = {
            n: f if isinstance(f, ort.OrtValue) else to_ortvalue(np.ascontiguousarray(f)) for n, f in feeds.items()
        }
        read = set(session.manifest.parts[part.name].reads)
        held = {name: value for name, value in state.values(state.side).items() if name in read}
        options = replace(session.options, optimization="none")
        open_session = partial(
            create_session, placement=session.placement, options=options, weights=session.opener.weights
        )
        sums = (measure.sums for measure in ports.measures if measure.name == "loss")
        search = NonFiniteSearch(part.model, {**batch, **rates.constants, **held}, batch, open_session)
        return search([ports.results["loss"], *sums, *ports.next_of.values()])
    finally:
        rates.write(before)
        rates.given = None


class NonFiniteSearch:
    """A search for the node of train.onnx that first produces NaN or infinity.

    Args:
        feeds: the values of all its inputs.
        batch: the names of the inputs that belong to the batch; the others are state and hyperparameters.
        open_session: creates a session for a model.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        feeds: Mapping[str, ort.OrtValue],
        batch: Collection[str],
        open_session: Callable[[onnx.ModelProto], ort.InferenceSession],
    ) -> None:
        self._model, self._feeds, self._batch, self._open = model, feeds, batch, open_session
        self._makers = {name: node for node in model.graph.node for name in node.output if name}
        self._types = _element_types(model)

    def __call__(self, results: Sequence[str]) -> NonFinite | None:
        """Return the origin of NaN or infinity in the first of ``results`` that is not finite; None if all are."""
        # count the NaN and the infinite elements of each floating-point tensor
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        names = [name for name, kind in self._types.items() if kind in FLOATS]
        for i, name in enumerate(names):
            model.graph.node.extend(_counting_nodes(name, f"{PREFIX}{i}"))
        outputs = [f"{PREFIX}{i}/{kind}" for i in range(len(names)) for kind in KINDS]
        found = [int(value.numpy()) for value in self._run(model, outputs)]
        self.counts = {name: (found[2 * i], found[2 * i + 1] - found[2 * i]) for i, name in enumerate(names)}
        bad = next((name for name in results if any(self.counts.get(name, (0, 0)))), None)
        return None if bad is None else self._origin(bad)

    def _origin(self, name: str) -> NonFinite:
        """Return the origin of NaN or infinity in ``name``; for NaN computed from infinity, that of the infinity."""
        if not self.counts[name][0]:
            return self._told(self._followed(name, 1))
        name = self._followed(name, 0)
        read = _read(self._makers[name]) if name in self._makers else ()
        infinite = next((i for i in read if self.counts.get(i, (0, 0))[1]), None)
        first = None if infinite is None else self._followed(infinite, 1)
        if first is None or not (first in self._makers or first in self._feeds):  # a stored infinity is intended
            return self._told(name)
        return self._told(first, self._told(name))

    def _followed(self, name: str, which: int) -> str:
        """Return the first tensor, following the inputs of ``name`` back, with NaN (``which`` 0) or infinity (1)."""
        while True:
            maker = self._makers.get(name)
            before = [] if maker is None else [i for i in _read(maker) if self.counts.get(i, (0, 0))[which]]
            if not before:
                return name
            name = before[0]

    def _told(self, name: str, after: NonFinite | None = None) -> NonFinite:
        maker = self._makers.get(name)
        nan, inf = self.counts[name]
        read = [] if maker is None else _read(maker)
        values = self._values([name, *read])
        shape = values[name].shape
        if maker is None:
            place = "batch" if name in self._batch else "state"
            return NonFinite("", "", name, place, nan, inf, shape, after=after)
        inputs = {i: _described(values[i]) for i in read[:MOST_INPUTS] if i in values}
        op_type = operator_name(maker.op_type, maker.domain)
        place = {"grad": "gradient", "loss": "loss", "update": "update"}.get(maker.name.split("/", 1)[0], "model")
        return NonFinite(maker.name, op_type, name, place, nan, inf, shape, inputs, after)

    def _values(self, names: Iterable[str]) -> dict[str, Array]:
        """Run the step and return the tensors ``names``, floats as float64; strings and unknown types are omitted."""
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        known = [name for name in names if self._types.get(name, STRING) != STRING]
        for i, name in enumerate(known):
            to = onnx.TensorProto.DOUBLE if self._types[name] in FLOATS else self._types[name]
            model.graph.node.append(onnx.helper.make_node("Cast", [name], [f"{PREFIX}{i}"], to=to))
        found = self._run(model, [f"{PREFIX}{i}" for i in range(len(known))])
        return {name: value.numpy() for name, value in zip(known, found, strict=True)}

    def _run(self, model: onnx.ModelProto, outputs: list[str]) -> Sequence[ort.OrtValue]:
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        read = {i for node in model.graph.node for i in reads(node)}
        inputs = [i for i in model.graph.input if i.name in read]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        session = self._open(model)
        feeds = {i.name: self._feeds[i.name] for i in session.get_inputs()}
        with explained("running the step failed"):
            found: Sequence[ort.OrtValue] = session.run_with_ort_values(outputs, feeds)
        return found


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the known ONNX element types of tensors in the main graph, by name."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    typed = {v.name: v.type.tensor_type.elem_type for v in values if v.type.HasField("tensor_type")}
    typed |= {t.name: t.data_type for t in graph.initializer}
    made = {name for node in graph.node for name in node.output}
    made |= {v.name for v in (*graph.input, *graph.initializer)}
    return {name: kind for name, kind in typed.items() if name in made}


def _counting_nodes(name: str, scope: str) -> list[onnx.NodeProto]:
    """Return nodes that count NaN elements, and NaN or infinite elements (x − x is NaN), of the tensor ``name``.

    Names of new tensors begin with ``scope``.
    """
    make = onnx.helper.make_node
    nodes = [make("Cast", [name], [f"{scope}/x"], to=onnx.TensorProto.DOUBLE),
             make("Sub", [f"{scope}/x", f"{scope}/x"], [f"{scope}/zero"])]  # fmt: skip
    for kind, of in zip(KINDS, ("x", "zero"), strict=True):
        nodes += [make("IsNaN", [f"{scope}/{of}"], [f"{scope}/{kind}/is"]),
                  make("Cast", [f"{scope}/{kind}/is"], [f"{scope}/{kind}/cast"], to=onnx.TensorProto.INT64),
                  make("ReduceSum", [f"{scope}/{kind}/cast"], [f"{scope}/{kind}"], keepdims=0)]  # fmt: skip
    return nodes


def _read(node: onnx.NodeProto) -> list[str]:
    """Return the names of the tensors that a node reads: its inputs, then tensors that only its subgraphs read."""
    return list(dict.fromkeys((*filter(None, node.input), *sorted(reads(node)))))


def _described(value: Array) -> str:
    """Return a description of an array's values, such as ``ranges from -0.3 to 2, with 3 infinite elements``."""
    if value.dtype.kind in "iub" or value.size == 0:
        return "is empty" if value.size == 0 else f"ranges from {value.min()} to {value.max()}"
    numbers = value.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    words = f"ranges from {finite.min():.4g} to {finite.max():.4g}" if finite.size else "has no finite element"
    infinite = int(np.isinf(numbers).sum())
    return f"{words}, with {infinite} infinite elements" if infinite else words
