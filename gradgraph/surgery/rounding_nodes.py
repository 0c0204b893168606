"""Rounding nodes: a QuantizeLinear and a DequantizeLinear, and the scale that both read.

A learned scale is ``first·exp(range)``, where ``range`` is a trained number initialised to 0. So the scale is always
positive, and a step of Adam changes large and small scales by the same proportion (as in TQT, Jain et al. 2020,
arXiv:1903.08066). For its gradient, see ``gradgraph.passes.normal.spelling.fake_quantization``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.files.model_metadata import learned_ranges, write_quantisation
from gradgraph.graph.quantisers import INTEGER_RANGES
from gradgraph.surgery.node_writer import NodeWriter
from gradgraph.surgery.operation import add_weight

SMALLEST = 1e-8  # minimum scale, also for a channel of zeros


class Writer(NodeWriter):
    """A writer of rounding nodes, named after their layer and inserted before the node ``place``."""

    def __init__(self, work: ir.Model, place: ir.Node, layer: str) -> None:
        super().__init__(work, f"{layer}/quantise")
        self._place = place

    def largest(self, x: ir.Value, axes: list[int]) -> ir.Value:
        """Return the largest |x| over these axes."""
        return self.reduced("ReduceMax", self.node("Abs", x), axes, since=18)

    def learned(self, first: np.ndarray, name: str) -> ir.Value:
        """Return a learned scale with the initial value ``first``; ``name`` is the name of its trained number."""
        begin = self.constant(first)
        trained = add_weight(self.work, name, np.zeros(np.shape(first), np.float32))
        write_quantisation(self.work, learned=(*learned_ranges(self.work.metadata_props), trained.name or ""))
        scale = self.node("Mul", begin, self.node("Exp", trained))
        scale.type, scale.shape = begin.type, begin.shape
        return scale

    def integers(self, x: ir.Value, scale: ir.Value, zero: ir.Value, limits: tuple[int, int] | None = None,
                 domain: str = "", **axis: int) -> ir.Value:  # fmt: skip
        """Write a QuantizeLinear, and a Clip of its result if ``limits`` are narrower than the integer type."""
        whole = self.node("QuantizeLinear", x, scale, zero, domain=domain, **axis)
        kind = zero.dtype
        if limits is None or kind is None or limits == INTEGER_RANGES[kind]:
            return whole
        return self.node("Clip", whole, *(self.constant(np.array(limit), kind) for limit in limits))

    def pair(self, x: ir.Value, scale: ir.Value, zero: ir.Value, limits: tuple[int, int] | None = None,
             **axis: int) -> tuple[ir.Value, ir.Value]:  # fmt: skip
        """Write ``integers`` and a DequantizeLinear; return the results of both."""
        integers = self.integers(x, scale, zero, limits, "", **axis)
        return integers, self.node("DequantizeLinear", integers, scale, zero, domain="", **axis)

    def place(self) -> None:
        self.place_before(self._place)
