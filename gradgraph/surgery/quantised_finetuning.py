"""Continued training of a quantised model.

Integer weights are dequantised to trainable floats, followed by a QuantizeLinear with the file's scale and zero point
(per tensor, channel or block), whose output takes the name of the integers. int32 biases are rounded to multiples of
their scale in the same way. An exported model thus has its original Q/DQ pairs, and int8 weights within 7 bits
(``gradgraph.graph.quantisers.SEVEN_BITS``) stay within 7 bits. Q/DQ pairs on activations are unchanged. Integer
products are converted to Q/DQ pairs first (``gradgraph.surgery.integer_products``).

With learned ranges, each scale is trained from its current value. The scale of a bias is the product of the input scale
and the weight scale of its layer, as integer kernels assume.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.quantisers import limits_of
from gradgraph.passes.normal.edit import attributes
from gradgraph.passes.normal.weights.places import module_of
from gradgraph.surgery.linear_layers import DOMAINS, INTEGER
from gradgraph.surgery.operation import add_weight, make_way, matched, numbers_of, tensor_of
from gradgraph.surgery.rounding_nodes import Writer
from gradgraph.surgery.stored_weights import as_read

_UNKNOWN = ("QLinear", "QEmbed", "QOrdered")  # prefixes of onnxruntime's integer operators


def is_quantised(work: ir.Model) -> bool:
    return any(_is(node, "QuantizeLinear") or _is(node, "DequantizeLinear") for node in work.graph)


def refuse_integer_products(work: ir.Model) -> None:
    """Raise BuildError for a layer that still multiplies integers, because its float form is unknown."""
    node = next((n for n in work.graph if n.op_type in INTEGER or n.op_type.startswith(_UNKNOWN)), None)
    if node is not None:
        raise BuildError(
            f"'{shown(node.name or node.op_type)}' is {node.op_type}, which computes in integers and has no gradient; "
            "quantise the float model again in the QDQ format, or use the float model",
        )


def names_of_quantised(work: ir.Model) -> list[str]:
    """Return the names that patterns for quantised weights match: of integer tensors, their readers and modules."""
    return [name for node in _with_integers(work) for name in _names(node)]


def _with_integers(work: ir.Model) -> list[ir.Node]:
    """Return the DequantizeLinear nodes that read stored integers."""
    return [node for node in work.graph if _is(node, "DequantizeLinear") and numbers_of(node.inputs[0]) is not None]


def go_on(work: ir.Model, target: str | Sequence[str] | None, learned: bool) -> list[str]:
    """Make quantised weights trainable, in place; return the names of their float tensors.

    ``target`` are names and globs of layers (None: all). If ``learned``, scales are trained, too.
    """
    found = _with_integers(work)
    named = {node.inputs[0] for node in (found if target is None else _named(found, target))}
    chosen = [node for node in found if node.inputs[0] in named]
    stood_for = {node.inputs[0]: as_read(node.outputs[0]) for node in reversed(chosen)}
    if learned:
        _learn(work, chosen, everywhere=target is None)
    made: dict[ir.Value, ir.Value] = {}
    for node in chosen:
        integers = node.inputs[0]
        assert integers is not None
        if integers not in made:
            made[integers] = _float_weight(work, node, integers, stood_for[integers])
        node.replace_input_with(0, made[integers])
    names = [_base(integers.name or "") for integers in made]
    for integers, rounded in made.items():
        _take_place(work, integers, rounded)
    return names


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and node.domain in DOMAINS


def _named(nodes: Sequence[ir.Node], target: str | Sequence[str]) -> list[ir.Node]:
    """Return the DequantizeLinear nodes whose integer tensor, reader or reader's module ``target`` matches."""
    return matched(target, ((_names(node), node) for node in nodes))


def _names(node: ir.Node) -> list[str]:
    own = (node.inputs[0].name if node.inputs[0] else None) or ""
    readers = [use.node for use in node.outputs[0].uses()]
    return [name for name in (own, _base(own), *(r.name for r in readers), *map(module_of, readers)) if name]


def _base(name: str) -> str:
    """Return the name of a tensor before quantisation, if it can be derived."""
    return name.removesuffix("_quantized")


def _float_weight(work: ir.Model, node: ir.Node, integers: ir.Value, numbers: np.ndarray) -> ir.Value:
    """Add a float weight with the dequantised ``numbers``; return the integers that the graph rounds it to."""
    kind, result = tensor_of(integers), node.outputs[0]
    if numbers.dtype != np.float32:
        raise BuildError(
            f"'{shown(integers.name)}' is dequantised to {numbers.dtype}, but rounding is trained in float32",
            remedy="convert the model first: gg.surgery.in_float32(model)",
            shell="convert the model first: gradgraph surgery MODEL --in-float32",
        )
    name = _base(integers.name or "weight")
    if result.name == name and not result.is_graph_output():
        make_way(work, result, f"{name}_dequantized")
    weight = add_weight(work, name if name != integers.name else f"{name}.float", numbers)
    write = Writer(work, node, _base(name))
    scale = node.inputs[1]
    assert scale is not None
    if kind.dtype == ir.DataType.INT32:
        rounded = write.cast(write.node("Round", write.node("Div", weight, scale)), ir.DataType.INT32)
    else:
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if zero is None:  # its type determines the type of the integers
            sizes = tuple(scale.shape.numpy()) if scale.shape is not None else ()
            zero = write.constant(np.zeros(sizes), kind.dtype)
            node.resize_inputs(3)
            node.replace_input_with(2, zero)
        given = {k: int(v) for k, v in attributes(node).items() if k in ("axis", "block_size")}
        rounded = write.integers(weight, scale, zero, limits_of(kind), domain=node.domain, **given)
    write.place()
    return rounded


def _take_place(work: ir.Model, integers: ir.Value, rounded: ir.Value) -> None:
    """Replace the stored ``integers`` with ``rounded``, which gets their name."""
    name = integers.name
    integers.replace_all_uses_with(rounded)
    if integers.is_initializer():
        work.graph.initializers.pop(name or "")
        integers.const_value = None  # else its tensor, which may be the caller's, would be renamed, too
    integers.name, rounded.name = None, name


# --- learned ranges -----------------------------------------------------------------------------------------------


def _learn(work: ir.Model, weights: Sequence[ir.Node], everywhere: bool) -> None:
    """Make the scales of ``weights`` and of the layers' inputs trainable, in place.

    ``weights`` are the DequantizeLinear nodes of weights. With ``everywhere``, all Q/DQ pairs on activations get
    trainable scales.
    """
    first = work.graph[0]  # scales depend on weights only, so they are computed before all other nodes
    biases = [n for n in weights if (held := numbers_of(n.inputs[0])) is not None and held.dtype == ir.DataType.INT32]
    layers = {use.node for node in weights for use in node.outputs[0].uses()}
    pairs = [node for node in work.graph if _is(node, "DequantizeLinear") and numbers_of(node.inputs[0]) is None]
    scales = [node.inputs[1] for node in weights if node not in biases]
    scales += [n.inputs[1] for n in pairs if everywhere or layers & {use.node for use in n.outputs[0].uses()}]
    learned: dict[ir.Value, ir.Value] = {}
    for scale in dict.fromkeys(scales):
        if scale is not None and (numbers := numbers_of(scale)) is not None:
            name = (scale.name or "scale").removesuffix("_scale")
            write = Writer(work, first, name)
            learned[scale] = write.learned(numbers.numpy(), f"{name}_range")
            write.place()
    for scale, computed in learned.items():
        _take_place(work, scale, computed)
    for node in biases:
        _follow(work, first, node)


def _follow(work: ir.Model, first: ir.Node, bias: ir.Node) -> None:
    """Compute the scale of a bias as input scale times weight scale of its layer, if the graph contains both."""
    layer = next((use.node for use in bias.outputs[0].uses() if use.idx == 2), None)
    dequantised = [v.producer() if v is not None else None for v in (layer.inputs[:2] if layer is not None else ())]
    found = [n.inputs[1] for n in dequantised if n is not None and _is(n, "DequantizeLinear")]
    whole = all(v is not None and len(v.shape if v.shape is not None else ()) < 2 for v in found)  # no blocks
    if len(found) == 2 and whole and found[0] is not None and found[1] is not None and bias.inputs[1] is not None:
        write = Writer(work, first, (bias.inputs[1].name or "bias").removesuffix("_scale"))
        product = write.node("Mul", found[0], found[1])
        if (old := numbers_of(bias.inputs[1])) is not None and old.shape.numpy() == (1,):
            product = write.node("Reshape", product, write.whole(-1))
        write.place()
        _take_place(work, bias.inputs[1], product)
