"""The methods of ``gg.explain`` that attribute to the inputs of a model."""

from __future__ import annotations

from gradgraph.explaining import methods as explaining

OTHERS = ("layer-conductance",)  # attributes to a layer


def methods() -> list[str]:
    """Return the names of the methods, without those that attack a model or attribute to a layer."""
    known = explaining.METHODS
    return [n for n in known if known[n].write.__module__ == explaining.__name__ and n not in OTHERS]
