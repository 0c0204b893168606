"""Adapters, as the metadata of a model describe them."""

from __future__ import annotations

from collections.abc import Sequence

from gradgraph.files.model_metadata import DEFAULT, Adapter, write_adapters

__all__ = ["DEFAULT", "Adapter", "names_of_adapters", "write_adapters"]


def names_of_adapters(adapters: Sequence[Adapter]) -> list[str]:
    """Each name once, in their order."""
    return list(dict.fromkeys(a.name for a in adapters))
