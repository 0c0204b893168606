"""File extensions and their formats: nothing is written under the extension of another format."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gradgraph.arguments import PATH, checked
from gradgraph.errors import OutputError, shown


@dataclass(frozen=True)
class Format:
    """The format of files with an extension.

    Attributes:
        holds: the content in words, such as "a model".
        python, shell: the Python call and the command that write files of this format; "" if there is none.
    """

    holds: str
    python: str = ""
    shell: str = ""


FORMATS = {
    ".onnx": Format("a model", "trainer.export(path)", "gradgraph export STEP -o FILE.onnx"),
    ".ort": Format("a model in onnxruntime's own format", "gradgraph.export.ort_model(model), which returns its bytes",
                   "gradgraph export STEP -o FILE.ort"),
    ".safetensors": Format("weights alone", "gradgraph.export.save_weights(step, path, checkpoint)",
                           "gradgraph export STEP -o FILE.safetensors"),
    ".bin": Format("a flat vector of weights", "gradgraph.export.flat_weights(step, checkpoint).save(path)",
                   "gradgraph export STEP -o FILE.bin"),
    ".ckpt": Format("a checkpoint", "trainer.save(path)", "gradgraph train --checkpoint FILE.ckpt"),
    ".config": Format("a list of operators", "gradgraph.export.save_required_operators(step, path)",
                      "gradgraph export STEP -o FILE.config"),
    ".html": Format("a page", "gradgraph.export.save_page(step, path)", "gradgraph inspect STEP --html FILE.html"),
    ".npz": Format("arrays", "numpy.savez(path, **trainer.state_dict())"),
    ".npy": Format("an array", "numpy.save(path, array)"),
    ".csv": Format("a table", "history.to_csv(path)"),
    **dict.fromkeys((".json", ".jsonl", ".toml", ".md", ".txt"), Format("text")),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".svg", ".pdf"), Format("a picture")),
    **dict.fromkeys((".pt", ".pth"), Format("objects of PyTorch")),
    **dict.fromkeys((".keras", ".h5"), Format("a model of Keras")),
    ".tflite": Format("a model of LiteRT"),
    **dict.fromkeys((".mlmodel", ".mlpackage"), Format("a model of Core ML")),
}  # fmt: skip


FOLDER = ""  # passed to check_suffix as the extension of a folder


@checked(path=PATH)
def check_suffix(path: str | os.PathLike[str], *own: str) -> None:
    """Raise OutputError if ``path`` has another format's extension; ``own`` and unknown ones are allowed."""
    suffix = Path(path).suffix.lower()
    other = FORMATS.get(suffix)
    if other is None or suffix in own:
        return
    written = "a folder" if own[0] == FOLDER else FORMATS[own[0]].holds
    name = f"call it '{shown(Path(path).stem)}{own[0]}'"
    raise OutputError(
        f"'{shown(Path(path).name)}' has the extension of {other.holds}, but {written} is written there",
        remedy=name + (f"; {suffix} is written by {other.python}" if other.python else ""),
        shell=name + (f"; {suffix} is written by: {other.shell}" if other.shell else ""),
    )
