"""A step written in two parts: its frozen layers as a model, and a step that trains the rest on their outputs."""

from __future__ import annotations

import contextlib
import os
import pathlib

from gradgraph.arguments import FLAG, PATH, checked
from gradgraph.errors import BuildError, OutputError, shown
from gradgraph.files.atomic import explain_errors, write_atomically
from gradgraph.files.models import save_model
from gradgraph.files.suffixes import FOLDER, check_suffix
from gradgraph.runtime.execution.exported import plain
from gradgraph.runtime.features.split import Split, split
from gradgraph.runtime.features.static_values import OpenSizes
from gradgraph.step.step import Step

EXAMPLES, STEP_SIZE = (24, 16), 8
FEATURES, STEP, PAGE = "features.onnx", "step", "README.md"


@checked(folder=PATH, force=FLAG)
def save_split(step: Step | str | os.PathLike[str], folder: str | os.PathLike[str], *, force: bool = False) -> Step:
    """Write the frozen layers of a step as ``features.onnx``, and the step of the rest to ``step/``.

    Compute ``features.onnx`` once for each sample, in evaluation mode, and train ``step/`` on its outputs in each
    epoch: both have the losses of the whole step. ``README.md`` lists the names.

    Args:
        step: a step, or its folder.
        folder: the folder to write.
        force: whether to replace files in it.

    Returns:
        The step of the rest.

    Raises:
        BuildError: no layer is the same in every epoch; the message names the first node that changes.
        OutputError: the folder cannot be written, or is not empty and ``force`` is not set.
    """
    check_suffix(folder, FOLDER)
    whole = step if isinstance(step, Step) else Step.load(step)
    parts = _split(whole)
    target = pathlib.Path(folder)
    if not force and target.is_dir() and any(target.iterdir()):
        raise OutputError(
            f"the folder '{shown(target)}' is not empty",
            remedy="pass force=True to replace its files",
            shell="add --force to replace its files",
        )
    with explain_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    parts.head.save(target / STEP, force=force)
    model = parts.evaluated
    for key, value in whole.manifest.data.as_metadata().items():
        model.metadata_props.add(key=key, value=value)
    save_model(plain(whole.opened(model, mapped=False)), target / FEATURES)
    write_atomically(target / PAGE, _page(parts, whole).encode())
    return parts.head


def _split(step: Step) -> Split:
    """Split a step for inputs of any size.

    If no value of known size can be kept, such as a mean over tokens, return a split where kept values have as many
    tokens as the inputs.
    """
    inputs = step.manifest.inputs
    try:
        return split(step, {s.name: s.shape for s in inputs})
    except BuildError:
        samples = {s.shape[0] for s in inputs if s.shape}
        names = dict.fromkeys(d for s in inputs for d in s.shape if isinstance(d, str) and d not in samples)
        of_tokens = {d for s in inputs if s.dtype in ("int32", "int64") for d in s.shape}
        if not names or not of_tokens.issuperset(names):  # strides of images and sounds need larger examples
            raise
        # shapes are inferred for two examples of all sizes, which are small, since positions may be limited
        some, other = ({name: first + STEP_SIZE * i for i, name in enumerate(names)} for first in EXAMPLES)
        shapes = [{s.name: [sizes.get(str(d), d) for d in s.shape] for s in inputs} for sizes in (some, other)]
        opened = OpenSizes(shapes[1], {(some[name], other[name]): name for name in names})
        with contextlib.suppress(BuildError):
            return split(step, shapes[0], opened)
        raise


def _page(parts: Split, whole: Step) -> str:
    """Return the text of README.md."""
    read = ", ".join(f"`{v.name}`" for v in parts.evaluated.graph.input)
    lines = [
        *(f"- `{n}`: {row.dtype} [{', '.join(map(str, ('samples', *row.dims)))}]" for n, row in parts.kept.items()),
        *(f"- `{name}`: this input of the model" for name in parts.passed),
        *(f"- `{target.name}`: as for the whole step" for target in whole.manifest.targets),
    ]
    return "\n".join(
        [
            "# Frozen layers, and a step that trains the rest",
            "",
            f"1. Run `{FEATURES}` once for each sample, in any ONNX runtime. It reads {read}.",
            f"2. Train `{STEP}/` on its outputs in each epoch. The entries of a batch:",
            "",
            *lines,
            "",
            f"The trained model is `{FEATURES}`, followed by the model exported from `{STEP}/`.",
            "",
            f"The frozen layers end before {parts.changing}.",
            "",
        ]
    )
