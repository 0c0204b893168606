"""Sizes of a model left open: one at a time, with those that must be equal to it, and all of them.

A size is one that may be open if the model runs with others: onnxruntime is given a larger one of one input; where it
refuses that, the same size of other inputs grows with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

Array = np.ndarray[Any, Any]
Place = tuple[str, int]  # an input and an axis of it

_MOST_TRIED = 60  # ways in which sizes may hang together


def left_open(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> Iterator[tuple[onnx.ModelProto, str]]:
    """Models with open sizes, and which these are.

    Of the first input the batch, the channels and the last size are left open in turn, of others the first and the
    last one; and all together that may be.
    """
    session = _session(model)
    if session is None:
        return
    shown, every = set[frozenset[Place]](), set[Place]()
    for number, (name, array) in enumerate(feeds.items()):
        for axis, size in enumerate(array.shape):
            places = _hanging_together(session, feeds, (name, axis))
            every |= places
            if (
                places
                and places not in shown
                and axis in ((0, 1, array.ndim - 1) if number == 0 else (0, array.ndim - 1))
            ):
                shown.add(places)
                yield opened(model, dict.fromkeys(places, f"n{size}")), f"{name}[{axis}]"
    if every and every not in shown:
        yield opened(model, {(name, axis): f"n{feeds[name].shape[axis]}" for name, axis in every}), "all"


def opened(model: onnx.ModelProto, names: Mapping[Place, str]) -> onnx.ModelProto:
    """A copy with these sizes open, by these names."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    inputs = {x.name: x for x in copy.graph.input}
    for (name, axis), symbol in names.items():
        inputs[name].type.tensor_type.shape.dim[axis].dim_param = symbol
    for y in copy.graph.output:
        y.type.tensor_type.ClearField("shape")
    return copy


def _session(model: onnx.ModelProto) -> ort.InferenceSession | None:
    """The model with all sizes open; None where onnxruntime has no kernel for it."""
    every = {
        (x.name, axis): f"{x.name}_{axis}"
        for x in model.graph.input
        for axis in range(len(x.type.tensor_type.shape.dim))
    }
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        content = opened(model, every).SerializeToString()
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception:
        return None


def _hanging_together(session: ort.InferenceSession, feeds: Mapping[str, Array], place: Place) -> frozenset[Place]:
    """``place`` and the fewest others that may have another size together; none if they must have this one."""
    size = feeds[place[0]].shape[place[1]]
    if size == 0:
        return frozenset()
    larger = (size + 1, 2 * size)  # windows and groups may want a multiple
    if size == 1:  # which may be one that is repeated: it is free if any other will do
        return frozenset([place]) if all(_runs(session, feeds, [place], s) for s in (2, 3)) else frozenset()
    others = [
        [None, *((name, axis) for axis, s in enumerate(array.shape) if s == size)]
        for name, array in feeds.items()
        if name != place[0]
    ]
    ways = sorted(itertools.product(*others), key=lambda way: sum(p is not None for p in way))
    for way in ways[:_MOST_TRIED]:
        places = [place, *(p for p in way if p is not None)]
        if any(_runs(session, feeds, places, s) for s in larger):
            return frozenset(places)
    return frozenset()


def _runs(session: ort.InferenceSession, feeds: Mapping[str, Array], places: Sequence[Place], size: int) -> bool:
    grown = dict(feeds)
    for name, axis in places:
        grown[name] = np.take(grown[name], np.arange(size), axis, mode="wrap")
    try:
        session.run(None, grown)
    except Exception:
        return False
    return True
