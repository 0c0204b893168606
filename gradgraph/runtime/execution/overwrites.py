"""Selection of the state tensors that a training session updates in place, according to ``RuntimeOptions.in_place``.

With ``in_place=True``, all tensors for which overwriting is provably safe are updated in place. By default, in-place
updates wait until the loss was computed and found finite, so a step that diverges, or fails before its loss, leaves the
state unchanged. Only updates of large tensors also wait for the tensor's other readers. If there are large tensors,
smaller ones whose updates need not wait for readers (optimizer state, biases) are updated in place, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from gradgraph.runtime.execution.after_loss import GATE, with_updates_after_loss
from gradgraph.runtime.execution.binding import Ports
from gradgraph.runtime.execution.inplace import large_of, overwritable, with_updates_last
from gradgraph.runtime.execution.session import RuntimeOptions


def may_overwrite(model: onnx.ModelProto, next_of: Mapping[str, str], options: RuntimeOptions) -> bool:
    """Whether ``options`` allow a session of this train graph to update any state tensor in place."""
    return options.in_place is True or (options.in_place == "auto" and bool(large_of(model, next_of)))


def prepared(model: onnx.ModelProto, ports: Ports, options: RuntimeOptions, checks_loss: bool) -> onnx.ModelProto:
    """Make updates of state tensors run after all other nodes that read them, in place; return ``model``.

    Unless ``in_place`` is True, updates also wait for the loss; with ``checks_loss``, the run then fails unless the
    loss is finite. ``model`` is a train graph in topological order, lowered for the CPU.
    """
    if options.in_place is True:
        return with_updates_last(model, ports.next_of)
    large = large_of(model, ports.next_of)
    if with_updates_after_loss(model, ports.results["loss"], ports.next_of, large, checks_loss):
        with_updates_last(model, ports.next_of)
    return model


def proven(executed: onnx.ModelProto, next_of: Mapping[str, str], options: RuntimeOptions) -> frozenset[str]:
    """Return the state tensors that a prepared graph may overwrite safely in any execution order of its nodes.

    ``executed`` is the graph as onnxruntime executes it; ``next_of``: state tensor → output with its next value.
    """
    return overwritable(executed, next_of, "" if options.in_place is True else GATE)
