"""Random networks on sequences, as exporters write them: transformers, mixtures of experts, gates, recurrences.

Every block can be written in several ways: as one operator or in several nodes, as PyTorch's exporters or tf2onnx do.
Activations are smooth, so that central differences are exact and rounding does not change a choice.
"""

from __future__ import annotations

from onnx import TensorProto

from tests.kit.random_sequences.blocks import BLOCKS
from tests.kit.random_sequences.ends import embedding, head
from tests.kit.random_sequences.layer_spellings import norm
from tests.kit.random_sequences.sequence_draft import Draft


class Network(Draft):
    """A random model of ``seed``; see ``Draft`` for its attributes."""

    def __init__(self, seed: int, large: bool = False) -> None:
        super().__init__(seed, large)
        self._write()

    def _write(self) -> None:
        self.is_ids = self.chance(0.6)
        if self.is_ids:
            self.source = "ids"
            self.inputs.append(("ids", TensorProto.INT64, ["B", "S"]))
        else:
            self.source = "x"
            self.inputs.append(("x", TensorProto.FLOAT, ["B", "S", 6]))
        x = embedding(self)
        for _ in range(int(self.rng.integers(1, 4))):
            kind = self.one_of(BLOCKS)
            self.blocks.append(kind.__name__)
            x = kind(self, x)
        x = norm(self, x) if self.chance(0.5) else x
        head(self, x)
