"""Products of the inputs of layers with adapters on calibration data, as GPTQ requires them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from gradgraph.data.record.specs import Specs
from gradgraph.files.model_metadata import Adapter
from gradgraph.graph.quantisers import Array
from gradgraph.passes.normal.edit import value_named
from gradgraph.runtime.execution.predictor import Predictor
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of
from gradgraph.surgery.gptq import Grams, gram_bytes, grams
from gradgraph.surgery.merged import layer_of
from gradgraph.surgery.operation import clear_away

Calibration = Callable[[Specs], Iterable[tuple[Mapping[str, Array], Array]]]


class LayerInputs:
    """The products of the inputs of each layer with a mergeable adapter, computed when they are first read.

    The model runs once for as many layers as fit into ``memory``, in the order in which adapters are merged.

    Args:
        model: a model with trained adapters. Large weights stay in their file.
        batches: a function of the model's inputs that returns calibration batches: arrays by input, and a mask of the
            positions that count, whose axes are the first axes of each layer's input. Called for each run.
        memory: bytes for all products that are held at a time; those of one layer are computed in any case.
    """

    def __init__(self, model: ir.Model, batches: Calibration, memory: int) -> None:
        self._model, self._batches, self._memory = model, batches, memory
        mergeable = [adapter for adapter in reversed(adapters_of(model)) if KINDS[adapter.kind].merge is not None]
        read = {adapter.module: _input_of(model, adapter) for adapter in mergeable}
        self._read = {module: value for module, value in read.items() if value is not None}
        self._found: dict[str, Grams] = {}

    def __call__(self, module: str) -> Grams | None:
        """Return the products of the inputs of a layer, for :class:`Gptq`; None if they are not products of rows.

        Raises:
            ModelError: onnxruntime rejects the model, or fails.
        """
        if module not in self._read:
            return None
        name, _ = self._read[module]
        if name not in self._found:
            self._found = {}  # the memory of those that were computed before
            self._found = self._computed(self._next(module))
        return self._found[name]

    def _next(self, module: str) -> dict[str, int]:
        """Return the names and sizes of the inputs of this layer and of those after it that fit into the memory."""
        modules, chosen, left = list(self._read), dict[str, int](), self._memory
        for one in modules[modules.index(module) :]:
            name, size = self._read[one]
            left -= 0 if name in chosen else gram_bytes(size)
            if chosen and left < 0:
                break
            chosen[name] = size
        return chosen

    def _computed(self, sizes: Mapping[str, int]) -> dict[str, Grams]:
        probed = self._model.clone()
        probed.graph.outputs[:] = [value_named(probed, name) for name in sizes]
        clear_away(probed)
        predictor, found = Predictor(probed, device="cpu", packs=False), dict[str, Grams]()
        for batch, mask in self._batches(predictor.specs):
            outputs = predictor(batch)
            for name, size in sizes.items():
                rows = outputs.pop(name)[mask].reshape(-1, size)
                found[name] = grams(rows.astype(np.float32, copy=False), found.get(name))
        return found


def _input_of(model: ir.Model, adapter: Adapter) -> tuple[str, int] | None:
    """Return the name of the value that a layer multiplies by its weight, and its size; None for other layers."""
    layer, _ = layer_of(model, adapter)
    if layer.kind not in ("Gemm", "MatMul", "MatMulNBits"):
        return None
    value = layer.data
    if adapter.side == "in":  # its factor is merged into the weight
        before = value.producer()
        assert before is not None and before.inputs[0] is not None
        value = before.inputs[0]
    return value.name or "", layer.sizes[0]
