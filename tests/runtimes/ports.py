"""Inputs and outputs of a file in order, for runtimes that do not keep their names."""

from __future__ import annotations

from pathlib import Path

import onnx


def ports(path: Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return [x.name for x in graph.input], [y.name for y in graph.output]
