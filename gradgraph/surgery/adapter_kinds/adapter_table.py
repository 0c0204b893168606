"""The complete table of adapter kinds: imports every file of this package that adds one to ``KINDS``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

import onnx_ir as ir

from gradgraph.errors import BuildError, UnknownNameError, listed, shown
from gradgraph.files.model_metadata import Adapter, adapters_in
from gradgraph.surgery import adapter_kinds
from gradgraph.surgery.adapter_kinds.kind import KINDS as KINDS
from gradgraph.surgery.adapter_kinds.kind import Kind as Kind
from gradgraph.surgery.operation import numbers_of, value_named

for _file in pkgutil.iter_modules(adapter_kinds.__path__):
    importlib.import_module(f"{adapter_kinds.__name__}.{_file.name}")
KINDS.order(sorted(KINDS))


def adapters_of(work: ir.Model) -> list[Adapter]:
    """Return the adapters of a model, read from its metadata, the oldest first.

    Raises:
        BuildError: an adapter has an unknown kind.
    """
    adapters = adapters_in(work.metadata_props)
    for adapter in adapters:
        if adapter.kind not in KINDS:
            raise BuildError(
                f"the adapter of '{shown(adapter.module)}' has the unknown kind '{shown(adapter.kind)}'; known kinds "
                f"are {listed(KINDS)}"
            )
    return adapters


def check_stored(work: ir.Model, adapters: Iterable[Adapter]) -> None:
    """Raise BuildError unless the model stores all weights of each adapter."""
    for adapter in adapters:
        missing = [name for name in adapter.weights if not _is_stored(work, name)]
        if missing or len(adapter.weights) != len(KINDS[adapter.kind].parts):
            what = f"no weights {listed(missing, 3)}" if missing else f"{len(adapter.weights)} weights"
            raise BuildError(
                f"the adapter of '{shown(adapter.module)}' has {what} in the model",
                remedy="use the model returned by gg.lora",
                shell="use the model that --lora wrote",
            )


def _is_stored(work: ir.Model, name: str) -> bool:
    try:
        return numbers_of(value_named(work, name)) is not None
    except UnknownNameError:
        return False
