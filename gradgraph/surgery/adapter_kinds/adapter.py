"""Adapters, as described by the metadata of a model."""

from __future__ import annotations

from collections.abc import Sequence

from gradgraph.files.model_metadata import DEFAULT, Adapter, write_adapters

__all__ = ["DEFAULT", "Adapter", "names_of_adapters", "write_adapters"]


def names_of_adapters(adapters: Sequence[Adapter]) -> list[str]:
    """Return each adapter name once, in order."""
    return list(dict.fromkeys(a.name for a in adapters))
