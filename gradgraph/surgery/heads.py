"""New heads: replace the last linear layer to change the number of classes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import PATH, TEXT, WHOLE, Kind, checked
from gradgraph.data.record.data_names import NAMES_KEY, DataNames
from gradgraph.errors import ModelError, Remedies, shown
from gradgraph.files.models import Source
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import is_static
from gradgraph.passes.normal.edit import discard, replace_value
from gradgraph.surgery.integer_products import write_pairs
from gradgraph.surgery.linear_layers import DOMAINS, Layer, drawn, layer_at, stored
from gradgraph.surgery.operation import (
    Path,
    Result,
    add_weight,
    clear_away,
    closed,
    forget_sizes_behind,
    free_name,
    learn_sizes,
    numbers_of,
    opened,
    parts_of,
    rename,
    set_numbers,
    value_named,
)

# operators allowed between the last linear layer and the output; they work for any number of classes
_PASSED = frozenset(
    (
        *("AveragePool", "Cast", "Clip", "Dropout", "Flatten", "GlobalAveragePool", "HardSigmoid", "Identity"),
        *("LogSoftmax", "ReduceMean", "Relu", "Reshape", "Sigmoid", "Softmax", "Squeeze", "Tanh", "Transpose"),
        *("Unsqueeze",),
    )
)
_PAIR = ("QuantizeLinear", "DequantizeLinear")  # removed after a new head: their ranges are those of the old classes
_LINEAR = ("Gemm", "MatMul", "Conv", "MatMulNBits")
_ABOVE_ZERO = Kind("a whole number above zero", lambda value: WHOLE.fits(value) and value > 0)


@checked(classes=_ABOVE_ZERO, output=TEXT.or_none(), name=TEXT, seed=WHOLE, out=PATH.or_none())
def new_head(
    model: Source,
    classes: int,
    *,
    output: str | None = None,
    name: str = "head",
    seed: int = 0,
    out: Path | None = None,
) -> Result:
    """Replace the last linear layer with a new one for ``classes`` classes.

    The layer (Gemm, MatMul or Conv, also with quantised weights) is found by searching backwards from the output,
    through activations, pools and reshapes, which are kept. The new weights are float, named ``<name>.weight`` and
    ``<name>.bias`` (if there was a bias), and initialised as in PyTorch, uniform in ±1/√(fan in). A tied embedding, or
    any other layer that shares the old weights, keeps them. A model with integer products (QLinearConv, MatMulInteger,
    …) is converted to QDQ format, with the same integers.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        classes: the new number of classes.
        output: the output whose head is replaced; by default the first.
        name: the name of the new layer: ``gg.build(gg.new_head(model, 7), train="head.*")`` trains only this layer.
        seed: seed of the initial values.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model`` (a ``ModelProto`` for a path; with ``out``, an ``onnx_ir.Model``).

    Raises:
        ModelError: no such layer was found; the message names the node at which the search ended.
        UnknownNameError: the model has no output of this name.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    if write_pairs(work):
        learn_sizes(work)
    chosen_name = output or work.graph.outputs[0].name or ""
    head = last_linear(value_named(work, chosen_name))
    new = _replace(work, head, classes, np.random.default_rng(seed))
    clear_away(work)
    for value, part in zip(new, ("weight", "bias"), strict=False):
        rename(value, free_name(work, f"{name}.{part}"))  # the old ones are removed, so their names are free
    learn_sizes(work)
    _check_classes(value_named(work, chosen_name), classes)
    _forget_classes(work)
    return closed(work, model, out)


def _forget_classes(work: ir.Model) -> None:
    """Remove the class names of the old head from the metadata; names of columns stay."""
    names = DataNames.read_from(work.metadata_props)
    work.metadata_props.pop(NAMES_KEY, None)
    work.metadata_props.update(replace(names, classes={}, softmax=()).as_metadata())


def _check_classes(output: ir.Value, classes: int) -> None:
    """Raise ModelError if a node after the head fixes the output to the old number of classes."""
    dims = shape_of(output)
    if dims is not None and is_static(dims[1:]) and classes not in dims:
        raise ModelError(
            f"the output '{shown(output.name)}' would stay {list(dims)}: a node after the last linear layer is fixed "
            "to the old classes; cut the model before it first"
        )


@dataclass
class Head:
    """The last linear layer.

    Attributes:
        sum: the Add of the bias after a MatMul, if any.
        behind: the nodes between the layer and the output, last first.
    """

    layer: Layer
    sum: ir.Node | None
    behind: list[ir.Node]


def last_linear(output: ir.Value) -> Head:
    """Return the last linear layer before ``output``; nodes that do not mix classes may follow it."""
    value, behind, added = output, list[ir.Node](), None
    while (node := value.producer()) is not None:
        if _does_nothing(node) and (same := node.inputs[0]) is not None:
            if value.is_graph_output():
                behind.append(node)
            else:
                replace_value(value, same)
                discard(node)
            value = same
            continue
        if node.op_type in _LINEAR and node.domain in DOMAINS:
            return Head(_layer(node, output), added, behind)
        summand, other = _with_stored(node)
        source: ir.Value | None
        if summand is not None and added is None and _count(other) > 1 and node.op_type == "Add":
            added, source = node, summand
        elif added is None and not node.domain and (node.op_type in (*_PASSED, *_PAIR) or _count(other) == 1):
            behind.append(node)
            source = summand if summand is not None else node.inputs[0]
        else:
            raise ModelError(
                f"no last linear layer found for the output '{shown(output.name)}': the search ended "
                f"at {_called(node)}, which is neither a linear layer nor an activation",
                **_cut_before(node),
            )
        if source is not None:
            value = source
    raise ModelError(
        f"no last linear layer found for the output '{shown(output.name)}': the search ended at '{shown(value.name)}', "
        "which no node computes; choose another output"
    )


def _cut_before(end: ir.Node) -> Remedies:
    """Return the remedies if the search ended at ``end``: a cut at the nearest linear layer before it."""
    queue, seen = deque([end]), {end}
    while queue:
        node = queue.popleft()
        if node.op_type in _LINEAR and node.domain in DOMAINS and layer_at(node) is not None:
            users = node.outputs[0].consumers()
            added = users[0] if len(users) == 1 and users[0].op_type == "Add" else None
            biased = added is not None and _with_stored(added)[0] is node.outputs[0]
            name = shown((added if biased and added is not None else node).outputs[0].name)
            return {
                "remedy": f"cut the model at the linear layer before it: gg.surgery.cut(model, outputs='{name}')",
                "shell": f"cut the model at the linear layer before it: add --output '{name}'",
            }
        before = [p for v in node.inputs if v is not None and (p := v.producer()) is not None and p not in seen]
        seen.update(before)
        queue.extend(before)
    return {
        "remedy": "cut the model at an inner value first: gg.surgery.cut(model, outputs=...)",
        "shell": "cut the model at an inner value first: gradgraph surgery MODEL --output VALUE",
    }


def _does_nothing(node: ir.Node) -> bool:
    """Whether ``node`` is a no-op that model converters write: an Identity, or a Cast to the same type."""
    if node.domain or node.op_type not in ("Cast", "Identity") or node.inputs[0] is None:
        return False
    return node.op_type == "Identity" or node.inputs[0].dtype == node.attributes["to"].as_int()


def _called(node: ir.Node) -> str:
    return f"{node.op_type} '{shown(node.name)}'" if node.name else node.op_type


def _with_stored(node: ir.Node) -> tuple[ir.Value | None, ir.TensorProtocol | None]:
    """Return the computed and the stored operand of an Add, Sub, Mul or Div, or (None, None) if neither is stored."""
    if node.op_type in ("Add", "Sub", "Mul", "Div") and not node.domain:
        for value, other in (node.inputs, node.inputs[::-1]):
            if (tensor := numbers_of(stored(other))) is not None:
                return value, tensor
    return None, None


def _count(tensor: ir.TensorProtocol | None) -> int:
    """Return the length of a vector (all other axes of size 1) or scalar; 0 for other tensors."""
    longest = 0 if tensor is None else max(tensor.shape.numpy(), default=1)
    return longest if tensor is not None and tensor.size == longest else 0


def _layer(node: ir.Node, output: ir.Value) -> Layer:
    layer = layer_at(node)
    if layer is None:
        raise ModelError(
            f"the last linear layer, {_called(node)}, multiplies two computed tensors, so it has no weight; choose "
            "another output"
        )
    if layer.kind != "Conv" and len(layer.shape) != 2:
        raise ModelError(
            f"the last linear layer, {_called(node)}, has a weight of shape {list(layer.shape)}; a head must have a "
            "matrix"
        )
    if layer.groups != 1:
        raise ModelError(
            f"the output '{shown(output.name)}' comes from {_called(node)} with groups, which cannot be a head; "
            "choose another output"
        )
    return layer


def _replace(work: ir.Model, head: Head, classes: int, rng: np.random.Generator) -> list[ir.Value]:
    """Replace the old layer with a new one; return its weight, and its bias if there was one."""
    layer, node = head.layer, head.layer.node
    old, before = (head.sum or node).outputs[0], layer.shape[layer.axis]
    kind, sizes = old.dtype or ir.DataType.FLOAT, list(layer.shape)
    sizes[layer.axis] = classes
    fan_in = int(np.prod(sizes)) // classes
    has_bias = head.sum is not None or layer.bias is not None
    weight = add_weight(work, "new.weight", drawn(rng, sizes, fan_in, kind))
    bias = add_weight(work, "new.bias", drawn(rng, (classes,), fan_in, kind)) if has_bias else None
    x, new = node.inputs[0], list[ir.Node]()
    if node.op_type in ("Gemm", "Conv"):
        attrs = {k: v for k, v in node.attributes.items() if k not in ("alpha", "beta")}
        new.append(ir.Node("", node.op_type, [x, weight, *([bias] if bias else [])], attrs.values(), name=node.name))
    else:
        new.append(ir.Node("", "MatMul", [x, weight], name=node.name))
        if bias is not None:
            new.append(ir.Node("", "Add", [new[0].outputs[0], bias], name=(head.sum or node).name))
    made = new[-1].outputs[0]
    for one in new:
        one.metadata_props.update(node.metadata_props)
    work.graph.insert_before(head.sum or node, new)
    made.type, wanted = old.type, old.name
    if head.sum is not None:
        node.outputs[0].name, new[0].outputs[0].name = None, node.outputs[0].name
    replace_value(old, made)
    old.name, made.name = None, wanted
    for gone in filter(None, (head.sum, node)):
        discard(gone)
    for one in list(_settled(head.behind)):
        if one.op_type == "Reshape":
            _fit_target(work, one, before, classes)
    forget_sizes_behind(made)
    return [weight] if bias is None else [weight, bias]


def _settled(behind: list[ir.Node]) -> Iterator[ir.Node]:
    """Yield the nodes after the head; remove Q/DQ pairs, whose ranges were calibrated on the old classes."""
    for node in behind:
        if node.op_type not in _PAIR:
            yield node
        elif node.op_type == "DequantizeLinear":
            first = node.inputs[0].producer() if node.inputs[0] is not None else None
            if first is None or first.op_type != "QuantizeLinear" or first.inputs[0] is None:
                raise ModelError(
                    f"{_called(node)} after the last linear layer has no QuantizeLinear before it; cut the model "
                    "before it first"
                )
            source, result = first.inputs[0], node.outputs[0]
            if result.is_graph_output():
                source.name, result.name = result.name, None
            replace_value(result, source)
            discard(node)
            if not first.outputs[0].uses():
                discard(first)


def _fit_target(work: ir.Model, node: ir.Node, before: int, now: int) -> None:
    """Replace the number of classes ``before`` with ``now`` in the target shape of a Reshape."""
    held = [(v, t.numpy()) for v in parts_of(node.inputs[1]) if v is not None and (t := numbers_of(v)) is not None]
    parts = [(v, sizes) for v, sizes in held if before in sizes]
    if not parts:
        return
    part, target = parts[0][0], parts[0][1].copy()
    if len(parts) > 1 or (target == before).sum() > 1 or len(part.uses()) > 1:
        raise ModelError(
            f"{_called(node)} after the last linear layer has the size {before} twice, so the axis of classes is "
            "ambiguous; cut the model before it first"
        )
    target[target == before] = now
    set_numbers(work, part, target)
