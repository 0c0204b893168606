"""onnxruntime's adapter format: one base model, and small files that a session switches between at run time.

In the base model, the adapters' tensors are optional inputs: initializers that may be fed. ``onnxruntime.LoraAdapter``
loads a file of such tensors, and ``RunOptions.add_active_adapter`` feeds them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path as FilePath

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.arguments import FLAG, NAMES, PATH, checked
from gradgraph.files.atomic import write_atomically
from gradgraph.files.model_metadata import DEFAULT, Adapter, write_adapters
from gradgraph.files.models import Source
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS, adapters_of
from gradgraph.surgery.adapter_kinds.low_rank import let_blocks_go, mask_of
from gradgraph.surgery.adapters import chosen_adapters, factor_of
from gradgraph.surgery.operation import (
    Path,
    Result,
    array_named,
    closed,
    forget_sizes_behind,
    opened,
    rename,
    set_numbers,
    value_named,
)

SUFFIX = ".onnx_adapter"


@checked(name=NAMES.or_none(), required=FLAG, out=PATH.or_none())
def switchable(model: Source, *, name: str | None = None, required: bool = False, out: Path | None = None) -> Result:
    """Make the adapters of a model optional inputs, which have no effect until a session loads an adapter file.

    ``save_adapter(model, "fr.onnx_adapter", trained)`` writes such files, also from other models with adapters on the
    same layers, of any rank and alpha::

        session = onnxruntime.InferenceSession("base.onnx")
        french = onnxruntime.LoraAdapter(); french.Load("fr.onnx_adapter")
        options = onnxruntime.RunOptions(); options.add_active_adapter(french)
        session.run(None, feeds, options)

    Args:
        model: the model returned by :func:`lora`.
        name: name of the set of adapters, if the model has several sets.
        required: make the adapters' tensors inputs without default values, which each run must feed: onnxruntime-web
            rejects inputs with defaults, and onnxruntime-node ignores values fed to them. To run without an adapter,
            feed an untrained one.
        out: write the result to this path.

    Raises:
        BuildError: the model has no adapters.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    chosen = chosen_adapters(work, name, "switch")
    shapes = {value: value.shape for value in work.graph.outputs}
    forget_sizes_behind(*(value_named(work, weight) for adapter in chosen for weight in adapter.weights))
    for value, shape in shapes.items():
        value.shape = shape
    for adapter in chosen:
        kind = KINDS[adapter.kind]
        let_blocks_go(work, adapter)
        arrays = kind.rest(work, adapter, [array_named(work, weight) for weight in adapter.weights])
        if kind.factor is not None:
            set_numbers(work, *factor_of(work, adapter, 1.0))  # adapter files include the scale in the second factor
        for place, (weight, array) in enumerate(zip(adapter.weights, arrays, strict=True)):
            value = value_named(work, weight)
            set_numbers(work, value, array)
            value.shape = ir.Shape(_open_sizes(adapter, place, array.shape))
            rename(value, _plain(adapter, weight))
            if not value.is_graph_input():
                work.graph.inputs.append(value)
            if required:
                work.graph.initializers.pop(value.name or "")
                value.const_value = None
    gone = set(chosen)
    write_adapters(work, [a for a in adapters_of(work) if a not in gone])
    return closed(work, model, out)


def _open_sizes(adapter: Adapter, place: int, sizes: Sequence[int]) -> list[int | str]:
    """Return the sizes of an adapter's tensor with a symbolic rank, since adapter files have different ranks."""
    axis = KINDS[adapter.kind].axes[adapter.operator == "Conv"][place]
    return [f"{adapter.module}.rank{place}" if i == axis else size for i, size in enumerate(sizes)]


def save_ort_adapter(work: ir.Model, adapters: Sequence[Adapter], path: Path) -> None:
    """Write adapters in onnxruntime's format, with their scale multiplied into the second factor."""
    tensors = {}
    for adapter in adapters:
        for place, weight in enumerate(adapter.weights):
            array = array_named(work, weight)
            if KINDS[adapter.kind].factor is not None and place == 1:
                array = (array * mask_of(adapter) * (adapter.scale * adapter.weight)).astype(array.dtype)
            tensors[_plain(adapter, weight)] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
    file = ort.AdapterFormat()
    file.set_adapter_version(1)
    file.set_model_version(1)
    file.set_parameters(tensors)
    with tempfile.TemporaryDirectory() as folder:
        temporary = FilePath(folder) / "adapter"
        file.export_adapter(os.fspath(temporary))  # pyright: ignore[reportArgumentType]  # it takes no PathLike
        write_atomically(FilePath(os.fspath(path)), temporary.read_bytes())


def _plain(adapter: Adapter, weight: str) -> str:
    """Return a tensor's name without the adapter name at its end, so that all adapter files fit one base model."""
    own = adapter.name == DEFAULT or adapter.kind == "bitfit"  # tensors of bitfit are the model's own
    return weight if own else weight.removesuffix(f".{adapter.name}")
