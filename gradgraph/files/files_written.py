"""Paths of the files that a command wrote, for messages."""

from __future__ import annotations

from pathlib import Path


def written(out: Path, *others: Path | None) -> str:
    """Return the paths of ``out``, its external data files and ``others`` as text, separated by commas."""
    return ", ".join(str(path) for path in (out, *data_beside(out), *others) if path is not None)


def data_beside(model: Path) -> list[Path]:
    """Return the paths of the external data files of a model; an empty list if ``model`` is not an ``.onnx``."""
    from gradgraph.files.external import data_names, stored_values
    from gradgraph.files.models import load_model

    if model.suffix.lower() != ".onnx" or not data_names(model):
        return []
    import onnx_ir as ir

    tensors = (value.const_value for value in stored_values(load_model(model)))
    names = {Path(tensor.path).name for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    return [model.with_name(name) for name in sorted(names - {model.name})]
