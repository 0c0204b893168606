"""Where NaN or infinity comes from: the node of a training step that first makes it on the way to the loss.

A step is run once more with two counts for each of its values: how many elements are NaN, and how many infinite. What
leads to the result is followed back to a node that makes NaN from inputs without NaN, and from there to the node that
made the infinity that it reads, if any. Infinities that are meant, such as those of a mask, lie on no such way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.errors import shown
from gradgraph.files.protos import reads
from gradgraph.graph.scoped_names import operator_name
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.execution.session import explained

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
STRING = onnx.TensorProto.STRING
PREFIX, KINDS = "nonfinite/", ("nan", "all")
MOST_INPUTS = 4


@dataclass(frozen=True)
class NonFinite:
    """The node where NaN or infinity comes from, as ``Trainer.find_nonfinite`` found it; ``str`` is one sentence.

    Attributes:
        node, op_type: the node, as the step (and the model) calls it; empty if the value is one that the step is fed.
        output: its output that is not finite, or the input or state tensor.
        place: ``"model"``, ``"loss"``, ``"gradient"``, ``"update"``, ``"batch"`` or ``"state"``.
        nan, inf: how many elements are NaN, and how many infinite.
        shape: of the output.
        inputs: of the node, with what they hold in words.
        after: what makes NaN of it, if it is an infinity and that another node.
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
        holds = f"holds {holds} of {size} elements"
        if not self.op_type:
            fed = "the batch" if self.place == "batch" else "the state, which a step before this one wrote,"
            return f"'{shown(self.output)}' of {fed} {holds}{self._after}"
        where = {"gradient": "the gradient of ", "loss": "the loss, ", "update": "the optimizer, "}.get(self.place, "")
        name = self.node  # or of grad//layer1/Log/Div the node of the model: /layer1/Log
        if self.place == "gradient":
            name = name.removeprefix("grad/").rpartition("/")[0] or name
        read = "; ".join(f"its input '{shown(name)}' {words}" for name, words in self.inputs.items())
        node = f"{where}node '{shown(name)}' ({self.op_type})"
        return f"{node}: its output '{shown(self.output)}' {holds}; {read}{self._after}"

    @property
    def _after(self) -> str:
        return f"; NaN is made of it by {self.after}" if self.after is not None else ""


class NonFiniteSearch:
    """The search for the node of train.onnx that a NaN or infinity comes from.

    Args:
        model: train.onnx.
        feeds: of all its inputs; those in ``batch`` are of the batch.
        open_session: makes a session of a model.
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
        """Find where the first NaN or infinity of ``results`` comes from; None if they are finite."""
        # how many elements of each floating value are NaN, and how many infinite
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
        """Find where NaN or infinity in a value comes from. NaN may be made of an infinity: then that comes first."""
        if not self.counts[name][0]:
            return self._told(self._followed(name, 1))
        name = self._followed(name, 0)
        read = _read(self._makers[name]) if name in self._makers else ()
        infinite = next((i for i in read if self.counts.get(i, (0, 0))[1]), None)
        first = None if infinite is None else self._followed(infinite, 1)
        if first is None or not (first in self._makers or first in self._feeds):  # one that the file holds is meant
            return self._told(name)
        return self._told(first, self._told(name))

    def _followed(self, name: str, which: int) -> str:
        """The first value on the way to ``name`` that has NaN (0) or infinity (1), with no other before it."""
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
        """Run the step for some of its tensors; floating ones are returned in float64."""
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
    """The element types of the tensors of the main graph, as far as they are known."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    typed = {v.name: v.type.tensor_type.elem_type for v in values if v.type.HasField("tensor_type")}
    typed |= {t.name: t.data_type for t in graph.initializer}
    made = {name for node in graph.node for name in node.output}
    made |= {v.name for v in (*graph.input, *graph.initializer)}
    return {name: kind for name, kind in typed.items() if name in made}


def _counting_nodes(name: str, scope: str) -> list[onnx.NodeProto]:
    """Nodes that count how many elements of ``name`` are NaN, and NaN or infinite: x − x is NaN there."""
    make = onnx.helper.make_node
    nodes = [make("Cast", [name], [f"{scope}/x"], to=onnx.TensorProto.DOUBLE),
             make("Sub", [f"{scope}/x", f"{scope}/x"], [f"{scope}/zero"])]  # fmt: skip
    for kind, of in zip(KINDS, ("x", "zero"), strict=True):
        nodes += [make("IsNaN", [f"{scope}/{of}"], [f"{scope}/{kind}/is"]),
                  make("Cast", [f"{scope}/{kind}/is"], [f"{scope}/{kind}/cast"], to=onnx.TensorProto.INT64),
                  make("ReduceSum", [f"{scope}/{kind}/cast"], [f"{scope}/{kind}"], keepdims=0)]  # fmt: skip
    return nodes


def _read(node: onnx.NodeProto) -> list[str]:
    """The names that a node reads, its own inputs first."""
    return list(dict.fromkeys((*filter(None, node.input), *sorted(reads(node)))))


def _described(value: Array) -> str:
    """``goes from -0.3 to 2``, and how much of it is not finite."""
    if value.dtype.kind in "iub" or value.size == 0:
        return "is empty" if value.size == 0 else f"goes from {value.min()} to {value.max()}"
    numbers = value.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    words = f"goes from {finite.min():.4g} to {finite.max():.4g}" if finite.size else "has no finite element"
    infinite = int(np.isinf(numbers).sum())
    return f"{words}, with {infinite} infinite elements" if infinite else words
