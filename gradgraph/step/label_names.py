"""Names of classes in the ``config.json`` that Hugging Face keeps beside a model."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from gradgraph.errors import ArgumentError, shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.inside import bytes_inside
from gradgraph.files.untrusted.regular import UnreadableError
from gradgraph.step.data_names import NO_NAMES, DataNames

log = logging.getLogger("gradgraph")

CONFIG, LABELS, LARGEST = "config.json", "id2label", 4 << 20  # ImageNet's 1,000 names take 60 kB
UNNAMED = re.compile(r"LABEL_\d+")  # what transformers writes where nobody has named a class


def names_beside(source: object) -> DataNames:
    """The names of classes beside the file of a model; none where there are none, or what there is names no class.

    They are looked for in the folder of the file, and of ``onnx/model.onnx`` in the one above, as transformers.js has
    it. Whose they are is not said: of the only target.

    Args:
        source: a path, or a model, beside which nothing lies.
    """
    if not isinstance(source, str | os.PathLike):
        return NO_NAMES
    folder = Path(source).parent
    for place in (folder, *([folder.parent] if folder.name == "onnx" else [])):
        try:
            config = json_of(bytes_inside(place, CONFIG, LARGEST) or b"")
        except (OSError, ValueError, UnreadableError):  # no file, or that of another program
            continue
        labels = config.get(LABELS) if isinstance(config, dict) else None
        if labels is not None:
            return _named(labels, place / CONFIG)
    return NO_NAMES


def _named(labels: Any, path: Path) -> DataNames:
    """The names in a dict of numbers, as text, and names."""
    try:
        names = [labels[str(i)] for i in range(len(labels))]
        named = DataNames(classes={"target": names})
    except (TypeError, KeyError, AttributeError, ArgumentError):
        log.warning("'%s' in '%s' does not give each class from 0 on a name of its own; it is left out", LABELS,
                    shown(path))  # fmt: skip
        return NO_NAMES
    return NO_NAMES if len(names) < 2 or all(map(UNNAMED.fullmatch, names)) else named
