"""The base class of random graphs under construction: random choices, names and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper


@dataclass
class Drawing:
    """A random graph under construction.

    Attributes:
        nodes: the nodes so far, in order.
        count: the number of names so far.
    """

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list, kw_only=True)
    count: int = field(default=0, kw_only=True)

    def flag(self, share: float = 0.5) -> bool:
        return bool(self.rng.random() < share)

    def choose(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def name(self, of: str) -> str:
        self.count += 1
        return f"{of}_{self.count}"

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attrs: Any) -> Any:
        """Append a node; return its output, or a list of outputs if there are several."""
        names = [self.name(op_type.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=names[0], **attrs))
        return names[0] if outputs == 1 else names
