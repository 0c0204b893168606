"""The next values that a training session writes over the current ones, according to its options.

``in_place=True`` asks for all that can be proven to be safe. By default it is large tensors alone, and these only once
the loss is known to be a number: so a step that diverges, or fails before its loss, leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from gradgraph.runtime.execution.after_loss import GATE, with_updates_after_loss
from gradgraph.runtime.execution.binding import Ports
from gradgraph.runtime.execution.inplace import large_of, overwritable, with_updates_last
from gradgraph.runtime.execution.session import RuntimeOptions


def may_overwrite(model: onnx.ModelProto, next_of: Mapping[str, str], options: RuntimeOptions) -> bool:
    """Whether a session of a train graph may have something to write over."""
    return options.in_place is True or (options.in_place == "auto" and bool(large_of(model, next_of)))


def prepared(model: onnx.ModelProto, ports: Ports, options: RuntimeOptions, checks_loss: bool) -> onnx.ModelProto:
    """Let updates of ``model`` wait for what they must before they are written over the state, in place; return it.

    Args:
        model: a train graph in topological order, lowered for the CPU.
        checks_loss: where it waits for the loss, for one that is a number.
    """
    if options.in_place is True:
        return with_updates_last(model, ports.next_of)
    large = large_of(model, ports.next_of)
    if with_updates_after_loss(model, ports.results["loss"], ports.next_of, large, checks_loss):
        with_updates_last(model, ports.next_of)
    return model


def proven(executed: onnx.ModelProto, next_of: Mapping[str, str], options: RuntimeOptions) -> frozenset[str]:
    """The state tensors that a prepared graph, as onnxruntime executes it, may write over, whatever the order of nodes.

    Args:
        next_of: state tensor → the output that holds its next value.
    """
    if options.in_place is True:
        return overwritable(executed, next_of, "")
    return overwritable(executed, next_of, GATE).intersection(large_of(executed, next_of))
