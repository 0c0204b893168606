"""Origins of the nodes of a training step: the node, module or weight of the user's model that each belongs to.

Origins are found from node names, because the name of a derived node contains the original name:
``grad/stem/Conv/ConvGradWeight`` is part of the gradient of ``stem/Conv``, and ``update/AdamUpdate`` part of the
optimizer. This also works for nodes that a backend rewrote. In saved steps, the origin of each node is stored in its
``metadata_props``, which viewers show.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from gradgraph.graph.scoped_names import LEFT_OUT
from gradgraph.step.manifest import Manifest

FORWARD, LOSS, BACKWARD, UPDATE = ROLES = ("forward", "loss", "backward", "update")
_SCOPES = {"grad": BACKWARD, "again": BACKWARD, "loss": LOSS, "attack": LOSS, "update": UPDATE,
           "ascent": UPDATE}  # fmt: skip
_AGAIN = re.compile(r"again/(.*?)(_\d+)?")  # recomputed nodes have the origin of the original ones
KEYS = tuple(f"gradgraph.{name}" for name in ("part", "forward", "node", "module", "weight"))  # in metadata_props
_MANY = ""  # in place of a weight's name: a node belongs to several weights


@dataclass(frozen=True)
class Origin:
    """The part of the model that a node was written for.

    Attributes:
        role: one of ``ROLES``.
        node: the name of the node of the user's model or loss that this node is, or was derived from; may be empty.
        forward: for a node of the backward pass, the forward node whose gradient it is part of.
        module: the module of ``node``, or of ``weight``.
        weight: for a node of the optimizer, the weight that it updates; empty if there are several.
    """

    role: str
    node: str = ""
    forward: str = ""
    module: str = ""
    weight: str = ""


class Origins:
    """A lookup of the origin of each node of a graph, and of nodes that a backend derives from them.

    Args:
        own: the names of the nodes of the user's model.
        source: nodes of the user's model that may be missing from ``graph``.
        weights: the names of weights and running statistics.
        moved: for each node of the optimizer, the weight that it updates.
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        own: set[str],
        source: Iterable[onnx.NodeProto],
        weights: set[str],
        moved: Mapping[str, str],
    ) -> None:
        self._own, self._weights = own, moved
        self._nodes = {n.name for n in graph.node if n.name}
        self._written = {n.name for n in graph.node if self._role(n.name) in (FORWARD, LOSS)}
        self._modules = self._modules_of([*source, *graph.node], weights)
        self._shortened = _tails({*self._own, *self._written})

    @classmethod
    def of_step(cls, manifest: Manifest, eval_: onnx.ModelProto, train: onnx.ModelProto) -> Origins:
        """Return the lookup for a train graph of a step."""
        weights = {s.name for s in manifest.state if s.kind in ("parameter", "statistic")} | {*manifest.frozen}
        own = _own_names(eval_.graph, {*manifest.outputs})
        return cls(train.graph, own, eval_.graph.node, weights, _moved(train, manifest))

    @classmethod
    def of_model(cls, model: onnx.ModelProto) -> Origins:
        """Return the lookup for any model; gradient nodes are recognised by name."""
        own = {n.name for n in model.graph.node if not n.name.startswith("grad/")}
        return cls(model.graph, own, (), {t.name for t in model.graph.initializer}, {})

    def _modules_of(self, nodes: Sequence[onnx.NodeProto], weights: set[str]) -> dict[str, str]:
        """Return the module of each node of the forward pass.

        A node without a module gets the smallest module that contains a producer and a consumer of it.
        """
        forward = [node for node in nodes if self._role(node.name) == FORWARD]
        cast, found, maker = casts_among(nodes), dict[str, str](), dict[str, str]()
        reader: dict[str, str] = {}
        for node in forward:
            module = found.setdefault(node.name, module_of(node, weights, cast))
            maker.update((y, module) for y in node.output)
        for node in reversed(forward):
            above = next((maker[x] for x in node.input if maker.get(x)), "")
            below = next((reader[y] for y in node.output if y in reader), "")
            if not found[node.name]:
                found[node.name] = _common(above, below)
            reader.update((x, found[node.name]) for x in node.input)
        return found

    def place(self, name: str) -> str:
        """Return the name of the train-graph node from which the lowered node ``name`` was derived; "" if unknown."""
        return next((prefix for prefix in _prefixes(name) if prefix in self._nodes), "")

    def __call__(self, name: str) -> Origin:
        """Return the origin of the node of this name."""
        role = self._role(name)
        if role == UPDATE:
            weight = next((w for p in _prefixes(name) if (w := self._weights.get(p)) is not None), _MANY)
            return Origin(role, module=parent_of(weight), weight=weight)
        forward = self._forward(name) if role == BACKWARD else ""
        node = self._node(forward or ("" if role == BACKWARD else name))
        return Origin(role, node, forward, self._modules.get(node, ""))

    def _role(self, name: str) -> str:
        return FORWARD if name in self._own else _SCOPES.get(name.partition("/")[0], FORWARD)

    def _forward(self, name: str) -> str:
        """Return the forward node whose gradient the node ``name`` is part of.

        Names of nodes of a second derivative start with ``grad/grad/``.
        """
        if (first := _AGAIN.fullmatch(name)) is not None:
            return next((p for p in _prefixes(first[1]) if p in self._own or p in self._written), "")
        whole = scope = name.rpartition("/")[0]
        while scope.startswith("grad/"):
            scope = scope.removeprefix("grad/")
            for prefix in _prefixes(scope):
                if prefix in self._own or prefix in self._written:
                    return prefix
        own = next((prefix for prefix in _prefixes(whole) if prefix in self._own), "")  # a user's module may be "grad"
        if own:
            return own
        _, cut, tail = whole.rpartition(LEFT_OUT)
        return self._shortened.get(tail, "") if cut else ""

    def _node(self, name: str) -> str:
        """Return the node of the model or loss that ``name`` was derived from, such as a Dropout for its parts."""
        if name in self._own:
            return name
        found = ""
        for prefix in _prefixes(name):
            if prefix in self._own:
                return prefix
            if prefix in self._written:
                found = prefix
        return found


def write_origins(model: onnx.ModelProto, origins: Origins) -> None:
    """Store the origin of each node in its metadata, in place."""
    for node in model.graph.node:
        origin = origins(node.name)
        stands_for = origin.node if origin.node not in (node.name, origin.forward) else ""
        told = dict(zip(KEYS, (origin.role, origin.forward, stands_for, origin.module, origin.weight), strict=True))
        kept = [p for p in node.metadata_props if p.key not in KEYS]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        for key, value in told.items():
            if value:
                node.metadata_props.add(key=key, value=value)


# --- modules ----------------------------------------------------------------------------------------------


def casts_among(nodes: Iterable[onnx.NodeProto]) -> dict[str, str]:
    """Return the input of each Cast by its output."""
    return {n.output[0]: n.input[0] for n in nodes if n.op_type == "Cast" and not n.domain}


def module_of(node: onnx.NodeProto, weights: set[str], cast: Mapping[str, str]) -> str:
    """Return the module of a node: of a weight that it reads, else as recorded by the exporter, else from its name.

    A node ``/layer1/conv/MatMul`` belongs to ``layer1.conv``. ``cast`` maps the output of each Cast to its input, so
    that cast weights are recognised.
    """
    names = list(node.input)
    for i, name in enumerate(names):
        while name in cast:
            name = names[i] = cast[name]
    read = next((name for name in names if name in weights and "." in name), None)
    if read is not None:
        return parent_of(read)
    told = _module_from_exporter(node)
    return ".".join(node.name.strip("/").split("/")[:-1]) if told is None else told


def _module_from_exporter(node: onnx.NodeProto) -> str | None:
    """Return the module recorded by PyTorch's exporter, or None if there is no such record.

    It is ``body.0`` in ``: Net/body.0: torch.nn.ReLU/relu: aten…``.
    """
    told = next((p.value for p in node.metadata_props if p.key == "namespace"), "")
    modules = [part.partition(": ")[0] for part in told.split("/")[:-1] if ": " in part]
    return modules[-1].strip(": ") if modules and told.startswith(": ") else None


def _common(a: str, b: str) -> str:
    """Return the smallest module that contains both ``a`` and ``b``."""
    words = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a.split("."), b.split("."), strict=False))
    return ".".join(word for word, _ in words)


def parent_of(name: str) -> str:
    """Return the module in the name of a weight: ``layer1.conv`` for ``layer1.conv.weight``."""
    return name.rpartition(".")[0]


def _own_names(graph: onnx.GraphProto, outputs: set[str]) -> set[str]:
    """Return the names of the user's nodes: all nodes upstream of ``outputs`` or outside the loss."""
    read, found = set(outputs), set[str]()
    for node in reversed(graph.node):
        leads = not read.isdisjoint(node.output)
        if leads:
            read.update(node.input)
        if node.name and (leads or not node.name.startswith("loss/")):
            found.add(node.name)
    return found


# --- names ------------------------------------------------------------------------------------------------


def _prefixes(name: str) -> Iterator[str]:
    """Yield the name and its enclosing scopes: ``a/b/c``, ``a/b``, ``a``."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _tails(names: Iterable[str]) -> dict[str, str]:
    """Return long names by suffix (starting at a ``/``), to look up truncated names; "" if several share a suffix."""
    found: dict[str, str] = {}
    for name in names:
        tail = name
        while len(name) > 60 and tail:  # shorter ones are never truncated
            found[tail] = "" if tail in found else name
            tail = tail.partition("/")[2]
    return found


# --- updates ----------------------------------------------------------------------------------------------


def _moved(train: onnx.ModelProto, manifest: Manifest) -> dict[str, str]:
    """Return the weight of each optimizer node: the weight whose value or optimizer state it reads or computes."""
    weights = {s.name for s in manifest.state if s.kind == "parameter"}
    known = {name: name for name in weights} | kept_of(manifest)
    known |= {s.next: known[s.name] for s in manifest.state if known.get(s.name)}
    found: dict[str, str] = {}
    updates = [n for n in train.graph.node if _SCOPES.get(n.name.partition("/")[0]) == UPDATE]
    for node in updates:
        read = {known[x] for x in node.input if known.get(x)}
        if read:
            found[node.name] = read.pop() if len(read) == 1 else _MANY
            known.update((y, found[node.name]) for y in node.output)
    wanted: dict[str, set[str]] = {}
    for node in reversed(updates):  # nodes that scale a gradient read no weight; their consumers identify it
        if node.name not in found:
            whose = set().union(*(wanted.get(y, set()) for y in node.output)) | {
                known[y] for y in node.output if y in known
            }
            if len(whose) == 1:
                found[node.name] = next(iter(whose))
        if node.name in found:
            for x in node.input:
                if len(wanted.setdefault(x, set())) < 2:
                    wanted[x].add(found[node.name])
    return found


def kept_of(manifest: Manifest) -> dict[str, str]:
    """Return the weight of each tensor of optimizer state.

    It is ``a.b`` for ``a.b.exp_avg``, and also for ``generator.a.b.exp_avg`` if ``generator`` is a named step.
    """
    weights, found = {s.name for s in manifest.state if s.kind == "parameter"}, dict[str, str]()
    steps = [f"{name}." for name in manifest.steps]
    for s in manifest.state:
        if s.kind == "optimizer":
            names = [s.name.removeprefix(step) for step in steps if s.name.startswith(step)] or [s.name]
            found[s.name] = next((p for name in names for p in _dotted(name) if p in weights), _MANY)
    return found


def _dotted(name: str) -> Iterator[str]:
    """Yield ``a.b`` and ``a`` for ``a.b.exp_avg``."""
    while "." in name:
        name = parent_of(name)
        yield name
