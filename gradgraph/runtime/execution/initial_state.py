"""The initial state of a step, computed by init.onnx."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import onnx

from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.files.external import is_external, is_packed
from gradgraph.files.float16_weights import widened
from gradgraph.graph.prune import needed
from gradgraph.runtime.execution.frozen_weights import external_weights
from gradgraph.runtime.execution.ort_values import fetched, to_ortvalue
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session, explained
from gradgraph.runtime.execution.state import State
from gradgraph.step.step import Step


def initial_state(step: Step, placement: Placement, options: RuntimeOptions) -> State:
    """Return the state tensors of a step on a device, initialized by running init.onnx."""
    moved = {name: set(part.writes) for name, part in step.manifest.parts.items()}
    movers = {s.name: [name for name, tensors in moved.items() if s.name in tensors] for s in step.manifest.state}
    state = State(step.manifest.state, placement, movers)
    model = step.init
    read = _read_straight(step, state)
    if computed := [name for name in state.specs if name not in read]:
        part = _cut_out(model, computed, ()) if read else model
        # no optimization: folding constants would compute the zeros of optimizer slots a second time
        session = create_session(part, placement, replace(options, optimization="none"), external_weights(step, part))
        binding = session.io_binding()
        for name, value in state.values(state.side).items():
            if name not in read:
                binding.bind_ortvalue_output(name, value)
        with explained("running init.onnx failed"):
            session.run_with_iobinding(binding)
    step.release_init()  # otherwise a second copy of the weights would stay in memory
    return state


def _read_straight(step: Step, state: State) -> set[str]:
    """Read the state tensors that init.onnx only copies from a weight file, unmapped; return their names."""
    if not state.on_cpu:
        return set()
    model = step.init
    stored = {t.name: t for t in model.graph.initializer if is_external(t) and not is_packed(t)}
    straight = {o.name: o.name for o in model.graph.output}
    straight |= {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Identity" and not n.domain}
    read = {name for name in state.specs if straight.get(name) in stored}
    for name in read:
        state.read_in(name, step.pieces(stored[straight[name]]))
    return read


def followed(
    step: Step, placement: Placement, options: RuntimeOptions, weights: Mapping[str, Array]
) -> dict[str, Array]:
    """Return, by name, state tensors that init.onnx computes from new weights, such as an optimizer's copies."""
    model = widened(step.init)
    made = {name for node in model.graph.node for name in node.output}
    of_weights = set(weights) - made
    for node in model.graph.node:
        if not of_weights.isdisjoint(node.input):
            of_weights.update(node.output)
    names = [o.name for o in model.graph.output if o.name in of_weights & made]
    if not names:
        step.release_init()
        return {}
    part = _cut_out(model, names, weights)
    session = create_session(part, placement, options, external_weights(step, part))
    feeds = {i.name: to_ortvalue(np.ascontiguousarray(weights[i.name])) for i in part.graph.input}
    with explained("running init.onnx failed"):
        found = session.run_with_ort_values(names, feeds)
    step.release_init()
    specs = {s.name: s for s in step.manifest.state}
    return {n: fetched(v, numpy_dtype(specs[n].dtype)) for n, v in zip(names, found, strict=True)}


def _cut_out(model: onnx.ModelProto, outputs: list[str], fed: Collection[str]) -> onnx.ModelProto:
    """Return the part of init.onnx that computes ``outputs``, with the initializers in ``fed`` as inputs."""
    nodes, names = needed(model.graph.node, outputs, lambda node: node.output, lambda node: node.input)
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = part.graph
    graph.name = model.graph.name
    graph.node.extend(nodes)
    graph.output.extend(o for o in model.graph.output if o.name in outputs)
    for tensor in model.graph.initializer:
        if tensor.name in fed and tensor.name in names:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        elif tensor.name in names:
            graph.initializer.append(tensor)
    return part
