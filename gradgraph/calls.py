"""How a saved step calls named operators: the domain of its model-local functions, and what they are called."""

from __future__ import annotations

DOMAIN = "gradgraph"
VERSION = 1


def function_name(operator: str, number: int) -> str:
    """The name of the ``number``-th function of an operator: ``ConvGradWeight``, ``ConvGradWeight_2``, …"""
    return operator if number == 1 else f"{operator}_{number}"


def operator_name(function: str, domain: str = DOMAIN) -> str:
    """The operator that a function of ours stands for; any other name stays as it is."""
    name, _, number = function.rpartition("_")
    return name if domain == DOMAIN and number.isdecimal() else function
