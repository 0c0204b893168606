"""The weights of a model, each with the paths that its module may have in the source code.

A weight is a stored tensor: plain, transposed, quantised, packed with others, or a constant that an exporter computed
from it. Its module is known from its own name, from the name that an optimizer recorded for a folded constant, or from
the scope of the node that reads it. Only the first two say that it is a parameter: a scope's constant may be any
function of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from gradgraph.files.model_metadata import given_names
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.weight_layouts import layouts
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.weights.places import behind_moves, module_of, place_of
from gradgraph.passes.normal.weights.roles import SCALE, SETTINGS, ZERO_POINT
from gradgraph.surgery.experts import Experts, experts_of, is_reordered
from gradgraph.surgery.linear_layers import Layer, linear_layers, rewritten
from gradgraph.surgery.naming import FOLDED_FROM, is_anonymous, recorded_names
from gradgraph.surgery.operation import numbers_of

TABLE = "GatherBlockQuantized"
BUILDER, PYTORCH = "onnxruntime-genai", "pytorch"  # producers of models
DECAY, _LOGARITHM = "neg_exp_A", ".A_log"  # onnxruntime-genai's builder stores -exp(A_log) under the first name
# names of values whose numbers are those of their source: of steps of PyTorch, and within these
_MOVED = re.compile(r"((_to_copy|_unsafe_view|alias|clone|contiguous|detach|expand|lift_fresh_copy|permute|"
                    r"reshape|squeeze|t|to|transpose|type_as|unsqueeze|view)(_\d+)?)")  # fmt: skip
_UNNAMED = re.compile(r"val_\d+")
_FX_NODE = "pkg.torch.onnx.fx_node"  # metadata of nodes: the operator of PyTorch that they are of
# call of a layer that reads its parameters as they are
_LAYER_CALL = re.compile(r"\.aten\.(?:linear|layer_norm|group_norm|conv\dd)\.\w+\]\(args = \((.*)\), kwargs = \{\}\)")
_TURN = re.compile(r"(t|transpose|permute)(_\d+)?")
_NORMS = frozenset({"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization",
                    "GroupQueryAttention", "PagedAttention", "RMSNormalization", "SimplifiedLayerNormalization",
                    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})  # fmt: skip
_STORED = re.compile(r"(_merged_\d+)?(_Q\d+(G\d+)?|_quantized|_quant)?$")  # what optimum and quantisers append to names
_COMPUTED = re.compile(r"/|Conv\w+Fusion_")  # beginnings of names of nodes' outputs, and of onnxruntime's fused weights
_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_MOVES = ("Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose")


@dataclass(frozen=True)
class Place:
    """A weight of a model.

    Attributes:
        names: possible paths of the parameter, the likeliest first: ``model.layers.0.attn.q_proj.weight``.
        own: how many of these come from the name of the tensor; the others come from the scope of its reader, in
            which several tensors may be.
        value: the stored tensor; for a MatMulNBits, the packed integers.
        node: the node that reads the tensor, behind nodes that only rewrite it.
        layer: the linear layer whose weight this is; None for other parameters.
        written: the paths that the model's file itself has for the stored tensor: its name, or the name of the
            parameter that the exporter moved. Empty if it has none, or if gradgraph derived the name.
        origin: the exporter's name of the stored tensor.
        experts: the experts whose weights this is; None for other parameters.
    """

    names: tuple[str, ...]
    own: int
    value: ir.Value
    node: ir.Node
    layer: Layer | None = None
    written: tuple[str, ...] = ()
    origin: str = ""
    experts: Experts | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def role(self) -> str:
        """The name of the parameter in its module: ``weight``, ``bias``, ``running_mean``."""
        return self.name.rpartition(".")[2]

    @property
    def is_norm(self) -> bool:
        """Whether a normalisation multiplies by this tensor, so that it contains any number added to the weight."""
        return self.role in ("weight", "scale") and (self.node.op_type in _NORMS or self.node.op_type == "Mul")

    @property
    def is_decay(self) -> bool:
        """Whether this is -exp(A_log), the decay of a state: that of a gate, or as PyTorch's exporter computed it."""
        if self.node.op_type == "LinearAttentionGate":
            return (self.value.name or "").endswith(f".{DECAY}")
        steps = [re.sub(r"_\d+$", "", step) for step in _computing(self.value, self.origin)]
        return steps == ["exp", "neg"] and any(path.endswith(_LOGARITHM) for path in recorded_names(self.value))

    @property
    def is_of_torch(self) -> bool:
        """Whether PyTorch's newer exporter wrote the reader; later programs may replace the model's producer."""
        return _FX_NODE in self.node.metadata_props

    @property
    def is_square_product(self) -> bool:
        """Whether a node other than a linear layer multiplies by this square matrix, in an unknown order of axes."""
        sizes = shape_of(self.value) or ()
        is_square = self.layer is None and len(sizes) == 2 and sizes[0] == sizes[1]
        return is_square and any(layout.inputs is not None for layout in layouts(self.value))

    @property
    def is_transposed_kernel(self) -> bool:
        """Whether this is the kernel of a ConvTranspose: (inputs, outputs of a group, kernel)."""
        return self.node.op_type == "ConvTranspose" and self.value in self.node.inputs[1:2]

    def is_reordered(self, types: Collection[str], are_separate: bool) -> bool:
        """Whether rows of gate and linear half alternate here, but not in the file (``experts.is_reordered``)."""
        own = [i for i, value in enumerate(self.node.inputs) if value is self.value]
        places = own if self.experts is None else [self.experts.place]
        return any(is_reordered(self.node, place, types, are_separate) for place in places)


def places_of(work: ir.Model) -> list[Place]:
    """Return the weights of a model in the order of their readers."""
    layers = linear_layers(work, "*")[0]
    found = [Place(*_names_of_layer(layer), _start(layer.weight), layer.node, layer) for layer in layers]
    found += [place for layer in layers if (place := _bias_of(layer)) is not None]
    found += [*_tables(work), *_biases_of_transposed(work)]
    found += [Place(*_names_of_experts(one), one.stored, one.node, experts=one) for one in experts_of(work)]
    taken = {place.value for place in found}
    for value in work.graph.initializers.values():
        if value in taken or value.dtype is None or not value.dtype.is_floating_point():
            continue
        uses = [use for use in value.uses() if use.node.op_type != "QuantizeLinear"]
        if uses and not _is_of_quantiser(value):
            node, _ = behind_moves(*uses[0])
            found.append(Place(*_names_of_value(value, *uses[0]), value, node))
    order, given = {node: i for i, node in enumerate(nodes_of(work))}, given_names(work.metadata_props)
    origins = [given.get(place.value.name or "", place.value.name or "") for place in found]
    found = [replace(p, written=_written(p, origin), origin=origin) for p, origin in zip(found, origins, strict=True)]
    return sorted(found, key=lambda place: order.get(place.node, -1))


def _written(place: Place, origin: str) -> tuple[str, ...]:
    """Return the paths that the file has for a stored tensor; none if the exporter recorded that it computed it.

    ``origin`` is the exporter's name of the tensor: for a copy of a merged weight, the name of another parameter.
    """
    own = [_plain(origin)] if _is_name(origin) else []
    read = [_parameter_read(place)] if origin != place.value.name and "." in origin else []
    return () if is_computed(place.value, origin) else _unique([*recorded_names(place.value), *own, *read])


def _parameter_read(place: Place) -> str:
    """Return the path of a parameter of the reader's module that PyTorch's exporter recorded as read; "" if none.

    A layer gets its parameters as arguments of the recorded operator; a computed tensor would not have their names.
    """
    path = f"{scope_of(place.node)}.{place.role}"
    call = _LAYER_CALL.search(place.node.metadata_props.get(_FX_NODE, ""))
    return path if call and f"p_{re.sub(r'[^a-z0-9]', '_', path.lower())}" in re.findall(r"%(\w+)", call[1]) else ""


def _is_name(name: str) -> bool:
    """Whether the name of a stored tensor is neither generated nor that of a node's output."""
    return not is_anonymous(_plain(name)) and _COMPUTED.match(name) is None


def _plain(name: str) -> str:
    """Return the name of a stored tensor without what quantisers, optimum and onnxruntime-genai's builder append."""
    name = _STORED.sub("", name).replace(".Add.bias", ".bias")
    return re.sub(r"\.MatMul\.weight$|\.qweight$", ".weight", name).replace(f".{DECAY}", _LOGARITHM)


def is_path(name: str) -> bool:
    """Whether a name is the path of a parameter in a module: identifiers and numbers with points between them."""
    return _PATH.fullmatch(name) is not None


def _start(value: ir.Value) -> ir.Value:
    start, _ = rewritten(value)
    return value if start is None else start


def _names_of_layer(layer: Layer) -> tuple[tuple[str, ...], int]:
    """Return the possible paths of a layer's weight, and how many come from the weight's name."""
    start = _start(layer.weight)
    named_so = [name for name in recorded_names(start) if name.endswith(".weight")]
    modules = [module.removesuffix(".MatMul") for module in (layer.name, layer.repeats) if module]
    named = _unique([*named_so, *(f"{module}.weight" for module in modules)])
    if named_so or (_is_name(start.name or "") and layer.name != module_of(layer.node)):
        return named, len(named)
    scope = scope_of(layer.node)
    if not scope:
        return named, 0
    return _unique([f"{scope}.weight", *([f"{layer.repeats}.weight"] if layer.repeats else [])]), 0


def _bias_of(layer: Layer) -> Place | None:
    value, node = layer.bias, layer.node
    if value is None and layer.added is not None and layer.added[1].dtype is not None:
        node, value = layer.added
    start, _ = rewritten(value)
    if start is None or numbers_of(start) is None or not start.is_initializer():
        return None
    of_weight, own = _names_of_layer(layer)
    modules = [name.rpartition(".")[0] for name in of_weight]
    named = [*recorded_names(start), *([start.name or ""] if _is_name(start.name or "") else [])]
    named = [name.replace(".Add.bias", ".bias") for name in named if name.endswith("bias") and "." in name]
    names = _unique([*named, *(f"{module}.bias" for module in modules)])
    names = names if f"{modules[0]}.bias" not in names else _unique([f"{modules[0]}.bias", *names])
    return Place(names, len(names) if own else len(named), start, node)


def _tables(work: ir.Model) -> Iterator[Place]:
    """Yield the tables that GatherBlockQuantized reads rows from."""
    for node in nodes_of(work):
        if node.op_type == TABLE and node.domain == "com.microsoft":
            value = node.inputs[0]
            while value is not None and numbers_of(value) is None:
                before = value.producer()
                value = before.inputs[0] if before is not None and before.op_type in _MOVES else None
            if value is not None:
                name = re.sub(r"(\.weight)?_(Q\d+|quantized|quant)$", "", value.name or "")
                names = _unique([f"{module}.weight" for module in (scope_of(node), name.removesuffix(".MatMul"))])
                yield Place(names, len(names), value, node)


def _names_of_experts(experts: Experts) -> tuple[tuple[str, ...], int]:
    names, own = _names_of_value(experts.stored, experts.node, experts.place)
    return tuple(name.replace(".qweight", ".weight") for name in names), own


def _biases_of_transposed(work: ir.Model) -> Iterator[Place]:
    """Yield the biases of ConvTranspose, with the modules of their kernels: the node's may be that of a merged norm."""
    for node in nodes_of(work):
        if node.op_type != "ConvTranspose" or len(node.inputs) < 3:
            continue
        kernel, bias = node.inputs[1:3]
        if kernel is None or bias is None or not bias.is_initializer():
            continue
        of_kernel, own = _names_of_value(_start(kernel), node, 1)
        of_bias, count = _names_of_value(bias, node, 2)
        named = [name for name in of_bias[:count] if name.endswith(".bias")]
        names = _unique([*named, *(f"{name.rpartition('.')[0]}.bias" for name in of_kernel[: own or None])])
        yield Place(names, len(names) if own else len(named), bias, node)


def _names_of_value(value: ir.Value, node: ir.Node, position: int) -> tuple[tuple[str, ...], int]:
    name = (value.name or "").replace(f".{DECAY}", _LOGARITHM)
    _, role = place_of(node, position)
    reader, _ = behind_moves(node, position)
    scope, module = scope_of(reader), module_of(reader)
    if module and name.startswith(f"{module}."):  # as untied weights are called
        name = f"{scope}{name[len(module) :]}"
    found = _unique([*recorded_names(value), *([name] if _is_name(name) else [])])
    return _unique([*found, *([f"{scope}.{role or 'weight'}"] if scope else [])]) or (name,), len(found)


def turns_of(value: ir.Value, origin: str) -> int | None:
    """Return how often PyTorch's exporter recorded that it transposed a matrix; None if that is unknown.

    ``origin`` is the exporter's name of the tensor.
    """
    steps = _steps(value, origin)
    if not steps or unknown_steps(value, origin):
        return None
    return sum((_TURN.fullmatch(step) or _UNNAMED.fullmatch(step)) is not None for step in steps)


def unknown_steps(value: ir.Value, origin: str) -> int:
    """Return the number of steps between a parameter and a stored tensor of which PyTorch's exporter recorded no name.

    These are parts of one operator of PyTorch, such as the Mul of ``add(alpha=2)``. In ``linear`` it is a Transpose.
    """
    is_linear = all("aten.linear" in use.node.metadata_props.get(_FX_NODE, "") for use in value.uses())
    return 0 if is_linear else sum(_UNNAMED.fullmatch(step) is not None for step in _steps(value, origin))


def is_computed(value: ir.Value, origin: str) -> bool:
    """Whether PyTorch's exporter recorded that it computed ``value`` from a parameter, not only moved it."""
    return bool(_computing(value, origin))


def is_moved(value: ir.Value, origin: str) -> bool:
    """Whether PyTorch's exporter recorded steps from a parameter to ``value`` that move numbers or have no name."""
    return len(_computing(value, origin)) < len(_steps(value, origin))


def _computing(value: ir.Value, origin: str) -> list[str]:
    """Return the recorded steps that compute other numbers."""
    return [step for step in _steps(value, origin) if not (_MOVED.fullmatch(step) or _UNNAMED.fullmatch(step))]


def _steps(value: ir.Value, origin: str) -> list[str]:
    """Return the names of the values from a parameter to a stored tensor, as PyTorch's exporter recorded them."""
    text = value.metadata_props.get(FOLDED_FROM, "")
    names = [*re.findall(r"'([^']*)'", text), origin]
    return [name for name in names if "." not in name] if "." in text else []


def _is_of_quantiser(value: ir.Value) -> bool:
    """Whether nodes read ``value`` only as a scale or zero point of integers."""
    return all(SETTINGS.get(f"{node.domain}.{node.op_type}".lstrip("."), {}).get(at) in (SCALE, ZERO_POINT)
               for node, at in value.uses())  # fmt: skip


def scope_of(node: ir.Node) -> str:
    """Return the module that a node belongs to; parts that PyTorch's older exporter repeats are removed.

    ``/layer1/layer1.0/conv1/Conv`` belongs to ``layer1.0.conv1``, since a child of a Sequential has the name of its
    parent in its own.
    """
    if "/" not in (node.name or "") or module_of(node) != ".".join((node.name or "").strip("/").split("/")[:-1]):
        return module_of(node)
    scopes: list[str] = []
    for scope in (node.name or "").strip("/").split("/")[:-1]:
        if scopes and scope.startswith(f"{scopes[-1]}."):
            scopes[-1] = scope
        else:
            scopes.append(scope)
    return ".".join(scopes)


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def computes_scores(place: Place) -> bool:
    """Whether the outputs of a layer reach an output of the model without another layer in between."""
    seen, values = set[ir.Value](), [place.node.outputs[0]]
    while values:
        value = values.pop()
        if value.is_graph_output():
            return True
        if value not in seen and len(seen) < 64:
            seen.add(value)
            values += [v for node in value.consumers() if node.op_type not in ("Conv", "Gemm", "MatMul", "MatMulNBits")
                       for v in node.outputs]  # fmt: skip
    return False
