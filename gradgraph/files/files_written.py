"""Paths of the files that a command wrote, for messages."""

from __future__ import annotations

from pathlib import Path


def written(out: Path, *others: Path | None) -> str:
    """Return the paths of ``out``, its external data files and ``others`` as text, separated by commas."""
    return ", ".join(str(path) for path in (out, *data_beside(out), *others) if path is not None)


def data_beside(model: Path) -> list[Path]:
    """Return the paths of the external data files of a model; an empty list if ``model`` is not an ``.onnx``."""
    from gradgraph.files.external import data_names, is_external, location_of
    from gradgraph.files.models import read_message
    from gradgraph.files.protos import proto_tensors

    if model.suffix.lower() != ".onnx" or not data_names(model):
        return []
    names = {Path(location_of(tensor)).name for tensor in proto_tensors(read_message(model)) if is_external(tensor)}
    return [model.with_name(name) for name in sorted(names - {model.name})]
