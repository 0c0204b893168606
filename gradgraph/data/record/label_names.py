"""Class names in the ``config.json`` that Hugging Face stores next to a model."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.errors import ArgumentError, shown
from gradgraph.files.untrusted.contained_paths import bytes_inside
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError

log = logging.getLogger("gradgraph")

CONFIG, LABELS, LARGEST = "config.json", "id2label", 4 << 20  # ImageNet's 1,000 names take 60 kB
UNNAMED = re.compile(r"LABEL_\d+")  # written by transformers when classes have no names


def names_beside(source: object) -> DataNames:
    """Return the class names stored next to the model file ``source``; they apply to the only target of a step.

    They are read from ``config.json`` in the folder of the file, or in its parent for ``onnx/model.onnx``, as
    transformers.js does. The result is empty if there are no names, or only placeholders such as ``LABEL_0``, and for a
    model in memory.
    """
    if not isinstance(source, str | os.PathLike):
        return NO_NAMES
    folder = Path(source).parent
    for place in (folder, *([folder.parent] if folder.name == "onnx" else [])):
        try:
            config = json_of(bytes_inside(place, CONFIG, LARGEST) or b"")
        except (OSError, ValueError, UnreadableError):  # no such file, or one of another program
            continue
        labels = config.get(LABELS) if isinstance(config, dict) else None
        if labels is not None:
            return _named(labels, place / CONFIG)
    return NO_NAMES


def _named(labels: Any, path: Path) -> DataNames:
    """Return class names from a dict ``{"0": name, "1": name, …}``, read from ``path``."""
    try:
        names = [labels[str(i)] for i in range(len(labels))]
        named = DataNames(classes={"target": names})
    except (TypeError, KeyError, AttributeError, ArgumentError):
        log.warning("'%s' in '%s' is ignored: it should map the class indices 0, 1, … to distinct names", LABELS,
                    shown(path))  # fmt: skip
        return NO_NAMES
    return NO_NAMES if len(names) < 2 or all(map(UNNAMED.fullmatch, names)) else named
